//! What all finished plans of a replica were like together, for counters that only grow: summed once a plan, read
//! without asking the engine's thread. Deliberately absent: single plans, which the step ring keeps.

use crate::engine::request::PerToken;
use crate::replica::observer::StepRecord;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sums over the finished plans of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTotals {
    /// Plans.
    pub plans: u64,
    /// Their steps.
    pub steps: u64,
    /// Rows of all decode steps, or tokens of all steps of prompts.
    pub rows: u64,
    /// Tokens drawn.
    pub tokens: u64,
    /// What they cost.
    pub cost: PerToken,
    /// The host's work: scheduling, delivering and enqueueing. Two threads share it, so it may pass beside the device's.
    pub host: Duration,
    /// The device's work; zero where its time is not measured.
    pub gpu: Duration,
    /// From the end of a plan's last region to when the engine had taken in its last report: finished work that
    /// waited for the host. Zero where the device's time is not measured.
    pub wait: Duration,
}

/// Sums over all finished plans.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Steps of prompts.
    pub prefill: PhaseTotals,
    /// Decode steps.
    pub decode: PhaseTotals,
}

/// A replica's sums. The lock is held for an addition or a copy.
#[derive(Debug, Default)]
pub struct StepTotals(Mutex<Totals>);

impl StepTotals {
    fn totals(&self) -> MutexGuard<'_, Totals> {
        // No panic happens while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a finished plan.
    pub fn add(&self, record: &StepRecord) {
        let mut totals = self.totals();
        match record.phase {
            "prefill" => totals.prefill.add(record),
            _ => totals.decode.add(record),
        }
    }

    /// The sums as they are now.
    pub fn read(&self) -> Totals {
        *self.totals()
    }
}

impl PhaseTotals {
    fn add(&mut self, record: &StepRecord) {
        let regions = || record.submissions.iter().flat_map(|submission| &submission.regions);
        let micros = record.cost.schedule_us + record.cost.deliver_us + record.cost.enqueue_us;
        self.plans += 1;
        self.steps += u64::from(record.steps);
        self.rows += u64::from(record.rows) * u64::from(record.steps);
        self.tokens += u64::from(record.tokens);
        self.cost.add(&record.cost, 1.0);
        self.host += Duration::from_secs_f64(micros.max(0.0) / 1e6);
        self.gpu += regions().map(|region| region.end.since(region.begin)).sum::<Duration>();
        self.wait += regions().map(|region| region.end).max().map_or(Duration::ZERO, |end| record.taken.since(end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::timeline::{FlushReason, RegionSpan, SubmissionRecord};
    use crate::device::{Point, Role};
    use crate::telemetry::clock::Moment;

    fn submission(spans: &[(u64, u64)]) -> SubmissionRecord {
        let region = |&(begin, end): &(u64, u64)| RegionSpan {
            name: "decode.4".into(),
            runs: 1,
            begin: Moment(begin),
            end: Moment(end),
            kernels: Vec::new(),
        };
        SubmissionRecord {
            enqueue: (Moment(0), Moment(0)),
            point: Point { role: Role::Compute, value: 1 },
            waits: Vec::new(),
            flush: FlushReason::Readback,
            seen: Moment(0),
            host_waits: 1,
            regions: spans.iter().map(region).collect(),
            clock: None,
            dispatches: 0,
            barriers: 0,
        }
    }

    fn record(phase: &'static str, submissions: Vec<SubmissionRecord>) -> StepRecord {
        StepRecord {
            number: 0,
            phase,
            rows: 4,
            steps: 3,
            at: Duration::ZERO,
            cost: PerToken { submits: 1.0, schedule_us: 5.0, deliver_us: 2.0, enqueue_us: 3.0, ..PerToken::default() },
            tokens: 11,
            planned: Moment(0),
            taken: Moment(1000),
            requests: Vec::new(),
            submissions,
            running: 0,
            waiting: 0,
            pages_used: 0,
            faults: 0,
        }
    }

    #[test]
    fn time_is_split_into_the_hosts_the_devices_and_waiting() {
        let totals = StepTotals::default();
        totals.add(&record("decode", vec![submission(&[(100, 150)]), submission(&[(200, 400), (400, 700)])]));
        let Totals { prefill, decode } = totals.read();
        assert_eq!(prefill, PhaseTotals::default());
        assert_eq!(decode.host, Duration::from_micros(10));
        assert_eq!(decode.gpu, Duration::from_nanos(50 + 200 + 300), "gaps between submissions are no work");
        assert_eq!(decode.wait, Duration::from_nanos(300));
        assert_eq!((decode.plans, decode.steps, decode.rows, decode.tokens), (1, 3, 12, 11));
        totals.add(&record("decode", Vec::new()));
        let again = totals.read().decode;
        assert_eq!((again.gpu, again.wait), (decode.gpu, decode.wait), "nothing was measured");
        assert_eq!((again.plans, again.cost.submits), (2, 2.0));
    }

    #[test]
    fn phases_are_kept_apart_and_an_estimated_end_after_the_report_is_no_wait() {
        let totals = StepTotals::default();
        totals.add(&record("prefill", vec![submission(&[(100, 1200)])]));
        let Totals { prefill, decode } = totals.read();
        assert_eq!(decode, PhaseTotals::default());
        assert_eq!((prefill.gpu, prefill.wait), (Duration::from_nanos(1100), Duration::ZERO));
    }
}
