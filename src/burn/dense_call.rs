//! Operations with dense weights of a chain.

use std::sync::Arc;

use crate::adapter::ErasedChain;
use crate::ep::BackwardFailure;
use crate::etp::WeightId;

/// The computation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DenseFunction {
    /// y = x·Wᵀ, and + b where there are two weights: `[output, input]` and `[output]`.
    Linear,
    /// Rows of W `[n, width]` by ids.
    Embedding,
    /// y = x / √(mean(x²) + ε) · γ, of γ `[width]`.
    RmsNorm {
        /// ε.
        epsilon: f64,
    },
}

/// A weight of a chain.
#[derive(Debug, Clone)]
pub struct DenseWeight {
    /// Its place there.
    pub id: WeightId,
    /// For errors.
    pub name: String,
    /// Sizes of the whole weight.
    pub dims: Vec<usize>,
}

/// A computation with its weights, in the order in which they are gathered.
#[derive(Debug, Clone)]
pub struct DenseCall {
    /// The chain.
    pub chain: ErasedChain,
    /// One weight, or two.
    pub weights: Vec<DenseWeight>,
    /// The operation.
    pub function: DenseFunction,
    /// Error that has unwound a backward.
    pub(crate) failure: Arc<BackwardFailure>,
}

/// Its input, beside the weights.
#[derive(Debug, Clone)]
pub enum DenseInput<F, I> {
    /// `[…, width]`.
    Rows(F),
    /// Ids, `[batch, tokens]`.
    Ids(I),
}
