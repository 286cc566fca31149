//! Attention: who sees whom, and the weighted sums of values.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{D, Device, Result, Tensor};

use crate::rotary::wide;

/// Queries handled at a time: scores of a block stay in a CPU's cache, and the half of the score matrix above the
/// diagonal is never made.
fn block(device: &Device) -> usize {
    if device.is_cuda() { 512 } else { 64 }
}

/// Which keys a query sees, of those at its position and before, and how their scores are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visible<'a> {
    /// Position of the first query.
    pub first: usize,
    /// The last so many positions, its own included.
    pub window: Option<usize>,
    /// Those of its own chunk of so many positions.
    pub chunk: Option<usize>,
    /// A logit for each head `[heads]` that takes part in the softmax and has no value.
    pub sinks: Option<&'a Tensor>,
    /// Factor of the scores.
    pub scale: f64,
    /// Masks of this forward.
    pub masks: &'a Masks,
}

/// Masks of a forward, which its layers share.
#[derive(Debug, Default)]
pub(crate) struct Masks(RefCell<HashMap<Block, Tensor>>);

/// A block of queries and the keys before its last one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Block {
    window: Option<usize>,
    chunk: Option<usize>,
    /// Position of the first query.
    start: usize,
    rows: usize,
    /// Position of the first key; the last is that of the last query.
    low: usize,
}

impl Visible<'_> {
    /// First position that a query at `position` sees.
    fn low(&self, position: usize) -> usize {
        let window = self.window.map_or(0, |n| (position + 1).saturating_sub(n));
        window.max(self.chunk.map_or(0, |n| position / n * n))
    }

    /// Keys of the last positions that a later query can see, of `len` positions so far.
    pub fn kept(&self, len: usize) -> usize {
        len - self.low(len).min(len)
    }
}

impl Masks {
    /// `[rows, keys]`: −∞ where a query does not see a key, else 0.
    fn get(&self, visible: &Visible<'_>, block: Block, like: &Tensor) -> Result<Tensor> {
        // Without window and chunk a mask depends on the distance alone.
        let key = match (visible.window, visible.chunk) {
            (None, None) => Block { start: block.start - block.low, low: 0, ..block },
            _ => block,
        };
        if let Some(mask) = self.0.borrow().get(&key) {
            return Ok(mask.clone());
        }
        let end = block.start + block.rows;
        let mut values = Vec::with_capacity(block.rows * (end - block.low));
        for query in block.start..end {
            let low = visible.low(query);
            let sees = |key: usize| if (low..=query).contains(&key) { 0.0 } else { f32::NEG_INFINITY };
            values.extend((block.low..end).map(sees));
        }
        let mask = Tensor::from_vec(values, (block.rows, end - block.low), like.device())?;
        let mask = mask.to_dtype(wide(like.dtype()))?;
        self.0.borrow_mut().insert(key, mask.clone());
        Ok(mask)
    }
}

/// Causal attention of `q [B, heads, S, D]` over `k [B, key heads, N, D]` and `v [B, key heads, N, V]`, of which the
/// last S are the queries' own positions and all are of positions one after the other. Query heads are groups of
/// neighbors over a key head. Gives `[B, S, heads, V]`.
pub(crate) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, visible: &Visible<'_>) -> Result<Tensor> {
    let (b, heads, s, d) = q.dims4()?;
    let (_, keys, n, _) = k.dims4()?;
    let groups = heads / keys;
    // Position of the first key that is there.
    let there = visible.first + s - n;
    let q = (q * visible.scale)?.reshape((b, keys, groups, s, d))?;
    let (k, v) = (k.contiguous()?, v.contiguous()?);
    let block = block(q.device());
    let mut blocks = Vec::with_capacity(s.div_ceil(block));
    for start in (0..s).step_by(block) {
        let rows = block.min(s - start);
        let (first, last) = (visible.first + start, visible.first + start + rows - 1);
        let low = visible.low(first).max(there);
        let edge = visible.low(last).max(there) > low;
        // Queries that share a key head become rows of one product.
        let q = q.narrow(3, start, rows)?.contiguous()?.reshape((b, keys, groups * rows, d))?;
        let scores = |from: usize, len: usize| {
            let scores = q.matmul(&k.narrow(2, from - there, len)?.transpose(2, 3)?)?;
            scores.to_dtype(wide(q.dtype()))
        };
        let masked = |scores: Tensor, low: usize| {
            let at = Block { window: visible.window, chunk: visible.chunk, start: first, rows, low };
            let mask = visible.masks.get(visible, at, &scores)?;
            let len = scores.dim(3)?;
            let scores = scores.reshape((b, keys, groups, rows, len))?.broadcast_add(&mask)?;
            scores.reshape((b, keys, groups * rows, len))
        };
        let len = last + 1 - low;
        let scores = match rows {
            1 => scores(low, len)?,
            _ if edge || low == first => masked(scores(low, len)?, low)?,
            // Only the queries' own positions need a mask: all see what is before.
            _ => Tensor::cat(&[scores(low, first - low)?, masked(scores(first, rows)?, first)?], 3)?,
        };
        let p = match visible.sinks {
            None => softmax(&scores)?,
            Some(sinks) => {
                let sinks = sinks.to_dtype(scores.dtype())?.reshape((1, keys, groups, 1))?;
                let sinks = sinks.broadcast_as((b, keys, groups, rows))?.reshape((b, keys, groups * rows, 1))?;
                softmax(&Tensor::cat(&[scores, sinks], 3)?)?.narrow(3, 0, len)?.contiguous()?
            }
        };
        let y = p.to_dtype(v.dtype())?.matmul(&v.narrow(2, low - there, len)?)?;
        blocks.push(y.reshape((b, heads, rows, v.dim(3)?))?.transpose(1, 2)?);
    }
    match &blocks[..] {
        [one] => one.contiguous(),
        many => Tensor::cat(many, 1),
    }
}

/// Softmax over the last dimension, of scores in f32 for types below it, as transformers' plain attention does: with
/// that, a bf16 decoder's first hidden states equal transformers' bit for bit. The fused one has no gradient.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    match scores.track_op() {
        true => candle_nn::ops::softmax(scores, D::Minus1),
        false => candle_nn::ops::softmax_last_dim(scores),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_gradients, difference, random, values};

    /// Sizes of a call: sequences, query and key heads, queries, keys, entries of a key and of a value.
    #[derive(Debug, Clone, Copy)]
    struct Sizes {
        b: usize,
        heads: usize,
        keys: usize,
        s: usize,
        n: usize,
        d: usize,
        v: usize,
    }

    impl Sizes {
        fn inputs(self) -> [Tensor; 4] {
            let Self { b, heads, keys, s, n, d, v } = self;
            let like = |own, dims: &[usize]| random(own, dims);
            [like(1, &[b, heads, s, d]), like(2, &[b, keys, n, d]), like(3, &[b, keys, n, v]), like(4, &[heads])]
        }

        /// Attention score by score.
        fn plain(self, [q, k, v, sinks]: &[Tensor; 4], visible: &Visible<'_>) -> Tensor {
            let Self { b, heads, keys, s, n, d, v: width } = self;
            let (q, k, v, sinks) = (values(q), values(k), values(v), values(sinks));
            let mut out = vec![0.0; b * s * heads * width];
            for (sequence, query, head) in (0..b * s * heads).map(|i| (i / (s * heads), i / heads % s, i % heads)) {
                let position = visible.first + query;
                let row = (sequence * keys + head / (heads / keys)) * n;
                let mut weights = Vec::new();
                for key in 0..n {
                    let at = visible.first + s - n + key;
                    let seen = at <= position
                        && visible.window.is_none_or(|w| at + w > position)
                        && visible.chunk.is_none_or(|c| at / c == position / c);
                    let from = ((sequence * heads + head) * s + query) * d;
                    let dot: f64 = (0..d).map(|i| q[from + i] * k[(row + key) * d + i]).sum();
                    weights.push(if seen { (dot * visible.scale).exp() } else { 0.0 });
                }
                let sink = if visible.sinks.is_some() { sinks[head].exp() } else { 0.0 };
                let sum = weights.iter().sum::<f64>() + sink;
                let to = ((sequence * s + query) * heads + head) * width;
                for (key, weight) in weights.iter().enumerate() {
                    for i in 0..width {
                        out[to + i] += weight / sum * v[(row + key) * width + i];
                    }
                }
            }
            Tensor::from_vec(out, (b, s, heads, width), &Device::Cpu).expect("a tensor")
        }
    }

    /// f64: sums of at most 200 terms below 1.
    const TOLERANCE: f64 = 1e-13;

    #[test]
    fn is_attention_score_by_score() {
        let sizes = Sizes { b: 2, heads: 4, keys: 2, s: 1, n: 1, d: 6, v: 5 };
        for (s, n) in [(1, 1), (1, 9), (7, 7), (5, 12), (64, 64), (65, 65), (150, 150), (70, 190)] {
            let sizes = Sizes { s, n, ..sizes };
            let inputs = sizes.inputs();
            for (window, chunk) in
                [(None, None), (Some(1), None), (Some(5), None), (Some(80), None), (None, Some(7)), (None, Some(64))]
            {
                for with_sinks in [false, true] {
                    // Also where keys before the first that is there have been forgotten.
                    for first in [n - s, n - s + 3] {
                        let masks = Masks::default();
                        let sinks = with_sinks.then_some(&inputs[3]);
                        let visible = Visible { first, window, chunk, sinks, scale: 0.7, masks: &masks };
                        let y = attention(&inputs[0], &inputs[1], &inputs[2], &visible).expect("attention");
                        let error = difference(&y, &sizes.plain(&inputs, &visible));
                        assert!(error < TOLERANCE, "{sizes:?}, {visible:?}: differs by {error:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn has_the_gradients_of_differences() {
        let sizes = Sizes { b: 1, heads: 4, keys: 2, s: 70, n: 70, d: 4, v: 3 };
        for (window, chunk) in [(None, None), (Some(9), None), (None, Some(16))] {
            check_gradients(&sizes.inputs(), &|t| {
                let masks = Masks::default();
                let visible = Visible { first: 0, window, chunk, sinks: Some(&t[3]), scale: 0.7, masks: &masks };
                attention(&t[0], &t[1], &t[2], &visible).expect("attention")
            });
        }
    }

    /// What is kept is what a later query sees, and no more.
    #[test]
    fn keeps_what_later_queries_see() {
        let masks = Masks::default();
        let visible = |window, chunk| Visible { first: 0, window, chunk, sinks: None, scale: 1.0, masks: &masks };
        assert_eq!(visible(None, None).kept(10), 10);
        assert_eq!(visible(Some(4), None).kept(10), 3);
        assert_eq!(visible(Some(4), None).kept(2), 2);
        assert_eq!(visible(Some(1), None).kept(10), 0);
        assert_eq!(visible(None, Some(4)).kept(10), 2);
        assert_eq!(visible(None, Some(5)).kept(10), 0);
    }
}
