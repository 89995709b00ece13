//! The record of a finished plan, as the step ring keeps it. Plain data.

use crate::actors::timeline::SubmissionRecord;
use crate::engine::request::PerToken;
use crate::telemetry::clock::Moment;
use std::sync::Arc;
use std::time::Duration;

/// An entry of the step ring: one plan, from its creation to its last token.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// The record's number, which grows by one per finished plan.
    pub number: u64,
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// The number of rows of the batch (decode) or of prompt tokens of the plan (prefill).
    pub rows: u32,
    /// The number of steps of the plan.
    pub steps: u32,
    /// When the plan completed, since the replica's start.
    pub at: Duration,
    /// The cost, summed over the steps.
    pub cost: PerToken,
    /// The number of tokens drawn.
    pub tokens: u32,
    /// When the engine had made the plan.
    pub planned: Moment,
    /// When the engine had processed the plan's last report.
    pub taken: Moment,
    /// The ids of the requests that had rows in the plan and had not ended when it was finished.
    pub requests: Vec<Arc<str>>,
    /// The plan's submissions to the compute queue, in order.
    pub submissions: Vec<SubmissionRecord>,
    /// The number of sequences that held a slot at the plan's end.
    pub running: u32,
    /// The number of sequences in the queue at the plan's end.
    pub waiting: u32,
    /// The number of KV cache pages in use at the plan's end.
    pub pages_used: u32,
    /// How often a fault kept steps of the plan from drawing, so that they were run again.
    pub faults: u32,
}
