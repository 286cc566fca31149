//! Hadamard transform of 16 elements with signs: spreads an outlier over its block, and cancels between the two
//! operands of a product that both went through it.

use half::bf16;

use super::NVFP4_BLOCK;

/// The transform `out[j] = bf16(Σ_k v[k] · g[k] · H[k][j] / 4)`, `H[k][j] = (−1)^popcount(k & j)` (Sylvester's H₁₆).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hadamard {
    /// Bit k is set where `g[k]` is −1.
    pub signs: u16,
}

impl Hadamard {
    /// TransformerEngine's signs: + + + − + − − − − − − + − + − −.
    pub const TE: Self = Self { signs: 0b1101_0111_1110_1000 };
    /// No sign changed.
    pub const PLAIN: Self = Self { signs: 0 };

    /// Transforms 16 bf16 values in place.
    ///
    /// The terms are exact (bf16 times ±¼), and added in binary32 in the order of k, so a fused multiply-add gives
    /// the same bits.
    pub fn apply(self, block: &mut [f32; NVFP4_BLOCK]) {
        let mut sums = [0.0f32; NVFP4_BLOCK];
        for (k, v) in block.iter().enumerate() {
            let term = v * if self.signs >> k & 1 == 0 { 0.25 } else { -0.25 };
            for (sum, sign) in sums.iter_mut().zip(SIGN_BITS[k]) {
                *sum += f32::from_bits(term.to_bits() ^ sign);
            }
        }
        *block = sums.map(|sum| bf16::from_f32(sum).to_f32());
    }
}

/// Sign bit of `H[k][j]`.
static SIGN_BITS: [[u32; NVFP4_BLOCK]; NVFP4_BLOCK] = {
    let mut bits = [[0; NVFP4_BLOCK]; NVFP4_BLOCK];
    let mut place = 0;
    while place < NVFP4_BLOCK * NVFP4_BLOCK {
        let (k, j) = (place / NVFP4_BLOCK, place % NVFP4_BLOCK);
        bits[k][j] = ((k & j).count_ones() % 2) << 31;
        place += 1;
    }
    bits
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_as_listed() {
        let listed = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];
        for (k, sign) in listed.into_iter().enumerate() {
            assert_eq!(Hadamard::TE.signs >> k & 1 == 1, sign < 0, "{k}");
        }
    }

    /// H·H = 16, so the plain transform of values that stay exact in bf16 is its own inverse.
    #[test]
    fn plain_is_an_involution() {
        let values: [f32; 16] = std::array::from_fn(|k| (k as f32 * 5.0) % 7.0 - 3.0);
        let mut twice = values;
        Hadamard::PLAIN.apply(&mut twice);
        assert_ne!(twice, values);
        Hadamard::PLAIN.apply(&mut twice);
        assert_eq!(twice, values);
    }

    /// An orthogonal transform keeps inner products: the property the wgrad product relies on.
    #[test]
    fn inner_products_cancel() {
        let mut a: [f32; 16] = std::array::from_fn(|k| ((k * 7) % 5) as f32 - 2.0);
        let mut b: [f32; 16] = std::array::from_fn(|k| ((k * 3) % 11) as f32 - 5.0);
        let dot = |a: &[f32; 16], b: &[f32; 16]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let before = dot(&a, &b);
        Hadamard::TE.apply(&mut a);
        Hadamard::TE.apply(&mut b);
        // Small integers over 4: every sum is exact.
        assert_eq!(dot(&a, &b), before);
    }
}
