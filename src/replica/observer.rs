//! The step ring: records of an engine thread's last finished plans.
//! Not here: decisions based on them, and sums over all plans (`totals`).

use crate::actors::timeline::SubmissionRecord;
use crate::engine::plan::{PlanReport, Ticket};
use crate::engine::request::PerToken;
use crate::engine::scheduler::{Completed, EngineLoad};
use crate::engine::sequence::SequenceId;
use crate::replica::record::StepRecord;
use crate::replica::totals::StepTotals;
use crate::telemetry::clock::Moment;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of entries of the step ring: about ten seconds of plans at ten milliseconds each.
pub const STEP_RING: usize = 1024;

/// A plan with work that is not finished.
#[derive(Debug)]
struct Open {
    ticket: Ticket,
    planned: Moment,
    sequences: Vec<SequenceId>,
    steps: u32,
    tokens: u32,
    cost: PerToken,
}

/// Follows plans from their creation to their end.
#[derive(Debug)]
pub struct Observer {
    started: Instant,
    open: VecDeque<Open>,
    /// At most `STEP_RING` records.
    ring: VecDeque<StepRecord>,
    number: u64,
    totals: Arc<StepTotals>,
}

impl Observer {
    /// Creates the observer of a replica that started at `started`.
    pub fn new(started: Instant) -> Observer {
        let ring = VecDeque::with_capacity(STEP_RING);
        Observer { started, open: VecDeque::new(), ring, number: 0, totals: Arc::default() }
    }

    /// Returns the sums over all records, which other threads can read.
    pub fn totals(&self) -> Arc<StepTotals> {
        Arc::clone(&self.totals)
    }

    /// Notes a plan with work that was made at `planned` and submitted to the executor.
    pub fn planned(&mut self, ticket: Ticket, planned: Moment, sequences: Vec<SequenceId>) {
        self.open.push_back(Open { ticket, planned, sequences, steps: 0, tokens: 0, cost: PerToken::default() });
    }

    /// Forgets the unfinished plans, because they will never finish.
    pub fn forget_open(&mut self) {
        self.open.clear();
    }

    /// Takes a report; `request` returns the id of a sequence's request if that has not ended. If the plan is finished,
    /// returns the number of its record, and its sequences.
    pub fn reported(
        &mut self,
        report: Reported,
        completed: Completed,
        counts: EngineLoad,
        request: impl Fn(SequenceId) -> Option<Arc<str>>,
    ) -> Option<(u64, Vec<SequenceId>)> {
        let index = self.open.iter().position(|open| open.ticket == report.ticket)?;
        let open = &mut self.open[index];
        open.steps += completed.steps;
        open.tokens += report.tokens;
        open.cost.add(&completed.cost, 1.0);
        if !report.finished {
            return None;
        }
        let open = self.open.remove(index)?;
        if self.ring.len() == STEP_RING {
            self.ring.pop_front();
        }
        let record = StepRecord {
            number: self.number,
            phase: completed.phase,
            rows: completed.rows,
            steps: open.steps,
            at: report.at.saturating_duration_since(self.started),
            cost: open.cost,
            tokens: open.tokens,
            planned: open.planned,
            taken: report.taken,
            requests: open.sequences.iter().filter_map(|id| request(*id)).collect(),
            submissions: report.submissions,
            running: counts.running,
            waiting: counts.waiting,
            pages_used: counts.pages_used,
            faults: report.faults,
        };
        let number = self.number;
        self.number += 1;
        self.totals.add(&record);
        self.ring.push_back(record);
        Some((number, open.sequences))
    }

    /// Returns the record with this number, if it is still in the ring.
    pub fn record(&self, number: u64) -> Option<&StepRecord> {
        let newest = self.number.checked_sub(1)?;
        let back = usize::try_from(newest.checked_sub(number)?).ok()?;
        self.ring.get(self.ring.len().checked_sub(back + 1)?)
    }

    /// Returns the number that the next record will have.
    pub fn next_number(&self) -> u64 {
        self.number
    }

    /// Returns the last records, at most `last` of them, oldest first.
    pub fn last(&self, last: usize) -> Vec<StepRecord> {
        let skip = self.ring.len().saturating_sub(last);
        self.ring.iter().skip(skip).cloned().collect()
    }

    /// Returns the number of tokens per second of the plans that were finished within `window` before `now`. If the
    /// full ring does not reach back that far, the period is that which the ring covers.
    pub fn tokens_per_second(&self, now: Moment, window: Duration) -> f64 {
        let mut tokens = 0u64;
        for record in self.ring.iter().rev() {
            if now.since(record.taken) > window {
                return tokens as f64 / window.as_secs_f64();
            }
            tokens += u64::from(record.tokens);
        }
        let full = self.ring.len() == STEP_RING;
        let held = self.ring.front().filter(|_| full).map_or(window, |oldest| now.since(oldest.planned).min(window));
        tokens as f64 / held.as_secs_f64().max(1e-3)
    }

    /// Returns the records from `number` on that are still in the ring, oldest first.
    pub fn from(&self, number: u64) -> Vec<StepRecord> {
        self.ring.iter().filter(|record| record.number >= number).cloned().collect()
    }
}

/// The parts of a report that the observer needs, kept while the scheduler processes the tokens.
#[derive(Debug)]
pub struct Reported {
    /// When the engine thread took the report, on both clocks.
    at: Instant,
    taken: Moment,
    ticket: Ticket,
    finished: bool,
    tokens: u32,
    faults: u32,
    submissions: Vec<SubmissionRecord>,
}

impl Reported {
    /// Copies the parts of a report; takes its submissions out.
    pub fn of(progress: &mut PlanReport) -> Reported {
        Reported {
            at: Instant::now(),
            taken: Moment::now(),
            ticket: progress.ticket,
            finished: progress.finished,
            tokens: progress.tokens.len() as u32,
            faults: progress.faults,
            submissions: std::mem::take(&mut progress.submissions),
        }
    }

    /// Returns how often a fault kept steps of the plan from drawing tokens.
    pub fn faults(&self) -> u32 {
        self.faults
    }
}
