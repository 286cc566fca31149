//! candle's tensors on a GPU as ours, and back: one context, one stream, the same memory.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::{CudaStorage, Device, Storage};
use cudarc::driver::{DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop};
use half::{bf16, f16};

use crate::cuda::{Cuda, DeviceBuffer, DeviceMut, DeviceRef};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::device::{CandleDevice, StorageMut, StorageSlice, StorageSliceMut, location};
use super::error::framework;

/// Where a tensor without elements lies: no kernel reads it, and null means "none" to some.
const NOWHERE: u64 = 256;

/// This crate's kernels on candle's stream.
///
/// Why not on that of `Device::new_cuda`: it is CUDA's per-thread default stream, one handle that names another stream
/// on every thread. A layer's kernels run behind those that made its tensors only as long as both are launched, and all
/// memory between them is freed, by one thread. candle frees a tensor, runs a backward and reads a result on whichever
/// thread it is told to, and this crate gives its own blocks from one tensor to the next in the order of a stream;
/// nothing would say when that order is lost. `Device::new_cuda_with_stream` has one stream for all threads.
///
/// # Errors
/// [`Error::Invalid`] for a candle device that is no GPU, and for one of `Device::new_cuda`, which names
/// `Device::new_cuda_with_stream`; what [`Cuda::on`] finds.
pub fn cuda(device: &Device) -> Result<Cuda> {
    const CALL: &str = "candle::cuda";
    match device.as_cuda_device() {
        Ok(device) => Cuda::on(device.cuda_stream()),
        Err(_) => Err(Error::invalid(CALL, "device", "a CUDA device", location(device))),
    }
}

impl CandleDevice for Cuda {
    type StorageGuard<'a> = SyncOnDrop<'a>;

    fn is(&self, device: &Device) -> bool {
        device.as_cuda_device().is_ok_and(|d| self.is_on(&d.cuda_stream()))
    }

    fn other(device: &Device) -> String {
        match device {
            // It may be the same GPU, with another stream.
            Device::Cuda(_) => format!("{}, another CUDA device of candle", location(device)),
            _ => location(device),
        }
    }

    /// A graph would outlive candle's tensors, unless `Capture` sees to them.
    fn ready(&self, call: &'static str) -> Result<()> {
        match self.captures_with_framework() || !self.is_capturing()? {
            true => Ok(()),
            false => Err(Error::Device {
                call,
                operation: "capture into a CUDA graph".to_string(),
                message:
                    "candle frees its tensors while the graph lives; capture with candle::Capture, and name every \
                          group and optimizer of the step to it"
                        .to_string(),
            }),
        }
    }

    fn view<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, SyncOnDrop<'a>)> {
        let Storage::Cuda(storage) = part.storage else { return Err(part.elsewhere::<Self>(EXPECTED)) };
        match part.storage.dtype() {
            candle_core::DType::F32 => view::<f32>(self, DType::F32, storage, part),
            candle_core::DType::F64 => view::<f64>(self, DType::F64, storage, part),
            candle_core::DType::BF16 => view::<bf16>(self, DType::BF16, storage, part),
            candle_core::DType::F16 => view::<f16>(self, DType::F16, storage, part),
            _ => Err(part.unfit("f32, bf16 or f16")),
        }
    }

    fn view_mut<'a>(&'a self, part: StorageSliceMut<'a>) -> Result<(TensorMut<'a, Self>, SyncOnDrop<'a>)> {
        let dtype = match &part.storage {
            StorageMut::Cuda(storage) => storage.dtype(),
            StorageMut::Cpu(_) => return Err(part.unfit(EXPECTED)),
        };
        match dtype {
            candle_core::DType::F32 => view_mut::<f32>(self, DType::F32, part),
            candle_core::DType::F64 => view_mut::<f64>(self, DType::F64, part),
            candle_core::DType::BF16 => view_mut::<bf16>(self, DType::BF16, part),
            candle_core::DType::F16 => view_mut::<f16>(self, DType::F16, part),
            _ => Err(part.unfit("f32, bf16 or f16")),
        }
    }

    fn view_ids<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, SyncOnDrop<'a>)> {
        let Storage::Cuda(storage) = part.storage else { return Err(part.elsewhere::<Self>(EXPECTED)) };
        match part.storage.dtype() {
            candle_core::DType::U32 => view::<u32>(self, DType::I32, storage, part),
            candle_core::DType::I64 => view::<i64>(self, DType::I64, storage, part),
            _ => Err(part.unfit("u32 or i64")),
        }
    }

    fn storage(tensor: crate::Tensor<Self>, device: &Device) -> Result<Storage> {
        let device = device.as_cuda_device().map_err(framework("candle::cuda"))?;
        let dtype = tensor.dtype();
        let buffer = tensor.into_buffer();
        Ok(Storage::Cuda(match dtype {
            DType::F32 => storage::<f32>(buffer, device)?,
            DType::F64 => storage::<f64>(buffer, device)?,
            DType::BF16 => storage::<bf16>(buffer, device)?,
            DType::F16 => storage::<f16>(buffer, device)?,
            DType::I64 => storage::<i64>(buffer, device)?,
            // Ids of experts: candle's type for indices.
            DType::I32 => storage::<u32>(buffer, device)?,
            DType::U8 => storage::<u8>(buffer, device)?,
        }))
    }

    fn cuda(&self) -> Option<Cuda> {
        Some(self.clone())
    }
}

const EXPECTED: &str = "one of the group's CUDA device";

fn view<'a, T: CudaDType + DeviceRepr + 'a>(
    cuda: &'a Cuda,
    dtype: DType,
    storage: &'a CudaStorage,
    part: StorageSlice<'a>,
) -> Result<(TensorRef<'a, Cuda>, SyncOnDrop<'a>)> {
    let slice = storage.as_cuda_slice::<T>().map_err(framework(part.call))?;
    if !cuda.is_on(slice.stream()) {
        return Err(part.elsewhere::<Cuda>(EXPECTED));
    }
    let range = part.range();
    let (ptr, guard) = slice.device_ptr(cuda.stream());
    let (ptr, bytes) = match range.len() * size_of::<T>() {
        0 => (NOWHERE, 0),
        bytes => (ptr + (range.start * size_of::<T>()) as u64, bytes),
    };
    if range.end > slice.len() {
        return Err(Error::invalid(
            part.call,
            format!("tensor {}", part.name),
            "a layout inside its storage",
            range.end,
        ));
    }
    // SAFETY: the range is inside the slice, whose storage stays locked for reading for 'a; candle frees and writes it
    // on the slice's own stream, which is this device's, so behind the kernels that read it.
    let data = unsafe { DeviceRef::from_raw(ptr, bytes) };
    Ok((TensorRef::new(data, dtype, part.dims)?, guard))
}

fn view_mut<'a, T: CudaDType + DeviceRepr + 'a>(
    cuda: &'a Cuda,
    dtype: DType,
    part: StorageSliceMut<'a>,
) -> Result<(TensorMut<'a, Cuda>, SyncOnDrop<'a>)> {
    let range = part.range();
    let (call, name, dims) = (part.call, part.name, part.dims);
    let unfit = part.unfit(EXPECTED);
    let StorageMut::Cuda(storage) = part.storage else { return Err(unfit) };
    let slice = storage.as_cuda_slice_mut::<T>().map_err(framework(call))?;
    if !cuda.is_on(slice.stream()) {
        return Err(unfit);
    }
    if range.end > slice.len() {
        return Err(Error::invalid(call, format!("tensor {name}"), "a layout inside its storage", range.end));
    }
    let (ptr, guard) = slice.device_ptr_mut(cuda.stream());
    let (ptr, bytes) = match range.len() * size_of::<T>() {
        0 => (NOWHERE, 0),
        bytes => (ptr + (range.start * size_of::<T>()) as u64, bytes),
    };
    // SAFETY: the range is inside the slice, whose storage candle has locked for writing for 'a; candle frees and reads
    // it on the slice's own stream, which is this device's, so behind the kernels that write it.
    let data = unsafe { DeviceMut::from_raw(ptr, bytes) };
    Ok((TensorMut::new(data, dtype, dims)?, guard))
}

fn storage<T: CudaDType + DeviceRepr>(buffer: DeviceBuffer, device: &CudaDevice) -> Result<CudaStorage> {
    Ok(CudaStorage::wrap_cuda_slice(buffer.into_slice::<T>()?, device.clone()))
}
