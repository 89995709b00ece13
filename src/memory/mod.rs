//! GPU memory as owned values: the memory plan that is printed at start, the arena and its buffers, the table of buffer
//! names, the staging ring, and the layout of weights.
//! Not here: Vulkan calls that bypass `device` (except those for memory itself, in `arena`), and what a weight means.

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
pub use staging::{StagingRing, StagingSlot};
pub use table::BufferTable;
