//! Parses bytes as a `model.safetensors.index.json`: an error or success, never a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    moebius::checkpoint::fuzzing::index(data);
});
