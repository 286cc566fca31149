//! A matrix to quantize: any two strides over a tensor's elements.

use super::format::Direction;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorRef;

/// A matrix within a tensor of F32, BF16 or F16. Every element that it names lies in the tensor.
#[derive(Debug)]
pub struct Matrix<'a, D: Device> {
    base: TensorRef<'a, D>,
    layout: Layout,
}

impl<D: Device> Clone for Matrix<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for Matrix<'_, D> {}

/// Place of a matrix's elements: element (i, j) is number `offset + i·strides[0] + j·strides[1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Number of the first element.
    pub offset: usize,
    /// Rows and columns.
    pub dims: [usize; 2],
    /// Elements from one row to the next and from one column to the next.
    pub strides: [usize; 2],
}

impl<'a, D: Device> Matrix<'a, D> {
    /// A whole tensor; all dimensions but the last together are the rows.
    ///
    /// # Errors
    /// Fewer than two dimensions, or another element type.
    pub fn new(base: TensorRef<'a, D>) -> Result<Self> {
        let [leading @ .., columns] = base.dims() else {
            return Err(Error::invalid("Matrix::new", "tensor", "at least two dimensions", "a scalar"));
        };
        if leading.is_empty() {
            return Err(Error::invalid("Matrix::new", "tensor", "at least two dimensions", format!("[{columns}]")));
        }
        let dims = [leading.iter().product(), *columns];
        Self::strided(base, Layout { offset: 0, dims, strides: [*columns, 1] })
    }

    /// Part of a tensor, or its transpose, or any other strides.
    ///
    /// # Errors
    /// A layout that leaves the tensor, or that names more elements than it has, one many times; another element type.
    pub fn strided(base: TensorRef<'a, D>, layout: Layout) -> Result<Self> {
        const CALL: &str = "Matrix::strided";
        if !matches!(base.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid(CALL, "tensor", "f32, bf16 or f16", base.dtype()));
        }
        let Layout { offset, dims, strides } = layout;
        let last = |axis: usize| dims[axis].saturating_sub(1).checked_mul(strides[axis]);
        let end = || last(0)?.checked_add(last(1)?)?.checked_add(offset);
        let empty = dims.contains(&0);
        // Sizes are multiplied later, in bytes and with padding. Work and scratch are for as many elements as a matrix
        // names: a stride of 0 must not name more than there is memory for.
        let count = dims[0].max(1).checked_mul(dims[1].max(1)).filter(|c| *c <= isize::MAX as usize / 64);
        let within = || end().is_some_and(|end| end < base.count()) && count.is_some_and(|c| c <= base.count());
        if count.is_none() || !(empty || within()) {
            let expected = format!("elements within the tensor's {}", base.count());
            return Err(Error::invalid(CALL, "layout", expected, format!("{layout:?}")));
        }
        Ok(Self { base, layout })
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        let Layout { offset, dims: [rows, columns], strides: [row, column] } = self.layout;
        Self { layout: Layout { offset, dims: [columns, rows], strides: [column, row] }, ..self }
    }

    /// The matrix for a row-wise form, its transpose for a column-wise one.
    pub fn towards(self, direction: Direction) -> Self {
        match direction {
            Direction::Rows => self,
            Direction::Columns => self.transposed(),
        }
    }

    /// Shorter borrow.
    pub fn borrow(&self) -> Matrix<'_, D> {
        Matrix { base: self.base.borrow(), layout: self.layout }
    }

    /// The tensor.
    pub fn base(&self) -> TensorRef<'a, D> {
        self.base
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.base.dtype()
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        self.layout.dims
    }

    /// Where elements lie.
    pub fn layout(&self) -> Layout {
        self.layout
    }
}
