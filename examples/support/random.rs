//! Seeded numbers without a dependency: the same on every machine and in every version.

use candle_core::{Device, Result, Tensor};

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A stream of numbers that depends on nothing but `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Normal with mean 0 and variance 1 (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Normal values of standard deviation `std`, F64.
    pub fn tensor(&mut self, dims: &[usize], std: f64) -> Result<Tensor> {
        let values: Vec<f64> = (0..dims.iter().product()).map(|_| std * self.normal()).collect();
        Tensor::from_vec(values, dims, &Device::Cpu)
    }
}
