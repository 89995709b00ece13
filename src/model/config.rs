//! The shape of a model, read from config.json (and generation_config.json) alone.
//! Every problem of a file is reported at once. Deliberately absent: files, tensors, and
//! anything known by a model's name instead of its configuration.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

/// The largest size that a dimension may have; above it a file is damaged, not a model.
const MAX_DIMENSION: u64 = 1 << 24;
/// The most layers.
const MAX_LAYERS: u64 = 4096;
/// The longest context, in tokens.
const MAX_CONTEXT: u64 = 1 << 30;

/// A model family whose forward pass we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: dense, with a norm on each query and key head.
    Qwen3,
    /// `LlamaForCausalLM`: dense.
    Llama,
}

impl Architecture {
    /// The name in config.json's `architectures`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Qwen3 => "Qwen3ForCausalLM",
            Architecture::Llama => "LlamaForCausalLM",
        }
    }
}

/// A storage format of weights that we read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// 16 bits: the upper half of an f32.
    Bf16,
    /// 16 bits: IEEE half precision.
    F16,
    /// 32 bits.
    F32,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }

    /// The name in a safetensors header.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
        }
    }

    /// The name in config.json.
    pub fn config_name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
            Dtype::F32 => "float32",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::F32 => "f32",
        })
    }
}

/// Accepts `bf16` and the spellings of config.json and safetensors, in any case.
impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(text: &str) -> Result<Dtype, UnknownDtype> {
        match text.to_ascii_lowercase().as_str() {
            "bf16" | "bfloat16" | "torch.bfloat16" => Ok(Dtype::Bf16),
            "f16" | "fp16" | "float16" | "half" | "torch.float16" => Ok(Dtype::F16),
            "f32" | "fp32" | "float32" | "float" | "torch.float32" => Ok(Dtype::F32),
            _ => Err(UnknownDtype(text.to_owned())),
        }
    }
}

/// A number format that we do not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("number format \"{0}\" is not supported (bf16, f16 and f32 are)")]
pub struct UnknownDtype(pub String);

/// What mixes the tokens of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Attention over every earlier position.
    FullAttention,
}

/// How an RMS norm uses its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Multiplies by `w`.
    Plain,
    /// Multiplies by `1 + w`.
    ZeroCentred,
}

/// The function between the gate and the product of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// How the rotary frequencies are changed for a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency is divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// Low frequencies are divided, high ones kept, those between interpolated.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are high.
        high_freq_factor: f64,
        /// Context of the first training, in tokens.
        original_context: f64,
    },
    /// A linear ramp over the dimensions between divided and kept frequencies.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context of the first training, in tokens.
        original_context: f64,
        /// Rotations over the original context at which the ramp begins.
        beta_fast: f64,
        /// Rotations at which it ends.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Multiplies cos and sin; `None`: derived from `factor` and the two below.
        attention_factor: Option<f64>,
        /// Numerator's coefficient of the derived attention factor.
        mscale: Option<f64>,
        /// Denominator's coefficient of the derived attention factor.
        mscale_all_dim: Option<f64>,
    },
}

/// Rotary position embedding, rotate-half style.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How many of a head's first dimensions are rotated (even).
    pub rotary_dim: u32,
    /// The change for longer contexts.
    pub scaling: RopeScaling,
}

impl Rope {
    /// `[rotary_dim / 2]`: the angle of dimension pair `j` at position `p` is `p * inv_freq[j]`.
    ///
    /// Powers are taken in f64 and rounded; what follows is done in f32 in the order of
    /// transformers, so that the result differs from its tables by a rounding at most.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f32;
        let theta = f64::from(self.theta as f32);
        let powers: Vec<f32> =
            (0..self.rotary_dim / 2).map(|j| theta.powf(f64::from((2 * j) as f32 / dim)) as f32).collect();
        match self.scaling {
            RopeScaling::Default => powers.iter().map(|p| 1.0 / p).collect(),
            RopeScaling::Linear { factor } => powers.iter().map(|p| 1.0 / p / factor as f32).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let longest = (original_context / low_freq_factor) as f32;
                let shortest = (original_context / high_freq_factor) as f32;
                let span = (high_freq_factor - low_freq_factor) as f32;
                let factor = factor as f32;
                powers
                    .iter()
                    .map(|p| {
                        let inv = 1.0 / p;
                        let wavelength = (1.0 / inv) * std::f64::consts::TAU as f32;
                        if wavelength > longest {
                            inv / factor
                        } else if wavelength < shortest {
                            inv
                        } else {
                            let ratio = (1.0 / wavelength) * original_context as f32;
                            let smooth = (ratio - low_freq_factor as f32) / span;
                            (1.0 - smooth) * inv / factor + smooth * inv
                        }
                    })
                    .collect()
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let dim = f64::from(self.rotary_dim);
                let correction = |rotations: f64| {
                    dim * (original_context / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (correction(beta_fast), correction(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                powers
                    .iter()
                    .enumerate()
                    .map(|(j, p)| {
                        let ramp = ((j as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        let divided = 1.0 / (factor as f32 * p);
                        divided * (1.0 - kept) + (1.0 / p) * kept
                    })
                    .collect()
            }
        }
    }

    /// Multiplies cos and sin, of queries and of keys; 1 except with yarn.
    pub fn attention_scale(&self) -> f32 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = self.scaling else {
            return 1.0;
        };
        let derived = |coefficient: f64| if factor <= 1.0 { 1.0 } else { 0.1 * coefficient * factor.ln() + 1.0 };
        let scale = match (attention_factor, mscale, mscale_all_dim) {
            (Some(scale), _, _) => scale,
            (None, Some(above), Some(below)) => derived(above) / derived(below),
            _ => derived(1.0),
        };
        scale as f32
    }
}

/// Everything that config.json says of a model, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the MLP.
    pub intermediate: u32,
    /// Layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Dimensions of a head (even); `heads * head_dim` need not be `hidden`.
    pub head_dim: u32,
    /// Added to the mean square in every norm.
    pub rms_eps: f32,
    /// Rows of the embedding and of the head.
    pub vocab: u32,
    /// Whether the embedding serves as the head.
    pub tied: bool,
    /// Whether the q, k, v and o projections have biases.
    pub attention_bias: bool,
    /// Whether the gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// Whether each query and key head is normed before the rotation.
    pub qk_norm: bool,
    /// Rotary embedding.
    pub rope: Rope,
    /// How norms use their weights.
    pub norm: NormKind,
    /// The MLP's activation.
    pub activation: Activation,
    /// `[layers]`.
    pub layer_kinds: Vec<LayerKind>,
    /// The longest sequence, in tokens.
    pub context: u32,
    /// Ids that end a sequence, without repeats.
    pub eos: Vec<u32>,
    /// The id that begins a sequence.
    pub bos: Option<u32>,
    /// What config.json says of the weights' format; the tensors have the last word.
    pub dtype: Option<Dtype>,
}

impl ModelConfig {
    /// Reads config.json's text, and generation_config.json's where there is one.
    pub fn parse(config_json: &str, generation_config: Option<&str>) -> Result<ModelConfig, ConfigError> {
        let mut problems = Vec::new();
        let mut object = |file: &'static str, text: &str| match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(map)) => Some(map),
            Ok(_) => {
                problems.push(ConfigProblem::NotJson { file, reason: "not an object".to_owned() });
                None
            }
            Err(error) => {
                problems.push(ConfigProblem::NotJson { file, reason: error.to_string() });
                None
            }
        };
        let config = object("config.json", config_json);
        let generation = generation_config.and_then(|text| object("generation_config.json", text));
        let Some(config) = config else {
            return Err(ConfigError { problems });
        };
        let mut reader = Reader { map: &config, problems };
        let parsed = read(&mut reader, generation.as_ref());
        match parsed {
            Some(parsed) if reader.problems.is_empty() => Ok(parsed),
            _ => Err(ConfigError { problems: reader.problems }),
        }
    }

    /// Rows of the query projection: `heads * head_dim`.
    pub fn q_rows(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Rows of the key projection, and of the value projection: `kv_heads * head_dim`.
    pub fn kv_rows(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Elements of keys and values that one token adds, over all layers.
    pub fn kv_elements_per_token(&self) -> u64 {
        2 * u64::from(self.layers) * u64::from(self.kv_rows())
    }
}

/// A configuration that we cannot run, with every reason.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigError {
    /// At least one.
    pub problems: Vec<ConfigProblem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// One reason why a configuration cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigProblem {
    /// The file is not a JSON object.
    #[error("{file} is not valid: {reason}")]
    NotJson {
        /// Its name.
        file: &'static str,
        /// The parser's words.
        reason: String,
    },
    /// A family that we do not know.
    #[error("architecture \"{0}\" is not supported (Qwen3ForCausalLM and LlamaForCausalLM are)")]
    UnsupportedArchitecture(String),
    /// A function that we do not know.
    #[error("activation \"{0}\" is not supported (silu is)")]
    UnsupportedActivation(String),
    /// A way of scaling that we do not know.
    #[error("rope type \"{0}\" is not supported (default, linear, llama3 and yarn are)")]
    UnsupportedRope(String),
    /// A number format that we do not read.
    #[error("dtype \"{0}\" is not supported (bfloat16, float16 and float32 are)")]
    UnsupportedDtype(String),
    /// The weights are quantized.
    #[error("quantization \"{0}\" is not supported")]
    Quantized(String),
    /// Attention that forgets.
    #[error("sliding-window attention is not supported ({0})")]
    SlidingWindow(String),
    /// A layer that is neither full attention nor anything else we know.
    #[error("layer type \"{0}\" is not supported (full_attention is)")]
    UnsupportedLayer(String),
    /// A key that has to be there.
    #[error("{0} is missing")]
    Missing(String),
    /// A value of the wrong type or out of range.
    #[error("{key} is {value}, must be {rule}")]
    Value {
        /// The key, with dots.
        key: String,
        /// What the file says.
        value: String,
        /// What is allowed.
        rule: String,
    },
}

/// Reads keys of one object and notes what is wrong with them.
struct Reader<'a> {
    map: &'a Map<String, Value>,
    problems: Vec<ConfigProblem>,
}

impl Reader<'_> {
    /// The value, if there is one that isn't null.
    fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&mut self, key: &str, value: impl fmt::Display, rule: impl Into<String>) {
        self.problems.push(ConfigProblem::Value { key: key.to_owned(), value: value.to_string(), rule: rule.into() });
    }

    /// An integer from 1 to `most`; notes it if it is missing.
    fn count(&mut self, key: &str, most: u64) -> Option<u32> {
        if self.value(key).is_none() {
            self.problems.push(ConfigProblem::Missing(key.to_owned()));
            return None;
        }
        self.optional_count(key, most)
    }

    /// An integer from 1 to `most`, if there is one.
    fn optional_count(&mut self, key: &str, most: u64) -> Option<u32> {
        let value = self.value(key)?.clone();
        match value.as_u64() {
            Some(n) if (1..=most).contains(&n) => Some(n as u32),
            _ => {
                self.wrong(key, value, format!("an integer from 1 to {most}"));
                None
            }
        }
    }

    fn flag(&mut self, key: &str) -> bool {
        match self.value(key) {
            None => false,
            Some(Value::Bool(flag)) => *flag,
            Some(other) => {
                let other = other.clone();
                self.wrong(key, other, "true or false");
                false
            }
        }
    }
}

/// Reads the whole configuration; what is wrong is in the reader's problems.
fn read(reader: &mut Reader<'_>, generation: Option<&Map<String, Value>>) -> Option<ModelConfig> {
    let architecture = architecture(reader);
    if let Some(quantization) = reader.value("quantization_config").or(reader.value("compression_config")) {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        reader.problems.push(ConfigProblem::Quantized(method.to_owned()));
    }
    let activation = reader.value("hidden_act").or(reader.value("hidden_activation")).cloned();
    match activation.as_ref().map(|value| value.as_str().ok_or(value)) {
        None | Some(Ok("silu" | "swish")) => {}
        Some(Ok(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_owned())),
        Some(Err(other)) => reader.problems.push(ConfigProblem::UnsupportedActivation(other.to_string())),
    }
    sliding_window(reader);
    let dtype = dtype(reader);

    let hidden = reader.count("hidden_size", MAX_DIMENSION);
    let intermediate = reader.count("intermediate_size", MAX_DIMENSION);
    let layers = reader.count("num_hidden_layers", MAX_LAYERS);
    let heads = reader.count("num_attention_heads", MAX_DIMENSION);
    let vocab = reader.count("vocab_size", MAX_DIMENSION);
    let kv_heads = match reader.value("num_key_value_heads") {
        None => heads,
        Some(_) => reader.optional_count("num_key_value_heads", MAX_DIMENSION),
    };
    let head_dim = match (reader.map.get("head_dim"), architecture) {
        // The class default of transformers; no released checkpoint leaves it out.
        (None, Some(Architecture::Qwen3)) => Some(128),
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
        (None, Some(Architecture::Qwen3)) => Some(32768),
        (None, None) => None,
    };
    let scaling = rope(reader, context);
    let tied = reader.flag("tie_word_embeddings");
    let attention_bias = reader.flag("attention_bias");
    // Qwen3 has no such key: its MLP is built without biases whatever the file says.
    let mlp_bias = reader.flag("mlp_bias") && architecture == Some(Architecture::Llama);
    let (bos, eos) = special_ids(reader, generation, architecture, vocab);

    let architecture = architecture?;
    let layers = layers?;
    let head_dim = head_dim?;
    let (theta, scaling) = scaling?;
    Some(ModelConfig {
        architecture,
        hidden: hidden?,
        intermediate: intermediate?,
        layers,
        heads: heads?,
        kv_heads: kv_heads?,
        head_dim,
        rms_eps,
        vocab: vocab?,
        tied,
        attention_bias,
        mlp_bias,
        qk_norm: architecture == Architecture::Qwen3,
        rope: Rope { theta, rotary_dim: head_dim, scaling },
        norm: NormKind::Plain,
        activation: Activation::Silu,
        layer_kinds: vec![LayerKind::FullAttention; layers as usize],
        context: context?,
        eos,
        bos,
        dtype,
    })
}

fn architecture(reader: &mut Reader<'_>) -> Option<Architecture> {
    let named = match reader.value("architectures") {
        Some(Value::Array(names)) if !names.is_empty() => {
            names.iter().map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned)).collect::<Vec<_>>()
        }
        None => match reader.value("model_type").and_then(Value::as_str) {
            Some("qwen3") => return Some(Architecture::Qwen3),
            Some("llama") => return Some(Architecture::Llama),
            Some(other) => vec![other.to_owned()],
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
    let known = [Architecture::Qwen3, Architecture::Llama]
        .into_iter()
        .find(|architecture| named.iter().any(|name| name == architecture.name()));
    if known.is_none() {
        reader.problems.push(ConfigProblem::UnsupportedArchitecture(named.join(", ")));
    }
    known
}

fn derived_head_dim(reader: &mut Reader<'_>, hidden: Option<u32>, heads: Option<u32>) -> Option<u32> {
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

fn sliding_window(reader: &mut Reader<'_>) {
    if reader.flag("use_sliding_window") {
        let window = reader.value("sliding_window").map_or("default".to_owned(), Value::to_string);
        let text = format!("use_sliding_window is true, sliding_window is {window}");
        reader.problems.push(ConfigProblem::SlidingWindow(text));
    }
    let Some(kinds) = reader.value("layer_types").cloned() else {
        return;
    };
    let Some(kinds) = kinds.as_array() else {
        reader.wrong("layer_types", kinds, "a list of names");
        return;
    };
    let mut refused: Vec<String> = Vec::new();
    for kind in kinds {
        let name = kind.as_str().map_or_else(|| kind.to_string(), str::to_owned);
        if name != "full_attention" && !refused.contains(&name) {
            reader.problems.push(ConfigProblem::UnsupportedLayer(name.clone()));
            refused.push(name);
        }
    }
    if let Some(layers) = reader.value("num_hidden_layers").and_then(Value::as_u64)
        && layers != kinds.len() as u64
    {
        let rule = format!("as long as num_hidden_layers ({layers})");
        reader.wrong("layer_types", format!("{} long", kinds.len()), rule);
    }
}

fn dtype(reader: &mut Reader<'_>) -> Option<Dtype> {
    let value = reader.value("dtype").or(reader.value("torch_dtype")).cloned()?;
    match value.as_str().map(Dtype::from_str) {
        Some(Ok(dtype)) => Some(dtype),
        // "auto" leaves it to the tensors.
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

/// Both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`.
fn rope(reader: &mut Reader<'_>, context: Option<u32>) -> Option<(f64, RopeScaling)> {
    let before = reader.problems.len();
    let mut section = "rope_scaling";
    let mut parameters = Map::new();
    for name in ["rope_scaling", "rope_parameters"] {
        match reader.value(name).cloned() {
            None => {}
            // transformers prefers `rope_scaling` where both are given.
            Some(Value::Object(map)) if parameters.is_empty() && !map.is_empty() => {
                section = name;
                parameters = map;
            }
            Some(Value::Object(_)) => {}
            Some(other) => reader.wrong(name, other, "an object"),
        }
    }
    let mut number = |key: &str, least: f64, default: Option<f64>| -> Option<f64> {
        let (value, key) = match parameters.get(key).filter(|value| !value.is_null()) {
            Some(value) => (Some(value.clone()), format!("{section}.{key}")),
            None if key == "rope_theta" || key == "partial_rotary_factor" => {
                (reader.value(key).cloned(), key.to_owned())
            }
            None => (None, format!("{section}.{key}")),
        };
        match (value, default) {
            (None, default) => default,
            (Some(value), _) => match value.as_f64().filter(|n| n.is_finite() && *n > least) {
                Some(n) => Some(n),
                None => {
                    reader.wrong(&key, value, format!("a number above {least}"));
                    default
                }
            },
        }
    };

    let theta = number("rope_theta", 1.0, Some(10_000.0))?;
    let partial = number("partial_rotary_factor", 0.0, Some(1.0))?;
    let factor = number("factor", 0.0, None);
    let low = number("low_freq_factor", 0.0, None);
    let high = number("high_freq_factor", 0.0, None);
    let original = number("original_max_position_embeddings", 0.0, context.map(f64::from));
    let beta_fast = number("beta_fast", 0.0, Some(32.0))?;
    let beta_slow = number("beta_slow", 0.0, Some(1.0))?;
    let attention_factor = number("attention_factor", 0.0, None);
    let mscale = number("mscale", 0.0, None);
    let mscale_all_dim = number("mscale_all_dim", 0.0, None);
    if partial != 1.0 {
        reader.wrong("partial_rotary_factor", partial, "1 for these architectures");
    }
    // A model-wide key beside the section has priority in transformers.
    let original = match reader.value("original_max_position_embeddings").and_then(Value::as_f64) {
        Some(outer) if outer > 0.0 => Some(outer),
        _ => original,
    };
    let truncate = match parameters.get("truncate") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(truncate)) => *truncate,
        Some(other) => {
            reader.wrong(&format!("{section}.truncate"), other, "true or false");
            true
        }
    };

    let kind = parameters.get("rope_type").or(parameters.get("type")).filter(|value| !value.is_null());
    let kind = match kind {
        None => "default",
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_string()));
            return None;
        }
    };
    let mut need = |key: &str, value: Option<f64>| {
        let key = format!("{section}.{key}");
        // A wrong value has already been noted under the same key.
        let noted =
            reader.problems.iter().any(|problem| matches!(problem, ConfigProblem::Value { key: k, .. } if *k == key));
        if value.is_none() && !noted {
            reader.problems.push(ConfigProblem::Missing(key));
        }
        value
    };
    let scaling = match kind {
        "default" => Some(RopeScaling::Default),
        "linear" => need("factor", factor).map(|factor| RopeScaling::Linear { factor }),
        "llama3" => {
            let factor = need("factor", factor);
            let low = need("low_freq_factor", low);
            let high = need("high_freq_factor", high);
            if let (Some(low), Some(high)) = (low, high)
                && high <= low
            {
                let rule = format!("above low_freq_factor ({low})");
                reader.wrong(&format!("{section}.high_freq_factor"), high, rule);
            }
            match (factor, low, high, original) {
                (Some(factor), Some(low_freq_factor), Some(high_freq_factor), Some(original_context)) => {
                    Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
                }
                _ => None,
            }
        }
        "yarn" => {
            // Where the factor is absent, it is the growth of the context.
            let factor = factor.or(match (context, original) {
                (Some(context), Some(original)) => Some(f64::from(context) / original),
                _ => None,
            });
            match (factor, original) {
                (Some(factor), Some(original_context)) => Some(RopeScaling::Yarn {
                    factor,
                    original_context,
                    beta_fast,
                    beta_slow,
                    truncate,
                    attention_factor,
                    mscale,
                    mscale_all_dim,
                }),
                _ => None,
            }
        }
        other => {
            reader.problems.push(ConfigProblem::UnsupportedRope(other.to_owned()));
            None
        }
    };
    (reader.problems.len() == before).then_some((theta, scaling?))
}

/// The ids that begin and end a sequence; generation_config.json extends config.json.
fn special_ids(
    reader: &mut Reader<'_>,
    generation: Option<&Map<String, Value>>,
    architecture: Option<Architecture>,
    vocab: Option<u32>,
) -> (Option<u32>, Vec<u32>) {
    let vocab = vocab.map_or(u64::from(u32::MAX), u64::from);
    let mut ids = |file: &str, key: &str, value: Option<&Value>| -> Vec<u32> {
        let values = match value {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(values)) => values.clone(),
            Some(value) => vec![value.clone()],
        };
        let mut found = Vec::new();
        for value in values {
            match value.as_u64().filter(|id| *id < vocab) {
                Some(id) => found.push(id as u32),
                None => {
                    let key = if file.is_empty() { key.to_owned() } else { format!("{file}: {key}") };
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
    let config = reader.map;
    let of = |key: &str| generation.and_then(|generation| generation.get(key));
    let mut named = ids("", "eos_token_id", config.get("eos_token_id"));
    named.extend(ids("generation_config.json", "eos_token_id", of("eos_token_id")));
    let mut eos = Vec::new();
    for id in named {
        if !eos.contains(&id) {
            eos.push(id);
        }
    }
    let mut bos = ids("", "bos_token_id", config.get("bos_token_id"));
    bos.extend(ids("generation_config.json", "bos_token_id", of("bos_token_id")));
    // The class defaults of transformers, which old Llama checkpoints rely on.
    if architecture == Some(Architecture::Llama) {
        if eos.is_empty() && !config.contains_key("eos_token_id") && of("eos_token_id").is_none() && vocab > 2 {
            eos.push(2);
        }
        if bos.is_empty() && !config.contains_key("bos_token_id") && of("bos_token_id").is_none() && vocab > 1 {
            bos.push(1);
        }
    }
    (bos.first().copied(), eos)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: &str = r#"{
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_sliding_window": false, "vocab_size": 151936 }"#;

    const LLAMA: &str = r#"{
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": [128001, 128008],
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "vocab_size": 128256 }"#;

    /// The text with keys replaced (or removed, by null).
    fn with(text: &str, changes: Value) -> String {
        let mut map: Map<String, Value> = serde_json::from_str(text).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            match value {
                Value::String(gone) if gone == "<absent>" => drop(map.remove(key)),
                value => drop(map.insert(key.clone(), value.clone())),
            }
        }
        Value::Object(map).to_string()
    }

    fn problems(text: &str) -> Vec<ConfigProblem> {
        ModelConfig::parse(text, None).unwrap_err().problems
    }

    #[test]
    fn reads_qwen3() {
        let c = ModelConfig::parse(QWEN3, None).unwrap();
        assert_eq!(c.architecture, Architecture::Qwen3);
        assert_eq!((c.hidden, c.intermediate, c.layers, c.heads, c.kv_heads), (1024, 3072, 28, 16, 8));
        assert_eq!((c.head_dim, c.q_rows(), c.kv_rows()), (128, 2048, 1024));
        assert_eq!(c.kv_elements_per_token(), 2 * 28 * 1024);
        assert!(c.tied && c.qk_norm && !c.attention_bias && !c.mlp_bias);
        assert_eq!(c.rope, Rope { theta: 1e6, rotary_dim: 128, scaling: RopeScaling::Default });
        assert_eq!((c.vocab, c.context, c.rms_eps), (151936, 40960, 1e-6));
        assert_eq!((c.bos, c.eos.as_slice()), (Some(151643), &[151645][..]));
        assert_eq!(c.dtype, Some(Dtype::Bf16));
        assert_eq!(c.layer_kinds, vec![LayerKind::FullAttention; 28]);
    }

    #[test]
    fn reads_llama_and_derives_head_dim() {
        let c = ModelConfig::parse(LLAMA, None).unwrap();
        assert_eq!((c.architecture, c.head_dim, c.qk_norm), (Architecture::Llama, 64, false));
        assert_eq!(c.eos, vec![128001, 128008]);
        assert_eq!(c.dtype, None);
        let expected =
            RopeScaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        assert_eq!(c.rope.scaling, expected);
    }

    #[test]
    fn generation_config_extends_the_end_ids() {
        let generation = r#"{"eos_token_id": [128001, 128009], "bos_token_id": 128000}"#;
        let c = ModelConfig::parse(LLAMA, Some(generation)).unwrap();
        assert_eq!(c.eos, vec![128001, 128008, 128009]);
    }

    #[test]
    fn absent_keys_take_the_class_defaults_of_transformers() {
        let absent = serde_json::json!({
            "eos_token_id": "<absent>", "bos_token_id": "<absent>", "rope_theta": "<absent>",
            "rope_scaling": "<absent>", "num_key_value_heads": "<absent>", "rms_norm_eps": "<absent>",
            "tie_word_embeddings": "<absent>", "max_position_embeddings": "<absent>",
        });
        let c = ModelConfig::parse(&with(LLAMA, absent), None).unwrap();
        assert_eq!((c.bos, c.eos.as_slice()), (Some(1), &[2][..]));
        assert_eq!((c.rope.theta, c.kv_heads, c.rms_eps, c.tied, c.context), (10_000.0, 32, 1e-6, false, 2048));
        let c = ModelConfig::parse(&with(QWEN3, serde_json::json!({"head_dim": "<absent>"})), None).unwrap();
        assert_eq!(c.head_dim, 128);
        let c = ModelConfig::parse(&with(QWEN3, serde_json::json!({"head_dim": null})), None).unwrap();
        assert_eq!(c.head_dim, 64);
    }

    #[test]
    fn both_spellings_of_rope_agree() {
        let older = ModelConfig::parse(LLAMA, None).unwrap();
        let newer = with(
            LLAMA,
            serde_json::json!({"rope_scaling": "<absent>", "rope_theta": "<absent>", "rope_parameters": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_theta": 500000.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
        );
        assert_eq!(older, ModelConfig::parse(&newer, None).unwrap());
    }

    #[test]
    fn original_context_and_factor_have_fallbacks() {
        let yarn = serde_json::json!({"rope_scaling": {"type": "yarn", "factor": 4.0}});
        let c = ModelConfig::parse(&with(QWEN3, yarn), None).unwrap();
        let RopeScaling::Yarn { original_context, beta_fast, beta_slow, truncate, .. } = c.rope.scaling else {
            panic!("{:?}", c.rope.scaling);
        };
        assert_eq!((original_context, beta_fast, beta_slow, truncate), (40960.0, 32.0, 1.0, true));

        let ratio = serde_json::json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 10240}});
        let c = ModelConfig::parse(&with(QWEN3, ratio), None).unwrap();
        assert!(matches!(c.rope.scaling, RopeScaling::Yarn { factor: 4.0, .. }));
        assert!((c.rope.attention_scale() - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
    }

    /// Goal: the tables of transformers. Method: their bits, written by tests/fixtures/rope/make.py;
    /// its vectorised power may be one unit in the last place off the exact one.
    #[test]
    fn rotary_tables_are_those_of_transformers() {
        let text = include_str!("../../tests/fixtures/rope/rope.json");
        let fixtures: Map<String, Value> = serde_json::from_str(text).unwrap();
        assert_eq!(fixtures.len(), 6);
        for (name, fixture) in fixtures {
            let mut changes = fixture["config"].clone();
            changes["rope_scaling"] = "<absent>".into();
            changes["rope_theta"] = "<absent>".into();
            let rope = ModelConfig::parse(&with(LLAMA, changes), None).unwrap().rope;
            assert_eq!(rope.attention_scale(), fixture["scale"].as_f64().unwrap() as f32, "{name}");
            let bits: Vec<i64> = fixture["bits"].as_array().unwrap().iter().map(|b| b.as_i64().unwrap()).collect();
            let ours: Vec<i64> = rope.inv_freq().iter().map(|f| i64::from(f.to_bits())).collect();
            assert_eq!(ours.len(), bits.len(), "{name}");
            for (j, (ours, theirs)) in ours.iter().zip(&bits).enumerate() {
                assert!((ours - theirs).abs() <= 2, "{name}[{j}]: {ours} and {theirs}");
            }
        }
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let text = with(
            QWEN3,
            serde_json::json!({
                "architectures": ["MambaForCausalLM"], "hidden_act": "gelu", "num_attention_heads": 0,
                "num_hidden_layers": "<absent>", "vocab_size": -5, "rms_norm_eps": 0, "torch_dtype": "float8_e4m3fn",
                "rope_scaling": {"rope_type": "longrope"}, "use_sliding_window": true,
                "quantization_config": {"quant_method": "awq"}, "tie_word_embeddings": "yes",
            }),
        );
        let found = problems(&text);
        let expect = |problem: ConfigProblem| assert!(found.contains(&problem), "{problem:?} not in {found:#?}");
        expect(ConfigProblem::UnsupportedArchitecture("MambaForCausalLM".into()));
        expect(ConfigProblem::UnsupportedActivation("gelu".into()));
        expect(ConfigProblem::Missing("num_hidden_layers".into()));
        expect(ConfigProblem::UnsupportedDtype("float8_e4m3fn".into()));
        expect(ConfigProblem::UnsupportedRope("longrope".into()));
        expect(ConfigProblem::Quantized("awq".into()));
        for key in ["num_attention_heads", "vocab_size", "rms_norm_eps", "tie_word_embeddings"] {
            assert!(found.iter().any(|p| matches!(p, ConfigProblem::Value { key: k, .. } if k == key)), "{key}");
        }
        assert!(found.iter().any(|p| matches!(p, ConfigProblem::SlidingWindow(_))));
        assert_eq!(found.len(), 11, "{found:#?}");
        let message = ConfigError { problems: found }.to_string();
        assert!(message.contains("num_hidden_layers is missing; "), "{message}");
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let value = |changes: Value| match problems(&with(QWEN3, changes)).as_slice() {
            [ConfigProblem::Value { key, .. }] => key.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(value(serde_json::json!({"num_key_value_heads": 3})), "num_key_value_heads");
        assert_eq!(value(serde_json::json!({"num_key_value_heads": 0})), "num_key_value_heads");
        assert_eq!(value(serde_json::json!({"head_dim": 127})), "head_dim");
        assert_eq!(value(serde_json::json!({"head_dim": null, "hidden_size": 1023})), "hidden_size");
        assert_eq!(value(serde_json::json!({"num_attention_heads": 1 << 20})), "num_attention_heads");
        assert_eq!(value(serde_json::json!({"num_hidden_layers": 1 << 20})), "num_hidden_layers");
        assert_eq!(value(serde_json::json!({"hidden_size": 1024.5})), "hidden_size");
        assert_eq!(value(serde_json::json!({"eos_token_id": 151936})), "eos_token_id");
        assert_eq!(value(serde_json::json!({"partial_rotary_factor": 0.5})), "partial_rotary_factor");
        assert_eq!(value(serde_json::json!({"layer_types": ["full_attention"]})), "layer_types");
        let llama3 = serde_json::json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 4.0, "high_freq_factor": 4.0}});
        assert_eq!(value(llama3), "rope_scaling.high_freq_factor");
        assert_eq!(
            value(serde_json::json!({"rope_scaling": {"rope_type": "linear", "factor": -2}})),
            "rope_scaling.factor"
        );
        let missing = problems(&with(QWEN3, serde_json::json!({"rope_scaling": {"rope_type": "llama3", "factor": 8}})));
        assert_eq!(missing.len(), 2, "{missing:?}");
        let kinds = serde_json::json!({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]});
        assert_eq!(problems(&with(QWEN3, kinds)), [ConfigProblem::UnsupportedLayer("sliding_attention".into())]);
    }

    #[test]
    fn damaged_files_are_named() {
        let error = ModelConfig::parse("{", Some("[]")).unwrap_err();
        assert_eq!(error.problems.len(), 2);
        assert!(error.to_string().contains("config.json is not valid"), "{error}");
        assert!(error.to_string().contains("generation_config.json is not valid: not an object"), "{error}");
    }
}
