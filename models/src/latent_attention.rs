//! Multi-head latent attention: keys and values are made of a latent of few entries a token, which is all that a cache
//! holds, and of a rotated key that all heads share.

use candle_core::{Module, Result as CandleResult, Tensor};
use candle_nn::Linear;

use crate::cache::LayerCache;
use crate::decoder::{Mixer, Step};
use crate::error::Result;
use crate::norm::{Norm, NormSpec};
use crate::ops::{AttentionOptions, cache_attention, masked_attention};
use crate::params::Loader;
use crate::static_cache::{CachePositions, StaticShape};

/// Most new tokens for which attention runs over the latents themselves: with more, making keys and values of the
/// latents once costs less than the longer products.
const ABSORBED: usize = 4;

/// Sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentSizes {
    /// Hidden size H.
    pub hidden: usize,
    pub heads: usize,
    /// Of the latent that queries are made of; `None`: of the token itself.
    pub query_latent: Option<usize>,
    /// Of the latent that keys and values are made of.
    pub latent: usize,
    /// Entries of a query and key without position.
    pub plain: usize,
    /// Entries with one.
    pub rotated: usize,
    /// Entries of a value.
    pub value: usize,
}

/// Attention over latents.
#[derive(Debug)]
pub(crate) struct LatentAttention {
    sizes: LatentSizes,
    query: Query,
    /// To latent and rotated key.
    down: Linear,
    norm: Norm,
    /// From the latent to each head's key without position and value: `[heads · (plain + value), latent]`.
    up: Tensor,
    output: Linear,
    scale: f64,
}

/// Options of a latent attention, beside its sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentOptions {
    /// Of the projections from and to the hidden size, but for that of whole queries.
    pub bias: bool,
    /// Of the latents' norms.
    pub eps: f64,
    /// Of the scores.
    pub scale: f64,
}

/// How queries are made.
#[derive(Debug)]
enum Query {
    Whole(Linear),
    Latent { down: Linear, norm: Norm, up: Linear },
}

impl LatentAttention {
    pub fn load(p: &mut Loader<'_>, prefix: &str, sizes: LatentSizes, options: LatentOptions) -> Result<Self> {
        let LatentOptions { bias, eps, scale } = options;
        let LatentSizes { hidden, heads, query_latent, latent, plain, rotated, value } = sizes;
        let name = |part: &str| format!("{prefix}.{part}");
        let queries = heads * (plain + rotated);
        let norm = NormSpec::rms(eps);
        let query = match query_latent {
            None => Query::Whole(p.linear(&name("q_proj"), [queries, hidden], false)?),
            Some(latent) => Query::Latent {
                down: p.linear(&name("q_a_proj"), [latent, hidden], bias)?,
                norm: Norm::load(p, &name("q_a_layernorm"), latent, norm)?,
                up: p.linear(&name("q_b_proj"), [queries, latent], false)?,
            },
        };
        Ok(Self {
            sizes,
            query,
            down: p.linear(&name("kv_a_proj_with_mqa"), [latent + rotated, hidden], bias)?,
            norm: Norm::load(p, &name("kv_a_layernorm"), latent, norm)?,
            up: p.get(&name("kv_b_proj.weight"), &[heads * (plain + value), latent])?,
            output: p.linear(&name("o_proj"), [hidden, heads * value], bias)?,
            scale,
        })
    }

    /// `[B, heads, S, plain]` and, rotated, `[B, heads, S, rotated]`.
    fn queries(&self, x: &Tensor, step: &Step<'_>) -> CandleResult<(Tensor, Tensor)> {
        let LatentSizes { heads, plain, rotated, .. } = self.sizes;
        let q = match &self.query {
            Query::Whole(q) => q.forward(x)?,
            Query::Latent { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?)?,
        };
        let q = q.reshape((step.sequences, step.len, heads, plain + rotated))?.transpose(1, 2)?;
        Ok((q.narrow(3, 0, plain)?.contiguous()?, step.angles.apply(&q.narrow(3, plain, rotated)?)?))
    }

    /// Queries over latents and rotated keys, `[B, heads, S, latent + rotated]`: they go through the matrix that would
    /// have made keys.
    fn absorbed(&self, q: &Tensor, rotated: &Tensor) -> CandleResult<Tensor> {
        let LatentSizes { heads, latent, plain, .. } = self.sizes;
        let (b, _, s, _) = q.dims4()?;
        let made = q.transpose(0, 1)?.reshape((heads, b * s, plain))?.matmul(&self.head_matrices(0, plain)?)?;
        Tensor::cat(&[&made.reshape((heads, b, s, latent))?.transpose(0, 1)?, rotated], 3)
    }

    /// `[B, S, heads, value]` of sums of latents `[B, S, heads, latent]`.
    fn values_of(&self, y: &Tensor) -> CandleResult<Tensor> {
        let LatentSizes { heads, latent, plain, value, .. } = self.sizes;
        let (b, s, ..) = y.dims4()?;
        let values = self.head_matrices(plain, value)?.t()?;
        let made = y.permute((2, 0, 1, 3))?.reshape((heads, b * s, latent))?.matmul(&values)?;
        made.reshape((heads, b, s, value))?.permute((1, 2, 0, 3))
    }

    /// Each head's matrix that makes of a latent this part of its key and value, `[heads, part, latent]`: a view, as copies
    /// would take longer than products of few rows.
    fn head_matrices(&self, first: usize, part: usize) -> CandleResult<Tensor> {
        let LatentSizes { heads, latent, plain, value, .. } = self.sizes;
        self.up.reshape((heads, plain + value, latent))?.narrow(1, first, part)
    }
}

impl Mixer for LatentAttention {
    fn static_cache(&self, shape: &StaticShape<'_>) -> CandleResult<LayerCache> {
        let LatentSizes { latent, rotated, .. } = self.sizes;
        // One tensor, the keys of attention over latents, whose first entries are the values.
        Ok(LayerCache::Static(shape.layer(CachePositions::new(shape.capacity, None, None), 1, &[latent + rotated])?))
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>, cache: Option<&mut LayerCache>) -> Result<Tensor> {
        let LatentSizes { heads, latent, plain, rotated, value, .. } = self.sizes;
        let (b, s) = (step.sequences, step.len);
        let options = AttentionOptions {
            first: step.past,
            window: None,
            chunk: None,
            sinks: None,
            scale: self.scale,
            masks: &step.masks,
        };
        let (q, q_rotated) = self.queries(x, step)?;
        let both = self.down.forward(x)?;
        let c = self.norm.forward(&both.narrow(1, 0, latent)?.contiguous()?)?.reshape((b, 1, s, latent))?;
        let k = both.narrow(1, latent, rotated)?.contiguous()?.reshape((b, 1, s, rotated))?;
        let late = step.late_rotation;
        let k = if late { k } else { step.angles.apply(&k)? };
        let absorbed = cache.is_some() && s <= ABSORBED;
        let (c, k) = match cache {
            None => (c, k),
            Some(LayerCache::Static(cache)) => {
                let new = [Tensor::cat(&[&c, &k], 3)?];
                if let Some(position) = &step.position {
                    cache.put_at(position, &new)?;
                    let q = self.absorbed(&q, &q_rotated)?;
                    let held = &cache.tensors[0];
                    let y = cache_attention(&q, held, held, &position.options(cache.positions, None, self.scale)?)?;
                    let y = self.values_of(&y.narrow(3, 0, latent)?)?;
                    return Ok(self.output.forward(&y.reshape((b, heads * value))?)?);
                }
                let all = cache.with_past(step.past, &new)?;
                cache.put(step.past, &new)?;
                (all[0].narrow(3, 0, latent)?.contiguous()?, all[0].narrow(3, latent, rotated)?.contiguous()?)
            }
            Some(cache) => cache.append(&c, &k)?,
        };
        let n = c.dim(2)?;
        let k = if late { step.key_angles(n)?.apply(&k)? } else { k };
        let y = if absorbed {
            // One key head, the latent and the rotated key.
            let q = self.absorbed(&q, &q_rotated)?;
            self.values_of(&masked_attention(&q, &Tensor::cat(&[&c, &k], 3)?, &c, &options)?)?
        } else {
            let made = c.reshape((b * n, latent))?.matmul(&self.up.t()?)?;
            let made = made.reshape((b, n, heads, plain + value))?.transpose(1, 2)?;
            let keys = [made.narrow(3, 0, plain)?, k.broadcast_as((b, heads, n, rotated))?.contiguous()?];
            let q = Tensor::cat(&[q, q_rotated], 3)?;
            masked_attention(&q, &Tensor::cat(&keys, 3)?, &made.narrow(3, plain, value)?, &options)?
        };
        Ok(self.output.forward(&y.reshape((b * s, heads * value))?)?)
    }
}
