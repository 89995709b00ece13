//! Tests of the configuration parser with released, old-style and invalid config.json files.

use super::*;
use serde_json::Map;

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

/// Returns the JSON text with keys replaced, or removed where the new value is the string `<absent>`.
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

/// Returns the rotary embedding of the first kind of attention layers.
fn rope_of(config: &ModelConfig) -> &Rope {
    config.attention_kinds[0].rope.as_ref().unwrap()
}

#[test]
fn reads_qwen3() {
    let c = ModelConfig::parse(QWEN3, None).unwrap();
    assert_eq!(c.architecture, Architecture::Qwen3);
    assert_eq!(
        (c.hidden, c.intermediate, c.layers, c.attention_kinds[0].heads, c.attention_kinds[0].kv_heads),
        (1024, 3072, 28, 16, 8)
    );
    assert_eq!(
        (c.attention_kinds[0].head_dim, c.attention_kinds[0].q_rows(), c.attention_kinds[0].kv_rows()),
        (128, 2048, 1024)
    );
    assert_eq!(c.kv_bytes_per_token(KvFormat::F32), 4 * 2 * 28 * 1024);
    assert!(c.tied && c.qk_norm == QkNorm::Heads && !c.qkv_bias && !c.o_bias && !c.mlp_bias);
    assert_eq!(
        *rope_of(&c),
        Rope {
            theta: 1e6,
            rotary_dim: 128,
            scaling: RopeScaling::Default,
            exponent_dim: 128,
            pairs: RotatedPairs::Halves,
            query_growth: None
        }
    );
    assert_eq!((c.vocab, c.context, c.rms_eps), (151936, 40960, 1e-6));
    assert_eq!((c.bos, c.eos.as_slice()), (Some(151643), &[151645][..]));
    assert_eq!(c.dtype, Some(Dtype::Bf16));
    assert_eq!(c.layer_kinds, vec![LayerKind::Attention; 28]);
}

#[test]
fn reads_llama_and_derives_head_dim() {
    let c = ModelConfig::parse(LLAMA, None).unwrap();
    assert_eq!((c.architecture, c.attention_kinds[0].head_dim, c.qk_norm), (Architecture::Llama, 64, QkNorm::None));
    assert_eq!(c.eos, vec![128001, 128008]);
    assert_eq!(c.dtype, None);
    let expected =
        RopeScaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
    assert_eq!(rope_of(&c).scaling, expected);
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
    assert_eq!(
        (rope_of(&c).theta, c.attention_kinds[0].kv_heads, c.rms_eps, c.tied, c.context),
        (10_000.0, 32, 1e-6, false, 2048)
    );
    let c = ModelConfig::parse(&with(QWEN3, serde_json::json!({"head_dim": "<absent>"})), None).unwrap();
    assert_eq!(c.attention_kinds[0].head_dim, 128);
    let c = ModelConfig::parse(&with(QWEN3, serde_json::json!({"head_dim": null})), None).unwrap();
    assert_eq!(c.attention_kinds[0].head_dim, 64);
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

/// Goal: dynamic scaling begins beyond `max_position_embeddings`, where no request gets.
#[test]
fn dynamic_rope_changes_nothing_within_the_context() {
    let rope = |changes: Value| rope_of(&ModelConfig::parse(&with(LLAMA, changes), None).unwrap()).clone();
    let dynamic = rope(serde_json::json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}));
    assert_eq!(dynamic, rope(serde_json::json!({"rope_scaling": null})));
}

/// Goal: where layers with a window have a rotary embedding of their own, transformers' classes apply keys that name no
/// kind of layers to neither kind, and a base outside the kinds is not the windows' base.
#[test]
fn rope_of_two_kinds_is_told_apart() {
    let olmo = |changes: Value| {
        let base = serde_json::json!({
            "architectures": ["Olmo3ForCausalLM"], "rope_scaling": "<absent>", "rope_theta": "<absent>"});
        with(&with(LLAMA, base), changes)
    };
    let theta = |rope: Value| {
        let text = olmo(serde_json::json!({"rope_parameters": rope, "rope_theta": 7000}));
        let c = ModelConfig::parse(&text, None).unwrap();
        let of = |slides: bool| c.attention_kinds.iter().find(|kind| kind.window.is_some() == slides).unwrap();
        [false, true].map(|slides| of(slides).rope.as_ref().unwrap().theta)
    };
    let plain = serde_json::json!({"rope_type": "default"});
    let both = serde_json::json!({"full_attention": plain, "sliding_attention": plain});
    assert_eq!(theta(both), [7000.0, 500_000.0]);
    for flat in [
        serde_json::json!({"rope_type": "default", "rope_theta": 10000.0}),
        serde_json::json!({"rope_type": "linear", "factor": 4.0}),
    ] {
        let text = olmo(serde_json::json!({"rope_parameters": flat}));
        let found = problems(&text);
        assert!(
            matches!(found.as_slice(), [ConfigProblem::Value { key, .. }] if key == "rope_parameters"),
            "{found:#?}"
        );
    }
    let same = serde_json::json!({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}});
    ModelConfig::parse(&olmo(same), None).unwrap();
}

#[test]
fn null_is_not_the_default_where_transformers_tells_them_apart() {
    let yarn = serde_json::json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": null}});
    let c = ModelConfig::parse(&with(QWEN3, yarn), None).unwrap();
    assert!(matches!(rope_of(&c).scaling, RopeScaling::Yarn { truncate: false, .. }));
    let smollm = |changes: Value| {
        let text = with(LLAMA, serde_json::json!({"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}));
        let c = ModelConfig::parse(&with(&text, changes), None).unwrap();
        (c.attention_kinds[0].heads, c.attention_kinds[0].kv_heads)
    };
    let (heads, kv_heads) = smollm(serde_json::json!({"num_key_value_heads": null}));
    assert_eq!(kv_heads, heads);
    assert_eq!(smollm(serde_json::json!({"num_key_value_heads": "<absent>"})).1, 4);
}

#[test]
fn some_families_rotate_whole_heads_unless_positions_are_scaled() {
    let gemma = |kind: &str| {
        let full = serde_json::json!({"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": kind});
        let sliding = serde_json::json!({"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5});
        let both = serde_json::json!({"full_attention": full, "sliding_attention": sliding});
        let c = ModelConfig::parse(&gemma4(serde_json::json!({"rope_parameters": both})), None).unwrap();
        c.attention_kinds.iter().map(|kind| kind.rope.as_ref().unwrap().rotary_dim).collect::<Vec<_>>()
    };
    assert_eq!(gemma("default"), [256, 512]);
    assert_eq!(gemma("proportional"), [256, 128]);
    let rope = |class: &str, model_type: &str| {
        let text = deepseek(class, model_type, serde_json::json!({"rope_scaling": null, "partial_rotary_factor": 0.5}));
        rope_of(&ModelConfig::parse(&text, None).unwrap()).rotary_dim
    };
    let whole = rope("DeepseekV3ForCausalLM", "deepseek_v3");
    assert_eq!(rope("Glm4MoeLiteForCausalLM", "glm4_moe_lite") * 2, whole);
}

#[test]
fn original_context_and_factor_have_fallbacks() {
    let yarn = serde_json::json!({"rope_scaling": {"type": "yarn", "factor": 4.0}});
    let c = ModelConfig::parse(&with(QWEN3, yarn), None).unwrap();
    let RopeScaling::Yarn { original_context, beta_fast, beta_slow, truncate, .. } = rope_of(&c).scaling.clone() else {
        panic!("{:?}", rope_of(&c).scaling);
    };
    assert_eq!((original_context, beta_fast, beta_slow, truncate), (40960.0, 32.0, 1.0, true));

    let ratio = serde_json::json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 10240}});
    let c = ModelConfig::parse(&with(QWEN3, ratio), None).unwrap();
    assert!(matches!(rope_of(&c).scaling, RopeScaling::Yarn { factor: 4.0, .. }));
    assert!((rope_of(&c).attention_scale() - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
}

/// Goal: the inverse frequencies match those of transformers. Method: compare with the bits of its f32 values, which
/// tests/fixtures/rope/make.py writes. Up to 2 units in the last place are tolerated, because its vectorised power may
/// differ from the exact one by one unit.
#[test]
fn rotary_tables_are_those_of_transformers() {
    let text = include_str!("../../../tests/fixtures/rope/rope.json");
    let fixtures: Map<String, Value> = serde_json::from_str(text).unwrap();
    assert_eq!(fixtures.len(), 6);
    for (name, fixture) in fixtures {
        let mut changes = fixture["config"].clone();
        changes["rope_scaling"] = "<absent>".into();
        changes["rope_theta"] = "<absent>".into();
        let config = ModelConfig::parse(&with(LLAMA, changes), None).unwrap();
        let rope = rope_of(&config);
        assert_eq!(rope.attention_scale(), fixture["scale"].as_f64().unwrap() as f32, "{name}");
        let bits: Vec<i64> = fixture["bits"].as_array().unwrap().iter().map(|b| b.as_i64().unwrap()).collect();
        let ours: Vec<i64> = rope.inv_freq(config.context).iter().map(|f| i64::from(f.to_bits())).collect();
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
            "rope_scaling": {"rope_type": "spiral"},
            "quantization_config": {"quant_method": "aqlm"}, "tie_word_embeddings": "yes",
        }),
    );
    let found = problems(&text);
    let expect = |problem: ConfigProblem| assert!(found.contains(&problem), "{problem:?} not in {found:#?}");
    expect(ConfigProblem::UnsupportedArchitecture("MambaForCausalLM".into()));
    expect(ConfigProblem::UnsupportedActivation("gelu".into(), "silu"));
    expect(ConfigProblem::Missing("num_hidden_layers".into()));
    expect(ConfigProblem::UnsupportedDtype("float8_e4m3fn".into()));
    expect(ConfigProblem::UnsupportedRope("spiral".into()));
    expect(ConfigProblem::Quantized("aqlm".into()));
    for key in ["num_attention_heads", "vocab_size", "rms_norm_eps", "tie_word_embeddings"] {
        assert!(found.iter().any(|p| matches!(p, ConfigProblem::Value { key: k, .. } if k == key)), "{key}");
    }
    assert_eq!(found.len(), 10, "{found:#?}");
    let message = ModelConfigError { problems: found }.to_string();
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

const QWEN3_MOE: &str = r#"{
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936 }"#;

const QWEN3_NEXT: &str = r#"{
    "architectures": ["Qwen3NextForCausalLM"], "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 151936 }"#;

/// The form of a released multimodal model: the text model's keys are in an object of their own.
const QWEN35: &str = r#"{
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": false, "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention",
                        "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false, "num_attention_heads": 8, "num_hidden_layers": 6,
        "num_key_value_heads": 2, "output_gate_type": "swish", "rms_norm_eps": 1e-06, "vocab_size": 248320,
        "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 10000000, "partial_rotary_factor": 0.25}},
    "tie_word_embeddings": true,
    "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5"} }"#;

/// Returns the text of [`QWEN35`] with keys of its `text_config` replaced.
fn with_text(changes: Value) -> String {
    let mut outer: Value = serde_json::from_str(QWEN35).unwrap();
    outer["text_config"] = serde_json::from_str(&with(&outer["text_config"].to_string(), changes)).unwrap();
    outer.to_string()
}

#[test]
fn reads_qwen3_moe() {
    let c = ModelConfig::parse(QWEN3_MOE, None).unwrap();
    assert_eq!(c.architecture, Architecture::Qwen3Moe);
    let experts = Experts {
        count: 128,
        chosen: 8,
        inner: 768,
        shared_inner: None,
        shared_gate: true,
        routing: None,
        normalise: true,
        bias: false,
        beside_dense: false,
    };
    assert_eq!((c.experts, experts.router_rows()), (Some(experts), 128));
    assert_eq!(c.mlp_kinds, vec![MlpKind::Experts; 48]);
    assert_eq!((c.intermediate, c.delta, c.mtp_layers), (0, None, 0));
    assert!(c.qk_norm == QkNorm::Heads && !c.attention_gate && c.norm == NormKind::Plain);
    assert_eq!((rope_of(&c).rotary_dim, c.qkv_rows(&c.attention_kinds[0])), (128, (32 + 2 * 4) * 128));
    // The class default of transformers differs from the released value.
    let c = ModelConfig::parse(&with(QWEN3_MOE, serde_json::json!({"norm_topk_prob": "<absent>"})), None).unwrap();
    assert!(!c.experts.unwrap().normalise);
}

#[test]
fn dense_layers_among_experts() {
    let kinds = |changes: Value| {
        let c = ModelConfig::parse(&with(QWEN3_MOE, changes), None).unwrap();
        let dense: Vec<u32> =
            (0..).zip(&c.mlp_kinds).filter(|(_, kind)| **kind == MlpKind::Dense).map(|(layer, _)| layer).collect();
        (dense, c.intermediate, c.experts.is_some())
    };
    let odd: Vec<u32> = vec![0, 2, 4];
    assert_eq!(kinds(serde_json::json!({"num_hidden_layers": 6, "decoder_sparse_step": 2})), (odd, 6144, true));
    assert_eq!(kinds(serde_json::json!({"mlp_only_layers": [0, 47]})), (vec![0, 47], 6144, true));
    assert_eq!(kinds(serde_json::json!({"num_hidden_layers": 2, "num_experts": 0})), (vec![0, 1], 6144, false));
    let renamed =
        serde_json::json!({"num_experts": "<absent>", "num_local_experts": 60, "intermediate_size": "<absent>"});
    let c = ModelConfig::parse(&with(QWEN3_MOE, renamed), None).unwrap();
    assert_eq!((c.experts.unwrap().count, c.intermediate), (60, 0));
    // A dense layer requires `intermediate_size`.
    let found = problems(&with(QWEN3_MOE, serde_json::json!({"mlp_only_layers": [3], "intermediate_size": null})));
    assert_eq!(found, [ConfigProblem::Missing("intermediate_size".into())]);
}

#[test]
fn reads_qwen3_next() {
    let c = ModelConfig::parse(QWEN3_NEXT, None).unwrap();
    assert_eq!((c.architecture, c.norm), (Architecture::Qwen3Next, NormKind::ZeroCentred));
    assert_eq!(c.layers_of(LayerKind::Attention).collect::<Vec<_>>(), (0..12).map(|i| 4 * i + 3).collect::<Vec<_>>());
    assert_eq!(c.layers_of(LayerKind::GatedDelta).count(), 36);
    let delta = DeltaNet {
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
        tiled: false,
        space: None,
    };
    assert_eq!(c.delta, Some(delta));
    assert_eq!((delta.key_rows(), delta.value_rows(), delta.channels()), (2048, 4096, 8192));
    assert_eq!((delta.projected_rows(), delta.state_elements()), (8192 + 4096 + 64, 32 * 128 * 128));
    let experts = Experts {
        count: 512,
        chosen: 10,
        inner: 512,
        shared_inner: Some(512),
        shared_gate: true,
        routing: None,
        normalise: true,
        bias: false,
        beside_dense: false,
    };
    assert_eq!((c.experts, experts.router_rows()), (Some(experts), 513));
    assert!(c.attention_gate && c.qk_norm == QkNorm::Heads && !c.tied);
    assert_eq!(
        (rope_of(&c).rotary_dim, c.qkv_rows(&c.attention_kinds[0]), c.mtp_layers),
        (64, 2 * 16 * 256 + 2 * 2 * 256, 1)
    );
    // Only full-attention layers keep keys and values.
    assert_eq!(c.kv_bytes_per_token(KvFormat::F16), 2 * 2 * 12 * 512);
}

#[test]
fn reads_the_text_of_qwen35() {
    let c = ModelConfig::parse(QWEN35, None).unwrap();
    assert_eq!((c.architecture, c.hidden, c.intermediate, c.vocab), (Architecture::Qwen35, 1024, 3584, 248_320));
    assert_eq!(c.layers_of(LayerKind::Attention).collect::<Vec<_>>(), [3, 5]);
    assert_eq!((rope_of(&c).theta, rope_of(&c).rotary_dim, c.mtp_layers), (1e7, 64, 1));
    assert_eq!((c.mlp_kinds.as_slice(), c.experts), (&[MlpKind::Dense; 6][..], None));
    assert!(c.tied && c.attention_gate && c.norm == NormKind::ZeroCentred);
    assert_eq!((c.eos.as_slice(), c.bos, c.dtype), (&[248_044][..], None, Some(Dtype::Bf16)));

    // The text configuration alone parses to the same result; so does giving the order of layers by interval instead.
    let mut text: Value = serde_json::from_str(QWEN35).unwrap();
    text = text["text_config"].take();
    text["tie_word_embeddings"] = true.into();
    assert_eq!(ModelConfig::parse(&text.to_string(), None).unwrap(), c);
    let interval = serde_json::json!({"layer_types": "<absent>", "full_attention_interval": 2});
    let c = ModelConfig::parse(&with_text(interval), None).unwrap();
    assert_eq!(c.layers_of(LayerKind::Attention).collect::<Vec<_>>(), [1, 3, 5]);

    // The head is tied if either place says so.
    let said = |outer: Value, inner: Value| {
        let mut config: Value = serde_json::from_str(QWEN35).unwrap();
        config["tie_word_embeddings"] = outer;
        config["text_config"]["tie_word_embeddings"] = inner;
        ModelConfig::parse(&config.to_string(), None).unwrap().tied
    };
    assert!(said(false.into(), true.into()) && said(true.into(), false.into()) && said(Value::Null, true.into()));
    assert!(!said(false.into(), false.into()) && !said(Value::Null, Value::Null));
}

#[test]
fn reads_qwen35_with_experts_by_class_defaults() {
    let absent = serde_json::json!({
        "intermediate_size": "<absent>", "linear_num_key_heads": "<absent>", "linear_num_value_heads": "<absent>",
        "linear_key_head_dim": "<absent>", "linear_value_head_dim": "<absent>", "head_dim": "<absent>",
        "linear_conv_kernel_dim": "<absent>", "num_key_value_heads": "<absent>", "rope_parameters": "<absent>",
        "mtp_use_dedicated_embeddings": true,
    });
    let mut config: Value = serde_json::from_str(&with_text(absent)).unwrap();
    config["architectures"] = serde_json::json!(["Qwen3_5MoeForConditionalGeneration"]);
    config["model_type"] = "qwen3_5_moe".into();
    config["text_config"]["model_type"] = "qwen3_5_moe_text".into();
    let c = ModelConfig::parse(&config.to_string(), None).unwrap();
    let experts = Experts {
        count: 256,
        chosen: 8,
        inner: 512,
        shared_inner: Some(512),
        shared_gate: true,
        routing: None,
        normalise: true,
        bias: false,
        beside_dense: false,
    };
    assert_eq!((c.architecture, c.experts, c.intermediate), (Architecture::Qwen35Moe, Some(experts), 0));
    assert_eq!(
        (c.attention_kinds[0].head_dim, c.attention_kinds[0].kv_heads, rope_of(&c).rotary_dim, rope_of(&c).theta),
        (256, 2, 64, 10_000.0)
    );
    let delta = DeltaNet {
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
        tiled: false,
        space: None,
    };
    assert_eq!((c.delta, c.mtp_layers), (Some(delta), 0));
    config.as_object_mut().unwrap().remove("architectures");
    assert_eq!(ModelConfig::parse(&config.to_string(), None).unwrap(), c);
}

#[test]
fn hybrids_that_cannot_be_run_are_refused_with_every_reason() {
    let found = problems(&with_text(serde_json::json!({
        "linear_conv_kernel_dim": 3, "linear_num_value_heads": 24, "linear_key_head_dim": 40,
        "linear_value_head_dim": 144, "output_gate_type": "sigmoid", "attn_output_gate": "yes",
        "mtp_num_hidden_layers": -1, "num_hidden_layers": "<absent>", "eos_token_id": 248_320,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5},
        "layer_types": ["linear_attention", "chunked_attention"],
    })));
    for key in [
        "linear_conv_kernel_dim",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "output_gate_type",
        "attn_output_gate",
        "mtp_num_hidden_layers",
        "eos_token_id",
        "rope_parameters.partial_rotary_factor",
    ] {
        // Problems name the key's path in the file.
        let named = format!("text_config.{key}");
        let noted = found.iter().any(|p| matches!(p, ConfigProblem::Value { key: k, .. } if *k == named));
        assert!(noted, "{named} is not among {found:#?}");
    }
    assert!(found.contains(&ConfigProblem::Missing("text_config.num_hidden_layers".into())), "{found:#?}");
    assert!(found.contains(&ConfigProblem::UnsupportedLayer("chunked_attention".into())), "{found:#?}");
    assert_eq!(found.len(), 11, "{found:#?}");

    let one = |text: &str, changes: Value| match problems(&with(text, changes)).as_slice() {
        [ConfigProblem::Value { key, .. }] => key.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"num_experts_per_tok": 513})), "num_experts_per_tok");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"hidden_size": 2056})), "hidden_size");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"num_experts_per_tok": 17})), "num_experts_per_tok");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"moe_intermediate_size": 516})), "moe_intermediate_size");
    let shared = serde_json::json!({"shared_expert_intermediate_size": 100});
    assert_eq!(one(QWEN3_NEXT, shared), "shared_expert_intermediate_size");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"num_experts": 1 << 20})), "num_experts");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"full_attention_interval": 0})), "full_attention_interval");
    // Without a full-attention layer there would be no KV cache pages.
    let few = serde_json::json!({"num_hidden_layers": 3});
    assert_eq!(one(QWEN3_NEXT, few), "full_attention_interval");
    let alone = serde_json::json!({"num_hidden_layers": 1, "layer_types": ["linear_attention"]});
    assert_eq!(one(QWEN3_NEXT, alone), "layer_types");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"mlp_only_layers": "none"})), "mlp_only_layers");
    assert_eq!(one(QWEN3_NEXT, serde_json::json!({"partial_rotary_factor": 0.005})), "partial_rotary_factor");
    assert_eq!(one(QWEN3_MOE, serde_json::json!({"partial_rotary_factor": 0.25})), "partial_rotary_factor");
    let hybrid = serde_json::json!({"num_hidden_layers": 1, "layer_types": ["linear_attention"]});
    assert_eq!(problems(&with(QWEN3_MOE, hybrid)), [ConfigProblem::UnsupportedLayer("linear_attention".into())]);
}

const MISTRAL: &str = r#"{
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000 }"#;

/// Returns the window of each layer.
fn windows(text: &str) -> Vec<Option<u32>> {
    let c = ModelConfig::parse(text, None).unwrap();
    (0..c.layers).map(|layer| c.attention(layer).window).collect()
}

#[test]
fn windows_are_live_where_the_family_says_so() {
    let mistral = |window: Value| windows(&with(MISTRAL, serde_json::json!({"sliding_window": window})));
    assert_eq!(mistral(4096.into()), vec![Some(4096); 32]);
    // The class's default; a null is no window.
    assert_eq!(mistral("<absent>".into()), vec![Some(4096); 32]);
    assert_eq!(mistral(Value::Null), vec![None; 32]);
    // Qwen's key counts only with its flag, from a layer on.
    let qwen = |flag: bool| {
        let keys = serde_json::json!({
            "sliding_window": 2048, "use_sliding_window": flag, "max_window_layers": 26,
        });
        windows(&with(QWEN3, keys))
    };
    assert_eq!(qwen(false), vec![None; 28]);
    assert_eq!(qwen(true), [vec![None; 26], vec![Some(2048); 2]].concat());
    // Llama has no window.
    let llama = with(LLAMA, serde_json::json!({"use_sliding_window": true, "sliding_window": 128}));
    assert!(matches!(problems(&llama).as_slice(), [ConfigProblem::SlidingWindow(_)]));
    assert_eq!(windows(&with(LLAMA, serde_json::json!({"sliding_window": 128}))), vec![None; 16]);
}

#[test]
fn layers_of_gemma_3_have_rotary_embeddings_of_their_own() {
    let text = with(
        MISTRAL,
        serde_json::json!({
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7,
            "hidden_act": "<absent>", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "rope_theta": 1e6,
            "rope_local_base_freq": 10000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 1024, "query_pre_attn_scalar": 168, "torch_dtype": "bfloat16",
        }),
    );
    let c = ModelConfig::parse(&text, None).unwrap();
    assert_eq!(c.attention_of, [0, 0, 0, 0, 0, 1, 0]);
    let [local, global] = c.attention_kinds.as_slice() else { panic!("{:?}", c.attention_kinds) };
    assert_eq!((local.window, global.window), (Some(1024), None));
    let of = |kind: &Attention| kind.rope.clone().map(|rope| (rope.theta, rope.scaling));
    assert_eq!(of(local), Some((10_000.0, RopeScaling::Default)));
    assert_eq!(of(global), Some((1e6, RopeScaling::Linear { factor: 8.0 })));
    // An original context outside the section is not theirs.
    let yarn = serde_json::json!({
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    });
    let c = ModelConfig::parse(&with(&text, yarn), None).unwrap();
    let Some(RopeScaling::Yarn { original_context, .. }) = of(&c.attention_kinds[1]).map(|(_, scaling)| scaling) else {
        panic!("{:?}", c.attention_kinds)
    };
    assert_eq!(original_context, 4096.0);
    assert_eq!(c.score_scale, Some(168f64.powf(-0.5) as f32));
    // The factor of embeddings is rounded like the weights: sqrt(4096) is exact, sqrt(3072) is not.
    assert_eq!(c.embedding_scale, 64.0);
    let c = ModelConfig::parse(&with(&text, serde_json::json!({"hidden_size": 3072})), None).unwrap();
    assert_eq!(c.embedding_scale, 55.5);
    assert!(!c.tied && c.norms == BlockNorms::GEMMA && c.activation == Activation::GeluTanh);
    // Without `dtype`, like the embedding.
    let absent = serde_json::json!({"hidden_size": 3072, "torch_dtype": "<absent>"});
    let mut c = ModelConfig::parse(&with(&text, absent), None).unwrap();
    assert_eq!((c.dtype, c.embedding_scale), (None, 55.5));
    c.default_dtype(Dtype::F32);
    assert_eq!((c.dtype, c.embedding_scale), (Some(Dtype::F32), 3072f32.sqrt()));
    c.default_dtype(Dtype::Bf16);
    assert_eq!((c.dtype, c.embedding_scale), (Some(Dtype::F32), 3072f32.sqrt()));
    // The class does not use the key.
    let capped = with(&text, serde_json::json!({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}));
    match problems(&capped).as_slice() {
        [ConfigProblem::Value { key, rule, .. }] => {
            assert_eq!((key.as_str(), rule.as_str()), ("attn_logit_softcapping", "null"))
        }
        other => panic!("{other:?}"),
    }
    let uncapped = with(&text, serde_json::json!({"attn_logit_softcapping": null, "final_logit_softcapping": 30.0}));
    let c = ModelConfig::parse(&uncapped, None).unwrap();
    assert_eq!((c.score_cap, c.logit_cap), (None, Some(30.0)));
}

#[test]
fn routers_with_groups_are_read_and_checked() {
    let text = with(
        MISTRAL,
        serde_json::json!({
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 3,
            "sliding_window": "<absent>", "n_routed_experts": 16, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 6, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5,
        }),
    );
    let c = ModelConfig::parse(&text, None).unwrap();
    assert_eq!(c.mlp_kinds, [MlpKind::Dense, MlpKind::Experts, MlpKind::Experts]);
    let routing = Routing {
        sigmoid: true,
        choice_bias: true,
        groups: 4,
        kept: 2,
        best: 2,
        sum_offset: 1e-20,
        factor: 2.5,
        logit_scale: 1.0,
        own_norm: false,
        expert_scales: false,
    };
    let experts = c.experts.unwrap();
    assert_eq!((experts.routing, experts.shared_inner, experts.shared_gate), (Some(routing), Some(128), false));
    assert_eq!((experts.router_rows(), c.qk_norm), (16, QkNorm::None));
    for (key, value) in [("n_group", 5), ("n_group", 16), ("topk_group", 5), ("topk_group", 1)] {
        let mut change = serde_json::json!({});
        change[key] = value.into();
        match problems(&with(&text, change)).as_slice() {
            [ConfigProblem::Value { key: found, .. }] => assert_eq!(found, key),
            other => panic!("{key} {value}: {other:?}"),
        }
    }
}

#[test]
fn long_rope_takes_its_lists_by_the_served_context() {
    let list = |first: f64| -> Vec<f64> { (0..64).map(|i| first + f64::from(i)).collect() };
    let phi = |changes: Value| {
        let base = serde_json::json!({
            "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": null,
            "original_max_position_embeddings": 4096, "max_position_embeddings": 131072,
            "rope_scaling": {"type": "longrope", "short_factor": list(1.0), "long_factor": list(2.0)},
        });
        with(&with(MISTRAL, base), changes)
    };
    let c = ModelConfig::parse(&phi(serde_json::json!({})), None).unwrap();
    let rope = rope_of(&c);
    assert_eq!(rope.inv_freq(4096)[0], 1.0);
    assert_eq!(rope.inv_freq(4097)[0], 0.5);
    let factor = (1.0 + 32f64.ln() / 4096f64.ln()).sqrt() as f32;
    assert_eq!(rope.attention_scale(), factor);
    let short = phi(serde_json::json!({
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": list(2.0)},
    }));
    assert!(matches!(problems(&short).as_slice(), [ConfigProblem::Value { key, .. }] if key.ends_with("short_factor")));
    let none = phi(serde_json::json!({"rope_scaling": {"type": "longrope", "short_factor": list(1.0)}}));
    assert!(matches!(problems(&none).as_slice(), [ConfigProblem::Value { key, .. }] if key.ends_with("long_factor")));
}

/// Goal: the released file of Gemma 3 4B, which leaves most keys to the class.
#[test]
fn reads_the_sparse_file_of_gemma_3() {
    let text = r#"{
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
        },
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152} }"#;
    let c = ModelConfig::parse(text, None).unwrap();
    let of = &c.attention_kinds[0];
    assert_eq!((of.heads, of.kv_heads, of.head_dim, c.vocab, c.tied), (8, 4, 256, 262_208, true));
    assert_eq!((of.window, c.context), (Some(1024), 131_072));
}

/// Goal: with `use_bidirectional_attention`, half of the window is on either side, and windows have no pages of their own; the
/// keys are those of EmbeddingGemma's released file. Classes that do not read the key refuse it.
#[test]
fn tokens_of_embedding_gemma_see_later_ones() {
    let text = |window: u32, both: Value| {
        let json = serde_json::json!({
            "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": false,
            "bos_token_id": 2, "dtype": "float32", "eos_token_id": 1, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152,
            "max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3,
            "num_hidden_layers": 24, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": window,
            "use_bidirectional_attention": both, "vocab_size": 262144
        });
        ModelConfig::parse(&json.to_string(), None).unwrap()
    };
    let c = text(512, true.into());
    let (local, global) = (c.attention(0), c.attention(5));
    assert_eq!((c.causal, local.window, global.window, c.recycled_window()), (false, Some(257), None, None));
    assert_eq!((c.context, c.embedding_scale, c.attention_kinds.len()), (2048, 768f32.sqrt(), 2));
    assert_eq!(text(9, true.into()).attention(0).window, Some(5));
    for plain in [false.into(), Value::Null] {
        let c = text(512, plain);
        assert_eq!((c.causal, c.attention(0).window, c.recycled_window()), (true, Some(512), Some(512)));
    }
    let problems = problems(&with(QWEN3, serde_json::json!({ "use_bidirectional_attention": true })));
    let [ConfigProblem::Value { key, rule, .. }] = problems.as_slice() else { panic!("{problems:?}") };
    assert_eq!((key.as_str(), rule.as_str()), ("use_bidirectional_attention", "false: attention is causal"));
    // The key of other decoders: as many tokens as the window has are seen on either side.
    for (text, window) in [(QWEN3, None), (LLAMA, None), (MISTRAL, Some(4097))] {
        let c = ModelConfig::parse(&with(text, serde_json::json!({ "is_causal": false })), None).unwrap();
        assert_eq!((c.causal, c.attention(0).window), (false, window));
    }
}

#[test]
fn numbers_outside_the_range_of_f32_are_refused() {
    let refused = |text: &str, changes: Value, key: &str| match problems(&with(text, changes)).as_slice() {
        [ConfigProblem::Value { key: found, .. }, ..] => assert!(found.ends_with(key), "{found}"),
        other => panic!("{key}: {other:?}"),
    };
    let granite = with(
        MISTRAL,
        serde_json::json!({"architectures": ["GraniteForCausalLM"], "model_type": "granite", "sliding_window": null}),
    );
    for key in ["embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"] {
        for value in [1e39, 1e-46, 0.0, -1.0] {
            let mut change = serde_json::json!({});
            change[key] = value.into();
            refused(&granite, change, key);
        }
    }
    refused(QWEN35, serde_json::json!({"is_causal": false}), "is_causal");
    let experts = serde_json::json!({
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "sliding_window": "<absent>",
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16392, "n_shared_experts": 1024,
    });
    refused(MISTRAL, experts, "n_shared_experts");
}

/// Returns the problems' keys and rules of a configuration.
fn rules(text: &str) -> Vec<(String, String)> {
    let value = |problem: &ConfigProblem| match problem {
        ConfigProblem::Value { key, rule, .. } => (key.clone(), rule.clone()),
        other => (String::new(), format!("{other:?}")),
    };
    problems(text).iter().map(value).collect()
}

#[test]
fn windows_decide_where_exaone_4_rotates() {
    let exaone = |changes: Value| {
        let own = serde_json::json!({
            "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "num_hidden_layers": 8,
            "sliding_window": 4096, "sliding_window_pattern": 4,
        });
        with(&with(MISTRAL, own), changes)
    };
    let rotated = |changes: Value| -> Vec<bool> {
        let c = ModelConfig::parse(&exaone(changes), None).unwrap();
        (0..c.layers).map(|layer| c.attention(layer).rope.is_some()).collect()
    };
    let three_of_four = [true, true, true, false, true, true, true, false];
    assert_eq!(rotated(serde_json::json!({})), three_of_four);
    assert_eq!(rotated(serde_json::json!({"sliding_window": "<absent>"})), three_of_four, "the class's window");
    assert_eq!(rotated(serde_json::json!({"sliding_window": null, "sliding_window_pattern": null})), [true; 8]);
    let full = vec!["full_attention"; 8];
    assert_eq!(rotated(serde_json::json!({"layer_types": full, "sliding_window": null})), [true; 8]);
    assert_eq!(rotated(serde_json::json!({"layer_types": full})), [false; 8], "the key says it, not the layers");
    let sliding = serde_json::json!({"layer_types": vec!["sliding_attention"; 8], "sliding_window": null});
    assert!(matches!(problems(&exaone(sliding)).as_slice(), [ConfigProblem::UnsupportedLayer(_), ..]));
    // A pattern of letters needs `layer_types`, which all published files have.
    let letters = rules(&exaone(serde_json::json!({"sliding_window_pattern": "LLLG"})));
    assert_eq!(letters[0].0, "sliding_window_pattern");
}

#[test]
fn other_spellings_of_published_files_are_read() {
    let dots = serde_json::json!({
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "sliding_window": null, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
    });
    let c = ModelConfig::parse(&with(MISTRAL, dots.clone()), None).unwrap();
    let experts = c.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, experts.shared_inner), (128, 6, Some(2816)));
    assert!(experts.routing.is_some_and(|routing| routing.sigmoid && routing.groups == 1 && routing.factor == 2.5));
    let kept = rules(&with(&with(MISTRAL, dots), serde_json::json!({"scoring_func": "softmax"})));
    assert_eq!(kept, [("scoring_func".to_owned(), "sigmoid".to_owned())]);

    let minimax = serde_json::json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64,
        "num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536, "scoring_func": "sigmoid",
    });
    let c = ModelConfig::parse(&with(MISTRAL, minimax.clone()), None).unwrap();
    let rope = c.attention(0).rope.clone().unwrap();
    assert_eq!((rope.rotary_dim, rope.theta, c.qk_norm, c.intermediate), (64, 1e4, QkNorm::Rows, 0));
    assert!(c.mlp_kinds.iter().all(|kind| *kind == MlpKind::Experts) && c.experts.unwrap().normalise);
    let part = serde_json::json!({"partial_rotary_factor": 0.25});
    let c = ModelConfig::parse(&with(&with(MISTRAL, minimax), part), None).unwrap();
    assert_eq!(c.attention(0).rope.as_ref().unwrap().rotary_dim, 32, "a factor counts before the number");
    let llama = rules(&with(LLAMA, serde_json::json!({"rotary_dim": 16})));
    assert_eq!(llama[0].0, "partial_rotary_factor");

    let kimi = serde_json::json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "sliding_window": "<absent>",
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    });
    assert_eq!(ModelConfig::parse(&with(MISTRAL, kimi), None).unwrap().architecture, Architecture::DeepseekV3);
    let olmoe = serde_json::json!({
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8,
        "clip_qkv": 8.0,
    });
    assert_eq!(rules(&with(MISTRAL, olmoe)), [("clip_qkv".to_owned(), "null".to_owned())]);
}

/// Goal: Granite's Mamba layers are state spaces by the names of both versions of transformers, and what the kernels do not
/// serve is refused by name with what they do.
#[test]
fn granite_4_with_mamba_layers_is_read() {
    let granite = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 2,
            "sliding_window": "<absent>", "layer_types": ["mamba", "attention"], "num_local_experts": 0,
            "num_experts_per_tok": 0, "position_embedding_type": "nope", "shared_intermediate_size": 2048,
            "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_conv_bias": true,
        });
        with(&with(MISTRAL, base), own)
    };
    let c = ModelConfig::parse(&granite(serde_json::json!({})), None).unwrap();
    assert_eq!(c.layer_kinds, [LayerKind::GatedDelta, LayerKind::Attention]);
    let space = Some(StateSpace { conv_bias: true, norm_groups: 1 });
    let net =
        DeltaNet { key_heads: 1, value_heads: 128, key_dim: 128, value_dim: 64, conv_kernel: 4, tiled: false, space };
    assert_eq!((c.delta, net.channels(), net.projected_rows()), (Some(net), 8192 + 256, 2 * 8192 + 256 + 128));
    let newer = serde_json::json!({
        "layer_types": ["linear_attention", "full_attention"], "mamba_d_head": "auto",
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    });
    let newer = granite(newer);
    assert_eq!(ModelConfig::parse(&newer, None).unwrap().delta, Some(net));
    // As transformers wrote it before version 5.
    let bare = newer.replace(r#"{"__float__":"Infinity"}"#, "Infinity");
    assert!(bare.contains("Infinity]") && serde_json::from_str::<serde_json::Value>(&bare).is_err());
    assert_eq!(ModelConfig::parse(&bare, None).unwrap().delta, Some(net));

    for (own, key, rule) in [
        (serde_json::json!({"mamba_d_state": "<absent>"}), "mamba_d_state", "a multiple of 16, at most 128"),
        (
            serde_json::json!({"mamba_n_heads": 64}),
            "mamba_n_heads",
            "mamba_expand x hidden_size / mamba_d_head (8192 / 64)",
        ),
        (serde_json::json!({"mamba_n_groups": 8}), "mamba_n_groups", "1"),
        (serde_json::json!({"mamba_d_conv": 3}), "mamba_d_conv", "4"),
        (serde_json::json!({"mamba_proj_bias": true}), "mamba_proj_bias", "false"),
        (serde_json::json!({"is_causal": false}), "is_causal", "true for this architecture: attention is causal"),
        (serde_json::json!({"time_step_limit": [0.0, 0.1]}), "time_step_limit", "from 0 to infinity"),
    ] {
        assert_eq!(rules(&granite(own)), [(key.to_owned(), rule.to_owned())]);
    }
    let whole = problems(&granite(serde_json::json!({"layer_types": ["mamba", "mamba"]})));
    assert!(matches!(whole.as_slice(), [ConfigProblem::Value { key, .. }] if key == "layer_types"), "{whole:?}");
}

/// Goal: each of Nemotron-H's layers is a mixer or an MLP, by a list of names or by a string of letters, and what the kernels do
/// not serve is refused by name with what they do.
#[test]
fn nemotron_h_has_layers_of_one_block() {
    let nemotron = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688, "vocab_size": 131072,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hybrid_override_pattern": "MEM*E-",
            "num_hidden_layers": 6, "intermediate_size": 1856, "layer_norm_epsilon": 2e-5, "rope_theta": 10000,
            "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
            "use_conv_bias": true, "expand": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}],
            "mlp_hidden_act": "relu2", "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "moe_latent_size": null, "sliding_window": null,
        });
        with(&with(r#"{"torch_dtype": "bfloat16"}"#, base), own)
    };
    let c = ModelConfig::parse(&nemotron(serde_json::json!({})), None).unwrap();
    let (state, full, none) = (LayerKind::GatedDelta, LayerKind::Attention, LayerKind::None);
    assert_eq!(c.layer_kinds, [state, none, state, full, none, none]);
    let (mlp, experts, nothing) = (MlpKind::Dense, MlpKind::Experts, MlpKind::None);
    assert_eq!(c.mlp_kinds, [nothing, experts, nothing, nothing, experts, mlp]);
    assert_eq!((c.layers, c.intermediate, c.rms_eps, c.attention(3).rope.is_none()), (6, 1856, 2e-5, true));
    assert!(!c.activation.has_gate() && c.has_single_blocks() && !c.has_dense_mlp(1) && c.has_dense_mlp(5));
    let net = c.delta.unwrap();
    assert_eq!((net.key_heads, net.value_heads, net.key_dim, net.value_dim), (8, 64, 128, 64));
    assert_eq!(net.space, Some(StateSpace { conv_bias: true, norm_groups: 8 }));
    let Experts { count, chosen, inner, shared_inner, shared_gate, routing, .. } = c.experts.unwrap();
    assert_eq!((count, chosen, inner, shared_inner, shared_gate), (128, 6, 1856, Some(3712), false));
    let routing = routing.unwrap();
    assert!(routing.sigmoid && routing.choice_bias && routing.factor == 2.5);
    // The names of older files count more than others, and no key gives attention a rotary embedding.
    let own = serde_json::json!({"mamba_n_groups": 4, "position_embedding_type": "rope"});
    let older = ModelConfig::parse(&nemotron(own), None).unwrap();
    assert!(older.attention(3).rope.is_none() && older.delta.is_some_and(|net| net.key_heads == 4));
    // As newer versions of transformers write it, by either kind of names; the number of layers follows.
    let names = ["linear_attention", "moe", "mamba", "attention", "moe", "mlp"];
    let newer = serde_json::json!({
        "layers_block_type": names, "hybrid_override_pattern": "<absent>", "num_hidden_layers": "<absent>",
    });
    let newer = ModelConfig::parse(&nemotron(newer), None).unwrap();
    assert_eq!((newer.layer_kinds, newer.mlp_kinds), (c.layer_kinds, c.mlp_kinds));

    for (own, key, rule) in [
        (
            serde_json::json!({"hybrid_override_pattern": "MEMEE-"}),
            "hybrid_override_pattern",
            "with a layer of it at least",
        ),
        (
            serde_json::json!({"num_hidden_layers": 5}),
            "num_hidden_layers",
            "the number of layers of hybrid_override_pattern (6)",
        ),
        (serde_json::json!({"n_groups": 7}), "n_groups", "a divisor of mamba_num_heads (64)"),
        (serde_json::json!({"ssm_state_size": 256}), "ssm_state_size", "a multiple of 16, at most 128"),
        (serde_json::json!({"moe_latent_size": 1024}), "moe_latent_size", "null"),
        (serde_json::json!({"moe_intermediate_size": 1848}), "moe_intermediate_size", "a multiple of 16"),
        (serde_json::json!({"use_bias": true}), "use_bias", "false"),
        (serde_json::json!({"time_step_limit": [0.001, 0.1]}), "time_step_limit", "from 0 to infinity"),
        (serde_json::json!({"mamba_dt_limit": [0.001, 0.1]}), "mamba_dt_limit", "from 0 to infinity"),
        (serde_json::json!({"n_routed_experts": 0}), "n_routed_experts", "an integer from 1 to 16777216"),
    ] {
        assert_eq!(rules(&nemotron(own)), [(key.to_owned(), rule.to_owned())]);
    }
    let other = problems(&nemotron(serde_json::json!({"hybrid_override_pattern": "MEM*EX"})));
    assert_eq!(other, [ConfigProblem::UnsupportedLayer("X".into())]);
    let gelu = problems(&nemotron(serde_json::json!({"mlp_hidden_act": "gelu"})));
    assert_eq!(gelu, [ConfigProblem::UnsupportedActivation("gelu".into(), "relu2")]);
    let absent = problems(&nemotron(serde_json::json!({"hybrid_override_pattern": "<absent>"})));
    assert_eq!(absent, [ConfigProblem::Missing("layers_block_type".into())]);
}

/// Goal: Granite's layers are attention, by name, with or without rotary embedding; a shared MLP is the dense one where there
/// are no experts.
#[test]
fn granite_4_without_mamba_layers_is_read() {
    let granite = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 2,
            "sliding_window": "<absent>", "layer_types": ["attention", "attention"], "num_local_experts": 0,
            "num_experts_per_tok": 0, "position_embedding_type": "rope", "shared_intermediate_size": 2048,
        });
        with(&with(MISTRAL, base), own)
    };
    let c = ModelConfig::parse(&granite(serde_json::json!({})), None).unwrap();
    assert_eq!((c.intermediate, c.experts, c.attention(1).rope.is_some()), (2048, None, true));
    let experts = serde_json::json!({
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512, "position_embedding_type": "nope",
    });
    let c = ModelConfig::parse(&granite(experts), None).unwrap();
    let experts = c.experts.unwrap();
    assert_eq!(
        (experts.inner, experts.shared_inner, experts.shared_gate, experts.normalise),
        (512, Some(2048), false, true)
    );
    assert!(c.attention(0).rope.is_none() && experts.routing.is_some(), "the choice needs no gate of the shared MLP");

    let absent = problems(&granite(serde_json::json!({"layer_types": "<absent>"})));
    assert_eq!(absent, [ConfigProblem::Missing("layer_types".into())]);
    let odd = rules(&granite(serde_json::json!({"position_embedding_type": "alibi"})));
    assert_eq!(odd, [("position_embedding_type".to_owned(), "rope, nope or null".to_owned())]);
    let llama = problems(&with(LLAMA, serde_json::json!({"layer_types": ["attention", "attention"]})));
    assert!(matches!(llama.as_slice(), [ConfigProblem::UnsupportedLayer(_), ..]), "{llama:?}");
}

/// Goal: LFM2's layers and the width of its MLPs are read in both spellings, and what its kernels cannot run is refused by the
/// key.
#[test]
fn short_convolutions_of_lfm2_are_read() {
    let lfm2 = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 4, "hidden_size": 1024,
            "intermediate_size": 6656, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 65536,
            "norm_eps": 1e-4, "conv_L_cache": 3, "full_attn_idxs": [1, 3],
        });
        with(&base.to_string(), own)
    };
    let read = |own: Value| ModelConfig::parse(&lfm2(own), None).unwrap();
    let c = read(serde_json::json!({}));
    let (conv, attention) = (LayerKind::ShortConv, LayerKind::Attention);
    assert_eq!(c.layer_kinds, [conv, attention, conv, attention]);
    assert_eq!(c.short_conv, Some(ShortConv { channels: 1024, taps: 3, bias: false }));
    assert!(c.is_recurrent() && c.tied && c.qk_norm == QkNorm::Heads && c.delta.is_none());
    assert_eq!((c.attention(1).head_dim, c.rms_eps, c.context), (64, 1e-4, 128_000));
    assert_eq!(c.attention(3).rope.as_ref().map(|rope| rope.theta), Some(1e6));
    // Two thirds are 4437, which is rounded up to a multiple of 256.
    assert_eq!((c.intermediate, c.dense_widths), (4608, vec![4608; 4]));
    let width = |own: Value| read(own).intermediate;
    assert_eq!(width(serde_json::json!({"block_auto_adjust_ff_dim": false})), 6656);
    assert_eq!(width(serde_json::json!({"block_ffn_dim_multiplier": null})), 4437);
    let other = serde_json::json!({"block_ff_dim": 90, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 24});
    assert_eq!(width(other), 96);
    let named = serde_json::json!({
        "layer_types": ["full_attention", "conv", "conv", "conv"], "conv_bias": true, "conv_L_cache": 4,
        "tie_embedding": false,
    });
    let c = read(named);
    assert_eq!((c.layer_kinds[0], c.layer_kinds[1], c.tied), (attention, conv, false));
    assert_eq!(c.short_conv, Some(ShortConv { channels: 1024, taps: 4, bias: true }));
    let plain = read(serde_json::json!({"full_attn_idxs": "<absent>"}));
    assert_eq!((plain.layer_kinds, plain.short_conv), (vec![attention; 4], None));

    for (own, key) in [
        (serde_json::json!({"conv_L_cache": 6}), "conv_L_cache"),
        (serde_json::json!({"conv_L_cache": 1}), "conv_L_cache"),
        (serde_json::json!({"hidden_size": 1026, "head_dim": 64}), "hidden_size"),
        (serde_json::json!({"full_attn_idxs": [4]}), "full_attn_idxs"),
        (serde_json::json!({"full_attn_idxs": []}), "full_attn_idxs"),
        (serde_json::json!({"intermediate_size": 1}), "intermediate_size"),
    ] {
        assert_eq!(rules(&lfm2(own.clone()))[0].0, key, "{own}");
    }
    let qwen = serde_json::json!({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]});
    assert_eq!(problems(&with(QWEN3_MOE, qwen)), [ConfigProblem::UnsupportedLayer("conv".into())]);

    let moe = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_experts": 32,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"], "full_attn_idxs": "<absent>",
        });
        with(&lfm2(base), own)
    };
    let c = ModelConfig::parse(&moe(serde_json::json!({})), None).unwrap();
    assert_eq!(c.mlp_kinds, [MlpKind::Dense, MlpKind::Experts, MlpKind::Experts, MlpKind::Experts]);
    assert_eq!((c.intermediate, c.experts.map(|experts| experts.normalise)), (6656, Some(true)));
    let routing = c.experts.and_then(|experts| experts.routing).unwrap();
    assert!(routing.sigmoid && routing.choice_bias && routing.sum_offset == 1e-6 && routing.factor == 1.0);
    let other = serde_json::json!({"use_expert_bias": false, "routed_scaling_factor": 2.5, "norm_topk_prob": false});
    let experts = ModelConfig::parse(&moe(other), None).unwrap().experts.unwrap();
    let routing = experts.routing.unwrap();
    assert_eq!((routing.choice_bias, routing.factor, experts.normalise), (false, 2.5, false));
    let absent = problems(&moe(serde_json::json!({"layer_types": "<absent>"})));
    assert_eq!(absent, [ConfigProblem::Missing("layer_types".into())]);
}

#[test]
fn experts_of_ernie_and_hunyuan_are_read() {
    let ernie = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "num_hidden_layers": 4,
            "sliding_window": "<absent>", "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2, "moe_layer_end_index": -1, "use_bias": false,
        });
        with(&with(MISTRAL, base), own)
    };
    let kinds = |own: Value| ModelConfig::parse(&ernie(own), None).unwrap().mlp_kinds;
    let (dense, experts) = (MlpKind::Dense, MlpKind::Experts);
    assert_eq!(kinds(serde_json::json!({})), [dense, experts, experts, experts]);
    let between = serde_json::json!({"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 2});
    assert_eq!(kinds(between), [dense, experts, dense, dense]);
    let of = ModelConfig::parse(&ernie(serde_json::json!({})), None).unwrap().experts.unwrap();
    assert_eq!((of.count, of.chosen, of.shared_inner, of.normalise), (64, 6, Some(3072), true));
    assert!(of.routing.is_some_and(|routing| routing.choice_bias && !routing.sigmoid));
    for (key, value) in [("use_bias", serde_json::json!(true)), ("moe_norm_min", serde_json::json!(0.5))] {
        assert_eq!(rules(&ernie(serde_json::json!({ key: value })))[0].0, key);
    }

    let hunyuan = |own: Value| {
        let base = serde_json::json!({
            "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "num_hidden_layers": 2,
            "sliding_window": "<absent>", "num_experts": 64, "moe_topk": [8, 8], "num_shared_expert": [1, 1],
            "intermediate_size": 3072, "moe_intermediate_size": [3072, 3072],
        });
        with(&with(MISTRAL, base), own)
    };
    let of = ModelConfig::parse(&hunyuan(serde_json::json!({})), None).unwrap().experts.unwrap();
    assert_eq!((of.chosen, of.inner, of.shared_inner, of.shared_gate), (8, 3072, Some(3072), false));
    for (key, value) in [
        ("moe_topk", serde_json::json!([8, 4])),
        ("num_shared_expert", serde_json::json!(2)),
        ("moe_intermediate_size", serde_json::json!([3072, 1536])),
        ("norm_topk_prob", serde_json::json!(false)),
    ] {
        assert_eq!(rules(&hunyuan(serde_json::json!({ key: value })))[0].0, key);
    }
}

#[test]
fn hunyuan_norms_what_a_rotation_of_another_base_keeps() {
    let hunyuan = |scaling: Value| {
        let own = serde_json::json!({
            "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 128,
            "sliding_window": "<absent>", "rope_scaling": scaling,
        });
        with(MISTRAL, own)
    };
    let alpha = serde_json::json!({"alpha": 1000.0, "factor": 1.0, "type": "dynamic"});
    let c = ModelConfig::parse(&hunyuan(alpha.clone()), None).unwrap();
    let theta = c.attention(0).rope.as_ref().unwrap().theta;
    assert!((theta - 11_158_839.925).abs() < 1e-2, "{theta}: what llama.cpp's converter writes");
    assert_eq!(c.qk_norm, QkNorm::RotatedHeads);
    let llama = ModelConfig::parse(&with(LLAMA, serde_json::json!({ "rope_scaling": alpha })), None).unwrap();
    let plain = ModelConfig::parse(LLAMA, None).unwrap();
    let theta = |c: &ModelConfig| c.attention(0).rope.as_ref().unwrap().theta;
    assert_eq!(theta(&llama), theta(&plain), "other families have no alpha");
    let yarn = rules(&hunyuan(serde_json::json!({
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
    })));
    let [(key, _)] = yarn.as_slice() else { panic!("{yarn:?}") };
    assert_eq!(key, "rope_scaling.attention_factor");
}

/// The configuration of a released Gemma 4 of the given kind, as far as it matters.
fn gemma4(changes: Value) -> String {
    let text = r#"{
        "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
        "intermediate_size": 2112, "vocab_size": 262144, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024,
        "attention_k_eq_v": true, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "dtype": "bfloat16",
        "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision", "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}"#;
    let text: Value = serde_json::from_str(&with(text, changes)).unwrap();
    serde_json::json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text
    })
    .to_string()
}

#[test]
fn reads_gemma_4_with_two_head_shapes() {
    let c = ModelConfig::parse(&gemma4(serde_json::json!({})), None).unwrap();
    let [local, global] = c.attention_kinds.as_slice() else { panic!("{:?}", c.attention_kinds) };
    assert_eq!((local.heads, local.kv_heads, local.head_dim, local.window), (16, 8, 256, Some(1024)));
    assert_eq!((global.heads, global.kv_heads, global.head_dim, global.window), (16, 2, 512, None));
    assert_eq!((local.values_are_keys, global.values_are_keys, c.v_norm), (false, true, true));
    let rope = global.rope.as_ref().unwrap();
    assert_eq!((rope.rotary_dim, rope.exponent_dim, rope.pairs), (128, 512, RotatedPairs::HalvesOfHead));
    assert_eq!(rope.pairs.places(8, 4), [0, 1, 4, 5, 2, 3, 6, 7]);
    let full: Vec<u32> = (0..30).filter(|layer| c.attention(*layer).window.is_none()).collect();
    assert_eq!(full, [5, 11, 17, 23, 29], "every sixth, and the last");
    assert_eq!((c.score_scale, c.logit_cap, c.embedding_scale), (Some(1.0), Some(30.0), 53.0));
    let experts = c.experts.unwrap();
    assert_eq!((experts.count, experts.chosen, experts.inner, experts.beside_dense), (128, 8, 704, true));
    assert_eq!((c.intermediate, c.recycled_window(), c.layer_inputs), (2112, Some(1024), None));

    // As newer versions of transformers write it, which leave out what is the same in all layers.
    let newer = |layers: Value| {
        let changes = serde_json::json!({
            "global_head_dim": "<absent>", "num_global_key_value_heads": "<absent>", "per_layer_config": layers});
        ModelConfig::parse(&gemma4(changes), None).unwrap()
    };
    let own = serde_json::json!({"head_dim": 512, "num_key_value_heads": 2});
    assert_eq!(newer(serde_json::json!({"5": own, "11": own, "17": own, "23": own, "29": own})), c);
    // The last layer sees all tokens, also if `layer_types` says otherwise.
    let kind = |layer: u32| if layer % 6 == 5 && layer < 29 { "full_attention" } else { "sliding_attention" };
    let listed: Vec<&str> = (0..30).map(kind).collect();
    assert_eq!(ModelConfig::parse(&gemma4(serde_json::json!({"layer_types": listed})), None).unwrap(), c);
    let same = newer(serde_json::json!({}));
    assert!(same.attention_kinds.iter().all(|kind| (kind.kv_heads, kind.head_dim) == (8, 256)));
}

#[test]
fn reads_gemma_4_with_shared_keys_and_inputs_of_layers() {
    let small = serde_json::json!({
        "num_hidden_layers": 8, "attention_k_eq_v": false, "enable_moe_block": false, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": "<absent>", "use_double_wide_mlp": true,
    });
    let c = ModelConfig::parse(&gemma4(small), None).unwrap();
    // The sixth layer and the last see all tokens; the last two have no keys and values of their own.
    assert_eq!(c.cache_of, [0, 1, 2, 3, 4, 5, 4, 5]);
    assert_eq!(c.cached_layers().count(), 6);
    assert_eq!(c.dense_widths, [2112, 2112, 2112, 2112, 2112, 2112, 4224, 4224]);
    assert_eq!((c.intermediate, c.experts), (4224, None));
    assert_eq!(c.layer_inputs, Some(LayerInputs { width: 256, vocab: 262_144, scale: 16.0 }));
    assert_eq!(c.attention(5).kv_heads, 8, "the number of others' key heads, unless values are keys");
}

#[test]
fn layers_of_other_families_do_not_differ_from_the_model() {
    let own = |layers: Value| with(MISTRAL, serde_json::json!({"per_layer_config": layers}));
    assert_eq!(refusal(&own(serde_json::json!({"1": {"head_dim": 64}}))).0, "per_layer_config");
    assert!(ModelConfig::parse(&own(serde_json::json!({})), None).is_ok());
}

#[test]
fn refuses_what_gemma_4_does_not_say_or_do() {
    for (key, value) in [
        ("use_bidirectional_attention", serde_json::json!("all")),
        ("num_kv_shared_layers", serde_json::json!(30)),
        ("num_global_key_value_heads", serde_json::json!(3)),
        ("per_layer_config", serde_json::json!({"0": {"head_dim": 512}})),
        ("per_layer_config", serde_json::json!({"5": {"intermediate_size": 8}})),
        ("vocab_size_per_layer_input", serde_json::json!(7)),
    ] {
        let mut changes = serde_json::json!({"hidden_size_per_layer_input": 256});
        changes[key] = value;
        let problems = problems(&gemma4(changes));
        let named = |problem: &ConfigProblem| matches!(problem, ConfigProblem::Value { key: found, .. } if found.ends_with(key));
        assert!(problems.iter().any(named), "{key}: {problems:?}");
    }
    let without = gemma4(serde_json::json!({"rope_parameters": "<absent>"}));
    assert!(problems(&without).iter().all(|problem| matches!(problem, ConfigProblem::Missing(_))));
}

/// Returns the key and the rule of the only problem.
fn refusal(text: &str) -> (String, String) {
    match problems(text).as_slice() {
        [ConfigProblem::Value { key, rule, .. }] => (key.clone(), rule.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_type_that_contradicts_the_architecture_is_refused() {
    for model_type in ["llama", "kimi_k2"] {
        let text = with(MISTRAL, serde_json::json!({"model_type": model_type}));
        let rule = "mistral where architectures has MistralForCausalLM".to_owned();
        assert_eq!(refusal(&text), ("model_type".to_owned(), rule));
    }
    // Either alone is enough.
    for absent in ["model_type", "architectures"] {
        let mut changes = serde_json::json!({});
        changes[absent] = "<absent>".into();
        assert_eq!(ModelConfig::parse(&with(MISTRAL, changes), None).unwrap().architecture, Architecture::Mistral);
    }
}

#[test]
fn layers_of_mistral_may_only_repeat_the_window() {
    let text = |window: Value, kind: &str| {
        let mut kinds = vec!["sliding_attention"; 31];
        kinds.push(kind);
        with(MISTRAL, serde_json::json!({"sliding_window": window, "layer_types": kinds}))
    };
    assert_eq!(windows(&text(4096.into(), "sliding_attention")), vec![Some(4096); 32]);
    let rule = |kind: &str| ("layer_types".to_owned(), format!("{kind} for every layer, as sliding_window says"));
    assert_eq!(refusal(&text(4096.into(), "full_attention")), rule("sliding_attention"));
    assert_eq!(refusal(&text(Value::Null, "sliding_attention")), rule("full_attention"));
}

/// Returns a configuration of DeepSeek's families.
fn deepseek(class: &str, model_type: &str, changes: Value) -> String {
    let base = serde_json::json!({
        "architectures": [class], "model_type": model_type, "num_hidden_layers": 3, "sliding_window": "<absent>",
        "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    });
    with(&with(MISTRAL, base), changes)
}

/// Goal: keys that transformers ignores, because all released models of the family have one value, are not ignored.
#[test]
fn how_deepseek_chooses_experts_is_what_the_file_says() {
    for (class, model_type, scores, other, method) in [
        ("DeepseekV3ForCausalLM", "deepseek_v3", "sigmoid", "softmax", "noaux_tc"),
        ("DeepseekV2ForCausalLM", "deepseek_v2", "softmax", "sigmoid", "group_limited_greedy"),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "sigmoid", "softmax", "noaux_tc"),
    ] {
        let right = serde_json::json!({"scoring_func": scores, "moe_layer_freq": 1, "topk_method": method});
        ModelConfig::parse(&deepseek(class, model_type, right), None).unwrap();
        for (key, value, rule) in [
            ("scoring_func", Value::from(other), scores),
            ("moe_layer_freq", 2.into(), "1"),
            ("moe_layer_freq", serde_json::json!([0, 1, 1]), "1"),
        ] {
            let mut changes = serde_json::json!({});
            changes[key] = value;
            assert_eq!(refusal(&deepseek(class, model_type, changes)), (key.to_owned(), rule.to_owned()), "{class}");
        }
    }
    let greedy = deepseek("DeepseekV3ForCausalLM", "deepseek_v3", serde_json::json!({"topk_method": "greedy"}));
    assert_eq!(refusal(&greedy), ("topk_method".to_owned(), "noaux_tc".to_owned()));
    let sum = deepseek("DeepseekV2ForCausalLM", "deepseek_v2", serde_json::json!({"norm_topk_prob": true}));
    assert_eq!(refusal(&sum), ("norm_topk_prob".to_owned(), "false".to_owned()));
}

/// Goal: as in transformers, a coefficient of 0 is none: scores are not scaled, and the factor of cosines and sines is that
/// of the context's growth.
#[test]
fn coefficients_of_yarn_that_are_zero_are_off() {
    let scaled = |mscale: Value, all: Value| {
        let rope = serde_json::json!({"rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": mscale,
            "mscale_all_dim": all}});
        let c = ModelConfig::parse(&deepseek("DeepseekV3ForCausalLM", "deepseek_v3", rope), None).unwrap();
        (c.score_scale.unwrap(), rope_of(&c).attention_scale())
    };
    let (growth, plain) = ((0.1 * 4f64.ln() + 1.0) as f32, 192f64.powf(-0.5) as f32);
    assert_eq!(scaled(1.0.into(), 0.into()), (plain, growth));
    assert_eq!(scaled(0.0.into(), Value::Null), (plain, growth));
    let both = (192f64.powf(-0.5) * (0.1 * 4f64.ln() + 1.0).powi(2)) as f32;
    assert_eq!(scaled(1.0.into(), 1.0.into()), (both, 1.0));
}

#[test]
fn keys_of_one_family_do_not_count_in_another() {
    let scaling = serde_json::json!({"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1}});
    let c = ModelConfig::parse(&with(QWEN3, scaling), None).unwrap();
    assert_eq!(rope_of(&c).query_growth, None);
    let wrapper = with(
        QWEN3,
        serde_json::json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}),
    );
    assert_eq!(ModelConfig::parse(&wrapper, None).unwrap().architecture, Architecture::Mistral);
    let longer = with(
        LLAMA,
        serde_json::json!({
        "architectures": ["SmolLM3ForCausalLM"], "rope_scaling": null, "no_rope_layers": vec![1; 20]}),
    );
    assert!(ModelConfig::parse(&longer, None).unwrap().attention_kinds.iter().all(|kind| kind.rope.is_some()));
}
