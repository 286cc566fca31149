//! Cross-entropy of the next token.

use candle_core::{Result as CandleResult, Tensor};

use crate::ops::{Head, head_cross_entropy, wide, with_zero_gradients};

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

/// Of `hidden [B, S, H]` and the ids `[B, S]` that they are of, U32 on their device, or none.
pub(crate) fn next_token(hidden: &Tensor, ids: &Tensor, head: &Head) -> CandleResult<Loss> {
    let (b, s, h) = hidden.dims3()?;
    let count = b * s.saturating_sub(1);
    if count == 0 {
        // The sum of nothing has the hidden states as its origin all the same, so that backward reaches the layers,
        // where the other ranks wait. (It would not through a product with 0, and of no elements a GPU starts no kernel,
        // which candle's conversion to another type would be.)
        let sum = Tensor::zeros((), wide(hidden.dtype()), hidden.device())?;
        return Ok(Loss { sum: with_zero_gradients("loss of no tokens", &[hidden], sum)?, count });
    }
    let rows = hidden.narrow(1, 0, s - 1)?.contiguous()?.reshape((count, h))?;
    let next = ids.narrow(1, 1, s - 1)?.contiguous()?.reshape(count)?;
    Ok(Loss { sum: head_cross_entropy(&rows, head, &next)?, count })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// Of no sequences, and of sequences of one token.
    #[test]
    fn the_loss_of_no_next_token_is_zero_and_has_gradients_of_zeros() -> CandleResult<()> {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            for dims in [[0, 5, 4], [0, 0, 4], [3, 1, 4]] {
                let hidden = Var::from_tensor(&Tensor::ones(&dims, dtype, &Device::Cpu)?)?;
                // Behind an operation, as a model's are.
                let made = hidden.reshape(&dims[..])?.affine(2.0, 0.0)?;
                let ids = Tensor::zeros((dims[0], dims[1]), DType::U32, &Device::Cpu)?;
                let head = Head { weight: Tensor::ones((7, 4), dtype, &Device::Cpu)?, bias: None, scale: 1.0 };
                let loss = next_token(&made, &ids, &head)?;
                assert_eq!((loss.count, loss.sum.dims(), loss.sum.dtype()), (0, &[][..], wide(dtype)));
                for (sum, of) in [(&loss.sum, "sum"), (&loss.mean()?, "mean")] {
                    assert_eq!(sum.to_dtype(DType::F64)?.to_scalar::<f64>()?, 0.0, "{of} of {dims:?}");
                    let gradients = sum.backward()?;
                    let gradient =
                        gradients.get(&hidden).ok_or_else(|| candle_core::Error::msg(format!("{dims:?}")))?;
                    assert_eq!((gradient.dims(), gradient.dtype()), (&dims[..], dtype));
                    let values = gradient.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                    assert!(values.iter().all(|value| *value == 0.0), "{of} of {dims:?}: {values:?}");
                }
            }
        }
        Ok(())
    }
}
