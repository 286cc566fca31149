//! Reads a stored matrix: whole, or those of its rows that a rank's shard holds.

use std::ops::Range;

use super::convert::RowPlacement;
use super::layout::{DiskMatrix, DiskRows};
use super::stored::{Form, Scratch, Stored};
use crate::dtype::DType;
use crate::error::Result;

/// Bytes of one read, unless a row is longer: large enough to be fast, small beside any expert.
const READ_BYTES: usize = 1 << 20;

/// Which matrix of a stored tensor is read, and how it lies there and in its place: fields of [`DiskMatrix`].
#[derive(Debug, Clone, Copy)]
pub(super) struct MatrixLayout {
    pub slice: usize,
    pub out: usize,
    pub inn: usize,
    pub transposed: bool,
    pub rows: DiskRows,
}

impl MatrixLayout {
    pub fn of(part: &DiskMatrix) -> Self {
        let DiskMatrix { slice, out, inn, transposed, rows, .. } = *part;
        Self { slice, out, inn, transposed, rows }
    }
}

/// Reads one matrix into its place, piece by piece.
pub(super) fn read_matrix(
    stored: &Stored<'_>,
    part: &MatrixLayout,
    matrix: &mut [u8],
    dtype: DType,
    scratch: &mut Scratch,
) -> Result<()> {
    let transposed = part.transposed != stored.flipped;
    let (rows, columns) = if transposed { (part.inn, part.out) } else { (part.out, part.inn) };
    let origin = part.slice * rows;
    if let (Form::Plain(found), false, DiskRows::From(first)) = (stored.form, transposed, part.rows)
        && found == dtype
    {
        let row = columns * dtype.size();
        let bytes = &mut matrix[first * row..(first + rows) * row];
        return Ok(stored.read_plain((origin * row) as u64, bytes)?);
    }
    // Even, for tensors whose codes are packed two rows a byte.
    let step = (READ_BYTES / 4 / columns.max(1) / 2 * 2).max(2);
    for first in (0..rows).step_by(step) {
        let last = (first + step).min(rows);
        let chunk = stored.read(origin + first..origin + last, columns, scratch)?;
        let place = RowPlacement { first, columns, transposed, rows: part.rows, inn: part.inn };
        place.store(&chunk, matrix, dtype);
    }
    Ok(())
}

/// A shard's memory, as a matrix is read into it.
#[derive(Debug)]
pub(super) struct ShardMemory<'a> {
    /// Row of the whole weight at which the matrix's parameter begins.
    pub first: usize,
    /// Rows of the whole weight that the memory holds.
    pub rows: Range<usize>,
    pub bytes: &'a mut [u8],
    pub dtype: DType,
}

/// Reads what a shard holds of a matrix, and returns its bytes. What the shard holds nothing of is not opened.
pub(super) fn read_window<'s>(
    find: &dyn Fn() -> Result<Stored<'s>>,
    part: &MatrixLayout,
    shard: ShardMemory<'_>,
    scratch: &mut Scratch,
) -> Result<usize> {
    let ShardMemory { first, rows: own, bytes, dtype } = shard;
    let (start, rows) = match part.rows {
        DiskRows::From(start) => (start, part.out),
        DiskRows::Alternate(half) => (0, 2 * half),
    };
    // Rows of the whole weight that this matrix fills, and those of them that are wanted.
    let filled = first + start..first + start + rows;
    let wanted = filled.start.max(own.start)..filled.end.min(own.end);
    if wanted.is_empty() {
        return Ok(0);
    }
    let stored = find()?;
    let row = part.inn * dtype.size();
    let to = &mut bytes[(wanted.start - own.start) * row..(wanted.end - own.start) * row];
    let from = wanted.start - filled.start..wanted.end - filled.start;
    let in_order = matches!(part.rows, DiskRows::From(_)) && part.transposed == stored.flipped;
    // Tensors packed two rows a byte are read from even rows on.
    if in_order && from.start.is_multiple_of(2) {
        let step = (READ_BYTES / 4 / part.inn.max(1) / 2 * 2).max(2);
        for at in from.clone().step_by(step) {
            let last = (at + step).min(from.end);
            let origin = part.slice * part.out;
            let chunk = stored.read(origin + at..origin + last, part.inn, scratch)?;
            let place = RowPlacement {
                first: at - from.start,
                columns: part.inn,
                transposed: false,
                rows: DiskRows::From(0),
                inn: part.inn,
            };
            place.store(&chunk, to, dtype);
        }
        return Ok(to.len());
    }
    let mut whole = vec![0; (start + rows) * row];
    read_matrix(&stored, part, &mut whole, dtype, scratch)?;
    to.copy_from_slice(&whole[(start + from.start) * row..(start + from.end) * row]);
    Ok(to.len())
}
