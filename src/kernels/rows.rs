//! Rows that move within a device: gathered by a map, joined, taken apart, and summed.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use crate::plan::Origin;

/// Copies rows: `out[i] = source[map[i]]`; a negative entry writes zeros.
#[derive(Debug)]
pub struct GatherRows<'a, D: Device> {
    /// Any dtype.
    pub source: TensorRef<'a, D>,
    /// `I32 [n]`.
    pub map: TensorRef<'a, D>,
    /// Whose rows these are, for errors.
    pub origin: Origin,
    /// `[n, …]`, rows of the source's size.
    pub out: TensorMut<'a, D>,
}

/// Rows of two tensors behind each other: `out[i] = left[i] ++ right[i] ++ zeros`. All `U8 [n, ·]`.
#[derive(Debug)]
pub struct ConcatRows<'a, D: Device> {
    /// First part of each row.
    pub left: TensorRef<'a, D>,
    /// Second part of each row.
    pub right: Option<TensorRef<'a, D>>,
    /// Rows of at least both their bytes.
    pub out: TensorMut<'a, D>,
}

/// [`ConcatRows`] taken apart.
#[derive(Debug)]
pub struct SplitRows<'a, D: Device> {
    /// The joined rows.
    pub source: TensorRef<'a, D>,
    /// As in [`ConcatRows`].
    pub left: TensorMut<'a, D>,
    /// As in [`ConcatRows`].
    pub right: Option<TensorMut<'a, D>>,
}

/// Bytes of a row of [`ConcatRows`] and [`SplitRows`], on the left, on the right and in all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConcatLayout {
    pub left: usize,
    pub right: usize,
    pub whole: usize,
}

impl ConcatLayout {
    /// Checks both sides.
    fn of<D: Device>(
        call: &'static str,
        name: &str,
        whole: TensorRef<'_, D>,
        left: TensorRef<'_, D>,
        right: Option<TensorRef<'_, D>>,
    ) -> Result<Self> {
        let rows = whole.rows();
        let all = [
            (name, Some(whole.borrow())),
            ("left", Some(left.borrow())),
            ("right", right.as_ref().map(TensorRef::borrow)),
        ];
        for (name, t) in all {
            let Some(t) = t else { continue };
            Error::check_dtype(call, name, DType::U8, t.dtype())?;
            Error::check_shape(call, name, &[rows, t.row_bytes()], t.dims())?;
        }
        let right = right.map_or(0, |t| t.row_bytes());
        let found = Self { left: left.row_bytes(), right, whole: whole.row_bytes() };
        match found.left + found.right <= found.whole {
            true => Ok(found),
            false => {
                let expected = format!("rows of at least {} + {} bytes", found.left, found.right);
                Err(Error::invalid(call, format!("tensor {name}"), expected, found.whole))
            }
        }
    }
}

impl<D: Device> ConcatRows<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<ConcatLayout> {
        ConcatLayout::of(call, "out", self.out.as_ref(), self.left.borrow(), self.right.as_ref().map(TensorRef::borrow))
    }
}

impl<D: Device> SplitRows<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<ConcatLayout> {
        ConcatLayout::of(
            call,
            "source",
            self.source.borrow(),
            self.left.as_ref(),
            self.right.as_ref().map(TensorMut::as_ref),
        )
    }
}

/// Adds rows: `out[t] = Σ_k source[map[t, k]]` in the accumulator type, in the order of k, rounded once; negative
/// entries count zero.
#[derive(Debug)]
pub struct ReduceRows<'a, D: Device> {
    /// `[·, H]`.
    pub source: TensorRef<'a, D>,
    /// `I32 [T, K]`.
    pub map: TensorRef<'a, D>,
    /// Whose rows these are, for errors.
    pub origin: Origin,
    /// `[T, H]`.
    pub out: TensorMut<'a, D>,
}
