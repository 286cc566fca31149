//! Attention with projections of queries, keys and values, in the variants that families have.

use candle_core::{Device, Result as CandleResult, Tensor};
use candle_nn::Linear;

use crate::cache::LayerCache;
use crate::config::Heads;
use crate::decoder::{Mixer, Step};
use crate::error::Result;
use crate::norm::{Norm, NormSpec, unit_rms};
use crate::ops::{AttentionOptions, QkNormRope, cache_attention, linear, masked_attention, sigmoid};
use crate::params::Loader;
use crate::static_cache::{CachePositions, StaticShape};

/// Which of an attention's projections have biases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Biases {
    pub qkv: bool,
    pub output: bool,
}

impl Biases {
    pub const NONE: Self = Self { qkv: false, output: false };

    /// All four projections, or none.
    pub fn all(bias: bool) -> Self {
        Self { qkv: bias, output: bias }
    }
}

/// How queries, keys and values are made of tokens.
#[derive(Debug)]
pub(crate) enum Projection {
    Apart {
        q: Linear,
        k: Linear,
        v: Linear,
    },
    /// One product, of queries, then keys, then values.
    Fused(Linear),
}

/// Norms of queries and keys.
#[derive(Debug)]
pub(crate) enum QkNorm {
    None,
    /// Over all heads of a token at once, before the rotation.
    Whole {
        q: Norm,
        k: Norm,
    },
    /// Over each head, before the rotation.
    Head {
        q: Norm,
        k: Norm,
    },
    /// Over each head, after the rotation.
    RotatedHead {
        q: Norm,
        k: Norm,
    },
    /// Over each head, after the rotation, without a weight.
    RotatedUnit {
        eps: f64,
    },
}

/// Queries grow with their position p: times `1 + factor · ln(1 + ⌊(p + 1) / floor⌋)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Temperature {
    pub floor: f64,
    pub factor: f64,
}

impl Temperature {
    /// Factors of positions, f32.
    fn growth(self, positions: std::ops::Range<usize>, device: &Device) -> CandleResult<Tensor> {
        let of = |p: usize| ((((p + 1) as f64 / self.floor).floor().ln_1p()) * self.factor + 1.0) as f32;
        Tensor::new(positions.map(of).collect::<Vec<f32>>(), device)
    }
}

/// Causal grouped-query attention. [`load`](Self::load) gives the plain one; families set the other fields.
#[derive(Debug)]
pub(crate) struct SelfAttention {
    pub heads: Heads,
    pub projection: Projection,
    pub output: Linear,
    pub norm: QkNorm,
    /// Bound on queries, keys and values, behind a norm that comes before the rotation.
    pub clip: Option<f64>,
    /// Queries and keys are rotated.
    pub rotary: bool,
    /// The query projection gives a gate beside each head's query: the sums of values are multiplied by its sigmoid.
    pub gated: bool,
    /// Of layers without rotation.
    pub temperature: Option<Temperature>,
    pub window: Option<usize>,
    pub chunk: Option<usize>,
    /// `[heads]`
    pub sinks: Option<Tensor>,
    /// Factor of the scores.
    pub scale: f64,
}

impl SelfAttention {
    /// Attention with projections `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    pub fn load(p: &mut Loader<'_>, prefix: &str, heads: Heads, biases: Biases) -> Result<Self> {
        Self::load_gated(p, prefix, heads, biases, false)
    }

    /// The same; with gates where `gated`.
    pub fn load_gated(p: &mut Loader<'_>, prefix: &str, heads: Heads, biases: Biases, gated: bool) -> Result<Self> {
        let Heads { hidden, queries, keys, dim } = heads;
        let name = |part: &str| format!("{prefix}.{part}");
        let q = p.linear(&name("q_proj"), [queries * dim * if gated { 2 } else { 1 }, hidden], biases.qkv)?;
        let k = p.linear(&name("k_proj"), [keys * dim, hidden], biases.qkv)?;
        let v = p.linear(&name("v_proj"), [keys * dim, hidden], biases.qkv)?;
        // One product of three weights, where nobody trains them and queries are not interleaved with gates.
        let projection = match p.is_trainable() || gated {
            true => Projection::Apart { q, k, v },
            false => Projection::Fused(concat_outputs(&[&q, &k, &v])?),
        };
        let output = p.linear(&name("o_proj"), [hidden, queries * dim], biases.output)?;
        Ok(Self { gated, ..Self::of(heads, projection, output) })
    }

    /// Attention with these projections.
    pub fn of(heads: Heads, projection: Projection, output: Linear) -> Self {
        Self {
            heads,
            projection,
            output,
            norm: QkNorm::None,
            clip: None,
            rotary: true,
            gated: false,
            temperature: None,
            window: None,
            chunk: None,
            sinks: None,
            scale: (heads.dim as f64).powf(-0.5),
        }
    }

    /// Queries, their gates `[T, heads · D]`, keys and values of `x [T, H]`: `[T, heads · D]` each.
    fn project(&self, x: &Tensor) -> CandleResult<(Tensor, Option<Tensor>, Tensor, Tensor)> {
        let Heads { queries, keys, dim, .. } = self.heads;
        let (q, k, v) = match &self.projection {
            Projection::Apart { q, k, v } => (linear(q, x)?, linear(k, x)?, linear(v, x)?),
            Projection::Fused(qkv) => {
                let y = linear(qkv, x)?;
                let part = |from: usize, heads: usize| y.narrow(1, from * dim, heads * dim)?.contiguous();
                (part(0, queries)?, part(queries, keys)?, part(queries + keys, keys)?)
            }
        };
        let (q, gate) = match self.gated {
            false => (q, None),
            true => {
                let rows = q.dim(0)?;
                let both = q.reshape((rows, queries, 2 * dim))?;
                let half = |from: usize| both.narrow(2, from, dim)?.contiguous()?.reshape((rows, queries * dim));
                (half(0)?, Some(half(dim)?))
            }
        };
        Ok((q, gate, k, v))
    }

    /// Heads of `x` by one kernel, and attention over them; `None`, and nothing is done, where there is none.
    fn fused(&self, x: &Tensor, step: &Step<'_>, cache: &mut Option<&mut LayerCache>) -> CandleResult<Option<Tensor>> {
        let Projection::Fused(projection) = &self.projection else { return Ok(None) };
        if self.clip.is_some() || self.temperature.is_some() || step.late_rotation {
            return Ok(None);
        }
        let (weights, eps) = match &self.norm {
            QkNorm::None => (None, 0.0),
            QkNorm::Head { q, k } => match (q.rms(), k.rms()) {
                (Some((q, eps)), Some((k, _))) => (Some([q, k]), eps),
                _ => return Ok(None),
            },
            QkNorm::Whole { .. } | QkNorm::RotatedHead { .. } | QkNorm::RotatedUnit { .. } => return Ok(None),
        };
        let angles = match (self.rotary, step.angles.halves()) {
            (false, _) => None,
            (true, Some((cos, sin))) => Some([cos, sin]),
            (true, None) => return Ok(None),
        };
        let Heads { queries, keys, dim, .. } = self.heads;
        let (sequences, tokens) = (step.sequences, step.len);
        let heads = QkNormRope { sequences, tokens, heads: queries, key_heads: keys, dim, weights, eps, angles };
        if !heads.has_kernel(projection, x) {
            return Ok(None);
        }
        let qkv = linear(projection, x)?;
        if let (Some(LayerCache::Static(cache)), Some(position)) = (&cache, &step.position) {
            let caches = [&cache.tensors[0], &cache.tensors[1]];
            let q = heads.put(&qkv, caches, position.cache_position(cache.positions)?)?;
            let options = position.options(cache.positions, self.sinks.as_ref(), self.scale)?;
            return cache_attention(&q, caches[0], caches[1], &options).map(Some);
        }
        let [q, k, v] = heads.split(&qkv)?;
        let (k, v) = self.with_past([k, v], step, cache)?;
        masked_attention(&q, &k, &v, &self.options(step)).map(Some)
    }

    fn options<'a>(&'a self, step: &'a Step<'_>) -> AttentionOptions<'a> {
        AttentionOptions {
            first: step.past,
            window: self.window,
            chunk: self.chunk,
            sinks: self.sinks.as_ref(),
            scale: self.scale,
            masks: &step.masks,
        }
    }

    /// Keys and values that the tokens see: the cache's, and these, which it then has too.
    fn with_past(
        &self,
        new: [Tensor; 2],
        step: &Step<'_>,
        cache: &mut Option<&mut LayerCache>,
    ) -> CandleResult<(Tensor, Tensor)> {
        let Some(cache) = cache else {
            let [k, v] = new;
            return Ok((k, v));
        };
        if let LayerCache::Static(cache) = cache {
            let all = cache.with_past(step.past, &new)?;
            cache.put(step.past, &new)?;
            return Ok((all[0].clone(), all[1].clone()));
        }
        let both = cache.append(&new[0], &new[1])?;
        cache.keep(self.options(step).kept(step.past + step.len))?;
        Ok(both)
    }

    fn bounded(&self, t: Tensor) -> CandleResult<Tensor> {
        match self.clip {
            Some(bound) => t.clamp(-bound, bound),
            None => Ok(t),
        }
    }

    /// `[B·S, heads · D]` as `[B, heads, S, D]`, bounded, and normalized where that comes before the rotation.
    fn split(&self, y: Tensor, which: Side, step: &Step<'_>) -> CandleResult<Tensor> {
        let dim = self.heads.dim;
        let heads = y.dim(1)? / dim;
        let (b, s) = (step.sequences, step.len);
        // Norms work on rows of D, before the transpose, where they are contiguous.
        let y = match (&self.norm, which) {
            (QkNorm::Whole { q, .. }, Side::Query) => q.forward(&y)?,
            (QkNorm::Whole { k, .. }, Side::Key) => k.forward(&y)?,
            (QkNorm::Head { q, .. }, Side::Query) => q.forward(&y.reshape((b * s * heads, dim))?)?,
            (QkNorm::Head { k, .. }, Side::Key) => k.forward(&y.reshape((b * s * heads, dim))?)?,
            _ => y,
        };
        self.bounded(y)?.reshape((b, s, heads, dim))?.transpose(1, 2)
    }

    /// Rotation, and the norm that comes after it.
    fn turn(&self, y: &Tensor, which: Side, step: &Step<'_>) -> CandleResult<Tensor> {
        let y = match self.rotary {
            true => match which {
                Side::Query => step.angles.apply(y)?,
                Side::Key => step.key_angles(y.dim(2)?)?.apply(y)?,
            },
            false => y.contiguous()?,
        };
        match (&self.norm, which) {
            (QkNorm::RotatedHead { q, .. }, Side::Query) => q.forward(&y),
            (QkNorm::RotatedHead { k, .. }, Side::Key) => k.forward(&y),
            (QkNorm::RotatedUnit { eps }, _) => unit_rms(&y, *eps),
            _ => Ok(y),
        }
    }

    /// `table`: the factor of each position, if the cache has them.
    fn warm(&self, q: Tensor, step: &Step<'_>, table: Option<&Tensor>) -> CandleResult<Tensor> {
        let Some(temperature) = self.temperature else { return Ok(q) };
        let growth = match (&step.position, table) {
            (Some(position), Some(table)) => position.number(table)?,
            _ => temperature.growth(step.past..step.past + step.len, q.device())?,
        };
        q.broadcast_mul(&growth.reshape((1, 1, step.len, 1))?.to_dtype(q.dtype())?)
    }
}

/// Queries or keys.
#[derive(Debug, Clone, Copy)]
enum Side {
    Query,
    Key,
}

impl Mixer for SelfAttention {
    fn static_cache(&self, shape: &StaticShape<'_>) -> CandleResult<LayerCache> {
        let positions = CachePositions::new(shape.capacity, self.window, self.chunk);
        let mut cache = shape.layer(positions, self.heads.keys, &[self.heads.dim; 2])?;
        if let Some(temperature) = self.temperature {
            cache.table = Some(temperature.growth(0..shape.capacity, &Device::Cpu)?.to_device(shape.device)?);
        }
        Ok(LayerCache::Static(cache))
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>, mut cache: Option<&mut LayerCache>) -> Result<Tensor> {
        let flat = |y: Tensor| y.reshape((step.sequences * step.len, self.heads.queries * self.heads.dim));
        if let Some(y) = self.fused(x, step, &mut cache)? {
            return Ok(linear(&self.output, &flat(y)?)?);
        }
        let (q, gate, k, v) = self.project(x)?;
        let finish = |y: Tensor| -> Result<Tensor> {
            let y = flat(y)?;
            let y = match &gate {
                None => y,
                Some(gate) => (y * sigmoid(gate)?)?,
            };
            Ok(linear(&self.output, &y)?)
        };
        let q = self.split(q, Side::Query, step)?;
        let table = match &cache {
            Some(LayerCache::Static(cache)) => cache.table.as_ref(),
            _ => None,
        };
        let q = self.warm(self.turn(&q, Side::Query, step)?, step, table)?;
        let k = self.split(k, Side::Key, step)?;
        let v =
            self.bounded(v)?.reshape((step.sequences, step.len, self.heads.keys, self.heads.dim))?.transpose(1, 2)?;
        // Where rotations change with the length, the cache has keys from before them.
        let late = self.rotary && step.late_rotation;
        let k = if late { k } else { self.turn(&k, Side::Key, step)? };
        if let (Some(LayerCache::Static(cache)), Some(position)) = (&cache, &step.position) {
            cache.put_at(position, &[k, v])?;
            let options = position.options(cache.positions, self.sinks.as_ref(), self.scale)?;
            return finish(cache_attention(&q.contiguous()?, &cache.tensors[0], &cache.tensors[1], &options)?);
        }
        let (k, v) = self.with_past([k, v], step, &mut cache)?;
        let k = if late { self.turn(&k, Side::Key, step)? } else { k };
        finish(masked_attention(&q, &k, &v, &self.options(step))?)
    }
}

/// The products of several weights as one, whose outputs are concatenated; they have biases all, or none.
fn concat_outputs(parts: &[&Linear]) -> CandleResult<Linear> {
    let weights: Vec<&Tensor> = parts.iter().map(|part| part.weight()).collect();
    let biases: Vec<&Tensor> = parts.iter().filter_map(|part| part.bias()).collect();
    let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
    Ok(Linear::new(Tensor::cat(&weights, 0)?, bias))
}

/// Loads norms of queries and keys: `names` in the attention, each of `sizes`.
pub(crate) fn qk_norms(
    p: &mut Loader<'_>,
    prefix: &str,
    names: [&str; 2],
    sizes: [usize; 2],
    norm: NormSpec,
) -> Result<(Norm, Norm)> {
    let q = Norm::load(p, &format!("{prefix}.{}", names[0]), sizes[0], norm)?;
    let k = Norm::load(p, &format!("{prefix}.{}", names[1]), sizes[1], norm)?;
    Ok((q, k))
}
