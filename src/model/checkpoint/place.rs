//! The places of tensors in their files, and the reading of small tensors that determine how others are read.
//!
//! Not here: weights, which the loader reads.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::CheckpointProblem;
use crate::config::file;

/// The maximum size in bytes of a tensor that says how a weight is read: the groups of 16 million columns.
const MOST_READ: u64 = 64 << 20;

/// The place of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPlace {
    /// The file.
    pub path: Arc<Path>,
    /// Byte offset of the tensor's data from the beginning of the file.
    pub offset: u64,
    /// The length of the tensor's data in bytes.
    pub bytes: u64,
}

impl TensorPlace {
    /// The tensor's bytes in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    /// Reads a tensor of at most [`MOST_READ`] bytes.
    pub(in crate::model) fn read(&self) -> Result<Vec<u8>, CheckpointProblem> {
        let failed = |reason: String| CheckpointProblem::Unreadable { path: self.path.to_path_buf(), reason };
        if self.bytes > MOST_READ {
            return Err(failed(format!("a tensor of {} bytes exceeds the limit of {MOST_READ}", self.bytes)));
        }
        let mut bytes = vec![0; self.bytes as usize];
        let (file, _) = file::open(&self.path).map_err(|error| failed(error.to_string()))?;
        file.read_exact_at(&mut bytes, self.offset).map_err(|error| failed(error.to_string()))?;
        Ok(bytes)
    }
}
