//! Reads config.json key by key. Absent keys take the class defaults of transformers; invalid values are recorded as
//! problems. A multimodal model keeps the keys of its text model in `text_config`, which take precedence over keys of
//! the same name outside.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

use super::families::{
    Architecture, Bias, BlockKeys, EmbeddingScale, ExpertFacts, ExpertStyle, FAMILIES, Facts, Rotated, ScoreScale,
    SoftCap, SpaceFacts, WRAPPER_TYPES, WRAPPERS, Windows,
};
use super::quantization::{self, Quantization};
use super::rope::{self, Layers, Rope, RopeScaling, RotatedPairs};
use super::{
    Activation, Attention, ConfigProblem, DeltaNet, Dtype, Experts, Latent, LayerInputs, LayerKind, MlpKind,
    ModelConfig, NormedHeads, QkNorm, Routing, ShortConv, StateSpace, UnknownDtype,
};
use crate::kernels::moe::MOST_CHOSEN;
use crate::kernels::short_conv;

/// The maximum size of a dimension. A larger value means that the file is damaged.
pub(super) const MAX_DIMENSION: u64 = 1 << 24;
/// The maximum number of layers.
pub(super) const MAX_LAYERS: u64 = 4096;
/// The maximum context length in tokens.
const MAX_CONTEXT: u64 = 1 << 30;
/// The maximum number of rows of one layer's experts, which are stacked in one packed weight.
const MAX_EXPERT_ROWS: u64 = 1 << 30;
/// The maximum head dimension of the gated delta rule that the kernels support.
const MAX_DELTA_DIM: u64 = 128;

/// The key of the text model's own configuration object in multimodal models.
const TEXT: &str = "text_config";

/// Reads keys of one JSON object and records what is wrong with them.
pub(super) struct Reader {
    /// The file's object, merged with the keys of `text_config` if there is one.
    map: Map<String, Value>,
    /// The keys taken from `text_config`; `None` if there is no such object.
    text: Option<Vec<String>>,
    pub(super) problems: Vec<ConfigProblem>,
}

impl Reader {
    pub(super) fn new(mut map: Map<String, Value>, problems: Vec<ConfigProblem>) -> Reader {
        let mut reader = Reader { map: Map::new(), text: None, problems };
        match map.remove(TEXT) {
            Some(Value::Object(text)) => {
                let mut names = Vec::new();
                for (key, value) in text {
                    // The outer object decides the architecture. A tied head may be declared in either place, so an
                    // outer `true` wins. A null in `text_config` does not replace an outer value.
                    let keep = match key.as_str() {
                        "architectures" => map.contains_key("architectures"),
                        "tie_word_embeddings" => map.get(&key) == Some(&Value::Bool(true)),
                        _ => value.is_null() && map.contains_key(&key),
                    };
                    if !keep {
                        names.push(key.clone());
                        map.insert(key, value);
                    }
                }
                reader.text = Some(names);
            }
            None | Some(Value::Null) => {}
            Some(other) => reader.wrong(TEXT, other, "an object"),
        }
        reader.map = map;
        reader
    }

    /// Returns the key's value, unless it is absent or null.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns the first of these keys that is present; the first of all if none is.
    fn first_of(&self, keys: &[&'static str]) -> &'static str {
        keys.iter().copied().find(|key| self.value(key).is_some()).unwrap_or(keys[0])
    }

    /// Returns the key's dotted path in the file, for messages.
    pub(super) fn named(&self, key: &str) -> String {
        let first = key.split('.').next().unwrap_or(key);
        match &self.text {
            // A missing key would belong to the text model.
            Some(text) if text.iter().any(|name| name == first) || !self.map.contains_key(first) => {
                format!("{TEXT}.{key}")
            }
            _ => key.to_owned(),
        }
    }

    pub(super) fn wrong(&mut self, key: &str, value: impl fmt::Display, rule: impl Into<String>) {
        let key = self.named(key);
        self.problems.push(ConfigProblem::Value { key, value: value.to_string(), rule: rule.into() });
    }

    /// Reads an integer from 1 to `most`. A missing key is a problem.
    fn count(&mut self, key: &str, most: u64) -> Option<u32> {
        if self.value(key).is_none() {
            let key = self.named(key);
            self.problems.push(ConfigProblem::Missing(key));
            return None;
        }
        self.optional_count(key, most)
    }

    /// Reads an integer from 1 to `most`, or returns `None` if the key is absent.
    pub(super) fn optional_count(&mut self, key: &str, most: u64) -> Option<u32> {
        self.integer(key, 1, most)
    }

    /// Reads an integer from 1 to `most`, or returns `default` if the key is absent.
    fn count_or(&mut self, key: &str, most: u64, default: u32) -> Option<u32> {
        if self.value(key).is_none() { Some(default) } else { self.optional_count(key, most) }
    }

    /// Reads an integer from `least` to `most`, or returns `None` if the key is absent.
    fn integer(&mut self, key: &str, least: u64, most: u64) -> Option<u32> {
        let value = self.value(key)?.clone();
        match value.as_u64() {
            Some(n) if (least..=most).contains(&n) => Some(n as u32),
            _ => {
                self.wrong(key, value, format!("an integer from {least} to {most}"));
                None
            }
        }
    }

    /// Reads a positive number between 1e-30 and 1e30, so that neither it nor its reciprocal leaves the range of f32, or
    /// returns `default` if the key is absent or null.
    fn positive(&mut self, key: &str, default: Option<f64>) -> Option<f64> {
        let Some(value) = self.value(key).cloned() else { return default };
        let number = value.as_f64().filter(|n| (1e-30..=1e30).contains(n));
        if number.is_none() {
            self.wrong(key, value, "a positive number, from 1e-30 to 1e30");
        }
        number
    }

    /// Whether the key is present and null.
    fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub(super) fn flag(&mut self, key: &str) -> bool {
        self.flag_or(key, false)
    }

    /// Reads a boolean, or returns `default` if the key is absent.
    fn flag_or(&mut self, key: &str, default: bool) -> bool {
        match self.value(key) {
            None => default,
            Some(Value::Bool(flag)) => *flag,
            Some(other) => {
                let other = other.clone();
                self.wrong(key, other, "true or false");
                default
            }
        }
    }
}

/// Reads the whole configuration. Problems are recorded in the reader; they must be checked even if this returns
/// `Some`.
pub(super) fn read(
    reader: &mut Reader,
    generation: Option<&Map<String, Value>>,
    quantized: Option<(&'static str, &Value)>,
) -> Option<ModelConfig> {
    // Without a known family, the keys are read with the defaults of the first, so that all problems are found.
    let known = family(reader);
    let facts = known.unwrap_or(&FAMILIES[0]);
    let quantization = quantization(reader, quantized);
    let activation = activation(reader, facts);
    let dtype = dtype(reader);

    let hidden = reader.count("hidden_size", MAX_DIMENSION);
    let blocks = facts.blocks.map(|keys| blocks(reader, keys));
    let layers = match &blocks {
        None => reader.count("num_hidden_layers", MAX_LAYERS),
        Some(blocks) => blocks.as_ref().map(|blocks| blocks.len() as u32),
    };
    let blocks = blocks.flatten();
    let (mlp_kinds, experts) = mlp_kinds(reader, facts, layers, hidden, blocks.as_deref());
    let intermediate = match &mlp_kinds {
        Some(kinds) if !kinds.contains(&MlpKind::Dense) && !experts.is_some_and(|of| of.beside_dense) => Some(0),
        _ => match facts.experts {
            Some(ExpertFacts { style: ExpertStyle::Granite, shared: Some(default), .. }) => {
                reader.count_or("shared_intermediate_size", MAX_DIMENSION, default)
            }
            _ if facts.lfm2 => lfm2_width(reader, facts),
            _ => reader.count("intermediate_size", MAX_DIMENSION),
        },
    };
    let vocab = match facts.defaults.vocab {
        Some(default) => reader.count_or("vocab_size", MAX_DIMENSION, default),
        None => reader.count("vocab_size", MAX_DIMENSION),
    };
    let sees = sees(reader, facts);
    let latent = latent(reader, facts);
    let heads = match (facts.latent, latent) {
        (None, _) => heads(reader, facts, hidden),
        (Some(_), latent) => latent_heads(reader, latent),
    };
    let eps_key = facts.eps_key;
    let rms_eps = match reader.value(eps_key).cloned() {
        None => facts.defaults.rms_eps,
        Some(value) => match value.as_f64().map(|eps| eps as f32) {
            Some(eps) if eps.is_finite() && eps > 0.0 => eps,
            _ => {
                reader.wrong(eps_key, value, "a positive number");
                1e-6
            }
        },
    };
    let context = match reader.value("max_position_embeddings") {
        Some(_) => reader.optional_count("max_position_embeddings", MAX_CONTEXT),
        None => Some(facts.defaults.context),
    };
    let mixers = match (facts.blocks, &blocks) {
        (None, _) => mixers(reader, facts, layers),
        (Some(_), blocks) => blocks.as_ref().map(|blocks| blocks.iter().map(|block| block.mixer()).collect()),
    };
    let shared = shared_caches(reader, facts, mixers.as_deref());
    let attention = attention(reader, facts, mixers.as_deref(), heads, (latent, context, sees));
    let layer_inputs = layer_inputs(reader, facts, layers, vocab, dtype);
    let wide = facts.gemma4 && reader.flag("use_double_wide_mlp");
    let layer_kinds: Option<Vec<LayerKind>> = mixers.map(|mixers| mixers.iter().map(|mixer| mixer.kind()).collect());
    let delta = layer_kinds.as_ref().is_some_and(|kinds| kinds.contains(&LayerKind::GatedDelta));
    let delta = delta.then(|| match facts.state_spaces {
        Some(keys) => state_space(reader, keys, hidden),
        None => delta_net(reader),
    });
    let short_conv = layer_kinds.as_ref().is_some_and(|kinds| kinds.contains(&LayerKind::ShortConv));
    let short_conv = short_conv.then(|| short_convolution(reader, hidden));

    // No published model clamps queries, keys and values.
    fixed(reader, "clip_qkv", Value::Null);
    let tied = reader.flag_or("tie_word_embeddings", facts.defaults.tied);
    let tied = if facts.lfm2 { reader.flag_or("tie_embedding", tied) } else { tied };
    let mut bias = |bias: Bias| match bias {
        Bias::Never => false,
        Bias::Always => true,
        Bias::Key(key, default) => reader.flag_or(key, default),
    };
    let (qkv_bias, o_bias, mlp_bias) = (bias(facts.qkv_bias), bias(facts.o_bias), bias(facts.mlp_bias));
    let (bos, eos) = special_ids(reader, generation, facts, vocab);
    let qk_normed = facts.qk_norm_key.is_none_or(|key| reader.flag(key));
    let attention_gate = reader.flag_or("attn_output_gate", true) && facts.hybrid;
    let mtp_layers = mtp_layers(reader, facts.hybrid);
    let score_scale = match facts.score_scale {
        ScoreScale::RootOfHead => None,
        ScoreScale::RootOf(key, default) => {
            reader.positive(key, Some(f64::from(default))).map(|value| value.powf(-0.5) as f32)
        }
        ScoreScale::Key(key) => reader.positive(key, Some(1.0)).map(|value| value as f32),
        ScoreScale::One => Some(1.0),
    };
    let score_scale = match (latent, &attention) {
        (Some(latent), Some((kinds, _))) => Some(latent_scale(latent, &kinds[0])),
        _ => score_scale,
    };
    let [score_cap, logit_cap] = match facts.soft_caps {
        None => [None, None],
        Some([scores, logits]) => {
            [("attn_logit_softcapping", scores), ("final_logit_softcapping", logits)].map(|(key, cap)| match cap {
                SoftCap::Never => {
                    fixed(reader, key, Value::Null);
                    None
                }
                // A null is no bound; an absent key is the class's default.
                SoftCap::Key(_) if reader.map.contains_key(key) => reader.positive(key, None),
                SoftCap::Key(default) => default,
            })
        }
    };
    let embedding_scale = match facts.embedding_scale {
        EmbeddingScale::One => 1.0,
        EmbeddingScale::RootOfHidden => hidden.map_or(1.0, |hidden| root(hidden, dtype)),
        EmbeddingScale::Key(key) => reader.positive(key, Some(1.0)).unwrap_or(1.0) as f32,
    };
    let mut multiplier = |key: &str| match facts.multipliers {
        true => reader.positive(key, Some(1.0)).unwrap_or(1.0),
        false => 1.0,
    };
    let (residual_scale, logits_scaling) = (multiplier("residual_multiplier"), multiplier("logits_scaling"));

    known?;
    if facts.latent.is_some() {
        latent?;
    }
    let (attention_kinds, attention_of) = attention?;
    let cache_of = shared?;
    let width =
        |(layer, cache): (u32, &u32)| if wide && *cache != layer { intermediate.map(|n| 2 * n) } else { intermediate };
    let dense_widths: Vec<u32> = (0..).zip(&cache_of).map(width).collect::<Option<_>>()?;
    let greatest_width = dense_widths.iter().copied().max().unwrap_or(0);
    Some(ModelConfig {
        architecture: facts.architecture,
        hidden: hidden?,
        intermediate: greatest_width,
        dense_widths,
        layers: layers?,
        attention_kinds,
        attention_of,
        latent,
        cache_of,
        rms_eps,
        vocab: vocab?,
        tied,
        qkv_bias,
        o_bias,
        mlp_bias,
        qk_norm: if qk_normed { facts.qk_norm } else { QkNorm::None },
        v_norm: facts.gemma4,
        attention_gate,
        sinks: facts.sinks,
        causal: sees == Sees::Earlier,
        score_scale,
        score_cap: score_cap.map(|cap| cap as f32),
        embedding_scale,
        residual_scale: residual_scale as f32,
        layer_scale: facts.gemma4,
        layer_inputs: layer_inputs?,
        logit_scale: (1.0 / logits_scaling) as f32,
        logit_cap: logit_cap.map(|cap| cap as f32),
        norm: facts.norm,
        norms: facts.norms,
        activation,
        layer_kinds: layer_kinds?,
        mlp_kinds: mlp_kinds?,
        delta: match delta {
            Some(delta) => Some(delta?),
            None => None,
        },
        short_conv: match short_conv {
            Some(conv) => Some(conv?),
            None => None,
        },
        experts,
        mtp_layers,
        mtp_attention: 0,
        mtp_width: greatest_width,
        mtp_experts: experts,
        draft_head: None,
        context: context?,
        eos,
        bos,
        dtype,
        quantization: match quantization {
            Some(quantization) => Some(quantization?),
            None => None,
        },
    })
}

/// Which tokens a token sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sees {
    /// Itself and earlier ones: in a window of W tokens, those at a distance below W.
    Earlier,
    /// Later ones too: in a window of W tokens, those at a distance of at most W on either side.
    Both,
    /// Later ones too: in a window of W tokens, those at a distance of at most W / 2 on either side.
    BothInHalves,
}

impl Sees {
    /// Returns [`Attention::window`] of layers with a window of `window` tokens.
    fn window(self, window: u32) -> u32 {
        match self {
            Sees::Earlier => window,
            Sees::Both => window + 1,
            Sees::BothInHalves => window / 2 + 1,
        }
    }
}

/// Returns which tokens a token sees.
fn sees(reader: &mut Reader, facts: &Facts) -> Sees {
    const BOTH: &str = "use_bidirectional_attention";
    let causal = reader.flag_or("is_causal", true);
    if !causal && (facts.hybrid || facts.state_spaces.is_some() || facts.latent.is_some() || facts.gemma4 || facts.lfm2)
    {
        reader.wrong("is_causal", false, "true for this architecture: attention is causal");
    }
    // With "vision", only the rows of images see later ones.
    if reader.value(BOTH).and_then(Value::as_str) == Some("vision") || !reader.flag(BOTH) {
        return if causal { Sees::Earlier } else { Sees::Both };
    }
    if !facts.both {
        reader.wrong(BOTH, true, "false: attention is causal");
    }
    Sees::BothInHalves
}

/// Rounds the factors of embeddings to the configuration's element type.
pub(super) fn round_embedding_scales(config: &mut ModelConfig) {
    if config.architecture.facts().embedding_scale == EmbeddingScale::RootOfHidden {
        config.embedding_scale = root(config.hidden, config.dtype);
    }
    if let Some(inputs) = &mut config.layer_inputs {
        inputs.scale = root(inputs.width, config.dtype);
    }
}

/// Returns the square root of a width as the factor of embeddings, rounded like the embeddings themselves; without an
/// element type, to bfloat16.
fn root(width: u32, dtype: Option<Dtype>) -> f32 {
    let value = f64::from(width).sqrt() as f32;
    match dtype {
        Some(Dtype::F32) => value,
        Some(Dtype::F16) => half::f16::from_f32(value).to_f32(),
        Some(Dtype::Bf16) | None => half::bf16::from_f32(value).to_f32(),
    }
}

/// Reads the MLPs' activation function.
fn activation(reader: &mut Reader, facts: &Facts) -> Activation {
    let (keys, mut own) = facts.activation;
    let (known, name) = match own {
        Activation::Silu => (["silu", "swish"].as_slice(), "silu"),
        Activation::GeluTanh => (["gelu_pytorch_tanh"].as_slice(), "gelu_pytorch_tanh"),
        Activation::ClampedSilu { .. } => {
            // The kernels have this number; no released checkpoint has another.
            if let Some(value) = reader.value("swiglu_alpha").cloned().filter(|value| value.as_f64() != Some(1.702)) {
                reader.wrong("swiglu_alpha", value, "1.702");
            }
            if let Some(limit) = reader.positive("swiglu_limit", None) {
                own = Activation::ClampedSilu { limit: (limit as f32).to_bits() };
                // The kernels keep the upper 24 bits of the limit.
                if (limit as f32).to_bits() & 0xff != 0 {
                    reader.wrong("swiglu_limit", limit, "a number of at most 16 significant bits");
                }
            }
            (["silu", "swish"].as_slice(), "silu")
        }
        Activation::SquaredRelu => (["relu2"].as_slice(), "relu2"),
    };
    let found = keys.iter().find_map(|key| reader.value(key)).cloned();
    match found.as_ref().map(|value| value.as_str().ok_or(value)) {
        None => {}
        Some(Ok(named)) if known.contains(&named) => {}
        Some(Ok(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_owned(), name)),
        Some(Err(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_string(), name)),
    }
    own
}

/// Reads the number of query heads, of key and value heads, and the dimensions of a head.
fn heads(reader: &mut Reader, facts: &Facts, hidden: Option<u32>) -> [Option<u32>; 3] {
    let heads = match facts.defaults.heads {
        Some(default) => reader.count_or("num_attention_heads", MAX_DIMENSION, default),
        None => reader.count("num_attention_heads", MAX_DIMENSION),
    };
    // A null is as many as query heads; an absent key is the class's default.
    let kv_heads = match reader.map.get("num_key_value_heads") {
        None => facts.defaults.kv_heads.or(heads),
        Some(Value::Null) => heads,
        Some(_) => reader.optional_count("num_key_value_heads", MAX_DIMENSION),
    };
    let head_dim = match (reader.map.get("head_dim"), facts.defaults.head_dim) {
        (None, Some(dim)) => Some(dim),
        (None | Some(Value::Null), _) => derived_head_dim(reader, hidden, heads),
        (Some(_), _) => reader.optional_count("head_dim", MAX_DIMENSION),
    };
    if let (Some(heads), Some(kv_heads)) = (heads, kv_heads)
        && heads % kv_heads != 0
    {
        reader.wrong("num_key_value_heads", kv_heads, format!("a divisor of num_attention_heads ({heads})"));
    }
    if let Some(head_dim) = head_dim
        && head_dim % 2 != 0
    {
        reader.wrong("head_dim", head_dim, "even");
    }
    if let (Some(heads), Some(head_dim)) = (heads, head_dim)
        && u64::from(heads) * u64::from(head_dim) > MAX_DIMENSION
    {
        reader.wrong("num_attention_heads", heads, format!("at most {MAX_DIMENSION} / head_dim ({head_dim})"));
    }
    [heads, kv_heads, head_dim]
}

/// Reads the dimensions of latent attention, if the family has it.
fn latent(reader: &mut Reader, facts: &Facts) -> Option<Latent> {
    let (defaults, _) = facts.latent?;
    if reader.flag("attention_bias") {
        reader.wrong("attention_bias", true, "false where attention is latent");
    }
    let q_rank = match reader.is_null("q_lora_rank") {
        true => None,
        false => Some(reader.count_or("q_lora_rank", MAX_DIMENSION, defaults.q_rank.unwrap_or(1))?),
    };
    let mut dim = |key: &str, default: u32| {
        let dim = reader.count_or(key, 1 << 12, default)?;
        if dim % 8 != 0 {
            reader.wrong(key, dim, "a multiple of 8");
        }
        Some(dim)
    };
    let (kv_rank, nope) = (dim("kv_lora_rank", defaults.kv_rank), dim("qk_nope_head_dim", defaults.nope));
    let (rope, value_dim) = (dim("qk_rope_head_dim", defaults.rope), dim("v_head_dim", defaults.value_dim));
    Some(Latent { q_rank, kv_rank: kv_rank?, nope: nope?, rope: rope?, value_dim: value_dim? })
}

/// Reads the number of query heads of latent attention, which share one key head.
fn latent_heads(reader: &mut Reader, latent: Option<Latent>) -> [Option<u32>; 3] {
    let heads = reader.count("num_attention_heads", 1 << 10);
    [heads, Some(1), latent.map(|latent| latent.rope + latent.kv_rank)]
}

/// Returns the factor of scores of latent attention. With YaRN, the factor of a context that is longer than the original
/// counts twice, once for queries and once for keys.
fn latent_scale(latent: Latent, kind: &Attention) -> f32 {
    let scale = f64::from(latent.nope + latent.rope).powf(-0.5);
    let longer = match kind.rope.as_ref().map(|rope| &rope.scaling) {
        Some(RopeScaling::Yarn { factor, mscale_all_dim: Some(coefficient), .. }) if *factor > 1.0 => {
            0.1 * coefficient * factor.ln() + 1.0
        }
        _ => 1.0,
    };
    (scale * longer * longer) as f32
}

/// Returns how the weights are quantised, according to config.json or else to a file beside it; the inner `None` stands
/// for a problem.
#[expect(clippy::option_option, reason = "absent, or present and wrong")]
fn quantization(reader: &mut Reader, beside: Option<(&'static str, &Value)>) -> Option<Option<Quantization>> {
    for key in ["quantization_config", "compression_config"] {
        if let Some(value) = reader.value(key).cloned() {
            let path = reader.named(key);
            return Some(quantization::read(&value, &path, &mut reader.problems));
        }
    }
    beside.map(|(file, value)| quantization::read(value, file, &mut reader.problems))
}

/// Returns the facts of the model's family.
fn family(reader: &mut Reader) -> Option<&'static Facts> {
    let model_type = reader.value("model_type").and_then(Value::as_str).map(str::to_owned);
    let by_type =
        FAMILIES.iter().find(|facts| model_type.as_deref().is_some_and(|name| facts.model_types.contains(&name)));
    let named = match reader.value("architectures") {
        Some(Value::Array(names)) if !names.is_empty() => {
            names.iter().map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned)).collect::<Vec<_>>()
        }
        None => match (by_type, model_type.clone()) {
            (Some(facts), _) => return Some(facts),
            (None, Some(model_type)) => vec![model_type],
            (None, None) => {
                reader.problems.push(ConfigProblem::Missing("architectures".to_owned()));
                return None;
            }
        },
        Some(other) => {
            let other = other.clone();
            reader.wrong("architectures", other, "a list of at least one name");
            return None;
        }
    };
    let known = FAMILIES.iter().find(|facts| named.iter().any(|name| facts.names.contains(&name.as_str())));
    // transformers goes by `model_type`, other programs by `architectures`: where they differ, neither is sure.
    if let (Some(facts), Some(model_type)) = (known, &model_type)
        && !facts.model_types.contains(&model_type.as_str())
    {
        let rule = format!("{} where architectures has {}", facts.model_types.join(" or "), named.join(", "));
        reader.wrong("model_type", model_type, rule);
    }
    let wrapped = named.iter().any(|name| WRAPPERS.contains(&name.as_str()));
    // A wrapper that does not name its text model's family has Mistral's.
    let by_default = FAMILIES.iter().find(|facts| facts.architecture == Architecture::Mistral);
    let unnamed = by_type.is_none() && model_type.as_deref().is_none_or(|name| WRAPPER_TYPES.contains(&name));
    let known = known.or(if unnamed { by_default } else { by_type }.filter(|_| wrapped));
    if known.is_none() {
        reader.problems.push(ConfigProblem::UnsupportedArchitecture(named.join(", ")));
    }
    known
}

fn derived_head_dim(reader: &mut Reader, hidden: Option<u32>, heads: Option<u32>) -> Option<u32> {
    let (hidden, heads) = (hidden?, heads?);
    if hidden % heads != 0 {
        reader.wrong(
            "hidden_size",
            hidden,
            format!("a multiple of num_attention_heads ({heads}) where head_dim is absent"),
        );
        return None;
    }
    Some(hidden / heads)
}

/// Returns the layer whose keys and values each layer reads: of the last `num_kv_shared_layers`, the last layer before
/// them of the same kind; of all others, the layer itself.
fn shared_caches(reader: &mut Reader, facts: &Facts, mixers: Option<&[Mixer]>) -> Option<Vec<u32>> {
    let mixers = mixers?;
    let layers = mixers.len() as u32;
    let shared = match facts.gemma4.then(|| reader.value("num_kv_shared_layers")).flatten() {
        None => 0,
        Some(_) => reader.integer("num_kv_shared_layers", 0, u64::from(layers))?,
    };
    let own = layers - shared;
    let source = |layer: u32| match layer < own {
        true => Some(layer),
        false => (0..own).rev().find(|other| mixers[*other as usize] == mixers[layer as usize]),
    };
    let sources: Option<Vec<u32>> = (0..layers).map(source).collect();
    if sources.is_none() {
        reader.wrong("num_kv_shared_layers", shared, "such that a layer of each kind has keys and values of its own");
    }
    sources
}

/// Returns the inputs of every layer that depend on the token, if the model has them. The inner `None` stands for models
/// without, the outer one for a problem.
#[expect(clippy::option_option, reason = "absent, or wrong")]
fn layer_inputs(
    reader: &mut Reader,
    facts: &Facts,
    layers: Option<u32>,
    vocab: Option<u32>,
    dtype: Option<Dtype>,
) -> Option<Option<LayerInputs>> {
    const WIDTH: &str = "hidden_size_per_layer_input";
    let width = match (facts.gemma4, reader.map.get(WIDTH)) {
        (false, _) | (true, Some(Value::Null)) => 0,
        (true, None) => 256,
        (true, Some(_)) => reader.integer(WIDTH, 0, MAX_DIMENSION / u64::from(layers?))?,
    };
    if width == 0 {
        return Some(None);
    }
    let rows = reader.count_or("vocab_size_per_layer_input", MAX_DIMENSION, 262_144)?;
    if rows < vocab? {
        reader.wrong("vocab_size_per_layer_input", rows, format!("at least vocab_size ({})", vocab?));
    }
    if width % 8 != 0 {
        reader.wrong(WIDTH, width, "a multiple of 8");
    }
    Some(Some(LayerInputs { width, vocab: rows, scale: root(width, dtype) }))
}

/// The mixer of a layer: the part that combines tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mixer {
    Attention(Layers),
    GatedDelta,
    ShortConv,
    None,
}

impl Mixer {
    fn kind(self) -> LayerKind {
        match self {
            Mixer::Attention(_) => LayerKind::Attention,
            Mixer::GatedDelta => LayerKind::GatedDelta,
            Mixer::ShortConv => LayerKind::ShortConv,
            Mixer::None => LayerKind::None,
        }
    }
}

/// A layer that is either a mixer or an MLP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SingleBlock {
    Attention,
    StateSpace,
    Dense,
    Experts,
}

impl SingleBlock {
    /// Returns the block with a name in a list of layers, or with a letter in a string of them.
    fn of(name: &str) -> Option<SingleBlock> {
        match name {
            "full_attention" | "attention" | "*" => Some(SingleBlock::Attention),
            "linear_attention" | "mamba" | "M" => Some(SingleBlock::StateSpace),
            "mlp" | "-" => Some(SingleBlock::Dense),
            "moe" | "E" => Some(SingleBlock::Experts),
            _ => None,
        }
    }

    fn mixer(self) -> Mixer {
        match self {
            SingleBlock::Attention => Mixer::Attention(Layers::Full),
            SingleBlock::StateSpace => Mixer::GatedDelta,
            SingleBlock::Dense | SingleBlock::Experts => Mixer::None,
        }
    }

    fn mlp(self) -> MlpKind {
        match self {
            SingleBlock::Attention | SingleBlock::StateSpace => MlpKind::None,
            SingleBlock::Dense => MlpKind::Dense,
            SingleBlock::Experts => MlpKind::Experts,
        }
    }
}

/// Reads what each layer is, in families whose layers are either a mixer or an MLP: from a list of names, or else from a
/// string of letters. `num_hidden_layers` may be absent.
fn blocks(reader: &mut Reader, keys: BlockKeys) -> Option<Vec<SingleBlock>> {
    let key = keys.names.iter().copied().find(|key| reader.value(key).is_some()).unwrap_or(keys.letters);
    let names: Vec<String> = match reader.value(key).cloned() {
        None => {
            let key = reader.named(keys.names[0]);
            reader.problems.push(ConfigProblem::Missing(key));
            return None;
        }
        Some(Value::Array(names)) if key != keys.letters => {
            names.iter().map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned)).collect()
        }
        Some(Value::String(letters)) if key == keys.letters => letters.chars().map(String::from).collect(),
        Some(other) => {
            let rule = if key == keys.letters { "a string of M, E, * and -" } else { "a list of names" };
            reader.wrong(key, other, rule);
            return None;
        }
    };
    if names.is_empty() || names.len() as u64 > MAX_LAYERS {
        reader.wrong(key, format!("{} long", names.len()), format!("from 1 to {MAX_LAYERS} layers"));
        return None;
    }
    refuse_layers(reader, names.iter().filter(|name| SingleBlock::of(name).is_none()).cloned().collect());
    let blocks: Vec<SingleBlock> = names.iter().map(|name| SingleBlock::of(name)).collect::<Option<_>>()?;
    if let Some(layers) = reader.optional_count("num_hidden_layers", MAX_LAYERS).filter(|n| *n as usize != names.len())
    {
        reader.wrong("num_hidden_layers", layers, format!("the number of layers of {key} ({})", names.len()));
    }
    needs_attention(reader, key, &blocks.iter().map(|block| block.mixer()).collect::<Vec<Mixer>>());
    Some(blocks)
}

/// Returns the token mixing of each layer: `layer_types` if present, otherwise the family's rule.
fn mixers(reader: &mut Reader, facts: &Facts, layers: Option<u32>) -> Option<Vec<Mixer>> {
    if facts.windows == Windows::Never && reader.flag("use_sliding_window") {
        let window = reader.value("sliding_window").map_or("default".to_owned(), Value::to_string);
        let text = format!("use_sliding_window is true, sliding_window is {window}");
        reader.problems.push(ConfigProblem::SlidingWindow(text));
    }
    // Whether `sliding_window` counts at all.
    let slides = match facts.windows {
        Windows::Never => false,
        Windows::Upper => reader.flag("use_sliding_window") && !reader.is_null("sliding_window"),
        Windows::Everywhere(default) => match reader.map.contains_key("sliding_window") {
            true => reader.value("sliding_window").is_some(),
            false => default.is_some(),
        },
        Windows::From(..) => !reader.is_null("sliding_window"),
        Windows::Between(..) => !(facts.rope_in_windows && reader.is_null("sliding_window")),
    };
    let (full, sliding) = (Mixer::Attention(Layers::Full), Mixer::Attention(Layers::Sliding));
    // The classes ignore `layer_types`, but transformers takes a Mistral file with the key for one of another class, which
    // follows it: it may only repeat what the window says.
    let everywhere = matches!(facts.windows, Windows::Everywhere(_));
    if everywhere && let Some(names) = reader.value("layer_types").cloned() {
        let only = if slides { "sliding_attention" } else { "full_attention" };
        if !names.as_array().is_some_and(|names| names.iter().all(|name| name == only)) {
            reader.wrong("layer_types", names, format!("{only} for every layer, as sliding_window says"));
        }
    }
    let Some(names) = reader.value("layer_types").cloned().filter(|_| !everywhere) else {
        let layers = layers?;
        if facts.attention_name.is_some() {
            let key = reader.named("layer_types");
            reader.problems.push(ConfigProblem::Missing(key));
            return None;
        }
        return Some(match facts.windows {
            _ if facts.lfm2 => lfm2_mixers(reader, facts, layers)?,
            _ if facts.hybrid => {
                let interval = reader.count_or("full_attention_interval", MAX_LAYERS, 4)?;
                // The KV cache's pages belong to attention layers, so a model needs at least one.
                if interval > layers {
                    let rule = format!("at most num_hidden_layers ({layers})");
                    reader.wrong("full_attention_interval", interval, rule);
                }
                let at = |layer: u32| if (layer + 1).is_multiple_of(interval) { full } else { Mixer::GatedDelta };
                (0..layers).map(at).collect()
            }
            _ if !slides => vec![full; layers as usize],
            Windows::Never => vec![full; layers as usize],
            Windows::Everywhere(_) => vec![sliding; layers as usize],
            // A window without rotary embedding is on the layers without one.
            Windows::Upper if facts.some_without_rope => {
                let rotated = rotated_layers(reader, facts, layers)?;
                rotated.into_iter().map(|rotated| if rotated { full } else { sliding }).collect()
            }
            Windows::Upper | Windows::From(..) => {
                let from = match (reader.value("max_window_layers"), facts.windows) {
                    (None, Windows::From(default, _)) => default,
                    (None, _) => 28,
                    (Some(_), _) => reader.integer("max_window_layers", 0, MAX_LAYERS)?,
                };
                (0..layers).map(|layer| if layer >= from { sliding } else { full }).collect()
            }
            Windows::Between(keys, default, _) => {
                let key = keys.iter().find(|key| reader.value(key).is_some());
                let every = match key {
                    None => default,
                    Some(key) => reader.optional_count(key, MAX_LAYERS)?,
                };
                let last = |layer: u32| facts.gemma4 && layer + 1 == layers;
                let sees_all = |layer: u32| (layer + 1).is_multiple_of(every) || last(layer);
                (0..layers).map(|layer| if sees_all(layer) { full } else { sliding }).collect()
            }
        });
    };
    let Some(names) = names.as_array() else {
        reader.wrong("layer_types", names, "a list of names");
        return None;
    };
    let mut mixers = Vec::new();
    let mut refused: Vec<String> = Vec::new();
    for name in names {
        match name.as_str() {
            Some("full_attention") => mixers.push(full),
            other if other.is_some() && other == facts.attention_name => mixers.push(full),
            Some("linear_attention") if facts.hybrid || facts.state_spaces.is_some() => mixers.push(Mixer::GatedDelta),
            Some("mamba") if facts.state_spaces.is_some() => mixers.push(Mixer::GatedDelta),
            Some("conv") if facts.lfm2 => mixers.push(Mixer::ShortConv),
            Some("sliding_attention") if slides => mixers.push(sliding),
            other => {
                refused.push(other.map_or_else(|| name.to_string(), str::to_owned));
            }
        }
    }
    if refused.is_empty() {
        needs_attention(reader, "layer_types", &mixers);
    }
    refuse_layers(reader, refused);
    if let Some(layers) = layers
        && layers as usize != names.len()
    {
        let rule = format!("as long as num_hidden_layers ({layers})");
        reader.wrong("layer_types", format!("{} long", names.len()), rule);
        return None;
    }
    // The class lets the last layer see all tokens, whatever the list says.
    if let (true, Some(last)) = (facts.gemma4, mixers.last_mut()) {
        *last = full;
    }
    Some(mixers)
}

/// Refuses layers of these names, each name once.
fn refuse_layers(reader: &mut Reader, names: Vec<String>) {
    for (at, name) in names.iter().enumerate() {
        if !names[..at].contains(name) {
            reader.problems.push(ConfigProblem::UnsupportedLayer(name.clone()));
        }
    }
}

/// Refuses layers without attention: the KV cache's pages belong to attention layers.
fn needs_attention(reader: &mut Reader, key: &str, mixers: &[Mixer]) {
    if !mixers.iter().any(|mixer| mixer.kind() == LayerKind::Attention) {
        reader.wrong(key, "without full_attention", "with a layer of it at least");
    }
}

/// Returns the mixers of LFM2's layers if `layer_types` is absent: attention in those that `full_attn_idxs` lists, or in all if
/// it is absent too and the class has a rule for that.
fn lfm2_mixers(reader: &mut Reader, facts: &Facts, layers: u32) -> Option<Vec<Mixer>> {
    const KEY: &str = "full_attn_idxs";
    let full = Mixer::Attention(Layers::Full);
    let Some(value) = reader.value(KEY).cloned() else {
        if facts.experts.is_some() {
            let key = reader.named("layer_types");
            reader.problems.push(ConfigProblem::Missing(key));
            return None;
        }
        return Some(vec![full; layers as usize]);
    };
    let listed = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    let Some(listed) = listed.filter(|listed| listed.iter().all(|layer| *layer < u64::from(layers))) else {
        reader.wrong(KEY, value, format!("a list of layers below num_hidden_layers ({layers})"));
        return None;
    };
    let at = |layer: u32| if listed.contains(&u64::from(layer)) { full } else { Mixer::ShortConv };
    let mixers: Vec<Mixer> = (0..layers).map(at).collect();
    needs_attention(reader, KEY, &mixers);
    Some(mixers)
}

/// Reads the width of LFM2's dense MLPs. In the family without experts, two thirds of it count, times a factor and rounded up to
/// a multiple, unless `block_auto_adjust_ff_dim` is false.
fn lfm2_width(reader: &mut Reader, facts: &Facts) -> Option<u32> {
    let adjusts = facts.experts.is_none() && reader.flag_or("block_auto_adjust_ff_dim", true);
    let of_block = facts.experts.is_none() && reader.value("block_ff_dim").is_some();
    let key = if of_block { "block_ff_dim" } else { "intermediate_size" };
    let width = reader.count(key, MAX_DIMENSION)?;
    if !adjusts {
        return Some(width);
    }
    const FACTOR: &str = "block_ffn_dim_multiplier";
    let whole = |number: f64| number as u64;
    let mut adjusted = whole(2.0 * f64::from(width) / 3.0);
    // A null is no factor, and then there is no multiple either.
    if !reader.is_null(FACTOR) {
        let factor = reader.positive(FACTOR, Some(1.0))?;
        let multiple = u64::from(reader.count_or("block_multiple_of", MAX_DIMENSION, 256)?);
        adjusted = whole(factor * adjusted as f64).next_multiple_of(multiple);
    }
    if !(1..=MAX_DIMENSION).contains(&adjusted) {
        reader.wrong(key, width, format!("such that the adjusted width is from 1 to {MAX_DIMENSION}, not {adjusted}"));
        return None;
    }
    Some(adjusted as u32)
}

/// Reads the dimensions of short-convolution layers.
fn short_convolution(reader: &mut Reader, hidden: Option<u32>) -> Option<ShortConv> {
    let taps = reader.count_or("conv_L_cache", MAX_DIMENSION, 3);
    if let Some(taps) = taps.filter(|taps| !short_conv::TAPS.contains(taps)) {
        let (least, most) = (short_conv::TAPS.start(), short_conv::TAPS.end());
        reader.wrong("conv_L_cache", taps, format!("an integer from {least} to {most}"));
    }
    if let Some(hidden) = hidden.filter(|hidden| !hidden.is_multiple_of(short_conv::CHANNEL_MULTIPLE)) {
        let rule = format!("a multiple of {} where layers are short convolutions", short_conv::CHANNEL_MULTIPLE);
        reader.wrong("hidden_size", hidden, rule);
    }
    let bias = reader.flag("conv_bias");
    Some(ShortConv { channels: hidden?, taps: taps?, bias })
}

/// Returns whether each layer has a rotary embedding: by `position_embedding_type`, in families that have it;
/// `no_rope_layers`, in which 1 stands for a layer with one; or all but every `no_rope_layer_interval`-th.
fn rotated_layers(reader: &mut Reader, facts: &Facts, layers: u32) -> Option<Vec<bool>> {
    if facts.rotated == Rotated::No {
        return Some(vec![false; layers as usize]);
    }
    if facts.rotated == Rotated::Named {
        const KEY: &str = "position_embedding_type";
        let kind = reader.value(KEY).cloned().unwrap_or(Value::Null);
        if ![Value::Null, "rope".into(), "nope".into()].contains(&kind) {
            reader.wrong(KEY, &kind, "rope, nope or null");
        }
        return Some(vec![kind == "rope"; layers as usize]);
    }
    if !facts.some_without_rope {
        return Some(vec![true; layers as usize]);
    }
    let Some(list) = reader.value("no_rope_layers").cloned() else {
        let interval = reader.count_or("no_rope_layer_interval", MAX_LAYERS, 4)?;
        return Some((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    // Entries beyond the last layer are of no layer.
    let flags = list.as_array().filter(|list| list.len() >= layers as usize);
    let flags = flags.and_then(|list| {
        list[..layers as usize].iter().map(|n| n.as_u64().filter(|n| *n <= 1)).collect::<Option<Vec<_>>>()
    });
    if flags.is_none() {
        let rule = format!("a list of 0 and 1 at least as long as num_hidden_layers ({layers})");
        reader.wrong("no_rope_layers", list, rule);
    }
    Some(flags?.into_iter().map(|flag| flag == 1).collect())
}

/// Returns the kinds of attention layers and the kind of each layer.
fn attention(
    reader: &mut Reader,
    facts: &Facts,
    mixers: Option<&[Mixer]>,
    [heads, kv_heads, head_dim]: [Option<u32>; 3],
    (latent, context, sees): (Option<Latent>, Option<u32>, Sees),
) -> Option<(Vec<Attention>, Vec<usize>)> {
    // Layers that see all tokens may have other heads.
    let keys_as_values = facts.gemma4 && reader.flag("attention_k_eq_v");
    let own = if facts.gemma4 { heads_by_layer(reader, mixers, heads) } else { None };
    if !facts.gemma4
        && let Some(value) = reader.value(PER_LAYER).cloned()
        && value != Value::Object(Map::new())
    {
        reader.wrong(PER_LAYER, value, "absent: only layers of Gemma 4 may differ by it");
    }
    let full_dim = match (facts.gemma4, own) {
        (_, Some([dim, _])) => dim.or(head_dim),
        (true, None) => full_head_dim(reader, heads, head_dim),
        (false, None) => head_dim,
    };
    let full_kv_heads = match (own, keys_as_values && reader.value("num_global_key_value_heads").is_some()) {
        (Some([_, own]), _) => own.or(kv_heads),
        (None, true) => reader.optional_count("num_global_key_value_heads", MAX_DIMENSION),
        (None, false) => kv_heads,
    };
    if let (true, Some(heads), Some(kv_heads)) = (keys_as_values || own.is_some(), heads, full_kv_heads)
        && heads % kv_heads != 0
    {
        let key = if own.is_some() { PER_LAYER } else { "num_global_key_value_heads" };
        reader.wrong(key, kv_heads, format!("a divisor of num_attention_heads ({heads})"));
    }
    let rotated_part = if facts.latent.is_some() { latent.map(|latent| latent.rope) } else { full_dim };
    let full = rope(reader, facts, Layers::Full, rotated_part, context);
    let mixers = mixers?;
    let slides = mixers.contains(&Mixer::Attention(Layers::Sliding));
    let (local, window) = match slides {
        false => (None, None),
        true => {
            let window = match (reader.value("sliding_window"), facts.windows) {
                (Some(_), _) => reader.optional_count("sliding_window", MAX_CONTEXT),
                (
                    None,
                    Windows::Between(_, _, window) | Windows::Everywhere(Some(window)) | Windows::From(_, window),
                ) => Some(window),
                // The class's default.
                (None, _) => Some(4096),
            };
            let window = window.map(|window| sees.window(window));
            (rope(reader, facts, Layers::Sliding, head_dim, context), Some(window?))
        }
    };
    let rotated = rotated_layers(reader, facts, mixers.len() as u32)?;
    let only_windows = facts.rope_in_windows && !reader.is_null("sliding_window");
    let (heads, kv_heads, head_dim) = (heads?, kv_heads?, head_dim?);
    let (full_kv_heads, full_dim) = (full_kv_heads?, full_dim?);
    let full = full?;
    let mut kinds: Vec<Attention> = Vec::new();
    let mut of = Vec::new();
    for (mixer, rotated) in mixers.iter().zip(rotated) {
        let (rope, window) = match mixer {
            Mixer::GatedDelta | Mixer::ShortConv | Mixer::None => {
                of.push(0);
                continue;
            }
            Mixer::Attention(Layers::Full) => (Some(full.clone()), None),
            Mixer::Attention(Layers::Sliding) => (local.clone(), window),
        };
        let (kv_heads, head_dim) = if window.is_none() { (full_kv_heads, full_dim) } else { (kv_heads, head_dim) };
        let values_are_keys = keys_as_values && window.is_none();
        let rope = rope.filter(|_| rotated && (window.is_some() || !only_windows));
        let normed_with = NormedHeads::default();
        let kind = Attention { heads, kv_heads, head_dim, rope, window, values_are_keys, normed_with };
        of.push(kinds.iter().position(|other| *other == kind).unwrap_or(kinds.len()));
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    Some((kinds, of)).filter(|(kinds, _)| !kinds.is_empty())
}

/// The key with the numbers of single layers that differ from those of the model.
const PER_LAYER: &str = "per_layer_config";

/// Returns the dimensions of a head and the number of key heads of the layers that see all tokens, if [`PER_LAYER`] is
/// present: newer versions of transformers write them so, and omit them if they equal those of the other layers.
fn heads_by_layer(reader: &mut Reader, mixers: Option<&[Mixer]>, heads: Option<u32>) -> Option<[Option<u32>; 2]> {
    const OWN: [&str; 2] = ["head_dim", "num_key_value_heads"];
    let value = reader.value(PER_LAYER).cloned()?;
    let (mixers, heads) = (mixers?, heads?);
    let number = |own: &Value, key: &str| match own.get(key) {
        None => Some(None),
        Some(value) => {
            let most = MAX_DIMENSION / u64::from(heads);
            let found = value.as_u64().filter(|n| (1..=most).contains(n) && (key != "head_dim" || n % 2 == 0));
            found.map(|n| Some(n as u32))
        }
    };
    let read = |own: &Value| {
        let known = own.as_object()?.keys().all(|key| OWN.contains(&key.as_str()));
        known.then_some([number(own, OWN[0])?, number(own, OWN[1])?])
    };
    let same = |map: &Map<String, Value>| {
        let within = |layer: &String| layer.parse::<usize>().is_ok_and(|layer| layer < mixers.len());
        let mut full = None;
        for (layer, mixer) in mixers.iter().enumerate() {
            let own = map.get(&layer.to_string()).map_or(Some([None; 2]), read)?;
            match mixer {
                Mixer::Attention(Layers::Full) if *full.get_or_insert(own) == own => {}
                Mixer::Attention(Layers::Sliding) | Mixer::GatedDelta | Mixer::ShortConv if own == [None; 2] => {}
                _ => return None,
            }
        }
        full.filter(|_| map.keys().all(within))
    };
    let found = value.as_object().and_then(same);
    if found.is_none() {
        let rule =
            "an even head_dim and num_key_value_heads, the same for every layer of full_attention and for no other";
        reader.wrong(PER_LAYER, value, rule);
    }
    found
}

/// Reads the dimensions of a head in layers that see all tokens: `global_head_dim`, or those of the other layers if it is
/// null or 0.
fn full_head_dim(reader: &mut Reader, heads: Option<u32>, other: Option<u32>) -> Option<u32> {
    const KEY: &str = "global_head_dim";
    let dim = match reader.map.get(KEY) {
        None => Some(512),
        Some(Value::Null) => Some(0),
        Some(_) => reader.integer(KEY, 0, MAX_DIMENSION / u64::from(heads?)),
    };
    let dim = dim.and_then(|dim| if dim == 0 { other } else { Some(dim) })?;
    if dim % 2 != 0 {
        reader.wrong(KEY, dim, "even");
        return None;
    }
    Some(dim)
}

/// Returns the MLP of each layer, and the experts' dimensions if a layer has experts.
fn mlp_kinds(
    reader: &mut Reader,
    facts: &Facts,
    layers: Option<u32>,
    hidden: Option<u32>,
    blocks: Option<&[SingleBlock]>,
) -> (Option<Vec<MlpKind>>, Option<Experts>) {
    let all = |kind: MlpKind| layers.map(|layers| vec![kind; layers as usize]);
    let style = facts.experts.map(|experts| experts.style);
    let Some(experts) = facts.experts.filter(|_| style != Some(ExpertStyle::Gemma4) || reader.flag("enable_moe_block"))
    else {
        return (all(MlpKind::Dense), None);
    };
    let ExpertFacts {
        count,
        chosen,
        inner,
        shared,
        everywhere,
        normalise,
        count_keys,
        chosen_keys,
        inner_keys,
        bias,
        style,
    } = experts;
    let [key, chosen_key, inner_key] = [count_keys, chosen_keys, inner_keys].map(|keys| reader.first_of(keys));
    if style == ExpertStyle::HunYuan {
        for key in [key, chosen_key, inner_key, "moe_intermediate_size", "num_shared_expert"] {
            same_in_all_layers(reader, key);
        }
        // The class computes by these values without reading the keys.
        fixed(reader, "num_shared_expert", 1);
        if let Some(width) = reader.value(inner_key).cloned() {
            fixed(reader, "moe_intermediate_size", width);
        }
        fixed(reader, "norm_topk_prob", true);
    }
    let count = match reader.value(key) {
        None => Some(count),
        // 0 experts make every layer dense, in families that allow dense layers and do not list those with experts.
        Some(_) => {
            let listed = blocks.is_some_and(|blocks| blocks.contains(&SingleBlock::Experts));
            reader.integer(key, u64::from(everywhere || listed), MAX_DIMENSION)
        }
    };
    let kinds = match (everywhere, count) {
        (true, _) => all(MlpKind::Experts),
        (false, _) if style == ExpertStyle::Nemotron => {
            blocks.map(|blocks| blocks.iter().map(|block| block.mlp()).collect())
        }
        (false, Some(0)) => all(MlpKind::Dense),
        (false, _) => match style {
            ExpertStyle::Qwen => sparse_layers(reader, layers),
            ExpertStyle::DeepSeekV3(dense, ..) => layers_after_dense(reader, layers, dense),
            ExpertStyle::DeepSeekV2 => layers_after_dense(reader, layers, 0),
            ExpertStyle::Ernie => layers_between(reader, layers),
            ExpertStyle::Lfm2(dense) => layers_from(reader, layers, "num_dense_layers", dense),
            ExpertStyle::Gemma4 | ExpertStyle::HunYuan | ExpertStyle::Granite | ExpertStyle::Nemotron => {
                all(MlpKind::Experts)
            }
        },
    };
    if kinds.as_ref().is_some_and(|kinds| !kinds.contains(&MlpKind::Experts)) {
        return (kinds, None);
    }
    let chosen = reader.count_or(chosen_key, MAX_DIMENSION, chosen);
    let inner = reader.count_or(inner_key, MAX_DIMENSION, inner);
    // The key of the shared expert's width, or of the number of experts that are as wide together, and its default.
    let (shared_key, times) = match style {
        ExpertStyle::DeepSeekV3(..) | ExpertStyle::DeepSeekV2 => ("n_shared_experts", Some(1)),
        ExpertStyle::Ernie => ("moe_num_shared_experts", Some(2)),
        ExpertStyle::HunYuan => ("num_shared_expert", Some(1)),
        ExpertStyle::Granite => ("shared_intermediate_size", None),
        ExpertStyle::Nemotron => ("moe_shared_expert_intermediate_size", None),
        ExpertStyle::Qwen | ExpertStyle::Gemma4 | ExpertStyle::Lfm2(_) => ("shared_expert_intermediate_size", None),
    };
    let shared_inner = match (shared, times, reader.value(shared_key)) {
        (None, ..) => Some(0),
        (Some(_), Some(default), stated) => {
            let shared = match stated {
                None => Some(default),
                Some(_) => reader.integer(shared_key, 0, 1024),
            };
            let product = shared.zip(inner).map(|(shared, inner)| u64::from(shared) * u64::from(inner));
            if let Some(product) = product.filter(|product| *product > MAX_DIMENSION) {
                let rule = format!("such that {inner_key} times it is at most {MAX_DIMENSION}, not {product}");
                reader.wrong(shared_key, shared.unwrap_or(0), rule);
            }
            product.filter(|product| *product <= MAX_DIMENSION).map(|product| product as u32)
        }
        (default, None, None) => default,
        (_, None, Some(_)) => reader.integer(shared_key, 0, MAX_DIMENSION),
    };
    let routing = match style {
        ExpertStyle::Qwen => None,
        // A softmax over the chosen logits has the shares of the softmax over all, normalised. The choice without a routing
        // takes a shared expert for one with a gate.
        ExpertStyle::HunYuan | ExpertStyle::Granite => shared_inner.filter(|inner| *inner > 0).map(|_| PLAIN_ROUTING),
        ExpertStyle::Ernie => {
            fixed(reader, "use_bias", false);
            // The least divisor of the chosen experts' shares. Published files have 1e-12, below every sum that matters.
            if let Some(least) = reader.positive("moe_norm_min", None).filter(|least| *least > 1e-9) {
                reader.wrong("moe_norm_min", least, "at most 1e-9");
            }
            Some(Routing { choice_bias: true, ..PLAIN_ROUTING })
        }
        ExpertStyle::Nemotron => {
            // Projections before and after the experts, and biases of the shared expert.
            fixed(reader, "moe_latent_size", Value::Null);
            fixed(reader, "mlp_bias", false);
            routing(reader, count, chosen, (1, 1, 1.0))
        }
        ExpertStyle::DeepSeekV3(_, groups, kept, factor) => routing(reader, count, chosen, (groups, kept, factor)),
        ExpertStyle::DeepSeekV2 => softmax_routing(reader, count, chosen),
        ExpertStyle::Lfm2(_) => {
            let factor = reader.positive("routed_scaling_factor", Some(1.0)).unwrap_or(1.0) as f32;
            let choice_bias = reader.flag_or("use_expert_bias", true);
            Some(Routing { sigmoid: true, choice_bias, sum_offset: 1e-6, factor, ..PLAIN_ROUTING })
        }
        // The router's input is divided by the square root of its width.
        ExpertStyle::Gemma4 => hidden.map(|hidden| Routing {
            sigmoid: false,
            choice_bias: false,
            logit_scale: f64::from(hidden).powf(-0.5) as f32,
            own_norm: true,
            expert_scales: true,
            ..PLAIN_ROUTING
        }),
    };
    let normalise = match style {
        ExpertStyle::DeepSeekV2 => {
            fixed(reader, "norm_topk_prob", false);
            false
        }
        _ => normalise.is_none_or(|default| reader.flag_or("norm_topk_prob", default)),
    };
    if let (Some(count), Some(chosen)) = (count, chosen)
        && chosen > count
    {
        reader.wrong(chosen_key, chosen, format!("at most {key} ({count})"));
    } else if let Some(chosen) = chosen.filter(|chosen| *chosen > MOST_CHOSEN) {
        reader.wrong(chosen_key, chosen, format!("at most {MOST_CHOSEN}"));
    }
    // The first matrix has as many rows, or twice as many with a gate: whole blocks of 16.
    let (_, activation) = facts.activation;
    let multiple = if activation.has_gate() { 8 } else { 16 };
    if let Some(inner) = inner
        && inner % multiple != 0
    {
        reader.wrong(inner_key, inner, format!("a multiple of {multiple}"));
    }
    // In the other styles it is a multiple of the experts' width.
    if let (None, Some(shared)) = (times, shared_inner)
        && shared % multiple != 0
    {
        reader.wrong(shared_key, shared, format!("a multiple of {multiple}"));
    }
    if let Some(hidden) = hidden
        && hidden % 16 != 0
    {
        reader.wrong("hidden_size", hidden, "a multiple of 16 where there are experts");
    }
    if let (Some(count), Some(inner), Some(hidden)) = (count, inner, hidden) {
        let most = MAX_EXPERT_ROWS / (2 * u64::from(inner)).max(u64::from(hidden));
        if u64::from(count) > most {
            reader.wrong(key, count, format!("at most {most} at these sizes"));
        }
    }
    let (Some(count), Some(chosen), Some(inner), Some(shared_inner)) = (count, chosen, inner, shared_inner) else {
        return (kinds, None);
    };
    let shared_inner = Some(shared_inner).filter(|inner| *inner > 0);
    (
        kinds,
        Some(Experts {
            count,
            chosen,
            inner,
            shared_inner,
            shared_gate: style == ExpertStyle::Qwen,
            routing,
            normalise,
            bias,
            beside_dense: style == ExpertStyle::Gemma4,
        }),
    )
}

/// Returns experts for the layers that `mlp_layer_types` calls sparse, or for those from `first_k_dense_replace` on.
fn layers_after_dense(reader: &mut Reader, layers: Option<u32>, dense: u32) -> Option<Vec<MlpKind>> {
    let layers = layers?;
    if let Some(names) = reader.value("mlp_layer_types").cloned() {
        let kind = |name: &Value| match name.as_str() {
            Some("dense") => Some(MlpKind::Dense),
            Some("sparse") => Some(MlpKind::Experts),
            _ => None,
        };
        let list = names.as_array().filter(|list| list.len() == layers as usize);
        let kinds = list.and_then(|list| list.iter().map(kind).collect::<Option<Vec<_>>>());
        if kinds.is_none() {
            let rule = format!("a list of dense and sparse as long as num_hidden_layers ({layers})");
            reader.wrong("mlp_layer_types", names, rule);
        }
        return kinds;
    }
    layers_from(reader, Some(layers), "first_k_dense_replace", dense)
}

/// Returns experts for the layers from a key's value on.
fn layers_from(reader: &mut Reader, layers: Option<u32>, key: &'static str, default: u32) -> Option<Vec<MlpKind>> {
    let dense = match reader.value(key) {
        None => default,
        Some(_) => reader.integer(key, 0, MAX_LAYERS)?,
    };
    Some((0..layers?).map(|layer| if layer < dense { MlpKind::Dense } else { MlpKind::Experts }).collect())
}

/// Replaces a list of the same value for each layer by the value; other lists stay, and are no value of the key.
fn same_in_all_layers(reader: &mut Reader, key: &str) {
    if let Some(Value::Array(values)) = reader.map.get(key)
        && let Some(first) = values.first().filter(|first| values.iter().all(|value| value == *first)).cloned()
    {
        reader.map.insert(key.to_owned(), first);
    }
}

/// Returns experts for every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`, where -1
/// stands for the last layer.
fn layers_between(reader: &mut Reader, layers: Option<u32>) -> Option<Vec<MlpKind>> {
    let (layers, interval) = (layers?, reader.count_or("moe_layer_interval", MAX_LAYERS, 1)?);
    let first = match reader.value("moe_layer_start_index") {
        None => 1,
        Some(_) => reader.integer("moe_layer_start_index", 0, MAX_LAYERS)?,
    };
    let last = match reader.value("moe_layer_end_index") {
        None => layers,
        Some(last) if last.as_i64() == Some(-1) => layers,
        Some(_) => reader.integer("moe_layer_end_index", 0, MAX_LAYERS)?,
    };
    let kind = |layer: u32| match (layer + 1).is_multiple_of(interval) && (first..=last).contains(&layer) {
        true => MlpKind::Experts,
        false => MlpKind::Dense,
    };
    Some((0..layers).map(kind).collect())
}

/// A choice by the greatest softmax scores of all experts.
const PLAIN_ROUTING: Routing = Routing {
    sigmoid: false,
    choice_bias: false,
    groups: 1,
    kept: 1,
    best: 1,
    // All scores may be 0.
    sum_offset: 1e-20,
    factor: 1.0,
    logit_scale: 1.0,
    own_norm: false,
    expert_scales: false,
};

/// Refuses other values of a key than the one by which the family computes, also where the class of transformers ignores
/// the key: the model was trained by what its file says.
fn fixed(reader: &mut Reader, key: &str, only: impl Into<Value>) {
    let only = only.into();
    if let Some(value) = reader.value(key).cloned().filter(|value| *value != only) {
        reader.wrong(key, value, only.as_str().map_or_else(|| only.to_string(), str::to_owned));
    }
}

/// Reads the choice of experts by sigmoid scores with a bias, in groups.
fn routing(
    reader: &mut Reader,
    count: Option<u32>,
    chosen: Option<u32>,
    (groups, kept, factor): (u32, u32, f64),
) -> Option<Routing> {
    // Files of dots.llm1 have the name of the method here.
    if reader.value("scoring_func").and_then(Value::as_str) != Some("noaux_tc") {
        fixed(reader, "scoring_func", "sigmoid");
    }
    fixed(reader, "topk_method", "noaux_tc");
    fixed(reader, "moe_layer_freq", 1);
    let (groups, kept) =
        (reader.count_or("n_group", MAX_DIMENSION, groups)?, reader.count_or("topk_group", MAX_DIMENSION, kept)?);
    let factor = reader.positive("routed_scaling_factor", Some(factor))? as f32;
    let (count, chosen) = (count?, chosen?);
    let each = count / groups;
    if !count.is_multiple_of(groups) || each < 2 {
        reader.wrong("n_group", groups, format!("a divisor of the number of experts ({count}) that leaves two each"));
        return None;
    }
    if kept > groups || kept * each < chosen {
        reader.wrong(
            "topk_group",
            kept,
            format!("at most n_group ({groups}), with num_experts_per_tok ({chosen}) experts"),
        );
        return None;
    }
    Some(Routing { sigmoid: true, choice_bias: true, groups, kept, best: 2, factor, ..PLAIN_ROUTING })
}

/// Reads the choice of experts by softmax scores, in groups if `topk_method` says so.
fn softmax_routing(reader: &mut Reader, count: Option<u32>, chosen: Option<u32>) -> Option<Routing> {
    fixed(reader, "scoring_func", "softmax");
    fixed(reader, "moe_layer_freq", 1);
    let factor = reader.positive("routed_scaling_factor", Some(1.0))? as f32;
    let (groups, kept) = match reader.value("topk_method").cloned() {
        None => (1, 1),
        Some(value) => match value.as_str() {
            Some("greedy") => (1, 1),
            Some("group_limited_greedy") => {
                (reader.count("n_group", MAX_DIMENSION)?, reader.count("topk_group", MAX_DIMENSION)?)
            }
            _ => {
                reader.wrong("topk_method", value, "greedy or group_limited_greedy");
                return None;
            }
        },
    };
    let (count, chosen) = (count?, chosen?);
    if !count.is_multiple_of(groups) {
        reader.wrong("n_group", groups, format!("a divisor of the number of experts ({count})"));
        return None;
    }
    if kept > groups || kept * (count / groups) < chosen {
        let rule = format!("at most n_group ({groups}), with num_experts_per_tok ({chosen}) experts");
        reader.wrong("topk_group", kept, rule);
        return None;
    }
    Some(Routing { groups, kept, factor, ..PLAIN_ROUTING })
}

/// Returns experts for every `decoder_sparse_step`-th layer except those in `mlp_only_layers`, and dense for the
/// others.
fn sparse_layers(reader: &mut Reader, layers: Option<u32>) -> Option<Vec<MlpKind>> {
    let step = reader.count_or("decoder_sparse_step", MAX_LAYERS, 1);
    let mut dense: Vec<u64> = Vec::new();
    match reader.value("mlp_only_layers").cloned() {
        None => {}
        Some(Value::Array(listed)) if listed.iter().all(Value::is_u64) => {
            dense.extend(listed.iter().filter_map(Value::as_u64));
        }
        Some(other) => reader.wrong("mlp_only_layers", other, "a list of layers"),
    }
    let (step, layers) = (step?, layers?);
    let kind = |layer: u32| match (layer + 1).is_multiple_of(step) && !dense.contains(&u64::from(layer)) {
        true => MlpKind::Experts,
        false => MlpKind::Dense,
    };
    Some((0..layers).map(kind).collect())
}

/// Reads the dimensions of gated-delta-rule layers. Absent keys take the class defaults of transformers.
fn delta_net(reader: &mut Reader) -> Option<DeltaNet> {
    let key_heads = reader.count_or("linear_num_key_heads", MAX_DIMENSION, 16);
    let value_heads = reader.count_or("linear_num_value_heads", MAX_DIMENSION, 32);
    let [key_dim, value_dim] = ["linear_key_head_dim", "linear_value_head_dim"].map(|key| {
        let dim = reader.count_or(key, MAX_DIMENSION, 128)?;
        if dim % 16 != 0 || u64::from(dim) > MAX_DELTA_DIM {
            reader.wrong(key, dim, format!("a multiple of 16, at most {MAX_DELTA_DIM}"));
        }
        Some(dim)
    });
    let conv_kernel = reader.count_or("linear_conv_kernel_dim", MAX_DIMENSION, 4);
    if let Some(taps) = conv_kernel
        && taps != 4
    {
        reader.wrong("linear_conv_kernel_dim", taps, "4");
    }
    if let (Some(key_heads), Some(value_heads)) = (key_heads, value_heads)
        && value_heads % key_heads != 0
    {
        reader.wrong(
            "linear_num_value_heads",
            value_heads,
            format!("a multiple of linear_num_key_heads ({key_heads})"),
        );
    }
    // Bounds the rows of q, k, v and z together by MAX_DIMENSION: a head has at most MAX_DELTA_DIM dimensions, and
    // there are at least as many value heads as key heads.
    if let Some(heads) = value_heads.max(key_heads)
        && u64::from(heads) > MAX_DIMENSION / (4 * MAX_DELTA_DIM)
    {
        let most = MAX_DIMENSION / (4 * MAX_DELTA_DIM);
        reader.wrong("linear_num_value_heads", heads, format!("at most {most}"));
    }
    // The activation of the output gate: only SiLU has a kernel.
    match reader.value("output_gate_type").map(|value| (value.as_str().map(str::to_owned), value.to_string())) {
        None => {}
        Some((Some(name), _)) if ["swish", "silu"].contains(&name.as_str()) => {}
        Some((_, value)) => reader.wrong("output_gate_type", value, "swish or silu"),
    }
    Some(DeltaNet {
        key_heads: key_heads?,
        value_heads: value_heads?,
        key_dim: key_dim?,
        value_dim: value_dim?,
        conv_kernel: conv_kernel?,
        tiled: false,
        space: None,
    })
}

/// Reads the dimensions of state spaces. Absent keys take the class defaults of transformers.
fn state_space(reader: &mut Reader, keys: SpaceFacts, hidden: Option<u32>) -> Option<DeltaNet> {
    let [groups_key, taps_key, bias_key] = [keys.groups, keys.taps, keys.conv_bias].map(|keys| reader.first_of(keys));
    let (default_groups, default_state, default_dim) = keys.defaults;
    let heads = reader.count_or(keys.heads, MAX_DIMENSION / (4 * MAX_DELTA_DIM), 128);
    let groups = reader.count_or(groups_key, MAX_DIMENSION / (4 * MAX_DELTA_DIM), default_groups);
    let inner = keys.expand.and_then(|key| {
        let expand = reader.count_or(key, MAX_DIMENSION, 2);
        expand.zip(hidden).map(|(expand, hidden)| u64::from(expand) * u64::from(hidden))
    });
    let state = reader.count_or(keys.state, MAX_DIMENSION, default_state);
    let dim = match (reader.value(keys.head_dim), default_dim) {
        (Some(value), _) if value != "auto" => reader.count_or(keys.head_dim, MAX_DIMENSION, 64),
        (None, Some(default)) => Some(default),
        _ => inner.zip(heads).and_then(|(inner, heads)| u32::try_from(inner / u64::from(heads)).ok()),
    };
    for (key, dim) in [(keys.state, state), (keys.head_dim, dim)] {
        if let Some(dim) = dim
            && (dim == 0 || dim % 16 != 0 || u64::from(dim) > MAX_DELTA_DIM)
        {
            reader.wrong(key, dim, format!("a multiple of 16, at most {MAX_DELTA_DIM}"));
        }
    }
    if let (Some(inner), Some(heads), Some(dim)) = (inner, heads, dim)
        && u64::from(heads) * u64::from(dim) != inner
    {
        let rule = format!("mamba_expand x hidden_size / mamba_d_head ({inner} / {dim})");
        reader.wrong(keys.heads, heads, rule);
    }
    match (groups, heads) {
        // Whether each group has a norm of its own differs between the programs that run such files.
        (Some(groups), _) if groups != 1 && !keys.norms_groups => reader.wrong(groups_key, groups, "1"),
        (Some(groups), Some(heads)) if !heads.is_multiple_of(groups) => {
            reader.wrong(groups_key, groups, format!("a divisor of {} ({heads})", keys.heads));
        }
        _ => {}
    }
    fixed(reader, taps_key, 4);
    keys.unbiased.iter().for_each(|key| fixed(reader, key, false));
    if let Some(key) = keys.activation {
        fixed(reader, key, "silu");
    }
    let conv_bias = reader.flag_or(bias_key, true);
    // The time step, which is positive, has no bound: Python writes infinity in one of two ways.
    for key in keys.limits {
        let Some(limit) = reader.value(key).cloned() else { continue };
        let unbounded = limit.as_array().is_some_and(|limit| match limit.as_slice() {
            [least, most] => {
                least.as_f64() == Some(0.0) && (most == "inf" || most == "Infinity" || most["__float__"] == "Infinity")
            }
            _ => false,
        });
        if !unbounded {
            reader.wrong(key, limit, "from 0 to infinity");
        }
    }
    Some(DeltaNet {
        key_heads: groups?,
        value_heads: heads?,
        key_dim: state?,
        value_dim: dim?,
        conv_kernel: 4,
        tiled: false,
        space: Some(StateSpace { conv_bias, norm_groups: if keys.norms_groups { groups? } else { 1 } }),
    })
}

/// Returns the number of multi-token-prediction (MTP) blocks. Hybrids have one by default; the checkpoint may still
/// lack its tensors. A block with its own embedding is not used, because its LM head would differ too.
fn mtp_layers(reader: &mut Reader, hybrid: bool) -> u32 {
    let key = if reader.value("mtp_num_hidden_layers").is_some() {
        "mtp_num_hidden_layers"
    } else {
        "num_nextn_predict_layers"
    };
    let layers = match reader.value(key) {
        None => 1,
        Some(_) => reader.integer(key, 0, MAX_LAYERS).unwrap_or(0),
    };
    let own_embedding = reader.flag("mtp_use_dedicated_embeddings");
    if hybrid && !own_embedding { layers } else { 0 }
}

/// Reads the rotary embedding of a kind of layers. Without a `partial_rotary_factor`, the family decides which part of a
/// head is rotated.
fn rope(
    reader: &mut Reader,
    facts: &Facts,
    layers: Layers,
    head_dim: Option<u32>,
    context: Option<u32>,
) -> Option<Rope> {
    let parameters = rope::read(reader, facts, layers, context)?;
    // Some files state the number of dimensions instead.
    let part = parameters.partial.or_else(|| {
        let dims = reader.optional_count("rotary_dim", MAX_DIMENSION)?;
        Some(f64::from(dims) / f64::from(head_dim?))
    });
    let partial = match facts.defaults.partial {
        Some(default) => part.unwrap_or(default),
        None => {
            if let Some(partial) = part.filter(|partial| *partial != 1.0) {
                reader.wrong("partial_rotary_factor", partial, "1 for this architecture");
            }
            1.0
        }
    };
    let head_dim = head_dim?;
    // Proportional embeddings rotate a part of each half of a head.
    let rotary_dim = match parameters.proportional {
        true => 2 * ((f64::from(head_dim) * partial) as u32 / 2),
        false => (f64::from(head_dim) * partial) as u32,
    };
    // An odd head_dim has its own problem report.
    if head_dim.is_multiple_of(2) && (rotary_dim == 0 || !rotary_dim.is_multiple_of(2)) {
        let rule = format!("such that it takes an even number of a head's {head_dim} dimensions");
        reader.wrong("partial_rotary_factor", partial, rule);
    }
    if let RopeScaling::LongRope { short, long, .. } = &parameters.scaling {
        for (key, list) in [("short_factor", short), ("long_factor", long)] {
            if list.len() != rotary_dim as usize / 2 {
                let rule = format!("{} long, one for each two rotated dimensions", rotary_dim / 2);
                reader.wrong(&format!("rope_scaling.{key}"), format!("{} long", list.len()), rule);
            }
        }
    }
    let interleaved = match facts.latent {
        Some((_, true)) => reader.flag_or("rope_interleave", facts.interleaved),
        _ => facts.interleaved,
    };
    let stretch = parameters.alpha.map_or(1.0, |alpha| {
        let dims = f64::from(rotary_dim);
        alpha.powf(dims / (dims - 2.0))
    });
    let rope = Rope {
        theta: parameters.theta * stretch,
        rotary_dim,
        scaling: parameters.scaling,
        exponent_dim: if parameters.proportional { head_dim } else { rotary_dim },
        pairs: match parameters.proportional {
            true => RotatedPairs::HalvesOfHead,
            false if interleaved => RotatedPairs::Neighbours,
            false => RotatedPairs::Halves,
        },
        query_growth: parameters.query_growth,
    };
    // The kernels take the mean square before the rotation, which must keep it.
    let factor = rope.attention_scale();
    if facts.qk_norm == QkNorm::RotatedHeads && factor != 1.0 {
        reader.wrong("rope_scaling.attention_factor", factor, "1 where heads have their norms after they are rotated");
    }
    Some(rope)
}

fn dtype(reader: &mut Reader) -> Option<Dtype> {
    let value = reader.value("dtype").or(reader.value("torch_dtype")).cloned()?;
    match value.as_str().map(Dtype::from_str) {
        Some(Ok(dtype)) => Some(dtype),
        // "auto" leaves the choice to the tensors' headers.
        Some(Err(UnknownDtype(name))) if name == "auto" => None,
        Some(Err(UnknownDtype(name))) => {
            reader.problems.push(ConfigProblem::UnsupportedDtype(name));
            None
        }
        None => {
            reader.wrong("dtype", value, "a name");
            None
        }
    }
}

/// Returns the beginning-of-sequence id and the end-of-sequence ids. Those of generation_config.json are added to those
/// of config.json; the first beginning-of-sequence id is used.
fn special_ids(
    reader: &mut Reader,
    generation: Option<&Map<String, Value>>,
    facts: &Facts,
    vocab: Option<u32>,
) -> (Option<u32>, Vec<u32>) {
    let vocab = vocab.map_or(u64::from(u32::MAX), u64::from);
    let [own_eos, own_bos] = ["eos_token_id", "bos_token_id"].map(|key| reader.map.get(key).cloned());
    let mut ids = |file: &str, key: &str, value: Option<Value>| -> Vec<u32> {
        let values = match value {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(values)) => values,
            Some(value) => vec![value],
        };
        let mut found = Vec::new();
        for value in values {
            match value.as_u64().filter(|id| *id < vocab) {
                Some(id) => found.push(id as u32),
                None => {
                    let key = if file.is_empty() { reader.named(key) } else { format!("{file}: {key}") };
                    reader.problems.push(ConfigProblem::Value {
                        key,
                        value: value.to_string(),
                        rule: format!("a token id below {vocab}"),
                    });
                }
            }
        }
        found
    };
    let of = |key: &str| generation.and_then(|generation| generation.get(key));
    let mut named = ids("", "eos_token_id", own_eos.clone());
    named.extend(ids("generation_config.json", "eos_token_id", of("eos_token_id").cloned()));
    let mut eos = Vec::new();
    for id in named {
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    let mut bos = ids("", "bos_token_id", own_bos.clone());
    bos.extend(ids("generation_config.json", "bos_token_id", of("bos_token_id").cloned()));
    // The class defaults of transformers, which old checkpoints rely on.
    if eos.is_empty() && own_eos.is_none() && of("eos_token_id").is_none() {
        eos.extend(facts.defaults.eos.iter().filter(|id| u64::from(**id) < vocab));
    }
    if bos.is_empty() && own_bos.is_none() && of("bos_token_id").is_none() {
        bos.extend(facts.defaults.bos.filter(|id| u64::from(*id) < vocab));
    }
    (bos.first().copied(), eos)
}
