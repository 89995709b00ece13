//! Tests of the features of model families beyond Llama's: the metadata that is understood, and the metadata that is
//! refused.

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

/// Goal: EmbeddingGemma's files have the window of config.json, and say nothing of later tokens or say it by `causal`.
#[test]
fn embedding_gemma_is_gemma_3_whose_tokens_see_later_ones() {
    let window = (WINDOW, Value::U32(512));
    let json = config("gemma-embedding", &[window.clone(), ("attention.causal", Value::Bool(false))]);
    assert_eq!((&json["use_bidirectional_attention"], &json["sliding_window"]), (&json!(true), &json!(512)));
    assert_eq!((&json["architectures"], &json["model_type"]), (&json!(["Gemma3TextModel"]), &json!("gemma3_text")));
    assert_eq!((&json["dtype"], &json["query_pre_attn_scalar"]), (&json!("float32"), &json!(4)));
    let six = ("block_count", Value::U32(6));
    let json = config("gemma-embedding", &[window.clone(), six]);
    assert_eq!((layers(&json).as_str(), &json["use_bidirectional_attention"]), ("SSSSSF", &json!(true)));
    assert_eq!(config("gemma3", std::slice::from_ref(&window))["use_bidirectional_attention"], json!(false));
    let causal = refused("gemma-embedding", &[window.clone(), ("attention.causal", Value::Bool(true))]);
    assert_eq!(causal, "gemma-embedding.attention.causal is true, must be false");
    let other = refused("gemma3", &[window, ("attention.causal", Value::Bool(false))]);
    assert_eq!(other, "gemma3.attention.causal is false, which is not supported (attention to later tokens)");
    assert_eq!(refused("gemma-embedding", &[]), "the metadata key gemma-embedding.attention.sliding_window is missing");
}

/// Goal: experts are read in files of llama, where Mixtral has them, and refused in families that have none.
#[test]
fn experts_are_refused_where_a_family_has_none() {
    let json = config("llama", &experts());
    assert_eq!((&json["architectures"], &json["num_experts"]), (&json!(["MixtralForCausalLM"]), &json!(2)));
    assert_eq!(config("llama", &[])["architectures"], json!(["LlamaForCausalLM"]));
    let error = refused("qwen2", &[("expert_count", Value::U32(8))]);
    assert_eq!(error, "qwen2.expert_count is 8, which is not supported (experts in this architecture)");
}

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

/// The keys of Gemma 4: heads of 4 dimensions in the first two of four layers, of 8 in the others.
fn two_kinds() -> Vec<(&'static str, Value)> {
    let mut pairs = vec![(PATTERN, Value::Array(Array::Bool(vec![true, true, false, false])))];
    let sizes = [
        ("attention.key_length", 8),
        ("attention.value_length", 8),
        ("attention.key_length_swa", 4),
        ("attention.value_length_swa", 4),
        ("rope.dimension_count", 8),
        ("rope.dimension_count_swa", 4),
        (WINDOW, 7),
    ];
    pairs.extend(sizes.map(|(key, size)| (key, Value::U32(size))));
    pairs
}

/// The divisor of dimensions that are not rotated in Gemma 4's files.
const STILL: f32 = 1e30;

/// Returns config.json of Gemma 4 with these keys in place of the usual ones and these divisors, or why it is refused.
fn gemma4(more: &[(&'static str, Value)], divisors: &[f32], tensors: &[&str]) -> Result<Json, String> {
    use super::super::container::TensorType::F32;
    let mut pairs = two_kinds();
    pairs.retain(|(key, _)| !more.iter().any(|(other, _)| other == key));
    pairs.extend(more.iter().cloned());
    let mut file = of("gemma4", &pairs);
    for name in tensors {
        file = file.tensor(name, &[8, 4], F32);
    }
    let mut factors = RopeFactors::default();
    if !divisors.is_empty() {
        file = file.tensor("rope_freqs.weight", &[divisors.len() as u64], F32);
        factors.llama3 = Some(divisors.to_vec());
    }
    let model = read(&file, &factors).map_err(|error| error.to_string())?;
    Ok(model.config_json(&SpecialIds::default()))
}

#[test]
fn layers_that_see_all_tokens_have_heads_of_their_own() {
    let divisors = [1.0, STILL, STILL, STILL];
    let config = gemma4(&[], &divisors, &[]).unwrap();
    let expected = json!({
        "model_type": "gemma4_text",
        "head_dim": 4,
        "global_head_dim": 8,
        "num_key_value_heads": 1,
        // The file has no values in the layers that see all tokens.
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": true,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": false,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": false,
        "sliding_window": 7,
        "final_logit_softcapping": null,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 500_000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&config[key], value, "{key}");
    }
    assert_eq!(layers(&config), "SSFF");
    let with_values = gemma4(&[], &divisors, &["blk.2.attn_v.weight"]).unwrap();
    assert_eq!(
        (&with_values["attention_k_eq_v"], &with_values["num_global_key_value_heads"]),
        (&json!(false), &Json::Null)
    );
    let by_layer = |sizes: [u32; 4]| Value::Array(Array::U32(sizes.into()));
    let heads = gemma4(&[("attention.head_count_kv", by_layer([2, 2, 1, 1]))], &divisors, &[]).unwrap();
    assert_eq!((&heads["num_key_value_heads"], &heads["num_global_key_value_heads"]), (&json!(2), &json!(1)));
    let refused = |more: &[(&'static str, Value)], tensors: &[&str]| gemma4(more, &divisors, tensors).unwrap_err();
    assert_eq!(
        refused(&[("attention.head_count_kv", by_layer([2, 1, 1, 1]))], &[]),
        "gemma4.attention.head_count_kv is a list of 4, must be the same in all layers of a kind, not 2 and 1"
    );
    assert_eq!(
        refused(&[("attention.head_count_kv", by_layer([2, 2, 1, 1]))], &["blk.2.attn_v.weight"]),
        "gemma4.attention.head_count_kv is a list of 4, must be 2 in all layers, not 1 in some that have values of their own"
    );
    for (key, wrong, rule) in [
        ("attention.value_length", 4, "equal to the keys' (8)"),
        ("attention.value_length_swa", 8, "equal to the keys' (4)"),
        ("rope.dimension_count", 2, "equal to attention.key_length (8)"),
        ("rope.dimension_count_swa", 6, "an integer from 1 to 4"),
        (WINDOW, 0, "an integer from 1 to 1073741824"),
    ] {
        let error = refused(&[(key, Value::U32(wrong))], &[]);
        assert_eq!(error, format!("gemma4.{key} is {wrong}, must be {rule}"));
    }
    let what = "none and linear are where a part of each half of a head is rotated";
    assert_eq!(
        refused(&[("rope.scaling.type", text("yarn"))], &[]),
        format!("gemma4.rope.scaling.type is \"yarn\", which is not supported ({what})")
    );
    let linear = [("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(8.0))];
    assert_eq!(gemma4(&linear, &divisors, &[]).unwrap()["rope_parameters"]["full_attention"]["factor"], 8.0);
    for key in [PATTERN, WINDOW, "attention.key_length", "attention.key_length_swa"] {
        let mut file = of("gemma4", &two_kinds());
        file.pairs.retain(|(other, _)| *other != format!("gemma4.{key}"));
        let factors = RopeFactors { llama3: Some(divisors.to_vec()), long: None };
        let error = read(&file, &factors).unwrap_err().to_string();
        assert_eq!(error, format!("the metadata key gemma4.{key} is missing"));
    }
}

#[test]
fn divisors_say_which_dimensions_are_rotated() {
    let part = |divisors: &[f32]| {
        gemma4(&[], divisors, &[])
            .map(|config| config["rope_parameters"]["full_attention"]["partial_rotary_factor"].clone())
    };
    assert_eq!(part(&[1.0; 4]), Ok(json!(1.0)));
    assert_eq!(part(&[1.0, 1.0, STILL, STILL]), Ok(json!(0.5)));
    assert_eq!(part(&[]), Err("tensor rope_freqs.weight is missing".to_owned()));
    for (divisors, has) in [
        (&[1.0, STILL, STILL][..], "3 values"),
        (&[STILL; 4], "1000000000000000000000000000000 first"),
        (&[1.0, 2.0, STILL, STILL], "2 after 1 values of 1"),
        (&[1.0, STILL, 1.0, STILL], "1 after 1 values of 1"),
        (&[1.0, STILL, f32::NAN, STILL], "NaN after 1 values of 1"),
    ] {
        let rule = "must have 4 values, first some 1 and then 1e30 only";
        assert_eq!(part(divisors), Err(format!("tensor rope_freqs.weight has {has}, {rule}")));
    }
}

#[test]
fn layers_read_the_keys_of_others_and_may_be_wider() {
    let divisors = [1.0, STILL, STILL, STILL];
    let pattern = (PATTERN, Value::Array(Array::Bool(vec![true, false, true, false])));
    let shared = ("attention.shared_kv_layers", Value::U32(2));
    let widths = |sizes: [u32; 4]| ("feed_forward_length", Value::Array(Array::U32(sizes.into())));
    let with = |sizes: [u32; 4]| gemma4(&[pattern.clone(), shared.clone(), widths(sizes)], &divisors, &[]);
    let wide = with([4, 4, 8, 8]).unwrap();
    assert_eq!((&wide["num_kv_shared_layers"], &wide["use_double_wide_mlp"]), (&json!(2), &json!(true)));
    assert_eq!((&wide["intermediate_size"], &with([4; 4]).unwrap()["use_double_wide_mlp"]), (&json!(4), &json!(false)));
    for (sizes, has, layer) in [([4, 4, 8, 4], 4, 3), ([4, 4, 12, 12], 12, 2), ([4, 8, 8, 8], 8, 1)] {
        let rule = format!("4 in all layers, or twice that from layer 2 on, not {has} in layer {layer}");
        let expected = format!("gemma4.feed_forward_length is a list of 4, must be {rule}");
        assert_eq!(with(sizes).unwrap_err(), expected);
    }
    let short = ("feed_forward_length", Value::Array(Array::U32(vec![4; 3])));
    let error = gemma4(&[pattern.clone(), shared, short], &divisors, &[]).unwrap_err();
    assert!(error.ends_with("must be a list of at least 4 integers from 1 to 1073741824"), "{error}");
    let all = ("attention.shared_kv_layers", Value::U32(4));
    let error = gemma4(&[pattern, all], &divisors, &[]).unwrap_err();
    assert_eq!(error, "gemma4.attention.shared_kv_layers is 4, must be an integer from 0 to 3");
    let inputs = ("embedding_length_per_layer_input", Value::U32(2));
    let error = gemma4(std::slice::from_ref(&inputs), &divisors, &[]).unwrap_err();
    assert_eq!(error, "tensor per_layer_token_embd.weight is missing");
    let config = gemma4(&[inputs], &divisors, &["per_layer_token_embd.weight"]).unwrap();
    assert_eq!((&config["hidden_size_per_layer_input"], &config["vocab_size_per_layer_input"]), (&json!(2), &json!(4)));
}

/// The keys of DeepSeek's family: two experts after one dense layer.
fn deepseek() -> Vec<(&'static str, Value)> {
    let sizes = [
        ("attention.kv_lora_rank", 16),
        ("attention.q_lora_rank", 8),
        ("attention.key_length", 20),
        ("attention.value_length", 16),
        ("attention.key_length_mla", 12),
        ("attention.value_length_mla", 6),
        ("rope.dimension_count", 4),
        ("leading_dense_block_count", 1),
        ("expert_shared_count", 3),
    ];
    let mut pairs = experts();
    pairs.extend(sizes.map(|(key, size)| (key, Value::U32(size))));
    pairs
}

/// Returns the model's file with these keys in place of the usual ones. Its queries are projected in two steps, and it has
/// these tensors too.
fn deepseek_file(more: &[(&'static str, Value)], tensors: &[&str]) -> File {
    let mut pairs = deepseek();
    pairs.retain(|(key, _)| !more.iter().any(|(other, _)| other == key));
    pairs.extend(more.iter().cloned());
    let mut file = of("deepseek2", &pairs);
    file.tensors.retain(|tensor| tensor.name != "blk.0.attn_q.weight");
    for name in tensors {
        file = file.tensor(name, &[2], super::super::container::TensorType::F32);
    }
    file
}

#[test]
fn latent_attention_has_its_dimensions_in_both_spellings() {
    let read_json = |more: &[(&'static str, Value)], tensors: &[&str]| {
        let model = read(&deepseek_file(more, tensors), &RopeFactors::default()).map_err(|error| error.to_string())?;
        Ok::<Json, String>(model.config_json(&SpecialIds::default()))
    };
    let dimensions = |config: &Json| {
        ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
            .map(|key| config[key].as_u64())
    };
    let expected = [Some(8), Some(16), Some(8), Some(4), Some(6)];
    assert_eq!(dimensions(&read_json(&[], &[]).unwrap()), expected);
    // Older files keep the projection of keys and values in one tensor.
    let mut file = deepseek_file(
        &[
            ("attention.key_length", Value::U32(12)),
            ("attention.value_length", Value::U32(6)),
            ("attention.head_count_kv", Value::U32(2)),
        ],
        &[],
    );
    file.pairs.retain(|(key, _)| !key.ends_with("_mla"));
    let old = read(&file, &RopeFactors::default()).unwrap().config_json(&SpecialIds::default());
    assert_eq!(dimensions(&old), expected);
    // The tensors decide, because some files state a rank that is not used.
    let at_once = read_json(&[], &["blk.0.attn_q.weight"]).unwrap();
    assert_eq!(dimensions(&at_once), [None, Some(16), Some(8), Some(4), Some(6)]);
    for (key, wrong, rule) in [
        ("attention.key_length", 24, "that of kv_lora_rank with the rotated dimensions (20)"),
        ("attention.value_length", 20, "that of kv_lora_rank (16)"),
        ("attention.key_length_mla", 4, "more than the rotated dimensions (rope.dimension_count, 4)"),
        ("attention.head_count_kv", 2, "1 where attention is latent"),
        ("leading_dense_block_count", 4, "less than the number of layers (4)"),
    ] {
        let error = read_json(&[(key, Value::U32(wrong))], &[]).unwrap_err();
        assert_eq!(error, format!("deepseek2.{key} is {wrong}, must be {rule}"));
    }
    for key in ["attention.kv_lora_rank", "attention.q_lora_rank", "attention.value_length_mla", "expert_count"] {
        let mut file = deepseek_file(&[], &[]);
        file.pairs.retain(|(other, _)| *other != format!("deepseek2.{key}"));
        let error = read(&file, &RopeFactors::default()).unwrap_err().to_string();
        assert_eq!(error, format!("the metadata key deepseek2.{key} is missing"));
    }
}

#[test]
fn experts_are_chosen_as_the_file_says() {
    const BIAS: &str = "blk.1.exp_probs_b.bias";
    let read_json = |more: &[(&'static str, Value)], tensors: &[&str]| {
        let model = read(&deepseek_file(more, tensors), &RopeFactors::default()).map_err(|error| error.to_string())?;
        Ok::<Json, String>(model.config_json(&SpecialIds::default()))
    };
    let scores = |n: u32| ("expert_gating_func", Value::U32(n));
    let model_type = |config: Result<Json, String>| config.unwrap()["model_type"].as_str().unwrap().to_owned();
    // Files of GLM-4.7-Flash do not name the scores.
    assert_eq!(model_type(read_json(&[], &[BIAS])), "deepseek_v3");
    assert_eq!(model_type(read_json(&[scores(2)], &[BIAS])), "deepseek_v3");
    assert_eq!(model_type(read_json(&[], &[])), "deepseek_v2");
    assert_eq!(model_type(read_json(&[scores(1)], &[])), "deepseek_v2");
    let error = read_json(&[scores(1)], &[BIAS]).unwrap_err();
    assert_eq!(error, "deepseek2.expert_gating_func is 1, which is not supported (softmax scores with a bias)");
    let error = read_json(&[scores(4)], &[]).unwrap_err();
    assert_eq!(error, "deepseek2.expert_gating_func is 4, which is not supported (scores of this kind)");
    let sum = [("expert_weights_norm", Value::Bool(true))];
    let error = read_json(&sum, &[]).unwrap_err();
    let what = "softmax scores of groups with a sum of 1";
    assert_eq!(error, format!("deepseek2.expert_weights_norm is true, which is not supported ({what})"));
    assert_eq!(read_json(&sum, &[BIAS]).unwrap()["norm_topk_prob"], true);

    let more = [
        ("expert_group_count", Value::U32(2)),
        ("expert_group_used_count", Value::U32(1)),
        ("expert_weights_scale", Value::F32(2.5)),
    ];
    let config = read_json(&more, &[]).unwrap();
    let expected = json!({
        "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 2, "n_shared_experts": 3,
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.5, "norm_topk_prob": false,
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&config[key], value, "{key}");
    }
    let plain = read_json(&[], &[]).unwrap();
    assert_eq!((&plain["topk_method"], &plain["routed_scaling_factor"]), (&json!("greedy"), &json!(1.0)));
    // Other families have neither groups nor dense layers before the first with experts.
    let moe = [experts(), vec![("leading_dense_block_count", Value::U32(1))]].concat();
    assert_eq!(
        refused("qwen3moe", &moe),
        "qwen3moe.leading_dense_block_count is 1, which is not supported (leading dense layers)"
    );
    // GLM-4.5's scores are never softmax.
    let glm = [experts(), vec![("rope.dimension_count", Value::U32(2))]].concat();
    assert_eq!(config_of_glm(&glm), json!(["glm4_moe", 0.5, false]));
    let error = refused("glm4moe", &[&glm[..], &[scores(1)]].concat());
    assert_eq!(error, "glm4moe.expert_gating_func is 1, which is not supported (scores of this kind)");
}

/// Returns the model type, the rotated part and whether there are norms of heads.
fn config_of_glm(pairs: &[(&str, Value)]) -> Json {
    let config = config("glm4moe", pairs);
    json!([config["model_type"], config["rope_parameters"]["partial_rotary_factor"], config["use_qk_norm"]])
}

#[test]
fn deepseeks_multiplier_is_a_tenth_of_the_coefficient() {
    let yarn = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(40.0)),
        ("rope.scaling.original_context_length", Value::U32(16)),
        ("rope.scaling.yarn_log_multiplier", Value::F64(0.0707)),
    ];
    let model = read(&deepseek_file(&yarn, &[]), &RopeFactors::default()).unwrap();
    let rope = &model.config_json(&SpecialIds::default())["rope_parameters"];
    for key in ["mscale", "mscale_all_dim"] {
        assert!((rope[key].as_f64().unwrap() - 0.707).abs() < 1e-9, "{key}: {}", rope[key]);
    }
    // Without the multiplier, llama.cpp scales scores by another factor than transformers.
    let refused = |pairs: &[(&'static str, Value)]| {
        read(&deepseek_file(pairs, &[]), &RopeFactors::default()).unwrap_err().to_string()
    };
    let key = "rope.scaling.yarn_log_multiplier";
    assert_eq!(refused(&yarn[..3]), format!("the metadata key deepseek2.{key} is missing"));
    let off = [&yarn[..3], &[(key, Value::F64(0.0))]].concat();
    assert_eq!(refused(&off), format!("deepseek2.{key} is 0, must be a number above 0"));
}

/// Returns the small model as one of Nemotron-H's family, of a state space, an MLP, attention and an MLP, with these keys in
/// place of the usual ones.
fn nemotron(family: &str, more: &[(&'static str, Value)]) -> File {
    let list = |sizes: [u32; 4]| Value::Array(Array::U32(sizes.into()));
    let mut pairs = vec![
        ("attention.head_count_kv", list([0, 0, 1, 0])),
        ("feed_forward_length", list([0, 24, 0, 24])),
        ("rope.scaling.finetuned", Value::Bool(false)),
    ];
    let sizes = [
        ("attention.key_length", 6),
        ("attention.value_length", 6),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.inner_size", 24),
        ("ssm.time_step_rank", 4),
    ];
    pairs.extend(sizes.map(|(key, size)| (key, Value::U32(size))));
    if family == "nemotron_h_moe" {
        let sizes = [
            ("expert_count", 8),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 24),
            ("expert_shared_feed_forward_length", 40),
            ("expert_shared_count", 1),
        ];
        pairs.extend(sizes.map(|(key, size)| (key, Value::U32(size))));
        pairs.extend([("expert_weights_norm", Value::Bool(true)), ("expert_weights_scale", Value::F32(2.5))]);
    }
    pairs.retain(|(key, _)| !more.iter().any(|(other, _)| other == key));
    pairs.extend(more.iter().cloned());
    of(family, &pairs)
}

fn nemotron_json(family: &str, more: &[(&'static str, Value)]) -> Result<Json, String> {
    let model = read(&nemotron(family, more), &RopeFactors::default()).map_err(|error| error.to_string())?;
    Ok(model.config_json(&SpecialIds::default()))
}

#[test]
fn layers_of_one_block_are_what_the_lists_say() {
    let dense = nemotron_json("nemotron_h", &[]).unwrap();
    let expected = json!({
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mlp_hidden_act": "relu2",
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 24,
        "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
        "use_conv_bias": false, "attention_bias": false, "mlp_bias": false, "layer_types": null, "n_routed_experts": null,
        "position_embedding_type": null, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&dense[key], value, "{key}");
    }
    let moe = nemotron_json("nemotron_h_moe", &[]).unwrap();
    let expected = json!({
        "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "moe"], "intermediate_size": null,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "n_group": 1,
        "topk_group": 1,
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&moe[key], value, "{key}");
    }
    // A number counts for all layers.
    let kinds =
        |more: &[(&'static str, Value)]| nemotron_json("nemotron_h", more).unwrap()["layers_block_type"].clone();
    let none = ("feed_forward_length", Value::U32(0));
    assert_eq!(kinds(std::slice::from_ref(&none)), json!(["mamba", "mamba", "attention", "mamba"]));
    assert_eq!(kinds(&[none, ("attention.head_count_kv", Value::U32(1))]), json!(vec!["attention"; 4]));
    // The entry of a block behind the layers, which has both, is not a layer's.
    let five = |sizes: [u32; 5]| Value::Array(Array::U32(sizes.into()));
    let mtp = [
        ("block_count", Value::U32(5)),
        ("nextn_predict_layers", Value::U32(1)),
        ("attention.head_count_kv", five([0, 0, 1, 0, 1])),
        ("feed_forward_length", five([0, 24, 0, 24, 24])),
    ];
    let mtp = nemotron_json("nemotron_h_moe", &mtp).unwrap();
    assert_eq!(mtp["layers_block_type"], moe["layers_block_type"]);
    // Keys of a rotary embedding say nothing.
    let rope = [
        ("rope.dimension_count", Value::U32(20)),
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.finetuned", Value::Bool(true)),
    ];
    assert_eq!(nemotron_json("nemotron_h", &rope).unwrap(), dense);
    // Without the key, tensors say how wide experts are: the list may count those of a token together.
    let mut file = nemotron("nemotron_h_moe", &[]);
    file.pairs.retain(|(key, _)| !key.ends_with("expert_feed_forward_length"));
    let file = file.tensor("blk.1.ffn_down_exps.weight", &[32, 8, 8], super::super::container::TensorType::F32);
    let json = read(&file, &RopeFactors::default()).unwrap().config_json(&SpecialIds::default());
    assert_eq!(json["moe_intermediate_size"], 32);
}

#[test]
fn metadata_of_layers_of_one_block_are_checked() {
    for (family, key) in [
        ("nemotron_h", "attention.head_count_kv"),
        ("nemotron_h", "feed_forward_length"),
        ("nemotron_h", "ssm.group_count"),
        ("nemotron_h", "ssm.time_step_rank"),
        ("nemotron_h", "attention.layer_norm_rms_epsilon"),
        ("nemotron_h_moe", "expert_count"),
        ("nemotron_h_moe", "expert_used_count"),
        ("nemotron_h_moe", "expert_feed_forward_length"),
    ] {
        let mut file = nemotron(family, &[]);
        file.pairs.retain(|(other, _)| *other != format!("{family}.{key}"));
        let error = read(&file, &RopeFactors::default()).unwrap_err().to_string();
        assert_eq!(error, format!("the metadata key {family}.{key} is missing"));
    }
    let list = |sizes: &[u32]| Value::Array(Array::U32(sizes.into()));
    for (key, value, rule) in [
        ("attention.head_count_kv", list(&[0, 0, 1]), "a list of at least 4 integers from 0 to 1073741824"),
        ("attention.head_count_kv", list(&[2, 0, 1, 0]), "the same in all layers"),
        ("attention.head_count_kv", list(&[0; 4]), "a list with a number"),
        ("feed_forward_length", list(&[0, 24, 0]), "a list of at least 4 integers from 0 to 1073741824"),
        ("feed_forward_length", text("24"), "an integer from 0 to 1073741824"),
        ("feed_forward_length", list(&[0, 24, 0, 40]), "24 in all layers that are MLPs, not 40 in layer 3"),
        ("attention.value_length", Value::U32(8), "equal to the keys' (6)"),
        ("ssm.time_step_rank", Value::U32(3), "a multiple of ssm.group_count (2)"),
        ("ssm.inner_size", Value::U32(26), "a multiple of ssm.time_step_rank (4)"),
    ] {
        let error = nemotron_json("nemotron_h", &[(key, value.clone())]).unwrap_err();
        assert_eq!(error, format!("nemotron_h.{key} is {value}, must be {rule}"));
    }
    // Epsilons of both keys are the same, or one of them is there.
    let (first, second) = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon");
    let error = nemotron_json("nemotron_h", &[(second, Value::F32(0.5))]).unwrap_err();
    assert_eq!(error, format!("nemotron_h.{first} is 0.000001, must be equal to {second} (0.5)"));
    let mut file = nemotron("nemotron_h", &[(second, Value::F32(0.5))]);
    file.pairs.retain(|(key, _)| !key.ends_with(first));
    let json = read(&file, &RopeFactors::default()).unwrap().config_json(&SpecialIds::default());
    assert_eq!((&json["layer_norm_epsilon"], &json["rms_norm_eps"]), (&json!(0.5), &json!(0.5)));
    for (key, value, what) in [
        ("moe_latent_size", Value::U32(16), "experts of a latent vector"),
        ("expert_gating_func", Value::U32(1), "scores of this kind"),
        ("attention.scale", Value::F32(0.5), "a scale of attention"),
        ("leading_dense_block_count", Value::U32(1), "leading dense layers"),
    ] {
        let error = nemotron_json("nemotron_h_moe", &[(key, value.clone())]).unwrap_err();
        assert_eq!(error, format!("nemotron_h_moe.{key} is {value}, which is not supported ({what})"));
    }
    assert!(nemotron_json("nemotron_h_moe", &[("expert_gating_func", Value::U32(2))]).is_ok());
    // Models whose experts differ by layer have lists.
    let widths = list(&[0, 24, 0, 40]);
    let error = nemotron_json("nemotron_h_moe", &[("expert_feed_forward_length", widths)]).unwrap_err();
    assert_eq!(error, "nemotron_h_moe.expert_feed_forward_length is a list of 4, must be the same in all layers");
    let chosen = list(&[0, 3, 0, 2]);
    let error = nemotron_json("nemotron_h_moe", &[("expert_used_count", chosen)]).unwrap_err();
    assert_eq!(error, "nemotron_h_moe.expert_used_count is a list of 4, must be an integer from 1 to 4096");
    let error = nemotron_json("nemotron_h", &[("expert_count", Value::U32(8))]).unwrap_err();
    assert_eq!(error, "nemotron_h.expert_count is 8, which is not supported (experts in this architecture)");
}
