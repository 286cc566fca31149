//! Constant matrices of the chunks of a recurrent layer, copied to the device once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

/// Constant matrices `[1, n, n]` of a chunk of n tokens. Rows are a token, columns one at or before it.
#[derive(Debug)]
pub(crate) struct ChunkMasks {
    /// 1 on the diagonal and below it.
    pub upto: Tensor,
    /// 1 below the diagonal.
    pub after: Tensor,
    /// 0 on the diagonal and below it, −∞ above.
    pub beyond: Tensor,
    /// 1 on the diagonal.
    identity: Tensor,
    /// For blocks of 1, 2, 4, … rows: 1 in the block below each second one of those along the diagonal.
    below: Vec<Tensor>,
}

/// The matrices of every length that a decoder's layers have met, on its device. A chunk bounds the lengths.
#[derive(Debug, Default)]
pub(crate) struct ChunkMaskCache(Mutex<HashMap<(usize, DType), Arc<ChunkMasks>>>);

impl ChunkMaskCache {
    /// Those of n tokens, in the type and on the device of `like`; every call is with the decoder's device.
    pub fn get(&self, n: usize, like: &Tensor) -> Result<Arc<ChunkMasks>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(masks) = known.get(&(n, like.dtype())) {
            return Ok(masks.clone());
        }
        let masks = Arc::new(ChunkMasks::new(n, like)?);
        known.insert((n, like.dtype()), masks.clone());
        Ok(masks)
    }
}

impl ChunkMasks {
    fn new(n: usize, like: &Tensor) -> Result<Self> {
        let fill = |value: &dyn Fn(usize, usize) -> f64| {
            let values: Vec<f64> = (0..n * n).map(|i| value(i / n, i % n)).collect();
            Tensor::from_vec(values, (1, n, n), &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())
        };
        let mask = |there: &dyn Fn(usize, usize) -> bool| fill(&|row, column| f64::from(u8::from(there(row, column))));
        let sizes = std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|size| *size < n);
        let below = |size: usize| {
            mask(&|row, column| row / size == column / size + 1 && row / (2 * size) == column / (2 * size))
        };
        Ok(Self {
            upto: mask(&|row, column| column <= row)?,
            after: mask(&|row, column| row > column)?,
            beyond: fill(&|row, column| if column <= row { 0.0 } else { f64::NEG_INFINITY })?,
            identity: mask(&|row, column| row == column)?,
            below: sizes.map(below).collect::<Result<_>>()?,
        })
    }

    /// `(I + L)⁻¹` for the part L of `lower [N, n, n]` that lies strictly below the diagonal. Inverses of blocks along
    /// the diagonal double in size: that of `[[A, 0], [B, D]]` is `[[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]`, as stable as a
    /// substitution row by row.
    pub fn inverse(&self, lower: &Tensor) -> Result<Tensor> {
        let mut inverse = self.identity.broadcast_as(lower.shape())?.contiguous()?;
        for below in &self.below {
            let b = lower.broadcast_mul(below)?;
            inverse = (&inverse - inverse.matmul(&b)?.matmul(&inverse)?)?;
        }
        Ok(inverse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::difference;

    /// Ones below the diagonal, the same key again and again: the powers of this matrix reach 1e18, its inverse has
    /// entries of 1 and −1 beside the diagonal alone.
    #[test]
    fn the_triangular_inverse_is_stable() {
        for n in [1, 2, 3, 5, 64] {
            let ones = Tensor::ones((1, n, n), DType::F64, &Device::Cpu).expect("ones");
            let masks = ChunkMasks::new(n, &ones).expect("masks");
            let entry = |i: usize| match (i / n).wrapping_sub(i % n) {
                0 => 1.0,
                1 => -1.0,
                _ => 0.0,
            };
            let expected = Tensor::from_vec((0..n * n).map(entry).collect::<Vec<f64>>(), (1, n, n), &Device::Cpu);
            let error = difference(&masks.inverse(&ones).expect("an inverse"), &expected.expect("a matrix"));
            assert!(error == 0.0, "{n}: differs by {error:e}");
        }
    }

    /// Layers that meet the same length share its matrices; another type has its own.
    #[test]
    fn matrices_are_made_once() {
        let cache = ChunkMaskCache::default();
        let like = |dtype| Tensor::zeros(1, dtype, &Device::Cpu).expect("a tensor");
        let get = |n, dtype| cache.get(n, &like(dtype)).expect("masks");
        let first = get(64, DType::F32);
        assert!(Arc::ptr_eq(&first, &get(64, DType::F32)));
        for other in [get(63, DType::F32), get(64, DType::F64)] {
            assert!(!Arc::ptr_eq(&first, &other));
        }
        assert_eq!((first.upto.dtype(), first.below.len()), (DType::F32, 6));
        assert_eq!(get(1, DType::F64).below.len(), 0);
    }
}
