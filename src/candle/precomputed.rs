//! A value that was computed before its operation in candle's graph.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, Device, Error, Result, Shape, Storage, Tensor};

use super::device::CandleDevice;

/// Of an operation that candle has run already.
fn ran_twice() -> Error {
    Error::wrap(crate::Error::invalid("candle", "operation", "one that runs once", "a second run"))
}

/// The value, until candle's operation takes it.
pub(super) struct Precomputed(Mutex<Option<(Storage, Shape)>>);

impl Precomputed {
    pub(super) fn new<D: CandleDevice>(value: crate::Tensor<D>, device: &Device) -> Result<Self> {
        let shape = Shape::from(value.dims());
        Self::shaped(value, shape, device)
    }

    /// A value of as many elements in another shape.
    pub(super) fn shaped<D: CandleDevice>(value: crate::Tensor<D>, shape: Shape, device: &Device) -> Result<Self> {
        Ok(Self(Mutex::new(Some((D::storage(value, device)?, shape)))))
    }

    /// A copy of a tensor of candle's.
    pub(super) fn copy_of(value: &Tensor) -> Result<Self> {
        let value = value.force_contiguous()?;
        let (storage, layout) = value.storage_and_layout();
        let copy = storage.try_clone(layout)?;
        Ok(Self(Mutex::new(Some((copy, value.shape().clone())))))
    }

    fn take(&self) -> Option<(Storage, Shape)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        match self.take() {
            Some((Storage::Cpu(value), shape)) => Ok((value, shape)),
            _ => Err(ran_twice()),
        }
    }

    pub(super) fn on_cuda(&self) -> Result<(CudaStorage, Shape)> {
        match self.take() {
            Some((Storage::Cuda(value), shape)) => Ok((value, shape)),
            _ => Err(ran_twice()),
        }
    }
}
