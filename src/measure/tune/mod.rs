//! Searches for the workgroup shapes with which a model's steps are fastest on a device, for `ostinato tune`. It times
//! whole steps with the model's weights at one position and changes one choice at a time.
//! Not here: the file of results (`gpu::tuned`), and the default choices (`gpu::build::defaults`).

mod bench;
mod compare;
mod knobs;
mod search;

use crate::actors::compute::GpuTime;
use crate::config;
use crate::device::{Adapter, Instance};
use crate::gpu::build::defaults::takes_ptx;
use crate::gpu::build::{Build, Fallbacks};
use crate::gpu::devices::{DeviceUse, OpenDevice};
use crate::gpu::error::StartError;
use crate::gpu::tuned;
use crate::gpu::tuned::{Tuned, TuningBounds};
use crate::host::progress::Progress;
use crate::kernels::attention::flash_decode::MOST_SPLITS;
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::{StepShape, Tuning};
use bench::{Bench, Places};
use search::{Found, Search, SearchClock};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The default time limit of the search for each kind of step.
pub const STEP_TIME: Duration = Duration::from_secs(60);
/// The maximum number of rows of a decode step.
pub const MOST_ROWS: u32 = 256;
/// The maximum number of rows of a prompt chunk.
pub const MOST_PROMPT: u32 = 4096;
/// The default numbers of rows of decode steps with row-major weights, whose products are computed by other kernels for many
/// rows than for few; with weights in fragments, the default is one row.
const ROWS: [u32; 4] = [1, 4, 16, 64];
/// The default number of rows of a prompt chunk with row-major weights.
const PROMPT: u32 = 512;
/// The same on CPU drivers, where steps take long.
const CPU_ROWS: [u32; 2] = [1, 4];
/// The default number of rows of a prompt chunk there.
const CPU_PROMPT: u32 = 64;

/// The options of a search.
#[derive(Clone, Copy, Debug)]
pub struct TuneOptions<'a> {
    /// The number of context tokens before a step. Where sequences share a context, it ends with its last whole page.
    pub depth: u32,
    /// The numbers of rows of the decode steps, powers of two; `None` for those that the layout of the weights suggests.
    pub rows: Option<&'a [u32]>,
    /// The numbers of rows of the prompt chunks; `None` as for `rows`.
    pub prompts: Option<&'a [u32]>,
    /// The time limit of the search over all kinds of steps; `None` for [`STEP_TIME`] for each.
    pub time: Option<Duration>,
    /// The maximum number of values of a choice that are tried per pass.
    pub candidates: usize,
    /// Changes of the tuning, `KEY=VALUE`, that the search keeps.
    pub tune: &'a [String],
    /// The directory for pipelines and results.
    pub cache: Option<&'a Path>,
}

/// An event of a search.
#[derive(Clone, Debug, PartialEq)]
pub enum TuneEvent {
    /// The search for a kind of step begins.
    Began {
        /// The kind of step.
        step: StepShape,
        /// The layout of its weights and whether words are tagged, for example `fragments, tagged`.
        variant: String,
        /// The time of a step with the default choices, in microseconds.
        us: f64,
    },
    /// A value makes the step faster and is adopted.
    Improved {
        /// The kind of step.
        step: StepShape,
        /// The choice, for example `skinny.4096x1024`.
        name: String,
        /// The old value.
        old: String,
        /// The new value.
        new: String,
        /// The old time of a step, in microseconds.
        before_us: f64,
        /// The new time of a step, in microseconds.
        after_us: f64,
    },
    /// A value makes the step faster, but its logits are wrong: it is rejected.
    Wrong {
        /// The kind of step.
        step: StepShape,
        /// The choice.
        name: String,
        /// The value.
        value: String,
        /// The problem, with numbers.
        what: String,
    },
}

/// The result of a search for one kind of step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// The kind of step.
    pub step: StepShape,
    /// The median time of a step with the default choices, in microseconds.
    pub before_us: f64,
    /// The median time of a step with the choices found, in microseconds.
    pub after_us: f64,
    /// The number of values tried.
    pub tried: usize,
    /// Whether all values were tried before the time limit.
    pub complete: bool,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct TuneOutcome {
    /// The results by kind of step, in the order of the search.
    pub steps: Vec<StepOutcome>,
    /// The file that the result was written to; `None` if there is no directory or writing failed.
    pub file: Option<PathBuf>,
}

/// Loads a model as a server would, runs the search, and writes the result to the file.
pub fn tune(
    instance: &Instance,
    adapter: &Adapter,
    checkpoint: &Checkpoint,
    options: &TuneOptions<'_>,
    progress: &dyn Progress,
    say: &mut dyn FnMut(&TuneEvent),
) -> Result<TuneOutcome, StartError> {
    let used = DeviceUse { gpu_time: GpuTime::Phases, ptx: takes_ptx(options.tune), turns: false };
    let opened = OpenDevice::open(instance, adapter, options.cache, used)?;
    let kept = Tuned::of_model(options.cache, adapter, checkpoint, progress);
    let none = Tuned::none(adapter, checkpoint);
    let (no_span, wanted) = (tracing::Span::none(), AtomicBool::new(false));
    let plain = config::Model::new("tune", "", Some(adapter.selector()));
    let of = |model, tune| Build {
        name: "tune",
        model,
        checkpoint,
        draft: None,
        opened: &opened,
        adapter,
        limit: None,
        tune,
        self_test: false,
        tuned: &none,
        progress,
        span: &no_span,
        beside: false,
        cancelled: &wanted,
        fallbacks: Fallbacks::default(),
        part: None,
    };
    let row_major = of(&plain, options.tune).tuning(options.depth).fragments.is_none();
    let steps = steps(options, row_major, adapter.is_cpu());
    let places = Places::new(options.depth, &steps);
    let model = places.sized(plain.clone());
    let bounds = TuningBounds::new(adapter, &checkpoint.config);
    let build = of(&model, options.tune);
    let rules = build.tuning(places.context());
    let room = [options.tune, &room(&build, &rules, bounds, options.depth, &steps)].concat();
    let build = of(&model, &room);
    let prepared = build.prepare(options.cache)?;
    let bench = Bench::new(&build, prepared, adapter, places)?;

    let begun = Instant::now();
    let time = options.time.unwrap_or(STEP_TIME * steps.len() as u32);
    let clock = SearchClock { until: begun + time, time, progress };
    let mut search = Search {
        bench,
        bounds,
        rules,
        kept: &kept,
        fixed: options.tune,
        depth: options.depth,
        candidates: options.candidates,
        clock,
        say,
        chosen: BTreeMap::new(),
        found: Found::new(),
        done: Vec::new(),
    };
    let mut outcome = TuneOutcome { steps: Vec::new(), file: None };
    for (index, shape) in steps.iter().enumerate() {
        // Each kind of step gets an equal share of the remaining time.
        let now = Instant::now();
        let share = (begun + time).saturating_duration_since(now) / (steps.len() - index) as u32;
        outcome.steps.push(search.step(*shape, now + share)?);
    }

    let Search { clock, found, .. } = search;
    clock.end();
    if let Some(folder) = options.cache {
        match tuned::keep(folder, adapter, &found) {
            Ok(path) => outcome.file = Some(path),
            Err(error) => progress.line(&format!("what was found could not be kept in {}: {error}", folder.display())),
        }
    }
    Ok(outcome)
}

/// Returns the kinds of steps to search, those of few rows first. Those of more rows may have choices that begin with fewer
/// rows.
fn steps(options: &TuneOptions<'_>, row_major: bool, cpu: bool) -> Vec<StepShape> {
    let (rows, prompts): (&[u32], &[u32]) = match (row_major, cpu) {
        (false, _) => (&[1], &[]),
        (true, true) => (&CPU_ROWS, &[CPU_PROMPT]),
        (true, false) => (&ROWS, &[PROMPT]),
    };
    let sorted = |numbers: &[u32]| {
        let mut numbers: Vec<u32> = numbers.iter().copied().filter(|n| *n > 0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    };
    let rows = sorted(options.rows.unwrap_or(rows)).into_iter().map(|rows| StepShape::Decode { rows });
    let prompts = sorted(options.prompts.unwrap_or(prompts)).into_iter().map(|rows| StepShape::Prefill { rows });
    rows.chain(prompts).collect()
}

/// Returns the changes of the tuning with which the memory plan has room for all values that may be tried: the largest number
/// of splits of attention, and the largest partial sums of `matmul`, which every step of several rows may use.
fn room(build: &Build<'_>, rules: &Tuning, bounds: TuningBounds, depth: u32, steps: &[StepShape]) -> Vec<String> {
    let mut room = vec![format!("splits={}", MOST_SPLITS.max(rules.splits))];
    if rules.fragments.is_none() && steps.iter().any(|step| step.rows() > 1) {
        let (context, chunk) = (build.wanted_context(), *build.buckets().last().expect("there is at least one bucket"));
        let decoder = build.decoder(context, 1, build.recycled_window(context).map(|_| 1), chunk);
        let tuning = Tuning { gemv_most: 1, dots_most: 1, ..rules.clone() };
        let of = |step: &StepShape| knobs::knobs(&decoder, &tuning, bounds, depth, *step);
        let most = steps.iter().flat_map(of).map(|knob| knob.room).max().unwrap_or(0);
        room.push(format!("matmul_room={}", most.div_ceil(1 << 10)));
        room.extend(knobs::LIMITS.map(|limit| format!("{limit}=1")));
    }
    room
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_layout_of_the_weights_and_few_rows_come_first() {
        let options =
            TuneOptions { depth: 256, rows: None, prompts: None, time: None, candidates: 1, tune: &[], cache: None };
        let names = |options: &TuneOptions<'_>, row_major, cpu| -> Vec<String> {
            steps(options, row_major, cpu).into_iter().map(StepShape::name).collect()
        };
        assert_eq!(names(&options, false, false), ["decode.1"]);
        assert_eq!(names(&options, true, false), ["decode.1", "decode.4", "decode.16", "decode.64", "prefill.512"]);
        assert_eq!(names(&options, true, true), ["decode.1", "decode.4", "prefill.64"]);
        let given = TuneOptions { rows: Some(&[16, 2, 16]), prompts: Some(&[0]), ..options };
        assert_eq!(names(&given, true, false), ["decode.2", "decode.16"]);
        let given = TuneOptions { prompts: Some(&[2048, 128]), ..options };
        assert_eq!(names(&given, false, false), ["decode.1", "prefill.128", "prefill.2048"]);
    }
}
