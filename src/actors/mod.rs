//! Actors, one file and one thread each: compute, transfer, loader, and the watcher that turns timeline progress into
//! reports. Also their inboxes (`mailbox`) and the pool of worker processes (`workers`). Not here: knowledge of models.

pub mod compute;
mod gpu_clock;
pub mod loader;
pub mod mailbox;
mod stamps;
pub mod thread;
pub mod timeline;
pub mod transfer;
pub mod watcher;
pub mod workers;
