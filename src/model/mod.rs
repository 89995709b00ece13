//! config.json, tensor names, tokenizer, chat template, architectures: a batch shape in,
//! a `Recording` out. Deliberately absent: threads, and reading of bulk data
//! (but for `synth`, which writes checkpoints).

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod demo;
pub mod grammar;
pub mod synth;
pub mod text;
pub mod worker;
