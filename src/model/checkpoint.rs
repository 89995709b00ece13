//! A checkpoint in Hugging Face layout, as plain data: its configuration, the location of each tensor in its files, and
//! the packed weights that the kernels read. Opening a checkpoint reports all of its problems at once.
//!
//! Not here: the tensors' bytes. The loader reads them by path and offset.

pub mod contents;
mod draft_tokens;
mod headers;
mod place;
mod quant_state;
mod quantised;
pub mod shard;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::{ConfigProblem, ModelConfig, quantization};
use super::gguf::tensors::TensorProblem;
use super::gguf::{self, GgufError};
use crate::config::Quantize;
use crate::config::file::{self, Stamp};
use crate::memory::pack::{Format, RowMap, SourceFormat, Transposed};
use crate::quant::quantize::{INT4, INT8};
use crate::quant::safetensors::WeightError;
use headers::Headers;
pub use place::TensorPlace;
pub use quantised::{MatrixRef, QuantisedWeight};

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Index of the tensor's file in [`Checkpoint::files`].
    pub file: usize,
    /// The element type as the file spells it, for example `BF16`.
    pub dtype: String,
    /// The format of the elements, if they are numbers or blocks that are read row by row.
    pub format: Option<SourceFormat>,
    /// The size of each dimension, outermost first.
    pub shape: Vec<u64>,
    /// Byte offset of the tensor's data from the beginning of the file.
    pub offset: u64,
    /// The length of the tensor's data in bytes.
    pub bytes: u64,
}

/// One safetensors file of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointFile {
    /// The file's path.
    pub path: Arc<Path>,
    /// The file's length in bytes.
    pub bytes: u64,
    /// The file's identity, length and times when its header was read. The loader uses it to verify that it reads the
    /// weights from the same, unchanged file.
    pub stamp: Stamp,
}

/// The two kinds of packed weight: a matrix, which is multiplied by a vector, or a vector, which is read element by
/// element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// A matrix of shape `[rows, cols]`, row-major and with the element type of its sources.
    Matrix,
    /// Shape `[rows]` with `cols` = 1, or rows of `cols` elements one after the other. The element type is always f32.
    Vector,
}

/// A run of rows of a checkpoint tensor that become rows of a packed weight.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceRef {
    /// The tensor's name in its file.
    pub tensor: String,
    /// The path of the file that holds the tensor.
    pub path: Arc<Path>,
    /// Byte offset of the source's first row from the beginning of the file, or of the stored matrix whose columns its
    /// rows are; 0 for rows of a quantised weight.
    pub offset: u64,
    /// The rows and their destination in the weight.
    pub map: RowMap,
    /// The columns that the source's rows are, if the stored matrix is the transpose of the weight.
    pub transposed: Option<Transposed>,
    /// The weight of several tensors whose rows these are; `tensor` and `path` are then those of its codes.
    pub matrix: Option<MatrixRef>,
}

/// One packed weight: the data that kernels read under one name.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// The name, for example `layers.3.qkv`, `embed` or `final_norm`.
    pub name: String,
    /// The name of the merged weight of which this is a range of rows; mostly `name`. A merged matrix has several ranges
    /// if its sources have formats that no common format represents.
    pub merged: String,
    /// The row of the merged weight that is this weight's row 0.
    pub first_row: u32,
    /// The number of rows of a matrix, or of elements of a vector.
    pub rows: u32,
    /// The number of elements in a row; 1 for most vectors.
    pub cols: u32,
    /// Whether the weight is a matrix or a vector.
    pub kind: WeightKind,
    /// The order of the columns of a matrix, if it is not that of its inputs: column j is multiplied with input
    /// `order[j]`. Only for quantised weights whose groups are not of adjacent columns (act-order).
    pub order: Option<Arc<[u32]>>,
    /// The format to pack to. A matrix keeps its sources' format. If the formats differ, it becomes f32, or codes that
    /// represent all of the sources' codes exactly. A vector is always f32.
    pub format: Format,
    /// The sources. Together they fill every row of the weight exactly once.
    pub sources: Vec<SourceRef>,
}

impl WeightSpec {
    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols)
    }

    /// Returns the size in bytes in the target format, without any layout's padding.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * self.row_bytes()
    }

    /// Returns the size of a row in bytes in the target format, without any layout's padding.
    pub fn row_bytes(&self) -> u64 {
        match self.format {
            Format::Codes(codes) => codes.row_bytes(self.cols),
            format => u64::from(self.cols) * format.bytes() as u64,
        }
    }

    /// Whether the weight belongs to the multi-token-prediction (MTP) block.
    pub fn is_mtp(&self) -> bool {
        self.name.starts_with("mtp.")
    }

    /// Whether the weight is a matrix that is quantised in the checkpoint, and packed as numbers because no form of codes
    /// fits.
    pub fn is_expanded(&self) -> bool {
        let quantised = |source: &SourceRef| source.matrix.is_some() || source.map.format.codes().is_some();
        self.kind == WeightKind::Matrix && self.format.codes().is_none() && self.sources.iter().any(quantised)
    }

    /// Whether the weight stacks one matrix per routed expert: `experts.gate_up` or `experts.down`.
    pub fn is_of_experts(&self) -> bool {
        self.name.contains(".experts.")
    }

    /// Whether the weight is a matrix of a layer's shared expert: `shared.gate_up` or `shared.down`.
    pub fn is_of_shared_expert(&self) -> bool {
        self.name.contains(".shared.")
    }
}

/// An opened checkpoint. Its headers have been checked against its configuration.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The checkpoint's directory, or its (first) GGUF file.
    pub dir: PathBuf,
    /// The model's configuration.
    pub config: ModelConfig,
    /// The checkpoint's safetensors or GGUF files.
    pub files: Vec<CheckpointFile>,
    /// All tensors by name: every tensor of a single file, or of shards those that the index assigns to them. May
    /// include tensors that the model does not use.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// The files that a GGUF model embeds in place of those of a folder (configuration, tokenizer), by their names.
    /// Empty for a folder.
    pub embedded: Vec<(&'static str, Vec<u8>)>,
    /// Of a draft head: the tokens that its vocabulary stands for, `[vocab]`, in the vocabulary of the model that it drafts
    /// for. Empty for a model.
    pub draft_tokens: Vec<u32>,
    weights: Vec<WeightSpec>,
}

impl Checkpoint {
    /// Reads the configuration and the safetensors headers under `dir` and checks them against each other. If `dir` is
    /// a GGUF file, reads both from the file and the others of its model.
    ///
    /// # Errors Every problem found, if there is any. A draft head is one: it is no model of its own.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let checkpoint = Checkpoint::open_draft(dir)?;
        match checkpoint.config.draft_head {
            Some(_) => Err(CheckpointError { problems: vec![CheckpointProblem::DraftHead(checkpoint.dir)] }),
            None => Ok(checkpoint),
        }
    }

    /// Like [`Checkpoint::open`], for what may draft: a draft head, or a model.
    ///
    /// # Errors Every problem found, if there is any.
    pub fn open_draft(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let mut problems = Vec::new();
        if gguf::is_named(dir) {
            return Checkpoint::open_gguf(dir).map_err(|problems| CheckpointError { problems });
        }
        if !dir.is_dir() {
            problems.push(CheckpointProblem::NoDirectory(dir.to_owned()));
            return Err(CheckpointError { problems });
        }
        let mut config = read_config(dir, &mut problems);
        let headers = Headers::read(dir, &mut problems);
        if let Some(config) = &mut config {
            // A model that draws no tokens has no use for a head, and is often published without one.
            config.tied = !headers.has_head() && (config.tied || !config.causal);
            if let Some(dtype) = headers.dtype_of("model.embed_tokens.weight") {
                config.default_dtype(dtype);
            }
        }
        let weights = match &config {
            Some(config) => weights::build(config, &headers, &mut problems),
            None => Vec::new(),
        };
        let draft_tokens = match &config {
            Some(config) => draft_tokens::read(config, &headers, &mut problems),
            None => Vec::new(),
        };
        match config {
            Some(config) if problems.is_empty() => Ok(Checkpoint {
                dir: dir.to_owned(),
                config,
                files: headers.files,
                tensors: headers.tensors,
                embedded: Vec::new(),
                draft_tokens,
                weights,
            }),
            _ => Err(CheckpointError { problems }),
        }
    }

    /// Returns the packed weights of a model whose tensors have these names and shapes, all in f32. They have no data.
    ///
    /// # Errors Every tensor that is missing or has a wrong shape.
    pub(super) fn weights_of_shapes(
        config: &ModelConfig,
        tensors: impl Iterator<Item = (String, Vec<u64>)>,
    ) -> Result<Vec<WeightSpec>, CheckpointError> {
        let mut problems = Vec::new();
        let weights = weights::build(config, &Headers::of_shapes(tensors), &mut problems);
        if problems.is_empty() { Ok(weights) } else { Err(CheckpointError { problems }) }
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint, Vec<CheckpointProblem>> {
        let problem = |error: GgufError| match error {
            GgufError::Tensors(problems) => problems.into_iter().map(CheckpointProblem::GgufTensor).collect(),
            error => vec![CheckpointProblem::Gguf { path: path.to_owned(), error: Box::new(error) }],
        };
        let (mut gguf, stamps) = gguf::open(path).map_err(problem)?;
        let text = |name: &str| gguf.file(name).map(String::from_utf8_lossy).unwrap_or_default().into_owned();
        let mut config = ModelConfig::parse(&text("config.json"), Some(&text("generation_config.json")))
            .map_err(|error| error.problems.into_iter().map(CheckpointProblem::Config).collect::<Vec<_>>())?;
        let embedded = std::mem::take(&mut gguf.files);
        let headers = Headers::of_gguf(gguf, stamps);
        if let Some(delta) = &mut config.delta {
            delta.tiled = headers.tiled();
        }
        let mut problems = Vec::new();
        let weights = weights::build(&config, &headers, &mut problems);
        match problems.is_empty() {
            true => Ok(Checkpoint {
                dir: path.to_owned(),
                config,
                files: headers.files,
                tensors: headers.tensors,
                embedded,
                draft_tokens: Vec::new(),
                weights,
            }),
            false => Err(problems),
        }
    }

    /// Returns the tensor `name` of a module of the model and its place: one of `FOLDER/model.safetensors` inside the
    /// checkpoint's folder or, of a GGUF model, the one that stands for it. `None` if there is none.
    ///
    /// # Errors The folder's file has no header that can be read.
    pub fn module_tensor(
        &self,
        folder: &str,
        name: &str,
    ) -> Result<Option<(TensorInfo, TensorPlace)>, CheckpointProblem> {
        if !self.embedded.is_empty() {
            let info = self.tensors.get(&format!("{folder}/{name}")).cloned();
            let place = |info: TensorInfo| {
                let path = Arc::clone(&self.files[info.file].path);
                let place = TensorPlace { path, offset: info.offset, bytes: info.bytes };
                (info, place)
            };
            return Ok(info.map(place));
        }
        let path = self.dir.join(folder).join("model.safetensors");
        if !file::is_named(&path) {
            return Ok(None);
        }
        let info = Headers::tensors_of(&path)?.remove(name);
        Ok(info.map(|info| {
            let place = TensorPlace { path: path.as_path().into(), offset: info.offset, bytes: info.bytes };
            (info, place)
        }))
    }

    /// Returns the packed weights: layer by layer, then `embed`, `final_norm`, `lm_head` unless the LM head is tied to
    /// the embedding, and finally the weights of the multi-token-prediction (MTP) block. Norm weights are the actual
    /// multipliers ([`RowMap::plus`] converts zero-centred ones). Sources keep the checkpoint's element type.
    ///
    /// Layer `i` has the following weights, each under the prefix `layers.{i}.` and only where the configuration
    /// requires it:
    /// - full attention: `attn_norm`, `qkv` (the rows of q, then k, then v, then the attention output gate; each part
    ///   is ordered by head), `qkv.bias`, `q_norm`, `k_norm`, `o`, `o.bias`;
    /// - gated delta rule (linear attention): `attn_norm`, `in_proj` (the rows of q, k, v, z, b and a, in this order),
    ///   `conv` (a vector; the taps of channel c start at `conv_kernel * c`, and the last tap is for the current token;
    ///   the channels are in the order of q, k, v in `in_proj`), `a_log` and `dt_bias` (`[value_heads]`), `delta_norm`
    ///   (`[value_dim]`), `o`;
    /// - state space (Mamba-2): the same, where q, k and v are C, B and x; without b in `in_proj`; `conv` is followed by a bias of
    ///   each channel if the configuration says so; `delta_norm` is over all heads (`[value_heads * value_dim]`); and `skip`
    ///   (`[value_heads]`);
    /// - short convolution: `attn_norm`, `conv_in` (the rows of B, C and x, in this order), `conv` (a vector; the taps of
    ///   channel c start at `taps * c`, and the last tap is for the current token), `o`, and with biases `conv_in.bias`,
    ///   `conv.bias` and `o.bias`;
    /// - dense MLP: `mlp_norm`, `gate_up` (row 2j is row j of the gate projection, row 2j + 1 is row j of the up
    ///   projection), `gate_up.bias`, `down`, `down.bias`;
    /// - MoE: `mlp_norm`, `router` (one row per expert, then the shared expert's gate), `experts.gate_up` (all experts
    ///   stacked, each laid out like a dense `gate_up`), `experts.down` (all experts stacked, each with `hidden` rows
    ///   of `inner` elements), and `shared.gate_up` and `shared.down`, laid out like a dense MLP's;
    /// - experts beside a dense MLP: the weights of both, and `dense_post_norm`, `experts.norm`, `experts.post_norm`,
    ///   `router.norm` and `router.scales`;
    /// - norms after mixer and MLP: `attn_post_norm`, `mlp_post_norm`;
    /// - inputs of the layer that depend on the token: `layer_input.gate`, `layer_input.output`, `layer_input.norm`; for
    ///   all layers together `layer_inputs.embed`, `layer_inputs.projection` and `layer_inputs.norm`;
    /// - `layer_scale`, one element.
    ///
    /// The MTP block is the first of `mtp_layers`, if the checkpoint contains it. It uses the prefix `mtp.` and has
    /// `embed_norm`, `hidden_norm`, `fc` (`[hidden, 2 * hidden]`, the embedding's columns first), `final_norm`, and the
    /// weights of a layer with full attention, including its MLP.
    ///
    /// A draft head has the weights of `layers.0.`, whose `qkv` has the columns of the embedding and then those of the features,
    /// `hidden_norm` (of the features), `fc` and, if the configuration requires it, `feature_norm` before it, `final_norm`,
    /// `lm_head`, and `embed` unless it uses the model's.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// Changes the formats of matrices whose sources are not quantised to codes, to which they are quantised when they
    /// are loaded. Routers, the input projections of gated-delta-rule layers and the `fc` of MTP blocks and draft heads are kept; the embedding
    /// and the LM head get 8 bits.
    pub fn quantize(&mut self, to: Quantize) {
        for weight in &mut self.weights {
            let numbers = weight.sources.iter().all(|source| matches!(source.map.format, SourceFormat::Numbers(_)));
            let kept = [".router", ".in_proj", "fc"].iter().any(|end| weight.merged.ends_with(end));
            if weight.kind != WeightKind::Matrix || !numbers || kept {
                continue;
            }
            weight.format = Format::Codes(match to {
                Quantize::Int4 if !["embed", "lm_head", "layer_inputs.embed"].contains(&weight.name.as_str()) => INT4,
                _ => INT8,
            });
        }
    }

    /// Returns the packed weights without those of the MTP block.
    pub fn weights_without_mtp(&self) -> &[WeightSpec] {
        let end = self.weights.iter().position(WeightSpec::is_mtp).unwrap_or(self.weights.len());
        &self.weights[..end]
    }

    /// Whether the checkpoint contains the MTP block.
    pub fn has_mtp(&self) -> bool {
        self.weights.iter().any(WeightSpec::is_mtp)
    }

    /// Returns the number of elements of all weights. A tied LM head counts once.
    pub fn parameters(&self) -> u64 {
        self.weights.iter().map(WeightSpec::elements).sum()
    }

    /// Returns the number of weight elements used for one token: of the routed experts only the chosen ones, and
    /// nothing of the MTP block. The embedding counts in full, as is usual.
    pub fn active_parameters(&self) -> u64 {
        self.active().map(|(weight, of, in_all)| weight.elements() / in_all * of).sum()
    }

    /// Returns the size in bytes of all weights in their target element types.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(WeightSpec::bytes).sum()
    }

    /// Returns the number of weight bytes that decoding one token at batch size 1 reads: all layers (of the routed
    /// experts only the chosen ones), the LM head and one row of the embedding. Excludes the KV cache, recurrent state
    /// and MTP blocks.
    pub fn bytes_per_token(&self) -> u64 {
        let row = WeightSpec::row_bytes;
        self.active()
            .map(|(weight, of, in_all)| match weight.name.as_str() {
                "embed" if self.config.tied => weight.bytes() + row(weight),
                "embed" | "layer_inputs.embed" => row(weight),
                _ => weight.bytes() / in_all * of,
            })
            .sum()
    }

    /// Returns each weight that a token may use, with a fraction of it that one token uses: numerator, then
    /// denominator.
    fn active(&self) -> impl Iterator<Item = (&WeightSpec, u64, u64)> {
        let experts = self.config.experts;
        self.weights.iter().filter(|weight| !weight.is_mtp()).map(move |weight| match experts {
            Some(experts) if weight.is_of_experts() => (weight, experts.chosen.into(), experts.count.into()),
            _ => (weight, 1, 1),
        })
    }
}

/// The reasons why a checkpoint cannot be loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointError {
    /// All problems found; at least one.
    pub problems: Vec<CheckpointProblem>,
}

/// The maximum number of problems that a message lists. A single missing shard can cause hundreds of missing tensors.
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

/// Returns why a path is not the directory of a checkpoint.
fn no_directory(path: &Path) -> String {
    let shown = path.display();
    let in_folder = path.extension().is_some_and(|end| end == "safetensors" || end == "json");
    match path.parent().filter(|_| in_folder && path.is_file()) {
        Some(folder) if folder.as_os_str().is_empty() => {
            format!("{shown} is a file of a checkpoint: name its directory, ./")
        }
        Some(folder) => format!("{shown} is a file of a checkpoint: name its directory, {}", folder.display()),
        None if !path.exists() => format!("{shown} does not exist"),
        None => format!("{shown} is neither a directory nor a file whose name ends in .gguf"),
    }
}

/// Returns what is wrong with a GGUF file; errors about the file itself begin with its name.
fn of_gguf(path: &Path, error: &GgufError) -> String {
    let (path, text) = (path.display().to_string(), error.to_string());
    if text.starts_with(&path) { text } else { format!("{path}: {text}") }
}

/// One reason why a checkpoint cannot be loaded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CheckpointProblem {
    /// The directory does not exist or is not a directory.
    #[error("{}", no_directory(.0))]
    NoDirectory(PathBuf),
    /// The checkpoint is a draft head, which is no model of its own.
    #[error(
        "{} is a draft head (EAGLE-3), which is no model of its own: serve the model that it was trained for, with draft = \"{}\"",
        .0.display(),
        .0.display()
    )]
    DraftHead(PathBuf),
    /// A draft head's vocabulary has a token that the model's has not.
    #[error("tensor {tensor} makes token {token} of entry {entry}, the vocabulary has {vocab} tokens")]
    DraftToken {
        /// The tensor's name.
        tensor: String,
        /// The index in the head's vocabulary.
        entry: usize,
        /// The token that it would stand for.
        token: i64,
        /// The number of tokens of the model's vocabulary.
        vocab: u32,
    },
    /// The distances of a draft head's tokens are of another type than integers.
    #[error("tensor {tensor} has dtype {dtype}, supported are I32 and I64")]
    DistanceDtype {
        /// The tensor's name.
        tensor: String,
        /// The element type as the file spells it.
        dtype: String,
    },
    /// The operating system could not open or read the file.
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error message.
        reason: String,
    },
    /// config.json or generation_config.json is invalid or unsupported.
    #[error(transparent)]
    Config(ConfigProblem),
    /// The directory has neither model.safetensors nor its index. The message lists other weight files found there.
    #[error("{} holds neither model.safetensors nor model.safetensors.index.json{others}", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// Empty, or ` (found ..., which is not read)`.
        others: String,
    },
    /// The GGUF files cannot be read or do not hold a supported model.
    #[error("{}", of_gguf(path, error))]
    Gguf {
        /// The file that was named.
        path: PathBuf,
        /// The cause.
        error: Box<GgufError>,
    },
    /// A tensor of a GGUF file is missing or has an unexpected shape.
    #[error(transparent)]
    GgufTensor(TensorProblem),
    /// A tensor is stored in a way that is not supported yet.
    #[error("tensor {tensor} is stored with {what}, which is not supported yet")]
    Stored {
        /// The tensor's name.
        tensor: String,
        /// The unsupported property of the tensor.
        what: &'static str,
    },
    /// The factor of a quantised tensor is zero or not finite.
    #[error("tensor {tensor} has factor {factor} at index {index}, which is zero or not a normal number")]
    Factor {
        /// The tensor with the factors.
        tensor: String,
        /// The index in the tensor.
        index: u64,
        /// The factor.
        factor: f32,
    },
    /// model.safetensors.index.json is malformed.
    #[error("{} is not valid: {reason}", path.display())]
    BadIndex {
        /// The file.
        path: PathBuf,
        /// The defect of the file.
        reason: String,
    },
    /// The index names a file that does not exist.
    #[error("shard {} is missing ({tensors} tensors)", path.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// The number of tensors that the index assigns to the file.
        tensors: usize,
    },
    /// The file is shorter than its header or the data that its header describes.
    #[error("{} is truncated: its header needs {needs} bytes, the file has {has}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The length in bytes that the header requires.
        needs: u64,
        /// The file's actual length in bytes.
        has: u64,
    },
    /// The file has no valid safetensors header.
    #[error("{} has no valid safetensors header: {reason}", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// The defect of the file.
        reason: String,
    },
    /// The model requires a tensor that no file contains.
    #[error("tensor {tensor} is missing")]
    MissingTensor {
        /// The tensor's full name.
        tensor: String,
    },
    /// A layer has a bias or a norm that the model does not have by its configuration.
    #[error("tensor {tensor} would not be used: by its architecture and its keys, the model has no such {what}")]
    UnusedTensor {
        /// The tensor's name in the file.
        tensor: String,
        /// `bias` or `norm`.
        what: &'static str,
    },
    /// A tensor's shape does not match config.json.
    #[error("tensor {tensor} has shape {shape:?}, config.json asks for {expected:?}")]
    Shape {
        /// The tensor's name.
        tensor: String,
        /// The shape in the file.
        shape: Vec<u64>,
        /// The shape that the configuration requires.
        expected: Vec<u64>,
    },
    /// The tensors of a merged weight have formats that no common format represents.
    #[error("{weight} is merged from tensors of formats that do not go together: {formats}")]
    MixedFormats {
        /// The merged weight's name.
        weight: String,
        /// The tensors with their formats.
        formats: String,
    },
    /// The tensors of a quantised weight do not fit together.
    #[error(transparent)]
    Weight(WeightError),
    /// The tensor that says how a weight of bitsandbytes is stored is damaged or says what is not supported.
    #[error("tensor {tensor} does not say how its weight is quantised: {reason}")]
    QuantState {
        /// The tensor's name.
        tensor: String,
        /// The defect, with what is expected.
        reason: String,
    },
    /// A quantised weight has not the size that config.json requires.
    #[error("tensor {tensor} is of a weight of {found:?} rows and columns, config.json asks for {expected:?}")]
    QuantisedShape {
        /// The name of the tensor with the codes.
        tensor: String,
        /// The rows and columns that the tensors have.
        found: [u64; 2],
        /// The rows and columns that the configuration requires.
        expected: [u64; 2],
    },
    /// A tensor is quantised, but nothing says how.
    #[error("tensor {tensor} of dtype {dtype} is quantised, but config.json has no quantization_config")]
    NoQuantization {
        /// The name of the tensor with the codes.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// A tensor is quantised, but the configuration excludes its module.
    #[error("tensor {tensor} is quantised, but quantization_config does not quantise {module}")]
    NotQuantised {
        /// The name of the tensor with the codes.
        tensor: String,
        /// The module's name.
        module: String,
    },
    /// A quantised tensor belongs to another format than the configuration's.
    #[error("tensor {tensor} is not of the format of quantization_config, which has {expected}")]
    OtherFormat {
        /// The name of the tensor with the codes.
        tensor: String,
        /// The name or names that it should have.
        expected: String,
    },
    /// A tensor of numbers stands beside a scale, so that it may not be the weight itself.
    #[error("tensor {tensor} of dtype {dtype} has the scale {scale} beside it, which only quantised tensors have")]
    ScaleBeside {
        /// The tensor's name.
        tensor: String,
        /// Its element type.
        dtype: String,
        /// The name of the scale.
        scale: String,
    },
    /// The tensor's element type is not supported.
    #[error(
        "tensor {tensor} has dtype {dtype}, supported are BF16, F16, F32, the block types of GGUF files and the quantised types of quantization_config"
    )]
    UnsupportedDtype {
        /// The tensor's name.
        tensor: String,
        /// The element type as the file spells it.
        dtype: String,
    },
}

fn read_config(dir: &Path, problems: &mut Vec<CheckpointProblem>) -> Option<ModelConfig> {
    let config = read_text(&dir.join("config.json"), file::SMALL, problems)?;
    let generation_path = dir.join("generation_config.json");
    let named = file::is_named(&generation_path);
    let generation = named.then(|| read_text(&generation_path, file::SMALL, problems)).flatten();
    let beside = quantization::FILES.into_iter().find(|name| file::is_named(&dir.join(name)));
    let beside = match beside {
        Some(name) => Some((name, read_text(&dir.join(name), file::SMALL, problems)?)),
        None => None,
    };
    let quantized = beside.as_ref().map(|(name, text)| (*name, text.as_str()));
    match ModelConfig::parse_with(&config, generation.as_deref(), quantized) {
        Ok(config) => Some(config),
        Err(error) => {
            problems.extend(error.problems.into_iter().map(CheckpointProblem::Config));
            None
        }
    }
}

/// Reads a text file of at most `most` bytes. Failures go to `problems`.
fn read_text(path: &Path, most: u64, problems: &mut Vec<CheckpointProblem>) -> Option<String> {
    file::read_text(path, most)
        .map_err(|error| {
            problems.push(CheckpointProblem::Unreadable { path: path.to_owned(), reason: error.to_string() })
        })
        .ok()
}
