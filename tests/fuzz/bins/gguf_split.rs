//! Entry point of libFuzzer for the target `gguf_split`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::gguf_split(bytes));
