//! One thread per file: compute, transfer, loader, and the watcher that turns timeline
//! progress into messages; the mailboxes through which they are asked; and worker processes. Deliberately absent:
//! model knowledge.

pub mod compute;
mod gpu_clock;
pub mod loader;
pub mod mailbox;
mod stamps;
pub mod timeline;
pub mod transfer;
pub mod watcher;
pub mod workers;
