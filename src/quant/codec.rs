//! Quantization as a device offers it.

use super::calls::{
    Amax, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Quantize, QuantizeFp8Block, QuantizeMxfp8, Swizzle,
};
use super::check;
use super::matrix::Matrix;
use crate::device::Device;
use crate::error::Result;

/// Quantization on a device. Calls do their work in the order in which they are made, and may return before it is done;
/// shapes, dtypes and formats are checked first.
///
/// [`quantize`](Self::quantize) is [`compute_amax`](Self::compute_amax) and
/// [`quantize_cast_only`](Self::quantize_cast_only), to the bit. A matrix whose shards lie on several ranks takes the
/// maximum of the amaxes between the two.
pub trait Codec: Device {
    /// [`Amax`]. NaN where there is a NaN, 0 of no elements.
    ///
    /// # Errors
    /// Types, formats or shapes that do not fit each other or the device, before anything is done; no memory; the
    /// device's.
    fn compute_amax(&self, call: Amax<'_, Self>) -> Result<()>;
    /// [`Amax`] of many matrices at once. Nothing is written if any is refused.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn multi_compute_amax(&self, calls: Vec<Amax<'_, Self>>) -> Result<()>;
    /// [`Quantize`] with the amaxes given.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn quantize_cast_only(&self, call: Quantize<'_, Self>) -> Result<()>;
    /// [`Quantize`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn quantize(&self, call: Quantize<'_, Self>) -> Result<()> {
        // All of it, so that a call refused for its second phase has not written its first.
        check::quantize("quantize", &call)?;
        let Quantize { format, matrix, mut rows, mut columns } = call;
        let amax = Amax {
            format,
            matrix: matrix.borrow(),
            rows: rows.as_mut().map(|side| side.amax.reborrow()),
            columns: columns.as_mut().map(|side| side.amax.reborrow()),
        };
        self.compute_amax(amax)?;
        self.quantize_cast_only(Quantize { format, matrix, rows, columns })
    }
    /// [`Dequantize`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn dequantize(&self, call: Dequantize<'_, Self>) -> Result<()>;
    /// [`Dequantize`] of many matrices at once. Nothing is written if any is refused.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn multi_dequantize(&self, calls: Vec<Dequantize<'_, Self>>) -> Result<()>;
    /// [`QuantizeMxfp8`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn quantize_mxfp8(&self, call: QuantizeMxfp8<'_, Self>) -> Result<()>;
    /// [`DequantizeMxfp8`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn dequantize_mxfp8(&self, call: DequantizeMxfp8<'_, Self>) -> Result<()>;
    /// [`DequantizeMxfp8`] of many matrices at once. Nothing is written if any is refused.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn multi_dequantize_mxfp8(&self, calls: Vec<DequantizeMxfp8<'_, Self>>) -> Result<()>;
    /// [`QuantizeFp8Block`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn quantize_fp8_block(&self, call: QuantizeFp8Block<'_, Self>) -> Result<()>;
    /// [`DequantizeFp8Block`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn dequantize_fp8_block(&self, call: DequantizeFp8Block<'_, Self>) -> Result<()>;
    /// [`DequantizeFp8Block`] of many matrices at once. Nothing is written if any is refused.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn multi_dequantize_fp8_block(&self, calls: Vec<DequantizeFp8Block<'_, Self>>) -> Result<()>;
    /// [`Swizzle`].
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn swizzle(&self, call: Swizzle<'_, Self>) -> Result<()>;
    /// [`Swizzle`], back.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax).
    fn unswizzle(&self, call: Swizzle<'_, Self>) -> Result<()>;
    /// Row and column of a matrix's first NaN or infinity, in row-major order: the check to make before quantizing
    /// where such a value should be an error. Waits for the device.
    ///
    /// # Errors
    /// As [`compute_amax`](Self::compute_amax); errors of earlier calls, as the device returns them when it is waited
    /// for.
    fn first_non_finite(&self, matrix: Matrix<'_, Self>) -> Result<Option<[usize; 2]>>;
}
