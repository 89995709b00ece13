//! A checkpoint in Hugging Face layout: its configuration, where each tensor lies in its
//! files, and the packed weights that kernels want, as plain data. Everything that is wrong
//! is reported at once. Deliberately absent: the tensors' bytes (the loader maps them by
//! path and offset).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde_json::Value;

use super::config::{ConfigProblem, Dtype, LayerKind, ModelConfig};

/// The longest header that a safetensors file may have; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Index in [`Checkpoint::files`].
    pub file: usize,
    /// The format as the file spells it, for example `BF16`.
    pub dtype: String,
    /// Elements by dimension, outermost first.
    pub shape: Vec<u64>,
    /// First byte, counted from the file's beginning.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointFile {
    /// Where it is.
    pub path: Arc<Path>,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Whether a packed weight is multiplied by a vector or taken element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// `[rows, cols]`, row-major as the sources are; keeps the sources' format.
    Matrix,
    /// `[rows]`, with `cols` 1; always f32.
    Vector,
}

/// Where the rows of a packed weight come from: row `r` of the source becomes row
/// `first_row + r * row_step` of the weight.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceRef {
    /// The tensor's name in its file.
    pub tensor: String,
    /// The file.
    pub path: Arc<Path>,
    /// First byte, counted from the file's beginning.
    pub offset: u64,
    /// Format of the bytes.
    pub dtype: Dtype,
    /// Rows of the source; its rows lie one after the other.
    pub rows: u32,
    /// Elements of a row.
    pub cols: u32,
    /// The packed row of the source's row 0.
    pub first_row: u32,
    /// Packed rows from one source row to the next.
    pub row_step: u32,
}

impl SourceRef {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols) * self.dtype.bytes()
    }
}

/// One packed weight: what a kernel reads under one name.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// For example `layers.3.qkv`, `embed` or `final_norm`.
    pub name: String,
    /// Rows of a matrix, elements of a vector.
    pub rows: u32,
    /// Elements of a row; 1 for a vector.
    pub cols: u32,
    /// Matrix or vector.
    pub kind: WeightKind,
    /// Format to pack to: a matrix keeps its sources' (f32 where they differ), a vector is f32.
    pub dtype: Dtype,
    /// Together they fill every row once.
    pub sources: Vec<SourceRef>,
}

impl WeightSpec {
    /// Elements.
    pub fn elements(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols)
    }

    /// Bytes in the target format, without the padding of any layout.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }
}

/// An opened checkpoint whose headers have been checked against its configuration.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The directory.
    pub dir: PathBuf,
    /// The model's shape.
    pub config: ModelConfig,
    /// Its safetensors files.
    pub files: Vec<CheckpointFile>,
    /// Every tensor of every file, by name; more than the model uses, perhaps.
    pub tensors: BTreeMap<String, TensorInfo>,
    weights: Vec<WeightSpec>,
}

impl Checkpoint {
    /// Reads the configuration and the headers under `dir`, and checks the one against the other.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let mut problems = Vec::new();
        if !dir.is_dir() {
            problems.push(CheckpointProblem::NoDirectory(dir.to_owned()));
            return Err(CheckpointError { problems });
        }
        let config = read_config(dir, &mut problems);
        let headers = Headers::read(dir, &mut problems);
        let weights = match &config {
            Some(config) => Specs { config, headers: &headers, problems: &mut problems, specs: Vec::new() }.build(),
            None => Vec::new(),
        };
        match config {
            Some(config) if problems.is_empty() => {
                Ok(Checkpoint { dir: dir.to_owned(), config, files: headers.files, tensors: headers.tensors, weights })
            }
            _ => Err(CheckpointError { problems }),
        }
    }

    /// The packed weights: layer by layer, then `embed`, `final_norm` and, where the head is
    /// not tied, `lm_head`.
    ///
    /// A full-attention layer `i` has, each under the prefix `layers.{i}.`: `attn_norm`, `qkv`
    /// (q, k and v rows one after the other), `qkv.bias`, `q_norm`, `k_norm`, `o`, `o.bias`,
    /// `mlp_norm`, `gate_up` (row 2j is the gate's row j, row 2j + 1 the up projection's),
    /// `gate_up.bias`, `down`, `down.bias`; those that the configuration has.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// Elements of all weights; a tied head counts once.
    pub fn parameters(&self) -> u64 {
        self.weights.iter().map(WeightSpec::elements).sum()
    }

    /// Bytes of all weights in their target formats.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(WeightSpec::bytes).sum()
    }

    /// Bytes of weights that one token at batch 1 reads: every layer, the head and one row of
    /// the embedding; keys and values not included.
    pub fn bytes_per_token(&self) -> u64 {
        let row = |weight: &WeightSpec| u64::from(weight.cols) * weight.dtype.bytes();
        self.weights
            .iter()
            .map(|weight| match weight.name.as_str() {
                "embed" if self.config.tied => weight.bytes() + row(weight),
                "embed" => row(weight),
                _ => weight.bytes(),
            })
            .sum()
    }
}

/// A checkpoint that we cannot load, with every reason.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointError {
    /// At least one.
    pub problems: Vec<CheckpointProblem>,
}

/// How many problems a message names; a missing shard alone can take hundreds of tensors away.
const PROBLEMS_SHOWN: usize = 24;

impl fmt::Display for CheckpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().take(PROBLEMS_SHOWN).enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{problem}")?;
        }
        if self.problems.len() > PROBLEMS_SHOWN {
            write!(f, "; and {} more", self.problems.len() - PROBLEMS_SHOWN)?;
        }
        Ok(())
    }
}

impl std::error::Error for CheckpointError {}

/// One reason why a checkpoint cannot be loaded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CheckpointProblem {
    /// There is no such directory.
    #[error("{} is not a directory", .0.display())]
    NoDirectory(PathBuf),
    /// The operating system refused.
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// config.json or generation_config.json.
    #[error(transparent)]
    Config(ConfigProblem),
    /// Neither model.safetensors nor its index; what else is there is named.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json{others}", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// Empty, or ` (found ..., which is not read)`.
        others: String,
    },
    /// model.safetensors.index.json is not what it should be.
    #[error("{} is not valid: {reason}", path.display())]
    BadIndex {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The index names a file that isn't there.
    #[error("shard {} is missing ({tensors} tensors)", path.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// How many tensors the index puts into it.
        tensors: usize,
    },
    /// The file ends before its tensors do.
    #[error("{} is truncated: its header needs {needs} bytes, the file has {has}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes by the header.
        needs: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// The header is not one of safetensors.
    #[error("{} has no valid safetensors header: {reason}", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The model needs a tensor that no file has.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// Its full name.
        tensor: String,
    },
    /// A tensor's shape contradicts config.json.
    #[error("tensor {tensor} has shape {shape:?}, config.json asks for {expected:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// The file's.
        shape: Vec<u64>,
        /// The configuration's.
        expected: Vec<u64>,
    },
    /// A tensor in a format that we don't read.
    #[error("tensor {tensor} has dtype {dtype}, supported are BF16, F16 and F32")]
    UnsupportedDtype {
        /// Its name.
        tensor: String,
        /// The file's spelling.
        dtype: String,
    },
}

fn read_config(dir: &Path, problems: &mut Vec<CheckpointProblem>) -> Option<ModelConfig> {
    let config = read_text(&dir.join("config.json"), problems)?;
    let generation_path = dir.join("generation_config.json");
    let generation = generation_path.exists().then(|| read_text(&generation_path, problems)).flatten();
    match ModelConfig::parse(&config, generation.as_deref()) {
        Ok(config) => Some(config),
        Err(error) => {
            problems.extend(error.problems.into_iter().map(CheckpointProblem::Config));
            None
        }
    }
}

fn read_text(path: &Path, problems: &mut Vec<CheckpointProblem>) -> Option<String> {
    std::fs::read_to_string(path)
        .map_err(|error| {
            problems.push(CheckpointProblem::Unreadable { path: path.to_owned(), reason: error.to_string() })
        })
        .ok()
}

/// The headers of all files, and which tensors were lost with a file that could not be read.
#[derive(Default)]
struct Headers {
    files: Vec<CheckpointFile>,
    tensors: BTreeMap<String, TensorInfo>,
    /// Tensors whose file has a problem of its own: not reported once more, one by one.
    lost: BTreeSet<String>,
    /// A file that cannot be read may have held anything.
    all_lost: bool,
}

impl Headers {
    fn read(dir: &Path, problems: &mut Vec<CheckpointProblem>) -> Headers {
        let mut headers = Headers::default();
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if single.exists() {
            match headers.read_file(&single, problems) {
                Some(found) => headers.tensors.extend(found),
                None => headers.all_lost = true,
            }
        } else if index.exists() {
            headers.read_shards(dir, &index, problems);
        } else {
            problems.push(CheckpointProblem::NoWeights { dir: dir.to_owned(), others: other_weights(dir) });
            headers.all_lost = true;
        }
        headers
    }

    fn read_shards(&mut self, dir: &Path, index: &Path, problems: &mut Vec<CheckpointProblem>) {
        self.all_lost = true;
        let Some(text) = read_text(index, problems) else {
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
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in map {
            match shard.as_str() {
                // A name, not a way out of the directory.
                Some(name) if Path::new(name).file_name().is_some_and(|file| file == name) => {
                    shards.entry(name).or_default().push(tensor);
                }
                _ => return bad(format!("weight_map puts {tensor} into {shard}, which is not a file name")),
            }
        }
        self.all_lost = false;
        for (name, tensors) in shards {
            let path = dir.join(name);
            let found = if path.exists() {
                self.read_file(&path, problems)
            } else {
                problems.push(CheckpointProblem::MissingShard { path, tensors: tensors.len() });
                None
            };
            match found {
                // The index has the last word on which shard a tensor is read from.
                Some(found) => {
                    self.tensors.extend(found.into_iter().filter(|(name, _)| tensors.contains(&name.as_str())))
                }
                None => self.lost.extend(tensors.into_iter().map(str::to_owned)),
            }
        }
    }

    /// The tensors of one file; `None` if it has a problem.
    fn read_file(
        &mut self,
        path: &Path,
        problems: &mut Vec<CheckpointProblem>,
    ) -> Option<BTreeMap<String, TensorInfo>> {
        match read_header(path, self.files.len()) {
            Ok(header) => {
                let (needs, has) = (header.end_of_data, header.file.bytes);
                if has < needs {
                    // The tensors are kept, so that their shapes and formats are checked too.
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

    /// The tensor of that name, with the prefix `model.` or without it.
    fn find(&self, name: &str) -> Option<(&str, &TensorInfo)> {
        let bare = name.strip_prefix("model.").unwrap_or(name);
        [name, bare]
            .into_iter()
            .find_map(|name| self.tensors.get_key_value(name).map(|(name, info)| (name.as_str(), info)))
    }

    fn is_lost(&self, name: &str) -> bool {
        let bare = name.strip_prefix("model.").unwrap_or(name);
        self.all_lost || self.lost.contains(name) || self.lost.contains(bare)
    }
}

/// What else lies in the directory that looks like weights, for the message.
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
    if names.is_empty() { String::new() } else { format!(" (found {}, which is not read)", names.join(", ")) }
}

/// What one file says of itself.
struct Header {
    file: CheckpointFile,
    tensors: BTreeMap<String, TensorInfo>,
    /// The least length that the file must have.
    end_of_data: u64,
}

/// Reads one safetensors header. Layout: u64 length of the header, its JSON, then the data
/// that the header's offsets count from.
fn read_header(path: &Path, index: usize) -> Result<Header, CheckpointProblem> {
    let unreadable =
        |error: std::io::Error| CheckpointProblem::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let bad = |reason: String| CheckpointProblem::BadHeader { path: path.to_owned(), reason };
    let truncated = |needs: u64, has: u64| CheckpointProblem::Truncated { path: path.to_owned(), needs, has };

    let mut file = File::open(path).map_err(unreadable)?;
    let has = file.metadata().map_err(unreadable)?.len();
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
        if let Ok(known) = Dtype::from_str(dtype) {
            let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
            let bytes = elements.and_then(|elements| elements.checked_mul(known.bytes()));
            if bytes != Some(end - begin) {
                let held = end - begin;
                return Err(bad(format!("tensor {name} of shape {shape:?} and dtype {dtype} has {held} bytes")));
            }
        }
        end_of_data = end_of_data.max(file_end);
        let info = TensorInfo { file: index, dtype: dtype.to_owned(), shape, offset, bytes: end - begin };
        tensors.insert(name.clone(), info);
    }
    Ok(Header { file: CheckpointFile { path: path.into(), bytes: has }, tensors, end_of_data })
}

fn numbers(value: Option<&Value>) -> Option<Vec<u64>> {
    value?.as_array()?.iter().map(Value::as_u64).collect()
}

/// Builds the list of packed weights, and notes what stands in the way.
struct Specs<'a> {
    config: &'a ModelConfig,
    headers: &'a Headers,
    problems: &'a mut Vec<CheckpointProblem>,
    specs: Vec<WeightSpec>,
}

impl<'a> Specs<'a> {
    fn build(mut self) -> Vec<WeightSpec> {
        let c = self.config;
        for (layer, kind) in c.layer_kinds.iter().enumerate() {
            match kind {
                LayerKind::FullAttention => self.full_attention(layer),
            }
            self.mlp(layer);
        }
        self.stacked("embed", &[("model.embed_tokens.weight", c.vocab)], Some(c.hidden));
        self.stacked("final_norm", &[("model.norm.weight", c.hidden)], None);
        if !c.tied {
            self.stacked("lm_head", &[("lm_head.weight", c.vocab)], Some(c.hidden));
        }
        self.specs
    }

    fn full_attention(&mut self, layer: usize) {
        let c = self.config;
        let (q, kv) = (c.q_rows(), c.kv_rows());
        let name = |part: &str| format!("layers.{layer}.{part}");
        let tensor = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = |part: &str| format!("model.layers.{layer}.self_attn.{part}");

        self.stacked(&name("attn_norm"), &[(&tensor("input_layernorm.weight"), c.hidden)], None);
        let rows = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let parts = rows.map(|(part, rows)| (attention(&format!("{part}.weight")), rows));
        self.stacked(&name("qkv"), &borrowed(&parts), Some(c.hidden));
        if c.attention_bias {
            let parts = rows.map(|(part, rows)| (attention(&format!("{part}.bias")), rows));
            self.stacked(&name("qkv.bias"), &borrowed(&parts), None);
        }
        if c.qk_norm {
            self.stacked(&name("q_norm"), &[(&attention("q_norm.weight"), c.head_dim)], None);
            self.stacked(&name("k_norm"), &[(&attention("k_norm.weight"), c.head_dim)], None);
        }
        self.stacked(&name("o"), &[(&attention("o_proj.weight"), c.hidden)], Some(q));
        if c.attention_bias {
            self.stacked(&name("o.bias"), &[(&attention("o_proj.bias"), c.hidden)], None);
        }
    }

    fn mlp(&mut self, layer: usize) {
        let c = self.config;
        let name = |part: &str| format!("layers.{layer}.{part}");
        let mlp = |part: &str| format!("model.layers.{layer}.mlp.{part}");

        let norm = format!("model.layers.{layer}.post_attention_layernorm.weight");
        self.stacked(&name("mlp_norm"), &[(&norm, c.hidden)], None);
        let parts = ["gate_proj.weight", "up_proj.weight"].map(|part| (mlp(part), c.intermediate));
        self.interleaved(&name("gate_up"), &borrowed(&parts), Some(c.hidden));
        if c.mlp_bias {
            let parts = ["gate_proj.bias", "up_proj.bias"].map(|part| (mlp(part), c.intermediate));
            self.interleaved(&name("gate_up.bias"), &borrowed(&parts), None);
        }
        self.stacked(&name("down"), &[(&mlp("down_proj.weight"), c.hidden)], Some(c.intermediate));
        if c.mlp_bias {
            self.stacked(&name("down.bias"), &[(&mlp("down_proj.bias"), c.hidden)], None);
        }
    }

    /// One part below the other. `cols` is `None` for a vector.
    fn stacked(&mut self, name: &str, parts: &[(&str, u32)], cols: Option<u32>) {
        let mut first_row = 0;
        let placed = parts
            .iter()
            .map(|&(tensor, rows)| {
                let place = (tensor, rows, first_row);
                first_row += rows;
                place
            })
            .collect();
        self.push(name, placed, 1, cols);
    }

    /// A row of each part in turn; the parts have equally many.
    fn interleaved(&mut self, name: &str, parts: &[(&str, u32)], cols: Option<u32>) {
        let placed = parts.iter().zip(0..).map(|(&(tensor, rows), part)| (tensor, rows, part)).collect();
        self.push(name, placed, parts.len() as u32, cols);
    }

    fn push(&mut self, name: &str, parts: Vec<(&str, u32, u32)>, row_step: u32, cols: Option<u32>) {
        let rows = parts.iter().map(|(_, rows, _)| rows).sum();
        let mut sources = Vec::with_capacity(parts.len());
        for (tensor, rows, first_row) in parts {
            if let Some((tensor, info, dtype)) = self.resolve(tensor, rows, cols) {
                let path = self.headers.files[info.file].path.clone();
                let (offset, cols) = (info.offset, cols.unwrap_or(1));
                sources.push(SourceRef { tensor, path, offset, dtype, rows, cols, first_row, row_step });
            }
        }
        let dtype = match (cols, sources.first()) {
            (Some(_), Some(first)) if sources.iter().all(|source| source.dtype == first.dtype) => first.dtype,
            _ => Dtype::F32,
        };
        let kind = if cols.is_some() { WeightKind::Matrix } else { WeightKind::Vector };
        let spec = WeightSpec { name: name.to_owned(), rows, cols: cols.unwrap_or(1), kind, dtype, sources };
        self.specs.push(spec);
    }

    /// The tensor, if it is there with the right shape and a format that we read.
    fn resolve(&mut self, name: &str, rows: u32, cols: Option<u32>) -> Option<(String, &'a TensorInfo, Dtype)> {
        let headers: &'a Headers = self.headers;
        let Some((tensor, info)) = headers.find(name) else {
            if !self.headers.is_lost(name) {
                self.problems.push(CheckpointProblem::MissingTensor { tensor: name.to_owned() });
            }
            return None;
        };
        let expected: Vec<u64> = [Some(rows), cols].into_iter().flatten().map(u64::from).collect();
        let fits = info.shape == expected;
        if !fits {
            let (tensor, shape) = (tensor.to_owned(), info.shape.clone());
            self.problems.push(CheckpointProblem::Shape { tensor, shape, expected });
        }
        match Dtype::from_str(&info.dtype) {
            Ok(dtype) => fits.then(|| (tensor.to_owned(), info, dtype)),
            Err(_) => {
                let (tensor, dtype) = (tensor.to_owned(), info.dtype.clone());
                self.problems.push(CheckpointProblem::UnsupportedDtype { tensor, dtype });
                None
            }
        }
    }
}

fn borrowed<const N: usize>(parts: &[(String, u32); N]) -> [(&str, u32); N] {
    parts.each_ref().map(|(name, rows)| (name.as_str(), *rows))
}
