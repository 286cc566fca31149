//! Seeds of random test data. Each place has a number of its own; the environment variable `MOEBIUS_TEST_SEED` moves
//! all of them, and stands beside every failure, so that it can be met again.
#![allow(dead_code, reason = "every suite takes a part")]

use std::panic;
use std::sync::OnceLock;

use rand::{Rng, SeedableRng, rngs::StdRng};
use rand_distr::StandardNormal;

/// The variable that moves every seed.
pub const VARIABLE: &str = "MOEBIUS_TEST_SEED";

/// By how much seeds are moved: 0 unless the variable says otherwise. From the first call on every panic names it.
pub fn shift() -> u64 {
    static SHIFT: OnceLock<u64> = OnceLock::new();
    *SHIFT.get_or_init(|| {
        let shift = std::env::var(VARIABLE).map_or(0, |text| text.parse().expect("MOEBIUS_TEST_SEED is a number"));
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            before(info);
            eprintln!("random data of {VARIABLE}={shift}");
        }));
        shift
    })
}

/// The seed of a place: its own number, moved.
pub fn seed(own: u64) -> u64 {
    own.wrapping_add(shift().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The same in 32 bytes.
pub fn bytes(own: u64) -> [u8; 32] {
    let mut bytes = [own as u8; 32];
    bytes[..8].copy_from_slice(&seed(own).to_le_bytes());
    bytes
}

/// A generator of this seed.
pub fn generator(own: u64) -> StdRng {
    StdRng::seed_from_u64(seed(own))
}

/// Numbers of mean 0 and variance 1.
pub fn normal(own: u64, count: usize) -> Vec<f64> {
    generator(own).sample_iter(StandardNormal).take(count).collect()
}
