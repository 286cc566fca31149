//! Descriptions of quantization calls, and memory for what they write.

use super::format::{Direction, Mxfp8, Nvfp4, fp8_block_scale_dims};
use super::matrix::Matrix;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Tensor, TensorMut, TensorRef};

/// Largest magnitude of a matrix, or of each of its lines, for [`Nvfp4`].
#[derive(Debug)]
pub struct Amax<'a, D: Device> {
    /// The format it is for.
    pub format: &'a Nvfp4,
    /// The matrix.
    pub matrix: Matrix<'a, D>,
    /// For the row-wise form, `F32 [1]` or, with an amax a row, `F32 [rows]`.
    pub rows: Option<TensorMut<'a, D>>,
    /// For the column-wise form, `F32 [1]` or `F32 [columns]`; of the transformed values, where there is a transform.
    pub columns: Option<TensorMut<'a, D>>,
}

/// A matrix to NVFP4, in one or both directions; both from the matrix itself, never one from the other.
#[derive(Debug)]
pub struct Quantize<'a, D: Device> {
    /// The format.
    pub format: &'a Nvfp4,
    /// The matrix.
    pub matrix: Matrix<'a, D>,
    /// Its row-wise form.
    pub rows: Option<Nvfp4Mut<'a, D>>,
    /// Its column-wise form: that of its transpose.
    pub columns: Option<Nvfp4Mut<'a, D>>,
}

/// One direction of an NVFP4 matrix, to write; shapes as [`Nvfp4::sizes`] has them.
#[derive(Debug)]
pub struct Nvfp4Mut<'a, D: Device> {
    /// `U8`: two codes a byte, the even element in the low nibble.
    pub codes: TensorMut<'a, D>,
    /// `U8`: E4M3, row-major, not swizzled, not padded.
    pub scales: TensorMut<'a, D>,
    /// `F32`: read by [`Codec::quantize_cast_only`](super::Codec::quantize_cast_only), written by
    /// [`Codec::quantize`](super::Codec::quantize).
    pub amax: TensorMut<'a, D>,
}

/// An NVFP4 matrix to floating point: `out = value(code) · second-level scale of its block`.
#[derive(Debug)]
pub struct Dequantize<'a, D: Device> {
    /// The format; only recipe and scope of the amax count.
    pub format: &'a Nvfp4,
    /// As in [`Nvfp4Mut`].
    pub codes: TensorRef<'a, D>,
    /// As in [`Nvfp4Mut`].
    pub scales: TensorRef<'a, D>,
    /// As in [`Nvfp4Mut`].
    pub amax: TensorRef<'a, D>,
    /// F32, BF16 or F16, `[lines, len]`: from a column-wise form comes the transpose.
    pub out: TensorMut<'a, D>,
}

/// A matrix to MXFP8, in one or both directions.
#[derive(Debug)]
pub struct QuantizeMxfp8<'a, D: Device> {
    /// The format.
    pub format: Mxfp8,
    /// The matrix.
    pub matrix: Matrix<'a, D>,
    /// Blocks along rows.
    pub rows: Option<Mxfp8Mut<'a, D>>,
    /// Blocks along columns; codes are not transposed.
    pub columns: Option<Mxfp8Mut<'a, D>>,
}

/// One direction of an MXFP8 matrix, to write.
#[derive(Debug)]
pub struct Mxfp8Mut<'a, D: Device> {
    /// `U8`: E4M3, of the matrix's shape.
    pub codes: TensorMut<'a, D>,
    /// `U8`: E8M0, of [`Mxfp8::scale_dims`].
    pub scales: TensorMut<'a, D>,
}

/// An MXFP8 matrix to floating point.
#[derive(Debug)]
pub struct DequantizeMxfp8<'a, D: Device> {
    /// Which way its blocks run.
    pub direction: Direction,
    /// As in [`Mxfp8Mut`].
    pub codes: TensorRef<'a, D>,
    /// As in [`Mxfp8Mut`].
    pub scales: TensorRef<'a, D>,
    /// F32, BF16 or F16, of the codes' shape.
    pub out: TensorMut<'a, D>,
}

/// Rows of a matrix to fp8 blocks: E4M3 codes, and an f32 scale for each 128 columns of a row. A last block of a row may
/// be short.
///
/// The scale is `max|x| / 448` over the block, at least 2⁻¹²⁶ and at most 2¹²⁷; an element's code is E4M3 of `x / scale`,
/// to nearest even. A value is off by a sixteenth at most, or by 2⁻¹⁰ of the scale where that is more. A block of
/// zeros has the scale 2⁻¹²⁶ and codes of zero, which keep their signs; no scale is subnormal. NaN elements do not count in the scale and have the
/// code of NaN. An infinity makes the scale 2¹²⁷ and has the code of 448, whose value is an infinity again; of finite
/// elements beside it those from 1.9375·2¹²⁷ on become infinite too.
#[derive(Debug)]
pub struct QuantizeFp8Block<'a, D: Device> {
    /// The matrix.
    pub matrix: Matrix<'a, D>,
    /// Its rows.
    pub rows: Fp8BlockMut<'a, D>,
}

/// Rows of fp8 blocks, to write.
#[derive(Debug)]
pub struct Fp8BlockMut<'a, D: Device> {
    /// `U8`: E4M3, of the matrix's shape.
    pub codes: TensorMut<'a, D>,
    /// `U8`: the bytes of f32 scales, of [`fp8_block_scale_dims`]; aligned as bytes are.
    pub scales: TensorMut<'a, D>,
}

/// Rows of fp8 blocks to floating point: `out = value(code) · scale of its block`.
#[derive(Debug)]
pub struct DequantizeFp8Block<'a, D: Device> {
    /// As in [`Fp8BlockMut`].
    pub codes: TensorRef<'a, D>,
    /// As in [`Fp8BlockMut`].
    pub scales: TensorRef<'a, D>,
    /// F32, BF16 or F16, of the codes' shape.
    pub out: TensorMut<'a, D>,
}

/// Block scales to the order in which tensor cores read them, or back.
#[derive(Debug)]
pub struct Swizzle<'a, D: Device> {
    /// `U8 [rows, columns]` of scales; back: `U8 [swizzled_len(rows, columns)]`.
    pub from: TensorRef<'a, D>,
    /// The other of the two. Padding of the swizzled form is written 0, and dropped on the way back.
    pub to: TensorMut<'a, D>,
}

/// Owned memory of one direction of an NVFP4 matrix.
#[derive(Debug)]
pub struct Nvfp4Tensors<D: Device> {
    /// `U8`, two codes a byte, of [`Nvfp4::sizes`].
    pub codes: Tensor<D>,
    /// `U8`, e4m3 bits, a scale a block, of [`Nvfp4::sizes`].
    pub scales: Tensor<D>,
    /// `F32`, the largest magnitudes that the second-level scales are made of, of [`Nvfp4::sizes`].
    pub amax: Tensor<D>,
}

impl<D: Device> Nvfp4Tensors<D> {
    /// Memory for one direction of a `[rows, columns]` matrix, of unspecified content.
    ///
    /// # Errors
    /// As [`Nvfp4::sizes`], and where there is no memory.
    pub fn empty(device: &D, format: &Nvfp4, dims: [usize; 2], direction: Direction) -> Result<Self> {
        let sizes = format.sizes(dims, direction)?;
        Ok(Self {
            codes: Tensor::empty(device, DType::U8, &sizes.codes)?,
            scales: Tensor::empty(device, DType::U8, &sizes.scales)?,
            amax: Tensor::empty(device, DType::F32, &[sizes.amax])?,
        })
    }

    /// To write.
    pub fn view_mut(&mut self) -> Nvfp4Mut<'_, D> {
        Nvfp4Mut { codes: self.codes.view_mut(), scales: self.scales.view_mut(), amax: self.amax.view_mut() }
    }

    /// To de-quantize into `out`.
    pub fn dequantize<'a>(&'a self, format: &'a Nvfp4, out: TensorMut<'a, D>) -> Dequantize<'a, D> {
        Dequantize { format, codes: self.codes.view(), scales: self.scales.view(), amax: self.amax.view(), out }
    }
}

/// Owned memory of one direction of an MXFP8 matrix.
#[derive(Debug)]
pub struct Mxfp8Tensors<D: Device> {
    /// `U8 [rows, columns]`, e4m3 bits.
    pub codes: Tensor<D>,
    /// `U8`, e8m0 bits, a scale a block, of [`Mxfp8::scale_dims`].
    pub scales: Tensor<D>,
}

impl<D: Device> Mxfp8Tensors<D> {
    /// Memory for one direction of a `[rows, columns]` matrix, of unspecified content.
    ///
    /// # Errors
    /// Where there is no memory.
    pub fn empty(device: &D, dims: [usize; 2], direction: Direction) -> Result<Self> {
        Ok(Self {
            codes: Tensor::empty(device, DType::U8, &dims)?,
            scales: Tensor::empty(device, DType::U8, &Mxfp8::scale_dims(dims, direction))?,
        })
    }

    /// To write.
    pub fn view_mut(&mut self) -> Mxfp8Mut<'_, D> {
        Mxfp8Mut { codes: self.codes.view_mut(), scales: self.scales.view_mut() }
    }
}

/// Owned memory of rows of fp8 blocks.
#[derive(Debug)]
pub struct Fp8BlockTensors<D: Device> {
    /// `U8 [rows, columns]`, e4m3 bits.
    pub codes: Tensor<D>,
    /// `U8`, f32 scales as bytes, of [`fp8_block_scale_dims`].
    pub scales: Tensor<D>,
}

impl<D: Device> Fp8BlockTensors<D> {
    /// Memory for a `[rows, columns]` matrix, of unspecified content.
    ///
    /// # Errors
    /// Where there is no memory.
    pub fn empty(device: &D, dims: [usize; 2]) -> Result<Self> {
        Ok(Self {
            codes: Tensor::empty(device, DType::U8, &dims)?,
            scales: Tensor::empty(device, DType::U8, &fp8_block_scale_dims(dims))?,
        })
    }

    /// To write.
    pub fn view_mut(&mut self) -> Fp8BlockMut<'_, D> {
        Fp8BlockMut { codes: self.codes.view_mut(), scales: self.scales.view_mut() }
    }

    /// To de-quantize into `out`.
    pub fn dequantize<'a>(&'a self, out: TensorMut<'a, D>) -> DequantizeFp8Block<'a, D> {
        DequantizeFp8Block { codes: self.codes.view(), scales: self.scales.view(), out }
    }
}
