//! The kernel of attention's forward on a GPU against a matrix of all scores, in f64 of the same inputs.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::tests::dense;
use super::*;
use crate::testing::random;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// Entries of a query, and of a value.
    dims: (usize, usize),
    queries: usize,
    /// Positions before the first query.
    past: usize,
    groups: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    sinks: bool,
}

const KEYS: usize = 2;

/// Sizes below, at and above those of a block of queries and a step of keys, in every size of head.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dims in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        for (queries, past) in [(16, 0), (63, 1), (64, 0), (65, 70), (128, 64), (129, 0), (300, 37)] {
            for (window, chunk) in [(None, None), (Some(7), None), (Some(100), None), (None, Some(48))] {
                let sinks = (queries + past) % 2 == 0;
                all.push(Case { dims, queries, past, groups: 1 + queries % 3, window, chunk, sinks });
            }
        }
    }
    all
}

/// ‖a − b‖ / ‖b‖, of f64.
fn relative(a: &Tensor, b: &Tensor) -> Result<f64> {
    let a = a.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let norm = |t: &Tensor| -> Result<f64> { t.sqr()?.sum_all()?.to_scalar::<f64>() };
    Ok((norm(&(a - b)?)? / norm(b)?).sqrt())
}

/// Values are rounded to `dtype` twice, as exponentials and as results: 2 ε. Gradients come of these, of the scores'
/// gradients and of the results' products, rounded again: 8 ε.
#[test]
#[ignore = "needs a GPU"]
fn kernel_equals_attention_with_all_scores() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (number, case) in cases().into_iter().enumerate() {
        let Case { dims: (dim, value), queries, past, groups, window, chunk, sinks } = case;
        let (heads, positions) = (KEYS * groups, queries + past);
        for (dtype, eps) in [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
            // As projections give them: heads of a position lie side by side.
            let of = |seed: u64, heads: usize, rows: usize, dim: usize| -> Result<(Tensor, Var)> {
                let t = random(seed + 10 * number as u64, &[2, rows, heads, dim]).to_dtype(dtype)?;
                Ok((
                    t.to_device(&device)?.transpose(1, 2)?,
                    Var::from_tensor(&t.to_dtype(DType::F64)?.transpose(1, 2)?)?,
                ))
            };
            let (q, exact_q) = of(1, heads, queries, dim)?;
            let (k, exact_k) = of(2, KEYS, positions, dim)?;
            let (v, exact_v) = of(3, KEYS, positions, value)?;
            let sink = (random(4 + 10 * number as u64, &[heads]) * 3.0)?.to_dtype(dtype)?;
            let exact_sink = Var::from_tensor(&sink.to_dtype(DType::F64)?)?;
            let sink = Var::from_tensor(&sink.to_device(&device)?)?;
            let masks = MaskCache::default();
            let options = AttentionOptions {
                first: past,
                window,
                chunk,
                sinks: None,
                scale: 1.0 / (dim as f64).sqrt(),
                masks: &masks,
            };
            let options = AttentionOptions { sinks: sinks.then_some(sink.as_tensor()), ..options };
            let exact = AttentionOptions { sinks: sinks.then_some(exact_sink.as_tensor()), ..options };
            let kernel = forward_cuda::forward([&q, &k, &v], &options, true)?;
            let kernel = kernel.ok_or_else(|| candle_core::Error::msg(format!("no kernel for {case:?}")))?;
            let expected = dense([&exact_q, &exact_k, &exact_v], &exact)?;
            let error = relative(&kernel.y, &expected)?;
            assert!(error < 2.0 * eps, "y of {case:?} in {dtype:?}: {error:e}");
            let vars = [Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?];
            let y = attention(&vars[0], &vars[1], &vars[2], &options)?;
            let bits = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
            assert_eq!(bits(&y)?, bits(&kernel.y)?, "tracking changes {case:?} in {dtype:?}");
            if !number.is_multiple_of(3) {
                continue;
            }
            let weights = random(5 + 10 * number as u64, &[2, queries, heads, value]).to_dtype(dtype)?;
            let (found, expected) = (
                (y * weights.to_device(&device)?)?.sum_all()?.backward()?,
                (expected * weights.to_dtype(DType::F64)?)?.sum_all()?.backward()?,
            );
            for (name, var, exact) in [
                ("q", &vars[0], &exact_q),
                ("k", &vars[1], &exact_k),
                ("v", &vars[2], &exact_v),
                ("sinks", &sink, &exact_sink),
            ] {
                let (Some(found), Some(expected)) = (found.get(var), expected.get(exact)) else {
                    assert!(name == "sinks" && !sinks, "no gradient of {name} of {case:?}");
                    continue;
                };
                let error = relative(found, expected)?;
                assert!(error < 8.0 * eps, "gradient of {name} of {case:?} in {dtype:?}: {error:e}");
            }
        }
    }
    Ok(())
}
