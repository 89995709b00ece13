//! The executor on a device: turns plans into patches of the device state and submissions of recorded regions, and
//! turns the entries of the token ring into tokens.
//! Not here: scheduling, and calls of Vulkan other than through the actors.

pub mod exchange;
mod inbox;
mod report;
pub mod split;
mod submit;

use crate::actors::compute::Compute;
use crate::actors::timeline::{FlushReason, SubmissionRecord};
use crate::actors::watcher::{Outbox, Report, Then};
use crate::device::{Device, Gate, Point};
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::pace::Pace;
use crate::engine::plan::{Capacity, PlanReport, Slot, StepPlan, Ticket, Work};
use crate::engine::variants::{Fallback, Variants};
use crate::gpu::overlap::OverlapRetry;
use crate::kernels::layout::StateLayout;
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::mask_words;
use crate::memory::Buffer;
use crate::model::decoder::RingLayout;
use crossbeam_channel::{Receiver, Sender, bounded};
use exchange::Exchange;
pub use inbox::{CountInbox, Inbox};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The capacity of the report channel: the number of reports that the plans in flight can produce.
const REPORTS: usize = 1024;

/// The maximum number of repetitions of a plan after faults. Repetitions run with barriers, so another fault is an
/// error of the device or of this program.
const MOST_REPEATS: u32 = 4;

/// The maximum time that a client should wait for a token that the device has finished, for a batch of one row. In a
/// batch of n rows each step gives n tokens, and the limit is 1/n of this.
const REPORT_EVERY: Duration = Duration::from_millis(16);

/// The regions of a bucket of decode or verification steps.
#[derive(Debug)]
pub struct DecodeRegions {
    /// Whether the activations of these steps are tagged, with barriers or without.
    pub tagged: bool,
    /// The step with a barrier for every dependency.
    pub plain: DecodeRegion,
    /// The step with tagged words instead of barriers, if it passed the test at start. Both forms give the same
    /// results, bit for bit.
    pub carried: Option<DecodeRegion>,
    /// For tests: `carried` with one call that waits for words that are never written, by the index of the wait in the
    /// replica's injections (`engine::injection`).
    pub broken: BTreeMap<usize, DecodeRegion>,
}

/// The steps into which tests inject faults, beside those of `engine::injection`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Injection {
    /// The number of the decode plan, counted from 1, before which the fault word is set; 0 for none.
    pub plan: u32,
    /// The number of the step without barriers, counted from 1, that contains a broken call; 0 for none.
    pub step: u32,
}

/// A decode step, as a whole and split in two parts.
#[derive(Clone, Debug)]
pub struct DecodeRegion {
    /// The whole step.
    pub whole: Arc<Region>,
    /// The part up to the logits, and the part from sampling on, which runs behind the gate while a mask is still to
    /// come; `None` if the device does not use gates.
    pub parts: Option<[Arc<Region>; 2]>,
}

/// The parts with which tokens are drawn and reach the host.
#[derive(Debug)]
pub struct HeadParts {
    /// The dimensions of the token ring.
    pub ring: RingLayout,
    /// Mapped memory: the token ring.
    pub ring_buffer: Arc<Buffer>,
    /// Mapped memory: `[slots][vocabulary / 32, rounded up]` words, the bit mask of the tokens that a constrained slot
    /// may draw next.
    pub masks: Arc<Buffer>,
    /// The timeline semaphore that steps wait for if their masks are still to come.
    pub gate: Arc<Gate>,
    /// Mapped memory: the logits of a step, for a slot that requested them.
    pub dump: Arc<Buffer>,
    /// Copies row 0 of the logits to `dump`.
    pub dump_region: Arc<Region>,
    /// Mapped memory: the scores, of two chunks.
    pub scores: Arc<Buffer>,
    /// The region that pools rows of a prefill step.
    pub pool: Arc<Region>,
    /// The number of values of a hidden state, and the number of floats per row of `pooled`.
    pub hidden: (u32, u32),
    /// Mapped memory: the pooled rows of two prefill steps.
    pub pooled: Arc<Buffer>,
}

/// Draws tokens of prompts and of slots that decode in the same step, without drafts.
#[derive(Debug)]
pub struct MixedHead {
    /// The region.
    pub whole: Arc<Region>,
    /// The same, to be run behind the gate while a mask is still to come; `None` if the device does not use gates.
    pub gated: Option<Arc<Region>>,
}

/// The regions of a prefill step behind its layers that compute logits.
#[derive(Debug)]
pub struct LogitRegions {
    /// The regions that draw the first tokens of prompts, by number of prompts.
    pub first: BTreeMap<u32, Arc<Region>>,
    /// The regions that draw tokens of prompts and of slots that decode in the same step, by the number of both; empty if no
    /// slots do.
    pub mixed: BTreeMap<u32, MixedHead>,
    /// The region that scores the next rows of a prefill step, and the number of rows that one run scores.
    pub score: (u32, Arc<Region>),
}

/// The parts of which a replica's executor consists, with everything allocated and recorded.
#[derive(Debug)]
pub struct Parts {
    /// The capacity that the executor reports to the scheduler.
    pub capacity: Capacity,
    /// The layout of the device state.
    pub layout: StateLayout,
    /// The parts around the sampler; `None` in all stages of a split replica but the last.
    pub head: Option<HeadParts>,
    /// The regions that compute logits behind the layers of a prefill step; `None` in stages that compute none.
    pub logits: Option<LogitRegions>,
    /// The buffers, regions and gates by which a stage of a split replica exchanges data with the others; `None` if the
    /// replica is not split.
    pub exchange: Option<Exchange>,
    /// The decode regions, by number of rows.
    pub decode: BTreeMap<u32, DecodeRegions>,
    /// The verification regions, by drafts per sequence, then by number of sequences.
    pub verify: BTreeMap<u32, BTreeMap<u32, DecodeRegions>>,
    /// The regions that run the layers of a prefill step, by number of rows.
    pub prefill: BTreeMap<u32, Arc<Region>>,
    /// Those of prefill steps in two microbatches, the first one of half of these rows; none without tensor parallelism.
    pub microbatches: BTreeMap<u32, Arc<Region>>,
    /// The regions in which a draft model computes tokens that it has not computed, by number of rows; none if it computes all
    /// of them in their own steps.
    pub catch_up: BTreeMap<u32, Arc<Region>>,
    /// The regions of prefill steps with more sequences than `StateLayout::prompts`, by number of rows.
    pub wide: BTreeMap<u32, Arc<Region>>,
    /// The region that completes the description of a prefill step in which slots decode; `None` without mixed steps.
    pub decode_rows: Option<Arc<Region>>,
    /// The inboxes: at least two. If there are no more of them than plans in flight, `submit` blocks.
    pub inboxes: Vec<Inbox>,
    /// The capacity of an inbox's patch, in pairs of offset and value.
    pub patch_pairs: u32,
    /// The capacity of an inbox's `seen`, in rows.
    pub seen_rows: u32,
    /// The device's compute actor.
    pub compute: Arc<Compute>,
    /// The points that the first submission waits for: the last copies of the weights.
    pub ready: Vec<Point>,
    /// The kernels and fallbacks in use.
    pub variants: Arc<Variants>,
    /// The device's name, for messages.
    pub device_name: String,
    /// The device, for building timed regions when profiling.
    pub device: Arc<Device>,
    /// The pipelines of the kernels, for the same purpose.
    pub pipelines: Pipelines,
    /// Faults that tests inject.
    pub injection: Injection,
    /// The time for which steps run with barriers after a first fault.
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
    /// The reports that were received while waiting for an inbox.
    early: VecDeque<Report>,
    free_inboxes: Vec<usize>,
    /// The slot of each row of the batch, as last written to the device.
    batch: Vec<u32>,
    /// For each slot, whether it requested logits.
    dumps: Vec<bool>,
    /// For each slot, whether it requested log probabilities.
    logprobs: Vec<bool>,
    /// For each slot, the number of tokens of its output that were reported; `None` once it is done.
    drawn: Vec<Option<u32>>,
    /// The last gate value that a submission waits for.
    gates: u64,
    pace: Pace,
    /// The number of chunks scored so far. Their scores are written alternately to the two halves of the buffer.
    scored: u32,
    /// The number of prefill steps with pooled rows so far. Their sums are written alternately to the two halves of the
    /// buffer.
    pooled: u32,
    /// When steps run without barriers again after a fault.
    overlap: OverlapRetry,
    /// Set while a plan is queued whose steps run with barriers: it repeats steps after a fault, or all stages of a split
    /// replica pause.
    repeats: bool,
    /// Whether tests may break steps that are queued now.
    breaks: bool,
    /// The number of the first exchange of the step that is queued now, if it has any.
    first_sum: Option<u64>,
    /// For a stage of a split model: the steps that drew no token because of a fault and have not been reported to the
    /// split executor, with the fault word.
    faulted: VecDeque<(Ticket, u32)>,
    decode_plans: u32,
    /// The number of steps without barriers queued so far.
    carried_steps: u64,
    /// The number of plans with work that are still to be profiled.
    profiled: u32,
    /// The completed submissions of plans that are not finished yet, in order.
    submissions: VecDeque<(Ticket, SubmissionRecord)>,
}

/// A submission whose last report has not been processed.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    /// The inboxes that its patches occupy.
    inboxes: Vec<usize>,
    steps: Steps,
    faults: Faults,
    /// The commands of the patches.
    fixed: Commands,
    /// The commands of each step.
    each: Commands,
    /// The number of completed entries.
    entries: u32,
    /// The gate value that its sampling waits for.
    gate: Option<u64>,
    /// The number of regions that are run before that gate.
    before_gate: usize,
    /// Whether its masks are still to come.
    awaits: bool,
    flush: FlushReason,
    submitted: Instant,
    /// Whether a part of it was reported.
    started: bool,
}

/// The steps of a submission.
#[derive(Debug, Default)]
struct Steps {
    kind: Kind,
    /// The number of steps.
    count: u32,
    /// The number of the first step in the token ring, if the steps draw tokens.
    first: u32,
    /// The number of rows of each step that draw tokens.
    rows: u32,
    /// The number of rows of a prefill step: prompt tokens, and slots that decode in it; 0 for others.
    prefill_rows: u32,
    /// The tokens of the chunk that are scored.
    scoring: Option<Scoring>,
    /// The rows that the step pools.
    pooling: Pools,
    /// The slots of a decode plan, needed to repeat steps after a fault.
    slots: Vec<Slot>,
    /// The number of draft tokens per slot.
    drafts: u32,
    /// Whether the logits of row 0 are copied to `dump`.
    dump: bool,
    /// The steps in which a test breaks a wait, with the wait's index.
    broken: Vec<(u32, usize)>,
}

/// The faults of a submission.
#[derive(Debug)]
struct Faults {
    /// Steps from this one on drew nothing because of a fault; `u32::MAX` if no fault is known.
    good: u32,
    /// Valid with `good`: the fault word, which is the number of the call that timed out.
    call: u32,
    /// The number of faults of the same plan before this submission.
    before: u32,
    /// Whether the submission was queued behind a step whose fault was not known yet, so that its decode steps draw
    /// nothing either.
    behind: bool,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults { good: u32::MAX, call: 0, before: 0, behind: false }
    }
}

/// The number of commands in some regions.
#[derive(Clone, Copy, Debug, Default)]
struct Commands {
    dispatches: u32,
    barriers: u32,
}

impl Commands {
    fn of<'a>(regions: impl IntoIterator<Item = &'a Arc<Region>>) -> Commands {
        let mut commands = Commands::default();
        commands.add(regions);
        commands
    }

    fn add<'a>(&mut self, regions: impl IntoIterator<Item = &'a Arc<Region>>) {
        for region in regions {
            self.dispatches += region.dispatches();
            self.barriers += region.barriers();
        }
    }
}

/// The tokens that are scored, and the place of their scores.
#[derive(Clone, Copy, Debug)]
struct Scoring {
    slot: Slot,
    /// The position of the first token.
    first: u32,
    tokens: u32,
    /// The index of the first token's entry in `scores`.
    entry: u32,
}

/// The runs of rows that a prefill step pools, and the place of their sums.
#[derive(Clone, Debug, Default)]
struct Pools {
    /// The slot of each run, and its number of rows.
    runs: Vec<(Slot, u32)>,
    /// The index of the first run's row of `pooled`.
    first: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Kind {
    /// Changes only; there is nothing to report.
    #[default]
    Changes,
    /// A step without tokens: a prefill in which no prompt ends, or a step of a stage without the LM head.
    Layers,
    /// Steps that draw tokens.
    Sampled,
}

/// The regions before and after a step.
#[derive(Debug)]
struct Around {
    /// The region that runs before the gate, if the device does not wait idle.
    ahead: Option<Arc<Region>>,
    before: Vec<Arc<Region>>,
    after: Vec<Arc<Region>>,
    link: Link,
}

/// The gate that a submission waits for, and the function to call when it has finished.
#[derive(Debug, Default)]
struct Link {
    gate: Option<(Arc<Gate>, u64)>,
    then: Option<Then>,
}

impl GpuExecutor {
    /// Creates an executor of recorded regions.
    pub fn new(parts: Parts) -> GpuExecutor {
        GpuExecutor::woken_by(parts, bounded(1))
    }

    /// Creates an executor with the channel, of capacity 1, that becomes readable when there may be reports.
    fn woken_by(parts: Parts, (waker, wake): (Sender<()>, Receiver<()>)) -> GpuExecutor {
        let (sender, reports) = bounded(REPORTS);
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
            drawn: vec![None; slots],
            gates: 0,
            scored: 0,
            pooled: 0,
            pace: Pace::default(),
            overlap: OverlapRetry::new(parts.retry_after),
            repeats: false,
            breaks: true,
            first_sum: None,
            faulted: VecDeque::new(),
            decode_plans: 0,
            carried_steps: 0,
            profiled: 0,
            submissions: VecDeque::new(),
            parts,
        }
    }

    /// Returns the parts around the LM head.
    ///
    /// # Panics
    /// In a stage without: no plan of it draws tokens.
    fn head(&self) -> &HeadParts {
        self.parts.head.as_ref().expect("a stage that draws tokens has an LM head")
    }
}

impl Pending {
    /// Creates the record of a submission of changes only.
    fn changes(ticket: Ticket, inboxes: Vec<usize>) -> Pending {
        Pending {
            ticket,
            inboxes,
            steps: Steps::default(),
            faults: Faults::default(),
            fixed: Commands::default(),
            each: Commands::default(),
            entries: 0,
            gate: None,
            before_gate: 0,
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
        self.enqueue(ticket, plan.work, posts, None)?;
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
        self.head().masks.write(u64::from(slot.0) * u64::from(words) * 4, bytemuck::cast_slice(mask));
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
        // No more masks will arrive. Opens the gate so that the queue runs empty; the tokens drawn without masks are
        // not reported.
        if let Some(head) = &self.parts.head {
            let _ = head.gate.open(self.gates);
        }
        // The device must finish its work before the buffers are freed. There is no time limit: each submission gets a
        // last report, even if the device is lost.
        let mut open: usize = self.pending.len() - self.early_finished().min(self.pending.len());
        while open > 0 {
            match self.reports.recv_timeout(Duration::from_secs(30)) {
                Ok(report) => open -= usize::from(report.last),
                Err(_) => tracing::warn!(device = self.parts.device_name, plans = open, "the device is still at work"),
            }
        }
    }
}
