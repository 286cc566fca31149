//! Operations with a backward of their own: fused, or in blocks that backward computes again, where candle's plain
//! operations would keep what a whole forward made.

mod attention;
mod computed;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
mod heads;
#[cfg(feature = "cuda")]
mod heads_cuda;
mod linear;
#[cfg(feature = "cuda")]
mod linear_cuda;
mod norm;
mod rotate;
#[cfg(feature = "cuda")]
mod rows_cuda;

pub(crate) use attention::{AttentionOptions, MaskCache, SlotOptions, attention, slot_attention};
pub(crate) use computed::with_backward;
pub(crate) use cross_entropy::{Head, cross_entropy};
pub(crate) use heads::HeadRows;
pub(crate) use linear::linear;
pub(crate) use norm::{add_rms_norm, rms_norm};
pub(crate) use rotate::rotate;

use candle_core::{D, DType, Result, Tensor};

/// Places of the first of each row's largest entries, U32 `[T, 1]` of `[T, V]`.
pub(crate) fn argmax(x: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Tensor::zeros((x.dim(0)?, 1), DType::U32, x.device());
    }
    #[cfg(feature = "cuda")]
    if let Some(places) = rows_cuda::argmax(x)? {
        return Ok(places);
    }
    x.argmax_keepdim(D::Minus1)
}

/// f32 for narrower types.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

#[cfg(test)]
mod tests;
