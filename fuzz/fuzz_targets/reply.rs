//! Parses bytes as rank 0's answer in the bootstrap: an error or success, never a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    moebius::ranks::fuzzing::reply(data);
});
