//! What the model families have beside what Llama has, in metadata keys and in keys of config.json: sliding windows,
//! constant factors, bounds. Also the metadata keys that are refused because a family has nothing of the kind.

use serde_json::{Value as Json, json};

use super::super::container::{Array, Value};
use super::GgufArchitecture::{self, Gemma2, Gemma3, Glm4, GptOss, Granite, Mistral3, Olmo2, Phi3, SmolLm3};
use super::{GgufConfigError, GgufModel, GgufRope, GgufWindow, Keys, LONG_ROPE_FACTORS, MAX_LAYERS, MAX_SIZE};

/// A key that changes the computation: the key, the value that changes nothing, what it means, and the families that
/// understand it. 0 stands for "not used" in all of these keys.
type Foreign = (&'static str, f64, &'static str, &'static [GgufArchitecture]);

const FOREIGN: [Foreign; 18] = [
    ("attention.sliding_window", 0.0, "sliding-window attention", &[Gemma2, Gemma3, GptOss, Phi3, Olmo2]),
    ("attention.clamp_kqv", 0.0, "clamped queries, keys and values", &[]),
    ("attention.max_alibi_bias", 0.0, "ALiBi", &[]),
    ("attention.scale", 0.0, "a scale of attention", &[Granite]),
    ("attention.temperature_scale", 0.0, "a temperature of attention", &[Mistral3]),
    ("attention.temperature_length", 0.0, "a temperature of attention", &[]),
    ("attention.shared_kv_layers", 0.0, "keys and values that layers share", &[]),
    ("attn_logit_softcapping", 0.0, "softcapping", &[Gemma2]),
    ("final_logit_softcapping", 0.0, "softcapping", &[Gemma2, Gemma3]),
    ("router_logit_softcapping", 0.0, "softcapping", &[]),
    ("logit_scale", 1.0, "a scale of the logits", &[Granite]),
    ("residual_scale", 1.0, "a scale of the residual stream", &[Granite]),
    ("embedding_scale", 1.0, "a scale of the embedding", &[Granite]),
    ("expert_group_count", 1.0, "groups of experts", &[]),
    ("expert_weights_scale", 1.0, "a scale of the experts' weights", &[]),
    ("leading_dense_block_count", 0.0, "leading dense layers", &[]),
    ("rope.scaling.yarn_log_multiplier", 0.0, "a multiplier of YaRN's attention factor", &[Mistral3]),
    ("rope.scaling.yarn_ext_factor", 1.0, "a factor of YaRN's extrapolation", &[]),
];

/// The window's pattern over the layers: a list of truth values, or n if every n-th layer has no window.
const PATTERN: &str = "attention.sliding_window_pattern";

/// How a router's scores become weights: softmax over all experts, and over those chosen.
const SOFTMAX: [u64; 2] = [0, 1];
const SOFTMAX_OF_CHOSEN: u64 = 3;

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
        match self.get("attention.causal") {
            None | Some(Value::Bool(true)) => {}
            Some(value) => return Err(self.unsupported("attention.causal", value, "attention to later tokens")),
        }
        match self.get("expert_gating_func") {
            None => {}
            Some(value) if value.unsigned().is_some_and(|n| SOFTMAX.contains(&n)) => {}
            Some(value) if self.architecture == GptOss && value.unsigned() == Some(SOFTMAX_OF_CHOSEN) => {}
            Some(value) => return Err(self.unsupported("expert_gating_func", value, "a router without softmax")),
        }
        if let (Granite, Some(value @ Value::Bool(false))) = (self.architecture, self.get("rope.scaling.finetuned")) {
            return Err(self.unsupported("rope.scaling.finetuned", value, "no rotary embedding"));
        }
        // With it, the rows of queries and keys are in another order.
        if let (Glm4, Some(value)) = (self.architecture, self.get("rope.dimension_sections")) {
            return Err(self.unsupported("rope.dimension_sections", value, "positions in several dimensions"));
        }
        match (self.get("expert_count"), self.architecture.has_experts()) {
            (Some(value), false) if value.unsigned() != Some(0) => {
                Err(self.unsupported("expert_count", value, "experts in this architecture"))
            }
            _ => Ok(()),
        }
    }

    /// Reads a number that 0 turns off, which is `default` if the key is absent.
    fn optional(&self, key: &str, default: Option<f64>) -> Result<Option<f64>, GgufConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) if value.number() == Some(0.0) => Ok(None),
            Some(_) => self.number(key),
        }
    }
}

/// Reads which layers have a sliding window. `theta` is the base of the other layers' rotary frequencies.
pub(super) fn window(keys: &Keys<'_>, layers: u64, theta: f64) -> Result<Option<GgufWindow>, GgufConfigError> {
    // The window if the key is absent, and n if every n-th layer has none by default.
    let (default, every) = match keys.architecture {
        Gemma2 => (4096, 2),
        Gemma3 => (0, 6),
        GptOss => (0, 2),
        Olmo2 => (0, 4),
        // All layers have it.
        Phi3 => (0, 0),
        _ => return Ok(None),
    };
    let key = "attention.sliding_window";
    let tokens = match keys.get(key) {
        None if keys.architecture == GptOss => return Err(keys.missing(key)),
        None => default,
        Some(_) => keys.size_or_zero(key, MAX_SIZE)?,
    };
    if tokens == 0 {
        return Ok(None);
    }
    let layers = pattern(keys, layers, every)?;
    let own = keys.number("rope.freq_base_swa")?;
    let rope_theta = match keys.architecture {
        Gemma3 => Some(own.unwrap_or(10_000.0)),
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
fn pattern(keys: &Keys<'_>, layers: u64, every: u64) -> Result<Vec<bool>, GgufConfigError> {
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

/// Reads the coefficient in the divisor of YaRN's factor of cosines and sines.
pub(super) fn mscale_all_dim(keys: &Keys<'_>) -> Result<Option<f64>, GgufConfigError> {
    match keys.architecture {
        Mistral3 => keys.optional("rope.scaling.yarn_log_multiplier", None),
        _ => Ok(None),
    }
}

/// Returns LongRoPE with these divisors, for short contexts and for long ones. `scaling` is what the keys say.
pub(super) fn long_rope(
    keys: &Keys<'_>,
    scaling: &GgufRope,
    factors: Option<&[Vec<f32>; 2]>,
    rotary_dim: u64,
) -> Result<GgufRope, GgufConfigError> {
    let wrong = |index: usize, has: String| GgufConfigError::LongRopeFactors {
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
    match keys.architecture {
        Gemma2 | Gemma3 => {
            // No key says it. The largest models of both families, which have these numbers of layers, are the only
            // published ones in which it is not head_dim.
            let largest = if keys.architecture == Gemma2 { 46 } else { 62 };
            let scalar = if layers == largest { hidden / heads } else { head_dim };
            own.push(("query_pre_attn_scalar", json!(scalar)));
            own.push(("hidden_activation", json!("gelu_pytorch_tanh")));
            let [scores, logits] = if keys.architecture == Gemma2 { [Some(50.0), Some(30.0)] } else { [None, None] };
            for (key, default) in [("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)] {
                own.push((key, json!(keys.optional(key, default)?)));
            }
        }
        Granite => {
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
        _ => {}
    }
    Ok(own)
}

impl GgufModel {
    /// Returns the entry of `architectures` and the `model_type` in config.json.
    pub fn published_names(&self) -> (&'static str, &'static str) {
        match self.architecture {
            GgufArchitecture::Llama => ("LlamaForCausalLM", "llama"),
            GgufArchitecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            GgufArchitecture::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            GgufArchitecture::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
            GgufArchitecture::Qwen3Next => ("Qwen3NextForCausalLM", "qwen3_next"),
            GgufArchitecture::Qwen35 => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
            GgufArchitecture::Qwen35Moe => ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
            GgufArchitecture::Qwen2Moe => ("Qwen2MoeForCausalLM", "qwen2_moe"),
            Gemma2 => ("Gemma2ForCausalLM", "gemma2"),
            Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
            GptOss => ("GptOssForCausalLM", "gpt_oss"),
            Phi3 => ("Phi3ForCausalLM", "phi3"),
            Granite => ("GraniteForCausalLM", "granite"),
            SmolLm3 => ("SmolLM3ForCausalLM", "smollm3"),
            Olmo2 if self.window.is_some() => ("Olmo3ForCausalLM", "olmo3"),
            Olmo2 => ("Olmo2ForCausalLM", "olmo2"),
            Glm4 => ("Glm4ForCausalLM", "glm4"),
            Mistral3 if self.query_growth.is_some() => ("Ministral3ForCausalLM", "ministral3"),
            Mistral3 => ("MistralForCausalLM", "mistral"),
        }
    }
}
