//! The executor of a replica that is split over several devices: it runs every step of a plan on one stage after the
//! other, or on all devices at once if each has a part of every layer (tensor parallelism), and joins their reports.
//!
//! All steps are queued at once, behind gates. When a stage has finished a step, its device's watcher carries the rows'
//! activations to the next stage's memory and opens that stage's gate. When the last stage has drawn tokens, its watcher
//! carries the slots' changes to the other stages in the same way; a stage applies them before its next step of these
//! slots. So the next step of a sequence waits for its last token, and steps of other sequences, and a prompt's next
//! chunk, run on one device while the other one is busy with the steps before. A decode batch is divided into up to
//! as many parts as there are stages, so that each stage works on another part.
//!
//! Devices that each have a part of every layer begin a step together. Within it they exchange sums, which proxies carry
//! (`actors::proxy`): the kernels wait for them, or the step is divided there. The last device draws the tokens. If an exchange
//! ends before its words have come, nothing that was computed since is used, and the replica is rebuilt.
//!
//! Decode steps run without barriers where all devices can. A stage whose call waited too long for tagged words says so in
//! its message, so no later stage draws a token of that step, nor of steps behind it, until the fault words are reset. When
//! all steps of a plan are reported, those that drew nothing are queued again on all stages, with barriers.
//! Not here: what a device runs (`gpu::executor`), and which layers it has (`gpu::build::split`).

use crate::actors::proxy::{DeviceFault, ExchangeMemory, Exchanges, Proxies};
use crate::actors::thread::SpawnError;
use crate::actors::timeline::SubmissionRecord;
use crate::actors::watcher::Then;
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, Change, PLANS_IN_FLIGHT, PlanReport, Slot, StepPlan, Ticket, Work};
use crate::engine::variants::{Fallback, Variants};
use crate::gpu::executor::exchange::{BusyWait, LEAST_ROWS, RETURNED, StageStep, Sums, buffer_of, faulted_call, parts};
use crate::gpu::executor::{GpuExecutor, MOST_REPEATS, Parts};
use crate::gpu::overlap::OverlapRetry;
use crate::kernels::exchange::GateOf;
use crate::kernels::sampling::{Patch, patch_inbox};
use crate::kernels::state;
use crate::model::decoder::parallel::HEAD_EXCHANGES;
use crossbeam_channel::{Receiver, bounded};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Held while a step is queued on all of its devices. So the steps of all split replicas of the process are in one order on
/// every device: a step waits for its own parts on other devices, which must not be queued behind a step of another
/// replica that waits for this one in turn.
static ORDER: Mutex<()> = Mutex::new(());

/// Runs plans on the devices of a split replica.
#[derive(Debug)]
pub struct SplitExecutor {
    /// The stages in the order of their layers; at least two.
    stages: Vec<GpuExecutor>,
    wake: Receiver<()>,
    /// The ticket of the next plan.
    next: u64,
    /// The index of the buffers that the next plan with work uses, if they are free.
    next_buffers: usize,
    /// The number of steps so far, and of those that draw tokens.
    messages: u64,
    returns: u64,
    /// The threads that carry the parts of sums from device to device, with tensor parallelism; then all devices run a
    /// step at the same time.
    proxies: Option<Proxies>,
    /// The number of the next exchange of sums.
    exchange: u64,
    /// The steps that are not reported, in order.
    queued: VecDeque<QueuedStep>,
    /// When steps run without barriers again after a fault.
    overlap: OverlapRetry,
    /// Whether the fault word of a stage may still be set: since a step was reported as faulted, and until a repetition that
    /// resets the words is queued. Steps that are queued meanwhile draw nothing either.
    faulty: bool,
    /// During the test at start: whether steps run with barriers. No faults are injected meanwhile, and those that occur
    /// are counted here.
    testing: Option<bool>,
    test_faults: u32,
    /// The number of decode plans so far.
    decode_plans: u32,
    /// The number of each stage's first wait in the joined injections.
    first_waits: Vec<usize>,
    /// The changes of slots by earlier steps that the stages before the last have not been told to apply.
    unapplied: Vec<Unapplied>,
    /// The plans with work that are not reported to their end.
    flights: VecDeque<Flight>,
    /// For each stage, the reports of steps that another stage has not reported.
    reports: Vec<VecDeque<StageReport>>,
    pace: Pace,
    /// The number of plans with work that are still to be profiled.
    profiled: u32,
    last_report: Instant,
    variants: Arc<Variants>,
}

/// The changes of slots by a step.
#[derive(Debug)]
struct Unapplied {
    /// The buffers that carry them.
    buffer: usize,
    /// The number of the return that carries them.
    number: u64,
    slots: Vec<Slot>,
}

/// A plan with work.
#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    /// The index of the plan's buffers (`exchange::buffer_of`).
    of_plan: usize,
    /// The parts of its batch; a single one, if it is not divided.
    parts: Vec<BatchPart>,
    /// The number of steps, and of those that are reported.
    steps: u32,
    reported: u32,
    /// The number of times that steps were queued again.
    repeats: u32,
    /// The measurement that the time of a step belongs to.
    timed: Timed,
    submissions: Vec<SubmissionRecord>,
}

/// A part of a plan's batch.
#[derive(Debug)]
struct BatchPart {
    /// The work of each step.
    one: Work,
    /// The number of steps that all stages have reported.
    reported: u32,
    /// The number of queued steps that drew nothing because of a fault.
    faulted: u32,
    /// The reports on steps that the other parts have not reported.
    waiting: VecDeque<PlanReport>,
}

impl BatchPart {
    fn new(one: Work) -> BatchPart {
        BatchPart { one, reported: 0, faulted: 0, waiting: VecDeque::new() }
    }

    fn slots(&self) -> Vec<Slot> {
        match &self.one {
            Work::Prefill { chunks, decoding, .. } => {
                chunks.iter().map(|chunk| chunk.slot).chain(decoding.iter().copied()).collect()
            }
            Work::CatchUp { chunks } => chunks.iter().map(|chunk| chunk.slot).collect(),
            Work::Decode { slots, .. } => slots.clone(),
        }
    }
}

/// A step of a part of a plan's batch that is queued on all stages.
#[derive(Debug)]
struct QueuedStep {
    plan: Ticket,
    part: usize,
    /// The number of its last exchange of sums; 0 if it has none.
    last_sum: u64,
    /// Whether it was queued behind a step that faulted, and before the repetition of that step.
    behind: bool,
    /// The waits that tests break in it, with their stages.
    broken: Vec<(usize, usize)>,
}

/// How a step is run.
#[derive(Clone, Copy, Debug, Default)]
struct Manner {
    /// With barriers, whether or not stages pause.
    barriers: bool,
    /// The value that the fault words of all stages have before it, if they are set.
    reset: Option<u32>,
    /// For tests: whether the fault word of the first stage is set before it.
    fails: bool,
}

/// The report of a stage on a step, and the fault word if the step drew nothing because of a fault.
type StageReport = (PlanReport, Option<u32>);

/// The kind of step that a measured time belongs to.
#[derive(Clone, Copy, Debug)]
enum Timed {
    /// A prompt step of this many rows: tokens of prompts, and slots that decode in it.
    Chunk(u32),
    /// A decode step of this many rows.
    Step(u32),
    /// A verification of this many drafts of each of this many sequences.
    Verify(u32, u32),
    /// A step that is unlike all others; its time is not recorded.
    Nothing,
}

impl SplitExecutor {
    /// Creates an executor of the stages, in the order of their layers, or of the devices that each have a part of every
    /// layer. Fails only if these need a thread and the system cannot start one.
    ///
    /// # Panics
    /// If there are fewer than two, or their sizes differ.
    pub fn new(stages: Vec<Parts>, on_cpu: bool) -> Result<SplitExecutor, SpawnError> {
        assert!(stages.len() > 1, "{} stages", stages.len());
        let sizes = |parts: &Parts| {
            let Capacity { pages, window, slots, context, .. } = parts.capacity;
            (pages, window, slots, context, parts.layout)
        };
        assert!(stages.iter().all(|parts| sizes(parts) == sizes(&stages[0])), "stages have the same pages and slots");
        let microbatches = |parts: &Parts| parts.microbatches.keys().copied().collect::<Vec<u32>>();
        let agreed = stages.iter().all(|parts| microbatches(parts) == microbatches(&stages[0]));
        assert!(agreed, "devices compute the same steps in microbatches");
        let variants: Vec<Arc<Variants>> = stages.iter().map(|parts| Arc::clone(&parts.variants)).collect();
        let first_waits = variants.iter().scan(0, |first, variants| {
            let own = *first;
            *first += variants.injections().seen().len();
            Some(own)
        });
        let first_waits = first_waits.collect();
        let overlap = OverlapRetry::new(stages[0].retry_after);
        let (waker, wake) = bounded(1);
        let stages: Vec<GpuExecutor> =
            stages.into_iter().map(|parts| GpuExecutor::woken_by(parts, (waker.clone(), wake.clone()))).collect();
        let sums = stages.iter().map(|stage| stage.exchange().sums.as_ref()).collect::<Option<Vec<&Sums>>>();
        let memory = sums.map(|sums| ExchangeMemory {
            outboxes: sums.iter().map(|of| Arc::clone(&of.outbox)).collect(),
            inboxes: sums.iter().map(|of| Arc::clone(&of.inbox)).collect(),
            gates: sums.iter().filter_map(|of| of.divided.as_ref()).map(|of| Arc::clone(&of.gate)).collect(),
            slot_words: sums[0].slot_words,
            best_words: sums[0].best_words,
            on_cpu,
        });
        Ok(SplitExecutor {
            proxies: memory.map(Proxies::spawn).transpose()?,
            // Memory of zeros is complete words of exchange 0, and gates have the value 0.
            exchange: 1,
            reports: stages.iter().map(|_| VecDeque::new()).collect(),
            stages,
            wake,
            next: 0,
            next_buffers: 0,
            messages: 0,
            returns: 0,
            queued: VecDeque::new(),
            overlap,
            faulty: false,
            testing: None,
            test_faults: 0,
            decode_plans: 0,
            first_waits,
            unapplied: Vec::new(),
            flights: VecDeque::new(),
            pace: Pace::default(),
            profiled: 0,
            last_report: Instant::now(),
            variants: Arc::new(Variants::joined(&variants)),
        })
    }

    /// Computes all prompts whole from now on.
    pub(crate) fn forbid_microbatches(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.parts.microbatches.clear());
    }

    /// Returns the number of rows of the smallest step of prompts that is computed in microbatches, if there is one.
    pub(crate) fn rows_in_microbatches(&self) -> Option<u32> {
        self.last().parts.microbatches.keys().next().copied()
    }

    fn last(&self) -> &GpuExecutor {
        self.stages.last().expect("there are stages")
    }

    /// Removes and returns the changes of slots that must be applied before work of these slots, or before a buffer
    /// is used again: the buffers that they are in, and the number of the last of them.
    fn due(&mut self, slots: &[Slot], reused: Option<usize>) -> (Vec<usize>, u64) {
        let is_due = |one: &Unapplied| Some(one.buffer) == reused || one.slots.iter().any(|slot| slots.contains(slot));
        let (due, rest) = std::mem::take(&mut self.unapplied).into_iter().partition::<Vec<_>, _>(is_due);
        self.unapplied = rest;
        (due.iter().map(|one| one.buffer).collect(), due.iter().map(|one| one.number).max().unwrap_or(0))
    }

    /// Returns the function that carries the changes of slots from the last stage to all others.
    fn carry_back(&self, slots: &[Slot], buffer: usize, number: u64) -> Then {
        let (layout, slots) = (self.last().parts.layout, slots.to_vec());
        let published = self.last().exchange().publish.as_ref().expect("the last stage tells what it draws");
        let from = Arc::clone(&published.slots[buffer]);
        let applies = self.stages.iter().filter_map(|stage| stage.exchange().apply.as_ref());
        let to: Vec<_> = applies.map(|to| (Arc::clone(&to.inboxes[buffer]), Arc::clone(&to.gate))).collect();
        let busy_wait =
            self.stages.iter().filter_map(|stage| stage.exchange().busy_wait.as_ref().map(BusyWait::numbers));
        let busy_wait: Vec<_> = busy_wait.collect();
        Then::new(move || {
            let mut patch = Patch::default();
            let mut words = [0u32; state::SLOT_WORDS as usize];
            for slot in &slots {
                from.read(u64::from(layout.slot_word(slot.0, 0)) * 4, bytemuck::cast_slice_mut(&mut words));
                RETURNED.iter().for_each(|word| patch.set(layout.slot_word(slot.0, *word), words[*word as usize]));
            }
            let inbox = patch_inbox(&patch.into_pairs());
            to.iter().for_each(|(inbox_of, _)| inbox_of.write(0, bytemuck::cast_slice(&inbox)));
            busy_wait.iter().for_each(|numbers| BusyWait::tell(numbers, GateOf::Returns, number));
            // Only now: a stage between the first and the last waits for the first one's message instead.
            to.iter().try_for_each(|(_, gate)| gate.open(number))
        })
    }

    /// Queues one step of a part of a plan's batch on all stages, after changes. `joined` are the slots that the changes
    /// name, apart from their pages.
    fn step(
        &mut self,
        (changes, joined): (&[Change], &[Slot]),
        (flight, part): (&Flight, usize),
        manner: Manner,
    ) -> Result<(), ExecuteError> {
        let buffer = buffer_of(flight.of_plan, part);
        let work = &flight.parts[part].one;
        let named: Vec<Slot> = flight.parts[part].slots().into_iter().chain(joined.iter().copied()).collect();
        let drawn: Vec<Slot> = match work {
            Work::Prefill { chunks, decoding, .. } => {
                let lasts = chunks.iter().filter(|chunk| chunk.last).map(|chunk| chunk.slot);
                lasts.chain(decoding.iter().copied()).collect()
            }
            Work::CatchUp { .. } => Vec::new(),
            Work::Decode { slots, .. } => slots.clone(),
        };
        // The buffers are those of an earlier step.
        let (apply, applied_at) = self.due(&named, Some(buffer));
        self.messages += 1;
        let message = self.messages;
        let draws = !drawn.is_empty();
        self.returns += u64::from(draws);
        let rows = self.stages[0].step_rows(work);
        let allowed = self.testing.map_or_else(|| self.overlap.allows(Instant::now()), |barriers| !barriers);
        let barriers = manner.barriers || !allowed;
        let wait = self.variants.injections().next(rows, work.drafts()).filter(|_| self.testing.is_none());
        let broken_stage = wait.map(|wait| self.first_waits.partition_point(|first| *first <= wait) - 1);
        let fault_word = self.last().parts.layout.fault_word();
        let exchanges = self.carry_sums(work, rows, draws);
        let _order = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
        let mut broken = Vec::new();
        let passed = exchanges.is_none().then_some((rows, fault_word));
        let carriers = self.carriers(passed, (buffer, message), draws.then_some(&drawn[..]));
        for (index, then) in carriers.into_iter().enumerate() {
            let apply = apply.clone();
            let breaks = broken_stage == Some(index);
            let fault = if manner.fails && index == 0 { Some(1) } else { manner.reset };
            let step =
                StageStep { buffer, apply, applied_at, message, draws, barriers, breaks, fault, exchanges, then };
            let wait = self.stages[index].submit_step(changes, Some(work.clone()), step)?;
            broken.extend(wait.map(|wait| (index, wait)));
        }
        if draws {
            self.unapplied.push(Unapplied { buffer, number: self.returns, slots: drawn });
        }
        let last_sum = exchanges.map_or(0, |_| self.exchange - 1);
        self.queued.push_back(QueuedStep { plan: flight.ticket, part, last_sum, behind: self.faulty, broken });
        Ok(())
    }

    /// Returns the functions that carry a step's message of `passed` (the number of rows, and the offset of the fault word)
    /// from each stage to the next one, and the words of the slots in `drawn` from the last one back. Each follows that of
    /// the stage before.
    fn carriers(
        &self,
        passed: Option<(u32, u32)>,
        (buffer, message): (usize, u64),
        drawn: Option<&[Slot]>,
    ) -> Vec<Option<Then>> {
        let mut carriers: Vec<Option<Then>> = Vec::with_capacity(self.stages.len());
        for index in 0..self.stages.len() {
            let exchange = self.stages[index].exchange();
            let then = match self.stages.get(index + 1) {
                Some(next) => passed.map(|passed| exchange.carry(next.exchange(), index, passed, buffer, message)),
                None => drawn.map(|drawn| self.carry_back(drawn, buffer, self.returns)),
            };
            let then = match carriers.last_mut() {
                Some(Some(earlier)) => then.map(|then| then.behind(earlier)),
                _ => then,
            };
            carriers.push(then);
        }
        carriers
    }

    /// Has the words of a step with regions of `rows` rows carried between devices that each have a part of every layer, and
    /// returns the exchanges. `draws`: whether tokens are drawn.
    fn carry_sums(&mut self, work: &Work, rows: u32, draws: bool) -> Option<Exchanges> {
        let proxies = self.proxies.as_ref()?;
        let sums = self.last().exchange().sums.as_ref()?;
        // A prompt step exchanges the rows that it has, other steps all rows of their regions.
        let (rows, halves, turns) = match work {
            Work::Prefill { chunks, .. } => (work.prompt_rows(), sums.rounds_prompts, self.last().score_turns(chunks)),
            Work::CatchUp { .. } => (0, false, 0),
            Work::Decode { .. } => (rows, false, 0),
        };
        let first_microbatch = match work {
            Work::Prefill { chunks, decoding, .. } => {
                self.last().parts.first_microbatch(rows, (chunks.len(), decoding.len()))
            }
            Work::CatchUp { .. } | Work::Decode { .. } => None,
        };
        let (count, rows) = match first_microbatch {
            Some(first) => (2 * sums.each_step, [first, rows - first]),
            None => (sums.each_step, [rows; 2]),
        };
        let exchanges = Exchanges {
            first: self.exchange,
            count,
            floats: rows.map(|rows| rows * sums.row_floats),
            halves,
            turns: if sums.gathers { turns } else { 0 },
            of_head: if sums.gathers && draws { HEAD_EXCHANGES } else { 0 },
        };
        proxies.carry(exchanges);
        self.exchange = exchanges.end();
        Some(exchanges)
    }

    /// Returns an error if the devices have stopped exchanging sums: all their results since then are wrong.
    fn check_exchanges(&self) -> Result<(), ExecuteError> {
        match self.proxies.as_ref().is_some_and(Proxies::has_stopped) {
            true => Err(self.exchange_ended()),
            false => Ok(()),
        }
    }

    /// Returns the error of exchanges that have ended, after an error line about the device that told of a fault.
    fn exchange_ended(&self) -> ExecuteError {
        let Some(DeviceFault { device, exchange, word }) = self.proxies.as_ref().and_then(Proxies::fault) else {
            return ExecuteError::ExchangeEnded;
        };
        let device = self.stages.get(device).expect("proxies name devices of the replica");
        let behind = |queued: &&QueuedStep| queued.last_sum as u32 >= exchange;
        let step = self.queued.iter().find(behind).and_then(|queued| {
            let flight = self.flights.iter().find(|flight| flight.ticket == queued.plan)?;
            Some(&flight.parts[queued.part].one)
        });
        let (step, rows, call) = match step {
            Some(work @ Work::Decode { drafts, .. }) => {
                let rows = device.step_rows(work);
                ("decode", rows, device.polling_call((rows / (drafts + 1), *drafts), word))
            }
            Some(work @ Work::Prefill { .. }) => ("prefill", work.prompt_rows(), None),
            Some(Work::CatchUp { .. }) | None => ("unknown", 0, None),
        };
        let device = &device.parts.device_name;
        let call = call.unwrap_or("unknown");
        tracing::error!(device, exchange, step, rows, call, number = word, "a device has a fault in an exchange");
        ExecuteError::ExchangeEnded
    }

    /// Joins the stages' reports on the next step, which all of them have reported. Returns the report on the plan, unless
    /// the step drew nothing because of a fault.
    fn join(&mut self) -> Result<Option<PlanReport>, ExecuteError> {
        let mut reports: Vec<StageReport> = self.reports.iter_mut().filter_map(VecDeque::pop_front).collect();
        let (mut joined, fault) = reports.pop().expect("there are stages");
        let queued = self.queued.pop_front().expect("a report is on a queued step");
        // A kernel that has given up by itself leaves words behind that have not passed.
        if self.proxies.as_ref().is_some_and(|proxies| !proxies.have_carried(queued.last_sum)) {
            self.queued.push_front(queued);
            return Err(self.exchange_ended());
        }
        let at = self.flights.iter().position(|flight| flight.ticket == queued.plan).expect("a step belongs to a plan");
        let flight = &mut self.flights[at];
        for (earlier, _) in reports {
            assert_eq!(earlier.ticket, joined.ticket, "stages report the same steps");
            joined.cost.add(&earlier.cost, 1.0);
            flight.submissions.extend(earlier.submissions);
        }
        flight.submissions.append(&mut joined.submissions);
        let part = &mut flight.parts[queued.part];
        if fault.is_some() && self.proxies.is_some() {
            return Err(ExecuteError::ExchangeEnded);
        }
        if let Some(word) = fault {
            part.faulted += 1;
            let over = flight.parts.iter().all(|part| part.reported + part.faulted == flight.steps);
            if !queued.behind {
                self.note_fault(at, &queued, word);
            }
            if over {
                self.repeat(at)?;
            }
            return Ok(None);
        }
        part.reported += joined.steps;
        part.waiting.push_back(joined);
        if flight.parts.iter().any(|part| part.waiting.is_empty()) {
            // What other parts lack may be steps that faulted.
            if flight.parts.iter().all(|part| part.reported + part.faulted == flight.steps) {
                self.repeat(at)?;
            }
            return Ok(None);
        }
        let mut reports: Vec<PlanReport> =
            flight.parts.iter_mut().filter_map(|part| part.waiting.pop_front()).collect();
        let mut joined = reports.remove(0);
        let since = std::mem::replace(&mut self.last_report, Instant::now()).elapsed();
        // The sum over all stages: a step of a sequence takes as long. Parts are on different stages at a time.
        let stages_at_a_time = match self.proxies {
            Some(_) => self.stages.len(),
            None => (1 + reports.len()).min(self.stages.len()),
        };
        for other in reports {
            joined.cost.add(&other.cost, 1.0);
            joined.tokens.extend(other.tokens);
        }
        flight.reported += joined.steps;
        joined.ticket = flight.ticket;
        joined.finished = flight.reported >= flight.steps;
        let time = match joined.cost.gpu_us {
            0.0 => since,
            us => Duration::from_secs_f64(us / 1e6) / stages_at_a_time as u32,
        };
        match flight.timed {
            Timed::Chunk(tokens) => self.pace.note_chunk(tokens, time),
            Timed::Step(rows) => self.pace.note_step(rows, time),
            Timed::Verify(sequences, drafts) => self.pace.note_verify(sequences, drafts, time),
            Timed::Nothing => {}
        }
        if joined.finished
            && let Some(flight) = self.flights.remove(at)
        {
            joined.faults = flight.repeats;
            joined.submissions = flight.submissions;
        }
        Ok(Some(joined))
    }

    /// Records that a call of a plan's step timed out while it polled for tagged words. Pauses steps without barriers on all
    /// stages, unless they are already paused.
    fn note_fault(&mut self, flight: usize, queued: &QueuedStep, word: u32) {
        // The fault words stay set until the repetition, which is not queued yet.
        self.faulty = true;
        for step in &mut self.queued {
            step.behind = true;
        }
        if self.testing.is_some() {
            self.test_faults += 1;
            return;
        }
        let part = &self.flights[flight].parts[queued.part];
        let (stage, call) = faulted_call(word, self.stages.len());
        let token = part.slots().iter().find_map(|slot| self.last().drawn[slot.0 as usize]);
        let own = queued.broken.iter().find(|(of, _)| *of == stage).map(|(_, wait)| *wait);
        self.stages[stage].parts.variants.injections().note_fault(own, call, token);
        let joined = own.map(|wait| self.first_waits[stage] + wait);
        self.variants.injections().note_quietly(joined, call, token);
        let Some(pause) = self.overlap.fault(Instant::now()) else { return };
        self.variants.fell_back(Fallback::OverlapFault);
        let work = &self.flights[flight].parts[queued.part].one;
        let (rows, drafts) = (self.stages[stage].step_rows(work), work.drafts());
        self.stages[stage].warn_of_fault((rows / (drafts + 1), drafts), call, pause);
    }

    /// Returns the number of parts into which a decode batch is divided.
    fn parts_of(&self, slots: &[Slot], drafts: u32) -> usize {
        // Only one row of logits can be kept at a time, and the test at start wants steps of all rows.
        let whole = self.proxies.is_some()
            || drafts > 0
            || self.testing.is_some()
            || slots.iter().any(|slot| self.last().dumps[slot.0 as usize]);
        if whole { 1 } else { parts(self.stages.len() as u32).min(slots.len() / LEAST_ROWS).max(1) }
    }

    /// Queues again, with barriers, the steps of a plan that drew nothing because of a fault. They then draw what they would
    /// have drawn, for the reasons at [`GpuExecutor::run_again`]: stages before the last compute from words of the slots that
    /// came back unchanged. Plans that were queued behind the faulted step are behind its repetition in turn, because their
    /// own repetitions are queued when they are reported.
    fn repeat(&mut self, at: usize) -> Result<(), ExecuteError> {
        let mut flight = self.flights.remove(at).expect("its step has been reported");
        if flight.repeats >= MOST_REPEATS {
            return Err(ExecuteError::Failed(format!(
                "a decode plan of a split replica has faulted {} times, at most {MOST_REPEATS} repeats are tried",
                flight.repeats + 1
            )));
        }
        flight.repeats += 1;
        let mut left = Vec::new();
        for part in &mut flight.parts {
            let Work::Decode { slots, .. } = &part.one else {
                unreachable!("prompts heed no fault word: they run with barriers and draw their tokens")
            };
            // Nor do steps that verify drafts.
            part.one = Work::Decode { slots: slots.clone(), steps: 1, drafts: 0, awaits: false };
            left.push(std::mem::take(&mut part.faulted));
        }
        self.faulty = false;
        let mut reset = Some(0);
        let steps = 0..left.iter().copied().max().unwrap_or(0);
        // A part lacks a step more than those before it, if the fault was between them.
        let again = steps.flat_map(|step| (0..left.len()).map(move |part| (step, part)));
        let queued = again.filter(|(step, part)| *step < left[*part]).try_for_each(|(_, part)| {
            let manner = Manner { barriers: true, reset: reset.take(), fails: false };
            self.step((&[], &[]), (&flight, part), manner)
        });
        self.flights.insert(at, flight);
        queued
    }

    /// Waits for all steps that are queued, and returns the reports. For the test at start.
    pub(crate) fn finish(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        let mut reports = Vec::new();
        while !self.queued.is_empty() {
            // It ends: each submission gets a last report, even if the device is lost.
            let _ = self.wake.recv_timeout(Duration::from_millis(100));
            reports.extend(self.poll()?);
        }
        Ok(reports)
    }

    /// Begins the test at start, or a part of it: all steps run with barriers, or without.
    pub(crate) fn test(&mut self, barriers: bool) {
        self.testing = Some(barriers);
    }

    /// Returns the numbers of rows of decode steps that run without barriers on at least one device.
    pub(crate) fn overlapping_rows(&self) -> BTreeSet<u32> {
        let decode = self.stages.iter().flat_map(|stage| &stage.parts.decode);
        decode.filter(|(_, regions)| regions.carried.is_some()).map(|(rows, _)| *rows).collect()
    }

    /// Has decode steps of `rows` rows run with barriers from now on, because they failed their test.
    pub(crate) fn drop_overlap(&mut self, rows: u32) {
        for stage in &mut self.stages {
            if let Some(regions) = stage.parts.decode.get_mut(&rows) {
                regions.carried = None;
                regions.broken.clear();
            }
        }
        self.variants.fell_back(Fallback::OverlapTest);
    }

    /// Ends the test at start: forgets the times of its steps. Returns the number of faults.
    pub(crate) fn end_test(&mut self) -> u32 {
        self.testing = None;
        self.pace = Pace::default();
        self.stages.iter_mut().for_each(|stage| stage.carried_steps = 0);
        std::mem::take(&mut self.test_faults)
    }
}

impl Executor for SplitExecutor {
    fn capacity(&self) -> &Capacity {
        &self.last().parts.capacity
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        let ticket = Ticket(self.next);
        self.next += 1;
        // Pages are no words of a slot that a step changes.
        let changed = plan.changes.iter().filter_map(|change| match change {
            Change::Join { slot, .. } | Change::Leave { slot } => Some(*slot),
            Change::Pages { .. } => None,
        });
        let changed: Vec<Slot> = changed.collect();
        let Some(work) = plan.work else {
            let (apply, applied_at) = self.due(&changed, None);
            for stage in &mut self.stages {
                let apply = apply.clone();
                let step = StageStep { apply, applied_at, ..StageStep::default() };
                stage.submit_step(&plan.changes, None, step)?;
            }
            return Ok(ticket);
        };
        assert!(self.flights.len() < PLANS_IN_FLIGHT, "{} plans are in flight", self.flights.len());
        // In turn, unless a plan in flight uses the next ones: it runs again after a fault.
        let mut turns = (0..PLANS_IN_FLIGHT).map(|turn| (self.next_buffers + turn) % PLANS_IN_FLIGHT);
        let free = |of_plan: &usize| self.flights.iter().all(|flight| flight.of_plan != *of_plan);
        let of_plan = turns.find(free).expect("there are as many buffers as plans in flight");
        self.next_buffers = of_plan + 1;
        let rows = self.stages[0].step_rows(&work);
        let timed = match &work {
            Work::Prefill { chunks, .. } if chunks.iter().any(|chunk| chunk.score.is_some()) => Timed::Nothing,
            Work::Prefill { .. } => Timed::Chunk(work.prompt_rows()),
            Work::CatchUp { .. } => Timed::Nothing,
            Work::Decode { drafts: 0, .. } => Timed::Step(rows),
            Work::Decode { drafts, .. } => Timed::Verify(rows / (drafts + 1), *drafts),
        };
        let steps = work.steps();
        if self.profiled > 0 {
            self.profiled -= 1;
            self.stages.iter_mut().for_each(|stage| stage.profile(1));
        }
        let every = self.variants.injections().every();
        self.stages.iter().for_each(|stage| stage.parts.variants.injections().set_every(every));
        let decodes = matches!(work, Work::Decode { .. });
        self.decode_plans = self.decode_plans.wrapping_add((decodes && self.testing.is_none()).into());
        let fails = decodes && self.testing.is_none() && self.decode_plans == self.stages[0].parts.injection.plan;
        let works = match work {
            Work::Decode { slots, drafts, awaits, .. } => {
                assert!(!awaits, "a split replica has no gates for masks");
                let each = slots.len().div_ceil(self.parts_of(&slots, drafts));
                let part = |slots: &[Slot]| Work::Decode { slots: slots.to_vec(), steps: 1, drafts, awaits };
                slots.chunks(each).map(part).collect()
            }
            prefill => {
                assert!(!prefill.awaits(), "a split replica has no gates for masks");
                vec![prefill]
            }
        };
        let parts = works.into_iter().map(BatchPart::new).collect();
        let flight = Flight { ticket, of_plan, parts, steps, reported: 0, repeats: 0, timed, submissions: Vec::new() };
        for (step, part) in (0..steps).flat_map(|step| (0..flight.parts.len()).map(move |part| (step, part))) {
            let first = step == 0 && part == 0;
            let changes = if first { (&plan.changes[..], &changed[..]) } else { (&[][..], &[][..]) };
            self.step(changes, (&flight, part), Manner { fails: fails && first, ..Manner::default() })?;
        }
        self.flights.push_back(flight);
        Ok(ticket)
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        for (stage, reports) in self.stages.iter_mut().zip(&mut self.reports) {
            for report in stage.poll()? {
                let fault = stage.faulted.pop_front_if(|(ticket, _)| *ticket == report.ticket);
                reports.push_back((report, fault.map(|(_, word)| word)));
            }
        }
        // After the reports were taken: sums of steps that have ended before have come.
        self.check_exchanges()?;
        let mut joined = Vec::new();
        while self.reports.iter().all(|reports| !reports.is_empty()) {
            joined.extend(self.join()?);
        }
        Ok(joined)
    }

    fn set_mask(&mut self, slot: Slot, mask: &[u32]) {
        self.stages.last_mut().expect("there are stages").set_mask(slot, mask);
    }

    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        Err(ExecuteError::Failed(format!("no plan of a split replica waits for masks, {ticket:?} either")))
    }

    fn profile(&mut self, plans: u32) {
        self.profiled = plans;
    }

    fn faults(&self) -> u64 {
        self.variants.fallen(Fallback::OverlapFault)
    }

    fn pace(&self) -> &Pace {
        &self.pace
    }

    fn variants(&self) -> Arc<Variants> {
        Arc::clone(&self.variants)
    }
}

impl Drop for SplitExecutor {
    fn drop(&mut self) {
        // Steps may wait for others that a lost device does not finish. What they compute now is not reported.
        if let Some(proxies) = &self.proxies {
            proxies.stop();
        }
        let last = self.messages.max(self.returns);
        for stage in &self.stages {
            // A gate of a lost device cannot be opened, and nothing waits at it.
            let _ = stage.open_all(last);
        }
    }
}
