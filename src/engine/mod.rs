//! Sequences, page tables, the pure scheduler and the step loop.
//! Deliberately absent: Vulkan (only `executor` speaks to the actors), text, tokio.

pub mod request;
pub mod executor;
pub mod pages;
pub mod sequence;
pub mod scheduler;
pub mod spans;
pub mod replica;
pub mod host;
pub mod fake;
pub mod gpu;
pub mod start;
pub mod ceiling;
pub mod stages;
