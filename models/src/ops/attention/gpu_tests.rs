//! Attention by kernels on a GPU, and its gradients, against a matrix of all scores, in f64 of the same inputs.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::tests::relative;
use super::cases::{Case, dense};
use super::*;
use crate::testing::random;

/// Sizes below, at and above those of a block of queries and a step of keys, in every size of head: entries of a query and
/// of a value.
fn cases() -> Vec<((usize, usize), Case)> {
    let mut all = Vec::new();
    for dims in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        for (queries, past) in [(16, 0), (63, 1), (64, 0), (65, 70), (128, 64), (129, 0), (300, 37)] {
            for (window, chunk) in [(None, None), (Some(7), None), (Some(100), None), (None, Some(48))] {
                let sinks = (queries + past) % 2 == 0;
                let case = Case { queries, past, groups: 1 + queries % 3, window, chunk, sinks };
                all.push((dims, case));
            }
        }
    }
    all
}

/// Values are rounded to `dtype` twice, as exponentials and as results: 2 ε. Gradients of queries, keys and values come
/// of these, of the scores' gradients, and are rounded again: 8 ε is twice that, as the sinks' are sums that may
/// cancel.
#[test]
#[ignore = "needs a GPU"]
fn kernel_equals_attention_with_all_scores() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (number, ((dim, value), case)) in cases().into_iter().enumerate() {
        for (dtype, eps) in [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
            let name = format!("{case:?} of heads of {dim} and {value} in {dtype:?}");
            let random = |seed: u64, dims: &[usize]| random(seed + 10 * number as u64, dims);
            // As projections give them: heads of a position lie side by side.
            let of = |seed: u64, dims: &[usize]| -> Result<(Tensor, Var)> {
                let t = random(seed, &[dims[0], dims[2], dims[1], dims[3]]).to_dtype(dtype)?;
                let exact = Var::from_tensor(&t.to_dtype(DType::F64)?.transpose(1, 2)?)?;
                Ok((t.to_device(&device)?.transpose(1, 2)?, exact))
            };
            let [q, k, v, sinks] = case.shapes(dim, value);
            let sinks = (random(4, &sinks) * 3.0)?.to_dtype(dtype)?;
            let exact_sinks = Var::from_tensor(&sinks.to_dtype(DType::F64)?)?;
            let sinks = Var::from_tensor(&sinks.to_device(&device)?)?;
            let ((q, exact_q), (k, exact_k), (v, exact_v)) = (of(1, &q)?, of(2, &k)?, of(3, &v)?);
            let (masks, scale) = (MaskCache::default(), 1.0 / (dim as f64).sqrt());
            let options = case.options(&sinks, scale, &masks);
            let kernel = forward_cuda::forward([&q, &k, &v], &options, true)?;
            let kernel = kernel.ok_or_else(|| candle_core::Error::msg(format!("no kernel for {name}")))?;
            let expected = dense([&exact_q, &exact_k, &exact_v], &case.options(&exact_sinks, scale, &masks))?;
            let error = relative(&kernel.y, &expected)?;
            assert!(error < 2.0 * eps, "y of {name}: {error:e}");
            let [q, k, v] = [Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?];
            let y = masked_attention(&q, &k, &v, &options)?;
            let bits = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
            assert_eq!(bits(&y)?, bits(&kernel.y)?, "tracking changes {name}");
            let weights = random(5, y.dims()).to_dtype(dtype)?;
            let (found, expected) = (
                (y * weights.to_device(&device)?)?.sum_all()?.backward()?,
                (expected * weights.to_dtype(DType::F64)?)?.sum_all()?.backward()?,
            );
            let exact = [&exact_q, &exact_k, &exact_v, &exact_sinks];
            case.same_gradients((&found, [&q, &k, &v, &sinks]), (&expected, exact), 8.0 * eps)?;
        }
    }
    Ok(())
}
