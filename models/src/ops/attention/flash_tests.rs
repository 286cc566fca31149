//! FlashAttention against a matrix of all scores in f64 of the same inputs, and its rate beside the crate's kernel.
//!
//! ```text
//! cargo test --release -p moebius-models --features flash-attn --lib \
//!     attention::flash_tests -- --ignored --nocapture --test-threads=1
//! ```

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::tests::relative;
use super::cases::{Case, dense};
use super::gpu_rates::{AttentionInputs, AttentionShape, causal_options, median_ms};
use super::*;
use crate::testing::random;

const BF16: f64 = 1.0 / 256.0;

/// Values are rounded twice, as exponentials and as results: 2 ε.
#[test]
#[ignore = "needs a GPU"]
fn flash_attention_equals_attention_with_all_scores() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (queries, past) in [(1, 0), (1, 70), (16, 0), (65, 70), (129, 0), (300, 37)] {
        for window in [None, Some(1), Some(7), Some(100), Some(1000)] {
            let case = Case { queries, past, groups: 1 + queries % 3, window, chunk: None, sinks: false };
            // As projections give them: heads of a position lie side by side.
            let of = |seed: u64, dims: &[usize]| -> Result<(Tensor, Tensor)> {
                let t = random(seed + queries as u64, &[dims[0], dims[2], dims[1], dims[3]]).to_dtype(DType::BF16)?;
                let exact = t.to_dtype(DType::F64)?.transpose(1, 2)?.contiguous()?;
                Ok((t.to_device(&device)?.transpose(1, 2)?, exact))
            };
            let [q, k, v, sinks] = case.shapes(128, 128);
            let ((q, exact_q), (k, exact_k), (v, exact_v)) = (of(1, &q)?, of(2, &k)?, of(3, &v)?);
            let sinks = Var::from_tensor(&random(4, &sinks))?;
            let (masks, scale) = (MaskCache::default(), 1.0 / 128f64.sqrt());
            let options = case.options(&sinks, scale, &masks);
            let found = flash::forward([&q, &k, &v], &options)?;
            let found = found.ok_or_else(|| candle_core::Error::msg(format!("not served: {case:?}")))?;
            let expected = dense([&exact_q, &exact_k, &exact_v], &options)?;
            assert_eq!(found.dims(), expected.dims(), "{case:?}");
            let error = relative(&found, &expected)?;
            assert!(error < 2.0 * BF16, "{case:?}: {error:e}");
        }
    }
    Ok(())
}

/// What it does not serve is left to the crate's kernel.
#[test]
#[ignore = "needs a GPU"]
fn what_flash_attention_does_not_serve() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let of = |dims: [usize; 4], dtype| random(1, &dims).to_dtype(dtype)?.to_device(&device);
    let (q, k) = (of([1, 2, 20, 128], DType::BF16)?, of([1, 1, 20, 128], DType::BF16)?);
    let masks = MaskCache::default();
    let plain = causal_options(128, &masks);
    assert!(flash::forward([&q, &k, &k], &plain)?.is_some());
    let sinks = random(2, &[2]).to_dtype(DType::BF16)?.to_device(&device)?;
    assert!(flash::forward([&q, &k, &k], &AttentionOptions { sinks: Some(&sinks), ..plain })?.is_none());
    assert!(flash::forward([&q, &k, &k], &AttentionOptions { chunk: Some(7), ..plain })?.is_none());
    let narrow = of([1, 1, 20, 64], DType::BF16)?;
    assert!(flash::forward([&q, &k, &narrow], &plain)?.is_none());
    let wide = [of([1, 2, 20, 128], DType::F32)?, of([1, 1, 20, 128], DType::F32)?];
    assert!(flash::forward([&wide[0], &wide[1], &wide[1]], &plain)?.is_none());
    Ok(())
}

/// Times of both forwards, one JSON line a shape. The crate's is to have 0.6 of FlashAttention's rate at least.
#[test]
#[ignore = "needs a GPU and nothing beside it"]
fn the_kernel_has_the_rate_of_flash_attention() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    for key_heads in [32, 4] {
        let shape = AttentionShape { heads: 32, key_heads, tokens: 8192, dim: 128, value: 128 };
        let AttentionInputs { q, k, v, .. } = shape.inputs(&device)?;
        let masks = MaskCache::default();
        let options = causal_options(shape.dim, &masks);
        let theirs = median_ms(&stream, 9, || flash::forward([&q, &k, &v], &options).map(drop))?;
        let ours = median_ms(&stream, 9, || output([&q, &k, &v], &options, false).map(drop))?;
        println!(
            "{{\"workload\":\"attention forward, causal, bf16\",\"tokens\":8192,\"heads\":32,\"key_heads\":{key_heads},\
             \"dim\":128,\"ms\":{ours:.3},\"candle_flash_attn_ms\":{theirs:.3},\"rate\":{:.2}}}",
            theirs / ours
        );
        assert!(theirs / ours >= 0.6, "{key_heads} key heads: {ours} ms, FlashAttention {theirs} ms");
    }
    Ok(())
}
