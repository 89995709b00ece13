//! The plan of a step, which the scheduler gives to an executor, and the executor's report on it. Plain data.
//! Not here: running a plan (`executor`).

use crate::actors::timeline::SubmissionRecord;
use crate::engine::request::{PerToken, Scored, TokenLogprobs};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::embed::BLOCK_ROWS;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The index of a slot: a row of device state that a running sequence holds. Below `Capacity::slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// The index of a KV cache page of 16 tokens. Below `Capacity::pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Page(pub u32);

/// The index of a cell of recurrent state, which holds the state of one sequence. Cell `s` below `Capacity::slots`
/// belongs to slot `s`; the cells from `Capacity::slots` on are snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateSlot(pub u32);

/// The granularity of snapshots in tokens: recurrent state can be stored after every multiple of this many tokens of a
/// chunk.
pub const STATE_TOKENS: u32 = BLOCK_ROWS;

/// The limits and abilities of an executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The number of sequences that can run at once.
    pub slots: u32,
    /// The number of KV cache pages.
    pub pages: u32,
    /// The pages of layers with a sliding window, if these have pages of their own. Otherwise they share those of the other
    /// layers.
    pub window: Option<WindowCapacity>,
    /// The maximum context in tokens (prompt and output).
    pub context: u32,
    /// The maximum number of prompt tokens in a step, of one sequence or several.
    pub prefill_chunk: u32,
    /// Whether a token sees earlier tokens only. Otherwise keys and values of a prompt's beginning depend on all of it: each
    /// prompt is one chunk, no pages are reused, and no token is drawn, prompts are only embedded.
    pub causal: bool,
    /// The maximum number of sequences whose prompts can share a step.
    pub prompts: u32,
    /// The maximum number of sequences of a prefill step in which some decode, with those whose prompts share it; at least
    /// `prompts`.
    pub sequences: u32,
    /// The time of a decode step from which sequences decode in prefill steps; `None` if they never can.
    pub mixed_steps: Option<Duration>,
    /// The decode buckets: numbers of rows, ascending, `[1, 2, 4, …]`.
    pub buckets: Vec<u32>,
    /// The maximum number of decode steps that are queued and not yet completed.
    pub run_ahead: u32,
    /// Whether a step in which slots decode can be queued before the masks of its constrained slots are available.
    pub gates: bool,
    /// The size of the vocabulary.
    pub vocabulary: u32,
    /// The limits of speculative decoding.
    pub drafts: Drafts,
    /// The number of cells for snapshots of recurrent state, in addition to one cell per slot; `None` if the model has
    /// no recurrent state.
    pub snapshots: Option<u32>,
    /// The time that a plan's work should not exceed on the device; `None` where it may take any time. A GPU that also draws
    /// a desktop stands still meanwhile, and drivers declare a GPU lost that finishes nothing for seconds.
    pub plan_limit: Option<Duration>,
}

/// The pages of layers with a sliding window, which are given back when no token sees them any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCapacity {
    /// The number of tokens that a token sees, itself included; the greatest, if layers differ.
    pub tokens: u32,
    /// The number of pages.
    pub pages: u32,
}

/// The maximum number of plans with work that are submitted and unfinished: one runs, and one is queued behind it.
pub const PLANS_IN_FLIGHT: usize = 2;

impl WindowCapacity {
    /// Returns the maximum number of window pages of a sequence of at most `context` tokens, apart from those of its prompt's
    /// chunks in flight: the window, and as many tokens as may be written before the first of them is reported.
    pub fn pages_each(tokens: u32, context: u32, run_ahead: u32, drafts: u32) -> u32 {
        let ahead = run_ahead * (drafts + 1) + drafts;
        // The first and the last page may be partly used, and the page of a chunk's end is also that of the next one's start.
        (tokens.saturating_add(ahead).div_ceil(PAGE_TOKENS) + 3).min(context.div_ceil(PAGE_TOKENS))
    }

    /// Returns the maximum number of window pages of all prompt chunks in flight together.
    pub fn pages_of_chunks(prefill_chunk: u32) -> u32 {
        PLANS_IN_FLIGHT as u32 * prefill_chunk.div_ceil(PAGE_TOKENS)
    }
}

/// The limits of speculative decoding on an executor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// The maximum number of draft tokens per sequence and step; 0 disables speculative decoding.
    pub most: u32,
    /// The maximum number of sequences in a verification step.
    pub sequences: u32,
    /// Whether to draft `most` tokens wherever drafts are possible, whatever they cost, instead of choosing the number
    /// by measured speed.
    pub always: bool,
    /// Whether the executor must know all tokens of a sequence: [`Change::Join`] then names those that no chunk contains.
    pub history: bool,
    /// Whether a draft model computes its keys and values only in prefill steps and in steps with drafts. Before drafts,
    /// [`Work::CatchUp`] must compute those of the other tokens.
    pub catches_up: bool,
}

/// The sampling and stopping parameters of a slot, as the device holds them. Set when the sequence joins.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotParams {
    /// The validated sampling parameters.
    pub sampling: super::request::Sampling,
    /// The resolved seed (the request's, or the one that the engine has drawn).
    pub seed: u64,
    /// The number of tokens at the end of the history that were generated earlier; above 0 only if a preempted sequence
    /// is recomputed. They count as output for the penalties and for the random state, so that the next token drawn has
    /// output index `generated`.
    pub generated: u32,
    /// The length of the request's prompt: tokens from this position on are output.
    pub prompt_tokens: u32,
    /// The number of tokens to draw from here on, after which the device marks the slot done.
    pub max_tokens: u32,
    /// The number of tokens to draw from here on before a stop id ends the sequence.
    pub min_tokens: u32,
    /// All stop ids that apply, including the model's own.
    pub stop_ids: Vec<u32>,
    /// The number of logprob alternatives; see `Request::logprobs`.
    pub logprobs: Option<u32>,
    /// Whether the logits of every step are returned; see `Request::dump_logits`.
    pub dump_logits: bool,
    /// The mask of the first token, in the format of [`super::executor::Executor::set_mask`]; `None` if the output is
    /// not constrained.
    pub mask: Option<Arc<[u32]>>,
}

/// The page tables of a slot. Entry i is the page of tokens 16 i and following.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageTable {
    /// The table of layers with full attention, and of all layers if windows have no pages of their own.
    Full,
    /// The table of layers with a sliding window. Entries before the window may name pages of other sequences.
    Window,
}

/// A small change of device state. Changes are applied in order, before the step of the same plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A sequence takes a slot: its parameters are written and the counts for its penalties are cleared.
    Join {
        /// The slot.
        slot: Slot,
        /// The sampling and stopping parameters.
        params: Box<SlotParams>,
        /// The tokens at the beginning of its history that were found in the prefix cache and are therefore in no later
        /// chunk. Used for the penalties' counts and by [`Drafts::history`]; otherwise empty.
        cached: Vec<u32>,
    },
    /// Writes entries `first..first + pages.len()` of one of a slot's page tables.
    Pages {
        /// The slot.
        slot: Slot,
        /// The table of the slot.
        table: PageTable,
        /// The index of the first entry in the slot's page table.
        first: u32,
        /// The pages.
        pages: Vec<Page>,
    },
    /// A sequence leaves its slot: further steps skip the slot.
    Leave {
        /// The slot.
        slot: Slot,
    },
}

/// A prompt chunk: consecutive tokens of one sequence's history.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// The slot of the sequence.
    pub slot: Slot,
    /// The token ids, at least one.
    pub tokens: Vec<u32>,
    /// The position of the first token.
    pub start: u32,
    /// Whether this is the last chunk: a token is sampled from its last position, and the slot continues with decode
    /// steps.
    pub last: bool,
    /// The token that follows the chunk, unless it is the last one; drafting needs it.
    pub next: Option<u32>,
    /// The snapshot whose recurrent state the chunk continues, if that is not the slot's own cell. Set for the first
    /// chunk after tokens that were found in the prefix cache. A first chunk at position 0 starts with zero state.
    pub restore: Option<StateSlot>,
    /// The snapshots that the chunk stores, in addition to the state in the slot's own cell; at most [`MOST_KEEPS`].
    pub keeps: Vec<Keep>,
    /// If set, all tokens of the chunk except its first one, and the token in `next`, are scored (their log
    /// probabilities are computed), with this many alternatives each. Such a chunk is alone in its plan.
    pub score: Option<u32>,
    /// The chunk's tokens whose hidden states are pooled, counted from its first one; empty for sequences that are not
    /// embedded. No token is drawn from a chunk of a sequence that is embedded: `last` is false.
    pub pooled: Range<u32>,
}

/// The maximum number of snapshots that a chunk stores.
pub const MOST_KEEPS: usize = 2;

/// A snapshot that a chunk stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The number of the chunk's tokens after which the state is stored: a multiple of [`STATE_TOKENS`].
    pub tokens: u32,
    /// The cell in which it is stored.
    pub cell: StateSlot,
}

/// The work of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A prefill step: prompt chunks that are computed together. At most `Capacity::prompts` chunks, each of another
    /// slot, with at most `Capacity::prefill_chunk` tokens in total. A chunk may read pages that another chunk of the
    /// step writes.
    Prefill {
        /// The chunks, at least one.
        chunks: Vec<Chunk>,
        /// Slots that decode in the step, each once, with one row each: it draws a token for each of them too, without
        /// drafts. Only with `Capacity::mixed_steps`, while no decode plan is unfinished, and without dumped logits; empty
        /// beside a chunk that is scored.
        decoding: Vec<Slot>,
        /// Whether masks of some of `decoding` are not available yet: nothing is drawn before
        /// [`super::executor::Executor::release`].
        awaits: bool,
    },
    /// The draft model computes its keys and values of tokens of slots that decode, which decode steps without drafts have
    /// written; see [`Drafts::catches_up`]. Nothing is drawn.
    CatchUp {
        /// The tokens as chunks, limited like those of a prefill step. Of each chunk, the slot, the tokens and the position of
        /// the first token count. All tokens of the slot before the chunk have such keys and values.
        chunks: Vec<Chunk>,
    },
    /// Decode steps of these slots. Each step draws one token per slot (more with drafts), which the device itself
    /// feeds to the next step.
    Decode {
        /// The slots, each once; at most as many as the largest bucket.
        slots: Vec<Slot>,
        /// The number of steps to queue.
        steps: u32,
        /// The number of draft tokens per slot that each step verifies; 0 for ordinary decode steps. If it is above 0,
        /// a step draws one token plus one per accepted draft for each slot, and every slot may write this many
        /// positions more than it draws.
        drafts: u32,
        /// Whether masks of some slots are not available yet: nothing is drawn before
        /// [`super::executor::Executor::release`]. Such a plan has one step and no drafts.
        awaits: bool,
    },
}

/// A unit of submission to an executor: changes, then one item of work.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// The changes, applied first and in order.
    pub changes: Vec<Change>,
    /// The work that runs after the changes; `None` if there are only changes (a slot was left and nothing else runs).
    pub work: Option<Work>,
}

impl Work {
    /// Returns the number of steps: prefill steps or decode steps.
    pub fn steps(&self) -> u32 {
        match self {
            Work::Prefill { .. } | Work::CatchUp { .. } => 1,
            Work::Decode { steps, .. } => *steps,
        }
    }

    /// Returns the number of drafts that each step verifies for each sequence.
    pub fn drafts(&self) -> u32 {
        if let Work::Decode { drafts, .. } = self { *drafts } else { 0 }
    }

    /// Returns the number of rows of a prefill step: tokens of prompts, and slots that decode in it; 0 of other work.
    pub fn prompt_rows(&self) -> u32 {
        match self {
            Work::Prefill { chunks, decoding, .. } => {
                (chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>() + decoding.len()) as u32
            }
            Work::CatchUp { .. } | Work::Decode { .. } => 0,
        }
    }

    /// Whether nothing is drawn before [`super::executor::Executor::release`].
    pub fn awaits(&self) -> bool {
        match self {
            Work::Prefill { awaits, .. } | Work::Decode { awaits, .. } => *awaits,
            Work::CatchUp { .. } => false,
        }
    }
}

impl StepPlan {
    /// Returns the slots that the work is for.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let (chunks, slots): (&[Chunk], &[Slot]) = match &self.work {
            Some(Work::Prefill { chunks, decoding, .. }) => (chunks, decoding),
            Some(Work::CatchUp { chunks }) => (chunks, &[]),
            Some(Work::Decode { slots, .. }) => (&[], slots),
            None => (&[], &[]),
        };
        chunks.iter().map(|chunk| chunk.slot).chain(slots.iter().copied())
    }
}

/// Identifies a submitted plan. Each ticket is one higher than the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The slot that it was drawn for.
    pub slot: Slot,
    /// The token id.
    pub id: u32,
    /// Set if the device marked the slot done with this token.
    pub done: Option<Done>,
    /// The number of accepted drafts of the step that precede this token: the token was drawn from the row of the draft
    /// with this number, counted from 1; 0: from the row of the step's input token.
    pub draft: u32,
    /// What few requests ask for; apart, so that the tokens of hundreds of rows are few bytes.
    pub details: Option<Box<SampledDetails>>,
}

/// What a request asked for with each of its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledDetails {
    /// The log probabilities, if the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
    /// The raw logits, if the request asked for them.
    pub logits: Option<Vec<f32>>,
}

/// The log probabilities of a chunk's tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredChunk {
    /// The slot of the sequence.
    pub slot: Slot,
    /// The position of the first scored token.
    pub first: u32,
    /// The scored tokens, in order of their positions.
    pub tokens: Vec<Scored>,
}

/// The pooled hidden states of a chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct PooledChunk {
    /// The slot of the sequence.
    pub slot: Slot,
    /// The number of tokens pooled.
    pub tokens: u32,
    /// The sum of their hidden states after the final norm: as many values as the model's hidden states have.
    pub sum: Vec<f32>,
}

/// Why the device marked a slot done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// The token is a stop id.
    Stop,
    /// The slot has drawn `max_tokens` tokens.
    Length,
}

/// A report on a plan that has work (plans with changes only are not reported). A decode plan of several steps may be
/// reported in parts, in order. Each step yields one `Sampled` per slot until the slot is done, and none after that;
/// with drafts up to `drafts` more.
#[derive(Clone, Debug)]
pub struct PlanReport {
    /// The plan.
    pub ticket: Ticket,
    /// The number of steps of the plan that this report completes (1 for a prefill).
    pub steps: u32,
    /// The number of drafts that these steps verified for each slot: 0 for those of a plan with drafts that were run again.
    pub drafts: u32,
    /// The tokens drawn, in step order, then in row order.
    pub tokens: Vec<Sampled>,
    /// The scores of the plan's chunk, if it asked for them.
    pub scored: Option<ScoredChunk>,
    /// In the last report of a prefill plan: the pooled states of each chunk that has some.
    pub pooled: Vec<PooledChunk>,
    /// Whether this is the plan's last report.
    pub finished: bool,
    /// In the last report: how often a fault (see [`super::executor::Executor::faults`]) kept steps of the plan from
    /// drawing tokens, so that they were run again.
    pub faults: u32,
    /// The cost, summed (not averaged) over the steps of this report.
    pub cost: PerToken,
    /// In the last report: all submissions of the plan, in order.
    pub submissions: Vec<SubmissionRecord>,
}
