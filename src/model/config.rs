//! The model configuration, read from the text of config.json and generation_config.json alone. All problems of a file
//! are reported at once.
//!
//! Not here: file access, tensors, and anything inferred from a model's name rather than from its configuration.

mod draft_head;
mod families;
pub mod quantization;
mod read;
mod rope;
#[cfg(test)]
mod tests;

use crate::config::KvFormat;
use crate::kernels::attention::HeadNorm;
use crate::model::python_json;
use std::fmt;
use std::str::FromStr;

use serde_json::Value;

pub use draft_head::DraftHead;
pub use families::Architecture;
use quantization::Quantization;
use read::Reader;
pub use rope::{Rope, RopeScaling, RotatedPairs};

/// An element type that weights may have in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// bfloat16, 16 bits: the upper half of an f32.
    Bf16,
    /// IEEE half precision, 16 bits.
    F16,
    /// IEEE single precision, 32 bits.
    F32,
}

impl Dtype {
    /// Returns the size of one element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }

    /// Returns the type's name in a safetensors header.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
        }
    }

    /// Returns the type's name in config.json.
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

/// Parses `bf16` and the spellings of config.json and safetensors, ignoring ASCII case.
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

/// An element type that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("number format \"{0}\" is not supported (bf16, f16 and f32 are)")]
pub struct UnknownDtype(pub String);

/// The operation of a layer that mixes information across tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Causal attention over earlier positions: all of them, or those of a sliding window ([`Attention::window`]).
    Attention,
    /// The gated delta rule (linear attention): a short causal convolution, followed by a recurrent state of fixed size
    /// for each head, which every token updates and reads; or the state space of Mamba-2 ([`DeltaNet::space`]).
    GatedDelta,
    /// A gated convolution over the last few tokens, which are all of the layer's state.
    ShortConv,
    /// Nothing: the layer is an MLP alone.
    None,
}

/// The kind of MLP that follows the token mixing in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlpKind {
    /// One MLP that every token uses.
    Dense,
    /// A mixture of experts (MoE): a router chooses the MLPs that a token uses.
    Experts,
    /// No MLP: the layer is a mixer alone.
    None,
}

/// What the state space of Mamba-2 has beside the dimensions of [`DeltaNet`], whose q, k and v are its C, B and x. Its groups
/// are key heads. The output has a norm after the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSpace {
    /// Whether the convolution has biases.
    pub conv_bias: bool,
    /// The number of groups of adjacent heads that are normed one by one; 1: all heads together.
    pub norm_groups: u32,
}

/// The dimensions of gated-delta-rule layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaNet {
    /// The number of heads of q and of k.
    pub key_heads: u32,
    /// The number of heads of v, of z and of the state; a multiple of `key_heads`.
    pub value_heads: u32,
    /// The dimensions of one head of q or k.
    pub key_dim: u32,
    /// The dimensions of one head of v or z.
    pub value_dim: u32,
    /// The number of taps of the convolution; the last tap is for the current token.
    pub conv_kernel: u32,
    /// Whether key heads take turns: value head h uses key head `h % key_heads`, as in GGUF files of some
    /// architectures, whose weights are used in that order. Otherwise each key head is shared by `value_heads /
    /// key_heads` consecutive value heads, as in Hugging Face checkpoints.
    pub tiled: bool,
    /// `Some` if the layers are state spaces, which have another rule.
    pub space: Option<StateSpace>,
}

impl DeltaNet {
    /// Returns the number of rows of the q projection, which equals that of the k projection: `key_heads * key_dim`.
    pub fn key_rows(&self) -> u32 {
        self.key_heads * self.key_dim
    }

    /// Returns the number of rows of the v projection, which equals that of the z projection: `value_heads *
    /// value_dim`.
    pub fn value_rows(&self) -> u32 {
        self.value_heads * self.value_dim
    }

    /// Returns the number of channels of the convolution, `[q | k | v]`.
    pub fn channels(&self) -> u32 {
        2 * self.key_rows() + self.value_rows()
    }

    /// Returns the number of rows of `in_proj`, `[q | k | v | z | b | a]`; state spaces have no b.
    pub fn projected_rows(&self) -> u32 {
        let gates = if self.space.is_some() { 1 } else { 2 };
        self.channels() + self.value_rows() + gates * self.value_heads
    }

    /// Whether the output of all heads together has a norm: that of state spaces without groups.
    pub fn norms_rows(&self) -> bool {
        self.space.is_some_and(|space| space.norm_groups == 1)
    }

    /// Returns the number of floats in one sequence's state in one layer: `value_heads * key_dim * value_dim`.
    pub fn state_elements(&self) -> u64 {
        u64::from(self.value_heads) * u64::from(self.key_dim) * u64::from(self.value_dim)
    }
}

/// The dimensions of short-convolution layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShortConv {
    /// The number of channels: the hidden size, or a part of it in a part of a model that several devices compute.
    pub channels: u32,
    /// The number of taps of the convolution; the last tap is for the current token.
    pub taps: u32,
    /// Whether the convolution and the projections before and after it have biases.
    pub bias: bool,
}

impl ShortConv {
    /// Returns the number of rows of `conv_in`, `[B | C | x]`.
    pub fn projected_rows(&self) -> u32 {
        3 * self.channels
    }
}

/// How a router chooses experts, if not by the greatest logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Whether an expert's score is the sigmoid of its logit; otherwise the softmax over all logits.
    pub sigmoid: bool,
    /// Whether a bias is added to the scores for the choice, but not for the weights.
    pub choice_bias: bool,
    /// The number of groups of experts.
    pub groups: u32,
    /// The number of groups from which experts are chosen.
    pub kept: u32,
    /// The number of experts whose scores make a group's score.
    pub best: u32,
    /// What is added to the sum of the chosen experts' scores, by which their weights are divided if they are normalised.
    pub sum_offset: f32,
    /// The factor of the chosen experts' weights.
    pub factor: f32,
    /// The factor of the logits.
    pub logit_scale: f32,
    /// Whether the router has its own norm, with weights, before its logits.
    pub own_norm: bool,
    /// Whether each expert's weights have a factor of their own.
    pub expert_scales: bool,
}

/// The dimensions of MoE layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// The number of routed experts.
    pub count: u32,
    /// The number of experts that the router chooses for each token (top-k).
    pub chosen: u32,
    /// The intermediate size of one routed expert's MLP.
    pub inner: u32,
    /// The intermediate size of the shared expert. Every token uses it in addition to its routed experts. `None` if there
    /// is no shared expert.
    pub shared_inner: Option<u32>,
    /// Whether the shared expert's output is scaled by a gate of its own.
    pub shared_gate: bool,
    /// How the router chooses; `None`: the greatest logits, with softmax weights, and a shared expert has a gate.
    pub routing: Option<Routing>,
    /// Whether the weights of a token's chosen experts are normalised to a sum of 1.
    pub normalise: bool,
    /// Whether the router and the experts' matrices have biases.
    pub bias: bool,
    /// Whether a layer with experts also has a dense MLP: the outputs of both are normed and added. The experts' input has a
    /// norm of its own ([`BESIDE_DENSE`]).
    pub beside_dense: bool,
}

/// The names of the norms of experts beside a dense MLP, within the layer: of the dense MLP's output, of the experts' input
/// and of the experts' output.
pub const BESIDE_DENSE: [&str; 3] =
    ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];

/// Inputs of every layer that depend on a row's token: an embedding for each layer, with a projection of the token's
/// common embedding added. After its MLP, a layer multiplies them with a gate, projects them and adds them to the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerInputs {
    /// The number of values of a row and layer.
    pub width: u32,
    /// The number of rows of their embedding, at least the model's vocabulary.
    pub vocab: u32,
    /// The factor of the embedding: √width, rounded like the embedding.
    pub scale: f32,
}

impl Experts {
    /// Returns the number of rows of `router`: one per expert, plus one for the shared expert's gate.
    pub fn router_rows(&self) -> u32 {
        self.count + u32::from(self.shared_inner.is_some() && self.shared_gate)
    }
}

/// How an RMS norm applies its weight `w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Multiplies by `w`.
    Plain,
    /// Multiplies by `1 + w`.
    ZeroCentred,
}

/// The RMS norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkNorm {
    /// None.
    None,
    /// A norm over each head before RoPE, with a weight of `[head_dim]` for queries and one for keys.
    Heads,
    /// The same after RoPE, whose cosines and sines have the factor 1.
    RotatedHeads,
    /// A norm over all query heads together and one over all key heads together, with weights of `[heads * head_dim]`
    /// and `[kv_heads * head_dim]`, before RoPE.
    Rows,
}

impl QkNorm {
    /// Returns the norm of each head, which attention's kernels compute.
    pub fn of_heads(self) -> HeadNorm {
        match self {
            QkNorm::None | QkNorm::Rows => HeadNorm::None,
            QkNorm::Heads => HeadNorm::Before,
            QkNorm::RotatedHeads => HeadNorm::After,
        }
    }
}

/// The RMS norms of a layer over the residual stream's width, by the names of their tensors within the layer; `None`
/// where there is no norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockNorms {
    /// The name of the norm of the mixer's input.
    pub mixer: Option<&'static str>,
    /// The name of the norm of the mixer's output, before it is added to the residual stream.
    pub after_mixer: Option<&'static str>,
    /// The name of the norm of the MLP's input.
    pub mlp: Option<&'static str>,
    /// The name of the norm of the MLP's output, before it is added to the residual stream.
    pub after_mlp: Option<&'static str>,
}

impl BlockNorms {
    /// Norms before mixer and MLP, as in Llama.
    pub const BEFORE: BlockNorms = BlockNorms {
        mixer: Some("input_layernorm"),
        after_mixer: None,
        mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
    /// Norms before and after mixer and MLP, with Gemma's names.
    pub const GEMMA: BlockNorms = BlockNorms {
        mixer: Some("input_layernorm"),
        after_mixer: Some("post_attention_layernorm"),
        mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
    };
    /// Norms before and after mixer and MLP, with the names of GLM-4.
    pub const GLM: BlockNorms = BlockNorms {
        mixer: Some("input_layernorm"),
        after_mixer: Some("post_self_attn_layernorm"),
        mlp: Some("post_attention_layernorm"),
        after_mlp: Some("post_mlp_layernorm"),
    };
    /// Norms before mixer and MLP, with the names of LFM2.
    pub const LFM: BlockNorms =
        BlockNorms { mixer: Some("operator_norm"), after_mixer: None, mlp: Some("ffn_norm"), after_mlp: None };
    /// A norm before the mixer or the MLP that the layer consists of, with the name of Nemotron-H.
    pub const NEMOTRON: BlockNorms =
        BlockNorms { mixer: Some("norm"), after_mixer: None, mlp: Some("norm"), after_mlp: None };
    /// Norms after mixer and MLP only, as in OLMo 2.
    pub const OLMO: BlockNorms = BlockNorms {
        mixer: None,
        after_mixer: Some("post_attention_layernorm"),
        mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    };
}

/// The activation function that an MLP applies to its gate projection, and how it combines the result with the up
/// projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// SwiGLU: `gate * sigmoid(gate) * up`.
    Silu,
    /// GeGLU: `gelu(gate) * up` with GELU's approximation by tanh.
    GeluTanh,
    /// gpt-oss: `g * sigmoid(1.702 g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.
    ClampedSilu {
        /// The bits of the limit, an f32.
        limit: u32,
    },
    /// Squared ReLU without a gate: `max(up, 0)²`.
    SquaredRelu,
}

impl Activation {
    /// Whether MLPs have a gate projection.
    pub fn has_gate(self) -> bool {
        self != Activation::SquaredRelu
    }
}

/// Attention layers that are computed alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The number of query heads.
    pub heads: u32,
    /// The number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// The dimensions of a head; even. `heads * head_dim` may differ from the hidden size.
    pub head_dim: u32,
    /// The rotary embedding (RoPE); `None` for layers without.
    pub rope: Option<Rope>,
    /// The number of tokens that a token sees, itself included (sliding window); `None` for all. If attention is not
    /// [causal](ModelConfig::causal): the least distance of a token that it does not see, on either side.
    pub window: Option<u32>,
    /// Whether the values are the rows of the key projection, before norm and rotation.
    pub values_are_keys: bool,
    /// In a part of a model that several devices compute: the heads of other devices whose queries and keys this one
    /// computes too, because norms are taken over all heads of a row ([`QkNorm::Rows`]).
    pub normed_with: NormedHeads,
}

/// Heads that are computed up to their norm only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NormedHeads {
    /// The number of query heads.
    pub queries: u32,
    /// The number of key heads.
    pub keys: u32,
}

impl Attention {
    /// Returns the number of rows of the query projection: `heads * head_dim`.
    pub fn q_rows(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Returns the number of rows of the key projection, which equals that of the value projection: `kv_heads *
    /// head_dim`.
    pub fn kv_rows(&self) -> u32 {
        self.kv_heads * self.head_dim
    }

    /// Returns the bytes of a token's keys and values in a format.
    pub fn kv_bytes(&self, format: KvFormat) -> u64 {
        2 * u64::from(self.kv_heads) * u64::from(format.head_bytes(self.head_dim))
    }

    /// Returns the number of a head's dimensions that are rotated.
    pub fn rotary_dim(&self) -> u32 {
        self.rope.as_ref().map_or(0, |rope| rope.rotary_dim)
    }
}

/// Multi-head latent attention (MLA): all heads share one key, a latent vector with a rotated part, from which the values
/// are projected too. The kinds of attention layers then have one key head, of `rope + kv_rank` dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Latent {
    /// The rank of the queries' projection; `None` if it is one matrix.
    pub q_rank: Option<u32>,
    /// The dimensions of the latent vector.
    pub kv_rank: u32,
    /// The dimensions of a head's query that meet the latent vector, and those that are rotated.
    pub nope: u32,
    /// The dimensions of the rotated part.
    pub rope: u32,
    /// The dimensions of a head's value.
    pub value_dim: u32,
}

impl Latent {
    /// Returns the number of rows of the projection of a layer's input: the queries' first projection, the rotated part of
    /// the key and the latent vector.
    pub fn input_rows(&self) -> u32 {
        self.q_rank.unwrap_or(0) + self.rope + self.kv_rank
    }
}

/// A model's configuration from config.json, validated.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The model family.
    pub architecture: Architecture,
    /// The width of the residual stream.
    pub hidden: u32,
    /// The greatest intermediate size of dense MLPs; 0 if no layer is dense.
    pub intermediate: u32,
    /// `[layers]`: the intermediate size of each layer's dense MLP.
    pub dense_widths: Vec<u32>,
    /// The number of layers.
    pub layers: u32,
    /// The kinds of attention layers; at least one.
    pub attention_kinds: Vec<Attention>,
    /// `[layers]`: the index of each layer's kind in `attention_kinds`; 0 for layers without attention.
    pub attention_of: Vec<usize>,
    /// The dimensions of latent attention, if attention is of that kind.
    pub latent: Option<Latent>,
    /// `[layers]`: the layer whose keys and values a layer with attention reads: itself, or an earlier layer of the same
    /// kind, and then it has no key and value projections.
    pub cache_of: Vec<u32>,
    /// The epsilon that every RMS norm adds to the mean square.
    pub rms_eps: f32,
    /// The number of rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Whether the LM head is tied to the embedding.
    pub tied: bool,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output's projection has a bias.
    pub o_bias: bool,
    /// Whether the gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// The norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether each value head has an RMS norm without weights.
    pub v_norm: bool,
    /// Whether the attention output is multiplied by the sigmoid of a gate, which is as wide as the queries (`heads *
    /// head_dim`).
    pub attention_gate: bool,
    /// Whether each query head has an attention sink: a score without a value.
    pub sinks: bool,
    /// Whether a token sees only itself and earlier tokens. Otherwise all tokens of a prompt see each other, up to the
    /// distance of a layer's window: a prompt is computed in one piece, and no token can be drawn.
    pub causal: bool,
    /// The factor of attention scores; `None` for `1 / sqrt(head_dim)`.
    pub score_scale: Option<f32>,
    /// The bound c of attention scores: `c * tanh(score / c)`.
    pub score_cap: Option<f32>,
    /// The factor of embeddings.
    pub embedding_scale: f32,
    /// The factor of the mixer's and the MLP's output, before it is added to the residual stream.
    pub residual_scale: f32,
    /// Whether each layer multiplies the stream by a factor of its own, at its end.
    pub layer_scale: bool,
    /// The inputs of every layer that depend on the token.
    pub layer_inputs: Option<LayerInputs>,
    /// The factor of logits.
    pub logit_scale: f32,
    /// The bound c of logits: `c * tanh(logit / c)`.
    pub logit_cap: Option<f32>,
    /// How norms apply their weights.
    pub norm: NormKind,
    /// The norms of a layer.
    pub norms: BlockNorms,
    /// The activation function of the MLPs.
    pub activation: Activation,
    /// `[layers]`: the token mixing of each layer.
    pub layer_kinds: Vec<LayerKind>,
    /// `[layers]`: the MLP of each layer.
    pub mlp_kinds: Vec<MlpKind>,
    /// The dimensions of gated-delta-rule layers; `Some` if there is at least one.
    pub delta: Option<DeltaNet>,
    /// The dimensions of short-convolution layers; `Some` if there is at least one.
    pub short_conv: Option<ShortConv>,
    /// The dimensions of MoE layers; `Some` if there is at least one.
    pub experts: Option<Experts>,
    /// The number of multi-token-prediction (MTP) blocks according to the configuration. The checkpoint may have been
    /// saved without their tensors ([`Checkpoint::has_mtp`](super::checkpoint::Checkpoint::has_mtp)).
    pub mtp_layers: u32,
    /// The index of the MTP block's kind of attention in `attention_kinds`.
    pub mtp_attention: usize,
    /// The intermediate size of the MTP block's dense MLP.
    pub mtp_width: u32,
    /// The dimensions of the MTP block's experts: those of the layers, but for parts of a model that several devices
    /// compute, where the block is whole.
    pub mtp_experts: Option<Experts>,
    /// What the configuration of a draft head says beside its layer's keys; `None` for a model of its own.
    pub draft_head: Option<DraftHead>,
    /// The maximum sequence length in tokens.
    pub context: u32,
    /// The end-of-sequence token ids, without duplicates.
    pub eos: Vec<u32>,
    /// The beginning-of-sequence token id.
    pub bos: Option<u32>,
    /// The weights' element type according to config.json. The types in the tensors' headers take precedence.
    pub dtype: Option<Dtype>,
    /// How the weights are quantised; `None` if they are numbers.
    pub quantization: Option<Quantization>,
}

impl ModelConfig {
    /// Parses the text of config.json and, if present, of generation_config.json.
    ///
    /// # Errors Every problem found, if there is any.
    pub fn parse(config_json: &str, generation_config: Option<&str>) -> Result<ModelConfig, ModelConfigError> {
        ModelConfig::parse_with(config_json, generation_config, None)
    }

    /// Like [`ModelConfig::parse`], with the name and text of a file that describes the quantisation of the weights
    /// (one of [`quantization::FILES`]). It is used if config.json has no such description.
    ///
    /// # Errors Every problem found, if there is any.
    pub fn parse_with(
        config_json: &str,
        generation_config: Option<&str>,
        quantized: Option<(&'static str, &str)>,
    ) -> Result<ModelConfig, ModelConfigError> {
        let mut problems = Vec::new();
        let mut object = |file: &'static str, text: &str| match python_json::parse(text) {
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
        let quantized = quantized.and_then(|(file, text)| object(file, text).map(|map| (file, Value::Object(map))));
        let Some(config) = config else {
            return Err(ModelConfigError { problems });
        };
        let heads = draft_head::is_draft_head(&config);
        let mut reader = Reader::new(if heads { draft_head::as_model(config) } else { config }, problems);
        let quantized = quantized.as_ref().map(|(file, value)| (*file, value));
        let mut parsed = read::read(&mut reader, generation.as_ref(), quantized);
        if let Some(config) = parsed.as_mut().filter(|_| heads) {
            draft_head::read(&mut reader, config);
        }
        match parsed {
            Some(parsed) if reader.problems.is_empty() => Ok(parsed),
            _ => Err(ModelConfigError { problems: reader.problems }),
        }
    }

    /// Takes an element type, that of the embedding, for the one that config.json does not name: factors of embeddings
    /// are rounded to it.
    pub fn default_dtype(&mut self, dtype: Dtype) {
        if self.dtype.is_none() {
            self.dtype = Some(dtype);
            read::round_embedding_scales(self);
        }
    }

    /// Returns the attention of a layer.
    pub fn attention(&self, layer: u32) -> &Attention {
        &self.attention_kinds[self.attention_of[layer as usize]]
    }

    /// Returns the number of rows of the packed `qkv` of a kind of layers: queries, keys, values and, if attention has
    /// one, the output gate; behind them the queries and the keys of [`Attention::normed_with`].
    pub fn qkv_rows(&self, attention: &Attention) -> u32 {
        let NormedHeads { queries, keys } = attention.normed_with;
        let own = attention.q_rows() * if self.attention_gate { 2 } else { 1 } + 2 * attention.kv_rows();
        own + (queries + keys) * attention.head_dim
    }

    /// Returns the number of columns of `qkv`: the hidden size or, in a draft head, that of the embedding and of the features
    /// together.
    pub fn qkv_cols(&self) -> u32 {
        self.hidden * if self.draft_head.is_some() { 2 } else { 1 }
    }

    /// Whether a layer with attention has keys and values of its own.
    pub fn owns_cache(&self, layer: u32) -> bool {
        self.cache_of[layer as usize] == layer
    }

    /// Whether a layer has a dense MLP, alone or beside experts.
    pub fn has_dense_mlp(&self, layer: u32) -> bool {
        let beside = self.experts.is_some_and(|experts| experts.beside_dense);
        self.mlp_kinds[layer as usize] == MlpKind::Dense || beside
    }

    /// Whether each layer is either a mixer or an MLP.
    pub fn has_single_blocks(&self) -> bool {
        self.norms == BlockNorms::NEMOTRON
    }

    /// Returns the name of a layer's module in the files of checkpoints, which is `usual` unless each layer has only one.
    pub fn module(&self, usual: &'static str) -> &'static str {
        if self.has_single_blocks() { "mixer" } else { usual }
    }

    /// Whether the outputs of mixers and MLPs are changed before they are added to the residual stream.
    pub fn has_branch_stages(&self) -> bool {
        self.norms.after_mixer.is_some() || self.norms.after_mlp.is_some() || self.residual_scale != 1.0
    }

    /// Returns the indices of the layers with the given token mixing, in ascending order.
    pub fn layers_of(&self, kind: LayerKind) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.layer_kinds).filter(move |(_, of_layer)| **of_layer == kind).map(|(layer, _)| layer)
    }

    /// Whether some layers have recurrent state: what a sequence keeps of its tokens is of a fixed size there.
    pub fn is_recurrent(&self) -> bool {
        self.delta.is_some() || self.short_conv.is_some()
    }

    /// Returns the least number of key heads of a kind of attention layers.
    pub fn least_kv_heads(&self) -> u32 {
        self.attention_kinds.iter().map(|kind| kind.kv_heads).min().unwrap_or(1)
    }

    /// Returns the layers that have keys and values of their own, in ascending order.
    pub fn cached_layers(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers_of(LayerKind::Attention).filter(|layer| self.owns_cache(*layer))
    }

    /// Returns the greatest window of layers whose pages are given back when no token sees them: those with a window, if
    /// others see all tokens. A prompt that is computed in one piece gives none back before its end.
    pub fn recycled_window(&self) -> Option<u32> {
        let windows = || self.cached_layers().map(|layer| self.attention(layer).window);
        windows().flatten().max().filter(|_| self.causal && windows().any(|window| window.is_none()))
    }

    /// Returns the bytes of keys and values that one token adds to the KV cache, over all attention layers. MTP blocks are
    /// not included.
    pub fn kv_bytes_per_token(&self, format: KvFormat) -> u64 {
        self.cached_layers().map(|layer| self.attention(layer).kv_bytes(format)).sum()
    }
}

/// The reasons why a configuration cannot be run.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfigError {
    /// All problems found; at least one.
    pub problems: Vec<ConfigProblem>,
}

impl fmt::Display for ModelConfigError {
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

impl std::error::Error for ModelConfigError {}

/// One reason why a configuration cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigProblem {
    /// The file is not a JSON object.
    #[error("{file} is not valid: {reason}")]
    NotJson {
        /// The file's name.
        file: &'static str,
        /// The cause, mostly the JSON parser's message.
        reason: String,
    },
    /// The model family is not supported.
    #[error("architecture \"{0}\" is not supported ({known} are)", known = Architecture::all().map(Architecture::name).collect::<Vec<_>>().join(", "))]
    UnsupportedArchitecture(String),
    /// The activation function is not supported.
    #[error("activation \"{0}\" is not supported for this architecture ({1} is)")]
    UnsupportedActivation(String, &'static str),
    /// The RoPE scaling type is not supported.
    #[error(
        "rope type \"{0}\" is not supported (default, dynamic, linear, llama3, longrope, proportional and yarn are)"
    )]
    UnsupportedRope(String),
    /// The element type is not supported.
    #[error("dtype \"{0}\" is not supported (bfloat16, float16 and float32 are)")]
    UnsupportedDtype(String),
    /// The weights are quantised in a way that is not supported.
    #[error("quantization \"{0}\" is not supported ({known} are)", known = quantization::methods())]
    Quantized(String),
    /// The model uses sliding-window attention, which its family does not have.
    #[error("sliding-window attention is not supported for this architecture ({0})")]
    SlidingWindow(String),
    /// A layer is of a type that its family does not have.
    #[error(
        "layer type \"{0}\" is not supported for this architecture (full_attention is, sliding_attention in families \
         with a window, linear_attention in hybrids, conv in LFM2, mamba in Granite)"
    )]
    UnsupportedLayer(String),
    /// A required key is missing.
    #[error("{0} is missing")]
    Missing(String),
    /// A value has the wrong type or is out of range.
    #[error("{key} is {value}, must be {rule}")]
    Value {
        /// The key's path, with dots.
        key: String,
        /// The value in the file.
        value: String,
        /// The allowed values.
        rule: String,
    },
}
