//! Where expert weights come from: a tensor at hand, one that is [gathered](crate::etp) just before use, or one that
//! stays [quantized](crate::quant::Quantized) and is de-quantized as it is multiplied.

use std::fmt::Debug;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{Quantized, QuantizedRef};
use crate::tensor::TensorRef;

/// A stack of expert weights, as a product takes it.
#[derive(Debug)]
pub enum Weight<'a, D: Device> {
    /// Of the rows' own type.
    Dense(TensorRef<'a, D>),
    /// De-quantized as it is read.
    Quantized(QuantizedRef<'a, D>),
}

impl<D: Device> Clone for Weight<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for Weight<'_, D> {}

impl<'a, D: Device> From<TensorRef<'a, D>> for Weight<'a, D> {
    fn from(tensor: TensorRef<'a, D>) -> Self {
        Weight::Dense(tensor)
    }
}

impl<'a, D: Device> From<QuantizedRef<'a, D>> for Weight<'a, D> {
    fn from(weight: QuantizedRef<'a, D>) -> Self {
        Weight::Quantized(weight)
    }
}

impl<D: Device> Weight<'_, D> {
    /// Sizes, as numbers.
    pub fn dims(&self) -> &[usize] {
        match self {
            Weight::Dense(tensor) => tensor.dims(),
            Weight::Quantized(weight) => &weight.dims,
        }
    }

    /// Shorter borrow.
    pub fn borrow(&self) -> Weight<'_, D> {
        match self {
            Weight::Dense(tensor) => Weight::Dense(tensor.borrow()),
            Weight::Quantized(weight) => Weight::Quantized(weight.borrow()),
        }
    }
}

/// A weight that becomes readable when it is acquired, and may vanish again when the guard is dropped.
pub trait WeightSource<D: Device>: Debug {
    /// Sizes of the whole weight.
    fn dims(&self) -> &[usize];
    /// Element type, where that must be the tokens': a layer refuses another before any work. `None`: it is
    /// de-quantized to any, or known only when acquired.
    fn dtype(&self) -> Option<DType> {
        None
    }
    /// Makes the weight readable for work enqueued after the guard's event.
    ///
    /// # Errors
    /// Whatever gathering or de-quantizing can meet.
    fn acquire(&self) -> Result<WeightGuard<'_, D>>;
    /// True of a weight that has no gradient.
    fn frozen(&self) -> bool {
        false
    }
    /// True of a weight that is gathered as it is acquired: rows are not kept waiting for it.
    fn is_gathered(&self) -> bool {
        false
    }
}

/// A readable weight.
#[derive(Debug)]
#[must_use = "the weight is readable only while its guard lives"]
pub struct WeightGuard<'a, D: Device> {
    weight: GuardedWeight<'a, D>,
    /// Work that must be done before the weight is read; `None` where it is readable now.
    pub ready: Option<D::Event>,
}

#[derive(Debug)]
enum GuardedWeight<'a, D: Device> {
    Borrowed(Weight<'a, D>),
    Acquired(Box<dyn AcquiredWeight<D> + 'a>),
}

/// A weight in memory that is given back when this is dropped.
pub trait AcquiredWeight<D: Device>: Debug {
    /// The weight.
    ///
    /// # Errors
    /// The memory no longer holds the weight that it was given for.
    fn tensor(&self) -> Result<TensorRef<'_, D>>;

    /// The same of one that may be quantized.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    fn weight(&self) -> Result<Weight<'_, D>> {
        self.tensor().map(Weight::Dense)
    }
}

impl<'a, D: Device> WeightGuard<'a, D> {
    /// A weight that outlives its guard.
    pub fn borrowed(weight: impl Into<Weight<'a, D>>, ready: Option<D::Event>) -> Self {
        Self { weight: GuardedWeight::Borrowed(weight.into()), ready }
    }

    /// A weight that lives as long as its guard.
    pub fn acquired(acquired: Box<dyn AcquiredWeight<D> + 'a>, ready: Option<D::Event>) -> Self {
        Self { weight: GuardedWeight::Acquired(acquired), ready }
    }

    /// The weight.
    ///
    /// # Errors
    /// As [`AcquiredWeight::tensor`].
    pub fn weight(&self) -> Result<Weight<'_, D>> {
        match &self.weight {
            GuardedWeight::Borrowed(weight) => Ok(weight.borrow()),
            GuardedWeight::Acquired(acquired) => acquired.weight(),
        }
    }

    /// The weight, where it is not quantized.
    ///
    /// # Errors
    /// As [`AcquiredWeight::tensor`]; a quantized weight.
    pub fn tensor(&self) -> Result<TensorRef<'_, D>> {
        match &self.weight {
            GuardedWeight::Borrowed(Weight::Dense(tensor)) => Ok(tensor.borrow()),
            GuardedWeight::Borrowed(Weight::Quantized(weight)) => {
                let found = format!("one in {:?}", weight.format);
                Err(Error::invalid("WeightGuard::tensor", "weight", "one of floating type", found))
            }
            GuardedWeight::Acquired(acquired) => acquired.tensor(),
        }
    }
}

impl<D: Device> WeightSource<D> for TensorRef<'_, D> {
    fn dims(&self) -> &[usize] {
        TensorRef::dims(self)
    }

    fn dtype(&self) -> Option<DType> {
        Some(TensorRef::dtype(self))
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        Ok(WeightGuard::borrowed(self.borrow(), None))
    }
}

impl<D: Device> WeightSource<D> for QuantizedRef<'_, D> {
    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        Ok(WeightGuard::borrowed(self.borrow(), None))
    }

    fn frozen(&self) -> bool {
        true
    }
}

impl<D: Device> WeightSource<D> for Quantized<D> {
    fn dims(&self) -> &[usize] {
        self.dims()
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        Ok(WeightGuard::borrowed(self.view(), None))
    }

    fn frozen(&self) -> bool {
        true
    }
}
