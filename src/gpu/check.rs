//! The check of a model on a device: the path through the kernels, the features that the device lacks and the
//! consequences, every pipeline with the driver's statistics of it, and the tests at start. For `ostinato
//! check-device`.
//! Not here: printing the result, and serving.

use crate::actors::compute::GpuTime;
use crate::config;
use crate::device::{Adapter, Device, DeviceError, Executable, Instance, Role};
use crate::engine::executor::Executor;
use crate::engine::variants::Fallback;
use crate::gpu::abilities::{KernelPath, Missing, lacks};
use crate::gpu::build::defaults::takes_ptx;
use crate::gpu::build::format_test::test_formats;
use crate::gpu::build::recordings::Recordings;
use crate::gpu::build::reference_test::{Tested, test_reference};
use crate::gpu::build::{Build, Fallbacks};
use crate::gpu::devices::{DeviceUse, OpenDevice};
use crate::gpu::error::StartError;
use crate::gpu::matrix_units::{Multiplies, unpromised};
use crate::gpu::tuned::Tuned;
use crate::host::progress::{Progress, Unit};
use crate::kernels::code_probe::code_kernel;
use crate::kernels::pack_codes::{PackProbe, PackVariant};
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{BuiltPipeline, Pipelines};
use crate::model::checkpoint::Checkpoint;
use crate::telemetry::with_causes;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The staging ring of a device on which nothing is loaded: slots and bytes of each.
const LITTLE_STAGING: (usize, usize) = (1, 4096);

/// The inputs of a check: model, checkpoint and options.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions<'a> {
    /// The model's configuration, as a server has it.
    pub model: &'a config::Model,
    /// The model's checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Changes of the tuning, `KEY=VALUE`.
    pub tune: &'a [String],
    /// Whether no work is submitted to the device: pipelines are built, and nothing is loaded or run.
    pub compile_only: bool,
    /// The directory for pipelines and tunings.
    pub cache: Option<&'a Path>,
}

/// The result of checking a model on a device.
#[derive(Debug, Default)]
pub struct Check {
    /// The paths through the kernels that were built; the first one is used, unless a test rules it out.
    pub paths: Vec<KernelPath>,
    /// The tests, in order.
    pub tests: Vec<SelfTest>,
    /// The pipelines, ordered by kernel.
    pub pipelines: Vec<BuiltPipeline>,
}

impl Check {
    /// Whether no test and no pipeline failed.
    pub fn passed(&self) -> bool {
        self.tests.iter().all(|test| !matches!(test.outcome, Outcome::Failed(_)))
            && self.pipelines.iter().all(|pipeline| pipeline.result.is_ok())
    }
}

/// A test and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfTest {
    /// The test's name.
    pub name: &'static str,
    /// The test's outcome.
    pub outcome: Outcome,
}

/// The outcome of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The test passed. The text states a consequence, or is empty.
    Passed(String),
    /// The test failed, so that the model cannot be served, with the reason.
    Failed(String),
    /// The test was not run, with the reason.
    NotRun(&'static str),
}

/// Returns what an adapter lacks, as [`lacks`] does, and also statistics of pipelines, which only the report of a check uses.
pub fn missing(adapter: &Adapter) -> Vec<Missing> {
    let cost = "this report has no registers and no spills";
    let statistics = Missing { what: "statistics of pipelines".to_owned(), cost };
    let untold = (!adapter.capabilities.pipeline_statistics).then_some(statistics);
    lacks(adapter).into_iter().chain(untold).collect()
}

/// Checks a model on a device. A failure is part of the result, as far as the check can go on after it.
///
/// # Errors
/// If the device cannot be opened or is lost.
pub fn check(
    instance: &Instance,
    adapter: &Adapter,
    options: CheckOptions<'_>,
    progress: &dyn Progress,
) -> Result<Check, StartError> {
    let device = Device::open_with_statistics(instance, adapter)?;
    let promised = unpromised(&adapter.capabilities).is_empty();
    let opened =
        OpenDevice::of(device, (GpuTime::Off, None), LITTLE_STAGING, |device, arena| match options.compile_only {
            true => Ok(Multiplies::promised(adapter)),
            false => Multiplies::tested(device, arena, None),
        })?;
    let tuned = Tuned::of_model(options.cache, adapter, options.checkpoint, progress);
    let (no_span, cancelled) = (tracing::Span::none(), AtomicBool::new(false));
    let of = |tune| Build {
        name: &options.model.name,
        model: options.model,
        checkpoint: options.checkpoint,
        draft: None,
        opened: &opened,
        adapter,
        limit: None,
        tune,
        // It is a test of its own here.
        self_test: false,
        tuned: &tuned,
        progress,
        span: &no_span,
        beside: false,
        cancelled: &cancelled,
        fallbacks: Fallbacks::default(),
        part: None,
    };
    let build = of(options.tune);
    let mut found = Check::default();
    found.tests.push(SelfTest {
        name: "matrix_order",
        outcome: match (promised, options.compile_only, opened.multiplies.matrices) {
            (false, ..) => Outcome::NotRun("the device promises no matrix units"),
            (_, true, _) => Outcome::NotRun(COMPILE_ONLY),
            (.., Some(_)) => Outcome::Passed("matrix units keep elements where the kernels expect them".to_owned()),
            (.., None) => Outcome::Passed("matrix units keep elements elsewhere: they are not used".to_owned()),
        },
    });
    if let Err(error) = build.check().and_then(|()| build.check_experts(&build.decoder(1, 1, None, 1))) {
        found.tests.push(SelfTest { name: "limits", outcome: Outcome::Failed(with_causes(&error)) });
        return Ok(found);
    }
    found.tests.push(SelfTest { name: "limits", outcome: Outcome::Passed(String::new()) });

    // Without a test it is not known whether matrix units can be used, so the path without them is built too.
    let mut tunes = vec![options.tune.to_vec()];
    let untested = options.compile_only && promised;
    if untested && !options.tune.iter().any(|change| change.starts_with("fragments=")) {
        tunes.push([options.tune, &["fragments=0".to_owned()]].concat());
    }
    let builds: Vec<Build<'_>> = tunes.iter().map(|tune| of(tune)).collect();
    let recordings: Vec<(KernelPath, Recordings)> = builds.iter().map(recorded).collect();
    let packing: Vec<(PackVariant, PackProbe)> = builds.iter().flat_map(packing).collect();
    found.paths = recordings.iter().map(|(path, _)| *path).collect();
    let mut all: Vec<&Recording> = recordings.iter().flat_map(|(_, recordings)| recordings.all()).collect();
    all.extend(packing.iter().map(|(_, probe)| &probe.recording));
    let (pipelines, built) = Pipelines::build_reported(&opened.device, &all, &|planned, done, total| {
        progress.step("building pipelines", done as u64, total as u64, Unit::Count);
        progress.line(&format!("building {} {:?}", planned.kernel, planned.constants));
    })?;
    found.pipelines = built;
    let whole = found.passed();
    let outcome = match () {
        () if options.compile_only => Outcome::NotRun(COMPILE_ONLY),
        () if !whole => Outcome::NotRun(NOT_BUILT),
        () if !quantised(&all) => Outcome::NotRun("the model has no quantised weights"),
        () => match test_formats(&build, &build.tuning(build.wanted_context()), &recordings[0].1, &pipelines)? {
            None => Outcome::Passed(String::new()),
            Some(why) if matches!(found.paths[0], KernelPath::RowMajor(_)) => Outcome::Failed(why),
            Some(why) => Outcome::Passed(format!("wrong in fragments ({why}): weights are packed row after row")),
        },
    };
    found.tests.push(SelfTest { name: "quantised_kernels", outcome });
    if !packing.is_empty() {
        let outcome = match () {
            () if options.compile_only => Outcome::NotRun(COMPILE_ONLY),
            () if !whole => Outcome::NotRun(NOT_BUILT),
            () => {
                let tuning = build.tuning(build.wanted_context());
                let mut wrong = Vec::new();
                for (variant, probe) in &packing {
                    let fault = build.packing_fault(*variant, probe, &tuning, &pipelines)?;
                    wrong.extend(fault.map(|why| format!("{variant} are packed wrongly ({why}): the host packs them")));
                }
                Outcome::Passed(wrong.join("; "))
            }
        };
        found.tests.push(SelfTest { name: "packing", outcome });
    }
    drop(pipelines);
    let outcome = match () {
        () if options.compile_only => Outcome::NotRun(COMPILE_ONLY),
        () if !whole => Outcome::NotRun(NOT_BUILT),
        () => {
            let context = build.wanted_context();
            let window = build.recycled_window(context).map(|_| 1);
            let decoder = build.decoder(context, 1, window, 1);
            match test_reference(&build, &decoder, None)? {
                Tested::Right(what) => Outcome::Passed(what),
                Tested::Before => Outcome::Passed(String::new()),
                Tested::Unknown(_) => Outcome::NotRun("a small model of this kind is not known"),
                Tested::Wrong(why) => Outcome::Failed(why),
            }
        }
    };
    found.tests.push(SelfTest { name: "small_model", outcome });
    drop(builds);
    let outcome = match () {
        () if options.compile_only => Outcome::NotRun(COMPILE_ONLY),
        () if !whole => Outcome::NotRun(NOT_BUILT),
        () => {
            // The device of a server, without statistics.
            let used = DeviceUse { gpu_time: GpuTime::Off, ptx: takes_ptx(options.tune), turns: false };
            let opened = OpenDevice::open(instance, adapter, options.cache, used)?;
            start(&Build { opened: &opened, ..of(options.tune) }, options.cache)?
        }
    };
    found.tests.push(SelfTest { name: "start", outcome });
    let submitted = Role::ALL.map(|role| opened.device.queue(role).last().value);
    assert!(!options.compile_only || submitted == [0, 0], "work was submitted: {submitted:?}");
    Ok(found)
}

/// The reason for which a test that submits work is not run.
const COMPILE_ONLY: &str = "--compile-only submits no work";
/// The reason for which a test is not run after a pipeline of the model has failed.
const NOT_BUILT: &str = "a pipeline could not be built";

/// Returns the path through the kernels that a replica would take, and the recordings that it would run.
fn recorded(build: &Build<'_>) -> (KernelPath, Recordings) {
    let buckets = build.buckets();
    let window = build.recycled_window(build.wanted_context()).map(|_| 1);
    let chunk = *buckets.last().expect("there is at least one bucket");
    let decoder = build.decoder(build.wanted_context(), 1, window, chunk);
    let path = KernelPath::of_tuning(&decoder.tuning);
    (path, Recordings::new(&decoder, &buckets, build.draft_sequences()))
}

/// Returns the probes of the kernels that pack the model's weights on the device.
fn packing(build: &Build<'_>) -> Vec<(PackVariant, PackProbe)> {
    let context = build.wanted_context();
    let decoder = build.decoder(context, 1, build.recycled_window(context).map(|_| 1), 1);
    build.packing_probes(&decoder.placed_weights(), &decoder.tuning)
}

/// Whether a recording has a kernel of quantised weights.
fn quantised(recordings: &[&Recording]) -> bool {
    let mut ops = recordings.iter().flat_map(|recording| &recording.ops);
    ops.any(|op| matches!(op, Op::Call(call) if code_kernel(call).is_some()))
}

/// Loads the model as a server does, with the tests at start, and runs its first work.
fn start(build: &Build<'_>, cache: Option<&Path>) -> Result<Outcome, StartError> {
    match build.executor(cache) {
        Ok((executor, ..)) => {
            let failed = executor.variants().fallen(Fallback::OverlapTest);
            Ok(Outcome::Passed(match failed {
                0 => String::new(),
                failed => format!("decode steps of {failed} sizes fail without barriers: they have barriers"),
            }))
        }
        Err(StartError::Device(error)) if matches!(error, DeviceError::DeviceLost { .. }) => Err(error.into()),
        Err(error) => Ok(Outcome::Failed(with_causes(&error))),
    }
}

/// Returns the registers of a pipeline's largest program, as its driver counts them; `None` if it does not report
/// them.
pub fn registers(executables: &[Executable]) -> Option<u64> {
    // AMD's scalar registers are another kind, of which there are always enough.
    let counts = |name: &str| match name {
        "VGPRs" | "GPRs" | "Number of GPRs" | "Registers used" | "Register Count" | "Max live registers" => true,
        name => name.eq_ignore_ascii_case("grf registers"),
    };
    let statistics = executables.iter().flat_map(|executable| &executable.statistics);
    statistics.filter(|statistic| counts(&statistic.name)).map(|statistic| statistic.value as u64).max()
}

/// Returns the number of spills of registers to memory in the program of a pipeline that spills most, as the driver
/// counts them; `None` if it does not report them.
pub fn spills(executables: &[Executable]) -> Option<u64> {
    // Spills from one kind of registers to another, as AMD's scalar registers have them, cost little. `STP Count` is
    // Adreno's number of stores to private memory: our shaders have no arrays there.
    let counts = |name: &str| match name {
        "STP Count" => true,
        "Spilled SGPRs" | "Spills to reg" => false,
        name => name.to_lowercase().contains("spill"),
    };
    let of = |executable: &Executable| {
        let counted = executable.statistics.iter().filter(|statistic| counts(&statistic.name));
        counted.map(|statistic| statistic.value as u64).reduce(|a, b| a + b)
    };
    executables.iter().filter_map(of).max()
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
