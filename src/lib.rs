//! Ostinato: language models on any Vulkan 1.3 GPU, served over gRPC.
//!
//! Imports point one way, and `tests/tidy.rs` keeps it so:
//! `config → device → memory → kernels → actors → model → engine → service → cli`;
//! `telemetry` stands beside and uses none of them.

#![deny(unsafe_code)]
#![warn(missing_docs, unreachable_pub, missing_debug_implementations)]

pub mod actors;
pub mod cli;
pub mod config;
pub mod device;
pub mod engine;
pub mod kernels;
pub mod memory;
pub mod model;
pub mod service;
pub mod telemetry;
