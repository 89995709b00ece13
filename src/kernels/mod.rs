//! The host half of each shader: its arguments, dispatch shape and `reference()` in plain
//! Rust; the `Recording`. Deliberately absent: the order of layers.

pub mod recording;
