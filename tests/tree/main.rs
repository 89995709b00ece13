//! Tests without a device: configuration, checkpoints, text, deployment files and the rules of the source tree.

#[path = "../python/mod.rs"]
mod python;
#[path = "../fuzz/targets.rs"]
mod targets;

mod checkpoint;
mod config;
mod deploy;
mod quant;
mod regressions;
mod text;
mod tidy;
