//! Attention: who sees whom, and the weighted sums of values, without a matrix of all scores.

mod backward;
#[cfg(feature = "cuda")]
mod backward_cuda;
mod cache;
#[cfg(feature = "cuda")]
mod cache_cuda;
mod causal;
#[cfg(feature = "flash-attn")]
mod flash;
#[cfg(feature = "cuda")]
mod forward_cuda;
mod mask;

use candle_core::{D, DType, Device, Result, Tensor};

use super::{softmax, wide};

pub(crate) use cache::{CacheAttentionOptions, CacheMask, cache_attention};
pub use causal::{CausalOptions, attention};
pub(crate) use mask::{AttentionOptions, MaskCache};

/// Queries handled at a time: scores of a block stay in a CPU's cache, and the half of the score matrix above the
/// diagonal is never made.
fn block(device: &Device) -> usize {
    if device.is_cuda() { 512 } else { 64 }
}

/// Causal attention whose masks a forward's layers share, of `q [B, heads, S, D]` over `k [B, key heads, N, D]` and `v [B, key heads, N, V]`, of which the
/// last S are the queries' own positions and all are of positions one after the other. Query heads are groups of
/// neighbors over a key head. Gives `[B, S, heads, V]`. Backward keeps what it was given, the result, and one number a
/// query and head; it makes the scores of a block again.
pub(crate) fn masked_attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions<'_>) -> Result<Tensor> {
    let tracked = |t: &Tensor| t.track_op();
    if tracked(q) || tracked(k) || tracked(v) || options.sinks.is_some_and(tracked) {
        return backward::attention(q, k, v, options);
    }
    // As with the crate's own kernel, of few queries candle's operations are quicker.
    #[cfg(feature = "flash-attn")]
    if q.dim(2)? >= forward_cuda::FEWEST_QUERIES
        && let Some(y) = flash::forward([q, k, v], options)?
    {
        return Ok(y);
    }
    Ok(output([q, k, v], options, false)?.y)
}

/// By a kernel where there is one.
fn output([q, k, v]: [&Tensor; 3], options: &AttentionOptions<'_>, log_sums: bool) -> Result<Output> {
    #[cfg(feature = "cuda")]
    if let Some(output) = forward_cuda::forward([q, k, v], options, log_sums)? {
        return Ok(output);
    }
    forward(&Operands::new(q, k, v, options)?, options, log_sums)
}

/// Sizes of an attention.
#[derive(Debug, Clone, Copy)]
struct AttentionSizes {
    sequences: usize,
    keys: usize,
    /// Query heads of a key head.
    groups: usize,
    queries: usize,
    /// Entries of a head's query and key, and of its value.
    dim: usize,
    value: usize,
    /// Position of the first key.
    first_key: usize,
}

/// Queries, keys and values as products take them.
#[derive(Debug)]
struct Operands {
    sizes: AttentionSizes,
    /// `[B, key heads, groups, S, D]`, scaled.
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Operands {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions<'_>) -> Result<Self> {
        let (sequences, heads, queries, dim) = q.dims4()?;
        let (_, keys, positions, _) = k.dims4()?;
        let first_key = options.first + queries - positions;
        let sizes = AttentionSizes { sequences, keys, groups: heads / keys, queries, dim, value: v.dim(3)?, first_key };
        let q = (q * options.scale)?.reshape((sequences, keys, heads / keys, queries, dim))?;
        Ok(Self { sizes, q, k: k.contiguous()?, v: v.contiguous()? })
    }

    /// Blocks of queries that are handled one after another.
    fn blocks(&self, options: &AttentionOptions<'_>) -> Vec<QueryBlock> {
        let (queries, size) = (self.sizes.queries, block(self.q.device()));
        let of = |start: usize| {
            let rows = size.min(queries - start);
            let (first, last) = (options.first + start, options.first + start + rows - 1);
            let low = options.low(first).max(self.sizes.first_key);
            let edge = options.low(last).max(self.sizes.first_key) > low;
            QueryBlock { start, rows, first, low, edge }
        };
        (0..queries).step_by(size).map(of).collect()
    }

    /// `[B, key heads, groups · rows, X]` of a block, of `[B, key heads, groups, S, X]`: queries that share a key head are
    /// rows of one product.
    fn rows(&self, of: &Tensor, block: QueryBlock) -> Result<Tensor> {
        let AttentionSizes { sequences, keys, groups, .. } = self.sizes;
        let last = of.dim(4)?;
        of.narrow(3, block.start, block.rows)?.contiguous()?.reshape((sequences, keys, groups * block.rows, last))
    }

    /// A block's part of keys or values.
    fn seen(&self, of: &Tensor, block: QueryBlock) -> Result<Tensor> {
        of.narrow(2, block.low - self.sizes.first_key, block.len())?.contiguous()
    }

    /// `[B, key heads, groups · rows, keys]` of a block in f32 (f64 for f64): −∞ where a query does not see a key.
    fn scores(&self, q: &Tensor, block: QueryBlock, options: &AttentionOptions<'_>) -> Result<Tensor> {
        let AttentionSizes { sequences, keys, groups, first_key, .. } = self.sizes;
        let QueryBlock { rows, first, low, .. } = block;
        let scores = |from: usize, len: usize| {
            let keys = self.k.narrow(2, from - first_key, len)?;
            q.matmul(&keys.transpose(2, 3)?)?.to_dtype(wide(q.dtype()))
        };
        let masked = |scores: Tensor, low: usize| {
            let mask = options.masks.get(options, [first, rows, low], &scores)?;
            let len = scores.dim(3)?;
            let scores = scores.reshape((sequences, keys, groups, rows, len))?.broadcast_add(&mask)?;
            scores.reshape((sequences, keys, groups * rows, len))
        };
        match rows {
            1 => scores(low, block.len()),
            _ if block.edge || low == first => masked(scores(low, block.len())?, low),
            // Only the queries' own positions need a mask: all see what is before.
            _ => Tensor::cat(&[scores(low, first - low)?, masked(scores(first, rows)?, first)?], 3),
        }
    }

    /// Each row's sink of a block, `[B, key heads, groups · rows, 1]`.
    fn sinks(&self, sinks: &Tensor, rows: usize, dtype: DType) -> Result<Tensor> {
        let AttentionSizes { sequences, keys, groups, .. } = self.sizes;
        let sinks = sinks.to_dtype(dtype)?.reshape((1, keys, groups, 1))?;
        sinks.broadcast_as((sequences, keys, groups, rows))?.reshape((sequences, keys, groups * rows, 1))
    }
}

/// A block of queries and the keys that any of them sees.
#[derive(Debug, Clone, Copy)]
struct QueryBlock {
    /// Its first query among the queries, and their number.
    start: usize,
    rows: usize,
    /// Position of its first query.
    first: usize,
    /// Position of its first key; the last is that of the last query.
    low: usize,
    /// Some of its queries do not see the first key.
    edge: bool,
}

impl QueryBlock {
    /// Keys.
    fn len(self) -> usize {
        self.first + self.rows - self.low
    }
}

/// A forward's results.
struct Output {
    /// `[B, S, heads, V]`
    y: Tensor,
    /// Logarithm of each row's sum of exponentials, `[B, key heads, groups, S, 1]`, where it is asked for.
    log_sums: Option<Tensor>,
}

fn forward(operands: &Operands, options: &AttentionOptions<'_>, log_sums: bool) -> Result<Output> {
    let AttentionSizes { sequences, keys, groups, value, .. } = operands.sizes;
    let (mut blocks, mut sums) = (Vec::new(), Vec::new());
    for block in operands.blocks(options) {
        let scores = operands.scores(&operands.rows(&operands.q, block)?, block, options)?;
        let sinks = match options.sinks {
            Some(sinks) => Some(operands.sinks(sinks, block.rows, scores.dtype())?),
            None => None,
        };
        if log_sums {
            let most = scores.max_keepdim(D::Minus1)?;
            let most = match &sinks {
                Some(sinks) => most.maximum(sinks)?,
                None => most,
            };
            let sum = scores.broadcast_sub(&most)?.exp()?.sum_keepdim(D::Minus1)?;
            let sum = match &sinks {
                Some(sinks) => (sum + (sinks - &most)?.exp()?)?,
                None => sum,
            };
            sums.push((most + sum.log()?)?.reshape((sequences, keys, groups, block.rows, 1))?);
        }
        let p = match sinks {
            None => softmax(&scores)?,
            Some(sinks) => {
                let all = softmax(&Tensor::cat(&[scores, sinks], 3)?)?;
                all.narrow(3, 0, block.len())?.contiguous()?
            }
        };
        // In f32 softmax for types below it, as transformers' plain attention does: with that, a bf16 decoder's first
        // hidden states equal transformers' bit for bit.
        let y = p.to_dtype(operands.v.dtype())?.matmul(&operands.seen(&operands.v, block)?)?;
        blocks.push(y.reshape((sequences, keys * groups, block.rows, value))?.transpose(1, 2)?);
    }
    let y = match &blocks[..] {
        [one] => one.contiguous()?,
        many => Tensor::cat(many, 1)?,
    };
    let log_sums = if log_sums { Some(Tensor::cat(&sums, 3)?) } else { None };
    Ok(Output { y, log_sums })
}

#[cfg(all(test, feature = "cuda"))]
mod backward_gpu_tests;
#[cfg(test)]
mod cases;
#[cfg(test)]
mod closed_forms;
#[cfg(all(test, feature = "flash-attn"))]
mod flash_tests;
#[cfg(all(test, feature = "cuda"))]
pub(super) mod gpu_rates;
#[cfg(all(test, feature = "cuda"))]
mod gpu_tests;
#[cfg(test)]
mod tests;
