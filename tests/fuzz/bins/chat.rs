//! Entry point of libFuzzer for the target `chat`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::chat(bytes));
