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
use crate::model::decoder::stage::{LayerStage, divide, divide_vocabulary};
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
    /// Whether steps may wait for other devices while they run, with tensor parallelism.
    pub(crate) polls: bool,
    /// Whether parts of sums of prompt steps pass as bfloat16, with tensor parallelism: where the products of all devices round
    /// their inputs so too.
    pub(crate) halves: bool,
    /// The tags of the words that the stage takes over (`Decoder::input_tags`).
    pub(crate) input_tags: BTreeMap<u32, u32>,
}

impl StagePart {
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

/// Returns the stages of a model on the devices of `builds`, and the sizes that all of them hold. The layers are divided
/// by `shares`; without any equally, or by free memory if a longer context or more KV pages fit then.
pub(crate) fn choose_stages(
    builds: &[Build<'_>],
    shares: &[u32],
) -> Result<(Vec<StagePart>, PlannedSizes), StartError> {
    // The last device has the draft model too.
    let drafting = |device: usize| {
        let draft = builds[device].draft.filter(|_| device + 1 == builds.len() && builds[device].drafts() > 0);
        draft.map_or(0, |draft| draft.weights_without_mtp().iter().map(WeightSpec::bytes).sum::<u64>())
    };
    let free = |(device, build): (usize, &Build<'_>)| {
        let free = build.opened.free_bytes(&build.opened.device.budget());
        let free = build.limit.map_or(free, |limit| limit.min(free));
        (free.saturating_sub(drafting(device)) as f64).max(1.0)
    };
    let ways: Vec<Vec<f64>> = match shares {
        [] => vec![vec![1.0; builds.len()], builds.iter().enumerate().map(free).collect()],
        shares => vec![shares.iter().map(|share| f64::from(*share)).collect()],
    };
    let (on_cpu, heap_bytes) = sizes_of(builds);
    let (first, config) = (&builds[0], &builds[0].checkpoint.config);
    let tags = builds.iter().all(Build::may_overlap);
    let (mut refused, mut best) = (None, None::<(Vec<StagePart>, PlannedSizes)>);
    for way in ways {
        let stages = divide(config, first.all_weights(), &way).map_err(|error| first.unsupported(error.to_string()))?;
        let (mut parts, mut input_tags) = (Vec::new(), BTreeMap::new());
        for (build, stage) in builds.iter().zip(stages) {
            let weights = stage.weights(config, first.all_weights());
            let part = StagePart {
                stage,
                weights,
                on_cpu,
                heap_bytes,
                window_pages: None,
                tags,
                polls: false,
                halves: false,
                input_tags,
            };
            input_tags = build.of_part(&part).output_tags();
            parts.push(part);
        }
        let planned = builds.iter().zip(&parts).map(|(build, part)| Ok(build.of_part(part).planned()?.0));
        match planned.collect::<Result<Vec<PlannedSizes>, StartError>>() {
            Ok(sizes) => {
                let found = agreed(parts, &sizes);
                let room = |(_, sizes): &(Vec<StagePart>, PlannedSizes)| (sizes.context, sizes.pages);
                if best.as_ref().is_none_or(|best| room(&found) > room(best)) {
                    best = Some(found);
                }
            }
            Err(error @ StartError::Plan { .. }) => refused = refused.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    best.ok_or_else(|| refused.expect("there is a way to divide the layers"))
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
    let tags = polls && tags && builds.iter().all(Build::may_overlap);
    let vocabulary = vocabulary(builds);
    if let Err(why) = vocabulary {
        builds[0].progress.line(&format!("\"{}\": the LM head is on the last device alone: {why}", builds[0].name));
    }
    let part = |(build, index): (&Build<'_>, u32)| {
        let config = &build.checkpoint.config;
        let stage = LayerStage::of_rank(config, Rank { index, of }, vocabulary.ok());
        let weights = stage.weights(config, build.all_weights());
        let input_tags = BTreeMap::new();
        StagePart { stage, weights, on_cpu, heap_bytes, window_pages: None, tags, polls, halves, input_tags }
    };
    let mut parts: Vec<StagePart> = builds.iter().zip(0..).map(part).collect();
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
