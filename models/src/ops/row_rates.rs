//! Times of the kernels of rows on a GPU, beside candle's operations. They count for the whole GPU, so nothing may run
//! beside them:
//!
//! ```text
//! cargo test --release -p moebius-models --features cuda --lib \
//!     ops::row_rates -- --ignored --nocapture --test-threads=1
//! ```

use candle_core::{D, DType, Device, Result, Tensor};

use super::attention::gpu_rates::median_ms;
use super::norm_cuda;
use super::row_tests::{Kind, inputs, kinds, of_kind};
use super::softmax_cuda;
use super::*;

/// What a kernel took, and how much it moves at least.
struct TimeRow<'a> {
    what: &'a str,
    rows: usize,
    size: usize,
    dtype: DType,
    /// Tensors of the rows' size that are read or written.
    passes: usize,
    us: f64,
    /// By candle's operations, where these do the same.
    candle_us: Option<f64>,
}

impl TimeRow<'_> {
    fn print(&self) {
        let Self { what, rows, size, dtype, passes, us, candle_us } = *self;
        let rate = (passes * rows * size * dtype.size_in_bytes()) as f64 / us / 1e6;
        let candle_us = candle_us.map_or("null".to_string(), |us| format!("{us:.1}"));
        println!(
            "{{\"workload\":\"{what}\",\"rows\":{rows},\"size\":{size},\"dtype\":\"{}\",\"us\":{us:.1},\"tb_per_s\":{rate:.2},\
             \"candle_us\":{candle_us}}}",
            dtype.as_str(),
        );
    }
}

/// Rows of a decoder's hidden states, of its heads, and of a decode step, in bf16.
const SHAPES: [(usize, usize); 4] = [(8192, 2048), (8192, 7168), (8192 * 32, 128), (1, 2048)];

#[test]
#[ignore = "needs a GPU and nothing beside it"]
fn norms() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let dtype = DType::BF16;
    for (rows, size) in SHAPES {
        for (kind, what) in kinds().into_iter().zip(["rms", "rms, 1 + w", "rms, no w", "layer", "layer, b"]) {
            let tensors = inputs(&[rows, size], kind)?;
            let tensors: Vec<Tensor> =
                tensors.iter().map(|t| t.to_dtype(dtype)?.to_device(&device)).collect::<Result<_>>()?;
            let time = |call: &dyn Fn() -> Result<()>| median_ms(&stream, 9, call).map(|ms| ms * 1e3);
            let us = time(&|| of_kind(&tensors, kind).map(drop))?;
            let candle_us = time(&|| candles(&tensors, kind).map(drop))?;
            let row = TimeRow { what, rows, size, dtype, passes: 2, us, candle_us: Some(candle_us) };
            row.print();
            let us = time(&|| {
                let found = norm_cuda::gradients(&tensors, kind.options, &tensors[0], &[true; 3][..tensors.len()])?;
                found.map(drop).ok_or_else(|| candle_core::Error::msg("no kernel"))
            })?;
            let passes = if kind.weights > 0 { 5 } else { 3 };
            TimeRow { what: &format!("{what}, gradients"), passes, us, candle_us: None, ..row }.print();
            if let Some(sum) = add_norm(&tensors[0], &tensors[0], weights_of(&tensors), kind.options)? {
                drop(sum);
                let us = time(&|| add_norm(&tensors[0], &tensors[0], weights_of(&tensors), kind.options).map(drop))?;
                TimeRow { what: &format!("{what}, of a sum"), passes: 4, us, candle_us: None, ..row }.print();
            }
        }
    }
    Ok(())
}

fn weights_of(tensors: &[Tensor]) -> Option<NormWeights<'_>> {
    tensors.get(1).map(|weight| NormWeights { weight, bias: tensors.get(2) })
}

/// The norm by candle: its fused one of weights as they are, else its operations.
fn candles(tensors: &[Tensor], Kind { options, weights }: Kind) -> Result<Tensor> {
    let (x, dtype) = (&tensors[0], tensors[0].dtype());
    if weights == 1 && options.is_plain_rms() {
        return candle_nn::ops::rms_norm(x, &tensors[1], options.eps as f32);
    }
    let x = x.to_dtype(DType::F32)?;
    let x = if options.centered { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let mut y = x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + options.eps)?.sqrt()?)?;
    if weights > 0 {
        y = y.broadcast_mul(&(tensors[1].to_dtype(DType::F32)? + options.weight_offset)?)?;
    }
    if weights > 1 {
        y = y.broadcast_add(&tensors[2].to_dtype(DType::F32)?)?;
    }
    y.to_dtype(dtype)
}

#[test]
#[ignore = "needs a GPU and nothing beside it"]
fn softmax_of_rows() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    // Scores of a block of attention, and logits of a block of a cross-entropy.
    for (rows, size, dtype) in [(16_384, 4096, DType::BF16), (16_384, 4096, DType::F32), (512, 151_936, DType::F32)] {
        let x = Tensor::randn(0f32, 3.0, (rows, size), &device)?.to_dtype(dtype)?;
        let us = median_ms(&stream, 9, || softmax(&x).map(drop))? * 1e3;
        let candle_us = median_ms(&stream, 9, || candle_nn::ops::softmax_last_dim(&x).map(drop))? * 1e3;
        let row = TimeRow { what: "softmax", rows, size, dtype, passes: 2, us, candle_us: Some(candle_us) };
        row.print();
        let y = softmax(&x)?;
        let us = median_ms(&stream, 9, || softmax_cuda::gradient(&y, &x).map(drop))? * 1e3;
        TimeRow { what: "softmax, gradient", passes: 3, us, candle_us: None, ..row }.print();
    }
    Ok(())
}
