//! Reads the headers of a checkpoint's safetensors files: a single file, or shards listed in an index. Everything that
//! a file claims about itself is validated before it is used.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use serde_json::Value;

use super::place::TensorPlace;
use super::quantised::Names;
use super::{CheckpointFile, CheckpointProblem, TensorInfo, read_text};
use crate::config::file::{self, Stamp};
use crate::memory::pack::{Format, SourceFormat};
use crate::model::config::Dtype;
use crate::model::gguf::Gguf;
use crate::model::gguf::container::TensorType;
use crate::model::gguf::tensors::{ColumnOrder, RowOrder, RowRun, Source, StoredAs};
use crate::quant::safetensors::TensorDtype;

/// The maximum header length in bytes, as the safetensors format defines it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The headers of all files, plus the set of tensors that are unknown because their file could not be read.
#[derive(Default)]
pub(super) struct Headers {
    pub(super) files: Vec<CheckpointFile>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// Tensors whose file already has a reported problem; they are not reported again as missing.
    lost: BTreeSet<String>,
    /// The sources of the rows of a GGUF model's tensors, by name. Tensors of safetensors files are stored in order.
    sources: BTreeMap<String, Source>,
    /// The factors of GGUF tensors that have one, by the tensors' names.
    factors: BTreeMap<String, Factor>,
    /// Whether value heads of gated-delta layers are used in the tiled order in which they are stored.
    tiled: bool,
    /// Set when any tensor may be lost: the single file or the index could not be read, or there are no weight files.
    all_lost: bool,
}

/// The factor of all values of a tensor.
struct Factor {
    /// The tensor that holds it.
    tensor: String,
    place: TensorPlace,
    /// Its index in that tensor.
    index: u64,
}

impl Headers {
    pub(super) fn read(dir: &Path, problems: &mut Vec<CheckpointProblem>) -> Headers {
        let mut headers = Headers::default();
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if file::is_named(&single) {
            match headers.read_file(&single, problems) {
                Some(found) => headers.tensors.extend(found),
                None => headers.all_lost = true,
            }
        } else if file::is_named(&index) {
            headers.read_shards(dir, &index, problems);
        } else {
            problems.push(CheckpointProblem::NoWeights { dir: dir.to_owned(), others: other_weights(dir) });
            headers.all_lost = true;
        }
        headers
    }

    /// Returns the tensors of a single file.
    pub(super) fn tensors_of(path: &Path) -> Result<BTreeMap<String, TensorInfo>, CheckpointProblem> {
        let mut problems = Vec::new();
        let found = Headers::default().read_file(path, &mut problems);
        match problems.into_iter().next() {
            Some(problem) => Err(problem),
            None => Ok(found.unwrap_or_default()),
        }
    }

    /// Returns headers of tensors of which only the shapes are known, as if a file had them in f32.
    pub(super) fn of_shapes(tensors: impl Iterator<Item = (String, Vec<u64>)>) -> Headers {
        let file = CheckpointFile { path: Path::new("").into(), bytes: 0, stamp: Stamp::default() };
        let tensors = tensors.map(|(name, shape)| {
            let bytes = 4 * shape.iter().product::<u64>();
            let (dtype, format) = ("F32".to_owned(), Some(SourceFormat::Numbers(Format::F32)));
            (name, TensorInfo { file: 0, dtype, format, shape, offset: 0, bytes })
        });
        Headers { files: vec![file], tensors: tensors.collect(), ..Headers::default() }
    }

    /// Returns the headers of a GGUF model, under the names that its tensors have in Hugging Face checkpoints.
    pub(super) fn of_gguf(gguf: Gguf, stamps: Vec<Stamp>) -> Headers {
        let parts = &gguf.parts;
        let files = parts.files.iter().zip(stamps).map(|(part, stamp)| CheckpointFile {
            path: part.path.as_path().into(),
            bytes: part.bytes,
            stamp,
        });
        let tensors = gguf.sources.iter().map(|(name, source)| {
            let info = parts.at(source.at);
            let tensor = TensorInfo {
                file: source.at.file,
                dtype: info.kind.name().to_owned(),
                format: Some(source_format(info.kind)),
                shape: source.shape.clone(),
                offset: info.offset,
                bytes: info.bytes,
            };
            (name.clone(), tensor)
        });
        let tiled = gguf.sources.values().any(|source| matches!(source.columns, ColumnOrder::TiledHeads { .. }));
        let (files, tensors): (Vec<CheckpointFile>, _) = (files.collect(), tensors.collect());
        let factor = |(name, source): (&String, &Source)| {
            let info = parts.at(source.scale?);
            let path = Arc::clone(&files[source.scale?.file].path);
            // One factor is that of all experts.
            let index = if info.bytes == 4 { 0 } else { source.expert.unwrap_or(0) };
            let place = TensorPlace { path, offset: info.offset + 4 * index, bytes: 4 };
            Some((name.clone(), Factor { tensor: info.name.clone(), place, index }))
        };
        let factors = gguf.sources.iter().filter_map(factor).collect();
        Headers { files, tensors, factors, sources: gguf.sources, tiled, ..Headers::default() }
    }

    /// Returns where `rows` rows of `cols` columns of a tensor, from row `from` on, are in its file, as runs of such rows.
    /// A row of the file's tensor may be several of them.
    pub(super) fn runs(&self, tensor: &str, from: u32, rows: u32, cols: u32) -> Vec<RowRun> {
        let (from, rows) = (u64::from(from), u64::from(rows));
        match self.sources.get(tensor) {
            Some(Source { order: RowOrder::TiledHeads { .. }, first, .. }) if self.tiled => {
                vec![RowRun { row: from, stored: first + from, stored_step: 1, rows }]
            }
            Some(source) => {
                let each = (source.cols / u64::from(cols)).max(1);
                let whole = |run: RowRun| RowRun {
                    row: run.row * each,
                    stored: run.stored * each,
                    rows: run.rows * each,
                    stored_step: run.stored_step,
                };
                let runs = source.runs_of(from / each, rows / each);
                // Parts of rows that are not adjacent are no run.
                let runs = runs.into_iter().filter(|run| each == 1 || run.stored_step == 1);
                runs.map(whole).collect()
            }
            None => vec![RowRun { row: from, stored: from, stored_step: 1, rows }],
        }
    }

    /// Returns where `rows` columns of a tensor's matrices, from column `from` on, are in the tensor: in their order, or
    /// nowhere if the tensor is a part of another one or has its rows in another order.
    pub(super) fn runs_of_columns(&self, tensor: &str, from: u32, rows: u32) -> Vec<RowRun> {
        let (from, rows) = (u64::from(from), u64::from(rows));
        let plain = |source: &Source| source.is_plain() && source.first == 0;
        let runs = vec![RowRun { row: from, stored: from, stored_step: 1, rows }];
        if self.sources.get(tensor).is_none_or(plain) { runs } else { Vec::new() }
    }

    /// Whether value heads of gated-delta layers are used in the tiled order: see [`crate::model::config::DeltaNet::tiled`].
    pub(super) fn tiled(&self) -> bool {
        self.tiled
    }

    /// Returns how a tensor's stored values differ from those that its name stands for.
    pub(super) fn change(&self, tensor: &str) -> StoredAs {
        self.sources.get(tensor).map_or(StoredAs::None, |source| source.change)
    }

    /// Whether these are the headers of a GGUF model, whose quantised tensors are blocks.
    pub(super) fn is_gguf(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Whether a tensor's elements may be codes.
    pub(super) fn may_be_quantised(&self, info: &TensorInfo) -> bool {
        !self.is_gguf() && TensorDtype::from_name(&info.dtype).is_some()
    }

    /// Returns what prevents a tensor from being read row by row, if anything does.
    pub(super) fn stored_specially(&self, tensor: &str) -> Option<&'static str> {
        let source = self.sources.get(tensor)?;
        match source.columns {
            ColumnOrder::TiledHeads { .. } if !self.tiled => Some("reordered columns"),
            _ => None,
        }
    }

    /// Reads the factor of all values of a tensor, if it has one.
    pub(super) fn factor(&self, tensor: &str) -> Option<Result<f32, CheckpointProblem>> {
        let factors = self.factors.get(tensor)?;
        let bytes = match factors.place.read() {
            Ok(bytes) => bytes,
            Err(problem) => return Some(Err(problem)),
        };
        let factor = bytes.first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
        Some(match factor.is_normal() {
            true => Ok(factor),
            false => Err(CheckpointProblem::Factor { tensor: factors.tensor.clone(), index: factors.index, factor }),
        })
    }

    fn read_shards(&mut self, dir: &Path, index: &Path, problems: &mut Vec<CheckpointProblem>) {
        self.all_lost = true;
        let Some(text) = read_text(index, file::LARGE, problems) else {
            return;
        };
        let mut bad = |reason: String| problems.push(CheckpointProblem::BadIndex { path: index.to_owned(), reason });
        let parsed: Value = match serde_json::from_str(&text) {
            Ok(parsed) => parsed,
            Err(error) => return bad(error.to_string()),
        };
        let Some(map) = parsed.get("weight_map").and_then(Value::as_object) else {
            return bad("weight_map is missing".to_owned());
        };
        let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in map {
            match shard.as_str() {
                // Accept a plain file name only, so that an index cannot point outside the directory.
                Some(name) if Path::new(name).file_name().is_some_and(|file| file == name) => {
                    shards.entry(name).or_default().insert(tensor);
                }
                _ => return bad(format!("weight_map puts {tensor} into {shard}, which is not a file name")),
            }
        }
        self.all_lost = false;
        for (name, tensors) in shards {
            let path = dir.join(name);
            let found = if file::is_named(&path) {
                self.read_file(&path, problems)
            } else {
                problems.push(CheckpointProblem::MissingShard { path, tensors: tensors.len() });
                None
            };
            match found {
                // The index decides which shard a tensor is read from, so a shard's other tensors are ignored.
                Some(found) => {
                    self.tensors.extend(found.into_iter().filter(|(name, _)| tensors.contains(name.as_str())))
                }
                None => self.lost.extend(tensors.into_iter().map(str::to_owned)),
            }
        }
    }

    /// Reads the header of one file and returns its tensors, or `None` if the header cannot be used. Problems go to
    /// `problems`.
    fn read_file(
        &mut self,
        path: &Path,
        problems: &mut Vec<CheckpointProblem>,
    ) -> Option<BTreeMap<String, TensorInfo>> {
        match read_header(path, self.files.len()) {
            Ok(header) => {
                let (needs, has) = (header.end_of_data, header.file.bytes);
                if has < needs {
                    // A truncated file keeps its tensors, so that their shapes and element types are checked too.
                    problems.push(CheckpointProblem::Truncated { path: path.to_owned(), needs, has });
                }
                self.files.push(header.file);
                Some(header.tensors)
            }
            Err(problem) => {
                problems.push(problem);
                None
            }
        }
    }

    /// Returns the tensor with the given name, under any of its [`spellings`].
    pub(super) fn find(&self, name: &str) -> Option<(&str, &TensorInfo)> {
        spellings(name)
            .find_map(|name| self.tensors.get_key_value(name.as_str()).map(|(name, info)| (name.as_str(), info)))
    }

    /// Whether a head of its own is there, as numbers or quantised, which counts more than a flag: fine-tunes keep a flag
    /// that is no longer true.
    pub(super) fn has_head(&self) -> bool {
        const HEAD: &str = "lm_head.weight";
        let found = |name: &str| self.find(name).is_some();
        !self.is_gguf() && (found(HEAD) || Names::new(HEAD).codes().iter().any(|name| found(name)))
    }

    /// Returns the element type of a tensor of numbers; `None` for another tensor, or if there is none.
    pub(super) fn dtype_of(&self, name: &str) -> Option<Dtype> {
        self.find(name).and_then(|(_, info)| info.dtype.parse().ok())
    }

    /// Returns where a tensor's data is.
    pub(super) fn place(&self, info: &TensorInfo) -> TensorPlace {
        let path = Arc::clone(&self.files[info.file].path);
        TensorPlace { path, offset: info.offset, bytes: info.bytes }
    }

    pub(super) fn is_lost(&self, name: &str) -> bool {
        self.all_lost || spellings(name).any(|name| self.lost.contains(name.as_str()))
    }
}

/// Returns the format of numbers of an element type.
fn numbers_of(dtype: Dtype) -> SourceFormat {
    SourceFormat::Numbers(match dtype {
        Dtype::Bf16 => Format::Bf16,
        Dtype::F16 => Format::F16,
        Dtype::F32 => Format::F32,
    })
}

/// Returns the format of a GGUF element type.
fn source_format(kind: TensorType) -> SourceFormat {
    match kind {
        TensorType::F32 => numbers_of(Dtype::F32),
        TensorType::F16 => numbers_of(Dtype::F16),
        TensorType::BF16 => numbers_of(Dtype::Bf16),
        TensorType::Blocks(blocks) => SourceFormat::Blocks(blocks),
    }
}

/// The possible prefixes of the text model's tensor names.
const PREFIXES: [&str; 6] =
    ["", "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone."];

/// Returns the number of the text model's layer that a tensor of a file belongs to, and its name in the layer; `None` for
/// tensors of other parts, such as multi-token-prediction blocks under a name of their own and the layers of encoders.
pub(super) fn layer_of(tensor: &str) -> Option<(u32, &str)> {
    let in_layers = |prefix: &&str| tensor.strip_prefix(*prefix)?.strip_prefix("layers.");
    let (number, part) = PREFIXES.iter().find_map(in_layers)?.split_once('.')?;
    Some((number.parse().ok()?, part))
}

/// Returns the names that a tensor may have in a file: as given, without the prefix `model.`, with that prefix (MTP
/// blocks), or under the prefixes that multimodal models use for their text model.
fn spellings(name: &str) -> impl Iterator<Item = String> {
    let bare = name.strip_prefix("model.").unwrap_or(name);
    let mut written = vec![name.to_owned()];
    for prefix in PREFIXES {
        let spelling = format!("{prefix}{bare}");
        if spelling != name {
            written.push(spelling);
        }
    }
    written.into_iter()
}

/// Lists up to four other weight files in the directory, for the error message.
fn other_weights(dir: &Path) -> String {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| [".bin", ".pth", ".gguf", ".safetensors"].iter().any(|end| name.ends_with(end)))
        .collect();
    names.sort();
    names.truncate(4);
    match names.as_slice() {
        [] => String::new(),
        names if names.iter().any(|name| name.ends_with(".gguf")) => {
            format!(" (found {}; a GGUF file is read if it is named itself)", names.join(", "))
        }
        names => format!(" (found {}, which is not read)", names.join(", ")),
    }
}

/// The contents of one file's header.
struct Header {
    file: CheckpointFile,
    tensors: BTreeMap<String, TensorInfo>,
    /// The minimum file length in bytes that the header requires.
    end_of_data: u64,
}

/// Reads one safetensors header. File layout: the header's length as a little-endian u64, the header as JSON, then the
/// tensor data. The offsets in the header count from the start of the data.
fn read_header(path: &Path, index: usize) -> Result<Header, CheckpointProblem> {
    let unreadable =
        |error: std::io::Error| CheckpointProblem::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let bad = |reason: String| CheckpointProblem::BadHeader { path: path.to_owned(), reason };
    let truncated = |needs: u64, has: u64| CheckpointProblem::Truncated { path: path.to_owned(), needs, has };

    let (mut file, _) = file::open(path).map_err(unreadable)?;
    let stamp = Stamp::settled(&file).map_err(unreadable)?;
    let has = stamp.len;
    if has < 8 {
        return Err(truncated(8, has));
    }
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(bad(format!("a header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")));
    }
    let data = 8 + length;
    if has < data {
        return Err(truncated(data, has));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let header: serde_json::Map<String, Value> =
        serde_json::from_slice(&header).map_err(|error| bad(error.to_string()))?;

    let mut tensors = BTreeMap::new();
    let mut end_of_data = data;
    for (name, entry) in &header {
        if name == "__metadata__" {
            continue;
        }
        let dtype = entry.get("dtype").and_then(Value::as_str);
        let shape = numbers(entry.get("shape"));
        let offsets = numbers(entry.get("data_offsets"));
        let (Some(dtype), Some(shape), Some(&[begin, end])) = (dtype, shape, offsets.as_deref()) else {
            return Err(bad(format!("the entry of tensor {name} is malformed")));
        };
        let (offset, file_end) = match (data.checked_add(begin), data.checked_add(end)) {
            (Some(offset), Some(file_end)) if begin <= end => (offset, file_end),
            _ => return Err(bad(format!("tensor {name} has the offsets {begin} and {end}"))),
        };
        if let Some(known) = TensorDtype::from_name(dtype) {
            let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
            let bytes = elements.and_then(|elements| elements.checked_mul(known.bytes() as u64));
            if bytes != Some(end - begin) {
                let held = end - begin;
                return Err(bad(format!("tensor {name} of shape {shape:?} and dtype {dtype} has {held} bytes")));
            }
        }
        end_of_data = end_of_data.max(file_end);
        let format = Dtype::from_str(dtype).ok().map(numbers_of);
        let info = TensorInfo { file: index, dtype: dtype.to_owned(), format, shape, offset, bytes: end - begin };
        tensors.insert(name.clone(), info);
    }
    Ok(Header { file: CheckpointFile { path: path.into(), bytes: has, stamp }, tensors, end_of_data })
}

fn numbers(value: Option<&Value>) -> Option<Vec<u64>> {
    value?.as_array()?.iter().map(Value::as_u64).collect()
}
