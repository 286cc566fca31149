//! Dense row-major tensors over a [`Device`]: [`Tensor`] owns its memory, [`TensorRef`] and [`TensorMut`] borrow it,
//! usually from the host framework.

use std::fmt;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};

const MAX_DIMS: usize = 4;

/// Sizes of up to four dimensions, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    rank: usize,
}

impl Shape {
    /// Shape of up to four dimensions.
    ///
    /// # Errors
    /// More than four dimensions, or sizes whose product (zeros left out) does not fit the address space.
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_DIMS {
            return Err(Error::invalid("Shape::new", "dims", "at most 4 dimensions", dims.len()));
        }
        let mut count = 1usize;
        for &d in dims {
            // A zero must not hide sizes that overflow in products without it, such as a row's.
            count = count.checked_mul(d.max(1)).filter(|c| *c <= isize::MAX as usize / 8).ok_or_else(|| {
                Error::invalid(
                    "Shape::new",
                    "dims",
                    "an element count that fits the address space",
                    format!("{dims:?}"),
                )
            })?;
        }
        let mut own = [1; MAX_DIMS];
        own[..dims.len()].copy_from_slice(dims);
        Ok(Self { dims: own, rank: dims.len() })
    }

    /// The sizes.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Number of elements (1 for a scalar).
    pub fn count(&self) -> usize {
        self.dims().iter().product()
    }

    /// Size of the first dimension (1 for a scalar).
    pub fn rows(&self) -> usize {
        self.dims().first().copied().unwrap_or(1)
    }

    /// Elements behind one index of the first dimension.
    pub fn row_len(&self) -> usize {
        self.dims().iter().skip(1).product()
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// Owned tensor.
#[derive(Debug)]
pub struct Tensor<D: Device> {
    buffer: D::Buffer,
    dtype: DType,
    shape: Shape,
}

impl<D: Device> Tensor<D> {
    /// Allocates a tensor of unspecified content: whoever allocates writes every element or never reads it.
    ///
    /// # Errors
    /// As [`Shape::new`]; where there is no memory, or a driver's.
    pub fn empty(device: &D, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        let buffer = device.alloc(dtype, shape.count())?;
        Ok(Self { buffer, dtype, shape })
    }

    /// Allocates a tensor of zeros.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn zeros(device: &D, dtype: DType, dims: &[usize]) -> Result<Self> {
        let mut t = Self::empty(device, dtype, dims)?;
        device.zero(t.view_mut().data)?;
        Ok(t)
    }

    /// Takes over a buffer of the device.
    ///
    /// # Errors
    /// A buffer whose length is not the shape's.
    pub fn from_buffer(buffer: D::Buffer, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        check_len("Tensor::from_buffer", D::len(D::view(&buffer)), dtype, shape)?;
        Ok(Self { buffer, dtype, shape })
    }

    /// Gives the buffer back.
    pub fn into_buffer(self) -> D::Buffer {
        self.buffer
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// A shape of another element count.
    pub fn reshape(self, dims: &[usize]) -> Result<Self> {
        Self::from_buffer(self.buffer, self.dtype, dims)
    }

    /// Borrows the tensor.
    pub fn view(&self) -> TensorRef<'_, D> {
        TensorRef { data: D::view(&self.buffer), dtype: self.dtype, shape: self.shape }
    }

    /// Borrows the tensor exclusively.
    pub fn view_mut(&mut self) -> TensorMut<'_, D> {
        TensorMut { data: D::view_mut(&mut self.buffer), dtype: self.dtype, shape: self.shape }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.count() * self.dtype.size()
    }
}

/// Borrowed, read-only tensor.
pub struct TensorRef<'a, D: Device> {
    data: D::Ref<'a>,
    dtype: DType,
    shape: Shape,
}

impl<D: Device> Clone for TensorRef<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for TensorRef<'_, D> {}

impl<D: Device> fmt::Debug for TensorRef<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorRef<{} {:?}>", self.dtype, self.shape)
    }
}

impl<'a, D: Device> TensorRef<'a, D> {
    /// Gives bytes a dtype and a shape.
    ///
    /// # Errors
    /// A view whose length is not the shape's.
    pub fn new(data: D::Ref<'a>, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        check_len("TensorRef::new", D::len(data), dtype, shape)?;
        Ok(Self { data, dtype, shape })
    }

    /// Shorter borrow, to join views of different lifetimes in one description.
    pub fn borrow(&self) -> TensorRef<'_, D> {
        TensorRef { data: D::shorten(self.data), dtype: self.dtype, shape: self.shape }
    }

    /// The bytes.
    pub fn data(&self) -> D::Ref<'a> {
        self.data
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// Size of the first dimension.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// Bytes of one row (all dimensions but the first).
    pub fn row_bytes(&self) -> usize {
        self.shape.row_len() * self.dtype.size()
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// A shape of another element count.
    pub fn reshape(self, dims: &[usize]) -> Result<Self> {
        Self::new(self.data, self.dtype, dims)
    }
}

/// Borrowed, exclusive tensor.
pub struct TensorMut<'a, D: Device> {
    data: D::Mut<'a>,
    dtype: DType,
    shape: Shape,
}

impl<D: Device> fmt::Debug for TensorMut<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorMut<{} {:?}>", self.dtype, self.shape)
    }
}

impl<'a, D: Device> TensorMut<'a, D> {
    /// Gives bytes a dtype and a shape.
    ///
    /// # Errors
    /// A view whose length is not the shape's.
    pub fn new(data: D::Mut<'a>, dtype: DType, dims: &[usize]) -> Result<Self> {
        let shape = Shape::new(dims)?;
        check_len("TensorMut::new", D::len_mut(&data), dtype, shape)?;
        Ok(Self { data, dtype, shape })
    }

    /// The bytes.
    pub fn into_data(self) -> D::Mut<'a> {
        self.data
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// A shape of another element count.
    pub fn reshape(self, dims: &[usize]) -> Result<Self> {
        Self::new(self.data, self.dtype, dims)
    }

    /// Shorter exclusive borrow.
    pub fn reborrow(&mut self) -> TensorMut<'_, D> {
        TensorMut { data: D::reborrow(&mut self.data), dtype: self.dtype, shape: self.shape }
    }

    /// Shared borrow.
    pub fn as_ref(&self) -> TensorRef<'_, D> {
        TensorRef { data: D::downgrade(&self.data), dtype: self.dtype, shape: self.shape }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// Size of the first dimension.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// Bytes of one row (all dimensions but the first).
    pub fn row_bytes(&self) -> usize {
        self.shape.row_len() * self.dtype.size()
    }
}

/// The sizes of a matrix with at least one column.
pub(crate) fn dims2(call: &'static str, name: &str, dims: &[usize]) -> Result<[usize; 2]> {
    match dims {
        [rows, cols] if *cols > 0 => Ok([*rows, *cols]),
        _ => Err(Error::invalid(
            call,
            format!("tensor {name}"),
            "two dimensions, the second at least 1",
            format!("{dims:?}"),
        )),
    }
}

/// The sizes of a stack of matrices, none of them empty but the stack.
pub(crate) fn dims3(call: &'static str, name: &str, dims: &[usize]) -> Result<[usize; 3]> {
    match dims {
        [stack, rows, cols] if rows * cols > 0 => Ok([*stack, *rows, *cols]),
        _ => Err(Error::invalid(
            call,
            format!("tensor {name}"),
            "three dimensions, the last two at least 1",
            format!("{dims:?}"),
        )),
    }
}

fn check_len(call: &'static str, bytes: usize, dtype: DType, shape: Shape) -> Result<()> {
    let expected = shape.count() * dtype.size();
    if bytes == expected {
        return Ok(());
    }
    Err(Error::invalid(call, "data", format!("{expected} bytes for {dtype} {shape:?}"), format!("{bytes} bytes")))
}
