//! Random bits of stochastic rounding: Philox4x32-7 (Salmon, Moraes, Dror and Shaw, SC 2011). Counter-based, so the
//! bits of a block depend on its place and the seed, on nothing that was computed before. Seven rounds are the fewest
//! that pass all of TestU01's BigCrush, by that paper; ten, the usual number, add a margin that a byte an element does
//! not need, and cost a cast of both directions 7 % of its time (`kernels/notes/quantization.md`, "Version 6").

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 7;

/// The key of a seed: its low word, its high word.
pub(crate) fn key(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// A key for each round.
pub(crate) type Keys = [[u32; 2]; ROUNDS];

pub(crate) fn keys(key: [u32; 2]) -> Keys {
    std::array::from_fn(|round| [0, 1].map(|i| key[i].wrapping_add(WEYL[i].wrapping_mul(round as u32))))
}

/// 128 random bits of a counter under a key, by seven rounds: not those of the ten that NumPy's or cuRAND's Philox has.
pub fn philox4x32(mut counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    for key in keys(key) {
        let wide = |i: usize, word: u32| u64::from(MULTIPLIERS[i]) * u64::from(word);
        let (p0, p1) = (wide(0, counter[0]), wide(1, counter[2]));
        let high = |p: u64| (p >> 32) as u32;
        counter = [high(p1) ^ counter[1] ^ key[0], p1 as u32, high(p0) ^ counter[3] ^ key[1], p0 as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // Those the authors published with their library.
        let pi = ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        for ((counter, key), expected) in [
            (([0; 4], [0; 2]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]),
            (([u32::MAX; 4], [u32::MAX; 2]), [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]),
            (pi, [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]),
        ] {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }
}
