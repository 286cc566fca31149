//! Heads of the product of queries, keys and values, by one kernel where there is one: qk-norm and rotary embedding.

use candle_core::{Result, Tensor};
use candle_nn::Linear;

/// Norm and rotation of the heads of a product of queries, keys and values,
/// `[sequences · tokens, (heads + 2 · key heads) · D]`.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels take it"))]
pub(crate) struct QkNormRope<'a> {
    pub sequences: usize,
    /// Of a sequence.
    pub tokens: usize,
    pub heads: usize,
    pub key_heads: usize,
    /// Entries of a head, D.
    pub dim: usize,
    /// Of norms of each query and key, `[D]`, and their ε.
    pub weights: Option<[&'a Tensor; 2]>,
    pub eps: f64,
    /// Cosines and sines of the tokens' positions, `[tokens, rotated / 2]`, of pairs of entries i and rotated/2 + i.
    pub angles: Option<[&'a Tensor; 2]>,
}

impl QkNormRope<'_> {
    /// Whether there is a kernel for the product of `x` and this projection, which has not been computed yet.
    pub fn has_kernel(&self, projection: &Linear, x: &Tensor) -> bool {
        #[cfg(feature = "cuda")]
        return super::qk_norm_rope_cuda::serves(self, projection, x);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (projection, x);
            false
        }
    }

    /// Normalized and rotated queries `[B, heads, S, D]` and keys `[B, key heads, S, D]`, and values, of a product that has
    /// a kernel.
    pub fn split(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        #[cfg(feature = "cuda")]
        return super::qk_norm_rope_cuda::split(self, qkv);
        #[cfg(not(feature = "cuda"))]
        Err(no_kernel(qkv))
    }

    /// The same queries of one token a sequence; keys and values go to `caches`, `[B, key heads, cache positions, D]`
    /// each, at the cache position that `at` (U32 `[1]`) has.
    pub fn put(&self, qkv: &Tensor, caches: [&Tensor; 2], at: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        return super::qk_norm_rope_cuda::put(self, qkv, caches, at);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (caches, at);
            Err(no_kernel(qkv))
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn no_kernel(qkv: &Tensor) -> candle_core::Error {
    candle_core::Error::msg(format!("heads: no kernel for {:?} on {:?}", qkv.dtype(), qkv.device()))
}
