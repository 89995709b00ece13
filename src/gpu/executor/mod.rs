//! The executor on a device: turns plans into patches of device state and submissions of
//! recorded regions, and the token ring into tokens.
//! Deliberately absent: scheduling, and Vulkan other than through the actors.

mod inbox;
mod report;
mod submit;

use crate::actors::compute::Compute;
use crate::actors::timeline::{FlushReason, SubmissionRecord};
use crate::actors::watcher::{Outbox, Report};
use crate::device::{Device, Gate, Point};
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, PlanReport, Slot, StepPlan, Ticket, Work};
use crate::engine::variants::{Fallback, Variants};
use crate::gpu::overlap::OverlapRetry;
use crate::kernels::attention::Heads;
use crate::kernels::layout::StateLayout;
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::mask_words;
use crate::memory::Buffer;
use crate::model::decoder::RingLayout;
use crossbeam_channel::{Receiver, bounded};
pub use inbox::Inbox;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reports that may wait for the engine's thread: as many as plans in flight can make.
const REPORTS: usize = 1024;

/// How often a plan is run again after faults. Repeats have barriers, so a second fault is a device's or ours.
const MOST_REPEATS: u32 = 4;

/// A client should not wait longer than this for a token that the device has finished: of one row; with several, a
/// report is shared by as many more tokens and comes as much sooner.
const REPORT_EVERY: Duration = Duration::from_millis(16);

/// The regions of a decode bucket.
#[derive(Debug)]
pub struct DecodeRegions {
    /// With a barrier for every dependency.
    pub plain: DecodeRegion,
    /// The same step with tagged words in place of barriers, where the device passed the start's test. Both give the
    /// same bits.
    pub carried: Option<DecodeRegion>,
    /// For tests: `carried`, but one of its calls waits for words that are never written.
    pub broken: Option<DecodeRegion>,
}

/// Faults that tests inject.
#[derive(Clone, Copy, Debug, Default)]
pub struct Injection {
    /// The fault word is set before this decode plan, counted from 1; 0: never.
    pub plan: u32,
    /// The step with this number among those without barriers, counted from 1, has a broken call; 0: none.
    pub step: u32,
    /// Every so manieth step without barriers has; 0: none.
    pub every: u32,
}

impl Injection {
    fn breaks(self, step: u64) -> bool {
        step == u64::from(self.step) || self.every > 0 && step.is_multiple_of(self.every.into())
    }
}

/// A decode step, whole and in two parts.
#[derive(Clone, Debug)]
pub struct DecodeRegion {
    /// All of it.
    pub whole: Arc<Region>,
    /// Up to the logits, and from there on: behind the gate where a mask is still to come. Where there are gates.
    pub parts: Option<[Arc<Region>; 2]>,
}

/// What a replica's executor is made of; everything in it is allocated and recorded.
#[derive(Debug)]
pub struct Parts {
    /// What it can hold.
    pub capacity: Capacity,
    /// Device state.
    pub layout: StateLayout,
    /// Of attention, for its tiles.
    pub heads: Heads,
    /// Token ring.
    pub ring: RingLayout,
    /// Mapped: the token ring.
    pub ring_buffer: Arc<Buffer>,
    /// Mapped: `[slots][vocabulary / 32, rounded up]`, the tokens that a constrained slot may draw next.
    pub masks: Arc<Buffer>,
    /// What steps wait for whose masks are still to come.
    pub gate: Arc<Gate>,
    /// Mapped: the logits of a step that a slot asked for.
    pub dump: Arc<Buffer>,
    /// Copies row 0 of the logits there.
    pub dump_region: Arc<Region>,
    /// By rows.
    pub decode: BTreeMap<u32, DecodeRegions>,
    /// Steps that verify drafts, by drafts of a sequence and sequences.
    pub verify: BTreeMap<u32, BTreeMap<u32, Arc<Region>>>,
    /// The layers over a step of prompts, by rows.
    pub prefill: BTreeMap<u32, Arc<Region>>,
    /// What draws the first tokens of prompts, by their number.
    pub first: BTreeMap<u32, Arc<Region>>,
    /// What scores the next rows of a step of prompts, so many at a time.
    pub score: (u32, Arc<Region>),
    /// Mapped: what it finds, of two steps.
    pub scores: Arc<Buffer>,
    /// At least two; more than plans in flight, or `submit` waits.
    pub inboxes: Vec<Inbox>,
    /// Pairs that an inbox's patch holds.
    pub patch_pairs: u32,
    /// Rows that an inbox's tokens seen have.
    pub seen_rows: u32,
    /// The device's compute queue.
    pub compute: Arc<Compute>,
    /// What the first submission waits for: the weights' last copies.
    pub ready: Vec<Point>,
    /// What runs.
    pub variants: Arc<Variants>,
    /// For messages.
    pub device_name: String,
    /// The device, and the kernels' pipelines, for regions that are timed.
    pub device: Arc<Device>,
    /// As `device` says.
    pub pipelines: Pipelines,
    /// For tests.
    pub injection: Injection,
    /// How long steps run with barriers after a first fault.
    pub retry_after: Duration,
}

/// Runs plans on a device's compute queue.
#[derive(Debug)]
pub struct GpuExecutor {
    parts: Parts,
    outbox: Outbox,
    reports: Receiver<Report>,
    wake: Receiver<()>,
    next: u64,
    next_step: u32,
    pending: VecDeque<Pending>,
    /// Reports that were taken while waiting for an inbox.
    early: VecDeque<Report>,
    free_inboxes: Vec<usize>,
    /// Batch list on the device.
    batch: Vec<u32>,
    /// Slots whose logits are asked for.
    dumps: Vec<bool>,
    /// Slots whose log probabilities are asked for.
    logprobs: Vec<bool>,
    /// Values of the gate that submissions wait for, so far.
    gates: u64,
    pace: Pace,
    /// Chunks that were scored, so far: their scores go to each half of the buffer in turn.
    scored: u32,
    /// When steps run without barriers again after a fault.
    overlap: OverlapRetry,
    /// The plan that is being queued repeats steps of a fault, with barriers.
    repeats: bool,
    decode_plans: u32,
    /// Steps without barriers that were queued.
    carried_steps: u64,
    /// Plans with work that are still to be profiled.
    profiled: u32,
    /// Of plans that are not finished: the submissions that are, in order.
    submissions: VecDeque<(Ticket, SubmissionRecord)>,
}

#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    /// Steps that sample, the first of them, and rows of each.
    steps: u32,
    first_step: u32,
    rows: u32,
    /// Entries that are done.
    entries: u32,
    /// Tokens of a chunk that are scored.
    scoring: Option<Scoring>,
    /// Steps from this one on drew nothing because of a fault; `u32::MAX` if none is known.
    good: u32,
    /// With `good`, the fault word: the number of the call that waited too long.
    fault: u32,
    /// Faults that its plan has met with before it was submitted this time.
    faults: u32,
    work: Kind,
    /// Tokens of a step of prompts.
    prompt_tokens: u32,
    /// Of a decode plan, for the steps that have to be run again after a fault.
    slots: Vec<Slot>,
    /// Tokens drafted for each of them.
    drafts: u32,
    dump: bool,
    inboxes: Vec<usize>,
    /// Dispatches and barriers of the patches, and of each step.
    fixed: (u32, u32),
    each: (u32, u32),
    /// What its draw waits for.
    gate: Option<u64>,
    /// Its masks are still to come.
    awaits: bool,
    flush: FlushReason,
    submitted: Instant,
    started: bool,
}

/// Which tokens are scored, and where the scores will be.
#[derive(Clone, Copy, Debug)]
struct Scoring {
    slot: Slot,
    /// Position of the first.
    first: u32,
    tokens: u32,
    /// The first's entry.
    entry: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// There is nothing to report.
    Changes,
    /// Prompts of which none ends: a step without tokens.
    Prompts,
    /// Tokens are drawn.
    Sampled,
}

impl GpuExecutor {
    /// An executor over recorded regions.
    pub fn new(parts: Parts) -> GpuExecutor {
        let (sender, reports) = bounded(REPORTS);
        let (waker, wake) = bounded(1);
        let slots = parts.capacity.slots as usize;
        GpuExecutor {
            outbox: Outbox { reports: sender, wake: waker },
            reports,
            wake,
            next: 0,
            next_step: 0,
            pending: VecDeque::new(),
            early: VecDeque::new(),
            free_inboxes: (0..parts.inboxes.len()).collect(),
            batch: vec![u32::MAX - 1; parts.layout.rows as usize],
            dumps: vec![false; slots],
            logprobs: vec![false; slots],
            gates: 0,
            scored: 0,
            pace: Pace::default(),
            overlap: OverlapRetry::new(parts.retry_after),
            repeats: false,
            decode_plans: 0,
            carried_steps: 0,
            profiled: 0,
            submissions: VecDeque::new(),
            parts,
        }
    }
}

impl GpuExecutor {}

impl Pending {
    /// Of changes alone.
    fn changes(ticket: Ticket, inboxes: Vec<usize>) -> Pending {
        Pending {
            ticket,
            steps: 0,
            first_step: 0,
            rows: 0,
            entries: 0,
            good: u32::MAX,
            fault: 0,
            faults: 0,
            work: Kind::Changes,
            prompt_tokens: 0,
            scoring: None,
            slots: Vec::new(),
            drafts: 0,
            dump: false,
            inboxes,
            fixed: (0, 0),
            each: (0, 0),
            gate: None,
            awaits: false,
            flush: FlushReason::PhaseBoundary,
            submitted: Instant::now(),
            started: false,
        }
    }
}

impl Executor for GpuExecutor {
    fn capacity(&self) -> &Capacity {
        &self.parts.capacity
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecuteError> {
        let mut posts = self.changes(&plan.changes);
        let ticket = Ticket(self.next);
        self.next += 1;
        if matches!(plan.work, Some(Work::Decode { .. })) {
            self.decode_plans = self.decode_plans.wrapping_add(1);
            if self.decode_plans == self.parts.injection.plan {
                posts.patch.set(self.parts.layout.fault_word(), 1);
            }
        }
        self.enqueue(ticket, plan.work, posts)?;
        Ok(ticket)
    }

    fn wake(&self) -> &Receiver<()> {
        &self.wake
    }

    fn poll(&mut self) -> Result<Vec<PlanReport>, ExecuteError> {
        let mut progress = Vec::new();
        while let Some(report) = self.early.pop_front().or_else(|| self.reports.try_recv().ok()) {
            progress.extend(self.take(report)?);
        }
        Ok(progress)
    }

    fn set_mask(&mut self, slot: Slot, mask: &[u32]) {
        let words = mask_words(self.parts.capacity.vocabulary);
        assert_eq!(mask.len() as u32, words, "a mask has a bit for each token");
        self.parts.masks.write(u64::from(slot.0) * u64::from(words) * 4, bytemuck::cast_slice(mask));
    }

    fn release(&mut self, ticket: Ticket) -> Result<(), ExecuteError> {
        for pending in self.pending.iter_mut().filter(|pending| pending.ticket == ticket) {
            pending.awaits = false;
        }
        self.open_gate()
    }

    fn profile(&mut self, plans: u32) {
        self.profiled = plans;
    }

    fn faults(&self) -> u64 {
        self.parts.variants.fallen(Fallback::OverlapFault)
    }

    fn pace(&self) -> &Pace {
        &self.pace
    }

    fn variants(&self) -> Arc<Variants> {
        Arc::clone(&self.parts.variants)
    }
}

impl Drop for GpuExecutor {
    fn drop(&mut self) {
        // Nobody brings masks any more; what is drawn without is not reported.
        let _ = self.parts.gate.open(self.gates);
        // The device's work ends before what it works on goes. There is no limit: each submission is owed a last report,
        // also where the device is lost.
        let mut open: usize = self.pending.len() - self.early_finished().min(self.pending.len());
        while open > 0 {
            match self.reports.recv_timeout(Duration::from_secs(30)) {
                Ok(report) => open -= usize::from(report.last),
                Err(_) => tracing::warn!(device = self.parts.device_name, plans = open, "the device is still at work"),
            }
        }
    }
}
