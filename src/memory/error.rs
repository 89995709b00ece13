//! What can go wrong with memory, one variant for each thing that a caller may treat
//! differently.

use super::place::Place;
use super::plan::{PlanError, told_apart};
use crate::device::DeviceError;
use std::path::PathBuf;

/// An error of the memory layer.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The plan does not fit.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device layer failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// One buffer is larger than the driver allows.
    #[error("{name:?} needs {} in one allocation, {device:?} allows {}",
        told_apart(*.asked, *.allowed).0, told_apart(*.asked, *.allowed).1)]
    TooLarge {
        /// The buffer.
        name: String,
        /// Its bytes.
        asked: u64,
        /// `maxMemoryAllocationSize`.
        allowed: u64,
        /// Where.
        device: String,
    },
    /// The device has no memory left.
    #[error("cannot reserve {} of {place} for {name:?}, {} free on {device:?}",
        told_apart(*.asked, *.free).0, told_apart(*.asked, *.free).1)]
    OutOfMemory {
        /// The buffer.
        name: String,
        /// Its bytes.
        asked: u64,
        /// Whose memory.
        place: Place,
        /// What the driver says is free of the device's own memory.
        free: u64,
        /// Where.
        device: String,
    },
    /// The device has no such memory.
    #[error("{device:?} has no {place} for {name:?}")]
    NoMemoryType {
        /// The buffer.
        name: String,
        /// What was asked for.
        place: Place,
        /// Where.
        device: String,
    },
    /// The allocator failed otherwise.
    #[error("cannot allocate memory for {name:?}")]
    Allocator {
        /// The buffer.
        name: String,
        /// The cause.
        #[source]
        source: gpu_allocator::AllocationError,
    },
    /// Memory could not be bound to a buffer.
    #[error("cannot bind memory to {name:?}")]
    Bind {
        /// The buffer.
        name: String,
        /// The cause.
        #[source]
        source: ash::vk::Result,
    },
    /// A name that is not in the table.
    #[error("no buffer is named {name:?}")]
    Missing {
        /// The name.
        name: String,
    },
    /// A name that is in the table already.
    #[error("two buffers are named {name:?}")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// No staging slot became free.
    #[error("no staging slot became free in {seconds} s")]
    StagingTimeout {
        /// How long was waited.
        seconds: u64,
    },
    /// A file cannot be opened or read.
    #[error("cannot read {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file is shorter than what it should hold.
    #[error("{} is truncated: {what} ends at byte {wanted}, the file has {has}", path.display())]
    Truncated {
        /// Which.
        path: PathBuf,
        /// What does not fit.
        what: String,
        /// Where that would end.
        wanted: u64,
        /// Length of the file.
        has: u64,
    },
    /// A file was written to or replaced after it was first looked at.
    #[error("{} was changed while it was loaded: {how}; it had {was} bytes and has {is}", path.display())]
    FileChanged {
        /// Which.
        path: PathBuf,
        /// What shows it.
        how: String,
        /// Length when opened.
        was: u64,
        /// Length now.
        is: u64,
    },
}
