//! What the model families have beside what Llama has: what of the metadata is understood, and what is refused.

use serde_json::{Value as Json, json};

use super::super::config::{GgufConfigError, GgufModel, RopeFactors, SpecialIds};
use super::super::container::{Array, Header, Value};
use super::super::split::{GgufFile, GgufFiles};
use super::{File, small_model, text};

/// Returns the small model with the keys of another family, four layers, and these keys.
fn of(family: &str, pairs: &[(&str, Value)]) -> File {
    let mut file = small_model();
    for (key, value) in &mut file.pairs {
        if let Some(rest) = key.strip_prefix("llama.") {
            *key = format!("{family}.{rest}");
        }
        match key.as_str() {
            "general.architecture" => *value = text(family),
            key if key.ends_with(".block_count") => *value = Value::U32(4),
            _ => {}
        }
    }
    for (key, value) in pairs {
        let key = format!("{family}.{key}");
        file.pairs.retain(|(other, _)| *other != key);
        file = file.pair(&key, value.clone());
    }
    file
}

fn read(file: &File, factors: &RopeFactors) -> Result<GgufModel, GgufConfigError> {
    let bytes = file.bytes();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let part = GgufFile { path: "m.gguf".into(), bytes: bytes.len() as u64, header };
    GgufModel::read(&GgufFiles::new(vec![part]).unwrap(), factors)
}

/// Returns config.json of a family's model with these keys.
fn config(family: &str, pairs: &[(&str, Value)]) -> Json {
    read(&of(family, pairs), &RopeFactors::default()).unwrap().config_json(&SpecialIds::default())
}

fn refused(family: &str, pairs: &[(&str, Value)]) -> String {
    read(&of(family, pairs), &RopeFactors::default()).expect_err("it is refused").to_string()
}

/// The keys of two experts.
fn experts() -> Vec<(&'static str, Value)> {
    ["expert_count", "expert_used_count", "expert_feed_forward_length"].map(|key| (key, Value::U32(2))).into()
}

const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";

/// Returns which layers of config.json have a window, as a string of S and F.
fn layers(config: &Json) -> String {
    let names = config["layer_types"].as_array().unwrap().iter();
    names.map(|name| if name == "sliding_attention" { 'S' } else { 'F' }).collect()
}

#[test]
fn windows_follow_the_families_pattern_or_the_files() {
    let window = (WINDOW, Value::U32(7));
    let six = ("block_count", Value::U32(6));
    for (family, expected) in [("gemma2", "SFSF"), ("gpt-oss", "SFSF"), ("gemma3", "SSSS"), ("olmo2", "SSSF")] {
        let experts = if family == "gpt-oss" { experts() } else { Vec::new() };
        let with = |more: &[(&str, Value)]| config(family, &[&experts, std::slice::from_ref(&window), more].concat());
        assert_eq!((layers(&with(&[])).as_str(), &with(&[])["sliding_window"]), (expected, &json!(7)), "{family}");
        assert_eq!(layers(&with(&[(PATTERN, Value::U32(3))])), "SSFS", "{family}");
        let flags = Array::Bool(vec![false, true, true, false]);
        assert_eq!(layers(&with(&[(PATTERN, Value::Array(flags))])), "FSSF", "{family}");
    }
    assert_eq!(layers(&config("gemma3", &[window.clone(), six])), "SSSSSF");
    // Without the key: a default, no window, and a missing key.
    assert_eq!(config("gemma2", &[])["sliding_window"], 4096);
    // Without the list, the family's default window would be used.
    assert!(config("gemma3", &[])["sliding_window"].is_null());
    assert_eq!(layers(&config("gemma3", &[])), "FFFF");
    assert_eq!(layers(&config("gemma2", &[(WINDOW, Value::U32(0))])), "FFFF");
    assert_eq!(config("olmo2", &[])["model_type"], "olmo2");
    assert_eq!(config("olmo2", std::slice::from_ref(&window))["model_type"], "olmo3");
    assert_eq!(config("phi3", std::slice::from_ref(&window))["sliding_window"], 7);
    assert!(config("phi3", &[(WINDOW, Value::U32(0))])["sliding_window"].is_null());
    assert_eq!(refused("gpt-oss", &experts()), "the metadata key gpt-oss.attention.sliding_window is missing");
    let short = Value::Array(Array::Bool(vec![true; 3]));
    assert_eq!(
        refused("gemma3", &[window.clone(), (PATTERN, short)]),
        "gemma3.attention.sliding_window_pattern is a list of 3, must be a list of at least 4 truth values"
    );
    for family in ["llama", "qwen3", "granite", "smollm3", "glm4", "mistral3", "qwen2"] {
        let error = refused(family, std::slice::from_ref(&window));
        let expected = "is 7, which is not supported (sliding-window attention)";
        assert_eq!(error, format!("{family}.attention.sliding_window {expected}"));
    }
}

#[test]
fn layers_with_a_window_have_their_own_rotary_embedding_or_the_others() {
    let window = (WINDOW, Value::U32(7));
    let base = ("rope.freq_base_swa", Value::F32(2000.0));
    let thetas = |config: &Json| {
        let rope = &config["rope_parameters"];
        ["full_attention", "sliding_attention"].map(|kind| rope[kind]["rope_theta"].as_f64())
    };
    assert_eq!(thetas(&config("gemma3", std::slice::from_ref(&window))), [Some(500_000.0), Some(10_000.0)]);
    assert_eq!(thetas(&config("gemma3", &[window.clone(), base.clone()])), [Some(500_000.0), Some(2000.0)]);
    assert_eq!(thetas(&config("olmo2", std::slice::from_ref(&window))), [Some(500_000.0); 2]);
    assert_eq!(config("gemma2", std::slice::from_ref(&window))["rope_parameters"]["rope_theta"], 500_000.0);
    let what = "(a rotary embedding of the layers with a window)";
    let error = refused("gemma2", &[window.clone(), base]);
    assert_eq!(error, format!("gemma2.rope.freq_base_swa is 2000, which is not supported {what}"));
    // Only the other layers' frequencies are scaled.
    let linear = [("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(8.0)), window];
    let rope = &config("gemma3", &linear)["rope_parameters"];
    assert_eq!(
        (&rope["full_attention"]["factor"], &rope["sliding_attention"]["rope_type"]),
        (&json!(8.0), &json!("default"))
    );
}

#[test]
fn gemmas_bounds_and_scale_are_those_of_the_released_models() {
    let gemma2 = config("gemma2", &[]);
    assert_eq!((&gemma2["attn_logit_softcapping"], &gemma2["final_logit_softcapping"]), (&json!(50.0), &json!(30.0)));
    let gemma3 = config("gemma3", &[("final_logit_softcapping", Value::F32(20.0))]);
    assert_eq!((&gemma3["attn_logit_softcapping"], &gemma3["final_logit_softcapping"]), (&Json::Null, &json!(20.0)));
    let off = config("gemma2", &[("attn_logit_softcapping", Value::F32(0.0))]);
    assert_eq!(off["attn_logit_softcapping"], Json::Null);
    let error = refused("gemma3", &[("attn_logit_softcapping", Value::F32(50.0))]);
    assert_eq!(error, "gemma3.attn_logit_softcapping is 50, which is not supported (softcapping)");
    let heads_of_6 = ("attention.key_length", Value::U32(6));
    let values_of_6 = ("attention.value_length", Value::U32(6));
    for (family, blocks, expected) in [("gemma2", 46, 4), ("gemma2", 62, 6), ("gemma3", 62, 4), ("gemma3", 46, 6)] {
        let blocks = ("block_count", Value::U32(blocks));
        let config = config(family, &[heads_of_6.clone(), values_of_6.clone(), blocks]);
        assert_eq!(config["query_pre_attn_scalar"], expected, "{family}");
    }
}

#[test]
fn the_factor_of_olmo_3s_frequencies_is_read() {
    let pairs = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(8.0)),
        ("rope.scaling.original_context_length", Value::U32(16)),
        ("rope.scaling.attn_factor", Value::F32(1.25)),
    ];
    assert_eq!(config("olmo2", &pairs)["rope_parameters"]["attention_factor"], 1.25);
    let error = refused("granite", &pairs);
    assert_eq!(error, "granite.rope.scaling.attn_factor is 1.25, which is not supported (a factor of attention)");
}

#[test]
fn granites_factors_are_translated_and_nobody_elses() {
    let factors = [
        ("attention.scale", "attention_multiplier", "a scale of attention"),
        ("embedding_scale", "embedding_multiplier", "a scale of the embedding"),
        ("residual_scale", "residual_multiplier", "a scale of the residual stream"),
        ("logit_scale", "logits_scaling", "a scale of the logits"),
    ];
    for (key, published, what) in factors {
        assert_eq!(config("granite", &[(key, Value::F32(0.5))])[published], 0.5);
        let error = refused("olmo2", &[(key, Value::F32(0.5))]);
        assert_eq!(error, format!("olmo2.{key} is 0.5, which is not supported ({what})"));
    }
    // 8 / 2 dimensions.
    assert_eq!(config("granite", &[])["attention_multiplier"], 0.5);
    let error = refused("granite", &[("rope.scaling.finetuned", Value::Bool(false))]);
    assert_eq!(error, "granite.rope.scaling.finetuned is false, which is not supported (no rotary embedding)");
    let error = refused("glm4", &[("rope.dimension_sections", Value::Array(Array::I32(vec![1, 1, 0, 0])))]);
    assert!(error.starts_with("glm4.rope.dimension_sections is"), "{error}");
}

#[test]
fn queries_grow_with_yarn_only() {
    let yarn = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(16.0)),
        ("rope.scaling.original_context_length", Value::U32(32)),
    ];
    let growth =
        [("attention.temperature_scale", Value::F32(0.25)), ("rope.scaling.yarn_log_multiplier", Value::F32(1.0))];
    let ministral = config("mistral3", &[&yarn[..], &growth].concat());
    assert_eq!(ministral["model_type"], "ministral3");
    let rope = &ministral["rope_parameters"];
    assert_eq!(
        (&rope["llama_4_scaling_beta"], &rope["mscale"], &rope["mscale_all_dim"]),
        (&json!(0.25), &json!(1.0), &json!(1.0))
    );
    let mistral = config("mistral3", &yarn);
    assert_eq!((&mistral["model_type"], &mistral["sliding_window"]), (&json!("mistral"), &Json::Null));
    assert!(mistral["rope_parameters"]["mscale"].is_null());
    assert_eq!(
        refused("mistral3", &growth[..1]),
        "mistral3.attention.temperature_scale is 0.25, which is not supported (a temperature of attention without YaRN)"
    );
    let what = "(a multiplier of YaRN's attention factor)";
    let error = refused("llama", &[&yarn[..], &growth[1..]].concat());
    assert_eq!(error, format!("llama.rope.scaling.yarn_log_multiplier is 1, which is not supported {what}"));
    // gpt-oss is the family whose ramp is not rounded.
    assert_eq!(config("mistral3", &yarn)["rope_parameters"]["truncate"], true);
    let gpt_oss = config("gpt-oss", &[&yarn[..], &experts(), &[(WINDOW, Value::U32(7))]].concat());
    assert_eq!((&gpt_oss["rope_parameters"]["truncate"], &gpt_oss["intermediate_size"]), (&json!(false), &json!(2)));
}

#[test]
fn phi_3s_divisors_are_checked() {
    use super::super::container::TensorType::F32;
    let file = of(
        "phi3",
        &[("rope.scaling.original_context_length", Value::U32(16)), ("rope.scaling.attn_factor", Value::F32(1.25))],
    );
    assert_eq!(config("phi3", &[])["rope_parameters"]["rope_type"], "default");
    // What belongs to the divisors is refused without them.
    let error = refused("phi3", &[("rope.scaling.attn_factor", Value::F32(1.25))]);
    assert_eq!(error, "phi3.rope.scaling.attn_factor is 1.25, which is not supported (a factor of attention)");
    assert!(refused("phi3", &[("rope.scaling.type", text("longrope"))]).starts_with("phi3.rope.scaling.type"));
    let file = file.tensor("rope_factors_long.weight", &[2], F32).tensor("rope_factors_short.weight", &[2], F32);
    let with = |short: &[f32], long: &[f32]| {
        let factors = RopeFactors { llama3: None, long: Some([short.to_vec(), long.to_vec()]) };
        read(&file, &factors).map(|model| model.config_json(&SpecialIds::default())["rope_parameters"].clone())
    };
    let rope = with(&[1.0, 1.5], &[2.0, 4.0]).unwrap();
    assert_eq!((&rope["short_factor"], &rope["long_factor"]), (&json!([1.0, 1.5]), &json!([2.0, 4.0])));
    assert_eq!((&rope["attention_factor"], &rope["original_max_position_embeddings"]), (&json!(1.25), &json!(16)));
    let rule = "must have 2 positive numbers and no other scaling beside it";
    for (short, long, has) in [
        (&[1.0][..], &[2.0, 4.0][..], "rope_factors_short.weight has 1 values"),
        (&[1.0, 1.5], &[2.0, 0.0], "rope_factors_long.weight has the value 0"),
        (&[1.0, f32::NAN], &[2.0, 4.0], "rope_factors_short.weight has the value NaN"),
    ] {
        assert_eq!(with(short, long).unwrap_err().to_string(), format!("tensor {has}, {rule}"));
    }
    let error = read(&file, &RopeFactors::default()).unwrap_err().to_string();
    assert_eq!(error, format!("tensor rope_factors_short.weight has no values, {rule}"));
}
