//! Quantized expert weights: what a product reads in place of a floating-point stack of matrices.

use super::{FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorRef};

/// How a stack of weight matrices `[L, out, in]` is quantized. Blocks run along `in`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// E2M1 in blocks of 16 with an E4M3 scale each: codes `[L, out, in / 2]`, scales `[L, out, in / 16]`. An E4M3
    /// NaN among the scales counts as 480 where a device multiplies without de-quantizing first.
    Nvfp4,
    /// E2M1 in blocks of 32 with an E8M0 scale each: codes `[L, out, in / 2]`, scales `[L, out, in / 32]`.
    Mxfp4,
    /// E4M3 in blocks of 128×128, ragged at the edges, with an F32 scale each: codes `[L, out, in]`, scales
    /// `[L, P·⌈out / P / 128⌉, ⌈in / 128⌉]`: of gate and up apart (P = 2), blocks begin anew with up.
    Fp8Block,
}

impl WeightFormat {
    /// Elements along a row that share a scale.
    pub const fn block(self) -> usize {
        match self {
            WeightFormat::Nvfp4 => NVFP4_BLOCK,
            WeightFormat::Mxfp4 => MXFP4_BLOCK,
            WeightFormat::Fp8Block => FP8_BLOCK,
        }
    }

    /// Shape of the codes of a stack.
    pub const fn code_dims(self, [stack, rows, columns]: [usize; 3]) -> [usize; 3] {
        match self {
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => [stack, rows, columns / 2],
            WeightFormat::Fp8Block => [stack, rows, columns],
        }
    }

    /// Type and shape of the scales of a stack whose rows come in `parts`, at least one.
    pub const fn scales(self, [stack, rows, columns]: [usize; 3], parts: usize) -> (DType, [usize; 3]) {
        let (blocks, parts) = (columns.div_ceil(self.block()), if parts == 0 { 1 } else { parts });
        match self {
            WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => (DType::U8, [stack, rows, blocks]),
            WeightFormat::Fp8Block => (DType::F32, [stack, parts * (rows / parts).div_ceil(FP8_BLOCK), blocks]),
        }
    }
}

/// A quantized stack, borrowed: element `code · scale · factor`.
#[derive(Debug)]
pub struct QuantizedRef<'a, D: Device> {
    /// The format.
    pub format: WeightFormat,
    /// `[L, out, in]`, as numbers.
    pub dims: [usize; 3],
    /// P: matrices that an expert's is made of, one below the other (2: gate and up), a divisor of `out`.
    pub parts: usize,
    /// `U8`, of [`WeightFormat::code_dims`].
    pub codes: TensorRef<'a, D>,
    /// Of [`WeightFormat::scales`].
    pub scales: TensorRef<'a, D>,
    /// Second-level scales, `F32 [L, P]`. Ones where absent.
    pub factors: Option<TensorRef<'a, D>>,
}

impl<D: Device> Clone for QuantizedRef<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for QuantizedRef<'_, D> {}

impl<D: Device> QuantizedRef<'_, D> {
    /// Shorter borrow.
    pub fn borrow(&self) -> QuantizedRef<'_, D> {
        QuantizedRef {
            format: self.format,
            dims: self.dims,
            parts: self.parts,
            codes: self.codes.borrow(),
            scales: self.scales.borrow(),
            factors: self.factors.as_ref().map(TensorRef::borrow),
        }
    }

    /// Checks parts against each other.
    ///
    /// # Errors
    /// Checks that all parts fit, and names one that does not.
    pub fn check(&self, call: &'static str) -> Result<()> {
        let [stack, rows, columns] = self.dims;
        if rows == 0
            || columns == 0
            || !columns.is_multiple_of(self.format.block()) && self.format != WeightFormat::Fp8Block
        {
            let expected = format!("[L, out, in], in a multiple of {}", self.format.block());
            return Err(Error::invalid(call, "weight", expected, format!("{:?}", self.dims)));
        }
        if self.parts == 0 || !rows.is_multiple_of(self.parts) {
            return Err(Error::invalid(call, "weight.parts", format!("a divisor of {rows}"), self.parts));
        }
        Error::check_dtype(call, "weight.codes", DType::U8, self.codes.dtype())?;
        Error::check_shape(call, "weight.codes", &self.format.code_dims(self.dims), self.codes.dims())?;
        let (dtype, dims) = self.format.scales(self.dims, self.parts);
        Error::check_dtype(call, "weight.scales", dtype, self.scales.dtype())?;
        Error::check_shape(call, "weight.scales", &dims, self.scales.dims())?;
        let Some(factors) = &self.factors else { return Ok(()) };
        Error::check_dtype(call, "weight.factors", DType::F32, factors.dtype())?;
        Error::check_shape(call, "weight.factors", &[stack, self.parts], factors.dims())
    }
}

/// Tensors of a [`Quantized`], of the shapes that [`QuantizedRef`] names.
#[derive(Debug)]
pub struct QuantizedTensors<D: Device> {
    /// The format.
    pub format: WeightFormat,
    /// `[L, out, in]`, as numbers.
    pub dims: [usize; 3],
    /// P: matrices that an expert's is made of, one below the other.
    pub parts: usize,
    /// Codes of the elements.
    pub codes: Tensor<D>,
    /// Scales of the blocks.
    pub scales: Tensor<D>,
    /// Second-level scales. Ones where absent.
    pub factors: Option<Tensor<D>>,
}

/// A quantized stack of expert weights. Frozen: it has no gradient, but gradients pass through it to the rows.
#[derive(Debug)]
pub struct Quantized<D: Device> {
    pub(crate) format: WeightFormat,
    pub(crate) dims: [usize; 3],
    pub(crate) parts: usize,
    pub(crate) codes: Tensor<D>,
    pub(crate) scales: Tensor<D>,
    pub(crate) factors: Option<Tensor<D>>,
}

impl<D: Device> Quantized<D> {
    /// A stack of these tensors.
    ///
    /// # Errors
    /// Tensors that do not fit.
    pub fn new(tensors: QuantizedTensors<D>) -> Result<Self> {
        let QuantizedTensors { format, dims, parts, codes, scales, factors } = tensors;
        let made = Self { format, dims, parts, codes, scales, factors };
        made.view().check("Quantized::new")?;
        Ok(made)
    }

    /// Borrows the stack.
    pub fn view(&self) -> QuantizedRef<'_, D> {
        QuantizedRef {
            format: self.format,
            dims: self.dims,
            parts: self.parts,
            codes: self.codes.view(),
            scales: self.scales.view(),
            factors: self.factors.as_ref().map(Tensor::view),
        }
    }

    /// `[L, out, in]`, as numbers.
    pub fn dims(&self) -> &[usize; 3] {
        &self.dims
    }

    /// The format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Bytes of codes, scales and factors.
    pub fn bytes(&self) -> usize {
        self.codes.bytes() + self.scales.bytes() + self.factors.as_ref().map_or(0, Tensor::bytes)
    }
}
