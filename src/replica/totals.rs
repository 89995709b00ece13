//! Sums over all finished plans of a replica, for monotonic counters. Updated once per plan, and read without asking
//! the engine thread.
//! Not here: single plans, which the step ring keeps (`observer`).

use crate::engine::request::PerToken;
use crate::replica::record::StepRecord;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sums over the finished plans of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTotals {
    /// The number of plans.
    pub plans: u64,
    /// The number of steps.
    pub steps: u64,
    /// The number of rows of all decode steps, or of tokens of all prefill steps.
    pub rows: u64,
    /// The number of tokens drawn.
    pub tokens: u64,
    /// The cost.
    pub cost: PerToken,
    /// Host time for scheduling, delivering and enqueueing. It is spent on two threads and can overlap with device
    /// time.
    pub host: Duration,
    /// Device time; zero if it is not measured.
    pub gpu: Duration,
    /// The time from the end of a plan's last region until the engine has processed its last report: finished work that
    /// waited for the host. Zero if device time is not measured.
    pub wait: Duration,
}

/// Sums over all finished plans.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Prefill plans.
    pub prefill: PhaseTotals,
    /// Decode plans.
    pub decode: PhaseTotals,
}

/// A replica's sums. The lock is only held for an addition or a copy.
#[derive(Debug, Default)]
pub struct StepTotals(Mutex<Totals>);

impl StepTotals {
    fn totals(&self) -> MutexGuard<'_, Totals> {
        // Poisoning is ignored: no code panics while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a finished plan.
    pub fn add(&self, record: &StepRecord) {
        let mut totals = self.totals();
        match record.phase {
            "prefill" => totals.prefill.add(record),
            _ => totals.decode.add(record),
        }
    }

    /// Returns the current sums.
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
    use crate::actors::timeline::{Point, Role};
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
            device: std::sync::Arc::default(),
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
