//! The features of model families beyond Llama's, in metadata keys and in keys of config.json: sliding windows,
//! constant factors, bounds. Also the metadata keys that are refused because a family has nothing of the kind.

use serde_json::{Value as Json, json};

use super::super::container::{Array, Value};
use super::GgufArchitecture::{
    self, DeepSeek2, Dots1, Ernie45, Ernie45Moe, Exaone4, Gemma2, Gemma3, Gemma4, GemmaEmbedding, Glm4, Glm4Moe,
    GptOss, Granite, GraniteHybrid, GraniteMoe, HunYuanDense, HunYuanMoe, Lfm2, Lfm2Moe, MiniMaxM2, Mistral3,
    NemotronH, NemotronHMoe, Olmo2, Olmoe, Phi3, Qwen2Vl, Qwen3Vl, Qwen3VlMoe, SeedOss, SmolLm3,
};
use super::experts::{NOT_STATED, SCORES, SOFTMAX, SOFTMAX_OF_CHOSEN};
use super::{
    GgufBlock, GgufConfigError, GgufFullHeads, GgufLatent, GgufModel, GgufRope, GgufRouting, GgufSpace, GgufWindow,
    Keys, LAYER_INPUTS, LONG_ROPE_FACTORS, MAX_LAYERS, MAX_SIZE,
};

/// A key that changes the computation: the key, the value that changes nothing, what it means, and the families that
/// understand it. 0 stands for "not used" in all of these keys.
type Foreign = (&'static str, f64, &'static str, &'static [GgufArchitecture]);

/// The families whose layers may have a sliding window.
const WITH_WINDOWS: [GgufArchitecture; 8] = [Gemma2, Gemma3, GemmaEmbedding, Gemma4, GptOss, Phi3, Olmo2, Exaone4];

/// The families with Granite's factors.
const GRANITES: [GgufArchitecture; 3] = [Granite, GraniteMoe, GraniteHybrid];

const FOREIGN: [Foreign; 21] = [
    ("attention.sliding_window", 0.0, "sliding-window attention", &WITH_WINDOWS),
    ("attention.clamp_kqv", 0.0, "clamped queries, keys and values", &[]),
    ("attention.max_alibi_bias", 0.0, "ALiBi", &[]),
    ("attention.scale", 0.0, "a scale of attention", &GRANITES),
    ("attention.temperature_scale", 0.0, "a temperature of attention", &[Mistral3]),
    ("attention.temperature_length", 0.0, "a temperature of attention", &[]),
    ("attention.shared_kv_layers", 0.0, "keys and values that layers share", &[Gemma4]),
    ("attn_logit_softcapping", 0.0, "softcapping", &[Gemma2]),
    ("final_logit_softcapping", 0.0, "softcapping", &[Gemma2, Gemma3, GemmaEmbedding, Gemma4]),
    ("router_logit_softcapping", 0.0, "softcapping", &[]),
    ("logit_scale", 1.0, "a scale of the logits", &GRANITES),
    ("residual_scale", 1.0, "a scale of the residual stream", &GRANITES),
    ("embedding_scale", 1.0, "a scale of the embedding", &GRANITES),
    ("expert_group_count", 1.0, "groups of experts", &[DeepSeek2, Glm4Moe, Dots1, NemotronHMoe]),
    ("expert_weights_scale", 1.0, "a scale of the experts' weights", &[DeepSeek2, Glm4Moe, Dots1, NemotronHMoe]),
    ("moe_latent_size", 0.0, "experts of a latent vector", &[]),
    ("leading_dense_block_count", 0.0, "leading dense layers", &[DeepSeek2, Glm4Moe, Dots1, Ernie45Moe, Lfm2Moe]),
    ("interleave_moe_layer_step", 1.0, "dense layers between those with experts", &[Ernie45Moe]),
    ("embedding_length_per_layer_input", 0.0, "inputs of layers", &[Gemma4]),
    ("rope.scaling.yarn_log_multiplier", 0.0, "a multiplier of YaRN's attention factor", &[Mistral3, DeepSeek2]),
    ("rope.scaling.yarn_ext_factor", 1.0, "a factor of YaRN's extrapolation", &[]),
];

/// The window's pattern over the layers: a list of truth values, or n if every n-th layer has no window.
const PATTERN: &str = "attention.sliding_window_pattern";

/// The factor of the coefficient in `rope.scaling.yarn_log_multiplier` in files of DeepSeek's families.
const YARN_LOG: f64 = 0.1;

impl Keys<'_> {
    /// Refuses keys that change the computation in a way that the family does not have.
    pub(super) fn refuse_foreign(&self) -> Result<(), GgufConfigError> {
        for (key, neutral, what, known) in FOREIGN {
            match self.get(key).filter(|_| !known.contains(&self.architecture)) {
                None => {}
                Some(value) if value.number().is_some_and(|n| n == neutral || n == 0.0) => {}
                Some(value) => return Err(self.unsupported(key, value, what)),
            }
        }
        match (self.get("attention.causal"), self.architecture) {
            (None, _) | (Some(Value::Bool(false)), GemmaEmbedding) => {}
            (Some(value), GemmaEmbedding) => return Err(self.wrong("attention.causal", value, "false")),
            (Some(Value::Bool(true)), _) => {}
            (Some(value), _) => return Err(self.unsupported("attention.causal", value, "attention to later tokens")),
        }
        match self.get(SCORES).filter(|_| !self.architecture.states_routing()) {
            None => {}
            Some(value) if value.unsigned().is_some_and(|n| [NOT_STATED, SOFTMAX].contains(&n)) => {}
            Some(value) if self.architecture == GptOss && value.unsigned() == Some(SOFTMAX_OF_CHOSEN) => {}
            Some(value) => return Err(self.unsupported(SCORES, value, "a router without softmax")),
        }
        if let (Granite | GraniteMoe, Some(value @ Value::Bool(false))) =
            (self.architecture, self.get("rope.scaling.finetuned"))
        {
            return Err(self.unsupported("rope.scaling.finetuned", value, "no rotary embedding"));
        }
        // With it, the rows of queries and keys are in another order.
        if let (Glm4, Some(value)) = (self.architecture, self.get("rope.dimension_sections")) {
            return Err(self.unsupported("rope.dimension_sections", value, "positions in several dimensions"));
        }
        match (self.get("expert_count"), self.architecture.may_have_experts()) {
            (Some(value), false) if value.unsigned() != Some(0) => {
                Err(self.unsupported("expert_count", value, "experts in this architecture"))
            }
            _ => Ok(()),
        }
    }

    /// Reads a number that 0 turns off, which is `default` if the key is absent.
    pub(super) fn optional(&self, key: &str, default: Option<f64>) -> Result<Option<f64>, GgufConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) if value.number() == Some(0.0) => Ok(None),
            Some(_) => self.number(key),
        }
    }
}

/// Reads which layers have a sliding window. `theta` is the base of the other layers' rotary frequencies.
pub(super) fn window(keys: &Keys<'_>, layers: u64, theta: f64) -> Result<Option<GgufWindow>, GgufConfigError> {
    // The window if the key is absent.
    let default = match keys.architecture {
        Gemma2 => 4096,
        // The largest model, which has this number of layers, is the only published one with a window.
        Exaone4 if layers == 64 => 4096,
        Gemma3 | GemmaEmbedding | Gemma4 | GptOss | Olmo2 | Phi3 | Exaone4 => 0,
        _ => return Ok(None),
    };
    let key = "attention.sliding_window";
    let tokens = match keys.get(key) {
        None if [GptOss, Gemma4, GemmaEmbedding].contains(&keys.architecture) => return Err(keys.missing(key)),
        // Layers without a window have other heads, so that it cannot be left out.
        Some(value) if keys.architecture == Gemma4 && keys.size_or_zero(key, MAX_SIZE)? == 0 => {
            return Err(keys.wrong(key, value, format!("an integer from 1 to {MAX_SIZE}")));
        }
        None => default,
        Some(_) => keys.size_or_zero(key, MAX_SIZE)?,
    };
    if tokens == 0 {
        return Ok(None);
    }
    let layers = pattern(keys, layers)?;
    let own = keys.number("rope.freq_base_swa")?;
    let rope_theta = match keys.architecture {
        Gemma3 | GemmaEmbedding | Gemma4 => Some(own.unwrap_or(10_000.0)),
        Olmo2 => Some(own.unwrap_or(theta)),
        _ => match (own, keys.get("rope.freq_base_swa")) {
            (Some(own), Some(value)) if own != theta => {
                let what = "a rotary embedding of the layers with a window";
                return Err(keys.unsupported("rope.freq_base_swa", value, what));
            }
            _ => None,
        },
    };
    Ok(Some(GgufWindow { tokens, layers, rope_theta }))
}

/// Returns for each layer whether it has the window.
pub(super) fn pattern(keys: &Keys<'_>, layers: u64) -> Result<Vec<bool>, GgufConfigError> {
    // n if every n-th layer has none by default; 0 if all layers have it.
    let every = match keys.architecture {
        Gemma2 | GptOss => 2,
        Gemma3 | GemmaEmbedding => 6,
        Olmo2 | Exaone4 => 4,
        _ => 0,
    };
    let every = match keys.get(PATTERN) {
        Some(value @ Value::Array(array)) => {
            let slides = |layer: usize| match array {
                Array::Bool(flags) => Some(flags[layer]),
                other => other.unsigned(layer).map(|n| n != 0),
            };
            let flags = (array.len() as u64 >= layers)
                .then(|| (0..layers as usize).map(slides).collect::<Option<Vec<bool>>>())
                .flatten();
            return flags
                .ok_or_else(|| keys.wrong(PATTERN, value, format!("a list of at least {layers} truth values")));
        }
        Some(_) => keys.size_or_zero(PATTERN, MAX_LAYERS)?,
        None if keys.architecture == Gemma4 => return Err(keys.missing(PATTERN)),
        None => every,
    };
    Ok((1..=layers).map(|layer| every == 0 || !layer.is_multiple_of(every)).collect())
}

/// Reads the coefficient of the growth of queries with their position, for which YaRN's original context counts.
pub(super) fn query_growth(keys: &Keys<'_>) -> Result<Option<f64>, GgufConfigError> {
    if keys.architecture != Mistral3 {
        return Ok(None);
    }
    let key = "attention.temperature_scale";
    let growth = keys.optional(key, None)?;
    let yarn = keys.get("rope.scaling.type").and_then(Value::text) == Some("yarn");
    match (growth, keys.get(key)) {
        (Some(_), Some(value)) if !yarn => Err(keys.unsupported(key, value, "a temperature of attention without YaRN")),
        _ => Ok(growth),
    }
}

/// Reads the coefficients in YaRN's factor of cosines and sines, and in its divisor.
pub(super) fn mscale(keys: &Keys<'_>) -> Result<Option<[f64; 2]>, GgufConfigError> {
    let key = "rope.scaling.yarn_log_multiplier";
    Ok(match keys.architecture {
        Mistral3 => keys.optional(key, None)?.map(|below| [1.0, below]),
        // No key has the first one. It is the second one in all published models, so that the factor is 1. Files without
        // the second one are refused, because their models' scores are scaled in llama.cpp and not in transformers.
        DeepSeek2 => Some([keys.number(key)?.ok_or_else(|| keys.missing(key))? / YARN_LOG; 2]),
        _ => None,
    })
}

/// Reads what each layer is, in families whose layers are either a mixer or an MLP.
pub(super) fn blocks(keys: &Keys<'_>, layers: u64) -> Result<Option<Vec<GgufBlock>>, GgufConfigError> {
    if !keys.architecture.has_single_blocks() {
        return Ok(None);
    }
    let need = |key: &str| keys.by_layer(key, layers, 0)?.ok_or_else(|| keys.missing(key));
    let (kv_heads, widths) = (need("attention.head_count_kv")?, need("feed_forward_length")?);
    let block = |sizes: (&u64, &u64)| match sizes {
        (0, 0) => GgufBlock::StateSpace,
        (_, 0) => GgufBlock::Attention,
        _ => GgufBlock::Mlp,
    };
    Ok(Some(kv_heads.iter().zip(&widths).map(block).collect()))
}

/// Reads the epsilon of the norms.
pub(super) fn norm_eps(keys: &Keys<'_>) -> Result<f64, GgufConfigError> {
    let [key, own] = ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"];
    let eps = keys.number(key)?;
    if !keys.architecture.has_single_blocks() {
        return eps.ok_or_else(|| keys.missing(key));
    }
    // transformers goes by the key of config.json that the converter writes as the second one, llama.cpp by the first one if
    // it is present.
    match (eps, keys.number(own)?, keys.get(key), keys.get(own)) {
        (Some(eps), Some(other), Some(value), Some(others)) if eps != other => {
            Err(keys.wrong(key, value, format!("equal to {own} ({others})")))
        }
        (eps, own, ..) => eps.or(own).ok_or_else(|| keys.missing(key)),
    }
}

/// Reads the intermediate size of dense MLPs, and whether it is twice as large in the layers from `own_caches` on, which
/// have no keys and values of their own.
pub(super) fn dense_widths(
    keys: &Keys<'_>,
    layers: u64,
    own_caches: u64,
) -> Result<(Option<u64>, bool), GgufConfigError> {
    let key = "feed_forward_length";
    match keys.architecture {
        // The list has the experts' width.
        NemotronHMoe => return Ok((None, false)),
        NemotronH => return Ok((width_of_mlps(keys, layers)?, false)),
        _ if own_caches == layers => return Ok((keys.uniform(key)?, false)),
        _ => {}
    }
    let Some(widths) = keys.by_layer(key, layers, 1)? else { return Ok((None, false)) };
    let (first, others) = (widths[0], widths[own_caches as usize]);
    let expected = |layer: u64| if layer < own_caches { first } else { others };
    let odd = (0..).zip(&widths).find(|(layer, width)| **width != expected(*layer));
    match (odd, keys.get(key)) {
        (None, _) if others == first || others == 2 * first => Ok((Some(first), others != first)),
        (odd, Some(value)) => {
            let (layer, has) = odd.map_or((own_caches, others), |(layer, has)| (layer, *has));
            let rule =
                format!("{first} in all layers, or twice that from layer {own_caches} on, not {has} in layer {layer}");
            Err(keys.wrong(key, value, rule))
        }
        (_, None) => Err(keys.missing(key)),
    }
}

/// Reads the intermediate size of the layers that are MLPs, which other layers have 0 for; `None` if there are none.
fn width_of_mlps(keys: &Keys<'_>, layers: u64) -> Result<Option<u64>, GgufConfigError> {
    let key = "feed_forward_length";
    let widths = keys.by_layer(key, layers, 0)?.unwrap_or_default();
    let mut mlps = (0..).zip(&widths).filter(|(_, width)| **width > 0);
    let Some((_, first)) = mlps.next() else { return Ok(None) };
    match (mlps.find(|(_, width)| *width != first), keys.get(key)) {
        (Some((layer, other)), Some(value)) => {
            let rule = format!("{first} in all layers that are MLPs, not {other} in layer {layer}");
            Err(keys.wrong(key, value, rule))
        }
        _ => Ok(Some(*first)),
    }
}

/// Reads the width of each layer's input that depends on the token, and the rows of its table.
pub(super) fn layer_inputs(keys: &Keys<'_>) -> Result<Option<[u64; 2]>, GgufConfigError> {
    let width = match keys.architecture {
        Gemma4 => keys.size_or_zero("embedding_length_per_layer_input", MAX_SIZE)?,
        _ => 0,
    };
    if width == 0 {
        return Ok(None);
    }
    let table = keys.parts.tensor(LAYER_INPUTS).ok_or(GgufConfigError::MissingTensor(LAYER_INPUTS))?;
    Ok(Some([width, table.rows()]))
}

/// Returns LongRoPE with these divisors, for short contexts and for long ones. `scaling` is what the keys say.
pub(super) fn long_rope(
    keys: &Keys<'_>,
    scaling: &GgufRope,
    factors: Option<&[Vec<f32>; 2]>,
    rotary_dim: u64,
) -> Result<GgufRope, GgufConfigError> {
    let wrong = |index: usize, has: String| GgufConfigError::Divisors {
        tensor: LONG_ROPE_FACTORS[index],
        has,
        rule: format!("{} positive numbers and no other scaling beside it", rotary_dim / 2),
    };
    let factors = factors.ok_or_else(|| wrong(0, "no values".to_owned()))?;
    for (index, factors) in factors.iter().enumerate() {
        if factors.len() as u64 != rotary_dim / 2 {
            return Err(wrong(index, format!("{} values", factors.len())));
        }
        if let Some(odd) = factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            return Err(wrong(index, format!("the value {odd}")));
        }
    }
    if *scaling != GgufRope::Default {
        return Err(wrong(0, "another scaling beside it".to_owned()));
    }
    let [short, long] = factors.clone();
    Ok(GgufRope::LongRope {
        short,
        long,
        original_context: keys.need("rope.scaling.original_context_length", MAX_SIZE)?,
        attention_factor: keys.number("rope.scaling.attn_factor")?,
    })
}

/// Returns the keys of config.json that only the family has.
pub(super) fn own_keys(
    keys: &Keys<'_>,
    [layers, hidden, heads, head_dim]: [u64; 4],
) -> Result<Vec<(&'static str, Json)>, GgufConfigError> {
    let mut own = Vec::new();
    // As of the other biases, what the last layer has counts.
    let has_output_bias = keys.parts.has(&format!("blk.{}.attn_output.bias", layers - 1));
    match keys.architecture {
        Gemma2 | Gemma3 | GemmaEmbedding => {
            // No key says it. The largest models of both families, which have these numbers of layers, are the only
            // published ones in which it is not head_dim.
            let largest = match keys.architecture {
                Gemma2 => Some(46),
                Gemma3 => Some(62),
                _ => None,
            };
            let scalar = if largest == Some(layers) { hidden / heads } else { head_dim };
            own.push(("query_pre_attn_scalar", json!(scalar)));
            own.push(("hidden_activation", json!("gelu_pytorch_tanh")));
            let [scores, logits] = if keys.architecture == Gemma2 { [Some(50.0), Some(30.0)] } else { [None, None] };
            for (key, default) in [("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)] {
                own.push((key, json!(keys.optional(key, default)?)));
            }
            // Its files have the window of config.json, of which each side is half.
            own.push(("use_bidirectional_attention", json!(keys.architecture == GemmaEmbedding)));
            if keys.architecture == GemmaEmbedding {
                // The published model is: the factor of its embeddings is not rounded.
                own.push(("dtype", json!("float32")));
            }
        }
        Gemma4 => {
            own.push(("hidden_activation", json!("gelu_pytorch_tanh")));
            own.push(("final_logit_softcapping", json!(keys.optional("final_logit_softcapping", None)?)));
        }
        Granite | GraniteMoe | GraniteHybrid => {
            if keys.architecture == GraniteHybrid {
                let rotates = keys.get("rope.scaling.finetuned").is_none_or(|value| value.flag() != Some(false));
                own.push(("position_embedding_type", json!(if rotates { "rope" } else { "nope" })));
            }
            for (key, published) in [
                ("attention.scale", "attention_multiplier"),
                ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"),
                ("logit_scale", "logits_scaling"),
            ] {
                if let Some(factor) = keys.optional(key, None)? {
                    own.push((published, json!(factor)));
                } else if key == "attention.scale" {
                    // Without the key, scores are scaled as in Llama; the published default is another one.
                    own.push((published, json!((head_dim as f64).powf(-0.5))));
                }
            }
        }
        SmolLm3 => own.push(("no_rope_layer_interval", json!(4))),
        SeedOss => own.push(("attention_out_bias", json!(has_output_bias))),
        Ernie45 => own.push(("use_bias", json!(has_output_bias))),
        _ => {}
    }
    Ok(own)
}

impl GgufModel {
    /// Returns the keys of config.json that say what some families have in their layers: other heads, keys and values
    /// that are shared, latent attention, experts after dense layers or beside them.
    pub(super) fn structural_keys(&self) -> Vec<(&'static str, Json)> {
        let mut keys = Vec::new();
        if let Some(GgufFullHeads { kv_heads, head_dim, values_are_keys, .. }) = self.full_heads {
            keys.extend([
                ("global_head_dim", json!(head_dim)),
                ("num_global_key_value_heads", json!(values_are_keys.then_some(kv_heads))),
                ("attention_k_eq_v", json!(values_are_keys)),
                ("num_kv_shared_layers", json!(self.layers - self.own_caches)),
                ("use_double_wide_mlp", json!(self.wide_shared)),
                ("hidden_size_per_layer_input", json!(self.layer_inputs.map_or(0, |[width, _]| width))),
                ("vocab_size_per_layer_input", json!(self.layer_inputs.map(|[_, rows]| rows))),
                ("enable_moe_block", json!(self.experts.is_some())),
                ("top_k_experts", json!(self.experts.map(|experts| experts.chosen))),
            ]);
        }
        if let Some(GgufLatent { q_rank, kv_rank, nope, rope, values }) = self.latent {
            keys.extend([
                ("q_lora_rank", json!(q_rank)),
                ("kv_lora_rank", json!(kv_rank)),
                ("qk_nope_head_dim", json!(nope)),
                ("qk_rope_head_dim", json!(rope)),
                ("v_head_dim", json!(values)),
                // Other pairs than neighbours have no place in these files.
                ("rope_interleave", json!(true)),
            ]);
        }
        if let Some(experts) = self.experts
            && let Some(GgufRouting { sigmoid, groups, kept_groups, factor, .. }) = experts.routing
            && ![Ernie45Moe, Lfm2Moe, NemotronHMoe].contains(&self.architecture)
        {
            let method = match sigmoid {
                true => "noaux_tc",
                false if groups > 1 => "group_limited_greedy",
                false => "greedy",
            };
            keys.extend([
                ("n_routed_experts", json!(experts.count)),
                ("n_shared_experts", json!(experts.shared_count())),
                ("first_k_dense_replace", json!(experts.dense_layers)),
                ("n_group", json!(groups)),
                ("topk_group", json!(kept_groups)),
                ("topk_method", json!(method)),
                ("routed_scaling_factor", json!(factor)),
            ]);
        }
        match (self.architecture, self.experts) {
            (Ernie45Moe, Some(experts)) => keys.extend([
                ("moe_num_shared_experts", json!(experts.shared_count())),
                ("moe_layer_start_index", json!(experts.dense_layers)),
                ("moe_layer_interval", json!(experts.interval)),
            ]),
            (HunYuanMoe, Some(experts)) => keys.push(("num_shared_expert", json!(experts.shared_count()))),
            (GraniteMoe | GraniteHybrid, Some(experts)) => {
                keys.push(("shared_intermediate_size", json!(experts.shared_inner.unwrap_or(0))));
            }
            // Its dense MLPs have the width of shared ones.
            (GraniteHybrid, None) => keys.extend([
                ("num_local_experts", json!(0)),
                ("num_experts_per_tok", json!(0)),
                ("shared_intermediate_size", json!(self.intermediate)),
            ]),
            _ => {}
        }
        if self.architecture.has_short_convs() {
            // The width of dense MLPs is the adjusted one.
            keys.extend([("norm_eps", json!(self.rms_eps)), ("block_auto_adjust_ff_dim", json!(false))]);
            let dense = self.experts.map_or(0, |experts| experts.dense_layers);
            keys.push(("num_dense_layers", json!(dense)));
        }
        keys.extend(self.block_keys());
        if self.architecture == Glm4Moe {
            keys.push(("use_qk_norm", json!(self.head_norms)));
        }
        keys
    }

    /// Returns the keys of config.json of families whose layers are either a mixer or an MLP.
    fn block_keys(&self) -> Vec<(&'static str, Json)> {
        let (Some(blocks), Some(GgufSpace { dims, conv_bias })) = (&self.blocks, self.space) else { return Vec::new() };
        let name = |block: &GgufBlock| match block {
            GgufBlock::Attention => "attention",
            GgufBlock::StateSpace => "mamba",
            GgufBlock::Mlp if self.experts.is_some() => "moe",
            GgufBlock::Mlp => "mlp",
        };
        let mut keys = vec![
            ("layers_block_type", json!(blocks.iter().map(name).collect::<Vec<_>>())),
            ("mlp_hidden_act", json!("relu2")),
            ("layer_norm_epsilon", json!(self.rms_eps)),
            ("mamba_num_heads", json!(dims.value_heads)),
            ("mamba_head_dim", json!(dims.value_dim)),
            ("n_groups", json!(dims.key_heads)),
            ("ssm_state_size", json!(dims.key_dim)),
            ("conv_kernel", json!(dims.conv_kernel)),
            ("use_conv_bias", json!(conv_bias)),
        ];
        if let Some(experts) = self.experts
            && let Some(GgufRouting { groups, kept_groups, factor, .. }) = experts.routing
        {
            keys.extend([
                ("n_routed_experts", json!(experts.count)),
                // 0 stands for no shared expert.
                ("moe_shared_expert_intermediate_size", json!(experts.shared_inner.unwrap_or(0))),
                ("n_group", json!(groups)),
                ("topk_group", json!(kept_groups)),
                ("routed_scaling_factor", json!(factor)),
            ]);
        }
        keys
    }

    /// Whether the choice of experts is DeepSeek-V3's.
    fn has_sigmoid_scores(&self) -> bool {
        self.experts.and_then(|experts| experts.routing).is_some_and(|routing| routing.sigmoid)
    }

    /// Returns the entry of `architectures` and the `model_type` in config.json.
    pub fn published_names(&self) -> (&'static str, &'static str) {
        match self.architecture {
            GgufArchitecture::Llama if self.experts.is_some() => ("MixtralForCausalLM", "mixtral"),
            GgufArchitecture::Llama => ("LlamaForCausalLM", "llama"),
            GgufArchitecture::Qwen2 | Qwen2Vl => ("Qwen2ForCausalLM", "qwen2"),
            GgufArchitecture::Qwen3 | Qwen3Vl => ("Qwen3ForCausalLM", "qwen3"),
            GgufArchitecture::Qwen3Moe | Qwen3VlMoe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            GgufArchitecture::Qwen3Next => ("Qwen3NextForCausalLM", "qwen3_next"),
            GgufArchitecture::Qwen35 => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
            GgufArchitecture::Qwen35Moe => ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
            GgufArchitecture::Qwen2Moe => ("Qwen2MoeForCausalLM", "qwen2_moe"),
            Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            GemmaEmbedding => ("Gemma3TextModel", "gemma3_text"),
            GptOss => ("GptOssForCausalLM", "gpt_oss"),
            Phi3 => ("Phi3ForCausalLM", "phi3"),
            Granite => ("GraniteForCausalLM", "granite"),
            SmolLm3 => ("SmolLM3ForCausalLM", "smollm3"),
            Olmo2 if self.window.is_some() => ("Olmo3ForCausalLM", "olmo3"),
            Olmo2 => ("Olmo2ForCausalLM", "olmo2"),
            Glm4 => ("Glm4ForCausalLM", "glm4"),
            Mistral3 if self.query_growth.is_some() => ("Ministral3ForCausalLM", "ministral3"),
            Mistral3 => ("MistralForCausalLM", "mistral"),
            Gemma4 => ("Gemma4ForCausalLM", "gemma4_text"),
            // GLM-4.7-Flash is stored as DeepSeek-V3, which it differs from in numbers only.
            DeepSeek2 if self.has_sigmoid_scores() => ("DeepseekV3ForCausalLM", "deepseek_v3"),
            DeepSeek2 => ("DeepseekV2ForCausalLM", "deepseek_v2"),
            Glm4Moe => ("Glm4MoeForCausalLM", "glm4_moe"),
            SeedOss => ("SeedOssForCausalLM", "seed_oss"),
            Ernie45 => ("Ernie4_5ForCausalLM", "ernie4_5"),
            Exaone4 => ("Exaone4ForCausalLM", "exaone4"),
            Olmoe => ("OlmoeForCausalLM", "olmoe"),
            Dots1 => ("Dots1ForCausalLM", "dots1"),
            MiniMaxM2 => ("MiniMaxM2ForCausalLM", "minimax_m2"),
            HunYuanDense => ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
            HunYuanMoe => ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
            Ernie45Moe => ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
            GraniteMoe if self.experts.is_some_and(|experts| experts.shared_inner.is_some()) => {
                ("GraniteMoeSharedForCausalLM", "granitemoeshared")
            }
            GraniteMoe => ("GraniteMoeForCausalLM", "granitemoe"),
            GraniteHybrid => ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
            Lfm2 => ("Lfm2ForCausalLM", "lfm2"),
            Lfm2Moe => ("Lfm2MoeForCausalLM", "lfm2_moe"),
            NemotronH | NemotronHMoe => ("NemotronHForCausalLM", "nemotron_h"),
        }
    }
}
