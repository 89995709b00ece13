//! Entry point of libFuzzer for the target `gguf`. A panic ends the fuzzer, except for panics that the service
//! turns into errors.
#![no_main]

use ostinato_fuzz::READING;

libfuzzer_sys::fuzz_target!(
    init: {
        let abort = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !READING.get() {
                abort(panic);
            }
        }));
    },
    |bytes: &[u8]| ostinato_fuzz::gguf(bytes)
);
