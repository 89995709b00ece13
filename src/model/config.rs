//! The shape of a model, read from config.json (and generation_config.json) alone.
//! Every problem of a file is reported at once. Deliberately absent: files, tensors, and
//! anything known by a model's name instead of its configuration.

mod read;
mod rope;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use read::Reader;
pub use rope::{Rope, RopeScaling};

/// A model family whose forward pass we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: dense, with a norm on each query and key head.
    Qwen3,
    /// `LlamaForCausalLM`: dense.
    Llama,
    /// `Qwen3MoeForCausalLM`: as Qwen3, with experts.
    Qwen3Moe,
    /// `Qwen3NextForCausalLM`: gated delta nets between layers of gated attention, experts and a shared one.
    Qwen3Next,
    /// `Qwen3_5ForConditionalGeneration` and `Qwen3_5ForCausalLM`: gated delta nets between layers of gated
    /// attention, dense. Of a model that also sees, the text alone.
    Qwen35,
    /// `Qwen3_5MoeForConditionalGeneration` and `Qwen3_5MoeForCausalLM`: as Qwen35, with experts and a shared one.
    Qwen35Moe,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Architecture; 6] = [
        Architecture::Qwen3,
        Architecture::Llama,
        Architecture::Qwen3Moe,
        Architecture::Qwen3Next,
        Architecture::Qwen35,
        Architecture::Qwen35Moe,
    ];

    /// The names in config.json's `architectures`, that of released checkpoints first.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Architecture::Qwen3 => &["Qwen3ForCausalLM"],
            Architecture::Llama => &["LlamaForCausalLM"],
            Architecture::Qwen3Moe => &["Qwen3MoeForCausalLM"],
            Architecture::Qwen3Next => &["Qwen3NextForCausalLM"],
            Architecture::Qwen35 => &["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"],
            Architecture::Qwen35Moe => &["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"],
        }
    }

    /// The first of [`Architecture::names`].
    pub fn name(self) -> &'static str {
        self.names()[0]
    }

    /// The names in config.json's `model_type`.
    pub fn model_types(self) -> &'static [&'static str] {
        match self {
            Architecture::Qwen3 => &["qwen3"],
            Architecture::Llama => &["llama"],
            Architecture::Qwen3Moe => &["qwen3_moe"],
            Architecture::Qwen3Next => &["qwen3_next"],
            Architecture::Qwen35 => &["qwen3_5", "qwen3_5_text"],
            Architecture::Qwen35Moe => &["qwen3_5_moe", "qwen3_5_moe_text"],
        }
    }

    /// Whether gated delta nets stand between the layers of attention.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe)
    }

    /// Whether its configuration speaks of experts.
    pub fn has_experts(self) -> bool {
        matches!(self, Architecture::Qwen3Moe | Architecture::Qwen3Next | Architecture::Qwen35Moe)
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
    /// A gated delta net: a short convolution, then a matrix of fixed size for each head that every token
    /// changes and reads.
    GatedDelta,
}

/// What follows the mixing of tokens in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlpKind {
    /// One MLP for every token.
    Dense,
    /// The MLPs of the experts that a router chooses for the token.
    Experts,
}

/// The shape of gated-delta layers. Consecutive value heads share a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaNet {
    /// Heads of q and of k.
    pub key_heads: u32,
    /// Heads of v, of z and of the state; a multiple of `key_heads`.
    pub value_heads: u32,
    /// Dimensions of one head of q, and of k.
    pub key_dim: u32,
    /// Dimensions of one head of v, and of z.
    pub value_dim: u32,
    /// Taps of the convolution; the last is the current token's.
    pub conv_kernel: u32,
}

impl DeltaNet {
    /// Rows of the projection to q, and of that to k: `key_heads * key_dim`.
    pub fn key_rows(&self) -> u32 {
        self.key_heads * self.key_dim
    }

    /// Rows of the projection to v, and of that to z: `value_heads * value_dim`.
    pub fn value_rows(&self) -> u32 {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution, `[q | k | v]`.
    pub fn channels(&self) -> u32 {
        2 * self.key_rows() + self.value_rows()
    }

    /// Rows of `in_proj`, `[q | k | v | z | b | a]`.
    pub fn projected_rows(&self) -> u32 {
        self.channels() + self.value_rows() + 2 * self.value_heads
    }

    /// Floats of one sequence's state in one layer: `value_heads * key_dim * value_dim`.
    pub fn state_elements(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.key_dim) * u64::from(self.value_dim)
    }
}

/// The shape of layers with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Experts {
    /// How many a router chooses from.
    pub count: u32,
    /// How many it chooses for a token.
    pub chosen: u32,
    /// Width of one expert's MLP.
    pub inner: u32,
    /// Width of the MLP that every token goes through beside the chosen ones, weighted by a gate of its own.
    pub shared_inner: Option<u32>,
    /// Whether the weights of the chosen ones are scaled to a sum of 1.
    pub normalise: bool,
}

impl Experts {
    /// Rows of `router`: one an expert, and the shared expert's gate.
    pub fn router_rows(&self) -> u32 {
        self.count + u32::from(self.shared_inner.is_some())
    }
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

/// Everything that config.json says of a model, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the MLP of dense layers; 0 where no layer is dense.
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
    /// Whether what attention gives is multiplied by the sigmoid of a gate, `heads * head_dim` wide like the queries.
    pub attention_gate: bool,
    /// Rotary embedding.
    pub rope: Rope,
    /// How norms use their weights.
    pub norm: NormKind,
    /// The MLP's activation.
    pub activation: Activation,
    /// `[layers]`: what mixes tokens.
    pub layer_kinds: Vec<LayerKind>,
    /// `[layers]`: what follows.
    pub mlp_kinds: Vec<MlpKind>,
    /// The shape of gated-delta layers; there where a layer is one.
    pub delta: Option<DeltaNet>,
    /// The shape of layers with experts; there where a layer is one.
    pub experts: Option<Experts>,
    /// Blocks that predict further tokens, by the configuration; the checkpoint may have been saved without
    /// their tensors ([`Checkpoint::has_mtp`](super::checkpoint::Checkpoint::has_mtp)).
    pub mtp_layers: u32,
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
        let mut reader = Reader::new(config, problems);
        let parsed = read::read(&mut reader, generation.as_ref());
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

    /// Rows of the packed `qkv`: queries, keys, values and, where attention has one, its gate.
    pub fn qkv_rows(&self) -> u32 {
        self.q_rows() * if self.attention_gate { 2 } else { 1 } + 2 * self.kv_rows()
    }

    /// The layers that mix tokens that way, in order.
    pub fn layers_of(&self, kind: LayerKind) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.layer_kinds).filter(move |(_, of_layer)| **of_layer == kind).map(|(layer, _)| layer)
    }

    /// Elements of keys and values that one token adds, over all layers of attention (not the further tokens' blocks).
    pub fn kv_elements_per_token(&self) -> u64 {
        2 * self.layers_of(LayerKind::FullAttention).count() as u64 * u64::from(self.kv_rows())
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
    #[error("architecture \"{0}\" is not supported ({known} are)", known = Architecture::ALL.map(Architecture::name).join(", "))]
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
    /// A layer that is neither full attention nor, in a hybrid, a gated delta net.
    #[error("layer type \"{0}\" is not supported (full_attention is, and linear_attention in hybrids)")]
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
