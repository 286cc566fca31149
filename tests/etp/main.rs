//! Sharded expert weights: bodies for any device, and its tests on threads as ranks.

#![allow(dead_code, reason = "each target takes a part")]

#[cfg(feature = "candle")]
mod candle;
#[path = "../common/changed.rs"]
pub mod changed;
mod engines;
mod exact;
mod faults;
#[path = "../common/limits.rs"]
mod limits;
#[cfg(feature = "candle")]
mod module;
mod quantised;
#[path = "../../examples/support/random.rs"]
mod random;
mod rig;
mod stored;
#[path = "../target/mod.rs"]
mod target;
mod turns;
mod world;

use rig::Chained;
#[allow(unused_imports, reason = "GPUs' suites ask for both")]
pub use rig::{has_memory, with_memory};
#[cfg(feature = "nccl")]
pub use target::gpus;

/// Every body with its file and the ranks that it needs at least.
#[allow(clippy::type_complexity, reason = "numbers, names and functions, no more")]
pub fn bodies<D: Chained>() -> Vec<(&'static str, usize, &'static str, fn(&D))> {
    let files = [
        ("exact", exact::bodies()),
        ("faults", faults::bodies()),
        ("quantised", quantised::bodies()),
        ("turns", turns::bodies()),
    ];
    files.into_iter().flat_map(|(file, all)| all.into_iter().map(move |(n, name, run)| (file, n, name, run))).collect()
}
