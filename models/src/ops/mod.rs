//! Operations with a backward of their own: fused, or in blocks that backward computes again, where candle's plain
//! operations would keep what a whole forward made. The decoders are made of them, and other decoders on candle may be.
//! They refuse what does not fit together with errors that name call, tensor, expected and found, and take part in candle's
//! `backward` as its own operations do. Tensors of no elements are for a CPU: candle has no memory of no bytes on a GPU, and
//! a call that would make one there ends with its error.
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use moebius_models::ops::{
//!     CausalOptions, CrossEntropyOptions, RopeLayout, attention, cross_entropy, rms_norm, rope, softmax,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::Cpu;
//! let x = Var::randn(0f32, 1., (2, 4, 6, 8), &device)?; // [B, heads, S, D]
//! let scale = Var::ones(8, DType::F32, &device)?;
//! let normed = rms_norm(&x, &scale, 1e-6)?;
//!
//! let angles = Tensor::rand(0f32, 3., (6, 4), &device)?; // [S, D/2]
//! let q = rope(&normed, [&angles.cos()?, &angles.sin()?], RopeLayout::Halves)?;
//! let keys = q.narrow(1, 0, 2)?; // two key heads of two query heads each
//! let y = attention(&q, &keys, &keys, CausalOptions::default().with_window(4))?; // [B, S, heads, D]
//!
//! let hidden = y.reshape((12, 32))?;
//! let head = Var::randn(0f32, 1., (50, 32), &device)?; // [V, H]
//! let targets = Tensor::arange(0u32, 12, &device)?;
//! let loss = cross_entropy(&hidden, &head, &targets, CrossEntropyOptions::default())?; // a sum
//! let gradients = (loss / 12.)?.backward()?;
//! assert!([&x, &scale, &head].iter().all(|var| gradients.get(var).is_some()));
//!
//! let p = softmax(&hidden)?;
//! assert_eq!(p.dims(), [12, 32]);
//! # Ok(()) }
//! ```

#[cfg(feature = "cuda")]
mod argmax_cuda;
mod argument_checks;
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

pub use attention::{CausalOptions, attention};
pub use cross_entropy::{CrossEntropyOptions, cross_entropy};
pub use norm::{layer_norm, rms_norm};
pub use rotate::{RopeLayout, rope};
pub use softmax::softmax;

pub(crate) use attention::{
    AttentionOptions, CacheAttentionOptions, CacheMask, MaskCache, cache_attention, masked_attention,
};
#[cfg(feature = "cuda")]
pub(crate) use captured_results::{CapturedResults, release_late};
pub(crate) use computed::{with_backward, with_zero_gradients};
pub(crate) use cross_entropy::{Head, head_cross_entropy};
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
