//! The model families, and the facts about each that no key of config.json says: one table, which the configuration's
//! reader combines with the keys. Nothing else depends on a family's name.
//!
//! Sources: the configuration and modelling classes of Hugging Face transformers 5.23.

use super::{Activation, BlockNorms, Latent, NormKind, QkNorm};

/// A model family whose forward pass is implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: dense, with an RMS norm on each query and key head.
    Qwen3,
    /// `LlamaForCausalLM`: dense.
    Llama,
    /// `Qwen3MoeForCausalLM`: like Qwen3, with MoE layers.
    Qwen3Moe,
    /// `Qwen3NextForCausalLM`: a hybrid of gated-delta-rule layers (linear attention) and gated full-attention layers,
    /// with MoE layers that include a shared expert.
    Qwen3Next,
    /// `Qwen3_5ForConditionalGeneration` and `Qwen3_5ForCausalLM`: a dense hybrid of gated-delta-rule layers (linear
    /// attention) and gated full-attention layers. Only the text model of a multimodal checkpoint is used.
    Qwen35,
    /// `Qwen3_5MoeForConditionalGeneration` and `Qwen3_5MoeForCausalLM`: like Qwen35, with MoE layers that include a
    /// shared expert.
    Qwen35Moe,
    /// `Qwen2ForCausalLM` (Qwen2, Qwen2.5): dense, with biases on q, k and v.
    Qwen2,
    /// `Qwen2MoeForCausalLM`: like Qwen2, with MoE layers that include a shared expert.
    Qwen2Moe,
    /// `Qwen3VLForConditionalGeneration`: its text model, which is Qwen3's.
    Qwen3Vl,
    /// `MistralForCausalLM`: like Llama, with a sliding window on all layers if the configuration has one.
    Mistral,
    /// `Ministral3ForCausalLM`: like Mistral, with queries that grow with their position.
    Ministral3,
    /// `Phi3ForCausalLM` (Phi-3, Phi-4, Phi-4-mini): like Llama, with fused projections and LongRoPE.
    Phi3,
    /// `SmolLM3ForCausalLM`: like Llama; some layers have no rotary embedding.
    SmolLm3,
    /// `GraniteForCausalLM`: like Llama, with constant factors on embeddings, scores, layers' outputs and logits.
    Granite,
    /// `Gemma2ForCausalLM`: norms before and after attention and MLP, GeGLU, bounded scores and logits, a sliding window
    /// on every other layer.
    Gemma2,
    /// `Gemma3ForCausalLM` and `Gemma3ForConditionalGeneration`: like Gemma 2, with an RMS norm on each query and key
    /// head instead of bounds, and a sliding window with a rotary embedding of its own on five layers of six. Only the
    /// text model of a multimodal checkpoint is used.
    Gemma3,
    /// `Olmo2ForCausalLM`: norms only after attention and MLP, and one norm over all query heads and one over all key
    /// heads.
    Olmo2,
    /// `Olmo3ForCausalLM`: like OLMo 2, with a sliding window on three layers of four.
    Olmo3,
    /// `GptOssForCausalLM`: MoE layers with biases and a clamped activation, attention with sinks and biases, a sliding
    /// window on every other layer.
    GptOss,
    /// `Glm4ForCausalLM`: norms before and after attention and MLP, half of each head rotated, in neighbouring pairs.
    Glm4,
    /// `Glm4MoeForCausalLM` (GLM-4.5 and later): like Llama, with half of each head rotated, and MoE layers after dense
    /// ones, whose experts are chosen by sigmoid scores with a bias, beside a shared expert.
    Glm4Moe,
    /// `Gemma4ForConditionalGeneration` and `Gemma4ForCausalLM`: like Gemma 3, with other heads in the layers that see all
    /// tokens, norms of values and factors of layers; some sizes with experts beside the dense MLPs, with inputs of every
    /// layer, and with layers that read the keys and values of others. Only the text model of a multimodal checkpoint is
    /// used.
    Gemma4,
    /// `DeepseekV2ForCausalLM`: latent attention, and MoE layers after dense ones, whose experts are chosen by softmax scores,
    /// beside a shared expert.
    DeepseekV2,
    /// `DeepseekV3ForCausalLM` (DeepSeek-V3, -R1): like DeepSeek-V2, with experts chosen as in GLM-4.5.
    DeepseekV3,
    /// `Glm4MoeLiteForCausalLM` (GLM-4.7-Flash): like DeepSeek-V3.
    Glm4MoeLite,
    /// `MixtralForCausalLM`: like Mistral, with experts in all layers.
    Mixtral,
    /// `Qwen2_5_VLForConditionalGeneration`: its text model, which is Qwen2's.
    Qwen25Vl,
    /// `Qwen3VLMoeForConditionalGeneration`: its text model, which is Qwen3-MoE's.
    Qwen3VlMoe,
    /// `SeedOssForCausalLM`: like Llama, with biases on q, k and v.
    SeedOss,
    /// `Ernie4_5ForCausalLM`: like Llama, with neighbouring pairs rotated.
    Ernie45,
    /// `Exaone4ForCausalLM`: norms only after attention and MLP, an RMS norm on each query and key head. In models with a
    /// sliding window, layers that see all tokens have no rotary embedding.
    Exaone4,
    /// `OlmoeForCausalLM`: like Llama, with experts in all layers, and with one norm over all query heads and one over all
    /// key heads.
    Olmoe,
    /// `Dots1ForCausalLM` (dots.llm1): like GLM-4.5, with whole heads rotated.
    Dots1,
    /// `MiniMaxM2ForCausalLM`: like OLMoE, with experts chosen by sigmoid scores with a bias, and with a part of each head
    /// rotated.
    MiniMaxM2,
    /// `HunYuanDenseV1ForCausalLM`: like Llama, with an RMS norm on each query and key head after they are rotated.
    HunYuanDense,
    /// `HunYuanMoEV1ForCausalLM`: like HunYuan's dense models, with experts in all layers, beside a shared expert.
    HunYuanMoe,
    /// `Ernie4_5_MoeForCausalLM`: like ERNIE 4.5, with experts between dense layers, which are chosen by softmax scores with a
    /// bias, beside a shared expert.
    Ernie45Moe,
    /// `GraniteMoeForCausalLM`: like Granite, with experts in all layers.
    GraniteMoe,
    /// `GraniteMoeSharedForCausalLM`: like that, with a shared expert.
    GraniteMoeShared,
    /// `GraniteMoeHybridForCausalLM` (Granite 4): like that, or dense, with or without rotary embedding; most layers may be state
    /// spaces (Mamba-2) instead of attention.
    GraniteMoeHybrid,
    /// `Lfm2ForCausalLM` (LFM2, LFM2.5): dense, with short convolutions instead of attention in most layers, and an RMS norm
    /// on each query and key head.
    Lfm2,
    /// `Lfm2MoeForCausalLM`: like that, with experts after dense layers, which are chosen by sigmoid scores with a bias.
    Lfm2Moe,
    /// `NemotronHForCausalLM` (Nemotron-H, Nemotron 3 Nano): each layer is either a mixer (attention without rotary embedding, or
    /// a state space) or an MLP without a gate (dense, or experts that are chosen as in GLM-4.5, beside a shared expert).
    NemotronH,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bias {
    Never,
    Always,
    /// The value of this key of config.json, or this default if the key is absent.
    Key(&'static str, bool),
}

/// The layers with a sliding window if config.json has no `layer_types`, and whether the key `sliding_window` is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layers, whatever the value of the key.
    Never,
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    Upper,
    /// The layers from `max_window_layers` on, unless the key is null. Holds the first of them if its key is absent, and
    /// the window if the key is absent.
    From(u32, u32),
    /// All layers, unless the key is null. Holds the window if the key is absent.
    Everywhere(Option<u32>),
    /// All layers except every n-th, counted from 1. Holds the keys that may give n, the default n, and the window if
    /// its key is absent.
    Between(&'static [&'static str], u32, u32),
}

/// The rotary embedding of layers with a sliding window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LocalRope {
    /// The rotary embedding of the other layers.
    Same,
    /// An unscaled one with its own base. Holds the key of the base, and the base if the key is absent.
    Own(Option<&'static str>, f64),
}

/// Whether layers have a rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rotated {
    /// All have one, but for those of [`Facts::some_without_rope`] and [`Facts::rope_in_windows`].
    Yes,
    /// Only if `position_embedding_type` says so.
    Named,
    /// None, whatever keys say.
    No,
}

/// The factor of the embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmbeddingScale {
    One,
    /// The square root of the hidden size, rounded to the weights' element type.
    RootOfHidden,
    /// A key of config.json; 1 if it is absent.
    Key(&'static str),
}

/// The factor of q · k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScoreScale {
    /// 1 / sqrt(head_dim).
    RootOfHead,
    /// 1 / sqrt of a key's value, which is this if the key is absent.
    RootOf(&'static str, u32),
    /// A key's value; 1 if it is absent.
    Key(&'static str),
    /// 1.
    One,
}

/// A bound of scores or of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SoftCap {
    /// None: the family's class has the key and does not use it.
    Never,
    /// The key's value, or this default if the key is absent.
    Key(Option<f64>),
}

/// The facts of a family that are the same in all its checkpoints, and the defaults of its configuration class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) architecture: Architecture,
    /// The names that `architectures` may contain, the one used by released checkpoints first.
    pub(super) names: &'static [&'static str],
    /// The values of `model_type`.
    pub(super) model_types: &'static [&'static str],
    /// Whether some layers use the gated delta rule instead of attention.
    pub(super) hybrid: bool,
    /// The keys of state spaces (Mamba-2), in families some of whose layers may be that instead of attention.
    pub(super) state_spaces: Option<SpaceFacts>,
    /// Whether layers may have experts.
    pub(super) experts: Option<ExpertFacts>,
    /// The biases of q, k and v; of the attention output's projection; of the MLP.
    pub(super) qkv_bias: Bias,
    pub(super) o_bias: Bias,
    pub(super) mlp_bias: Bias,
    pub(super) qk_norm: QkNorm,
    /// The key that says whether there are norms of queries and keys, if not all checkpoints of the family have them; absent,
    /// it means no.
    pub(super) qk_norm_key: Option<&'static str>,
    pub(super) norm: NormKind,
    pub(super) norms: BlockNorms,
    pub(super) windows: Windows,
    pub(super) local_rope: LocalRope,
    /// Whether the class's default of `rope_parameters` is more than a base, so that the key must be present.
    pub(super) rope_required: bool,
    /// Whether rotary embeddings of the default kind rotate whole heads, whatever `partial_rotary_factor` says.
    pub(super) default_rope_is_whole: bool,
    /// Layers without rotary embedding: whether `no_rope_layers` and `no_rope_layer_interval` (4) count.
    pub(super) some_without_rope: bool,
    /// Another name in `layer_types` of layers that see all tokens, in families whose layers are of other kinds, which are not
    /// supported, if the key is absent.
    pub(super) attention_name: Option<&'static str>,
    /// Whether layers have a rotary embedding.
    pub(super) rotated: Rotated,
    /// Whether layers that see all tokens have no rotary embedding unless `sliding_window` is null, which stands for no
    /// window then.
    pub(super) rope_in_windows: bool,
    /// Whether a fixed `alpha` of a `dynamic` rotary embedding counts, which changes its base.
    pub(super) rope_alpha: bool,
    /// Whether `llama_4_scaling_beta` counts: queries grow with their position.
    pub(super) query_growth: bool,
    /// The class's defaults of the dimensions of latent attention, in families that have it, and whether
    /// `rope_interleave` counts.
    pub(super) latent: Option<(Latent, bool)>,
    /// Whether the rotated dimensions are neighbouring pairs; otherwise the halves of the rotated part.
    pub(super) interleaved: bool,
    /// The keys that name the MLP's activation, and the activation if all are absent.
    pub(super) activation: (&'static [&'static str], Activation),
    pub(super) embedding_scale: EmbeddingScale,
    pub(super) score_scale: ScoreScale,
    /// Whether attention has sinks.
    pub(super) sinks: bool,
    /// Whether `use_bidirectional_attention` counts: with it, tokens see later ones too, and a window of W tokens hides
    /// those at a distance of W / 2 + 1 and more, on either side.
    pub(super) both: bool,
    /// Whether the keys of Gemma 4 count: other heads in layers that see all tokens, values that are keys, shared keys and
    /// values, inputs and factors of layers, and norms of values.
    pub(super) gemma4: bool,
    /// Whether the keys of LFM2 count: `norm_eps`, `tie_embedding`, the layers that are short convolutions, and the adjusted
    /// width of dense MLPs.
    pub(super) lfm2: bool,
    /// Whether scores have a bound by `attn_logit_softcapping` and logits one by `final_logit_softcapping`, in families that
    /// have these keys.
    pub(super) soft_caps: Option<[SoftCap; 2]>,
    /// The keys that list the layers' blocks, in families whose layers are either a mixer or an MLP.
    pub(super) blocks: Option<BlockKeys>,
    /// The key of the norms' epsilon.
    pub(super) eps_key: &'static str,
    /// Whether `residual_multiplier` and `logits_scaling` count.
    pub(super) multipliers: bool,
    /// The class's defaults of keys.
    pub(super) defaults: Defaults,
}

/// The keys of a family's state spaces; of several names of a key, the first that is present counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceFacts {
    /// The keys of the number of heads, of groups of them with the same B and C, of a state's dimensions per value, of a
    /// head's values, of the convolution's taps, and whether it has biases.
    pub(super) heads: &'static str,
    pub(super) groups: &'static [&'static str],
    pub(super) state: &'static str,
    pub(super) head_dim: &'static str,
    pub(super) taps: &'static [&'static str],
    pub(super) conv_bias: &'static [&'static str],
    /// The class's defaults of groups, state and a head's values; `None`: the head's values are the inner size's share.
    pub(super) defaults: (u32, u32, Option<u32>),
    /// The key of the inner size over the hidden size, if it counts.
    pub(super) expand: Option<&'static str>,
    /// Whether each group of heads has a norm of its own; otherwise a model has one group.
    pub(super) norms_groups: bool,
    /// The keys that may only be false, of biases; of the bounds of the time step, which may only be those of none; and of the
    /// activation behind the convolution, which may only be SiLU.
    pub(super) unbiased: &'static [&'static str],
    pub(super) limits: &'static [&'static str],
    pub(super) activation: Option<&'static str>,
}

/// The keys that say what each layer is: a list of names, and the same as a string of letters.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockKeys {
    pub(super) names: &'static [&'static str],
    pub(super) letters: &'static str,
}

const GRANITE_SPACES: SpaceFacts = SpaceFacts {
    heads: "mamba_n_heads",
    groups: &["mamba_n_groups"],
    state: "mamba_d_state",
    head_dim: "mamba_d_head",
    taps: &["mamba_d_conv"],
    conv_bias: &["mamba_conv_bias"],
    defaults: (1, 256, None),
    expand: Some("mamba_expand"),
    norms_groups: false,
    unbiased: &["mamba_proj_bias"],
    limits: &["time_step_limit"],
    activation: None,
};

const NEMOTRON_SPACES: SpaceFacts = SpaceFacts {
    heads: "mamba_num_heads",
    groups: &["mamba_n_groups", "n_groups"],
    state: "ssm_state_size",
    head_dim: "mamba_head_dim",
    taps: &["mamba_d_conv", "conv_kernel"],
    conv_bias: &["mamba_conv_bias", "use_conv_bias"],
    defaults: (8, 128, Some(64)),
    expand: None,
    norms_groups: true,
    unbiased: &["mamba_proj_bias", "use_bias"],
    limits: &["mamba_dt_limit", "time_step_limit"],
    activation: Some("mamba_hidden_act"),
};

/// The values of absent keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Defaults {
    /// `num_attention_heads` and `vocab_size`, in families whose released files leave them out.
    pub(super) heads: Option<u32>,
    pub(super) vocab: Option<u32>,
    /// `num_key_value_heads`; `None`: as many as query heads.
    pub(super) kv_heads: Option<u32>,
    /// `head_dim`; `None`: hidden_size / num_attention_heads.
    pub(super) head_dim: Option<u32>,
    pub(super) context: u32,
    pub(super) rms_eps: f32,
    pub(super) tied: bool,
    pub(super) theta: f64,
    /// `partial_rotary_factor`; `None`: the key is not supported for this family, and 1.
    pub(super) partial: Option<f64>,
    /// `bos_token_id` and `eos_token_id`.
    pub(super) bos: Option<u32>,
    pub(super) eos: &'static [u32],
}

/// The experts of a family.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertFacts {
    /// The class's defaults: number of experts, experts chosen per token, their intermediate size, the shared expert's
    /// intermediate size.
    pub(super) count: u32,
    pub(super) chosen: u32,
    pub(super) inner: u32,
    pub(super) shared: Option<u32>,
    /// Whether all layers have experts, and at least one expert.
    pub(super) everywhere: bool,
    /// Whether the chosen experts' weights are normalised: always, or by `norm_topk_prob` with this default.
    pub(super) normalise: Option<bool>,
    /// The keys of the number of experts, of the number chosen and of their intermediate size; the first that is present
    /// counts.
    pub(super) count_keys: &'static [&'static str],
    pub(super) chosen_keys: &'static [&'static str],
    pub(super) inner_keys: &'static [&'static str],
    /// Whether the router and the experts' matrices have biases.
    pub(super) bias: bool,
    /// How the keys say which layers are dense and how wide the shared expert is, and how experts are chosen.
    pub(super) style: ExpertStyle,
}

/// The style of a family's configuration of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ExpertStyle {
    /// Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`; `shared_expert_intermediate_size`, with a
    /// gate; the greatest logits are chosen.
    Qwen,
    /// The layers from `first_k_dense_replace` on (with this default), or those that `mlp_layer_types` calls sparse, have
    /// experts; `n_shared_experts` times the experts' width, without a gate; chosen by sigmoid scores with a bias, in
    /// groups. The defaults of `n_group`, `topk_group` and `routed_scaling_factor`.
    DeepSeekV3(u32, u32, u32, f64),
    /// Like that, from layer 0 on by default; chosen by softmax scores, in groups if `topk_method` says so.
    DeepSeekV2,
    /// If `enable_moe_block` is true, all layers have experts beside a dense MLP; `top_k_experts` are chosen of softmax
    /// scores, by a router with a norm of its own, and each has a factor.
    Gemma4,
    /// Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts;
    /// `moe_num_shared_experts` times the experts' width, without a gate; chosen by softmax scores with a bias.
    Ernie,
    /// All layers; a shared expert as wide as the others, without a gate. Keys may be lists of the same number for each layer.
    HunYuan,
    /// The layers from `num_dense_layers` on (with this default); chosen by sigmoid scores, with a bias unless
    /// `use_expert_bias` is false.
    Lfm2(u32),
    /// All layers, or none if there are 0 experts; `shared_intermediate_size`, without a gate, which is also the width of
    /// dense MLPs.
    Granite,
    /// The layers that [`Facts::blocks`] says; `moe_shared_expert_intermediate_size`; chosen as in DeepSeek-V3.
    Nemotron,
}

const DEFAULTS: Defaults = Defaults {
    heads: None,
    vocab: None,
    kv_heads: None,
    head_dim: None,
    context: 32_768,
    rms_eps: 1e-6,
    tied: false,
    theta: 10_000.0,
    partial: None,
    bos: None,
    eos: &[],
};

const EXPERTS: ExpertFacts = ExpertFacts {
    count: 128,
    chosen: 8,
    inner: 768,
    shared: None,
    everywhere: false,
    normalise: Some(false),
    count_keys: &["num_experts", "num_local_experts"],
    chosen_keys: &["num_experts_per_tok"],
    inner_keys: &["moe_intermediate_size"],
    bias: false,
    style: ExpertStyle::Qwen,
};

const LLAMA: Facts = Facts {
    architecture: Architecture::Llama,
    names: &["LlamaForCausalLM"],
    model_types: &["llama"],
    hybrid: false,
    state_spaces: None,
    experts: None,
    qkv_bias: Bias::Key("attention_bias", false),
    o_bias: Bias::Key("attention_bias", false),
    mlp_bias: Bias::Key("mlp_bias", false),
    qk_norm: QkNorm::None,
    qk_norm_key: None,
    norm: NormKind::Plain,
    norms: BlockNorms::BEFORE,
    windows: Windows::Never,
    local_rope: LocalRope::Same,
    rope_required: false,
    default_rope_is_whole: false,
    some_without_rope: false,
    attention_name: None,
    rotated: Rotated::Yes,
    rope_in_windows: false,
    rope_alpha: false,
    query_growth: false,
    latent: None,
    interleaved: false,
    activation: (&["hidden_act", "hidden_activation"], Activation::Silu),
    embedding_scale: EmbeddingScale::One,
    score_scale: ScoreScale::RootOfHead,
    sinks: false,
    both: false,
    gemma4: false,
    lfm2: false,
    soft_caps: None,
    blocks: None,
    eps_key: "rms_norm_eps",
    multipliers: false,
    defaults: Defaults { context: 2048, bos: Some(1), eos: &[2], ..DEFAULTS },
};

const QWEN3: Facts = Facts {
    architecture: Architecture::Qwen3,
    names: &["Qwen3ForCausalLM"],
    model_types: &["qwen3"],
    // The other families' MLPs have no biases, whatever the file says.
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Heads,
    windows: Windows::Upper,
    // No released checkpoint omits `head_dim`.
    defaults: Defaults { head_dim: Some(128), ..DEFAULTS },
    ..LLAMA
};

const QWEN35: Facts = Facts {
    architecture: Architecture::Qwen35,
    names: &["Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"],
    model_types: &["qwen3_5", "qwen3_5_text"],
    hybrid: true,
    norm: NormKind::ZeroCentred,
    windows: Windows::Never,
    defaults: Defaults { kv_heads: Some(4), head_dim: Some(256), partial: Some(0.25), ..DEFAULTS },
    ..QWEN3
};

const QWEN2: Facts = Facts {
    architecture: Architecture::Qwen2,
    names: &["Qwen2ForCausalLM"],
    model_types: &["qwen2"],
    qkv_bias: Bias::Always,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Upper,
    defaults: DEFAULTS,
    ..LLAMA
};

const MISTRAL: Facts = Facts {
    architecture: Architecture::Mistral,
    names: &["MistralForCausalLM"],
    model_types: &["mistral"],
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    windows: Windows::Everywhere(Some(4096)),
    defaults: Defaults { kv_heads: Some(8), context: 131_072, bos: Some(1), eos: &[2], ..DEFAULTS },
    ..LLAMA
};

const GEMMA2: Facts = Facts {
    architecture: Architecture::Gemma2,
    names: &["Gemma2ForCausalLM"],
    model_types: &["gemma2"],
    mlp_bias: Bias::Never,
    norm: NormKind::ZeroCentred,
    norms: BlockNorms::GEMMA,
    windows: Windows::Between(&[], 2, 4096),
    activation: (&["hidden_activation"], Activation::GeluTanh),
    embedding_scale: EmbeddingScale::RootOfHidden,
    score_scale: ScoreScale::RootOf("query_pre_attn_scalar", 256),
    soft_caps: Some([SoftCap::Key(Some(50.0)), SoftCap::Key(Some(30.0))]),
    defaults: Defaults {
        heads: Some(8),
        vocab: Some(256_000),
        kv_heads: Some(4),
        head_dim: Some(256),
        context: 8192,
        tied: true,
        bos: Some(2),
        eos: &[1],
        ..DEFAULTS
    },
    ..LLAMA
};

const LFM2: Facts = Facts {
    architecture: Architecture::Lfm2,
    names: &["Lfm2ForCausalLM", "LFM2ForCausalLM"],
    model_types: &["lfm2"],
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Heads,
    norms: BlockNorms::LFM,
    activation: (&[], Activation::Silu),
    lfm2: true,
    eps_key: "norm_eps",
    defaults: Defaults {
        kv_heads: Some(8),
        context: 128_000,
        rms_eps: 1e-5,
        tied: true,
        theta: 1_000_000.0,
        bos: Some(1),
        eos: &[2],
        ..DEFAULTS
    },
    ..LLAMA
};

const OLMO2: Facts = Facts {
    architecture: Architecture::Olmo2,
    names: &["Olmo2ForCausalLM"],
    model_types: &["olmo2"],
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::Rows,
    norms: BlockNorms::OLMO,
    defaults: Defaults { context: 2048, rms_eps: 1e-5, eos: &[50_279], ..DEFAULTS },
    ..LLAMA
};

const GLM4: Facts = Facts {
    architecture: Architecture::Glm4,
    names: &["Glm4ForCausalLM"],
    model_types: &["glm4"],
    qkv_bias: Bias::Key("attention_bias", true),
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norms: BlockNorms::GLM,
    interleaved: true,
    defaults: Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        rms_eps: 1.5625e-7,
        partial: Some(0.5),
        eos: &[151_329, 151_336, 151_338],
        ..DEFAULTS
    },
    ..LLAMA
};

const DEEPSEEK_V3: Facts = Facts {
    architecture: Architecture::DeepseekV3,
    names: &["DeepseekV3ForCausalLM"],
    // Kimi K2's files have this architecture.
    model_types: &["deepseek_v3", "kimi_k2"],
    experts: Some(ExpertFacts {
        count: 256,
        chosen: 8,
        inner: 2048,
        shared: Some(2048),
        normalise: Some(true),
        count_keys: &["n_routed_experts", "num_local_experts"],
        style: ExpertStyle::DeepSeekV3(3, 8, 4, 2.5),
        ..EXPERTS
    }),
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    latent: Some((Latent { q_rank: Some(1536), kv_rank: 512, nope: 128, rope: 64, value_dim: 128 }, true)),
    interleaved: true,
    default_rope_is_whole: true,
    defaults: Defaults { context: 4096, partial: Some(1.0), bos: Some(0), eos: &[1], ..DEFAULTS },
    ..LLAMA
};

const ERNIE45: Facts = Facts {
    architecture: Architecture::Ernie45,
    names: &["Ernie4_5ForCausalLM"],
    model_types: &["ernie4_5"],
    qkv_bias: Bias::Key("use_bias", false),
    o_bias: Bias::Key("use_bias", false),
    mlp_bias: Bias::Key("use_bias", false),
    interleaved: true,
    defaults: Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        rms_eps: 1e-5,
        tied: true,
        theta: 500_000.0,
        bos: Some(1),
        eos: &[2],
        ..DEFAULTS
    },
    ..LLAMA
};

const GRANITE: Facts = Facts {
    architecture: Architecture::Granite,
    names: &["GraniteForCausalLM"],
    model_types: &["granite"],
    embedding_scale: EmbeddingScale::Key("embedding_multiplier"),
    score_scale: ScoreScale::Key("attention_multiplier"),
    multipliers: true,
    ..LLAMA
};

const GRANITE_EXPERTS: ExpertFacts = ExpertFacts {
    count: 8,
    chosen: 2,
    inner: 11_008,
    everywhere: true,
    normalise: None,
    count_keys: &["num_local_experts", "num_experts"],
    inner_keys: &["intermediate_size"],
    style: ExpertStyle::Granite,
    ..EXPERTS
};

const GRANITE_MOE: Facts = Facts {
    architecture: Architecture::GraniteMoe,
    names: &["GraniteMoeForCausalLM"],
    model_types: &["granitemoe"],
    experts: Some(GRANITE_EXPERTS),
    mlp_bias: Bias::Never,
    ..GRANITE
};

const HUNYUAN: Facts = Facts {
    architecture: Architecture::HunYuanDense,
    names: &["HunYuanDenseV1ForCausalLM"],
    model_types: &["hunyuan_v1_dense"],
    mlp_bias: Bias::Never,
    qk_norm: QkNorm::RotatedHeads,
    rope_alpha: true,
    defaults: Defaults { rms_eps: 1e-5, ..LLAMA.defaults },
    ..LLAMA
};

/// All supported families.
pub(super) static FAMILIES: [Facts; 43] = [
    QWEN3,
    LLAMA,
    Facts {
        architecture: Architecture::Qwen3Moe,
        names: &["Qwen3MoeForCausalLM"],
        model_types: &["qwen3_moe"],
        experts: Some(EXPERTS),
        // Their windows follow other rules.
        windows: Windows::Never,
        defaults: Defaults { kv_heads: Some(4), ..DEFAULTS },
        ..QWEN3
    },
    Facts {
        architecture: Architecture::Qwen3Next,
        names: &["Qwen3NextForCausalLM"],
        model_types: &["qwen3_next"],
        experts: Some(ExpertFacts {
            count: 512,
            chosen: 10,
            inner: 512,
            shared: Some(512),
            normalise: Some(true),
            ..EXPERTS
        }),
        defaults: Defaults { kv_heads: Some(2), ..QWEN35.defaults },
        ..QWEN35
    },
    QWEN35,
    Facts {
        architecture: Architecture::Qwen35Moe,
        names: &["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"],
        model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        experts: Some(ExpertFacts {
            count: 256,
            chosen: 8,
            inner: 512,
            shared: Some(512),
            everywhere: true,
            normalise: None,
            ..EXPERTS
        }),
        defaults: Defaults { kv_heads: Some(2), ..QWEN35.defaults },
        ..QWEN35
    },
    QWEN2,
    Facts {
        architecture: Architecture::Qwen2Moe,
        names: &["Qwen2MoeForCausalLM"],
        model_types: &["qwen2_moe"],
        experts: Some(ExpertFacts { count: 60, chosen: 4, inner: 1408, shared: Some(5632), ..EXPERTS }),
        qkv_bias: Bias::Key("qkv_bias", true),
        windows: Windows::Never,
        defaults: Defaults { kv_heads: Some(16), ..DEFAULTS },
        ..QWEN2
    },
    Facts {
        architecture: Architecture::Qwen3Vl,
        names: &["Qwen3VLForConditionalGeneration"],
        model_types: &["qwen3_vl", "qwen3_vl_text"],
        windows: Windows::Never,
        defaults: Defaults { context: 128_000, theta: 500_000.0, ..QWEN3.defaults },
        ..QWEN3
    },
    MISTRAL,
    Facts {
        architecture: Architecture::Ministral3,
        names: &["Ministral3ForCausalLM"],
        model_types: &["ministral3"],
        rope_required: true,
        query_growth: true,
        windows: Windows::Everywhere(None),
        defaults: Defaults { head_dim: Some(128), context: 262_144, rms_eps: 1e-5, ..MISTRAL.defaults },
        ..MISTRAL
    },
    Facts {
        architecture: Architecture::Phi3,
        names: &["Phi3ForCausalLM"],
        model_types: &["phi3"],
        windows: Windows::Everywhere(None),
        defaults: Defaults {
            kv_heads: None,
            context: 4096,
            rms_eps: 1e-5,
            partial: Some(1.0),
            eos: &[32_000],
            ..MISTRAL.defaults
        },
        ..MISTRAL
    },
    Facts {
        architecture: Architecture::SmolLm3,
        names: &["SmolLM3ForCausalLM"],
        model_types: &["smollm3"],
        windows: Windows::Upper,
        some_without_rope: true,
        defaults: Defaults {
            kv_heads: Some(4),
            tied: true,
            theta: 2_000_000.0,
            bos: Some(128_000),
            eos: &[128_001],
            ..DEFAULTS
        },
        ..LLAMA
    },
    GRANITE,
    GEMMA2,
    Facts {
        architecture: Architecture::Gemma3,
        names: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"],
        model_types: &["gemma3_text", "gemma3"],
        both: true,
        qk_norm: QkNorm::Heads,
        windows: Windows::Between(&["sliding_window_pattern", "_sliding_window_pattern"], 6, 4096),
        local_rope: LocalRope::Own(Some("rope_local_base_freq"), 10_000.0),
        soft_caps: Some([SoftCap::Never, SoftCap::Key(None)]),
        defaults: Defaults { vocab: Some(262_208), context: 131_072, theta: 1_000_000.0, ..GEMMA2.defaults },
        ..GEMMA2
    },
    Facts {
        architecture: Architecture::Gemma4,
        names: &["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"],
        model_types: &["gemma4_text", "gemma4"],
        experts: Some(ExpertFacts {
            normalise: None,
            count_keys: &["num_experts"],
            chosen_keys: &["top_k_experts"],
            style: ExpertStyle::Gemma4,
            ..EXPERTS
        }),
        qk_norm: QkNorm::Heads,
        norm: NormKind::Plain,
        windows: Windows::Between(&[], 6, 512),
        local_rope: LocalRope::Own(None, 10_000.0),
        rope_required: true,
        score_scale: ScoreScale::One,
        soft_caps: Some([SoftCap::Never, SoftCap::Key(None)]),
        gemma4: true,
        default_rope_is_whole: true,
        defaults: Defaults {
            vocab: Some(262_144),
            context: 131_072,
            theta: 1_000_000.0,
            partial: Some(1.0),
            ..GEMMA2.defaults
        },
        ..GEMMA2
    },
    OLMO2,
    Facts {
        architecture: Architecture::Olmo3,
        names: &["Olmo3ForCausalLM"],
        model_types: &["olmo3"],
        windows: Windows::Between(&[], 4, 4096),
        local_rope: LocalRope::Own(None, 500_000.0),
        defaults: Defaults { theta: 500_000.0, ..OLMO2.defaults },
        ..OLMO2
    },
    Facts {
        architecture: Architecture::GptOss,
        names: &["GptOssForCausalLM"],
        model_types: &["gpt_oss"],
        experts: Some(ExpertFacts {
            count: 128,
            chosen: 4,
            inner: 2880,
            everywhere: true,
            normalise: None,
            count_keys: &["num_local_experts", "num_experts"],
            inner_keys: &["intermediate_size"],
            bias: true,
            ..EXPERTS
        }),
        qkv_bias: Bias::Key("attention_bias", true),
        o_bias: Bias::Key("attention_bias", true),
        mlp_bias: Bias::Never,
        windows: Windows::Between(&[], 2, 128),
        rope_required: true,
        activation: (&["hidden_act"], Activation::ClampedSilu { limit: 7f32.to_bits() }),
        sinks: true,
        defaults: Defaults {
            kv_heads: Some(8),
            head_dim: Some(64),
            context: 131_072,
            rms_eps: 1e-5,
            theta: 150_000.0,
            ..DEFAULTS
        },
        ..LLAMA
    },
    GLM4,
    Facts {
        architecture: Architecture::Glm4Moe,
        names: &["Glm4MoeForCausalLM"],
        model_types: &["glm4_moe"],
        experts: Some(ExpertFacts {
            inner: 1408,
            shared: Some(1408),
            normalise: Some(true),
            count_keys: &["n_routed_experts", "num_local_experts"],
            style: ExpertStyle::DeepSeekV3(1, 1, 1, 1.0),
            ..EXPERTS
        }),
        qkv_bias: Bias::Key("attention_bias", false),
        qk_norm: QkNorm::Heads,
        qk_norm_key: Some("use_qk_norm"),
        norms: BlockNorms::BEFORE,
        interleaved: false,
        defaults: Defaults { kv_heads: Some(8), head_dim: None, rms_eps: 1e-5, eos: &[], ..GLM4.defaults },
        ..GLM4
    },
    Facts {
        architecture: Architecture::DeepseekV2,
        names: &["DeepseekV2ForCausalLM"],
        model_types: &["deepseek_v2"],
        experts: Some(ExpertFacts {
            count: 64,
            chosen: 6,
            inner: 1407,
            shared: Some(1407),
            normalise: None,
            count_keys: &["n_routed_experts", "num_local_experts"],
            style: ExpertStyle::DeepSeekV2,
            ..EXPERTS
        }),
        latent: Some((Latent { q_rank: Some(1536), kv_rank: 512, nope: 128, rope: 64, value_dim: 128 }, false)),
        defaults: Defaults { context: 2048, bos: Some(0), eos: &[1], ..DEEPSEEK_V3.defaults },
        ..DEEPSEEK_V3
    },
    DEEPSEEK_V3,
    Facts {
        architecture: Architecture::Glm4MoeLite,
        names: &["Glm4MoeLiteForCausalLM"],
        model_types: &["glm4_moe_lite"],
        experts: Some(ExpertFacts {
            count: 64,
            chosen: 4,
            inner: 1536,
            shared: Some(1536),
            normalise: Some(true),
            count_keys: &["n_routed_experts", "num_local_experts"],
            style: ExpertStyle::DeepSeekV3(1, 1, 1, 1.8),
            ..EXPERTS
        }),
        latent: Some((Latent { q_rank: Some(768), kv_rank: 512, nope: 192, rope: 64, value_dim: 256 }, true)),
        default_rope_is_whole: false,
        defaults: Defaults { context: 202_752, rms_eps: 1e-5, bos: None, eos: &[], ..DEEPSEEK_V3.defaults },
        ..DEEPSEEK_V3
    },
    Facts {
        architecture: Architecture::Mixtral,
        names: &["MixtralForCausalLM"],
        model_types: &["mixtral"],
        experts: Some(ExpertFacts {
            count: 8,
            chosen: 2,
            inner: 14_336,
            everywhere: true,
            normalise: None,
            inner_keys: &["intermediate_size"],
            ..EXPERTS
        }),
        windows: Windows::Everywhere(None),
        defaults: Defaults { rms_eps: 1e-5, theta: 1_000_000.0, ..MISTRAL.defaults },
        ..MISTRAL
    },
    Facts {
        architecture: Architecture::Qwen25Vl,
        names: &["Qwen2_5_VLForConditionalGeneration"],
        model_types: &["qwen2_5_vl", "qwen2_5_vl_text"],
        defaults: Defaults { kv_heads: Some(8), rms_eps: 1e-5, theta: 1_000_000.0, ..DEFAULTS },
        ..QWEN2
    },
    Facts {
        architecture: Architecture::Qwen3VlMoe,
        names: &["Qwen3VLMoeForConditionalGeneration"],
        model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
        experts: Some(ExpertFacts { count: 60, chosen: 4, inner: 1408, normalise: None, ..EXPERTS }),
        windows: Windows::Never,
        defaults: Defaults { kv_heads: Some(16), head_dim: None, context: 128_000, theta: 500_000.0, ..DEFAULTS },
        ..QWEN3
    },
    Facts {
        architecture: Architecture::SeedOss,
        names: &["SeedOssForCausalLM"],
        model_types: &["seed_oss"],
        qkv_bias: Bias::Key("attention_bias", true),
        o_bias: Bias::Key("attention_out_bias", false),
        defaults: Defaults {
            kv_heads: Some(8),
            head_dim: Some(128),
            context: 524_288,
            bos: Some(0),
            eos: &[2],
            ..DEFAULTS
        },
        ..LLAMA
    },
    ERNIE45,
    Facts {
        architecture: Architecture::Exaone4,
        names: &["Exaone4ForCausalLM"],
        model_types: &["exaone4"],
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        windows: Windows::Between(&["sliding_window_pattern"], 4, 4096),
        rope_in_windows: true,
        defaults: Defaults { kv_heads: Some(32), context: 2048, rms_eps: 1e-5, bos: Some(0), eos: &[2], ..DEFAULTS },
        ..OLMO2
    },
    Facts {
        architecture: Architecture::Olmoe,
        names: &["OlmoeForCausalLM"],
        model_types: &["olmoe"],
        experts: Some(ExpertFacts {
            count: 64,
            inner: 2048,
            everywhere: true,
            inner_keys: &["intermediate_size"],
            ..EXPERTS
        }),
        norms: BlockNorms::BEFORE,
        defaults: Defaults { context: 4096, ..OLMO2.defaults },
        ..OLMO2
    },
    Facts {
        architecture: Architecture::Dots1,
        names: &["Dots1ForCausalLM"],
        model_types: &["dots1"],
        experts: Some(ExpertFacts {
            inner: 1408,
            shared: Some(1408),
            count_keys: &["n_routed_experts", "num_local_experts"],
            style: ExpertStyle::DeepSeekV3(0, 1, 1, 1.0),
            ..EXPERTS
        }),
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Heads,
        windows: Windows::From(62, 4096),
        defaults: Defaults { kv_heads: Some(32), context: 2048, ..DEFAULTS },
        ..LLAMA
    },
    Facts {
        architecture: Architecture::MiniMaxM2,
        names: &["MiniMaxM2ForCausalLM"],
        model_types: &["minimax_m2"],
        experts: Some(ExpertFacts {
            count: 256,
            chosen: 8,
            inner: 1536,
            everywhere: true,
            normalise: None,
            inner_keys: &["intermediate_size"],
            style: ExpertStyle::DeepSeekV3(0, 1, 1, 1.0),
            ..EXPERTS
        }),
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        qk_norm: QkNorm::Rows,
        defaults: Defaults {
            kv_heads: Some(8),
            head_dim: Some(128),
            context: 196_608,
            theta: 5_000_000.0,
            partial: Some(1.0),
            bos: Some(200_034),
            eos: &[200_020],
            ..DEFAULTS
        },
        ..LLAMA
    },
    HUNYUAN,
    Facts {
        architecture: Architecture::HunYuanMoe,
        names: &["HunYuanMoEV1ForCausalLM"],
        model_types: &["hunyuan_v1_moe"],
        experts: Some(ExpertFacts {
            count: 1,
            chosen: 1,
            inner: 11_008,
            shared: Some(11_008),
            everywhere: true,
            normalise: None,
            chosen_keys: &["moe_topk", "num_experts_per_tok"],
            inner_keys: &["intermediate_size"],
            style: ExpertStyle::HunYuan,
            ..EXPERTS
        }),
        ..HUNYUAN
    },
    Facts {
        architecture: Architecture::Ernie45Moe,
        names: &["Ernie4_5_MoeForCausalLM"],
        model_types: &["ernie4_5_moe"],
        experts: Some(ExpertFacts {
            count: 64,
            chosen: 6,
            inner: 1536,
            shared: Some(3072),
            normalise: None,
            count_keys: &["moe_num_experts", "num_experts"],
            chosen_keys: &["moe_k", "num_experts_per_tok"],
            style: ExpertStyle::Ernie,
            ..EXPERTS
        }),
        qkv_bias: Bias::Never,
        o_bias: Bias::Never,
        mlp_bias: Bias::Never,
        defaults: Defaults { kv_heads: Some(4), head_dim: None, ..ERNIE45.defaults },
        ..ERNIE45
    },
    GRANITE_MOE,
    Facts {
        architecture: Architecture::GraniteMoeShared,
        names: &["GraniteMoeSharedForCausalLM"],
        model_types: &["granitemoeshared"],
        experts: Some(ExpertFacts { shared: Some(0), ..GRANITE_EXPERTS }),
        ..GRANITE_MOE
    },
    Facts {
        architecture: Architecture::GraniteMoeHybrid,
        names: &["GraniteMoeHybridForCausalLM"],
        model_types: &["granitemoehybrid"],
        experts: Some(ExpertFacts { shared: Some(1024), everywhere: false, ..GRANITE_EXPERTS }),
        attention_name: Some("attention"),
        state_spaces: Some(GRANITE_SPACES),
        rotated: Rotated::Named,
        ..GRANITE_MOE
    },
    LFM2,
    Facts {
        architecture: Architecture::Lfm2Moe,
        names: &["Lfm2MoeForCausalLM"],
        model_types: &["lfm2_moe"],
        experts: Some(ExpertFacts {
            count: 32,
            chosen: 4,
            inner: 1792,
            normalise: Some(true),
            style: ExpertStyle::Lfm2(2),
            ..EXPERTS
        }),
        ..LFM2
    },
    Facts {
        architecture: Architecture::NemotronH,
        names: &["NemotronHForCausalLM"],
        model_types: &["nemotron_h"],
        state_spaces: Some(NEMOTRON_SPACES),
        experts: Some(ExpertFacts {
            count: 8,
            chosen: 2,
            inner: 7688,
            shared: Some(7688),
            normalise: Some(true),
            count_keys: &["n_routed_experts", "num_local_experts"],
            style: ExpertStyle::Nemotron,
            ..EXPERTS
        }),
        norms: BlockNorms::NEMOTRON,
        rotated: Rotated::No,
        activation: (&["mlp_hidden_act"], Activation::SquaredRelu),
        blocks: Some(BlockKeys { names: &["layers_block_type", "layer_types"], letters: "hybrid_override_pattern" }),
        eps_key: "layer_norm_epsilon",
        defaults: Defaults {
            heads: Some(32),
            vocab: Some(131_072),
            kv_heads: Some(8),
            head_dim: Some(128),
            context: 4096,
            rms_eps: 1e-5,
            bos: Some(1),
            eos: &[2],
            ..DEFAULTS
        },
        ..LLAMA
    },
];

/// Multimodal architectures whose text model may be of several families: `text_config.model_type` decides.
pub(super) const WRAPPERS: [&str; 1] = ["Mistral3ForConditionalGeneration"];
/// The values of `model_type` of these architectures themselves.
pub(super) const WRAPPER_TYPES: [&str; 1] = ["mistral3"];

impl Architecture {
    pub(super) fn facts(self) -> &'static Facts {
        FAMILIES.iter().find(|facts| facts.architecture == self).expect("every family has facts")
    }

    /// All supported families.
    pub fn all() -> impl Iterator<Item = Architecture> {
        FAMILIES.iter().map(|facts| facts.architecture)
    }

    /// Returns the names that config.json's `architectures` may contain, the one used by released checkpoints first.
    pub fn names(self) -> &'static [&'static str] {
        self.facts().names
    }

    /// Returns the first of [`Architecture::names`].
    pub fn name(self) -> &'static str {
        self.names()[0]
    }

    /// Returns the values of config.json's `model_type`.
    pub fn model_types(self) -> &'static [&'static str] {
        self.facts().model_types
    }

    /// Whether the model is a hybrid: some of its layers use the gated delta rule (linear attention) instead of
    /// attention.
    pub fn is_hybrid(self) -> bool {
        self.facts().hybrid
    }

    /// Whether the family's configuration describes experts.
    pub fn has_experts(self) -> bool {
        self.facts().experts.is_some()
    }
}
