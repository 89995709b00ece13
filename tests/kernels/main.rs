//! Kernels against their references: each kernel on the CPU drivers, and whole recordings by the interpreter.

#[path = "../common/mod.rs"]
mod common;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../python/mod.rs"]
mod python;

mod assembler;
mod codes;
mod delta;
mod draft;
mod exchange;
mod flash;
mod forward;
mod moe;
mod pack_codes;
mod pages;
mod ptx;
mod recordings;
mod sampling;
mod scores;
mod shared;
mod short_conv;
mod stream;
mod tiled;
mod wgmma;
