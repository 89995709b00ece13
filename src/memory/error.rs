//! Errors of the memory layer, with one variant per case that a caller may handle differently.

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
        /// The name of the buffer.
        name: String,
        /// The size of the buffer, in bytes.
        asked: u64,
        /// `maxMemoryAllocationSize`.
        allowed: u64,
        /// The name of the device.
        device: String,
    },
    /// There is not enough free memory.
    #[error("cannot reserve {} of {place} for {name:?}, {} free on {device:?}",
        told_apart(*.asked, *.free).0, told_apart(*.asked, *.free).1)]
    OutOfMemory {
        /// The name of the buffer.
        name: String,
        /// The bytes that the buffer needs, including the driver's padding.
        asked: u64,
        /// The kind of memory that was requested.
        place: Place,
        /// The free device-local memory in bytes as the driver reports it, also if `place` is host memory.
        free: u64,
        /// The name of the device.
        device: String,
    },
    /// The device has no memory type of the requested kind.
    #[error("{device:?} has no {place} for {name:?}")]
    NoMemoryType {
        /// The name of the buffer.
        name: String,
        /// The kind of memory that was requested.
        place: Place,
        /// The name of the device.
        device: String,
    },
    /// The allocator failed for another reason.
    #[error("cannot allocate memory for {name:?}")]
    Allocator {
        /// The name of the buffer.
        name: String,
        /// The cause.
        #[source]
        source: gpu_allocator::AllocationError,
    },
    /// Memory could not be bound to a buffer.
    #[error("cannot bind memory to {name:?}")]
    Bind {
        /// The name of the buffer.
        name: String,
        /// The cause.
        #[source]
        source: ash::vk::Result,
    },
    /// A name is not in the table.
    #[error("no buffer is named {name:?}")]
    Missing {
        /// The name.
        name: String,
    },
    /// A name is already in the table.
    #[error("two buffers are named {name:?}")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// No staging slot became free.
    #[error("no staging slot became free in {seconds} s")]
    StagingTimeout {
        /// The length of the wait.
        seconds: u64,
    },
    /// A file cannot be opened or read.
    #[error("cannot read {}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file is too short for a part that it should contain.
    #[error("{} is truncated: {what} ends at byte {wanted}, the file has {has}", path.display())]
    Truncated {
        /// The path of the file.
        path: PathBuf,
        /// The part that does not fit.
        what: String,
        /// The offset of the part's end, in bytes.
        wanted: u64,
        /// The length of the file, in bytes.
        has: u64,
    },
    /// A file was written to or replaced after its state was first recorded.
    #[error("{} was changed while it was loaded: {how}; it had {was} bytes and has {is}", path.display())]
    FileChanged {
        /// The path of the file.
        path: PathBuf,
        /// The difference that shows the change.
        how: String,
        /// The length when the state was recorded, in bytes.
        was: u64,
        /// The current length, in bytes.
        is: u64,
    },
}
