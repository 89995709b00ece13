//! Configurations as released, as old and as wrong ones, and what is made of them.

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
    let text = include_str!("../../../tests/fixtures/rope/rope.json");
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
