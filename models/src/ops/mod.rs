//! Operations with a backward of their own: fused, or in blocks that backward computes again, where candle's plain
//! operations would keep what a whole forward made. The decoders are made of them; [`softmax`] is for others too.

#[cfg(feature = "cuda")]
mod argmax_cuda;
mod attention;
#[cfg(feature = "cuda")]
mod captured_results;
mod computed;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod gemv_cuda;
#[cfg(feature = "cuda")]
mod kernel_table;
mod linear;
mod norm;
#[cfg(feature = "cuda")]
mod norm_cuda;
#[cfg(feature = "cuda")]
mod params;
mod qk_norm_rope;
#[cfg(feature = "cuda")]
mod qk_norm_rope_cuda;
mod rotate;
mod softmax;
#[cfg(feature = "cuda")]
mod softmax_cuda;

pub use softmax::softmax;

pub(crate) use attention::{AttentionOptions, CacheAttentionOptions, CacheMask, MaskCache, attention, cache_attention};
#[cfg(feature = "cuda")]
pub(crate) use captured_results::{CapturedResults, release_late};
pub(crate) use computed::with_backward;
pub(crate) use cross_entropy::{Head, cross_entropy};
pub(crate) use linear::linear;
pub(crate) use norm::{NormOptions, NormWeights, add_norm, norm};
pub(crate) use qk_norm_rope::QkNormRope;
pub(crate) use rotate::rotate;

use candle_core::{D, DType, Result, Tensor};

/// Places of the first of each row's largest entries, U32 `[T, 1]` of `[T, V]`.
pub(crate) fn argmax(x: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Tensor::zeros((x.dim(0)?, 1), DType::U32, x.device());
    }
    #[cfg(feature = "cuda")]
    if let Some(places) = argmax_cuda::argmax(x)? {
        return Ok(places);
    }
    x.argmax_keepdim(D::Minus1)
}

/// x · sigmoid(x), rounded once to x's type. candle's own rounds 16-bit values three times, which is enough to send a token
/// to another expert behind it.
pub(crate) fn silu(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(wide(x.dtype()))?.silu()?.to_dtype(x.dtype())
}

/// sigmoid(x), rounded once to x's type.
pub(crate) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    candle_nn::ops::sigmoid(&x.to_dtype(wide(x.dtype()))?)?.to_dtype(x.dtype())
}

/// f32 for narrower types.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

#[cfg(all(test, feature = "cuda"))]
mod row_gpu_tests;
#[cfg(all(test, feature = "cuda"))]
mod row_rates;
#[cfg(test)]
mod row_tests;
#[cfg(test)]
mod tests;
