//! The `ostinato` program as a process: its commands, its page in a browser, and behind a router.

#[path = "../browser/mod.rs"]
mod browser;
#[path = "../common/mod.rs"]
mod common;
#[path = "../python/mod.rs"]
mod python;
#[path = "../router/mod.rs"]
mod router;
#[path = "../serving/mod.rs"]
mod serving;

mod check;
mod cli;
mod fleet;
mod front;
mod hub;
mod openai;
mod package;
mod page;
mod soak;
