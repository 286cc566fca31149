//! Random bits of stochastic rounding: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011). Counter-based, so the
//! bits of a block depend on its place and the seed, on nothing that was computed before.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// 128 random bits of a counter under a key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let wide = |i: usize, word: u32| u64::from(MULTIPLIERS[i]) * u64::from(word);
        let (p0, p1) = (wide(0, counter[0]), wide(1, counter[2]));
        let high = |p: u64| (p >> 32) as u32;
        counter = [high(p1) ^ counter[1] ^ key[0], p1 as u32, high(p0) ^ counter[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
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
            (([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ] {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }
}
