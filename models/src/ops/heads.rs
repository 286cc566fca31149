//! Heads of the product of queries, keys and values, by one kernel where there is one.

use candle_core::{DType, Result, Tensor};

/// The product of queries, keys and values of several tokens, and what becomes of its heads.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels take it"))]
pub(crate) struct HeadRows<'a> {
    /// `[B · S, (heads + 2 · key heads) · D]`
    pub qkv: &'a Tensor,
    pub sequences: usize,
    /// Heads, key heads, D.
    pub sizes: [usize; 3],
    /// Of norms of each query and key, `[D]`, and their ε.
    pub weights: Option<[&'a Tensor; 2]>,
    pub eps: f64,
    /// Cosines and sines of the tokens' positions, `[S, rotated / 2]`, of pairs of entries i and rotated/2 + i.
    pub angles: Option<[&'a Tensor; 2]>,
}

impl HeadRows<'_> {
    /// Whether there is a kernel for a device and type.
    pub fn has_kernel(like: &Tensor) -> bool {
        cfg!(feature = "cuda") && like.device().is_cuda() && like.dtype() == DType::BF16
    }

    /// Normalized and rotated queries `[B, heads, S, D]` and keys `[B, key heads, S, D]`, and values; `None` where no
    /// kernel makes them.
    pub fn split(&self) -> Result<Option<[Tensor; 3]>> {
        #[cfg(feature = "cuda")]
        if super::heads_cuda::serves(self) {
            return super::heads_cuda::split(self).map(Some);
        }
        Ok(None)
    }

    /// The same queries of one token a sequence; keys and values go to `slots`, `[B, key heads, slots, D]` each, at the
    /// place that `slot` (U32 `[1]`) has.
    pub fn put(&self, slots: [&Tensor; 2], slot: &Tensor) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if super::heads_cuda::serves(self) {
            return super::heads_cuda::put(self, slots, slot).map(Some);
        }
        let _ = (slots, slot);
        Ok(None)
    }
}
