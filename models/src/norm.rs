//! Norms over the last dimension. Tokens are rows, `[T, H]`.

use candle_core::{Result as CandleResult, Tensor};

use crate::error::Result;
use crate::ops::{NormOptions, NormWeights, add_norm, norm};
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
    options: NormOptions,
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Norm {
    pub fn load(p: &mut Loader<'_>, name: &str, size: usize, spec: NormSpec) -> Result<Self> {
        let NormSpec { kind, eps } = spec;
        let weight = p.get(&format!("{name}.weight"), &[size])?;
        let bias = match kind {
            NormKind::Layer { bias: true } => Some(p.get(&format!("{name}.bias"), &[size])?),
            _ => None,
        };
        let options = match kind {
            NormKind::Rms => NormOptions::rms(eps),
            NormKind::RmsPlusOne => NormOptions { weight_offset: 1.0, ..NormOptions::rms(eps) },
            NormKind::Layer { .. } => NormOptions { centered: true, ..NormOptions::rms(eps) },
        };
        Ok(Self { options, weight, bias })
    }

    /// Weight and ε of a plain root mean square norm.
    pub fn rms(&self) -> Option<(&Tensor, f64)> {
        self.options.is_plain_rms().then_some((&self.weight, self.options.eps))
    }

    /// `x + y` and its norm, `[T, size]` each.
    pub fn of_sum(&self, x: &Tensor, y: &Tensor) -> CandleResult<[Tensor; 2]> {
        let weights = NormWeights { weight: &self.weight, bias: self.bias.as_ref() };
        if let Some(both) = add_norm(x, y, Some(weights), self.options)? {
            return Ok(both);
        }
        let x = (x + y)?;
        let normed = self.forward(&x)?;
        Ok([x, normed])
    }

    /// Of `[…, size]`, contiguous.
    pub fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let in_type = |t: &Tensor| t.to_dtype(x.dtype());
        let (weight, bias) = (in_type(&self.weight)?, self.bias.as_ref().map(in_type).transpose()?);
        norm(x, Some(NormWeights { weight: &weight, bias: bias.as_ref() }), self.options)
    }
}

/// `x / √(mean x² + ε)` over the last dimension of a contiguous `x`, computed in f32 or wider, in x's type.
pub(crate) fn unit_rms(x: &Tensor, eps: f64) -> CandleResult<Tensor> {
    norm(x, None, NormOptions::rms(eps))
}
