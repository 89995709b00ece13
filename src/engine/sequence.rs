//! One sequence: its tokens, what it holds on the device, and how far the device has been
//! asked to go with it. Deliberately absent: which sequence goes next (`scheduler`).

use crate::actors::workers::Cancel;
use crate::engine::page_pool::Content;
use crate::engine::plan::{Chunk, Page, STATE_TOKENS, Slot, SlotParams, StateSlot};
use crate::engine::prefix::PageKey;
use crate::engine::request::{PerToken, Request, Scored, Timings};
use crate::kernels::attention::PAGE_TOKENS;
use crate::model::grammar::{Grammar, Started};
use crate::telemetry::names;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request that is not finished, as the scheduler sees one sample of it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestView {
    /// The request's id; samples after the first have a mark and their index behind it.
    pub id: String,
    /// `waiting`, `prefill`, `decode` or `leaving`.
    pub phase: &'static str,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Of the history that this stay on the device computes or found: tokens queued so far.
    pub prefilled_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Output tokens reported.
    pub output_tokens: u32,
    /// Most output tokens.
    pub max_tokens: u32,
    /// KV pages held.
    pub pages: u32,
    /// How often it lost its pages.
    pub preemptions: u32,
    /// Submission until now.
    pub age: Duration,
    /// Submission to its first chunk; until now for one that waits.
    pub queued: Duration,
    /// Submission to its first token.
    pub first_token: Option<Duration>,
}

/// Names a sequence; grows by one an arrival, so the smaller is the older.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// What a phase of a sequence cost in all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseCost {
    /// Tokens taken in (prefill) or handed out (decode).
    pub tokens: u64,
    /// Chunks (prefill) or decode steps.
    pub steps: u64,
    /// Sum over the steps. A step is counted whole, however many rows share it.
    pub sum: PerToken,
    /// How often the sequence lost its pages until the end of the phase.
    pub preemptions: u32,
}

/// What a sequence's output must look like, and how far that is known.
#[derive(Debug)]
pub struct Constrained {
    /// `None` while somebody finds out what may follow the last token reported.
    pub grammar: Option<Box<Grammar>>,
    /// What output token number `next`, counted from 0, may be.
    pub mask: Arc<[u32]>,
    /// As `mask` says; at most the number of tokens reported.
    pub next: u32,
    /// Since when somebody finds it out.
    pub asked: Option<Instant>,
    /// How often its mask was late, and how many were in time since.
    pub late: (u32, u32),
    /// Ends what is being found out for it.
    pub cancel: Cancel,
}

/// How long a step that has been queued waits for a mask; then the row that lacks it leaves the batch.
pub const MASK_PATIENCE: Duration = Duration::from_millis(30);
/// Masks in time, after which a row whose mask was late once is queued before its masks again; twice as many after
/// each further time.
const TRUSTED_AFTER: u32 = 64;

impl Constrained {
    /// Whether a step is not queued before its mask is there: its masks were late, lately.
    fn waits_apart(&self) -> bool {
        let (late, in_time) = self.late;
        late > 0 && in_time < TRUSTED_AFTER << (late - 1).min(16)
    }

    /// Takes what was found out at `now`.
    pub fn answered(&mut self, grammar: Box<Grammar>, mask: Arc<[u32]>, next: u32, now: Instant) {
        if let Some(asked) = self.asked.take()
            && now.saturating_duration_since(asked) < MASK_PATIENCE / 2
        {
            self.late.1 = self.late.1.saturating_add(1);
        }
        (self.grammar, self.mask, self.next) = (Some(grammar), mask, next);
    }

    /// Its mask is late.
    pub fn is_late(&mut self) {
        self.late = (self.late.0 + 1, 0);
    }
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    /// In the queue: no slot, no pages.
    Waiting,
    /// Holds a slot and the pages of its whole history, of which chunks are still to be queued.
    Prefill,
    /// The device draws tokens.
    Decode,
    /// Asked off its slot, which it holds with its pages until the last plan that names it is
    /// finished. Then it is gone, or, if it has not ended, back in the queue.
    Leaving,
}

/// A request on its way through the scheduler.
#[derive(Debug)]
pub struct Sequence {
    /// By arrival.
    pub id: SequenceId,
    /// The request's.
    pub request: String,
    /// Higher goes first.
    pub priority: i32,
    /// The request's.
    pub deadline: Option<Instant>,
    /// Prompt, then the output reported so far.
    pub tokens: Vec<u32>,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Most output tokens; prompt and output fit in the context.
    pub max_tokens: u32,
    /// As of the arrival; `join` makes what the device is told of it.
    params: SlotParams,
    /// Alternatives of its prompt's tokens, while some of these are still to be scored.
    score: Option<u32>,
    /// Tokens of the prompt whose scores were handed out, the first included, which has none.
    scored: u32,
    /// What it may draw, where that is constrained.
    pub constraint: Option<Constrained>,

    /// Where it stands.
    pub state: SequenceState,
    /// It was passed over so often that nobody goes before it until its end.
    pub shielded: bool,
    /// `Finished` was handed out; what is still reported is surplus.
    pub ended: bool,
    /// Held from its first chunk until released.
    pub slot: Option<Slot>,
    /// Its page table.
    pub pages: Vec<Page>,
    /// Plans that name it and are not finished.
    pub in_flight: u32,
    /// Names of the full pages of `tokens`, as far as they were needed.
    keys: Vec<PageKey>,
    /// Where the chain of `keys` begins.
    root: PageKey,
    /// It begins with a salt.
    salted: bool,
    /// The first of `pages` whose content was not yet told to the pool.
    unnamed: u32,
    /// Tokens of history that this stay on the device starts from; set on joining.
    history: u32,
    /// Of them queued for prefill, or found in pages.
    prefilled: u32,
    /// The cell that its next chunk's recurrent state comes from, if not the slot's own.
    restore: Option<StateSlot>,
    /// Tokens of history whose pages were found, as far as state can be kept: another sequence has begun alike, and
    /// further ones may.
    branch: u32,
    /// Tokens of the prompt that its first stay found in pages.
    pub cached_tokens: u32,
    /// Tokens that the device was asked to draw in this stay.
    drawn: u32,
    /// Grows with every row of a plan: who has the smallest has gone longest without.
    pub turn: u64,

    /// Submission.
    pub arrived: Instant,
    /// First chunk queued.
    pub started: Option<Instant>,
    /// First token reported.
    pub first_token: Option<Instant>,
    /// Last token reported.
    pub last_token: Option<Instant>,
    /// Until the first token.
    pub prefill_cost: PhaseCost,
    /// After the first token.
    pub decode_cost: PhaseCost,
    /// How often it lost its pages.
    pub preemptions: u32,
    /// How often it held a slot of a device that was lost.
    pub losses: u32,
    /// Tokens that were drafted for it, and those of its output that were drafts.
    pub drafted_tokens: u32,
    /// As `drafted_tokens` says.
    pub accepted_tokens: u32,
}

impl Sequence {
    /// A validated request, in the queue.
    pub fn new(id: SequenceId, request: Request, context: u32, eos_ids: &[u32], seed: u64, now: Instant) -> Sequence {
        let prompt_tokens = request.prompt.len() as u32;
        assert!(0 < prompt_tokens && prompt_tokens < context, "the request was not validated");
        let room = context - prompt_tokens;
        let max_tokens = request.limits.max_tokens.map_or(room, |asked| asked.min(room));
        let params = SlotParams {
            seed: request.sampling.seed.unwrap_or(seed),
            sampling: request.sampling,
            generated: 0,
            prompt_tokens,
            max_tokens,
            min_tokens: request.limits.min_tokens,
            stop_ids: request.limits.resolve_stop_ids(eos_ids),
            logprobs: request.logprobs,
            dump_logits: request.dump_logits,
            mask: None,
        };
        let constrained = |started: Started| Constrained {
            cancel: started.grammar.cancel(),
            grammar: Some(started.grammar),
            mask: started.mask,
            next: 0,
            asked: None,
            late: (u32::from(started.slow), 0),
        };
        Sequence {
            id,
            request: request.id,
            priority: request.priority,
            deadline: request.deadline,
            tokens: request.prompt,
            prompt_tokens,
            max_tokens,
            params,
            // A prompt of one token has nothing to score.
            score: request.prompt_logprobs.filter(|_| prompt_tokens > 1),
            scored: 1,
            constraint: request.grammar.map(constrained),
            keys: Vec::new(),
            root: PageKey::root(&request.cache_salt),
            salted: !request.cache_salt.is_empty(),
            unnamed: 0,
            cached_tokens: 0,
            state: SequenceState::Waiting,
            shielded: false,
            ended: false,
            slot: None,
            pages: Vec::new(),
            in_flight: 0,
            history: 0,
            prefilled: 0,
            restore: None,
            branch: 0,
            drawn: 0,
            turn: 0,
            arrived: now,
            started: None,
            first_token: None,
            last_token: None,
            prefill_cost: PhaseCost::default(),
            decode_cost: PhaseCost::default(),
            preemptions: 0,
            losses: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
        }
    }

    /// Orders sequences, best first; no two are equal.
    pub fn rank(&self) -> (Reverse<bool>, Reverse<i32>, SequenceId) {
        (Reverse(self.shielded), Reverse(self.priority), self.id)
    }

    /// Output tokens reported.
    pub fn output_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Whether the device hands every step's logits back: such a sequence runs without run-ahead.
    pub fn dumps_logits(&self) -> bool {
        self.params.dump_logits
    }

    /// Whether tokens of its prompt are still to be scored: nothing is found for it, and its chunks are alone.
    pub fn is_scored(&self) -> bool {
        self.score.is_some()
    }

    /// Takes scores of its prompt's tokens from position `first` on; gives those that were not there before.
    pub fn take_scores(&mut self, first: u32, mut tokens: Vec<Scored>) -> Vec<Scored> {
        let known = self.scored.saturating_sub(first).min(tokens.len() as u32);
        let end = first + tokens.len() as u32;
        tokens.drain(..known as usize);
        self.scored = self.scored.max(end);
        if self.scored == self.prompt_tokens {
            self.score = None;
        }
        tokens
    }

    /// Names of the pages that could be found before it joins: all full ones, but never the last token's, which
    /// has to be computed for something to be drawn from.
    pub fn wanted(&mut self) -> &[PageKey] {
        let pages = (self.tokens.len() - 1) / PAGE_TOKENS as usize;
        self.extend_keys(pages);
        &self.keys[..pages]
    }

    fn extend_keys(&mut self, pages: usize) {
        while self.keys.len() < pages {
            let at = self.keys.len() * PAGE_TOKENS as usize;
            let before = self.keys.last().copied().unwrap_or(self.root);
            self.keys.push(before.next(&self.tokens[at..at + PAGE_TOKENS as usize]));
        }
    }

    /// Its first chunk continues the recurrent state of a cell; the pages of its first `branch` tokens are found.
    pub fn continue_state(&mut self, restore: Option<StateSlot>, branch: u32) {
        self.restore = restore;
        self.branch = branch / STATE_TOKENS * STATE_TOKENS;
    }

    /// Positions behind which a chunk's recurrent state is worth keeping, the best first, and the names of the pages
    /// before them: where the next turn of a conversation may go on, where another sequence has parted from this
    /// one, and the end of a chunk of many.
    pub fn keep_points(&self, chunk: &Chunk) -> impl Iterator<Item = (u32, PageKey)> + '_ {
        let start = chunk.start;
        let end = start + chunk.tokens.len() as u32;
        let turn = (self.history - 1) / STATE_TOKENS * STATE_TOKENS;
        let whole = if chunk.last { 0 } else { end };
        let points = [turn, self.branch, whole].into_iter();
        let inside = points.filter(move |point| start < *point && *point <= end);
        inside.map(|point| (point, self.keys[(point / PAGE_TOKENS) as usize - 1]))
    }

    /// Tokens of its history that are neither queued nor found.
    pub fn unqueued(&self) -> u32 {
        self.history - self.prefilled
    }

    /// Takes a slot and the pages of its whole history, of which the first `found` hold their tokens. Gives what
    /// the device is told, and the tokens that its penalties have to hear of beside.
    pub fn join(&mut self, slot: Slot, pages: Vec<Page>, found: u32) -> (SlotParams, Vec<u32>) {
        assert_eq!(self.state, SequenceState::Waiting);
        assert!(self.slot.is_none() && self.pages.is_empty() && self.in_flight == 0);
        self.state = SequenceState::Prefill;
        self.slot = Some(slot);
        self.pages = pages;
        self.unnamed = found;
        self.history = self.tokens.len() as u32;
        self.prefilled = found * PAGE_TOKENS;
        assert!(self.prefilled < self.history, "nothing is left to compute");
        self.drawn = 0;
        let generated = self.output_tokens();
        if self.started.is_none() {
            self.cached_tokens = self.prefilled;
        }
        let params = SlotParams {
            generated,
            max_tokens: self.max_tokens - generated,
            min_tokens: self.params.min_tokens.saturating_sub(generated),
            mask: self.constraint.as_ref().map(|constraint| Arc::clone(&constraint.mask)),
            ..self.params.clone()
        };
        let counted = if params.sampling.has_penalties() { self.prefilled } else { 0 };
        (params, self.tokens[..counted as usize].to_vec())
    }

    /// Pages whose content has become certain since the last call: those that queued chunks
    /// fill, and those that hold only tokens that were reported.
    pub fn newly_full(&mut self) -> impl Iterator<Item = (Page, Content)> {
        let written = match self.state {
            SequenceState::Prefill => self.prefilled,
            // The token reported last is written by the step that draws the next one.
            _ => self.prefilled.max(self.tokens.len() as u32 - 1),
        };
        let full = written / PAGE_TOKENS;
        let first = std::mem::replace(&mut self.unnamed, full) as usize;
        self.extend_keys(full as usize);
        let pages = self.tokens.chunks_exact(PAGE_TOKENS as usize);
        let pages = pages.enumerate().take(full as usize).skip(first);
        pages.map(|(index, tokens)| {
            let content = Content {
                name: self.keys[index],
                behind: index.checked_sub(1).map(|before| self.keys[before]),
                tokens: tokens.try_into().expect("a full page"),
                shared: !self.salted,
            };
            (self.pages[index], content)
        })
    }

    /// The first of its pages that it may still write, as far as it was asked to go.
    pub fn first_open_page(&self) -> u32 {
        let queued =
            if self.state == SequenceState::Prefill { self.prefilled } else { self.history + self.drawn.max(1) - 1 };
        queued / PAGE_TOKENS
    }

    /// Gives slot and pages back, to be released; an unfinished sequence is in the queue again.
    pub fn leave(&mut self) -> (Option<Slot>, Vec<Page>) {
        assert_eq!(self.in_flight, 0, "an unfinished plan names the sequence");
        self.state = SequenceState::Waiting;
        self.unnamed = 0;
        (self.slot.take(), std::mem::take(&mut self.pages))
    }

    /// The next chunk of its history, of at most `most` tokens; if it is not the last, of a multiple of `unit`. It
    /// counts as queued from now on.
    pub fn next_chunk(&mut self, most: u32, unit: u32) -> Chunk {
        assert_eq!(self.state, SequenceState::Prefill);
        let slot = self.slot.expect("it has joined");
        let start = self.prefilled;
        let end = if self.unqueued() <= most { self.history } else { start + most / unit * unit };
        assert!(end > start, "a chunk of {most} tokens, at least {unit} are needed");
        self.prefilled = end;
        let last = end == self.history;
        if last {
            self.state = SequenceState::Decode;
            self.drawn = 1;
        }
        let tokens = self.tokens[start as usize..end as usize].to_vec();
        let next = self.tokens.get(end as usize).copied();
        Chunk { slot, tokens, start, last, next, restore: self.restore.take(), keeps: Vec::new(), score: self.score }
    }

    /// Tokens that the device may still be asked to draw.
    pub fn undrawn(&self) -> u32 {
        let before = self.history - self.prompt_tokens;
        self.max_tokens - before - self.drawn
    }

    /// Whether it could join: what it may draw first is known.
    pub fn may_join(&self) -> bool {
        self.constraint.as_ref().is_none_or(|constraint| constraint.next == self.output_tokens())
    }

    /// The number of the next output token that the device is asked to draw, where its mask is still to come.
    pub fn awaited_mask(&self) -> Option<u32> {
        let next = self.history - self.prompt_tokens + self.drawn;
        self.constraint.as_ref().filter(|constraint| constraint.next != next).map(|_| next)
    }

    /// Whether its next step is not queued before its mask is there, which it is not.
    pub fn waits_apart(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constrained::waits_apart) && self.awaited_mask().is_some()
    }

    /// When the mask that is being found out for it is late.
    pub fn mask_deadline(&self) -> Option<Instant> {
        Some(self.constraint.as_ref()?.asked? + MASK_PATIENCE)
    }

    /// Whether it can have a row of the next decode step: who has ended is leaving.
    pub fn decodes(&self) -> bool {
        self.state == SequenceState::Decode && self.undrawn() > 0
    }

    /// Pages to add so that `tokens` more that are drawn have somewhere to be written.
    pub fn pages_missing(&self, tokens: u32) -> u32 {
        // The token drawn last is written by the step that draws the next one.
        let written = self.history + self.drawn - 1;
        let needed = (written + tokens.min(self.undrawn())).div_ceil(PAGE_TOKENS);
        needed.saturating_sub(self.pages.len() as u32)
    }

    /// The device was asked to draw up to `tokens` more.
    pub fn draw(&mut self, tokens: u32) {
        assert_eq!(self.state, SequenceState::Decode);
        self.drawn += tokens.min(self.undrawn());
    }

    /// Of the tokens that it was asked for it has not drawn so many.
    pub fn undraw(&mut self, tokens: u32) {
        assert!(tokens < self.drawn, "{tokens} of {} tokens were not drawn", self.drawn);
        self.drawn -= tokens;
    }

    /// As others see it.
    pub fn view(&self, now: Instant) -> RequestView {
        let since = |moment: Instant| moment.saturating_duration_since(self.arrived);
        RequestView {
            id: self.request.clone(),
            phase: match self.state {
                SequenceState::Waiting => "waiting",
                SequenceState::Prefill => names::SPAN_PREFILL,
                SequenceState::Decode if self.first_token.is_none() => names::SPAN_PREFILL,
                SequenceState::Decode => names::SPAN_DECODE,
                SequenceState::Leaving => "leaving",
            },
            prompt_tokens: self.prompt_tokens,
            prefilled_tokens: if self.state == SequenceState::Waiting { 0 } else { self.prefilled },
            cached_tokens: self.cached_tokens,
            output_tokens: self.output_tokens(),
            max_tokens: self.max_tokens,
            pages: self.pages.len() as u32,
            preemptions: self.preemptions,
            age: since(now),
            queued: since(self.started.unwrap_or(now)),
            first_token: self.first_token.map(since),
        }
    }

    /// Its phases as of its end at `now`.
    pub fn timings(&self, now: Instant) -> Timings {
        let between = |from: Instant, to: Instant| to.saturating_duration_since(from);
        let Some(started) = self.started else {
            return Timings { queue: between(self.arrived, now), ..Timings::default() };
        };
        let first = self.first_token;
        Timings {
            queue: between(self.arrived, started),
            prefill: between(started, first.unwrap_or(now)),
            decode: match (first, self.last_token) {
                (Some(first), Some(last)) => between(first, last),
                _ => Duration::ZERO,
            },
        }
    }
}

/// Pages that hold `tokens`.
pub fn pages_for(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS)
}
