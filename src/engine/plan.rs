//! The plan of a step: what the scheduler hands to an executor, and what the executor reports of it. Plain data.
//! Not here: running a plan (`executor`).

use crate::actors::timeline::SubmissionRecord;
use crate::engine::request::{PerToken, Scored, TokenLogprobs};
use crate::kernels::embed::BLOCK_ROWS;
use std::sync::Arc;

/// A row of the batch that a running sequence holds; index below `Capacity::slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A page of 16 tokens of KV; index below `Capacity::pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u32);

/// A place for one sequence's recurrent state: cell `s` is slot `s`'s own, those behind the slots' are snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateSlot(pub u32);

/// Recurrent state can be kept behind every so many tokens of a chunk.
pub const STATE_TOKENS: u32 = BLOCK_ROWS;

/// What an executor can hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that can run at once.
    pub slots: u32,
    /// KV pages.
    pub pages: u32,
    /// Longest context, tokens (prompt and output).
    pub context: u32,
    /// Prompt tokens of a step, of one sequence or several.
    pub prefill_chunk: u32,
    /// Sequences whose prompts can share a step.
    pub prompts: u32,
    /// Decode buckets, ascending rows: `[1, 2, 4, …]`.
    pub buckets: Vec<u32>,
    /// Decode steps that may be queued and not yet completed.
    pub run_ahead: u32,
    /// Whether a step can be queued before its masks are there.
    pub gates: bool,
    /// Vocabulary size.
    pub vocabulary: u32,
    /// What can be drafted.
    pub drafts: Drafts,
    /// Cells for snapshots of recurrent state, behind the slots' own; `None`: the model has no such state.
    pub snapshots: Option<u32>,
}

/// How far an executor drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Tokens of a sequence at a time, at most; 0: none.
    pub most: u32,
    /// Sequences that a step which verifies drafts can have.
    pub sequences: u32,
    /// As many as possible are drafted, whatever they cost.
    pub always: bool,
}

/// Sampling and stopping of a slot as the device holds them; set when the sequence joins.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotParams {
    /// Validated.
    pub sampling: super::request::Sampling,
    /// Resolved (never `None`).
    pub seed: u64,
    /// The last tokens of the prompt that were drawn earlier: not 0 only where a preempted
    /// sequence is recomputed. They count as output for penalties and for the random state,
    /// so the next token drawn has output index `generated`.
    pub generated: u32,
    /// Length of the prompt proper: from this position on, tokens are output.
    pub prompt_tokens: u32,
    /// Tokens to draw (from here on) until the device marks the slot done.
    pub max_tokens: u32,
    /// A stop id counts only if at least this many tokens were drawn (from here on) before it.
    pub min_tokens: u32,
    /// All that apply, the model's own included.
    pub stop_ids: Vec<u32>,
    /// As in `Request`.
    pub logprobs: Option<u32>,
    /// As in `Request`.
    pub dump_logits: bool,
    /// What the first token may be ([`super::executor::Executor::set_mask`]); `None`: nothing is constrained.
    pub mask: Option<Arc<[u32]>>,
}

/// A small change of device state, applied in order before the next step of the same plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A sequence takes a slot: parameters are written, penalties' counts cleared.
    Join {
        /// Which.
        slot: Slot,
        /// How it samples and stops.
        params: Box<SlotParams>,
        /// The beginning of its history that is in pages already and in no chunk to come: for
        /// penalties' counts only, and empty without penalties.
        cached: Vec<u32>,
    },
    /// Entries `first..first + pages.len()` of a slot's page table.
    Pages {
        /// Which.
        slot: Slot,
        /// Index in the slot's page table.
        first: u32,
        /// The pages.
        pages: Vec<Page>,
    },
    /// The slot's further steps do nothing.
    Leave {
        /// Which.
        slot: Slot,
    },
}

/// Consecutive tokens of one sequence's prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Whose.
    pub slot: Slot,
    /// Token ids, at least one.
    pub tokens: Vec<u32>,
    /// Position of the first of them.
    pub start: u32,
    /// The last chunk: a token is sampled from its last position and the slot decodes on from it.
    pub last: bool,
    /// The token behind it, where it is not the last chunk: drafting reads it.
    pub next: Option<u32>,
    /// The cell whose recurrent state it continues, where that is not the slot's own: of a first chunk behind tokens
    /// that were found in pages. A first chunk at position 0 begins without state.
    pub restore: Option<StateSlot>,
    /// Where else than in the slot's cell state is left; at most [`MOST_KEEPS`].
    pub keeps: Vec<Keep>,
    /// How probable its tokens are is asked, with so many alternatives: of all behind its first one, and of `next`. Such a
    /// chunk is alone in its plan.
    pub score: Option<u32>,
}

/// Snapshots that a chunk leaves, at most.
pub const MOST_KEEPS: usize = 2;

/// A snapshot that a chunk leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// After so many of the chunk's tokens: a multiple of [`STATE_TOKENS`].
    pub tokens: u32,
    /// There.
    pub cell: StateSlot,
}

/// Work of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Chunks of prompts, taken in as one step: at most `Capacity::prompts`, each of another slot, together at
    /// most `Capacity::prefill_chunk` tokens. A chunk may read pages that another chunk of the step writes.
    Prefill {
        /// At least one.
        chunks: Vec<Chunk>,
    },
    /// Decode steps of these slots, one token each a step, fed back on the device.
    Decode {
        /// Distinct slots, at most the largest bucket.
        slots: Vec<Slot>,
        /// Steps to queue.
        steps: u32,
        /// Not 0: each step verifies so many tokens that were drafted for each slot, and draws as many more than one as
        /// are right. Every slot may write as many positions more than it draws.
        drafts: u32,
        /// Masks of some slots are still to come: nothing is drawn before [`super::executor::Executor::release`]. Then there is one step
        /// and no draft.
        awaits: bool,
    },
}

/// What the step loop asks for at once: changes, then one work. Never blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// Applied first, in order.
    pub changes: Vec<Change>,
    /// Then run. `None`: only changes (a leave without further work).
    pub work: Option<Work>,
}

impl Work {
    /// Steps that sample, or take prompts in.
    pub fn steps(&self) -> u32 {
        match self {
            Work::Prefill { .. } => 1,
            Work::Decode { steps, .. } => *steps,
        }
    }
}

impl StepPlan {
    /// The slots that its work is for.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let (chunks, slots): (&[Chunk], &[Slot]) = match &self.work {
            Some(Work::Prefill { chunks }) => (chunks, &[]),
            Some(Work::Decode { slots, .. }) => (&[], slots),
            None => (&[], &[]),
        };
        chunks.iter().map(|chunk| chunk.slot).chain(slots.iter().copied())
    }
}

/// Names a submitted plan; grows by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Whose.
    pub slot: Slot,
    /// The id.
    pub id: u32,
    /// The device marked the slot done with this token.
    pub done: Option<Done>,
    /// Which of the step's drafts it is, counted from 1; 0: none of them.
    pub draft: u32,
    /// If asked.
    pub logprobs: Option<TokenLogprobs>,
    /// If asked.
    pub logits: Option<Vec<f32>>,
}

/// How probable the tokens of a chunk were.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredChunk {
    /// Whose.
    pub slot: Slot,
    /// Position of the first of them.
    pub first: u32,
    /// In order.
    pub tokens: Vec<Scored>,
}

/// Why the device marked a slot done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// The token is a stop id.
    Stop,
    /// `max_tokens` reached.
    Length,
}

/// PlanReport of a plan that has work (plans of changes alone are not reported). A decode plan of several steps may be reported in parts, in order;
/// every slot yields one `Sampled` a step until it is done, then none; with drafts up to as many more as there are.
#[derive(Clone, Debug)]
pub struct PlanReport {
    /// Which plan.
    pub ticket: Ticket,
    /// Steps of the plan that this report completes (1 for a prefill).
    pub steps: u32,
    /// In step order, then row order.
    pub tokens: Vec<Sampled>,
    /// If the plan's chunk asked.
    pub scored: Option<ScoredChunk>,
    /// The plan has nothing further to report.
    pub finished: bool,
    /// With the last report: how often a fault (see [`super::executor::Executor::faults`]) kept steps of the plan from drawing tokens, so
    /// that they were run again.
    pub faults: u32,
    /// Sum (not mean) over the steps reported here.
    pub cost: PerToken,
    /// With the last report: every submission that the plan took, in order.
    pub submissions: Vec<SubmissionRecord>,
}
