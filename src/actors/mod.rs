//! Actors, one file and one thread each: compute, transfer, loader, and the watcher that turns timeline progress into
//! reports. Also their inboxes (`mailbox`), the pool of worker processes (`workers`), and the turns of
//! processes on one device (`turns`). Not here: knowledge of models.

pub mod compute;
mod gpu_clock;
pub mod loader;
pub mod mailbox;
pub mod packer;
pub mod proxy;
mod stamps;
pub mod thread;
pub mod timeline;
pub mod transfer;
pub mod turns;
pub mod watcher;
pub mod workers;
