//! The open devices, each with its actors, and the models built on them. A device is opened when a model first needs it
//! and stays open as long as the host, while models are loaded and unloaded, unless it is lost.
//! Not here: building a replica (`gpu::build`), and the decision when to load a model (`host::lifecycle`).

use crate::actors::compute::{Compute, GpuTime};
use crate::actors::loader::{LoadReport, Loader};
use crate::actors::timeline::TransferRecord;
use crate::actors::transfer::Transfer;
use crate::actors::transfer::TransferCounters;
use crate::actors::turns::Turns;
use crate::config::{self, Config, SplitMode};
use crate::device::{Adapter, Device, Instance, InstanceOptions, MemoryBudget, choose};
use crate::engine::executor::{ExecuteError, Executor};
use crate::engine::plan::Capacity;
use crate::gpu::abilities::{KernelPath, lacks};
use crate::gpu::build::defaults::{check_tuning, takes_ptx};
use crate::gpu::build::speed::Speeds;
use crate::gpu::build::split::{Division, StagePart, check_stages, choose_ranks, choose_stages, shards};
use crate::gpu::build::split_test::{Microbatches, test_exchanges, test_split};
use crate::gpu::build::{Build, Fallbacks};
use crate::gpu::error::StartError;
use crate::gpu::executor::split::SplitExecutor;
use crate::gpu::matrix_units::{Multiplies, runs_wgmma};
use crate::gpu::spans;
use crate::gpu::tuned::Tuned;
use crate::host::progress::{Progress, WarningsOnly};
use crate::host::source::LoadAttempt;
use crate::host::source::{BuildError, ModelSource};
use crate::host::{DeviceMemory, DeviceReport, DeviceStatus, MemoryShare, ServedDevice};
use crate::host::{Host, ModelInfo, ServedModel};
use crate::kernels::gemm::skinny::Matrices;
use crate::kernels::pack_codes::PackVariant;
use crate::kernels::region::PipelineTable;
use crate::memory::plan::{PlanColumn, PlanTable};
use crate::memory::{Arena, StagingRing};
use crate::model::checkpoint::Checkpoint;
use crate::model::demo;
use crate::model::draft::{self, DraftError};
use crate::model::embedding;
use crate::model::text::Text;
use crate::replica::rebuild::{Rebuild, RebuildError};
use crate::replica::{DeviceInfo, MemoryUse, Replica, ReplicaConfig, ReplicaStage};
use crate::telemetry::with_causes;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The number of slots of the staging ring and the size of each in bytes: one slot for each packing thread, and as many
/// again to keep the transfer queue busy meanwhile. Smaller copies leave gaps on the queue (docs/rejected.md).
const STAGING: (usize, usize) = (32, 8 << 20);
const STAGING_CPU: (usize, usize) = (4, 2 << 20);
/// The interval at which a load checks whether another load on the same device has ended.
const TURN_LOOK: Duration = Duration::from_millis(20);

/// A device with its actors.
#[derive(Debug)]
pub struct OpenDevice {
    pub(crate) device: Arc<Device>,
    pub(crate) arena: Arena,
    pub(crate) compute: Arc<Compute>,
    pub(crate) transfer: Arc<Transfer>,
    pub(crate) ring: StagingRing,
    pub(crate) loader: Loader,
    pub(crate) pipelines: PipelineTable,
    pub(crate) multiplies: Multiplies,
    /// Why the device does not run `wgmma`, if it does not.
    pub(crate) ptx: Result<(), String>,
    /// What the test of packing on the device found, for each kernel that was tested: nothing, or the first difference.
    pub(crate) packing_faults: Mutex<HashMap<PackVariant, Option<String>>>,
    /// Locked while a replica is built: a memory plan relies on free memory that no other load may take.
    building: Mutex<()>,
}

/// How a device is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceUse {
    /// How finely its work is timed.
    pub(crate) gpu_time: GpuTime,
    /// Whether it takes programs in PTX, if it can.
    pub(crate) ptx: bool,
    /// Whether its submissions take turns with those of other processes.
    pub(crate) turns: bool,
}

impl OpenDevice {
    /// Opens a device.
    pub(crate) fn open(
        instance: &Instance,
        adapter: &Adapter,
        cache: Option<&Path>,
        DeviceUse { gpu_time, ptx, turns }: DeviceUse,
    ) -> Result<OpenDevice, StartError> {
        let device = match ptx {
            true => Device::open(instance, adapter)?,
            false => Device::open_without_ptx(instance, adapter)?,
        };
        // The driver of a CPU has no contexts to change between.
        let turns = if turns && !adapter.is_cpu() { Turns::of_device(&adapter.uuid) } else { None };
        OpenDevice::of(device, (gpu_time, turns), staging(adapter), |device, arena| {
            Multiplies::tested(device, arena, cache)
        })
    }

    /// Makes an open device of `device`, with a staging ring of some slots of some bytes. `multiplies` says how the device
    /// multiplies matrix blocks, and row-major weights.
    pub(crate) fn of(
        device: Arc<Device>,
        (gpu_time, turns): (GpuTime, Option<Turns>),
        (slots, bytes): (usize, usize),
        multiplies: impl FnOnce(&Arc<Device>, &Arena) -> Result<Multiplies, StartError>,
    ) -> Result<OpenDevice, StartError> {
        let arena = Arena::new(&device)?;
        let ring = StagingRing::new(&arena, slots, bytes)?;
        let transfer = Arc::new(Transfer::spawn(&arena)?);
        let multiplies = multiplies(&device, &arena)?;
        Ok(OpenDevice {
            ptx: match multiplies.matrices {
                Some(Matrices::Cooperative) => runs_wgmma(&device),
                _ => Err("the device has no matrix units that the kernels use".to_owned()),
            },
            multiplies,
            pipelines: PipelineTable::default(),
            packing_faults: Mutex::default(),
            building: Mutex::default(),
            compute: Arc::new(Compute::spawn(Arc::clone(&device), gpu_time, turns)?),
            loader: Loader::spawn(Arc::clone(&transfer), ring.clone(), None)?,
            ring,
            transfer,
            arena,
            device,
        })
    }

    /// Returns the bytes of device memory that may still be allocated. If the driver does not report its budget, only
    /// this process's own allocations are subtracted from the heap.
    pub(crate) fn free_bytes(&self, budget: &MemoryBudget) -> u64 {
        match budget.reported {
            true => budget.free_bytes(),
            false => budget.free_bytes().saturating_sub(self.arena.usage().reserved_bytes),
        }
    }

    /// Returns the device's compute actor.
    pub fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Waits until no other load runs on this device. Returns an error if the load is cancelled meanwhile.
    fn turn(&self, model: &str, attempt: &LoadAttempt<'_>) -> Result<MutexGuard<'_, ()>, StartError> {
        let mut said = false;
        loop {
            match self.building.try_lock() {
                Ok(turn) => return Ok(turn),
                // The mutex guards no data that a panic could have left inconsistent.
                Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if attempt.cancelled.load(Ordering::Relaxed) {
                return Err(StartError::Cancelled { model: model.to_owned() });
            }
            if !std::mem::replace(&mut said, true) {
                let device = &self.device.adapter().name;
                attempt.progress.line(&format!("\"{model}\" waits for another load on \"{device}\""));
            }
            std::thread::sleep(TURN_LOOK);
        }
    }
}

impl DeviceStatus for OpenDevice {
    fn memory(&self) -> DeviceMemory {
        let now = self.device.budget();
        let share = MemoryShare { budget_bytes: now.budget_bytes, used_bytes: now.used_bytes };
        DeviceMemory { heap_bytes: now.heap_bytes, budget: now.reported.then_some(share) }
    }

    fn report(&self) -> DeviceReport {
        let adapter = self.device.adapter();
        DeviceReport {
            driver: adapter.driver.clone(),
            path: KernelPath::of(self.multiplies.matrices, self.multiplies.arithmetic).words(),
            lacks: lacks(adapter).into_iter().map(|missing| (missing.what, missing.cost)).collect(),
        }
    }

    fn buffer_bytes(&self) -> u64 {
        self.arena.usage().buffers_bytes
    }

    fn transfer_counters(&self) -> TransferCounters {
        self.transfer.counters()
    }

    fn transfers(&self, number: u64) -> Vec<TransferRecord> {
        self.transfer.records(number)
    }

    fn declare_lost(&self, why: &str) {
        self.device.declare_lost(why);
    }

    fn is_lost(&self) -> bool {
        self.device.is_lost()
    }
}

fn device_info(adapter: &Adapter) -> DeviceInfo {
    DeviceInfo {
        index: adapter.index,
        name: adapter.name.clone(),
        uuid: adapter.uuid.clone(),
        pci: adapter.pci.clone(),
        is_cpu: adapter.is_cpu(),
    }
}

pub(crate) fn staging(adapter: &Adapter) -> (usize, usize) {
    if adapter.is_cpu() { STAGING_CPU } else { STAGING }
}

/// Opens the devices that the configuration's models need, and loads the models whose configuration says to load them
/// at start.
pub fn start(config: &Config, progress: &dyn Progress) -> Result<Host, StartError> {
    let instance = Instance::new(&InstanceOptions { validation: config.runtime.validation })?;
    start_on(&instance, config, progress)
}

/// Like [`start`], on the caller's instance. Tests use it to read the instance's validation messages.
pub fn start_on(instance: &Instance, config: &Config, progress: &dyn Progress) -> Result<Host, StartError> {
    start_with(&Arc::new(OpenDevices::new(instance)), config, progress)
}

/// Like [`start`], on devices that hosts of one process share: they stay open until `opened` and the last of those hosts are
/// dropped, and a host finds the pipelines that another has built. Hosts share a device if they use it in the same
/// way (timestamps, programs in PTX, turns with other processes); otherwise each opens it for itself.
pub fn start_with(opened: &Arc<OpenDevices>, config: &Config, progress: &dyn Progress) -> Result<Host, StartError> {
    let (runtime, gpu_time) = (config.runtime.clone(), config.telemetry.gpu_time);
    let devices = Arc::new(Devices { devices: Arc::clone(opened), runtime, gpu_time });
    // Checks the device selection of all models before opening the first device.
    config.models.iter().try_for_each(|model| devices.check(model))?;
    let host = Host::of(&config.models, config.server.queue_limit as usize, Box::new(devices));
    host.load_all(progress)?;
    Ok(host)
}

/// Whether the steps of a replica with tensor parallelism wait inside kernels, by polling.
#[derive(Clone, Copy, Debug)]
struct Waits {
    /// Whether they poll for words of other devices.
    polls: bool,
    /// Whether they poll for tagged words of earlier calls, in place of barriers.
    tags: bool,
}

impl Waits {
    const NONE: Waits = Waits { polls: false, tags: false };
}

/// The open devices of an instance, each opened when a model first needs it.
#[derive(Debug)]
pub struct OpenDevices {
    instance: Instance,
    /// The devices, each with its adapter's index and how it is used. Hosts that use one device differently have it opened
    /// for each way.
    open: Mutex<Vec<(usize, DeviceUse, Arc<OpenDevice>)>>,
    /// Locked while a device is opened, which takes a while.
    opening: Mutex<()>,
    /// How fast devices read weights, as far as it was measured.
    speeds: Speeds,
}

impl OpenDevices {
    /// Returns an instance's devices, none of them open.
    pub fn new(instance: &Instance) -> OpenDevices {
        OpenDevices {
            instance: instance.clone(),
            open: Mutex::default(),
            opening: Mutex::default(),
            speeds: Speeds::default(),
        }
    }

    fn open(&self) -> MutexGuard<'_, Vec<(usize, DeviceUse, Arc<OpenDevice>)>> {
        // No change of the list panics halfway.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the open devices with this use, ordered by their adapters' indices.
    fn with_use(&self, wanted: DeviceUse) -> Vec<Arc<OpenDevice>> {
        let mut found: Vec<_> = self.open().iter().filter(|(_, used, _)| *used == wanted).cloned().collect();
        found.sort_by_key(|(index, ..)| *index);
        found.into_iter().map(|(.., opened)| opened).collect()
    }

    /// Returns the device of an adapter for this use; opens it if it is not open or is lost.
    fn opened(&self, adapter: &Adapter, used: DeviceUse, cache: Option<&Path>) -> Result<Arc<OpenDevice>, StartError> {
        let _one_at_a_time = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |entry: &(usize, DeviceUse, Arc<OpenDevice>)| (entry.0, entry.1) == (adapter.index, used);
        let found = self.open().iter().find(|entry| is_it(entry)).map(|(.., opened)| Arc::clone(opened));
        if let Some(opened) = found.filter(|opened| !opened.device.is_lost()) {
            return Ok(opened);
        }
        let opened = Arc::new(OpenDevice::open(&self.instance, adapter, cache, used)?);
        let lost = {
            let mut open = self.open();
            let lost: Vec<_> = open.extract_if(.., |entry| is_it(entry)).collect();
            open.push((adapter.index, used, Arc::clone(&opened)));
            lost
        };
        // Dropped without the lock on the list: if this was the last reference to the lost device, dropping it ends its actors.
        drop(lost);
        Ok(opened)
    }
}

/// Builds models on the machine's devices.
#[derive(Debug)]
struct Devices {
    devices: Arc<OpenDevices>,
    runtime: config::Runtime,
    gpu_time: GpuTime,
}

impl Devices {
    /// Returns the devices of each replica, of a split one in the order of its stages.
    fn choose(&self, model: &config::Model) -> Result<Vec<Vec<Adapter>>, StartError> {
        model.replicas.iter().map(|replica| self.choose_for(model, replica)).collect()
    }

    fn choose_for(&self, model: &config::Model, placement: &config::Placement) -> Result<Vec<Adapter>, StartError> {
        let adapters = self.devices.instance.adapters();
        if placement.split.is_none() {
            return Ok(vec![choose(&adapters, placement.device.as_ref())?.clone()]);
        }
        let mut chosen: Vec<Adapter> = Vec::new();
        for device in &placement.devices {
            let adapter = choose(&adapters, Some(device))?;
            if let Some(other) = chosen.iter().position(|other| other.index == adapter.index) {
                let what = format!(
                    "devices \"{}\" and \"{device}\" of a split replica are both \"{}\": name each device once",
                    placement.devices[other], adapter.name
                );
                return Err(StartError::Unsupported { model: model.name.clone(), what });
            }
            chosen.push(adapter.clone());
        }
        Ok(chosen)
    }

    /// Returns how the host uses its devices.
    fn device_use(&self) -> DeviceUse {
        let ptx = self.runtime.ptx.unwrap_or_else(|| takes_ptx(&self.runtime.tune));
        DeviceUse { gpu_time: self.gpu_time, ptx, turns: self.runtime.turns }
    }

    fn opened(&self, adapter: &Adapter) -> Result<Arc<OpenDevice>, StartError> {
        self.devices.opened(adapter, self.device_use(), self.runtime.cache_directory.as_deref())
    }

    /// Builds the executor of a replica, with its weights loaded, on one device or split over several.
    fn executor(
        &self,
        model: &config::Model,
        index: usize,
        adapters: &[Adapter],
        (checkpoint, draft): (&Checkpoint, Option<&Checkpoint>),
        attempt: &LoadAttempt<'_>,
    ) -> Result<BuiltReplica, StartError> {
        let cache = self.runtime.cache_directory.as_deref();
        let opened = adapters.iter().map(|adapter| self.opened(adapter)).collect::<Result<Vec<_>, _>>()?;
        // In one order for all loads, so that no two of them wait for each other.
        let mut turns: Vec<&OpenDevice> = opened.iter().map(|opened| &**opened).collect();
        turns.sort_by_key(|opened| opened.device.adapter().index);
        let _turns =
            turns.into_iter().map(|opened| opened.turn(&model.name, attempt)).collect::<Result<Vec<_>, _>>()?;
        let name = replica_name(model, index);
        let span = spans::load(&name);
        let placement = &model.replicas[index];
        let shards = match placement.split {
            Some(SplitMode::Tensor) => shards(model, checkpoint, adapters.len() as u32)?,
            Some(SplitMode::Layers) | None => Vec::new(),
        };
        let of_device = |device: usize| shards.get(device).unwrap_or(checkpoint);
        let tuned = adapters.iter().enumerate();
        let tuned: Vec<Tuned> = tuned
            .map(|(device, adapter)| Tuned::of_model(cache, adapter, of_device(device), attempt.progress))
            .collect();
        let build = |device: usize, model| Build {
            name: &name,
            model,
            checkpoint: of_device(device),
            draft,
            opened: &opened[device],
            adapter: &adapters[device],
            limit: placement.memory_limit.or(model.memory_limit).map(|bytes| bytes.0),
            tune: &self.runtime.tune,
            self_test: self.runtime.self_test,
            tuned: &tuned[device],
            progress: attempt.progress,
            span: &span,
            beside: attempt.beside,
            cancelled: attempt.cancelled,
            fallbacks: Fallbacks::default(),
            part: None,
        };
        let Some(split) = placement.split else {
            let (executor, loaded, memory) = build(0, model).executor(cache)?;
            return Ok(BuiltReplica { executor: Box::new(executor), loaded: Some(loaded), memory, stages: Vec::new() });
        };
        let builds: Vec<Build<'_>> = (0..adapters.len()).map(|device| build(device, model)).collect();
        let on_cpu = adapters.iter().any(Adapter::is_cpu);
        let built = |waits: Waits| self.split_executor(&builds, (split, &placement.shares), waits, attempt);
        if split == SplitMode::Layers || on_cpu {
            return built(Waits::NONE);
        }
        let says = |what: &str, error: &StartError| {
            attempt.progress.warning(&format!("\"{name}\": {what}: {}", with_causes(error)));
        };
        let tags = builds.iter().all(Build::may_overlap);
        for (waits, otherwise) in [
            (Waits { polls: true, tags: true }, "decode steps have barriers, because a test failed"),
            (Waits { polls: true, tags: false }, "steps are divided where sums are exchanged, because a test failed"),
        ] {
            if waits.tags && !tags {
                continue;
            }
            match built(waits) {
                Err(error @ StartError::SplitTest { source: ExecuteError::ExchangeEnded, .. }) => {
                    says(otherwise, &error)
                }
                Err(error @ StartError::NoBar { .. }) => {
                    says("steps are divided where sums are exchanged", &error);
                    break;
                }
                built => return built,
            }
        }
        built(Waits::NONE)
    }

    /// Builds the executor of a replica that is split over the devices of `builds`.
    fn split_executor(
        &self,
        builds: &[Build<'_>],
        (split, shares): (SplitMode, &[u32]),
        waits: Waits,
        attempt: &LoadAttempt<'_>,
    ) -> Result<BuiltReplica, StartError> {
        let cache = self.runtime.cache_directory.as_deref();
        let name = builds[0].name;
        let (mut parts, sizes) = match split {
            SplitMode::Layers if !shares.is_empty() => choose_stages(builds, Division::Shares(shares))?,
            SplitMode::Layers => choose_stages(builds, Division::Speeds(&self.speeds(builds)?))?,
            SplitMode::Tensor => choose_ranks(builds, (waits.polls, waits.tags))?,
        };
        // All stages hold the same sequences.
        let own = builds[0].model.clone();
        let model = config::Model { context: Some(sizes.context), kv_pages: Some(sizes.pages), ..own };
        let column = |(build, part): (&Build<'_>, &StagePart)| -> Result<PlanColumn, StartError> {
            let (_, plan) = build.of_part(part).with_model(&model).planned()?;
            Ok(PlanColumn { heading: part.column(), plan })
        };
        let plans = PlanTable(builds.iter().zip(&parts).map(column).collect::<Result<_, StartError>>()?);
        attempt.progress.line(&format!("memory of \"{name}\" on {} devices{plans}", builds.len()));
        let (mut executors, mut loads, mut stages) = (Vec::new(), Vec::new(), Vec::new());
        let mut before: Option<BTreeMap<u32, u32>> = None;
        for (device, part) in parts.iter_mut().enumerate() {
            // The stage before may have been prepared otherwise than planned, after a test of its kernels.
            part.input_tags = before.take().unwrap_or_default();
            let adapter = builds[device].adapter;
            let (executor, loaded, memory) = builds[device].of_part(part).with_model(&model).parts(cache)?;
            attempt.progress.line(&format!("\"{name}\": {} on {}", part.layers(), adapter.name));
            before = executor.exchange.as_ref().map(|exchange| exchange.output_tags.clone());
            executors.push(executor);
            loads.push(loaded);
            let device = device_info(adapter);
            stages.push(ReplicaStage { device, layers: part.stage.layers.clone(), memory });
        }
        let memory = stages.iter().flat_map(|stage| stage.memory.iter().cloned()).collect();
        let loaded = LoadReport::joined(loads);
        let host_memory = executors.iter().position(|parts| parts.exchange.as_ref().is_some_and(|of| of.lacks_bar()));
        if let Some(device) = host_memory.filter(|_| waits.polls) {
            return Err(StartError::NoBar { device: builds[device].adapter.name.clone() });
        }
        let on_cpu = builds.iter().any(|build| build.adapter.is_cpu());
        let mut executor = SplitExecutor::new(executors, on_cpu)?;
        let failed_test = |source| StartError::SplitTest { model: name.to_owned(), source };
        if split == SplitMode::Tensor {
            let says = |why: &str| format!("\"{name}\": prompts are computed whole, {why}");
            match test_exchanges(&mut executor, waits.polls).map_err(failed_test)? {
                Microbatches::Tested => {}
                Microbatches::Untested => {
                    attempt.progress.line(&says("because a sequence has no room for one that tests microbatches"))
                }
                Microbatches::Wrong => attempt
                    .progress
                    .warning(&says("because a test failed: in microbatches, a prompt had other logits than in chunks")),
            }
        }
        let failed = test_split(&mut executor).map_err(failed_test)?;
        for (rows, why) in failed {
            attempt.progress.warning(&format!(
                "\"{name}\": the decode step of {rows} rows without barriers failed its test ({why}): it runs with barriers"
            ));
        }
        Ok(BuiltReplica { executor: Box::new(executor), loaded, memory, stages })
    }

    /// Returns the bytes of weights that the devices of `builds` read per second in decode steps; equal numbers if one of them
    /// cannot be measured.
    fn speeds(&self, builds: &[Build<'_>]) -> Result<Vec<f64>, StartError> {
        check_stages(builds)?;
        let cache = self.runtime.cache_directory.as_deref();
        let speeds = self.devices.speeds.of(builds, cache)?;
        Ok(speeds.unwrap_or_else(|| {
            builds[0].progress.line(&format!(
                "\"{}\": a device has too little free memory to be measured: all count as equally fast",
                builds[0].name
            ));
            vec![1e9; builds.len()]
        }))
    }

    /// Opens the model's checkpoint.
    fn checkpoint(&self, model: &config::Model) -> Result<Checkpoint, StartError> {
        let cache = self.runtime.cache_directory.as_deref();
        let path = demo::unpack(&model.path, cache).map_err(|(path, source)| StartError::Demo { path, source })?;
        match Checkpoint::open(&path) {
            Ok(mut checkpoint) => {
                if let Some(to) = model.quantize {
                    checkpoint.quantize(to);
                }
                Ok(checkpoint)
            }
            Err(source) => Err(StartError::Checkpoint { model: model.name.clone(), path, source }),
        }
    }

    /// Opens the checkpoint of the model that drafts for a model, if one is configured and drafts are not disabled.
    fn draft(&self, model: &config::Model, own: &Checkpoint) -> Result<Option<Checkpoint>, StartError> {
        let Some(config::Draft::Model(path)) = model.draft.as_ref().filter(|_| model.drafts != Some(0)) else {
            return Ok(None);
        };
        let cache = self.runtime.cache_directory.as_deref();
        let path = demo::unpack(path, cache).map_err(|(path, source)| StartError::Demo { path, source })?;
        let opened = || -> Result<Checkpoint, DraftError> {
            let mut draft = Checkpoint::open_draft(&path)?;
            draft::check(&draft, own)?;
            let by_layers = |replica: &&config::Placement| replica.split == Some(SplitMode::Layers);
            if let (Some(_), Some(split)) = (&draft.config.draft_head, model.replicas.iter().find(by_layers)) {
                return Err(DraftError::Split { devices: split.devices.len() });
            }
            if let Some(to) = model.quantize {
                draft.quantize(to);
            }
            Ok(draft)
        };
        opened().map(Some).map_err(|source| StartError::Draft { model: model.name.clone(), path: path.clone(), source })
    }

    /// Builds another executor, with the same capacity, for a replica whose device was lost.
    fn rebuild(
        &self,
        model: &config::Model,
        index: usize,
        capacity: &Capacity,
        cancelled: &AtomicBool,
    ) -> Result<Box<dyn Executor>, StartError> {
        let adapters = self.choose_for(model, &model.replicas[index])?;
        let checkpoint = self.checkpoint(model)?;
        let draft = self.draft(model, &checkpoint)?;
        // Context and pages that the configuration leaves open depended on the free memory at that time; the new
        // executor must have the same.
        let model = config::Model {
            context: Some(capacity.context),
            prefill_chunk: Some(capacity.prefill_chunk),
            kv_pages: Some(capacity.pages),
            kv_memory: None,
            ..model.clone()
        };
        // No operator waits for this load, so its progress is not reported, but for warnings. The replica's clients wait for
        // it, so it may use all of the host.
        let attempt = LoadAttempt { beside: false, queue_limit: 0, cancelled, progress: &WarningsOnly };
        Ok(self.executor(&model, index, &adapters, (&checkpoint, draft.as_ref()), &attempt)?.executor)
    }
}

/// A replica whose weights are loaded.
struct BuiltReplica {
    executor: Box<dyn Executor>,
    loaded: Option<LoadReport>,
    memory: Vec<MemoryUse>,
    /// Empty, unless it is split.
    stages: Vec<ReplicaStage>,
}

fn replica_name(model: &config::Model, index: usize) -> String {
    format!("{}/{index}", model.name)
}

/// Returns the function that rebuilds a replica's executor after its device was lost.
fn rebuilding(devices: &Arc<Devices>, model: &config::Model, index: usize) -> Rebuild {
    let (devices, model) = (Arc::clone(devices), model.clone());
    Rebuild::new(move |capacity, cancelled| {
        devices.rebuild(&model, index, capacity, cancelled).map_err(RebuildError::from)
    })
}

/// Implemented for `Arc`, because replicas keep a reference in order to rebuild lost executors.
impl ModelSource for Arc<Devices> {
    fn check(&self, model: &config::Model) -> Result<(), BuildError> {
        let chosen = self.choose(model)?;
        Ok(chosen.iter().flatten().try_for_each(|adapter| check_tuning(adapter, &self.runtime.tune))?)
    }

    fn devices(&self) -> Vec<ServedDevice> {
        let served = |opened: Arc<OpenDevice>| ServedDevice {
            info: device_info(opened.device.adapter()),
            memory: Vec::new(),
            status: Some(opened as Arc<dyn DeviceStatus>),
        };
        self.devices.with_use(self.device_use()).into_iter().map(served).collect()
    }

    fn build(&self, model: &config::Model, attempt: &LoadAttempt<'_>) -> Result<ServedModel, BuildError> {
        Ok(serve(self, model, attempt)?)
    }
}

/// Builds a model with all its replicas.
fn serve(devices: &Arc<Devices>, model: &config::Model, attempt: &LoadAttempt<'_>) -> Result<ServedModel, StartError> {
    let placed = devices.choose(model)?;
    let progress = attempt.progress;
    let checkpoint = devices.checkpoint(model)?;
    if let Some(to) = model.quantize {
        progress.line(&format!("model \"{}\" is quantised to {to}", model.name));
    }
    let text = Text::of(&checkpoint).map_err(|source| StartError::Text { model: model.name.clone(), source })?;
    if text.is_none() {
        progress.line(&format!("model \"{}\" has no tokenizer: it serves token ids only", model.name));
    }
    let embedding = embedding::of(&checkpoint)
        .map_err(|error| StartError::Unsupported { model: model.name.clone(), what: error.to_string() })?;
    let draft = devices.draft(model, &checkpoint)?;
    let mut replicas = Vec::new();
    let mut context = checkpoint.config.context;
    for (index, adapters) in placed.iter().enumerate() {
        let built = devices.executor(model, index, adapters, (&checkpoint, draft.as_ref()), attempt)?;
        let BuiltReplica { executor, loaded, memory, stages } = built;
        context = context.min(executor.capacity().context);
        let replica_config = ReplicaConfig {
            queue_limit: attempt.queue_limit,
            eos_ids: checkpoint.config.eos.clone(),
            context: executor.capacity().context,
            vocabulary: checkpoint.config.vocab,
            prefix_cache: model.prefix_cache.unwrap_or(true),
            rebuild: Some(rebuilding(devices, model, index)),
        };
        let name = replica_name(model, index);
        let mut replica = Replica::spawn(name, device_info(&adapters[0]), executor, replica_config)?;
        replica.loaded = loaded;
        replica.memory = memory;
        replica.stages = stages;
        replicas.push(replica);
    }
    let info = ModelInfo {
        architecture: checkpoint.config.architecture.name().to_owned(),
        context,
        vocabulary: checkpoint.config.vocab,
        eos_ids: checkpoint.config.eos.clone(),
        weight_bytes: checkpoint.weight_bytes(),
        bytes_per_token: checkpoint.bytes_per_token(),
        parameters: checkpoint.parameters(),
        active_parameters: checkpoint.active_parameters(),
        embedding,
    };
    Ok(ServedModel::new(model.name.clone(), info, text.map(Arc::new), replicas))
}
