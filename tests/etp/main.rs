//! Sharded expert weights, on threads as ranks.

#[cfg(feature = "candle")]
mod candle;
mod exact;
mod faults;
#[cfg(feature = "candle")]
mod module;
mod quantised;
#[path = "../../examples/support/random.rs"]
#[allow(dead_code, reason = "the examples take more of it")]
mod random;
mod rig;
mod stored;
mod turns;
mod world;
