//! Where the rows of a rank's experts lie.

use std::sync::OnceLock;

use crate::device::Device;
use crate::tensor::{Tensor, TensorRef};

use super::Origin;

/// Expert-major layout of a rank: where each local expert's rows lie.
///
/// Expert j owns slots `offsets[j] .. offsets[j] + counts[j]`; the slots after them up to the next offset are
/// padding. Padding is never computed on and never read.
#[derive(Debug)]
pub struct Segments<D: Device> {
    /// First slot of each local expert, `I64 [L]`.
    pub offsets: Tensor<D>,
    /// Filled slots of each local expert, `I64 [L]`.
    pub counts: Tensor<D>,
    /// Rows N of buffers in this layout.
    pub rows: usize,
    /// The rank and layer that it is of, for errors.
    pub origin: Origin,
    /// Kernels go by it unchecked, so none but the device gives one.
    pub(crate) tiles: OnceLock<Tensor<D>>,
}

impl<D: Device> Segments<D> {
    /// A layout of one's own; what does not fit is an error of the call that takes it.
    pub fn new(offsets: Tensor<D>, counts: Tensor<D>, rows: usize) -> Self {
        Self { offsets, counts, rows, origin: Origin::default(), tiles: OnceLock::new() }
    }

    /// The same of this rank and layer.
    pub fn with_origin(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    /// The device's own list of row tiles, where it has made one with the layout or since.
    pub fn tiles(&self) -> Option<TensorRef<'_, D>> {
        self.tiles.get().map(Tensor::view)
    }
}
