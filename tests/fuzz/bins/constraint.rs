//! Entry point of libFuzzer for the target `constraint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::constraint(bytes));
