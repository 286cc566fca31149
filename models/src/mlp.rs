//! The feed-forward block of a layer without experts. Tokens are rows, `[T, H]`.

use candle_core::Tensor;
use candle_nn::Linear;

use crate::error::Result;
use crate::ops::{linear, silu};
use crate::params::Loader;

/// `down(silu(gate x) · up x)`.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub fn load(p: &mut Loader<'_>, prefix: &str, [hidden, inner]: [usize; 2], bias: bool) -> Result<Self> {
        Ok(Self {
            gate: p.linear(&format!("{prefix}.gate_proj"), [inner, hidden], bias)?,
            up: p.linear(&format!("{prefix}.up_proj"), [inner, hidden], bias)?,
            down: p.linear(&format!("{prefix}.down_proj"), [hidden, inner], bias)?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        linear(&self.down, &(silu(&linear(&self.gate, x)?)? * linear(&self.up, x)?)?)
    }
}
