//! Matrix products of a decoder's own weights.

use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;

/// `x wᵀ` and the bias where there is one, of `x [T, in]`. Few rows on a GPU are done by a kernel that reads the weight as
/// quickly as memory gives it.
pub(crate) fn linear(of: &Linear, x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(y) = super::gemv_cuda::gemv(of, x)? {
        return Ok(y);
    }
    of.forward(x)
}
