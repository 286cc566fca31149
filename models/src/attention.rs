//! Grouped-query attention with normalized queries and keys.

use candle_core::{D, DType, Device, Module, Tensor};
use candle_nn::Linear;
use candle_nn::kv_cache::ConcatKvCache;

use crate::blocks::{Norm, linear};
use crate::config::Config;
use crate::error::Result;
use crate::params::Params;
use crate::rotary::Angles;

/// Queries handled at a time: scores of a block stay in a CPU's cache, and the half of the score matrix above the
/// diagonal is never made.
fn block(device: &Device) -> usize {
    if device.is_cuda() { 512 } else { 64 }
}

/// `[n, n]` for the first n positions of a block: −∞ above the diagonal, else 0. Earlier positions are seen by all.
#[derive(Debug)]
pub(crate) struct Mask(Tensor);

impl Mask {
    /// For calls of `len` positions.
    pub fn new(len: usize, dtype: DType, device: &Device) -> candle_core::Result<Self> {
        let n = block(device).min(len);
        let values = (0..n * n).map(|i| if i % n > i / n { f32::NEG_INFINITY } else { 0.0 });
        Tensor::from_vec(values.collect::<Vec<f32>>(), (n, n), device)?.to_dtype(dtype).map(Self)
    }
}

#[derive(Debug)]
pub(crate) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Norm,
    k_norm: Norm,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    differentiable: bool,
}

impl Attention {
    pub fn load(p: &mut Params<'_>, prefix: &str, config: &Config) -> Result<Self> {
        let (h, d, eps) = (config.hidden_size, config.head_dim(), config.rms_norm_eps);
        let (heads, kv_heads, bias) = (config.num_attention_heads, config.num_key_value_heads, config.attention_bias);
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(Self {
            q_proj: linear(p, &name("q_proj"), [heads * d, h], bias)?,
            k_proj: linear(p, &name("k_proj"), [kv_heads * d, h], bias)?,
            v_proj: linear(p, &name("v_proj"), [kv_heads * d, h], bias)?,
            o_proj: linear(p, &name("o_proj"), [h, heads * d], bias)?,
            q_norm: Norm::load(p, &name("q_norm"), d, eps)?,
            k_norm: Norm::load(p, &name("k_norm"), d, eps)?,
            heads,
            kv_heads,
            head_dim: d,
            differentiable: p.trainable(),
        })
    }

    /// `x` is `[B·S, H]`; the angles are those of the S positions after what the cache holds.
    pub fn forward(
        &self,
        x: &Tensor,
        (b, s): (usize, usize),
        (angles, mask): (&Angles, &Mask),
        cache: Option<&mut ConcatKvCache>,
    ) -> Result<Tensor> {
        let split = |y: Tensor, heads: usize| y.reshape((b, s, heads, self.head_dim))?.transpose(1, 2);
        // The norm works on rows of D, before the transpose, where they are contiguous.
        let normed = |y: Tensor, heads: usize, norm: &Norm| {
            norm.forward(&y.reshape((b * s * heads, self.head_dim))?)?.reshape((b * s, heads * self.head_dim))
        };
        let q = split(normed(self.q_proj.forward(x)?, self.heads, &self.q_norm)?, self.heads)?;
        let k = split(normed(self.k_proj.forward(x)?, self.kv_heads, &self.k_norm)?, self.kv_heads)?;
        let v = split(self.v_proj.forward(x)?, self.kv_heads)?.contiguous()?;
        let q = (angles.apply(&q, self.differentiable)? * (self.head_dim as f64).powf(-0.5))?;
        let k = angles.apply(&k, self.differentiable)?;
        let (k, v) = match cache {
            Some(cache) => cache.append(&k, &v)?,
            None => (k, v),
        };
        let y = self.attend(&q, &k, &v, mask)?;
        Ok(self.o_proj.forward(&y.reshape((b * s, self.heads * self.head_dim))?)?)
    }

    /// Causal attention of `q [B, heads, S, D]`, scaled, to the N ≥ S keys of which the last S are its own
    /// positions; gives `[B, S, heads, D]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor> {
        let (b, _, s, d) = q.dims4()?;
        let past = k.dim(2)? - s;
        let groups = self.heads / self.kv_heads;
        let q = q.reshape((b, self.kv_heads, groups, s, d))?;
        let block = block(q.device());
        let mut blocks = Vec::with_capacity(s.div_ceil(block));
        for start in (0..s).step_by(block) {
            let rows = block.min(s - start);
            let (own, end) = (past + start, past + start + rows);
            // Queries that share a key head become rows of one product.
            let q = q.narrow(3, start, rows)?.contiguous()?.reshape((b, self.kv_heads, groups * rows, d))?;
            let scores = |first: usize, len: usize| q.matmul(&k.narrow(2, first, len)?.transpose(2, 3)?);
            let scores = match rows {
                1 => scores(0, end)?,
                _ => {
                    let mask = mask.0.narrow(0, 0, rows)?.narrow(1, 0, rows)?;
                    let last = scores(own, rows)?.reshape((b, self.kv_heads, groups, rows, rows))?;
                    let last = last.broadcast_add(&mask)?.reshape((b, self.kv_heads, groups * rows, rows))?;
                    if own == 0 { last } else { Tensor::cat(&[scores(0, own)?, last], 3)? }
                }
            };
            let y = self.softmax(&scores)?.matmul(&v.narrow(2, 0, end)?)?;
            blocks.push(y.reshape((b, self.heads, rows, d))?.transpose(1, 2)?);
        }
        Ok(match &blocks[..] {
            [one] => one.contiguous()?,
            many => Tensor::cat(many, 1)?,
        })
    }

    /// Softmax over the last dimension, in f32 for types below it, as transformers' plain attention does: with that,
    /// a bf16 decoder's first hidden states equal transformers' bit for bit. candle's own on a GPU rounds the exponents
    /// to bf16, which costs percents.
    fn softmax(&self, scores: &Tensor) -> candle_core::Result<Tensor> {
        let dtype = scores.dtype();
        let wide = if dtype == DType::F64 { scores.clone() } else { scores.to_dtype(DType::F32)? };
        let p = match self.differentiable {
            true => candle_nn::ops::softmax(&wide, D::Minus1),
            false => candle_nn::ops::softmax_last_dim(&wide),
        };
        p?.to_dtype(dtype)
    }
}
