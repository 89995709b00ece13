//! A model's configuration from `config.json`, and the metadata that say the same in a GGUF file.

use serde_json::Value as Json;

use super::super::config::{
    Delta, GgufArchitecture, GgufExperts, GgufModel, GgufRope, Llama3, MAX_EXPERTS, MAX_LAYERS,
};
use super::super::container::{Array, Value};
use super::super::tokenizer::MODEL;
use super::WriteError;
use super::text::{self, id_list};

/// The maximum of sizes other than those of [`GgufModel`] that have their own.
const MAX_SIZE: u64 = 1 << 30;

/// The names of model families in `model_type` and `architectures`.
const TYPES: [(&str, &str, GgufArchitecture); 10] = [
    ("llama", "LlamaForCausalLM", GgufArchitecture::Llama),
    ("mistral", "MistralForCausalLM", GgufArchitecture::Llama),
    ("qwen2", "Qwen2ForCausalLM", GgufArchitecture::Qwen2),
    ("qwen3", "Qwen3ForCausalLM", GgufArchitecture::Qwen3),
    ("qwen3_moe", "Qwen3MoeForCausalLM", GgufArchitecture::Qwen3Moe),
    ("qwen3_next", "Qwen3NextForCausalLM", GgufArchitecture::Qwen3Next),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", GgufArchitecture::Qwen35),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", GgufArchitecture::Qwen35),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", GgufArchitecture::Qwen35Moe),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", GgufArchitecture::Qwen35Moe),
];

/// Returns the names of the known model types.
pub(super) fn known_types() -> String {
    TYPES.map(|(name, ..)| name).join(", ")
}

/// Reads values of a configuration. A value of null is the same as none.
struct Keys<'a> {
    /// The configuration of the text model.
    text: &'a Json,
    /// The whole configuration, which is the same unless the model has more than text.
    whole: &'a Json,
}

impl<'a> Keys<'a> {
    fn new(config: &'a Json) -> Keys<'a> {
        let text = config.get("text_config").filter(|text| text.is_object());
        Keys { text: text.unwrap_or(config), whole: config }
    }

    fn get(&self, key: &str) -> Option<&'a Json> {
        let of = |json: &'a Json| json.get(key).filter(|value| !value.is_null());
        of(self.text).or_else(|| of(self.whole))
    }

    fn wrong(key: &'static str, value: &Json, rule: impl Into<String>) -> WriteError {
        WriteError::Value { key, value: short(value), rule: rule.into() }
    }

    fn unsupported(key: &'static str, value: &Json, what: &'static str) -> WriteError {
        WriteError::Unsupported { key, value: short(value), what }
    }

    fn between(&self, key: &'static str, least: u64, most: u64) -> Result<Option<u64>, WriteError> {
        let read = |value: &Json| {
            let number = value.as_u64().filter(|n| (least..=most).contains(n));
            number.ok_or_else(|| Keys::wrong(key, value, format!("an integer from {least} to {most}")))
        };
        self.get(key).map(read).transpose()
    }

    fn size(&self, key: &'static str) -> Result<Option<u64>, WriteError> {
        self.between(key, 1, MAX_SIZE)
    }

    fn need(&self, key: &'static str, most: u64) -> Result<u64, WriteError> {
        self.between(key, 1, most)?.ok_or(WriteError::Missing(key))
    }

    fn flag(&self, key: &'static str) -> Result<Option<bool>, WriteError> {
        let read = |value: &Json| value.as_bool().ok_or_else(|| Keys::wrong(key, value, "true or false"));
        self.get(key).map(read).transpose()
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>, WriteError> {
        self.get(key).map(|value| positive(key, value)).transpose()
    }

    fn architecture(&self) -> Result<GgufArchitecture, WriteError> {
        let model_type = self.get("model_type").and_then(Json::as_str);
        let class = self.get("architectures").and_then(|list| list.get(0)).and_then(Json::as_str);
        let known = TYPES.iter().find(|(name, other, _)| match model_type {
            Some(model_type) => *name == model_type,
            None => Some(*other) == class,
        });
        let name = model_type.or(class).unwrap_or_default();
        known.map(|row| row.2).ok_or_else(|| WriteError::GgufArchitecture(name.chars().take(80).collect()))
    }

    /// Refuses what changes the computation in a way that the metadata cannot say.
    fn refuse_foreign(&self) -> Result<(), WriteError> {
        if let Some(value) = self.get("hidden_act").filter(|value| value.as_str() != Some("silu")) {
            return Err(Keys::unsupported("hidden_act", value, "silu is"));
        }
        if let Some(value) = self.get("quantization_config") {
            return Err(Keys::unsupported("quantization_config", value, "the checkpoint is quantised already"));
        }
        let used = self.flag("use_sliding_window")? != Some(false);
        if let Some(value) = self.get("sliding_window").filter(|_| used) {
            let all = match (value.as_u64(), self.get("max_position_embeddings").and_then(Json::as_u64)) {
                (Some(window), Some(context)) => window >= context,
                _ => false,
            };
            if !all {
                return Err(Keys::unsupported("sliding_window", value, "sliding-window attention"));
            }
        }
        if let Some(value) = self.get("decoder_sparse_step").filter(|value| value.as_u64() != Some(1)) {
            return Err(Keys::unsupported("decoder_sparse_step", value, "layers without experts"));
        }
        match self.get("mlp_only_layers") {
            Some(value) if value.as_array().is_none_or(|layers| !layers.is_empty()) => {
                Err(Keys::unsupported("mlp_only_layers", value, "layers without experts"))
            }
            _ => Ok(()),
        }
    }

    fn rope(&self, architecture: GgufArchitecture, context: u64) -> Result<(f64, f64, GgufRope), WriteError> {
        let scaling = self.get("rope_parameters").or_else(|| self.get("rope_scaling"));
        let of = |key: &str| scaling.and_then(|scaling| scaling.get(key)).filter(|value| !value.is_null());
        let number = |key: &'static str| of(key).map(|value| positive(key, value)).transpose();
        let need = |key: &'static str| number(key)?.ok_or(WriteError::Missing(key));
        let theta = number("rope_theta")?.or(self.number("rope_theta")?).unwrap_or(10_000.0);
        let default = if architecture.is_hybrid() { 0.25 } else { 1.0 };
        let partial = number("partial_rotary_factor")?.or(self.number("partial_rotary_factor")?).unwrap_or(default);
        let kind = of("rope_type").or_else(|| of("type"));
        let scaling = match kind.map(|kind| (kind, kind.as_str())) {
            None | Some((_, Some("default" | "mrope"))) => GgufRope::Default,
            Some((_, Some("linear"))) => GgufRope::Linear { factor: need("factor")? },
            Some((_, Some("llama3"))) if architecture == GgufArchitecture::Llama => GgufRope::Llama3(Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_context: need("original_max_position_embeddings")?,
            }),
            Some((_, Some("yarn"))) => {
                for key in ["mscale", "mscale_all_dim"] {
                    if let Some(value) = of(key) {
                        return Err(Keys::unsupported("rope_scaling", value, "YaRN with mscale"));
                    }
                }
                GgufRope::Yarn {
                    factor: need("factor")?,
                    original_context: number("original_max_position_embeddings")?.map_or(context, |n| n as u64),
                    beta_fast: number("beta_fast")?,
                    beta_slow: number("beta_slow")?,
                    attention_factor: number("attention_factor")?,
                    mscale: None,
                }
            }
            Some((kind, _)) => {
                let what = "default, linear and yarn are, and llama3 for llama";
                return Err(Keys::unsupported("rope_type", kind, what));
            }
        };
        Ok((theta, partial, scaling))
    }

    fn full_attention(&self, architecture: GgufArchitecture, layers: u64) -> Result<Vec<bool>, WriteError> {
        let key = "layer_types";
        match self.get(key) {
            Some(value) => {
                let kinds = value.as_array().filter(|kinds| kinds.len() as u64 == layers);
                let kinds = kinds.ok_or_else(|| Keys::wrong(key, value, format!("a list of {layers}")))?;
                let full = |kind: &Json| match kind.as_str() {
                    Some("full_attention") => Ok(true),
                    Some("linear_attention") if architecture.is_hybrid() => Ok(false),
                    _ => Err(Keys::unsupported(key, kind, "a kind of layer that the architecture does not have")),
                };
                kinds.iter().map(full).collect()
            }
            None if architecture.is_hybrid() => {
                let interval = self.between("full_attention_interval", 1, MAX_LAYERS)?.unwrap_or(4);
                Ok((1..=layers).map(|layer| layer.is_multiple_of(interval)).collect())
            }
            None => Ok(vec![true; layers as usize]),
        }
    }

    fn delta(&self) -> Result<Delta, WriteError> {
        let (key_heads, value_heads) =
            (self.need("linear_num_key_heads", MAX_SIZE)?, self.need("linear_num_value_heads", MAX_SIZE)?);
        if !value_heads.is_multiple_of(key_heads) {
            let rule = format!("a multiple of linear_num_key_heads ({key_heads})");
            return Err(Keys::wrong("linear_num_value_heads", &value_heads.into(), rule));
        }
        Ok(Delta {
            key_heads,
            value_heads,
            key_dim: self.need("linear_key_head_dim", MAX_SIZE)?,
            value_dim: self.need("linear_value_head_dim", MAX_SIZE)?,
            conv_kernel: self.between("linear_conv_kernel_dim", 1, MAX_SIZE)?.unwrap_or(4),
        })
    }

    fn experts(&self, architecture: GgufArchitecture) -> Result<GgufExperts, WriteError> {
        let next = architecture != GgufArchitecture::Qwen3Moe;
        let shared = self.between("shared_expert_intermediate_size", 0, MAX_SIZE)?;
        Ok(GgufExperts {
            count: self.need("num_experts", MAX_EXPERTS)?,
            chosen: self.need("num_experts_per_tok", MAX_EXPERTS)?,
            inner: self.need("moe_intermediate_size", MAX_SIZE)?,
            // The published defaults.
            shared_inner: Some(shared.unwrap_or(if next { 512 } else { 0 })).filter(|n| *n > 0),
            normalise: self.flag("norm_topk_prob")?.unwrap_or(next),
            dense_layers: 0,
            interval: 1,
            routing: None,
        })
    }
}

/// Returns a value's text, cut to a length that fits into a message.
fn short(value: &Json) -> String {
    value.to_string().chars().take(80).collect()
}

fn positive(key: &'static str, value: &Json) -> Result<f64, WriteError> {
    let number = value.as_f64().filter(|n| n.is_finite() && *n > 0.0);
    number.ok_or_else(|| Keys::wrong(key, value, "a number above 0"))
}

/// Reads the configuration of a checkpoint from its config.json.
///
/// # Errors The first problem found.
pub fn model(config: &Json) -> Result<GgufModel, WriteError> {
    let keys = Keys::new(config);
    let architecture = keys.architecture()?;
    keys.refuse_foreign()?;
    let hidden = keys.need("hidden_size", MAX_SIZE)?;
    let layers = keys.need("num_hidden_layers", MAX_LAYERS)?;
    let heads = keys.need("num_attention_heads", MAX_SIZE)?;
    let head_dim = match (keys.size("head_dim")?, architecture) {
        (Some(head_dim), _) => head_dim,
        // The published defaults.
        (None, GgufArchitecture::Qwen3) => 128,
        (None, _) if architecture.is_hybrid() => 256,
        (None, _) if hidden.is_multiple_of(heads) => hidden / heads,
        (None, _) => return Err(WriteError::Missing("head_dim")),
    };
    let context = keys.need("max_position_embeddings", MAX_SIZE)?;
    let (rope_theta, partial, rope_scaling) = keys.rope(architecture, context)?;
    let rotary_dim = (head_dim as f64 * partial) as u64;
    if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        let rule = format!("a part of head_dim ({head_dim}) that is even");
        return Err(Keys::wrong("partial_rotary_factor", &partial.into(), rule));
    }
    let mtp_layers = match architecture.is_hybrid() {
        true => keys.between("mtp_num_hidden_layers", 0, 1)?.unwrap_or(0),
        false => 0,
    };
    if mtp_layers > 0 && keys.flag("mtp_use_dedicated_embeddings")? == Some(true) {
        let what = "an embedding of the multi-token-prediction block";
        return Err(Keys::unsupported("mtp_use_dedicated_embeddings", &true.into(), what));
    }
    Ok(GgufModel {
        architecture,
        hidden,
        layers,
        mtp_layers,
        mtp_own_embedding: false,
        heads,
        kv_heads: keys.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        rotary_dim,
        full_heads: None,
        own_caches: layers,
        latent: None,
        head_norms: !matches!(architecture, GgufArchitecture::Llama | GgufArchitecture::Qwen2),
        rope_theta,
        rope_scaling,
        intermediate: keys.size("intermediate_size")?,
        wide_shared: false,
        layer_inputs: None,
        rms_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
        vocab: keys.need("vocab_size", MAX_SIZE)?,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        // Qwen2's class has biases whatever the key says, and only Llama's reads the other one.
        attention_bias: keys.flag("attention_bias")?.unwrap_or(false) || architecture == GgufArchitecture::Qwen2,
        mlp_bias: keys.flag("mlp_bias")?.unwrap_or(false) && architecture == GgufArchitecture::Llama,
        context,
        full_attention: keys.full_attention(architecture, layers)?,
        blocks: None,
        delta: architecture.is_hybrid().then(|| keys.delta()).transpose()?,
        conv_taps: None,
        space: None,
        experts: architecture.has_experts().then(|| keys.experts(architecture)).transpose()?,
        window: None,
        query_growth: None,
        own_keys: Vec::new(),
    })
}

/// Returns the metadata of a checkpoint, given its config.json, generation_config.json, tokenizer.json and
/// tokenizer_config.json, in the order of the file. A multi-token-prediction block counts if config.json states it: set
/// `mtp_num_hidden_layers` to 0 for a checkpoint that lacks its tensors.
///
/// A tokenizer that the format cannot express exactly is left out, and the model becomes one without text; [`text`]
/// says why. The keys that depend on the types of the tensors, such as `general.file_type`, are not among them.
///
/// # Errors The configuration is not supported.
///
/// [`text`]: super::text()
pub fn metadata(
    config: &Json,
    generation: Option<&Json>,
    tokenizer: Option<&Json>,
    tokenizer_config: Option<&Json>,
) -> Result<Vec<(String, Value)>, WriteError> {
    let model = model(config)?;
    let mut pairs = of_model(&model, config);
    pairs.extend(of_generation(generation));
    match tokenizer.map(|tokenizer| text::text(config, generation, tokenizer, tokenizer_config)) {
        Some(Ok(text)) => pairs.extend(text),
        Some(Err(_)) | None => {
            pairs.push((MODEL.to_owned(), Value::String("none".to_owned())));
            pairs.extend(special_ids(config, generation));
        }
    }
    Ok(pairs)
}

/// Returns the metadata of the model itself.
fn of_model(model: &GgufModel, config: &Json) -> Vec<(String, Value)> {
    let name = model.architecture.name();
    let mut pairs = vec![
        ("general.architecture".to_owned(), Value::String(name.to_owned())),
        ("general.type".to_owned(), Value::String("model".to_owned())),
    ];
    let mut set = |key: &str, value: Value| pairs.push((format!("{name}.{key}"), value));
    // All sizes are at most 2^30, and no layers beyond those were counted.
    let size = |n: u64| Value::U32(n as u32);
    let number = |n: f64| Value::F32(n as f32);
    set("block_count", size(model.layers + model.mtp_layers));
    set("context_length", size(model.context));
    set("embedding_length", size(model.hidden));
    if let Some(intermediate) = model.intermediate {
        set("feed_forward_length", size(intermediate));
    }
    set("attention.head_count", size(model.heads));
    set("attention.head_count_kv", size(model.kv_heads));
    set("attention.key_length", size(model.head_dim));
    set("attention.value_length", size(model.head_dim));
    set("attention.layer_norm_rms_epsilon", number(model.rms_eps));
    set("vocab_size", size(model.vocab));
    set("rope.dimension_count", size(model.rotary_dim));
    set("rope.freq_base", number(model.rope_theta));
    match model.rope_scaling {
        // Llama 3's scaling is a tensor. No family that is written has LongRoPE.
        GgufRope::Default | GgufRope::Llama3(_) | GgufRope::LongRope { .. } => {}
        GgufRope::Linear { factor } => {
            set("rope.scaling.type", Value::String("linear".to_owned()));
            set("rope.scaling.factor", number(factor));
        }
        GgufRope::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, mscale: _ } => {
            set("rope.scaling.type", Value::String("yarn".to_owned()));
            set("rope.scaling.factor", number(factor));
            set("rope.scaling.original_context_length", size(original_context));
            let more = [("beta_fast", beta_fast), ("beta_slow", beta_slow), ("attn_factor", attention_factor)];
            for (key, value) in more {
                if let Some(value) = value {
                    set(&format!("rope.scaling.yarn_{key}"), number(value));
                }
            }
        }
    }
    if let Some(experts) = model.experts {
        set("expert_count", size(experts.count));
        set("expert_used_count", size(experts.chosen));
        set("expert_feed_forward_length", size(experts.inner));
        if let Some(inner) = experts.shared_inner {
            set("expert_shared_feed_forward_length", size(inner));
        }
        set("expert_weights_norm", Value::Bool(experts.normalise));
    }
    if let Some(delta) = model.delta {
        set("ssm.conv_kernel", size(delta.conv_kernel));
        set("ssm.state_size", size(delta.key_dim));
        set("ssm.group_count", size(delta.key_heads));
        set("ssm.time_step_rank", size(delta.value_heads));
        set("ssm.inner_size", size(delta.value_dim * delta.value_heads));
        let first = model.full_attention.iter().position(|full| *full).unwrap_or(model.full_attention.len());
        let interval = first as u64 + 1;
        if (1..).zip(&model.full_attention).all(|(layer, full): (u64, _)| *full == layer.is_multiple_of(interval)) {
            set("full_attention_interval", size(interval));
        } else {
            let mtp = vec![false; model.mtp_layers as usize];
            let recurrent = model.full_attention.iter().map(|full| !full).chain(mtp).collect();
            set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
        }
        if model.architecture != GgufArchitecture::Qwen3Next {
            // The released models have this one; text alone gives the same positions for all sections.
            let section = Keys::new(config).get("rope_parameters").and_then(|rope| rope.get("mrope_section"));
            let read = |list: &Vec<Json>| list.iter().map(|n| n.as_i64().and_then(|n| i32::try_from(n).ok())).collect();
            let section: Option<Vec<i32>> = section.and_then(Json::as_array).and_then(read);
            let mut section = section.unwrap_or_else(|| vec![11, 11, 10]);
            section.resize(4, 0);
            set("rope.dimension_sections", Value::Array(Array::I32(section)));
        }
        if model.mtp_layers > 0 {
            set("nextn_predict_layers", size(model.mtp_layers));
        }
    }
    pairs
}

/// Returns the recommended values of sampling.
fn of_generation(generation: Option<&Json>) -> Vec<(String, Value)> {
    let Some(generation) = generation else { return Vec::new() };
    let mut pairs = Vec::new();
    let recommended =
        [("temp", "temperature"), ("top_p", "top_p"), ("min_p", "min_p"), ("penalty_repeat", "repetition_penalty")];
    for (to, from) in recommended {
        if let Some(number) = generation.get(from).and_then(Json::as_f64) {
            pairs.push((format!("general.sampling.{to}"), Value::F32(number as f32)));
        }
    }
    if let Some(top_k) = generation.get("top_k").and_then(Json::as_u64).and_then(|n| i32::try_from(n).ok()) {
        pairs.push(("general.sampling.top_k".to_owned(), Value::I32(top_k)));
    }
    pairs
}

/// Returns the special token ids of a model without text.
fn special_ids(config: &Json, generation: Option<&Json>) -> Vec<(String, Value)> {
    let keys = Keys::new(config);
    let of = |key: &str| generation.and_then(|json| json.get(key)).filter(|id| !id.is_null()).or_else(|| keys.get(key));
    let ends = id_list(of("eos_token_id"));
    let first = |key: &str| id_list(of(key)).first().copied();
    let end = |index: usize| ends.get(index).copied();
    let ids = [
        ("bos", first("bos_token_id")),
        ("eos", end(0)),
        ("eot", end(1)),
        ("eom", end(2)),
        ("padding", first("pad_token_id")),
    ];
    let pair = |(name, id): (&str, Option<u32>)| Some((format!("tokenizer.ggml.{name}_token_id"), Value::U32(id?)));
    ids.into_iter().filter_map(pair).collect()
}
