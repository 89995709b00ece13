//! The executor of a replica whose layers are split over several devices: it runs every step of a plan on one stage after
//! the other, and joins the stages' reports.
//!
//! All steps are queued at once, behind gates. When a stage has finished a step, its device's watcher carries the rows'
//! activations to the next stage's memory and opens that stage's gate. When the last stage has drawn tokens, its watcher
//! carries the slots' changes to the other stages in the same way; a stage applies them before its next step of these
//! slots. So the next step of a sequence waits for its last token, and steps of other sequences, and a prompt's next
//! chunk, run on one device while the other one is busy with the steps before.
//! Not here: what a device runs (`gpu::executor`), and which layers it has (`gpu::build::split`).

use crate::actors::timeline::SubmissionRecord;
use crate::actors::watcher::Then;
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, Change, PLANS_IN_FLIGHT, PlanReport, Slot, StepPlan, Ticket, Work};
use crate::engine::variants::Variants;
use crate::gpu::executor::exchange::{RETURNED, StageStep};
use crate::gpu::executor::{GpuExecutor, Parts};
use crate::kernels::sampling::{Patch, patch_inbox};
use crate::kernels::state;
use crossbeam_channel::{Receiver, bounded};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs plans on the devices of a split replica.
#[derive(Debug)]
pub struct SplitExecutor {
    /// In the order of their layers; at least two.
    stages: Vec<GpuExecutor>,
    wake: Receiver<()>,
    /// The ticket of the next plan, and the number of plans with work so far.
    next: u64,
    works: usize,
    /// The number of steps so far, and of those that draw tokens.
    messages: u64,
    returns: u64,
    /// The changes of slots by earlier steps that the stages before the last have not been told to apply.
    unapplied: Vec<Unapplied>,
    /// The plans with work that are not reported to their end.
    flights: VecDeque<Flight>,
    /// For each stage, the reports of steps that another stage has not reported.
    reports: Vec<VecDeque<PlanReport>>,
    pace: Pace,
    /// The number of plans with work that are still to be profiled.
    profiled: u32,
    last_report: Instant,
    variants: Arc<Variants>,
}

/// The changes of slots by the last step of a plan.
#[derive(Debug)]
struct Unapplied {
    /// Which of each pair of buffers the plan uses.
    of_plan: usize,
    /// The number of the return that carries them.
    number: u64,
    slots: Vec<Slot>,
}

/// A plan with work.
#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    /// The number of steps, and of those that are reported.
    steps: u32,
    reported: u32,
    /// What is noted about the time of a step.
    timed: Timed,
    submissions: Vec<SubmissionRecord>,
}

/// What the time of a step is the time of.
#[derive(Clone, Copy, Debug)]
enum Timed {
    /// A prompt chunk of this many tokens.
    Chunk(u32),
    /// A decode step of this many rows.
    Step(u32),
    /// A verification of this many drafts of each of this many sequences.
    Verify(u32, u32),
    /// Of something that other steps are not like.
    Nothing,
}

impl SplitExecutor {
    /// Creates an executor of the stages, in the order of their layers.
    ///
    /// # Panics
    /// If there are fewer than two, or their sizes differ.
    pub fn new(stages: Vec<Parts>) -> SplitExecutor {
        assert!(stages.len() > 1, "{} stages", stages.len());
        let sizes = |parts: &Parts| {
            let Capacity { pages, window, slots, context, .. } = parts.capacity;
            (pages, window, slots, context, parts.layout)
        };
        assert!(stages.iter().all(|parts| sizes(parts) == sizes(&stages[0])), "stages have the same pages and slots");
        let variants: Vec<Arc<Variants>> = stages.iter().map(|parts| Arc::clone(&parts.variants)).collect();
        let (waker, wake) = bounded(1);
        let stages: Vec<GpuExecutor> =
            stages.into_iter().map(|parts| GpuExecutor::woken_by(parts, (waker.clone(), wake.clone()))).collect();
        SplitExecutor {
            reports: stages.iter().map(|_| VecDeque::new()).collect(),
            stages,
            wake,
            next: 0,
            works: 0,
            messages: 0,
            returns: 0,
            unapplied: Vec::new(),
            flights: VecDeque::new(),
            pace: Pace::default(),
            profiled: 0,
            last_report: Instant::now(),
            variants: Arc::new(Variants::joined(&variants)),
        }
    }

    fn last(&self) -> &GpuExecutor {
        self.stages.last().expect("there are stages")
    }

    /// Removes and returns the changes of slots that must be applied before work of these slots, or before the buffers
    /// of a plan are used again: the buffers that they are in, and the number of the last of them.
    fn due(&mut self, slots: &[Slot], reused: Option<usize>) -> (Vec<usize>, u64) {
        let is_due = |one: &Unapplied| Some(one.of_plan) == reused || one.slots.iter().any(|slot| slots.contains(slot));
        let (due, rest) = std::mem::take(&mut self.unapplied).into_iter().partition::<Vec<_>, _>(is_due);
        self.unapplied = rest;
        (due.iter().map(|one| one.of_plan).collect(), due.iter().map(|one| one.number).max().unwrap_or(0))
    }

    /// Returns the function that carries the changes of slots from the last stage to all others.
    fn carry_back(&self, slots: &[Slot], of_plan: usize, number: u64) -> Then {
        let (layout, slots) = (self.last().parts.layout, slots.to_vec());
        let published = self.last().exchange().publish.as_ref().expect("the last stage tells what it draws");
        let from = Arc::clone(&published.slots[of_plan]);
        let applies = self.stages.iter().filter_map(|stage| stage.exchange().apply.as_ref());
        let to: Vec<_> = applies.map(|to| (Arc::clone(&to.inboxes[of_plan]), Arc::clone(&to.gate))).collect();
        Then::new(move || {
            let mut patch = Patch::default();
            let mut words = [0u32; state::SLOT_WORDS as usize];
            for slot in &slots {
                from.read(u64::from(layout.slot_word(slot.0, 0)) * 4, bytemuck::cast_slice_mut(&mut words));
                RETURNED.iter().for_each(|word| patch.set(layout.slot_word(slot.0, *word), words[*word as usize]));
            }
            let inbox = patch_inbox(&patch.into_pairs());
            to.iter().for_each(|(inbox_of, _)| inbox_of.write(0, bytemuck::cast_slice(&inbox)));
            // Only now: a stage between the first and the last waits for the first one's message instead.
            to.iter().try_for_each(|(_, gate)| gate.open(number))
        })
    }

    /// Queues one step on all stages.
    fn step(&mut self, changes: &[Change], work: &Work, of_plan: usize, named: &[Slot]) -> Result<(), ExecuteError> {
        let drawn: Vec<Slot> = match work {
            Work::Prefill { chunks } => chunks.iter().filter(|chunk| chunk.last).map(|chunk| chunk.slot).collect(),
            Work::Decode { slots, .. } => slots.clone(),
        };
        // Of the buffers of a plan, those of the plan before last are used again.
        let (apply, applied_at) = self.due(named, Some(of_plan));
        self.messages += 1;
        let message = self.messages;
        let draws = !drawn.is_empty();
        self.returns += u64::from(draws);
        let rows = self.stages[0].step_rows(work);
        for index in 0..self.stages.len() {
            let then = match self.stages.get(index + 1) {
                Some(next) => Some(self.stages[index].exchange().carry(next.exchange(), rows, of_plan, message)),
                None => draws.then(|| self.carry_back(&drawn, of_plan, self.returns)),
            };
            let apply = apply.clone();
            let step = StageStep { of_plan, apply, applied_at, message, draws, then };
            self.stages[index].submit_step(changes, Some(work.clone()), step)?;
        }
        if draws {
            self.unapplied.push(Unapplied { of_plan, number: self.returns, slots: drawn });
        }
        Ok(())
    }

    /// Returns the report on the next step that all stages have reported, if there is one.
    fn joined(&mut self) -> Option<PlanReport> {
        if self.reports.iter().any(VecDeque::is_empty) {
            return None;
        }
        let mut reports: Vec<PlanReport> = self.reports.iter_mut().filter_map(VecDeque::pop_front).collect();
        let mut joined = reports.pop().expect("there are stages");
        let flight = self.flights.front_mut().expect("a step belongs to a plan");
        for earlier in reports {
            assert_eq!(earlier.ticket, joined.ticket, "stages report the same steps");
            joined.cost.add(&earlier.cost, 1.0);
            flight.submissions.extend(earlier.submissions);
        }
        flight.submissions.append(&mut joined.submissions);
        flight.reported += joined.steps;
        joined.ticket = flight.ticket;
        joined.finished = flight.reported >= flight.steps;
        let since = std::mem::replace(&mut self.last_report, Instant::now()).elapsed();
        // The sum over all stages: a step of a sequence takes as long.
        let time = match joined.cost.gpu_us {
            0.0 => since,
            us => Duration::from_secs_f64(us / 1e6),
        };
        match flight.timed {
            Timed::Chunk(tokens) => self.pace.note_chunk(tokens, time),
            Timed::Step(rows) => self.pace.note_step(rows, time),
            Timed::Verify(sequences, drafts) => self.pace.note_verify(sequences, drafts, time),
            Timed::Nothing => {}
        }
        if joined.finished
            && let Some(flight) = self.flights.pop_front()
        {
            joined.submissions = flight.submissions;
        }
        Some(joined)
    }
}

impl Executor for SplitExecutor {
    fn capacity(&self) -> &Capacity {
        &self.last().parts.capacity
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        let ticket = Ticket(self.next);
        self.next += 1;
        let changed = plan.changes.iter().map(|change| match change {
            Change::Join { slot, .. } | Change::Pages { slot, .. } | Change::Leave { slot } => *slot,
        });
        let mut named: Vec<Slot> = changed.chain(plan.slots()).collect();
        named.sort_unstable();
        named.dedup();
        let Some(work) = plan.work else {
            let (apply, applied_at) = self.due(&named, None);
            for stage in &mut self.stages {
                let apply = apply.clone();
                let step = StageStep { of_plan: 0, apply, applied_at, message: 0, draws: false, then: None };
                stage.submit_step(&plan.changes, None, step)?;
            }
            return Ok(ticket);
        };
        assert!(self.flights.len() < PLANS_IN_FLIGHT, "{} plans are in flight", self.flights.len());
        let of_plan = self.works % PLANS_IN_FLIGHT;
        self.works += 1;
        let rows = self.stages[0].step_rows(&work);
        let timed = match &work {
            Work::Prefill { chunks } if chunks.iter().any(|chunk| chunk.score.is_some()) => Timed::Nothing,
            Work::Prefill { chunks } => Timed::Chunk(chunks.iter().map(|chunk| chunk.tokens.len() as u32).sum()),
            Work::Decode { drafts: 0, .. } => Timed::Step(rows),
            Work::Decode { drafts, .. } => Timed::Verify(rows / (drafts + 1), *drafts),
        };
        let steps = work.steps();
        self.flights.push_back(Flight { ticket, steps, reported: 0, timed, submissions: Vec::new() });
        if self.profiled > 0 {
            self.profiled -= 1;
            self.stages.iter_mut().for_each(|stage| stage.profile(1));
        }
        let one = match work {
            Work::Decode { slots, drafts, awaits, .. } => {
                assert!(!awaits, "a split replica has no gates for masks");
                Work::Decode { slots, steps: 1, drafts, awaits }
            }
            prefill => prefill,
        };
        for step in 0..steps {
            let changes = if step == 0 { &plan.changes[..] } else { &[] };
            self.step(changes, &one, of_plan, &named)?;
        }
        Ok(ticket)
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        for (stage, reports) in self.stages.iter_mut().zip(&mut self.reports) {
            reports.extend(stage.poll()?);
        }
        Ok(std::iter::from_fn(|| self.joined()).collect())
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
        let last = self.messages.max(self.returns);
        for stage in &self.stages {
            // A gate of a lost device cannot be opened, and nothing waits at it.
            let _ = stage.open_all(last);
        }
    }
}
