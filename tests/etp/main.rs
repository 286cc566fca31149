//! Sharded expert weights: bodies for any device, and its tests on threads as ranks.

#![allow(dead_code, reason = "each target takes a part")]

#[cfg(feature = "candle")]
mod candle;
mod copy_engines;
#[cfg(feature = "candle")]
mod dense;
#[cfg(feature = "candle")]
mod dense_model;
#[cfg(feature = "candle")]
mod dense_replicas;
#[cfg(feature = "candle")]
mod dense_stored;
#[cfg(feature = "candle")]
mod dense_uses;
#[path = "../devices/mod.rs"]
mod devices;
mod dispatchers;
mod exact;
mod faults;
#[path = "../common/faulty_comm.rs"]
pub mod faulty_comm;
mod finish;
#[path = "../common/limits.rs"]
mod limits;
#[cfg(feature = "candle")]
mod module;
mod quantized;
#[path = "../../examples/support/random.rs"]
mod random;
#[cfg(feature = "candle")]
mod refused;
mod replicas;
mod same_ranks;
mod stored;
#[cfg(feature = "candle")]
mod stored_module;
mod test_ranks;
mod turns;
#[cfg(feature = "candle")]
mod two_chains;
mod world;

#[cfg(feature = "nccl")]
pub use devices::gpus;
use test_ranks::Chained;
#[allow(unused_imports, reason = "GPUs' suites ask for both")]
pub use test_ranks::{has_memory, with_memory};

/// Every body with its file and the ranks that it needs at least.
#[allow(clippy::type_complexity, reason = "numbers, names and functions, no more")]
pub fn bodies<D: Chained>() -> Vec<(&'static str, usize, &'static str, fn(&D))> {
    let files = [
        ("dispatchers", dispatchers::bodies()),
        ("exact", exact::bodies()),
        ("faults", faults::bodies()),
        ("quantized", quantized::bodies()),
        ("replicas", replicas::bodies()),
        ("stored", stored::bodies()),
        ("turns", turns::bodies()),
    ];
    files.into_iter().flat_map(|(file, all)| all.into_iter().map(move |(n, name, run)| (file, n, name, run))).collect()
}
