//! The quantization codec: bit for bit against the vectors of third-party references, and against a straight-line
//! reference of our own on random, extreme and strided matrices; then what must hold of any input.

#[path = "../devices/mod.rs"]
mod devices;
mod errors;
mod fp8_block;
mod golden;
mod properties;
mod random;
mod reference;
mod support;

/// Every body of the suite that is for any device.
pub fn cases<D: devices::Target>() -> devices::Cases<D> {
    [golden::cases(), random::cases(), properties::cases(), fp8_block::cases()].concat()
}
