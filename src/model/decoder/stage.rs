//! Stages: the consecutive layers of a model that one of several devices computes, and the division of a model into
//! stages.
//!
//! Not here: devices, and how activations pass from one to the next.

use super::{Decoder, StepShape, TAGGED};
use crate::kernels::exchange::{Columns, Rank};
use crate::kernels::recording::Recording;
use crate::kernels::{embed, sampling, tags};
use crate::memory::plan::HumanBytes;
use crate::model::checkpoint::{WeightSpec, shard};
use crate::model::config::{LayerKind, ModelConfig};
use std::collections::BTreeMap;
use std::ops::Range;

/// The part of a model that one device computes. The first stage also has the embedding, the last one the LM head and the
/// sampler. A model on one device has a single stage, which is both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerStage {
    /// The layers; at least one.
    pub layers: Range<u32>,
    /// The number of layers of the model.
    pub of: u32,
    /// The number of stages into which the model is divided.
    pub stages: u32,
    /// With tensor parallelism, the device among those that each have a part of every layer. All of them have the embedding,
    /// the last one has the sampler.
    pub rank: Option<Rank>,
    /// How the rows of the LM head are divided among these devices; `None` if the last device has all of them.
    pub vocabulary: Option<Columns>,
}

/// The multiples of which the numbers of the LM head's rows of a device are: larger ones suit kernels.
const VOCABULARY_MULTIPLES: [u32; 5] = [256, 128, 64, 32, 16];
/// The minimum number of multiples that each device has on average, unless the least is too large for that: no device has
/// many more than another.
const LEAST_MULTIPLES: u32 = 16;

/// Returns the division of the LM head's rows among devices; `None` if there are too few rows.
pub fn divide_vocabulary(config: &ModelConfig, devices: u32) -> Option<Columns> {
    let [.., least] = VOCABULARY_MULTIPLES;
    let suits = |unit: &u32| config.vocab / unit >= LEAST_MULTIPLES * devices;
    let columns = Columns { count: config.vocab, unit: VOCABULARY_MULTIPLES.into_iter().find(suits).unwrap_or(least) };
    (columns.units() >= devices).then_some(columns)
}

impl LayerStage {
    /// Returns the only stage of a model on one device.
    pub fn whole(config: &ModelConfig) -> LayerStage {
        LayerStage { layers: 0..config.layers, of: config.layers, stages: 1, rank: None, vocabulary: None }
    }

    /// Returns one device's part of a model that is split within its layers, and perhaps within its LM head. `config` is the
    /// configuration of that part (`Checkpoint::shard`).
    pub fn of_rank(config: &ModelConfig, rank: Rank, vocabulary: Option<Columns>) -> LayerStage {
        LayerStage { rank: Some(rank), vocabulary, ..LayerStage::whole(config) }
    }

    /// Whether the stage is all of the model, on one device.
    pub fn is_whole(&self) -> bool {
        self.stages == 1 && self.rank.is_none()
    }

    /// Whether the stage begins with the embedding.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the stage ends with the sampler.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.of && self.rank.is_none_or(|rank| rank.index + 1 == rank.of)
    }

    /// Whether the stage computes logits: of all of the vocabulary, or of a part of it.
    pub fn has_logits(&self) -> bool {
        self.is_last() || self.vocabulary.is_some()
    }

    /// Returns the device's part of the vocabulary, if the LM head is divided, and its rank.
    pub fn own_vocabulary(&self) -> Option<(Columns, Rank, Range<u32>)> {
        let (columns, rank) = (self.vocabulary?, self.rank?);
        Some((columns, rank, columns.part(rank)))
    }

    /// Returns the weights of a model that the stage uses. A tied LM head and a block that drafts tokens use the
    /// embedding, which the last stage then has as well as the first.
    pub fn weights(&self, config: &ModelConfig, all: &[WeightSpec]) -> Vec<WeightSpec> {
        let embeds_last = config.tied || all.iter().any(WeightSpec::is_mtp);
        let uses = |weight: &&WeightSpec| match layer_of(weight) {
            Some(layer) => self.layers.contains(&layer),
            None if weight.name.starts_with("layer_inputs.") => self.is_first(),
            None if weight.merged == "embed" => self.is_first() || self.is_last() && embeds_last,
            None if ["final_norm", "lm_head", "lm_head.bias"].contains(&weight.merged.as_str()) => self.has_logits(),
            None => self.is_last(),
        };
        let is_head = |weight: &&WeightSpec| weight.merged.starts_with("lm_head");
        let Some((.., own)) = self.own_vocabulary() else { return all.iter().filter(uses).cloned().collect() };
        let mut weights: Vec<WeightSpec> = all.iter().filter(uses).filter(|w| !is_head(w)).cloned().collect();
        for name in ["lm_head", "lm_head.bias"] {
            let ranges: Vec<&WeightSpec> = all.iter().filter(|weight| weight.merged == name).collect();
            weights.extend(shard::rows(&ranges, std::slice::from_ref(&own)));
        }
        weights
    }
}

/// Returns the layer of a weight; `None` for those outside of layers.
fn layer_of(weight: &WeightSpec) -> Option<u32> {
    weight.merged.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// The reasons why the layers of a model cannot be divided among devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotDivide {
    /// The model has fewer places where it can be divided than devices ask for.
    #[error(
        "split over {asked} devices is asked for, its {layers} layers can be divided in at most {most} parts{}",
        if *.most < *.layers { ": layers that read another layer's keys and values stay with it" } else { "" }
    )]
    TooManyStages {
        /// The number of devices.
        asked: usize,
        /// The number of layers.
        layers: u32,
        /// The maximum number of stages.
        most: u32,
    },
    /// No division leaves each device a stage that it has room for.
    #[error("its weights of {} have no place, layer by layer, in the {} of {devices} devices", HumanBytes(*.held), HumanBytes(*.room))]
    NoRoom {
        /// The bytes of all weights, and of those that devices have beside their stages.
        held: u64,
        /// The bytes that the devices have room for, together.
        room: u64,
        /// The number of devices.
        devices: usize,
    },
}

/// What makes the size of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// The bytes of its weights.
    Held,
    /// The bytes of its weights that a decode step of one row reads: of the embedding a row, of experts those that are chosen.
    Read,
}

/// A device that is to have a stage.
#[derive(Clone, Copy, Debug)]
pub struct StageDevice {
    /// The size of its stage for its share is to be like that of the others: the bytes that it reads per second, or a part of
    /// the weights in any unit. Above 0.
    pub share: f64,
    /// The bytes of weights that it has room for; `None` if that is no limit.
    pub room: Option<u64>,
    /// The bytes of weights that it has, and reads in each step, beside its stage.
    pub further: u64,
}

impl StageDevice {
    /// Returns a device without limits.
    pub fn of_share(share: f64) -> StageDevice {
        StageDevice { share, room: None, further: 0 }
    }
}

/// Bytes of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bytes {
    held: u64,
    read: u64,
}

impl Bytes {
    /// Returns the bytes of a stage's weight.
    fn of(config: &ModelConfig, stage: &LayerStage, weight: &WeightSpec) -> Bytes {
        let held = weight.bytes();
        let read = match (config.experts, weight.merged.as_str()) {
            // It is the LM head too.
            (_, "embed") if config.tied && stage.is_last() => held,
            (_, "embed" | "layer_inputs.embed") => weight.row_bytes(),
            (Some(experts), _) if weight.is_of_experts() => held / u64::from(experts.count) * u64::from(experts.chosen),
            _ => held,
        };
        Bytes { held, read }
    }

    fn plus(self, other: Bytes) -> Bytes {
        Bytes { held: self.held + other.held, read: self.read + other.read }
    }

    fn counted(self, by: Counted) -> u64 {
        match by {
            Counted::Held => self.held,
            Counted::Read => self.read,
        }
    }
}

/// Returns the bytes of a stage's weights by what makes its size.
pub fn stage_bytes(config: &ModelConfig, weights: &[WeightSpec], stage: &LayerStage, counted: Counted) -> u64 {
    let own = stage.weights(config, weights);
    own.iter().map(|weight| Bytes::of(config, stage, weight).counted(counted)).sum()
}

/// The bytes of any consecutive layers of a model with what belongs to them outside of layers.
struct StageSizes {
    /// The bytes of the layers before each layer, and of all.
    before: Vec<Bytes>,
    /// The bytes outside of layers of a stage that is neither first nor last, the first, the last, and both.
    outside: [Bytes; 4],
}

impl StageSizes {
    fn of(config: &ModelConfig, weights: &[WeightSpec]) -> StageSizes {
        let layers = config.layers;
        let whole = LayerStage::whole(config);
        let mut each = vec![Bytes::default(); layers as usize];
        for weight in weights {
            if let Some(layer) = layer_of(weight) {
                let of_layer = &mut each[layer as usize];
                *of_layer = of_layer.plus(Bytes::of(config, &whole, weight));
            }
        }
        let outside: Vec<WeightSpec> = weights.iter().filter(|weight| layer_of(weight).is_none()).cloned().collect();
        // More layers than there are, so that a stage can have neither end.
        let ends = [(1, layers + 1), (0, layers + 1), (1, layers + 2), (0, layers + 2)];
        let outside = ends.map(|(from, to)| {
            let stage = LayerStage { layers: from..to, of: layers + 2, ..whole.clone() };
            let own = stage.weights(config, &outside);
            own.iter().map(|weight| Bytes::of(config, &stage, weight)).fold(Bytes::default(), Bytes::plus)
        });
        let mut before = vec![Bytes::default()];
        for of_layer in each {
            before.push(before[before.len() - 1].plus(of_layer));
        }
        StageSizes { before, outside }
    }

    fn size(&self, from: u32, to: u32) -> Bytes {
        let last = to as usize + 1 == self.before.len();
        let outside = self.outside[usize::from(from == 0) + 2 * usize::from(last)];
        let (from, to) = (self.before[from as usize], self.before[to as usize]);
        Bytes { held: to.held - from.held + outside.held, read: to.read - from.read + outside.read }
    }
}

/// Divides places from the first to the last one in `stages` consecutive parts so that their joined cost is the least; `None`
/// if each division has a part without a cost. `cost` returns the cost of a stage from a place to a later one. Returns the
/// cost, and the place at which each part ends.
fn cheapest(
    (places, stages): (usize, usize),
    cost: impl Fn(usize, usize, usize) -> Option<f64>,
    join: fn(f64, f64) -> f64,
) -> Option<(f64, Vec<usize>)> {
    // `best[stage][at]`: the least cost with which the stages before `stage` end at `at`, and where the last of them begins.
    let mut best: Vec<Vec<Option<(f64, usize)>>> = vec![vec![None; places]];
    best[0][0] = Some((0.0, 0));
    for stage in 0..stages {
        let ends = (0..places).map(|end| {
            let joined = |begin: usize| {
                let (so_far, _) = best[stage][begin]?;
                Some((join(so_far, cost(stage, begin, end)?), begin))
            };
            (0..end).filter_map(joined).min_by(|a, b| a.0.total_cmp(&b.0))
        });
        let ends = ends.collect();
        best.push(ends);
    }
    let mut end = places - 1;
    let (least, _) = best[stages][end]?;
    let mut ends = Vec::new();
    for stage in (1..=stages).rev() {
        ends.push(end);
        (_, end) = best[stage][end].expect("it is on the way to the end");
    }
    ends.reverse();
    Some((least, ends))
}

/// Divides a model into one stage for each device, each of which has room for its stage. The greatest ratio of a stage's size
/// to its device's share is as small as possible; of such divisions it is the one whose other ratios differ least.
///
/// # Panics
/// If there is no device, or a share is not above 0.
pub fn divide(
    config: &ModelConfig,
    weights: &[WeightSpec],
    counted: Counted,
    devices: &[StageDevice],
) -> Result<Vec<LayerStage>, CannotDivide> {
    assert!(!devices.is_empty() && devices.iter().all(|device| device.share > 0.0), "devices {devices:?}");
    let layers = config.layers;
    let reads_before = |cut: u32| {
        config.layers_of(LayerKind::Attention).any(|layer| layer >= cut && config.cache_of[layer as usize] < cut)
    };
    // The first layers of possible stages, and the end.
    let cuts: Vec<u32> = (0..=layers).filter(|cut| *cut == 0 || *cut == layers || !reads_before(*cut)).collect();
    let most = cuts.len() as u32 - 1;
    if devices.len() > most as usize {
        return Err(CannotDivide::TooManyStages { asked: devices.len(), layers, most });
    }
    let sizes = StageSizes::of(config, weights);
    let ratio = |stage: usize, begin: usize, end: usize| {
        let StageDevice { share, room, further } = devices[stage];
        let size = sizes.size(cuts[begin], cuts[end]).plus(Bytes { held: further, read: further });
        room.is_none_or(|room| size.held <= room).then(|| size.counted(counted) as f64 / share)
    };
    let places = (cuts.len(), devices.len());
    let Some((greatest, _)) = cheapest(places, ratio, f64::max) else {
        let further: u64 = devices.iter().map(|device| device.further).sum();
        return Err(CannotDivide::NoRoom {
            held: sizes.size(0, layers).held + further,
            room: devices.iter().filter_map(|device| device.room).sum(),
            devices: devices.len(),
        });
    };
    let squared = |stage, begin, end| ratio(stage, begin, end).filter(|of| *of <= greatest).map(|of| of * of);
    let (_, ends) = cheapest(places, squared, |a, b| a + b).expect("one is known");
    let begins = [0].into_iter().chain(ends.iter().copied());
    let stage = |(begin, end): (usize, &usize)| LayerStage {
        layers: cuts[begin]..cuts[*end],
        of: layers,
        stages: devices.len() as u32,
        rank: None,
        vocabulary: None,
    };
    Ok(begins.zip(&ends).map(stage).collect())
}

/// A buffer of activations that passes from a stage to the next one, and its place in the message that carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassedBuffer {
    /// The buffer's name, the same on both devices, in steps whose activations are not tagged.
    pub name: &'static str,
    /// Whether its words are tagged in steps whose activations are; its name then begins with [`TAGGED`].
    pub tagged: bool,
    /// The number of bytes of a row.
    pub row_bytes: u64,
    /// The offset in the message in bytes, the same for any number of rows: what an earlier message left there has the
    /// same meaning.
    pub at: u64,
}

/// The layout of a message from a stage to the next one. All offsets and sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageLayout {
    /// The activations.
    pub buffers: Vec<PassedBuffer>,
    /// The offset of the sender's fault word.
    pub fault: u64,
    /// The offset of an inbox of `patch` with room for one word: the receiver's fault word, if the sender's is set.
    pub inbox: u64,
    /// The size.
    pub bytes: u64,
}

/// Returns the tag of the residual stream at the end of a decode step; `None` if its words are not tagged.
pub fn output_tag(step: &Recording) -> Option<u32> {
    tags::last_tag(step, &format!("{TAGGED}x"))
}

impl PassedBuffer {
    /// Returns the buffer's name in a step whose activations are tagged, or are not.
    pub fn name_in(&self, tagged_step: bool) -> String {
        match tagged_step && self.tagged {
            true => format!("{TAGGED}{}", self.name),
            false => self.name.to_owned(),
        }
    }
}

impl Decoder<'_> {
    /// Returns what passes from a stage to the next one in steps of at most `most` rows: the row table, the residual stream,
    /// and the inputs of layers that depend on the tokens, if the model has them; and the fault word.
    pub fn message(&self, most: u32) -> MessageLayout {
        let c = self.config;
        let floats = |width: u32| u64::from(super::stride(width)) * 4;
        let inputs = c.layer_inputs.map(|of| ("layer_inputs", floats(of.width * c.layers)));
        let mut bytes = 0;
        let buffers = [("rows", embed::rows_bytes(1)), ("x", floats(c.hidden))].into_iter().chain(inputs);
        let passed = buffers.map(|(name, row_bytes)| {
            let at = bytes;
            bytes += row_bytes * u64::from(most);
            PassedBuffer { name, tagged: name == "x", row_bytes, at }
        });
        let buffers = passed.collect();
        let fault = bytes.next_multiple_of(16);
        let inbox = fault + 16;
        MessageLayout { buffers, fault, inbox, bytes: inbox + sampling::patch_bytes(1) }
    }

    /// Returns the tags of the residual stream at the end of the stage's decode steps, by number of rows, for
    /// [`Decoder::input_tags`] of the next stage. Numbers of rows are missing whose steps are not tagged.
    pub fn output_tags(&self) -> BTreeMap<u32, u32> {
        let mut tags = BTreeMap::new();
        let mut rows = 1;
        while rows <= self.state.rows {
            let shape = StepShape::Decode { rows };
            if self.carries(shape) {
                tags.extend(output_tag(&self.record(shape)).map(|tag| (rows, tag)));
            }
            rows *= 2;
        }
        tags
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::checkpoint::Checkpoint;
    use std::path::Path;

    fn open(name: &str) -> Checkpoint {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn layers(checkpoint: &Checkpoint, shares: &[f64]) -> Vec<Range<u32>> {
        let devices: Vec<StageDevice> = shares.iter().copied().map(StageDevice::of_share).collect();
        of_devices(checkpoint, Counted::Held, &devices).unwrap()
    }

    fn of_devices(
        checkpoint: &Checkpoint,
        counted: Counted,
        devices: &[StageDevice],
    ) -> Result<Vec<Range<u32>>, CannotDivide> {
        let stages = divide(&checkpoint.config, checkpoint.weights(), counted, devices)?;
        Ok(stages.into_iter().map(|stage| stage.layers).collect())
    }

    /// Divides layers of 100 bytes, behind an embedding of `embed` rows of four bytes and before an LM head of `head` bytes. Returns
    /// the number of layers of each device.
    fn counts(
        (layers, embed, head): (u32, u32, u32),
        counted: Counted,
        devices: &[StageDevice],
    ) -> Result<Vec<usize>, CannotDivide> {
        let checkpoint = open("moe-top1");
        let vector = checkpoint.weights().iter().find(|weight| weight.cols == 1).expect("a vector").clone();
        let each = (0..layers).map(|layer| (format!("layers.{layer}.o"), 25));
        let outside = [("embed".to_owned(), embed), ("lm_head".to_owned(), head / 4)];
        let spec = |(name, rows): (String, u32)| WeightSpec { merged: name.clone(), name, rows, ..vector.clone() };
        let weights: Vec<WeightSpec> = each.chain(outside).map(spec).collect();
        let kinds = vec![LayerKind::Attention; layers as usize];
        let config = ModelConfig {
            layers,
            layer_kinds: kinds,
            cache_of: (0..layers).collect(),
            tied: false,
            ..checkpoint.config
        };
        let stages = divide(&config, &weights, counted, devices)?;
        assert_eq!((stages[0].layers.start, stages[stages.len() - 1].layers.end), (0, layers));
        assert!(stages.windows(2).all(|pair| pair[0].layers.end == pair[1].layers.start), "{stages:?}");
        Ok(stages.iter().map(|stage| stage.layers.len()).collect())
    }

    #[test]
    fn the_slowest_stage_is_as_fast_as_possible() {
        let counts = |sizes, shares: &[f64]| {
            let devices: Vec<StageDevice> = shares.iter().copied().map(StageDevice::of_share).collect();
            counts(sizes, Counted::Read, &devices).expect("there is a division")
        };
        // An odd number of layers, and the LM head in place of a layer.
        assert_eq!(counts((5, 10, 0), &[1.0, 1.0]), [2, 3]);
        assert_eq!(counts((5, 10, 100), &[1.0, 1.0]), [3, 2]);
        // A fast device and a slow one, in both orders; a very slow one gets a layer.
        assert_eq!(counts((8, 10, 0), &[3.0, 1.0]), [6, 2]);
        assert_eq!(counts((8, 10, 0), &[1.0, 3.0]), [2, 6]);
        assert_eq!(counts((8, 10, 0), &[1e12, 1.0]), [7, 1]);
        assert_eq!(counts((10, 10, 0), &[1.0, 2.0, 2.0]), [2, 4, 4]);
        // An LM head larger than a layer: the last device has a single layer, the others as many as each other.
        assert_eq!(counts((4, 10, 400), &[1.0, 1.0]), [3, 1]);
        assert_eq!(counts((6, 10, 400), &[1.0, 1.0, 1.0]), [2, 3, 1]);
    }

    #[test]
    fn memory_bounds_the_stage_of_a_fast_device() {
        let of = |share, room| StageDevice { room: Some(room), ..StageDevice::of_share(share) };
        let counts = |devices: &[StageDevice]| counts((8, 10, 0), Counted::Read, devices);
        assert_eq!(counts(&[of(3.0, 640), of(1.0, 800)]).unwrap(), [6, 2]);
        assert_eq!(counts(&[of(3.0, 400), of(1.0, 800)]).unwrap(), [3, 5]);
        // Three devices: what the first has no room for goes to the next fastest.
        assert_eq!(counts(&[of(3.0, 240), of(1.0, 800), of(3.0, 800)]).unwrap(), [2, 1, 5]);
        let error = counts(&[of(3.0, 400), of(1.0, 300)]).unwrap_err();
        assert_eq!(error, CannotDivide::NoRoom { held: 840, room: 700, devices: 2 });
        assert_eq!(error.to_string(), "its weights of 840 B have no place, layer by layer, in the 700 B of 2 devices");
    }

    #[test]
    fn the_embedding_counts_as_held_and_a_draft_model_beside_its_stage() {
        let equal = [StageDevice::of_share(1.0); 2];
        assert_eq!(counts((4, 100, 0), Counted::Held, &equal).unwrap(), [1, 3]);
        assert_eq!(counts((4, 100, 0), Counted::Read, &equal).unwrap(), [2, 2]);
        let drafting = [equal[0], StageDevice { further: 200, ..equal[1] }];
        assert_eq!(counts((4, 10, 0), Counted::Read, &drafting).unwrap(), [3, 1]);
    }

    /// Goal: what the stages read together is what a token reads of the whole model: one row of the embedding, the chosen
    /// experts, the LM head once.
    #[test]
    fn stages_read_what_a_token_reads() {
        for name in ["moe-top1", "qwen3-deep", "families/gemma4-shared"] {
            let checkpoint = open(name);
            let (config, weights) = (&checkpoint.config, checkpoint.weights_without_mtp());
            let stages = divide(config, weights, Counted::Read, &[StageDevice::of_share(1.0); 2]).unwrap();
            let sum = |counted| stages.iter().map(|stage| stage_bytes(config, weights, stage, counted)).sum::<u64>();
            assert_eq!(sum(Counted::Read), checkpoint.bytes_per_token(), "{name}");
            let sizes = StageSizes::of(config, weights);
            for stage in &stages {
                let Bytes { held, read } = sizes.size(stage.layers.start, stage.layers.end);
                let of = |counted| stage_bytes(config, weights, stage, counted);
                assert_eq!((held, read), (of(Counted::Held), of(Counted::Read)), "{name}");
            }
        }
    }

    #[test]
    fn stages_hold_each_layer_once_and_both_ends_what_they_need() {
        for name in ["qwen3-deep", "hybrid-two", "families/gemma4-shared", "families/gemma3-wrapped"] {
            let checkpoint = open(name);
            let devices = [StageDevice::of_share(1.0); 2];
            let stages = divide(&checkpoint.config, checkpoint.weights(), Counted::Held, &devices).unwrap();
            assert!(stages[0].is_first() && !stages[0].is_last() && stages[1].is_last() && !stages[1].is_first());
            assert_eq!(stages[0].layers.end, stages[1].layers.start, "{name}");
            let held: Vec<Vec<WeightSpec>> =
                stages.iter().map(|stage| stage.weights(&checkpoint.config, checkpoint.weights())).collect();
            for weight in checkpoint.weights() {
                let holders = held.iter().filter(|held| held.contains(weight)).count();
                let both = weight.name == "embed" && (checkpoint.config.tied || checkpoint.has_mtp());
                assert_eq!(holders, if both { 2 } else { 1 }, "{name}: {}", weight.name);
            }
            assert!(held[0].iter().any(|weight| weight.name == "embed"), "{name}");
            assert!(held[1].iter().any(|weight| weight.name == "final_norm"), "{name}");
        }
    }

    /// Goal: the devices' rows of an LM head are all of its rows, each once, in whole multiples; a tied one stays whole, and what
    /// follows the logits is on the last device.
    #[test]
    fn the_vocabulary_is_divided_in_whole_multiples() {
        for (name, of) in [("moe-top1", 2), ("moe-top1", 3), ("quantised/ct-mixed", 4), ("qwen3-deep", 2)] {
            let checkpoint = open(name);
            let config = &checkpoint.config;
            let columns = divide_vocabulary(config, of).expect("there are enough rows");
            let (mut end, mut rows) = (0, 0);
            for index in 0..of {
                let stage = LayerStage::of_rank(config, Rank { index, of }, Some(columns));
                let (.., own) = stage.own_vocabulary().expect("it is divided");
                assert!(own.start == end && own.start.is_multiple_of(16) && !own.is_empty(), "{name}: {own:?}");
                assert!(own.len() as u32 <= columns.most(of) && stage.has_logits(), "{name}: {own:?}");
                end = own.end;
                let weights = stage.weights(config, checkpoint.weights_without_mtp());
                let heads: Vec<&WeightSpec> = weights.iter().filter(|weight| weight.merged == "lm_head").collect();
                assert_eq!(heads.is_empty(), config.tied, "{name}");
                rows += heads.iter().map(|head| head.rows).sum::<u32>();
                let covered: u32 = heads.iter().flat_map(|head| &head.sources).map(|source| source.map.rows).sum();
                assert_eq!(covered, heads.iter().map(|head| head.rows).sum::<u32>(), "{name}");
                let holds = |name: &str| weights.iter().any(|weight| weight.name == name);
                assert!(holds("embed") && holds("final_norm"), "{name}");
            }
            assert_eq!((end, rows), (config.vocab, if config.tied { 0 } else { config.vocab }), "{name}");
            let whole = LayerStage::of_rank(config, Rank { index: 0, of }, None);
            assert!(
                !whole.has_logits()
                    && !whole.weights(config, checkpoint.weights()).iter().any(|w| w.name == "final_norm")
            );
        }
        let large = ModelConfig { vocab: 151_936, ..open("moe-top1").config };
        assert_eq!(divide_vocabulary(&large, 2), Some(Columns { count: 151_936, unit: 256 }));
        assert_eq!(divide_vocabulary(&ModelConfig { vocab: 48, ..large }, 4), None);
    }

    #[test]
    fn shares_move_the_cut_and_no_stage_is_empty() {
        let checkpoint = open("qwen3-deep");
        assert_eq!(layers(&checkpoint, &[1e9, 1.0]), [0..4, 4..5]);
        assert_eq!(layers(&checkpoint, &[1.0, 1e9]), [0..1, 1..5]);
        assert_eq!(layers(&checkpoint, &[1.0; 5]), [0..1, 1..2, 2..3, 3..4, 4..5]);
        let error = of_devices(&checkpoint, Counted::Held, &[StageDevice::of_share(1.0); 6]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "split over 6 devices is asked for, its 5 layers can be divided in at most 5 parts"
        );
    }

    #[test]
    fn layers_that_read_the_keys_of_others_stay_with_them() {
        let checkpoint = open("families/gemma4-shared");
        let config = &checkpoint.config;
        for shares in [[1.0, 1.0], [1e9, 1.0], [1.0, 1e9]] {
            let found = layers(&checkpoint, &shares);
            for layer in 0..config.layers {
                let of = |layer: u32| found.iter().position(|layers| layers.contains(&layer));
                assert_eq!(of(layer), of(config.cache_of[layer as usize]), "layer {layer} in {found:?}");
            }
        }
        let error = of_devices(&checkpoint, Counted::Held, &[StageDevice::of_share(1.0); 5]).unwrap_err().to_string();
        assert!(error.ends_with(": layers that read another layer's keys and values stay with it"), "{error}");
    }
}
