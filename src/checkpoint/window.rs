//! Reads some rows of a matrix: those of a rank's shard.

use std::ops::Range;

use super::convert::RowPlacement;
use super::layout::{DiskMatrix, DiskRows};
use super::load::{CHUNK, MatrixLayout, read_matrix};
use super::stored::{Scratch, Stored};
use crate::dtype::DType;
use crate::error::Result;

/// Reads what a shard holds of a matrix, and returns its bytes. The shard's memory begins with row `own.start` of the
/// whole weight; the matrix's parameter begins at its row `first`. What the shard holds nothing of is not opened.
pub(super) fn read_window<'s>(
    find: &dyn Fn() -> Result<Stored<'s>>,
    part: &DiskMatrix,
    first: usize,
    own: Range<usize>,
    shard: &mut [u8],
    dtype: DType,
    scratch: &mut Scratch,
) -> Result<usize> {
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
    let to = &mut shard[(wanted.start - own.start) * row..(wanted.end - own.start) * row];
    let from = wanted.start - filled.start..wanted.end - filled.start;
    let in_order = matches!(part.rows, DiskRows::From(_)) && part.transposed == stored.flipped;
    // Tensors packed two rows a byte are read from even rows on.
    if in_order && from.start.is_multiple_of(2) {
        let step = (CHUNK / 4 / part.inn.max(1) / 2 * 2).max(2);
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
    read_matrix(&stored, &MatrixLayout::of(part), &mut whole, dtype, scratch)?;
    to.copy_from_slice(&whole[(start + from.start) * row..(start + from.end) * row]);
    Ok(to.len())
}
