//! Attention score by score, and its gradients by differences.

use candle_core::{Device, Tensor};

use super::*;
use crate::testing::{check_gradients, difference, random, values};

/// Sizes of a call: sequences, query and key heads, queries, keys, entries of a key and of a value.
#[derive(Debug, Clone, Copy)]
struct CallSizes {
    b: usize,
    heads: usize,
    keys: usize,
    s: usize,
    n: usize,
    d: usize,
    v: usize,
}

impl CallSizes {
    fn inputs(self) -> [Tensor; 4] {
        let Self { b, heads, keys, s, n, d, v } = self;
        let like = |own, dims: &[usize]| random(own, dims);
        [like(1, &[b, heads, s, d]), like(2, &[b, keys, n, d]), like(3, &[b, keys, n, v]), like(4, &[heads])]
    }

    /// Attention score by score.
    fn plain(self, [q, k, v, sinks]: &[Tensor; 4], options: &AttentionOptions<'_>) -> Tensor {
        let Self { b, heads, keys, s, n, d, v: width } = self;
        let (q, k, v, sinks) = (values(q), values(k), values(v), values(sinks));
        let mut out = vec![0.0; b * s * heads * width];
        for (sequence, query, head) in (0..b * s * heads).map(|i| (i / (s * heads), i / heads % s, i % heads)) {
            let position = options.first + query;
            let row = (sequence * keys + head / (heads / keys)) * n;
            let mut weights = Vec::new();
            for key in 0..n {
                let at = options.first + s - n + key;
                let seen = at <= position
                    && options.window.is_none_or(|w| at + w > position)
                    && options.chunk.is_none_or(|c| at / c == position / c);
                let from = ((sequence * heads + head) * s + query) * d;
                let dot: f64 = (0..d).map(|i| q[from + i] * k[(row + key) * d + i]).sum();
                weights.push(if seen { (dot * options.scale).exp() } else { 0.0 });
            }
            let sink = if options.sinks.is_some() { sinks[head].exp() } else { 0.0 };
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
    let sizes = CallSizes { b: 2, heads: 4, keys: 2, s: 1, n: 1, d: 6, v: 5 };
    for (s, n) in [(1, 1), (1, 9), (7, 7), (5, 12), (64, 64), (65, 65), (150, 150), (70, 190)] {
        let sizes = CallSizes { s, n, ..sizes };
        let inputs = sizes.inputs();
        for (window, chunk) in
            [(None, None), (Some(1), None), (Some(5), None), (Some(80), None), (None, Some(7)), (None, Some(64))]
        {
            for with_sinks in [false, true] {
                // Also where keys before the first that is there have been forgotten.
                for first in [n - s, n - s + 3] {
                    let masks = MaskCache::default();
                    let sinks = with_sinks.then_some(&inputs[3]);
                    let options = AttentionOptions { first, window, chunk, sinks, scale: 0.7, masks: &masks };
                    let y = masked_attention(&inputs[0], &inputs[1], &inputs[2], &options).expect("attention");
                    let error = difference(&y, &sizes.plain(&inputs, &options));
                    assert!(error < TOLERANCE, "{sizes:?}, {options:?}: differs by {error:e}");
                }
            }
        }
    }
}

#[test]
fn has_the_gradients_of_differences() {
    let sizes = CallSizes { b: 1, heads: 4, keys: 2, s: 70, n: 70, d: 4, v: 3 };
    for (window, chunk) in [(None, None), (Some(9), None), (None, Some(16))] {
        check_gradients(&sizes.inputs(), &|t| {
            let masks = MaskCache::default();
            let options = AttentionOptions { first: 0, window, chunk, sinks: Some(&t[3]), scale: 0.7, masks: &masks };
            masked_attention(&t[0], &t[1], &t[2], &options).expect("attention")
        });
    }
}

/// What is kept is what a later query sees, and no more.
#[test]
fn keeps_what_later_queries_see() {
    let masks = MaskCache::default();
    let options = |window, chunk| AttentionOptions { first: 0, window, chunk, sinks: None, scale: 1.0, masks: &masks };
    assert_eq!(options(None, None).kept(10), 10);
    assert_eq!(options(Some(4), None).kept(10), 3);
    assert_eq!(options(Some(4), None).kept(2), 2);
    assert_eq!(options(Some(1), None).kept(10), 0);
    assert_eq!(options(None, Some(4)).kept(10), 2);
    assert_eq!(options(None, Some(5)).kept(10), 0);
}
