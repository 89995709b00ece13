//! Entry point of libFuzzer for the target `generate`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::generate(bytes));
