//! Presets: the shapes of released models, and tiny ones of the same families, as the config.json of such a checkpoint.

use crate::model::python_json;
use serde_json::{Map, Value, json};

use super::{SynthError, TEXT};
use crate::model::config::{Architecture, DeltaNet, Experts};

/// The presets by name.
pub const PRESETS: [(&str, Preset); 23] = [
    ("qwen3-0.6b", Preset::qwen3(1024, 3072, 28, 16, true)),
    ("qwen3-1.7b", Preset::qwen3(2048, 6144, 28, 16, true)),
    ("qwen3-4b", Preset::qwen3(2560, 9728, 36, 32, true)),
    ("qwen3-8b", Preset::qwen3(4096, 12288, 36, 32, false)),
    ("llama-3.2-1b", Preset::llama3(2048, 8192, 16, 64, 32, true)),
    ("llama-3.1-8b", Preset::llama3(4096, 14336, 32, 128, 8, false)),
    ("qwen3-30b-a3b", Preset::qwen3_moe(2048, 48, 32, 4, experts(128, 8, 768, None))),
    ("qwen3.5-0.8b", Preset::qwen35(1024, 3584, 24, 16, true).heads(8, 2)),
    ("qwen3.5-2b", Preset::qwen35(2048, 6144, 24, 16, true).heads(8, 2)),
    ("qwen3.5-4b", Preset::qwen35(2560, 9216, 32, 32, true).heads(16, 4)),
    ("qwen3.5-9b", Preset::qwen35(4096, 12288, 32, 32, false).heads(16, 4)),
    ("qwen3.5-35b-a3b", Preset::qwen35(2048, 0, 40, 32, false).heads(16, 2).with(experts(256, 8, 512, Some(512)))),
    ("qwen3-next-80b-a3b", Preset::qwen3_next(2048, 48, 16, 2, experts(512, 10, 512, Some(512)))),
    ("gemma-4-e2b", Preset::gemma4(1536, 6144, 35, (8, 1), E2B)),
    ("gemma-4-e4b", Preset::gemma4(2560, 10_240, 42, (8, 2), E4B)),
    ("gemma-4-31b", Preset::gemma4(5376, 21_504, 60, (32, 16), Gemma4 { full_kv_heads: Some(4), ..LARGE })),
    ("gemma-4-26b-a4b", Preset::gemma4(2816, 2112, 30, (16, 8), LARGE).beside(experts(128, 8, 704, None))),
    ("tiny-qwen3", Preset::qwen3(128, 384, 4, 4, true).narrow(2, 64).tiny()),
    ("tiny-llama", Preset::llama3(128, 352, 3, 32, 8, false).heads(4, 1).tiny()),
    ("tiny-qwen3-moe", Preset::qwen3_moe(128, 3, 4, 2, experts(8, 2, 64, None)).narrow(2, 64).tiny()),
    ("tiny-qwen3.5", Preset::qwen35(128, 384, 4, 4, true).heads(4, 2).narrow(2, 64).delta(2, 32).tiny()),
    (
        "tiny-qwen3.5-moe",
        Preset::qwen35(128, 0, 4, 4, false).heads(4, 2).narrow(2, 64).delta(2, 32).with(TINY_EXPERTS).tiny(),
    ),
    ("tiny-qwen3-next", Preset::qwen3_next(128, 4, 4, 2, TINY_EXPERTS).narrow(2, 64).delta(2, 32).tiny()),
];

/// The parameters in which the sizes of Gemma 4 differ, beside widths and heads.
#[derive(Clone, Copy, Debug)]
struct Gemma4 {
    window: u32,
    /// Every n-th layer sees all tokens.
    every: u32,
    /// The key heads of layers that see all tokens, whose values are their keys then.
    full_kv_heads: Option<u32>,
    /// The number of last layers that read the keys and values of others.
    shared: u32,
    /// The width of the layers' inputs that depend on the token; 0 for none.
    inputs: u32,
    /// Whether layers without keys and values have MLPs of twice the width.
    wide: bool,
}

const LARGE: Gemma4 = Gemma4 { window: 1024, every: 6, full_kv_heads: Some(2), shared: 0, inputs: 0, wide: false };
const E4B: Gemma4 = Gemma4 { window: 512, every: 6, full_kv_heads: None, shared: 18, inputs: 256, wide: false };
const E2B: Gemma4 = Gemma4 { every: 5, shared: 20, wide: true, ..E4B };

const TINY_EXPERTS: Experts = experts(8, 2, 64, Some(96));

const fn experts(count: u32, chosen: u32, inner: u32, shared_inner: Option<u32>) -> Experts {
    Experts {
        count,
        chosen,
        inner,
        shared_inner,
        shared_gate: true,
        routing: None,
        normalise: true,
        bias: false,
        beside_dense: false,
    }
}

/// The shape of a model that can be requested by name.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    architecture: Architecture,
    hidden: u32,
    /// The intermediate size of dense MLPs; 0 if no layer is dense.
    intermediate: u32,
    layers: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    vocab: u32,
    context: u32,
    tied: bool,
    /// The divisor of the low rotary frequencies (Llama only).
    rope_factor: u32,
    /// The dimensions of gated-delta-rule layers: all layers except every [`INTERVAL`]-th. `None` if the model is not a
    /// hybrid.
    delta: Option<DeltaNet>,
    /// The experts of every layer; `None` for a dense model.
    experts: Option<Experts>,
    /// The parameters of Gemma 4; `None` for other families.
    gemma4: Option<Gemma4>,
}

/// In hybrids every INTERVAL-th layer has full attention.
const INTERVAL: u32 = 4;

impl Preset {
    const fn qwen3(hidden: u32, intermediate: u32, layers: u32, heads: u32, tied: bool) -> Preset {
        Preset {
            architecture: Architecture::Qwen3,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151_936,
            context: 40_960,
            tied,
            rope_factor: 1,
            delta: None,
            experts: None,
            gemma4: None,
        }
    }

    const fn qwen3_moe(hidden: u32, layers: u32, heads: u32, kv_heads: u32, experts: Experts) -> Preset {
        Preset {
            architecture: Architecture::Qwen3Moe,
            experts: Some(experts),
            kv_heads,
            ..Preset::qwen3(hidden, 0, layers, heads, false)
        }
    }

    const fn qwen35(hidden: u32, intermediate: u32, layers: u32, value_heads: u32, tied: bool) -> Preset {
        let delta = DeltaNet {
            key_heads: 16,
            value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_kernel: 4,
            tiled: false,
            space: None,
        };
        Preset {
            architecture: Architecture::Qwen35,
            head_dim: 256,
            vocab: 248_320,
            context: 262_144,
            delta: Some(delta),
            ..Preset::qwen3(hidden, intermediate, layers, 16, tied)
        }
    }

    const fn qwen3_next(hidden: u32, layers: u32, heads: u32, kv_heads: u32, experts: Experts) -> Preset {
        let hybrid = Preset::qwen35(hidden, 0, layers, 32, false).heads(heads, kv_heads);
        Preset { architecture: Architecture::Qwen3Next, vocab: 151_936, experts: Some(experts), ..hybrid }
    }

    const fn llama3(
        hidden: u32,
        intermediate: u32,
        layers: u32,
        head_dim: u32,
        rope_factor: u32,
        tied: bool,
    ) -> Preset {
        Preset {
            architecture: Architecture::Llama,
            head_dim,
            vocab: 128_256,
            context: 131_072,
            rope_factor,
            ..Preset::qwen3(hidden, intermediate, layers, 32, tied)
        }
    }

    const fn gemma4(hidden: u32, intermediate: u32, layers: u32, (heads, kv_heads): (u32, u32), of: Gemma4) -> Preset {
        Preset {
            architecture: Architecture::Gemma4,
            head_dim: 256,
            kv_heads,
            vocab: 262_144,
            context: if of.inputs > 0 { 131_072 } else { 262_144 },
            gemma4: Some(of),
            ..Preset::qwen3(hidden, intermediate, layers, heads, true)
        }
    }

    /// Returns the preset with experts beside its dense MLPs.
    const fn beside(self, experts: Experts) -> Preset {
        Preset { experts: Some(experts), ..self }
    }

    const fn narrow(self, kv_heads: u32, head_dim: u32) -> Preset {
        Preset { kv_heads, head_dim, ..self }
    }

    const fn heads(self, heads: u32, kv_heads: u32) -> Preset {
        Preset { heads, kv_heads, ..self }
    }

    /// Returns this Qwen3.5 preset with experts.
    const fn with(self, experts: Experts) -> Preset {
        Preset { architecture: Architecture::Qwen35Moe, experts: Some(experts), ..self }
    }

    /// Returns the preset with other gated-delta-rule dimensions; there are twice as many value heads as key heads.
    const fn delta(self, key_heads: u32, dim: u32) -> Preset {
        let delta = DeltaNet {
            key_heads,
            value_heads: 2 * key_heads,
            key_dim: dim,
            value_dim: dim,
            conv_kernel: 4,
            tiled: false,
            space: None,
        };
        Preset { delta: Some(delta), ..self }
    }

    const fn tiny(self) -> Preset {
        Preset { vocab: 512, context: 2048, ..self }
    }

    /// Returns the config.json of the preset.
    pub fn config_json(&self) -> String {
        let config = match self.architecture {
            Architecture::Qwen35 | Architecture::Qwen35Moe | Architecture::Gemma4 => self.with_text(),
            _ => Value::Object(self.keys()),
        };
        format!("{config:#}\n")
    }

    /// Returns the configuration in the form of a multimodal model: the text model's keys are in an object of their
    /// own.
    fn with_text(&self) -> Value {
        let mut text = self.keys();
        text.remove("architectures");
        let types = self.architecture.model_types();
        let of_text = if self.gemma4.is_some() { types.first() } else { types.last() };
        if let Some(part) = of_text {
            text.insert("model_type".to_owned(), (*part).into());
        }
        json!({
            "architectures": [self.architecture.name()],
            "model_type": if self.gemma4.is_some() { types[1] } else { types[0] },
            TEXT: text,
            "tie_word_embeddings": self.tied,
        })
    }

    fn keys(&self) -> Map<String, Value> {
        // The ids of the released tokenizers, unless the vocabulary is too small for them.
        let tiny = self.vocab < 100_000;
        let (bos, eos) = match self.architecture {
            _ if tiny => (json!(256), json!(258)),
            Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Qwen3Next => (json!(151_643), json!(151_645)),
            Architecture::Qwen35 | Architecture::Qwen35Moe => (Value::Null, json!([248_046, 248_044])),
            Architecture::Gemma4 => (json!(2), json!([1, 106])),
            _ => (json!(128_000), json!([128_001, 128_008, 128_009])),
        };
        let (eps, theta) = match self.architecture {
            Architecture::Qwen3 | Architecture::Qwen3Moe => (1e-6, 1e6),
            Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => (1e-6, 1e7),
            Architecture::Gemma4 => (1e-6, 1e6),
            _ => (1e-5, 5e5),
        };
        let mut keys = Map::new();
        let mut add = |more: Value| keys.extend(more.as_object().cloned().unwrap_or_default());
        add(json!({
            "architectures": [self.architecture.name()],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "max_position_embeddings": self.context,
            "model_type": self.architecture.model_types()[0],
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": eps,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": self.vocab,
        }));
        if self.intermediate > 0 {
            add(json!({"intermediate_size": self.intermediate}));
        }
        add(match self.architecture {
            Architecture::Qwen3 | Architecture::Qwen3Moe => json!({"rope_theta": theta, "rope_scaling": null}),
            Architecture::Qwen3Next => {
                json!({"rope_theta": theta, "rope_scaling": null, "partial_rotary_factor": 0.25})
            }
            Architecture::Qwen35 | Architecture::Qwen35Moe => {
                // Multimodal RoPE: how many of the rotated dimension pairs each of the three positions of an image
                // rotates. Text tokens have equal positions, so it makes no difference for them.
                let pairs = self.head_dim / 8;
                json!({"rope_parameters": {
                    "mrope_interleaved": true,
                    "mrope_section": [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": theta,
                    "rope_type": "default",
                }})
            }
            Architecture::Gemma4 => json!({"rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": theta, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }}),
            _ => json!({"rope_theta": theta, "rope_scaling": {
                "factor": f64::from(self.rope_factor),
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": if tiny { 256 } else { 8192 },
                "rope_type": "llama3",
            }}),
        });
        if let Some(of) = self.gemma4 {
            let sees_all = |layer: u32| (layer + 1).is_multiple_of(of.every) || layer + 1 == self.layers;
            let kind = |layer: u32| if sees_all(layer) { "full_attention" } else { "sliding_attention" };
            add(json!({
                "attention_k_eq_v": of.full_kv_heads.is_some(),
                "enable_moe_block": self.experts.is_some(),
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": of.inputs,
                "layer_types": (0..self.layers).map(kind).collect::<Vec<_>>(),
                "num_global_key_value_heads": of.full_kv_heads,
                "num_kv_shared_layers": of.shared,
                "sliding_window": of.window,
                "top_k_experts": self.experts.map(|experts| experts.chosen),
                "use_double_wide_mlp": of.wide,
                "vocab_size_per_layer_input": self.vocab,
            }));
            keys.remove("hidden_act");
        }
        let mut add = |more: Value| keys.extend(more.as_object().cloned().unwrap_or_default());
        if let Some(delta) = self.delta {
            add(json!({
                "attn_output_gate": true,
                "full_attention_interval": INTERVAL,
                "linear_conv_kernel_dim": delta.conv_kernel,
                "linear_key_head_dim": delta.key_dim,
                "linear_num_key_heads": delta.key_heads,
                "linear_num_value_heads": delta.value_heads,
                "linear_value_head_dim": delta.value_dim,
                "mtp_num_hidden_layers": 1,
            }));
        }
        if let Some(experts) = self.experts {
            add(json!({
                "moe_intermediate_size": experts.inner,
                "num_experts": experts.count,
                "num_experts_per_tok": experts.chosen,
            }));
            if let Some(inner) = experts.shared_inner {
                add(json!({"shared_expert_intermediate_size": inner}));
            }
            if ![Architecture::Qwen35Moe, Architecture::Gemma4].contains(&self.architecture) {
                add(json!({
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [],
                    "norm_topk_prob": experts.normalise,
                }));
            }
        }
        keys
    }
}

/// Returns the config.json of a preset.
pub fn preset(name: &str) -> Result<String, SynthError> {
    PRESETS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, preset)| preset.config_json())
        .ok_or_else(|| SynthError::UnknownArch(name.to_owned()))
}

/// Returns the configuration with the given number of layers of the same widths. Text that is not a JSON object is
/// returned unchanged; the parser reports it.
pub fn with_layers(config_json: &str, layers: u32) -> String {
    let Ok(Value::Object(mut config)) = python_json::parse(config_json) else {
        return config_json.to_owned();
    };
    let keys = match config.get_mut(TEXT) {
        Some(Value::Object(text)) => text,
        _ => &mut config,
    };
    keys.insert("num_hidden_layers".to_owned(), layers.into());
    for list in ["layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern"] {
        match keys.get_mut(list) {
            Some(Value::Array(kinds)) => kinds.truncate(layers as usize),
            Some(Value::String(letters)) => *letters = letters.chars().take(layers as usize).collect(),
            _ => {}
        }
    }
    format!("{:#}\n", Value::Object(config))
}
