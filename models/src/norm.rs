//! Norms over the last dimension. Tokens are rows, `[T, H]`.

use candle_core::{D, Result as CandleResult, Tensor};

use crate::error::Result;
use crate::ops::{add_rms_norm, rms_norm, wide};
use crate::params::Loader;

/// Which norm a family has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NormKind {
    /// `x / √(mean x² + ε) · w`.
    Rms,
    /// The same with `1 + w`.
    RmsPlusOne,
    /// `(x − mean) / √(var + ε) · w`, and a bias where there is one.
    Layer { bias: bool },
}

/// A norm without its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormSpec {
    pub kind: NormKind,
    pub eps: f64,
}

impl NormSpec {
    pub fn rms(eps: f64) -> Self {
        Self { kind: NormKind::Rms, eps }
    }
}

/// A norm.
#[derive(Debug)]
pub(crate) struct Norm {
    kind: NormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Norm {
    pub fn load(p: &mut Loader<'_>, name: &str, size: usize, spec: NormSpec) -> Result<Self> {
        let NormSpec { kind, eps } = spec;
        let weight = p.get(&format!("{name}.weight"), &[size])?;
        let bias = match kind {
            NormKind::Layer { bias: true } => Some(p.get(&format!("{name}.bias"), &[size])?),
            _ => None,
        };
        Ok(Self { kind, weight, bias, eps })
    }

    /// Weight and ε of a plain root mean square norm.
    pub fn rms(&self) -> Option<(&Tensor, f64)> {
        (self.kind == NormKind::Rms).then_some((&self.weight, self.eps))
    }

    /// `x + y` and its norm, `[T, size]` each.
    pub fn of_sum(&self, x: &Tensor, y: &Tensor) -> CandleResult<[Tensor; 2]> {
        if let Some((weight, eps)) = self.rms()
            && let Some(both) = add_rms_norm(x, y, weight, eps)?
        {
            return Ok(both);
        }
        let x = (x + y)?;
        let normed = self.forward(&x)?;
        Ok([x, normed])
    }

    /// Of `[…, size]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let dtype = x.dtype();
        match self.kind {
            NormKind::Rms => rms_norm(x, &self.weight.to_dtype(dtype)?, self.eps),
            NormKind::RmsPlusOne => {
                let x = unit_rms(&x.to_dtype(wide(dtype))?, self.eps)?;
                x.broadcast_mul(&(self.weight.to_dtype(wide(dtype))? + 1.0)?)?.to_dtype(dtype)
            }
            NormKind::Layer { .. } => {
                let x = x.to_dtype(wide(dtype))?;
                let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
                let x = unit_rms(&x, self.eps)?.broadcast_mul(&self.weight.to_dtype(wide(dtype))?)?;
                match &self.bias {
                    Some(bias) => x.broadcast_add(&bias.to_dtype(wide(dtype))?)?.to_dtype(dtype),
                    None => x.to_dtype(dtype),
                }
            }
        }
    }
}

/// `x / √(mean x² + ε)` over the last dimension, computed in f32 or wider, in x's type.
pub(crate) fn unit_rms(x: &Tensor, eps: f64) -> CandleResult<Tensor> {
    let dtype = x.dtype();
    let x = x.to_dtype(wide(dtype))?;
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.to_dtype(dtype)
}
