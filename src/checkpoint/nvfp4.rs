//! A matrix in ModelOpt's NVFP4, as the three tensors of a checkpoint.

use super::open::Checkpoint;
use super::stored::sibling;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::quant::{Codec, Direction, Matrix, NVFP4_BLOCK, Nvfp4, Nvfp4Tensors, Quantize};
use crate::tensor::Tensor;

pub(super) const FORMAT: &Nvfp4 = &Nvfp4::MODELOPT;

/// One of the three tensors that a quantized matrix becomes.
#[derive(Debug)]
pub(super) struct Nvfp4Item {
    pub part: Nvfp4Part,
    /// The matrix's own name.
    pub matrix: String,
    pub dims: [usize; 2],
    pub amax: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nvfp4Part {
    Codes,
    Scales,
    Second,
}

impl Nvfp4Item {
    /// Name on disk.
    pub fn name(&self) -> String {
        match self.part {
            Nvfp4Part::Codes => self.matrix.clone(),
            Nvfp4Part::Scales => sibling(&self.matrix, "weight_scale"),
            Nvfp4Part::Second => sibling(&self.matrix, "weight_scale_2"),
        }
    }

    /// Shape on disk.
    pub fn shape(&self) -> Vec<usize> {
        let [out, inn] = self.dims;
        match self.part {
            Nvfp4Part::Codes => vec![out, inn / 2],
            Nvfp4Part::Scales => vec![out, inn / NVFP4_BLOCK],
            Nvfp4Part::Second => Vec::new(),
        }
    }
}

impl Checkpoint {
    /// Bytes of one of a matrix's three tensors.
    pub(super) fn nvfp4_bytes(&self, item: &Nvfp4Item) -> Result<Vec<u8>> {
        if item.part == Nvfp4Part::Second {
            return Ok(Nvfp4::second_scale(item.amax).to_le_bytes().to_vec());
        }
        let made = cast(&self.tensor(&item.matrix, None)?, item.amax)?;
        let tensor = if item.part == Nvfp4Part::Codes { made.codes } else { made.scales };
        Ok(tensor.as_bytes().to_vec())
    }
}

/// The matrix in ModelOpt's NVFP4 under a given amax.
pub(super) fn cast(weight: &Tensor<Cpu>, amax: f32) -> Result<Nvfp4Tensors<Cpu>> {
    let cpu = Cpu::new();
    let matrix = Matrix::new(weight.view())?;
    let mut made = Nvfp4Tensors::empty(&cpu, FORMAT, matrix.dims(), Direction::Rows)?;
    made.amax.view_mut().into_slice::<f32>()?.fill(amax);
    cpu.quantize_cast_only(Quantize { format: FORMAT, matrix, rows: Some(made.view_mut()), columns: None })?;
    Ok(made)
}
