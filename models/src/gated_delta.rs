//! The gated delta rule: a recurrent layer whose state is a matrix for each head. A step forgets a part of the state and
//! corrects what the state gives for the step's key:
//!
//! ```text
//! S := exp(g) · S;   δ = β · (v − Sᵀ k);   S := S + k δᵀ;   o = Sᵀ q
//! ```
//!
//! Tokens are handled in chunks: within one, all δ follow from one triangular system.

use candle_core::{Module, Result as CandleResult, Tensor};
use candle_nn::Linear;

use crate::cache::LayerCache;
use crate::chunk_masks::{ChunkMaskCache, ChunkMasks};
use crate::decoder::{Mixer, Step};
use crate::error::Result;
use crate::norm::{Norm, NormSpec, unit_rms};
use crate::ops::{silu, wide};
use crate::params::Loader;
use crate::static_cache::StaticShape;

/// Tokens of a chunk.
const CHUNK: usize = 64;
/// ε of the norms of queries and keys, which configurations do not have.
const UNIT_EPS: f64 = 1e-6;

/// Sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaSizes {
    /// Hidden size H.
    pub hidden: usize,
    pub key_heads: usize,
    /// A multiple of the key heads.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
}

impl DeltaSizes {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Entries of queries, keys and values.
    fn mixed(&self) -> usize {
        2 * self.keys() + self.values()
    }
}

/// How a token's queries, keys, values, gates z, rates b and decays a are made.
#[derive(Debug)]
enum Projection {
    /// One product for queries, keys, values and gates, one for rates and decays, both key head by key head.
    ByHead { qkvz: Linear, ba: Linear },
    /// One after the other.
    Apart { qkv: Linear, z: Linear, b: Linear, a: Linear },
}

/// A token's projections: `[B, S, …]`.
struct Projected {
    /// Queries, then keys, then values.
    qkv: Tensor,
    z: Tensor,
    /// `[B, S, value heads]`
    b: Tensor,
    a: Tensor,
}

/// A recurrent layer with the gated delta rule.
#[derive(Debug)]
pub(crate) struct GatedDelta {
    sizes: DeltaSizes,
    projection: Projection,
    /// `[mixed, 1, kernel]`
    convolution: Tensor,
    /// `[value heads]` each.
    decay_bias: Tensor,
    decay_log: Tensor,
    norm: Norm,
    output: Linear,
}

impl GatedDelta {
    /// `by_head`: projections lie key head by key head, as Qwen3-Next has them.
    pub fn load(p: &mut Loader<'_>, prefix: &str, sizes: DeltaSizes, eps: f64, by_head: bool) -> Result<Self> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, heads) = (sizes.hidden, sizes.value_heads);
        let projection = if by_head {
            Projection::ByHead {
                qkvz: p.linear(&name("in_proj_qkvz"), [sizes.mixed() + sizes.values(), hidden], false)?,
                ba: p.linear(&name("in_proj_ba"), [2 * heads, hidden], false)?,
            }
        } else {
            Projection::Apart {
                qkv: p.linear(&name("in_proj_qkv"), [sizes.mixed(), hidden], false)?,
                z: p.linear(&name("in_proj_z"), [sizes.values(), hidden], false)?,
                b: p.linear(&name("in_proj_b"), [heads, hidden], false)?,
                a: p.linear(&name("in_proj_a"), [heads, hidden], false)?,
            }
        };
        Ok(Self {
            sizes,
            projection,
            convolution: p.get(&name("conv1d.weight"), &[sizes.mixed(), 1, sizes.kernel])?,
            decay_bias: p.get(&name("dt_bias"), &[heads])?,
            decay_log: p.get(&name("A_log"), &[heads])?,
            norm: Norm::load(p, &name("norm"), sizes.value_dim, NormSpec::rms(eps))?,
            output: p.linear(&name("out_proj"), [hidden, sizes.values()], false)?,
        })
    }

    fn project(&self, x: &Tensor, (b, s): (usize, usize)) -> CandleResult<Projected> {
        let sizes = &self.sizes;
        match &self.projection {
            Projection::Apart { qkv, z, b: rate, a } => Ok(Projected {
                qkv: qkv.forward(x)?.reshape((b, s, sizes.mixed()))?,
                z: z.forward(x)?.reshape((b, s, sizes.values()))?,
                b: rate.forward(x)?.reshape((b, s, sizes.value_heads))?,
                a: a.forward(x)?.reshape((b, s, sizes.value_heads))?,
            }),
            Projection::ByHead { qkvz, ba } => {
                let group = sizes.value_heads / sizes.key_heads;
                let (k, v) = (sizes.key_dim, group * sizes.value_dim);
                let qkvz = qkvz.forward(x)?.reshape((b, s, sizes.key_heads, 2 * k + 2 * v))?;
                let ba = ba.forward(x)?.reshape((b, s, sizes.key_heads, 2 * group))?;
                let part = |t: &Tensor, from: usize, len: usize| {
                    t.narrow(3, from, len)?.contiguous()?.reshape((b, s, sizes.key_heads * len))
                };
                let mixed = [part(&qkvz, 0, k)?, part(&qkvz, k, k)?, part(&qkvz, 2 * k, v)?];
                Ok(Projected {
                    qkv: Tensor::cat(&mixed, 2)?,
                    z: part(&qkvz, 2 * k + v, v)?,
                    b: part(&ba, 0, group)?,
                    a: part(&ba, group, group)?,
                })
            }
        }
    }

    /// A causal convolution of each entry over the last tokens, and silu. `before`: the tokens before, `[B, kernel − 1,
    /// mixed]`; gives those of the next call too.
    fn convolve(&self, qkv: &Tensor, before: Option<&Tensor>) -> CandleResult<(Tensor, Tensor)> {
        let (b, s, mixed) = qkv.dims3()?;
        let held = self.sizes.kernel - 1;
        let before = match before {
            Some(before) => before.clone(),
            None => Tensor::zeros((b, held, mixed), qkv.dtype(), qkv.device())?,
        };
        let all = if held == 0 { qkv.clone() } else { Tensor::cat(&[&before, qkv], 1)? };
        // Products and sums are rounded once, as a convolution's are.
        let wide = wide(qkv.dtype());
        let weight = self.convolution.to_dtype(wide)?.squeeze(1)?.t()?.contiguous()?;
        let taps = all.to_dtype(wide)?;
        let mut sum = taps.narrow(1, 0, s)?.broadcast_mul(&weight.narrow(0, 0, 1)?)?;
        for tap in 1..self.sizes.kernel {
            sum = (sum + taps.narrow(1, tap, s)?.broadcast_mul(&weight.narrow(0, tap, 1)?)?)?;
        }
        Ok((silu(&sum.to_dtype(qkv.dtype())?)?, all.narrow(1, s, held)?.force_contiguous()?))
    }

    /// Heads of queries, keys and values, `[B · value heads, S, D]`, in f32 or wider.
    fn heads(&self, mixed: &Tensor) -> CandleResult<[Tensor; 3]> {
        let (b, s, _) = mixed.dims3()?;
        let DeltaSizes { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let mixed = mixed.to_dtype(wide(mixed.dtype()))?;
        let unit = |from: usize| -> CandleResult<Tensor> {
            let t = mixed.narrow(2, from, self.sizes.keys())?.contiguous()?.reshape((b, s, key_heads, key_dim))?;
            // x / √(Σ x² + ε), as a root mean square norm: its mean and its ε are those of D entries.
            let t = (unit_rms(&t, UNIT_EPS / key_dim as f64)? * (key_dim as f64).powf(-0.5))?;
            let t = t.transpose(1, 2)?.unsqueeze(2)?;
            // Value heads are groups of neighbors over a key head.
            let t = t.broadcast_as((b, key_heads, value_heads / key_heads, s, key_dim))?.contiguous()?;
            t.reshape((b * value_heads, s, key_dim))
        };
        let v = mixed.narrow(2, 2 * self.sizes.keys(), self.sizes.values())?.contiguous()?;
        let v = v.reshape((b, s, value_heads, value_dim))?.transpose(1, 2)?.contiguous()?;
        let q = (unit(0)? * (key_dim as f64).powf(-0.5))?;
        Ok([q, unit(self.sizes.keys())?, v.reshape((b * value_heads, s, value_dim))?])
    }

    /// β and g, `[B · value heads, S, 1]`, in f32 or wider.
    fn rates(&self, b: &Tensor, a: &Tensor) -> CandleResult<(Tensor, Tensor)> {
        let (sequences, s, heads) = b.dims3()?;
        let dtype = wide(b.dtype());
        let by_head = |t: Tensor| t.transpose(1, 2)?.contiguous()?.reshape((sequences * heads, s, 1));
        let beta = candle_nn::ops::sigmoid(&b.to_dtype(dtype)?)?;
        let x = a.to_dtype(dtype)?.broadcast_add(&self.decay_bias.to_dtype(dtype)?)?;
        // softplus, without overflow: max(x, 0) + ln(1 + exp(−|x|)).
        let softplus = (x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
        let g = softplus.broadcast_mul(&self.decay_log.to_dtype(dtype)?.exp()?.neg()?)?;
        Ok((by_head(beta)?, by_head(g)?))
    }
}

/// Queries, keys, values, β and g of some tokens, `[N, n, …]`.
struct Tokens<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    beta: &'a Tensor,
    g: &'a Tensor,
    masks: &'a ChunkMaskCache,
}

impl Tokens<'_> {
    /// Outputs `[N, n, value dim]` of a chunk, and the state `[N, key dim, value dim]` behind it.
    fn chunk(&self, from: usize, n: usize, state: &Tensor) -> CandleResult<(Tensor, Tensor)> {
        let part = |t: &Tensor| t.narrow(1, from, n)?.contiguous();
        let (q, k, v, beta) = (part(self.q)?, part(self.k)?, part(self.v)?, part(self.beta)?);
        let masks = self.masks.get(n, &k)?;
        let ChunkMasks { upto, after, beyond, .. } = &*masks;
        // Decay from the chunk's start to the end of each step, and from each step to each later one: sums of g over the
        // steps between, since a difference of sums from the start would cancel.
        let g = part(self.g)?;
        let decay = upto.broadcast_matmul(&g)?;
        let between = upto.broadcast_matmul(&after.broadcast_mul(&g)?)?.broadcast_add(beyond)?.exp()?;
        let decay_from_start = decay.exp()?;
        // (I + L) δ = β (v − exp(decay) k S), L strictly below the diagonal.
        let seen = k.matmul(&k.transpose(1, 2)?.contiguous()?)?.mul(&between)?.broadcast_mul(&beta)?;
        let given = k.broadcast_mul(&decay_from_start)?.matmul(state)?;
        let delta = masks.inverse(&seen)?.matmul(&(v - given)?.broadcast_mul(&beta)?)?;
        let y = q.broadcast_mul(&decay_from_start)?.matmul(state)?;
        let y = (y + q.matmul(&k.transpose(1, 2)?.contiguous()?)?.mul(&between)?.matmul(&delta)?)?;
        let to_end = between.narrow(1, n - 1, 1)?.transpose(1, 2)?;
        let added = k.broadcast_mul(&to_end)?.transpose(1, 2)?.contiguous()?.matmul(&delta)?;
        let state = (state.broadcast_mul(&decay_from_start.narrow(1, n - 1, 1)?)? + added)?;
        Ok((y, state))
    }
}

impl Mixer for GatedDelta {
    fn static_cache(&self, shape: &StaticShape<'_>) -> CandleResult<LayerCache> {
        let DeltaSizes { value_heads, key_dim, value_dim, kernel, .. } = self.sizes;
        let before = shape.zeros(&[shape.sequences, kernel - 1, self.sizes.mixed()])?;
        let wide = StaticShape { dtype: wide(shape.dtype), ..*shape };
        Ok(LayerCache::State(before, wide.zeros(&[shape.sequences * value_heads, key_dim, value_dim])?))
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>, cache: Option<&mut LayerCache>) -> Result<Tensor> {
        let (b, s) = (step.sequences, step.len);
        let DeltaSizes { value_heads, key_dim, value_dim, .. } = self.sizes;
        let Projected { qkv, z, b: rate, a } = self.project(x, (b, s))?;
        let held = cache.as_ref().and_then(|cache| cache.state());
        let (mixed, before) = self.convolve(&qkv, held.map(|(before, _)| before))?;
        let [q, k, v] = self.heads(&mixed)?;
        let (beta, g) = self.rates(&rate, &a)?;
        let mut state = match held {
            Some((_, state)) => state.clone(),
            None => Tensor::zeros((b * value_heads, key_dim, value_dim), q.dtype(), q.device())?,
        };
        let tokens = Tokens { q: &q, k: &k, v: &v, beta: &beta, g: &g, masks: step.chunk_masks };
        let mut chunks = Vec::with_capacity(s.div_ceil(CHUNK));
        for from in (0..s).step_by(CHUNK) {
            let (y, next) = tokens.chunk(from, CHUNK.min(s - from), &state)?;
            chunks.push(y);
            state = next;
        }
        if let Some(cache) = cache {
            cache.set_state(before, state)?;
        }
        let y = Tensor::cat(&chunks, 1)?.reshape((b, value_heads, s, value_dim))?.transpose(1, 2)?.contiguous()?;
        let y = y.reshape((b * s * value_heads, value_dim))?.to_dtype(x.dtype())?;
        let wide = wide(x.dtype());
        let gate = z.reshape((b * s * value_heads, value_dim))?.to_dtype(wide)?.silu()?;
        let y = (self.norm.forward(&y)?.to_dtype(wide)? * gate)?.to_dtype(x.dtype())?;
        Ok(self.output.forward(&y.reshape((b * s, self.sizes.values()))?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    use crate::testing::{check_gradients, difference, random, values};

    const HEADS: usize = 2;
    const KEY: usize = 5;
    const VALUE: usize = 3;

    /// q, k, v, β in (0, 1), g ≤ 0, and a state.
    fn inputs(s: usize) -> Vec<Tensor> {
        let like = |own, width| random(own, &[HEADS, s, width]);
        let unit = |t: Tensor| t.broadcast_div(&t.sqr()?.sum_keepdim(2)?.sqrt()?);
        let beta = candle_nn::ops::sigmoid(&like(4, 1)).expect("rates");
        let g = (like(5, 1).abs().expect("sizes") * -2.0).expect("decays");
        let state = random(6, &[HEADS, KEY, VALUE]);
        vec![unit(like(1, KEY)).expect("q"), unit(like(2, KEY)).expect("k"), like(3, VALUE), beta, g, state]
    }

    fn chunked(t: &[Tensor], chunk: usize) -> CandleResult<(Tensor, Tensor)> {
        let masks = ChunkMaskCache::default();
        let tokens = Tokens { q: &t[0], k: &t[1], v: &t[2], beta: &t[3], g: &t[4], masks: &masks };
        let (s, mut state, mut parts) = (t[0].dim(1)?, t[5].clone(), Vec::new());
        for from in (0..s).step_by(chunk) {
            let (y, next) = tokens.chunk(from, chunk.min(s - from), &state)?;
            parts.push(y);
            state = next;
        }
        Ok((Tensor::cat(&parts, 1)?, state))
    }

    /// The rule, step by step.
    fn stepwise(t: &[Tensor], s: usize) -> (Tensor, Tensor) {
        let [q, k, v, beta, g, mut state] = [0, 1, 2, 3, 4, 5].map(|i| values(&t[i]));
        let mut out = Vec::new();
        for head in 0..HEADS {
            let state = &mut state[head * KEY * VALUE..][..KEY * VALUE];
            for step in (0..s).map(|step| head * s + step) {
                state.iter_mut().for_each(|x| *x *= g[step].exp());
                let (q, k) = (&q[step * KEY..][..KEY], &k[step * KEY..][..KEY]);
                for column in 0..VALUE {
                    let given: f64 = (0..KEY).map(|row| state[row * VALUE + column] * k[row]).sum();
                    let delta = beta[step] * (v[step * VALUE + column] - given);
                    (0..KEY).for_each(|row| state[row * VALUE + column] += k[row] * delta);
                }
                let y = |column: usize| (0..KEY).map(|row| state[row * VALUE + column] * q[row]).sum::<f64>();
                out.extend((0..VALUE).map(y));
            }
        }
        let tensor = |values: Vec<f64>, n| Tensor::from_vec(values, (HEADS, n, VALUE), &Device::Cpu).expect("a tensor");
        (tensor(out, s), tensor(state, KEY))
    }

    #[test]
    fn chunks_are_the_rule_step_by_step() {
        for s in [1, 2, 3, 17, 64, 65, 150] {
            let t = inputs(s);
            let (y, state) = stepwise(&t, s);
            for chunk in [1, 7, CHUNK] {
                let (found, end) = chunked(&t, chunk).expect("outputs");
                // f64, some hundred terms below 1 one behind the other.
                let error = difference(&found, &y).max(difference(&end, &state));
                assert!(error < 1e-13, "{s} tokens in chunks of {chunk}: differs by {error:e}");
            }
        }
    }

    #[test]
    fn has_the_gradients_of_differences() {
        check_gradients(&inputs(20), &|t| {
            let (y, state) = chunked(t, 8).expect("outputs");
            Tensor::cat(&[y, state], 1).expect("all of it")
        });
    }
}
