//! Norms of rows, with a backward.

use candle_core::{D, DType, Result, Tensor};

use super::argument_checks::Call;
use super::{wide, with_backward, with_zero_gradients};
use crate::error::Result as CheckedResult;

/// Root mean square norm over the last dimension: `x / √(mean x² + eps) · weight`, of `x [.., H]` and `weight [H]`, in x's
/// shape and type. It is computed in f32 (f64 for f64). In 16 bits the result is rounded once on a GPU; on a CPU it is
/// rounded before its product with the weight and behind it, as that of transformers is.
///
/// Unlike candle's fused norm it has a backward, which keeps x and the weight alone. On a GPU both are kernels in f32, bf16
/// and f16. Of no rows the result is none, and the weight's gradient zeros.
///
/// # Errors
/// A typed error for a tensor without dimensions or of rows without entries, types other than f64, f32, bf16 and f16, a
/// weight of another size, type or device than x's, and an `eps` that is negative or not finite; candle's.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> CheckedResult<Tensor> {
    checked_norm(Call("ops::rms_norm"), x, NormWeights { weight, bias: None }, NormOptions::rms(eps))
}

/// Layer norm over the last dimension: `(x − mean x) / √(mean (x − mean x)² + eps) · weight + bias`, of `x [.., H]`,
/// `weight [H]` and, where there is one, `bias [H]`, in x's shape and type. It is computed in f32 (f64 for f64) and rounded
/// once, as torch's is.
///
/// Unlike candle's fused norm it has a backward, which keeps x, weight and bias alone. On a GPU both are kernels in f32,
/// bf16 and f16. Of no rows the result is none, and the gradients of weight and bias are zeros.
///
/// # Errors
/// As [`rms_norm`], of the bias too.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> CheckedResult<Tensor> {
    let options = NormOptions { centered: true, ..NormOptions::rms(eps) };
    checked_norm(Call("ops::layer_norm"), x, NormWeights { weight, bias }, options)
}

/// A norm with a weight, of what others hand in.
fn checked_norm(call: Call, x: &Tensor, weights: NormWeights<'_>, options: NormOptions) -> CheckedResult<Tensor> {
    call.float("x", x)?;
    call.eps(options.eps)?;
    let Some(size) = x.dims().last().copied().filter(|size| *size > 0) else {
        return call.refuse_shape("x", x, "[.., H] with H >= 1");
    };
    for (name, t) in ["weight", "bias"].into_iter().zip(weights.tensors()) {
        call.shape(name, t, &[size])?;
        call.same_dtype_and_device(("x", x), name, t)?;
    }
    if x.elem_count() == 0 {
        let inputs: Vec<&Tensor> = std::iter::once(x).chain(weights.tensors()).collect();
        return Ok(with_zero_gradients("norm", &inputs, x.zeros_like()?)?);
    }
    let contiguous: Vec<Tensor> = weights.tensors().map(Tensor::contiguous).collect::<Result<_>>()?;
    let weights = contiguous.first().map(|weight| NormWeights { weight, bias: contiguous.get(1) });
    Ok(norm(&x.contiguous()?, weights, options)?)
}

/// A norm but for its weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NormOptions {
    pub eps: f64,
    /// Rows are less their means first, as layer norms have it.
    pub centered: bool,
    /// Added to each weight.
    pub weight_offset: f64,
}

impl NormOptions {
    /// A root mean square norm.
    pub fn rms(eps: f64) -> Self {
        Self { eps, centered: false, weight_offset: 0.0 }
    }

    /// Whether it is a root mean square norm with weights as they are.
    pub fn is_plain_rms(&self) -> bool {
        !self.centered && self.weight_offset == 0.0
    }
}

/// A norm's weight `[H]`, and its bias `[H]` where it has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormWeights<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
}

/// `x / √(mean x² + ε) · (w + offset) + b` over the last dimension of a contiguous `x [.., H]`, centered where that is asked
/// for, computed in f32 (f64 for f64), in x's type; weights have it too. Without weights the row is as it was divided.
/// Backward keeps x and the weights alone.
///
/// The result is rounded once, as torch's `layer_norm` and norms of 1 + w of transformers are. But on a CPU a root mean
/// square norm of 16 bits with weights as they are is rounded before its product with them and behind it, as
/// transformers' is.
pub(crate) fn norm(x: &Tensor, weights: Option<NormWeights<'_>>, options: NormOptions) -> Result<Tensor> {
    let inputs: Vec<&Tensor> = std::iter::once(x).chain(weights.iter().flat_map(NormWeights::tensors)).collect();
    let detached: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let y = forward(&detached, options)?;
    let asked: Vec<bool> = inputs.iter().map(|input| input.track_op()).collect();
    with_backward("norm", &inputs, y, move |inputs, _, of| gradients(inputs, options, of, &asked))
}

/// `x + y` and its norm, without a backward, by a kernel; `None` where there is none.
pub(crate) fn add_norm(
    x: &Tensor,
    y: &Tensor,
    weights: Option<NormWeights<'_>>,
    options: NormOptions,
) -> Result<Option<[Tensor; 2]>> {
    #[cfg(feature = "cuda")]
    if let Some(both) = super::norm_cuda::add_norm(x, y, weights, options)? {
        return Ok(Some(both));
    }
    let _ = (x, y, weights, options);
    Ok(None)
}

impl NormWeights<'_> {
    /// The weight, then the bias.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(self.weight).chain(self.bias)
    }
}

/// Of x, and weight and bias where they are there.
fn forward(inputs: &[Tensor], options: NormOptions) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(y) = super::norm_cuda::norm(inputs, options)? {
        return Ok(y);
    }
    let (x, dtype) = (&inputs[0], inputs[0].dtype());
    if let ([_, w], false) = (inputs, options.centered) {
        // candle's own on the CPU rounds the root mean square to x's type, and has no f64.
        let in_half = x.device().is_cuda() && dtype != DType::F64 && options.is_plain_rms();
        if in_half || dtype == DType::F32 {
            return candle_nn::ops::rms_norm(x, &offset(w, options)?.to_dtype(dtype)?, options.eps as f32);
        }
        if options.is_plain_rms() {
            return unit(x, options)?.0.to_dtype(dtype)?.broadcast_mul(w);
        }
    }
    let (mut y, _) = unit(x, options)?;
    if let Some(w) = inputs.get(1) {
        y = y.broadcast_mul(&offset(w, options)?)?;
    }
    if let Some(b) = inputs.get(2) {
        y = y.broadcast_add(&b.to_dtype(y.dtype())?)?;
    }
    y.to_dtype(dtype)
}

/// Rows of a norm before their weights, and what they were divided by, `[.., 1]`: in f32, or wider.
fn unit(x: &Tensor, options: NormOptions) -> Result<(Tensor, Tensor)> {
    let x = x.to_dtype(wide(x.dtype()))?;
    let x = if options.centered { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + options.eps)?.sqrt()?;
    Ok((x.broadcast_div(&root)?, root))
}

/// What rows are multiplied by, in f32 or wider.
fn offset(w: &Tensor, options: NormOptions) -> Result<Tensor> {
    let w = w.to_dtype(wide(w.dtype()))?;
    if options.weight_offset == 0.0 { Ok(w) } else { w + options.weight_offset }
}

fn gradients(inputs: &[Tensor], options: NormOptions, of: &Tensor, asked: &[bool]) -> Result<Vec<Option<Tensor>>> {
    #[cfg(feature = "cuda")]
    if let Some(found) = super::norm_cuda::gradients(inputs, options, of, asked)? {
        return Ok(found);
    }
    let (unit, root) = unit(&inputs[0], options)?;
    let of = of.to_dtype(unit.dtype())?;
    let of_rows = || {
        let scaled = match inputs.get(1) {
            Some(w) => of.broadcast_mul(&offset(w, options)?)?,
            None => of.clone(),
        };
        let along = (&scaled * &unit)?.mean_keepdim(D::Minus1)?;
        let d = if options.centered { scaled.broadcast_sub(&scaled.mean_keepdim(D::Minus1)?)? } else { scaled };
        (d - unit.broadcast_mul(&along)?)?.broadcast_div(&root)
    };
    let of_column = |t: Tensor| t.reshape(((), t.dim(D::Minus1)?))?.sum(0);
    let of_input = |number: usize| match number {
        0 => of_rows(),
        1 => of_column((&of * &unit)?),
        _ => of_column(of.clone()),
    };
    let gradient = |number: usize| match asked[number] {
        true => of_input(number)?.to_dtype(inputs[number].dtype()).map(Some),
        false => Ok(None),
    };
    (0..inputs.len()).map(gradient).collect()
}
