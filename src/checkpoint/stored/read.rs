//! What a stored tensor holds: rows of it as F32 or as they are, its codes and its scales.

use std::ops::Range;

use safetensors::Dtype;

use super::{Form, Stored};
use crate::dtype::DType;
use crate::error::{CheckpointError, CheckpointResult};
use crate::quant::{E4M3, decode_fp4, e8m0};

/// Rows that were read.
#[derive(Debug)]
pub(in crate::checkpoint) enum Chunk<'s> {
    /// As stored.
    Plain(DType, &'s [u8]),
    /// De-quantized.
    F32(&'s [f32]),
}

/// Memory for one read.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct Scratch {
    /// Eight-byte units, so that every element type is aligned.
    raw: Vec<u64>,
    scale_raw: Vec<u8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

impl Stored<'_> {
    /// Fills `out` with a plain tensor's bytes from byte `offset`.
    pub fn read_plain(&self, offset: u64, out: &mut [u8]) -> CheckpointResult<()> {
        self.files.read(&self.data.0, self.data.1, offset, out)
    }

    /// Reads `rows` of `columns` elements each, counted over all leading dimensions of what is on disk.
    ///
    /// With `flipped`, rows and columns are those on disk. Chunks of tensors packed by rows begin at an even row.
    pub fn read<'s>(
        &self,
        rows: Range<usize>,
        columns: usize,
        scratch: &'s mut Scratch,
    ) -> CheckpointResult<Chunk<'s>> {
        let count = rows.len() * columns;
        if count == 0 {
            return Ok(Chunk::F32(&[]));
        }
        match self.form {
            Form::Plain(dtype) => {
                let bytes = fill(&mut scratch.raw, count * dtype.size());
                self.files.read(&self.data.0, self.data.1, (rows.start * columns * dtype.size()) as u64, bytes)?;
                return Ok(Chunk::Plain(dtype, bytes));
            }
            Form::Fp8Block | Form::Fp8Scaled => self.read_fp8(rows, columns, scratch)?,
            Form::Nvfp4ModelOpt | Form::Nvfp4CompressedTensors if self.packed_rows => {
                self.read_packed_rows(rows, columns, scratch)?;
            }
            Form::Mxfp4 | Form::Mxfp4CompressedTensors | Form::Nvfp4ModelOpt | Form::Nvfp4CompressedTensors => {
                let block = self.block[1];
                self.read_scales(rows.start * columns / block, count / block, scratch)?;
                let codes = fill(&mut scratch.raw, count / 2);
                self.files.read(&self.data.0, self.data.1, (rows.start * columns / 2) as u64, codes)?;
                scratch.values.resize(count, 0.0);
                decode_fp4(codes, &scratch.scales, block, &mut scratch.values);
            }
        }
        Ok(Chunk::F32(&scratch.values[..count]))
    }

    fn read_fp8(&self, rows: Range<usize>, columns: usize, scratch: &mut Scratch) -> CheckpointResult<()> {
        let [block_rows, block_columns] = self.block;
        // Scales restart with each slice of the leading dimensions.
        let slice_rows = self.dims[self.dims.len() - 2].max(1);
        let scale_rows = slice_rows.div_ceil(block_rows);
        let scale_row = |row: usize| match block_rows {
            usize::MAX => 0,
            _ => row / slice_rows * scale_rows + row % slice_rows / block_rows,
        };
        let scale_columns = columns.div_ceil(block_columns);
        let (first, last) = (scale_row(rows.start), scale_row(rows.end - 1));
        self.read_scales(first * scale_columns, (last - first + 1) * scale_columns, scratch)?;
        let codes = fill(&mut scratch.raw, rows.len() * columns);
        self.files.read(&self.data.0, self.data.1, (rows.start * columns) as u64, codes)?;
        scratch.values.resize(rows.len() * columns, 0.0);
        for ((row, codes), values) in
            rows.zip(codes.chunks_exact(columns)).zip(scratch.values.chunks_exact_mut(columns))
        {
            let scales = &scratch.scales[(scale_row(row) - first) * scale_columns..][..scale_columns];
            for (block, scale) in scales.iter().enumerate() {
                let from = block * block_columns.min(columns);
                let to = from.saturating_add(block_columns).min(columns);
                for (value, code) in values[from..to].iter_mut().zip(&codes[from..to]) {
                    *value = E4M3[*code as usize] * scale;
                }
            }
        }
        Ok(())
    }

    fn read_packed_rows(&self, rows: Range<usize>, columns: usize, scratch: &mut Scratch) -> CheckpointResult<()> {
        let block = self.block[0];
        let (first, last) = (rows.start / block, rows.end.div_ceil(block));
        self.read_scales(first * columns, (last - first) * columns, scratch)?;
        let pairs = rows.start / 2..rows.end.div_ceil(2);
        let codes = fill(&mut scratch.raw, pairs.len() * columns);
        self.files.read(&self.data.0, self.data.1, (pairs.start * columns) as u64, codes)?;
        scratch.values.resize(rows.len() * columns, 0.0);
        for (row, values) in rows.zip(scratch.values.chunks_exact_mut(columns)) {
            let codes = &codes[(row / 2 - pairs.start) * columns..][..columns];
            let scales = &scratch.scales[(row / block - first) * columns..][..columns];
            for ((value, code), scale) in values.iter_mut().zip(codes).zip(scales) {
                let code = if row % 2 == 0 { code & 15 } else { code >> 4 };
                *value = crate::quant::E2M1[code as usize] * scale;
            }
        }
        Ok(())
    }

    /// `count` scales from the `first` on, the second-level scale applied.
    fn read_scales(&self, first: usize, count: usize, scratch: &mut Scratch) -> CheckpointResult<()> {
        let Some((name, entry)) = &self.scales else { return Ok(()) };
        let size = entry.dtype.bitsize() / 8;
        scratch.scale_raw.resize(count * size, 0);
        self.files.read(name, entry, (first * size) as u64, &mut scratch.scale_raw)?;
        let bytes = scratch.scale_raw.as_slice();
        let global = self.read_global()?;
        scratch.scales.clear();
        match entry.dtype {
            Dtype::F32 => scratch.scales.extend(bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>)),
            Dtype::BF16 => {
                let widen = |b| bytemuck::pod_read_unaligned::<half::bf16>(b).to_f32();
                scratch.scales.extend(bytes.chunks_exact(2).map(widen));
            }
            Dtype::F16 => {
                let widen = |b| bytemuck::pod_read_unaligned::<half::f16>(b).to_f32();
                scratch.scales.extend(bytes.chunks_exact(2).map(widen));
            }
            Dtype::F8_E4M3 => {
                let divide = self.form == Form::Nvfp4CompressedTensors;
                let scale = |b: &u8| match divide {
                    true => E4M3[*b as usize] / global,
                    false => E4M3[*b as usize] * global,
                };
                scratch.scales.extend(bytes.iter().map(scale));
            }
            _ => scratch.scales.extend(bytes.iter().map(|b| e8m0(*b))),
        }
        self.check_scales(first, scratch.scales.iter().copied())
    }

    /// Refuses block scales, from number `first` on, that no quantizer writes: they would make other weights without a word.
    fn check_scales(&self, first: usize, scales: impl Iterator<Item = f32>) -> CheckpointResult<()> {
        let fits = |scale: f32| scale.is_finite() && scale >= 0.0;
        let Some((i, found)) = scales.enumerate().find(|(_, scale)| !fits(*scale)) else { return Ok(()) };
        let Some((name, entry)) = &self.scales else { return Ok(()) };
        Err(CheckpointError::Tensor {
            path: self.files.path_of(entry),
            tensor: name.clone(),
            expected: "scales that are finite and not negative".into(),
            found: format!("{found} at element {}", first + i),
        })
    }

    /// Fills `codes` with bytes of the codes from `offset` on.
    pub fn read_codes(&self, offset: usize, codes: &mut [u8]) -> CheckpointResult<()> {
        self.files.read(&self.data.0, self.data.1, offset as u64, codes)
    }

    /// Fills `scales` with block scales from number `first` on, as bytes where they are bytes, else as F32; without the
    /// second-level scale.
    pub fn read_block_scales(&self, first: usize, scales: &mut [u8], scratch: &mut Scratch) -> CheckpointResult<()> {
        if self.form == Form::Fp8Block {
            self.read_scales(first, scales.len() / 4, scratch)?;
            scales.copy_from_slice(bytemuck::cast_slice(&scratch.scales));
            return Ok(());
        }
        let Some((name, entry)) = &self.scales else { return Ok(()) };
        self.files.read(name, entry, first as u64, scales)?;
        let value = |b: &u8| if entry.dtype == Dtype::F8_E4M3 { E4M3[*b as usize] } else { e8m0(*b) };
        self.check_scales(first, scales.iter().map(value))
    }

    /// The second-level scale as a factor; `None` where the form has none.
    pub fn factor(&self) -> CheckpointResult<Option<f32>> {
        let global = self.read_global()?;
        Ok(match self.form {
            Form::Nvfp4ModelOpt => Some(global),
            Form::Nvfp4CompressedTensors => Some(1.0 / global),
            _ => None,
        })
    }

    fn read_global(&self) -> CheckpointResult<f32> {
        let Some((name, entry)) = &self.global else { return Ok(1.0) };
        let mut bytes = [0; 4];
        self.files.read(name, entry, 0, &mut bytes)?;
        let found = f32::from_le_bytes(bytes);
        // Of compressed-tensors a divisor. A matrix of zeros has a factor of 0 in the other form.
        let divides = self.form == Form::Nvfp4CompressedTensors;
        // The reciprocal of a number below 2^-128 is infinite.
        let factor = if divides { 1.0 / found } else { found };
        if found.is_finite() && found >= 0.0 && factor.is_finite() {
            return Ok(found);
        }
        let expected = if divides { "a number above 0 with a finite reciprocal" } else { "a finite number from 0 on" };
        let (path, found) = (self.files.path_of(entry), found.to_string());
        Err(CheckpointError::Tensor { path, tensor: name.clone(), expected: expected.into(), found })
    }
}

/// The first `bytes` bytes of a buffer, grown where it is smaller.
fn fill(raw: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    let units = bytes.div_ceil(8);
    if raw.len() < units {
        raw.resize(units, 0);
    }
    &mut bytemuck::cast_slice_mut(raw)[..bytes]
}
