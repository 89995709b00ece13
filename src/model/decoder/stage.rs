//! Stages: the consecutive layers of a model that one of several devices computes, and the division of a model into
//! stages.
//!
//! Not here: devices, and how activations pass from one to the next.

use super::{Decoder, StepShape, TAGGED};
use crate::kernels::exchange::{Columns, Rank};
use crate::kernels::recording::Recording;
use crate::kernels::{embed, sampling, tags};
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

/// A model has fewer places where it can be divided than devices ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "split over {asked} devices is asked for, its {layers} layers can be divided in at most {most} parts{}",
    if *.most < *.layers { ": layers that read another layer's keys and values stay with it" } else { "" }
)]
pub struct TooManyStages {
    /// The number of devices.
    pub asked: usize,
    /// The number of layers.
    pub layers: u32,
    /// The maximum number of stages.
    pub most: u32,
}

/// Divides a model into one stage per share. The greatest ratio of a stage's weight bytes (embedding and LM head
/// included) to its share is as small as possible.
///
/// # Panics
/// If there is no share, or one is not above 0.
pub fn divide(config: &ModelConfig, weights: &[WeightSpec], shares: &[f64]) -> Result<Vec<LayerStage>, TooManyStages> {
    assert!(!shares.is_empty() && shares.iter().all(|share| *share > 0.0), "shares {shares:?}");
    let layers = config.layers;
    let reads_before = |cut: u32| {
        config.layers_of(LayerKind::Attention).any(|layer| layer >= cut && config.cache_of[layer as usize] < cut)
    };
    // The first layers of possible stages, and the end.
    let cuts: Vec<u32> = (0..=layers).filter(|cut| *cut == 0 || *cut == layers || !reads_before(*cut)).collect();
    let most = cuts.len() as u32 - 1;
    if shares.len() > most as usize {
        return Err(TooManyStages { asked: shares.len(), layers, most });
    }
    let bytes = |from: u32, to: u32| -> f64 {
        let stage =
            LayerStage { layers: from..to, of: layers, stages: shares.len() as u32, rank: None, vocabulary: None };
        stage.weights(config, weights).iter().map(|weight| weight.bytes() as f64).sum()
    };
    // `sums[i]` is the number of bytes of layers before `i`; what is outside of layers is added at the ends.
    let of_layer = |layer: u32| -> f64 {
        weights.iter().filter(|weight| layer_of(weight) == Some(layer)).map(|weight| weight.bytes() as f64).sum()
    };
    let mut sums = vec![0.0];
    for layer in 0..layers {
        sums.push(sums[layer as usize] + of_layer(layer));
    }
    let inner = |from: u32, to: u32| sums[to as usize] - sums[from as usize];
    let size = |from: u32, to: u32| if from == 0 || to == layers { bytes(from, to) } else { inner(from, to) };
    // `best[at]`: the least greatest ratio with which the stages so far end at `cuts[at]`, and where the last begins.
    let mut best: Vec<Vec<Option<(f64, usize)>>> = vec![vec![None; cuts.len()]];
    best[0][0] = Some((0.0, 0));
    for share in shares {
        let before = best.last().expect("it begins with one");
        let ends = (0..cuts.len()).map(|end| {
            let ratio = |begin: usize| {
                let (so_far, _) = before[begin]?;
                Some((f64::max(so_far, size(cuts[begin], cuts[end]) / share), begin))
            };
            (0..end).filter_map(ratio).min_by(|a, b| a.0.total_cmp(&b.0))
        });
        let ends = ends.collect();
        best.push(ends);
    }
    let mut stages = Vec::new();
    let mut end = cuts.len() - 1;
    for stage in (1..=shares.len()).rev() {
        let (_, begin) = best[stage][end].expect("there are enough places to cut");
        let layers_of_stage = cuts[begin]..cuts[end];
        let stages_of = shares.len() as u32;
        stages.push(LayerStage {
            layers: layers_of_stage,
            of: layers,
            stages: stages_of,
            rank: None,
            vocabulary: None,
        });
        end = begin;
    }
    stages.reverse();
    Ok(stages)
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
        let stages = divide(&checkpoint.config, checkpoint.weights(), shares).unwrap();
        stages.into_iter().map(|stage| stage.layers).collect()
    }

    #[test]
    fn stages_hold_each_layer_once_and_both_ends_what_they_need() {
        for name in ["qwen3-deep", "hybrid-two", "families/gemma4-shared", "families/gemma3-wrapped"] {
            let checkpoint = open(name);
            let stages = divide(&checkpoint.config, checkpoint.weights(), &[1.0, 1.0]).unwrap();
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
        let error = divide(&checkpoint.config, checkpoint.weights(), &[1.0; 6]).unwrap_err();
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
        let error = divide(config, checkpoint.weights(), &[1.0; 5]).unwrap_err().to_string();
        assert!(error.ends_with(": layers that read another layer's keys and values stay with it"), "{error}");
    }
}
