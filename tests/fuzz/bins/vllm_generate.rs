//! Entry point of libFuzzer for the target `vllm_generate`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ostinato_fuzz::vllm_generate(bytes));
