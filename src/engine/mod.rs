//! The engine of one model: requests, sequences, KV cache pages, the prefix cache, and the pure scheduler that turns
//! them into plans; the `Executor` trait and a fake executor.
//! Not here: Vulkan, text and tokio. Only the fake starts a thread.

pub mod executor;
pub mod fake;
pub mod injection;
pub mod pace;
pub mod page_pool;
pub mod plan;
pub mod prefix;
pub mod request;
pub mod scheduler;
pub mod sequence;
pub mod sequence_map;
pub mod snapshots;
pub mod speculation;
pub mod variants;
pub mod window;
