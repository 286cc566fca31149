//! Attention of one query a sequence over keys and values in slots of memory that stays.

use candle_core::{Result, Tensor};

use crate::ops::wide;

#[cfg(feature = "cuda")]
use super::slots_cuda;

/// What of the slots a query sees, and how scores are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotOptions<'a> {
    /// `[slots]` in f32 (f64 for f64): 0 where the query sees a slot, else −∞.
    pub mask: &'a Tensor,
    /// The same as a number of slots, U32 `[1]`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels take it"))]
    pub filled: &'a Tensor,
    /// A logit for each head `[heads]` that takes part in the softmax and has no value.
    pub sinks: Option<&'a Tensor>,
    /// Factor of the scores.
    pub scale: f64,
}

/// Attention of `q [B, heads, 1, D]` over `k [B, key heads, N, D]` and `v [B, key heads, N, V]`. Query heads are groups of
/// neighbors over a key head. Gives `[B, 1, heads, V]`. Neither k nor v is copied.
pub(crate) fn slot_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &SlotOptions<'_>) -> Result<Tensor> {
    let (b, heads, _, dim) = q.dims4()?;
    let (_, keys, slots, _) = k.dims4()?;
    let (groups, dtype) = (heads / keys, q.dtype());
    #[cfg(feature = "cuda")]
    if slots_cuda::serves(q, dim) && k.dims() == v.dims() && options.sinks.is_none_or(|sinks| sinks.dtype() == dtype) {
        return slots_cuda::attend(&q.reshape((b, heads * dim))?, k, v, options);
    }
    let q = (q * options.scale)?.reshape((b, keys, groups, dim))?;
    let scores = q.matmul(&k.transpose(2, 3)?)?.to_dtype(wide(dtype))?.broadcast_add(options.mask)?;
    let p = match options.sinks {
        None => candle_nn::ops::softmax_last_dim(&scores)?,
        Some(sinks) => {
            let sinks = sinks.to_dtype(wide(dtype))?.reshape((1, keys, groups, 1))?;
            let sinks = sinks.broadcast_as((b, keys, groups, 1))?;
            let all = candle_nn::ops::softmax_last_dim(&Tensor::cat(&[scores, sinks.contiguous()?], 3)?)?;
            all.narrow(3, 0, slots)?.contiguous()?
        }
    };
    p.to_dtype(dtype)?.matmul(v)?.reshape((b, 1, heads, v.dim(3)?))
}

/// Projections of one token a sequence, as a kernel makes heads of them.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels take it"))]
pub(crate) struct SlotRows<'a> {
    /// `[B, heads · D]`, of which nobody else has the memory: it is written in place.
    pub q: &'a Tensor,
    /// `[B, key heads · D]`
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    /// Where keys and values go, `[B, key heads, slots, D]`, and to which slot, U32 `[1]`.
    pub held: [&'a Tensor; 2],
    pub slot: &'a Tensor,
    /// Of norms of each query and key, `[D]`, and their ε.
    pub weights: Option<[&'a Tensor; 2]>,
    pub eps: f64,
    /// Angles of the position, `[1, rotated / 2]`, of pairs of entries i and rotated/2 + i.
    pub rotated: bool,
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
}

impl SlotRows<'_> {
    /// Normalizes and rotates queries in place, and puts keys and values into their slots; false, and nothing is done,
    /// where no kernel does it.
    pub fn put(&self) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if self.fits()? {
            slots_cuda::rows(self)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Whether there is a kernel, and every tensor is as it takes them.
    #[cfg(feature = "cuda")]
    fn fits(&self) -> Result<bool> {
        let [k_slots, v_slots] = self.held;
        let (b, keys, _, dim) = k_slots.dims4()?;
        let heads = self.q.dim(1)? / dim;
        let row = |t: &Tensor, heads: usize| t.dims() == [b, heads * dim] && (t.stride()[1] == 1);
        let vector = |t: &&Tensor| t.dims() == [dim] && t.is_contiguous();
        let mut all = vec![self.q, self.k, self.v, k_slots, v_slots, self.cos, self.sin];
        all.extend(self.weights.into_iter().flatten());
        Ok(slots_cuda::serves(self.q, dim)
            && all.iter().all(|t| t.dtype() == self.q.dtype() && t.device().same_device(self.q.device()))
            && row(self.q, heads)
            && row(self.k, keys)
            && row(self.v, keys)
            && v_slots.dims() == k_slots.dims()
            && [k_slots, v_slots, self.cos, self.sin].iter().all(|t| t.is_contiguous())
            && self.cos.dims() == self.sin.dims()
            && self.cos.dim(0)? == 1
            && 2 * self.cos.dim(1)? <= dim
            && self.weights.iter().flatten().all(vector))
    }
}
