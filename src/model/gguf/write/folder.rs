//! Converting the folder of a checkpoint: its JSON files, and its safetensors files with their headers.

use crate::model::python_json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::f16;
use half::slice::HalfFloatSliceExt;
use serde_json::Value as Json;

use super::super::container::Value;
use super::{
    FileType, GgufWritten, SourceRows, SourceType, WriteError, metadata, model, tensors, text, type_of, write,
};
use crate::config::file;

/// The maximum length of a safetensors header in bytes, as the format's own library defines it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Computes bytes of the tensor of a name, from a byte on. Returns false if there is no such tensor, or if it has fewer
/// bytes.
pub type ReadWeights<'a> = dyn Fn(&str, u64, &mut [u8]) -> bool + Sync + 'a;

/// Writes the checkpoint in the folder `folder` as the file `out`, on `threads` threads. The folder holds config.json,
/// model.safetensors or several files with model.safetensors.index.json, and may hold generation_config.json,
/// tokenizer.json, tokenizer_config.json and chat_template.jinja.
///
/// # Errors The first problem found. There is then no file.
pub fn convert(folder: &Path, out: &Path, file_type: FileType, threads: usize) -> Result<GgufWritten, WriteError> {
    converted(folder, None, out, file_type, threads)
}

/// The same for a folder whose safetensors files have headers, but no data; `weights` computes them.
///
/// # Errors The first problem found. There is then no file.
pub fn convert_outline(
    folder: &Path,
    weights: &ReadWeights<'_>,
    out: &Path,
    file_type: FileType,
    threads: usize,
) -> Result<GgufWritten, WriteError> {
    converted(folder, Some(weights), out, file_type, threads)
}

fn converted(
    folder: &Path,
    weights: Option<&ReadWeights<'_>>,
    out: &Path,
    file_type: FileType,
    threads: usize,
) -> Result<GgufWritten, WriteError> {
    let json = |name: &str| read_json(&folder.join(name));
    let missing = || WriteError::Content { path: folder.join("config.json"), reason: "the file is missing".to_owned() };
    let mut config = json("config.json")?.ok_or_else(missing)?;
    let (generation, tokenizer) = (json("generation_config.json")?, json("tokenizer.json")?);
    let mut tokenizer_config = json("tokenizer_config.json")?;
    if let Some(config) = tokenizer_config.as_mut().and_then(Json::as_object_mut).filter(|c| !c.contains_key(TEMPLATE))
        && let Some(template) = read_text(&folder.join("chat_template.jinja"))?
    {
        config.insert(TEMPLATE.to_owned(), Json::String(template));
    }

    let store = Store::open(folder)?;
    let names: BTreeMap<String, (Vec<u64>, String)> =
        store.tensors.iter().map(|(name, t)| (name.clone(), (t.shape.clone(), t.dtype.clone()))).collect();
    if !names.keys().any(|name| name.starts_with("mtp.")) {
        without_mtp(&mut config);
    }
    let model = model(&config)?;
    let planned = tensors(&config, &names)?;
    let mut metadata = metadata(&config, generation.as_ref(), tokenizer.as_ref(), tokenizer_config.as_ref())?;
    metadata.insert(1, ("general.file_type".to_owned(), Value::U32(file_type.id())));
    let layers = model.layers + model.mtp_layers;
    let typed = planned.into_iter().map(|tensor| {
        let kind = type_of(file_type, &tensor.name, &tensor.dims, tensor.layer, layers, model.tied);
        (tensor, kind)
    });
    let typed: Vec<_> = typed.collect();
    if typed.iter().any(|(_, kind)| kind.is_quantised()) {
        metadata.insert(2, ("general.quantization_version".to_owned(), Value::U32(2)));
    }
    let written = write(out, &metadata, &typed, |rows, numbers| store.read(weights, rows, numbers), threads)?;
    let config_of = tokenizer_config.as_ref();
    let no_text = tokenizer.and_then(|tokenizer| text(&config, generation.as_ref(), &tokenizer, config_of).err());
    Ok(GgufWritten { no_text, ..written })
}

/// The key of the chat template in tokenizer_config.json.
const TEMPLATE: &str = "chat_template";

/// Takes the multi-token-prediction block, which the checkpoint does not have, out of its configuration.
fn without_mtp(config: &mut Json) {
    let clear = |config: Option<&mut Json>| {
        if let Some(layers) = config.and_then(|config| config.get_mut("mtp_num_hidden_layers")) {
            *layers = 0.into();
        }
    };
    clear(config.get_mut("text_config"));
    clear(Some(config));
}

fn read_text(path: &Path) -> Result<Option<String>, WriteError> {
    match file::read_text(path, file::LARGE) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(WriteError::io("read", path)(error)),
    }
}

fn read_json(path: &Path) -> Result<Option<Json>, WriteError> {
    let wrong = |error: serde_json::Error| WriteError::Content { path: path.to_owned(), reason: error.to_string() };
    read_text(path)?.map(|text| python_json::parse(&text).map_err(wrong)).transpose()
}

/// A tensor of a safetensors file.
struct Tensor {
    file: usize,
    dtype: String,
    shape: Vec<u64>,
    /// The offset of its data from the beginning of the file.
    offset: u64,
    bytes: u64,
}

/// The safetensors files of a checkpoint.
struct Store {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Tensor>,
}

impl Store {
    fn open(folder: &Path) -> Result<Store, WriteError> {
        let index = folder.join("model.safetensors.index.json");
        let names: BTreeSet<String> = match read_json(&index)? {
            None => ["model.safetensors".to_owned()].into(),
            Some(json) => {
                let map = json.get("weight_map").and_then(Json::as_object);
                let wrong = || WriteError::Content { path: index.clone(), reason: "it has no weight_map".to_owned() };
                map.ok_or_else(wrong)?.values().filter_map(Json::as_str).map(str::to_owned).collect()
            }
        };
        let mut store = Store { files: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            store.add(folder.join(name))?;
        }
        Ok(store)
    }

    /// Adds the tensors of a file.
    fn add(&mut self, path: PathBuf) -> Result<(), WriteError> {
        let wrong = |reason: String| WriteError::Content { path: path.clone(), reason };
        let (file, _) = file::open(&path).map_err(WriteError::io("open", &path))?;
        let length = file.metadata().map_err(WriteError::io("read", &path))?.len();
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(WriteError::io("read", &path))?;
        let header = u64::from_le_bytes(prefix);
        let most = length.saturating_sub(8).min(MAX_HEADER_BYTES);
        if header > most {
            return Err(wrong(format!("the header has {header} bytes, must have at most {most}")));
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact_at(&mut bytes, 8).map_err(WriteError::io("read", &path))?;
        let json: Json = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let start = 8 + header;
        for (name, entry) in json.as_object().into_iter().flatten().filter(|(name, _)| *name != "__metadata__") {
            let numbers =
                |key: &str| -> Option<Vec<u64>> { entry.get(key)?.as_array()?.iter().map(Json::as_u64).collect() };
            let (Some(shape), Some(span), Some(dtype)) =
                (numbers("shape"), numbers("data_offsets"), entry.get("dtype").and_then(Json::as_str))
            else {
                return Err(wrong(format!("the description of tensor {name} is incomplete")));
            };
            let &[begin, end] = &span[..] else { return Err(wrong(format!("tensor {name} has no two offsets"))) };
            if begin > end || end > length - start {
                let has = length - start;
                return Err(wrong(format!("tensor {name} has bytes {begin} to {end}, the file has {has} of data")));
            }
            let bytes = end - begin;
            let elements = shape.iter().try_fold(1u64, |all, n| all.checked_mul(*n));
            if let Some(size) = SourceType::of(dtype).map(SourceType::bytes)
                && elements.and_then(|n| n.checked_mul(size)) != Some(bytes)
            {
                return Err(wrong(format!("tensor {name} has {bytes} bytes, its shape is {shape:?} of {dtype}")));
            }
            let tensor = Tensor { file: self.files.len(), dtype: dtype.into(), shape, offset: start + begin, bytes };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(wrong(format!("tensor {name} is in two files")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// Reads rows of a tensor.
    fn read(
        &self,
        weights: Option<&ReadWeights<'_>>,
        rows: SourceRows<'_>,
        numbers: &mut [f32],
    ) -> Result<(), WriteError> {
        let missing = || WriteError::MissingTensor(rows.tensor.to_owned());
        let tensor = self.tensors.get(rows.tensor).ok_or_else(missing)?;
        let dtype = || WriteError::Dtype { tensor: rows.tensor.to_owned(), dtype: tensor.dtype.clone() };
        let kind = SourceType::of(&tensor.dtype).ok_or_else(dtype)?;
        let (path, file) = &self.files[tensor.file];
        let row_bytes = rows.cols * kind.bytes();
        let (begin, length) = (rows.row * row_bytes, rows.rows * row_bytes);
        if begin + length > tensor.bytes {
            return Err(WriteError::SourceRows {
                tensor: rows.tensor.to_owned(),
                has: tensor.bytes / row_bytes,
                expected: rows.row + rows.rows,
            });
        }
        let mut bytes = vec![0; length as usize];
        match weights {
            None => {
                file.read_exact_at(&mut bytes, tensor.offset + begin).map_err(WriteError::io("read", path))?;
            }
            Some(weights) if weights(rows.tensor, begin, &mut bytes) => {}
            Some(_) => return Err(missing()),
        }
        match kind {
            SourceType::F32 => {
                let values = bytes.as_chunks::<4>().0.iter().zip(numbers);
                values.for_each(|(bytes, x)| *x = f32::from_le_bytes(*bytes));
            }
            SourceType::BF16 => {
                let values = bytes.as_chunks::<2>().0.iter().zip(numbers);
                values.for_each(|(bytes, x)| *x = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
            }
            SourceType::F16 => {
                let halves: Vec<f16> =
                    bytes.as_chunks::<2>().0.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect();
                halves.convert_to_f32_slice(numbers);
            }
        }
        Ok(())
    }
}
