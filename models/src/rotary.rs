//! Rotary position embedding, the half-split form.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::rotary_emb::{rope, rope_slow};

/// Frequencies of one model.
#[derive(Debug, Clone)]
pub(crate) struct Rotary {
    inverse_frequencies: Tensor,
}

/// Cosines and sines of a range of positions, `[S, D/2]`.
#[derive(Debug)]
pub(crate) struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// `theta^(-2i/D)` for i in `0..D/2`.
    pub fn new(head_dim: usize, theta: f64, device: &Device) -> Result<Self> {
        let f: Vec<f32> = (0..head_dim / 2).map(|i| theta.powf(-((2 * i) as f64) / head_dim as f64) as f32).collect();
        Ok(Self { inverse_frequencies: Tensor::new(f, device)?.unsqueeze(0)? })
    }

    /// Angles of positions `start..start + len`. They are made for each forward: their cost is that of one row of
    /// one head, and no table need be as long as the longest sequence that the configuration allows.
    pub fn angles(&self, start: usize, len: usize, dtype: DType) -> Result<Angles> {
        let positions: Vec<f32> = (start..start + len).map(|p| p as f32).collect();
        let positions = Tensor::from_vec(positions, (len, 1), self.inverse_frequencies.device())?;
        let angles = positions.matmul(&self.inverse_frequencies)?;
        Ok(Angles { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }
}

impl Angles {
    /// Rotates `[B, heads, S, D]`; the fused operation has no gradient.
    pub fn apply(&self, x: &Tensor, differentiable: bool) -> Result<Tensor> {
        let x = x.contiguous()?;
        if differentiable { rope_slow(&x, &self.cos, &self.sin) } else { rope(&x, &self.cos, &self.sin) }
    }
}
