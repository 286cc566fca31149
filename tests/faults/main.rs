//! Faults over the whole layer at R = 4: a rank that is lost, or brings bad input, is a typed error on every rank in
//! time, and where the communicator survives the same group then makes a correct step.

#[cfg(feature = "candle")]
mod candle;
mod config;
#[path = "../devices/mod.rs"]
mod devices;
mod input;
#[path = "../common/limits.rs"]
mod limits;
mod lost;
mod memory;
mod scarce;
#[path = "../common/scarce_allocator.rs"]
mod scarce_allocator;
mod support;

pub use input::cases;
