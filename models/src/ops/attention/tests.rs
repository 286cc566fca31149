//! Against a matrix of all scores.

use candle_core::{DType, Tensor, Var};
use candle_nn::ops::softmax;

use super::super::tests::close;
use super::*;
use crate::testing::random;

#[derive(Debug, Clone, Copy)]
struct Case {
    queries: usize,
    /// Positions before the first query.
    past: usize,
    groups: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    sinks: bool,
}

const KEYS: usize = 2;
const PLAIN: Case = Case { queries: 5, past: 0, groups: 1, window: None, chunk: None, sinks: false };

/// Sizes below, at and above a block's, and several.
fn cases() -> Vec<Case> {
    let mut all = vec![PLAIN];
    for queries in [1, 63, 64, 65, 150] {
        for (window, chunk) in [(None, None), (Some(7), None), (Some(100), None), (None, Some(16)), (None, Some(90))] {
            all.push(Case { queries, past: queries % 3 * 4, groups: 2, window, chunk, sinks: queries % 2 == 0 });
            all.push(Case { queries, past: 0, groups: 3, window, chunk, sinks: queries % 2 == 1 });
        }
    }
    all
}

/// With every score at once.
pub fn dense([q, k, v]: [&Tensor; 3], options: &AttentionOptions<'_>) -> Result<Tensor> {
    let (b, heads, s, _) = q.dims4()?;
    let (_, keys, n, _) = k.dims4()?;
    let groups = heads / keys;
    let spread = |t: &Tensor| t.unsqueeze(2)?.repeat((1, 1, groups, 1, 1))?.reshape((b, heads, n, t.dim(3)?));
    let scores = (q.matmul(&spread(k)?.transpose(2, 3)?.contiguous()?)? * options.scale)?;
    let first_key = options.first + s - n;
    let mut mask = Vec::new();
    for query in options.first..options.first + s {
        let sees = |key: usize| {
            key <= query
                && options.window.is_none_or(|window| query - key < window)
                && options.chunk.is_none_or(|chunk| query / chunk == key / chunk)
        };
        mask.extend((first_key..first_key + n).map(|key| if sees(key) { 0.0 } else { f64::NEG_INFINITY }));
    }
    let mask = Tensor::from_vec(mask, (s, n), q.device())?.to_dtype(q.dtype())?;
    let scores = scores.broadcast_add(&mask)?;
    let scores = match options.sinks {
        Some(sinks) => Tensor::cat(&[scores, sinks.reshape((1, heads, 1, 1))?.broadcast_as((b, heads, s, 1))?], 3)?,
        None => scores,
    };
    let p = softmax(&scores, D::Minus1)?.narrow(3, 0, n)?.contiguous()?;
    p.matmul(&spread(v)?)?.transpose(1, 2)
}

/// Values and all gradients, in f64 to its rounding over sums of some 150 terms, in f32 to the same number of its own.
#[test]
fn equals_attention_with_all_scores() -> Result<()> {
    for (number, case) in cases().into_iter().enumerate() {
        let Case { queries, past, groups, window, chunk, sinks } = case;
        let (heads, positions) = (KEYS * groups, queries + past);
        for dtype in [DType::F64, DType::F32] {
            let of = |seed: u64, dims: &[usize]| -> Result<Var> {
                Var::from_tensor(&random(seed + 10 * number as u64, dims).to_dtype(dtype)?)
            };
            let (q, k) = (of(1, &[2, heads, queries, 6])?, of(2, &[2, KEYS, positions, 6])?);
            let (v, sink) = (of(3, &[2, KEYS, positions, 4])?, of(4, &[heads])?);
            let weights = of(5, &[2, queries, heads, 4])?;
            let masks = MaskCache::default();
            let options = AttentionOptions {
                first: past,
                window,
                chunk,
                sinks: sinks.then(|| sink.as_tensor()),
                scale: 0.4,
                masks: &masks,
            };
            let found = attention(&q, &k, &v, &options)?;
            let expected = dense([&q, &k, &v], &options)?;
            let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
            close(&found, &expected, tolerance, &format!("y of {case:?}"))?;
            let gradients = |y: &Tensor| (y * weights.as_detached_tensor())?.sum_all()?.backward();
            let (found, expected) = (gradients(&found)?, gradients(&expected)?);
            for (name, var) in [("q", &q), ("k", &k), ("v", &v), ("sinks", &sink)] {
                let Some(expected) = expected.get(var) else {
                    assert!(name == "sinks" && !sinks && found.get(var).is_none());
                    continue;
                };
                let found = found.get(var).ok_or_else(|| candle_core::Error::msg(name))?;
                close(found, expected, tolerance, &format!("gradient of {name} of {case:?}"))?;
            }
        }
    }
    Ok(())
}

/// One position sees itself alone: its value comes back, whatever the scores, and with it its gradient.
#[test]
fn one_position_has_its_own_value() -> Result<()> {
    let (q, k, v) = (random(1, &[1, 2, 1, 4]), random(2, &[1, 2, 1, 4]), Var::from_tensor(&random(3, &[1, 2, 1, 4]))?);
    let masks = MaskCache::default();
    let options = AttentionOptions { first: 0, window: None, chunk: None, sinks: None, scale: 3.0, masks: &masks };
    let y = attention(&q, &k, &v, &options)?;
    assert_eq!(y.flatten_all()?.to_vec1::<f64>()?, v.flatten_all()?.to_vec1::<f64>()?);
    let gradients = y.sum_all()?.backward()?;
    let of_v = gradients.get(&v).map(|t| t.flatten_all()?.to_vec1::<f64>()).transpose()?;
    assert_eq!(of_v, Some(vec![1.0; 8]));
    Ok(())
}

/// A tracked forward has the values of one without gradients, to the bit.
#[test]
fn tracking_changes_no_bit() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let of = |seed, dims: &[usize]| random(seed, dims).to_dtype(dtype);
        let (q, k, v) = (of(1, &[1, 4, 70, 8])?, of(2, &[1, 2, 70, 8])?, of(3, &[1, 2, 70, 8])?);
        let sinks = of(4, &[4])?;
        let masks = MaskCache::default();
        let options = AttentionOptions {
            first: 0,
            window: Some(20),
            chunk: None,
            sinks: Some(&sinks),
            scale: 0.3,
            masks: &masks,
        };
        let plain = attention(&q, &k, &v, &options)?;
        let tracked = attention(Var::from_tensor(&q)?.as_tensor(), &k, &v, &options)?;
        let bits = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert_eq!(bits(&plain)?, bits(&tracked)?);
    }
    Ok(())
}
