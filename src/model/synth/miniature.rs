//! A small model with random weights that has the kinds of layers, the shapes of heads and the formats of weights of
//! another model. The test at start (`gpu::build::reference_test`) compares a device's results for it with those of plain
//! Rust.

use super::tensors::{Distribution, tensors_of};
use crate::memory::pack::{self, Format, Packing, RowMap, Rows, SourceFormat, codes};
use crate::model::checkpoint::{Checkpoint, CheckpointError, WeightKind, WeightSpec};
use crate::model::config::{
    Attention, DeltaNet, Experts, Latent, LayerInputs, LayerKind, ModelConfig, NormedHeads, ShortConv, StateSpace,
};
use crate::model::split_mix::{GAMMA, mix, split_mix};
use std::collections::{BTreeMap, BTreeSet};

/// The width of the residual stream: whole groups of columns in every format of codes.
const HIDDEN: u32 = 256;
/// The intermediate size of dense MLPs.
const INTERMEDIATE: u32 = 512;
/// The intermediate size of an expert.
const EXPERT_INNER: u32 = 256;
/// The number of tokens in the vocabulary.
const VOCABULARY: u32 = 512;
/// The number of key heads of attention and of recurrent layers.
const KEY_HEADS: u32 = 2;
/// The number of heads of latent attention, whose key is shared by all of them.
const LATENT_HEADS: u32 = 8;
/// The number of routed experts, and how many there are at least for each that is chosen.
const EXPERTS: (u32, u32) = (32, 2);
/// The window of layers with a sliding window, in tokens: shorter than the test's prompt.
const WINDOW: u32 = 24;
/// The width of inputs of a layer that depend on the token, and the rank of latent queries.
const INPUTS: u32 = 128;
/// The rows of a matrix of which one format ends and another begins are a multiple of this.
const RANGE_ROWS: u32 = 32;

/// A small model like another one.
#[derive(Clone, Debug)]
pub struct Miniature {
    /// Its configuration.
    pub config: ModelConfig,
    /// Its packed weights. Their sources have no data: [`Miniature::words`] returns it.
    pub weights: Vec<WeightSpec>,
    distributions: BTreeMap<String, Distribution>,
}

impl Miniature {
    /// Creates a small model with a layer of each kind that a model of this configuration and with these weights has.
    ///
    /// # Errors
    /// If the tensors of such a model are not known.
    pub fn of(config: &ModelConfig, weights: &[WeightSpec]) -> Result<Miniature, CheckpointError> {
        let layers = chosen_layers(config, weights);
        let small = shrunk(config, &layers);
        let tensors = tensors_of(&small, "model.");
        let shapes = tensors.iter().map(|(name, shape, _)| (name.clone(), shape.clone()));
        let plain = Checkpoint::weights_of_shapes(&small, shapes)?;
        let weights = plain.iter().flat_map(|spec| with_formats(spec, &layers, weights)).collect();
        let distributions = tensors.into_iter().map(|(name, _, distribution)| (name, distribution)).collect();
        Ok(Miniature { config: small, weights, distributions })
    }

    /// Returns the words of a weight in a packing, all of it.
    pub fn words(&self, spec: &WeightSpec, packing: &Packing) -> Vec<u32> {
        let mut state = spec.name.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)).wrapping_add(GAMMA));
        let of = |tensor: &str| {
            self.distributions.get(tensor).copied().unwrap_or(Distribution::Normal { mean: 0.0, deviation: 0.1 })
        };
        let first = spec.sources.first().map_or("", |source| &source.tensor);
        if let (Format::Codes(codes), Distribution::Normal { deviation, .. }) = (packing.format, of(first)) {
            let size = (packing.rows, packing.cols);
            return codes::random(codes, packing.layout, size, deviation, &mut || split_mix(&mut state));
        }
        let mut numbers = |distribution: Distribution, count: usize| -> Vec<u8> {
            (0..count).flat_map(|_| draw(distribution, &mut state).to_le_bytes()).collect()
        };
        let data: Vec<(RowMap, Vec<u8>)> = match spec.kind {
            WeightKind::Matrix => {
                let map = RowMap::whole(SourceFormat::Numbers(Format::F32), spec.rows, spec.cols);
                vec![(map, numbers(of(first), spec.elements() as usize))]
            }
            WeightKind::Vector => {
                let read = spec
                    .sources
                    .iter()
                    .map(|source| (source.map, numbers(of(&source.tensor), (source.map.bytes() / 4) as usize)));
                read.collect()
            }
        };
        let rows: Vec<Rows<'_>> = data.iter().map(|(map, bytes)| Rows { bytes, map: *map }).collect();
        let mut out = vec![0; packing.bytes() as usize];
        pack::pack(packing, &rows, 0..packing.bytes(), &mut out).expect("the numbers are finite");
        out.resize(out.len().next_multiple_of(4), 0);
        let words = out.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        let factor = if spec.name.ends_with(".q_norm") { self.query_factor(&spec.name) } else { 1.0 };
        words.map(|word| if factor == 1.0 { word } else { (f32::from_bits(word) * factor).to_bits() }).collect()
    }

    /// Returns a factor of the norm of a layer's queries that keeps attention scores near 1. With larger ones, attention
    /// picks single tokens, and rounding decides which: a trained model's norms are small there.
    fn query_factor(&self, name: &str) -> f32 {
        let layer = name.strip_prefix("layers.").and_then(|name| name.split('.').next()?.parse().ok()).unwrap_or(0);
        let scale = self.config.score_scale.unwrap_or(0.0);
        (1.0 / (scale * (self.config.attention(layer).head_dim as f32).sqrt())).min(1.0)
    }
}

/// Returns a random number of a distribution.
fn draw(distribution: Distribution, state: &mut u64) -> f32 {
    let mut uniform = || (split_mix(state) >> 40) as f32 / 2f32.powi(24);
    match distribution {
        // The sum of four uniform numbers is near enough to a normal distribution; its variance is a third.
        Distribution::Normal { mean, deviation } => {
            let sum: f32 = (0..4).map(|_| uniform() - 0.5).sum();
            mean + deviation * sum * 3f32.sqrt()
        }
        Distribution::LogOfUniform { low, high } => (low + (high - low) * uniform()).ln(),
    }
}

/// Returns the layers of a model of which each has something that those before it lack: a kind of layer, or a format of a
/// weight. Layers that read the keys and values of another follow that one.
fn chosen_layers(config: &ModelConfig, weights: &[WeightSpec]) -> Vec<u32> {
    let mut formats: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for weight in weights {
        let of_layer = weight.merged.strip_prefix("layers.").and_then(|name| name.split_once('.'));
        let Some((layer, name)) = of_layer.and_then(|(layer, name)| Some((layer.parse().ok()?, name))) else {
            continue;
        };
        let kind = format!("{name} {:?} {}", weight.format, weight.order.is_some());
        formats.entry(layer).or_default().insert(kind);
    }
    let mut seen = BTreeSet::new();
    let mut chosen = BTreeSet::new();
    for layer in 0..config.layers {
        let at = layer as usize;
        let kind = (config.layer_kinds[at], config.mlp_kinds[at]);
        let own = config.owns_cache(layer);
        let mut found = formats.remove(&layer).unwrap_or_default();
        found.insert(format!("{kind:?} {} {own} {}", config.attention_of[at], config.dense_widths[at] == 0));
        if found.iter().any(|of| !seen.contains(of)) {
            chosen.insert(layer);
            if config.layer_kinds[at] == LayerKind::Attention {
                chosen.insert(config.cache_of[at]);
            }
        }
        seen.append(&mut found);
    }
    chosen.into_iter().collect()
}

/// Returns the configuration of a small model that consists of these layers of another.
fn shrunk(c: &ModelConfig, layers: &[u32]) -> ModelConfig {
    fn of<T: Clone>(all: &[T], layers: &[u32]) -> Vec<T> {
        layers.iter().map(|layer| all[*layer as usize].clone()).collect()
    }
    let intermediate = |width: u32| width.min(INTERMEDIATE);
    let attention = |kind: &Attention| {
        let group = kind.heads / kind.kv_heads;
        let kv_heads = match c.latent {
            Some(_) => kind.kv_heads.min(LATENT_HEADS),
            None => kind.kv_heads.min(KEY_HEADS),
        };
        let group = if c.latent.is_some() { group.min(LATENT_HEADS) } else { group };
        let window = kind.window.map(|window| window.min(WINDOW));
        let normed_with = NormedHeads::default();
        Attention { heads: group * kv_heads, kv_heads, window, normed_with, ..kind.clone() }
    };
    let place = |layer: u32| layers.iter().position(|other| *other == layer).unwrap_or(0) as u32;
    let experts = |of: Experts| {
        let groups = of.routing.map_or(1, |routing| routing.groups.max(1));
        let count = EXPERTS.0.max(EXPERTS.1 * of.chosen).next_multiple_of(groups).min(of.count);
        let shared_inner = of.shared_inner.map(|inner| inner.min(EXPERT_INNER));
        Experts { count, inner: of.inner.min(EXPERT_INNER), shared_inner, ..of }
    };
    let delta = |net: DeltaNet| {
        let key_heads = net.key_heads.min(KEY_HEADS);
        // Either all heads are normed together, or those of each key head.
        let space = net.space.map(|space| StateSpace { norm_groups: space.norm_groups.min(key_heads), ..space });
        DeltaNet { key_heads, value_heads: net.value_heads / net.key_heads * key_heads, space, ..net }
    };
    let short_conv = |conv: ShortConv| ShortConv { channels: conv.channels.min(HIDDEN), ..conv };
    let vocab = c.vocab.min(VOCABULARY);
    ModelConfig {
        hidden: c.hidden.min(HIDDEN),
        intermediate: intermediate(c.intermediate),
        dense_widths: of(&c.dense_widths, layers).into_iter().map(intermediate).collect(),
        layers: layers.len() as u32,
        attention_kinds: c.attention_kinds.iter().map(attention).collect(),
        attention_of: of(&c.attention_of, layers),
        latent: c.latent.map(|of| Latent { q_rank: of.q_rank.map(|rank| rank.min(INPUTS)), ..of }),
        cache_of: of(&c.cache_of, layers).into_iter().map(place).collect(),
        vocab,
        layer_inputs: c.layer_inputs.map(|of| LayerInputs { width: of.width.min(INPUTS), vocab, ..of }),
        layer_kinds: of(&c.layer_kinds, layers),
        mlp_kinds: of(&c.mlp_kinds, layers),
        delta: c.delta.map(delta),
        short_conv: c.short_conv.map(short_conv),
        experts: c.experts.map(experts),
        mtp_layers: 0,
        mtp_attention: 0,
        mtp_width: 0,
        mtp_experts: None,
        eos: Vec::new(),
        bos: None,
        ..c.clone()
    }
}

/// Returns the ranges of rows of a weight of the small model, in the formats that the model `weights` has for it.
fn with_formats(spec: &WeightSpec, layers: &[u32], weights: &[WeightSpec]) -> Vec<WeightSpec> {
    let of_layer = spec.name.strip_prefix("layers.").and_then(|name| name.split_once('.'));
    let prefix = of_layer
        .and_then(|(layer, _)| layer.parse().ok())
        .map(|layer: u32| (format!("layers.{layer}."), format!("layers.{}.", layers[layer as usize])));
    let like = match &prefix {
        Some((own, other)) => spec.name.replacen(own, other, 1),
        None => spec.name.clone(),
    };
    let ranges: Vec<&WeightSpec> = weights.iter().filter(|weight| weight.merged == like).collect();
    let count = ranges.len().min((spec.rows / RANGE_ROWS) as usize).max(1);
    let each = spec.rows / count as u32 / RANGE_ROWS * RANGE_ROWS;
    let mut first_row = 0;
    let mut found = Vec::new();
    for (index, range) in ranges.into_iter().take(count).enumerate() {
        let rows = if index + 1 == count { spec.rows - first_row } else { each };
        let name = match &prefix {
            Some((own, other)) => range.name.replacen(other, own, 1),
            None => range.name.clone(),
        };
        let order = range.order.is_some().then(|| (0..spec.cols).rev().collect());
        found.push(WeightSpec { name, first_row, rows, order, format: range.format, ..spec.clone() });
        first_row += rows;
    }
    // Empty where the model has no such weight.
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pack::Layout;
    use crate::model::synth::{PRESETS, preset};

    /// The sizes of Nemotron 3 Nano 30B-A3B, with fewer layers: more groups of state spaces than a miniature has.
    const NEMOTRON: &str = r#"{
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688, "vocab_size": 131072,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hybrid_override_pattern": "MEM*E-",
        "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712 }"#;

    #[test]
    fn every_built_in_shape_has_a_miniature() {
        let built_in = PRESETS.map(|(name, _)| (name, preset(name).expect("a built-in shape")));
        let further = [("nemotron", NEMOTRON.to_owned())];
        for (name, config) in built_in.into_iter().chain(further) {
            let config = ModelConfig::parse(&config, None).expect("valid");
            let tensors = tensors_of(&config, "model.").into_iter().map(|(name, shape, _)| (name, shape));
            let weights = Checkpoint::weights_of_shapes(&config, tensors).expect("all tensors");
            let small = Miniature::of(&config, &weights).unwrap_or_else(|error| panic!("{name}: {error}"));
            let names: BTreeSet<&str> = small.weights.iter().map(|weight| weight.name.as_str()).collect();
            assert_eq!(names.len(), small.weights.len(), "{name}");
            let parameters: u64 = small.weights.iter().map(WeightSpec::elements).sum();
            assert!(parameters < 20 << 20, "{name}: {parameters} parameters");
            let divides = |net: DeltaNet| {
                let groups = net.space.map_or(1, |space| space.norm_groups);
                groups <= net.key_heads && net.value_heads.is_multiple_of(groups)
            };
            assert!(small.config.delta.is_none_or(divides), "{name}: {:?}", small.config.delta);
        }
    }

    #[test]
    fn weights_have_the_deviation_of_their_tensor() {
        let config = ModelConfig::parse(&preset("qwen3-0.6b").expect("a built-in shape"), None).expect("valid");
        let tensors = tensors_of(&config, "model.").into_iter().map(|(name, shape, _)| (name, shape));
        let weights = Checkpoint::weights_of_shapes(&config, tensors).expect("all tensors");
        let small = Miniature::of(&config, &weights).expect("known tensors");
        let down = small.weights.iter().find(|weight| weight.name == "layers.0.down").expect("an MLP");
        let layout = Layout::RowMajor { columns_multiple: 8 };
        let packing = Packing { rows: down.rows, cols: down.cols, layout, format: Format::F32 };
        let numbers: Vec<f32> = small.words(down, &packing).into_iter().map(f32::from_bits).collect();
        let square = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
        let wanted = 1.0 / down.cols as f32;
        assert!((square / wanted - 1.0).abs() < 0.02, "{square} instead of {wanted}");
    }
}
