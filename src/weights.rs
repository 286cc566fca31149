//! Where expert weights come from: a tensor at hand, one that is [gathered](crate::etp) just before use, or later one
//! that is de-quantised then.

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
    held: Held<'a, D>,
    /// Work that must be done before the weight is read; `None` where it is readable now.
    pub ready: Option<D::Event>,
}

#[derive(Debug)]
enum Held<'a, D: Device> {
    Borrowed(TensorRef<'a, D>),
    Leased(Box<dyn Lease<D> + 'a>),
}

/// A weight in memory that is given back when this is dropped.
pub trait Lease<D: Device>: Debug {
    /// The weight.
    ///
    /// # Errors
    /// The memory no longer holds what it was lent for.
    fn tensor(&self) -> Result<TensorRef<'_, D>>;
}

impl<'a, D: Device> WeightGuard<'a, D> {
    /// A weight that outlives its guard.
    pub fn borrowed(tensor: TensorRef<'a, D>, ready: Option<D::Event>) -> Self {
        Self { held: Held::Borrowed(tensor), ready }
    }

    /// A weight that lives as long as its guard.
    pub fn leased(lease: Box<dyn Lease<D> + 'a>, ready: Option<D::Event>) -> Self {
        Self { held: Held::Leased(lease), ready }
    }

    /// The weight.
    ///
    /// # Errors
    /// As [`Lease::tensor`].
    pub fn tensor(&self) -> Result<TensorRef<'_, D>> {
        match &self.held {
            Held::Borrowed(tensor) => Ok(tensor.borrow()),
            Held::Leased(lease) => lease.tensor(),
        }
    }
}

impl<D: Device> WeightSource<D> for TensorRef<'_, D> {
    fn dims(&self) -> &[usize] {
        TensorRef::dims(self)
    }

    fn acquire(&self, _stream: &D::Stream) -> Result<WeightGuard<'_, D>> {
        Ok(WeightGuard::borrowed(self.borrow(), None))
    }
}
