//! The quantisation codec: bit for bit against the vectors of third-party references, and against a straight-line
//! reference of our own on random, extreme and strided matrices; then what must hold of any input.

mod errors;
mod golden;
mod properties;
mod random;
mod reference;
mod support;
#[path = "../target/mod.rs"]
mod target;

/// Every body of the suite that is for any device.
pub fn cases<D: target::Target>() -> target::Cases<D> {
    [golden::cases(), random::cases(), properties::cases()].concat()
}
