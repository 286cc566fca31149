//! A stack of weights in NVFP4, made where the weights lie.

use super::Kernels;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{
    Amax, Codec, Layout, Matrix, NVFP4_BLOCK, Nvfp4, Nvfp4Mut, Quantize, Quantized, QuantizedTensors, WeightFormat,
    amax_of_cast,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

const NVFP4: &Nvfp4 = &Nvfp4::MODELOPT;

impl<D: Kernels + Codec> Quantized<D> {
    /// A stack of weights `[L, out, in]` by ModelOpt's recipe, with an amax a matrix, which the host waits for. `call` and
    /// `name` are the caller's and the weight's in errors.
    ///
    /// # Errors
    /// A weight of other dimensions, rows of no multiple of 16 entries, weights that are not finite; no memory; the
    /// device's.
    pub fn nvfp4(device: &D, call: &'static str, name: &str, weight: TensorRef<'_, D>) -> Result<Self> {
        let &[stack, rows, columns] = weight.dims() else {
            return Err(Error::invalid(call, name, "[L, out, in]", format!("{:?}", weight.dims())));
        };
        let dims = [stack, rows, columns];
        if !columns.is_multiple_of(NVFP4_BLOCK) {
            return Err(Error::invalid(call, name, "rows of a multiple of 16 entries", format!("{dims:?}")));
        }
        let matrix = |e: usize| {
            let layout = Layout { offset: e * rows * columns, dims: [rows, columns], strides: [columns, 1] };
            Matrix::strided(weight.borrow(), layout)
        };
        let mut amaxes = Tensor::zeros(device, DType::F32, &[stack])?;
        for e in 0..stack {
            let (matrix, rows) = (matrix(e)?, Some(entry(amaxes.view_mut(), e)?));
            device.compute_amax(Amax { format: NVFP4, matrix: matrix.borrow(), rows, columns: None })?;
        }
        let found = device.download(amaxes.view())?;
        let found = found.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect::<Vec<_>>();
        if let Some(e) = found.iter().position(|amax| !amax.is_finite()) {
            return Err(Error::invalid(call, name, "finite weights", format!("NaN or infinity in expert {e}")));
        }
        let found: Vec<f32> = found.into_iter().map(amax_of_cast).collect();
        put(device, &found, &mut amaxes)?;
        let mut factors = Tensor::empty(device, DType::F32, &[stack, 1])?;
        put(device, &found.iter().map(|amax| Nvfp4::second_scale(*amax)).collect::<Vec<_>>(), &mut factors)?;
        let format = WeightFormat::Nvfp4;
        let (dtype, scale_dims) = format.scales(dims, 1);
        let mut codes = Tensor::empty(device, DType::U8, &format.code_dims(dims))?;
        let mut scales = Tensor::empty(device, dtype, &scale_dims)?;
        for e in 0..stack {
            let (codes, scales) = (slice(codes.view_mut(), e)?, slice(scales.view_mut(), e)?);
            let rows = Some(Nvfp4Mut { codes, scales, amax: entry(amaxes.view_mut(), e)? });
            let matrix = matrix(e)?;
            device.quantize_cast_only(Quantize { format: NVFP4, matrix: matrix.borrow(), rows, columns: None })?;
        }
        Self::new(QuantizedTensors { format, dims, parts: 1, codes, scales, factors: Some(factors) })
    }
}

fn put<D: Kernels>(device: &D, values: &[f32], tensor: &mut Tensor<D>) -> Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    device.upload(&bytes, tensor.view_mut())
}

/// One number of `F32 [L]`, as `[1]`.
fn entry<D: Codec>(of: TensorMut<'_, D>, index: usize) -> Result<TensorMut<'_, D>> {
    TensorMut::new(D::slice_mut(of.into_data(), index * 4..index * 4 + 4), DType::F32, &[1])
}

/// Matrix `index` of a stack of bytes `[L, rows, bytes]`.
fn slice<D: Codec>(of: TensorMut<'_, D>, index: usize) -> Result<TensorMut<'_, D>> {
    let dims = [of.dims()[1], of.dims()[2]];
    let bytes = dims[0] * dims[1];
    TensorMut::new(D::slice_mut(of.into_data(), index * bytes..(index + 1) * bytes), DType::U8, &dims)
}
