//! Quantized expert weights on the host: as numbers, and put on another device.

use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::quant::{E2M1, E4M3, FP8_BLOCK, Quantized, QuantizedRef, WeightFormat, e8m0};
use crate::tensor::Tensor;

impl Quantized<Cpu> {
    /// The same stack on another device.
    ///
    /// # Errors
    /// Where there is no memory, or a driver's error.
    pub fn to<D: Kernels>(&self, device: &D) -> Result<Quantized<D>> {
        let put = |t: &Tensor<Cpu>| t.to(device);
        Ok(Quantized {
            format: self.format,
            dims: self.dims,
            parts: self.parts,
            codes: put(&self.codes)?,
            scales: put(&self.scales)?,
            factors: self.factors.as_ref().map(put).transpose()?,
        })
    }
}

impl QuantizedRef<'_, Cpu> {
    /// De-quantizes one matrix of the stack: `(code · scale) · factor`, the first product exact.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn dequantize(&self, index: usize) -> Result<Vec<f32>> {
        const CALL: &str = "QuantizedRef::dequantize";
        self.check(CALL)?;
        let [stack, rows, columns] = self.dims;
        if index >= stack {
            return Err(Error::invalid(CALL, "index", format!("0..{stack}"), index));
        }
        let factors = self.factors.map(|f| f.as_slice::<f32>()).transpose()?;
        let (parts, each) = (self.parts, rows / self.parts);
        let of_row = |row: usize| factors.map_or(1.0, |f| f[index * parts + row / each]);
        let bytes = self.codes.row_bytes() / rows;
        let codes = &self.codes.data()[index * rows * bytes..][..rows * bytes];
        let mut out = vec![0.0; rows * columns];
        let lines = out.chunks_exact_mut(columns).zip(codes.chunks_exact(bytes)).enumerate();
        if self.format == WeightFormat::Fp8Block {
            let scales = self.scales.as_slice::<f32>()?;
            let [_, high, wide] = self.format.scales(self.dims, parts).1;
            for (row, (line, codes)) in lines {
                let block = row / each * (high / parts) + row % each / FP8_BLOCK;
                let scales = &scales[(index * high + block) * wide..][..wide];
                for (j, (value, code)) in line.iter_mut().zip(codes).enumerate() {
                    *value = E4M3[*code as usize] * scales[j / FP8_BLOCK] * of_row(row);
                }
            }
            return Ok(out);
        }
        let (block, blocks) = (self.format.block(), columns / self.format.block());
        let scales = &self.scales.data()[index * rows * blocks..][..rows * blocks];
        for (row, (line, codes)) in lines {
            for (j, value) in line.iter_mut().enumerate() {
                let scale = scales[row * blocks + j / block];
                let scale = if self.format == WeightFormat::Nvfp4 { E4M3[scale as usize] } else { e8m0(scale) };
                *value = E2M1[(codes[j / 2] >> (j % 2 * 4) & 15) as usize] * scale * of_row(row);
            }
        }
        Ok(out)
    }
}
