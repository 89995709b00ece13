//! Sequences, page tables, the pure scheduler and the step loop.
//! Deliberately absent: Vulkan (only `executor` speaks to the actors), text, tokio.

pub mod affinity;
pub mod by_age;
pub mod ceiling;
pub mod executor;
pub mod fake;
pub mod gpu;
pub mod host;
pub mod lifecycle;
pub mod masks;
mod matrices;
pub mod observe;
pub mod overlap;
mod overlap_test;
pub mod pace;
pub mod pages;
pub mod prefix;
pub mod rebuild;
pub mod replica;
pub mod request;
pub mod scheduler;
pub mod sequence;
pub mod snapshots;
pub mod spans;
pub mod speculation;
pub mod stages;
pub mod start;
mod stations;
pub mod totals;
pub mod tune;
pub mod tuned;
pub mod variants;
