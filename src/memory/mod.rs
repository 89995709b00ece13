//! GPU memory as owned values: the plan printed at start, the arena and its buffers, the
//! table of names, the staging ring, and how weights are laid out.
//! Deliberately absent: Vulkan calls other than through `device`, and what a weight means.

pub mod pack;
pub mod plan;
