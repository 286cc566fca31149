//! candle's host tensors as ours, and back, without a copy of what is contiguous.

use crate::cpu::{Cpu, HostBuffer};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorRef;
use candle_core::{CpuStorage, Device, Storage, Tensor};

/// A candle error as ours.
pub(super) fn framework(call: &'static str) -> impl Fn(candle_core::Error) -> Error {
    move |e| Error::Framework { call, framework: "candle", message: e.to_string() }
}

/// Runs `f` with views of tensors, whose storages stay locked for reading meanwhile.
pub(super) fn with_views<R>(
    call: &'static str,
    tensors: &[&Tensor],
    f: impl FnOnce(&[TensorRef<'_, Cpu>]) -> Result<R>,
) -> Result<R> {
    let guards: Vec<_> = tensors.iter().map(|t| t.storage_and_layout()).collect();
    let views = guards
        .iter()
        .map(|(storage, layout)| {
            let Storage::Cpu(storage) = &**storage else {
                return Err(Error::invalid(call, "tensor", "a tensor on candle's CPU device", "another device"));
            };
            let Some((start, end)) = layout.contiguous_offsets() else {
                return Err(Error::invalid(call, "tensor", "contiguous memory", format!("{layout:?}")));
            };
            let dims = layout.dims();
            match storage {
                CpuStorage::F32(v) => TensorRef::from_slice(&v[start..end], dims),
                CpuStorage::F64(v) => TensorRef::from_slice(&v[start..end], dims),
                CpuStorage::BF16(v) => TensorRef::from_slice(&v[start..end], dims),
                CpuStorage::F16(v) => TensorRef::from_slice(&v[start..end], dims),
                other => Err(Error::invalid(call, "tensor", "f32, f64, bf16 or f16", format!("{:?}", dtype(other)))),
            }
        })
        .collect::<Result<Vec<_>>>()?;
    f(&views)
}

/// Our own copy of a view.
pub(super) fn copy_of(view: TensorRef<'_, Cpu>) -> Result<crate::Tensor<Cpu>> {
    let mut copy = crate::Tensor::empty(&Cpu::new(), view.dtype(), view.dims())?;
    copy.as_bytes_mut().copy_from_slice(view.data());
    Ok(copy)
}

fn dtype(storage: &CpuStorage) -> candle_core::DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// Our tensor as candle's storage; the memory moves over.
pub(super) fn into_storage(t: crate::Tensor<Cpu>) -> Result<CpuStorage> {
    Ok(match t.into_buffer() {
        HostBuffer::F32(v) => CpuStorage::F32(v),
        HostBuffer::F64(v) => CpuStorage::F64(v),
        HostBuffer::BF16(v) => CpuStorage::BF16(v),
        HostBuffer::F16(v) => CpuStorage::F16(v),
        HostBuffer::I64(v) => CpuStorage::I64(v),
        HostBuffer::I32(v) => CpuStorage::I32(v),
        HostBuffer::U8(v) => CpuStorage::U8(v),
    })
}

/// Our tensor as candle's, in another shape of as many elements; the memory moves over.
pub(super) fn into_candle(t: crate::Tensor<Cpu>, shape: &[usize]) -> Result<Tensor> {
    const CALL: &str = "into_candle";
    let on = &Device::Cpu;
    match t.into_buffer() {
        HostBuffer::F32(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::F64(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::BF16(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::F16(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::I64(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::I32(v) => Tensor::from_vec(v, shape, on),
        HostBuffer::U8(v) => Tensor::from_vec(v, shape, on),
    }
    .map_err(framework(CALL))
}

/// A copy of our tensor as candle's, for data that is ours to keep.
pub(super) fn copy_to_candle(t: &crate::Tensor<Cpu>) -> Result<Tensor> {
    let shape = t.dims();
    let on = &Device::Cpu;
    match t.dtype() {
        DType::F32 => Tensor::from_slice(t.as_slice::<f32>()?, shape, on),
        DType::F64 => Tensor::from_slice(t.as_slice::<f64>()?, shape, on),
        DType::I32 => Tensor::from_slice(t.as_slice::<i32>()?, shape, on),
        other => return Err(Error::invalid("copy_to_candle", "tensor", "f32, f64 or i32", other)),
    }
    .map_err(framework("copy_to_candle"))
}
