//! candle's host tensors as ours, and back.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor};

use crate::cpu::{Cpu, HostBuffer};
use crate::error::{Error, Result};
use crate::etp::Chain;
use crate::tensor::{TensorMut, TensorRef};

use super::error::framework;
use super::host::{DeviceChain, Host, StorageMut, StorageSlice, StorageSliceMut, VisitVars};

impl Host for Cpu {
    type Hold<'a> = ();

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

    fn with_vars(&self, call: &'static str, vars: &[&Tensor], visit: &mut VisitVars<'_, Self>) -> Result<()> {
        let visit = RefCell::new(visit);
        for (index, var) in vars.iter().enumerate() {
            var.inplace_op1(&Visit { index, call, visit: &visit }).map_err(framework(call))?;
        }
        Ok(())
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

    fn hide(chain: Arc<Chain<Self>>) -> DeviceChain {
        DeviceChain::Cpu(chain)
    }

    fn chain(of: &DeviceChain) -> Option<&Arc<Chain<Self>>> {
        match of {
            DeviceChain::Cpu(chain) => Some(chain),
            #[cfg(feature = "cuda")]
            DeviceChain::Cuda(_) => None,
        }
    }
}

/// A variable under change.
struct Visit<'a, 'v> {
    index: usize,
    call: &'static str,
    visit: &'a RefCell<&'a mut VisitVars<'v, Cpu>>,
}

impl InplaceOp1 for Visit<'_, '_> {
    fn name(&self) -> &'static str {
        self.call
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            let name = format!("variable {}", self.index);
            return Err(Error::invalid(self.call, name, "contiguous memory", format!("{layout:?}")).into());
        };
        // A vector: sizes are checked by whoever changes it.
        let (range, dims) = (start..end, [end - start]);
        let view = match storage {
            CpuStorage::F32(v) => TensorMut::from_slice(&mut v[range], &dims),
            CpuStorage::F64(v) => TensorMut::from_slice(&mut v[range], &dims),
            CpuStorage::BF16(v) => TensorMut::from_slice(&mut v[range], &dims),
            CpuStorage::F16(v) => TensorMut::from_slice(&mut v[range], &dims),
            _ => {
                let name = format!("variable {}", self.index);
                return Err(Error::invalid(self.call, name, "f32, bf16 or f16", "another type").into());
            }
        };
        let mut visit = self.visit.borrow_mut();
        Ok((*visit)(self.index, vec![view?])?)
    }
}
