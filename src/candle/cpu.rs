//! candle's host tensors as ours, and back.

use candle_core::{CpuStorage, Device, Storage};

use crate::cpu::{Cpu, HostBuffer};
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

use super::device::{CandleDevice, StorageMut, StorageSlice, StorageSliceMut};

impl CandleDevice for Cpu {
    type StorageGuard<'a> = ();

    fn is(&self, device: &Device) -> bool {
        device.is_cpu()
    }

    fn view<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, ())> {
        let Storage::Cpu(storage) = part.storage else {
            return Err(part.elsewhere::<Self>("one on the CPU, as the group"));
        };
        let (range, dims) = (part.range(), part.dims);
        let view = match storage {
            CpuStorage::F32(v) => TensorRef::from_slice(&v[range], dims),
            CpuStorage::F64(v) => TensorRef::from_slice(&v[range], dims),
            CpuStorage::BF16(v) => TensorRef::from_slice(&v[range], dims),
            CpuStorage::F16(v) => TensorRef::from_slice(&v[range], dims),
            _ => Err(part.unfit("f32, f64, bf16 or f16")),
        };
        Ok((view?, ()))
    }

    fn view_mut<'a>(&'a self, part: StorageSliceMut<'a>) -> Result<(TensorMut<'a, Self>, ())> {
        let (range, dims) = (part.range(), part.dims);
        let view = match part.storage {
            StorageMut::Cpu(CpuStorage::F32(v)) => TensorMut::from_slice(&mut v[range], dims),
            StorageMut::Cpu(CpuStorage::F64(v)) => TensorMut::from_slice(&mut v[range], dims),
            StorageMut::Cpu(CpuStorage::BF16(v)) => TensorMut::from_slice(&mut v[range], dims),
            StorageMut::Cpu(CpuStorage::F16(v)) => TensorMut::from_slice(&mut v[range], dims),
            _ => Err(part.unfit("one of f32, f64, bf16 or f16 on the CPU, as the group")),
        };
        Ok((view?, ()))
    }

    fn view_ids<'a>(&'a self, part: StorageSlice<'a>) -> Result<(TensorRef<'a, Self>, ())> {
        let Storage::Cpu(storage) = part.storage else {
            return Err(part.elsewhere::<Self>("one on the CPU, as the group"));
        };
        let (range, dims) = (part.range(), part.dims);
        let view = match storage {
            CpuStorage::U32(v) => TensorRef::from_slice(bytemuck::cast_slice::<u32, i32>(&v[range]), dims),
            CpuStorage::I64(v) => TensorRef::from_slice(&v[range], dims),
            _ => Err(part.unfit("u32 or i64")),
        };
        Ok((view?, ()))
    }

    fn storage(tensor: crate::Tensor<Self>, _: &Device) -> Result<Storage> {
        Ok(Storage::Cpu(match tensor.into_buffer() {
            HostBuffer::F32(v) => CpuStorage::F32(v),
            HostBuffer::F64(v) => CpuStorage::F64(v),
            HostBuffer::BF16(v) => CpuStorage::BF16(v),
            HostBuffer::F16(v) => CpuStorage::F16(v),
            HostBuffer::I64(v) => CpuStorage::I64(v),
            // Ids of experts: candle's type for indices.
            HostBuffer::I32(v) => CpuStorage::U32(bytemuck::cast_vec(v)),
            HostBuffer::U8(v) => CpuStorage::U8(v),
        }))
    }
}
