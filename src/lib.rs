//! Ostinato: language models on any Vulkan 1.3 GPU, served over gRPC.
//!
//! Imports point one way, and `tests/tidy.rs` keeps it so:
//! `config → device → memory → kernels → actors → model → engine → replica → host → gpu, service → measure → cli`.
//! `gpu` and `service` do not use each other; every module may use `telemetry`, which uses none of them.

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
pub mod replica;
pub mod service;
pub mod telemetry;
