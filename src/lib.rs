//! Ostinato: an inference server for language models on any Vulkan 1.3 GPU, with a gRPC interface.
//!
//! Modules import in one direction only, which `tests/tree/tidy.rs` checks: `config, quant → device → memory → kernels → actors →
//! model → engine → replica → host → gpu, service → measure → cli`. `gpu` and `service` do not import each other. Every
//! module may import `telemetry`, which imports none of them.

#![deny(unsafe_code)]
#![warn(missing_docs, unreachable_pub, missing_debug_implementations)]

pub mod actors;
pub mod cli;
pub mod config;
pub mod device;
pub mod engine;
pub mod gpu;
pub mod host;
pub mod kernels;
pub mod measure;
pub mod memory;
pub mod model;
pub mod quant;
pub mod replica;
pub mod service;
pub mod telemetry;
