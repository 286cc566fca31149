//! Checks that every device makes before it starts.

use super::calls::{
    Amax, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Mxfp8Mut, Nvfp4Mut, Quantize, QuantizeFp8Block,
    QuantizeMxfp8, Swizzle,
};
use super::format::{AmaxScope, Direction, Mxfp8, Nvfp4, Recipe, Rounding, fp8_block_scale_dims};
use super::nvfp4::Bits;
use super::swizzle::swizzled_len;
use super::{Matrix, NVFP4_BLOCK};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef, dims2};

fn tensor<D: Device>(call: &'static str, name: &str, tensor: TensorRef<'_, D>, spec: (DType, &[usize])) -> Result<()> {
    Error::check_dtype(call, name, spec.0, tensor.dtype())?;
    Error::check_shape(call, name, spec.1, tensor.dims())
}

/// A transform takes whole blocks of bf16, columns only.
fn transform<D: Device>(call: &'static str, format: &Nvfp4, matrix: &Matrix<'_, D>, columns: bool) -> Result<()> {
    if format.hadamard.is_none() || !columns {
        return Ok(());
    }
    Error::check_dtype(call, "matrix of a Hadamard transform", DType::BF16, matrix.dtype())?;
    match matrix.dims()[0] {
        rows if rows.is_multiple_of(NVFP4_BLOCK) => Ok(()),
        rows => Err(Error::invalid(call, "rows of the matrix", "a multiple of 16 for a Hadamard transform", rows)),
    }
}

pub(crate) fn amax<D: Device>(call: &'static str, amax: &Amax<'_, D>) -> Result<()> {
    amax.format.check(call)?;
    let dims = amax.matrix.dims();
    transform(call, amax.format, &amax.matrix, amax.columns.is_some())?;
    let sides = [("rows.amax", &amax.rows, dims[0]), ("columns.amax", &amax.columns, dims[1])];
    for (name, out, lines) in sides {
        let Some(out) = out else { continue };
        let count = match amax.format.scope {
            AmaxScope::Matrix => 1,
            AmaxScope::Line => lines,
        };
        tensor(call, name, out.as_ref(), (DType::F32, &[count]))?;
    }
    Ok(())
}

pub(crate) fn quantize<D: Device>(call: &'static str, quantize: &Quantize<'_, D>) -> Result<()> {
    quantize.format.check(call)?;
    transform(call, quantize.format, &quantize.matrix, quantize.columns.is_some())?;
    let side = |direction, names: [&str; 3], side: &Option<Nvfp4Mut<'_, D>>| {
        let Some(side) = side else { return Ok(()) };
        let sizes = quantize.format.sizes(quantize.matrix.dims(), direction)?;
        tensor(call, names[0], side.codes.as_ref(), (DType::U8, &sizes.codes))?;
        tensor(call, names[1], side.scales.as_ref(), (DType::U8, &sizes.scales))?;
        tensor(call, names[2], side.amax.as_ref(), (DType::F32, &[sizes.amax]))?;
        match quantize.format.rounding {
            Rounding::Stochastic(random) => Bits::new(call, random, direction, sizes.scales).map(|_| ()),
            Rounding::Nearest => Ok(()),
        }
    };
    side(Direction::Rows, ["rows.codes", "rows.scales", "rows.amax"], &quantize.rows)?;
    side(Direction::Columns, ["columns.codes", "columns.scales", "columns.amax"], &quantize.columns)
}

fn floating<D: Device>(call: &'static str, out: &TensorMut<'_, D>) -> Result<[usize; 2]> {
    if !matches!(out.dtype(), DType::F32 | DType::BF16 | DType::F16) {
        return Err(Error::invalid(call, "tensor out", "f32, bf16 or f16", out.dtype()));
    }
    dims2(call, "out", out.dims())
}

/// Returns lines and their length.
pub(crate) fn dequantize<D: Device>(call: &'static str, dequantize: &Dequantize<'_, D>) -> Result<[usize; 2]> {
    let dims = floating(call, &dequantize.out)?;
    let mut sizes = dequantize.format.sizes(dims, Direction::Rows)?;
    if dequantize.format.recipe == Recipe::Te {
        // Cropped or whole blocks: both are read.
        let whole = sizes.scales[1] * NVFP4_BLOCK / 2;
        sizes.codes[1] = if dequantize.codes.dims().get(1) == Some(&whole) { whole } else { sizes.codes[1] };
    }
    tensor(call, "codes", dequantize.codes, (DType::U8, &sizes.codes))?;
    tensor(call, "scales", dequantize.scales, (DType::U8, &sizes.scales))?;
    tensor(call, "amax", dequantize.amax, (DType::F32, &[sizes.amax]))?;
    Ok(dims)
}

pub(crate) fn quantize_mxfp8<D: Device>(call: &'static str, quantize: &QuantizeMxfp8<'_, D>) -> Result<()> {
    let dims = quantize.matrix.dims();
    let side = |direction, names: [&str; 2], side: &Option<Mxfp8Mut<'_, D>>| {
        let Some(side) = side else { return Ok(()) };
        tensor(call, names[0], side.codes.as_ref(), (DType::U8, &dims))?;
        tensor(call, names[1], side.scales.as_ref(), (DType::U8, &Mxfp8::scale_dims(dims, direction)))
    };
    side(Direction::Rows, ["rows.codes", "rows.scales"], &quantize.rows)?;
    side(Direction::Columns, ["columns.codes", "columns.scales"], &quantize.columns)
}

/// Returns the matrix's rows and columns.
pub(crate) fn dequantize_mxfp8<D: Device>(
    call: &'static str,
    dequantize: &DequantizeMxfp8<'_, D>,
) -> Result<[usize; 2]> {
    let dims = floating(call, &dequantize.out)?;
    tensor(call, "codes", dequantize.codes, (DType::U8, &dims))?;
    let scales = Mxfp8::scale_dims(dims, dequantize.direction);
    tensor(call, "scales", dequantize.scales, (DType::U8, &scales))?;
    Ok(dims)
}

pub(crate) fn quantize_fp8_block<D: Device>(call: &'static str, quantize: &QuantizeFp8Block<'_, D>) -> Result<()> {
    let (dims, rows) = (quantize.matrix.dims(), &quantize.rows);
    tensor(call, "rows.codes", rows.codes.as_ref(), (DType::U8, &dims))?;
    tensor(call, "rows.scales", rows.scales.as_ref(), (DType::U8, &fp8_block_scale_dims(dims)))
}

/// Returns the matrix's rows and columns.
pub(crate) fn dequantize_fp8_block<D: Device>(
    call: &'static str,
    dequantize: &DequantizeFp8Block<'_, D>,
) -> Result<[usize; 2]> {
    let dims = floating(call, &dequantize.out)?;
    tensor(call, "codes", dequantize.codes, (DType::U8, &dims))?;
    tensor(call, "scales", dequantize.scales, (DType::U8, &fp8_block_scale_dims(dims)))?;
    Ok(dims)
}

/// Returns rows and columns of the unswizzled side; `back`: that is where the call writes.
pub(crate) fn swizzle<D: Device>(call: &'static str, swizzle: &Swizzle<'_, D>, back: bool) -> Result<[usize; 2]> {
    let (plain, tiled) = match back {
        false => (swizzle.from.borrow(), swizzle.to.as_ref()),
        true => (swizzle.to.as_ref(), swizzle.from.borrow()),
    };
    let (plain_name, tiled_name) = if back { ("to", "from") } else { ("from", "to") };
    let dims = dims2(call, plain_name, plain.dims())?;
    tensor(call, plain_name, plain, (DType::U8, &dims))?;
    tensor(call, tiled_name, tiled, (DType::U8, &[swizzled_len(dims[0], dims[1])]))?;
    Ok(dims)
}
