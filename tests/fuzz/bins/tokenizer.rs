//! libFuzzer's way into the target of this name. A panic ends the fuzzer, but for those that the service makes an error of.
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
    |bytes: &[u8]| ostinato_fuzz::tokenizer(bytes)
);
