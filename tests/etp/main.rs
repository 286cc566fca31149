//! Sharded expert weights, on threads as ranks.

mod exact;
mod faults;
#[path = "../../examples/support/random.rs"]
#[allow(dead_code, reason = "the examples take more of it")]
mod random;
mod rig;
mod turns;
mod world;
