//! Operations with a backward of their own: fused, or in blocks that backward computes again, where candle's plain
//! operations would keep what a whole forward made.

mod attention;
mod computed;
mod cross_entropy;
mod norm;
mod rotate;

pub(crate) use attention::{AttentionOptions, MaskCache, SlotOptions, SlotRows, attention, slot_attention};
pub(crate) use computed::with_backward;
pub(crate) use cross_entropy::{Head, cross_entropy};
pub(crate) use norm::rms_norm;
pub(crate) use rotate::rotate;

use candle_core::DType;

/// f32 for narrower types.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

#[cfg(test)]
mod tests;
