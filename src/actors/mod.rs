//! One thread per file: compute, transfer, loader, and the watcher that turns timeline
//! progress into messages. Deliberately absent: model knowledge.

pub mod compute;
mod gpu_clock;
pub mod loader;
mod stamps;
pub mod timeline;
pub mod transfer;
pub mod watcher;
