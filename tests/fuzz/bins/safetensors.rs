//! Entry point of libFuzzer for the target `safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::safetensors(bytes));
