//! [`Codec`] of the CPU. Work is cut into panels of whole blocks, one task each; what a panel gives depends on nothing
//! outside it, so results are the same on any number of threads.

mod fp8_block;
mod lines;
mod mxfp8;
mod nvfp4;
mod swizzle;
mod weight;

use crate::error::Result;
use crate::quant::{
    Amax, Codec, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Matrix, Quantize, QuantizeFp8Block, QuantizeMxfp8,
    Swizzle,
};

use super::Cpu;

impl Codec for Cpu {
    fn compute_amax(&self, call: Amax<'_, Self>) -> Result<()> {
        nvfp4::amax("compute_amax", vec![call])
    }
    fn multi_compute_amax(&self, calls: Vec<Amax<'_, Self>>) -> Result<()> {
        nvfp4::amax("multi_compute_amax", calls)
    }
    fn quantize_cast_only(&self, call: Quantize<'_, Self>) -> Result<()> {
        nvfp4::cast(call)
    }
    fn dequantize(&self, call: Dequantize<'_, Self>) -> Result<()> {
        nvfp4::dequantize("dequantize", vec![call])
    }
    fn multi_dequantize(&self, calls: Vec<Dequantize<'_, Self>>) -> Result<()> {
        nvfp4::dequantize("multi_dequantize", calls)
    }
    fn quantize_mxfp8(&self, call: QuantizeMxfp8<'_, Self>) -> Result<()> {
        mxfp8::quantize(call)
    }
    fn dequantize_mxfp8(&self, call: DequantizeMxfp8<'_, Self>) -> Result<()> {
        mxfp8::dequantize("dequantize_mxfp8", vec![call])
    }
    fn multi_dequantize_mxfp8(&self, calls: Vec<DequantizeMxfp8<'_, Self>>) -> Result<()> {
        mxfp8::dequantize("multi_dequantize_mxfp8", calls)
    }
    fn quantize_fp8_block(&self, call: QuantizeFp8Block<'_, Self>) -> Result<()> {
        fp8_block::quantize(call)
    }
    fn dequantize_fp8_block(&self, call: DequantizeFp8Block<'_, Self>) -> Result<()> {
        fp8_block::dequantize("dequantize_fp8_block", vec![call])
    }
    fn multi_dequantize_fp8_block(&self, calls: Vec<DequantizeFp8Block<'_, Self>>) -> Result<()> {
        fp8_block::dequantize("multi_dequantize_fp8_block", calls)
    }
    fn swizzle(&self, call: Swizzle<'_, Self>) -> Result<()> {
        swizzle::swizzle(call)
    }
    fn unswizzle(&self, call: Swizzle<'_, Self>) -> Result<()> {
        swizzle::unswizzle(call)
    }
    fn first_non_finite(&self, matrix: Matrix<'_, Self>) -> Result<Option<[usize; 2]>> {
        lines::first_non_finite(matrix)
    }
}
