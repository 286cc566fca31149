//! Quantised weight formats, de-quantised on load: element decoders here, layouts in the checkpoint reader.
//!
//! Sources: OCP Microscaling Formats (MX) 1.0 for E2M1, E8M0 and MXFP4; OCP 8-bit Floating Point (OFP8) 1.0 for
//! E4M3; nvidia-modelopt and compressed-tensors for the two NVFP4 layouts; DeepSeek-V3's `weight_scale_inv`.
//! All arithmetic is binary32 with one rounding a step, in the order of the reference implementations, so results
//! equal theirs bit for bit.

/// Elements of one NVFP4 block, which share an E4M3 scale.
pub const NVFP4_BLOCK: usize = 16;
/// Elements of one MXFP4 block, which share an E8M0 scale.
pub const MXFP4_BLOCK: usize = 32;

/// E2M1 code (sign in bit 3) to value.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// E4M3 (`e4m3fn`: bias 7, largest 448, no infinity, 0x7F and 0xFF NaN) to value, for every byte.
pub static E4M3: [f32; 256] = e4m3_table();

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

/// Two E2M1 codes a byte, the low nibble first, times one scale a block: `out[i] = E2M1[code i] · scale[i / block]`.
///
/// `codes` holds half as many bytes as `out` has elements, `scales` one value per `block` elements.
pub fn decode_fp4(codes: &[u8], scales: &[f32], block: usize, out: &mut [f32]) {
    debug_assert_eq!((codes.len() * 2, scales.len() * block), (out.len(), out.len()));
    for ((codes, out), scale) in codes.chunks_exact(block / 2).zip(out.chunks_exact_mut(block)).zip(scales) {
        for (byte, pair) in codes.iter().zip(out.chunks_exact_mut(2)) {
            pair[0] = E2M1[(byte & 15) as usize] * scale;
            pair[1] = E2M1[(byte >> 4) as usize] * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn e8m0_corners() {
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2f32.powi(-126) / 2.0);
        assert_eq!(e8m0(1), 2f32.powi(-126));
        assert_eq!(e8m0(254), 2f32.powi(127));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn fp4_low_nibble_first() {
        let mut out = [0.0; 32];
        let mut codes = [0u8; 16];
        codes[0] = 0x71;
        codes[8] = 0xF2;
        decode_fp4(&codes, &[2.0, 0.5], NVFP4_BLOCK, &mut out);
        assert_eq!((out[0], out[1], out[16], out[17]), (1.0, 12.0, 0.5, -3.0));
    }
}
