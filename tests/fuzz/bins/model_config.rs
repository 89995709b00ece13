//! Entry point of libFuzzer for the target `model_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::model_config(bytes));
