//! libFuzzer's way into the target of this name.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::constraint(bytes));
