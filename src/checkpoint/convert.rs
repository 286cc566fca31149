//! Elements from disk into a parameter, and back: type, orientation and order of rows.

use half::{bf16, f16};

use super::layout::DiskRows;
use super::stored::Chunk;
use crate::cpu::Element;
use crate::dtype::DType;

/// Floating types with their conversions; `f64` goes through `f32` but to itself.
trait FloatElement: Element {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

macro_rules! value {
    ($($rust:ty, $widen:expr, $narrow:expr);*) => {$(
        impl FloatElement for $rust {
            fn widen(self) -> f32 {
                $widen(self)
            }
            fn narrow(value: f32) -> Self {
                $narrow(value)
            }
        }
    )*};
}
value!(f64, |v| v as f32, f64::from; f32, |v| v, |v| v; f16, f16::to_f32, f16::from_f32; bf16, bf16::to_f32, bf16::from_f32);

/// Where some rows on disk go in a matrix in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowPlacement {
    /// The first row read, counted from the matrix's first on disk.
    pub first: usize,
    /// Elements of a row on disk.
    pub columns: usize,
    /// Rows on disk are columns in memory.
    pub transposed: bool,
    /// Order of the rows in memory.
    pub rows: DiskRows,
    /// Elements of a row in memory.
    pub inn: usize,
}

impl RowPlacement {
    /// Calls `visit(disk index, memory index, length)` for runs that are consecutive on both sides.
    fn runs(&self, count: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let rows = count.checked_div(self.columns).unwrap_or(0);
        if !self.transposed {
            for row in 0..rows {
                visit(row * self.columns, self.rows.map(self.first + row) * self.inn, self.columns);
            }
            return;
        }
        for out in 0..self.columns {
            let to = self.rows.map(out) * self.inn + self.first;
            for row in 0..rows {
                visit(row * self.columns + out, to + row, 1);
            }
        }
    }

    /// Writes rows that were read into a matrix of `dtype`, a floating type.
    pub fn store(&self, chunk: &Chunk<'_>, matrix: &mut [u8], dtype: DType) {
        match chunk {
            Chunk::F32(values) => self.store_as(values, matrix, dtype),
            Chunk::Plain(DType::F64, bytes) => self.store_as::<f64>(bytemuck::cast_slice(bytes), matrix, dtype),
            Chunk::Plain(DType::F32, bytes) => self.store_as::<f32>(bytemuck::cast_slice(bytes), matrix, dtype),
            Chunk::Plain(DType::F16, bytes) => self.store_as::<f16>(bytemuck::cast_slice(bytes), matrix, dtype),
            Chunk::Plain(DType::BF16, bytes) => self.store_as::<bf16>(bytemuck::cast_slice(bytes), matrix, dtype),
            // Callers let integers through only where nothing is converted.
            Chunk::Plain(..) => debug_assert!(false, "an integer tensor is not a parameter"),
        }
    }

    fn store_as<S: FloatElement>(&self, from: &[S], matrix: &mut [u8], dtype: DType) {
        match dtype {
            DType::F64 => self.convert::<S, f64>(from, bytemuck::cast_slice_mut(matrix)),
            DType::F32 => self.convert::<S, f32>(from, bytemuck::cast_slice_mut(matrix)),
            DType::F16 => self.convert::<S, f16>(from, bytemuck::cast_slice_mut(matrix)),
            DType::BF16 => self.convert::<S, bf16>(from, bytemuck::cast_slice_mut(matrix)),
            DType::I64 | DType::I32 | DType::U8 => debug_assert!(false, "an integer tensor is not a parameter"),
        }
    }

    fn convert<S: FloatElement, D: FloatElement>(&self, from: &[S], to: &mut [D]) {
        let one = |v: S| match S::DTYPE == D::DTYPE {
            // Keeps the bits, of NaNs too.
            true => bytemuck::cast::<S, D>(v),
            false => D::narrow(v.widen()),
        };
        self.runs(from.len(), |disk, memory, len| {
            for (to, from) in to[memory..memory + len].iter_mut().zip(&from[disk..disk + len]) {
                *to = one(*from);
            }
        });
    }

    /// The inverse: a matrix's elements of `size` bytes to their order on disk.
    pub fn extract(&self, matrix: &[u8], disk: &mut [u8], size: usize) {
        self.runs(disk.len() / size, |to, from, len| {
            disk[to * size..(to + len) * size].copy_from_slice(&matrix[from * size..(from + len) * size]);
        });
    }
}
