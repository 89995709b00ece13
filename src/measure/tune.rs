//! Searches for the workgroup shapes with which a model's decode step of one row is fastest on a device, for `ostinato
//! tune`. It times whole steps with the model's weights at one position and changes one choice at a time.
//! Not here: the file of results (`gpu::tuned`), steps of several rows, prompts, and the default choices
//! (`gpu::build::defaults`).

use crate::actors::compute::{Compute, Gates, GpuTime, Submission};
use crate::actors::timeline::FlushReason;
use crate::actors::watcher::Outbox;
use crate::config;
use crate::device::{Adapter, Device, Instance, Point};
use crate::gpu::build::defaults::{PATCH_PAIRS, takes_ptx};
use crate::gpu::build::recordings::InboxRecordings;
use crate::gpu::build::{Build, PreparedModel};
use crate::gpu::devices::{DeviceUse, OpenDevice};
use crate::gpu::error::StartError;
use crate::gpu::tuned;
use crate::gpu::tuned::{MOST_TILES, Tuned, TuningBounds};
use crate::host::progress::{Progress, Unit};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::attention::flash_decode::MOST_SPLITS;
use crate::kernels::codes_of;
use crate::kernels::embed::PromptRows;
use crate::kernels::gemm::skinny::MOST_AHEAD;
use crate::kernels::recording::{Op, Recording};
use crate::kernels::region::{Pipelines, Region};
use crate::kernels::sampling::{Patch, patch_inbox};
use crate::kernels::shaders::{SkinnyArgs, SkinnyCodesArgs, SkinnyCodesConstants, SkinnyConstants};
use crate::kernels::state::{self, SlotInit};
use crate::memory::pack::codes::unit_cols;
use crate::memory::{Buffer, BufferTable, Place};
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::{Decoder, StepShape, Tuning};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A GPU that finishes nothing for this long counts as stuck.
const STEP_WAIT: Duration = Duration::from_secs(120);
/// The number of steps that time one value before it is compared with the current one.
const SCREENED: usize = 7;
/// The number of steps that time each of two values when they are compared.
const DUELLED: usize = 21;
/// The number of values of a choice, the fastest ones, that are compared with the current one.
const DUELS: usize = 3;
/// The number of warm-up steps, which are not counted, so that clocks and caches are in the same state as in normal
/// operation.
const WARM: usize = 1;
/// The time for which a GPU is kept busy before the first measurement.
const CLOCKS_RISE: Duration = Duration::from_millis(500);
/// The maximum time, in microseconds, for repetitions of a step, so that slow devices can try several values too.
const REPEATED_US: f64 = 300_000.0;
/// The number of submissions in flight; low enough that the compute actor has timestamps for all of them.
const IN_FLIGHT: usize = 24;
/// The maximum number of passes over all choices; the search ends earlier if a pass finds nothing.
const PASSES: usize = 3;
/// The maximum difference between a candidate's logits and those of the default choices, relative to their norm.
const MOST_DIFFERENCE: f64 = 2e-3;
/// The minimum gain, as a fraction of the step time, for which an entry is written.
const LEAST_GAIN: f64 = 1e-3;
/// The context length from which fewer splits and threads of attention than the default are tried. On a shorter context
/// most splits are idle, and its times do not show what a long context would lose with fewer.
const LONG: u32 = 2048;

/// The options of a search.
#[derive(Clone, Copy, Debug)]
pub struct TuneOptions<'a> {
    /// The number of context tokens before the step.
    pub depth: u32,
    /// The time limit of the search.
    pub time: Duration,
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
    /// The search begins.
    Began {
        /// The kind of decode step, for example `fragments, tagged`.
        variant: String,
        /// The time of a step with the default choices, in microseconds.
        us: f64,
    },
    /// A value makes the step faster and is adopted.
    Improved {
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
        /// The choice.
        name: String,
        /// The value.
        value: String,
        /// The problem, with numbers.
        what: String,
    },
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct TuneOutcome {
    /// The median time of a step with the default choices, in microseconds.
    pub before_us: f64,
    /// The median time of a step with the choices found, in microseconds.
    pub after_us: f64,
    /// The number of values tried.
    pub tried: usize,
    /// Whether all values were tried before the time limit.
    pub complete: bool,
    /// The file that the result was written to; `None` if there is no directory or writing failed.
    pub file: Option<PathBuf>,
}

/// A choice that the search can change.
#[derive(Clone, Debug, PartialEq)]
struct Knob {
    /// The key for [`Tuning::set`].
    key: String,
    /// The entry's name in the file of results.
    entry: String,
    /// The default value.
    rule: String,
    /// The values that the device can run.
    candidates: Vec<String>,
    /// The number of weight bytes that a step reads with the kernel that the choice configures; 0 for attention.
    bytes: u64,
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
    let mut model = config::Model::new("tune", "", Some(adapter.selector()));
    model.context = Some(options.depth.saturating_add(16));
    let used = DeviceUse { gpu_time: GpuTime::Phases, ptx: takes_ptx(options.tune), turns: false };
    let opened = OpenDevice::open(instance, adapter, options.cache, used)?;
    let kept = Tuned::of_model(options.cache, adapter, checkpoint, progress);
    let none = Tuned::none(adapter, checkpoint);
    let (no_span, wanted) = (tracing::Span::none(), AtomicBool::new(false));
    let of = |tune| Build {
        name: "tune",
        model: &model,
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
        row_major: AtomicBool::new(false),
        no_ptx: AtomicBool::new(false),
        no_dots: AtomicBool::new(false),
        no_flash_wgmma: AtomicBool::new(false),
        part: None,
    };
    // The memory plan must allow for the largest number of splits that may be tried.
    let build = of(options.tune);
    let rules = build.tuning(options.depth.saturating_add(16));
    let room = [options.tune, &[format!("splits={}", MOST_SPLITS.max(rules.splits))]].concat();
    let build = of(&room);
    let prepared = build.prepare(options.cache)?;
    let mut bench = Bench::new(&build, prepared, adapter)?;
    bench.fill(options.depth)?;

    let bounds = TuningBounds::new(adapter, &checkpoint.config);
    let mut knobs = knobs(&bench.decoder, &rules, bounds, options.depth);
    knobs.retain(|knob| !options.tune.iter().any(|change| change.split('=').next() == Some(knob.key.as_str())));
    let (rules, reference) = bench.reference(rules)?;
    let variant = tuned::variant(&rules);
    let region = bench.region(&rules)?;
    let us = bench.steady_us(&region)?;
    say(&TuneEvent::Began { variant: variant.clone(), us });

    let by_rules = Arc::clone(&region);
    let until = Instant::now() + options.time;
    let clock = SearchClock { until, time: options.time, progress };
    let mut search = Search { bench, bounds, best: rules, region, reference, tried: 0, clock, say };
    let mut found = BTreeMap::new();
    let mut complete = true;
    for pass in 0..PASSES {
        let mut improved = false;
        for (index, knob) in knobs.iter().enumerate() {
            let now = Instant::now();
            if now >= until {
                complete = false;
                break;
            }
            // Each choice gets an equal share of the remaining time.
            let share = (until - now) / (knobs.len() - index) as u32;
            let current = found.get(&knob.entry).and_then(Clone::clone).unwrap_or_else(|| knob.rule.clone());
            let first = kept.value(&variant, &knob.key).filter(|_| pass == 0);
            let mut values = nearest_first(&knob.candidates, &current, first);
            values.truncate(options.candidates);
            let (better, whole) = search.turn(knob, &current, &values, now + share)?;
            improved |= better.is_some();
            complete &= whole;
            let value = better.unwrap_or(current);
            found.insert(knob.entry.clone(), (value != knob.rule).then_some(value));
        }
        if !improved || !complete {
            break;
        }
    }

    let Search { mut bench, region, reference, tried, clock, say, .. } = search;
    clock.end();
    let mut outcome = TuneOutcome { before_us: us, after_us: us, tried, complete, file: None };
    if !Arc::ptr_eq(&region, &by_rules) {
        let times = bench.times(&[&by_rules, &region], DUELLED)?;
        outcome.before_us = median(&times[0]);
        outcome.after_us = median(&times[1]);
        let right = bench.logits(&region)?.and_then(|logits| same(&reference, &logits));
        if let Err(what) = &right {
            let (name, value) = ("everything".to_owned(), "together".to_owned());
            say(&TuneEvent::Wrong { name, value, what: what.clone() });
        }
        if right.is_err() || outcome.after_us >= outcome.before_us {
            // The logits of all changes together are wrong, or their gains do not add up: nothing is kept.
            outcome.after_us = outcome.before_us;
            found.values_mut().for_each(|value| *value = None);
        }
    }
    if let Some(folder) = options.cache {
        match tuned::keep(folder, adapter, &variant, &found) {
            Ok(path) => outcome.file = Some(path),
            Err(error) => progress.line(&format!("what was found could not be kept in {}: {error}", folder.display())),
        }
    }
    Ok(outcome)
}

/// Returns the choices for a model's decode step of one row, those that concern most bytes first.
fn knobs(decoder: &Decoder<'_>, rules: &Tuning, bounds: TuningBounds, depth: u32) -> Vec<Knob> {
    let step = Decoder { tuning: rules.clone(), ..decoder.clone() }.record(StepShape::Decode { rows: 1 });
    let mut knobs: Vec<Knob> = Vec::new();
    let mut add = |key: String, rule: String, values: Vec<String>, bytes: u64| {
        if let Some(knob) = knobs.iter_mut().find(|knob| knob.key == key) {
            knob.bytes += bytes;
            return;
        }
        let Some(entry) = tuned::entry(&key, decoder.config) else { return };
        let candidates = values.into_iter().filter(|v| bounds.changed(rules, &key, v).is_some()).collect();
        knobs.push(Knob { key, entry, rule, candidates, bytes });
    };
    let powers = |from: u32, to: u32| (from..=to).filter(|n| n.is_power_of_two()).map(|n| n.to_string()).collect();
    let pages = depth.div_ceil(PAGE_TOKENS).max(rules.splits);
    let least = if depth < LONG { rules.splits } else { 1 };
    let splits = [1, 2, 4, 6, 8, 12, 16, 20, 24, 32].into_iter().filter(|n| (least..=pages).contains(n));
    let splits: Vec<String> = splits.map(|n| n.to_string()).collect();
    for op in &step.ops {
        let Op::Call(call) = op else { continue };
        let family = call.kernel.split('.').next().unwrap_or(call.kernel);
        match family {
            "skinny" => {
                let (args, constants) =
                    (SkinnyArgs::from_args(&call.args), SkinnyConstants::from_values(&call.constants));
                let rule = format!("{}/{}/{}", constants.threads, constants.tiles, constants.ahead);
                let values = skinny_values(args.n, constants.chunks, rules.processors);
                add(format!("skinny.{}x{}", args.n, args.k), rule, values, args.weight.bytes);
            }
            "skinny_codes" => {
                let (args, c) =
                    (SkinnyCodesArgs::from_args(&call.args), SkinnyCodesConstants::from_values(&call.constants));
                let codes = codes_of(c.codes);
                let tiles = args.n.div_ceil(16 * c.tiles);
                let each = tiles.min(call.groups[0] * call.groups[2]).div_ceil(rules.processors);
                let rule = format!("{}/{}/{}/{each}", c.threads, c.tiles, c.ahead);
                // The 16-byte words of codes in a lane count like those of bfloat16, of which a chunk has two.
                let words = unit_cols(codes) * codes.bits / 256;
                let values = codes_values(args.n, c.units, words, rules.processors);
                add(format!("codes.{}x{}x{}", codes.bits, args.n, args.k), rule, values, args.weight.bytes);
            }
            "gemv" => {
                let bytes = call.args[0].range().bytes;
                let values = powers(rules.gemv_threads.min(32), 256);
                add("gemv_threads".to_owned(), rules.gemv_threads.to_string(), values, bytes);
            }
            "flash_decode" => {
                let least = if depth < LONG { rules.flash_threads } else { 32 };
                let values = [32, 64, 96, 128, 192, 256, 384, 512].into_iter().filter(|n| *n >= least);
                let values = values.map(|n| n.to_string()).collect();
                add("flash_threads".to_owned(), rules.flash_threads.to_string(), values, 0);
                add("splits".to_owned(), rules.splits.to_string(), splits.clone(), 0);
            }
            "attention" => {
                let rule = rules.attention_threads.to_string();
                add("attention_threads".to_owned(), rule, powers(32, 512), 0);
                add("splits".to_owned(), rules.splits.to_string(), splits.clone(), 0);
            }
            _ => {}
        }
    }
    knobs.sort_by_key(|knob| std::cmp::Reverse(knob.bytes));
    knobs
}

/// Returns the `skinny` workgroup shapes that are worth trying for a matrix with `rows` rows and `chunks` chunks of 32
/// columns.
fn skinny_values(rows: u32, chunks: u32, processors: u32) -> Vec<String> {
    let mut values = Vec::new();
    for threads in [128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 1024] {
        let groups = threads / 32;
        // Rounds of equal lengths.
        let lengths: BTreeSet<u32> = (1..=chunks).map(|rounds| chunks.div_ceil(groups * rounds)).collect();
        for tiles in 1..=MOST_TILES {
            for &ahead in lengths.range(..=MOST_AHEAD) {
                // If the round reaches past the last chunk in every group, the group multiplies zeros.
                let wasted = ahead > 1 && (ahead - 1) * groups >= chunks;
                // The weights in flight take eight registers per chunk and tile.
                let heavy = ahead * tiles > 8 || ahead * tiles * 8 * threads > 40 << 10;
                let few = tiles > 1 && rows.div_ceil(16 * tiles) < processors / 2;
                if !(wasted || heavy || few) {
                    values.push(format!("{threads}/{tiles}/{ahead}"));
                }
            }
        }
    }
    values
}

/// Like [`skinny_values`], for `skinny_codes` and a matrix with `units` units of columns, of which a lane loads `words` 16-byte words.
fn codes_values(rows: u32, units: u32, words: u32, processors: u32) -> Vec<String> {
    let mut values = Vec::new();
    for threads in [64, 128, 192, 256, 384, 512, 768] {
        for tiles in 1..=MOST_TILES {
            for ahead in [1, 2, 3, 4, 6] {
                let groups = threads / 32;
                let wasted = ahead > 1 && (ahead - 1) * groups >= units;
                // Two steps are in flight.
                let heavy = ahead * tiles * words > 8 || ahead * tiles * words * 8 * threads > 32 << 10;
                let few = tiles > 1 && rows.div_ceil(16 * tiles) < processors / 2;
                if !(wasted || heavy || few) {
                    let each = (1..=4).filter(|each| each * threads <= 1024);
                    values.extend(each.map(|each| format!("{threads}/{tiles}/{ahead}/{each}")));
                }
            }
        }
    }
    values
}

/// Returns the candidates by their distance from `current`, which is left out; `first` comes before all others.
fn nearest_first(candidates: &[String], current: &str, first: Option<&str>) -> Vec<String> {
    let numbers = |value: &str| -> Vec<f64> { value.split('/').filter_map(|n| n.parse().ok()).collect() };
    let own = numbers(current);
    let distance = |value: &str| -> f64 { numbers(value).iter().zip(&own).map(|(a, b)| (a / b).ln().abs()).sum() };
    let mut values: Vec<String> = candidates.iter().filter(|value| *value != current).cloned().collect();
    values.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    if let Some(first) = first.filter(|first| *first != current) {
        values.retain(|value| value != first);
        values.insert(0, first.to_owned());
    }
    values
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Returns whether a candidate that was timed alternately with the incumbent is faster by more than the variation
/// between repetitions.
fn faster(incumbent: &[f64], candidate: &[f64]) -> bool {
    let spread = |times: &[f64]| {
        let middle = median(times);
        median(&times.iter().map(|time| (time - middle).abs()).collect::<Vec<f64>>())
    };
    let gain = median(incumbent) - median(candidate);
    let noise = spread(incumbent).max(spread(candidate)).max(LEAST_GAIN * median(incumbent));
    let wins = incumbent.iter().zip(candidate).filter(|(old, new)| new < old).count();
    gain > noise && wins * 4 >= incumbent.len() * 3
}

/// Returns `Ok` if the logits equal the reference except for rounding; otherwise describes the difference.
fn same(reference: &[f32], logits: &[f32]) -> Result<(), String> {
    let best = |of: &[f32]| of.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token);
    let square = |value: f64| value * value;
    let norm: f64 = reference.iter().map(|a| square(f64::from(*a))).sum();
    let apart: f64 = reference.iter().zip(logits).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let difference = (apart / norm).sqrt();
    if difference.is_nan() || difference > MOST_DIFFERENCE {
        return Err(format!(
            "its logits differ by {difference:.1e} of their norm, at most {MOST_DIFFERENCE:.1e} is rounding"
        ));
    }
    match (best(reference), best(logits)) {
        (Some(wanted), Some(found)) if wanted != found => Err(format!("its token is {found}, the rules' is {wanted}")),
        _ => Ok(()),
    }
}

/// The state of a search: the best tuning so far, and the means to try others.
struct Search<'a, 'b> {
    bench: Bench<'a>,
    bounds: TuningBounds,
    best: Tuning,
    region: Arc<Region>,
    reference: Vec<f32>,
    tried: usize,
    clock: SearchClock<'b>,
    say: &'b mut dyn FnMut(&TuneEvent),
}

/// Reports how much of a search's time has passed.
struct SearchClock<'a> {
    until: Instant,
    time: Duration,
    progress: &'a dyn Progress,
}

impl SearchClock<'_> {
    const WHAT: &'static str = "searching, seconds";

    fn tick(&self) {
        let left = self.until.saturating_duration_since(Instant::now());
        let passed = self.time.saturating_sub(left).as_secs();
        // The end is reported once, by `end`.
        let total = self.time.as_secs().max(1);
        self.progress.step(SearchClock::WHAT, passed.min(total - 1), total, Unit::Count);
    }

    fn end(&self) {
        let total = self.time.as_secs().max(1);
        self.progress.step(SearchClock::WHAT, total, total, Unit::Count);
    }
}

impl Search<'_, '_> {
    /// Tries values of one choice until a deadline. Returns the value that was adopted, if any, and whether all values
    /// were tried.
    fn turn(
        &mut self,
        knob: &Knob,
        current: &str,
        values: &[String],
        until: Instant,
    ) -> Result<(Option<String>, bool), StartError> {
        let at_once = std::thread::available_parallelism().map_or(1, |n| n.get());
        let incumbent = median(&self.bench.times(&[&self.region], SCREENED)?[0]);
        let mut screened: Vec<(f64, &String, Tuning, Arc<Region>)> = Vec::new();
        let mut whole = true;
        'values: for some in values.chunks(at_once) {
            if Instant::now() >= until {
                whole = false;
                break;
            }
            let changed: Vec<(&String, Tuning)> = some
                .iter()
                .filter_map(|value| Some((value, self.bounds.changed(&self.best, &knob.key, value)?)))
                .collect();
            let tunings: Vec<Tuning> = changed.iter().map(|(_, tuning)| tuning.clone()).collect();
            for ((value, tuning), region) in changed.into_iter().zip(self.bench.regions(&tunings)?) {
                // A tuning that the driver cannot build is not a candidate.
                let Some(region) = region else { continue };
                if Instant::now() >= until {
                    whole = false;
                    break 'values;
                }
                self.tried += 1;
                self.clock.tick();
                let us = median(&self.bench.times(&[&region], SCREENED)?[0]);
                if us < incumbent {
                    screened.push((us, value, tuning, region));
                }
            }
        }
        screened.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, value, tuning, region) in screened.into_iter().take(DUELS) {
            let times = self.bench.times(&[&self.region, &region], DUELLED)?;
            if !faster(&times[0], &times[1]) {
                continue;
            }
            let right = self.bench.logits(&region)?.and_then(|logits| same(&self.reference, &logits));
            if let Err(what) = right {
                (self.say)(&TuneEvent::Wrong { name: knob.key.clone(), value: value.clone(), what });
                continue;
            }
            (self.say)(&TuneEvent::Improved {
                name: knob.key.clone(),
                old: current.to_owned(),
                new: value.clone(),
                before_us: median(&times[0]),
                after_us: median(&times[1]),
            });
            self.best = tuning;
            self.region = region;
            return Ok((Some(value.clone()), whole));
        }
        Ok((None, whole))
    }
}

/// A loaded model whose decode step can be rebuilt and timed.
struct Bench<'a> {
    decoder: Decoder<'a>,
    device: Arc<Device>,
    device_name: String,
    compute: Arc<Compute>,
    table: BufferTable,
    pipelines: Pipelines,
    /// The points that the first submission waits for.
    ready: Vec<Point>,
    /// Mapped memory: the words that `apply` writes to the device state.
    patch: Arc<Buffer>,
    apply: Arc<Region>,
    /// A prefill of one chunk.
    prompt: Arc<Region>,
    /// Copies the logits and the fault word to buffers that the host reads.
    check: Arc<Region>,
    logits: Arc<Buffer>,
    fault: Arc<Buffer>,
    /// The approximate time of a step.
    step_us: f64,
}

impl<'a> Bench<'a> {
    fn new(build: &'a Build<'_>, prepared: PreparedModel<'a>, adapter: &Adapter) -> Result<Bench<'a>, StartError> {
        let PreparedModel { decoder, recordings, mut table, pipelines, loading, .. } = prepared;
        let device = Arc::clone(&build.opened.device);
        let mut check = Recording::new("check");
        let from = check.buffer("logits", u64::from(decoder.config.vocab) * 4);
        let to = check.buffer("dump", from.bytes);
        check.ops.push(Op::Copy { from, to });
        let from = decoder.state.fault(&mut check);
        let to = check.buffer("tune.fault", from.bytes);
        check.ops.push(Op::Copy { from, to });
        let fault = build.opened.arena.buffer("tune.fault", to.bytes, Place::Readback)?;
        table.add(Arc::clone(&fault))?;
        let region = |recording: &Recording| Region::build(&device, recording, &table, &pipelines).map(Arc::new);
        let (_, prompt) = recordings.prefill.last().expect("there is at least one bucket");
        let InboxRecordings { apply, .. } = recordings.inboxes.first().expect("there is an inbox");
        let (check, prompt, apply) = (region(&check)?, region(prompt)?, region(apply)?);
        Ok(Bench {
            compute: Arc::clone(&build.opened.compute),
            device_name: adapter.name.clone(),
            patch: Arc::clone(table.require("inbox.0.patch")?),
            logits: Arc::clone(table.require("dump")?),
            ready: build.finish(loading)?.0,
            apply,
            prompt,
            check,
            fault,
            step_us: 1.0,
            decoder,
            device,
            table,
            pipelines,
        })
    }

    fn unsupported(&self, what: String) -> StartError {
        StartError::Unsupported { model: "tune".to_owned(), what: format!("device \"{}\": {what}", self.device_name) }
    }

    /// Returns the step's region for each tuning; `None` where the driver cannot build it.
    fn regions(&mut self, tunings: &[Tuning]) -> Result<Vec<Option<Arc<Region>>>, StartError> {
        let steps: Vec<Recording> = tunings
            .iter()
            .map(|tuning| {
                Decoder { tuning: tuning.clone(), ..self.decoder.clone() }.record(StepShape::Decode { rows: 1 })
            })
            .collect();
        let all: Vec<&Recording> = steps.iter().collect();
        let mut built = vec![true; steps.len()];
        if self.pipelines.add(&self.device, &all).is_err() {
            for (step, built) in steps.iter().zip(&mut built) {
                match self.pipelines.add(&self.device, &[step]) {
                    Ok(()) => {}
                    Err(error) if error.is_lost() => return Err(error.into()),
                    Err(_) => *built = false,
                }
            }
        }
        let region = |step: &Recording| Region::build(&self.device, step, &self.table, &self.pipelines).map(Arc::new);
        let regions = steps.iter().zip(built).map(|(step, built)| built.then(|| region(step)).transpose());
        Ok(regions.collect::<Result<_, _>>()?)
    }

    fn region(&mut self, tuning: &Tuning) -> Result<Arc<Region>, StartError> {
        let region = self.regions(std::slice::from_ref(tuning))?.pop().flatten();
        region.ok_or_else(|| self.unsupported("its step cannot be built".to_owned()))
    }

    /// Returns the logits of the default step with barriers as the reference, and the tuning to search from: the
    /// default one, without tags if the step with tags has other logits.
    fn reference(&mut self, rules: Tuning) -> Result<(Tuning, Vec<f32>), StartError> {
        let barriers = Tuning { tags: false, ..rules.clone() };
        let region = self.region(&barriers)?;
        let reference = self.logits(&region)?.and_then(|logits| same(&logits, &logits).map(|()| logits));
        let reference = reference.map_err(|what| self.unsupported(what))?;
        self.step_us = median(&self.times(&[&region], 1)?[0]);
        if rules == barriers {
            return Ok((rules, reference));
        }
        let region = self.region(&rules)?;
        let right = self.logits(&region)?.and_then(|logits| same(&reference, &logits));
        Ok((if right.is_ok() { rules } else { barriers }, reference))
    }

    /// Runs each region in a submission of its own and returns the device time of each in microseconds.
    fn run(&mut self, regions: &[Arc<Region>]) -> Result<Vec<Option<f64>>, StartError> {
        let (reports, done) = crossbeam_channel::unbounded();
        let (wake, _woken) = crossbeam_channel::bounded(1);
        let mut times = Vec::new();
        for some in regions.chunks(IN_FLIGHT) {
            for region in some {
                self.compute.submit(Submission {
                    id: 0,
                    entries: vec![vec![Arc::clone(region)]],
                    waits: std::mem::take(&mut self.ready),
                    gates: Gates::new(),
                    waits_within: false,
                    flush: FlushReason::PhaseBoundary,
                    report_after: Vec::new(),
                    outbox: Outbox { reports: reports.clone(), wake: wake.clone() },
                    then: None,
                });
            }
            for _ in some {
                let report = self.compute.report(&done, STEP_WAIT);
                let seconds = STEP_WAIT.as_secs();
                let report = report.ok_or_else(|| self.unsupported(format!("a step did not finish in {seconds} s")))?;
                report.result?;
                times.push(report.device_time.map(|time| time.as_secs_f64() * 1e6));
            }
        }
        Ok(times)
    }

    /// Writes words of the device state. No other work uses the state meanwhile.
    fn write(&mut self, patch: Patch) -> Result<(), StartError> {
        for pairs in patch.into_pairs().chunks(PATCH_PAIRS as usize) {
            self.patch.write(0, bytemuck::cast_slice(&patch_inbox(pairs)));
            self.run(&[Arc::clone(&self.apply)])?;
        }
        Ok(())
    }

    /// Fills the KV cache with made-up tokens up to `depth`; `apply` then prepares the step after them.
    fn fill(&mut self, depth: u32) -> Result<(), StartError> {
        let layout = self.decoder.state;
        let vocabulary = self.decoder.config.vocab;
        let tokens: Vec<u32> = (0..depth).map(|at| at.wrapping_mul(2_654_435_761) % vocabulary).collect();
        let mut patch = Patch::default();
        for page in 0..depth / PAGE_TOKENS + 1 {
            patch.set(layout.page_word(0, page), page);
        }
        self.write(patch)?;
        for (index, some) in tokens.chunks(layout.chunk as usize).enumerate() {
            let mut patch = Patch::default();
            let start = index as u32 * layout.chunk;
            let from = (start > 0).then_some(0);
            let rows = PromptRows { slot: 0, start, tokens: some, last: false, next: None, from, keeps: &[] };
            // The tiles of a single prompt begin at 0.
            for (word, words) in layout.chunk_layout().describe(&[rows]) {
                patch.set_all(layout.chunk_word(word), &words);
            }
            self.write(patch)?;
            self.run(&[Arc::clone(&self.prompt)])?;
        }
        let mut patch = Patch::default();
        // A step decrements the remaining tokens and advances the position, so `apply` sets them again before every
        // step.
        patch.set_all(layout.slot_word(0, 0), &SlotInit { remaining: 1 << 20, ..SlotInit::default() }.words());
        patch.set(layout.slot_word(0, state::SLOT_TOKEN), vocabulary / 2);
        patch.set(layout.slot_word(0, state::SLOT_POSITION), depth);
        patch.set(layout.batch_word(0), 0);
        patch.set(layout.fault_word(), 0);
        self.write(patch)
    }

    /// Returns the times in microseconds of each of several steps, which run alternately for up to `rounds` rounds.
    fn times(&mut self, steps: &[&Arc<Region>], rounds: usize) -> Result<Vec<Vec<f64>>, StartError> {
        let fit = (REPEATED_US / self.step_us.max(1.0)) as usize;
        let rounds = fit.clamp(rounds.div_ceil(4), rounds);
        let round = steps.iter().flat_map(|step| [Arc::clone(&self.apply), Arc::clone(step)]);
        let all: Vec<Arc<Region>> = std::iter::repeat_n(round.collect::<Vec<_>>(), rounds + WARM).flatten().collect();
        let times = self.run(&all)?;
        let mut by_step = vec![Vec::new(); steps.len()];
        for (index, time) in times.iter().skip(1).step_by(2).enumerate().skip(WARM * steps.len()) {
            let time = time.ok_or_else(|| self.unsupported("its compute queue has no timestamps".to_owned()))?;
            by_step[index % steps.len()].push(time);
        }
        Ok(by_step)
    }

    /// Returns the median time of a step in microseconds, measured after [`CLOCKS_RISE`] of such steps: a GPU that was idle
    /// runs at a fraction of its clocks at first.
    fn steady_us(&mut self, step: &Arc<Region>) -> Result<f64, StartError> {
        let begun = Instant::now();
        loop {
            let us = median(&self.times(&[step], DUELLED)?[0]);
            if begun.elapsed() >= CLOCKS_RISE {
                return Ok(us);
            }
        }
    }

    /// Returns the logits of a step; the inner error describes a problem on the device.
    fn logits(&mut self, step: &Arc<Region>) -> Result<Result<Vec<f32>, String>, StartError> {
        self.run(&[Arc::clone(&self.apply), Arc::clone(step), Arc::clone(&self.check)])?;
        if self.fault.load_u32(0) != 0 {
            return Ok(Err("a workgroup waited too long for another".to_owned()));
        }
        let mut logits = vec![0f32; self.decoder.config.vocab as usize];
        self.logits.read(0, bytemuck::cast_slice_mut(&mut logits));
        Ok(Ok(logits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DEMO_PATH, KvFormat};
    use crate::device::AdapterKind;
    use crate::gpu::build::defaults::tuning;
    use crate::kernels::gemm::skinny::Matrices;
    use crate::kernels::layout::StateLayout;
    use crate::model::decoder::RingLayout;
    use crate::model::decoder::stage::LayerStage;
    use crate::model::demo;

    fn of_demo(fragments: Option<Matrices>, depth: u32) -> Vec<Knob> {
        let mut adapter = Adapter::made_up(0, "Some GPU", AdapterKind::Discrete);
        adapter.capabilities.max_invocations = 512;
        adapter.capabilities.max_workgroup_size = [1024; 3];
        adapter.capabilities.max_shared_bytes = 32 << 10;
        let checkpoint =
            Checkpoint::open(&demo::unpack(Path::new(DEMO_PATH), None).expect("a folder")).expect("the demo model");
        let rules = Tuning { fragments, splits: 8, ..tuning(&adapter, None, 4, 1024) };
        let decoder = Decoder {
            input_tags: BTreeMap::new(),
            config: &checkpoint.config,
            weights: checkpoint.weights(),
            stage: LayerStage::whole(&checkpoint.config),
            max_buffer_bytes: 1 << 30,
            state: StateLayout {
                slots: 1,
                rows: 1,
                chunk: 16,
                prompts: 1,
                max_pages: 64,
                cells: false,
                windows: false,
            },
            cells: 1,
            drafts: 0,
            drafter: None,
            pages: 64,
            window_pages: None,
            kv_format: KvFormat::F16,
            ring: RingLayout { steps: 16, rows: 1 },
            context: 1024,
            tuning: rules.clone(),
        };
        let bounds = TuningBounds::new(&adapter, &checkpoint.config);
        let knobs = knobs(&decoder, &rules, bounds, depth);
        for knob in &knobs {
            assert!(knob.candidates.iter().all(|value| bounds.changed(&rules, &knob.key, value).is_some()));
        }
        knobs
    }

    fn named<'a>(knobs: &'a [Knob], key: &str) -> &'a Knob {
        knobs.iter().find(|knob| knob.key == key).unwrap_or_else(|| panic!("no {key} in {knobs:?}"))
    }

    #[test]
    fn a_step_on_fragments_has_a_choice_a_shape_and_those_of_attention() {
        let knobs = of_demo(Some(Matrices::Emulated), 256);
        let mut keys: Vec<&str> = knobs.iter().map(|knob| knob.key.as_str()).collect();
        keys.sort_unstable();
        let skinny = ["1024x256", "2048x256", "256x256", "256x512", "512x256"].map(|shape| format!("skinny.{shape}"));
        let wanted: Vec<&str> = ["flash_threads"].into_iter().chain(skinny.iter().map(String::as_str)).collect();
        assert_eq!(keys, [wanted, vec!["splits"]].concat());
        assert!(knobs.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes));
        let gate_up = named(&knobs, "skinny.1024x256");
        assert_eq!((gate_up.bytes, gate_up.entry.as_str()), (7 * 1024 * 256 * 2, "skinny.1024x256"));
        assert!(gate_up.candidates.iter().any(|value| value == "128/2/2"), "{gate_up:?}");
        // The device's workgroups cannot have this many threads.
        assert!(gate_up.candidates.iter().all(|value| !value.starts_with("768/") && !value.starts_with("1024/")));
        assert_eq!(named(&knobs, "flash_threads").entry, "flash_threads.8x4x32");
    }

    #[test]
    fn a_step_on_rows_has_choices_of_its_own() {
        let knobs = of_demo(None, 256);
        let keys: Vec<&str> = knobs.iter().map(|knob| knob.key.as_str()).collect();
        assert_eq!(keys, ["gemv_threads", "attention_threads", "splits"]);
        assert_eq!(knobs[0].entry, "gemv_threads.256x512");
    }

    #[test]
    fn short_contexts_do_not_take_splits_from_long_ones() {
        assert_eq!(named(&of_demo(Some(Matrices::Emulated), 256), "splits").candidates, ["8", "12", "16"]);
        let long = of_demo(Some(Matrices::Emulated), LONG);
        assert_eq!(named(&long, "splits").candidates.first().map(String::as_str), Some("1"));
        assert_eq!(named(&long, "splits").candidates.last().map(String::as_str), Some("32"));
    }

    #[test]
    fn shapes_that_waste_or_cannot_fill_the_device_are_not_tried() {
        // With 32 chunks, each of the 16 groups of a workgroup of 512 threads takes two.
        let values = skinny_values(4096, 32, 132);
        assert!(values.contains(&"512/1/2".to_owned()) && !values.contains(&"512/1/3".to_owned()));
        assert!(values.contains(&"128/3/2".to_owned()) && !values.contains(&"128/4/1".to_owned()));
        // With 64 row blocks, two per workgroup would leave most of the 132 processors idle.
        assert!(skinny_values(1024, 96, 132).iter().all(|value| value.split('/').nth(1) == Some("1")));
        assert!(skinny_values(1 << 17, 128, 132).iter().all(|value| {
            let n: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            n[1] * n[2] <= 8 && n[0] * n[1] * n[2] * 8 <= 40 << 10
        }));
    }

    #[test]
    fn near_values_come_first_and_a_kept_one_before_them() {
        let candidates: Vec<String> = ["128/1/2", "256/1/2", "512/1/2", "512/1/4", "1024/4/8"].map(String::from).into();
        assert_eq!(nearest_first(&candidates, "512/1/2", None), ["256/1/2", "512/1/4", "128/1/2", "1024/4/8"]);
        let kept = nearest_first(&candidates, "512/1/2", Some("1024/4/8"));
        assert_eq!(kept, ["1024/4/8", "256/1/2", "512/1/4", "128/1/2"]);
        assert_eq!(nearest_first(&candidates, "512/1/2", Some("512/1/2")).len(), 4);
    }

    #[test]
    fn only_what_stands_out_of_the_noise_is_faster() {
        let noisy: Vec<f64> = (0..21).map(|i| 100.0 + f64::from(i % 5)).collect();
        let scaled = |by: f64| -> Vec<f64> { noisy.iter().map(|time| time * by).collect() };
        assert!(faster(&noisy, &scaled(0.9)));
        assert!(!faster(&noisy, &noisy) && !faster(&noisy, &scaled(1.1)));
        // A gain smaller than the variation of the times.
        assert!(!faster(&noisy, &scaled(0.995)));
        // A better median, but too many lost rounds.
        let lucky: Vec<f64> = (0..21).map(|i| if i % 2 == 0 { 90.0 } else { 200.0 }).collect();
        assert!(!faster(&[100.0; 21], &lucky));
    }

    #[test]
    fn logits_are_the_same_but_for_rounding() {
        let reference: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let scaled: Vec<f32> = reference.iter().map(|value| value * 1.001).collect();
        assert_eq!(same(&reference, &scaled), Ok(()));
        let mut wrong = reference.clone();
        wrong[3] += 0.1;
        assert!(same(&reference, &wrong).is_err_and(|what| what.contains("of their norm")));
        wrong[3] = f32::NAN;
        assert!(same(&reference, &wrong).is_err());
        assert!(same(&[1.0, 1.0001, 0.0], &[1.0001, 1.0, 0.0]).is_err_and(|what| what.contains("its token is 0")));
    }
}
