//! What runs next. A pure state machine: arrivals, aborts, progress and the clock's reading in;
//! plans and events out. Deliberately absent: threads, channels, devices, reading a clock.
//!
//! - Higher priority goes first, and within a priority who came first. One admission in
//!   `PASSED_OVER_MAX + 1` goes to whoever has waited longest, and nobody takes its pages
//!   again: so nobody waits for ever.
//! - A sequence joins with the pages of its whole history; pages for decoding are taken as the
//!   run-ahead needs them. When there are none, run-ahead is shortened first, then the youngest
//!   of the lowest priority loses its pages and is computed again later.
//! - A prompt plan takes in chunks of as many prompts as its tokens allow, and alternates with decode plans while
//!   there are both. It then lasts at most `PROMPT_STEPS` decode steps, with a lone prompt that takes several plans
//!   `LONE_PROMPT_STEPS`, or longer where many prompts
//!   wait (`MOST_ROWS_PER_PROMPT`): rows hardly notice one prompt, and many prompts do not wait for a few rows.
//! - A full page is named by its tokens and all before them as soon as a chunk that fills it is planned, or its
//!   tokens are reported: whoever joins later with the same beginning, even in the same plan, shares it. Nobody
//!   writes to a page that has a name, so nothing is ever copied; at least one token is always computed.
//! - Two plans are in flight, so the device has the next one when it ends the first. A decode
//!   plan is as many steps as make `PLAN_TIME`, or as many as make `PLAN_TOKENS` tokens where that
//!   takes at most `PLAN_TIME_MAX`, and at least `PLAN_STEPS_MIN` where there is room, so that even a
//!   slow device is submitted to less than once a token.
//! - What a constrained sequence may draw is known once its last token is: its next step is queued before that, alone,
//!   and draws when the mask has come, for all rows that share it. Nothing but decode steps is queued behind it. A row
//!   whose mask is late loses its place, so that the step goes on without it, and comes back when its mask is there.
//! - A slot and its pages are free when the last plan that names the slot is finished.

use super::by_age::ByAge;
use super::executor::{
    Capacity, Cell, Change, Chunk, Done, Keep, MOST_KEEPS, PAGE_TOKENS, Page, Progress, STATE_TOKENS, Sampled,
    ScoredChunk, Slot, StepPlan, Ticket, Work,
};
use super::host::RequestView;
use super::pace::Pace;
use super::pages::PagePool;
use super::request::{Event, FinishReason, Finished, PerToken, Request, Started, Token};
use super::sequence::{PhaseCost, Sequence, SequenceId, State, pages_for};
use super::snapshots::{Found, Snapshots};
use super::speculation::Speculation;
use crate::model::grammar::{Grammar, GrammarError, Next};
use crate::telemetry::names;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Plans with work that may be submitted and unfinished: one runs, one waits behind it.
pub const PLANS_IN_FLIGHT: usize = 2;
/// What a decode plan should take: long enough that a submission costs little of it, short
/// enough that arrivals and aborts take effect soon.
pub const PLAN_TIME: Duration = Duration::from_millis(10);
/// Tokens of a decode plan that a submission and a wait should be shared by, and what it may take then.
pub const PLAN_TOKENS: u32 = 10;
/// As [`PLAN_TOKENS`] says.
pub const PLAN_TIME_MAX: Duration = Duration::from_millis(40);
/// Steps of a decode plan on a device that takes longer than `PLAN_TIME` for them. Their tokens
/// are still reported one by one, so nobody waits longer for one.
pub const PLAN_STEPS_MIN: u32 = 2;
/// Most steps of a decode plan.
pub const PLAN_STEPS_MAX: u32 = 16;
/// Decode steps that a prompt plan may last beside rows that decode: small chunks use the device badly, and prompts
/// that come faster than they are taken in queue up.
pub const PROMPT_STEPS: u32 = 4;
/// The same where a single prompt takes several plans: with their own step rows then wait three times as long for
/// each token as without it, for as long as that prompt lasts.
pub const LONE_PROMPT_STEPS: u32 = 2;
/// With several prompts each counts for as many rows as there are prompts, at most so many, and a prompt plan may last
/// as many times [`PROMPT_STEPS`] as they outweigh the rows: prompts that come together are taken in before much is
/// decoded, which a larger batch then does for hardly more than a small one.
const MOST_ROWS_PER_PROMPT: usize = 16;
/// Losses of the device while a sequence was on it after which the sequence is ended: it may be the cause.
const MOST_LOSSES: u32 = 2;
/// Tokens that such a plan may have, where all that a step takes would last too long.
const PROMPT_SIZES: [u32; 13] = [1536, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, PAGE_TOKENS];
/// Admissions that may pass over whoever has waited longest before it is its turn.
pub const PASSED_OVER_MAX: u32 = 7;

/// What a scheduler is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The executor's.
    pub capacity: Capacity,
    /// Longest prompt and output together; at most `Capacity::usable_context`.
    pub context: u32,
    /// The model's end-of-sequence ids.
    pub eos_ids: Vec<u32>,
    /// For `Started`.
    pub device_name: String,
    /// For `Started`.
    pub device_uuid: String,
    /// For `Started`.
    pub replica: String,
    /// Where the seeds of requests without one come from.
    pub seed: u64,
    /// Whether prompts are looked for in pages.
    pub prefix_cache: bool,
}

/// What the scheduler has to say, in order.
#[derive(Clone, Debug)]
pub enum Output {
    /// For the request's sink.
    Event(SequenceId, Event),
    /// The prompt is taken in (before the first token), or ended unfinished.
    Prefilled(SequenceId, Box<PhaseCost>),
    /// Decoding ended (before `Finished`).
    Decoded(SequenceId, Box<PhaseCost>),
}

/// What the scheduler wants done about constraints, in order.
#[derive(Clone, Debug)]
pub enum Order {
    /// Find out what may follow the token; `constrained` takes the answer.
    Take(SequenceId, Box<Grammar>, u32),
    /// For the executor: what a slot may draw next.
    Mask(Slot, Arc<[u32]>),
    /// For the executor: the masks of a plan are there.
    Release(Ticket),
}

/// What a report of progress was about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Completed {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Rows of the batch (decode) or tokens of the chunk (prefill).
    pub rows: u32,
    /// Steps reported.
    pub steps: u32,
    /// Summed over the steps.
    pub cost: PerToken,
}

/// Counts of what is going on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sequences that hold a slot, those that have ended and wait for their last plan included.
    pub running: u32,
    /// Sequences in the queue.
    pub waiting: u32,
    /// Unfinished requests that are not in the queue.
    pub admitted: u32,
    /// Pages held.
    pub pages_used: u32,
    /// Free pages that a prompt may still find.
    pub pages_cached: u32,
    /// Tokens of prompts that joined, since the start.
    pub prompt_tokens: u64,
    /// Of them found in pages.
    pub cached_tokens: u64,
    /// Sequences that lost their pages, since the start.
    pub preemptions: u64,
    /// Tokens that were drafted and verified, since the start.
    pub drafted_tokens: u64,
    /// Of them those that were right.
    pub accepted_tokens: u64,
    /// Snapshots of recurrent state that a prompt may find.
    pub snapshots: u32,
}

/// A submitted plan with work.
#[derive(Debug)]
struct Flight {
    /// By `submitted`.
    ticket: Ticket,
    /// Tokens of each slot's chunk; empty for decode steps.
    chunks: Vec<u32>,
    /// Slots named, each once.
    slots: Vec<Slot>,
    /// Rows (decode) or tokens (prefill).
    rows: u32,
    /// Steps not reported.
    steps_left: u32,
    /// Slots whose masks are still to come, each with the number of the output token that it is for.
    awaits: Vec<(Slot, u32)>,
    /// Tokens drafted a step.
    drafts: u32,
    /// With drafts: tokens that each slot may draw, and those that it was reported to have drawn.
    reserved: u32,
    drawn: Vec<u32>,
}

impl Flight {
    fn is_prefill(&self) -> bool {
        !self.chunks.is_empty()
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    setup: Setup,
    pool: PagePool,
    /// Of models with recurrent state.
    snapshots: Option<Snapshots>,
    speculation: Speculation,
    /// Plans of decode steps and of prompts for which a size was chosen: one in some tries what seems worse.
    choices: (u64, u64),
    /// All that have not ended, and those that have and still hold a slot.
    sequences: ByAge<Sequence>,
    /// Not ended, by the request's id.
    by_request: HashMap<String, SequenceId>,
    /// Not ended and with a deadline.
    deadlines: BTreeSet<(Instant, SequenceId)>,
    /// In the queue, best first.
    ranked: BTreeSet<(Reverse<i32>, SequenceId)>,
    /// In the queue, oldest first.
    waiting: BTreeSet<SequenceId>,
    /// Beside the queue: they hold nothing, and what they may draw next is being found out.
    unmasked: BTreeSet<SequenceId>,
    /// Admissions since the oldest in the queue could have gone.
    passed_over: u32,
    /// Holder by slot.
    slots: Vec<Option<SequenceId>>,
    /// Slots that the device must be told to stop, with the next plan.
    leaves: Vec<Slot>,
    /// Submitted and unfinished, in order.
    flights: VecDeque<Flight>,
    /// Handed out by `next_plan`, until `submitted` names it.
    unnamed: Option<Flight>,
    /// The last plan was a chunk of a prompt.
    prefilled_last: bool,
    outputs: Vec<Output>,
    orders: Vec<Order>,
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
    /// The longest prompt and output together that the pages hold, tokens.
    pub fn usable_context(&self) -> u32 {
        self.context.min(self.pages.saturating_mul(PAGE_TOKENS))
    }
}

/// Who takes in the next chunk.
#[derive(Debug)]
enum Prompt {
    /// Holds a slot.
    Resident(SequenceId),
    /// Joins with it.
    Joining(Joining),
}

impl Prompt {
    fn id(&self) -> SequenceId {
        match self {
            Prompt::Resident(id) => *id,
            Prompt::Joining(joining) => joining.id,
        }
    }
}

/// Who may join: there are a slot and pages for it.
#[derive(Debug)]
struct Joining {
    id: SequenceId,
    slot: Slot,
    /// What holds the beginning of its history.
    beginning: Beginning,
}

/// What a waiting sequence could start from.
#[derive(Debug, Default)]
struct Beginning {
    pages: Vec<Page>,
    /// Of the pages.
    free: u32,
    /// The recurrent state behind the pages, of models that have some.
    restore: Option<Cell>,
    /// Tokens whose pages are there, with or without the state behind them.
    branch: u32,
}

impl Scheduler {
    /// With nothing to do.
    pub fn new(setup: Setup) -> Scheduler {
        let capacity = &setup.capacity;
        assert!(setup.context <= capacity.usable_context(), "a context longer than the pages hold");
        assert!(capacity.slots > 0 && capacity.prefill_chunk > 0 && capacity.prompts > 0 && capacity.run_ahead > 0);
        assert!(!capacity.buckets.is_empty() && capacity.buckets.is_sorted());
        let chunk = capacity.prefill_chunk;
        assert!(capacity.snapshots.is_none() || chunk >= STATE_TOKENS, "state cannot be kept in chunks of {chunk}");
        Scheduler {
            snapshots: capacity.snapshots.map(|count| Snapshots::new(capacity.slots, count)),
            speculation: Speculation::new(capacity.drafts),
            choices: (0, 0),
            pool: PagePool::new(capacity.pages),
            sequences: ByAge::default(),
            by_request: HashMap::new(),
            deadlines: BTreeSet::new(),
            ranked: BTreeSet::new(),
            waiting: BTreeSet::new(),
            unmasked: BTreeSet::new(),
            passed_over: 0,
            slots: vec![None; capacity.slots as usize],
            leaves: Vec::new(),
            flights: VecDeque::new(),
            unnamed: None,
            prefilled_last: false,
            outputs: Vec::new(),
            orders: Vec::new(),
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

    /// A validated request whose id no other unfinished one has.
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

    /// Rows whose masks are late lose their places: what was queued with them goes on.
    pub fn give_up_late_masks(&mut self, now: Instant) {
        // Each once: two plans may wait for one row.
        let late: BTreeSet<SequenceId> =
            self.awaited().filter(|(_, deadline)| *deadline <= now).map(|(sequence, _)| sequence.id).collect();
        for id in late {
            let sequence = self.sequences.get_mut(id).expect("whoever holds a slot is known");
            if let Some(constraint) = &mut sequence.constraint {
                constraint.is_late();
            }
            sequence.preemptions += 1;
            self.preemptions += 1;
            sequence.state = State::Leaving;
            let slot = sequence.slot.expect("it has a row");
            self.leaves.push(slot);
            self.has_come(slot, u32::MAX);
        }
    }

    /// Who has a row in a plan that waits for its mask, which is being found out, and when that is late.
    fn awaited(&self) -> impl Iterator<Item = (&Sequence, Instant)> {
        let slots = self.flights.iter().flat_map(|flight| &flight.awaits).map(|(slot, _)| *slot);
        let sequences = slots.filter_map(|slot| self.sequences.get(self.slots[slot.0 as usize]?));
        let running = sequences.filter(|sequence| sequence.state == State::Decode);
        running.filter_map(|sequence| Some((sequence, sequence.mask_deadline()?)))
    }

    /// When `expire` or `give_up_late_masks` next has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let masks = self.awaited().map(|(_, deadline)| deadline);
        self.deadlines.first().map(|&(deadline, _)| deadline).into_iter().chain(masks).min()
    }

    /// Ends everything: the device has failed, and no plan will be reported any more.
    pub fn fail(&mut self, why: &str, now: Instant) {
        let unfinished: Vec<SequenceId> = self.by_request.values().copied().collect();
        for id in unfinished.into_iter().collect::<BTreeSet<_>>() {
            self.end(id, FinishReason::Error(why.to_string()), now);
        }
        self.orders.clear();
        for id in self.forget_plans() {
            self.release(id);
        }
    }

    /// No plan will be reported any more. Gives those who hold a slot, which nothing keeps any longer.
    fn forget_plans(&mut self) -> Vec<SequenceId> {
        self.flights.clear();
        self.unnamed = None;
        self.leaves.clear();
        let residents: Vec<SequenceId> = self.slots.iter().flatten().copied().collect();
        for id in &residents {
            self.sequences.get_mut(*id).expect("whoever holds a slot is known").in_flight = 0;
        }
        residents
    }

    /// Whether there is neither a request nor an unfinished plan.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.flights.is_empty() && self.leaves.is_empty()
    }

    /// The device was lost and another is there, which knows nothing: whoever holds a slot goes back to the queue with all
    /// that was reported of it, and what prompts could begin with is forgotten. Whoever has held one at
    /// two losses is ended with `why`: it may be the cause.
    pub fn restart(&mut self, why: &str, now: Instant) {
        // What is asked of grammars is not asked of the device.
        self.orders.retain(|order| matches!(order, Order::Take(..)));
        for id in self.forget_plans() {
            let sequence = self.sequences.get_mut(id).expect("whoever holds a slot is known");
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
        self.pool.forget();
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.forget();
        }
    }

    /// Who holds a slot.
    pub fn holder_id(&self, slot: Slot) -> Option<SequenceId> {
        self.slots[slot.0 as usize]
    }

    /// All that have not ended, oldest first.
    pub fn views(&self, now: Instant) -> Vec<RequestView> {
        let mut ids: Vec<SequenceId> = self.by_request.values().copied().collect();
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| Some(self.sequences.get(id)?.view(now))).collect()
    }

    /// What is going on.
    pub fn counts(&self) -> Counts {
        Counts {
            running: self.slots.iter().flatten().count() as u32,
            waiting: (self.waiting.len() + self.unmasked.len()) as u32,
            admitted: (self.by_request.len() - self.waiting.len() - self.unmasked.len()) as u32,
            pages_used: self.pool.used(),
            pages_cached: self.pool.cached(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            preemptions: self.preemptions,
            drafted_tokens: self.drafted_tokens,
            accepted_tokens: self.accepted_tokens,
            snapshots: self.snapshots.as_ref().map_or(0, Snapshots::used),
        }
    }

    /// Forgets all that a prompt could begin with, if no request runs or waits and no plan is open; whether it did.
    pub fn forget_prompts(&mut self) -> bool {
        let idle = self.sequences.is_empty() && self.flights.is_empty();
        if idle {
            self.pool.forget();
            if let Some(snapshots) = &mut self.snapshots {
                snapshots.forget();
            }
        }
        idle
    }

    /// The pages that prompts can be found in, for those who follow them.
    pub fn pool(&mut self) -> &mut PagePool {
        &mut self.pool
    }

    /// Panics unless all that is counted twice agrees: for simulations, after every step.
    /// Its cost grows with the slots, not with the queue.
    pub fn assert_consistent(&self) {
        let mut held: BTreeMap<Page, u32> = BTreeMap::new();
        let mut open = Vec::new();
        let mut ended = 0;
        for (index, id) in self.slots.iter().enumerate() {
            let Some(id) = id else { continue };
            let sequence = &self.sequences[*id];
            let slot = Slot(index as u32);
            assert_eq!(sequence.slot, Some(slot), "{id:?} holds another slot");
            assert_ne!(sequence.state, State::Waiting, "{id:?} waits and holds {slot:?}");
            let queued = self.waiting.contains(id) || self.unmasked.contains(id);
            assert!(!queued, "{id:?} is in the queue and holds {slot:?}");
            let live = self.by_request.get(&sequence.request) == Some(id);
            assert_eq!(live, !sequence.ended, "{id:?} has ended and is live, or neither");
            ended += usize::from(sequence.ended);
            let named = self.flights.iter().filter(|flight| flight.slots.contains(&slot));
            assert_eq!(named.count() as u32, sequence.in_flight, "{id:?} is in other plans");
            let gone = sequence.state == State::Leaving && sequence.in_flight == 0;
            assert!(!gone, "{id:?} has left and holds {slot:?}");
            for &page in &sequence.pages {
                *held.entry(page).or_default() += 1;
            }
            if sequence.state != State::Leaving {
                open.extend(&sequence.pages[sequence.first_open_page() as usize..]);
            }
        }
        assert_eq!(held.len() as u32, self.pool.used(), "pages are held by nobody with a slot");
        for (&page, &holders) in &held {
            assert_eq!(holders, self.pool.holders(page), "{page:?} has other holders than the pool knows");
        }
        for page in open {
            assert_eq!(held[page], 1, "{page:?} is shared and will be written");
        }
        self.pool.assert_consistent();
        let resident = self.slots.iter().flatten().count();
        assert_eq!(self.waiting.len(), self.ranked.len());
        assert!(self.waiting.is_disjoint(&self.unmasked));
        let waiting = self.waiting.len() + self.unmasked.len();
        assert_eq!(resident + waiting, self.sequences.len(), "a sequence is nowhere, or twice");
        assert_eq!(resident + waiting - ended, self.by_request.len(), "an ended request is live");
        assert!(self.flights.len() <= PLANS_IN_FLIGHT);
    }

    /// What there is to say since the last call, in order.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        // As much room for the next step as this one took.
        let room = self.outputs.len();
        std::mem::replace(&mut self.outputs, Vec::with_capacity(room))
    }

    /// What to do about constraints since the last call, in order: before the next plan.
    pub fn take_orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// What may follow the last token reported of a sequence, as [`Order::Take`] asked.
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
        if let (State::Decode, Some(slot)) = (sequence.state, sequence.slot) {
            self.orders.push(Order::Mask(slot, mask));
            self.has_come(slot, output);
        }
    }

    /// The masks of a slot for output tokens up to `output` have come, or are not needed any more.
    fn has_come(&mut self, slot: Slot, output: u32) {
        for flight in self.flights.iter_mut().filter(|flight| !flight.awaits.is_empty()) {
            flight.awaits.retain(|&(other, number)| other != slot || number > output);
            if flight.awaits.is_empty() {
                self.orders.push(Order::Release(flight.ticket));
            }
        }
    }

    /// What the device should be given now, if anything; `submitted` must follow.
    /// `pace`: what steps took lately.
    pub fn next_plan(&mut self, now: Instant, pace: &Pace) -> Option<StepPlan> {
        assert!(self.unnamed.is_none(), "the last plan was not submitted");
        if self.flights.len() >= PLANS_IN_FLIGHT {
            return None;
        }
        if self.flights.iter().any(|flight| !flight.awaits.is_empty()) {
            // What is queued behind a closed gate keeps what it was queued with: steps need little, prompts much. A
            // prompt whose turn it is waits for the gate, and no further step goes before it.
            let prompt_is_next = !self.prefilled_last && self.next_prompt().is_some();
            return if prompt_is_next { None } else { self.plan_decode(pace, true) };
        }
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.next_plan();
        }
        let plan = match self.next_prompt() {
            Some(prompt) if !self.prefilled_last => Some(self.plan_prefill(prompt, pace, now)),
            prompt => self.plan_decode(pace, prompt.is_some()).or_else(|| {
                // Decoding may have taken pages that the prompt counted on: who goes first is asked again.
                let prompt = self.next_prompt()?;
                Some(self.plan_prefill(prompt, pace, now))
            }),
        };
        plan.or_else(|| {
            let changes = self.take_leaves();
            (!changes.is_empty()).then_some(StepPlan { changes, work: None })
        })
    }

    /// Names the plan that `next_plan` handed out last.
    pub fn submitted(&mut self, ticket: Ticket) {
        if let Some(mut flight) = self.unnamed.take() {
            flight.ticket = ticket;
            self.flights.push_back(flight);
        }
    }

    /// Takes in what the device reports; `None` if it completes no step.
    pub fn progress(&mut self, progress: Progress, now: Instant) -> Option<Completed> {
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
            phase: if flight.is_prefill() { names::SPAN_PREFILL } else { names::SPAN_DECODE },
            rows: flight.rows,
            steps: progress.steps,
            cost: progress.cost,
        };
        // The flight is put back below, unless it has ended.
        let mut flight = self.flights.remove(index).expect("it was found there");

        if flight.is_prefill() {
            self.charge_prefill(&flight, &completed);
        } else {
            self.charge_decode(&progress.tokens, &completed);
        }
        if let Some(ScoredChunk { slot, first, tokens }) = progress.scored
            && let Some(sequence) = self.holder(slot).filter(|sequence| !sequence.ended)
        {
            let id = sequence.id;
            let tokens = sequence.take_scores(first, tokens);
            if !tokens.is_empty() {
                self.outputs.push(Output::Event(id, Event::Prompt(tokens)));
            }
        }
        for sampled in progress.tokens {
            debug_assert!(flight.slots.contains(&sampled.slot), "a token of a slot that the plan does not name");
            if flight.drafts > 0 {
                let index = flight.slots.iter().position(|slot| *slot == sampled.slot);
                flight.drawn[index.expect("a token of a slot that the plan names")] += 1;
                self.speculation.note(flight.drafts, sampled.draft);
            }
            self.take_token(sampled, flight.drafts, now);
        }
        let finished = progress.finished;
        if finished {
            for (index, slot) in flight.slots.into_iter().enumerate() {
                let id = self.slots[slot.0 as usize].expect("a slot is held until its last plan is finished");
                let sequence = self.sequences.get_mut(id).expect("whoever holds a slot is known");
                if flight.drafts > 0 && sequence.state == State::Decode {
                    sequence.undraw(flight.reserved - flight.drawn[index]);
                }
                sequence.in_flight -= 1;
                if sequence.in_flight == 0 && sequence.state == State::Leaving {
                    self.release(id);
                }
            }
        } else {
            self.flights.insert(index, flight);
        }
        (completed.steps > 0 || finished).then_some(completed)
    }

    // ---- prompts ----

    /// Who takes in the next chunk: the best of those that hold a slot, or whoever may join
    /// ahead of it.
    fn next_prompt(&mut self) -> Option<Prompt> {
        let resident = self
            .residents()
            .filter(|sequence| sequence.state == State::Prefill)
            .min_by_key(|sequence| sequence.rank())
            .map(|sequence| (sequence.id, sequence.shielded, sequence.priority));
        match (resident, self.next_to_join()) {
            (Some((_, shielded, priority)), Some(joining))
                if !shielded && priority < self.sequences[joining.id].priority =>
            {
                Some(Prompt::Joining(joining))
            }
            (Some((resident, ..)), _) => Some(Prompt::Resident(resident)),
            (None, joining) => joining.map(Prompt::Joining),
        }
    }

    /// The head of the queue, if there is a slot and there are pages for it. Nobody behind it
    /// goes first: a long prompt would wait for ever.
    fn next_to_join(&mut self) -> Option<Joining> {
        let oldest = *self.waiting.first()?;
        let &(_, best) = self.ranked.first()?;
        let id = if self.passed_over >= PASSED_OVER_MAX { oldest } else { best };
        let slot = self.slots.iter().position(Option::is_none)?;
        // A page in reserve for everyone who runs: else who joins is preempted at once.
        let reserve = self.slots.iter().flatten().count() as u32;
        if self.sequences[id].dumps_logits() && self.residents().any(Sequence::dumps_logits) {
            return None;
        }
        let beginning = self.beginning(id)?;
        let missing = pages_for(self.sequences[id].tokens.len() as u32) - beginning.pages.len() as u32;
        let needed = missing + beginning.free + reserve;
        (needed <= self.pool.free()).then_some(Joining { id, slot: Slot(slot as u32), beginning })
    }

    /// What holds the beginning of a waiting sequence's history already; `None` if the plan that is being made leaves
    /// more of it for the next.
    fn beginning(&mut self, id: SequenceId) -> Option<Beginning> {
        if !self.setup.prefix_cache || self.sequences[id].is_scored() {
            return Some(Beginning::default());
        }
        let sequence = self.sequences.get_mut(id).expect("a waiting sequence is known");
        let wanted = sequence.wanted();
        let (mut pages, free) = self.pool.find(wanted);
        let branch = pages.len() as u32 * PAGE_TOKENS;
        let Some(snapshots) = &self.snapshots else {
            return Some(Beginning { pages, free, restore: None, branch });
        };
        let (usable, restore) = match snapshots.find(&wanted[..pages.len()]) {
            Found::Soon(_) => return None,
            Found::Ready(usable, cell) => (usable, Some(cell)),
            Found::Nothing => (0, None),
        };
        pages.truncate(usable);
        let free = self.pool.free_among(&pages);
        Some(Beginning { pages, free, restore, branch })
    }

    /// Tokens of which a chunk that is not a prompt's last has a multiple.
    fn chunk_unit(&self) -> u32 {
        if self.snapshots.is_some() { STATE_TOKENS } else { 1 }
    }

    /// Tokens of a prompt that its next chunk could have.
    fn unqueued(&self, prompt: &Prompt) -> u32 {
        match prompt {
            Prompt::Resident(id) => self.sequences[*id].unqueued(),
            Prompt::Joining(Joining { id, beginning, .. }) => {
                self.sequences[*id].tokens.len() as u32 - beginning.pages.len() as u32 * PAGE_TOKENS
            }
        }
    }

    /// Tokens that a prompt plan may have now: all that a step takes, or as many as rows that decode can wait for.
    fn prompt_tokens_aim(&self, pace: &Pace) -> u32 {
        let most = self.setup.capacity.prefill_chunk;
        let rows = self.residents().filter(|sequence| sequence.decodes()).count();
        let (Some(step), true) = (pace.step(), rows > 0) else { return most };
        let taken_in = || self.residents().filter(|s| s.state == State::Prefill);
        let prompts = taken_in().count() + self.waiting.len();
        let weight = prompts * prompts.min(MOST_ROWS_PER_PROMPT) / rows;
        let lasts = |tokens: u32, steps: u32| {
            let allowed = step * steps * weight.max(1) as u32;
            tokens <= most && pace.chunk(tokens, self.choices.1).is_none_or(|time| time <= allowed)
        };
        let waiting = self.waiting.iter().map(|id| self.sequences[*id].tokens.len() as u32);
        let mut left = taken_in().map(|sequence| sequence.unqueued()).chain(waiting);
        let lone = prompts == 1 && left.any(|tokens| !lasts(tokens, PROMPT_STEPS));
        let fits = |tokens: u32| lasts(tokens, if lone { LONE_PROMPT_STEPS } else { PROMPT_STEPS });
        let sizes = PROMPT_SIZES.into_iter().filter(|tokens| *tokens < most);
        let aim = [most].into_iter().chain(sizes).find(|&tokens| fits(tokens)).unwrap_or(most.min(PAGE_TOKENS));
        aim.max(self.chunk_unit())
    }

    /// The next prompt plan, which begins with `prompt`.
    fn plan_prefill(&mut self, prompt: Prompt, pace: &Pace, now: Instant) -> StepPlan {
        let mut prompt = Some(prompt);
        self.choices.1 += 1;
        let mut left = self.prompt_tokens_aim(pace);
        let mut changes = self.take_leaves();
        let mut chunks: Vec<Chunk> = Vec::new();
        let unit = self.chunk_unit();
        while let Some(next) = prompt {
            // Who is scored has the plan alone.
            let scored = self.sequences[next.id()].is_scored();
            if left < unit.min(self.unqueued(&next)) || (scored && !chunks.is_empty()) {
                break;
            }
            let id = match next {
                Prompt::Resident(id) => id,
                Prompt::Joining(joining) => {
                    let id = joining.id;
                    self.admit(joining, &mut changes, now);
                    id
                }
            };
            let turn = self.next_turn();
            let sequence = self.sequences.get_mut(id).expect("a prompt's sequence is known");
            let mut chunk = sequence.next_chunk(left, unit);
            sequence.in_flight += 1;
            sequence.turn = turn;
            self.name_pages(id);
            chunk.keeps = self.keeps(id, &chunk);
            left -= chunk.tokens.len() as u32;
            chunks.push(chunk);
            let room = left > 0 && !scored && chunks.len() < self.setup.capacity.prompts as usize;
            prompt = if room { self.next_prompt() } else { None };
        }
        self.prefilled_last = true;
        self.unnamed = Some(Flight {
            ticket: Ticket(0),
            chunks: chunks.iter().map(|chunk| chunk.tokens.len() as u32).collect(),
            slots: chunks.iter().map(|chunk| chunk.slot).collect(),
            rows: chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum(),
            steps_left: 1,
            awaits: Vec::new(),
            drafts: 0,
            reserved: 0,
            drawn: Vec::new(),
        });
        StepPlan { changes, work: Some(Work::Prefill { chunks }) }
    }

    /// The snapshots that a chunk leaves.
    fn keeps(&mut self, id: SequenceId, chunk: &Chunk) -> Vec<Keep> {
        let Some(snapshots) = self.snapshots.as_mut().filter(|_| self.setup.prefix_cache) else { return Vec::new() };
        let kept = self.sequences[id]
            .keep_points(chunk)
            .filter_map(|(point, name)| Some(Keep { tokens: point - chunk.start, cell: snapshots.keep(name)? }));
        kept.take(MOST_KEEPS).collect()
    }

    /// Lets others find what has become certain of a sequence's pages.
    fn name_pages(&mut self, id: SequenceId) {
        if self.setup.prefix_cache {
            let sequence = self.sequences.get_mut(id).expect("who holds pages is known");
            for (page, content) in sequence.newly_full() {
                self.pool.name_content(page, content);
            }
        }
    }

    fn admit(&mut self, joining: Joining, changes: &mut Vec<Change>, now: Instant) {
        let Joining { id, slot, beginning: Beginning { mut pages, restore, branch, .. } } = joining;
        let found = pages.len() as u32;
        if let (Some(snapshots), Some(cell)) = (&mut self.snapshots, restore) {
            snapshots.read(cell);
        }
        for page in &pages {
            self.pool.share(*page);
        }
        let sequence = self.sequences.get_mut(id).expect("a joining sequence is known");
        let missing = pages_for(sequence.tokens.len() as u32) - found;
        pages.extend(self.pool.take(missing).expect("next_to_join counted the pages"));
        if self.waiting.first() == Some(&id) {
            sequence.shielded |= self.passed_over >= PASSED_OVER_MAX;
            self.passed_over = 0;
        } else {
            self.passed_over += 1;
        }
        self.waiting.remove(&id);
        self.ranked.remove(&(Reverse(sequence.priority), id));
        let holder = self.slots[slot.0 as usize].replace(id);
        assert!(holder.is_none(), "the slot is held");
        let (params, cached) = sequence.join(slot, pages.clone(), found);
        sequence.continue_state(restore, branch);
        changes.push(Change::Join { slot, params: Box::new(params), cached });
        changes.push(Change::Pages { slot, first: 0, pages });
        if sequence.started.is_none() {
            sequence.started = Some(now);
            self.prompt_tokens += u64::from(sequence.prompt_tokens);
            self.cached_tokens += u64::from(sequence.cached_tokens);
            let started = Started {
                device_name: self.setup.device_name.clone(),
                device_uuid: self.setup.device_uuid.clone(),
                replica: self.setup.replica.clone(),
                queue: now.saturating_duration_since(sequence.arrived),
                prompt_tokens: sequence.prompt_tokens,
                cached_tokens: sequence.cached_tokens,
            };
            self.outputs.push(Output::Event(id, Event::Started(Box::new(started))));
        }
    }

    // ---- decoding ----

    /// The next decode plan, if anyone can decode. `beside_prompt`: prompts wait to alternate
    /// with it, so it is short.
    fn plan_decode(&mut self, pace: &Pace, beside_prompt: bool) -> Option<StepPlan> {
        let outstanding: u32 = self.flights.iter().filter(|f| !f.is_prefill()).map(|f| f.steps_left).sum();
        let room = self.setup.capacity.run_ahead.saturating_sub(outstanding);
        if room == 0 {
            return None;
        }
        self.choices.0 += 1;
        let mut rows = self.decode_rows(pace);
        if rows.is_empty() {
            return None;
        }
        let undrawn = || rows.iter().map(|&id| self.sequences[id].undrawn());
        // While someone waits for a slot, a plan ends with the first row that does.
        let useful = if self.waiting.is_empty() { undrawn().max() } else { undrawn().min() };
        let dumps = rows.iter().any(|&id| self.sequences[id].dumps_logits());
        // Who waits for a late mask is not waited for.
        let constrained = self.residents().any(|s| s.constraint.is_some() && s.decodes() && !s.waits_apart());
        let sequences = rows.len() as u32;
        let mut drafts = if dumps || constrained { 0 } else { self.speculation.choose(sequences, pace) };
        // What drafts are to follow has to fit the context too.
        let least = undrawn().min().expect("there are rows");
        if least < 2 * drafts + 1 {
            drafts = 0;
        }
        let time = if drafts > 0 { pace.verify(sequences, drafts).or(pace.step()) } else { pace.step() };
        let aim = if beside_prompt || dumps || constrained { 1 } else { self.steps_aim(time, sequences) };
        let mut steps = aim.min(room).min(useful.expect("there are rows"));
        if drafts > 0 {
            steps = steps.min((least - drafts) / (drafts + 1));
            while steps > 0 && self.pages_missing(&rows, steps * (drafts + 1) + drafts) > self.pool.free() {
                steps /= 2;
            }
            if steps == 0 {
                (drafts, steps) = (0, 1);
            }
        }
        let tokens = |steps: u32| if drafts > 0 { steps * (drafts + 1) + drafts } else { steps };

        while steps > 1 && self.pages_missing(&rows, tokens(steps)) > self.pool.free() {
            steps /= 2;
        }
        if self.pages_missing(&rows, tokens(steps)) > self.pool.free() {
            // The best first. Who finds no page then waits for those that are about to be released.
            rows.sort_by_key(|&id| self.sequences[id].rank());
            self.preempt(&mut rows);
            let mut free = self.pool.free();
            rows.retain(|&id| {
                let missing = self.sequences[id].pages_missing(steps);
                let fits = missing <= free;
                free -= if fits { missing } else { 0 };
                fits
            });
            if rows.is_empty() {
                return None;
            }
        }

        let mut changes = self.take_leaves();
        let mut slots = Vec::with_capacity(rows.len());
        let mut awaits = Vec::new();
        for id in &rows {
            let turn = self.next_turn();
            let sequence = self.sequences.get_mut(*id).expect("rows are known");
            let slot = sequence.slot.expect("rows hold slots");
            let missing = sequence.pages_missing(tokens(steps));
            if missing > 0 {
                let pages = self.pool.take(missing).expect("the pages were counted");
                let first = sequence.pages.len() as u32;
                sequence.pages.extend_from_slice(&pages);
                changes.push(Change::Pages { slot, first, pages });
            }
            awaits.extend(sequence.awaited_mask().map(|output| (slot, output)));
            sequence.draw(steps * (drafts + 1));
            sequence.in_flight += 1;
            sequence.turn = turn;
            slots.push(slot);
        }
        self.prefilled_last = false;
        let waits = !awaits.is_empty();
        self.unnamed = Some(Flight {
            ticket: Ticket(0),
            chunks: Vec::new(),
            slots: slots.clone(),
            rows: slots.len() as u32,
            steps_left: steps,
            awaits,
            drafts,
            reserved: steps * (drafts + 1),
            drawn: vec![0; slots.len()],
        });
        Some(StepPlan { changes, work: Some(Work::Decode { slots, steps, drafts, awaits: waits }) })
    }

    /// Who can decode, by slot, so that rows keep their places from step to step; at most the largest bucket, and no
    /// more than the device serves best at once: where there are more, those that have gone longest without.
    fn decode_rows(&self, pace: &Pace) -> Vec<SequenceId> {
        let mut rows: Vec<&Sequence> = self
            .residents()
            .filter(|sequence| sequence.decodes())
            // Logits are read back before the next step overwrites them.
            .filter(|sequence| !sequence.dumps_logits() || sequence.in_flight == 0)
            .filter(|sequence| match self.setup.capacity.gates {
                true => !sequence.waits_apart(),
                false => sequence.awaited_mask().is_none(),
            })
            .collect();
        let most = *self.setup.capacity.buckets.last().expect("there are buckets");
        let most = pace.best_rows(most.min(rows.len() as u32), self.choices.0) as usize;
        if rows.len() > most {
            rows.sort_by_key(|sequence| sequence.turn);
            rows.truncate(most);
        }
        rows.into_iter().map(|sequence| sequence.id).collect()
    }

    fn steps_aim(&self, step_time: Option<Duration>, rows: u32) -> u32 {
        // Half of what may be queued, so that two plans fit.
        let most = (self.setup.capacity.run_ahead / 2).clamp(1, PLAN_STEPS_MAX);
        let least = PLAN_STEPS_MIN.min(most);
        match step_time {
            // The first plan of all shows how long a step takes.
            None => least,
            Some(step_time) => {
                let step_ns = step_time.as_nanos().max(1);
                let shared = u128::from(PLAN_TOKENS.div_ceil(rows)).min(PLAN_TIME_MAX.as_nanos() / step_ns);
                (PLAN_TIME.as_nanos() / step_ns).max(shared).clamp(u128::from(least), u128::from(most)) as u32
            }
        }
    }

    fn pages_missing(&self, rows: &[SequenceId], steps: u32) -> u32 {
        rows.iter().map(|&id| self.sequences[id].pages_missing(steps)).sum()
    }

    /// Takes pages from the youngest of the lowest priority until one step of the remaining
    /// rows finds its pages, now or when the unfinished plans are.
    fn preempt(&mut self, rows: &mut Vec<SequenceId>) {
        loop {
            if self.pages_missing(rows, 1) <= self.pool.free() + self.pages_free_soon() {
                return;
            }
            let victim = self
                .residents()
                .filter(|s| s.state == State::Prefill || s.decodes())
                .max_by_key(|s| s.rank())
                .expect("one sequence alone always finds its pages")
                .id;
            rows.retain(|&id| id != victim);
            self.preemptions += 1;
            let sequence = self.sequences.get_mut(victim).expect("a victim is known");
            sequence.preemptions += 1;
            sequence.state = State::Leaving;
            let in_flight = sequence.in_flight;
            let slot = sequence.slot.expect("a victim holds a slot");
            self.leaves.push(slot);
            self.has_come(slot, u32::MAX);
            if in_flight == 0 {
                self.release(victim);
            }
        }
    }

    /// Pages that are free when the plans in flight are finished: those of who leaves, and of who has no token
    /// left to be drawn, unless others hold them too.
    fn pages_free_soon(&self) -> u32 {
        let mut releases: HashMap<Page, u32> = HashMap::new();
        let ends = |s: &&Sequence| s.state == State::Leaving || (s.state == State::Decode && s.undrawn() == 0);
        for &page in self.residents().filter(ends).flat_map(|s| &s.pages) {
            *releases.entry(page).or_default() += 1;
        }
        releases.into_iter().filter(|&(page, releases)| releases == self.pool.holders(page)).count() as u32
    }

    // ---- what the device reports ----

    /// Each sequence has its tokens' share of a step.
    fn charge_prefill(&mut self, flight: &Flight, completed: &Completed) {
        for (&slot, &tokens) in flight.slots.iter().zip(&flight.chunks) {
            let Some(sequence) = self.holder(slot) else { continue };
            // A preempted sequence's second prefill is not what its first token waited for.
            if sequence.first_token.is_none() && !sequence.ended && completed.steps > 0 {
                let cost = &mut sequence.prefill_cost;
                cost.tokens += u64::from(tokens);
                cost.steps += u64::from(completed.steps);
                cost.sum.add(&completed.cost, f64::from(tokens) / f64::from(completed.rows));
            }
        }
    }

    /// A step costs what it costs; each row that drew a token in it had that step.
    fn charge_decode(&mut self, tokens: &[Sampled], completed: &Completed) {
        if completed.steps == 0 {
            return;
        }
        let step = 1.0 / f64::from(completed.steps);
        for sampled in tokens {
            if let Some(sequence) = self.holder(sampled.slot)
                && !sequence.ended
                && sampled.draft == 0
            {
                sequence.decode_cost.steps += 1;
                sequence.decode_cost.sum.add(&completed.cost, step);
            }
        }
    }

    /// `drafts`: how many were verified in the step that drew the token.
    fn take_token(&mut self, sampled: Sampled, drafts: u32, now: Instant) {
        let Some(sequence) = self.holder(sampled.slot) else {
            return;
        };
        if sequence.ended {
            return;
        }
        let id = sequence.id;
        if sequence.constraint.is_some() && sequence.state == State::Leaving {
            // Who has lost its place is not waited for with a mask: what was drawn then is drawn again.
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
        // Of a sequence that has lost its pages nothing is to be named.
        let full = (sequence.tokens.len() as u32 - 1).is_multiple_of(PAGE_TOKENS) && sequence.state == State::Decode;
        self.drafted_tokens += u64::from(drafted);
        self.accepted_tokens += u64::from(accepted);
        let token = Token { index: 0, id: sampled.id, logprobs: sampled.logprobs, logits: sampled.logits };
        self.outputs.extend(prefilled.map(|cost| Output::Prefilled(id, Box::new(cost))));
        self.outputs.push(Output::Event(id, Event::Token(token)));
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
            (None, Some(grammar)) => self.orders.push(Order::Take(id, grammar, sampled.id)),
            (None, None) => {}
        }
    }

    // ---- ends ----

    fn end(&mut self, id: SequenceId, reason: FinishReason, now: Instant) {
        self.end_as(id, reason, false, now);
    }

    /// The one place where a sequence ends. `stopped`: the device has marked its slot done.
    fn end_as(&mut self, id: SequenceId, reason: FinishReason, stopped: bool, now: Instant) {
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
            self.outputs.push(Output::Decoded(id, Box::new(sequence.decode_cost)));
        } else if sequence.started.is_some() {
            sequence.prefill_cost.preemptions = sequence.preemptions;
            self.outputs.push(Output::Prefilled(id, Box::new(sequence.prefill_cost)));
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
        self.outputs.push(Output::Event(id, Event::Finished(Box::new(finished))));
        match sequence.state {
            State::Waiting => {
                self.waiting.remove(&id);
                self.unmasked.remove(&id);
                self.ranked.remove(&(Reverse(sequence.priority), id));
                self.sequences.remove(id);
            }
            // Told to leave when it was preempted.
            State::Leaving => {}
            State::Prefill | State::Decode => {
                sequence.state = State::Leaving;
                let in_flight = sequence.in_flight;
                let slot = sequence.slot.expect("a running sequence holds a slot");
                if !stopped {
                    self.leaves.push(slot);
                }
                self.has_come(slot, u32::MAX);
                if in_flight == 0 {
                    self.release(id);
                }
            }
        }
    }

    /// No plan names the sequence any more: its slot and pages are free, and it is gone or
    /// back in the queue.
    fn release(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(id).expect("a released sequence is known");
        let (slot, pages) = sequence.leave();
        // The end first: of what is kept, a beginning is of use longer than what follows it.
        for page in pages.into_iter().rev() {
            self.pool.release(page);
        }
        if let Some(slot) = slot {
            let holder = self.slots[slot.0 as usize].take();
            assert_eq!(holder, Some(id), "a slot is released by its holder");
        }
        if sequence.ended {
            self.sequences.remove(id);
        } else if sequence.may_join() {
            self.ranked.insert((Reverse(sequence.priority), id));
            self.waiting.insert(id);
        } else {
            // Nobody waits behind it.
            self.unmasked.insert(id);
        }
    }

    // ---- small things ----

    fn residents(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten().map(|&id| &self.sequences[id])
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

/// SplitMix64: advances the state, returns a well-mixed value.
pub fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::executor::Drafts;
    use crate::engine::request::{Limits, Sampling};

    fn setup(slots: u32, pages: u32) -> Setup {
        let capacity = Capacity {
            slots,
            pages,
            context: 256,
            prefill_chunk: 32,
            prompts: 4,
            buckets: vec![1, 2, 4, 8],
            run_ahead: 32,
            gates: true,
            vocabulary: 100,
            snapshots: None,
            drafts: Drafts::default(),
        };
        Setup {
            context: capacity.usable_context(),
            capacity,
            eos_ids: vec![99],
            device_name: "fake".into(),
            device_uuid: "0".into(),
            replica: "m/0".into(),
            seed: 1,
            prefix_cache: false,
        }
    }

    fn request(id: &str, prompt: usize, max_tokens: u32) -> Request {
        Request {
            id: id.into(),
            prompt: vec![1; prompt],
            sampling: Sampling::default(),
            limits: Limits { max_tokens: Some(max_tokens), ..Limits::default() },
            logprobs: None,
            prompt_logprobs: None,
            dump_logits: false,
            grammar: None,
            priority: 0,
            cache_salt: String::new(),
            deadline: None,
            span: tracing::Span::none(),
        }
    }

    /// A scheduler, its plans in flight, and a device that does what it is told.
    struct Bench {
        scheduler: Scheduler,
        now: Instant,
        pace: Pace,
        tickets: u64,
        flights: VecDeque<(Ticket, Work)>,
    }

    impl Bench {
        fn new(setup: Setup) -> Bench {
            Bench {
                scheduler: Scheduler::new(setup),
                now: Instant::now(),
                pace: Pace::of_step(Duration::from_millis(1)),
                tickets: 0,
                flights: VecDeque::new(),
            }
        }

        fn arrive(&mut self, request: Request) {
            self.scheduler.arrive(request, self.now);
        }

        fn plan(&mut self) -> Option<StepPlan> {
            let plan = self.scheduler.next_plan(self.now, &self.pace)?;
            self.tickets += 1;
            let ticket = Ticket(self.tickets);
            self.scheduler.submitted(ticket);
            if let Some(work) = &plan.work {
                self.flights.push_back((ticket, work.clone()));
            }
            self.scheduler.assert_consistent();
            Some(plan)
        }

        fn work(&mut self) -> Option<Work> {
            self.plan().map(|plan| plan.work.expect("work"))
        }

        /// The oldest plan is reported whole; every row draws token 7.
        fn complete(&mut self) {
            let (ticket, work) = self.flights.pop_front().expect("a plan in flight");
            let token = |slot| Sampled { slot, id: 7, done: None, draft: 0, logprobs: None, logits: None };
            let (steps, tokens) = match work {
                Work::Prefill { chunks } => {
                    (1, chunks.iter().filter(|chunk| chunk.last).map(|chunk| token(chunk.slot)).collect())
                }
                Work::Decode { slots, steps, .. } => {
                    (steps, (0..steps).flat_map(|_| slots.iter().map(|&slot| token(slot))).collect())
                }
            };
            let cost = PerToken::default();
            let report = Progress {
                ticket,
                steps,
                tokens,
                scored: None,
                finished: true,
                faults: 0,
                cost,
                submissions: Vec::new(),
            };
            self.scheduler.progress(report, self.now);
            self.scheduler.assert_consistent();
        }

        fn finished(&mut self) -> Vec<FinishReason> {
            let outputs = self.scheduler.take_outputs().into_iter();
            outputs
                .filter_map(|output| match output {
                    Output::Event(_, Event::Finished(finished)) => Some(finished.reason),
                    _ => None,
                })
                .collect()
        }
    }

    /// Slot, first position, tokens and whether it is the last, of each chunk.
    fn chunks(work: Option<Work>) -> Vec<(u32, u32, usize, bool)> {
        match work {
            Some(Work::Prefill { chunks }) => {
                chunks.iter().map(|chunk| (chunk.slot.0, chunk.start, chunk.tokens.len(), chunk.last)).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    fn steps(work: Option<Work>) -> u32 {
        match work {
            Some(Work::Decode { steps, .. }) => steps,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_prompt_runs_in_chunks_and_decoding_follows_without_waiting_for_its_token() {
        let mut bench = Bench::new(setup(1, 16));
        bench.arrive(request("a", 70, 10));
        let plan = bench.plan().unwrap();
        assert!(matches!(&plan.changes[0], Change::Join { slot: Slot(0), .. }));
        assert!(matches!(&plan.changes[1], Change::Pages { first: 0, pages, .. } if pages.len() == 5));
        assert_eq!(chunks(plan.work), [(0, 0, 32, false)]);
        assert_eq!(chunks(bench.work()), [(0, 32, 32, false)]);
        assert_eq!(bench.plan(), None, "two plans are in flight");
        bench.complete();
        assert_eq!(chunks(bench.work()), [(0, 64, 6, true)]);
        bench.complete();
        assert_eq!(steps(bench.work()), 9, "one token comes from the prompt, nine from decoding");
    }

    #[test]
    fn a_plan_lasts_ten_milliseconds_or_ten_tokens_and_two_fit_the_run_ahead() {
        for (micros, expected) in [(100, 16), (625, 16), (1_000, 10), (3_800, 10), (9_000, 4), (50_000, 2)] {
            let mut bench = Bench::new(setup(1, 16));
            bench.pace = Pace::of_step(Duration::from_micros(micros));
            bench.arrive(request("a", 1, 200));
            bench.plan();
            bench.complete();
            assert_eq!(steps(bench.work()), expected, "{micros} us a step");
            assert_eq!(steps(bench.work()), expected);
            assert_eq!(bench.plan(), None);
        }
        let mut unknown = Bench::new(setup(1, 16));
        unknown.pace = Pace::default();
        unknown.arrive(request("a", 1, 200));
        unknown.plan();
        unknown.complete();
        assert_eq!(steps(unknown.work()), PLAN_STEPS_MIN, "nobody knows yet what a step takes");
        let mut little = setup(1, 16);
        little.capacity.run_ahead = 3;
        let mut bench = Bench::new(little);
        bench.arrive(request("a", 1, 200));
        bench.plan();
        bench.complete();
        assert_eq!((steps(bench.work()), steps(bench.work())), (1, 1));
    }

    #[test]
    fn no_step_is_queued_beyond_the_last_token_and_no_page_taken_for_it() {
        let mut bench = Bench::new(setup(1, 16));
        bench.arrive(request("a", 14, 4));
        bench.plan();
        // Positions 14, 15 and 16 are written; the fourth token never is.
        let plan = bench.plan().unwrap();
        assert!(matches!(&plan.changes[..], [Change::Pages { first: 1, pages, .. }] if pages.len() == 1));
        assert_eq!(plan.work, Some(Work::Decode { slots: vec![Slot(0)], steps: 3, drafts: 0, awaits: false }));
        bench.complete();
        assert_eq!(bench.plan(), None);
        bench.complete();
        assert_eq!(bench.finished(), [FinishReason::Length]);
        // The device did not say that it was done (this one never does), so it is told.
        assert_eq!(bench.plan().unwrap().changes, [Change::Leave { slot: Slot(0) }]);
        assert!(bench.scheduler.is_idle());
        assert_eq!(
            bench.scheduler.counts(),
            Counts { prompt_tokens: bench.scheduler.prompt_tokens, ..Counts::default() }
        );
    }

    #[test]
    fn an_aborted_slot_is_held_until_its_plans_are_finished_and_its_surplus_is_dropped() {
        let mut bench = Bench::new(setup(1, 16));
        bench.arrive(request("a", 1, 100));
        bench.arrive(request("b", 1, 100));
        bench.plan();
        bench.plan();
        bench.scheduler.abort("a", bench.now);
        bench.scheduler.abort("a", bench.now);
        bench.scheduler.abort("nobody", bench.now);
        assert_eq!(bench.finished(), [FinishReason::Aborted]);
        assert_eq!(bench.plan(), None);
        bench.complete();
        assert_eq!(bench.scheduler.counts().running, 1);
        let plan = bench.plan().unwrap();
        assert_eq!(plan, StepPlan { changes: vec![Change::Leave { slot: Slot(0) }], work: None });
        bench.complete();
        assert_eq!(bench.scheduler.counts().running, 0);
        assert!(bench.scheduler.take_outputs().is_empty(), "tokens after the end");
        assert_eq!(chunks(bench.work()), [(0, 0, 1, true)]);
    }

    #[test]
    fn deadlines_end_requests_in_the_queue_and_on_the_device() {
        let mut bench = Bench::new(setup(1, 16));
        let deadline = bench.now + Duration::from_secs(1);
        for id in ["a", "b"] {
            bench.arrive(Request { deadline: Some(deadline), ..request(id, 1, 100) });
        }
        bench.plan();
        assert_eq!(bench.scheduler.next_deadline(), Some(deadline));
        bench.scheduler.expire(deadline - Duration::from_nanos(1));
        assert_eq!(bench.finished(), []);
        bench.scheduler.expire(deadline);
        assert_eq!(bench.finished(), [FinishReason::DeadlineExceeded, FinishReason::DeadlineExceeded]);
        assert_eq!(bench.scheduler.next_deadline(), None);
        bench.complete();
        bench.plan();
        assert!(bench.scheduler.is_idle());
    }

    #[test]
    fn higher_priority_goes_first_and_the_oldest_is_not_passed_over_for_ever() {
        let mut bench = Bench::new(setup(1, 16));
        bench.arrive(request("low", 1, 1));
        let mut order = Vec::new();
        for i in 0..20 {
            bench.arrive(Request { priority: 5, ..request(&format!("high {i}"), 1, 1) });
            let Some(plan) = bench.plan() else { panic!() };
            assert!(plan.work.is_some());
            for output in bench.scheduler.take_outputs() {
                if let Output::Event(id, Event::Started(_)) = output {
                    order.push(id.0);
                }
            }
            bench.complete();
        }
        assert_eq!(order[..PASSED_OVER_MAX as usize], [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(order[PASSED_OVER_MAX as usize], 0, "the oldest had its turn");
        assert_eq!(order[8..10], [8, 9]);
    }

    #[test]
    fn the_youngest_of_the_lowest_priority_gives_way_and_resumes_with_its_history() {
        let mut small = setup(3, 6);
        small.context = 96;
        let mut bench = Bench::new(small);
        bench.pace = Pace::of_step(Duration::from_millis(10));
        bench.arrive(Request { priority: 1, ..request("first", 15, 60) });
        bench.arrive(request("second", 15, 60));
        bench.arrive(request("third", 15, 60));
        let mut left = Vec::new();
        let mut joined = Vec::new();
        while bench.scheduler.preemptions < 2 {
            while let Some(plan) = bench.plan() {
                for change in plan.changes {
                    match change {
                        Change::Join { slot, params, .. } => joined.push((slot, params.generated, params.max_tokens)),
                        Change::Leave { slot } => left.push(slot),
                        Change::Pages { .. } => {}
                    }
                }
            }
            bench.complete();
        }
        // Slots were given in order of arrival: the third goes first, then the second.
        assert_eq!(left[0], Slot(2));
        assert_eq!(joined[..3], [(Slot(0), 0, 60), (Slot(1), 0, 60), (Slot(2), 0, 60)]);
        while !bench.scheduler.is_idle() {
            while let Some(plan) = bench.plan() {
                for change in plan.changes {
                    if let Change::Join { slot, params, .. } = change {
                        joined.push((slot, params.generated, params.max_tokens));
                    }
                }
            }
            if !bench.flights.is_empty() {
                bench.complete();
            }
        }
        assert!(joined.len() >= 5);
        for (_, generated, max_tokens) in &joined[3..] {
            assert!(*generated > 0);
            assert_eq!(generated + max_tokens, 60);
        }
        assert_eq!(bench.finished(), vec![FinishReason::Length; 3]);
    }

    #[test]
    fn whoever_was_passed_over_keeps_its_pages_to_the_end() {
        let mut small = setup(2, 6);
        small.context = 96;
        let mut bench = Bench::new(small);
        bench.pace = Pace::of_step(Duration::from_millis(10));
        bench.arrive(request("low", 15, 60));
        bench.scheduler.passed_over = PASSED_OVER_MAX;
        bench.plan();
        let high = Request { priority: 5, ..request("high", 15, 60) };
        bench.arrive(high);
        let mut left = Vec::new();
        while bench.scheduler.preemptions == 0 {
            while let Some(plan) = bench.plan() {
                left.extend(plan.changes.into_iter().filter_map(|change| match change {
                    Change::Leave { slot } => Some(slot),
                    _ => None,
                }));
            }
            bench.complete();
        }
        while left.is_empty() {
            let plan = bench.plan();
            left.extend(plan.into_iter().flat_map(|plan| plan.changes).filter_map(|change| match change {
                Change::Leave { slot } => Some(slot),
                _ => None,
            }));
            if left.is_empty() {
                bench.complete();
            }
        }
        assert_eq!(left, [Slot(1)], "the one of higher priority gave way");
    }

    #[test]
    fn prompts_alternate_with_decoding() {
        let mut bench = Bench::new(setup(2, 32));
        bench.arrive(request("a", 1, 100));
        bench.plan();
        bench.complete();
        bench.arrive(request("b", 100, 10));
        let mut kinds = Vec::new();
        for _ in 0..8 {
            match bench.work().unwrap() {
                Work::Prefill { .. } => kinds.push(0),
                Work::Decode { steps, .. } => kinds.push(steps),
            }
            bench.complete();
        }
        assert_eq!(kinds, [1, 0, 1, 0, 1, 0, 1, 0]);
    }

    #[test]
    fn several_prompts_share_a_step_up_to_its_tokens_and_its_number_of_prompts() {
        let mut bench = Bench::new(setup(8, 64));
        for (id, prompt) in [("a", 10), ("b", 12), ("c", 40), ("d", 1), ("e", 1), ("f", 1), ("g", 1)] {
            bench.arrive(request(id, prompt, 1));
        }
        assert_eq!(chunks(bench.work()), [(0, 0, 10, true), (1, 0, 12, true), (2, 0, 10, false)]);
        let expected = [(2, 10, 30, true), (3, 0, 1, true), (4, 0, 1, true)];
        assert_eq!(chunks(bench.work()), expected, "32 tokens");
        bench.complete();
        let plan = bench.plan().unwrap();
        // Those whose only token came have left their slots.
        assert_eq!(chunks(plan.work), [(0, 0, 1, true), (1, 0, 1, true)]);
    }

    #[test]
    fn beside_rows_that_decode_a_prompt_plan_is_short_and_a_lone_long_prompts_is_shorter() {
        for (prompt, wanted) in [(64, 64), (100, 100), (200, 48)] {
            beside_rows(prompt, wanted);
        }
    }

    /// A prompt's first plan beside a row whose step takes 4 ms, where 64 tokens take 9 ms and 32 take 6.
    fn beside_rows(prompt: usize, wanted: usize) {
        let mut large = setup(8, 64);
        large.capacity.prefill_chunk = 128;
        let mut bench = Bench::new(large);
        bench.arrive(request("a", 1, 200));
        bench.plan();
        bench.complete();
        bench.pace.note_step(1, Duration::from_millis(4));
        bench.pace.note_chunk(64, Duration::from_millis(9));
        bench.pace.note_chunk(32, Duration::from_millis(6));
        bench.arrive(request("b", prompt, 10));
        let taken = |work| chunks(work).iter().map(|chunk| chunk.2).sum::<usize>();
        let decoded = bench.work();
        assert_eq!(steps(decoded), 1);
        assert_eq!(taken(bench.work()), wanted, "{prompt} tokens");
        // More prompts than rows: they do not wait for its sake.
        for id in ["c", "d", "e"] {
            bench.arrive(request(id, 40, 10));
        }
        bench.complete();
        assert_eq!(steps(bench.work()), 1);
        bench.complete();
        assert_eq!(taken(bench.work()), (prompt - wanted + 3 * 40).min(128), "three prompts or four for one row");
    }

    fn cached(slots: u32, pages: u32) -> Bench {
        Bench::new(Setup { prefix_cache: true, ..setup(slots, pages) })
    }

    fn counting(id: &str, prompt: u32) -> Request {
        Request { prompt: (0..prompt).map(|i| i % 90).collect(), ..request(id, 1, 20) }
    }

    #[test]
    fn prompts_with_one_beginning_share_its_full_pages_even_within_a_plan() {
        let mut bench = cached(4, 16);
        for id in ["a", "b"] {
            bench.arrive(counting(id, 30));
        }
        let plan = bench.plan().unwrap();
        let tables: Vec<&Vec<Page>> = plan
            .changes
            .iter()
            .filter_map(|change| match change {
                Change::Pages { pages, .. } => Some(pages),
                _ => None,
            })
            .collect();
        assert_eq!(tables[0][0], tables[1][0]);
        assert_ne!(tables[0][1], tables[1][1], "a page that grows is nobody else's");
        assert_eq!(chunks(plan.work), [(0, 0, 30, true), (1, 16, 2, false)], "32 tokens");
        assert_eq!(bench.scheduler.counts().pages_used, 3);
        assert_eq!(bench.scheduler.counts().cached_tokens, 16);
    }

    #[test]
    fn at_least_one_token_is_computed_and_another_salt_finds_nothing() {
        let mut bench = cached(4, 16);
        bench.arrive(counting("a", 32));
        bench.plan();
        bench.complete();
        bench.arrive(counting("b", 32));
        bench.arrive(Request { cache_salt: "x".into(), ..counting("c", 32) });
        let work = loop {
            match bench.work() {
                Some(Work::Decode { .. }) => bench.complete(),
                work => break work,
            }
        };
        assert_eq!(chunks(work), [(1, 16, 16, true), (2, 0, 16, false)]);
    }

    #[test]
    fn what_was_generated_is_found_by_the_next_turn_after_the_first_has_ended() {
        let mut bench = cached(2, 16);
        bench.arrive(Request { limits: Limits { max_tokens: Some(20), ..Limits::default() }, ..counting("a", 15) });
        while !bench.scheduler.is_idle() {
            while bench.plan().is_some() {}
            if !bench.flights.is_empty() {
                bench.complete();
            }
        }
        let counts = bench.scheduler.counts();
        assert_eq!((counts.pages_used, counts.pages_cached), (0, 2), "the last token was never written");
        // Every token drawn was 7.
        let mut next = counting("b", 15);
        next.prompt.extend([7; 20]);
        next.prompt.push(1);
        bench.arrive(next);
        assert_eq!(chunks(bench.work()), [(0, 32, 4, true)]);
        let started = bench.scheduler.take_outputs().into_iter().find_map(|output| match output {
            Output::Event(SequenceId(1), Event::Started(started)) => Some(started.cached_tokens),
            _ => None,
        });
        assert_eq!(started, Some(32));
    }

    #[test]
    fn a_preempted_sequence_finds_what_is_left_of_its_pages() {
        let mut small = setup(2, 6);
        small.context = 96;
        small.prefix_cache = true;
        let mut bench = Bench::new(small);
        bench.pace = Pace::of_step(Duration::from_millis(10));
        bench.arrive(counting("first", 15));
        bench.arrive(Request { cache_salt: "x".into(), ..counting("second", 15) });
        for request in ["first", "second"] {
            let id = bench.scheduler.by_request[request];
            bench.scheduler.sequences.get_mut(id).unwrap().max_tokens = 60;
        }
        let mut resumed = None;
        while !bench.scheduler.is_idle() {
            while let Some(plan) = bench.plan() {
                if let Some(Work::Prefill { chunks }) = plan.work
                    && bench.scheduler.preemptions > 0
                {
                    resumed.get_or_insert(chunks[0].start);
                }
            }
            if !bench.flights.is_empty() {
                bench.complete();
            }
        }
        assert!(resumed.is_some_and(|start| start > 0 && start % PAGE_TOKENS == 0), "{resumed:?}");
    }

    #[test]
    fn a_request_that_dumps_logits_does_not_run_ahead_and_runs_one_at_a_time() {
        let mut bench = Bench::new(setup(2, 16));
        for id in ["a", "b"] {
            bench.arrive(Request { dump_logits: true, ..request(id, 1, 3) });
        }
        for _ in 0..2 {
            for expected in [0, 1, 1] {
                match bench.work().unwrap() {
                    Work::Prefill { .. } => assert_eq!(expected, 0),
                    Work::Decode { steps, slots, .. } => {
                        assert_eq!((steps, slots.len()), (expected, 1))
                    }
                }
                assert_eq!(bench.plan(), None);
                bench.complete();
            }
        }
    }

    #[test]
    fn more_rows_than_the_largest_bucket_take_turns() {
        let mut narrow = setup(3, 32);
        narrow.capacity.buckets = vec![1, 2];
        let mut bench = Bench::new(narrow);
        bench.pace = Pace::of_step(Duration::from_millis(10));
        for id in ["a", "b", "c"] {
            bench.arrive(request(id, 1, 150));
        }
        let mut turns = [0; 3];
        for _ in 0..40 {
            if let Work::Decode { slots, .. } = bench.work().unwrap() {
                assert!(slots.len() <= 2);
                slots.iter().for_each(|slot| turns[slot.0 as usize] += 1);
            }
            bench.complete();
        }
        assert!(turns.iter().all(|&turns| turns >= 20), "{turns:?}");
    }

    #[test]
    fn a_row_too_many_for_a_good_step_takes_turns_with_the_others() {
        let mut bench = Bench::new(setup(5, 64));
        bench.pace.note_step(4, Duration::from_millis(10));
        bench.pace.note_step(5, Duration::from_millis(30));
        for id in ["a", "b", "c", "d", "e"] {
            bench.arrive(request(id, 1, 200));
        }
        let mut drawn = [0; 5];
        for _ in 0..21 {
            if let Work::Decode { slots, .. } = bench.work().unwrap() {
                assert_eq!(slots.len(), 4);
                slots.iter().for_each(|slot| drawn[slot.0 as usize] += 1);
            }
            bench.complete();
        }
        assert!(drawn.iter().all(|&drawn| (14..=17).contains(&drawn)), "{drawn:?}");
    }

    #[test]
    fn a_failed_device_ends_everything() {
        let mut bench = Bench::new(setup(2, 16));
        for id in ["a", "b", "c"] {
            bench.arrive(request(id, 1, 50));
        }
        bench.plan();
        bench.plan();
        bench.scheduler.fail("gone", bench.now);
        assert_eq!(bench.finished(), vec![FinishReason::Error("gone".into()); 3]);
        assert!(bench.scheduler.is_idle());
        assert_eq!(
            bench.scheduler.counts(),
            Counts { prompt_tokens: bench.scheduler.prompt_tokens, ..Counts::default() }
        );
        bench.scheduler.assert_consistent();
    }
}
