//! The decoder's dense blocks. All of them take tokens as rows, `[T, H]`.

use candle_core::{DType, Module, Tensor};

use crate::error::Result;
use crate::params::Params;

/// Matrix product with a weight `[out, in]`, and a bias where there is one.
pub(crate) fn linear(p: &mut Params<'_>, prefix: &str, dims: [usize; 2], bias: bool) -> Result<candle_nn::Linear> {
    let weight = p.get(&format!("{prefix}.weight"), &dims)?;
    let bias = if bias { Some(p.get(&format!("{prefix}.bias"), &dims[..1])?) } else { None };
    Ok(candle_nn::Linear::new(weight, bias))
}

/// RMS norm over the last dimension.
#[derive(Debug)]
pub(crate) struct Norm {
    inner: candle_nn::RmsNorm,
    fused: bool,
}

impl Norm {
    pub fn load(p: &mut Params<'_>, prefix: &str, size: usize, eps: f64) -> Result<Self> {
        let weight = p.get(&format!("{prefix}.weight"), &[size])?;
        // On the CPU the fused operation rounds the root mean square to the tokens' type: in bf16 that scales whole
        // rows by up to 1 ± 2⁻⁹. The other computes in f32, as the fused one does on a GPU.
        let exact = weight.device().is_cuda() || matches!(weight.dtype(), DType::F32 | DType::F64);
        let fused = exact && !p.trainable();
        Ok(Self { inner: candle_nn::RmsNorm::new(weight, eps), fused })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if self.fused { self.inner.forward(x) } else { self.inner.forward_diff(x) }
    }
}

/// The feed-forward block of a layer without experts: down(silu(gate x) · up x).
#[derive(Debug)]
pub(crate) struct Mlp {
    gate: candle_nn::Linear,
    up: candle_nn::Linear,
    down: candle_nn::Linear,
}

impl Mlp {
    pub fn load(p: &mut Params<'_>, prefix: &str, hidden: usize, inner: usize) -> Result<Self> {
        Ok(Self {
            gate: linear(p, &format!("{prefix}.gate_proj"), [inner, hidden], false)?,
            up: linear(p, &format!("{prefix}.up_proj"), [inner, hidden], false)?,
            down: linear(p, &format!("{prefix}.down_proj"), [hidden, inner], false)?,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&(self.gate.forward(x)?.silu()? * self.up.forward(x)?)?)
    }
}
