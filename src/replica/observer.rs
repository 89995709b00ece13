//! What an engine thread keeps of its plans: the step ring. Deliberately absent: deciding anything by it.

use crate::actors::timeline::SubmissionRecord;
use crate::engine::plan::{PlanReport, Ticket};
use crate::engine::request::PerToken;
use crate::engine::scheduler::{Completed, Counts};
use crate::engine::sequence::SequenceId;
use crate::replica::totals::StepTotals;
use crate::telemetry::clock::Moment;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of the step ring: some seconds of plans at ten milliseconds each.
pub const STEP_RING: usize = 1024;

/// One entry of the step ring: a plan, from its making to its last token.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Grows by one a finished plan.
    pub number: u64,
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Rows of the batch (decode) or tokens of the chunk (prefill).
    pub rows: u32,
    /// Steps that this record sums up.
    pub steps: u32,
    /// When it completed, since the replica's start.
    pub at: Duration,
    /// What it cost, summed over the steps.
    pub cost: PerToken,
    /// Tokens that it drew.
    pub tokens: u32,
    /// When the engine had made the plan.
    pub planned: Moment,
    /// When the engine had taken in its last report.
    pub taken: Moment,
    /// The requests that had rows in it and had not ended when it was finished, by id.
    pub requests: Vec<Arc<str>>,
    /// What it took on the compute queue, in order.
    pub submissions: Vec<SubmissionRecord>,
    /// As of its end: sequences that hold a slot, and those in the queue.
    pub running: u32,
    /// As `running` says.
    pub waiting: u32,
    /// As of its end: KV pages in use.
    pub pages_used: u32,
    /// How often a fault kept some of its steps from drawing, so that they were run again.
    pub faults: u32,
}

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

/// Follows plans from their making to their end.
#[derive(Debug)]
pub struct Observer {
    started: Instant,
    open: VecDeque<Open>,
    /// At most `STEP_RING`.
    ring: VecDeque<StepRecord>,
    number: u64,
    totals: Arc<StepTotals>,
}

impl Observer {
    /// Of a replica that starts now.
    pub fn new(started: Instant) -> Observer {
        let ring = VecDeque::with_capacity(STEP_RING);
        Observer { started, open: VecDeque::new(), ring, number: 0, totals: Arc::default() }
    }

    /// The sums over all records, for whoever reads them beside the engine's thread.
    pub fn totals(&self) -> Arc<StepTotals> {
        Arc::clone(&self.totals)
    }

    /// A plan with work was made at a moment and handed to the executor.
    pub fn planned(&mut self, ticket: Ticket, planned: Moment, sequences: Vec<SequenceId>) {
        self.open.push_back(Open { ticket, planned, sequences, steps: 0, tokens: 0, cost: PerToken::default() });
    }

    /// The plans that are not finished never will be.
    pub fn forget_open(&mut self) {
        self.open.clear();
    }

    /// A report came; `request` names the sequences that have not ended. Of a plan that is finished gives the record's
    /// number and the plan's sequences.
    pub fn reported(
        &mut self,
        report: Reported,
        completed: Completed,
        counts: Counts,
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
            at: self.started.elapsed(),
            cost: open.cost,
            tokens: open.tokens,
            planned: open.planned,
            taken: Moment::now(),
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

    /// The record of that number, while it is kept.
    pub fn record(&self, number: u64) -> Option<&StepRecord> {
        let newest = self.number.checked_sub(1)?;
        let back = usize::try_from(newest.checked_sub(number)?).ok()?;
        self.ring.get(self.ring.len().checked_sub(back + 1)?)
    }

    /// The number that the next record will have.
    pub fn next_number(&self) -> u64 {
        self.number
    }

    /// The last records, oldest first, at most `last`.
    pub fn last(&self, last: usize) -> Vec<StepRecord> {
        let skip = self.ring.len().saturating_sub(last);
        self.ring.iter().skip(skip).cloned().collect()
    }

    /// Tokens of the plans that were finished within `window` before `now`, a second. Where the ring does not reach
    /// back so far, over as much as it holds.
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

    /// The records from `number` on that are kept, oldest first.
    pub fn from(&self, number: u64) -> Vec<StepRecord> {
        self.ring.iter().filter(|record| record.number >= number).cloned().collect()
    }
}

/// What a report says beside tokens: kept while the scheduler takes the tokens in.
#[derive(Debug)]
pub struct Reported {
    ticket: Ticket,
    finished: bool,
    tokens: u32,
    faults: u32,
    submissions: Vec<SubmissionRecord>,
}

impl Reported {
    /// Of a report; takes its submissions out.
    pub fn of(progress: &mut PlanReport) -> Reported {
        Reported {
            ticket: progress.ticket,
            finished: progress.finished,
            tokens: progress.tokens.len() as u32,
            faults: progress.faults,
            submissions: std::mem::take(&mut progress.submissions),
        }
    }
}
