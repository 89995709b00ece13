//! Reads config.json key by key. Absent keys take the class defaults of transformers; invalid values are recorded as
//! problems. A multimodal model keeps the keys of its text model in `text_config`, which take precedence over keys of
//! the same name outside.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

use super::quantization::{self, Quantization};
use super::rope::{self, Rope};
use super::{
    Activation, Architecture, ConfigProblem, DeltaNet, Dtype, Experts, LayerKind, MlpKind, ModelConfig, NormKind,
    UnknownDtype,
};

/// The maximum size of a dimension. A larger value means that the file is damaged.
const MAX_DIMENSION: u64 = 1 << 24;
/// The maximum number of layers.
const MAX_LAYERS: u64 = 4096;
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
    fn optional_count(&mut self, key: &str, most: u64) -> Option<u32> {
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

    fn flag(&mut self, key: &str) -> bool {
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
    let architecture = architecture(reader);
    let quantization = quantization(reader, quantized);
    let activation = reader.value("hidden_act").or(reader.value("hidden_activation")).cloned();
    match activation.as_ref().map(|value| value.as_str().ok_or(value)) {
        None | Some(Ok("silu" | "swish")) => {}
        Some(Ok(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_owned())),
        Some(Err(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_string())),
    }
    let dtype = dtype(reader);

    let hidden = reader.count("hidden_size", MAX_DIMENSION);
    let layers = reader.count("num_hidden_layers", MAX_LAYERS);
    let layer_kinds = layer_kinds(reader, architecture, layers);
    let (mlp_kinds, experts) = mlp_kinds(reader, architecture, layers, hidden);
    let intermediate = match &mlp_kinds {
        Some(kinds) if !kinds.contains(&MlpKind::Dense) => Some(0),
        _ => reader.count("intermediate_size", MAX_DIMENSION),
    };
    let delta = layer_kinds.as_ref().is_some_and(|kinds| kinds.contains(&LayerKind::GatedDelta));
    let delta = delta.then(|| delta_net(reader));
    let heads = reader.count("num_attention_heads", MAX_DIMENSION);
    let vocab = reader.count("vocab_size", MAX_DIMENSION);
    let kv_heads = match reader.value("num_key_value_heads") {
        None => architecture.and_then(default_kv_heads).or(heads),
        Some(_) => reader.optional_count("num_key_value_heads", MAX_DIMENSION),
    };
    let head_dim = match (reader.map.get("head_dim"), architecture) {
        // The class default of transformers; no released checkpoint omits the key.
        (None, Some(Architecture::Qwen3)) => Some(128),
        (None, Some(architecture)) if architecture.is_hybrid() => Some(256),
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

    let rms_eps = match reader.value("rms_norm_eps").cloned() {
        None => 1e-6,
        Some(value) => match value.as_f64().map(|eps| eps as f32) {
            Some(eps) if eps.is_finite() && eps > 0.0 => eps,
            _ => {
                reader.wrong("rms_norm_eps", value, "a positive number");
                1e-6
            }
        },
    };
    let context = match (reader.value("max_position_embeddings"), architecture) {
        (Some(_), _) => reader.optional_count("max_position_embeddings", MAX_CONTEXT),
        (None, Some(Architecture::Llama)) => Some(2048),
        (None, Some(_)) => Some(32768),
        (None, None) => None,
    };
    let rope = rope(reader, architecture, head_dim, context);
    let tied = reader.flag("tie_word_embeddings");
    let attention_bias = reader.flag("attention_bias");
    // Only Llama has this key. The other families' MLPs have no biases, whatever the file says.
    let mlp_bias = reader.flag("mlp_bias") && architecture == Some(Architecture::Llama);
    let (bos, eos) = special_ids(reader, generation, architecture, vocab);

    let hybrid = architecture.is_some_and(Architecture::is_hybrid);
    let attention_gate = reader.flag_or("attn_output_gate", true) && hybrid;
    let mtp_layers = mtp_layers(reader, hybrid);

    let architecture = architecture?;
    let head_dim = head_dim?;
    Some(ModelConfig {
        architecture,
        hidden: hidden?,
        intermediate: intermediate?,
        layers: layers?,
        heads: heads?,
        kv_heads: kv_heads?,
        head_dim,
        rms_eps,
        vocab: vocab?,
        tied,
        attention_bias,
        mlp_bias,
        qk_norm: architecture != Architecture::Llama,
        attention_gate,
        rope: rope?,
        norm: if hybrid { NormKind::ZeroCentred } else { NormKind::Plain },
        activation: Activation::Silu,
        layer_kinds: layer_kinds?,
        mlp_kinds: mlp_kinds?,
        delta: match delta {
            Some(delta) => Some(delta?),
            None => None,
        },
        experts,
        mtp_layers,
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

fn architecture(reader: &mut Reader) -> Option<Architecture> {
    let named = match reader.value("architectures") {
        Some(Value::Array(names)) if !names.is_empty() => {
            names.iter().map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned)).collect::<Vec<_>>()
        }
        None => match reader.value("model_type").and_then(Value::as_str) {
            Some(model_type) => {
                match Architecture::ALL.into_iter().find(|known| known.model_types().contains(&model_type)) {
                    Some(known) => return Some(known),
                    None => vec![model_type.to_owned()],
                }
            }
            None => {
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
    let known = Architecture::ALL
        .into_iter()
        .find(|architecture| named.iter().any(|name| architecture.names().contains(&name.as_str())));
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

/// Returns the default number of key and value heads, or `None` if the default is one per query head.
fn default_kv_heads(architecture: Architecture) -> Option<u32> {
    match architecture {
        Architecture::Qwen3 | Architecture::Llama => None,
        Architecture::Qwen3Moe | Architecture::Qwen35 => Some(4),
        Architecture::Qwen3Next | Architecture::Qwen35Moe => Some(2),
    }
}

/// Returns the token mixing of each layer: `layer_types` if present. Otherwise every `full_attention_interval`-th layer
/// of a hybrid has full attention, and every layer of other models does.
fn layer_kinds(reader: &mut Reader, architecture: Option<Architecture>, layers: Option<u32>) -> Option<Vec<LayerKind>> {
    if reader.flag("use_sliding_window") {
        let window = reader.value("sliding_window").map_or("default".to_owned(), Value::to_string);
        let text = format!("use_sliding_window is true, sliding_window is {window}");
        reader.problems.push(ConfigProblem::SlidingWindow(text));
    }
    let hybrid = architecture.is_some_and(Architecture::is_hybrid);
    let Some(names) = reader.value("layer_types").cloned() else {
        if !hybrid {
            return layers.map(|layers| vec![LayerKind::FullAttention; layers as usize]);
        }
        let interval = reader.count_or("full_attention_interval", MAX_LAYERS, 4)?;
        let kind = |layer: u32| match (layer + 1) % interval {
            0 => LayerKind::FullAttention,
            _ => LayerKind::GatedDelta,
        };
        // The KV cache's pages belong to full-attention layers, so a model needs at least one.
        if let Some(layers) = layers.filter(|layers| interval > *layers) {
            reader.wrong("full_attention_interval", interval, format!("at most num_hidden_layers ({layers})"));
        }
        return layers.map(|layers| (0..layers).map(kind).collect());
    };
    let Some(names) = names.as_array() else {
        reader.wrong("layer_types", names, "a list of names");
        return None;
    };
    let mut kinds = Vec::new();
    let mut refused: Vec<String> = Vec::new();
    for name in names {
        match name.as_str() {
            Some("full_attention") => kinds.push(LayerKind::FullAttention),
            Some("linear_attention") if hybrid => kinds.push(LayerKind::GatedDelta),
            other => {
                let name = other.map_or_else(|| name.to_string(), str::to_owned);
                if !refused.contains(&name) {
                    reader.problems.push(ConfigProblem::UnsupportedLayer(name.clone()));
                    refused.push(name);
                }
            }
        }
    }
    if refused.is_empty() && !kinds.contains(&LayerKind::FullAttention) {
        reader.wrong("layer_types", "without full_attention", "with a layer of it at least");
    }
    if let Some(layers) = layers
        && layers as usize != names.len()
    {
        let rule = format!("as long as num_hidden_layers ({layers})");
        reader.wrong("layer_types", format!("{} long", names.len()), rule);
    }
    Some(kinds)
}

/// Returns the MLP of each layer, and the experts' dimensions if a layer has experts.
fn mlp_kinds(
    reader: &mut Reader,
    architecture: Option<Architecture>,
    layers: Option<u32>,
    hidden: Option<u32>,
) -> (Option<Vec<MlpKind>>, Option<Experts>) {
    let all = |kind: MlpKind| layers.map(|layers| vec![kind; layers as usize]);
    // The class defaults: number of experts, experts chosen per token, their intermediate size, the shared expert's
    // intermediate size.
    let (count, chosen, inner, shared) = match architecture {
        Some(Architecture::Qwen3Moe) => (128, 8, 768, None),
        Some(Architecture::Qwen3Next) => (512, 10, 512, Some(512)),
        Some(Architecture::Qwen35Moe) => (256, 8, 512, Some(512)),
        Some(Architecture::Qwen3 | Architecture::Llama | Architecture::Qwen35) => return (all(MlpKind::Dense), None),
        None => return (None, None),
    };
    let everywhere = architecture == Some(Architecture::Qwen35Moe);
    let key = if reader.value("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let count = match reader.value(key) {
        None => Some(count),
        // 0 experts make every layer dense, in families that allow dense layers.
        Some(_) => reader.integer(key, u64::from(everywhere), MAX_DIMENSION),
    };
    let kinds = match (everywhere, count) {
        (true, _) => all(MlpKind::Experts),
        (false, Some(0)) => all(MlpKind::Dense),
        (false, _) => sparse_layers(reader, layers),
    };
    if kinds.as_ref().is_some_and(|kinds| !kinds.contains(&MlpKind::Experts)) {
        return (kinds, None);
    }
    let chosen = reader.count_or("num_experts_per_tok", MAX_DIMENSION, chosen);
    let inner = reader.count_or("moe_intermediate_size", MAX_DIMENSION, inner);
    let shared_inner = match (shared, reader.value("shared_expert_intermediate_size")) {
        (None, _) => Some(0),
        (default, None) => default,
        (_, Some(_)) => reader.integer("shared_expert_intermediate_size", 0, MAX_DIMENSION),
    };
    let normalise = match architecture {
        Some(Architecture::Qwen35Moe) => true,
        architecture => reader.flag_or("norm_topk_prob", architecture == Some(Architecture::Qwen3Next)),
    };
    if let (Some(count), Some(chosen)) = (count, chosen)
        && chosen > count
    {
        reader.wrong("num_experts_per_tok", chosen, format!("at most {key} ({count})"));
    }
    if let Some(inner) = inner
        && inner % 8 != 0
    {
        reader.wrong("moe_intermediate_size", inner, "a multiple of 8");
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
    (kinds, Some(Experts { count, chosen, inner, shared_inner, normalise }))
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

/// Reads the rotary embedding. Without a `partial_rotary_factor`, hybrids rotate a quarter of a head and other models
/// all of it.
fn rope(
    reader: &mut Reader,
    architecture: Option<Architecture>,
    head_dim: Option<u32>,
    context: Option<u32>,
) -> Option<Rope> {
    let parameters = rope::read(reader, context)?;
    let partial = match architecture? {
        architecture if architecture.is_hybrid() => parameters.partial.unwrap_or(0.25),
        _ => {
            if let Some(partial) = parameters.partial.filter(|partial| *partial != 1.0) {
                reader.wrong("partial_rotary_factor", partial, "1 for this architecture");
            }
            1.0
        }
    };
    let head_dim = head_dim?;
    let rotary_dim = (f64::from(head_dim) * partial) as u32;
    // An odd head_dim has its own problem report.
    if head_dim.is_multiple_of(2) && (rotary_dim == 0 || !rotary_dim.is_multiple_of(2)) {
        let rule = format!("such that it takes an even number of a head's {head_dim} dimensions");
        reader.wrong("partial_rotary_factor", partial, rule);
    }
    Some(Rope { theta: parameters.theta, rotary_dim, scaling: parameters.scaling })
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
    architecture: Option<Architecture>,
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
    // The class defaults of transformers, which old Llama checkpoints rely on.
    if architecture == Some(Architecture::Llama) {
        if eos.is_empty() && own_eos.is_none() && of("eos_token_id").is_none() && vocab > 2 {
            eos.push(2);
        }
        if bos.is_empty() && own_bos.is_none() && of("bos_token_id").is_none() && vocab > 1 {
            bos.push(1);
        }
    }
    (bos.first().copied(), eos)
}
