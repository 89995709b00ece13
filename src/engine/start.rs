//! From a checkpoint to a replica of it on a device that is open: plans memory, loads weights and records regions,
//! bottom to top. Deliberately absent: what a request is, which devices are open (`stations`), and when models come
//! and go (`lifecycle`).

use super::executor::{Capacity, Drafts, PAGE_TOKENS, STATE_TOKENS};
use super::gpu::{DecodeRegion, DecodeRegions, GpuExecutor, Inbox, Injection, Parts};
use super::host::MemoryUse;
use super::overlap_test::{Probe, test_overlap};
use super::spans;
use super::stations::{Station, staging};
pub use super::stations::{start, start_on};
use super::tuned::Tuned;
use super::variants::{Fallback, Variants};
use crate::actors::compute::Submission;
use crate::actors::loader::{Load, LoadError, LoadPlan, LoadReport, LoadTensor, Source};
use crate::actors::timeline::FlushReason;
use crate::actors::transfer::TransferError;
use crate::actors::watcher::Outbox;
use crate::config::{self, file::Stamp};
use crate::device::{Adapter, DeviceError, Gate, Point};
use crate::kernels::embed::rows_bytes;
use crate::kernels::layout::StateLayout;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region, RegionError, buffer_sizes};
use crate::kernels::sampling;
use crate::kernels::shaders::{ClearCountsArgs, MarkPromptArgs, PatchArgs};
use crate::kernels::skinny::Matrices;
use crate::kernels::state::MOST_DRAFTS;
use crate::kernels::tags;
use crate::memory::pack::{Format, Packing};
use crate::memory::plan::{self, Entry, KvRequest, Limits, Pages, Plan, PlanError, Purpose, Side};
use crate::memory::{MemoryError, Place, Table, WeightFile};
use crate::model::checkpoint::{Checkpoint, CheckpointError, SourceRef, WeightSpec};
use crate::model::config::LayerKind;
use crate::model::decoder::{self, Decoder, Part, RingLayout, Shape, Tuning};
use crate::model::text::TextError;
use crate::telemetry::clock::Moment;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::Span;

/// Says what a start does and how far it is.
pub trait Progress: Sync {
    /// A fact worth a line: a plan table, a load's speed.
    fn line(&self, text: &str);
    /// `done` of `total` (bytes or things, by `unit`) of what is going on.
    fn step(&self, what: &str, done: u64, total: u64, unit: Unit);
}

/// What a step counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things.
    Count,
}

/// Says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Progress for Quiet {
    fn line(&self, _: &str) {}
    fn step(&self, _: &str, _: u64, _: u64, _: Unit) {}
}

/// Why a start failed. `is_users` tells what the operator can mend.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No or several devices, a lost device, Vulkan.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A selector that cannot be read.
    #[error("device \"{given}\" of model \"{model}\" cannot be read")]
    Selector {
        /// The model.
        model: String,
        /// What was given.
        given: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint that cannot be served.
    #[error("model \"{model}\" cannot be loaded from {path}")]
    Checkpoint {
        /// The model.
        model: String,
        /// The directory.
        path: PathBuf,
        /// Everything that is wrong.
        #[source]
        source: CheckpointError,
    },
    /// A tokenizer or chat template that cannot be read.
    #[error("the tokenizer of model \"{model}\" cannot be loaded")]
    Text {
        /// The model.
        model: String,
        /// Why.
        #[source]
        source: TextError,
    },
    /// The model's shape is outside what the kernels do.
    #[error("model \"{model}\": {what}")]
    Unsupported {
        /// The model.
        model: String,
        /// What, with numbers.
        what: String,
    },
    /// More context was asked for than the model was made for.
    #[error("model \"{model}\" is configured for a context of {asked} tokens, its own is {own}")]
    Context {
        /// The model.
        model: String,
        /// Configured tokens.
        asked: u32,
        /// The checkpoint's.
        own: u32,
    },
    /// Memory does not suffice.
    #[error("model \"{model}\" does not fit")]
    Plan {
        /// The model.
        model: String,
        /// Both numbers.
        #[source]
        source: PlanError,
    },
    /// An allocation failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region could not be recorded.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The weights could not be loaded.
    #[error("the weights of model \"{model}\" could not be loaded")]
    Load {
        /// The model.
        model: String,
        /// Why.
        #[source]
        source: LoadError,
    },
    /// A copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The host has no thread left.
    #[error("an engine thread could not be started")]
    Thread(#[source] std::io::Error),
    /// Nobody wants it any more.
    #[error("the load of model \"{model}\" was cancelled")]
    Cancelled {
        /// The model.
        model: String,
    },
    /// The host has no models beyond those that it was made with.
    #[error("model \"{model}\" cannot be loaded: this host loads none")]
    NoSource {
        /// The model.
        model: String,
    },
    /// An embedded model could not be unpacked.
    #[error("the embedded demo model could not be unpacked to {path}")]
    Demo {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl StartError {
    /// Whether the operator can mend it: arguments, files, configuration, devices.
    pub fn is_users(&self) -> bool {
        match self {
            StartError::Device(error) => error.is_users(),
            StartError::Selector { .. }
            | StartError::Checkpoint { .. }
            | StartError::Text { .. }
            | StartError::Unsupported { .. }
            | StartError::Context { .. }
            | StartError::Plan { .. }
            | StartError::Load { .. }
            | StartError::Demo { .. } => true,
            StartError::Memory(_)
            | StartError::Thread(_)
            | StartError::Region(_)
            | StartError::Transfer(_)
            | StartError::Cancelled { .. }
            | StartError::NoSource { .. } => false,
        }
    }
}

/// Of a device that others serve on, what a load runs on the compute queue (its test, above all) takes at most one part
/// in so many of the time, as far as the device tells how long it took.
const BESIDE_SHARE: u32 = 32;
/// A GPU that finishes nothing for so long while a model's first steps run is stuck.
const FIRST_STEPS: Duration = Duration::from_secs(60);
/// The longest pause for that.
const BESIDE_PAUSE: Duration = Duration::from_secs(1);
/// Cores that a load leaves alone while others serve: their engine's thread, the compute actor's, the watcher's and one
/// of the endpoint's.
const BESIDE_CORES: usize = 4;

/// Threads that read, pack and compile while others serve.
fn threads_beside() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    cores.saturating_sub(BESIDE_CORES).max(1)
}

/// Decode steps that may be queued and not reported.
const RUN_AHEAD: u32 = 32;
/// Steps of the token ring: well above what can be queued.
const RING_STEPS: u32 = 128;
/// Pairs of a patch: the tokens of a step of prompts, its pages and some slots' words. More take several patches.
pub(super) const PATCH_PAIRS: u32 = 4096;
/// Rows of an inbox's tokens seen.
const SEEN_ROWS: u32 = 1024;
/// Prompts that can share a step: more wait for the next one.
const MOST_PROMPTS: u32 = 64;
/// Sequences that run at once on a CPU driver where nobody says otherwise.
const CPU_SLOTS: u32 = 4;
/// Device memory for each sequence that runs at once on a GPU where nobody says otherwise, bytes, and how many at least and at most.
const SLOT_MEMORY: u64 = 512 << 20;
/// As [`SLOT_MEMORY`] says.
const GPU_SLOTS: (u32, u32) = (8, 256);
/// Tokens that are drafted at a time, and sequences that a step which verifies them can have: with more sequences the
/// rows of drafts cost what rows of other sequences would.
const GPU_DRAFTS: u32 = 3;
/// As [`GPU_DRAFTS`] says.
const GPU_DRAFT_SEQUENCES: u32 = 4;
/// As [`GPU_DRAFTS`] says, on a CPU driver, where every recording takes its time to build.
const CPU_DRAFTS: u32 = 1;
/// As [`CPU_DRAFTS`] says.
const CPU_DRAFT_SEQUENCES: u32 = 1;
/// Snapshots of recurrent state on a CPU driver where nobody says otherwise.
const CPU_SNAPSHOTS: u32 = 8;
/// On a GPU they take at most one part in so many of its memory, and are at least and at most so many.
const SNAPSHOT_SHARE: u64 = 32;
/// As [`SNAPSHOT_SHARE`] says.
const GPU_SNAPSHOTS: (u32, u32) = (8, 64);
/// Pages that are planned where nobody says otherwise and memory suffices: for every sequence the longest context,
/// but where that is more than so many tokens, as many longest contexts or so many tokens.
const DEFAULT_CONTEXTS: u64 = 16;
/// As [`DEFAULT_CONTEXTS`] says.
const DEFAULT_KV_TOKENS: u64 = 1 << 19;
/// Plans in flight are two; changes alone come on top.
const INBOXES: usize = 16;
/// Sequences that one decode step can have rows for.
const MOST_SLOTS: u32 = 1024;
/// Snapshots of recurrent state: the scheduler has an entry for each, whatever memory the device has.
const MOST_SNAPSHOTS: u32 = 65_536;
/// KV pages, for the same reason: 64 million tokens.
const MOST_PAGES: u32 = 1 << 22;
/// Tokens of a chunk: above it, one submission would last too long for a driver's watchdog.
const MOST_CHUNK: u32 = 16_384;
/// Context that is planned where neither the operator nor memory says otherwise.
const DEFAULT_CONTEXT: u32 = 32_768;

/// Choices by what the device can do.
pub fn tuning(adapter: &Adapter, matrices: Option<Matrices>, kv_heads: u32, context: u32) -> Tuning {
    let (capabilities, cpu) = (&adapter.capabilities, adapter.is_cpu());
    let most = capabilities.max_invocations.min(capabilities.max_workgroup_size[0]);
    let processors = capabilities.sm_count.unwrap_or(32);
    Tuning {
        gemv_threads: if cpu { 32 } else { 128.min(most) },
        gemv_wide_from: 12_000,
        // Larger blocks pay for long contexts and cost half a microsecond on short ones.
        attention_threads: if cpu { 32 } else { if context >= 8192 { 256 } else { 128 }.min(most) },
        flash_threads: if cpu { 64 } else { 256.min(most) },
        flash_threads_many: if cpu { 64 } else { 128.min(most) },
        spread: 2,
        spread_pages: 2,
        processors,
        shared_bytes: capabilities.max_shared_bytes,
        splits: if cpu { 4 } else { (processors / kv_heads).clamp(4, 32) },
        argmax_threads: if cpu { 32 } else { 256.min(most) },
        sample_threads: sampling::sample_threads(if cpu { 128 } else { most }),
        fragments: matrices,
        skinny: BTreeMap::new(),
        panel: BTreeMap::new(),
        tiles: BTreeMap::new(),
        fold_rows: 32,
        // Workgroups of later calls wait for those of earlier ones: only where these are known to run first.
        tags: matrices == Some(Matrices::Cooperative) && adapter.is_nvidia(),
        fault_at: 0,
        broken_call: 0,
        broken_step: 0,
        broken_every: 0,
        retry_ms: 1000,
        gates: !cpu,
    }
}

pub(super) struct Build<'a> {
    pub(super) name: &'a str,
    pub(super) model: &'a config::Model,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) station: &'a Station,
    pub(super) adapter: &'a Adapter,
    pub(super) limit: Option<u64>,
    pub(super) tune: &'a [String],
    pub(super) tuned: &'a Tuned,
    pub(super) progress: &'a dyn Progress,
    /// What the parts of the load are shown under.
    pub(super) span: &'a Span,
    /// Others serve meanwhile, and must not feel it.
    pub(super) beside: bool,
    /// Set when nobody wants it any more.
    pub(super) cancelled: &'a AtomicBool,
}

/// A model whose buffers are allocated and whose weights are on their way.
pub(super) struct Prepared<'a> {
    pub(super) decoder: Decoder<'a>,
    pub(super) recordings: Recordings,
    pub(super) table: Table,
    pub(super) pipelines: Pipelines,
    pub(super) loading: Loading,
    /// What memory was planned for.
    pub(super) memory: Vec<MemoryUse>,
}

/// What is under way when a model is prepared.
pub(super) struct Loading {
    /// Clears what starts as zero.
    init: Arc<Region>,
    weights: Weights,
    rope: Point,
    pipelines: (usize, Moment, Moment),
    started: Instant,
}

/// Weights on their way. Dropped before they are there, it waits until nobody uses their buffers any more.
struct Weights(Option<Load>);

impl Drop for Weights {
    fn drop(&mut self) {
        if let Some(load) = self.0.take() {
            load.cancel();
            // Its error is that of a load that was cancelled.
            let _ = load.wait();
        }
    }
}

/// What memory is for, by buffer name.
fn purpose(name: &str) -> Purpose {
    match name {
        "state" | "sampling.counts" | "step" | "rope" => Purpose::State,
        name if name.starts_with(decoder::RECURRENT) => Purpose::Recurrent,
        "ring" | "dump" | "scores" => Purpose::Ring,
        name if name.starts_with("kv.") => Purpose::KvPages,
        _ => Purpose::Scratch,
    }
}

impl Build<'_> {
    pub(super) fn unsupported(&self, what: String) -> StartError {
        StartError::Unsupported { model: self.model.name.clone(), what }
    }

    fn check(&self) -> Result<(), StartError> {
        let c = &self.checkpoint.config;
        if let Some(asked) = self.model.context.filter(|asked| *asked > c.context) {
            return Err(StartError::Context { model: self.model.name.clone(), asked, own: c.context });
        }
        for (what, asked, most) in [
            ("slots", self.model.slots, MOST_SLOTS),
            ("prefill_chunk", self.model.prefill_chunk, MOST_CHUNK),
            ("snapshots", self.model.snapshots, MOST_SNAPSHOTS),
        ] {
            if let Some(asked) = asked.filter(|asked| *asked > most) {
                return Err(self.unsupported(format!("{what} is {asked}, at most {most} are possible")));
            }
        }
        let drafts = self.model.drafts.unwrap_or(0);
        if drafts > MOST_DRAFTS {
            return Err(self.unsupported(format!("drafts is {drafts}, at most {MOST_DRAFTS} are possible")));
        }
        if drafts > 0 && !self.checkpoint.has_mtp() {
            return Err(self.unsupported(format!(
                "drafts is {drafts}, the checkpoint has no block that drafts tokens (multi-token prediction): only 0 is possible"
            )));
        }
        if let (Some(_), Some(chunk)) =
            (c.delta, self.model.prefill_chunk.filter(|chunk| !chunk.is_multiple_of(STATE_TOKENS)))
        {
            return Err(self
                .unsupported(format!("prefill_chunk is {chunk}, recurrent state takes a multiple of {STATE_TOKENS}")));
        }
        let most = self.adapter.capabilities.max_allocation_bytes.min(self.adapter.capabilities.max_buffer_bytes);
        for weight in self.checkpoint.weights().iter().filter(|weight| weight.name.contains(".experts.")) {
            if weight.bytes() > most {
                return Err(self.unsupported(format!(
                    "\"{}\" has {} bytes, the device's buffers have at most {most}",
                    weight.name,
                    weight.bytes()
                )));
            }
        }
        if !c.head_dim.is_multiple_of(8) {
            return Err(self.unsupported(format!("head_dim is {}, kernels need a multiple of 8", c.head_dim)));
        }
        if c.head_dim / 8 > self.adapter.capabilities.max_invocations {
            return Err(self.unsupported(format!(
                "head_dim is {}, the device's workgroups have {} invocations and need an eighth of it",
                c.head_dim, self.adapter.capabilities.max_invocations
            )));
        }
        Ok(())
    }

    fn buckets(&self) -> Vec<u32> {
        let most = self.model.prefill_chunk.unwrap_or(if self.adapter.is_cpu() { 64 } else { 2048 });
        // Many steps of prompts are as long as rows that decode can wait for: there sizes lie close.
        let sizes: &[u32] = if self.adapter.is_cpu() {
            &[16, 64, 256, 1024]
        } else {
            &[16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048]
        };
        let mut buckets: Vec<u32> = sizes.iter().copied().filter(|rows| *rows < most).collect();
        buckets.push(most);
        buckets
    }

    /// Sequences that run at once.
    fn slots(&self) -> u32 {
        self.model.slots.unwrap_or_else(|| {
            if self.adapter.is_cpu() {
                return CPU_SLOTS;
            }
            let fit = u32::try_from(self.station.device.budget().heap_bytes / SLOT_MEMORY).unwrap_or(u32::MAX);
            1 << fit.clamp(GPU_SLOTS.0, GPU_SLOTS.1).ilog2()
        })
    }

    /// Snapshots of recurrent state, of models that have some.
    fn snapshots(&self) -> Option<u32> {
        let net = self.checkpoint.config.delta?;
        let finds = self.model.prefix_cache.unwrap_or(true);
        let own = || {
            if self.adapter.is_cpu() {
                return CPU_SNAPSHOTS;
            }
            let layers = self.checkpoint.config.layers_of(LayerKind::GatedDelta).count() as u64;
            let heads = decoder::delta_heads(net);
            let bytes = (layers * (heads.state_bytes(1) + heads.window_bytes(1))).max(1);
            let fit = self.station.device.budget().heap_bytes / SNAPSHOT_SHARE / bytes;
            u32::try_from(fit).unwrap_or(u32::MAX).clamp(GPU_SNAPSHOTS.0, GPU_SNAPSHOTS.1)
        };
        Some(if finds { self.model.snapshots.unwrap_or_else(own) } else { 0 })
    }

    /// Tokens that are drafted at a time, at most.
    fn drafts(&self) -> u32 {
        if !self.checkpoint.has_mtp() {
            return 0;
        }
        self.model.drafts.unwrap_or(if self.adapter.is_cpu() { CPU_DRAFTS } else { GPU_DRAFTS })
    }

    /// Sequences that a step which verifies drafts can have: a power of two.
    fn draft_sequences(&self) -> u32 {
        let most = if self.adapter.is_cpu() { CPU_DRAFT_SEQUENCES } else { GPU_DRAFT_SEQUENCES };
        1 << most.min(self.slots()).ilog2()
    }

    /// The model's recordings with that many KV pages.
    fn decoder(&self, context: u32, pages: u32, chunk: u32) -> Decoder<'_> {
        let slots = self.slots();
        let config = &self.checkpoint.config;
        let capabilities = &self.adapter.capabilities;
        Decoder {
            config,
            weights: if self.drafts() > 0 { self.checkpoint.weights() } else { self.checkpoint.weights_without_mtp() },
            max_buffer_bytes: capabilities.max_allocation_bytes.min(capabilities.max_buffer_bytes),
            state: StateLayout {
                slots,
                rows: slots.next_power_of_two(),
                chunk,
                // Steps that draw from several prompts have as many rows as a power of two.
                prompts: slots.next_power_of_two().min(MOST_PROMPTS),
                max_pages: context.div_ceil(PAGE_TOKENS),
                recurrent: config.delta.is_some(),
            },
            cells: slots + self.snapshots().unwrap_or(0),
            drafts: self.drafts(),
            pages,
            kv_format: self.model.kv_format.map_or(Format::F16, |format| match format {
                config::KvFormat::F16 => Format::F16,
                config::KvFormat::F32 => Format::F32,
            }),
            ring: RingLayout {
                steps: RING_STEPS,
                rows: slots.next_power_of_two().max(self.draft_sequences() * (self.drafts() + 1)),
            },
            context,
            tuning: self.tuning(context),
        }
    }

    pub(super) fn tuning(&self, context: u32) -> Tuning {
        let adapter = self.adapter;
        let kv_heads = self.checkpoint.config.kv_heads;
        let mut tuning = tuning(adapter, self.station.matrices, kv_heads, context);
        for change in self.tune {
            tuning.set(change);
        }
        // What was kept depends on some of the changes, and none of it undoes one.
        self.tuned.apply(&mut tuning);
        for change in self.tune {
            tuning.set(change);
        }
        tuning
    }

    /// Plans and allocates memory, begins to load the weights and builds the pipelines meanwhile.
    pub(super) fn prepare(&self, cache: Option<&Path>) -> Result<Prepared<'_>, StartError> {
        self.check()?;
        let started = Instant::now();
        let buckets = self.buckets();
        let chunk = *buckets.last().expect("there is at least one bucket");
        let model_context = self.checkpoint.config.context;
        let asked = self.model.context;
        let wanted = asked.unwrap_or(model_context.min(DEFAULT_CONTEXT));

        // Everything but the KV pool has its size before the pool is planned.
        let probe = self.decoder(wanted, 1, chunk);
        let plan = self.plan(&probe, &buckets, wanted, asked.is_some())?;
        self.progress.line(&format!("memory of \"{}\" on {}\n{plan}", self.name, self.adapter.name));
        let memory = plan.entries().iter().map(|entry| MemoryUse {
            replica: self.name.to_owned(),
            purpose: entry.purpose,
            bytes: entry.bytes,
            side: entry.side,
        });
        let memory = memory.collect();
        let pages = u32::try_from(plan.kv_pages()).ok().filter(|pages| *pages <= MOST_PAGES).ok_or_else(|| {
            self.unsupported(format!("{} KV pages are asked for, at most {MOST_PAGES} are possible", plan.kv_pages()))
        })?;
        let context = wanted.min(pages.saturating_mul(PAGE_TOKENS));
        let decoder = self.decoder(context, pages, chunk);
        let used = self.tuned.apply(&mut decoder.tuning.clone());
        if used > 0 {
            self.progress.line(&format!("\"{}\": {used} workgroup shapes as `ostinato tune` found them", self.name));
        }
        let recordings = Recordings::new(&decoder, &buckets, self.draft_sequences());
        let all = recordings.all();

        let mut table = Table::new();
        let mut init = Recording::new("init");
        let weights: Vec<(&WeightSpec, Vec<Part>)> =
            decoder.weights.iter().map(|weight| (weight, decoder.parts(weight))).collect();
        for part in weights.iter().flat_map(|(_, parts)| parts) {
            table.add(self.station.arena.buffer(&part.name, part.bytes, Place::DeviceLocal)?)?;
        }
        for (name, bytes) in buffer_sizes(&all) {
            if table.get(&name).is_some() {
                continue;
            }
            let place = match name.as_str() {
                "ring" | "dump" | "scores" => Place::Readback,
                name if name.starts_with("inbox.") || name == "masks" => Place::Upload { bar: true },
                _ => Place::DeviceLocal,
            };
            let buffer = self.station.arena.buffer(&name, bytes, place)?;
            // Of a cache nothing is read that was not written.
            let cache = matches!(purpose(&name), Purpose::KvPages | Purpose::Recurrent);
            if place == Place::DeviceLocal && !cache && name != "rope" {
                let to = init.buffer(&name, bytes);
                init.ops.push(Op::Fill { to, word: 0 });
            }
            table.add(buffer)?;
        }

        let load = Weights(Some(self.load(&decoder, &weights, &table)?));
        let rope = decoder.rope_table();
        let rope_buffer = table.require("rope")?;
        let rope_point =
            self.station.transfer.upload(&self.station.ring, rope_buffer, 0, bytemuck::cast_slice(&rope))?;

        let mut with_init = all.clone();
        with_init.push(&init);
        let begin = Moment::now();
        let threads = self.beside.then(threads_beside);
        let pipelines = Pipelines::build_on(&self.station.device, cache, &with_init, threads, &|done, total| {
            self.progress.step("building pipelines", done as u64, total as u64, Unit::Count);
        })?;
        let init = Arc::new(Region::build(&self.station.device, &init, &table, &pipelines)?);
        let built = (pipelines.len(), begin, Moment::now());
        let loading = Loading { init, weights: load, rope: rope_point, pipelines: built, started };
        Ok(Prepared { decoder, recordings, table, pipelines, loading, memory })
    }

    /// Waits until a prepared model is loaded; gives the points after which it can run, and what the load was like.
    pub(super) fn finish(&self, mut loading: Loading) -> Result<(Vec<Point>, LoadReport), StartError> {
        self.run_once(vec![loading.init])?;
        let load = loading.weights.0.take().expect("it is waited for once");
        for p in load.progress() {
            self.progress.step("loading weights", p.bytes_done, p.bytes_total, Unit::Bytes);
            if self.cancelled.load(Ordering::Relaxed) {
                load.cancel();
            }
        }
        let report = load.wait();
        self.wanted()?;
        let report = report.map_err(|source| StartError::Load { model: self.model.name.clone(), source })?;
        self.progress.line(&format!(
            "\"{}\": {report}; {} pipelines; ready {:.2} s after the start of its load",
            self.name,
            loading.pipelines.0,
            loading.started.elapsed().as_secs_f64()
        ));
        spans::loaded(self.span, &report, loading.pipelines);
        Ok((report.point.into_iter().chain([loading.rope]).collect(), report))
    }

    pub(super) fn executor(
        &self,
        cache: Option<&Path>,
    ) -> Result<(GpuExecutor, LoadReport, Vec<MemoryUse>), StartError> {
        let Prepared { decoder, recordings, table, pipelines, loading, memory } = self.prepare(cache)?;
        let begin = Moment::now();
        let region = |recording: &Recording| -> Result<Arc<Region>, StartError> {
            self.wanted()?;
            Ok(Arc::new(Region::build(&self.station.device, recording, &table, &pipelines)?))
        };
        let step = |recording: &Recording| -> Result<DecodeRegion, StartError> {
            let parts = || -> Result<[Arc<Region>; 2], StartError> {
                let (body, draw) = recording.split("sample");
                let draw = Region::build_gated(&self.station.device, &draw, &table, &pipelines)?;
                Ok([region(&body)?, Arc::new(draw)])
            };
            Ok(DecodeRegion { whole: region(recording)?, parts: decoder.tuning.gates.then(parts).transpose()? })
        };
        let mut decode = BTreeMap::new();
        for (rows, recording, plain) in &recordings.decode {
            let carried = plain.as_ref().map(|_| step(recording)).transpose()?;
            let broken = recordings.broken.get(rows).map(step).transpose()?;
            let plain = step(plain.as_ref().unwrap_or(recording))?;
            decode.insert(*rows, DecodeRegions { plain, carried, broken });
        }
        let mut verify: BTreeMap<u32, BTreeMap<u32, Arc<Region>>> = BTreeMap::new();
        for (drafts, sequences, recording) in &recordings.verify {
            verify.entry(*drafts).or_default().insert(*sequences, region(recording)?);
        }
        let mut prefill = BTreeMap::new();
        for (rows, layers) in &recordings.prefill {
            prefill.insert(*rows, region(layers)?);
        }
        let mut first = BTreeMap::new();
        for (rows, head) in &recordings.first {
            first.insert(*rows, region(head)?);
        }
        let score = (recordings.score.0, region(&recordings.score.1)?);
        let mut inboxes = Vec::new();
        for (index, InboxRecordings { apply, clear, mark }) in recordings.inboxes.iter().enumerate() {
            inboxes.push(Inbox {
                patch: Arc::clone(table.require(&format!("inbox.{index}.patch"))?),
                clear: Arc::clone(table.require(&format!("inbox.{index}.clear"))?),
                seen: Arc::clone(table.require(&format!("inbox.{index}.seen"))?),
                apply: region(apply)?,
                clear_counts: region(clear)?,
                mark_seen: region(mark)?,
            });
        }
        let dump_region = region(&recordings.dump)?;
        let dump = Arc::clone(table.require("dump")?);
        let (ready, loaded) = self.finish(loading)?;
        let ring_buffer = Arc::clone(table.require("ring")?);
        let probe = Probe {
            inbox: &inboxes[0],
            ring: &ring_buffer,
            dump_region: &dump_region,
            dump: &dump,
            ready: &ready,
            page_tokens: PAGE_TOKENS,
        };
        let failed = test_overlap(self, &decoder, &table, &probe, &mut decode)?;
        spans::recorded(self.span, begin);
        let variants = Arc::new(variants(&decoder, &recordings, failed));
        let overlaps = decode.values().any(|regions| regions.carried.is_some());
        self.progress.line(&format!(
            "\"{}\": weights {}; stages of a decode step {}",
            self.name,
            match decoder.tuning.fragments {
                None => "row after row",
                Some(Matrices::ByHand) => "in fragments, multiplied by hand",
                Some(Matrices::Cooperative) => "in fragments, on matrix units",
            },
            if overlaps { "overlap" } else { "run one after the other" }
        ));
        let slots = decoder.state.slots;
        let capacity = Capacity {
            slots,
            pages: decoder.pages,
            context: decoder.context,
            prefill_chunk: decoder.state.chunk,
            prompts: slots.min(MOST_PROMPTS),
            buckets: recordings.decode.iter().map(|(rows, ..)| *rows).collect(),
            run_ahead: RUN_AHEAD,
            gates: decoder.tuning.gates,
            vocabulary: self.checkpoint.config.vocab,
            drafts: Drafts {
                most: decoder.drafts,
                sequences: self.draft_sequences(),
                always: self.model.drafts_always.unwrap_or(false),
            },
            snapshots: self.snapshots(),
        };
        let executor = GpuExecutor::new(Parts {
            capacity,
            layout: decoder.state,
            heads: decoder.heads(),
            ring: decoder.ring,
            ring_buffer,
            masks: Arc::clone(table.require("masks")?),
            gate: Arc::new(Gate::new(&self.station.device)?),
            dump,
            dump_region,
            decode,
            verify,
            prefill,
            first,
            score,
            scores: Arc::clone(table.require("scores")?),
            inboxes,
            patch_pairs: PATCH_PAIRS,
            seen_rows: SEEN_ROWS,
            compute: Arc::clone(&self.station.compute),
            ready,
            variants,
            device_name: self.adapter.name.clone(),
            device: Arc::clone(&self.station.device),
            pipelines,
            injection: Injection {
                plan: decoder.tuning.fault_at,
                step: decoder.tuning.broken_step,
                every: decoder.tuning.broken_every,
            },
            retry_after: Duration::from_millis(u64::from(decoder.tuning.retry_ms)),
        });
        Ok((executor, loaded, memory))
    }

    /// An error once nobody wants the model any more.
    pub(super) fn wanted(&self) -> Result<(), StartError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(StartError::Cancelled { model: self.model.name.clone() }),
            false => Ok(()),
        }
    }

    fn plan(&self, probe: &Decoder<'_>, buckets: &[u32], context: u32, asked: bool) -> Result<Plan, StartError> {
        let budget = self.station.device.budget();
        let capabilities = &self.adapter.capabilities;
        let limits = Limits {
            device: self.adapter.name.clone(),
            free_bytes: self.station.free_bytes(&budget),
            total_bytes: budget.heap_bytes,
            limit_bytes: self.limit,
            max_allocation_bytes: probe.max_buffer_bytes,
            unified: capabilities.unified_memory,
            reserve_bytes: plan::default_reserve(budget.heap_bytes),
        };
        let recordings = Recordings::new(probe, buckets, self.draft_sequences());
        let weights: Vec<Part> = probe.weights.iter().flat_map(|weight| probe.parts(weight)).collect();
        let names: Vec<&str> = weights.iter().map(|part| part.name.as_str()).collect();
        let sizes: Vec<(String, u64)> = buffer_sizes(&recordings.all())
            .into_iter()
            .filter(|(name, _)| !names.contains(&name.as_str()) && !name.starts_with("kv."))
            .collect();
        let (slots, bytes) = staging(self.adapter);
        let mut entries = vec![
            Entry::of_buffers(
                Purpose::Weights,
                Side::Device,
                weights.iter().map(|part| (part.name.as_str(), part.bytes)),
            ),
            Entry::of_buffers(Purpose::Staging, Side::Host, [("staging", (slots * bytes) as u64)]),
        ];
        for (wanted, side) in [
            (Purpose::State, Side::Device),
            (Purpose::Recurrent, Side::Device),
            (Purpose::Scratch, Side::Device),
            (Purpose::Ring, Side::Host),
        ] {
            let of =
                sizes.iter().filter(|(name, _)| purpose(name) == wanted).map(|(name, bytes)| (name.as_str(), *bytes));
            let mut entry = Entry::of_buffers(wanted, side, of);
            if wanted == Purpose::Recurrent {
                let (slots, cells) = (probe.state.slots, u64::from(probe.cells));
                let of = |count: u64, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
                let (slots, snapshots) = (of(slots.into(), "slot"), of(cells - u64::from(slots), "snapshot"));
                entry.things = Some((cells, format!("{slots} and {snapshots}")));
            }
            entries.push(entry);
        }
        let heads = probe.heads();
        // The drafting block has pages of its own.
        let layers = probe.config.layers_of(LayerKind::FullAttention).count() as u64 + u64::from(probe.drafts());
        let context_pages = u64::from(context.div_ceil(PAGE_TOKENS));
        let page_bytes = heads.page_bytes() * 2 * layers;
        let pages = match (self.model.kv_pages, self.model.kv_memory) {
            (Some(pages), _) => Pages::Exactly(u64::from(pages)),
            (None, Some(bytes)) => Pages::Exactly(bytes.0 / page_bytes),
            (None, None) => {
                let most = (context_pages * DEFAULT_CONTEXTS).max(DEFAULT_KV_TOKENS / u64::from(PAGE_TOKENS));
                Pages::UpTo((context_pages * u64::from(probe.state.slots)).min(most).min(MOST_PAGES.into()))
            }
        };
        // A context that was asked for is kept or refused; the model's own may shrink to the memory.
        let least = if asked { context_pages } else { context_pages.min(16) };
        let kv = KvRequest { page_bytes, page_bytes_in_largest_buffer: heads.page_bytes(), pages, least };
        Plan::new(limits, entries, Some(kv))
            .map_err(|source| StartError::Plan { model: self.model.name.clone(), source })
    }

    fn load(
        &self,
        decoder: &Decoder<'_>,
        weights: &[(&WeightSpec, Vec<Part>)],
        table: &Table,
    ) -> Result<Load, StartError> {
        // Those whose headers were read, and not what may have been put in their place since.
        let stamps: HashMap<&Path, &Stamp> =
            self.checkpoint.files.iter().map(|file| (&*file.path, &file.stamp)).collect();
        let failed = |source: LoadError| StartError::Load { model: self.model.name.clone(), source };
        let mut files: HashMap<Arc<Path>, Arc<WeightFile>> = HashMap::new();
        let mut tensors = Vec::new();
        for (weight, parts) in weights {
            for part in parts {
                let whole = decoder.packing(weight);
                let mut sources = Vec::new();
                for source in &weight.sources {
                    let file = match files.get(&source.path) {
                        Some(file) => Arc::clone(file),
                        None => {
                            let file = WeightFile::open_as(&source.path, stamps[&*source.path]);
                            let file = Arc::new(file.map_err(|error| failed(error.into()))?);
                            files.insert(Arc::clone(&source.path), Arc::clone(&file));
                            file
                        }
                    };
                    sources.extend(clip(source, part, file));
                }
                tensors.push(LoadTensor {
                    name: part.name.clone(),
                    target: Arc::clone(table.require(&part.name)?),
                    offset: 0,
                    packing: Packing { rows: part.rows, ..whole },
                    sources,
                });
            }
        }
        let threads = self.beside.then(threads_beside);
        self.station.loader.load_on(LoadPlan { tensors }, threads).map_err(failed)
    }

    /// Runs regions in order and waits for them.
    fn run_once(&self, regions: Vec<Arc<Region>>) -> Result<(), StartError> {
        self.run_all(vec![regions], &[])
    }

    /// Submits each list of regions, behind `waits`, and then waits for all of them.
    pub(super) fn run_all(&self, submissions: Vec<Vec<Arc<Region>>>, waits: &[Point]) -> Result<(), StartError> {
        let (reports, done) = crossbeam_channel::bounded(submissions.len());
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let count = submissions.len();
        for regions in submissions {
            self.station.compute.submit(Submission {
                id: 0,
                entries: vec![regions],
                waits: waits.to_vec(),
                gate: None,
                flush: FlushReason::PhaseBoundary,
                report_after: Vec::new(),
                outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
            });
        }
        let mut ran = Duration::ZERO;
        for _ in 0..count {
            let Some(report) = self.station.compute.report(&done, FIRST_STEPS) else {
                return Err(StartError::Unsupported {
                    model: self.model.name.clone(),
                    what: format!(
                        "device \"{}\" has finished nothing for {} s of its first steps",
                        self.adapter.name,
                        FIRST_STEPS.as_secs()
                    ),
                });
            };
            report.result?;
            ran += report.device_time.unwrap_or(Duration::ZERO);
        }
        if self.beside {
            std::thread::sleep((ran * (BESIDE_SHARE - 1)).min(BESIDE_PAUSE));
        }
        Ok(())
    }
}

/// Which kernels a model's regions are made of, and what could not be as it should; of `failed` buckets the step
/// without barriers failed its test.
fn variants(decoder: &Decoder<'_>, recordings: &Recordings, failed: u32) -> Variants {
    let variants = Variants::of(recordings.of_steps());
    match decoder.tuning.fragments {
        None => variants.fell_back(Fallback::RowLayout),
        Some(Matrices::ByHand) => variants.fell_back(Fallback::ByHand),
        Some(Matrices::Cooperative) => {}
    }
    if !decoder.tuning.tags {
        variants.fell_back(Fallback::NoOverlap);
    }
    (0..failed).for_each(|_| variants.fell_back(Fallback::OverlapTest));
    variants
}

/// The rows of a source that lie in a part of its weight.
fn clip(source: &SourceRef, part: &Part, file: Arc<WeightFile>) -> Option<Source> {
    let format = decoder::format(source.dtype);
    let (first, step) = (u64::from(source.first_row), u64::from(source.row_step));
    let (begin, end) = (u64::from(part.first_row), u64::from(part.first_row + part.rows));
    let from = begin.saturating_sub(first).div_ceil(step);
    let to = end.saturating_sub(first).div_ceil(step).min(u64::from(source.rows));
    if from >= to {
        return None;
    }
    Some(Source {
        file,
        offset: source.offset + from * u64::from(source.cols) * format.bytes() as u64,
        rows: (to - from) as u32,
        cols: source.cols,
        format,
        first_row: (first + from * step - begin) as u32,
        row_step: source.row_step,
        plus: source.plus,
    })
}

/// Every recording of a replica.
pub(super) struct Recordings {
    /// By rows; the second with barriers, where that is another.
    decode: Vec<(u32, Recording, Option<Recording>)>,
    /// For tests: by rows, steps without barriers of which one call waits for words that are never written.
    broken: BTreeMap<u32, Recording>,
    /// By drafts of a sequence and sequences.
    verify: Vec<(u32, u32, Recording)>,
    /// By rows.
    pub(super) prefill: Vec<(u32, Recording)>,
    /// By prompts.
    first: Vec<(u32, Recording)>,
    /// With its rows.
    score: (u32, Recording),
    pub(super) inboxes: Vec<InboxRecordings>,
    dump: Recording,
}

/// What applies the changes in an inbox.
pub(super) struct InboxRecordings {
    /// Words of the state.
    pub(super) apply: Recording,
    /// Zeroes counts.
    clear: Recording,
    /// Enters tokens in counts.
    mark: Recording,
}

impl Recordings {
    fn new(decoder: &Decoder<'_>, buckets: &[u32], draft_sequences: u32) -> Recordings {
        let mut decode = Vec::new();
        let mut broken = BTreeMap::new();
        let tuning = &decoder.tuning;
        let mut rows = 1;
        while rows <= decoder.state.rows {
            let mut recording = decoder.record(Shape::Decode { rows });
            // Where words are tagged, the same step with barriers stands by.
            let plain = recording.with_barriers();
            let plain = (plain != recording).then_some(plain);
            if plain.is_some() && tuning.broken_call > 0 {
                let mut other = recording.clone();
                if tags::break_call(&mut other, tuning.broken_call) {
                    match tuning.broken_step + tuning.broken_every {
                        0 => recording = other,
                        _ => {
                            broken.insert(rows, other);
                        }
                    }
                }
            }
            decode.push((rows, recording, plain));
            rows *= 2;
        }
        let mut verify = Vec::new();
        for drafts in 1..=decoder.drafts {
            let mut sequences = 1;
            while sequences <= draft_sequences {
                verify.push((drafts, sequences, decoder.record(Shape::Verify { sequences, drafts })));
                sequences *= 2;
            }
        }
        let prefill = buckets.iter().map(|&rows| (rows, decoder.record(Shape::Prefill { rows }))).collect();
        let sizes = (0..).map(|power| 1 << power).take_while(|rows| *rows <= decoder.state.prompts);
        let first = sizes.map(|rows| (rows, decoder.record(Shape::Head { rows }))).collect();
        let inboxes = (0..INBOXES).map(|index| inbox_recordings(decoder, index)).collect();
        let mut dump = Recording::new("dump");
        let bytes = u64::from(decoder.config.vocab) * 4;
        let from = dump.buffer("logits", bytes);
        let to = dump.buffer("dump", bytes);
        dump.ops.push(Op::Copy { from, to });
        let rows = decoder.score_rows();
        let score = (rows, decoder.record(Shape::Score { rows }));
        Recordings { decode, broken, verify, prefill, first, score, inboxes, dump }
    }

    /// What steps are made of, without those that stand by.
    fn of_steps(&self) -> impl Iterator<Item = &Recording> {
        let decode = self.decode.iter().map(|(_, recording, _)| recording);
        let verify = self.verify.iter().map(|(.., recording)| recording);
        let prompts = self.prefill.iter().chain(&self.first).chain([&self.score]).map(|(_, recording)| recording);
        decode.chain(verify).chain(prompts)
    }

    fn all(&self) -> Vec<&Recording> {
        let decode = self.decode.iter().flat_map(|(_, recording, plain)| std::iter::once(recording).chain(plain));
        let prompts = self.prefill.iter().chain(&self.first).chain([&self.score]).map(|(_, recording)| recording);
        let verify = self.verify.iter().map(|(.., recording)| recording);
        let inboxes = self.inboxes.iter().flat_map(|inbox| [&inbox.apply, &inbox.clear, &inbox.mark]);
        decode.chain(verify).chain(prompts).chain(inboxes).chain([&self.dump]).collect()
    }
}

fn inbox_recordings(decoder: &Decoder<'_>, index: usize) -> InboxRecordings {
    let mut apply = Recording::new("patch");
    let inbox = apply.buffer(&format!("inbox.{index}.patch"), sampling::patch_bytes(PATCH_PAIRS));
    let target = decoder.state.all(&mut apply);
    let args = PatchArgs { inbox, target, capacity: PATCH_PAIRS, words: (target.bytes / 4) as u32 };
    let call = sampling::patch("patch".to_owned(), args);
    apply.call(call);

    let slots = decoder.state.slots;
    let vocabulary = decoder.config.vocab;
    let mut clear = Recording::new("clear_counts");
    let inbox = clear.buffer(&format!("inbox.{index}.clear"), sampling::clear_bytes(slots));
    let counts = clear.buffer("sampling.counts", sampling::counts_bytes(slots, vocabulary));
    let args = ClearCountsArgs { inbox, counts, slots, vocabulary };
    let call = sampling::clear_counts("clear_counts".to_owned(), slots, args);
    clear.call(call);

    let mut mark = Recording::new("mark_seen");
    let rows = mark.buffer(&format!("inbox.{index}.seen"), rows_bytes(SEEN_ROWS));
    let counts = mark.buffer("sampling.counts", sampling::counts_bytes(slots, vocabulary));
    let args = MarkPromptArgs { rows, state: decoder.state.slots(&mut mark), counts, row_count: SEEN_ROWS, vocabulary };
    mark.call(sampling::mark_prompt("mark_seen".to_owned(), args));
    InboxRecordings { apply, clear, mark }
}
