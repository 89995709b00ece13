//! The device layer, its actors and the loading of weights, on the CPU drivers.

#[path = "../common/mod.rs"]
mod common;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../serving/mod.rs"]
mod serving;

mod actors;
mod handles;
mod loader;
mod loading;
mod pinning;
mod proxies;
mod two_devices;
