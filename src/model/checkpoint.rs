//! A checkpoint in Hugging Face layout: its configuration, where each tensor lies in its
//! files, and the packed weights that kernels want, as plain data. Everything that is wrong
//! is reported at once. Deliberately absent: the tensors' bytes (the loader reads them by
//! path and offset).

mod headers;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::{ConfigProblem, Dtype, ModelConfig};
use crate::config::file::{self, Stamp};
use headers::Headers;

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
    /// Its state when its header was read: weights are read from the same file, unchanged since.
    pub stamp: Stamp,
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
    /// What is added to every element, in f32: 1 for the weights of norms that are stored around zero, else 0.
    pub plus: f32,
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

    /// Whether it belongs to the block that predicts further tokens.
    pub fn is_mtp(&self) -> bool {
        self.name.starts_with("mtp.")
    }

    /// Whether it is one below the other what each expert has: `experts.gate_up` or `experts.down`.
    pub fn is_of_experts(&self) -> bool {
        self.name.contains(".experts.")
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
            Some(config) => weights::build(config, &headers, &mut problems),
            None => Vec::new(),
        };
        match config {
            Some(config) if problems.is_empty() => {
                Ok(Checkpoint { dir: dir.to_owned(), config, files: headers.files, tensors: headers.tensors, weights })
            }
            _ => Err(CheckpointError { problems }),
        }
    }

    /// The packed weights: layer by layer, then `embed`, `final_norm`, `lm_head` where the head is not tied, and
    /// those of the block that predicts further tokens. In all of them norms' weights are what to multiply by
    /// ([`SourceRef::plus`] makes them so), and sources keep the format of the checkpoint.
    ///
    /// A layer `i` has, each under the prefix `layers.{i}.`, those of these that the configuration asks for:
    /// - with full attention: `attn_norm`, `qkv` (rows of q, k, v and the gate of what attention gives, one after the
    ///   other, each head after head), `qkv.bias`, `q_norm`, `k_norm`, `o`, `o.bias`;
    /// - with a gated delta net: `attn_norm`, `in_proj` (rows of q, k, v, z, b and a, one after the other), `conv`
    ///   (vector; channel c's taps at `conv_kernel * c` on, the last the current token's; channels as `in_proj`'s
    ///   q, k, v), `a_log` and `dt_bias` (`[value_heads]`), `delta_norm` (`[value_dim]`), `o`;
    /// - dense: `mlp_norm`, `gate_up` (row 2j is the gate's row j, row 2j + 1 the up projection's), `gate_up.bias`,
    ///   `down`, `down.bias`;
    /// - with experts: `mlp_norm`, `router` (a row each expert, then the shared expert's gate), `experts.gate_up`
    ///   (expert after expert, each like a dense `gate_up`), `experts.down` (expert after expert, `hidden` rows of
    ///   `inner` each), and `shared.gate_up` and `shared.down` like a dense MLP's.
    ///
    /// The block that predicts further tokens, the first of `mtp_layers` if the checkpoint has it, is under the
    /// prefix `mtp.`: `embed_norm`, `hidden_norm`, `fc` (`[hidden, 2 * hidden]`, the embedding's columns first),
    /// `final_norm`, and what a layer with full attention has.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// The packed weights without those of the block that predicts further tokens.
    pub fn weights_without_mtp(&self) -> &[WeightSpec] {
        let end = self.weights.iter().position(WeightSpec::is_mtp).unwrap_or(self.weights.len());
        &self.weights[..end]
    }

    /// Whether the block that predicts further tokens was saved too.
    pub fn has_mtp(&self) -> bool {
        self.weights.iter().any(WeightSpec::is_mtp)
    }

    /// Elements of all weights; a tied head counts once.
    pub fn parameters(&self) -> u64 {
        self.weights.iter().map(WeightSpec::elements).sum()
    }

    /// Elements of the weights that one token goes through: of experts the chosen ones, of the block that predicts
    /// further tokens none. The embedding counts whole, as is usual.
    pub fn active_parameters(&self) -> u64 {
        self.active().map(|(weight, of, in_all)| weight.elements() / in_all * of).sum()
    }

    /// Bytes of all weights in their target formats.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(WeightSpec::bytes).sum()
    }

    /// Bytes of weights that one token at batch 1 reads: every layer, of its experts the chosen ones, the head and
    /// one row of the embedding; keys, values, states and blocks that predict further tokens not included.
    pub fn bytes_per_token(&self) -> u64 {
        let row = |weight: &WeightSpec| u64::from(weight.cols) * weight.dtype.bytes();
        self.active()
            .map(|(weight, of, in_all)| match weight.name.as_str() {
                "embed" if self.config.tied => weight.bytes() + row(weight),
                "embed" => row(weight),
                _ => weight.bytes() / in_all * of,
            })
            .sum()
    }

    /// The weights that a token may go through, and how many of how many equal parts of each it does.
    fn active(&self) -> impl Iterator<Item = (&WeightSpec, u64, u64)> {
        let experts = self.config.experts;
        self.weights.iter().filter(|weight| !weight.is_mtp()).map(move |weight| match experts {
            Some(experts) if weight.is_of_experts() => (weight, experts.chosen.into(), experts.count.into()),
            _ => (weight, 1, 1),
        })
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
    let config = read_text(&dir.join("config.json"), file::SMALL, problems)?;
    let generation_path = dir.join("generation_config.json");
    let named = file::is_named(&generation_path);
    let generation = named.then(|| read_text(&generation_path, file::SMALL, problems)).flatten();
    match ModelConfig::parse(&config, generation.as_deref()) {
        Ok(config) => Some(config),
        Err(error) => {
            problems.extend(error.problems.into_iter().map(CheckpointProblem::Config));
            None
        }
    }
}

/// A file of at most `most` bytes.
fn read_text(path: &Path, most: u64, problems: &mut Vec<CheckpointProblem>) -> Option<String> {
    file::read_text(path, most)
        .map_err(|error| {
            problems.push(CheckpointProblem::Unreadable { path: path.to_owned(), reason: error.to_string() })
        })
        .ok()
}
