//! Where expert weights come from: a tensor at hand, or later one that is gathered or de-quantised just before use.

use std::fmt::Debug;

use crate::device::Device;
use crate::error::Result;
use crate::tensor::TensorRef;

/// A weight that becomes readable when it is acquired, and may vanish again when the guard is dropped.
pub trait WeightSource<D: Device>: Debug {
    /// Sizes of the whole weight.
    fn dims(&self) -> &[usize];
    /// Makes the weight readable for work enqueued on `stream` after the guard's event.
    ///
    /// # Errors
    /// Whatever gathering or de-quantising can meet.
    fn acquire(&self, stream: &D::Stream) -> Result<WeightGuard<'_, D>>;
}

/// A readable weight.
#[derive(Debug)]
#[must_use = "the weight is readable only while its guard lives"]
pub struct WeightGuard<'a, D: Device> {
    /// The weight.
    pub tensor: TensorRef<'a, D>,
    /// Work that must be done before the weight is read; `None` where it is readable now.
    pub ready: Option<D::Event>,
}

impl<D: Device> WeightSource<D> for TensorRef<'_, D> {
    fn dims(&self) -> &[usize] {
        TensorRef::dims(self)
    }

    fn acquire(&self, _stream: &D::Stream) -> Result<WeightGuard<'_, D>> {
        Ok(WeightGuard { tensor: self.borrow(), ready: None })
    }
}
