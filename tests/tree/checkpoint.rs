//! Tests of checkpoints on disk: a checkpoint written by `synth` opens with the right list of weights, and a broken one
//! is refused with all its problems at once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ostinato::memory::pack::{Format, SourceFormat};
use ostinato::model::checkpoint::{Checkpoint, CheckpointProblem, WeightKind, WeightSpec};
use ostinato::model::config::{ConfigProblem, Dtype};
use ostinato::model::synth::{self, SynthError, SynthOptions};
use ostinato::model::text::Text;
use ostinato::model::text::chat::{ChatMessage, ChatOptions};
use ostinato::telemetry::with_causes;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Returns the config.json of a preset with some keys replaced.
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

/// Rewrites the JSON header of a safetensors file, padded to at least its old length.
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

/// Returns a packed weight as f32, built element by element from its sources as the loader must do it. Panics if a row
/// has no source or more than one.
fn pack(spec: &WeightSpec) -> Vec<f32> {
    let mut packed = vec![f32::NAN; spec.elements() as usize];
    for source in &spec.sources {
        let mut bytes = vec![0; source.map.bytes() as usize];
        let file = fs::File::open(&source.path).unwrap();
        match source.transposed {
            None => file.read_exact_at(&mut bytes, source.offset).unwrap(),
            Some(of) => {
                let size = source.map.format.row_bytes(1) as usize;
                for (i, element) in bytes.chunks_mut(size).enumerate() {
                    let (row, col) = (i / source.map.cols as usize, i % source.map.cols as usize);
                    let at = source.offset + ((col * of.width as usize + of.first as usize + row) * size) as u64;
                    file.read_exact_at(element, at).unwrap();
                }
            }
        }
        let SourceFormat::Numbers(format) = source.map.format else { panic!("{:?}", source.map.format) };
        let values: Vec<f32> = match format {
            Format::Bf16 => bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Format::F16 => bytes.chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Format::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
            Format::Codes(_) => unreachable!("numbers"),
        };
        let values: Vec<f32> =
            values.into_iter().map(|v| if source.map.plus == 0.0 { v } else { v + source.map.plus }).collect();
        for row in 0..source.map.rows {
            let to = (source.map.first_row + row * source.map.row_step) as usize * spec.cols as usize;
            let from = (row * source.map.cols) as usize;
            let target = &mut packed[to..to + source.map.cols as usize];
            assert!(target.iter().all(|v| v.is_nan()), "{}: row {row} of {} written twice", spec.name, source.tensor);
            target.copy_from_slice(&values[from..from + source.map.cols as usize]);
        }
    }
    assert!(packed.iter().all(|v| !v.is_nan()), "{} has rows without a source", spec.name);
    packed
}

/// Returns every tensor by name, read with the safetensors crate so that the reader is independent of ours.
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

    let shape = |name: &str| (specs[name].rows, specs[name].cols, specs[name].kind, specs[name].format);
    assert_eq!(shape("layers.3.qkv"), (256 + 2 * 128, 128, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("layers.0.o"), (128, 256, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("layers.0.gate_up"), (768, 128, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("layers.0.down"), (128, 384, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("layers.0.q_norm"), (64, 1, WeightKind::Vector, Format::F32));
    assert_eq!(shape("embed"), (512, 128, WeightKind::Matrix, Format::Bf16));

    // Every row is in its place, compared with what the independent reader gives.
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
    assert_eq!(find("lm_head").unwrap().format, Format::F16);
    for (name, rows) in [("qkv.bias", 128 + 2 * 32), ("o.bias", 128), ("gate_up.bias", 704), ("down.bias", 128)] {
        let spec = find(&format!("layers.2.{name}")).unwrap();
        assert_eq!((spec.rows, spec.cols, spec.kind, spec.format), (rows, 1, WeightKind::Vector, Format::F32));
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
    // A token reads one row of the embedding and all of the LM head.
    let embed = find("embed").unwrap();
    assert_eq!(checkpoint.bytes_per_token(), checkpoint.weight_bytes() - embed.bytes() + 2 * 128);
    assert_eq!(checkpoint.config.dtype, Some(Dtype::F16));
}

/// Returns every packed weight by name, built by [`pack`].
fn packed(dir: &Path) -> BTreeMap<String, Vec<f32>> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let packed: BTreeMap<_, _> = checkpoint.weights().iter().map(|w| (w.name.clone(), pack(w))).collect();
    assert_eq!(packed.len(), checkpoint.weights().len());
    packed
}

/// Replaces the checkpoint's weights file with one of these tensors, all of them bf16.
fn rewrite(dir: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<u8>)>) {
    use safetensors::tensor::{Dtype, TensorView};
    let views = tensors
        .iter()
        .map(|(name, (shape, bytes))| (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// Returns every tensor by name with its shape and bytes.
fn shaped(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    read.tensors().into_iter().map(|(name, view)| (name, (view.shape().to_vec(), view.data().to_vec()))).collect()
}

/// Returns rows `from..to` of a matrix with `cols` columns.
fn rows(matrix: &[f32], from: usize, to: usize, cols: usize) -> Vec<f32> {
    matrix[from * cols..to * cols].to_vec()
}

fn one_more(weights: &[f32]) -> Vec<f32> {
    weights.iter().map(|w| 1.0 + w).collect()
}

#[test]
fn weights_of_a_hybrid() {
    let dir = written(&synth::preset("tiny-qwen3.5").unwrap(), SynthOptions::default());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let c = checkpoint.config.clone();
    let (raw, packed) = (tensors(dir.path()), packed(dir.path()));
    assert!(raw.keys().all(|name| name.starts_with("model.language_model.") || name.starts_with("mtp.")), "{raw:?}");
    let mut expected: BTreeSet<String> = ["embed", "final_norm"].map(str::to_owned).into();
    let attention = ["attn_norm", "qkv", "q_norm", "k_norm", "o"];
    let delta = ["attn_norm", "in_proj", "conv", "a_log", "dt_bias", "delta_norm", "o"];
    let mlp = ["mlp_norm", "gate_up", "down"];
    for layer in 0..4 {
        let mixer = if layer == 3 { &attention[..] } else { &delta };
        expected.extend(mixer.iter().chain(&mlp).map(|part| format!("layers.{layer}.{part}")));
    }
    let further = ["embed_norm", "hidden_norm", "fc", "final_norm"];
    expected.extend(attention.iter().chain(&mlp).chain(&further).map(|part| format!("mtp.{part}")));
    assert_eq!(packed.keys().cloned().collect::<BTreeSet<_>>(), expected);

    // The input projections are stacked in the order qkv, z, b, a. The hidden size is 128; there are 2 key heads and 4
    // value heads of 32 dimensions.
    let tensor = |name: &str| bf16(&raw[&format!("model.language_model.layers.{name}")]);
    let parts = ["qkv", "z", "b", "a"].map(|part| tensor(&format!("1.linear_attn.in_proj_{part}.weight")));
    assert_eq!(parts.each_ref().map(|p| p.len() / 128), [256, 128, 4, 4]);
    assert_eq!(packed["layers.1.in_proj"], parts.concat());
    // The convolution keeps the checkpoint's layout [channel][tap].
    assert_eq!(packed["layers.1.conv"].len(), 256 * 4);
    assert_eq!(packed["layers.1.conv"], tensor("1.linear_attn.conv1d.weight"));
    assert_eq!(packed["layers.1.a_log"], tensor("1.linear_attn.A_log"));
    assert_eq!(packed["layers.1.dt_bias"], tensor("1.linear_attn.dt_bias"));
    assert_eq!(packed["layers.1.o"], tensor("1.linear_attn.out_proj.weight"));
    // The gated norm is stored as the factor that is applied; all other norms of this family are stored minus one.
    assert_eq!(packed["layers.1.delta_norm"], tensor("1.linear_attn.norm.weight"));
    assert_eq!(packed["layers.1.attn_norm"], one_more(&tensor("1.input_layernorm.weight")));
    assert_eq!(packed["layers.3.mlp_norm"], one_more(&tensor("3.post_attention_layernorm.weight")));
    assert_eq!(packed["layers.3.q_norm"], one_more(&tensor("3.self_attn.q_norm.weight")));
    assert_eq!(packed["layers.3.k_norm"], one_more(&tensor("3.self_attn.k_norm.weight")));
    assert_eq!(packed["final_norm"], one_more(&bf16(&raw["model.language_model.norm.weight"])));

    // The rows of `qkv` are the queries of the 4 heads of 64 dimensions, then keys, values and the heads' gates. In the
    // checkpoint each head's gate follows its query.
    let q = tensor("3.self_attn.q_proj.weight");
    let mut qkv: Vec<f32> = (0..4).flat_map(|head| rows(&q, 128 * head, 128 * head + 64, 128)).collect();
    qkv.extend(tensor("3.self_attn.k_proj.weight"));
    qkv.extend(tensor("3.self_attn.v_proj.weight"));
    qkv.extend((0..4).flat_map(|head| rows(&q, 128 * head + 64, 128 * head + 128, 128)));
    assert_eq!(qkv.len() / 128, c.qkv_rows(&c.attention_kinds[0]) as usize);
    assert_eq!(packed["layers.3.qkv"], qkv);

    assert!(checkpoint.has_mtp());
    assert_eq!(packed["mtp.fc"], bf16(&raw["mtp.fc.weight"]));
    assert_eq!(packed["mtp.embed_norm"], one_more(&bf16(&raw["mtp.pre_fc_norm_embedding.weight"])));
    assert_eq!(packed["mtp.hidden_norm"], one_more(&bf16(&raw["mtp.pre_fc_norm_hidden.weight"])));
    assert_eq!(packed["mtp.final_norm"], one_more(&bf16(&raw["mtp.norm.weight"])));
    assert_eq!(packed["mtp.down"], bf16(&raw["mtp.layers.0.mlp.down_proj.weight"]));
    let q = bf16(&raw["mtp.layers.0.self_attn.q_proj.weight"]);
    assert_eq!(packed["mtp.qkv"][..64 * 128], q[..64 * 128]);
    assert_eq!(packed["mtp.qkv"][64 * 128..128 * 128], q[128 * 128..192 * 128]);

    let elements: u64 = raw.values().map(|bytes| bytes.len() as u64 / 2).sum();
    let of_mtp: u64 = raw.iter().filter(|(n, _)| n.starts_with("mtp.")).map(|(_, b)| b.len() as u64 / 2).sum();
    assert_eq!((checkpoint.parameters(), checkpoint.active_parameters()), (elements, elements - of_mtp));
    let main = checkpoint.weights().iter().filter(|w| !w.is_mtp()).map(WeightSpec::bytes).sum::<u64>();
    assert_eq!(checkpoint.bytes_per_token(), main + 2 * 128);
}

#[test]
fn hybrids_under_every_name_and_without_further_tokens() {
    let dir = written(&synth::preset("tiny-qwen3.5").unwrap(), SynthOptions::default());
    let (all, reference) = (shaped(dir.path()), packed(dir.path()));
    let renamed = |change: &dyn Fn(&str) -> Option<String>| {
        let tensors = all.iter().filter_map(|(name, tensor)| Some((change(name)?, tensor.clone()))).collect();
        rewrite(dir.path(), &tensors);
        packed(dir.path())
    };
    let root = "model.language_model.";
    for prefix in ["model.", "", "language_model.model.", "language_model."] {
        let change =
            |name: &str| Some(name.strip_prefix(root).map_or(name.to_owned(), |rest| format!("{prefix}{rest}")));
        assert_eq!(renamed(&change), reference, "{prefix}");
    }
    let below = |name: &str| Some(if name.starts_with("mtp.") { format!("model.{name}") } else { name.to_owned() });
    assert_eq!(renamed(&below), reference);
    // Tensors that the model does not use are ignored.
    let mut more = all.clone();
    more.insert("model.visual.blocks.0.norm1.weight".to_owned(), (vec![4], vec![0; 8]));
    rewrite(dir.path(), &more);
    assert_eq!(packed(dir.path()), reference);

    let without = renamed(&|name| (!name.starts_with("mtp.")).then(|| name.to_owned()));
    assert!(without.keys().all(|name| !name.starts_with("mtp.")) && without.len() < reference.len());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.has_mtp(), checkpoint.config.mtp_layers), (false, 1));
    // An incomplete set of `mtp.` tensors is an error that names the missing tensor.
    rewrite(
        dir.path(),
        &all.iter().filter(|(n, _)| *n != "mtp.norm.weight").map(|(n, t)| (n.clone(), t.clone())).collect(),
    );
    assert_eq!(problems(dir.path()), [CheckpointProblem::MissingTensor { tensor: "mtp.norm.weight".into() }]);
}

/// Goal: the router, the experts and the shared expert are read from the right tensors, and the parameter and byte
/// counts that an operator sees are correct. Experts in one tensor per expert and experts in one fused tensor give the
/// same weights.
#[test]
fn experts_one_by_one_and_fused() {
    let dir = written(&synth::preset("tiny-qwen3.5-moe").unwrap(), SynthOptions::default());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let (all, fused) = (shaped(dir.path()), packed(dir.path()));
    let tensor = |name: &str| bf16(&all[&format!("model.language_model.layers.2.mlp.{name}")].1);
    // 8 experts with an intermediate size of 64 and a shared expert of 96; the hidden size is 128.
    assert_eq!(fused["layers.2.router"], [tensor("gate.weight"), tensor("shared_expert_gate.weight")].concat());
    let both = tensor("experts.gate_up_proj");
    let interleaved: Vec<f32> = (0..8)
        .flat_map(|e| (0..64).flat_map(move |j| [128 * e + j, 128 * e + 64 + j]))
        .flat_map(|row| rows(&both, row, row + 1, 128))
        .collect();
    assert_eq!(fused["layers.2.experts.gate_up"], interleaved);
    assert_eq!(fused["layers.2.experts.down"], tensor("experts.down_proj"));
    assert_eq!(fused["layers.2.shared.down"], tensor("shared_expert.down_proj.weight"));
    let (gate, up) = (tensor("shared_expert.gate_proj.weight"), tensor("shared_expert.up_proj.weight"));
    for (j, pair) in fused["layers.2.shared.gate_up"].chunks(2 * 128).enumerate() {
        assert_eq!((&pair[..128], &pair[128..]), (&gate[128 * j..128 * (j + 1)], &up[128 * j..128 * (j + 1)]));
    }
    let spec = |name: &str| checkpoint.weights().iter().find(|w| w.name == name).unwrap();
    let shape = |name: &str| (spec(name).rows, spec(name).cols, spec(name).kind, spec(name).format);
    assert_eq!(shape("mtp.experts.gate_up"), (8 * 2 * 64, 128, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("mtp.experts.down"), (8 * 128, 64, WeightKind::Matrix, Format::Bf16));
    assert_eq!(shape("layers.0.router"), (9, 128, WeightKind::Matrix, Format::Bf16));

    // A token reads 2 of 8 experts in each of 4 layers, nothing of the multi-token prediction block, and one row of the
    // untied embedding.
    let of_experts = 4 * 8 * 3 * 64 * 128u64;
    let main: Vec<&WeightSpec> = checkpoint.weights().iter().filter(|w| !w.is_mtp()).collect();
    let elements: u64 = main.iter().map(|w| w.elements()).sum();
    assert_eq!(main.iter().filter(|w| w.is_of_experts()).map(|w| w.elements()).sum::<u64>(), of_experts);
    assert_eq!(checkpoint.active_parameters(), elements - of_experts / 8 * 6);
    assert!(checkpoint.parameters() > elements);
    let bytes: u64 = main.iter().map(|w| w.bytes()).sum();
    assert_eq!(checkpoint.bytes_per_token(), bytes - 2 * of_experts / 8 * 6 - spec("embed").bytes() + 2 * 128);

    let mut single = all.clone();
    for (name, (shape, bytes)) in &all {
        let Some((before, part)) = name.split_once(".experts.") else { continue };
        single.remove(name);
        let each = shape[1] * shape[2] * 2;
        for (e, bytes) in bytes.chunks(each).enumerate() {
            let mut put = |part: &str, rows: usize, bytes: &[u8]| {
                let name = format!("{before}.experts.{e}.{part}.weight");
                single.insert(name, (vec![rows, shape[2]], bytes.to_vec()));
            };
            if part == "down_proj" {
                put("down_proj", shape[1], bytes);
            } else {
                put("gate_proj", shape[1] / 2, &bytes[..each / 2]);
                put("up_proj", shape[1] / 2, &bytes[each / 2..]);
            }
        }
    }
    rewrite(dir.path(), &single);
    assert_eq!(packed(dir.path()), fused);
    single.remove("model.language_model.layers.1.mlp.experts.5.up_proj.weight");
    rewrite(dir.path(), &single);
    let tensor = "model.layers.1.mlp.experts.5.up_proj.weight".to_owned();
    assert_eq!(problems(dir.path()), [CheckpointProblem::MissingTensor { tensor }]);
}

/// Goal: experts of numbers in gpt-oss's layout, each matrix transposed and with alternating rows of gate and up, are the
/// same weights. Method: the tensors of a checkpoint are written again in that layout, for an expert whose inner size is
/// half the hidden size, so that the shape of `gate_up_proj` does not tell, and for one of another size.
#[test]
fn experts_of_numbers_as_gpt_oss_has_them() {
    for inner in [64, 48] {
        let mut config: Value = serde_json::from_str(&synth::preset("tiny-qwen3.5-moe").unwrap()).unwrap();
        config["text_config"]["moe_intermediate_size"] = inner.into();
        let dir = written(&config.to_string(), SynthOptions::default());
        let (all, wanted) = (shaped(dir.path()), packed(dir.path()));
        let mut stored = all.clone();
        for (name, (shape, bytes)) in &all {
            let Some((_, part)) = name.split_once(".experts.") else { continue };
            let &[count, rows, cols] = &shape[..] else { panic!("{name}: {shape:?}") };
            let mut to = vec![0u8; bytes.len()];
            for (i, element) in bytes.chunks(2).enumerate() {
                let (expert, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
                let row = match (part, row) {
                    ("gate_up_proj", gate) if gate < rows / 2 => 2 * gate,
                    ("gate_up_proj", up) => 2 * (up - rows / 2) + 1,
                    (_, row) => row,
                };
                to[2 * ((expert * cols + col) * rows + row)..][..2].copy_from_slice(element);
            }
            stored.insert(name.clone(), (vec![count, cols, rows], to));
        }
        rewrite(dir.path(), &stored);
        assert!(packed(dir.path()) == wanted, "inner size {inner}");
    }
}

/// Goal: a head of its own counts more than `tie_word_embeddings` also if it is quantised, instead of being left out.
#[test]
fn a_quantised_head_is_not_tied_whatever_the_flag_says() {
    use safetensors::tensor::{Dtype, TensorView};
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/ct-mixed");
    let dir = TempDir::new().unwrap();
    fs::copy(fixture.join("config.json"), dir.path().join("config.json")).unwrap();
    edit(dir.path(), "config.json", |config| {
        config["tie_word_embeddings"] = true.into();
        config["quantization_config"]["ignore"] = json!([]);
        // A symmetric format of 4 bits in groups of 16.
        config["quantization_config"]["config_groups"]["group_4"]["targets"] =
            json!(["re:.*layers\\.1\\.[a-z_]+\\.q_proj$", "lm_head"]);
    });
    let bytes = fs::read(fixture.join("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut views: BTreeMap<String, TensorView<'_>> =
        read.tensors().into_iter().filter(|(name, _)| name != "lm_head.weight").collect();
    let (rows, cols) = (257usize, 64usize);
    let zeros = vec![0; rows * cols];
    let shape: Vec<u8> = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
    for (part, dtype, dims, data) in [
        ("weight_packed", Dtype::I32, vec![rows, cols / 8], &zeros[..rows * cols / 2]),
        ("weight_scale", Dtype::BF16, vec![rows, cols / 16], &zeros[..rows * cols / 8]),
        ("weight_shape", Dtype::I64, vec![2], &shape[..]),
    ] {
        views.insert(format!("lm_head.{part}"), TensorView::new(dtype, dims, data).unwrap());
    }
    safetensors::serialize_to_file(&views, None, &dir.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let head = checkpoint.weights().iter().find(|weight| weight.name == "lm_head").expect("a head");
    assert!(!checkpoint.config.tied && matches!(head.format, Format::Codes(_)), "{:?}", head.format);
}

/// Goal: a model does not run without biases and norms that it was trained with, and tensors that change nothing, or are
/// not of its layers, do not prevent it from running.
#[test]
fn biases_and_norms_that_nothing_uses_are_refused() {
    let dir = tiny();
    let original = shaped(dir.path());
    let with = |name: &str, byte: u8| {
        let mut tensors = original.clone();
        tensors.insert(name.to_owned(), (vec![4], vec![byte; 8]));
        rewrite(dir.path(), &tensors);
    };
    for (tensor, what) in [
        ("model.layers.0.self_attn.q_proj.bias", "bias"),
        ("model.layers.1.mlp.experts.3.down_proj.bias", "bias"),
        ("model.layers.1.pre_feedforward_layernorm.weight", "norm"),
        ("model.language_model.layers.0.self_attn.kv_a_layernorm.weight", "norm"),
    ] {
        with(tensor, 0x3f);
        let unused = CheckpointProblem::UnusedTensor { tensor: tensor.to_owned(), what };
        assert_eq!(problems(dir.path()), [unused], "{tensor}");
    }
    with("model.layers.0.self_attn.q_proj.bias", 0);
    Checkpoint::open(dir.path()).unwrap();
    for tensor in [
        "model.layers.99.self_attn.q_proj.bias",
        "model.layers.99.enorm.weight",
        "mtp.layers.0.self_attn.q_proj.bias",
        "model.visual.blocks.0.norm1.weight",
        "vision_tower.encoder.layers.0.layer_norm1.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.q_proj.input_scale",
    ] {
        with(tensor, 0x3f);
        Checkpoint::open(dir.path()).unwrap_or_else(|error| panic!("{tensor}: {error}"));
    }
}

/// Goal: weights with act-order stay codes where a product can have one order of inputs: merged rows of one order are one
/// weight, rows of several are ranges, and rows that alternate are expanded.
#[test]
fn orders_of_columns_decide_how_weights_are_packed() {
    let open = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name);
        Checkpoint::open(&folder).unwrap().weights().to_vec()
    };
    let found = |weights: &[WeightSpec], name: &str| {
        let of = weights.iter().filter(|weight| weight.merged == name);
        of.map(|weight| (weight.first_row, weight.format, weight.order.clone())).collect::<Vec<_>>()
    };
    let weights = open("gptq-order");
    for name in ["qkv", "o", "gate_up", "down"] {
        match &found(&weights, &format!("layers.1.{name}"))[..] {
            [(0, Format::Codes(_), Some(order))] => {
                assert!(order.iter().zip(0..).any(|(column, place)| *column != place));
                assert_eq!(order.iter().copied().collect::<BTreeSet<u32>>().len(), order.len(), "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    let weights = open("gptq-orders");
    let of = |name: &str| found(&weights, name);
    match &of("layers.0.qkv")[..] {
        [(0, Format::Codes(_), Some(q)), (64, Format::Codes(_), Some(k)), (128, Format::Codes(_), Some(v))] => {
            assert!(q != k && k != v && v != q);
        }
        other => panic!("{other:?}"),
    }
    match &of("layers.1.qkv")[..] {
        [(0, Format::Codes(_), Some(_)), (64, Format::Bf16, None), (128, Format::Codes(_), Some(_))] => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(of("layers.0.gate_up"), [(0, Format::F16, None)]);
    let expanded: Vec<&str> = weights.iter().filter(|w| w.is_expanded()).map(|w| w.name.as_str()).collect();
    assert_eq!(expanded, ["layers.0.gate_up", "layers.1.gate_up"]);
    let weights = open("ct-order");
    match &found(&weights, "layers.0.o")[..] {
        [(0, Format::Codes(_), None)] => {}
        other => panic!("groups of -1 are of adjacent columns: {other:?}"),
    }
    let experts = open("gptq-order-moe");
    assert_eq!(found(&experts, "layers.0.experts.down"), [(0, Format::F16, None)]);
}

#[test]
fn factors_of_a_gguf_file_that_no_tensor_can_have_are_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/gguf-nvfp4/model.gguf");
    for (index, factor) in [(2, 0.0f32), (0, f32::NAN), (3, f32::INFINITY)] {
        let mut bytes = fs::read(&fixture).unwrap();
        let (model, _) = ostinato::model::gguf::open(&fixture).unwrap();
        let tensor = "blk.1.ffn_up_exps.scale".to_owned();
        let factors = model.parts.tensor(&tensor).unwrap();
        assert_eq!(factors.dims, [4]);
        bytes[factors.offset as usize + 4 * index..][..4].copy_from_slice(&factor.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let found: Vec<String> = problems(&path).iter().map(ToString::to_string).collect();
        let problem = CheckpointProblem::Factor { tensor, index: index as u64, factor };
        assert_eq!(found, [problem.to_string()]);
    }
    // Two factors for four experts.
    let bytes = fs::read(&fixture).unwrap();
    let name = b"blk.0.ffn_up_exps.scale\x01\0\0\0\x04";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("the header has it");
    let mut changed = bytes.clone();
    changed[at + name.len() - 1] = 2;
    fs::write(&path, changed).unwrap();
    let found: Vec<String> = problems(&path).iter().map(ToString::to_string).collect();
    assert_eq!(found, ["tensor blk.0.ffn_up_exps.scale has the dimensions [2], must have [4]"]);
}

#[test]
fn mxfp4_experts_of_other_dimensions_are_refused() {
    let dir = TempDir::new().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/gpt-oss-mxfp4");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(file), dir.path().join(file)).unwrap();
    }
    Checkpoint::open(dir.path()).unwrap();
    edit_header(&dir.path().join("model.safetensors"), |header| {
        for (part, shape) in [("blocks", json!([192, 4, 2, 16])), ("scales", json!([192, 4, 2]))] {
            header[format!("model.layers.1.mlp.experts.gate_up_proj_{part}")]["shape"] = shape;
        }
    });
    let tensor = "model.layers.1.mlp.experts.gate_up_proj_blocks".to_owned();
    let problem = CheckpointProblem::Shape { tensor, shape: vec![192, 4, 2, 16], expected: vec![4, 192, 2, 16] };
    assert_eq!(problems(dir.path()), [problem]);
}

/// Goal: what stands beside a weight of bitsandbytes says how it is read, or is refused by its name. Method: fixtures whose
/// tensors are changed, byte by byte.
#[test]
fn states_of_bitsandbytes_that_say_something_else_are_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("model.safetensors");
    let copy = |name: &str| {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name);
        for file in ["config.json", "model.safetensors"] {
            fs::copy(fixture.join(file), dir.path().join(file)).unwrap();
        }
        Checkpoint::open(dir.path()).unwrap();
    };
    // Replaces bytes of a tensor and returns what is said of it.
    let changed = |name: &str, tensor: &str, find: &[u8], put: &[u8]| -> Vec<String> {
        copy(name);
        let mut bytes = fs::read(&file).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let value: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let at = |index: usize| value[tensor]["data_offsets"][index].as_u64().unwrap() as usize + 8 + header;
        let found = bytes[at(0)..at(1)].windows(find.len()).position(|window| window == find).unwrap();
        bytes[at(0) + found..][..put.len()].copy_from_slice(put);
        fs::write(&file, bytes).unwrap();
        problems(dir.path()).iter().map(ToString::to_string).collect()
    };
    let weight = "model.layers.0.self_attn.q_proj.weight";
    let state = format!("{weight}.quant_state.bitsandbytes__nf4");
    let said = "does not say how its weight is quantised";
    assert_eq!(
        changed("bnb-nf4", &state, b"\"blocksize\": 64", b"\"blocksize\": 40"),
        [format!("tensor {state} {said}: blocksize is 40, must be a multiple of 16 of at most 16777216")]
    );
    // Twice as many elements in a block, so half as many scales.
    assert_eq!(
        changed("bnb-nf4", &state, b"\"blocksize\": 64", b"\"blocksize\":128"),
        [format!("tensor {weight}.absmax has shape [64], expected [32]")]
    );
    assert_eq!(
        changed("bnb-nf4", &state, b"\"shape\": [64, 64]", b"\"shape\": [32,128]"),
        [format!("tensor {weight} is of a weight of [32, 128] rows and columns, config.json asks for [64, 64]")]
    );
    let map = format!("{weight}.quant_map");
    assert_eq!(
        changed("bnb-nf4", &map, &1f32.to_le_bytes(), &0.75f32.to_le_bytes()),
        [format!("tensor {map} {said}: code 15 is 0.75, must be 1 as nf4 has it")]
    );
    let format = "model.layers.1.mlp.up_proj.weight_format";
    assert_eq!(
        changed("bnb-int8", format, &[0], &[2]),
        [format!("tensor {format} {said}: the format is 2, must be 0 (rows)")]
    );

    // Codes in a tensor of any element type, as `bnb_4bit_quant_storage` asks for.
    copy("bnb-nf4");
    edit_header(&file, |header| {
        for (dtype, shape, part) in [("BF16", json!([1024, 1]), "q_proj"), ("F32", json!([512, 1]), "k_proj")] {
            let tensor = &mut header[format!("model.layers.0.self_attn.{part}.weight")];
            (tensor["dtype"], tensor["shape"]) = (dtype.into(), shape);
        }
    });
    Checkpoint::open(dir.path()).unwrap();
    // Without its state, a tensor is not known to be codes.
    edit_header(&file, |header| drop(header.as_object_mut().unwrap().remove(&state)));
    let found: Vec<String> = problems(dir.path()).iter().map(ToString::to_string).collect();
    let scale = "which only quantised tensors have";
    assert_eq!(found, [format!("tensor {weight} of dtype BF16 has the scale {weight}.absmax beside it, {scale}")]);
    copy("bnb-nf4");
    edit_header(&file, |header| drop(header.as_object_mut().unwrap().remove(&format!("{weight}.nested_absmax"))));
    let found: Vec<String> = problems(dir.path()).iter().map(ToString::to_string).collect();
    assert_eq!(found, [format!("tensor {weight}.nested_absmax is missing")]);
}

#[test]
fn weights_whose_inputs_must_be_scaled_are_refused() {
    let dir = TempDir::new().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/modelopt-mixed");
    for file in ["config.json", "hf_quant_config.json", "model.safetensors"] {
        fs::copy(fixture.join(file), dir.path().join(file)).unwrap();
    }
    Checkpoint::open(dir.path()).unwrap();
    let module = "model.layers.1.mlp.down_proj";
    edit_header(&dir.path().join("model.safetensors"), |header| {
        header[format!("{module}.pre_quant_scale")] = header[format!("{module}.weight_scale")].clone();
    });
    let what = "scales of its inputs (pre_quant_scale)";
    assert_eq!(problems(dir.path()), [CheckpointProblem::Stored { tensor: format!("{module}.weight"), what }]);
    // A module that the lists exclude must not be quantised.
    fs::copy(fixture.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    edit(dir.path(), "hf_quant_config.json", |config| {
        let of = &mut config["quantization"];
        of["quantized_layers"].as_object_mut().unwrap().remove(module);
        of["exclude_modules"] = json!(["lm_head", "model.layers.1.mlp*"]);
    });
    let problem = CheckpointProblem::NotQuantised { tensor: format!("{module}.weight"), module: module.to_owned() };
    assert_eq!(problems(dir.path()), [problem]);
}

#[test]
fn experts_beside_dense_layers() {
    let changes = json!({"mlp_only_layers": [1], "intermediate_size": 88});
    let dir = written(&config("tiny-qwen3-moe", changes), SynthOptions::default());
    let raw = tensors(dir.path());
    let packed = packed(dir.path());
    assert!(packed.contains_key("layers.0.experts.down") && packed.contains_key("layers.2.router"));
    assert!(!packed.contains_key("layers.1.router") && !packed.contains_key("layers.0.gate_up"));
    assert_eq!(packed["layers.1.gate_up"].len(), 2 * 88 * 128);
    assert_eq!(packed["layers.0.router"], bf16(&raw["model.layers.0.mlp.gate.weight"]));
    let down: Vec<f32> =
        (0..8).flat_map(|e| bf16(&raw[&format!("model.layers.2.mlp.experts.{e}.down_proj.weight")])).collect();
    assert_eq!(packed["layers.2.experts.down"], down);
    // Norms of this model family are stored as the factor that is applied.
    assert_eq!(packed["layers.0.attn_norm"], bf16(&raw["model.layers.0.input_layernorm.weight"]));
}

/// Goal: projections grouped by key head, as in Qwen3-Next, and separate projections give the same packed weights.
/// Method: the test splits the groups as the format defines them and writes the parts as separate tensors.
#[test]
fn grouped_and_separate_projections() {
    let dir = written(&synth::preset("tiny-qwen3-next").unwrap(), SynthOptions::default());
    let (all, grouped) = (shaped(dir.path()), packed(dir.path()));
    // 2 key heads and 4 value heads of 32 dimensions.
    let (groups, keys, values, row) = (2, 32, 2 * 32, 128 * 2);
    let mut separate = all.clone();
    for layer in 0..3 {
        let name = |part: &str| format!("model.layers.{layer}.linear_attn.in_proj_{part}.weight");
        let (_, qkvz) = separate.remove(&name("qkvz")).unwrap();
        let (_, ba) = separate.remove(&name("ba")).unwrap();
        // Returns `rows` rows of every group, starting at row `from` of the group.
        let take = |bytes: &[u8], of_group: usize, from: usize, rows: usize| -> Vec<u8> {
            let groups = bytes.chunks(of_group * row);
            groups.flat_map(|group| group[from * row..(from + rows) * row].to_vec()).collect()
        };
        let of_group = 2 * keys + 2 * values;
        assert_eq!(qkvz.len(), groups * of_group * row);
        let q = take(&qkvz, of_group, 0, keys);
        let k = take(&qkvz, of_group, keys, keys);
        let v = take(&qkvz, of_group, 2 * keys, values);
        let parts = [
            ("qkv", [q, k, v].concat()),
            ("z", take(&qkvz, of_group, 2 * keys + values, values)),
            ("b", take(&ba, 4, 0, 2)),
            ("a", take(&ba, 4, 2, 2)),
        ];
        for (part, bytes) in parts {
            separate.insert(name(part), (vec![bytes.len() / row, 128], bytes));
        }
    }
    rewrite(dir.path(), &separate);
    assert_eq!(packed(dir.path()), grouped);
    assert!(Checkpoint::open(dir.path()).unwrap().has_mtp());
    // If neither form is present, the missing tensors are reported in the form that is native to the family.
    separate.retain(|name, _| !name.contains("layers.0.linear_attn.in_proj"));
    rewrite(dir.path(), &separate);
    let missing = |part: &str| CheckpointProblem::MissingTensor {
        tensor: format!("model.layers.0.linear_attn.in_proj_{part}.weight"),
    };
    assert_eq!(problems(dir.path()), [missing("qkvz"), missing("ba")]);
}

#[test]
fn shapes_of_hybrids_are_checked() {
    let dir = written(&synth::preset("tiny-qwen3.5-moe").unwrap(), SynthOptions::default());
    edit(dir.path(), "config.json", |config| {
        config["text_config"]["linear_num_value_heads"] = 6.into();
        config["text_config"]["num_experts"] = 9.into();
    });
    let found = problems(dir.path());
    let shape = |name: &str, shape: &[u64], expected: &[u64]| CheckpointProblem::Shape {
        tensor: format!("model.language_model.layers.0.{name}"),
        shape: shape.to_vec(),
        expected: expected.to_vec(),
    };
    for problem in [
        shape("linear_attn.conv1d.weight", &[256, 1, 4], &[320, 1, 4]),
        shape("linear_attn.in_proj_qkv.weight", &[256, 128], &[320, 128]),
        shape("linear_attn.A_log", &[4], &[6]),
        shape("mlp.experts.gate_up_proj", &[8, 128, 128], &[9, 128, 128]),
        shape("mlp.experts.down_proj", &[8, 128, 64], &[9, 128, 64]),
        shape("mlp.gate.weight", &[8, 128], &[9, 128]),
    ] {
        assert!(found.contains(&problem), "{problem:?} not in {found:#?}");
    }
}

#[test]
fn as_many_layers_as_asked_for() {
    for (name, layers) in [("tiny-qwen3.5", 4), ("tiny-qwen3-moe", 5)] {
        let text = synth::with_layers(&synth::preset(name).unwrap(), layers);
        let dir = written(&text, SynthOptions { dtype: Some(Dtype::F32), ..SynthOptions::default() });
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!((checkpoint.config.layers, checkpoint.config.dtype), (layers, Some(Dtype::F32)), "{name}");
        let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
        let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let of_layers = checkpoint.tensors.keys().filter(|name| name.contains(&format!("layers.{}.", layers - 1)));
        assert!(of_layers.count() > 0 && written.len() == checkpoint.tensors.len());
    }
}

#[test]
fn names_without_the_prefix_and_mixed_formats() {
    let dir = tiny();
    let path = dir.path().join("model.safetensors");
    edit_header(&path, |header| {
        let mut renamed = serde_json::Map::new();
        for (name, mut entry) in header.as_object().unwrap().clone() {
            // f16 and bf16 elements have the same size, so the data need not change.
            if name == "model.layers.0.self_attn.k_proj.weight" || name == "model.layers.1.mlp.down_proj.weight" {
                entry["dtype"] = "F16".into();
            }
            renamed.insert(name.strip_prefix("model.").unwrap_or(&name).to_owned(), entry);
        }
        *header = Value::Object(renamed);
    });
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let format = |name: &str| checkpoint.weights().iter().find(|w| w.name == name).unwrap().format;
    assert_eq!(format("layers.0.qkv"), Format::F32);
    assert_eq!(format("layers.1.qkv"), Format::Bf16);
    assert_eq!(format("layers.1.down"), Format::F16);
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
    // Cut within the header and within its length field.
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
        header["model.layers.0.mlp.up_proj.weight"]["dtype"] = "I16".into();
        header.remove("model.layers.2.self_attn.q_norm.weight");
    });
    let found = problems(dir.path());
    let expected = [
        CheckpointProblem::UnsupportedDtype { tensor: "model.layers.0.mlp.up_proj.weight".into(), dtype: "I16".into() },
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
    let distinct: BTreeSet<&[u8]> = reference.values().map(|b| &b[..64]).collect();
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

    // If a shard cannot be created, the shards already written are removed.
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("model-00002-of-00008.safetensors")).unwrap();
    let options = SynthOptions { shard_bytes: 300_000, ..SynthOptions::default() };
    let error = synth::write(&synth::preset("tiny-qwen3").unwrap(), dir.path(), &options, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("model-00002-of-00008.safetensors"), "{error}");
    assert!(!dir.path().join("model-00001-of-00008.safetensors").exists());
}

/// Returns the error texts of the checkpoint reader and the tokenizer loader for a folder, empty where they succeed.
/// Panics after 20 seconds, because a reader that opens a pipe could block forever.
fn said_of(dir: &Path) -> (String, String) {
    let (said, heard) = std::sync::mpsc::channel();
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        let checkpoint = Checkpoint::open(&dir).map_or_else(|error| error.to_string(), |_| String::new());
        let text = Text::load(&dir).map_or_else(|error| with_causes(&error), |_| String::new());
        said.send((checkpoint, text))
    });
    heard.recv_timeout(Duration::from_secs(20)).expect("it waits for the other end of a pipe")
}

/// Goal: nothing in a model's folder can block a load or be read without end, and a file counts as absent only if no
/// directory entry has its name. Method: each file is replaced in turn by a named pipe, a device, a folder, a dangling
/// link and a sparse file of one terabyte.
#[test]
fn what_is_no_regular_file_of_a_sane_size_is_refused_by_name() {
    const MODEL: [&str; 4] = ["config.json", "generation_config.json", "model.safetensors.index.json", "SHARD"];
    const TEXT: [&str; 5] = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    ];
    let names: BTreeSet<&str> = MODEL.into_iter().chain(TEXT).chain(["model.safetensors"]).collect();
    for name in names {
        let (dir, of_text) = (if name == "model.safetensors" { tiny() } else { sharded() }, TEXT.contains(&name));
        let shard = "model-00001-of-00008.safetensors";
        let file = if name == "SHARD" { shard } else { name };
        let path = dir.path().join(file);
        let places: [(&str, &dyn Fn()); 5] = [
            ("a named pipe", &|| assert!(Command::new("mkfifo").arg(&path).status().unwrap().success())),
            ("a character device", &|| std::os::unix::fs::symlink("/dev/zero", &path).unwrap()),
            ("a directory", &|| fs::create_dir(&path).unwrap()),
            ("a symbolic link to ../blobs/0a1b", &|| std::os::unix::fs::symlink("../blobs/0a1b", &path).unwrap()),
            ("1099511627776 bytes, at most ", &|| fs::File::create(&path).unwrap().set_len(1 << 40).unwrap()),
        ];
        for (wanted, place) in places {
            let weights = file.ends_with(".safetensors");
            if weights && wanted.starts_with("10995") {
                continue;
            }
            fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).ok();
            place();
            let (checkpoint, text) = said_of(dir.path());
            let says = |said: &str| said.contains(file) && said.contains(wanted);
            assert!(says(&checkpoint) || !MODEL.contains(&name) && !weights, "{name}, {wanted}: {checkpoint}");
            assert!(says(&text) || !of_text, "{name}, {wanted}: {text}");
        }
        // With the directory entry removed, an optional file counts as absent.
        fs::remove_file(&path).unwrap();
        if name == "generation_config.json" || of_text {
            assert_eq!(said_of(dir.path()), (String::new(), String::new()), "{name}");
        }
    }
}

#[test]
fn the_written_tokenizer_speaks() {
    let dir = tiny();
    let text = Text::load(dir.path()).unwrap().unwrap();
    let ids = text.encode("héllo 👋\n", false).unwrap();
    assert_eq!(ids.len(), "héllo 👋\n".len());
    assert_eq!(text.decode(&ids, true).unwrap(), "héllo 👋\n");
    let message = ChatMessage { role: "user".into(), content: "hi".into(), ..Default::default() };
    let rendered = text.chat(&[message], &ChatOptions::default()).unwrap();
    assert_eq!(rendered, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = text.encode(&rendered, false).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 258).count(), 1);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().config.eos, [258]);
}
