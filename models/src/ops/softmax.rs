//! Softmax of rows, with a backward.

use candle_core::{D, DType, Error, Result, Tensor};

use super::{wide, with_backward};

/// Softmax over the last dimension of `x [.., N]`, in x's shape and type: exp(x − max) / Σ exp(x − max). Sums are f32 (f64
/// for f64), and the result is rounded once. Entries of −∞ have probability zero; a row of nothing else, or with +∞ or a
/// not-a-number in it, is not a number.
///
/// Unlike candle's fused softmax it has a backward, y ∘ (g − Σ y ∘ g), which keeps the result alone. On a GPU both are a
/// kernel each in f32, bf16 and f16.
///
/// # Errors
/// A tensor without dimensions, or of integers; candle's.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let supported = matches!(x.dtype(), DType::F64 | DType::F32 | DType::BF16 | DType::F16);
    if x.rank() == 0 || !supported {
        let found = (x.dims(), x.dtype());
        return Err(Error::msg(format!("softmax: expected rows of f64, f32, bf16 or f16, found {found:?}")));
    }
    let y = forward(&x.detach().contiguous()?)?;
    with_backward("softmax", &[x], y, |_, y, of| Ok(vec![Some(gradient(y, of)?)]))
}

fn forward(x: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return x.zeros_like();
    }
    #[cfg(feature = "cuda")]
    if let Some(y) = super::softmax_cuda::softmax(x)? {
        return Ok(y);
    }
    candle_nn::ops::softmax_last_dim(&x.to_dtype(wide(x.dtype()))?)?.to_dtype(x.dtype())
}

fn gradient(y: &Tensor, of: &Tensor) -> Result<Tensor> {
    if y.elem_count() == 0 {
        return y.zeros_like();
    }
    #[cfg(feature = "cuda")]
    if let Some(d_x) = super::softmax_cuda::gradient(y, of)? {
        return Ok(d_x);
    }
    let dtype = y.dtype();
    let (y, of) = (y.to_dtype(wide(dtype))?, of.to_dtype(wide(dtype))?);
    let along = (&y * &of)?.sum_keepdim(D::Minus1)?;
    (y * of.broadcast_sub(&along)?)?.to_dtype(dtype)
}
