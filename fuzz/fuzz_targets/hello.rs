//! Parses bytes as a rank's message to rank 0 of the bootstrap: an error or success, never a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    moebius::ranks::fuzzing::hello(data);
});
