//! The root mean square norm, with a backward.

use candle_core::{D, DType, Result, Tensor};

use super::{wide, with_backward};

/// `x / √(mean x² + ε) · w` over the last dimension of a contiguous `x`, computed in f32 (f64 for f64), in x's type; `w`
/// has it too. Backward keeps x and w alone.
pub(crate) fn rms_norm(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    let y = forward(&x.detach(), &w.detach(), eps)?;
    let asked = [x.track_op(), w.track_op()];
    with_backward("rms_norm", &[x, w], y, move |inputs, _, of| {
        let [x, w] = inputs else { return Ok(Vec::new()) };
        let dtype = wide(x.dtype());
        let (x, w, of) = (x.to_dtype(dtype)?, w.to_dtype(dtype)?, of.to_dtype(dtype)?);
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        let unit = x.broadcast_div(&rms)?;
        let d_x = asked[0].then(|| {
            let scaled = of.broadcast_mul(&w)?;
            let along = (&scaled * &unit)?.mean_keepdim(D::Minus1)?;
            (scaled - unit.broadcast_mul(&along)?)?.broadcast_div(&rms)?.to_dtype(inputs[0].dtype())
        });
        let d_w = asked[1].then(|| {
            let size = w.elem_count();
            (&of * &unit)?.reshape(((), size))?.sum(0)?.to_dtype(inputs[1].dtype())
        });
        Ok(vec![d_x.transpose()?, d_w.transpose()?])
    })
}

/// `x + y` and its norm, without a backward, by a kernel; `None` where there is none.
pub(crate) fn add_rms_norm(x: &Tensor, y: &Tensor, w: &Tensor, eps: f64) -> Result<Option<[Tensor; 2]>> {
    #[cfg(feature = "cuda")]
    if let Some(both) = super::add_rms_norm_cuda::add_rms_norm(x, y, w, eps)? {
        return Ok(Some(both));
    }
    let _ = (x, y, w, eps);
    Ok(None)
}

fn forward(x: &Tensor, w: &Tensor, eps: f64) -> Result<Tensor> {
    // candle's own on the CPU rounds the root mean square to x's type, and has no f64.
    if x.device().is_cuda() && x.dtype() != DType::F64 || x.dtype() == DType::F32 {
        return candle_nn::ops::rms_norm(x, w, eps as f32);
    }
    let dtype = x.dtype();
    let wide_x = x.to_dtype(wide(dtype))?;
    let rms = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    wide_x.broadcast_div(&rms)?.to_dtype(dtype)?.broadcast_mul(w)
}
