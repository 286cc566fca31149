//! What a forward returns.

use std::sync::Arc;

use crate::kernels::Kernels;
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::Tensor;

use super::aux_losses::AuxLoss;
use super::context::Context;

/// Result of [`Layer::forward`](super::Layer::forward).
#[derive(Debug)]
pub struct Forward<D: Kernels> {
    /// `[T, H]`, tokens' dtype.
    pub y: Tensor<D>,
    /// Auxiliary losses, coefficients included; zeros where none is asked for.
    pub aux: AuxLoss<D>,
    /// The routing, as data.
    pub routing: Routing<D>,
    /// State that backward needs; present if asked for.
    pub context: Option<Context<D>>,
}

/// Result of [`Layer::forward_into`](super::Layer::forward_into): a [`Forward`] whose output is the caller's.
#[derive(Debug)]
pub struct ForwardInfo<D: Kernels> {
    /// Auxiliary losses, coefficients included; zeros where none is asked for.
    pub aux: AuxLoss<D>,
    /// The routing, as data.
    pub routing: Routing<D>,
    /// State that backward needs; present if asked for.
    pub context: Option<Context<D>>,
}

/// Routing of this rank's tokens.
#[derive(Debug)]
pub struct Routing<D: Kernels> {
    /// `[T, E]`, accumulator type.
    pub logits: Arc<Tensor<D>>,
    /// Chosen experts, `I32 [T, K]`, before any drop.
    pub ids: Arc<Tensor<D>>,
    /// Weights of the chosen, accumulator type `[T, K]`.
    pub weights: Arc<Tensor<D>>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}
