//! Cross-entropy of the next token.

use candle_core::{D, DType, Result as CandleResult, Tensor};

use crate::rotary::wide;

/// Rows whose logits are there at a time.
const ROWS: usize = 512;

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

/// Of `hidden [B, S, H]` and the ids that they are of; `logits` makes `[T, V]` of `[T, H]`.
pub(crate) fn next_token(
    hidden: &Tensor,
    ids: &Tensor,
    logits: impl Fn(&Tensor) -> CandleResult<Tensor>,
) -> CandleResult<Loss> {
    let (b, s, h) = hidden.dims3()?;
    let count = b * s.saturating_sub(1);
    if count == 0 {
        // The sum of nothing has the hidden states as its origin all the same, so that backward reaches the layers,
        // where the other ranks wait. (It would not through a product with 0.)
        let sum = hidden.narrow(1, 0, 0)?.to_dtype(wide(hidden.dtype()))?.sum_all()?;
        return Ok(Loss { sum, count });
    }
    let rows = hidden.narrow(1, 0, s - 1)?.contiguous()?.reshape((count, h))?;
    let next = ids.narrow(1, 1, s - 1)?.contiguous()?.reshape((count, 1))?.to_dtype(DType::U32)?;
    let part = |start: usize| {
        let len = ROWS.min(count - start);
        let logits = logits(&rows.narrow(0, start, len)?)?;
        let logits = logits.to_dtype(wide(logits.dtype()))?;
        let chosen = logits.gather(&next.narrow(0, start, len)?.contiguous()?, 1)?.squeeze(1)?;
        (logits.log_sum_exp(D::Minus1)? - chosen)?.sum_all()
    };
    let mut sum = part(0)?;
    for start in (ROWS..count).step_by(ROWS) {
        sum = (sum + part(start)?)?;
    }
    Ok(Loss { sum, count })
}
