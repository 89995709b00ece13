//! The executor trait: the interface between the scheduler's step loop and what runs its plans, which is a GPU
//! (`gpu::executor`) or, in tests and simulations, a fake (`fake`).
//! Not here: plans and reports themselves (`plan`).

use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, PlanReport, Slot, StepPlan, Ticket};
use crate::engine::variants::Variants;
use std::sync::Arc;

/// Why an executor cannot run plans any more.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The device is lost; everything on it must be rebuilt.
    #[error("device \"{device}\" is lost")]
    DeviceLost {
        /// The device's name.
        device: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The devices of a replica have stopped exchanging data in the middle of a step; everything on them must be rebuilt.
    #[error("the devices of the replica have stopped exchanging data")]
    ExchangeEnded,
    /// The step number in an entry of the token ring differs from that of the completed step.
    #[error("step {expected} was reported as {found}: its results cannot be trusted")]
    StepMismatch {
        /// The number of the completed step.
        expected: u32,
        /// The number in the ring.
        found: u32,
    },
    /// Any other error.
    #[error("{0}")]
    Failed(String),
}

/// Runs plans in order. Used from one thread. Dropping an executor waits for everything that it has submitted.
///
/// The step loop guarantees the following:
/// - A slot joins only after its previous sequence has left or was marked done, and after every plan whose work names
///   the slot was reported finished.
/// - A page that a slot may write is given to it only when no other slot that holds the page can still be accessed by
///   an unfinished plan.
/// - A page that several slots hold is full of the same tokens for each of them, was queued to be written before or in
///   the plan that reads it, and is not written any more.
/// - No step is queued for a position without a page.
/// - At most `run_ahead` decode steps are queued and not reported.
/// - Within a plan no snapshot cell is both read and written, or written twice.
/// - A slot with `dump_logits` has at most one unreported sample.
/// - At most [`PLANS_IN_FLIGHT`](super::plan::PLANS_IN_FLIGHT) plans with work are not reported to their end.
/// - At most two plans with a scored chunk, and at most two with pooled tokens, are unreported.
pub trait Executor: Send {
    /// Returns the executor's limits.
    fn capacity(&self) -> &Capacity;
    /// Queues a plan after all earlier ones and returns its ticket. Does not wait for the device, except that the GPU
    /// executor waits for an earlier submission if none of its patch buffers is free.
    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError>;
    /// Returns a channel that becomes readable when `poll` may have reports.
    fn wake(&self) -> &crossbeam_channel::Receiver<()>;
    /// Returns the reports that have completed since the last call; never blocks.
    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError>;
    /// Sets which tokens a slot may draw next: bit `i % 32` of word `i / 32` stands for token `i`, over the whole
    /// vocabulary. Call it only for slots that joined with a mask, and only when no queued plan can still draw with the
    /// previous mask.
    fn set_mask(&mut self, slot: Slot, mask: &[u32]);
    /// Signals that all masks that a plan waits for were set. Waiting plans may be released in any order, and each of
    /// them must be released, unless the executor is dropped first.
    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError>;
    /// Times every kernel of one step in each of the next `plans` plans with work. Replaces what is left of an earlier
    /// call. Does nothing if the executor cannot time kernels.
    fn profile(&mut self, plans: u32) {
        let _ = plans;
    }
    /// Returns recent step times; the step loop sizes its run-ahead and prompt chunks by them.
    fn pace(&self) -> &Pace;
    /// Returns the number of faults so far: how often a kernel of a step without barriers timed out while it
    /// polled for another kernel's words. One fault can affect several plans in flight (`PlanReport::faults` says
    /// which); none loses a token.
    fn faults(&self) -> u64 {
        0
    }
    /// Returns the kernels that run, and the fallbacks in use; empty for an executor without kernels.
    fn variants(&self) -> Arc<Variants> {
        Arc::default()
    }
}
