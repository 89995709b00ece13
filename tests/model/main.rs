//! Whole models on the CPU drivers: against transformers, in batches, with constraints, drafts and faults.

#[path = "../common/mod.rs"]
mod common;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../serving/mod.rs"]
mod serving;

mod batches;
mod demo;
mod embedding;
mod experts;
mod fallback;
mod families;
mod gguf_families;
mod grammar;
mod hybrids;
mod kv_codes;
mod llama_cpp;
mod quantised;
mod scoring;
mod speculation;
mod split;
mod streams;
mod tensor;
mod tiles;
mod transformers;
mod tune;
