//! Regions: a region is a recording bound to memory and pipelines, as one command buffer that is recorded once and
//! submitted unchanged. Not here: when it is submitted, and what it computes.

use super::barriers;
use super::programs;
use super::recording::{Arg, BufferId, Call, Op, Range, Recording};
use super::shaders::{self, SHADER_SET};
use crate::device::{
    Commands, Device, DeviceError, Encoder, Executable, Module, Pipeline, PipelineCache, PipelineDesc, Point, Program,
    ProgramDesc, Queries, Role,
};
use crate::memory::{Buffer, BufferTable};
use crate::telemetry::clock::cpu_time;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An error while a region is built.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A recording names a buffer that was not allocated.
    #[error("recording \"{recording}\" uses buffer \"{buffer}\", which has no memory")]
    NoBuffer {
        /// The recording's name.
        recording: String,
        /// The buffer's name.
        buffer: String,
    },
    /// An allocated buffer is smaller than a recording needs.
    #[error("recording \"{recording}\" needs {needed} bytes of buffer \"{buffer}\", which has {has}")]
    SmallBuffer {
        /// The recording's name.
        recording: String,
        /// The buffer's name.
        buffer: String,
        /// The size that the recording declares, in bytes.
        needed: u64,
        /// The allocated size in bytes.
        has: u64,
    },
    /// Vulkan reported an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The key of a pipeline: a kernel and its specialization constants.
type Key = (&'static str, Vec<u32>);

/// A pipeline that recordings need.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The shader variant's name.
    pub kernel: &'static str,
    /// The values of its specialization constants, with ids from 0 on.
    pub constants: Vec<u32>,
    /// The requirements on the device.
    pub module: Module,
}

impl Planned {
    /// Returns the constants that the shader declares, with their names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let declared = shaders::find(self.kernel).constants.iter();
        declared.filter_map(|(id, name)| Some((*name, *self.constants.get(*id as usize)?)))
    }
}

/// A pipeline that was built for a report.
#[derive(Debug)]
pub struct BuiltPipeline {
    /// The pipeline.
    pub planned: Planned,
    /// The time that the build took. The driver may have kept the result of an earlier build in a cache of its own.
    pub took: Duration,
    /// The CPU time of the process during the build: its time on one core, whatever else runs on the machine.
    pub cpu: Duration,
    /// The driver's statistics of the compiled programs, empty if it reports none; or the error of the build.
    pub result: Result<Vec<Executable>, DeviceError>,
}

/// The pipelines of some recordings, each built once.
#[derive(Debug)]
pub struct Pipelines {
    built: HashMap<Key, Kernel>,
}

/// The pipelines of a device, for all models that are loaded on it, also later ones: drivers of CPUs, and others with an empty
/// cache, compile for seconds.
#[derive(Debug, Default)]
pub struct PipelineTable {
    built: Mutex<HashMap<Key, Kernel>>,
}

/// The number of pipelines in a [`PipelineTable`] above which those that no model uses leave it. A model has 30 to 300.
const MOST_KEPT: usize = 2048;

/// A built kernel; clones share it.
#[derive(Clone, Debug)]
enum Kernel {
    /// A pipeline, of SPIR-V.
    Pipeline(Pipeline),
    /// A program, of PTX.
    Program(Program),
}

impl Kernel {
    /// Whether there is a clone of it.
    fn is_shared(&self) -> bool {
        match self {
            Kernel::Pipeline(pipeline) => pipeline.is_shared(),
            Kernel::Program(program) => program.is_shared(),
        }
    }
}

impl PipelineTable {
    fn built(&self) -> MutexGuard<'_, HashMap<Key, Kernel>> {
        // Every change of the map is a single operation, so a panic leaves it valid.
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns those of the recordings' pipelines that are built.
    fn find(&self, recordings: &[&Recording]) -> HashMap<Key, Kernel> {
        let built = self.built();
        keys(recordings).filter_map(|key| built.get(&key).cloned().map(|kernel| (key, kernel))).collect()
    }

    /// Adds pipelines. If there are more than [`MOST_KEPT`] then, those that nothing else uses are dropped.
    fn add(&self, pipelines: &HashMap<Key, Kernel>) {
        let mut built = self.built();
        built.extend(pipelines.iter().map(|(key, kernel)| (key.clone(), kernel.clone())));
        if built.len() > MOST_KEPT {
            built.retain(|_, kernel| kernel.is_shared());
        }
    }
}

impl Pipelines {
    /// Builds the pipelines that the recordings need, on all cores, through the pipeline cache in `cache_dir` (`None`:
    /// the cache is not kept). If the cache cannot be written, a warning is logged. `progress` receives the number of
    /// built pipelines and the total number.
    pub fn build(
        device: &Device,
        cache_dir: Option<&Path>,
        recordings: &[&Recording],
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Pipelines, DeviceError> {
        Pipelines::build_for(device, &PipelineTable::default(), cache_dir, recordings, None, progress)
    }

    /// Like [`Pipelines::build`], for a model of a device with the table `table`: takes those that are in the table, and
    /// adds the others to it. Builds on `cores` cores; `None` uses all.
    pub fn build_for(
        device: &Device,
        table: &PipelineTable,
        cache_dir: Option<&Path>,
        recordings: &[&Recording],
        cores: Option<usize>,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Pipelines, DeviceError> {
        let mut pipelines = Pipelines { built: table.find(recordings) };
        if keys(recordings).all(|key| pipelines.built.contains_key(&key)) {
            return Ok(pipelines);
        }
        let cache = match cache_dir {
            Some(dir) => PipelineCache::open(dir, device, SHADER_SET)?,
            None => PipelineCache::in_memory(device)?,
        };
        pipelines.build_missing(device, &cache, recordings, cores, progress)?;
        table.add(&pipelines.built);
        match cache.save() {
            Err(error) if error.is_lost() => return Err(error),
            // The next start compiles them again, which is slower but no reason to refuse this start.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the pipeline cache is not kept: the next start compiles again");
            }
            Ok(()) => {}
        }
        Ok(pipelines)
    }

    /// Builds the pipelines that the recordings need and that do not exist yet, without keeping them in a cache: most
    /// of these variants are tried once.
    pub fn add(&mut self, device: &Device, recordings: &[&Recording]) -> Result<(), DeviceError> {
        self.build_missing(device, &PipelineCache::in_memory(device)?, recordings, None, &|_, _| {})
    }

    /// Builds the pipelines that the recordings need for a report: one after the other on this thread, so that each
    /// one's time is its own, and without our cache. A pipeline that fails does not end the build; only the loss of the
    /// device does. `before` is called before each one, with the number of those that are built and the total number.
    pub fn build_reported(
        device: &Device,
        recordings: &[&Recording],
        before: &dyn Fn(&Planned, usize, usize),
    ) -> Result<(Pipelines, Vec<BuiltPipeline>), DeviceError> {
        let cache = PipelineCache::in_memory(device)?;
        let keys: BTreeSet<Key> = keys(recordings).collect();
        let mut pipelines = Pipelines { built: HashMap::new() };
        let mut built = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            let (kernel, constants) = key.clone();
            let shader = shaders::find(kernel);
            let module = match shader.is_ptx() {
                true => {
                    let (threads, shared_bytes) = programs::workgroup(kernel, &constants);
                    let shared_bytes = Some(shared_bytes);
                    Module { capabilities: BTreeSet::new(), group: [threads, 1, 1], shared_bytes }
                }
                false => Module::read(&shader.words(), &constants),
            };
            let planned = Planned { kernel, module, constants };
            before(&planned, index, keys.len());
            let (begun, used) = (Instant::now(), cpu_time());
            let result = build_one(device, &cache, key);
            let (took, cpu) = (begun.elapsed(), cpu_time().saturating_sub(used));
            let result = match result {
                Err(error) if error.is_lost() => return Err(error),
                result => result.and_then(|kernel| {
                    let executables = match &kernel {
                        Kernel::Pipeline(pipeline) => pipeline.executables()?,
                        Kernel::Program(_) => Vec::new(),
                    };
                    pipelines.built.insert(key.clone(), kernel);
                    Ok(executables)
                }),
            };
            built.push(BuiltPipeline { planned, took, cpu, result });
        }
        Ok((pipelines, built))
    }

    fn build_missing(
        &mut self,
        device: &Device,
        cache: &PipelineCache,
        recordings: &[&Recording],
        cores: Option<usize>,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<(), DeviceError> {
        let keys: HashSet<Key> = keys(recordings).filter(|key| !self.built.contains_key(key)).collect();
        let total = keys.len();
        progress(0, total);
        let queue = Mutex::new(keys.into_iter());
        let results = Mutex::new((HashMap::new(), None));
        let cores = cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        let workers = cores.min(total.max(1));
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                        let Some(key) = next else { return };
                        let result = build_one(device, cache, &key);
                        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                        match result {
                            Ok(pipeline) => {
                                results.0.insert(key, pipeline);
                                progress(results.0.len(), total);
                            }
                            Err(error) => results.1 = Some(error),
                        }
                    }
                });
            }
        });
        let (built, error) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = error {
            return Err(error);
        }
        self.built.extend(built);
        Ok(())
    }

    /// The number of pipelines.
    pub fn len(&self) -> usize {
        self.built.len()
    }

    /// Whether there are no pipelines.
    pub fn is_empty(&self) -> bool {
        self.built.is_empty()
    }

    fn get(&self, call: &Call) -> &Kernel {
        self.built
            .get(&(call.kernel, call.constants.clone()))
            .unwrap_or_else(|| panic!("no pipeline was built for {}{:?}", call.kernel, call.constants))
    }
}

/// Returns the keys of all calls, some of them several times.
fn keys(recordings: &[&Recording]) -> impl Iterator<Item = Key> {
    let calls = recordings.iter().flat_map(|r| &r.ops).filter_map(as_call);
    calls.map(|call| (call.kernel, call.constants.clone()))
}

fn build_one(device: &Device, cache: &PipelineCache, (kernel, constants): &Key) -> Result<Kernel, DeviceError> {
    let shader = shaders::find(kernel);
    if shader.is_ptx() {
        let program = programs::program(kernel, constants);
        let desc = ProgramDesc {
            name: kernel,
            text: &program.text,
            entry: program.entry,
            threads: program.threads,
            shared_bytes: program.shared_bytes,
            args_bytes: shader.push_bytes,
        };
        return Program::new(device, &desc).map(Kernel::Program);
    }
    let words = shader.words();
    let desc = PipelineDesc {
        name: kernel,
        spirv: &words,
        constants,
        push_bytes: shader.push_bytes,
        required_subgroup: shader.required_subgroup(constants),
        full_subgroups: shader.full_subgroups(),
    };
    Pipeline::new(device, cache, &desc).map(Kernel::Pipeline)
}

fn as_call(op: &Op) -> Option<&Call> {
    match op {
        Op::Call(call) => Some(call),
        _ => None,
    }
}

/// A recorded command buffer, with the buffers that it uses and statistics about it.
#[derive(Debug)]
pub struct Region {
    name: Arc<str>,
    commands: Commands,
    dispatches: u32,
    barriers: u32,
    timing: Option<Timing>,
    /// Whether the region is submitted behind a gate: it reads what the host writes after the submission.
    gated: bool,
    recording: Recording,
    // The buffers must outlive every submission of the commands. `drop` marks them with the last submission.
    buffers: Vec<Arc<Buffer>>,
    /// The compute queue's timeline value of the last submission that contains the commands; set by `mark_used`.
    last_use: AtomicU64,
}

/// The options for recording a region.
struct How {
    /// Whether a barrier is needed before each operation.
    needed: Vec<bool>,
    timing: Option<Timing>,
    /// Whether the first barrier also makes visible what the host has written since the submission.
    gated: bool,
}

/// The timestamps of a region: one at its start and one after each operation. They serve one run.
#[derive(Debug)]
pub struct Timing {
    queries: Queries,
    operations: Vec<Operation>,
}

/// The operation between two timestamps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The call's label, or the buffer's name for a copy or fill.
    pub label: Arc<str>,
    /// The shader's name, or `copy` or `fill`.
    pub kernel: &'static str,
}

impl Timing {
    /// The timed operations, in order.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Returns the timestamps of a finished run, in nanoseconds of the device's clock: one more than there are
    /// operations. Returns `None` if one of them was not written.
    pub fn read(&self) -> Option<Vec<u64>> {
        self.queries.read(0, self.queries.count()).ok()?.into_iter().collect()
    }
}

impl Region {
    /// Records `recording` with the memory in `table`. Fails if a buffer is missing or too small, or if Vulkan fails.
    pub fn build(
        device: &Device,
        recording: &Recording,
        table: &BufferTable,
        pipelines: &Pipelines,
    ) -> Result<Region, RegionError> {
        let how = How { needed: barriers::derive(&recording.ops), timing: None, gated: false };
        Region::with(device, recording, bind(recording, table)?, pipelines, how)
    }

    /// Like [`Region::build`], for a region that is submitted behind a gate: it reads what the host writes after the
    /// submission.
    pub fn build_gated(
        device: &Device,
        recording: &Recording,
        table: &BufferTable,
        pipelines: &Pipelines,
    ) -> Result<Region, RegionError> {
        let how = How { needed: barriers::derive(&recording.ops), timing: None, gated: true };
        Region::with(device, recording, bind(recording, table)?, pipelines, how)
    }

    /// Returns the same operations and barriers with timestamps between them. The timestamps take time themselves.
    /// Where operations overlap, each one's time counts from the end of the operation before it.
    pub fn timed(&self, device: &Device, pipelines: &Pipelines) -> Result<Region, RegionError> {
        let name = |id: BufferId| self.recording.buffers[id.0 as usize].name.as_str();
        let operation = |op: &Op| match op {
            Op::Call(call) => Operation { label: call.label.as_str().into(), kernel: call.kernel },
            Op::Copy { to, .. } => Operation { label: name(to.buffer).into(), kernel: "copy" },
            Op::Fill { to, .. } => Operation { label: name(to.buffer).into(), kernel: "fill" },
        };
        let operations: Vec<Operation> = self.recording.ops.iter().map(operation).collect();
        let queries = Queries::new(device, operations.len() as u32 + 1)?;
        let timing = Some(Timing { queries, operations });
        let how = How { needed: barriers::derive(&self.recording.ops), timing, gated: self.gated };
        Region::with(device, &self.recording, self.buffers.clone(), pipelines, how)
    }

    /// Like [`Region::build`], with a barrier before every operation, needed or not: to time calls as a chain of
    /// dependent ones.
    pub fn build_serial(
        device: &Device,
        recording: &Recording,
        table: &BufferTable,
        pipelines: &Pipelines,
    ) -> Result<Region, RegionError> {
        let how = How { needed: vec![true; recording.ops.len()], timing: None, gated: false };
        Region::with(device, recording, bind(recording, table)?, pipelines, how)
    }

    fn with(
        device: &Device,
        recording: &Recording,
        buffers: Vec<Arc<Buffer>>,
        pipelines: &Pipelines,
        How { needed, timing, gated }: How,
    ) -> Result<Region, RegionError> {
        let stamp = |encoder: &mut Encoder, index: u32| {
            if let Some(timing) = &timing {
                encoder.timestamp(&timing.queries, index);
            }
        };
        let mut dispatches = 0;
        // The barrier at the start orders the region after everything that was submitted before.
        let mut count = 1;
        let commands = Commands::record(device, Role::Compute, |encoder| {
            encoder.name(&recording.name);
            let starts_with_copy = !recording.ops.iter().all(|op| matches!(op, Op::Call(_)));
            if starts_with_copy || gated {
                encoder.barrier_full()
            } else {
                encoder.barrier_compute()
            }
            let mut copied = false;
            stamp(encoder, 0);
            for ((op, barrier), index) in recording.ops.iter().zip(needed).zip(1..) {
                let copies = !matches!(op, Op::Call(_));
                if barrier {
                    count += 1;
                    // The narrow barrier suffices where only kernels are involved.
                    if copied || copies {
                        encoder.barrier_full()
                    } else {
                        encoder.barrier_compute()
                    }
                    copied = false;
                }
                copied |= copies;
                dispatches += u32::from(!copies);
                encode(encoder, op, &buffers, pipelines);
                stamp(encoder, index);
            }
            if copied || buffers.iter().any(|b| b.host_visible()) {
                encoder.barrier_host();
            }
        })?;
        Ok(Region {
            name: recording.name.as_str().into(),
            commands,
            dispatches,
            barriers: count,
            timing,
            gated,
            recording: recording.clone(),
            buffers,
            last_use: AtomicU64::new(0),
        })
    }

    /// The recording's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The label of operation `index` of the recording, if the operation is a call.
    pub fn label(&self, index: u32) -> Option<&str> {
        self.recording.ops.get(index as usize).and_then(as_call).map(|call| call.label.as_str())
    }

    /// The recording's name as a shared string.
    pub fn shared_name(&self) -> &Arc<str> {
        &self.name
    }

    /// The command buffer to submit.
    pub fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Notes that the submission with this point contains the commands, or may contain them. This updates one word for
    /// all of the region's buffers: there can be hundreds of buffers, and a step is submitted a thousand times per
    /// second. The buffers are marked when the region is dropped, and none of them can be freed before that.
    pub fn mark_used(&self, point: Point) {
        assert_eq!(point.role, Role::Compute, "regions are recorded for the compute queue");
        self.last_use.fetch_max(point.value, Ordering::AcqRel);
    }

    /// The region's timestamps, if it has any.
    pub fn timing(&self) -> Option<&Timing> {
        self.timing.as_ref()
    }

    /// The number of dispatches.
    pub fn dispatches(&self) -> u32 {
        self.dispatches
    }

    /// The number of barriers, including the one at the start.
    pub fn barriers(&self) -> u32 {
        self.barriers
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let value = self.last_use.load(Ordering::Acquire);
        if value > 0 {
            let point = Point { role: Role::Compute, value };
            self.buffers.iter().for_each(|buffer| buffer.mark_written(point));
        }
    }
}

fn bind(recording: &Recording, table: &BufferTable) -> Result<Vec<Arc<Buffer>>, RegionError> {
    recording
        .buffers
        .iter()
        .map(|decl| {
            let buffer = table.get(&decl.name).ok_or_else(|| RegionError::NoBuffer {
                recording: recording.name.clone(),
                buffer: decl.name.clone(),
            })?;
            if buffer.bytes() < decl.bytes {
                return Err(RegionError::SmallBuffer {
                    recording: recording.name.clone(),
                    buffer: decl.name.clone(),
                    needed: decl.bytes,
                    has: buffer.bytes(),
                });
            }
            Ok(Arc::clone(buffer))
        })
        .collect()
}

fn encode(encoder: &mut Encoder, op: &Op, buffers: &[Arc<Buffer>], pipelines: &Pipelines) {
    let buffer = |id: BufferId| &buffers[id.0 as usize];
    match op {
        Op::Call(call) => {
            let shader = shaders::find(call.kernel);
            let mut block = vec![0u8; shader.push_bytes as usize];
            assert_eq!(call.args.len(), shader.fields.len(), "{} takes other arguments", call.kernel);
            for (arg, field) in call.args.iter().zip(shader.fields) {
                let at = field.offset as usize;
                match arg {
                    Arg::Buffer(range, _) | Arg::Carried(range, _) | Arg::Apart(range, _) => {
                        let address = buffer(range.buffer).address() + range.offset;
                        block[at..at + 8].copy_from_slice(&address.to_le_bytes());
                    }
                    Arg::U32(value) => block[at..at + 4].copy_from_slice(&value.to_le_bytes()),
                    Arg::F32(value) => block[at..at + 4].copy_from_slice(&value.to_le_bytes()),
                }
            }
            match pipelines.get(call) {
                Kernel::Pipeline(pipeline) => {
                    encoder.bind(pipeline);
                    encoder.push(&block);
                    encoder.dispatch(call.groups);
                }
                Kernel::Program(program) => encoder.launch(program, call.groups, &block),
            }
        }
        Op::Copy { from, to } => {
            let Range { offset, bytes, .. } = *from;
            encoder.copy(buffer(from.buffer).raw(), offset, buffer(to.buffer).raw(), to.offset, bytes);
        }
        Op::Fill { to, word } => encoder.fill(buffer(to.buffer).raw(), to.offset, to.bytes, *word),
    }
}

/// Returns the largest size that any of the recordings declares for each buffer, in the order of first use.
pub fn buffer_sizes(recordings: &[&Recording]) -> Vec<(String, u64)> {
    let mut sizes: Vec<(String, u64)> = Vec::new();
    let mut index: HashMap<&str, usize> = HashMap::new();
    for decl in recordings.iter().flat_map(|r| &r.buffers) {
        match index.get(decl.name.as_str()) {
            Some(&i) => sizes[i].1 = sizes[i].1.max(decl.bytes),
            None => {
                index.insert(&decl.name, sizes.len());
                sizes.push((decl.name.clone(), decl.bytes));
            }
        }
    }
    sizes
}
