//! Goal: a model from a GGUF file gives the same tokens as the same weights from a Hugging Face checkpoint. Method: the
//! demo model and random models of several architectures are written as GGUF files. A file of unchanged weights must
//! give the checkpoint's tokens; a quantised file those of a checkpoint that holds the file's values in f32, with logits
//! whose mean Kullback-Leibler divergence is at most that of the rounding of scales to f16. The tokens of the demo model
//! from an unchanged file are also those that transformers draws (`transformers.rs`).

use crate::common::{Driver, Vulkan};
use crate::harness::every_case;
use crate::harness::models::{Lines, expected, generate, request};
use ostinato::config::{Config, KvFormat, Model, Quantize};
use ostinato::engine::request::Request;
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::checkpoint::Checkpoint;
use ostinato::model::gguf;
use ostinato::model::gguf::container::TensorType;
use ostinato::model::gguf::write::{FileType, convert};
use ostinato::model::synth::{self, SynthOptions};
use ostinato::quant::store::StoredType;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The mean divergence that products in f32 may have: of a model whose weights were trained, and of random ones, whose
/// logits follow small changes of their activations. It comes from the scales of K-quants, which are products of two
/// numbers and are rounded to f16: types with one f16 scale stay below 1e-12.
pub const DIVERGENCE: f64 = 1e-6;
const RANDOM_DIVERGENCE: f64 = 1e-4;
const EXACT_DIVERGENCE: f64 = 1e-10;
/// The mean divergence of integers with zeros: a minimum, scale × zero, has up to 19 significant bits and is stored in 11,
/// so that all weights of a group are off by up to half a 500th of a step.
const OFF_BY_MINIMUMS: f64 = 1e-5;
/// The mean divergence of NF4, whose numbers are stored as integers.
const OFF_BY_CODES: f64 = 1e-3;
/// The mean divergence of codes that are expanded to f16.
const EXPANDED_DIVERGENCE: f64 = 1e-6;
/// The mean divergence of codes that are expanded to bfloat16.
const EXPANDED_TO_BFLOATS: f64 = 1e-5;

fn configured(vulkan: &Vulkan, path: &Path, quantize: Option<Quantize>, tune: &[&str]) -> Config {
    let mut model = Model::new("quantised", path, Some(vulkan.adapter(Driver::Lavapipe).selector()));
    model.kv_format = Some(KvFormat::F32);
    model.context = Some(512);
    model.quantize = quantize;
    let mut config = Config { models: vec![model], ..Config::default() };
    config.runtime.tune = tune.iter().map(|change| (*change).to_owned()).collect();
    config
}

pub fn start(vulkan: &Vulkan, path: &Path, quantize: Option<Quantize>, tune: &[&str]) -> Host {
    let config = configured(vulkan, path, quantize, tune);
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()))
}

/// Returns the greedy tokens and the logits that they are drawn from.
pub fn draw(host: &Host, prompt: &[u32], count: u32) -> (Vec<u32>, Vec<Vec<f32>>) {
    let replica = host.replicas().next().expect("one model");
    let drawn = generate(&replica, Request { dump_logits: true, ..request(prompt, count) });
    let logits = drawn.drawn.into_iter().map(|token| token.logits.expect("logits were asked for")).collect();
    (drawn.tokens, logits)
}

/// Returns the mean Kullback-Leibler divergence of rows of logits from the wanted ones.
pub fn divergence(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f64 {
    let logs = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().fold(f64::MIN, |top, x| top.max(f64::from(*x)));
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - top).exp()).sum();
        row.iter().map(|x| f64::from(*x) - top - sum.ln()).collect()
    };
    let of = |(found, wanted): (&Vec<f32>, &Vec<f32>)| -> f64 {
        logs(wanted).iter().zip(logs(found)).map(|(w, f)| w.exp() * (w - f)).sum()
    };
    found.iter().zip(wanted).map(of).sum::<f64>() / found.len() as f64
}

/// Writes the checkpoint whose f32 weights are the values of a GGUF file.
pub fn restore(file: &Path, folder: &Path) {
    let (model, _) = gguf::open(file).expect("a model");
    for (name, bytes) in &model.files {
        std::fs::write(folder.join(name), bytes).expect("written");
    }
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, source) in &model.sources {
        let part = &model.parts.files[source.at.file];
        let info = model.parts.at(source.at);
        let mut bytes = vec![0; info.bytes as usize];
        let opened = std::fs::File::open(&part.path).expect("the file");
        opened.read_exact_at(&mut bytes, info.offset).expect("its bytes");
        let values: Vec<f32> = match info.kind {
            TensorType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            TensorType::BF16 => {
                bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            TensorType::F16 => bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            TensorType::Blocks(blocks) => {
                let mut values = vec![0.0; bytes.len() / blocks.bytes() * blocks.elements()];
                blocks.dequantize(&bytes, &mut values);
                values
            }
        };
        let values = source.restore(&values).into_iter().flat_map(f32::to_le_bytes).collect();
        tensors.insert(name.clone(), (source.shape.iter().map(|n| *n as usize).collect(), values));
    }
    let views = tensors.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor"))
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).expect("written");
}

/// Checks a file of each type of a checkpoint; of the type `fragments` also in fragment order, and by integer dot products.
fn check(checkpoint: &Path, prompt: &[u32], types: &[&str], fragments: Option<&str>) {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.gguf");
    for name in types {
        convert(checkpoint, &file, FileType::from_name(name).expect("a type"), 2).expect("converted");
        let restored = tempfile::tempdir().expect("a folder");
        restore(&file, restored.path());
        let (wanted, wanted_logits) = draw(&start(&vulkan, restored.path(), None, &[]), prompt, 24);
        let (found, logits) = draw(&start(&vulkan, &file, None, &[]), prompt, 24);
        let apart = divergence(&logits, &wanted_logits);
        println!("{} {name}: divergence {apart:.1e}", checkpoint.display());
        let most = match *name {
            "Q8_0" | "Q4_0" | "Q4_1" | "Q5_0" | "Q5_1" | "MXFP4" => EXACT_DIVERGENCE,
            _ if prompt == RANDOM_PROMPT => RANDOM_DIVERGENCE,
            _ => DIVERGENCE,
        };
        assert_eq!(found, wanted, "{} as {name}", checkpoint.display());
        assert!(apart <= most, "{} as {name}: {apart:e}", checkpoint.display());
        if fragments != Some(name) {
            continue;
        }
        // Without matrix units: products in f16 and bfloat16.
        let (_, logits) = draw(&start(&vulkan, &file, None, &["fragments=1"]), prompt, 8);
        let apart = divergence(&logits[..1], &wanted_logits[..1]);
        println!("{} {name} in fragments: divergence {apart:.1e}", checkpoint.display());
        assert!(apart <= 1e-3, "{} as {name} in fragments: {apart:e}", checkpoint.display());
        let (found, logits) = draw(&start(&vulkan, &file, None, &["integer_dots=1"]), prompt, 8);
        let apart = divergence(&logits, &wanted_logits[..8]);
        println!("{} {name} by integer dot products: divergence {apart:.1e}", checkpoint.display());
        assert_eq!(found, wanted[..8], "{} as {name} by integer dot products", checkpoint.display());
        assert!(apart <= most, "{} as {name} by integer dot products: {apart:e}", checkpoint.display());
    }
}

#[test]
fn the_demo_model_tells_its_story_from_a_gguf_file() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("demo.gguf");
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    convert(demo, &file, FileType::from_name("BF16").expect("a type"), 2).expect("converted");
    let expected = expected("demo");
    let host = start(&vulkan, &file, None, &[]);
    let replica = host.replicas().next().expect("one model");
    let drawn = generate(&replica, request(&expected.prompt, expected.greedy.len() as u32));
    assert_eq!(drawn.tokens, expected.greedy);
    let text = host.models().iter().next().and_then(|model| model.text.clone()).expect("a tokenizer");
    assert!(text.has_chat(), "the chat template is in the file");
}

/// Goal: models in float16 draw from weights in fragments what they draw from weights row after row, and what transformers draws.
/// Method: the demo model in a GGUF file of F16, and a checkpoint in float16. A prompt's rows are rounded to bfloat16, or with
/// `half_rows=1` to f16, whose error is an eighth of that.
#[test]
fn models_in_float16_draw_the_same_from_fragments() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("demo.gguf");
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    convert(demo, &file, FileType::from_name("F16").expect("a type"), 2).expect("converted");
    for (name, path) in [("demo", file), ("qwen3-f16", crate::harness::models::fixture("qwen3-f16"))] {
        let known = expected(name);
        let (wanted, wanted_logits) = draw(&start(&vulkan, &path, None, &["fragments=0"]), &known.prompt, 8);
        assert_eq!(wanted, known.greedy[..8], "{name} row after row");
        for (tune, most) in [(&["fragments=1"][..], 1e-4), (&["fragments=1", "half_rows=1"], 2e-6)] {
            let (found, logits) = draw(&start(&vulkan, &path, None, tune), &known.prompt, 8);
            let apart = divergence(&logits, &wanted_logits);
            println!("{name} with {tune:?}: divergence {apart:.1e}");
            assert_eq!(found, wanted, "{name} with {tune:?}");
            assert!(apart <= most, "{name} with {tune:?}: {apart:e}");
        }
    }
}

#[test]
fn the_demo_model_in_the_common_types() {
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    // Models of random weights have the others too (`hybrids_whose_key_heads_take_turns`).
    let types = ["Q3_K_M", "Q4_K_M", "Q5_K_M", "Q8_0"];
    let types = if every_case() { &types[..] } else { &types[..2] };
    check(demo, &expected("demo").prompt, types, Some("Q4_K_M"));
}

/// Writes a checkpoint of random weights with a fixture's configuration, changed by `changes`, of rows of whole blocks of
/// 256 and two layers unless it is a hybrid. Returns its folder.
pub fn random_model(folder: &Path, fixture: &str, changes: &[(&str, u32)]) -> PathBuf {
    let config = std::fs::read_to_string(crate::harness::models::fixture(fixture).join("config.json")).expect("config");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    let usual = [("hidden_size", 256), ("intermediate_size", 512), ("moe_intermediate_size", 256)];
    // Multimodal models have the text model's configuration in an object of its own.
    let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    for (key, value) in usual.iter().chain(changes) {
        if text.get(key).is_some() {
            text[key] = (*value).into();
        }
    }
    if text.get("linear_num_key_heads").is_none() {
        text["num_hidden_layers"] = 2.into();
    }
    let out = folder.join(fixture);
    synth::write(&config.to_string(), &out, &SynthOptions::default(), &mut |_, _| {}).expect("written");
    out
}

pub const RANDOM_PROMPT: [u32; 6] = [1, 5, 9, 2, 7, 3];

#[test]
fn random_models_of_several_architectures() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, types) in [("llama-plain", ["Q4_0", "Q6_K"]), ("qwen3-deep", ["Q4_1", "IQ4_XS"])] {
        check(&random_model(folder.path(), name, &[]), &RANDOM_PROMPT, &types, None);
    }
}

/// The fixtures of quantised safetensors, and of GGUF files of types that are not written here (`make_quantised.py`).
fn check_fixture(name: &str, limit: f64) {
    let vulkan = Vulkan::shared();
    let name = format!("quantised/{name}");
    let (mut path, expected) = (crate::harness::models::fixture(&name), expected(&name));
    if path.join("model.gguf").is_file() {
        path.push("model.gguf");
    }
    let host = start(&vulkan, &path, None, &[]);
    let (found, logits) = draw(&host, &expected.prompt, expected.greedy.len() as u32);
    let steps = expected.logits.iter();
    let (found_rows, wanted): (Vec<_>, Vec<_>) = steps.map(|(step, row)| (logits[*step].clone(), row.clone())).unzip();
    let apart = divergence(&found_rows, &wanted);
    println!("{name}: divergence {apart:.1e}");
    assert_eq!(found, expected.greedy, "{name}");
    assert!(apart <= limit, "{name}: {apart:e}");
    drop(host);
    // Fragments without matrix units: products in f16 and bfloat16. CPU drivers take a minute to compile them, and
    // `kernels::codes` tests them for every format, so one model stands for all, and one for those with act-order.
    if !["quantised/awq", "quantised/gptq-order"].contains(&name.as_str()) {
        return;
    }
    let (_, logits) = draw(&start(&vulkan, &path, None, &["fragments=1"]), &expected.prompt, 2);
    let apart = divergence(&logits, &wanted[..2]);
    println!("{name} in fragments: divergence {apart:.1e}");
    assert!(apart <= 1e-3, "{name} in fragments: {apart:e}");
}

#[test]
fn compressed_tensors_of_all_formats() {
    check_fixture("ct-mixed", OFF_BY_MINIMUMS);
}

#[test]
fn gptq_of_four_bits_with_rules() {
    check_fixture("gptq-4", OFF_BY_MINIMUMS);
}

#[test]
fn gptq_of_eight_bits_version_2() {
    check_fixture("gptq-8", EXACT_DIVERGENCE);
}

#[test]
fn gptq_of_three_bits() {
    check_fixture("gptq-3", EXACT_DIVERGENCE);
}

#[test]
fn gptq_with_act_order() {
    check_fixture("gptq-order", EXACT_DIVERGENCE);
}

/// Of q, k and v each is multiplied with its own order of inputs. Of gate and up, whose rows alternate, numbers are
/// packed.
#[test]
fn gptq_with_an_order_for_each_module() {
    check_fixture("gptq-orders", OFF_BY_MINIMUMS);
}

/// The experts' codes are expanded to f16.
#[test]
fn gptq_with_act_order_of_experts() {
    check_fixture("gptq-order-moe", EXPANDED_DIVERGENCE);
}

#[test]
fn compressed_tensors_with_act_order() {
    check_fixture("ct-order", EXACT_DIVERGENCE);
}

#[test]
fn awq() {
    check_fixture("awq", OFF_BY_MINIMUMS);
}

#[test]
fn fp8_blocks_of_a_hybrid() {
    check_fixture("fp8-hybrid", DIVERGENCE);
}

#[test]
fn fp8_blocks_of_fused_experts() {
    check_fixture("fp8-experts", DIVERGENCE);
}

#[test]
fn mxfp4_experts_as_gpt_oss_has_them() {
    check_fixture("gpt-oss-mxfp4", EXACT_DIVERGENCE);
}

#[test]
fn transposed_experts_as_gpt_oss_has_them() {
    check_fixture("gpt-oss-bf16", EXACT_DIVERGENCE);
}

/// The shared expert is expanded to the other experts' bfloat16.
#[test]
fn a_quantised_shared_expert_beside_experts_of_numbers() {
    check_fixture("fp8-shared", EXPANDED_TO_BFLOATS);
}

/// NF4 is stored in 8 bits, whose mean error is a 19th of NF4's own.
#[test]
fn nf4_of_bitsandbytes_with_quantised_scales() {
    check_fixture("bnb-nf4", OFF_BY_CODES);
}

#[test]
fn fp4_of_bitsandbytes() {
    check_fixture("bnb-fp4", EXACT_DIVERGENCE);
}

#[test]
fn eight_bits_of_bitsandbytes() {
    check_fixture("bnb-int8", EXACT_DIVERGENCE);
}

#[test]
fn nvfp4_in_a_gguf_file() {
    check_fixture("gguf-nvfp4", EXACT_DIVERGENCE);
}

#[test]
fn auto_round_in_tensors_of_gptq() {
    check_fixture("auto-round-gptq", OFF_BY_MINIMUMS);
}

#[test]
fn auto_round_in_tensors_of_awq() {
    check_fixture("auto-round-awq", OFF_BY_MINIMUMS);
}

#[test]
fn mixed_precision_of_modelopt() {
    check_fixture("modelopt-mixed", EXACT_DIVERGENCE);
}

#[test]
fn mxfp4_and_fp8_of_quark() {
    check_fixture("quark-mixed", EXACT_DIVERGENCE);
}

#[test]
fn nvfp4_experts_of_modelopt() {
    check_fixture("modelopt-moe", EXACT_DIVERGENCE);
}

#[test]
fn mixtures_of_experts_in_mixed_types() {
    let folder = tempfile::tempdir().expect("a folder");
    check(&random_model(folder.path(), "moe-top2", &[]), &RANDOM_PROMPT, &["Q4_K_M", "Q8_0"], None);
    // With a shared expert, whose rows are not whole blocks of 256, and value heads grouped by their key heads.
    let changes = [("shared_expert_intermediate_size", 96), ("linear_value_head_dim", 64)];
    check(&random_model(folder.path(), "next-moe", &changes), &RANDOM_PROMPT, &["Q4_K_M"], None);
}

/// Recurrent layers with three value heads for each key head.
pub const THREE_EACH: [(&str, u32); 4] = [
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 6),
    ("linear_key_head_dim", 32),
    ("linear_value_head_dim", 32),
];

/// Goal: value heads that a file stores in the order in which key heads take turns are used in that order; the restored
/// checkpoint has them grouped.
#[test]
fn hybrids_whose_key_heads_take_turns() {
    let folder = tempfile::tempdir().expect("a folder");
    check(&random_model(folder.path(), "hybrid-three", &THREE_EACH), &RANDOM_PROMPT, &["Q8_0", "Q4_K_M"], None);
    let changes = [THREE_EACH.as_slice(), &[("shared_expert_intermediate_size", 256)]].concat();
    check(&random_model(folder.path(), "hybrid-moe", &changes), &RANDOM_PROMPT, &["Q5_K_M"], None);
}

/// Goal: a device that computes a format wrongly is noticed at start. Method: the start's test of formats is given other
/// weights than its reference (`broken_codes`): for weights in fragments, so that the model runs with weights row after
/// row; with integer dot products, so that it runs without; and for all, so that it is refused.
#[test]
fn a_device_that_computes_a_format_wrongly_is_noticed_at_start() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let model = random_model(folder.path(), "qwen3-deep", &[]);
    let file = folder.path().join("model.gguf");
    convert(&model, &file, FileType::from_name("Q4_K_M").expect("a type"), 2).expect("converted");
    let lines = Lines::default();
    let started =
        |tune: &[&str], lines: &Lines| start_with(&vulkan.devices, &configured(&vulkan, &file, None, tune), lines);
    let (wanted, _) = draw(&started(&[], &lines).expect("a start"), &RANDOM_PROMPT, 8);

    let (found, _) = draw(&started(&["fragments=1", "broken_codes=1"], &lines).expect("a start"), &RANDOM_PROMPT, 8);
    assert_eq!(found, wanted);
    let said = lines.0.lock().expect("no panic").join("\n");
    assert!(said.contains("computes quantised weights in fragments wrongly"), "{said}");

    let (found, _) = draw(&started(&["integer_dots=1", "broken_codes=3"], &lines).expect("a start"), &RANDOM_PROMPT, 8);
    assert_eq!(found, wanted);
    let said = lines.0.lock().expect("no panic").join("\n");
    assert!(said.contains("tested again without integer dot products"), "{said}");

    let error = format!("{:?}", started(&["broken_codes=2"], &lines).expect_err("a refusal"));
    assert!(error.contains("computes its quantised weights wrongly") && error.contains("differs by"), "{error}");
}

/// Goal: a model whose weights the device packs is the same as one whose weights the host packs, and a device that packs
/// wrongly is noticed. Method: K-quants in both layouts, whose logits must be equal bit for bit; the test at start fails
/// (`broken_packing`), so that the host packs.
#[test]
fn a_model_that_the_device_packs_is_the_same() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let model = random_model(folder.path(), "qwen3-deep", &[]);
    let file = folder.path().join("model.gguf");
    convert(&model, &file, FileType::from_name("Q4_K_M").expect("a type"), 2).expect("converted");
    let started = |tune: &[&str]| {
        let lines = Lines::default();
        let host = start_with(&vulkan.devices, &configured(&vulkan, &file, None, tune), &lines).expect("a start");
        let drawn = draw(&host, &RANDOM_PROMPT, 8);
        let said = lines.0.lock().expect("no panic").join("\n");
        (drawn, said)
    };
    for layout in ["fragments=0", "fragments=1"] {
        let (wanted, said) = started(&[layout]);
        assert!(!said.contains("the device packed"), "a CPU driver leaves packing to the host: {said}");
        let (found, said) = started(&[layout, "device_packing=2"]);
        assert_eq!(found, wanted, "{layout}");
        assert!(said.contains("; the device packed ") && !said.contains("wrongly"), "{said}");
        let (found, said) = started(&[layout, "device_packing=2", "broken_packing=1"]);
        assert_eq!(found, wanted, "{layout}");
        let wrong =
            said.contains("packs Q4_K as") && said.contains("wrongly (an injected failure): the host packs them");
        assert!(wrong && !said.contains("the device packed"), "{said}");
    }
}

/// Goal: a device that computes a kind of model wrongly is noticed at start. Method: the device's small model is given
/// another norm than the reference's (`broken_reference`): with weights in fragments, so that the model runs with weights
/// row after row, and with all, so that it is refused by the name of a kernel.
#[test]
fn a_device_that_computes_a_kind_of_model_wrongly_is_noticed_at_start() {
    let vulkan = Vulkan::shared();
    let model = crate::harness::models::fixture("qwen3-deep");
    let lines = Lines::default();
    let started =
        |tune: &[&str], lines: &Lines| start_with(&vulkan.devices, &configured(&vulkan, &model, None, tune), lines);
    let (wanted, _) = draw(&started(&["reference_test=2"], &lines).expect("a start"), &RANDOM_PROMPT, 8);
    let said = lines.0.lock().expect("no panic").join("\n");
    assert!(said.contains("a small model of the same kind gives the reference's results"), "{said}");

    let broken = ["reference_test=2", "fragments=1", "broken_reference=1"];
    let (found, _) = draw(&started(&broken, &lines).expect("a start"), &RANDOM_PROMPT, 8);
    assert_eq!(found, wanted);
    let said = lines.0.lock().expect("no panic").join("\n");
    assert!(said.contains("computes models of this kind in fragments wrongly"), "{said}");

    let error = format!("{:?}", started(&["reference_test=2", "broken_reference=2"], &lines).expect_err("a refusal"));
    for part in ["computes models of this kind wrongly: gemv", "lm_head", "--skip-self-test", "of their size"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Goal: the small model of the test at start has groups of state spaces like those of the model, which has more.
#[test]
fn a_small_model_has_fewer_groups_of_state_spaces() {
    let vulkan = Vulkan::shared();
    let model = crate::harness::models::fixture("families/nemotronh-dense");
    let lines = Lines::default();
    let config = configured(&vulkan, &model, None, &["reference_test=2"]);
    start_with(&vulkan.devices, &config, &lines).expect("a start");
    let said = lines.0.lock().expect("no panic").join("\n");
    assert!(said.contains("a small model of the same kind gives the reference's results"), "{said}");
}

/// A random checkpoint in every type of `synth --quantize` runs, and its logits are near those of the numbers.
#[test]
fn random_models_of_every_stored_type() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(crate::harness::models::fixture("llama-plain").join("config.json"));
    let mut config: serde_json::Value = serde_json::from_str(&config.expect("config")).expect("JSON");
    config["hidden_size"] = 160.into();
    config["intermediate_size"] = 320.into();
    config["num_hidden_layers"] = 2.into();
    let numbers = folder.path().join("numbers");
    synth::write(&config.to_string(), &numbers, &SynthOptions::default(), &mut |_, _| {}).expect("written");
    let prompt = [1, 5, 9, 2, 7, 3];
    let (_, wanted) = draw(&start(&vulkan, &numbers, None, &[]), &prompt, 1);
    for kind in StoredType::ALL {
        let out = folder.path().join(kind.name());
        // Two files, so that the tensors of a weight may be in different ones.
        synth::quantise(&numbers, None, &out, kind, 400_000, 2, &|_, _| {}).expect("written");
        let (_, found) = draw(&start(&vulkan, &out, None, &[]), &prompt, 1);
        let apart = divergence(&found, &wanted);
        println!("{}: divergence {apart:.1e}", kind.name());
        let limit = match kind {
            StoredType::Gptq8 | StoredType::Int8 | StoredType::BitsAndBytes8 => 1e-3,
            StoredType::Fp8 | StoredType::Fp8Channel | StoredType::Fp8Block => 5e-2,
            _ => 0.3,
        };
        assert!(apart <= limit, "{}: {apart:e}", kind.name());
    }
}

/// Goal: latent attention runs from quantised projections of keys and values, which its kernels read as numbers. Method:
/// a random checkpoint of DeepSeek-V3's family is quantised, `kv_b_proj` too, and its logits are compared with those of
/// the numbers.
#[test]
fn quantised_projections_of_latent_attention_are_expanded() {
    let vulkan = Vulkan::shared();
    let folder = tempfile::tempdir().expect("a folder");
    let numbers = crate::harness::models::fixture("families/deepseek3-blocks");
    let prompt = [1, 5, 9, 2, 7, 3];
    let (_, wanted) = draw(&start(&vulkan, &numbers, None, &[]), &prompt, 1);
    for (kind, limit) in [(StoredType::Int8, 2e-2), (StoredType::Fp8Channel, 6e-2), (StoredType::Fp8Block, 6e-2)] {
        let out = folder.path().join(kind.name());
        synth::quantise(&numbers, None, &out, kind, 1 << 30, 2, &|_, _| {}).expect("written");
        let checkpoint = Checkpoint::open(&out).expect("a checkpoint");
        for part in ["latent.keys", "latent.values"] {
            let name = format!("layers.0.{part}");
            let weight = checkpoint.weights().iter().find(|weight| weight.name == name).expect("the weight");
            assert!(weight.sources.iter().all(|source| source.matrix.is_some()), "{name} of {}", kind.name());
        }
        let (_, found) = draw(&start(&vulkan, &out, None, &[]), &prompt, 1);
        let apart = divergence(&found, &wanted);
        println!("{}: divergence {apart:.1e}", kind.name());
        assert!(apart <= limit, "{}: {apart:e}", kind.name());
    }
}

#[test]
fn quantising_at_load_stays_near_the_checkpoint() {
    let vulkan = Vulkan::shared();
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    let prompt = expected("demo").prompt;
    let (_, wanted) = draw(&start(&vulkan, demo, None, &[]), &prompt, 4);
    for (quantize, limit) in [(Quantize::Int8, 5e-3), (Quantize::Int4, 0.3)] {
        let (_, found) = draw(&start(&vulkan, demo, Some(quantize), &[]), &prompt, 4);
        let apart = divergence(&found[..1], &wanted[..1]);
        println!("{quantize:?}: divergence {apart:.1e}");
        assert!(apart <= limit, "{quantize:?}: {apart:e}");
    }
}

/// Goal: experts of codes that a router with factors of its own chooses run on fragments, pass the test at start there, and
/// give the logits of the same codes on row-major kernels.
#[test]
fn quantised_experts_with_factors_run_on_fragments() {
    let vulkan = Vulkan::shared();
    let numbers = crate::harness::models::fixture("families/gemma4-moe");
    let (_, wanted) = draw(&start(&vulkan, &numbers, Some(Quantize::Int8), &[]), &RANDOM_PROMPT, 3);
    let (_, found) = draw(&start(&vulkan, &numbers, Some(Quantize::Int8), &["fragments=1"]), &RANDOM_PROMPT, 3);
    let apart = divergence(&found[..1], &wanted[..1]);
    println!("divergence {apart:.1e}");
    assert!(apart <= 1e-3, "{apart:e}");
}
