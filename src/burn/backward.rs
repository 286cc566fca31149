//! Backward from a gradient that is given.

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};

use crate::error::{Error, Result};

use super::backend::MoeBackend;

const CALL: &str = "backward_with";
const GRADIENT: &str = "gradient of y";

/// [`Tensor::backward`] of `y` with its gradient given: for a loss whose gradient is known, for a stage of a pipeline.
/// The gradients are those of `(y * d_y).sum().backward()`, without the product.
///
/// # Errors
/// A gradient of another shape or type than `y`'s, or on another device; a `y` that tracks no gradients.
pub fn backward_with<B: AutodiffBackend + MoeBackend, const D: usize>(
    y: Tensor<B, D>,
    d_y: Tensor<B::InnerBackend, D>,
) -> Result<B::Gradients> {
    Ok(inner_product(y, d_y)?.backward())
}

/// Σ y ∘ d_y, for its gradient alone.
pub(super) fn inner_product<B: AutodiffBackend + MoeBackend, const D: usize>(
    y: Tensor<B, D>,
    d_y: Tensor<B::InnerBackend, D>,
) -> Result<Tensor<B, 1>> {
    Error::check_shape(CALL, GRADIENT, &y.dims(), &d_y.dims())?;
    if y.dtype() != d_y.dtype() {
        let found = format!("{:?}", d_y.dtype());
        return Err(Error::invalid(CALL, GRADIENT, format!("{:?}", y.dtype()), found));
    }
    if y.device() != d_y.device() {
        let found = format!("one on {:?}", d_y.device());
        return Err(Error::invalid(CALL, GRADIENT, format!("one on {:?}", y.device()), found));
    }
    let d_y = B::to_native(Tensor::<B, D>::from_inner(d_y).into_primitive().tensor());
    let product = B::moe_inner_product(y.into_primitive().tensor(), d_y)?;
    Ok(Tensor::from_primitive(TensorPrimitive::Float(product)))
}

/// The error for a tensor that no backward can begin at.
pub(super) fn untracked() -> Error {
    Error::invalid(CALL, "y", "a tensor that tracks gradients", "a constant")
}
