//! The scheduler: decides what runs next. A pure state machine: arrivals, aborts, reports and the current time go in;
//! plans and events come out.
//! Not here: threads, channels, devices, reading a clock.
//!
//! - Higher priority goes first, and within a priority the older sequence. One admission in `PASSED_OVER_MAX + 1` goes
//!   to the sequence that has waited longest, which until its end ranks before all others that did not get their slots
//!   this way, so that no sequence waits forever.
//! - A sequence joins with the pages of its whole history. Pages for decoding are taken as the run-ahead needs them. If
//!   there are too few, the run-ahead is shortened first; then the youngest sequence of the lowest priority is
//!   preempted: it loses its pages and is computed again later.
//! - A prefill plan contains chunks of as many prompts as fit in its tokens, and alternates with decode plans while
//!   there are both. It then lasts at most `PROMPT_STEPS` decode steps (`LONE_PROMPT_STEPS` for a single prompt that
//!   takes several plans), or longer if many prompts wait (`MOST_ROWS_PER_PROMPT`). So one prompt hardly delays the
//!   rows that decode, and many prompts do not wait for a few rows.
//! - On an executor with mixed steps, prefill plans do not alternate with decode plans: the rows decode in them, and so wait
//!   for one plan instead of two. Rows that may draft, and rows beside one whose logits are read back, take turns.
//! - A full page gets a key, made of its tokens and all tokens before them, as soon as a chunk that fills it is planned
//!   or its tokens are reported. A sequence that joins later with the same prefix, even in the same plan, shares the
//!   page. A page with a key is never written again, so nothing is ever copied; at least one token of a sequence is
//!   always computed.
//! - Two plans are in flight, so that the device has the next one when it finishes the first. A decode plan has as many
//!   steps as take `PLAN_TIME`, or as many as draw `PLAN_TOKENS` tokens if that takes at most `PLAN_TIME_MAX`, and at
//!   least `PLAN_STEPS_MIN` if there is room, so that even a slow device gets less than one submission per token.
//! - The mask of a constrained sequence can only be computed after its last token is known. Its next step is queued
//!   before that, as a plan of one step, and draws for all of its rows when the masks are available. Only decode steps
//!   are queued behind such a plan; a prompt waits until its masks are available. A row whose mask is late leaves
//!   the batch, so that the step continues without it, and returns when its mask is available.
//! - Tokens of decode steps that end nothing are taken into their sequences only after the next plan is made, and so is what
//!   decode plans ask of most sequences, so that the device gets its plan earlier (`Scheduler::settle`).
//! - A slot and its pages become free when the last plan that names the slot is finished.

mod decoding;
mod preemption;
mod prompts;

use crate::engine::pace::Pace;
use crate::engine::page_pool::PagePool;
use crate::engine::plan::{
    Capacity, Change, Done, PLANS_IN_FLIGHT, Page, PageTable, PlanReport, PooledChunk, STATE_TOKENS, Sampled,
    SampledDetails, ScoredChunk, Slot, StepPlan, Ticket,
};
use crate::engine::request::{Event, FinishReason, Finished, PerToken, Request, Token};
use crate::engine::sequence::{PhaseCost, RequestView, Sequence, SequenceId, SequenceState, pages_for};
use crate::engine::sequence_map::SequenceMap;
use crate::engine::snapshots::Snapshots;
use crate::engine::speculation::Speculation;
use crate::engine::window::WindowPages;
use crate::kernels::attention::PAGE_TOKENS;
use crate::model::grammar::{Grammar, GrammarError, Next};
use crate::model::split_mix::split_mix;
use crate::telemetry::names;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// The maximum number of consecutive admissions that pass over the sequence that has waited longest; then it is
/// admitted next.
pub const PASSED_OVER_MAX: u32 = 7;
/// The number of device losses while a sequence held a slot after which the sequence is ended, because it may be the
/// cause.
const MOST_LOSSES: u32 = 2;

/// The configuration of a scheduler.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The executor's capacity.
    pub capacity: Capacity,
    /// The maximum length of prompt and output together, in tokens; at most `Capacity::usable_context`.
    pub context: u32,
    /// The model's end-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// The device's name, for `Started`.
    pub device_name: String,
    /// The device's UUID, for `Started`.
    pub device_uuid: String,
    /// The replica's name, for `Started`.
    pub replica: String,
    /// The seed from which seeds of requests without one are generated.
    pub seed: u64,
    /// Whether the prefix cache is used, if the executor's pages can be reused (`Capacity::causal`).
    pub prefix_cache: bool,
}

/// An output of the scheduler.
#[derive(Clone, Debug)]
pub enum SchedulerOutput {
    /// An event for the request's sink.
    Event(SequenceId, Event),
    /// The prefill phase ended: the prompt is computed (sent before the first token), or the request ended before that.
    Prefilled(SequenceId, Box<PhaseCost>),
    /// The decode phase ended (sent before `Finished`).
    Decoded(SequenceId, Box<PhaseCost>),
}

/// A command of the scheduler concerning constraints. Commands must be carried out in order.
#[derive(Clone, Debug)]
pub enum ConstraintCommand {
    /// Compute what may follow the token; `constrained` takes the result.
    Take(SequenceId, Box<Grammar>, u32),
    /// For the executor: set the tokens that a slot may draw next.
    Mask(Slot, Arc<[u32]>),
    /// For the executor: all masks of a plan are set.
    Release(Ticket),
}

/// The steps that a report completed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Completed {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// The number of rows of the batch (decode) or of prompt tokens of the plan (prefill).
    pub rows: u32,
    /// The number of steps reported.
    pub steps: u32,
    /// The cost, summed over the steps.
    pub cost: PerToken,
}

/// How busy an engine is, and what it has done: counts of sequences, requests, pages and tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// The number of sequences that hold a slot, including those that have ended and wait for their last plan.
    pub running: u32,
    /// The number of sequences in the queue, including those that wait for a mask.
    pub waiting: u32,
    /// The number of unfinished requests that are not in the queue.
    pub admitted: u32,
    /// The number of pages held.
    pub pages_used: u32,
    /// The number of pages.
    pub pages_total: u32,
    /// The number of free pages that a prompt can still reuse.
    pub pages_cached: u32,
    /// The number of prompt tokens of the requests that have started, since the start.
    pub prompt_tokens: u64,
    /// The number of those tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// The number of preemptions since the start: how often a sequence lost its pages.
    pub preemptions: u64,
    /// The number of draft tokens verified since the start.
    pub drafted_tokens: u64,
    /// The number of draft tokens accepted since the start.
    pub accepted_tokens: u64,
    /// The number of snapshots of recurrent state that a prompt can reuse.
    pub snapshots: u32,
}

/// What is outstanding in a slot: the few bytes that a report of a decode step and the next decode plan read and write of
/// each row.
#[derive(Clone, Copy, Debug, Default)]
struct Outstanding {
    /// The number of unfinished plans that name the slot.
    in_flight: u32,
    /// The number of reported tokens that are not in the holder's sequence yet; see [`Scheduler::settle`].
    unsettled: u32,
    /// Set while reports and decode plans need not read the holder's sequence; see [`Sequence::can_wait`]. The holder decodes
    /// then, and does not leave the slot.
    waits: Option<Waits>,
}

/// What decode plans may ask of a sequence without reading it.
#[derive(Clone, Copy, Debug)]
struct Waits {
    /// The number of tokens that the device may still be asked to draw: [`Sequence::undrawn`], less `asked`.
    undrawn: u32,
    /// The number of tokens that can still be written to the sequence's pages.
    room: u32,
    /// The number of these pages.
    pages: u32,
    /// The number of tokens that the device was asked to draw and that the sequence does not know of yet; see
    /// [`Scheduler::settle`].
    asked: u32,
    /// [`Sequence::turn`] after these.
    turn: u64,
    /// The page that was taken for these, if any, which the sequence does not know of either.
    page: Option<Page>,
}

impl Waits {
    /// Returns what is known of a sequence that can wait.
    fn of(sequence: &Sequence) -> Waits {
        Waits {
            undrawn: sequence.undrawn(),
            room: sequence.room(),
            pages: sequence.pages.len() as u32,
            asked: 0,
            turn: sequence.turn,
            page: None,
        }
    }

    /// Returns the number of pages to add so that `tokens` more can be written.
    fn pages_missing(&self, tokens: u32) -> u32 {
        pages_for(tokens.min(self.undrawn).saturating_sub(self.room))
    }

    /// Whether `tokens` more can be asked for: the sequence can wait afterwards, and needs at most one page.
    fn can_ask(&self, tokens: u32) -> bool {
        tokens < self.undrawn && self.pages_missing(tokens) <= u32::from(self.page.is_none())
    }

    /// Asks for `tokens` more in a plan's turn, with the page for them that is missing, if one is. Returns that page's index.
    fn ask(&mut self, tokens: u32, turn: u64, page: Option<Page>) -> u32 {
        let index = self.pages;
        if page.is_some() {
            self.page = page;
            self.pages += 1;
            self.room += PAGE_TOKENS;
        }
        self.undrawn -= tokens;
        self.room -= tokens;
        self.asked += tokens;
        self.turn = turn;
        index
    }
}

/// Reported tokens that are not in their sequences yet.
#[derive(Debug)]
struct Unsettled {
    /// The tokens, all of decode steps without drafts.
    tokens: Vec<Sampled>,
    /// The steps that drew them, among others.
    completed: Completed,
    /// When they were reported.
    at: Instant,
}

/// A submitted plan with work.
#[derive(Debug, Default)]
struct Flight {
    /// The ticket, set by `submitted`.
    ticket: Ticket,
    /// The number of tokens of each chunk; empty for decode plans.
    chunks: Vec<u32>,
    /// The position of the first token of each chunk.
    starts: Vec<u32>,
    /// The slots that the plan names, each once: those of the chunks, then those that decode.
    slots: Vec<Slot>,
    /// Whether a draft model catches up.
    catches_up: bool,
    /// The number of rows (decode) or tokens (prefill, catching up).
    rows: u32,
    /// The number of steps not reported yet.
    steps_left: u32,
    /// The slots whose masks are not available yet, each with the number of the output token that the mask is for.
    awaits: Vec<(Slot, u32)>,
    /// The number of drafts per step and slot.
    drafts: u32,
    /// With drafts: the number of tokens that each slot may draw, and the numbers of tokens that were reported, by
    /// slot.
    reserved: u32,
    drawn: Vec<u32>,
}

impl Flight {
    fn is_prefill(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Returns the slots that decode, in a prefill plan or a decode plan.
    fn decoding(&self) -> &[Slot] {
        &self.slots[self.chunks.len()..]
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    setup: Setup,
    pool: PagePool,
    /// The pages of layers with a sliding window, if these have pages of their own.
    window: Option<WindowPages>,
    /// The snapshots, for models with recurrent state.
    snapshots: Option<Snapshots>,
    speculation: Speculation,
    /// The numbers of decode plans and of prefill plans for which a size was chosen; now and then a plan tries a size
    /// that seems worse.
    choices: (u64, u64),
    /// All sequences that have not ended, and those that have ended and still hold a slot.
    sequences: SequenceMap<Sequence>,
    /// Sequences that have not ended, by the request's id.
    by_request: HashMap<String, SequenceId>,
    /// Sequences that have not ended and have a deadline.
    deadlines: BTreeSet<(Instant, SequenceId)>,
    /// The sequences in the queue, best first.
    ranked: BTreeSet<(Reverse<i32>, SequenceId)>,
    /// The sequences in the queue, oldest first.
    waiting: BTreeSet<SequenceId>,
    /// Sequences that hold nothing and are not in the queue, because the mask of their next token is not available yet.
    unmasked: BTreeSet<SequenceId>,
    /// The number of consecutive admissions that passed over the oldest sequence in the queue.
    passed_over: u32,
    /// The sequence that holds each slot.
    slots: Vec<Option<SequenceId>>,
    /// What is outstanding in each slot.
    outstanding: Vec<Outstanding>,
    /// Slots that the next plan tells the device to leave.
    leaves: Vec<Slot>,
    /// The submitted and unfinished plans, in order.
    flights: VecDeque<Flight>,
    /// The plan that `next_plan` returned, until `submitted` sets its ticket.
    unnamed: Option<Flight>,
    /// Whether the last plan was a prefill plan.
    prefilled_last: bool,
    /// The number of plans for which prefill and decode plans take turns, although rows could decode in prefill plans.
    turns_left: u32,
    /// The number of prefill plans in a row in which rows decode.
    mixed_in_a_row: u32,
    /// Whether the last plan that was not a prefill plan was a draft model's catching up.
    caught_up_last: bool,
    /// The reported tokens that are not in their sequences yet, in order.
    unsettled: Vec<Unsettled>,
    outputs: Vec<SchedulerOutput>,
    commands: Vec<ConstraintCommand>,
    next_id: u64,
    turns: u64,
    preemptions: u64,
    drafted_tokens: u64,
    accepted_tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    seed: u64,
}

impl Capacity {
    /// Returns the maximum length of prompt and output together that fits in the pages and, if a prompt cannot be divided,
    /// in a step, in tokens.
    pub fn usable_context(&self) -> u32 {
        let step = if self.causal { u32::MAX } else { self.prefill_chunk };
        self.context.min(self.pages.saturating_mul(PAGE_TOKENS)).min(step)
    }
}

impl Scheduler {
    /// Creates a scheduler without requests.
    pub fn new(mut setup: Setup) -> Scheduler {
        // What a page holds does not follow from the tokens up to it.
        setup.prefix_cache &= setup.capacity.causal;
        let capacity = &setup.capacity;
        assert!(setup.context <= capacity.usable_context(), "a context longer than pages or a step hold");
        assert!(capacity.slots > 0 && capacity.prefill_chunk > 0 && capacity.prompts > 0 && capacity.run_ahead > 0);
        assert!(!capacity.buckets.is_empty() && capacity.buckets.is_sorted());
        let Capacity { prompts, sequences, .. } = *capacity;
        assert!(sequences >= prompts, "{sequences} sequences of a step with {prompts} prompts");
        assert!(capacity.causal || capacity.mixed_steps.is_none(), "mixed steps of an executor that draws nothing");
        let chunk = capacity.prefill_chunk;
        assert!(capacity.snapshots.is_none() || chunk >= STATE_TOKENS, "state cannot be kept in chunks of {chunk}");
        Scheduler {
            snapshots: capacity.snapshots.map(|count| Snapshots::new(capacity.slots, count)),
            speculation: Speculation::new(capacity.drafts),
            choices: (0, 0),
            pool: PagePool::new(capacity.pages),
            window: WindowPages::new(capacity),
            sequences: SequenceMap::default(),
            by_request: HashMap::new(),
            deadlines: BTreeSet::new(),
            ranked: BTreeSet::new(),
            waiting: BTreeSet::new(),
            unmasked: BTreeSet::new(),
            passed_over: 0,
            slots: vec![None; capacity.slots as usize],
            outstanding: vec![Outstanding::default(); capacity.slots as usize],
            leaves: Vec::new(),
            flights: VecDeque::new(),
            unnamed: None,
            prefilled_last: false,
            turns_left: 0,
            mixed_in_a_row: 0,
            caught_up_last: false,
            unsettled: Vec::new(),
            outputs: Vec::new(),
            commands: Vec::new(),
            next_id: 0,
            turns: 0,
            preemptions: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            seed: setup.seed,
            setup,
        }
    }

    /// Adds a validated request, whose id must differ from those of all unfinished requests. Returns the id of its
    /// sequence.
    pub fn arrive(&mut self, request: Request, now: Instant) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let seed = split_mix(&mut self.seed);
        let sequence = Sequence::new(id, request, self.setup.context, &self.setup.eos_ids, seed, now);
        let before = self.by_request.insert(sequence.request.clone(), id);
        assert!(before.is_none(), "request id \"{}\" is in use", sequence.request);
        if let Some(deadline) = sequence.deadline {
            self.deadlines.insert((deadline, id));
        }
        self.waiting.insert(id);
        self.ranked.insert((Reverse(sequence.priority), id));
        self.sequences.insert(id, sequence);
        id
    }

    /// Ends a request as aborted; unknown ids are ignored.
    pub fn abort(&mut self, request: &str, now: Instant) {
        if let Some(&id) = self.by_request.get(request) {
            self.end(id, FinishReason::Aborted, now);
        }
    }

    /// Ends a sequence as aborted unless it has ended.
    pub fn abort_sequence(&mut self, id: SequenceId, now: Instant) {
        if self.sequences.get(id).is_some_and(|sequence| !sequence.ended) {
            self.end(id, FinishReason::Aborted, now);
        }
    }

    /// Ends every request whose deadline has passed.
    pub fn expire(&mut self, now: Instant) {
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if now < deadline {
                break;
            }
            self.end(id, FinishReason::DeadlineExceeded, now);
        }
    }

    /// Removes rows with late masks from the batch, so that the plans that wait for these masks continue without them, and
    /// so that sequences that wait for a slot get one.
    pub fn give_up_late_masks(&mut self, now: Instant) {
        // Each sequence once: two plans may wait for the same one.
        let late: BTreeSet<SequenceId> =
            self.awaited().filter(|(_, deadline)| *deadline <= now).map(|(sequence, _)| sequence.id).collect();
        for id in late {
            let sequence = self.sequences.get_mut(id).expect("a sequence that holds a slot is known");
            if let Some(constraint) = &mut sequence.constraint {
                constraint.is_late();
            }
            sequence.preemptions += 1;
            self.preemptions += 1;
            self.leave(id, true);
        }
    }

    /// Returns the sequences whose masks others wait for, with the time at which the mask that is being computed is late:
    /// those that have a row in a plan that waits for it, and, on a device without gates, those that hold a slot in no plan
    /// while others wait for a slot.
    fn awaited(&self) -> impl Iterator<Item = (&Sequence, Instant)> {
        let slots = self.flights.iter().flat_map(|flight| &flight.awaits).map(|(slot, _)| *slot);
        let planned = slots.filter_map(|slot| self.sequences.get(self.slots[slot.0 as usize]?));
        let crowded = !self.setup.capacity.gates && !self.waiting.is_empty() && self.slots.iter().all(Option::is_some);
        let unplanned = crowded
            .then(|| self.residents())
            .into_iter()
            .flatten()
            .filter(|sequence| sequence.decodes() && self.is_free(sequence) && sequence.awaited_mask().is_some());
        let sequences = planned.chain(unplanned);
        let running = sequences.filter(|sequence| sequence.state == SequenceState::Decode);
        running.filter_map(|sequence| Some((sequence, sequence.mask_deadline()?)))
    }

    /// Returns the time at which `expire` or `give_up_late_masks` next has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let masks = self.awaited().map(|(_, deadline)| deadline);
        self.deadlines.first().map(|&(deadline, _)| deadline).into_iter().chain(masks).min()
    }

    /// Ends all requests with an error: the device has failed, and no plan will be reported any more.
    pub fn fail(&mut self, why: &str, now: Instant) {
        let unfinished: Vec<SequenceId> = self.by_request.values().copied().collect();
        for id in unfinished.into_iter().collect::<BTreeSet<_>>() {
            self.end(id, FinishReason::Error(why.to_string()), now);
        }
        self.commands.clear();
        for id in self.forget_plans() {
            self.release(id);
        }
    }

    /// Forgets all plans, because none will be reported any more. Returns the sequences that hold a slot; the caller
    /// must release them.
    fn forget_plans(&mut self) -> Vec<SequenceId> {
        self.settle();
        self.flights.clear();
        self.unnamed = None;
        self.leaves.clear();
        self.outstanding.fill(Outstanding::default());
        self.slots.iter().flatten().copied().collect()
    }

    /// Whether nothing is left to do: there is no sequence, no unfinished plan and no slot to leave.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.flights.is_empty() && self.leaves.is_empty()
    }

    /// Continues after the device was lost and replaced by another one without any state. All unfinished sequences that
    /// hold a slot return to the queue with the tokens reported so far, and the prefix cache is emptied. A sequence
    /// that has held a slot at `MOST_LOSSES` losses ends with the error `why`, because it may be the cause.
    pub fn restart(&mut self, why: &str, now: Instant) {
        // Grammar computations do not depend on the device.
        self.commands.retain(|order| matches!(order, ConstraintCommand::Take(..)));
        for id in self.forget_plans() {
            let sequence = self.sequences.get_mut(id).expect("a sequence that holds a slot is known");
            let ended = sequence.ended;
            if !ended {
                sequence.losses += 1;
                sequence.preemptions += 1;
                self.preemptions += 1;
            }
            let ends = !ended && sequence.losses >= MOST_LOSSES;
            self.release(id);
            if ends {
                self.end(id, FinishReason::Error(why.to_owned()), now);
            }
        }
        self.forget_caches();
    }

    /// Empties the prefix cache. Only allowed while no page is held.
    fn forget_caches(&mut self) {
        self.pool.forget();
        if let Some(window) = &mut self.window {
            window.pool.forget();
        }
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.forget();
        }
    }

    /// Returns the sequence that holds a slot.
    pub fn holder_id(&self, slot: Slot) -> Option<SequenceId> {
        self.slots[slot.0 as usize]
    }

    /// Returns all requests that have not ended, oldest first.
    pub fn views(&self, now: Instant) -> Vec<RequestView> {
        let mut ids: Vec<SequenceId> = self.by_request.values().copied().collect();
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| Some(self.sequences.get(id)?.view(now))).collect()
    }

    /// Returns the current load.
    pub fn load(&self) -> EngineLoad {
        EngineLoad {
            running: self.slots.iter().flatten().count() as u32,
            waiting: (self.waiting.len() + self.unmasked.len()) as u32,
            admitted: (self.by_request.len() - self.waiting.len() - self.unmasked.len()) as u32,
            pages_used: self.pool.used(),
            pages_total: self.setup.capacity.pages,
            pages_cached: self.pool.cached(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            preemptions: self.preemptions,
            drafted_tokens: self.drafted_tokens,
            accepted_tokens: self.accepted_tokens,
            snapshots: self.snapshots.as_ref().map_or(0, Snapshots::used),
        }
    }

    /// Empties the prefix cache if no request runs or waits and no plan is unfinished. Returns whether it did.
    pub fn forget_prompts(&mut self) -> bool {
        let idle = self.sequences.is_empty() && self.flights.is_empty();
        if idle {
            self.forget_caches();
        }
        idle
    }

    /// Returns the page pool, to watch which pages can be found in the prefix cache.
    pub fn pool(&mut self) -> &mut PagePool {
        &mut self.pool
    }

    /// Panics if redundant state is inconsistent. Simulations call it after every step; its cost grows with the numbers
    /// of slots and pages, not with the queue.
    pub fn assert_consistent(&self) {
        // The number of sequences that hold each page.
        let none = |pool: &PagePool| vec![0u32; pool.total() as usize];
        let mut held = none(&self.pool);
        let mut held_windows = self.window.as_ref().map(|window| none(&window.pool)).unwrap_or_default();
        let (mut open, mut open_windows, mut shares) = (Vec::new(), Vec::new(), 0);
        let mut ended = 0;
        let unsettled = |slot| self.unsettled.iter().flat_map(|some| &some.tokens).filter(move |s| s.slot == slot);
        for (index, id) in self.slots.iter().enumerate() {
            let Some(id) = id else { continue };
            let sequence = &self.sequences[*id];
            let slot = Slot(index as u32);
            let outstanding = self.outstanding[index];
            assert_eq!(unsettled(slot).count() as u32, outstanding.unsettled, "other tokens of {id:?} wait");
            let leaves = sequence.state == SequenceState::Leaving;
            if let Some(waits) = outstanding.waits {
                assert!(waits.asked > 0 || waits.turn == sequence.turn, "{id:?} waits in another turn");
                assert!(!leaves && sequence.can_wait(), "{id:?} cannot wait");
                let page = u32::from(waits.page.is_some());
                let room = waits.room + waits.asked - page * PAGE_TOKENS;
                let known = (sequence.undrawn(), sequence.room(), sequence.pages.len() as u32);
                assert_eq!(
                    (waits.undrawn + waits.asked, room, waits.pages - page),
                    known,
                    "{id:?} waits with other limits"
                );
                waits.page.into_iter().for_each(|page| held[page.0 as usize] += 1);
            }
            assert_eq!(sequence.slot, Some(slot), "{id:?} holds another slot");
            assert_ne!(sequence.state, SequenceState::Waiting, "{id:?} waits and holds {slot:?}");
            let queued = self.waiting.contains(id) || self.unmasked.contains(id);
            assert!(!queued, "{id:?} is in the queue and holds {slot:?}");
            let live = self.by_request.get(&sequence.request) == Some(id);
            assert_eq!(live, !sequence.ended, "{id:?} has ended and is live, or neither");
            ended += usize::from(sequence.ended);
            let named = self.flights.iter().filter(|flight| flight.slots.contains(&slot));
            assert_eq!(named.count() as u32, outstanding.in_flight, "{id:?} is in other plans");
            assert!(!leaves || outstanding.in_flight > 0, "{id:?} has left and holds {slot:?}");
            sequence.pages.iter().for_each(|page| held[page.0 as usize] += 1);
            assert!(self.window.is_some() || sequence.window.is_empty(), "window pages of a model without any");
            sequence.window.iter().for_each(|page| held_windows[page.0 as usize] += 1);
            if sequence.state != SequenceState::Leaving {
                let first = sequence.first_open_page();
                open.extend(&sequence.pages[first as usize..]);
                let first = first.saturating_sub(sequence.window_first) as usize;
                open_windows.extend(sequence.window.iter().skip(first));
            }
            shares += self.window.as_ref().map_or(0, |window| window.share(sequence.most_tokens()));
        }
        let check = |what: &str, pool: &PagePool, held: &[u32], open: &[Page]| {
            for (page, holders) in (0..).map(Page).zip(held) {
                assert_eq!(*holders, pool.holders(page), "{what}{page:?}: the pool has another number of holders");
            }
            for page in open {
                assert_eq!(held[page.0 as usize], 1, "{what}{page:?} is shared and will be written");
            }
            pool.assert_consistent();
        };
        if let Some(window) = &self.window {
            assert!(window.serves(shares), "sequences with {shares} window pages together");
            check("window ", &window.pool, &held_windows, &open_windows);
        }
        check("", &self.pool, &held, &open);
        let resident = self.slots.iter().flatten().count();
        assert_eq!(self.waiting.len(), self.ranked.len());
        assert!(self.waiting.is_disjoint(&self.unmasked));
        let waiting = self.waiting.len() + self.unmasked.len();
        assert_eq!(resident + waiting, self.sequences.len(), "a sequence is nowhere or twice");
        assert_eq!(resident + waiting - ended, self.by_request.len(), "an ended request is live");
        assert!(self.flights.len() <= PLANS_IN_FLIGHT);
    }

    /// Returns the outputs since the last call, in order.
    pub fn take_outputs(&mut self) -> Vec<SchedulerOutput> {
        self.settle();
        // Reserve as much room for the next step as this one took.
        let room = self.outputs.len();
        std::mem::replace(&mut self.outputs, Vec::with_capacity(room))
    }

    /// Returns the commands since the last call, in order. They must be carried out before the next plan.
    pub fn take_commands(&mut self) -> Vec<ConstraintCommand> {
        std::mem::take(&mut self.commands)
    }

    /// Takes what may follow the last token reported of a sequence, the result of [`ConstraintCommand::Take`].
    pub fn constrained(
        &mut self,
        id: SequenceId,
        grammar: Box<Grammar>,
        next: Result<Next, GrammarError>,
        now: Instant,
    ) {
        let Some(sequence) = self.sequences.get_mut(id).filter(|sequence| !sequence.ended) else { return };
        let mask = match next {
            Ok(Next::Mask(mask)) => mask,
            Ok(Next::Complete) => return self.end(id, FinishReason::Complete, now),
            Err(error) => return self.end(id, FinishReason::Constraint(error), now),
        };
        let output = sequence.output_tokens();
        let constraint = sequence.constraint.as_mut().expect("only a constrained sequence is asked about");
        constraint.answered(grammar, Arc::clone(&mask), output, now);
        if self.unmasked.remove(&id) {
            self.ranked.insert((Reverse(sequence.priority), id));
            self.waiting.insert(id);
        }
        if let (SequenceState::Decode, Some(slot)) = (sequence.state, sequence.slot) {
            self.commands.push(ConstraintCommand::Mask(slot, mask));
            self.has_come(slot, output);
        }
    }

    /// Notes that the masks of a slot for output tokens up to `output` are set, or are not needed any more.
    fn has_come(&mut self, slot: Slot, output: u32) {
        for flight in self.flights.iter_mut().filter(|flight| !flight.awaits.is_empty()) {
            flight.awaits.retain(|&(other, number)| other != slot || number > output);
            if flight.awaits.is_empty() {
                self.commands.push(ConstraintCommand::Release(flight.ticket));
            }
        }
    }

    /// Returns the next plan for the device, if there is one; `submitted` must follow. `pace`: the recent step times.
    pub fn next_plan(&mut self, now: Instant, pace: &Pace) -> Option<StepPlan> {
        assert!(self.unnamed.is_none(), "the last plan was not submitted");
        if self.setup.capacity.drafts.most > 0 {
            // Whether drafts are possible depends on which tokens are known.
            self.settle();
        }
        if self.flights.len() >= PLANS_IN_FLIGHT {
            return None;
        }
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.next_plan();
        }
        let prompt = self.next_prompt();
        if prompt.is_some() {
            self.settle_plans();
        }
        let mixed = prompt.as_ref().filter(|prompt| !self.is_scored(prompt)).and_then(|_| self.mixed_rows(pace));
        if self.flights.iter().any(|flight| !flight.awaits.is_empty()) {
            // Work behind a closed gate holds its resources until the gate opens: few for a decode step, many for a
            // prompt. So only decode steps are queued there. If it is a prompt's turn, it is planned when the gate has
            // opened, and no further decode step goes before it.
            let prompt_is_next = prompt.is_some() && (!self.prefilled_last || mixed.is_some());
            return if prompt_is_next { None } else { self.plan_decode(pace, true) };
        }
        let plan = match (prompt, mixed) {
            // Decode steps that are not finished may draw nothing yet because of a fault.
            (Some(_), Some(_)) if self.flights.iter().any(|flight| !flight.is_prefill()) => None,
            (Some(prompt), Some(rows)) => Some(self.plan_prefill(prompt, &rows, pace, now)),
            (Some(prompt), None) if !self.prefilled_last => Some(self.plan_prefill(prompt, &[], pace, now)),
            (prompt, _) => self.plan_decode(pace, prompt.is_some()).or_else(|| {
                // Decoding may have taken pages that the prompt needed, so the next prompt is determined again.
                let prompt = self.next_prompt()?;
                Some(self.plan_prefill(prompt, &[], pace, now))
            }),
        };
        plan.or_else(|| {
            let changes = self.take_leaves();
            (!changes.is_empty()).then_some(StepPlan { changes, work: None })
        })
    }

    /// Sets the ticket of the plan that `next_plan` has returned last.
    pub fn submitted(&mut self, ticket: Ticket) {
        if let Some(mut flight) = self.unnamed.take() {
            flight.ticket = ticket;
            self.flights.push_back(flight);
        }
    }

    /// Takes a report of the device. Returns `None` if it neither completes a step nor finishes a plan.
    pub fn progress(&mut self, progress: PlanReport, now: Instant) -> Option<Completed> {
        let index = self.flights.iter().position(|flight| flight.ticket == progress.ticket);
        let Some(index) = index else {
            assert!(progress.tokens.is_empty(), "tokens of a plan without work");
            return None;
        };
        let flight = &mut self.flights[index];
        assert!(progress.steps <= flight.steps_left, "more steps reported than queued");
        flight.steps_left -= progress.steps;
        assert!(!progress.finished || flight.steps_left == 0, "a plan finished without all its steps");
        let completed = Completed {
            // A draft model that catches up computes tokens like those of a prompt.
            phase: if flight.is_prefill() || flight.catches_up { names::SPAN_PREFILL } else { names::SPAN_DECODE },
            rows: flight.rows,
            steps: progress.steps,
            cost: progress.cost,
        };
        // The flight is reinserted below, unless it is finished.
        let mut flight = self.flights.remove(index).expect("it was found there");

        if flight.is_prefill() {
            self.charge_prefill(&flight, &completed);
        }
        if let Some(ScoredChunk { slot, first, tokens }) = progress.scored
            && let Some(sequence) = self.holder(slot).filter(|sequence| !sequence.ended)
        {
            let id = sequence.id;
            let tokens = sequence.take_scores(first, tokens);
            if !tokens.is_empty() {
                self.outputs.push(SchedulerOutput::Event(id, Event::Prompt(tokens)));
            }
        }
        for PooledChunk { slot, tokens, sum } in progress.pooled {
            // The sum of a sequence that has lost its place begins anew when it joins again.
            if let Some(sequence) = self.holder(slot).filter(|s| !s.ended && s.state != SequenceState::Leaving) {
                let id = sequence.id;
                if let Some(vector) = sequence.take_pooled(sum, tokens) {
                    self.outputs.push(SchedulerOutput::Event(id, Event::Embedding(vector)));
                    self.end(id, FinishReason::Embedded, now);
                }
            }
        }
        // Windows move with the tokens that are known.
        let may_wait = !flight.is_prefill() && flight.drafts == 0 && self.window.is_none();
        let can_wait = |sampled: &Sampled| {
            may_wait && sampled.done.is_none() && self.outstanding[sampled.slot.0 as usize].waits.is_some()
        };
        // Mostly all of them wait.
        let mut later = progress.tokens;
        let rest = later.split_off(later.iter().position(|sampled| !can_wait(sampled)).unwrap_or(later.len()));
        for sampled in &later {
            debug_assert!(flight.slots.contains(&sampled.slot), "a token of a slot that the plan does not name");
            self.outstanding[sampled.slot.0 as usize].unsettled += 1;
        }
        for sampled in rest {
            debug_assert!(flight.slots.contains(&sampled.slot), "a token of a slot that the plan does not name");
            let outstanding = &mut self.outstanding[sampled.slot.0 as usize];
            if may_wait && outstanding.waits.is_some() && sampled.done.is_none() {
                outstanding.unsettled += 1;
                later.push(sampled);
                continue;
            }
            if outstanding.unsettled > 0 {
                self.unsettled.push(Unsettled { tokens: std::mem::take(&mut later), completed, at: now });
                self.settle();
            }
            if flight.drafts > 0 {
                let index = flight.slots.iter().position(|slot| *slot == sampled.slot);
                flight.drawn[index.expect("a token of a slot that the plan names")] += 1;
            }
            if progress.drafts > 0 {
                self.speculation.note(progress.drafts, sampled.draft);
            }
            let decodes = !flight.is_prefill() || flight.decoding().contains(&sampled.slot);
            self.take_token(sampled, progress.drafts, decodes.then_some(&completed), now);
        }
        if !later.is_empty() {
            self.unsettled.push(Unsettled { tokens: later, completed, at: now });
        }
        let finished = progress.finished;
        if finished {
            for (index, slot) in flight.slots.into_iter().enumerate() {
                let outstanding = &mut self.outstanding[slot.0 as usize];
                outstanding.in_flight -= 1;
                let Outstanding { in_flight, waits, .. } = *outstanding;
                if may_wait && waits.is_some() {
                    continue;
                }
                let id = self.slots[slot.0 as usize].expect("a slot is held until its last plan is finished");
                let sequence = self.sequences.get_mut(id).expect("a sequence that holds a slot is known");
                if flight.drafts > 0 && sequence.state == SequenceState::Decode {
                    sequence.undraw(flight.reserved - flight.drawn[index]);
                }
                let leaves = in_flight == 0 && sequence.state == SequenceState::Leaving;
                if flight.drafts > 0 {
                    if progress.faults > 0 {
                        sequence.drafts_failed(flight.drawn[index]);
                    }
                    self.name_drafted(id);
                }
                if leaves {
                    self.release(id);
                } else {
                    // Others may need the pages of its chunk before it is in a plan again.
                    self.slide_window(id);
                }
            }
        } else {
            self.flights.insert(index, flight);
        }
        (completed.steps > 0 || finished).then_some(completed)
    }

    // ---- reports of the device ----

    /// Charges each sequence with the share of a prefill step that its tokens have in the step.
    fn charge_prefill(&mut self, flight: &Flight, completed: &Completed) {
        for (&slot, &tokens) in flight.slots.iter().zip(&flight.chunks) {
            let Some(sequence) = self.holder(slot) else { continue };
            // The second prefill of a preempted sequence is not part of the time to its first token.
            if sequence.first_token.is_none() && !sequence.ended && completed.steps > 0 {
                let cost = &mut sequence.prefill_cost;
                cost.tokens += u64::from(tokens);
                cost.steps += u64::from(completed.steps);
                cost.sum.add(&completed.cost, f64::from(tokens) / f64::from(completed.rows));
            }
        }
    }

    /// Tells the sequences what decode plans have asked of them, and takes the reported tokens that are not in their sequences
    /// yet. None of them ends its sequence, and decode plans do not depend on them, unless a sequence loses its place; so the
    /// device gets its next plan first.
    pub(super) fn settle(&mut self) {
        self.settle_plans();
        for Unsettled { tokens, completed, at } in std::mem::take(&mut self.unsettled) {
            for sampled in tokens {
                self.outstanding[sampled.slot.0 as usize].unsettled -= 1;
                self.take_token(sampled, 0, Some(&completed), at);
            }
        }
    }

    /// Tells the sequences what decode plans have asked of them.
    fn settle_plans(&mut self) {
        for slot in 0..self.slots.len() as u32 {
            self.settle_asked(Slot(slot));
        }
    }

    /// Tells a slot's holder what decode plans have asked of it.
    fn settle_asked(&mut self, slot: Slot) {
        let Some(waits) = self.outstanding[slot.0 as usize].waits.as_mut().filter(|waits| waits.asked > 0) else {
            return;
        };
        let (asked, page, turn) = (std::mem::take(&mut waits.asked), waits.page.take(), waits.turn);
        let sequence = self.holder(slot).expect("a sequence that waits holds its slot");
        sequence.pages.extend(page);
        sequence.draw(asked);
        sequence.turn = turn;
    }

    /// Takes a drawn token. `drafts`: the number of drafts verified in the step that drew it. `decoded`: the steps of which
    /// one drew it, if its sequence decoded in them; each row is charged with the full cost of a step.
    fn take_token(&mut self, sampled: Sampled, drafts: u32, decoded: Option<&Completed>, now: Instant) {
        let Some(sequence) = self.holder(sampled.slot) else {
            return;
        };
        if sequence.ended {
            return;
        }
        let id = sequence.id;
        if let Some(completed) = decoded.filter(|completed| completed.steps > 0 && sampled.draft == 0) {
            sequence.decode_cost.steps += 1;
            sequence.decode_cost.sum.add(&completed.cost, 1.0 / f64::from(completed.steps));
        }
        if sequence.constraint.is_some() && sequence.state == SequenceState::Leaving {
            // A plan does not wait for the masks of a row that left its place. Tokens drawn for it are dropped and
            // drawn again later.
            return;
        }
        sequence.tokens.push(sampled.id);
        let grammar = sequence.constraint.as_mut().and_then(|constraint| {
            constraint.asked = Some(now);
            constraint.grammar.take()
        });
        let (drafted, accepted) = if sampled.draft > 0 { (0, 1) } else { (drafts, 0) };
        sequence.drafted_tokens += drafted;
        sequence.accepted_tokens += accepted;
        sequence.last_token = Some(now);
        let mut prefilled = None;
        if sequence.first_token.is_none() {
            sequence.first_token = Some(now);
            sequence.prefill_cost.preemptions = sequence.preemptions;
            prefilled = Some(sequence.prefill_cost);
        } else {
            sequence.decode_cost.tokens += 1;
        }
        let complete = sequence.output_tokens() >= sequence.max_tokens;
        // Pages of a sequence that has left its place are not given keys.
        let full =
            (sequence.tokens.len() as u32 - 1).is_multiple_of(PAGE_TOKENS) && sequence.state == SequenceState::Decode;
        self.drafted_tokens += u64::from(drafted);
        self.accepted_tokens += u64::from(accepted);
        let SampledDetails { logprobs, logits } =
            sampled.details.map_or_else(SampledDetails::default, |details| *details);
        let token = Token { index: 0, id: sampled.id, logprobs, logits };
        self.outputs.extend(prefilled.map(|cost| SchedulerOutput::Prefilled(id, Box::new(cost))));
        self.outputs.push(SchedulerOutput::Event(id, Event::Token(token)));
        let reason = match sampled.done {
            Some(Done::Stop) => Some(FinishReason::Stop(sampled.id)),
            Some(Done::Length) => Some(FinishReason::Length),
            None if complete => Some(FinishReason::Length),
            None => None,
        };
        if full {
            self.name_pages(id);
        }
        match (reason, grammar) {
            (Some(reason), _) => self.end_as(id, reason, sampled.done.is_some(), now),
            (None, Some(grammar)) => self.commands.push(ConstraintCommand::Take(id, grammar, sampled.id)),
            (None, None) => {}
        }
    }

    // ---- the ends of sequences ----

    fn end(&mut self, id: SequenceId, reason: FinishReason, now: Instant) {
        self.end_as(id, reason, false, now);
    }

    /// Ends a sequence; the only place where this is done. `stopped`: the device has marked its slot done.
    fn end_as(&mut self, id: SequenceId, reason: FinishReason, stopped: bool, now: Instant) {
        if let Some(slot) = self.sequences[id].slot {
            self.settle_asked(slot);
            if self.outstanding[slot.0 as usize].unsettled > 0 {
                self.settle();
            }
        }
        let sequence = self.sequences.get_mut(id).expect("an ending sequence is known");
        assert!(!sequence.ended, "a sequence ends once");
        sequence.ended = true;
        if let Some(constraint) = &sequence.constraint {
            constraint.cancel.cancel();
        }
        self.by_request.remove(&sequence.request);
        if let Some(deadline) = sequence.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        if sequence.first_token.is_some() {
            sequence.decode_cost.preemptions = sequence.preemptions;
            self.outputs.push(SchedulerOutput::Decoded(id, Box::new(sequence.decode_cost)));
        } else if sequence.started.is_some() {
            sequence.prefill_cost.preemptions = sequence.preemptions;
            self.outputs.push(SchedulerOutput::Prefilled(id, Box::new(sequence.prefill_cost)));
        }
        let finished = Finished {
            index: 0,
            reason,
            prompt_tokens: sequence.prompt_tokens,
            cached_tokens: sequence.cached_tokens,
            output_tokens: sequence.output_tokens(),
            drafted_tokens: sequence.drafted_tokens,
            accepted_tokens: sequence.accepted_tokens,
            timings: sequence.timings(now),
            per_token: sequence.decode_cost.sum.mean(sequence.decode_cost.tokens),
        };
        self.outputs.push(SchedulerOutput::Event(id, Event::Finished(Box::new(finished))));
        match sequence.state {
            SequenceState::Waiting => {
                self.waiting.remove(&id);
                self.unmasked.remove(&id);
                self.ranked.remove(&(Reverse(sequence.priority), id));
                self.sequences.remove(id);
            }
            // The slot was told to leave when the sequence was preempted or its mask was late.
            SequenceState::Leaving => {}
            SequenceState::Prefill | SequenceState::Decode => self.leave(id, !stopped),
        }
    }

    /// Makes a running sequence leave its slot when the last plan that names it is finished. `told`: the next plan tells the
    /// device so.
    fn leave(&mut self, id: SequenceId, told: bool) {
        let sequence = self.sequences.get_mut(id).expect("a sequence that leaves is known");
        sequence.state = SequenceState::Leaving;
        let slot = sequence.slot.expect("a running sequence holds a slot");
        if told {
            self.leaves.push(slot);
        }
        self.has_come(slot, u32::MAX);
        let outstanding = &mut self.outstanding[slot.0 as usize];
        let waits = outstanding.waits.take();
        assert!(waits.is_none_or(|waits| waits.asked == 0), "{id:?} leaves and does not know what it was asked for");
        if outstanding.in_flight == 0 {
            self.release(id);
        }
    }

    /// Frees slot and pages of a sequence that no plan names any more. The sequence is removed or returns to the queue.
    fn release(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(id).expect("a released sequence is known");
        let (slot, pages, window) = sequence.leave();
        // From the last page to the first, because the pages released first are reused first, and the beginning of a
        // prompt stays useful longer than what follows it.
        for page in pages.into_iter().rev() {
            self.pool.release(page);
        }
        if let Some(pool) = self.window.as_mut().map(|window| &mut window.pool) {
            window.into_iter().for_each(|page| pool.release(page));
        }
        if let Some(slot) = slot {
            let holder = self.slots[slot.0 as usize].take();
            assert_eq!(holder, Some(id), "a slot is released by its holder");
            let Outstanding { in_flight, unsettled, .. } = std::mem::take(&mut self.outstanding[slot.0 as usize]);
            assert_eq!((in_flight, unsettled), (0, 0), "plans that name {id:?}, and tokens of it");
        }
        if sequence.ended {
            self.sequences.remove(id);
        } else if sequence.may_join() {
            self.ranked.insert((Reverse(sequence.priority), id));
            self.waiting.insert(id);
        } else {
            // It is kept out of the queue, so that it does not block the sequences behind it.
            self.unmasked.insert(id);
        }
    }

    // ---- window pages ----

    /// Gives back the window pages of a sequence that none of its unfinished and later tokens sees.
    fn slide_window(&mut self, id: SequenceId) {
        let Some(window) = &mut self.window else { return };
        let sequence = self.sequences.get_mut(id).expect("a sequence that holds window pages is known");
        let slot = sequence.slot.expect("a sequence that holds window pages holds a slot");
        let started = self.flights.iter().flat_map(|flight| flight.slots.iter().zip(&flight.starts));
        let unfinished = started.filter(|(other, _)| **other == slot).map(|(_, start)| *start).min();
        let from = unfinished.unwrap_or(u32::MAX).min(sequence.next_position());
        for page in sequence.slide(window.first_seen(from)) {
            window.pool.release(page);
        }
    }

    /// Slides a sequence's window, and takes the pages in which its tokens before `end` are written.
    fn move_window(&mut self, id: SequenceId, end: u32, changes: &mut Vec<Change>) {
        self.slide_window(id);
        let Some(window) = &mut self.window else { return };
        let sequence = self.sequences.get_mut(id).expect("a sequence in a plan is known");
        let slot = sequence.slot.expect("a sequence in a plan holds a slot");
        let missing = sequence.window_missing(end);
        if missing > 0 {
            let first = sequence.window_first + sequence.window.len() as u32;
            let pages =
                window.pool.take(missing).expect("sequences join only if there are enough window pages for all");
            sequence.window.extend_from_slice(&pages);
            changes.push(Change::Pages { slot, table: PageTable::Window, first, pages });
        }
    }

    // ---- helpers ----

    fn residents(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten().map(|&id| &self.sequences[id])
    }

    /// Returns the sequences that hold a slot and whose prompts are not queued to their ends.
    fn prompts(&self) -> impl Iterator<Item = &Sequence> {
        // A sequence that waits decodes.
        let slots = self.slots.iter().zip(&self.outstanding).filter(|(_, outstanding)| outstanding.waits.is_none());
        let sequences = slots.filter_map(|(id, _)| id.as_ref()).map(|id| &self.sequences[*id]);
        sequences.filter(|sequence| sequence.state == SequenceState::Prefill)
    }

    /// Returns the sequence that has a row in the plan that is being made.
    fn row(&self, slot: Slot) -> &Sequence {
        &self.sequences[self.slots[slot.0 as usize].expect("a row has a slot that is held")]
    }

    /// Whether no unfinished plan names a sequence that holds a slot.
    fn is_free(&self, sequence: &Sequence) -> bool {
        sequence.slot.is_some_and(|slot| self.outstanding[slot.0 as usize].in_flight == 0)
    }

    fn holder(&mut self, slot: Slot) -> Option<&mut Sequence> {
        let id = self.slots[slot.0 as usize]?;
        self.sequences.get_mut(id)
    }

    fn take_leaves(&mut self) -> Vec<Change> {
        self.leaves.drain(..).map(|slot| Change::Leave { slot }).collect()
    }

    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }
}

#[cfg(test)]
mod tests;
