//! One thread per file: compute, transfer, loader, and the watcher that turns timeline
//! progress into messages. Deliberately absent: model knowledge.

pub mod compute;
pub mod loader;
pub mod transfer;
pub mod watcher;
