//! Parses bytes as a whole safetensors file: an error or success, never a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    moebius::checkpoint::fuzzing::header(data);
});
