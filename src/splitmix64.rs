//! SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), modulo 2⁶⁴.

/// Its increment: ⌊2⁶⁴ / φ⌋, odd.
pub(crate) const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Its finalizer.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
