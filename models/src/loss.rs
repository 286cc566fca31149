//! Cross-entropy of the next token.

use candle_core::{DType, Result as CandleResult, Tensor};

use crate::ops::{Head, cross_entropy, wide};

/// Cross-entropy of each next token of this rank's sequences.
#[derive(Debug, Clone)]
pub struct Loss {
    /// Sum over the positions that have a next token, a scalar (f64 for f64 models, else f32) that carries gradients.
    pub sum: Tensor,
    /// Their number.
    pub count: usize,
}

impl Loss {
    /// The mean over this rank's positions; 0 where there is none. Over several ranks the mean is the sum of all
    /// ranks' sums over that of their counts.
    ///
    /// # Errors
    /// candle's.
    pub fn mean(&self) -> CandleResult<Tensor> {
        &self.sum / self.count.max(1) as f64
    }
}

/// Of `hidden [B, S, H]` and the ids that they are of.
pub(crate) fn next_token(hidden: &Tensor, ids: &Tensor, head: &Head) -> CandleResult<Loss> {
    let (b, s, h) = hidden.dims3()?;
    let count = b * s.saturating_sub(1);
    if count == 0 {
        // The sum of nothing has the hidden states as its origin all the same, so that backward reaches the layers,
        // where the other ranks wait. (It would not through a product with 0.)
        let sum = hidden.narrow(1, 0, 0)?.to_dtype(wide(hidden.dtype()))?.sum_all()?;
        return Ok(Loss { sum, count });
    }
    let rows = hidden.narrow(1, 0, s - 1)?.contiguous()?.reshape((count, h))?;
    let next = ids.narrow(1, 1, s - 1)?.contiguous()?.reshape(count)?.to_dtype(DType::U32)?;
    Ok(Loss { sum: cross_entropy(&rows, head, &next)?, count })
}
