//! Requirements of the adapter on a device: candle's tensors as ours and back, without a copy of what is contiguous.
//! One file a device implements it.

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Device, DeviceLocation, Storage, Tensor};

use crate::adapter::{FrameworkDevice, FrameworkTensors, ResultSpec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::optimizer::OptimizerDevice;
use crate::tensor::{TensorMut, TensorRef};

use super::error::framework;

/// A device whose memory candle and this crate share: [`Cpu`](crate::cpu::Cpu), and with the `cuda` feature `Cuda`.
pub trait CandleDevice: FrameworkDevice + OptimizerDevice {
    /// Owner of memory that must live until the work that reads a view is enqueued.
    #[doc(hidden)]
    type StorageGuard<'a>;

    /// Says whether candle's device is this one.
    #[doc(hidden)]
    fn is(&self, device: &Device) -> bool;

    /// A candle device that is not this one, in words.
    #[doc(hidden)]
    fn other(device: &Device) -> String {
        location(device)
    }

    /// Refuses work that cannot be done now.
    #[doc(hidden)]
    fn ready(&self, call: &'static str) -> Result<()> {
        let _ = call;
        Ok(())
    }

    /// Elements of candle's storage as a tensor.
    #[doc(hidden)]
    fn view<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, Self::StorageGuard<'a>)>;

    /// Elements of candle's storage, for writing, as a tensor.
    #[doc(hidden)]
    fn view_mut<'a>(&'a self, part: StorageSliceMut<'a>) -> Result<(TensorMut<'a, Self>, Self::StorageGuard<'a>)>;

    /// Ids of experts in candle's storage as a tensor: U32 as I32, I64 as it is.
    #[doc(hidden)]
    fn view_ids<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, Self::StorageGuard<'a>)>;

    /// Our tensor as candle's storage on `device`, which is this one; the memory moves over.
    #[doc(hidden)]
    fn storage(tensor: crate::Tensor<Self>, device: &Device) -> Result<Storage>;

    /// The device, if it is a GPU.
    #[doc(hidden)]
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<crate::cuda::Cuda> {
        None
    }
}

/// Elements of a storage, one behind the other.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct StorageSlice<'a> {
    pub(super) call: &'static str,
    /// The tensor, for errors.
    pub(super) name: &'a str,
    pub(super) storage: &'a Storage,
    pub(super) start: usize,
    pub(super) dims: &'a [usize],
}

impl StorageSlice<'_> {
    /// The elements.
    pub(super) fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.dims.iter().product::<usize>()
    }

    /// Refuses a tensor that is not on the group's device.
    pub(super) fn elsewhere<D: CandleDevice>(&self, expected: &str) -> Error {
        let found = D::other(&self.storage.device());
        Error::invalid(self.call, format!("tensor {}", self.name), expected, format!("one on {found}"))
    }

    /// Refuses a tensor of a type that the layer has no use for.
    pub(super) fn unfit(&self, expected: &str) -> Error {
        let found = self.storage.dtype().as_str();
        Error::invalid(self.call, format!("tensor {}", self.name), expected, found)
    }
}

/// Elements of a storage, one behind the other, to be written.
#[doc(hidden)]
#[derive(Debug)]
pub struct StorageSliceMut<'a> {
    pub(super) call: &'static str,
    /// The tensor, for errors.
    pub(super) name: &'a str,
    pub(super) storage: StorageMut<'a>,
    pub(super) start: usize,
    pub(super) dims: &'a [usize],
}

/// A storage that candle gives for writing ([`with_storages_mut`](super::with_storages_mut)).
#[derive(Debug)]
pub enum StorageMut<'a> {
    /// Of a tensor on the CPU.
    Cpu(&'a mut CpuStorage),
    /// Of a tensor on a GPU.
    Cuda(&'a mut CudaStorage),
}

impl StorageSliceMut<'_> {
    /// The elements.
    pub(super) fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.dims.iter().product::<usize>()
    }

    /// Refuses a tensor of another device or type.
    pub(super) fn unfit(&self, expected: &str) -> Error {
        let found = match &self.storage {
            StorageMut::Cpu(storage) => format!("{:?} on the CPU", storage.dtype()),
            StorageMut::Cuda(storage) => format!("{:?} on a GPU", storage.dtype()),
        };
        Error::invalid(self.call, format!("tensor {}", self.name), expected, found)
    }
}

/// A candle device in words.
pub(super) fn location(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "the CPU".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("GPU {gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("Metal GPU {gpu_id}"),
    }
}

/// Runs `f` with views of named tensors, whose storages stay locked for reading meanwhile.
pub(super) fn with_views<D: CandleDevice, R>(
    device: &D,
    call: &'static str,
    tensors: &[(&str, &Tensor)],
    f: impl FnOnce(&[TensorRef<'_, D>]) -> Result<R>,
) -> Result<R> {
    device.ready(call)?;
    let storages: Vec<_> = tensors.iter().map(|(_, t)| t.storage_and_layout()).collect();
    let (mut views, mut guards) = (Vec::new(), Vec::new());
    for ((name, _), (storage, layout)) in tensors.iter().zip(&storages) {
        let Some((start, _)) = layout.contiguous_offsets() else {
            return Err(Error::invalid(call, format!("tensor {name}"), "contiguous memory", format!("{layout:?}")));
        };
        let (view, guard) = device.view(StorageSlice { call, name, storage, start, dims: layout.dims() })?;
        views.push(view);
        guards.push(guard);
    }
    let result = f(&views);
    drop(guards);
    result
}

/// candle's tensors; results are in memory of this crate, which becomes candle's without a copy.
pub(super) struct CandleTensors;

impl<D: CandleDevice> FrameworkTensors<D> for CandleTensors {
    type Float = Tensor;
    type Ids = Tensor;
    type Output = crate::Tensor<D>;

    fn with_views<R>(
        &self,
        device: &D,
        call: &'static str,
        floats: &[(&'static str, &Tensor)],
        ids: Option<&Tensor>,
        work: impl FnOnce(&[TensorRef<'_, D>]) -> Result<R>,
    ) -> Result<R> {
        let ids = ids.map(|ids| routing_ids(device, ids)).transpose()?;
        let contiguous = floats.iter().map(|(_, t)| t.contiguous()).collect::<candle_core::Result<Vec<_>>>();
        let contiguous = contiguous.map_err(framework(call))?;
        let named: Vec<_> = floats.iter().map(|(name, _)| *name).zip(&contiguous).collect();
        with_views(device, call, &named, |views| {
            let ids = ids.as_ref().map(crate::Tensor::view);
            work(&views.iter().map(TensorRef::borrow).chain(ids).collect::<Vec<_>>())
        })
    }

    fn output(&self, device: &D, spec: ResultSpec<'_>) -> Result<crate::Tensor<D>> {
        crate::Tensor::empty(device, spec.dtype, spec.dims)
    }

    fn view_mut(output: &mut crate::Tensor<D>) -> Result<TensorMut<'_, D>> {
        Ok(output.view_mut())
    }

    fn ordered<R>(&self, _: &D, work: impl FnOnce() -> Result<R>) -> Result<R> {
        work()
    }
}

/// Where a tensor's storage is: two tensors that share it have one place.
pub(super) fn storage_place(t: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&t.storage_and_layout().0) as usize
}

/// Our tensor as candle's, in another shape of as many elements; the memory moves over.
pub(super) fn into_candle<D: CandleDevice>(t: crate::Tensor<D>, shape: &[usize], device: &Device) -> Result<Tensor> {
    let t = t.reshape(shape)?;
    Ok(Tensor::from_storage(D::storage(t, device)?, shape, BackpropOp::none(), false))
}

/// A copy of routing ids that candle has, U32 or I64, as [`TokenDispatcher::prepare`] takes them: for a router of your
/// own over [`DeviceGroup::on`](super::DeviceGroup::on). A choice that is dropped is `u32::MAX` or −1.
///
/// # Errors
/// Another type, or another device than the group's.
///
/// [`TokenDispatcher::prepare`]: crate::ep::TokenDispatcher::prepare
pub fn routing_ids<D: CandleDevice>(device: &D, ids: &Tensor) -> Result<crate::Tensor<D>> {
    const CALL: &str = "routing_ids";
    let ids = ids.contiguous().map_err(framework(CALL))?;
    device.ready(CALL)?;
    let (storage, layout) = ids.storage_and_layout();
    let part = StorageSlice {
        call: CALL,
        name: "topk_ids",
        storage: &storage,
        start: layout.start_offset(),
        dims: layout.dims(),
    };
    let (view, guard) = device.view_ids(part)?;
    let copy = copy_of(device, view);
    drop(guard);
    copy
}

/// Our name of candle's floating-point type.
pub(super) fn dtype_of(call: &'static str, name: &str, dtype: candle_core::DType) -> Result<DType> {
    match dtype {
        candle_core::DType::F32 => Ok(DType::F32),
        candle_core::DType::F64 => Ok(DType::F64),
        candle_core::DType::BF16 => Ok(DType::BF16),
        candle_core::DType::F16 => Ok(DType::F16),
        other => Err(Error::invalid(call, name, "f32, f64, bf16 or f16", other.as_str())),
    }
}

/// Our own copy of a view.
pub(super) fn copy_of<D: CandleDevice>(device: &D, view: TensorRef<'_, D>) -> Result<crate::Tensor<D>> {
    let mut copy = crate::Tensor::empty(device, view.dtype(), view.dims())?;
    device.copy(view.data(), copy.view_mut().into_data())?;
    Ok(copy)
}
