//! One thread per file: compute, transfer, loader, and the watcher that turns timeline
//! progress into messages; and the mailboxes through which they are asked. Deliberately absent:
//! model knowledge.

pub mod compute;
mod gpu_clock;
pub mod loader;
pub mod mailbox;
mod stamps;
pub mod timeline;
pub mod transfer;
pub mod watcher;
