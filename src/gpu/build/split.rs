//! The division of a model among several devices, so that the memory of each suffices: of its layers, or of each layer's
//! heads and inner values and of the LM head's rows.
//! Not here: how stages exchange activations (`gpu::executor`), and the placement of devices (`gpu::devices`).

use crate::config;
use crate::gpu::build::defaults::DEFAULT_CONTEXT;
use crate::gpu::build::{Build, PlannedSizes};
use crate::gpu::error::StartError;
use crate::kernels::exchange::{Columns, Rank};
use crate::kernels::gemm::skinny::Matrices;
use crate::memory::plan::HumanBytes;
use crate::model::checkpoint::shard::ShardError;
use crate::model::checkpoint::{Checkpoint, WeightSpec};
use crate::model::config::ModelConfig;
use crate::model::decoder::stage::{Counted, LayerStage, StageDevice, divide, divide_vocabulary, stage_bytes};
use std::collections::BTreeMap;

/// A stage of a model that is split over several devices, as the build on its device knows it.
#[derive(Clone, Debug)]
pub(crate) struct StagePart {
    /// The layers.
    pub(crate) stage: LayerStage,
    /// The weights that the stage uses.
    pub(crate) weights: Vec<WeightSpec>,
    /// Whether one of the devices is a CPU driver.
    pub(crate) on_cpu: bool,
    /// The size of the smallest device memory, in bytes.
    pub(crate) heap_bytes: u64,
    /// The number of window pages on which the stages have agreed; `None` before that.
    pub(crate) window_pages: Option<u32>,
    /// Whether decode steps may run without barriers: all devices or none, because a fault of one stage ends the step of
    /// all.
    pub(crate) tags: bool,
    /// Whether slots may decode in the steps of prompts: on all devices or on none.
    pub(crate) mixes: bool,
    /// Whether steps may wait for other devices while they run, with tensor parallelism.
    pub(crate) polls: bool,
    /// Whether parts of sums of prompt steps pass as bfloat16, with tensor parallelism: where the products of all devices round
    /// their inputs so too.
    pub(crate) halves: bool,
    /// The minimum size of a bucket of prompt steps in microbatches, with tensor parallelism; 0 for none. The same on all devices,
    /// which exchange the sums of each.
    pub(crate) microbatch_rows: u32,
    /// The tags of the words that the stage takes over (`Decoder::input_tags`).
    pub(crate) input_tags: BTreeMap<u32, u32>,
}

impl StagePart {
    /// Returns a stage of a model with these weights; nothing else is known of it.
    pub(crate) fn of(stage: LayerStage, config: &ModelConfig, all: &[WeightSpec]) -> StagePart {
        StagePart {
            weights: stage.weights(config, all),
            stage,
            on_cpu: false,
            heap_bytes: 0,
            window_pages: None,
            tags: false,
            mixes: true,
            polls: false,
            halves: false,
            microbatch_rows: 0,
            input_tags: BTreeMap::new(),
        }
    }

    /// Returns the heading of the device's column in the table of all plans.
    pub(crate) fn column(&self) -> String {
        match (self.stage.rank, self.stage.layers.len()) {
            (Some(rank), _) => format!("part {} of {}", rank.index + 1, rank.of),
            (None, 1) => format!("layer {}", self.stage.layers.start),
            (None, _) => format!("layers {} to {}", self.stage.layers.start, self.stage.layers.end - 1),
        }
    }

    /// Returns the layers as text, such as `layers 0 to 17 of 36`, and the size of the device's part of an LM head.
    pub(crate) fn layers(&self) -> String {
        match self.head_bytes() {
            None => layers_of(&self.stage),
            Some(bytes) => format!("{} ({})", layers_of(&self.stage), HumanBytes(bytes)),
        }
    }

    /// Returns the number of bytes of the device's part of the LM head; `None` if that is not divided.
    fn head_bytes(&self) -> Option<u64> {
        let (columns, _, own) = self.stage.own_vocabulary()?;
        Some(match bytes_of(&self.weights, "lm_head") {
            // The embedding, which is whole.
            0 => bytes_of(&self.weights, "embed") * own.len() as u64 / u64::from(columns.count),
            own => own,
        })
    }
}

/// Returns the number of bytes of a merged weight.
fn bytes_of(weights: &[WeightSpec], name: &str) -> u64 {
    weights.iter().filter(|weight| weight.merged == name).map(WeightSpec::bytes).sum()
}

/// Returns a stage's layers as text.
pub(crate) fn layers_of(stage: &LayerStage) -> String {
    let LayerStage { layers, of, rank, .. } = stage;
    if let Some(rank) = rank {
        let layers = format!("part {} of {} of all layers", rank.index + 1, rank.of);
        return match stage.own_vocabulary() {
            None => layers,
            Some((.., own)) => format!("{layers} and rows {} to {} of the LM head", own.start, own.end - 1),
        };
    }
    match layers.len() {
        1 => format!("layer {} of {of}", layers.start),
        _ => format!("layers {} to {} of {of}", layers.start, layers.end - 1),
    }
}

/// How the layers of a model are divided among devices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Division<'a> {
    /// By configured shares of the weights.
    Shares(&'a [u32]),
    /// By the bytes of weights that each device reads per second.
    Speeds(&'a [f64]),
}

/// The parts of a device's free memory, in tenths, that its weights may take if the fastest division does not fit, or leaves
/// little room for keys and values: the first that changes this is taken.
const ROOM_TENTHS: [u64; 4] = [9, 8, 7, 6];

/// The number of times as many KV pages as a fast division has room for that are reason to take a slower one.
const WORTH_PAGES: u64 = 2;

/// Stages of a model on several devices, and the sizes that all of them hold.
type PlannedStages = (Vec<StagePart>, PlannedSizes);

/// Returns the stages of a model on the devices of `builds`, and the sizes that all of them hold.
pub(crate) fn choose_stages(builds: &[Build<'_>], division: Division<'_>) -> Result<PlannedStages, StartError> {
    let divided = |counted, devices: &[StageDevice]| divided(builds, counted, devices);
    let speeds = match division {
        Division::Shares(shares) => {
            let devices: Vec<StageDevice> =
                shares.iter().map(|share| StageDevice::of_share(f64::from(*share))).collect();
            return planned_stages(builds, &divided(Counted::Held, &devices)?);
        }
        Division::Speeds(speeds) => speeds,
    };
    let device = |(index, (build, speed)): (usize, (&Build<'_>, &f64))| {
        let free = build.opened.free_bytes(&build.opened.device.budget());
        // The last device has the draft model too.
        let draft = build.draft.filter(|_| index + 1 == builds.len() && build.drafts() > 0);
        MeasuredDevice {
            speed: *speed,
            free: build.limit.map_or(free, |limit| limit.min(free)),
            drafting: draft.map_or(0, |draft| draft.weights_without_mtp().iter().map(WeightSpec::bytes).sum::<u64>()),
        }
    };
    let devices: Vec<MeasuredDevice> = builds.iter().zip(speeds).enumerate().map(device).collect();
    let (chosen, by) = by_measured_times(&devices, &divided, &|stages| planned_stages(builds, stages))?;
    say_division(builds, speeds, by, &chosen.0);
    Ok(chosen)
}

/// A device whose speed is known.
#[derive(Clone, Copy, Debug)]
struct MeasuredDevice {
    /// The bytes of weights that it reads per second.
    speed: f64,
    /// The bytes of memory that may be allocated.
    free: u64,
    /// The bytes of the draft model's weights on it.
    drafting: u64,
}

/// Divides the layers of a model among devices.
type DivideLayers<'f> = dyn Fn(Counted, &[StageDevice]) -> Result<Vec<LayerStage>, StartError> + 'f;

/// Plans the memory of stages.
type PlanMemory<'f, P> = dyn Fn(&[LayerStage]) -> Result<(P, PlannedSizes), StartError> + 'f;

/// Chooses stages so that the slowest device takes as little time as possible, as far as memory suffices; by free memory instead if
/// a longer context or twice as many KV pages fit then. Returns the plan, and by what layers are divided. What `planned` refuses
/// for lack of memory is not chosen.
fn by_measured_times<P>(
    devices: &[MeasuredDevice],
    divided: &DivideLayers<'_>,
    planned: &PlanMemory<'_, P>,
) -> Result<((P, PlannedSizes), &'static str), StartError> {
    let by_speed = |tenths: Option<u64>| {
        let device = |of: &MeasuredDevice| StageDevice {
            share: of.speed,
            room: tenths.map(|tenths| of.free / 10 * tenths),
            further: of.drafting,
        };
        divided(Counted::Read, &devices.iter().map(device).collect::<Vec<_>>())
    };
    let of_free = |of: &MeasuredDevice| StageDevice::of_share((of.free.saturating_sub(of.drafting) as f64).max(1.0));
    let by_memory = divided(Counted::Held, &devices.iter().map(of_free).collect::<Vec<_>>())?;
    let fitting = |stages: &[LayerStage]| match planned(stages) {
        Err(error @ StartError::Plan { .. }) => Ok(Err(error)),
        planned => planned.map(Ok),
    };
    let largest = fitting(&by_memory)?;
    let mut tried = vec![by_memory];
    let ways = std::iter::once(None).chain(ROOM_TENTHS.map(Some));
    for tenths in ways {
        // Smaller rooms hold no more.
        let Ok(stages) = by_speed(tenths) else { break };
        let by = if tenths.is_none() { "measured times" } else { "measured times as far as memory suffices" };
        if stages == tried[0] {
            return Ok((largest?, by));
        }
        if tried.contains(&stages) {
            continue;
        }
        if let Ok(found) = fitting(&stages)?
            && largest.as_ref().map_or(true, |largest| suffices(&found.1, &largest.1))
        {
            return Ok((found, by));
        }
        tried.push(stages);
    }
    Ok((largest?, "free memory, because a longer context or more kv pages fit than by measured times"))
}

/// Whether a division with sizes `one` need not give way to one with sizes `other`.
fn suffices(one: &PlannedSizes, other: &PlannedSizes) -> bool {
    one.context >= other.context && u64::from(one.pages) * WORTH_PAGES > u64::from(other.pages)
}

/// Divides the layers of the model of `builds` among their devices.
fn divided(builds: &[Build<'_>], counted: Counted, devices: &[StageDevice]) -> Result<Vec<LayerStage>, StartError> {
    let first = &builds[0];
    divide(&first.checkpoint.config, first.all_weights(), counted, devices)
        .map_err(|error| first.unsupported(error.to_string()))
}

/// Refuses a model whose layers are fewer than the devices of `builds`.
pub(crate) fn check_stages(builds: &[Build<'_>]) -> Result<(), StartError> {
    divided(builds, Counted::Held, &vec![StageDevice::of_share(1.0); builds.len()]).map(|_| ())
}

/// Says by what layers are divided, how fast devices read weights, and how long each takes for its stage.
fn say_division(builds: &[Build<'_>], speeds: &[f64], by: &str, parts: &[StagePart]) {
    let each = builds.iter().zip(speeds).zip(parts).map(|((build, speed), part)| {
        let config = &build.checkpoint.config;
        let read = stage_bytes(config, build.all_weights(), &part.stage, Counted::Read);
        format!(
            "\"{}\" reads weights at {}/s, and those of {} in {:.2} ms",
            build.adapter.name,
            HumanBytes(*speed as u64),
            layers_of(&part.stage),
            read as f64 / speed * 1e3
        )
    });
    let each: Vec<String> = each.collect();
    builds[0].progress.line(&format!("\"{}\": layers are divided by {by}: {}", builds[0].name, each.join("; ")));
}

/// Plans the memory of stages on the devices of `builds`.
fn planned_stages(builds: &[Build<'_>], stages: &[LayerStage]) -> Result<PlannedStages, StartError> {
    let (on_cpu, heap_bytes) = sizes_of(builds);
    let (first, config) = (&builds[0], &builds[0].checkpoint.config);
    let tags = builds.iter().all(Build::may_overlap);
    let mut parts: Vec<StagePart> = Vec::new();
    for stage in stages {
        let part = StagePart::of(stage.clone(), config, first.all_weights());
        parts.push(StagePart { on_cpu, heap_bytes, tags, ..part });
    }
    agree_on_mixed_steps(builds, &mut parts);
    let mut input_tags = BTreeMap::new();
    for (build, part) in builds.iter().zip(&mut parts) {
        part.input_tags = input_tags;
        input_tags = build.of_part(part).output_tags();
    }
    let planned = builds.iter().zip(&parts).map(|(build, part)| Ok(build.of_part(part).planned()?.0));
    let sizes = planned.collect::<Result<Vec<PlannedSizes>, StartError>>()?;
    Ok(agreed(parts, &sizes))
}

/// Has slots decode in the steps of prompts on all devices, if all can, or on none.
fn agree_on_mixed_steps(builds: &[Build<'_>], parts: &mut [StagePart]) {
    let mixes = builds.iter().zip(&*parts).all(|(build, part)| build.of_part(part).mixes());
    parts.iter_mut().for_each(|part| part.mixes = mixes);
}

/// Returns the part of a model for each of `devices` devices with tensor parallelism.
pub(crate) fn shards(
    model: &config::Model,
    checkpoint: &Checkpoint,
    devices: u32,
) -> Result<Vec<Checkpoint>, StartError> {
    let shard = |index| checkpoint.shard(Rank { index, of: devices });
    let refused = |error: ShardError| StartError::Unsupported { model: model.name.clone(), what: error.to_string() };
    (0..devices).map(shard).collect::<Result<_, ShardError>>().map_err(refused)
}

/// The minimum number of bytes of the LM head that a GPU does not read because others do, for a division that pays: on two
/// H200s the LM head of Qwen3-0.6B (156 MB less) decodes 5 % slower divided, that of Qwen3-8B (622 MB less) 5 % faster.
const LEAST_SAVED: u64 = 256 << 20;

/// Returns how the rows of the LM head are divided among the devices of `builds`, or why they are not.
fn vocabulary(builds: &[Build<'_>]) -> Result<Columns, &'static str> {
    let (last, config) = (builds.last().expect("there are devices"), &builds[0].checkpoint.config);
    let of = builds.len() as u64;
    let chosen = |build: &Build<'_>| build.tuning(DEFAULT_CONTEXT).vocabulary_rows;
    let chosen = builds.iter().map(chosen).min().unwrap_or(0);
    let name = if config.tied { "embed" } else { "lm_head" };
    let saved = bytes_of(builds[0].all_weights(), name) * (of - 1) / of;
    let pays = chosen > 1 || saved >= LEAST_SAVED || builds.iter().any(|build| build.adapter.is_cpu());
    let drafts_itself =
        last.drafts() > 0 && last.draft.map_or(last.model.draft.is_none(), |draft| draft.config.draft_head.is_some());
    match divide_vocabulary(config, builds.len() as u32) {
        _ if !config.causal => Err("the model draws no tokens"),
        _ if chosen == 0 => Err("vocabulary_rows=0"),
        _ if drafts_itself => Err("the block or head that drafts tokens needs all of it"),
        None => Err("it has too few rows"),
        Some(_) if !pays => Err("it is small, so that a token would wait longer for the exchange of logits"),
        Some(columns) => Ok(columns),
    }
}

/// Returns the parts of a model with tensor parallelism on the devices of `builds`, whose checkpoints are the devices' parts
/// ([`shards`]), and the sizes that all of them hold. `polls`: whether steps may wait for other devices while they run;
/// `tags`: whether decode steps may then run without barriers.
pub(crate) fn choose_ranks(
    builds: &[Build<'_>],
    (polls, tags): (bool, bool),
) -> Result<(Vec<StagePart>, PlannedSizes), StartError> {
    let (on_cpu, heap_bytes) = sizes_of(builds);
    let of = builds.len() as u32;
    let rounds = |build: &Build<'_>| build.tuning(DEFAULT_CONTEXT).fragments == Some(Matrices::Cooperative);
    let halves = builds.iter().all(rounds);
    let microbatch_rows = agreed_microbatch_rows(builds);
    let tags = polls && tags && builds.iter().all(Build::may_overlap);
    let vocabulary = vocabulary(builds);
    if let Err(why) = vocabulary {
        builds[0].progress.line(&format!("\"{}\": the LM head is on the last device alone: {why}", builds[0].name));
    }
    let part = |(build, index): (&Build<'_>, u32)| {
        let config = &build.checkpoint.config;
        let stage = LayerStage::of_rank(config, Rank { index, of }, vocabulary.ok());
        let whole = StagePart::of(stage, config, build.all_weights());
        StagePart { on_cpu, heap_bytes, tags, polls, halves, microbatch_rows, ..whole }
    };
    let mut parts: Vec<StagePart> = builds.iter().zip(0..).map(part).collect();
    agree_on_mixed_steps(builds, &mut parts);
    // Tagged words are rounded: where one device's are and another's are not, their residual streams would differ, and so could
    // the experts that they choose.
    let tagged = |(build, part): (&Build<'_>, &StagePart)| -> Vec<u32> {
        if part.tags { build.of_part(part).output_tags().into_keys().collect() } else { Vec::new() }
    };
    let tagged: Vec<Vec<u32>> = builds.iter().zip(&parts).map(tagged).collect();
    if tagged.iter().any(|rows| *rows != tagged[0]) {
        parts.iter_mut().for_each(|part| part.tags = false);
    }
    let planned = builds.iter().zip(&parts).map(|(build, part)| Ok(build.of_part(part).planned()?.0));
    let sizes = planned.collect::<Result<Vec<PlannedSizes>, StartError>>()?;
    Ok(agreed(parts, &sizes))
}

/// Returns the minimum size of a bucket of prompt steps in microbatches that suits all devices; 0 if one has none. Only the last
/// device has a draft head, which takes all rows of a step.
fn agreed_microbatch_rows(builds: &[Build<'_>]) -> u32 {
    let heads = |build: &Build<'_>| build.draft.is_some_and(|draft| draft.config.draft_head.is_some());
    let rows = builds.iter().map(|build| build.tuning(DEFAULT_CONTEXT).microbatch_rows);
    match builds.iter().any(heads) || rows.clone().any(|rows| rows == 0) {
        true => 0,
        false => rows.max().unwrap_or(0),
    }
}

/// Returns whether one of the devices is a CPU driver, and the size of the smallest device memory in bytes.
fn sizes_of(builds: &[Build<'_>]) -> (bool, u64) {
    let heap = |build: &Build<'_>| build.opened.device.budget().heap_bytes;
    let heap_bytes = builds.iter().map(heap).min().unwrap_or(0);
    (builds.iter().any(|build| build.adapter.is_cpu()), heap_bytes)
}

/// Returns the stages with the sizes that all of them hold.
fn agreed(mut parts: Vec<StagePart>, sizes: &[PlannedSizes]) -> (Vec<StagePart>, PlannedSizes) {
    let least = |of: &dyn Fn(&PlannedSizes) -> u32| sizes.iter().map(of).min().unwrap_or(0);
    let window_pages = sizes.iter().filter_map(|sizes| sizes.window_pages).min();
    let context = least(&|sizes| sizes.context);
    let pages = least(&|sizes| sizes.pages);
    parts.iter_mut().for_each(|part| part.window_pages = window_pages);
    (parts, PlannedSizes { context, pages, window_pages })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::plan::{PlanError, Purpose};
    use crate::model::decoder::stage::CannotDivide;
    use std::path::Path;

    /// Goal: the fastest division is taken unless memory is short. Method: devices of several speeds and sizes; a plan in which
    /// each layer's keys and values take 64 bytes a page, and a context takes 16 pages at most.
    #[test]
    fn memory_decides_where_the_fastest_division_leaves_too_little() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen3-deep");
        let checkpoint = Checkpoint::open(&folder).expect("a model");
        let (config, weights) = (&checkpoint.config, checkpoint.weights());
        let whole: u64 = weights.iter().map(WeightSpec::bytes).sum();
        let held = |stage: &LayerStage| stage_bytes(config, weights, stage, Counted::Held);
        let choose = |devices: [(f64, u64); 2]| {
            let devices = devices.map(|(speed, free)| MeasuredDevice { speed, free, drafting: 0 });
            let divided = |counted, of: &[StageDevice]| {
                let what = |error: CannotDivide| error.to_string();
                divide(config, weights, counted, of)
                    .map_err(what)
                    .map_err(|what| StartError::Unsupported { model: "m".to_owned(), what })
            };
            let planned = |stages: &[LayerStage]| {
                let fit = stages.iter().zip(&devices).map(|(stage, device)| {
                    let free = device.free.saturating_sub(held(stage));
                    (free / (64 * stage.layers.len() as u64)) as u32
                });
                let pages = fit.min().expect("stages").min(100);
                let device = "small".to_owned();
                let (asked, free, limited) = (2, 1, false);
                let source = PlanError::DoesNotFit { purpose: Purpose::KvPages, asked, free, limited, device };
                match pages {
                    0 => Err(StartError::Plan { model: "m".to_owned(), source }),
                    _ => Ok((
                        stages.to_vec(),
                        PlannedSizes { context: (16 * pages).min(256), pages, window_pages: None },
                    )),
                }
            };
            let ((stages, sizes), by) = by_measured_times(&devices, &divided, &planned)?;
            let layers: Vec<usize> = stages.iter().map(|stage| stage.layers.len()).collect();
            Ok::<_, StartError>((layers, sizes.pages, by))
        };
        // Enough memory: the fast device has most layers, wherever it is.
        let (layers, pages, by) = choose([(1e12, 10 * whole), (1.0, 10 * whole)]).unwrap();
        assert_eq!((&layers[..], pages, by), (&[4, 1][..], 100, "measured times"));
        assert_eq!(choose([(1.0, 10 * whole), (1e12, 10 * whole)]).unwrap().0, [1, 4]);
        // The fast device has room for three of four layers, and for some pages beside two.
        let [two, three, four] =
            [2, 3, 4].map(|layers| held(&LayerStage { layers: 0..layers, ..LayerStage::whole(config) }));
        let (layers, pages, by) = choose([(1e12, three + 1), (1.0, 10 * whole)]).unwrap();
        assert!(layers[0] < 3 && pages > 0 && by != "measured times", "{layers:?}, {pages} pages, by {by}");
        assert!(two < three && three < four);
        // Nearly as many pages are no reason for a slower division, and twice as many are.
        let with = |pages: u64| four + 64 * 4 * pages;
        let (layers, pages, by) = choose([(1e12, with(60)), (1.0, 10 * whole)]).unwrap();
        assert_eq!((&layers[..], pages, by), (&[4, 1][..], 60, "measured times"));
        let (layers, pages, by) = choose([(1e12, with(50)), (1.0, 10 * whole)]).unwrap();
        assert!(layers[0] < 4 && pages > 50 && by != "measured times", "{layers:?}, {pages} pages, by {by}");
        // Too little for any division: the refusal is that of the plan.
        let error =
            choose([(1.0, held(&LayerStage { layers: 0..1, ..LayerStage::whole(config) })), (1.0, 1)]).unwrap_err();
        assert!(matches!(error, StartError::Plan { .. }), "{error}");
    }
}
