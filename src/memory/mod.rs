//! GPU memory as owned values: the plan printed at start, the arena and its buffers, the
//! table of names, the staging ring, and how weights are laid out.
//! Deliberately absent: Vulkan calls other than through `device` (and, for memory itself, in
//! `arena`), and what a weight means.

pub mod pack;
pub mod plan;

mod arena;
mod error;
mod file;
mod place;
mod staging;
mod table;

pub use arena::{Arena, Buffer, HostSlice, Usage};
pub use error::MemoryError;
pub use file::WeightFile;
pub use place::Place;
pub use plan::Plan;
pub use staging::{Slot, StagingRing};
pub use table::Table;
