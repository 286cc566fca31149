//! Where a rank keeps its shard.

use std::fmt::Debug;
use std::sync::{PoisonError, RwLock};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorRef};

/// A rank's shard of a weight, `[S, C]`, wherever the optimizer keeps it. A gather reads it from a thread of its own;
/// one that is sent quantized, or by copy engines, is read by the thread that asks for a weight, within the
/// [`Chain`](crate::etp::Chain)'s lock.
pub trait ShardSource<D: Device>: Debug + Send + Sync {
    /// Calls `visit` once with the shard as it is now; whoever writes it waits until the call is over. Calls nothing of
    /// the chain, nor waits for a thread that does.
    ///
    /// # Errors
    /// Those of `visit`; that the shard cannot be read.
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()>;
}

/// A shard in memory of this crate.
#[derive(Debug)]
pub struct Shard<D: Device>(RwLock<Tensor<D>>);

impl<D: Device> Shard<D> {
    /// Takes the shard over.
    pub fn new(tensor: Tensor<D>) -> Self {
        Self(RwLock::new(tensor))
    }

    /// Changes the values, between passes: a step of an optimizer.
    ///
    /// # Errors
    /// Those of `change`; a tensor of another shape or type left behind.
    pub fn update<R>(&self, change: impl FnOnce(&mut Tensor<D>) -> Result<R>) -> Result<R> {
        let mut tensor = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let (dims, dtype) = (tensor.dims().to_vec(), tensor.dtype());
        let result = change(&mut tensor)?;
        Error::check_shape("Shard::update", "shard", &dims, tensor.dims())?;
        Error::check_dtype("Shard::update", "shard", dtype, tensor.dtype())?;
        Ok(result)
    }
}

impl<D: Device> ShardSource<D> for Shard<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        visit(self.0.read().unwrap_or_else(PoisonError::into_inner).view())
    }
}
