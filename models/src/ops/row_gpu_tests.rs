//! Norms and softmax of rows by kernels on a GPU.

use candle_core::{DType, Device, Result, Tensor};

use super::norm_cuda;
use super::row_tests::{SHAPES, check_norms, check_softmax, check_special_values, inputs, kinds, of_kind};
use super::softmax_cuda;
use super::*;
use crate::testing::random;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn bits(t: &Tensor) -> Result<Vec<u32>> {
    let values = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Inputs of a norm on a GPU.
fn on_gpu(inputs: Vec<Tensor>, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    inputs.into_iter().map(|t| t.to_dtype(dtype)?.to_device(device)).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn norms_equal_plain_operations() -> Result<()> {
    check_norms(&Device::new_cuda_with_stream(0)?)
}

#[test]
#[ignore = "needs a GPU"]
fn softmax_equals_plain_operations() -> Result<()> {
    check_softmax(&Device::new_cuda_with_stream(0)?)
}

#[test]
#[ignore = "needs a GPU"]
fn rows_without_numbers() -> Result<()> {
    check_special_values(&Device::new_cuda_with_stream(0)?)
}

/// What the tests above compare is the kernels': these have all rows but the longest norms', forward and backward.
#[test]
#[ignore = "needs a GPU"]
fn kernels_have_all_shapes() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (dims, dtype) in SHAPES.into_iter().flat_map(|dims| TYPES.map(|dtype| (dims, dtype))) {
        let kept = dims[dims.len() - 1] <= 12_000;
        for kind in kinds() {
            let tensors = on_gpu(inputs(dims, kind)?, dtype, &device)?;
            assert_eq!(norm_cuda::norm(&tensors, kind.options)?.is_some(), kept, "{kind:?} of {dims:?}");
            let found = norm_cuda::gradients(&tensors, kind.options, &tensors[0], &[true; 3][..tensors.len()])?;
            assert_eq!(found.map(|found| found.len()), kept.then_some(tensors.len()), "{kind:?} of {dims:?}");
        }
        let x = random(1, dims).to_dtype(dtype)?.to_device(&device)?;
        assert!(softmax_cuda::softmax(&x)?.is_some() && softmax_cuda::gradient(&x, &x)?.is_some(), "{dims:?}");
    }
    Ok(())
}

/// A sum with its norm is the sum of candle's, and that one's norm, to the bit. The same twice.
#[test]
#[ignore = "needs a GPU"]
fn sums_with_norms_are_sums_and_norms() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (kind, dtype) in kinds().into_iter().flat_map(|kind| TYPES.map(|dtype| (kind, dtype))) {
        for (rows, size) in [(7, 12), (5, 33), (9, 128), (3, 2048), (2, 7168)] {
            let mut tensors = on_gpu(inputs(&[rows, size], kind)?, dtype, &device)?;
            let y = random(9, &[rows, size]).to_dtype(dtype)?.to_device(&device)?;
            let weights = (kind.weights > 0).then(|| NormWeights { weight: &tensors[1], bias: tensors.get(2) });
            let found = add_norm(&tensors[0], &y, weights, kind.options)?;
            let again = add_norm(&tensors[0], &y, weights, kind.options)?;
            let name = format!("{kind:?} of {rows} rows of {size} in {dtype:?}");
            let (Some([sum, normed]), Some([_, again])) = (found, again) else {
                return Err(candle_core::Error::msg(format!("no kernel for {name}")));
            };
            tensors[0] = (&tensors[0] + &y)?;
            assert_eq!(bits(&sum)?, bits(&tensors[0])?, "sum of {name}");
            assert_eq!(bits(&normed)?, bits(&of_kind(&tensors, kind)?)?, "{name}");
            assert_eq!(bits(&normed)?, bits(&again)?, "{name}, again");
        }
    }
    Ok(())
}

/// Rows that begin at no whole access of a kernel, and gradients that are views, go another way to the same numbers.
#[test]
#[ignore = "needs a GPU"]
fn views_have_the_numbers_of_their_copies() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let all = random(1, &[6, 33]).to_dtype(DType::F32)?.to_device(&device)?;
    let (view, copy) = (all.narrow(0, 1, 4)?, all.narrow(0, 1, 4)?.force_contiguous()?);
    assert!(super::tests::relative(&softmax(&view)?, &softmax(&copy)?)? < 1e-6);
    let rms = NormOptions::rms(1e-3);
    assert!(super::tests::relative(&norm(&view, None, rms)?, &norm(&copy, None, rms)?)? < 1e-6);
    let g = random(2, &[33, 4]).to_dtype(DType::F32)?.to_device(&device)?.t()?;
    let y = softmax(&copy)?;
    let missing = || candle_core::Error::msg("no kernel");
    let found = softmax_cuda::gradient(&y, &g)?.ok_or_else(missing)?;
    let expected = softmax_cuda::gradient(&y, &g.force_contiguous()?)?.ok_or_else(missing)?;
    assert_eq!(bits(&found)?, bits(&expected)?);
    Ok(())
}
