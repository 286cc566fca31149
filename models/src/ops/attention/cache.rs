//! Attention of one query a sequence over keys and values in memory that stays.

use std::sync::OnceLock;

use candle_core::{Result, Tensor};

use crate::ops::{softmax, wide};

#[cfg(feature = "cuda")]
use super::cache_cuda;

/// The cache positions that a query sees, as numbers that are added to scores. Made where it is asked for, as kernels read
/// how many there are.
#[derive(Debug)]
pub(crate) struct CacheMask {
    /// U32 `[cache positions]`: 0, 1, …
    pub numbers: Tensor,
    /// `[cache positions]` in f32 (f64 for f64): zeros, and −∞.
    pub seen: Tensor,
    pub unseen: Tensor,
    /// U32 `[1]`: how many the query sees, from the first on.
    pub filled: Tensor,
    pub made: OnceLock<Tensor>,
}

impl CacheMask {
    /// 0 where the query sees a cache position, else −∞.
    fn tensor(&self) -> Result<Tensor> {
        if let Some(mask) = self.made.get() {
            return Ok(mask.clone());
        }
        let mask = self.numbers.broadcast_lt(&self.filled)?.where_cond(&self.seen, &self.unseen)?;
        Ok(self.made.get_or_init(|| mask).clone())
    }
}

/// The cache positions that a query sees, and how scores are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheAttentionOptions<'a> {
    pub mask: &'a CacheMask,
    /// The same as a number of cache positions, U32 `[1]`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels take it"))]
    pub filled: &'a Tensor,
    /// A logit for each head `[heads]` that takes part in the softmax and has no value.
    pub sinks: Option<&'a Tensor>,
    /// Factor of the scores.
    pub scale: f64,
}

/// Attention of `q [B, heads, 1, D]` over `k [B, key heads, N, D]` and `v [B, key heads, N, V]`. Query heads are groups of
/// neighbors over a key head. Gives `[B, 1, heads, V]`. Neither k nor v is copied.
pub(crate) fn cache_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &CacheAttentionOptions<'_>,
) -> Result<Tensor> {
    let (b, heads, _, dim) = q.dims4()?;
    let (_, keys, positions, _) = k.dims4()?;
    let (groups, dtype) = (heads / keys, q.dtype());
    #[cfg(feature = "cuda")]
    if let Some(y) = cache_cuda::cache_attention(q, k, v, options)? {
        return Ok(y);
    }
    let q = (q * options.scale)?.reshape((b, keys, groups, dim))?;
    let scores = q.matmul(&k.transpose(2, 3)?)?.to_dtype(wide(dtype))?.broadcast_add(&options.mask.tensor()?)?;
    let p = match options.sinks {
        None => softmax(&scores)?,
        Some(sinks) => {
            let sinks = sinks.to_dtype(wide(dtype))?.reshape((1, keys, groups, 1))?;
            let sinks = sinks.broadcast_as((b, keys, groups, 1))?;
            let all = softmax(&Tensor::cat(&[scores, sinks.contiguous()?], 3)?)?;
            all.narrow(3, 0, positions)?.contiguous()?
        }
    };
    p.to_dtype(dtype)?.matmul(v)?.reshape((b, 1, heads, v.dim(3)?))
}
