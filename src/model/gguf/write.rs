//! Writing GGUF files from checkpoints in the Hugging Face layout: the inverse of the modules beside it. Metadata are
//! made from the checkpoint's JSON files, each GGUF tensor is planned as runs of rows of the checkpoint's tensors, a
//! file type chooses the element types, and threads compute and write the data in pieces.
//!
//! The plan is not a second description of the layout: it inverts what the reader's own map says about the file to be
//! written, and a header is read back before any data is written. A file that cannot be read is not written.
//!
//! Not here: split files, calibration, tokenizers other than byte-level BPE (such models are written without text), and
//! checkpoints that are quantised already.

mod data;
mod folder;
mod metadata;
mod plan;
mod text;
mod types;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use super::GgufError;

pub use data::{GgufWritten, SourceRows, write};
pub use folder::{ReadWeights, convert, convert_outline};
pub use metadata::{metadata, model};
pub use plan::{PlannedTensor, Run, SourceType, tensors};
pub use text::{NoText, text};
pub use types::{FileType, type_of};

/// The reason why a file cannot be written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WriteError {
    /// A required key of the configuration is missing.
    #[error("config.json has no {0}")]
    Missing(&'static str),
    /// A value of the configuration has the wrong type or is out of range.
    #[error("{key} is {value} in config.json, must be {rule}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The allowed values.
        rule: String,
    },
    /// The model family is not supported.
    #[error("model type {0:?} is not supported ({known} are)", known = metadata::known_types())]
    GgufArchitecture(String),
    /// The model has something that files of its family cannot express.
    #[error("{key} is {value} in config.json, which is not supported ({what})")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// The meaning of the value.
        what: &'static str,
    },
    /// The checkpoint lacks a tensor.
    #[error("tensor {0} is missing")]
    MissingTensor(String),
    /// A tensor's shape differs from the configuration.
    #[error("tensor {tensor} has the shape {has:?}, must have {expected:?}")]
    Shape {
        /// The tensor in the checkpoint.
        tensor: String,
        /// The shape in the checkpoint.
        has: Vec<u64>,
        /// The shape by the configuration.
        expected: Vec<u64>,
    },
    /// A tensor's element type is not supported.
    #[error("tensor {tensor} has the element type {dtype}, must have F32, F16 or BF16")]
    Dtype {
        /// The tensor in the checkpoint.
        tensor: String,
        /// The element type.
        dtype: String,
    },
    /// The checkpoint has a tensor that files of its family have no place for.
    #[error("tensor {0} has no place in a file of this architecture")]
    Unused(String),
    /// The tensors of the checkpoint do not fill a tensor of the file.
    #[error("the sources of tensor {tensor} have {has} rows, must have {expected}")]
    SourceRows {
        /// The tensor in the file.
        tensor: String,
        /// The number of rows of all sources.
        has: u64,
        /// The number of rows in the file.
        expected: u64,
    },
    /// The name of a file type is not known.
    #[error("file type {0:?} is not known ({known} are)", known = FileType::known().join(", "))]
    FileType(String),
    /// A type cannot hold a tensor.
    #[error("tensor {tensor} has rows of {cols} elements, type {kind} has blocks of {block}")]
    Block {
        /// The tensor in the file.
        tensor: String,
        /// The number of elements of a row.
        cols: u64,
        /// The name of the type.
        kind: &'static str,
        /// The number of elements of a block.
        block: u64,
    },
    /// A type cannot be written.
    #[error("tensor {tensor} cannot be written as {kind}, which needs a factor beside the tensor")]
    Type {
        /// The tensor in the file.
        tensor: String,
        /// The name of the type.
        kind: &'static str,
    },
    /// A number cannot be represented in the type of its tensor.
    #[error("tensor {tensor} has {number} at row {row}, column {column}; type {kind} has numbers up to {limit}")]
    Number {
        /// The tensor in the file.
        tensor: String,
        /// The row in the file.
        row: u64,
        /// The column in the file.
        column: u64,
        /// The number.
        number: f32,
        /// The name of the type.
        kind: &'static str,
        /// The largest number that the type holds.
        limit: f32,
    },
    /// The file to be written could not be read back. This is an error of the writer, or the model is beyond a limit of
    /// the reader.
    #[error("the file would not be readable: {0}")]
    Unreadable(#[from] Box<GgufError>),
    /// A file of the checkpoint does not have the expected content.
    #[error("{path}: {reason}", path = .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The defect of the file.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {path}: {reason}", path = .path.display())]
    Io {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

impl WriteError {
    fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> WriteError {
        move |error| WriteError::Io { action, path: path.to_owned(), reason: error.to_string() }
    }
}
