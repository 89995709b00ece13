//! The boundary between the engine loop and what runs its plans: a GPU (`gpu::executor`) or, in tests and simulations,
//! a fake (`fake`).

use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, PlanReport, Slot, StepPlan, Ticket};
use crate::engine::variants::Variants;
use std::sync::Arc;

/// What running a step can end in.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The device is gone; everything on it must be rebuilt.
    #[error("device \"{device}\" is lost")]
    DeviceLost {
        /// Its name.
        device: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A step's number in the ring does not match its point.
    #[error("step {expected} was reported as {found}: its results cannot be trusted")]
    StepMismatch {
        /// By the point.
        expected: u32,
        /// In the ring.
        found: u32,
    },
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// Runs plans in order. Used from one thread. Dropped, it waits for what it has submitted.
///
/// What the step loop keeps: a slot joins only when every plan whose work names it has been
/// reported finished, and has left or been marked done before; a page that a slot may write is handed to it only
/// when no slot that holds it can still be touched by an unfinished plan; a page that several slots hold is full
/// of the same tokens for each, was queued to be written before or within the plan that reads it, and is written by
/// nobody any more; no step is queued for a position without a page; decode steps queued and not reported are at
/// most `run_ahead`; within a plan no cell of a snapshot is both read and written, or written twice.
/// A slot that asks for `dump_logits` has at most one unreported sample. At most two plans whose chunk is scored are
/// unreported.
pub trait Executor: Send {
    /// What it can hold.
    fn capacity(&self) -> &Capacity;
    /// Queues a plan behind all earlier ones.
    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError>;
    /// A channel that becomes readable when `poll` may have something to say.
    fn wake(&self) -> &crossbeam_channel::Receiver<()>;
    /// Everything that has completed since the last call; never blocks.
    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError>;
    /// What a slot may draw with its next token: bit `i % 32` of word `i / 32` stands for token `i`, of all in the
    /// vocabulary. Only when no plan can still draw with the mask before it. Of slots that joined with a mask.
    fn set_mask(&mut self, slot: Slot, mask: &[u32]);
    /// The masks that a plan waits for are there. Plans that wait are released in any order, and each is owed it.
    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError>;
    /// Times every kernel of one step of each of the next `plans` plans with work; those asked for before and not
    /// submitted yet are replaced. Does nothing where nothing can be timed.
    fn profile(&mut self, plans: u32) {
        let _ = plans;
    }
    /// What steps took lately; the step loop sizes its run-ahead and prompts' chunks by it.
    fn pace(&self) -> &Pace;
    /// Faults so far: how often a kernel of a decode step without barriers waited in vain for another's words. Several
    /// plans in flight can be affected by one fault (`PlanReport::faults` says which); none loses a token.
    fn faults(&self) -> u64 {
        0
    }
    /// Which kernels run, and the slower ways that are taken; nothing of an executor without kernels.
    fn variants(&self) -> Arc<Variants> {
        Arc::default()
    }
}
