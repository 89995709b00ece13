//! Writes a checkpoint again with quantised weights: the matrices of attention, recurrent layers and MLPs, in a format of
//! `quant::store`. Embeddings, LM heads, norms, routers, small projections and the multi-token-prediction block stay as
//! they are; so do matrices whose size a format does not have.
//!
//! Not here: random weights.

use crate::model::python_json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde_json::{Map, Value, json};

use super::{RandomWeights, RemoveOnDrop, SynthError, Written};
use crate::config::file;
use crate::memory::pack::{Format, SourceFormat};
use crate::model::checkpoint::{Checkpoint, TensorInfo};
use crate::quant::store::{BLOCK, GROUP, StoredTensor, StoredType};

/// The maximum number of threads: each has a whole matrix in memory.
const MAX_THREADS: usize = 16;

/// The ends of the names of quantised matrices.
const QUANTISED: [&str; 16] = [
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "q_a_proj.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "kv_b_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
    "in_proj_qkv.weight",
    "in_proj_qkvz.weight",
    "in_proj_z.weight",
    "mamba.in_proj.weight",
    "out_proj.weight",
];

/// A part of a tensor of the source that becomes tensors of the result.
struct Item {
    /// The tensor of the source, and its name.
    source: TensorInfo,
    name: String,
    /// The rows and columns, and the first element, of the part; the whole tensor if it is copied.
    matrix: Option<(usize, usize, u64)>,
    /// The results with their offsets in their file.
    targets: Vec<(String, StoredTensor, u64)>,
    /// Index of the result's file.
    shard: usize,
}

/// Returns the value of `quantization_config` for a format.
fn quantization(kind: StoredType) -> Value {
    let compressed = |format: &str, weights: Value| {
        json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}},
            "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_(a|b|ba)$", "re:mtp.*"],
        })
    };
    let weights = |bits: u32, kind: &str, strategy: &str, group: Option<usize>| json!({"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": true});
    let gptq = |bits: u32, ordered: bool| {
        json!({
            "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": true, "desc_act": ordered,
            "checkpoint_format": "gptq", "lm_head": false,
        })
    };
    match kind {
        StoredType::Fp8 => json!({"quant_method": "fp8", "activation_scheme": "dynamic"}),
        StoredType::Fp8Channel => compressed("float-quantized", weights(8, "float", "channel", None)),
        StoredType::Fp8Block => {
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})
        }
        StoredType::Gptq4 => gptq(4, false),
        StoredType::Gptq8 => gptq(8, false),
        StoredType::Gptq4Order => gptq(4, true),
        StoredType::Awq => json!({
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true, "version": "gemm",
        }),
        StoredType::Int4 => compressed("pack-quantized", weights(4, "int", "group", Some(GROUP))),
        StoredType::Int8 => compressed("int-quantized", weights(8, "int", "channel", None)),
        StoredType::Nvfp4 => compressed("nvfp4-pack-quantized", weights(4, "float", "tensor_group", Some(16))),
        StoredType::Mxfp4 => compressed("mxfp4-pack-quantized", weights(4, "float", "group", Some(32))),
        StoredType::Nf4 => json!({
            "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": false, "bnb_4bit_compute_dtype": "bfloat16",
        }),
        StoredType::BitsAndBytes8 => json!({
            "quant_method": "bitsandbytes", "load_in_4bit": false, "load_in_8bit": true, "llm_int8_threshold": 6.0,
        }),
    }
}

/// Returns the modules that a tensor is stored as: its name without the format's part, and the rows, the columns and the
/// first element of each. Fused experts become one module for each expert and projection. Empty if the tensor stays.
fn modules(kind: StoredType, name: &str, shape: &[u64]) -> Vec<(String, usize, usize, u64)> {
    let fits = |rows: u64, cols: u64| kind.fits(rows as usize, cols as usize);
    if name.starts_with("mtp.") {
        return Vec::new();
    }
    match *shape {
        [rows, cols] if QUANTISED.iter().any(|end| name.ends_with(end)) && fits(rows, cols) => {
            let module = name.strip_suffix("weight").unwrap_or(name);
            vec![(module.to_owned(), rows as usize, cols as usize, 0)]
        }
        [experts, rows, cols] if name.ends_with("experts.gate_up_proj") && fits(rows / 2, cols) => {
            let base = name.strip_suffix("gate_up_proj").unwrap_or(name);
            let part = |expert: u64, index: u64, part: &str| {
                let first = (expert * rows + index * rows / 2) * cols;
                (format!("{base}{expert}.{part}."), (rows / 2) as usize, cols as usize, first)
            };
            (0..experts).flat_map(|expert| [part(expert, 0, "gate_proj"), part(expert, 1, "up_proj")]).collect()
        }
        [experts, rows, cols] if name.ends_with("experts.down_proj") && fits(rows, cols) => {
            let base = name.strip_suffix("down_proj").unwrap_or(name);
            let part = |expert: u64| {
                (format!("{base}{expert}.down_proj."), rows as usize, cols as usize, expert * rows * cols)
            };
            (0..experts).map(part).collect()
        }
        _ => Vec::new(),
    }
}

/// Quantises the checkpoint in the folder `from` into the folder `out`, which is created and must not hold a checkpoint.
/// If `from` is only an outline, its weights come from `weights`. `progress` is called from time to time with the bytes
/// read and all bytes to be read.
pub fn quantise(
    from: &Path,
    weights: Option<&RandomWeights>,
    out: &Path,
    kind: StoredType,
    shard_bytes: u64,
    threads: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Written, SynthError> {
    let checkpoint = Checkpoint::open(from).map_err(|error| SynthError::Source(error.to_string()))?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| SynthError::Write { path: path.clone(), source }
    };
    std::fs::create_dir_all(out).map_err(failed(out))?;
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        if out.join(name).exists() {
            return Err(SynthError::Occupied(out.join(name)));
        }
    }
    let (items, shards) = plan(&checkpoint, kind, shard_bytes);
    let names: Vec<String> = match shards.len() {
        1 => vec!["model.safetensors".to_owned()],
        n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
    };
    let mut guard = RemoveOnDrop { paths: Vec::new() };
    let mut files = Vec::new();
    for (name, (header, bytes)) in names.iter().zip(&shards) {
        let path = out.join(name);
        guard.paths.push(path.clone());
        let file = File::create_new(&path).and_then(|file| {
            file.write_all_at(header, 0)?;
            file.set_len(header.len() as u64 + bytes)?;
            Ok(file)
        });
        files.push((file.map_err(failed(&path))?, path, header.len() as u64));
    }
    let sources: Result<Vec<File>, SynthError> = checkpoint
        .files
        .iter()
        .map(|of| file::open(&of.path).map(|(file, _)| file).map_err(|source| read_error(&of.path, source)))
        .collect();
    let sources = sources?;
    let all: u64 = checkpoint.tensors.values().map(|tensor| tensor.bytes).sum();
    let (next, done, error) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let work = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (file, path, begin) = &files[item.shard];
            let source = (&sources[item.source.file], &*checkpoint.files[item.source.file].path);
            match write_item(item, kind, weights, source, (file, path, *begin)) {
                Ok(bytes) => progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, all),
                Err(problem) => {
                    next.store(items.len(), Ordering::Relaxed);
                    error.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(problem);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, MAX_THREADS) {
            scope.spawn(work);
        }
        work();
    });
    if let Some(error) = error.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    let total = shards.iter().map(|(_, bytes)| bytes).sum();
    if names.len() > 1 {
        let map: BTreeMap<&str, &str> = items
            .iter()
            .flat_map(|item| item.targets.iter().map(|(name, ..)| (name.as_str(), names[item.shard].as_str())))
            .collect();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        let path = out.join("model.safetensors.index.json");
        guard.paths.push(path.clone());
        std::fs::write(&path, format!("{index:#}\n")).map_err(failed(&path))?;
    }
    let tokenizer = copy_texts(from, out, kind)?;
    guard.paths.clear();
    let parameters = checkpoint.tensors.values().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
    Ok(Written { parameters, bytes: total, shards: files.into_iter().map(|(_, path, _)| path).collect(), tokenizer })
}

fn read_error(path: &Path, source: io::Error) -> SynthError {
    SynthError::Read { path: path.to_owned(), source }
}

/// Copies the files beside the weights; config.json, which is last, gets its `quantization_config`. Returns whether
/// there is a tokenizer.
fn copy_texts(from: &Path, out: &Path, kind: StoredType) -> Result<bool, SynthError> {
    let failed = |path: PathBuf| move |source: io::Error| SynthError::Write { path, source };
    for name in ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        if from.join(name).is_file() {
            std::fs::copy(from.join(name), out.join(name)).map_err(failed(out.join(name)))?;
        }
    }
    let path = from.join("config.json");
    let text = file::read_text(&path, file::SMALL).map_err(|source| read_error(&path, source))?;
    let mut config: Value = python_json::parse(&text).map_err(|error| SynthError::Source(error.to_string()))?;
    config["quantization_config"] = quantization(kind);
    let path = out.join("config.json");
    std::fs::write(&path, format!("{config:#}\n")).map_err(failed(path))?;
    Ok(from.join("tokenizer.json").is_file())
}

/// Returns the items and, for each file of the result, its header and the bytes after it.
fn plan(checkpoint: &Checkpoint, kind: StoredType, shard_bytes: u64) -> (Vec<Item>, Vec<(Vec<u8>, u64)>) {
    let mut items = Vec::new();
    let (mut headers, mut header, mut filled) = (Vec::new(), Map::new(), 0u64);
    for (name, source) in &checkpoint.tensors {
        let parts = modules(kind, name, &source.shape);
        let copy = parts.is_empty().then(|| {
            let tensor = StoredTensor { part: "", dtype: "", shape: source.shape.clone(), bytes: source.bytes };
            (None, vec![(name.clone(), tensor)])
        });
        let quantised = parts.into_iter().map(|(module, rows, cols, first)| {
            let tensors = kind.tensors(rows, cols).into_iter();
            (Some((rows, cols, first)), tensors.map(|tensor| (format!("{module}{}", tensor.part), tensor)).collect())
        });
        for (matrix, tensors) in copy.into_iter().chain(quantised) {
            let bytes: u64 = tensors.iter().map(|(_, tensor): &(_, StoredTensor)| tensor.bytes).sum();
            if filled + bytes > shard_bytes && !header.is_empty() {
                headers.push(finish(std::mem::take(&mut header), filled));
                filled = 0;
            }
            let mut targets = Vec::new();
            for (name, tensor) in tensors {
                // Numbers stay in their format.
                let dtype = if matrix.is_none() { source.dtype.as_str() } else { tensor.dtype };
                let offsets = [filled, filled + tensor.bytes];
                header.insert(name.clone(), json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}));
                let at = filled;
                filled += tensor.bytes;
                targets.push((name, tensor, at));
            }
            items.push(Item { source: source.clone(), name: name.clone(), matrix, targets, shard: headers.len() });
        }
    }
    headers.push(finish(header, filled));
    (items, headers)
}

fn finish(header: Map<String, Value>, bytes: u64) -> (Vec<u8>, u64) {
    let mut text = Value::Object(header).to_string();
    // The data begins at a multiple of 8.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.as_bytes());
    (header, bytes)
}

/// Writes the tensors of an item, and returns the bytes that it read.
fn write_item(
    item: &Item,
    kind: StoredType,
    weights: Option<&RandomWeights>,
    (source, source_path): (&File, &Path),
    (file, path, begin): (&File, &Path, u64),
) -> Result<u64, SynthError> {
    let put = |bytes: &[u8], at: u64| {
        file.write_all_at(bytes, begin + at).map_err(|source| SynthError::Write { path: path.to_owned(), source })
    };
    // From a byte of the source's tensor on.
    let read = |bytes: &mut [u8], at: u64| match weights {
        None => source.read_exact_at(bytes, item.source.offset + at).map_err(|error| read_error(source_path, error)),
        Some(weights) if weights.read(&item.name, at, bytes) => Ok(()),
        Some(_) => Err(SynthError::Source(format!("{} is not a tensor of this size", item.name))),
    };
    let Some((rows, cols, first)) = item.matrix else {
        let mut bytes = vec![0; (item.source.bytes as usize).min(1 << 24)];
        let step = bytes.len().max(1);
        for at in (0..item.source.bytes).step_by(step) {
            let bytes = &mut bytes[..(item.source.bytes - at).min(step as u64) as usize];
            read(bytes, at)?;
            put(bytes, item.targets[0].2 + at)?;
        }
        return Ok(item.source.bytes);
    };
    let Some(SourceFormat::Numbers(format)) = item.source.format else {
        return Err(SynthError::Source(format!("{} is not of numbers", item.source.dtype)));
    };
    let size = format.bytes();
    let mut bytes = vec![0; rows * cols * size];
    read(&mut bytes, first * size as u64)?;
    let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    let numbers: Vec<f32> = match format {
        Format::Bf16 => bytes.chunks_exact(2).map(|b| half::bf16::from_bits(pair(b)).to_f32()).collect(),
        Format::F16 => bytes.chunks_exact(2).map(|b| half::f16::from_bits(pair(b)).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    };
    let read = bytes.len() as u64;
    drop(bytes);
    for ((_, _, at), data) in item.targets.iter().zip(kind.quantise(rows, cols, &numbers)) {
        put(&data, *at)?;
    }
    Ok(read)
}
