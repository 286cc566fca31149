//! Against a matrix of all scores.

use candle_core::{DType, Tensor, Var};

use super::super::tests::close;
use super::cases::{Case, dense};
use super::*;
use crate::testing::random;

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

/// Values and all gradients, in f64 to its rounding over sums of some 150 terms, in f32 to the same number of its own.
#[test]
fn equals_attention_with_all_scores() -> Result<()> {
    for (number, case) in cases().into_iter().enumerate() {
        for dtype in [DType::F64, DType::F32] {
            let of = |seed: u64, dims: &[usize]| -> Result<Var> {
                Var::from_tensor(&random(seed + 10 * number as u64, dims).to_dtype(dtype)?)
            };
            let [q, k, v, sinks] = case.shapes(6, 4);
            let [q, k, v, sinks] = [of(1, &q)?, of(2, &k)?, of(3, &v)?, of(4, &sinks)?];
            let masks = MaskCache::default();
            let options = case.options(&sinks, 0.4, &masks);
            let found = masked_attention(&q, &k, &v, &options)?;
            let expected = dense([&q, &k, &v], &options)?;
            let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
            close(&found, &expected, tolerance, &format!("y of {case:?}"))?;
            let weights = of(5, found.dims())?;
            let gradients = |y: &Tensor| (y * weights.as_detached_tensor())?.sum_all()?.backward();
            let (found, expected) = (gradients(&found)?, gradients(&expected)?);
            let vars = [&q, &k, &v, &sinks];
            case.same_gradients((&found, vars), (&expected, vars), tolerance)?;
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
    let y = masked_attention(&q, &k, &v, &options)?;
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
        let plain = masked_attention(&q, &k, &v, &options)?;
        let tracked = masked_attention(Var::from_tensor(&q)?.as_tensor(), &k, &v, &options)?;
        let bits = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert_eq!(bits(&plain)?, bits(&tracked)?);
    }
    Ok(())
}
