//! Element formats: E2M1, E4M3 and E8M0, to and from binary32, bit by bit.

/// E2M1 code (sign in bit 3) to value.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Largest E2M1 magnitude.
pub const E2M1_MAX: f32 = 6.0;
/// Largest E4M3 magnitude.
pub const E4M3_MAX: f32 = 448.0;
/// The E4M3 byte that this crate writes for NaN; 0xFF is one too.
pub const E4M3_NAN: u8 = 0x7F;

/// E4M3 (`e4m3fn`: bias 7, largest 448, no infinity, 0x7F and 0xFF NaN) to value, for every byte.
pub static E4M3: [f32; 256] = e4m3_table();

/// 2⁻⁶, the least normal E4M3 magnitude. Below it values are multiples of 2⁻⁹.
const E4M3_NORMAL: f32 = 0.015_625;
/// The excess of binary32's biased exponent over E4M3's, at the place of E4M3's exponent.
const E4M3_REBIAS: u32 = (127 - 7) << 3;

/// E8M0 byte b to 2^(b − 127); 255 is NaN.
pub fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits((b as u32) << 23),
    }
}

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = e4m3(byte as u8);
        byte += 1;
    }
    table
}

const fn e4m3(byte: u8) -> f32 {
    let sign = (byte as u32 >> 7) << 31;
    let exponent = (byte >> 3) as u32 & 15;
    let mantissa = byte as u32 & 7;
    let bits = match (exponent, mantissa) {
        (15, 7) => 0x7FC0_0000,
        // Subnormals are multiples of 2⁻⁹: exact in binary32.
        (0, m) => (m as f32 * 0.001_953_125).to_bits(),
        (e, m) => ((e + 120) << 23) | (m << 20),
    };
    f32::from_bits(sign | bits)
}

/// Sign bit of a code: of values below zero only, so −0.0 has code 0 and −0.1 code 8.
fn e2m1_sign(y: f32) -> u8 {
    if y < 0.0 { 8 } else { 0 }
}

/// Value to E2M1 code: to nearest, ties to the even code, saturating at ±6; NaN is 7.
pub fn e2m1_nearest(y: f32) -> u8 {
    if y.is_nan() { 7 } else { e2m1_compared(y) }
}

/// As [`e2m1_nearest`], but NaN is 0, as it passes no comparison.
pub(super) fn e2m1_compared(y: f32) -> u8 {
    let a = y.abs();
    // The code is the number of midpoints passed; a tie passes where that makes the code even.
    let passed = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0];
    passed.into_iter().map(u8::from).sum::<u8>() | e2m1_sign(y)
}

/// Value to E2M1 code, stochastically: `|y| + u·step` (one rounding), truncated to the grid, with `u = random / 256`
/// and the step of |y|'s own interval: ½ below 2, 1 below 4, else 2. Saturates at ±6; NaN is 7.
pub fn e2m1_stochastic(y: f32, random: u8) -> u8 {
    let a = y.abs();
    if a.is_nan() {
        return 7;
    }
    let step = match a {
        a if a < 2.0 => 0.5,
        a if a < 4.0 => 1.0,
        _ => 2.0,
    };
    let t = a + f32::from(random) * (step / 256.0);
    let reached = [t >= 0.5, t >= 1.0, t >= 1.5, t >= 2.0, t >= 3.0, t >= 4.0, t >= 6.0];
    reached.into_iter().map(u8::from).sum::<u8>() | e2m1_sign(y)
}

/// Value to E4M3 byte: to nearest even, saturating at ±448 (infinities too); NaN is [`E4M3_NAN`]. Keeps the sign of
/// zero.
pub fn e4m3_nearest(x: f32) -> u8 {
    let half = |bits: u32| 0x7_FFFF + ((bits >> 20) & 1);
    e4m3_from(x, |bits| (bits + half(bits)) >> 20, |multiple| multiple.round_ties_even())
}

/// Value to E4M3 byte, stochastically: away from zero with the probability of the part that E4M3 cannot hold, to 20
/// bits, the upper ones of `random`. Otherwise as [`e4m3_nearest`].
pub fn e4m3_stochastic(x: f32, random: u32) -> u8 {
    let random = random >> 12;
    // In binary64 the sum of a multiple below 8 and 20 bits below 1 truncates as the exact sum does, but for values
    // below 2⁻⁴⁰, whose chance is nil at 20 bits.
    let up = f64::from(random) / f64::from(1u32 << 20);
    e4m3_from(x, |bits| (bits + random) >> 20, |multiple| (f64::from(multiple) + up).floor() as f32)
}

/// `normal` rounds binary32 bits to 3 bits of mantissa, `small` a multiple of 2⁻⁹ to an integer.
fn e4m3_from(x: f32, normal: impl Fn(u32) -> u32, small: impl Fn(f32) -> f32) -> u8 {
    if x.is_nan() {
        return E4M3_NAN;
    }
    let a = x.abs().min(E4M3_MAX);
    let code = match a < E4M3_NORMAL {
        // 8 of the least steps are the least normal value, in value and in code.
        true => small(a * 512.0) as u32,
        false => (normal(a.to_bits()) - E4M3_REBIAS).min(0x7E),
    };
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Magnitude to E8M0 byte, rounded up: the least 2^(b − 127) that is at least `v`, 254 above all of them, 0 for
/// 0. The sign is ignored; NaN is 255.
pub fn e8m0_ceil(v: f32) -> u8 {
    let bits = v.abs().to_bits();
    let (exponent, mantissa) = (bits >> 23, bits & 0x7F_FFFF);
    match exponent {
        255 if mantissa != 0 => 255,
        254 | 255 => 254,
        // 2⁻¹²⁷ is a binary32 subnormal.
        0 => u8::from(mantissa > 0x40_0000),
        _ => exponent as u8 + u8::from(mantissa > 0),
    }
}

/// Magnitude to E8M0 byte, rounded down: the largest 2^(b − 127) that is at most `v`, 0 below all of them, 254 for
/// an infinity. The sign is ignored; NaN is 255.
pub fn e8m0_floor(v: f32) -> u8 {
    let bits = v.abs().to_bits();
    match (bits >> 23, bits & 0x7F_FFFF) {
        (255, 0) => 254,
        (exponent, _) => exponent as u8,
    }
}

/// Two E2M1 codes a byte, the low nibble first, times one scale a block: `out[i] = E2M1[code i] · scale[i / block]`.
///
/// `codes` holds half as many bytes as `out` has elements, `scales` one value per `block` elements; the last block
/// may be partial.
pub(crate) fn decode_fp4(codes: &[u8], scales: &[f32], block: usize, out: &mut [f32]) {
    debug_assert_eq!((codes.len() * 2, scales.len()), (out.len(), out.len().div_ceil(block)));
    for ((codes, out), scale) in codes.chunks(block / 2).zip(out.chunks_mut(block)).zip(scales) {
        for (byte, pair) in codes.iter().zip(out.chunks_exact_mut(2)) {
            pair[0] = E2M1[(byte & 15) as usize] * scale;
            pair[1] = E2M1[(byte >> 4) as usize] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neighbors of every finite E4M3 or E2M1 value and of every midpoint, from below to above.
    fn probes(grid: &[f64]) -> Vec<f32> {
        let mut probes = Vec::new();
        for pair in grid.windows(2) {
            let middle = ((pair[0] + pair[1]) / 2.0) as f32;
            for at in [pair[0] as f32, middle] {
                probes.extend([at.next_down(), at, at.next_up()].map(f32::abs));
            }
        }
        probes.extend([
            f32::from_bits(1),
            f32::MIN_POSITIVE,
            grid[grid.len() - 1] as f32,
            1e9,
            f32::MAX,
            f32::INFINITY,
        ]);
        probes
    }

    /// The definition: index of the nearest, of two the even one.
    fn nearest(grid: &[f64], x: f32) -> u8 {
        let x = f64::from(x).min(grid[grid.len() - 1]);
        let distance = |i: usize| (grid[i] - x).abs();
        let best = (0..grid.len()).map(distance).fold(f64::INFINITY, f64::min);
        (0..grid.len()).filter(|i| distance(*i) == best).min_by_key(|i| i % 2).unwrap() as u8
    }

    fn e2m1_grid() -> Vec<f64> {
        E2M1[..8].iter().map(|v| f64::from(*v)).collect()
    }

    fn e4m3_grid() -> Vec<f64> {
        E4M3[..0x7F].iter().map(|v| f64::from(*v)).collect()
    }

    #[test]
    fn e4m3_corners() {
        // From the OFP8 specification's table of values.
        assert_eq!(E4M3[0x00].to_bits(), 0.0f32.to_bits());
        assert_eq!(E4M3[0x80].to_bits(), (-0.0f32).to_bits());
        assert_eq!(E4M3[0x01], 2f32.powi(-9));
        assert_eq!(E4M3[0x07], 0.875 * 2f32.powi(-6));
        assert_eq!(E4M3[0x08], 2f32.powi(-6));
        assert_eq!(E4M3[0x38], 1.0);
        assert_eq!(E4M3[0x7E], 448.0);
        assert_eq!(E4M3[0xFE], -448.0);
        assert!(E4M3[0x7F].is_nan() && E4M3[0xFF].is_nan());
        assert_eq!(E4M3.iter().filter(|v| v.is_nan()).count(), 2);
    }

    #[test]
    fn e2m1_is_nearest_even() {
        let grid = e2m1_grid();
        for x in probes(&grid) {
            assert_eq!(e2m1_nearest(x), nearest(&grid, x), "{x}");
            if x > 0.0 {
                assert_eq!(e2m1_nearest(-x), nearest(&grid, x) | 8, "-{x}");
            }
        }
        assert_eq!((e2m1_nearest(-0.0), e2m1_nearest(f32::NAN), e2m1_nearest(-f32::NAN)), (0, 7, 7));
    }

    #[test]
    fn e4m3_is_nearest_even() {
        let grid = e4m3_grid();
        for x in probes(&grid) {
            assert_eq!(e4m3_nearest(x), nearest(&grid, x), "{x}");
            assert_eq!(e4m3_nearest(-x), nearest(&grid, x) | 0x80, "-{x}");
        }
        assert_eq!((e4m3_nearest(f32::NAN), e4m3_nearest(-f32::NAN)), (0x7F, 0x7F));
        for (byte, value) in E4M3.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
            assert_eq!(e4m3_nearest(*value) as usize, byte);
        }
    }

    /// How many of all random numbers round away from zero, against the exact share of the way to the next value.
    #[test]
    fn stochastic_chances() {
        let grid = e2m1_grid();
        for x in probes(&grid).into_iter().filter(|x| *x <= 6.0) {
            let below = grid.iter().rposition(|v| *v <= f64::from(x)).unwrap();
            let ups = (0..=255).filter(|u| e2m1_stochastic(x, *u) as usize != below).count() as f64;
            let next = grid.get(below + 1).copied().unwrap_or(8.0);
            let share = 256.0 * (f64::from(x) - grid[below]) / (next - grid[below]);
            // 256 equally likely numbers: the count is the share rounded down, or up where the f32 sum rounds up.
            assert!(ups >= share.floor() && ups <= share.ceil(), "{x}: {ups} of 256, {share}");
            assert!((0..=255).all(|u| e2m1_stochastic(-x, u) & 7 == e2m1_stochastic(x, u)));
        }
        assert_eq!((e2m1_stochastic(-0.1, 0), e2m1_stochastic(-0.0, 255), e2m1_stochastic(f32::NAN, 9)), (8, 0, 7));
        assert_eq!((e2m1_stochastic(1e9, 0), e2m1_stochastic(-f32::INFINITY, 0)), (7, 15));

        let grid = e4m3_grid();
        // Every 2⁹th of the 2²⁰ numbers that E4M3 tells apart.
        let randoms: Vec<u32> = (0..1 << 11).map(|i| i << 21).collect();
        for x in probes(&grid).into_iter().filter(|x| *x < 448.0) {
            let below = grid.iter().rposition(|v| *v <= f64::from(x)).unwrap();
            let share = (f64::from(x) - grid[below]) / (grid[below + 1] - grid[below]);
            let ups = randoms.iter().filter(|r| e4m3_stochastic(x, **r) as usize == below + 1).count();
            let stay = randoms.iter().filter(|r| e4m3_stochastic(x, **r) as usize == below).count();
            assert_eq!(ups + stay, randoms.len());
            assert!((ups as f64 - share * randoms.len() as f64).abs() <= 1.0, "{x}: {ups}, {share}");
        }
        assert_eq!(e4m3_stochastic(448.0, u32::MAX), 0x7E);
        assert_eq!(e4m3_stochastic(-f32::INFINITY, u32::MAX), 0xFE);
        assert_eq!(e4m3_stochastic(f32::NAN, 0), 0x7F);
    }

    #[test]
    fn e8m0_corners() {
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2f32.powi(-126) / 2.0);
        assert_eq!(e8m0(1), 2f32.powi(-126));
        assert_eq!(e8m0(254), 2f32.powi(127));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn e8m0_rounds_both_ways() {
        for byte in 0..=254u8 {
            let power = e8m0(byte);
            assert_eq!((e8m0_ceil(power), e8m0_floor(power)), (byte, if byte == 0 { 0 } else { byte }));
            assert_eq!(e8m0_ceil(power.next_up()), (byte + 1).min(254));
            assert_eq!(e8m0_ceil(power.next_down()), byte);
            assert_eq!(e8m0_floor(power.next_up()), byte);
            assert_eq!(e8m0_floor(power.next_down()), byte.saturating_sub(1));
            assert_eq!(e8m0_ceil(-power), byte);
        }
        assert_eq!((e8m0_ceil(0.0), e8m0_floor(0.0)), (0, 0));
        assert_eq!((e8m0_ceil(f32::INFINITY), e8m0_floor(f32::INFINITY)), (254, 254));
        assert_eq!((e8m0_ceil(f32::NAN), e8m0_floor(f32::NAN)), (255, 255));
    }

    #[test]
    fn fp4_low_nibble_first() {
        let mut out = [0.0; 32];
        let mut codes = [0u8; 16];
        codes[0] = 0x71;
        codes[8] = 0xF2;
        decode_fp4(&codes, &[2.0, 0.5], crate::quant::NVFP4_BLOCK, &mut out);
        assert_eq!((out[0], out[1], out[16], out[17]), (1.0, 12.0, 0.5, -3.0));
    }
}
