//! Tests of the tree: configuration, checkpoints, text, deployment files, the rules of the source tree, and the commands
//! of the README, which are the only ones that use a device.

#[path = "../python/mod.rs"]
mod python;
#[path = "../fuzz/targets.rs"]
mod targets;

mod checkpoint;
mod config;
mod deploy;
mod quant;
mod readme;
mod regressions;
mod text;
mod tidy;
