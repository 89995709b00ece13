//! Everything that depends on the model: config.json, tensor names, tokenizer, chat template, grammars and the
//! architectures' forward passes, which turn a batch shape into a `Recording`.
//! Also `split_mix`, the generator of seeds that `synth` and the modules above `model` share.
//!
//! Not here: threads, and reading bulk tensor data. The exception is `synth`, which writes checkpoints with threads.

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod demo;
pub mod draft;
pub mod embedding;
pub mod gguf;
pub mod grammar;
pub mod python_json;
pub mod split_mix;
pub mod synth;
pub mod text;
pub mod worker;
