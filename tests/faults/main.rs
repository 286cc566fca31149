//! Faults over the whole layer at R = 4: a rank that is lost, or brings bad input, is a typed error on every rank in
//! time, and where the communicator survives the same group then makes a correct step.

#[cfg(feature = "candle")]
mod candle;
mod config;
#[path = "../devices/mod.rs"]
mod devices;
mod failed_allocations;
#[path = "../common/failing_allocator.rs"]
mod failing_allocator;
mod input;
#[path = "../common/limits.rs"]
mod limits;
mod lost;
mod memory;
mod support;

pub use input::cases;
