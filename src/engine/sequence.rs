//! One sequence: its tokens, the slot and pages that it holds on the device, and how far the device was asked to go
//! with it.
//! Not here: which sequence goes next (`scheduler`).

use crate::actors::workers::Cancel;
use crate::engine::page_pool::Content;
use crate::engine::plan::{Chunk, Page, STATE_TOKENS, Slot, SlotParams, StateSlot};
use crate::engine::prefix::PageKey;
use crate::engine::request::{PerToken, Request, Scored, Timings};
use crate::kernels::attention::PAGE_TOKENS;
use crate::model::embedding::Pooling;
use crate::model::grammar::{Grammar, StartedGrammar};
use crate::telemetry::names;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A snapshot of one sample of an unfinished request, for the admin interface and statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestView {
    /// The request's id; for samples after the first, followed by `SAMPLE_MARK` and the sample's index.
    pub id: String,
    /// `waiting`, `prefill`, `decode` or `leaving`.
    pub phase: &'static str,
    /// The number of prompt tokens.
    pub prompt_tokens: u32,
    /// The number of tokens of the history that were queued for prefill, or found in the prefix cache, since the
    /// sequence last joined; 0 while it waits.
    pub prefilled_tokens: u32,
    /// The number of prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// The number of output tokens reported.
    pub output_tokens: u32,
    /// The maximum number of output tokens.
    pub max_tokens: u32,
    /// The number of KV cache pages held.
    pub pages: u32,
    /// How often the sequence lost its pages.
    pub preemptions: u32,
    /// The time since submission.
    pub age: Duration,
    /// The time from submission to the first chunk; until now if the sequence has not started.
    pub queued: Duration,
    /// The time from submission to the first token.
    pub first_token: Option<Duration>,
}

/// Identifies a sequence. Ids grow by one per arrival, so the smaller id is the older sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// The total cost of one phase of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseCost {
    /// The number of tokens computed (prefill) or reported (decode).
    pub tokens: u64,
    /// The number of chunks (prefill) or decode steps.
    pub steps: u64,
    /// The sum over the steps. A prefill step counts with the sequence's share of its tokens; a decode step counts in
    /// full, regardless of how many rows share it.
    pub sum: PerToken,
    /// How often the sequence had lost its pages by the end of the phase.
    pub preemptions: u32,
}

/// The constraint on a sequence's output, and the mask of the next token as far as it is known.
#[derive(Debug)]
pub struct Constrained {
    /// The grammar; `None` while a worker computes what may follow the last token reported.
    pub grammar: Option<Box<Grammar>>,
    /// The mask of output token number `next`.
    pub mask: Arc<[u32]>,
    /// The number, counted from 0, of the output token that `mask` applies to; at most the number of tokens reported.
    pub next: u32,
    /// When the mask that a worker computes now was requested.
    pub asked: Option<Instant>,
    /// How often a mask was late, and how many masks were in time since the last late one.
    pub late: (u32, u32),
    /// Cancels the worker's computation for this sequence.
    pub cancel: Cancel,
}

/// How long a queued step waits for a mask. After that the row without a mask leaves the batch.
pub const MASK_PATIENCE: Duration = Duration::from_millis(30);
/// The number of masks in time after which a row whose mask was late once is queued before its masks are available
/// again. It doubles with each further late mask.
const TRUSTED_AFTER: u32 = 64;

impl Constrained {
    /// Whether a step is only queued when its mask is available, because masks were late recently.
    fn waits_apart(&self) -> bool {
        let (late, in_time) = self.late;
        late > 0 && in_time < TRUSTED_AFTER << (late - 1).min(16)
    }

    /// Takes a mask that was computed, at `now`. It counts as in time if it took less than half of [`MASK_PATIENCE`].
    pub fn answered(&mut self, grammar: Box<Grammar>, mask: Arc<[u32]>, next: u32, now: Instant) {
        if let Some(asked) = self.asked.take()
            && now.saturating_duration_since(asked) < MASK_PATIENCE / 2
        {
            self.late.1 = self.late.1.saturating_add(1);
        }
        (self.grammar, self.mask, self.next) = (Some(grammar), mask, next);
    }

    /// Notes that the mask is late.
    pub fn is_late(&mut self) {
        self.late = (self.late.0 + 1, 0);
    }
}

/// The state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    /// The sequence is in the queue, without slot and pages.
    Waiting,
    /// The sequence holds a slot and the pages of its whole history, of which some chunks are not queued yet.
    Prefill,
    /// The device draws tokens.
    Decode,
    /// The sequence is to leave its slot. It holds the slot and its pages until the last plan that names it is
    /// finished. Then it is removed or, if it has not ended, returns to the queue.
    Leaving,
}

/// Some tokens that a sequence was asked to draw are not reported yet.
#[derive(Clone, Copy, Debug)]
pub struct Unreported;

/// The tokens of a sequence of which a draft model has keys and values.
#[derive(Clone, Copy, Debug)]
enum Drafted {
    /// This many, from the first one on.
    UpTo(u32),
    /// As many as steps with drafts need, and they compute the others.
    All,
}

/// A request in the scheduler. What planning a decode step reads and writes comes first, in two adjacent cache lines: with
/// hundreds of rows, the device waits for its next work as long as these lines take to come.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Sequence {
    /// The id, by arrival.
    pub id: SequenceId,
    /// The slot, held from the first chunk until the sequence is released.
    pub slot: Option<Slot>,
    /// The page table.
    pub pages: Vec<Page>,
    /// The value of a counter that grows with every row of a plan: the sequence with the smallest value has waited
    /// longest for a row.
    pub turn: u64,
    /// The number of tokens (prompt and earlier output) when the sequence last joined.
    history: u32,
    /// The number of tokens that the device was asked to draw since the sequence last joined. Steps with drafts may draw
    /// fewer, so that steps behind them are asked for more than there is room for as long as that is not known.
    drawn: u32,
    /// The length of the prompt.
    pub prompt_tokens: u32,
    /// The maximum number of output tokens; prompt and output fit in the context.
    pub max_tokens: u32,
    /// The state.
    pub state: SequenceState,
    /// `Finished` was sent; later reports on the sequence are dropped.
    pub ended: bool,
    /// Whether the logits of every step are returned: `params.dump_logits`, beside what planning reads.
    dumps_logits: bool,
    /// The constraint on its output, if any.
    pub constraint: Option<Box<Constrained>>,
    /// The prompt, then the output reported so far, apart from tokens that the scheduler has not taken yet.
    pub tokens: Vec<u32>,
    /// When the first token was reported.
    pub first_token: Option<Instant>,

    /// When the last token was reported.
    pub last_token: Option<Instant>,
    /// The cost after the first token.
    pub decode_cost: PhaseCost,
    /// The number of tokens that were drafted for the sequence.
    pub drafted_tokens: u32,
    /// The number of drafted tokens that were accepted as output.
    pub accepted_tokens: u32,

    /// The request's id.
    pub request: String,
    /// The priority; higher goes first.
    pub priority: i32,
    /// The request's deadline.
    pub deadline: Option<Instant>,
    /// The parameters at arrival; `join` derives the slot's parameters from them.
    params: SlotParams,
    /// The number of alternatives per prompt token, while some prompt tokens are not scored yet; otherwise `None`.
    score: Option<u32>,
    /// The number of prompt tokens whose scores were reported, including the first token, which has none.
    scored: u32,
    /// How the prompt is embedded, if it is; then no token is drawn.
    pooling: Option<Pooling>,
    /// The sum of the states pooled since the sequence last joined, and their number.
    pooled: (Vec<f32>, u32),
    /// Set if the sequence was passed over too often: until its end it ranks before all sequences that are not
    /// shielded.
    pub shielded: bool,
    /// The pages of layers with a sliding window, if these have pages of their own: those of the tokens that the sequence's
    /// unfinished and later tokens see.
    pub window: Vec<Page>,
    /// The index in the page table of the first of them.
    pub window_first: u32,
    /// The keys of the full pages of `tokens`, as far as they were needed.
    keys: Vec<PageKey>,
    /// The root of the key chain.
    root: PageKey,
    /// Whether the root depends on a salt.
    salted: bool,
    /// The index of the first page in `pages` whose content the pool does not know yet.
    unnamed: u32,
    /// The number of those tokens of `history` that were queued for prefill or found in the prefix cache.
    prefilled: u32,
    /// Whether a chunk was queued since the sequence last joined whose size was that of a lone prompt's.
    pub lone: bool,
    /// The snapshot whose recurrent state the next chunk starts from, if that is not the slot's own cell.
    restore: Option<StateSlot>,
    /// The number of tokens whose pages were found, rounded down to a multiple of `STATE_TOKENS`. The tokens of another
    /// sequence were the same up to there, and those of further sequences may be.
    branch: u32,
    /// The number of prompt tokens that were found in the prefix cache when the sequence first joined.
    pub cached_tokens: u32,
    /// The number of its first tokens of which a draft model has keys and values; see `Drafts::catches_up`.
    drafted: Drafted,
    /// The number of its first pages of which the pool knows that.
    drafted_pages: u32,
    /// The time of submission.
    pub arrived: Instant,
    /// When the first chunk was queued.
    pub started: Option<Instant>,
    /// The cost until the first token.
    pub prefill_cost: PhaseCost,
    /// How often the sequence lost its pages.
    pub preemptions: u32,
    /// How often the device was lost while the sequence held a slot.
    pub losses: u32,
}

impl Sequence {
    /// Creates the sequence of a validated request, in the queue.
    pub fn new(id: SequenceId, request: Request, context: u32, eos_ids: &[u32], seed: u64, now: Instant) -> Sequence {
        let prompt_tokens = request.prompt.len() as u32;
        let output = u32::from(request.pooling.is_none());
        assert!(0 < prompt_tokens && prompt_tokens + output <= context, "the request was not validated");
        let room = context - prompt_tokens;
        let max_tokens = match request.pooling {
            None => request.limits.max_tokens.map_or(room, |asked| asked.min(room)),
            // As if the prompt's end had drawn the only token.
            Some(_) => 1,
        };
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
            mask: request.allowed,
        };
        let constrained = |started: StartedGrammar| Constrained {
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
            dumps_logits: request.dump_logits,
            params,
            // A prompt of one token has nothing to score.
            score: request.prompt_logprobs.filter(|_| prompt_tokens > 1 && request.pooling.is_none()),
            scored: 1,
            pooling: request.pooling,
            pooled: (Vec::new(), 0),
            constraint: request.grammar.filter(|_| request.pooling.is_none()).map(constrained).map(Box::new),
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
            window: Vec::new(),
            window_first: 0,
            history: 0,
            prefilled: 0,
            lone: false,
            restore: None,
            branch: 0,
            drawn: 0,
            drafted: Drafted::UpTo(0),
            drafted_pages: 0,
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

    /// Returns the key that orders sequences, best first; no two are equal.
    pub fn rank(&self) -> (Reverse<bool>, Reverse<i32>, SequenceId) {
        (Reverse(self.shielded), Reverse(self.priority), self.id)
    }

    /// Returns the number of output tokens reported.
    pub fn output_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Whether tokens of the decode steps that the device was asked for can be taken into the sequence after later plans are
    /// made: none of them begins its output or is the last one of it, unless the device says so, and neither masks nor the
    /// steps that may be queued follow from them.
    pub fn can_wait(&self) -> bool {
        self.decodes() && self.first_token.is_some() && self.constraint.is_none() && !self.dumps_logits
    }

    /// Whether the device returns the logits of every step. Such a sequence has at most one step queued.
    pub fn dumps_logits(&self) -> bool {
        self.dumps_logits
    }

    /// Whether prompt tokens are still to be scored: then no pages are reused for the sequence, and its chunks are
    /// alone in their plans.
    pub fn is_scored(&self) -> bool {
        self.score.is_some()
    }

    /// Whether every token of the history must be computed, so that no pages can be reused: tokens are scored, or pooled
    /// that a reused page may hold.
    pub fn computes_all(&self) -> bool {
        self.is_scored() || self.pooling.is_some_and(|pooling| pooling != Pooling::Last)
    }

    /// Adds pooled states of a chunk. Returns the prompt's vector when all of its states have come. Chunks are reported
    /// in order, so the sum of a prompt does not depend on what runs beside it.
    pub fn take_pooled(&mut self, sum: Vec<f32>, tokens: u32) -> Option<Box<[f32]>> {
        let pooling = self.pooling?;
        let (total, count) = &mut self.pooled;
        if total.is_empty() {
            *total = sum;
        } else {
            total.iter_mut().zip(sum).for_each(|(total, value)| *total += value);
        }
        *count += tokens;
        if *count < pooling.count(self.prompt_tokens) {
            return None;
        }
        let (total, count) = std::mem::take(&mut self.pooled);
        Some(total.into_iter().map(|value| value / count as f32).collect())
    }

    /// Takes scores of prompt tokens, the first of which is at position `first`. Returns those that were not reported
    /// before.
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

    /// Returns the keys of the pages that can be reused when the sequence joins: all full pages, but never the one that
    /// ends with the last token, which must be computed so that a token can be drawn from it.
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

    /// Sets where the first chunk starts from: the recurrent state of a snapshot, and the number of tokens whose pages
    /// were found.
    pub fn continue_state(&mut self, restore: Option<StateSlot>, branch: u32) {
        self.restore = restore;
        self.branch = branch / STATE_TOKENS * STATE_TOKENS;
    }

    /// Returns the positions at which the chunk's recurrent state is worth a snapshot, the best first, each with the
    /// key of the page before it. The positions are: the last possible one before the end of the history, where the
    /// next turn of a conversation can continue; the one where another sequence has diverged from this one; and the end
    /// of a chunk that is not the last.
    pub fn keep_points(&self, chunk: &Chunk) -> impl Iterator<Item = (u32, PageKey)> + '_ {
        let start = chunk.start;
        let end = start + chunk.tokens.len() as u32;
        let turn = (self.history - 1) / STATE_TOKENS * STATE_TOKENS;
        let whole = if end == self.history { 0 } else { end };
        let points = [turn, self.branch, whole].into_iter();
        let inside = points.filter(move |point| start < *point && *point <= end);
        inside.map(|point| (point, self.keys[(point / PAGE_TOKENS) as usize - 1]))
    }

    /// Returns the number of tokens of the history that are neither queued nor found in the prefix cache.
    pub fn unqueued(&self) -> u32 {
        self.history - self.prefilled
    }

    /// Returns the number of tokens that the sequence has at most.
    pub fn most_tokens(&self) -> u32 {
        self.prompt_tokens + self.max_tokens
    }

    /// Returns the position of the next token that the device will be asked to compute, as far as that is known to be
    /// computed in order: earlier ones are computed, or in unfinished chunks.
    pub fn next_position(&self) -> u32 {
        if self.state == SequenceState::Prefill { self.prefilled } else { self.tokens.len() as u32 - 1 }
    }

    /// Gives up the window pages before the page with index `first`, and returns them.
    pub fn slide(&mut self, first: u32) -> Vec<Page> {
        let count = first.saturating_sub(self.window_first).min(self.window.len() as u32);
        self.window_first = self.window_first.max(first);
        self.window.drain(..count as usize).collect()
    }

    /// Returns the number of window pages to add so that the first `tokens` tokens can be written.
    pub fn window_missing(&self, tokens: u32) -> u32 {
        pages_for(tokens).saturating_sub(self.window_first + self.window.len() as u32)
    }

    /// Returns the number of tokens that are written when `tokens` more are drawn.
    pub fn written_after(&self, tokens: u32) -> u32 {
        // The last token drawn is written by the step that draws the next one.
        let drawn = self.drawn.min(self.most_drawn());
        self.history + drawn - 1 + tokens.min(self.undrawn())
    }

    /// Takes a slot and the pages of the whole history, of which the first `found` already hold their tokens. Returns
    /// the slot's parameters, and the tokens that no chunk contains but that the penalties count or, with `history`, that
    /// the executor must know.
    pub fn join(&mut self, slot: Slot, pages: Vec<Page>, found: u32, history: bool) -> (SlotParams, Vec<u32>) {
        assert_eq!(self.state, SequenceState::Waiting);
        assert!(self.slot.is_none() && self.pages.is_empty());
        self.state = SequenceState::Prefill;
        self.slot = Some(slot);
        self.pages = pages;
        self.unnamed = found;
        self.history = self.tokens.len() as u32;
        self.prefilled = found * PAGE_TOKENS;
        assert!(self.prefilled < self.history, "nothing is left to compute");
        self.drawn = 0;
        self.lone = false;
        self.drafted = Drafted::UpTo(0);
        self.drafted_pages = 0;
        self.pooled = (Vec::new(), 0);
        let generated = self.output_tokens();
        if self.started.is_none() {
            self.cached_tokens = self.prefilled;
        }
        let params = SlotParams {
            generated,
            max_tokens: self.max_tokens - generated,
            min_tokens: self.params.min_tokens.saturating_sub(generated),
            mask: match &self.constraint {
                Some(constraint) => Some(Arc::clone(&constraint.mask)),
                None => self.params.mask.clone(),
            },
            ..self.params.clone()
        };
        let counted = if params.sampling.has_penalties() || history { self.prefilled } else { 0 };
        (params, self.tokens[..counted as usize].to_vec())
    }

    /// Returns the pages whose content has become final since the last call: those that queued chunks fill, and those
    /// that hold only reported tokens. Each comes with the window page of the same tokens, if the sequence has it.
    pub fn newly_full(&mut self) -> impl Iterator<Item = (Page, Option<Page>, Content)> {
        let written = match self.state {
            SequenceState::Prefill => self.prefilled,
            // The last token reported is written by the step that draws the next one.
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
            let window = (index as u32).checked_sub(self.window_first);
            let window = window.and_then(|index| self.window.get(index as usize).copied());
            (self.pages[index], window, content)
        })
    }

    /// Returns the index of the first page that steps which are not queued yet may still write.
    pub fn first_open_page(&self) -> u32 {
        let drawn = self.drawn.clamp(1, self.most_drawn());
        let queued = if self.state == SequenceState::Prefill { self.prefilled } else { self.history + drawn - 1 };
        queued / PAGE_TOKENS
    }

    /// Returns slot, pages and window pages, which the caller must release. The sequence counts as waiting again.
    pub fn leave(&mut self) -> (Option<Slot>, Vec<Page>, Vec<Page>) {
        self.state = SequenceState::Waiting;
        self.unnamed = 0;
        self.window_first = 0;
        (self.slot.take(), std::mem::take(&mut self.pages), std::mem::take(&mut self.window))
    }

    /// Returns the position after the chunk that [`Sequence::next_chunk`] would return.
    pub fn chunk_end(&self, most: u32, unit: u32) -> u32 {
        if self.unqueued() <= most { self.history } else { self.prefilled + most / unit * unit }
    }

    /// Returns the next chunk of the history with at most `most` tokens; a chunk that is not the last has a multiple of
    /// `unit` tokens. The chunk counts as queued from now on.
    pub fn next_chunk(&mut self, most: u32, unit: u32) -> Chunk {
        assert_eq!(self.state, SequenceState::Prefill);
        let slot = self.slot.expect("it has joined");
        let start = self.prefilled;
        let end = self.chunk_end(most, unit);
        assert!(end > start, "a chunk of {most} tokens, at least {unit} are needed");
        self.prefilled = end;
        let last = end == self.history;
        if last {
            self.state = SequenceState::Decode;
            self.drawn = 1;
        }
        let tokens = self.tokens[start as usize..end as usize].to_vec();
        let next = self.tokens.get(end as usize).copied();
        let pooled = match self.pooling {
            None => 0..0,
            Some(pooling) => pooling.pooled(start, end, self.history),
        };
        let pooled = if pooled.is_empty() { 0..0 } else { pooled.start - start..pooled.end - start };
        let last = last && self.pooling.is_none();
        let (restore, keeps, score) = (self.restore.take(), Vec::new(), self.score);
        Chunk { slot, tokens, start, last, next, restore, keeps, score, pooled }
    }

    /// Notes of a sequence that has just joined that a draft model has keys and values of its first `pages` pages.
    pub fn finds_drafted(&mut self, pages: u32) {
        self.drafted = Drafted::UpTo(pages * PAGE_TOKENS);
        self.drafted_pages = pages;
    }

    /// Notes that a draft model computes keys and values of the tokens from `start` up to `end`, if it has those before.
    pub fn drafts_through(&mut self, start: u32, end: u32) {
        if matches!(self.drafted, Drafted::UpTo(count) if count >= start) {
            self.drafted = Drafted::UpTo(end);
        }
    }

    /// Notes that steps with drafts are queued for the sequence, or steps without.
    pub fn drafts_now(&mut self, with: bool) {
        self.drafted = match with {
            true => Drafted::All,
            false => Drafted::UpTo(self.drafted_tokens_known()),
        };
    }

    /// Notes that steps with drafts, which drew the last `drawn` reported tokens, were run again without drafts: what a draft
    /// model has computed in them may be anything.
    pub fn drafts_failed(&mut self, drawn: u32) {
        let before = (self.tokens.len() as u32).saturating_sub(drawn + 2);
        self.drafted = Drafted::UpTo(self.drafted_tokens_known().min(before));
    }

    /// Returns the number of reported tokens of which a draft model has keys and values at least.
    fn drafted_tokens_known(&self) -> u32 {
        match self.drafted {
            Drafted::UpTo(count) => count,
            // A step with drafts computes those of the last two tokens that it finds.
            Drafted::All => (self.tokens.len() as u32).saturating_sub(2),
        }
    }

    /// Returns the tokens that a draft model must compute before a step with drafts: their first position, and the tokens.
    /// `None` if there are none.
    ///
    /// # Errors
    /// If not all of them are known yet.
    pub fn undrafted(&self) -> Result<Option<(u32, &[u32])>, Unreported> {
        let Drafted::UpTo(count) = self.drafted else { return Ok(None) };
        let (all, known) = (self.history + self.drawn, self.tokens.len() as u32);
        match all.saturating_sub(2) {
            needed if needed <= count => Ok(None),
            _ if known < all => Err(Unreported),
            needed => Ok(Some((count, &self.tokens[count as usize..needed as usize]))),
        }
    }

    /// Returns the pages of which a draft model has all keys and values since the last call.
    pub fn newly_drafted(&mut self) -> impl Iterator<Item = Page> {
        let full = self.drafted_tokens_known() / PAGE_TOKENS;
        let first = self.drafted_pages;
        self.drafted_pages = first.max(full);
        self.pages[..full as usize].iter().skip(first as usize).copied()
    }

    /// Returns the number of tokens that the device may still be asked to draw.
    pub fn undrawn(&self) -> u32 {
        self.most_drawn().saturating_sub(self.drawn)
    }

    /// Returns the maximum number of tokens that the device draws since the sequence last joined.
    fn most_drawn(&self) -> u32 {
        self.max_tokens - (self.history - self.prompt_tokens)
    }

    /// Whether the sequence can join: the mask of its next token is known, if it needs one.
    pub fn may_join(&self) -> bool {
        self.constraint.as_ref().is_none_or(|constraint| constraint.next == self.output_tokens())
    }

    /// Returns the number of the next output token that the device will be asked to draw, if its mask is not available
    /// yet.
    pub fn awaited_mask(&self) -> Option<u32> {
        let next = self.history - self.prompt_tokens + self.drawn;
        self.constraint.as_ref().filter(|constraint| constraint.next != next).map(|_| next)
    }

    /// Whether the next step must not be queued now, because its mask is not available and masks were late recently.
    pub fn waits_apart(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| constraint.waits_apart()) && self.awaited_mask().is_some()
    }

    /// Returns the time at which the mask that is being computed is late.
    pub fn mask_deadline(&self) -> Option<Instant> {
        Some(self.constraint.as_ref()?.asked? + MASK_PATIENCE)
    }

    /// Whether the sequence can have a row in the next decode step. A sequence that has ended is leaving and cannot.
    pub fn decodes(&self) -> bool {
        self.state == SequenceState::Decode && self.undrawn() > 0
    }

    /// Returns the number of pages to add so that `tokens` more drawn tokens can be written.
    pub fn pages_missing(&self, tokens: u32) -> u32 {
        pages_for(self.written_after(tokens)).saturating_sub(self.pages.len() as u32)
    }

    /// Returns the number of drawn tokens that can still be written to the sequence's pages.
    pub fn room(&self) -> u32 {
        self.pages.len() as u32 * PAGE_TOKENS - self.written_after(0)
    }

    /// Notes that the device was asked to draw up to `tokens` more.
    pub fn draw(&mut self, tokens: u32) {
        assert_eq!(self.state, SequenceState::Decode);
        self.drawn += tokens;
    }

    /// Subtracts `tokens` that the device was asked to draw but has not drawn, because drafts were rejected.
    pub fn undraw(&mut self, tokens: u32) {
        assert!(tokens < self.drawn, "{tokens} of {} tokens were not drawn", self.drawn);
        self.drawn -= tokens;
    }

    /// Returns the state of the sequence for display.
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

    /// Returns the durations of the phases if the sequence ends at `now`.
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

/// Returns the number of pages that hold `tokens` tokens.
pub fn pages_for(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS)
}
