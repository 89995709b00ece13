//! A model's configuration from GGUF metadata, and the `config.json` and `generation_config.json` that say the same in
//! the keys of Hugging Face checkpoints.
//!
//! Not here: whether the values can be run, which the reader of `config.json` decides, and the tokenizer.

mod experts;
mod families;
mod heads;

use serde_json::{Map, Value as Json, json};

use super::container::{Array, GgufTensor, Value};
use super::split::GgufFiles;
use heads::Heads;

/// The maximum number of layers, including multi-token-prediction blocks.
pub const MAX_LAYERS: u64 = 4096;
/// The maximum number of experts of a layer.
pub const MAX_EXPERTS: u64 = 4096;
/// The maximum value of any other size.
const MAX_SIZE: u64 = 1 << 30;

/// The tensor that holds the divisors of the rotary frequencies in models with Llama 3's scaling.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The tensors that hold LongRoPE's divisors of the rotary frequencies: for short contexts and for long ones.
pub const LONG_ROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
/// The table of the layers' inputs that depend on the token.
pub const LAYER_INPUTS: &str = "per_layer_token_embd.weight";
/// The name, after that of its block, of the bias that counts for the choice of experts only.
pub const CHOICE_BIAS: &str = "exp_probs_b.bias";
/// The maximum number of elements of each of the tensors of divisors.
pub const MAX_ROPE_FACTORS: u64 = 1 << 16;

/// The values of the tensors of divisors of the rotary frequencies that a model has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeFactors {
    /// The values of the tensor [`ROPE_FACTORS`].
    pub llama3: Option<Vec<f32>>,
    /// The values of the tensors [`LONG_ROPE_FACTORS`].
    pub long: Option<[Vec<f32>; 2]>,
}

/// The model families whose metadata and tensors are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GgufArchitecture {
    /// Llama and models that store themselves as Llama, such as Mistral; dense, or with experts in all layers (Mixtral).
    Llama,
    /// Qwen2 and Qwen2.5; dense, with biases of q, k and v.
    Qwen2,
    /// Qwen3; dense.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Qwen3-Next: a hybrid with experts.
    Qwen3Next,
    /// Qwen3.5: a dense hybrid.
    Qwen35,
    /// Qwen3.5 with experts: a hybrid.
    Qwen35Moe,
    /// Qwen2 with experts, one of them shared.
    Qwen2Moe,
    /// Gemma 2; dense, with norms around attention and MLP, a sliding window and bounds.
    Gemma2,
    /// Gemma 3; dense, with norms around attention and MLP and a sliding window.
    Gemma3,
    /// EmbeddingGemma: Gemma 3 whose tokens see later ones too, for embeddings.
    GemmaEmbedding,
    /// gpt-oss: experts with biases, attention with sinks and a sliding window.
    GptOss,
    /// Phi-3 and Phi-4; dense, with LongRoPE.
    Phi3,
    /// Granite; dense, with constant factors.
    Granite,
    /// SmolLM3; dense, with layers without rotary embedding.
    SmolLm3,
    /// OLMo 2 and, with a sliding window, OLMo 3; dense, with norms after attention and MLP.
    Olmo2,
    /// GLM-4; dense, with norms around attention and MLP.
    Glm4,
    /// Mistral Small 3 and Ministral 3; dense.
    Mistral3,
    /// Gemma 4; dense or with experts beside the dense MLPs, with other heads in the layers that see all tokens.
    Gemma4,
    /// DeepSeek-V2, -V3 and GLM-4.7-Flash: latent attention, and experts after dense layers.
    DeepSeek2,
    /// GLM-4.5 and later: experts after dense layers.
    Glm4Moe,
    /// Qwen3-VL's text model, which is Qwen3's; dense.
    Qwen3Vl,
    /// Qwen3-VL's text model with experts, which is that of Qwen3 with experts.
    Qwen3VlMoe,
    /// Qwen2.5-VL's text model, which is Qwen2's; dense.
    Qwen2Vl,
    /// Seed-OSS; dense, with biases of q, k and v.
    SeedOss,
    /// ERNIE 4.5; dense.
    Ernie45,
    /// EXAONE 4; dense, with norms after attention and MLP, and layers without rotary embedding.
    Exaone4,
    /// OLMoE: experts in all layers.
    Olmoe,
    /// dots.llm1: experts after dense layers.
    Dots1,
    /// MiniMax-M2: experts in all layers.
    MiniMaxM2,
    /// HunYuan; dense.
    HunYuanDense,
    /// HunYuan with experts in all layers.
    HunYuanMoe,
    /// ERNIE 4.5 with experts after dense layers.
    Ernie45Moe,
    /// Granite with experts in all layers.
    GraniteMoe,
    /// LFM2; dense, with short convolutions instead of attention in most layers.
    Lfm2,
    /// LFM2 with experts after dense layers.
    Lfm2Moe,
    /// Granite 4, dense or with experts, with state spaces (Mamba-2) instead of attention in most layers.
    GraniteHybrid,
    /// Nemotron-H; dense, with layers that are either attention, a state space (Mamba-2) or an MLP without a gate.
    NemotronH,
    /// Nemotron 3: like that, with experts in all MLPs.
    NemotronHMoe,
}

impl GgufArchitecture {
    /// All families.
    pub const ALL: [GgufArchitecture; 39] = [
        GgufArchitecture::Llama,
        GgufArchitecture::Qwen2,
        GgufArchitecture::Qwen3,
        GgufArchitecture::Qwen3Moe,
        GgufArchitecture::Qwen3Next,
        GgufArchitecture::Qwen35,
        GgufArchitecture::Qwen35Moe,
        GgufArchitecture::Qwen2Moe,
        GgufArchitecture::Gemma2,
        GgufArchitecture::Gemma3,
        GgufArchitecture::GemmaEmbedding,
        GgufArchitecture::GptOss,
        GgufArchitecture::Phi3,
        GgufArchitecture::Granite,
        GgufArchitecture::SmolLm3,
        GgufArchitecture::Olmo2,
        GgufArchitecture::Glm4,
        GgufArchitecture::Mistral3,
        GgufArchitecture::Gemma4,
        GgufArchitecture::DeepSeek2,
        GgufArchitecture::Glm4Moe,
        GgufArchitecture::Qwen3Vl,
        GgufArchitecture::Qwen3VlMoe,
        GgufArchitecture::Qwen2Vl,
        GgufArchitecture::SeedOss,
        GgufArchitecture::Ernie45,
        GgufArchitecture::Exaone4,
        GgufArchitecture::Olmoe,
        GgufArchitecture::Dots1,
        GgufArchitecture::MiniMaxM2,
        GgufArchitecture::HunYuanDense,
        GgufArchitecture::HunYuanMoe,
        GgufArchitecture::Ernie45Moe,
        GgufArchitecture::GraniteMoe,
        GgufArchitecture::Lfm2,
        GgufArchitecture::Lfm2Moe,
        GgufArchitecture::GraniteHybrid,
        GgufArchitecture::NemotronH,
        GgufArchitecture::NemotronHMoe,
    ];

    /// Returns the value of `general.architecture`, which is also the prefix of the family's metadata keys.
    pub fn name(self) -> &'static str {
        match self {
            GgufArchitecture::Llama => "llama",
            GgufArchitecture::Qwen2 => "qwen2",
            GgufArchitecture::Qwen3 => "qwen3",
            GgufArchitecture::Qwen3Moe => "qwen3moe",
            GgufArchitecture::Qwen3Next => "qwen3next",
            GgufArchitecture::Qwen35 => "qwen35",
            GgufArchitecture::Qwen35Moe => "qwen35moe",
            GgufArchitecture::Qwen2Moe => "qwen2moe",
            GgufArchitecture::Gemma2 => "gemma2",
            GgufArchitecture::Gemma3 => "gemma3",
            GgufArchitecture::GemmaEmbedding => "gemma-embedding",
            GgufArchitecture::GptOss => "gpt-oss",
            GgufArchitecture::Phi3 => "phi3",
            GgufArchitecture::Granite => "granite",
            GgufArchitecture::SmolLm3 => "smollm3",
            GgufArchitecture::Olmo2 => "olmo2",
            GgufArchitecture::Glm4 => "glm4",
            GgufArchitecture::Mistral3 => "mistral3",
            GgufArchitecture::Gemma4 => "gemma4",
            GgufArchitecture::DeepSeek2 => "deepseek2",
            GgufArchitecture::Glm4Moe => "glm4moe",
            GgufArchitecture::Qwen3Vl => "qwen3vl",
            GgufArchitecture::Qwen3VlMoe => "qwen3vlmoe",
            GgufArchitecture::Qwen2Vl => "qwen2vl",
            GgufArchitecture::SeedOss => "seed_oss",
            GgufArchitecture::Ernie45 => "ernie4_5",
            GgufArchitecture::Exaone4 => "exaone4",
            GgufArchitecture::Olmoe => "olmoe",
            GgufArchitecture::Dots1 => "dots1",
            GgufArchitecture::MiniMaxM2 => "minimax-m2",
            GgufArchitecture::HunYuanDense => "hunyuan-dense",
            GgufArchitecture::HunYuanMoe => "hunyuan-moe",
            GgufArchitecture::Ernie45Moe => "ernie4_5-moe",
            GgufArchitecture::GraniteMoe => "granitemoe",
            GgufArchitecture::Lfm2 => "lfm2",
            GgufArchitecture::Lfm2Moe => "lfm2moe",
            GgufArchitecture::GraniteHybrid => "granitehybrid",
            GgufArchitecture::NemotronH => "nemotron_h",
            GgufArchitecture::NemotronHMoe => "nemotron_h_moe",
        }
    }

    /// Whether some layers use the gated delta rule (linear attention).
    pub fn is_hybrid(self) -> bool {
        matches!(self, GgufArchitecture::Qwen3Next | GgufArchitecture::Qwen35 | GgufArchitecture::Qwen35Moe)
    }

    /// Whether some layers are short convolutions.
    pub fn has_short_convs(self) -> bool {
        matches!(self, GgufArchitecture::Lfm2 | GgufArchitecture::Lfm2Moe)
    }

    /// Whether some layers are state spaces.
    pub fn has_state_spaces(self) -> bool {
        self == GgufArchitecture::GraniteHybrid || self.has_single_blocks()
    }

    /// Whether each layer is either a mixer or an MLP. Attention has no rotary embedding in these families, whatever keys
    /// say of it, and MLPs have no gate projection.
    pub fn has_single_blocks(self) -> bool {
        matches!(self, GgufArchitecture::NemotronH | GgufArchitecture::NemotronHMoe)
    }

    /// Whether layers without attention have no key heads.
    fn counts_no_key_heads(self) -> bool {
        self.has_short_convs() || self.has_state_spaces()
    }

    /// Whether all files of the family have experts.
    pub fn has_experts(self) -> bool {
        matches!(
            self,
            GgufArchitecture::Qwen2Moe
                | GgufArchitecture::Qwen3Moe
                | GgufArchitecture::Qwen3Next
                | GgufArchitecture::Qwen35Moe
                | GgufArchitecture::GptOss
                | GgufArchitecture::DeepSeek2
                | GgufArchitecture::Glm4Moe
                | GgufArchitecture::Qwen3VlMoe
                | GgufArchitecture::Olmoe
                | GgufArchitecture::Dots1
                | GgufArchitecture::MiniMaxM2
                | GgufArchitecture::HunYuanMoe
                | GgufArchitecture::Ernie45Moe
                | GgufArchitecture::GraniteMoe
                | GgufArchitecture::Lfm2Moe
                | GgufArchitecture::NemotronHMoe
        )
    }

    /// Whether some files of the family have experts, those that state a number of them.
    pub fn may_have_experts(self) -> bool {
        use GgufArchitecture::{Gemma4, GraniteHybrid, Llama};
        self.has_experts() || matches!(self, Gemma4 | Llama | GraniteHybrid)
    }

    /// Whether keys say how experts are chosen ([`GgufExperts::routing`]), how many dense layers stand before those with
    /// experts, and how wide the shared expert is, which has no gate.
    pub fn states_routing(self) -> bool {
        use GgufArchitecture::{DeepSeek2, Dots1, Ernie45Moe, Glm4Moe, Lfm2Moe, MiniMaxM2, NemotronHMoe};
        matches!(self, DeepSeek2 | Glm4Moe | Dots1 | MiniMaxM2 | Ernie45Moe | Lfm2Moe | NemotronHMoe)
    }

    /// Whether a shared expert has no gate, in families whose files do not state the routing.
    pub fn adds_shared_expert(self) -> bool {
        use GgufArchitecture::{GraniteHybrid, GraniteMoe, HunYuanMoe};
        matches!(self, GraniteMoe | GraniteHybrid | HunYuanMoe)
    }

    /// Whether config.json has the intermediate size of experts under the key of that of dense MLPs.
    fn has_only_experts(self) -> bool {
        use GgufArchitecture::{GptOss, GraniteHybrid, GraniteMoe, HunYuanMoe, Llama, MiniMaxM2, Olmoe};
        matches!(self, GptOss | Llama | MiniMaxM2 | Olmoe | GraniteMoe | GraniteHybrid | HunYuanMoe)
    }

    /// Whether layers have a window in config.json unless it says otherwise.
    fn has_default_window(self) -> bool {
        use GgufArchitecture::{Gemma2, Gemma3, GemmaEmbedding, GptOss};
        matches!(self, Gemma2 | Gemma3 | GemmaEmbedding | GptOss)
    }

    /// Whether the weights of norms over the residual stream and over heads are stored with 1 added.
    pub fn has_shifted_norms(self) -> bool {
        use GgufArchitecture::{Gemma2, Gemma3, GemmaEmbedding};
        self.is_hybrid() || matches!(self, Gemma2 | Gemma3 | GemmaEmbedding)
    }
}

/// The dimensions of gated-delta-rule layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The number of heads of q and of k.
    pub key_heads: u64,
    /// The number of heads of v; a multiple of `key_heads`.
    pub value_heads: u64,
    /// The dimensions of a head of q or k.
    pub key_dim: u64,
    /// The dimensions of a head of v.
    pub value_dim: u64,
    /// The number of taps of the convolution.
    pub conv_kernel: u64,
}

/// What a layer is, in families whose layers are either a mixer or an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufBlock {
    /// Attention.
    Attention,
    /// A state space.
    StateSpace,
    /// An MLP, dense or with experts: the same in all layers.
    Mlp,
}

/// The state spaces of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufSpace {
    /// The dimensions: key heads are groups, and value heads the heads.
    pub dims: Delta,
    /// Whether the convolution has biases.
    pub conv_bias: bool,
}

/// The dimensions of layers with experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufExperts {
    /// The number of routed experts.
    pub count: u64,
    /// The number of experts that a token uses.
    pub chosen: u64,
    /// The intermediate size of a routed expert.
    pub inner: u64,
    /// The intermediate size of the shared expert; `None` if the model has no shared expert.
    pub shared_inner: Option<u64>,
    /// Whether the weights of a token's experts are normalised to a sum of 1.
    pub normalise: bool,
    /// The number of dense layers before the first one with experts.
    pub dense_layers: u64,
    /// n if, from there on, every n-th layer of all layers has experts.
    pub interval: u64,
    /// How experts are chosen, in the families whose files say it
    /// ([`GgufArchitecture::states_routing`]); `None`: by the greatest softmax scores.
    pub routing: Option<GgufRouting>,
}

impl GgufExperts {
    /// Whether a layer has experts.
    pub fn has(&self, layer: u64) -> bool {
        layer >= self.dense_layers && (layer + 1).is_multiple_of(self.interval)
    }

    /// Returns how many routed experts are as wide as the shared expert; 0 if none is shared, or if it is no multiple.
    pub fn shared_count(&self) -> u64 {
        let whole = self.shared_inner.filter(|inner| inner.is_multiple_of(self.inner));
        whole.map_or(0, |inner| inner / self.inner)
    }
}

/// A choice of experts in groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufRouting {
    /// Whether scores are sigmoids; otherwise they are of a softmax over all experts.
    pub sigmoid: bool,
    /// Whether scores have a bias that counts for the choice only.
    pub biased: bool,
    /// The number of groups.
    pub groups: u64,
    /// The number of groups that a token's experts are of.
    pub kept_groups: u64,
    /// The factor of the experts' weights.
    pub factor: f64,
}

/// The heads of the layers that see all tokens, in a family in which they are not those of the layers with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufFullHeads {
    /// The number of key and value heads.
    pub kv_heads: u64,
    /// The dimensions of a head.
    pub head_dim: u64,
    /// The number of rotated dimensions of a head: as many of the first half as of the second one.
    pub rotary_dim: u64,
    /// Whether keys, before their norm, are the values too.
    pub values_are_keys: bool,
}

/// The dimensions of latent attention (MLA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufLatent {
    /// The width of the queries' latent vector; `None` if queries are projected at once.
    pub q_rank: Option<u64>,
    /// The width of the latent vector of keys and values.
    pub kv_rank: u64,
    /// The dimensions of a head's query and key that are not rotated.
    pub nope: u64,
    /// The dimensions of a head's query and key that are rotated.
    pub rope: u64,
    /// The dimensions of a head's value.
    pub values: u64,
}

/// The heads of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufLayerHeads {
    /// The number of key and value heads.
    pub kv_heads: u64,
    /// The dimensions of a head.
    pub head_dim: u64,
    /// Whether the layer has keys and values of its own; otherwise it reads those of another layer.
    pub own: bool,
    /// Whether it has a projection of values; otherwise keys are the values too.
    pub values: bool,
}

/// How the rotary frequencies are changed for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufRope {
    /// No change.
    Default,
    /// Every frequency is divided.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3's scaling.
    Llama3(Llama3),
    /// YaRN. Absent values take the defaults of config.json.
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// The context length of the original training.
        original_context: u64,
        /// The number of rotations at which the ramp begins.
        beta_fast: Option<f64>,
        /// The number of rotations at which the ramp ends.
        beta_slow: Option<f64>,
        /// The factor of cosines and sines.
        attention_factor: Option<f64>,
        /// The coefficients in the factor of cosines and sines, and in its divisor.
        mscale: Option<[f64; 2]>,
    },
    /// LongRoPE: every frequency has a divisor of its own.
    LongRope {
        /// The divisors for contexts up to the original one.
        short: Vec<f32>,
        /// The divisors for longer contexts.
        long: Vec<f32>,
        /// The context length of the original training.
        original_context: u64,
        /// The factor of cosines and sines.
        attention_factor: Option<f64>,
    },
}

/// The sliding window of attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufWindow {
    /// The number of tokens that a token sees, itself included.
    pub tokens: u64,
    /// `[layers]`: whether the layer has the window.
    pub layers: Vec<bool>,
    /// The base of the rotary frequencies of these layers, which are not scaled. `None` if they have the rotary
    /// embedding of the other layers.
    pub rope_theta: Option<f64>,
}

/// The parameters of Llama 3's scaling of rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// The divisor of the low frequencies.
    pub factor: f64,
    /// Frequencies with a wavelength above `original_context / low_freq_factor` are low.
    pub low_freq_factor: f64,
    /// Frequencies with a wavelength below `original_context / high_freq_factor` are high.
    pub high_freq_factor: f64,
    /// The context length of the original training.
    pub original_context: f64,
}

/// A model's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    /// The model family.
    pub architecture: GgufArchitecture,
    /// The width of the residual stream.
    pub hidden: u64,
    /// The number of layers without multi-token-prediction (MTP) blocks.
    pub layers: u64,
    /// The number of MTP blocks, which stand behind the layers.
    pub mtp_layers: u64,
    /// Whether the MTP block has an embedding or a head of its own.
    pub mtp_own_embedding: bool,
    /// The number of query heads.
    pub heads: u64,
    /// The number of key and value heads; with [`GgufModel::full_heads`], those of layers with a window.
    pub kv_heads: u64,
    /// The dimensions of a head; with [`GgufModel::full_heads`], those of layers with a window, and with latent attention
    /// the rotated ones.
    pub head_dim: u64,
    /// The number of rotated dimensions of a head.
    pub rotary_dim: u64,
    /// The heads of the layers that see all tokens, if they are other ones.
    pub full_heads: Option<GgufFullHeads>,
    /// The number of layers that have keys and values of their own; those behind them read the last of these layers of
    /// their kind.
    pub own_caches: u64,
    /// The dimensions of latent attention, in families that have it.
    pub latent: Option<GgufLatent>,
    /// Whether there are norms of each query and key head, in families in which not all files have them.
    pub head_norms: bool,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The change of the rotary frequencies.
    pub rope_scaling: GgufRope,
    /// The intermediate size of dense layers; `None` if the file does not say.
    pub intermediate: Option<u64>,
    /// Whether the MLPs of the layers without keys and values of their own are twice as wide.
    pub wide_shared: bool,
    /// The width of each layer's input that depends on the token, and the number of rows of its table; `None` without
    /// such inputs.
    pub layer_inputs: Option<[u64; 2]>,
    /// The epsilon of the norms.
    pub rms_eps: f64,
    /// The number of rows of the embedding.
    pub vocab: u64,
    /// Whether the head is tied to the embedding.
    pub tied: bool,
    /// Whether q, k and v have biases.
    pub attention_bias: bool,
    /// Whether the MLPs have biases.
    pub mlp_bias: bool,
    /// The maximum sequence length.
    pub context: u64,
    /// `[layers]`: whether the layer has full attention, rather than the gated delta rule, a short convolution, a state
    /// space or an MLP alone.
    pub full_attention: Vec<bool>,
    /// `[layers]`: what the layer is, in families whose layers are either a mixer or an MLP.
    pub blocks: Option<Vec<GgufBlock>>,
    /// The dimensions of gated-delta-rule layers; `Some` for hybrids.
    pub delta: Option<Delta>,
    /// The number of taps of short convolutions; `Some` for families that have them.
    pub conv_taps: Option<u64>,
    /// The state spaces; `Some` for families that have them.
    pub space: Option<GgufSpace>,
    /// The dimensions of layers with experts; `Some` for families that have them.
    pub experts: Option<GgufExperts>,
    /// The sliding window; `None` if no layer has one.
    pub window: Option<GgufWindow>,
    /// The coefficient of the growth of queries with their position. Only with YaRN.
    pub query_growth: Option<f64>,
    /// The keys of config.json that only this family has, such as its constant factors.
    pub own_keys: Vec<(&'static str, Json)>,
}

/// The reason why a model's metadata cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GgufConfigError {
    /// A required metadata key is missing.
    #[error("the metadata key {0} is missing")]
    Missing(String),
    /// A metadata value has the wrong type or is out of range.
    #[error("{key} is {value}, must be {rule}")]
    Value {
        /// The key.
        key: String,
        /// The value in the file.
        value: String,
        /// The allowed values.
        rule: String,
    },
    /// The model family is not supported.
    #[error("architecture {0:?} is not supported ({known} are)", known = known_architectures())]
    GgufArchitecture(String),
    /// The model has something that no supported family has.
    #[error("{key} is {value}, which is not supported ({what})")]
    Unsupported {
        /// The metadata key.
        key: String,
        /// The value in the file.
        value: String,
        /// The meaning of the value.
        what: &'static str,
    },
    /// A tensor that determines a size is missing.
    #[error("tensor {0} is missing")]
    MissingTensor(&'static str),
    /// A size in the metadata differs from that of the tensors.
    #[error("{key} is {has}, tensor {tensor} has {expected}")]
    Size {
        /// The metadata key.
        key: String,
        /// The value in the metadata.
        has: u64,
        /// The tensor.
        tensor: &'static str,
        /// The value that the tensor's shape has.
        expected: u64,
    },
    /// A dense module behind the pooling has a bias.
    #[error("tensor {0}.bias, the bias of a dense module, is not supported")]
    DenseBias(&'static str),
    /// The divisors of the rotary frequencies are not those of a known scaling.
    #[error("tensor {ROPE_FACTORS} has {0}, which is not the scaling of Llama 3")]
    RopeFactors(String),
    /// The divisors of the rotary frequencies are not those of the family.
    #[error("tensor {tensor} has {has}, must have {rule}")]
    Divisors {
        /// The tensor.
        tensor: &'static str,
        /// The tensor's contents.
        has: String,
        /// The required contents.
        rule: String,
    },
}

fn known_architectures() -> String {
    GgufArchitecture::ALL.map(GgufArchitecture::name).join(", ")
}

/// Reads metadata values of one family.
struct Keys<'a> {
    parts: &'a GgufFiles,
    architecture: GgufArchitecture,
}

impl<'a> Keys<'a> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.parts.get(&self.key(key))
    }

    fn wrong(&self, key: &str, value: &Value, rule: impl Into<String>) -> GgufConfigError {
        GgufConfigError::Value { key: self.key(key), value: value.to_string(), rule: rule.into() }
    }

    fn missing(&self, key: &str) -> GgufConfigError {
        GgufConfigError::Missing(self.key(key))
    }

    fn in_range(
        &self,
        key: &str,
        value: &Value,
        n: Option<u64>,
        least: u64,
        most: u64,
    ) -> Result<u64, GgufConfigError> {
        n.filter(|n| (least..=most).contains(n))
            .ok_or_else(|| self.wrong(key, value, format!("an integer from {least} to {most}")))
    }

    /// Reads an integer from 1 to `most`; `None` if the key is absent.
    fn size(&self, key: &str, most: u64) -> Result<Option<u64>, GgufConfigError> {
        self.get(key).map(|value| self.in_range(key, value, value.unsigned(), 1, most)).transpose()
    }

    /// Reads an integer from 0 to `most`; 0 if the key is absent.
    fn size_or_zero(&self, key: &str, most: u64) -> Result<u64, GgufConfigError> {
        self.get(key).map_or(Ok(0), |value| self.in_range(key, value, value.unsigned(), 0, most))
    }

    fn need(&self, key: &str, most: u64) -> Result<u64, GgufConfigError> {
        self.size(key, most)?.ok_or_else(|| self.missing(key))
    }

    /// Reads a size that may be given by layer. All layers must have the same; in families whose layers are not all of
    /// attention, layers may have 0.
    fn uniform(&self, key: &str) -> Result<Option<u64>, GgufConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else { return self.size(key, MAX_SIZE) };
        let mut found = None;
        for index in 0..array.len() {
            match array.unsigned(index) {
                Some(0) if self.architecture.is_hybrid() || self.architecture.counts_no_key_heads() => {}
                Some(n) if n > 0 && n <= MAX_SIZE && found.is_none_or(|other| other == n) => found = Some(n),
                _ => return Err(self.wrong(key, value, "the same in all layers")),
            }
        }
        found.ok_or_else(|| self.wrong(key, value, "a list with a number")).map(Some)
    }

    /// Reads a size of at least `least` for each of `layers` layers, which may be given once for all; `None` if the key is
    /// absent.
    fn by_layer(&self, key: &str, layers: u64, least: u64) -> Result<Option<Vec<u64>>, GgufConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Array(array) = value else {
            let n = self.in_range(key, value, value.unsigned(), least, MAX_SIZE)?;
            return Ok(Some(vec![n; layers as usize]));
        };
        let size = |layer: usize| array.unsigned(layer).filter(|n| (least..=MAX_SIZE).contains(n));
        let sizes = (array.len() as u64 >= layers)
            .then(|| (0..layers as usize).map(size).collect::<Option<Vec<u64>>>())
            .flatten();
        let rule = || format!("a list of at least {layers} integers from {least} to {MAX_SIZE}");
        sizes.ok_or_else(|| self.wrong(key, value, rule())).map(Some)
    }

    /// Reads a number above 0; `None` if the key is absent.
    fn number(&self, key: &str) -> Result<Option<f64>, GgufConfigError> {
        let read = |value: &Value| {
            let number = value.number().filter(|n| n.is_finite() && *n > 0.0);
            number.ok_or_else(|| self.wrong(key, value, "a number above 0"))
        };
        self.get(key).map(read).transpose()
    }

    fn unsupported(&self, key: &str, value: &Value, what: &'static str) -> GgufConfigError {
        GgufConfigError::Unsupported { key: self.key(key), value: value.to_string(), what }
    }
}

/// Returns the model family.
///
/// # Errors The architecture is missing or not supported.
pub fn architecture(parts: &GgufFiles) -> Result<GgufArchitecture, GgufConfigError> {
    let key = "general.architecture";
    let value = parts.get(key).ok_or_else(|| GgufConfigError::Missing(key.to_owned()))?;
    let name = value.text().ok_or_else(|| GgufConfigError::GgufArchitecture(value.to_string()))?;
    let known = GgufArchitecture::ALL.into_iter().find(|known| known.name() == name);
    known.ok_or_else(|| GgufConfigError::GgufArchitecture(name.chars().take(80).collect()))
}

/// A dense module of an embedding model: its folder, the name of its tensor, and the keys that say the tensor's columns and
/// rows.
pub type DenseModule = (&'static str, &'static str, [&'static str; 2]);

/// The dense modules that a file may have, in their order. Files have no biases of them and name no activation.
pub const DENSE: [DenseModule; 2] = [
    ("2_Dense", "dense_2", ["dense_2_feat_in", "dense_2_feat_out"]),
    ("3_Dense", "dense_3", ["dense_3_feat_in", "dense_3_feat_out"]),
];

/// Returns the dense modules of a model, each with its tensor.
pub fn dense_modules(parts: &GgufFiles) -> impl Iterator<Item = (DenseModule, &GgufTensor)> {
    DENSE.into_iter().filter_map(|module| Some((module, parts.tensor(&format!("{}.weight", module.1))?)))
}

/// Returns the files that say how an embedding model pools, and which dense modules follow, by their names; empty if the
/// metadata does not say. Vectors are scaled to unit length, as llama.cpp does by default.
///
/// # Errors The kind of pooling is unknown, or a dense module has another shape than keys say.
pub fn embedding_json(parts: &GgufFiles) -> Result<Vec<(&'static str, Json)>, GgufConfigError> {
    let keys = Keys { parts, architecture: architecture(parts)? };
    let key = "pooling_type";
    let mode = match keys.get(key).map(|value| (value, value.unsigned())) {
        None | Some((_, Some(0))) if dense_modules(parts).next().is_none() => return Ok(Vec::new()),
        None | Some((_, Some(0 | 1))) => "mean",
        Some((_, Some(2))) => "cls",
        Some((_, Some(3))) => "lasttoken",
        Some((value, Some(4))) => return Err(keys.unsupported(key, value, "a head for ranking")),
        Some((value, _)) => return Err(keys.wrong(key, value, "an integer from 0 to 3")),
    };
    let [modules_file, pooling_file, dense_files @ ..] = EMBEDDING_FILES;
    let mut modules = vec![("Transformer", ""), ("Pooling", "1_Pooling")];
    let mut files = vec![(pooling_file, json!({"pooling_mode": mode}))];
    for ((folder, name, [cols, rows]), tensor) in dense_modules(parts) {
        if parts.has(&format!("{name}.bias")) {
            return Err(GgufConfigError::DenseBias(name));
        }
        for (key, expected) in [(cols, tensor.cols()), (rows, tensor.rows())] {
            let has = keys.size_or_zero(key, MAX_SIZE)?;
            if has != 0 && has != expected {
                return Err(GgufConfigError::Size { key: keys.key(key), has, tensor: name, expected });
            }
        }
        let file = dense_files.into_iter().find(|file| file.starts_with(folder)).expect("each folder has a file");
        let settings = json!({
            "in_features": tensor.cols(), "out_features": tensor.rows(), "bias": false, "activation_function": "Identity"
        });
        modules.push(("Dense", folder));
        files.push((file, settings));
    }
    modules.push(("Normalize", ""));
    let modules = modules
        .into_iter()
        .enumerate()
        .map(|(index, (class, path))| json!({"idx": index, "name": index.to_string(), "path": path, "type": class}));
    files.insert(0, (modules_file, modules.collect()));
    Ok(files)
}

/// The names of the files of [`embedding_json`].
pub const EMBEDDING_FILES: [&str; 4] =
    ["modules.json", "1_Pooling/config.json", "2_Dense/config.json", "3_Dense/config.json"];

impl GgufModel {
    /// Reads the configuration. `factors` are the values of the model's tensors of divisors of the rotary frequencies.
    ///
    /// # Errors The first problem found.
    pub fn read(parts: &GgufFiles, factors: &RopeFactors) -> Result<GgufModel, GgufConfigError> {
        let architecture = architecture(parts)?;
        let keys = Keys { parts, architecture };
        keys.refuse_foreign()?;

        let hidden = keys.need("embedding_length", MAX_SIZE)?;
        let blocks = keys.need("block_count", MAX_LAYERS)?;
        let mtp_layers = keys.size_or_zero("nextn_predict_layers", blocks - 1)?;
        let layers = blocks - mtp_layers;
        let Heads { heads, kv_heads, head_dim, rotary_dim, full: full_heads, own_caches, latent } =
            heads::read(&keys, layers, hidden, factors.llama3.as_deref())?;
        let rope_theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
        let long = architecture == GgufArchitecture::Phi3 && LONG_ROPE_FACTORS.iter().any(|name| parts.has(name));
        let scaling = match architecture.has_single_blocks() {
            true => GgufRope::Default,
            false => rope_scaling(&keys, long)?,
        };
        let rope_scaling = match (parts.has(ROPE_FACTORS), &factors.llama3) {
            // The tensor says which dimensions are rotated.
            _ if full_heads.is_some() => scaling,
            // Nothing is rotated.
            _ if architecture.has_single_blocks() => scaling,
            (false, _) if long => families::long_rope(&keys, &scaling, factors.long.as_ref(), rotary_dim)?,
            (false, _) => scaling,
            (true, None) => return Err(GgufConfigError::RopeFactors("no values".to_owned())),
            (true, Some(_)) if scaling != GgufRope::Default => {
                return Err(GgufConfigError::RopeFactors("a second scaling beside it".to_owned()));
            }
            (true, Some(factors)) => fit_llama3(factors, rope_theta, rotary_dim)?,
        };
        let blocks = families::blocks(&keys, layers)?;
        let (intermediate, wide_shared) = families::dense_widths(&keys, layers, own_caches)?;
        let embedding = "token_embd.weight";
        let embedding_info = parts.tensor(embedding).ok_or(GgufConfigError::MissingTensor(embedding))?;
        let vocab = embedding_info.rows();
        let same = |key: &str, has: u64, expected: u64| match has == expected {
            true => Ok(()),
            false => Err(GgufConfigError::Size { key: keys.key(key), has, tensor: embedding, expected }),
        };
        same("embedding_length", hidden, embedding_info.cols())?;
        if let Some(stated) = keys.size("vocab_size", MAX_SIZE)? {
            same("vocab_size", stated, vocab)?;
        }
        // Of families whose layers are either a mixer or an MLP, the last layer of the kind counts.
        let last = |kind: GgufBlock| match &blocks {
            None => layers - 1,
            Some(blocks) => blocks.iter().rposition(|block| *block == kind).map_or(layers - 1, |layer| layer as u64),
        };
        let (attention, mlp) = (last(GgufBlock::Attention), last(GgufBlock::Mlp));
        let has_one_of =
            |layer: u64, names: &[&str]| names.iter().any(|name| parts.has(&format!("blk.{layer}.{name}")));
        let own = ["embed_tokens", "shared_head_head"];
        let mtp_own_embedding = own.iter().any(|name| parts.has(&format!("blk.{layers}.nextn.{name}.weight")));
        let full_attention = match &blocks {
            None => full_attention(&keys, layers)?,
            Some(blocks) => blocks.iter().map(|block| *block == GgufBlock::Attention).collect(),
        };
        let first_space = match &blocks {
            None => full_attention.iter().position(|full| !full),
            Some(blocks) => blocks.iter().position(|block| *block == GgufBlock::StateSpace),
        };
        Ok(GgufModel {
            architecture,
            hidden,
            layers,
            mtp_layers,
            mtp_own_embedding,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            full_heads,
            own_caches,
            latent,
            head_norms: has_one_of(attention, &["attn_q_norm.weight"]),
            rope_theta,
            rope_scaling,
            intermediate,
            wide_shared,
            layer_inputs: families::layer_inputs(&keys)?,
            rms_eps: families::norm_eps(&keys)?,
            vocab,
            tied: !parts.has("output.weight"),
            attention_bias: has_one_of(attention, &["attn_q.bias", "attn_qkv.bias"]),
            mlp_bias: has_one_of(mlp, &["ffn_gate.bias", "ffn_up.bias"]),
            context: keys.need("context_length", MAX_SIZE)?,
            space: architecture.has_state_spaces().then(|| state_space(&keys, first_space)).transpose()?,
            full_attention,
            delta: architecture.is_hybrid().then(|| delta(&keys)).transpose()?,
            conv_taps: match architecture.has_short_convs() {
                true => Some(keys.need("shortconv.l_cache", MAX_SIZE)?),
                false => None,
            },
            experts: experts::read(&keys, layers, blocks.as_deref())?,
            blocks,
            window: families::window(&keys, layers, rope_theta)?,
            query_growth: families::query_growth(&keys)?,
            own_keys: families::own_keys(&keys, [layers, hidden, heads, head_dim])?,
        })
    }

    /// Returns the heads of a layer.
    pub fn heads_of(&self, layer: u64) -> GgufLayerHeads {
        let slides = self.window.as_ref().is_some_and(|window| window.layers.get(layer as usize) == Some(&true));
        let own = layer < self.own_caches;
        match self.full_heads.filter(|_| !slides) {
            None => GgufLayerHeads { kv_heads: self.kv_heads, head_dim: self.head_dim, own, values: true },
            Some(GgufFullHeads { kv_heads, head_dim, values_are_keys, .. }) => {
                GgufLayerHeads { kv_heads, head_dim, own, values: !values_are_keys }
            }
        }
    }

    /// Returns the intermediate size of a layer's dense MLP; `None` if the file does not say.
    pub fn dense_width(&self, layer: u64) -> Option<u64> {
        let wide = self.wide_shared && layer >= self.own_caches;
        self.intermediate.map(|inner| if wide { 2 * inner } else { inner })
    }

    /// Returns the text model's config.json. `ids` are those of the tokenizer.
    pub fn config_json(&self, ids: &SpecialIds) -> Json {
        let (class, model_type) = self.published_names();
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| {
            config.insert(key.to_owned(), value);
        };
        set("architectures", json!([class]));
        set("model_type", json!(model_type));
        set("hidden_act", json!("silu"));
        set("hidden_size", json!(self.hidden));
        set("num_hidden_layers", json!(self.layers));
        set("num_attention_heads", json!(self.heads));
        set("num_key_value_heads", json!(self.kv_heads));
        set("head_dim", json!(self.head_dim));
        // Families without dense layers have the size of their experts under this key.
        let of_experts = self.experts.filter(|_| self.architecture.has_only_experts());
        if let Some(intermediate) = of_experts.map(|experts| experts.inner).or(self.intermediate) {
            set("intermediate_size", json!(intermediate));
        }
        set("rms_norm_eps", json!(self.rms_eps));
        set("vocab_size", json!(self.vocab));
        set("max_position_embeddings", json!(self.context));
        set("tie_word_embeddings", json!(self.tied));
        set("attention_bias", json!(self.attention_bias));
        set("qkv_bias", json!(self.attention_bias));
        set("mlp_bias", json!(self.mlp_bias));
        set("rope_parameters", self.rope_json());
        if self.architecture.is_hybrid() {
            let kind = |full: &bool| if *full { "full_attention" } else { "linear_attention" };
            set("layer_types", json!(self.full_attention.iter().map(kind).collect::<Vec<_>>()));
            set("mtp_num_hidden_layers", json!(self.mtp_layers));
            set("mtp_use_dedicated_embeddings", json!(self.mtp_own_embedding));
        }
        if let Some(taps) = self.conv_taps {
            let kind = |full: &bool| if *full { "full_attention" } else { "conv" };
            set("layer_types", json!(self.full_attention.iter().map(kind).collect::<Vec<_>>()));
            set("conv_L_cache", json!(taps));
        }
        if let Some(GgufSpace { dims, conv_bias }) = self.space.filter(|_| self.blocks.is_none()) {
            let kind = |full: &bool| if *full { "attention" } else { "mamba" };
            set("layer_types", json!(self.full_attention.iter().map(kind).collect::<Vec<_>>()));
            set("mamba_n_heads", json!(dims.value_heads));
            set("mamba_n_groups", json!(dims.key_heads));
            set("mamba_d_head", json!(dims.value_dim));
            set("mamba_d_state", json!(dims.key_dim));
            set("mamba_d_conv", json!(dims.conv_kernel));
            set("mamba_expand", json!(dims.value_heads * dims.value_dim / self.hidden));
            set("mamba_conv_bias", json!(conv_bias));
        }
        if let Some(delta) = self.delta {
            set("linear_num_key_heads", json!(delta.key_heads));
            set("linear_num_value_heads", json!(delta.value_heads));
            set("linear_key_head_dim", json!(delta.key_dim));
            set("linear_value_head_dim", json!(delta.value_dim));
            set("linear_conv_kernel_dim", json!(delta.conv_kernel));
        }
        if let Some(experts) = self.experts {
            set("num_experts", json!(experts.count));
            set("num_experts_per_tok", json!(experts.chosen));
            set("moe_intermediate_size", json!(experts.inner));
            set("norm_topk_prob", json!(experts.normalise));
            set("decoder_sparse_step", json!(1));
            // 0 stands for no shared expert; without the key a default would be used.
            set("shared_expert_intermediate_size", json!(experts.shared_inner.unwrap_or(0)));
        }
        set("sliding_window", json!(self.window.as_ref().map(|window| window.tokens)));
        if let Some(window) = &self.window {
            let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
            set("layer_types", json!(window.layers.iter().map(kind).collect::<Vec<_>>()));
        } else if self.architecture.has_default_window() {
            // Without the key, these families have their default window.
            set("layer_types", json!(vec!["full_attention"; self.layers as usize]));
        }
        for (key, value) in self.structural_keys().iter().chain(&self.own_keys) {
            set(key, value.clone());
        }
        set("bos_token_id", json!(ids.bos));
        set("eos_token_id", json!(ids.eos));
        set("pad_token_id", json!(ids.pad));
        Json::Object(config)
    }

    fn rope_json(&self) -> Json {
        let rope = self.full_rope_json();
        match self.window.as_ref().and_then(|window| window.rope_theta) {
            None => rope,
            Some(theta) => {
                let mut local = json!({"rope_type": "default", "rope_theta": theta});
                if self.full_heads.is_some() && self.rotary_dim != self.head_dim {
                    // The default kind rotates whole heads; a factor of 1 changes nothing else.
                    local = json!({"rope_type": "linear", "factor": 1.0, "rope_theta": theta});
                    local["partial_rotary_factor"] = json!(partial(self.rotary_dim, self.head_dim));
                }
                json!({"full_attention": rope, "sliding_attention": local})
            }
        }
    }

    /// Returns the rotary embedding of layers without a sliding window.
    fn full_rope_json(&self) -> Json {
        let mut rope = match &self.rope_scaling {
            GgufRope::Default => json!({"rope_type": "default"}),
            GgufRope::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            GgufRope::Llama3(Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": *original_context as u64,
            }),
            GgufRope::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, mscale } => {
                json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original_context,
                    "beta_fast": beta_fast,
                    "beta_slow": beta_slow,
                    "attention_factor": attention_factor,
                    "mscale": mscale.map(|[above, _]| above),
                    "mscale_all_dim": mscale.map(|[_, below]| below),
                    "llama_4_scaling_beta": self.query_growth,
                    // The published models of this family do not round the ends of the ramp. No key says so.
                    "truncate": self.architecture != GgufArchitecture::GptOss,
                })
            }
            GgufRope::LongRope { short, long, original_context, attention_factor } => json!({
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original_context,
                "attention_factor": attention_factor,
            }),
        };
        rope["rope_theta"] = json!(self.rope_theta);
        if let Some(full) = self.full_heads {
            // Proportional: scaled, but otherwise plain frequencies of a part of the head.
            rope["rope_type"] = json!("proportional");
            rope["partial_rotary_factor"] = json!(partial(full.rotary_dim, full.head_dim));
            return rope;
        }
        let always = self.architecture.is_hybrid()
            || [GgufArchitecture::Glm4, GgufArchitecture::Glm4Moe].contains(&self.architecture);
        if always || self.rotary_dim != self.head_dim {
            rope["partial_rotary_factor"] = json!(partial(self.rotary_dim, self.head_dim));
        }
        rope
    }
}

/// Returns the fraction that gives `rotary_dim` when it is multiplied by `head_dim` and rounded down.
fn partial(rotary_dim: u64, head_dim: u64) -> f64 {
    let exact = rotary_dim as f64 / head_dim as f64;
    match (exact * head_dim as f64) as u64 == rotary_dim {
        true => exact,
        false => (rotary_dim as f64 + 0.5) / head_dim as f64,
    }
}

/// Reads the scaling of the rotary frequencies. `long`: the model has the tensors of LongRoPE.
fn rope_scaling(keys: &Keys<'_>, long: bool) -> Result<GgufRope, GgufConfigError> {
    let factor = keys.number("rope.scaling.factor")?;
    let yarn = keys.get("rope.scaling.type").and_then(Value::text) == Some("yarn");
    // Files of OLMo 3 have the factor of cosines and sines under this key.
    let whole = keys.architecture == GgufArchitecture::Olmo2 && yarn;
    let allowed = |value: &&Value| value.number() == Some(1.0) || long || whole;
    if let Some(value) = keys.get("rope.scaling.attn_factor").filter(|value| !allowed(value)) {
        return Err(keys.unsupported("rope.scaling.attn_factor", value, "a factor of attention"));
    }
    let need = || factor.ok_or_else(|| keys.missing("rope.scaling.factor"));
    match keys.get("rope.scaling.type").map(|value| (value, value.text())) {
        // Older files state a linear factor under another key.
        None => match keys.number("rope.scale_linear")?.or(factor).filter(|factor| *factor != 1.0) {
            None => Ok(GgufRope::Default),
            Some(factor) => Ok(GgufRope::Linear { factor }),
        },
        Some((_, Some("none"))) => Ok(GgufRope::Default),
        // Its tensors say the rest.
        Some((_, Some("longrope"))) if long => Ok(GgufRope::Default),
        Some((_, Some("linear"))) => Ok(GgufRope::Linear { factor: need()? }),
        Some((_, Some("yarn"))) => Ok(GgufRope::Yarn {
            factor: need()?,
            original_context: keys.need("rope.scaling.original_context_length", MAX_SIZE)?,
            beta_fast: keys.number("rope.scaling.yarn_beta_fast")?,
            beta_slow: keys.number("rope.scaling.yarn_beta_slow")?,
            attention_factor: match whole {
                true => keys.number("rope.scaling.attn_factor")?,
                false => keys.number("rope.scaling.yarn_attn_factor")?,
            },
            mscale: families::mscale(keys)?,
        }),
        Some((value, _)) => Err(keys.unsupported("rope.scaling.type", value, "none, linear and yarn are")),
    }
}

/// Returns for each layer whether it has full attention.
fn full_attention(keys: &Keys<'_>, layers: u64) -> Result<Vec<bool>, GgufConfigError> {
    if keys.architecture.counts_no_key_heads() {
        let key = "attention.head_count_kv";
        return match keys.get(key) {
            Some(value @ Value::Array(array)) if array.len() as u64 >= layers => {
                let full = (0..layers as usize).map(|layer| array.unsigned(layer).map(|heads| heads > 0)).collect();
                Option::ok_or_else(full, || keys.wrong(key, value, "a list of integers"))
            }
            Some(value @ Value::Array(_)) => {
                Err(keys.wrong(key, value, format!("a list of at least {layers} integers")))
            }
            _ => Ok(vec![true; layers as usize]),
        };
    }
    if !keys.architecture.is_hybrid() {
        return Ok(vec![true; layers as usize]);
    }
    let key = "attention.recurrent_layers";
    match keys.get(key) {
        None => {
            let interval = keys.size("full_attention_interval", MAX_LAYERS)?.unwrap_or(4);
            Ok((1..=layers).map(|layer| layer.is_multiple_of(interval)).collect())
        }
        Some(value @ Value::Array(array)) if array.len() as u64 >= layers => {
            let full = |layer: usize| match array {
                Array::Bool(flags) => Some(!flags[layer]),
                other => other.unsigned(layer).map(|n| n == 0),
            };
            let full = (0..layers as usize).map(full).collect::<Option<Vec<bool>>>();
            full.ok_or_else(|| keys.wrong(key, value, "a list of truth values"))
        }
        Some(value) => Err(keys.wrong(key, value, format!("a list of at least {layers} truth values"))),
    }
}

/// Reads the dimensions of state spaces; the tensors of the first one, if a layer is one, say whether the convolution has
/// biases.
fn state_space(keys: &Keys<'_>, first: Option<usize>) -> Result<GgufSpace, GgufConfigError> {
    let layer = first.unwrap_or(0);
    Ok(GgufSpace { dims: delta(keys)?, conv_bias: keys.parts.has(&format!("blk.{layer}.ssm_conv1d.bias")) })
}

fn delta(keys: &Keys<'_>) -> Result<Delta, GgufConfigError> {
    let value_heads = keys.need("ssm.time_step_rank", MAX_SIZE)?;
    let key_heads = keys.need("ssm.group_count", MAX_SIZE)?;
    let inner = keys.need("ssm.inner_size", MAX_SIZE)?;
    if !value_heads.is_multiple_of(key_heads) {
        let rule = format!("a multiple of ssm.group_count ({key_heads})");
        return Err(keys.wrong("ssm.time_step_rank", &Value::U64(value_heads), rule));
    }
    if !inner.is_multiple_of(value_heads) {
        let rule = format!("a multiple of ssm.time_step_rank ({value_heads})");
        return Err(keys.wrong("ssm.inner_size", &Value::U64(inner), rule));
    }
    Ok(Delta {
        key_heads,
        value_heads,
        key_dim: keys.need("ssm.state_size", MAX_SIZE)?,
        value_dim: inner / value_heads,
        conv_kernel: keys.need("ssm.conv_kernel", MAX_SIZE)?,
    })
}

/// The special token ids of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// The beginning of a sequence.
    pub bos: Option<u32>,
    /// The end of a sequence, as the tokenizer names it.
    pub eos: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// All tokens that end an answer, the end of a sequence first.
    pub ends: Vec<u32>,
}

/// Returns the model's generation_config.json.
pub fn generation_config_json(parts: &GgufFiles, ids: &SpecialIds) -> Json {
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| {
        config.insert(key.to_owned(), value);
    };
    if let Some(bos) = ids.bos {
        set("bos_token_id", json!(bos));
    }
    if !ids.ends.is_empty() {
        set("eos_token_id", json!(ids.ends));
    }
    if let Some(pad) = ids.pad {
        set("pad_token_id", json!(pad));
    }
    let recommended =
        [("temp", "temperature"), ("top_p", "top_p"), ("min_p", "min_p"), ("penalty_repeat", "repetition_penalty")];
    for (from, to) in recommended {
        let number = parts.get(&format!("general.sampling.{from}")).and_then(Value::number);
        if let Some(number) = number.filter(|n| n.is_finite()) {
            set(to, json!(number));
        }
    }
    if let Some(top_k) = parts.get("general.sampling.top_k").and_then(Value::unsigned) {
        set("top_k", json!(top_k));
    }
    Json::Object(config)
}

/// The largest relative difference between a factor in a file and the one that fitted parameters give. Both are
/// computed in single precision, and rounding a frequency changes a factor by up to `factor` times as much.
const FIT: f64 = 2e-5;

/// Returns the scaling whose divisors of the rotary frequencies are `factors`: Llama 3's, or none if all are 1.
///
/// Only the ratio of the low and high frequency factors and the context to one another matters, so a low frequency
/// factor of 1, which all published models have, is no restriction.
///
/// # Errors The factors are not those of Llama 3's scaling with any parameters.
pub fn fit_llama3(factors: &[f32], theta: f64, rotary_dim: u64) -> Result<GgufRope, GgufConfigError> {
    let refuse = |what: String| Err(GgufConfigError::RopeFactors(what));
    if rotary_dim / 2 != factors.len() as u64 || factors.is_empty() {
        return refuse(format!("{} values for {rotary_dim} dimensions", factors.len()));
    }
    if let Some(odd) = factors.iter().find(|factor| !(factor.is_finite() && **factor >= 1.0)) {
        return refuse(format!("the value {odd}"));
    }
    if factors.iter().all(|factor| *factor == 1.0) {
        return Ok(GgufRope::Default);
    }
    let waves: Vec<f64> = (0..factors.len()).map(|i| wavelength(i, theta, rotary_dim)).collect();
    let largest = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let parameters = |factor: f64, high: f64, context: f64| Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: high,
        original_context: context,
    };
    // Published models have these parameters, most of them a context of 8192.
    let mut candidates: Vec<Llama3> =
        (10..=20).map(|power| parameters(largest, 4.0, f64::from(1u32 << power))).collect();
    candidates.sort_by_key(|candidate| candidate.original_context != 8192.0);
    // Between the low and the high frequencies, the reciprocal of the divisor is a straight line over that of the
    // wavelength. Two points of it determine two parameters.
    let between: Vec<usize> =
        (0..factors.len()).filter(|i| factors[*i] > 1.0 && f64::from(factors[*i]) < largest).collect();
    if let (Some(&first), Some(&last)) = (between.first(), between.last())
        && first != last
    {
        let reciprocal = |i: usize| 1.0 / f64::from(factors[i]);
        let slope = (reciprocal(first) - reciprocal(last)) / (1.0 / waves[first] - 1.0 / waves[last]);
        let offset = reciprocal(first) - slope / waves[first];
        let low = (1.0 / largest - offset) / (1.0 - 1.0 / largest);
        let (high, context) = (1.0 + 1.0 / low, slope / (1.0 - 1.0 / largest) / low);
        // Parameters are round numbers: whole ones, or multiples of 1/16.
        candidates.push(parameters(largest, high.round(), context.round()));
        candidates.push(parameters(largest, (high * 16.0).round() / 16.0, context.round()));
        // If no frequency is low, the factor is none of the divisors, and several parameters give the same ones.
        let factor = (4.0 / (3.0 * offset + 1.0)).round();
        candidates.push(parameters(factor, 4.0, (3.0 * slope / (1.0 - 1.0 / factor)).round()));
    }
    candidates.retain(|Llama3 { factor, high_freq_factor, original_context, .. }| {
        *factor > 1.0 && *high_freq_factor > 1.0 && (1.0..1e9).contains(original_context) && factor.is_finite()
    });
    let fits = |candidate: &Llama3| {
        let same = |(wave, factor): (&f64, &f32)| (candidate.divisor(*wave) / f64::from(*factor) - 1.0).abs() <= FIT;
        waves.iter().zip(factors).all(same)
    };
    match candidates.into_iter().find(fits) {
        Some(found) => Ok(GgufRope::Llama3(found)),
        None => refuse(format!("{} values from 1 to {largest}", factors.len())),
    }
}

/// Returns the wavelength, in tokens, of a pair of rotary dimensions.
fn wavelength(pair: usize, theta: f64, rotary_dim: u64) -> f64 {
    std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / rotary_dim as f64)
}

impl Llama3 {
    /// Returns the divisor of the frequency that has this wavelength.
    pub fn divisor(&self, wavelength: f64) -> f64 {
        if wavelength > self.original_context / self.low_freq_factor {
            self.factor
        } else if wavelength < self.original_context / self.high_freq_factor {
            1.0
        } else {
            let rotations = self.original_context / wavelength;
            let kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            1.0 / ((1.0 - kept) / self.factor + kept)
        }
    }
}
