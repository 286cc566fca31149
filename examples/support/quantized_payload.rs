//! Rows of tokens or weights that travel quantized, as they come back: the values that are computed with.

use moebius::cpu::Cpu;
use moebius::etp::Payload;
use moebius::kernels::Kernels;
use moebius::quant::{
    Codec, DequantizeMxfp8, Direction, Fp8BlockTensors, Matrix, Mxfp8, Mxfp8Tensors, Nvfp4, Nvfp4Tensors, Quantize,
    QuantizeFp8Block, QuantizeMxfp8,
};
use moebius::{DType, Result, Tensor};

/// The form of tokens in NVFP4: an amax a row.
pub const TOKENS: Nvfp4 = Nvfp4::TE.row_scaled();

/// Rows of `dtype` there and back; `format` is NVFP4's.
///
/// # Errors
/// Sizes or a type that the form cannot have.
pub fn through(
    (payload, format): (Payload, Nvfp4),
    (dtype, values): (DType, &[f64]),
    dims: [usize; 2],
) -> Result<Vec<f64>> {
    let cpu = Cpu::new();
    let rows = cpu.write(values, dtype, &dims)?;
    let (matrix, mut back) = (Matrix::new(rows.view())?, Tensor::empty(&cpu, dtype, &dims)?);
    match payload {
        Payload::Nvfp4 => {
            let mut form = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows)?;
            cpu.quantize(Quantize { format: &format, matrix, rows: Some(form.view_mut()), columns: None })?;
            cpu.dequantize(form.dequantize(&format, back.view_mut()))?;
        }
        Payload::Mxfp8 => {
            let mut form = Mxfp8Tensors::empty(&cpu, dims, Direction::Rows)?;
            let call = QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows: Some(form.view_mut()), columns: None };
            cpu.quantize_mxfp8(call)?;
            let (codes, scales, out) = (form.codes.view(), form.scales.view(), back.view_mut());
            cpu.dequantize_mxfp8(DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out })?;
        }
        Payload::Fp8Block => {
            let mut form = Fp8BlockTensors::empty(&cpu, dims)?;
            cpu.quantize_fp8_block(QuantizeFp8Block { matrix, rows: form.view_mut() })?;
            cpu.dequantize_fp8_block(form.dequantize(back.view_mut()))?;
        }
        _ => return Ok(values.to_vec()),
    }
    cpu.read(back.view())
}
