//! Where a rank keeps its shard.

use std::fmt::Debug;
use std::sync::{PoisonError, RwLock};

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::ShardDevice;
use crate::tensor::{Shape, Tensor, TensorRef};

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

    /// Whether it lies in memory of the host that the device's copies read ([`ShardDevice::page_locked`]): a chain of one
    /// rank takes it.
    fn is_on_host(&self) -> bool {
        false
    }
}

/// A shard in memory of this crate.
#[derive(Debug)]
pub struct Shard<D: Device> {
    tensor: RwLock<Tensor<D>>,
    on_host: bool,
}

impl<D: ShardDevice> Shard<D> {
    /// A shard `[S, C]` of these bytes in page-locked memory of the host, for a weight that is frozen. A gather copies it
    /// to the device beside the computation.
    ///
    /// # Errors
    /// Bytes that are not the shape's; as [`ShardDevice::page_locked`].
    pub fn on_host(device: &D, dtype: DType, dims: [usize; 2], bytes: &[u8]) -> Result<Self> {
        const CALL: &str = "Shard::on_host";
        let expected = Shape::new(&dims)?.count() * dtype.size();
        if bytes.len() != expected {
            return Err(Error::invalid(CALL, "bytes", format!("{expected} for {dtype} {dims:?}"), bytes.len()));
        }
        Ok(Self::page_locked(device.page_locked(dtype, &dims, &mut |to| to.copy_from_slice(bytes))?))
    }
}

impl<D: Device> Shard<D> {
    /// Takes the shard over.
    pub fn new(tensor: Tensor<D>) -> Self {
        Self { tensor: RwLock::new(tensor), on_host: false }
    }

    /// Takes over one of [`ShardDevice::page_locked`].
    pub(in crate::etp) fn page_locked(tensor: Tensor<D>) -> Self {
        Self { on_host: true, ..Self::new(tensor) }
    }

    /// Changes the values, between passes: a step of an optimizer.
    ///
    /// # Errors
    /// A shard on the host, which is frozen; those of `change`; a tensor of another shape or type left behind.
    pub fn update<R>(&self, change: impl FnOnce(&mut Tensor<D>) -> Result<R>) -> Result<R> {
        if self.on_host {
            return Err(Error::invalid("Shard::update", "shard", "one on the device", "a frozen one on the host"));
        }
        let mut tensor = self.tensor.write().unwrap_or_else(PoisonError::into_inner);
        let (dims, dtype) = (tensor.dims().to_vec(), tensor.dtype());
        let result = change(&mut tensor)?;
        Error::check_shape("Shard::update", "shard", &dims, tensor.dims())?;
        Error::check_dtype("Shard::update", "shard", dtype, tensor.dtype())?;
        Ok(result)
    }
}

impl<D: Device> ShardSource<D> for Shard<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        visit(self.tensor.read().unwrap_or_else(PoisonError::into_inner).view())
    }

    fn is_on_host(&self) -> bool {
        self.on_host
    }
}
