//! Small random checkpoints are written as files of every type and read back by the reader.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::{Value as Json, json};
use tokenizers::Tokenizer;

use super::super::Gguf;
use super::super::container::TensorType;
use super::super::tensors::StoredAs;
use super::super::tests::Random;
use super::*;
use crate::quant::blocks::BlockType;

/// The tensors of a checkpoint: shape and values by name.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

fn open(path: &Path) -> std::io::Result<(File, u64)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

/// A checkpoint in the making.
struct GgufModel {
    config: Json,
    tensors: Tensors,
    random: Random,
}

impl GgufModel {
    /// Returns a model with random tensors, and the configuration `more` beside the common one.
    fn new(model_type: &str, more: Json) -> GgufModel {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "vocab_size": 40, "rope_theta": 500_000.0, "hidden_act": "silu",
            "eos_token_id": [7, 9], "bos_token_id": 1,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut model = GgufModel { config, tensors: BTreeMap::new(), random: Random(5) };
        model.fill();
        model
    }

    fn size(&self, key: &str) -> u64 {
        self.config[key].as_u64().unwrap_or_default()
    }

    fn flag(&self, key: &str) -> bool {
        self.config[key] == true
    }

    fn put(&mut self, name: &str, shape: &[u64]) {
        let count = shape.iter().product::<u64>();
        // Multiples of 1/128 between -1 and 1: bf16 holds them, and 1 can be added without rounding in f32.
        let mut number = || (self.random.below(257) as f32 - 128.0) / 128.0;
        let values = (0..count).map(|_| number()).collect();
        self.tensors.insert(name.to_owned(), (shape.to_owned(), values));
    }

    fn fill(&mut self) {
        let (hidden, vocab, inner) =
            (self.size("hidden_size"), self.size("vocab_size"), self.size("intermediate_size"));
        let kind = self.config["model_type"].as_str().unwrap().to_owned();
        let hybrid = kind.starts_with("qwen3_5") || kind == "qwen3_next";
        self.put("model.embed_tokens.weight", &[vocab, hidden]);
        self.put("model.norm.weight", &[hidden]);
        if !self.flag("tie_word_embeddings") {
            self.put("lm_head.weight", &[vocab, hidden]);
        }
        let (head, heads, kv) =
            (self.size("head_dim"), self.size("num_attention_heads"), self.size("num_key_value_heads"));
        for layer in 0..self.size("num_hidden_layers") {
            let p = format!("model.layers.{layer}.");
            self.put(&format!("{p}input_layernorm.weight"), &[hidden]);
            self.put(&format!("{p}post_attention_layernorm.weight"), &[hidden]);
            if hybrid && layer % 4 != 3 {
                let (kh, vh) = (self.size("linear_num_key_heads"), self.size("linear_num_value_heads"));
                let (kd, vd) = (self.size("linear_key_head_dim"), self.size("linear_value_head_dim"));
                let channels = 2 * kh * kd + vh * vd;
                let mut put = |name: &str, shape: &[u64]| self.put(&format!("{p}linear_attn.{name}"), shape);
                put("conv1d.weight", &[channels, 1, 4]);
                put("A_log", &[vh]);
                put("dt_bias", &[vh]);
                put("norm.weight", &[vd]);
                put("out_proj.weight", &[hidden, vh * vd]);
                if kind == "qwen3_next" {
                    put("in_proj_qkvz.weight", &[channels + vh * vd, hidden]);
                    put("in_proj_ba.weight", &[2 * vh, hidden]);
                } else {
                    put("in_proj_qkv.weight", &[channels, hidden]);
                    put("in_proj_z.weight", &[vh * vd, hidden]);
                    put("in_proj_b.weight", &[vh, hidden]);
                    put("in_proj_a.weight", &[vh, hidden]);
                }
            } else {
                let bias = self.flag("attention_bias") || kind == "qwen2";
                let q = if hybrid { 2 * heads * head } else { heads * head };
                for (part, rows) in [("q", q), ("k", kv * head), ("v", kv * head)] {
                    self.put(&format!("{p}self_attn.{part}_proj.weight"), &[rows, hidden]);
                    if bias {
                        self.put(&format!("{p}self_attn.{part}_proj.bias"), &[rows]);
                    }
                }
                self.put(&format!("{p}self_attn.o_proj.weight"), &[hidden, heads * head]);
                if kind != "llama" && kind != "qwen2" {
                    self.put(&format!("{p}self_attn.q_norm.weight"), &[head]);
                    self.put(&format!("{p}self_attn.k_norm.weight"), &[head]);
                }
            }
            let experts = self.size("num_experts");
            let of = |inner: u64| [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)];
            if experts == 0 {
                for (part, rows, cols) in of(inner) {
                    self.put(&format!("{p}mlp.{part}_proj.weight"), &[rows, cols]);
                }
                continue;
            }
            let inner = self.size("moe_intermediate_size");
            self.put(&format!("{p}mlp.gate.weight"), &[experts, hidden]);
            if kind == "qwen3_5_moe_text" {
                self.put(&format!("{p}mlp.experts.gate_up_proj"), &[experts, 2 * inner, hidden]);
                self.put(&format!("{p}mlp.experts.down_proj"), &[experts, hidden, inner]);
            } else {
                for expert in 0..experts {
                    for (part, rows, cols) in of(inner) {
                        self.put(&format!("{p}mlp.experts.{expert}.{part}_proj.weight"), &[rows, cols]);
                    }
                }
            }
            let shared = self.size("shared_expert_intermediate_size");
            if shared > 0 {
                self.put(&format!("{p}mlp.shared_expert_gate.weight"), &[1, hidden]);
                for (part, rows, cols) in of(shared) {
                    self.put(&format!("{p}mlp.shared_expert.{part}_proj.weight"), &[rows, cols]);
                }
            }
        }
    }

    /// Writes the checkpoint into a folder, with its tensors as `dtype` and spread over two files.
    fn save(&self, folder: &Path, dtype: &str) {
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        let mut map = serde_json::Map::new();
        for part in 0..2 {
            let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
            let file = format!("model-{part}.safetensors");
            for (index, (name, (shape, values))) in self.tensors.iter().enumerate() {
                if index % 2 != part {
                    continue;
                }
                let begin = data.len();
                for x in values {
                    match dtype {
                        "F32" => data.extend(x.to_le_bytes()),
                        "F16" => data.extend(half::f16::from_f32(*x).to_le_bytes()),
                        _ => data.extend(half::bf16::from_f32(*x).to_le_bytes()),
                    }
                }
                let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
                header.insert(name.clone(), entry);
                map.insert(name.clone(), json!(file));
            }
            let header = Json::Object(header).to_string();
            let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
            std::fs::write(folder.join(file), bytes).unwrap();
        }
        let index = json!({ "weight_map": map });
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// Converts the checkpoint and opens the file.
    fn convert(&self, dtype: &str, file_type: FileType) -> (tempfile::TempDir, Gguf, GgufWritten) {
        let folder = tempfile::tempdir().unwrap();
        self.save(folder.path(), dtype);
        let path = folder.path().join("out.gguf");
        let written = convert(folder.path(), &path, file_type, 3).unwrap();
        let gguf = Gguf::open(&path, open).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), written.bytes);
        assert_eq!(gguf.parts.tensors.len(), written.tensors);
        (folder, gguf, written)
    }

    /// Returns the tensors under the reader's names, experts one by one.
    fn readable(&self) -> Tensors {
        let mut out = Tensors::new();
        for (name, (shape, values)) in &self.tensors {
            let mut each = |part: &str, first: u64, rows: u64, of_expert: u64| {
                let (base, cols) = (name.rsplit_once('.').unwrap().0, shape[2]);
                for expert in 0..shape[0] {
                    let begin = ((expert * of_expert + first) * cols) as usize;
                    let values = values[begin..begin + (rows * cols) as usize].to_vec();
                    out.insert(format!("{base}.{expert}.{part}_proj.weight"), (vec![rows, cols], values));
                }
            };
            if name.ends_with("experts.gate_up_proj") {
                each("gate", 0, shape[1] / 2, shape[1]);
                each("up", shape[1] / 2, shape[1] / 2, shape[1]);
            } else if name.ends_with("experts.down_proj") {
                each("down", 0, shape[1], shape[1]);
            } else {
                out.insert(name.clone(), (shape.clone(), values.clone()));
            }
        }
        out
    }
}

/// Reads the numbers of a tensor of a file, and its bytes.
fn stored(gguf: &Gguf, name: &str) -> (TensorType, Vec<f32>, Vec<u8>) {
    let info = gguf.parts.tensor(name).unwrap();
    let mut bytes = vec![0; info.bytes as usize];
    File::open(&gguf.parts.files[0].path).unwrap().read_exact_at(&mut bytes, info.offset).unwrap();
    let halves = || bytes.as_chunks::<2>().0.iter();
    let numbers = match info.kind {
        TensorType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        TensorType::F16 => halves().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        TensorType::BF16 => halves().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        kind => {
            let mut numbers = vec![0.0; info.dims.iter().product::<u64>() as usize];
            BlockType::from_id(kind.id()).unwrap().dequantize(&bytes, &mut numbers);
            numbers
        }
    };
    (info.kind, numbers, bytes)
}

/// Checks that the reader finds every tensor of the checkpoint with its values.
fn check_values(model: &GgufModel, gguf: &Gguf) -> usize {
    let mut cache: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut checked = 0;
    for (name, (shape, values)) in model.readable() {
        // The reader cuts these into others.
        if name.ends_with("in_proj_qkvz.weight")
            || name.ends_with("in_proj_ba.weight") && !gguf.sources.contains_key(&name)
        {
            continue;
        }
        let source = gguf.sources.get(&name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(source.shape, shape, "{name}");
        let at = &gguf.parts.at(source.at).name;
        let numbers = cache.entry(at.clone()).or_insert_with(|| stored(gguf, at).1);
        let restored = source.restore(numbers);
        assert_eq!(restored.len(), values.len(), "{name}");
        for (restored, value) in restored.iter().zip(&values) {
            match source.change {
                StoredAs::NegativeExp => assert!((restored - value).abs() < 1e-6, "{name}: {restored} {value}"),
                _ => assert_eq!(restored.to_bits(), (value + 0.0).to_bits(), "{name}: {restored} {value}"),
            }
        }
        checked += 1;
    }
    checked
}

fn llama3() -> Json {
    json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 1024})
}

fn models() -> Vec<(&'static str, GgufModel)> {
    let experts =
        json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": true});
    let delta = json!({
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    });
    let both = |more: &Json| {
        let mut all = delta.as_object().unwrap().clone();
        all.extend(more.as_object().unwrap().clone());
        Json::Object(all)
    };
    vec![
        ("llama", GgufModel::new("llama", json!({}))),
        ("llama3, biases", GgufModel::new("llama", json!({"rope_scaling": llama3(), "attention_bias": true}))),
        ("mistral", GgufModel::new("llama", json!({"architectures": ["MistralForCausalLM"], "sliding_window": null}))),
        ("qwen2", GgufModel::new("qwen2", json!({"tie_word_embeddings": true, "use_sliding_window": false}))),
        // Its class reads neither key.
        ("qwen2, keys of biases", GgufModel::new("qwen2", json!({"attention_bias": false, "mlp_bias": true}))),
        ("qwen3", GgufModel::new("qwen3", json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}))),
        ("qwen3moe", GgufModel::new("qwen3_moe", experts.clone())),
        ("qwen3next", GgufModel::new("qwen3_next", both(&experts))),
        ("qwen35", GgufModel::new("qwen3_5_text", both(&json!({})))),
        ("qwen35moe", GgufModel::new("qwen3_5_moe_text", both(&experts))),
    ]
}

#[test]
fn every_tensor_comes_back_bit_for_bit() {
    for (name, model) in models() {
        for dtype in ["F32", "BF16", "F16"] {
            let (_folder, gguf, written) = model.convert(dtype, FileType::One(TensorType::F32));
            let checked = check_values(&model, &gguf);
            println!("{name} from {dtype}: {checked} tensors, {} bytes", written.bytes);
            assert!(checked > 10, "{name}");
            assert_eq!(written.no_text, None);
            // The reader's configuration is the writer's, also where it went through the file.
            assert_eq!(super::model(&model.config).unwrap(), gguf.model, "{name}");
            let config: Json = serde_json::from_slice(gguf.file("config.json").unwrap()).unwrap();
            assert_eq!(super::model(&config).unwrap(), gguf.model, "{name}");
            assert_eq!(gguf.file("tokenizer.json"), None);
            assert_eq!((gguf.ids.bos, &gguf.ids.ends[..]), (Some(1), &[7, 9][..]));
        }
        // Types of 16 bits hold the same numbers.
        for kind in [TensorType::F16, TensorType::BF16] {
            let (_folder, gguf, _) = model.convert("F32", FileType::One(kind));
            check_values(&model, &gguf);
        }
    }
}

/// The blocks in the file are those of the rows in the file's order.
#[test]
fn blocks_are_those_of_the_plain_rows() {
    for (name, model) in models() {
        let (_plain_folder, plain, _) = model.convert("F32", FileType::One(TensorType::F32));
        // One model in all types; those with searched grids take long. Which types a mixture has is another test, so one
        // mixture stands for all.
        let mut types = if name == "llama" { FileType::known() } else { vec!["F16", "Q8_0", "Q4_K_M"] };
        if std::env::var_os("OSTINATO_TEST_EVERY_CASE").is_none() {
            types.retain(|name| *name == "Q4_K_M" || matches!(FileType::from_name(name), Ok(FileType::One(_))));
        }
        for file_type in types {
            let file_type = FileType::from_name(file_type).unwrap();
            let (_folder, gguf, _) = model.convert("BF16", file_type);
            let mut quantised = 0;
            for info in &gguf.parts.header().tensors {
                let (kind, numbers, bytes) = stored(&gguf, &info.name);
                let (_, rows, _) = stored(&plain, &info.name);
                match BlockType::from_id(kind.id()) {
                    Some(blocks) => {
                        let mut expected = vec![0; bytes.len()];
                        blocks.quantize(&rows, &mut expected);
                        assert!(bytes == expected, "{name}, {}: {}", file_type.name(), info.name);
                        quantised += 1;
                    }
                    None => assert_eq!(numbers, rows, "{name}, {}: {}", file_type.name(), info.name),
                }
            }
            let plain = matches!(file_type, FileType::One(kind) if !kind.is_quantised());
            assert_eq!(quantised > 10, !plain, "{name}, {}: {quantised}", file_type.name());
        }
    }
}

#[test]
fn types_of_the_mixtures() {
    let of = |name: &str, tensor: &str, layer: Option<u64>, tied: bool| {
        let tensor = layer.map_or(tensor.to_owned(), |layer| format!("blk.{layer}.{tensor}"));
        type_of(FileType::from_name(name).unwrap(), &tensor, &[4096, 4096], layer, 32, tied).name()
    };
    let more = |name: &str, tensor: &str| -> Vec<u64> {
        (0..32).filter(|layer| of(name, tensor, Some(*layer), false) == "Q6_K").collect()
    };
    // As in the published files of Llama 3.1 8B.
    let half = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
    for name in ["Q4_K_M", "Q5_K_M"] {
        for tensor in ["attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "attn_qkv.weight"] {
            assert_eq!(more(name, tensor), half, "{name} {tensor}");
        }
        for tensor in ["attn_q.weight", "attn_k.weight", "attn_output.weight", "ffn_up.weight", "ffn_gate_exps.weight"]
        {
            assert_eq!(more(name, tensor), [0; 0], "{name} {tensor}");
        }
        assert_eq!(of(name, "output.weight", None, false), "Q6_K");
    }
    assert_eq!(of("q4_k_m", "token_embd.weight", None, false), "Q4_K");
    assert_eq!(of("q4_k_m", "token_embd.weight", None, true), "Q6_K");
    assert_eq!(of("Q4_K_S", "attn_v.weight", Some(3), false), "Q5_K");
    assert_eq!(of("Q4_K_S", "attn_v.weight", Some(4), false), "Q4_K");
    assert_eq!(of("Q3_K_M", "attn_v.weight", Some(1), false), "Q5_K");
    assert_eq!(of("Q3_K_M", "ffn_down.weight", Some(2), false), "Q4_K");
    assert_eq!(of("Q3_K_L", "attn_output.weight", Some(2), false), "Q5_K");
    assert_eq!(of("q8_0", "output.weight", None, false), "Q8_0");
    for tensor in ["attn_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_a", "attn_q.bias"] {
        assert_eq!(of("Q4_K_M", tensor, Some(5), false), "F32", "{tensor}");
    }
    let narrow = |name: &str, cols: u64| {
        type_of(FileType::from_name(name).unwrap(), "blk.1.attn_q.weight", &[cols, 8], Some(1), 32, false).name()
    };
    for (name, expected) in [
        ("q4_k", "Q5_0"),
        ("q5_k", "Q5_1"),
        ("q6_k", "Q8_0"),
        ("q3_k", "Q4_0"),
        ("iq4_xs", "IQ4_NL"),
        ("mxfp4", "MXFP4"),
    ] {
        assert_eq!(narrow(name, 256 + 32), expected, "{name}");
        assert_eq!(narrow(name, 256 + 16), "F16", "{name}");
    }
}

#[test]
fn names_of_file_types() {
    for name in FileType::known() {
        for name in [name.to_owned(), name.to_lowercase()] {
            assert!(FileType::from_name(&name).unwrap().name().eq_ignore_ascii_case(&name));
        }
    }
    let error = FileType::from_name("q9_k").unwrap_err().to_string();
    assert!(error.contains("\"q9_k\"") && error.contains("Q4_K_M") && error.contains("MXFP4"), "{error}");
}

#[test]
fn problems_are_named_and_leave_no_file() {
    let try_it = |change: &dyn Fn(&mut GgufModel)| {
        let mut model = GgufModel::new("llama", json!({}));
        change(&mut model);
        let folder = tempfile::tempdir().unwrap();
        model.save(folder.path(), "F32");
        let before = std::fs::read_dir(folder.path()).unwrap().count();
        let result = convert(
            folder.path(),
            &folder.path().join("out.gguf"),
            FileType::One(TensorType::Blocks(BlockType::Q8_0)),
            2,
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), before);
        result.unwrap_err().to_string()
    };
    let norm = "model.layers.1.input_layernorm.weight";
    let up = "model.layers.1.mlp.up_proj.weight";
    type Damage<'a> = &'a dyn Fn(&mut GgufModel);
    let cases: [(&str, Damage<'_>); 9] = [
        ("tensor model.layers.1.input_layernorm.weight is missing", &|m| drop(m.tensors.remove(norm))),
        ("has the shape [255, 256], must have [256, 256]", &|m| {
            m.put("model.layers.0.mlp.down_proj.weight", &[255, 256])
        }),
        ("tensor model.layers.0.extra.weight has no place", &|m| m.put("model.layers.0.extra.weight", &[3])),
        ("\"gpt_neo\" is not supported (llama,", &|m| m.config["model_type"] = json!("gpt_neo")),
        ("hidden_act is \"gelu\"", &|m| m.config["hidden_act"] = json!("gelu")),
        ("sliding_window is 64", &|m| m.config["sliding_window"] = json!(64)),
        ("config.json has no vocab_size", &|m| m.config["vocab_size"] = Json::Null),
        ("rope_type is \"dynamic\"", &|m| m.config["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 2.0})),
        ("blk.1.ffn_up.weight has NaN at row 2, column 1; type Q8_0", &|m| {
            m.tensors.get_mut(up).unwrap().1[2 * 256 + 1] = f32::NAN;
        }),
    ];
    for (expected, change) in cases {
        let error = try_it(change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// A text that is made of pieces of many scripts, and of special tokens.
fn some_text(random: &mut Random) -> String {
    const PIECES: [&str; 24] = [
        "the ",
        "Hello",
        " world",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "1234",
        " 7",
        "don't",
        "ÄÖü",
        "日本語",
        "한국",
        "العربية",
        "😀",
        "e\u{301}",
        "<|im_start|>",
        "<|im_end|>",
        "assistant",
        "{}();",
        " != ",
        "ſ",
        "\u{200b}",
        "'RE",
    ];
    (0..1 + random.below(20)).map(|_| PIECES[random.below(PIECES.len())]).collect()
}

/// The demo model, with its tokenizer and chat template.
#[test]
fn a_checkpoint_with_text() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    let out = tempfile::tempdir().unwrap();
    let read = |name: &str| -> Json { serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap() };
    for name in ["F32", "BF16", "Q8_0", "Q4_K_M"] {
        let path = out.path().join(format!("{name}.gguf"));
        let written = convert(folder, &path, FileType::from_name(name).unwrap(), 2).unwrap();
        assert_eq!(written.no_text, None);
        let gguf = Gguf::open(&path, open).unwrap();
        println!("{name}: {written:?}");
        let before = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
        let after = Tokenizer::from_bytes(gguf.file("tokenizer.json").unwrap()).unwrap();
        let mut random = Random(1);
        for _ in 0..1000 {
            let text = some_text(&mut random);
            for special in [false, true] {
                let encode = |tokenizer: &Tokenizer| tokenizer.encode(&text[..], special).unwrap().get_ids().to_vec();
                assert_eq!(encode(&before), encode(&after), "{text:?}");
            }
            let ids = before.encode(&text[..], true).unwrap().get_ids().to_vec();
            assert_eq!(before.decode(&ids, false).unwrap(), after.decode(&ids, false).unwrap());
        }
        let config: Json = serde_json::from_slice(gguf.file("tokenizer_config.json").unwrap()).unwrap();
        let published = read("tokenizer_config.json");
        for key in ["chat_template", "eos_token", "bos_token", "pad_token"] {
            assert_eq!(config[key], published[key], "{key}");
        }
        let generation: Json = serde_json::from_slice(gguf.file("generation_config.json").unwrap()).unwrap();
        let published = read("generation_config.json");
        for key in ["eos_token_id", "pad_token_id", "temperature", "top_p"] {
            assert_eq!(generation[key], published[key], "{key}");
        }
    }
}

/// Prints the speed with which a checkpoint of 0.2 G weights is written on one thread, and the memory that it takes.
#[test]
#[ignore = "a measurement, to be run alone in a release build"]
fn speed() {
    let more = json!({"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 32768});
    let mut model = GgufModel::new("llama", json!({ "num_hidden_layers": 0 }));
    model.config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    model.config["num_hidden_layers"] = json!(2);
    model.fill();
    let folder = tempfile::tempdir().unwrap();
    model.save(folder.path(), "BF16");
    let weights: u64 = model.tensors.values().map(|(shape, _)| shape.iter().product::<u64>()).sum();
    drop(model);
    for name in ["BF16", "F16", "Q8_0", "Q6_K", "Q4_K", "Q4_K_M"] {
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let begin = std::time::Instant::now();
        let out = folder.path().join("out.gguf");
        convert(folder.path(), &out, FileType::from_name(name).unwrap(), 1).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak: Vec<&str> =
            status.lines().filter(|line| line.starts_with("VmHWM") || line.starts_with("VmRSS")).collect();
        println!("{name}: {:.3} G weights/s, {peak:?}", weights as f64 / seconds / 1e9);
    }
}
