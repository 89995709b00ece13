//! Entry point of libFuzzer for the target `configuration`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::configuration(bytes));
