//! Builds a replica from a checkpoint on an open device: plans memory, loads the weights and records the regions.
//! Not here: requests, the open devices (`gpu::devices`), and loading and unloading of models (`host::lifecycle`).

mod broken;
pub mod defaults;
pub(crate) mod format_test;
pub(crate) mod limits;
mod overlap_test;
mod packing;
mod ptx_test;
pub(crate) mod recordings;
pub(crate) mod reference_test;
pub(crate) mod speed;
pub(crate) mod split;
pub(crate) mod split_test;

use crate::actors::compute::{Gates, Submission};
use crate::actors::loader::{LoadError, LoadPlan, LoadReport, LoadTensor, MatrixRows, TensorSource, WeightLoad};
use crate::actors::packer::DevicePacker;
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::config::{self, file::Stamp};
use crate::device::{Adapter, DeviceError, Gate, Point};
use crate::engine::injection::Wait;
use crate::engine::plan::{Capacity, Drafts, WindowCapacity};
use crate::gpu::build::broken::{BrokenSteps, broken_steps};
use crate::gpu::build::defaults::{DEFAULT_CONTEXT, PATCH_PAIRS, PLAN_LIMIT, RUN_AHEAD, SEEN_ROWS};
use crate::gpu::build::format_test::test_formats;
use crate::gpu::build::limits::{MOST_PAGES, purpose};
use crate::gpu::build::overlap_test::{Probe, test_overlap};
use crate::gpu::build::ptx_test::{FailedPtx, TestedPtx, test_ptx};
use crate::gpu::build::recordings::{
    AWAITED, EXCHANGE, ExchangeRecordings, HeadRecordings, InboxRecordings, LogitRecordings, Recordings,
    exchange_buffer, variants,
};
use crate::gpu::build::reference_test::{Tested, test_reference};
use crate::gpu::build::split::StagePart;
use crate::gpu::devices::OpenDevice;
use crate::gpu::error::StartError;
use crate::gpu::executor::exchange::{
    self, BusyWait, DividedSteps, Exchange, MessagesIn, MessagesOut, PassedRows, SlotsIn, SlotsOut, Sums,
};
use crate::gpu::executor::{
    CountInbox, DecodeRegion, DecodeRegions, GpuExecutor, HeadParts, Inbox, Injection, LogitRegions, MixedHead, Parts,
};
use crate::gpu::spans;
use crate::gpu::tuned::Tuned;
use crate::host::progress::{Progress, Unit};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::gemm::wgmma;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region, buffer_sizes};
use crate::kernels::shaders::{EXPERT_SKINNY_PTX, FLASH_WGMMA, SKINNY_CODES_PTX};
use crate::memory::pack::Packing;
use crate::memory::plan::{HumanBytes, Plan, Purpose, Side};
use crate::memory::{Buffer, BufferTable, MemoryError, Place, WeightFile};
use crate::model::checkpoint::{Checkpoint, SourceRef, WeightSpec};
use crate::model::decoder::drafter::{DRAFTER, PlacedWeight, TOKEN_IDS};
use crate::model::decoder::{Decoder, Part, ROPE, parallel, stride};
use crate::replica::MemoryUse;
use crate::telemetry::clock::Moment;
use crate::telemetry::with_causes;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::Span;

/// On a device that serves other models, the work of a load on the compute queue (mainly the test of decode steps)
/// takes at most 1/BESIDE_SHARE of the time, as far as the device reports how long the work took and [`BESIDE_PAUSE`]
/// allows.
const BESIDE_SHARE: u32 = 32;
/// A GPU that finishes nothing for this long during a model's first steps counts as stuck.
const FIRST_STEPS: Duration = Duration::from_secs(60);
/// The maximum pause that [`BESIDE_SHARE`] causes.
const BESIDE_PAUSE: Duration = Duration::from_secs(1);
/// The number of cores that a load leaves free while others serve: for the engine thread, the compute actor, the
/// watcher and one thread of the service.
const BESIDE_CORES: usize = 4;

/// Returns the number of threads that read, pack and compile while others serve.
fn threads_beside() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    cores.saturating_sub(BESIDE_CORES).max(1)
}

pub(crate) struct Build<'a> {
    pub(crate) name: &'a str,
    pub(crate) model: &'a config::Model,
    pub(crate) checkpoint: &'a Checkpoint,
    /// The draft model, if drafts come from one.
    pub(crate) draft: Option<&'a Checkpoint>,
    pub(crate) opened: &'a OpenDevice,
    pub(crate) adapter: &'a Adapter,
    pub(crate) limit: Option<u64>,
    pub(crate) tune: &'a [String],
    /// Whether the results of a small model of the same kind are compared with those of plain Rust at start.
    pub(crate) self_test: bool,
    pub(crate) tuned: &'a Tuned,
    pub(crate) progress: &'a dyn Progress,
    /// The span of the load; spans of its parts are exported below it.
    pub(crate) span: &'a Span,
    /// Whether others serve meanwhile; the load must not slow them down noticeably.
    pub(crate) beside: bool,
    /// Set when the load is cancelled.
    pub(crate) cancelled: &'a AtomicBool,
    /// What the model runs without, as tests on this device have shown.
    pub(crate) fallbacks: Fallbacks,
    /// The stage that the device computes, if the model is split over several devices.
    pub(crate) part: Option<&'a StagePart>,
}

/// The sizes that a memory plan determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedSizes {
    /// The maximum context in tokens.
    pub(crate) context: u32,
    /// The number of KV pages.
    pub(crate) pages: u32,
    /// The number of window pages, if windows have pages of their own.
    pub(crate) window_pages: Option<u32>,
}

/// A model whose buffers are allocated and whose weights are being loaded.
pub(crate) struct PreparedModel<'a> {
    pub(crate) decoder: Decoder<'a>,
    pub(crate) recordings: Recordings,
    pub(crate) table: BufferTable,
    pub(crate) pipelines: Pipelines,
    pub(crate) loading: Loading,
    /// The memory plan.
    pub(crate) memory: Vec<MemoryUse>,
}

/// The work in progress when a model is prepared.
pub(crate) struct Loading {
    /// Clears the buffers that start as zero.
    init: Arc<Region>,
    weights: Weights,
    /// After these the rotary tables and the orders of columns are there.
    tables: Vec<Point>,
    pipelines: (usize, Moment, Moment),
    started: Instant,
}

/// A load of weights in progress. If it is dropped before it has finished, it cancels the load and waits until the
/// buffers are no longer in use.
struct Weights(Option<WeightLoad>);

impl Drop for Weights {
    fn drop(&mut self) {
        if let Some(load) = self.0.take() {
            load.cancel();
            // The error only says that the load was cancelled.
            let _ = load.wait();
        }
    }
}

/// What a model runs without, because a test on this device has failed, or memory does not suffice.
#[derive(Debug, Default)]
pub(crate) struct Fallbacks {
    /// Weights in fragments: quantised weights are packed row after row.
    pub(crate) row_major: AtomicBool,
    /// Programs in PTX.
    pub(crate) no_ptx: AtomicBool,
    /// `flash_wgmma`, of the programs in PTX.
    pub(crate) no_flash_wgmma: AtomicBool,
    /// `skinny_codes.ptx`, likewise.
    pub(crate) no_codes_ptx: AtomicBool,
    /// `expert_skinny.codes.ptx`, likewise.
    pub(crate) no_expert_ptx: AtomicBool,
    /// Integer dot products of codes.
    pub(crate) no_dots: AtomicBool,
    /// Packing of weights on the device during the load: the host packs them.
    pub(crate) no_device_packing: AtomicBool,
}

impl Fallbacks {
    fn copy(&self) -> Fallbacks {
        let copy = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Relaxed));
        Fallbacks {
            row_major: copy(&self.row_major),
            no_ptx: copy(&self.no_ptx),
            no_flash_wgmma: copy(&self.no_flash_wgmma),
            no_codes_ptx: copy(&self.no_codes_ptx),
            no_expert_ptx: copy(&self.no_expert_ptx),
            no_dots: copy(&self.no_dots),
            no_device_packing: copy(&self.no_device_packing),
        }
    }
}

impl<'a> Build<'a> {
    /// Returns the build of a stage on the same device.
    pub(crate) fn of_part<'b>(&self, part: &'b StagePart) -> Build<'b>
    where
        'a: 'b,
    {
        let this: &Build<'b> = self;
        Build { part: Some(part), fallbacks: self.fallbacks.copy(), ..*this }
    }
}

impl Build<'_> {
    /// Returns the same build with another configuration of the model.
    pub(crate) fn with_model<'b>(self, model: &'b config::Model) -> Build<'b>
    where
        Self: 'b,
    {
        Build { model, ..self }
    }

    pub(crate) fn unsupported(&self, what: String) -> StartError {
        StartError::Unsupported { model: self.model.name.clone(), what }
    }

    /// Whether decode steps may run without barriers, as far as the device and its tuning are concerned.
    pub(crate) fn may_overlap(&self) -> bool {
        self.tuning(DEFAULT_CONTEXT).tags
    }

    /// Returns the tags of the words that the stage hands on, for [`StagePart::input_tags`] of the next one.
    pub(crate) fn output_tags(&self) -> BTreeMap<u32, u32> {
        self.probe(self.wanted_context()).output_tags()
    }

    /// Whether slots can decode in the steps of prompts.
    pub(crate) fn mixes(&self) -> bool {
        self.probe(self.wanted_context()).mixed_steps().is_some()
    }

    /// Returns the decoder before the KV pool is planned, with one page: everything else has its size.
    fn probe(&self, context: u32) -> Decoder<'_> {
        let chunk = *self.buckets().last().expect("there is at least one bucket");
        self.decoder(context, 1, self.recycled_window(context).map(|_| 1), chunk)
    }

    /// Checks the configuration and plans the memory. Returns the sizes that follow from it, and the plan.
    pub(crate) fn planned(&self) -> Result<(PlannedSizes, Plan), StartError> {
        self.check()?;
        let buckets = self.buckets();
        let wanted = self.wanted_context();
        let window = self.recycled_window(wanted);
        let probe = self.probe(wanted);
        self.check_experts(&probe)?;
        let plan = self.plan(&probe, &buckets, wanted, self.model.context.is_some())?;
        let pages = u32::try_from(plan.kv_pages()).ok().filter(|pages| *pages <= MOST_PAGES).ok_or_else(|| {
            self.unsupported(format!("{} KV pages are asked for, at most {MOST_PAGES} are possible", plan.kv_pages()))
        })?;
        // A stage without windows takes any number of their pages.
        let window_pages =
            window.map(|_| plan.window_pages().map_or(MOST_PAGES, |of| of.min(MOST_PAGES.into()) as u32));
        let window_pages = match (window_pages, self.part.and_then(|part| part.window_pages)) {
            (Some(own), Some(agreed)) if own < agreed => {
                return Err(self.unsupported(format!(
                    "{own} window pages fit on \"{}\", {agreed} did before: its memory was taken meanwhile",
                    self.adapter.name
                )));
            }
            (Some(_), Some(agreed)) => Some(agreed),
            (own, _) => own,
        };
        let context = wanted.min(pages.saturating_mul(PAGE_TOKENS));
        Ok((PlannedSizes { context, pages, window_pages }, plan))
    }

    /// Plans and allocates memory, starts loading the weights, and builds the pipelines meanwhile.
    pub(crate) fn prepare(&self, cache: Option<&Path>) -> Result<PreparedModel<'_>, StartError> {
        let started = Instant::now();
        let buckets = self.buckets();
        let chunk = *buckets.last().expect("there is at least one bucket");
        let (sizes, plan) = self.planned()?;
        let PlannedSizes { context, pages, window_pages } = sizes;
        // The plans of a replica on several devices are printed together.
        if self.part.is_none() {
            self.progress.line(&format!("memory of \"{}\" on {}\n{plan}", self.name, self.adapter.name));
        }
        let memory = plan.entries().iter().map(|entry| MemoryUse {
            replica: self.name.to_owned(),
            purpose: entry.purpose.to_string(),
            bytes: entry.bytes,
            on_device: entry.side == Side::Device,
        });
        let memory = memory.collect();
        let decoder = self.decoder(context, pages, window_pages, chunk);
        if let (Some(drafter), Some(draft)) = (&decoder.drafter, self.draft) {
            let (layers, bytes) = (draft.config.layers, 2 * drafter.decoder.cache_page_bytes().iter().sum::<u64>());
            let weights = drafter.decoder.weights.iter().map(WeightSpec::bytes).sum();
            let what =
                if draft.config.draft_head.is_some() { "a draft head".to_owned() } else { format!("{layers} layers") };
            self.progress.line(&format!(
                "\"{}\": drafts come from {}: {what}, {} of weights, {} of each kv page",
                self.name,
                draft.dir.display(),
                HumanBytes(weights),
                HumanBytes(bytes)
            ));
        }
        for line in acts_in_order(&decoder) {
            self.progress.line(&format!("\"{}\": {line}", self.name));
        }
        let used = self.tuned.apply(&mut decoder.tuning.clone());
        if used > 0 {
            self.progress.line(&format!("\"{}\": {used} workgroup shapes as `ostinato tune` found them", self.name));
        }
        let recordings = Recordings::new(&decoder, &buckets, self.draft_sequences());
        let all = recordings.all();

        let mut table = BufferTable::new();
        let mut init = Recording::new("init");
        let weights = decoder.placed_weights();
        for part in weights.iter().flat_map(|weight| &weight.parts) {
            table.add(self.opened.arena.buffer(&part.name, part.bytes, Place::DeviceLocal)?)?;
        }
        for (name, bytes) in buffer_sizes(&all) {
            if table.get(&name).is_some() {
                continue;
            }
            let place = match name.as_str() {
                "ring" | "dump" | "scores" | "pooled" => Place::Readback,
                name if name.starts_with(EXCHANGE) => exchange_place(name),
                name if name.starts_with("inbox.") || name == "masks" => Place::Upload { bar: true },
                _ => Place::DeviceLocal,
            };
            let buffer = match self.opened.arena.buffer(&name, bytes, place) {
                // The part of device memory that the host can write to may be small.
                Err(MemoryError::OutOfMemory { .. }) if name == parallel::INBOX => {
                    self.opened.arena.buffer(&name, bytes, Place::Upload { bar: false })?
                }
                buffer => buffer?,
            };
            if name.starts_with(EXCHANGE) {
                // Rows of zeros are of no sequence, and inboxes of zeros change nothing.
                buffer.write(0, &vec![0; bytes as usize]);
            }
            // Caches need no initial value: only entries that were written are read. Those of a draft model are not written
            // in steps of many sequences, and must not be NaN then.
            let own = name.strip_prefix(DRAFTER);
            let cache = own.is_none() && matches!(purpose(&name), Purpose::KvPages | Purpose::Recurrent);
            let own = own.unwrap_or(&name);
            let table_of_words = ["orders", TOKEN_IDS].contains(&own);
            if place == Place::DeviceLocal && !cache && !own.starts_with(ROPE) && !table_of_words {
                let to = init.buffer(&name, bytes);
                init.ops.push(Op::Fill { to, word: 0 });
            }
            table.add(buffer)?;
        }

        let packer = self.packer(&weights, &decoder.tuning, cache)?;
        let load = Weights(Some(self.load(&weights, &table, packer)?));
        let upload = |buffer, bytes: &[u8]| self.opened.transfer.upload(&self.opened.ring, buffer, 0, bytes);
        let mut tables = Vec::new();
        for (name, rope) in decoder.placed_rope_tables() {
            // A stage may have no layer of a kind.
            if let Some(buffer) = table.get(&name) {
                tables.push(upload(buffer, bytemuck::cast_slice(&rope))?);
            }
        }
        for (name, words) in decoder.placed_tables() {
            if let (Some(buffer), [_, ..]) = (table.get(&name), &words[..]) {
                tables.push(upload(buffer, bytemuck::cast_slice(&words))?);
            }
        }

        let mut with_init = all.clone();
        with_init.push(&init);
        let begin = Moment::now();
        let threads = Some(self.threads());
        let pipelines = Pipelines::build_for(
            &self.opened.device,
            &self.opened.pipelines,
            cache,
            &with_init,
            threads,
            &|done, total| self.progress.step("building pipelines", done as u64, total as u64, Unit::Count),
        )?;
        let init = Arc::new(Region::build(&self.opened.device, &init, &table, &pipelines)?);
        let built = (pipelines.len(), begin, Moment::now());
        let loading = Loading { init, weights: load, tables, pipelines: built, started };
        Ok(PreparedModel { decoder, recordings, table, pipelines, loading, memory })
    }

    /// Returns the number of threads that compile and test.
    pub(crate) fn threads(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if self.beside { threads_beside() } else { all() }
    }

    /// Leaves out a kernel in PTX, and says why.
    fn leave_out(&self, kernel: &str, why: &str) {
        let device = &self.adapter.name;
        self.progress.warning(&format!("\"{}\": {kernel} is not used on \"{device}\": {why}", self.name));
        let flag = if kernel == FLASH_WGMMA.name {
            &self.fallbacks.no_flash_wgmma
        } else if kernel == SKINNY_CODES_PTX.name {
            &self.fallbacks.no_codes_ptx
        } else if kernel == EXPERT_SKINNY_PTX.name {
            &self.fallbacks.no_expert_ptx
        } else {
            &self.fallbacks.no_ptx
        };
        flag.store(true, Ordering::Relaxed);
    }

    /// Tests the programs in PTX that a prepared model launches, and says whether it launches any. Returns whether the
    /// model can stay as it is.
    fn passes_ptx(&self, prepared: &PreparedModel<'_>) -> Result<bool, StartError> {
        let PreparedModel { decoder, recordings, pipelines, .. } = prepared;
        let says = |what: &str| self.progress.line(&format!("\"{}\": {what}", self.name));
        let e4m3 = |op: &Op| matches!(op, Op::Call(call) if wgmma::is_e4m3(call));
        if decoder.tuning.fp8_activations && !recordings.all().iter().any(|recording| recording.ops.iter().any(e4m3)) {
            says("fp8_activations changes nothing: no product of 128 rows has weights in e4m3 and uses wgmma");
        }
        if !self.adapter.is_nvidia() {
            return Ok(true);
        }
        if !decoder.tuning.ptx {
            match &self.opened.ptx {
                _ if self.fallbacks.no_ptx.load(Ordering::Relaxed) => {}
                Ok(()) => says("wgmma is not used: ptx=0"),
                Err(why) => says(&format!("wgmma is not used: {why}")),
            }
            return Ok(true);
        }
        match test_ptx(self, &decoder.tuning, recordings, pipelines)? {
            Ok(TestedPtx { products, attention, codes, experts }) => {
                says(&match products {
                    0 => "wgmma serves none of the model's products".to_owned(),
                    count => format!("products of many rows use wgmma, {count} programs in PTX"),
                });
                if decoder.divides_experts() {
                    says("experts that are divided among several buffers do not use wgmma");
                }
                if codes > 0 {
                    says(&format!("products of few rows use skinny_codes.ptx, {codes} programs in PTX"));
                }
                if experts > 0 {
                    says(&format!("few rows of experts use expert_skinny.codes.ptx, {experts} programs in PTX"));
                }
                if attention > 0 {
                    says(&format!("prompts' attention uses wgmma, {attention} programs in PTX"));
                }
            }
            Err(FailedPtx { kernel, why }) => {
                self.leave_out(kernel, &format!("its test failed ({why})"));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until a prepared model is loaded. Returns the points after which it can run, and the report of the load.
    pub(crate) fn finish(&self, mut loading: Loading) -> Result<(Vec<Point>, LoadReport), StartError> {
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
        Ok((report.point.into_iter().chain(loading.tables).collect(), report))
    }

    /// Prepares a model and tests its programs in PTX, its kernels of quantised weights and the results of a small model of
    /// its kind. If programs in PTX fail, the model is prepared again without them. If kernels for weights in fragments, or
    /// the small model's results with these, fail, it is prepared again with weights row after row; if those fail, without
    /// integer dot products.
    fn prepare_tested(&self, cache: Option<&Path>) -> Result<PreparedModel<'_>, StartError> {
        loop {
            let prepared = match self.prepare(cache) {
                Err(StartError::Device(error @ DeviceError::Program { .. }))
                    if !self.fallbacks.no_ptx.load(Ordering::Relaxed) =>
                {
                    let DeviceError::Program { kernel, .. } = &error else { unreachable!("it is one") };
                    self.leave_out(kernel, &with_causes(&error));
                    continue;
                }
                prepared => prepared?,
            };
            if !self.passes_ptx(&prepared)? {
                continue;
            }
            let PreparedModel { decoder, recordings, pipelines, .. } = &prepared;
            let device = &self.adapter.name;
            let ((what, why), refusal) = match test_formats(self, &decoder.tuning, recordings, pipelines)? {
                Some(why) => (
                    ("quantised weights", format!("({why})")),
                    format!("device \"{device}\" computes its quantised weights wrongly: {why}"),
                ),
                None => match self.failed_reference(decoder, cache)? {
                    Some(why) => (
                        ("models of this kind", format!("({why})")),
                        format!(
                            "device \"{device}\" computes models of this kind wrongly: {why}; --skip-self-test starts it \
                             all the same, and its texts may be wrong"
                        ),
                    ),
                    None => return Ok(prepared),
                },
            };
            if prepared.decoder.tuning.fragments.is_none() {
                if decoder.tuning.dots.is_none() {
                    return Err(self.unsupported(refusal));
                }
                self.progress.warning(&format!(
                    "\"{}\": device \"{device}\" computes {what} wrongly {why}: tested again without integer dot products",
                    self.name
                ));
                self.fallbacks.no_dots.store(true, Ordering::Relaxed);
                continue;
            }
            self.progress.warning(&format!(
                "\"{}\": device \"{device}\" computes {what} in fragments wrongly {why}: they are packed row after row",
                self.name
            ));
            self.fallbacks.row_major.store(true, Ordering::Relaxed);
        }
    }

    /// Compares the results of a small model of the same kind with those of plain Rust, where the tuning asks for it.
    /// Returns what is wrong, if anything is.
    fn failed_reference(&self, decoder: &Decoder<'_>, cache: Option<&Path>) -> Result<Option<String>, StartError> {
        if decoder.tuning.reference_test <= u32::from(decoder.tuning.fragments.is_some()) {
            return Ok(None);
        }
        let begin = Instant::now();
        let says = |what: &str| self.progress.line(&format!("\"{}\": {what}", self.name));
        match test_reference(self, decoder, cache)? {
            Tested::Right(what) => {
                let took = begin.elapsed().as_secs_f64();
                says(&format!("a small model of the same kind gives the reference's results ({what}; {took:.2} s)"));
            }
            Tested::Before => {}
            Tested::Unknown(why) => says(&format!("its kind is not tested with a small model: {why}")),
            Tested::Wrong(why) => return Ok(Some(why)),
        }
        Ok(None)
    }

    pub(crate) fn executor(
        &self,
        cache: Option<&Path>,
    ) -> Result<(GpuExecutor, LoadReport, Vec<MemoryUse>), StartError> {
        let (parts, loaded, memory) = self.parts(cache)?;
        Ok((GpuExecutor::new(parts), loaded, memory))
    }

    /// Builds the parts of an executor: of a replica, or of one of its stages.
    pub(crate) fn parts(&self, cache: Option<&Path>) -> Result<(Parts, LoadReport, Vec<MemoryUse>), StartError> {
        let PreparedModel { decoder, recordings, table, pipelines, loading, memory } = self.prepare_tested(cache)?;
        let begin = Moment::now();
        let region = |recording: &Recording| -> Result<Arc<Region>, StartError> {
            self.wanted()?;
            Ok(Arc::new(Region::build(&self.opened.device, recording, &table, &pipelines)?))
        };
        let gated = |recording: &Recording| -> Result<Arc<Region>, StartError> {
            self.wanted()?;
            Ok(Arc::new(Region::build_gated(&self.opened.device, recording, &table, &pipelines)?))
        };
        // Where the host carries sums within a step, its region is the first part, and this has the others.
        let divided = RefCell::new(BTreeMap::new());
        let layers = |recording: &Recording| -> Result<Arc<Region>, StartError> {
            // Kernels wait for the sums themselves.
            if decoder.tuning.exchange_polls > 0 {
                return region(recording);
            }
            let pieces = parallel::pieces(recording);
            let first = region(&pieces[0])?;
            if pieces.len() > 1 {
                let rest = pieces[1..].iter().map(gated).collect::<Result<Vec<_>, StartError>>()?;
                divided.borrow_mut().insert(Arc::clone(first.shared_name()), rest);
            }
            Ok(first)
        };
        let step = |recording: &Recording| -> Result<DecodeRegion, StartError> {
            let parts = || -> Result<[Arc<Region>; 2], StartError> {
                let (body, draw) = recording.split("sample");
                let draw = Region::build_gated(&self.opened.device, &draw, &table, &pipelines)?;
                Ok([region(&body)?, Arc::new(draw)])
            };
            Ok(DecodeRegion { whole: layers(recording)?, parts: decoder.tuning.gates.then(parts).transpose()? })
        };
        let BrokenSteps { always, sometimes } =
            broken_steps(&recordings, &decoder.tuning).map_err(|what| self.unsupported(what))?;
        // Constrained rows do not draft, so only decode steps wait for masks.
        let verifying = |recording: &Recording| Ok(DecodeRegion { whole: layers(recording)?, parts: None });
        let regions = |(drafts, sequences): (u32, u32), recording: &Recording, plain: &Option<Recording>| {
            let step = |recording: &Recording| if drafts > 0 { verifying(recording) } else { step(recording) };
            let carried = always.get(&(drafts, sequences)).unwrap_or(recording);
            let carried = plain.as_ref().map(|_| step(carried)).transpose()?;
            let own = |wait: &Wait| (wait.drafts, wait.rows) == (drafts, sequences * (drafts + 1));
            let of_step = sometimes.iter().enumerate().filter(|(_, (wait, _))| own(wait));
            let broken = of_step.map(|(index, (_, broken))| Ok((index, step(broken)?)));
            let broken = broken.collect::<Result<_, StartError>>()?;
            let plain = step(plain.as_ref().unwrap_or(recording))?;
            Ok::<_, StartError>(DecodeRegions { tagged: carried.is_some(), plain, carried, broken })
        };
        let mut decode = BTreeMap::new();
        for (rows, recording, plain) in &recordings.decode {
            decode.insert(*rows, regions((0, *rows), recording, plain)?);
        }
        let mut verify: BTreeMap<u32, BTreeMap<u32, DecodeRegions>> = BTreeMap::new();
        for (drafts, sequences, recording, plain) in &recordings.verify {
            let regions = regions((*drafts, *sequences), recording, plain)?;
            verify.entry(*drafts).or_default().insert(*sequences, regions);
        }
        let waits: Vec<Wait> = sometimes.into_iter().map(|(wait, _)| wait).collect();
        let kinds: BTreeSet<(u32, u32)> = waits.iter().map(|wait| (wait.drafts, wait.rows)).collect();
        for (drafts, rows) in kinds {
            let count = waits.iter().filter(|wait| (wait.drafts, wait.rows) == (drafts, rows)).count();
            let verifying = if drafts > 0 { format!(" with {drafts} drafts a sequence") } else { String::new() };
            let name = self.name;
            self.progress.line(&format!(
                "\"{name}\": for a test, {count} waits of steps of {rows} rows{verifying} are broken in turn"
            ));
        }
        let by_rows = |of: &[(u32, Recording)]| {
            let built = of.iter().map(|(rows, recording)| Ok((*rows, layers(recording)?)));
            built.collect::<Result<BTreeMap<u32, Arc<Region>>, StartError>>()
        };
        // Those of `mixed` take the place of those of `first`.
        let mixed_heads = |first: &[(u32, Recording)], mixed: &[(u32, Recording)]| {
            let of: BTreeMap<u32, &Recording> = first.iter().chain(mixed).map(|(rows, of)| (*rows, of)).collect();
            let head = |(rows, recording): (u32, &Recording)| -> Result<(u32, MixedHead), StartError> {
                let gated = decoder.tuning.gates.then(|| gated(recording)).transpose()?;
                Ok((rows, MixedHead { whole: layers(recording)?, gated }))
            };
            of.into_iter().map(head).collect::<Result<BTreeMap<u32, MixedHead>, StartError>>()
        };
        let (prefill, wide) = (by_rows(&recordings.prefill)?, by_rows(&recordings.wide)?);
        let microbatches = by_rows(&recordings.microbatches)?;
        let mut inboxes = Vec::new();
        for (index, InboxRecordings { apply, clear, mark }) in recordings.inboxes.iter().enumerate() {
            inboxes.push(Inbox {
                patch: Arc::clone(table.require(&format!("inbox.{index}.patch"))?),
                apply: region(apply)?,
                counts: match (clear, mark) {
                    (Some(clear), Some(mark)) => Some(CountInbox {
                        clear: Arc::clone(table.require(&format!("inbox.{index}.clear"))?),
                        seen: Arc::clone(table.require(&format!("inbox.{index}.seen"))?),
                        clear_counts: region(clear)?,
                        mark_seen: region(mark)?,
                    }),
                    _ => None,
                },
            });
        }
        let buffer = |name: &str| -> Result<Arc<Buffer>, StartError> { Ok(Arc::clone(table.require(name)?)) };
        let head = match &recordings.head {
            None => None,
            Some(HeadRecordings { pool, dump }) => Some(HeadParts {
                ring: decoder.ring,
                ring_buffer: buffer("ring")?,
                masks: buffer("masks")?,
                gate: Arc::new(Gate::new(&self.opened.device)?),
                dump: buffer("dump")?,
                dump_region: region(dump)?,
                scores: buffer("scores")?,
                pool: region(pool)?,
                hidden: (decoder.config.hidden, decoder.pooled_stride()),
                pooled: buffer("pooled")?,
            }),
        };
        let logits = match &recordings.logits {
            None => None,
            Some(LogitRecordings { first, mixed, score }) => Some(LogitRegions {
                mixed: match decoder.mixed_steps() {
                    Some(_) => mixed_heads(first, mixed)?,
                    None => BTreeMap::new(),
                },
                first: by_rows(first)?,
                score: (score.0, layers(&score.1)?),
            }),
        };
        let mut exchange = match self.part {
            None => None,
            Some(_) => Some(self.exchange(&decoder, &recordings, &buffer, &region, &gated)?),
        };
        if let Some(sums) = exchange.as_mut().and_then(|exchange| exchange.sums.as_mut())
            && decoder.tuning.exchange_polls == 0
        {
            let gate = Arc::new(Gate::new(&self.opened.device)?);
            sums.divided = Some(DividedSteps { gate, rest: divided.take() });
        }
        let (ready, loaded) = self.finish(loading)?;
        let failed = match &head {
            // The steps of a split model are tested on all devices together (`split_test`).
            _ if self.part.is_some() => 0,
            None => 0,
            Some(head) => {
                let probe = Probe {
                    inbox: &inboxes[0],
                    ring: &head.ring_buffer,
                    dump_region: &head.dump_region,
                    dump: &head.dump,
                    ready: &ready,
                    page_tokens: PAGE_TOKENS,
                };
                test_overlap(self, &decoder, &table, &probe, (&mut decode, &mut verify))?
            }
        };
        spans::recorded(self.span, begin);
        let variants = Arc::new(variants(&decoder, &recordings, failed, waits));
        let overlaps = decode.values().any(|regions| regions.carried.is_some());
        self.progress.line(&format!(
            "\"{}\": weights {}; stages of a decode step {}",
            self.name,
            match decoder.tuning.fragments {
                None => "row after row",
                Some(Matrices::Emulated) => "in fragments, on emulated matrix units",
                Some(Matrices::Cooperative) => "in fragments, on matrix units",
            },
            if overlaps { "overlap" } else { "run one after the other" }
        ));
        let slots = decoder.state.slots;
        let capacity = Capacity {
            slots,
            pages: decoder.pages,
            window: decoder.window_pages.map(|pages| {
                let window = self.checkpoint.config.recycled_window();
                WindowCapacity { tokens: window.expect("a model with window pages has windows"), pages }
            }),
            context: decoder.context,
            prefill_chunk: decoder.state.chunk,
            causal: self.checkpoint.config.causal,
            prompts: slots.min(decoder.state.prompts),
            sequences: slots.min(decoder.state.sequences),
            mixed_steps: decoder.mixed_steps(),
            buckets: recordings.decode.iter().map(|(rows, ..)| *rows).collect(),
            run_ahead: RUN_AHEAD,
            gates: decoder.tuning.gates,
            vocabulary: self.checkpoint.config.vocab,
            drafts: Drafts {
                most: decoder.drafts,
                sequences: self.draft_sequences(),
                always: self.model.drafts_always.unwrap_or(false),
                history: decoder.keeps_tokens(),
                catches_up: decoder.drafter_catches_up(),
            },
            snapshots: self.snapshots(),
            plan_limit: (!self.adapter.is_cpu()).then_some(PLAN_LIMIT),
        };
        let parts = Parts {
            capacity,
            layout: decoder.state,
            head,
            logits,
            exchange,
            decode,
            verify,
            prefill,
            wide,
            microbatches,
            catch_up: by_rows(&recordings.catch_up)?,
            decode_rows: recordings.decode_rows.as_ref().map(&region).transpose()?,
            inboxes,
            patch_pairs: PATCH_PAIRS,
            seen_rows: SEEN_ROWS,
            compute: Arc::clone(&self.opened.compute),
            ready,
            variants,
            device_name: self.adapter.name.clone(),
            device: Arc::clone(&self.opened.device),
            pipelines,
            injection: Injection { plan: decoder.tuning.fault_at, step: decoder.tuning.broken_step },
            retry_after: Duration::from_millis(u64::from(decoder.tuning.retry_ms)),
        };
        Ok((parts, loaded, memory))
    }

    /// Builds the buffers, regions and gates by which a stage exchanges data with the others.
    fn exchange(
        &self,
        decoder: &Decoder<'_>,
        recordings: &Recordings,
        buffer: &dyn Fn(&str) -> Result<Arc<Buffer>, StartError>,
        region: &dyn Fn(&Recording) -> Result<Arc<Region>, StartError>,
        gated: &dyn Fn(&Recording) -> Result<Arc<Region>, StartError>,
    ) -> Result<Exchange, StartError> {
        if self.adapter.is_cpu() {
            // The load waits for work that is submitted later, so what was timed before has been read by then.
            self.opened.compute.stop_timing();
        }
        let ExchangeRecordings { receive, send, apply, publish, awaits } = &recordings.exchange;
        type Make<'m> = &'m dyn Fn(&Recording) -> Result<Arc<Region>, StartError>;
        let each = |of: &[Recording], make: Make<'_>| of.iter().map(make).collect::<Result<Vec<_>, StartError>>();
        let buffers = |what: &str| -> Result<Vec<Arc<Buffer>>, StartError> {
            exchange::buffers(decoder.stage.stages).map(|index| buffer(&exchange_buffer(what, index))).collect()
        };
        let by_rows = |of: &BTreeMap<PassedRows, Vec<Recording>>, make: Make<'_>| {
            of.iter().map(|(rows, of)| Ok((*rows, each(of, make)?))).collect::<Result<BTreeMap<_, _>, StartError>>()
        };
        let gate = || -> Result<Arc<Gate>, StartError> { Ok(Arc::new(Gate::new(&self.opened.device)?)) };
        Ok(Exchange {
            layouts: recordings.message_rows().map(|most| decoder.message(most)),
            carries_faults: decoder.tuning.tags,
            output_tags: recordings.output_tags(),
            receive: match receive.is_empty() {
                true => None,
                false => {
                    Some(MessagesIn { messages: buffers("receive")?, regions: by_rows(receive, gated)?, gate: gate()? })
                }
            },
            send: match send.is_empty() {
                true => None,
                false => Some(MessagesOut { messages: buffers("send")?, regions: by_rows(send, region)? }),
            },
            apply: match apply.is_empty() {
                true => None,
                false => Some(SlotsIn { inboxes: buffers("apply")?, regions: each(apply, gated)?, gate: gate()? }),
            },
            publish: match publish.is_empty() {
                true => None,
                false => Some(SlotsOut { slots: buffers("publish")?, regions: each(publish, region)? }),
            },
            busy_wait: match awaits {
                None => None,
                Some([messages, returns]) => {
                    let (numbers, regions) = (buffer(AWAITED)?, [gated(messages)?, gated(returns)?]);
                    // Polls of host memory would take the bus from other devices.
                    numbers.device_local().then(|| BusyWait::new(numbers, regions))
                }
            },
            sums: match decoder.stage.rank {
                None => None,
                Some(_) => Some(self.sums(decoder, recordings, buffer)?),
            },
        })
    }

    /// Returns the exchanges of sums of a device that has a part of every layer.
    fn sums(
        &self,
        decoder: &Decoder<'_>,
        recordings: &Recordings,
        buffer: &dyn Fn(&str) -> Result<Arc<Buffer>, StartError>,
    ) -> Result<Sums, StartError> {
        let (outbox, inbox) = (buffer(parallel::OUTBOX)?, buffer(parallel::INBOX)?);
        let (_, step, _) = &recordings.decode[0];
        let layers = recordings.layers();
        assert!(layers.map(parallel::exchanges).all(|count| count == parallel::exchanges(step)), "sums of all steps");
        let mut microbatches = recordings.microbatches.iter().map(|(_, step)| parallel::exchanges(step));
        assert!(microbatches.all(|count| count == 2 * parallel::exchanges(step)), "sums of both microbatches");
        Ok(Sums {
            outbox,
            inbox,
            slot_words: decoder.exchange_words(),
            best_words: decoder.best_words(),
            each_step: parallel::exchanges(step),
            gathers: decoder.stage.vocabulary.is_some(),
            row_floats: stride(decoder.config.hidden),
            rounds_prompts: decoder.rounds_prompts(),
            divided: None,
        })
    }

    /// Returns an error if the load was cancelled.
    pub(crate) fn wanted(&self) -> Result<(), StartError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(StartError::Cancelled { model: self.model.name.clone() }),
            false => Ok(()),
        }
    }

    fn load(
        &self,
        weights: &[PlacedWeight<'_>],
        table: &BufferTable,
        packer: Option<Arc<DevicePacker>>,
    ) -> Result<WeightLoad, StartError> {
        // The stamps of the files whose headers were read, so that files that were replaced since are rejected.
        let files = self.checkpoint.files.iter().chain(self.draft.iter().flat_map(|draft| &draft.files));
        let stamps: HashMap<&Path, &Stamp> = files.map(|file| (&*file.path, &file.stamp)).collect();
        let failed = |source: LoadError| StartError::Load { model: self.model.name.clone(), source };
        let mut files: HashMap<Arc<Path>, Arc<WeightFile>> = HashMap::new();
        let mut open = |path: &Arc<Path>| -> Result<Arc<WeightFile>, StartError> {
            if let Some(file) = files.get(path) {
                return Ok(Arc::clone(file));
            }
            let file = WeightFile::open_as(path, stamps[&**path]);
            let file = Arc::new(file.map_err(|error| failed(error.into()))?);
            files.insert(Arc::clone(path), Arc::clone(&file));
            Ok(file)
        };
        let mut tensors = Vec::new();
        for PlacedWeight { spec: weight, packing: whole, parts } in weights {
            for part in parts {
                let mut sources = Vec::new();
                for source in &weight.sources {
                    let Some(clipped) = clip(source, part, open(&source.path)?) else { continue };
                    let matrix = match &source.matrix {
                        None => None,
                        Some(of) => {
                            let tensors = of.matrix.places.iter();
                            let tensors = tensors.map(|place| Ok((open(&place.path)?, place.range())));
                            Some(MatrixRows {
                                description: Arc::clone(&of.matrix.description),
                                tensors: tensors.collect::<Result<_, StartError>>()?,
                                first: of.first + clipped.from,
                                ordered: weight.order.is_some(),
                            })
                        }
                    };
                    sources.push(TensorSource { matrix, ..clipped.source });
                }
                tensors.push(LoadTensor {
                    name: part.name.clone(),
                    target: Arc::clone(table.require(&part.name)?),
                    offset: 0,
                    packing: Packing { rows: part.rows, ..*whole },
                    sources,
                });
            }
        }
        let threads = self.beside.then(threads_beside);
        self.opened.loader.load_on(LoadPlan { tensors, packer }, threads).map_err(failed)
    }

    /// Runs regions in order and waits for them.
    fn run_once(&self, regions: Vec<Arc<Region>>) -> Result<(), StartError> {
        self.run_all(vec![regions], &[])
    }

    /// Submits each list of regions, each waiting for `waits`, and then waits for all of them.
    pub(crate) fn run_all(&self, submissions: Vec<Vec<Arc<Region>>>, waits: &[Point]) -> Result<(), StartError> {
        self.run_timed(submissions, waits).map(|_| ())
    }

    /// Like [`Build::run_all`]. Returns the device time, as far as the device reports it.
    fn run_timed(&self, submissions: Vec<Vec<Arc<Region>>>, waits: &[Point]) -> Result<Duration, StartError> {
        let (reports, done) = crossbeam_channel::bounded(submissions.len());
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let count = submissions.len();
        for regions in submissions {
            self.opened.compute.submit(Submission {
                id: 0,
                ahead: None,
                entries: vec![regions],
                waits: waits.to_vec(),
                gates: Gates::new(),
                waits_within: false,
                flush: FlushReason::PhaseBoundary,
                report_after: Vec::new(),
                outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
                then: None,
            });
        }
        let mut ran = Duration::ZERO;
        for _ in 0..count {
            let Some(report) = self.opened.compute.report(&done, FIRST_STEPS) else {
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
        Ok(ran)
    }
}

/// Returns the memory of an exchange buffer.
fn exchange_place(name: &str) -> Place {
    match name.strip_prefix(EXCHANGE).is_some_and(|name| name.starts_with("send") || name.starts_with("publish")) {
        true => Place::Readback,
        false => Place::Upload { bar: true },
    }
}

/// Returns the log lines about weights whose groups do not consist of adjacent columns (act-order).
fn acts_in_order(decoder: &Decoder<'_>) -> Vec<String> {
    let count = |is: &dyn Fn(&&WeightSpec) -> bool| decoder.weights.iter().filter(is).count();
    let ordered = count(&|weight| weight.order.is_some());
    let expanded = |weight: &&WeightSpec| weight.is_expanded();
    let bytes: u64 = decoder.weights.iter().filter(expanded).map(WeightSpec::bytes).sum();
    let mut lines = Vec::new();
    if ordered > 0 {
        lines.push(format!(
            "the groups of {ordered} matrices are not of adjacent columns (act-order): a stage before each of their \
             products puts its input in order, and stages do not overlap"
        ));
    }
    if bytes > 0 {
        lines.push(format!(
            "{} matrices are expanded to numbers, {}: the order of their columns (act-order) differs between rows, or they \
             are of experts, of which all or none are quantised",
            count(&expanded),
            HumanBytes(bytes)
        ));
    }
    lines
}

/// Rows of a source that lie in a part of its weight.
struct Clipped {
    source: TensorSource,
    /// The first of them.
    from: u32,
}

/// Returns the rows of a source that lie in a part of its weight; `None` if there are none.
fn clip(source: &SourceRef, part: &Part, file: Arc<WeightFile>) -> Option<Clipped> {
    let SourceRef { offset, map, transposed, .. } = source.within(&(part.first_row..part.first_row + part.rows))?;
    let from = source.map.source_rows(part.first_row..part.first_row + part.rows).start;
    Some(Clipped { source: TensorSource { file, offset, map, transposed, matrix: None }, from })
}
