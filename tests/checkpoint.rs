//! Checkpoints on disk: what `synth` writes is opened with the right list of weights, and what
//! is broken is refused with every reason at once.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ostinato::model::checkpoint::{Checkpoint, CheckpointProblem, WeightKind, WeightSpec};
use ostinato::model::config::{ConfigProblem, Dtype};
use ostinato::model::synth::{self, SynthError, SynthOptions};
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A config.json with keys replaced.
fn config(preset: &str, changes: Value) -> String {
    let mut config: Value = serde_json::from_str(&synth::preset(preset).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

fn write_into(dir: &Path, config: &str, options: SynthOptions) {
    synth::write(config, dir, &options, &mut |_, _| {}).unwrap();
}

fn written(config: &str, options: SynthOptions) -> TempDir {
    let dir = TempDir::new().unwrap();
    write_into(dir.path(), config, options);
    dir
}

fn tiny() -> TempDir {
    written(&synth::preset("tiny-qwen3").unwrap(), SynthOptions::default())
}

fn sharded() -> TempDir {
    written(&synth::preset("tiny-qwen3").unwrap(), SynthOptions { shard_bytes: 300_000, ..SynthOptions::default() })
}

fn problems(dir: &Path) -> Vec<CheckpointProblem> {
    Checkpoint::open(dir).unwrap_err().problems
}

fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Rewrites the JSON header of a safetensors file, keeping its length by padding.
fn edit_header(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let text = header.to_string();
    let new_length = text.len().max(length);
    bytes.splice(8..8 + length, format!("{text:new_length$}").into_bytes());
    bytes[..8].copy_from_slice(&(new_length as u64).to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// The packed weight as a loader would make it, element by element, in f32.
fn pack(spec: &WeightSpec) -> Vec<f32> {
    let mut packed = vec![f32::NAN; spec.elements() as usize];
    for source in &spec.sources {
        let mut bytes = vec![0; source.bytes() as usize];
        fs::File::open(&source.path).unwrap().read_exact_at(&mut bytes, source.offset).unwrap();
        let values: Vec<f32> = match source.dtype {
            Dtype::Bf16 => bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Dtype::F16 => bytes.chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Dtype::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        };
        for row in 0..source.rows {
            let to = (source.first_row + row * source.row_step) as usize * spec.cols as usize;
            let from = (row * source.cols) as usize;
            let target = &mut packed[to..to + source.cols as usize];
            assert!(target.iter().all(|v| v.is_nan()), "{}: row {row} of {} written twice", spec.name, source.tensor);
            target.copy_from_slice(&values[from..from + source.cols as usize]);
        }
    }
    assert!(packed.iter().all(|v| !v.is_nan()), "{} has rows without a source", spec.name);
    packed
}

/// Every tensor by name through the safetensors crate: another reader than ours.
fn tensors(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = fs::read(path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                assert!(all.insert(name, view.data().to_vec()).is_none());
            }
        }
    }
    all
}

fn bf16(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

#[test]
fn weights_of_a_tied_qwen3() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.files.len() > 2);
    let c = &checkpoint.config;
    let specs: BTreeMap<&str, &WeightSpec> = checkpoint.weights().iter().map(|w| (w.name.as_str(), w)).collect();
    assert_eq!(specs.len(), checkpoint.weights().len());
    let mut expected = vec!["embed".to_owned(), "final_norm".to_owned()];
    for i in 0..c.layers {
        for part in ["attn_norm", "qkv", "q_norm", "k_norm", "o", "mlp_norm", "gate_up", "down"] {
            expected.push(format!("layers.{i}.{part}"));
        }
    }
    expected.sort();
    assert_eq!(specs.keys().copied().collect::<Vec<_>>(), expected);

    let shape = |name: &str| (specs[name].rows, specs[name].cols, specs[name].kind, specs[name].dtype);
    assert_eq!(shape("layers.3.qkv"), (256 + 2 * 128, 128, WeightKind::Matrix, Dtype::Bf16));
    assert_eq!(shape("layers.0.o"), (128, 256, WeightKind::Matrix, Dtype::Bf16));
    assert_eq!(shape("layers.0.gate_up"), (768, 128, WeightKind::Matrix, Dtype::Bf16));
    assert_eq!(shape("layers.0.down"), (128, 384, WeightKind::Matrix, Dtype::Bf16));
    assert_eq!(shape("layers.0.q_norm"), (64, 1, WeightKind::Vector, Dtype::F32));
    assert_eq!(shape("embed"), (512, 128, WeightKind::Matrix, Dtype::Bf16));

    // Every row from its place, read by another reader.
    let raw = tensors(dir.path());
    let tensor = |name: &str| bf16(&raw[&format!("model.layers.1.{name}.weight")]);
    let stacked = [tensor("self_attn.q_proj"), tensor("self_attn.k_proj"), tensor("self_attn.v_proj")].concat();
    assert_eq!(pack(specs["layers.1.qkv"]), stacked);
    let (gate, up) = (tensor("mlp.gate_proj"), tensor("mlp.up_proj"));
    let packed = pack(specs["layers.1.gate_up"]);
    for (j, pair) in packed.chunks(2 * 128).enumerate() {
        assert_eq!(pair[..128], gate[128 * j..128 * (j + 1)]);
        assert_eq!(pair[128..], up[128 * j..128 * (j + 1)]);
    }
    for spec in checkpoint.weights() {
        pack(spec);
    }

    let elements: u64 = raw.values().map(|bytes| bytes.len() as u64 / 2).sum();
    assert_eq!(checkpoint.parameters(), elements);
    let vectors: u64 = checkpoint.weights().iter().filter(|w| w.kind == WeightKind::Vector).map(|w| w.elements()).sum();
    assert_eq!(checkpoint.weight_bytes(), 2 * elements + 2 * vectors);
    assert_eq!(checkpoint.bytes_per_token(), checkpoint.weight_bytes() + 2 * 128);
}

#[test]
fn weights_of_an_untied_llama_with_every_bias() {
    let text = config("tiny-llama", json!({"attention_bias": true, "mlp_bias": true}));
    let dir = written(&text, SynthOptions { dtype: Some(Dtype::F16), ..SynthOptions::default() });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let find = |name: &str| checkpoint.weights().iter().find(|w| w.name == name);
    assert!(find("layers.0.q_norm").is_none());
    assert_eq!(find("lm_head").unwrap().dtype, Dtype::F16);
    for (name, rows) in [("qkv.bias", 128 + 2 * 32), ("o.bias", 128), ("gate_up.bias", 704), ("down.bias", 128)] {
        let spec = find(&format!("layers.2.{name}")).unwrap();
        assert_eq!((spec.rows, spec.cols, spec.kind, spec.dtype), (rows, 1, WeightKind::Vector, Dtype::F32));
    }
    let raw = tensors(dir.path());
    let bias = |name: &str| -> Vec<f32> {
        let bytes = &raw[&format!("model.layers.2.mlp.{name}.bias")];
        bytes.chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    };
    let mixed: Vec<f32> = bias("gate_proj").into_iter().zip(bias("up_proj")).flat_map(|(g, u)| [g, u]).collect();
    assert_eq!(pack(find("layers.2.gate_up.bias").unwrap()), mixed);
    for spec in checkpoint.weights() {
        pack(spec);
    }
    // One row of the embedding, all of the head.
    let embed = find("embed").unwrap();
    assert_eq!(checkpoint.bytes_per_token(), checkpoint.weight_bytes() - embed.bytes() + 2 * 128);
    assert_eq!(checkpoint.config.dtype, Some(Dtype::F16));
}

#[test]
fn names_without_the_prefix_and_mixed_formats() {
    let dir = tiny();
    let path = dir.path().join("model.safetensors");
    edit_header(&path, |header| {
        let mut renamed = serde_json::Map::new();
        for (name, mut entry) in header.as_object().unwrap().clone() {
            // f16 and bf16 are equally long.
            if name == "model.layers.0.self_attn.k_proj.weight" || name == "model.layers.1.mlp.down_proj.weight" {
                entry["dtype"] = "F16".into();
            }
            renamed.insert(name.strip_prefix("model.").unwrap_or(&name).to_owned(), entry);
        }
        *header = Value::Object(renamed);
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let dtype = |name: &str| checkpoint.weights().iter().find(|w| w.name == name).unwrap().dtype;
    assert_eq!(dtype("layers.0.qkv"), Dtype::F32);
    assert_eq!(dtype("layers.1.qkv"), Dtype::Bf16);
    assert_eq!(dtype("layers.1.down"), Dtype::F16);
}

#[test]
fn a_missing_shard_is_named_once() {
    let dir = sharded();
    fs::remove_file(dir.path().join("model-00002-of-00008.safetensors")).unwrap();
    match problems(dir.path()).as_slice() {
        [CheckpointProblem::MissingShard { path, tensors }] => {
            assert!(path.ends_with("model-00002-of-00008.safetensors"));
            assert!(*tensors > 0);
        }
        other => panic!("{other:#?}"),
    }
}

#[test]
fn a_truncated_shard_is_refused_with_both_numbers() {
    let dir = sharded();
    let path = dir.path().join("model-00003-of-00008.safetensors");
    let whole = fs::metadata(&path).unwrap().len();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole - 1).unwrap();
    let expected = CheckpointProblem::Truncated { path: path.clone(), needs: whole, has: whole - 1 };
    assert_eq!(problems(dir.path()), [expected]);
    // Cut within the header, and before it.
    for has in [100, 5] {
        file.set_len(has).unwrap();
        let found = problems(dir.path());
        assert!(matches!(&found[..], [CheckpointProblem::Truncated { has: h, .. }] if *h == has), "{found:#?}");
    }
}

#[test]
fn shapes_formats_and_missing_tensors_are_named_at_once() {
    let dir = tiny();
    edit(dir.path(), "config.json", |config| config["vocab_size"] = 513.into());
    edit_header(&dir.path().join("model.safetensors"), |header| {
        let header = header.as_object_mut().unwrap();
        header["model.layers.0.mlp.up_proj.weight"]["dtype"] = "F8_E4M3".into();
        header.remove("model.layers.2.self_attn.q_norm.weight");
    });
    let found = problems(dir.path());
    let expected = [
        CheckpointProblem::UnsupportedDtype {
            tensor: "model.layers.0.mlp.up_proj.weight".into(),
            dtype: "F8_E4M3".into(),
        },
        CheckpointProblem::MissingTensor { tensor: "model.layers.2.self_attn.q_norm.weight".into() },
        CheckpointProblem::Shape {
            tensor: "model.embed_tokens.weight".into(),
            shape: vec![512, 128],
            expected: vec![513, 128],
        },
    ];
    assert_eq!(found, expected);
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("has shape [512, 128], config.json asks for [513, 128]"), "{message}");
}

#[test]
fn configuration_and_files_are_judged_together() {
    let dir = sharded();
    edit(dir.path(), "config.json", |config| config["architectures"] = json!(["GemmaForCausalLM"]));
    fs::remove_file(dir.path().join("model-00001-of-00008.safetensors")).unwrap();
    let found = problems(dir.path());
    let unknown = ConfigProblem::UnsupportedArchitecture("GemmaForCausalLM".into());
    assert!(found.contains(&CheckpointProblem::Config(unknown)), "{found:#?}");
    assert!(found.iter().any(|p| matches!(p, CheckpointProblem::MissingShard { .. })), "{found:#?}");
}

#[test]
fn directories_without_weights() {
    let dir = TempDir::new().unwrap();
    let gone = dir.path().join("none");
    assert_eq!(problems(&gone), [CheckpointProblem::NoDirectory(gone.clone())]);
    fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("config.json"), "{message}");
    assert!(message.contains("(found pytorch_model.bin, which is not read)"), "{message}");
}

#[test]
fn hostile_files_are_refused() {
    let dir = tiny();
    let path = dir.path().join("model.safetensors");
    let bad = |what: &str| {
        let found = problems(dir.path());
        assert!(matches!(&found[..], [CheckpointProblem::BadHeader { .. }]), "{what}: {found:#?}");
    };
    let original = fs::read(&path).unwrap();
    let norm = "model.norm.weight";
    edit_header(&path, |h| h[norm]["data_offsets"] = json!([10, 4]));
    bad("backwards offsets");
    fs::write(&path, &original).unwrap();
    edit_header(&path, |h| h[norm]["data_offsets"] = json!([u64::MAX - 1, u64::MAX]));
    bad("overflowing offsets");
    fs::write(&path, &original).unwrap();
    edit_header(&path, |h| h[norm]["shape"] = json!([1u64 << 40, 1u64 << 40]));
    bad("overflowing shape");
    fs::write(&path, &original).unwrap();
    edit_header(&path, |h| h[norm] = json!("?"));
    bad("malformed entry");
    let mut huge = original.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, huge).unwrap();
    bad("endless header");
    let mut garbage = original;
    garbage[8..16].copy_from_slice(b"\xFFgarbage");
    fs::write(&path, garbage).unwrap();
    bad("no JSON");

    let dir = sharded();
    let outside = format!("../{}/x.safetensors", dir.path().file_name().unwrap().to_str().unwrap());
    edit(dir.path(), "model.safetensors.index.json", |i| i["weight_map"][norm] = outside.into());
    let found = problems(dir.path());
    assert!(matches!(&found[..], [CheckpointProblem::BadIndex { .. }]), "{found:#?}");
}

#[test]
fn a_seed_gives_the_same_weights_however_they_are_written() {
    let text = synth::preset("tiny-qwen3").unwrap();
    let with = |seed, shard_bytes, threads| {
        let options = SynthOptions { seed, shard_bytes, threads: Some(threads), dtype: None };
        tensors(written(&text, options).path())
    };
    let reference = with(1, u64::MAX, 1);
    assert_eq!(reference.len(), 2 + 4 * 11);
    assert_eq!(with(1, 200_000, 7), reference);
    let other = with(2, u64::MAX, 2);
    assert!(reference.iter().all(|(name, bytes)| other[name] != *bytes));
    let distinct: std::collections::BTreeSet<&[u8]> = reference.values().map(|b| &b[..64]).collect();
    assert_eq!(distinct.len(), reference.len());
}

#[test]
fn progress_reaches_the_end_and_nothing_is_overwritten() {
    let dir = TempDir::new().unwrap();
    let text = synth::preset("tiny-llama").unwrap();
    let mut heard = Vec::new();
    let written =
        synth::write(&text, dir.path(), &SynthOptions::default(), &mut |done, total| heard.push((done, total)));
    let written = written.unwrap();
    assert_eq!(heard.last(), Some(&(written.bytes, written.bytes)));
    assert!(heard.windows(2).all(|w| w[0].0 < w[1].0));
    assert_eq!(written.shards, [dir.path().join("model.safetensors")]);
    let again = synth::write(&text, dir.path(), &SynthOptions::default(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(again, SynthError::Occupied(_)), "{again}");

    // A shard that cannot be made takes back those that were.
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("model-00002-of-00008.safetensors")).unwrap();
    let options = SynthOptions { shard_bytes: 300_000, ..SynthOptions::default() };
    let error = synth::write(&synth::preset("tiny-qwen3").unwrap(), dir.path(), &options, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("model-00002-of-00008.safetensors"), "{error}");
    assert!(!dir.path().join("model-00001-of-00008.safetensors").exists());
}

#[test]
fn the_written_tokenizer_speaks() {
    let dir = tiny();
    let text = Text::load(dir.path()).unwrap().unwrap();
    let ids = text.encode("héllo 👋\n", false).unwrap();
    assert_eq!(ids.len(), "héllo 👋\n".len());
    assert_eq!(text.decode(&ids, true).unwrap(), "héllo 👋\n");
    let message = ChatMessage { role: "user".into(), content: "hi".into() };
    let rendered = text.chat(&[message], &ChatOptions::default()).unwrap();
    assert_eq!(rendered, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = text.encode(&rendered, false).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 258).count(), 1);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().config.eos, [258]);
}
