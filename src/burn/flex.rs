//! Flex, burn's CPU back end.

use burn::backend::Flex;
use burn::backend::flex::{FlexDevice, FlexTensor};
use burn::tensor::ops::{IntTensor, IntTensorOps};
use burn::tensor::{DType, TensorMetadata};

use crate::cpu::{Cpu, Element};
use crate::device::Waited;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::backend::{Named, NativeMemory, ResultSpec, core_dtype, data, float, unfit_ids};
use super::expert_sums::{ErasedExpertSums, SharedExpertSums};
use super::group::DeviceGroup;
use super::native::NativeGroup;

const CALL: &str = "ExpertParallelMoE";

impl NativeMemory for Flex {
    type Core = Cpu;
    type Output = Tensor<Cpu>;
    type Shared = FlexTensor;

    fn contiguous(tensor: FlexTensor) -> FlexTensor {
        if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
    }

    fn view<'a>(_: &Cpu, Named { name, tensor }: Named<'a, FlexTensor>) -> Result<TensorRef<'a, Cpu>> {
        match tensor.dtype() {
            DType::F64 => slice::<f64>(name, tensor),
            DType::F32 => slice::<f32>(name, tensor),
            DType::F16 => slice::<half::f16>(name, tensor),
            DType::BF16 => slice::<half::bf16>(name, tensor),
            other => Err(core_dtype(CALL, name, other).err().unwrap_or_else(|| not_contiguous(name))),
        }
    }

    fn share(core: &Cpu, Named { name, tensor }: Named<'_, FlexTensor>) -> Result<FlexTensor> {
        Self::view(core, Named { name, tensor })?;
        Ok(tensor.clone())
    }

    fn view_shared<'a>(core: &Cpu, shared: &'a FlexTensor) -> Result<TensorRef<'a, Cpu>> {
        Self::view(core, Named { name: "shard", tensor: shared })
    }

    fn contiguous_ids(tensor: FlexTensor) -> FlexTensor {
        Self::contiguous(tensor)
    }

    fn view_ids<'a>(_: &Cpu, Named { name, tensor }: Named<'a, FlexTensor>) -> Result<TensorRef<'a, Cpu>> {
        match tensor.dtype() {
            DType::I32 => slice::<i32>(name, tensor),
            DType::I64 => slice::<i64>(name, tensor),
            DType::U32 => {
                let values = tensor.as_slice::<u32>().ok_or_else(|| not_contiguous(name))?;
                TensorRef::from_slice(bytemuck::cast_slice::<u32, i32>(values), &tensor.shape())
            }
            other => Err(unfit_ids(CALL, name, other)),
        }
    }

    fn output(core: &Cpu, _: &FlexTensor, ResultSpec { dtype, dims }: ResultSpec<'_>) -> Result<Tensor<Cpu>> {
        Tensor::empty(core, dtype, dims)
    }

    fn view_mut(output: &mut Tensor<Cpu>) -> Result<TensorMut<'_, Cpu>> {
        Ok(output.view_mut())
    }

    fn float(output: Tensor<Cpu>) -> Result<FlexTensor> {
        float::<Self>(output, &FlexDevice)
    }

    fn int(output: Tensor<Cpu>) -> Result<IntTensor<Self>> {
        Ok(Self::int_from_data(data(output)?, &FlexDevice))
    }

    fn erase_sums(sums: SharedExpertSums<Tensor<Cpu>>) -> ErasedExpertSums {
        ErasedExpertSums::Cpu(sums)
    }

    fn named_sums(sums: &ErasedExpertSums) -> Option<&SharedExpertSums<Tensor<Cpu>>> {
        match sums {
            ErasedExpertSums::Cpu(sums) => Some(sums),
            #[cfg(feature = "burn-cuda")]
            ErasedExpertSums::Cuda(_) => None,
        }
    }

    fn begin(_: &Cpu) -> Result<Waited> {
        Ok(Waited::Nothing)
    }

    fn end(_: &Cpu) -> Result<Waited> {
        Ok(Waited::Nothing)
    }
}

impl NativeGroup for Flex {
    fn native_group(config: GroupConfig, _: &FlexDevice) -> Result<DeviceGroup> {
        Ok(EpGroup::single(config)?.into())
    }
}

fn slice<'a, T: Element + burn::tensor::Element>(name: &str, tensor: &'a FlexTensor) -> Result<TensorRef<'a, Cpu>> {
    let values = tensor.as_slice::<T>().ok_or_else(|| not_contiguous(name))?;
    TensorRef::from_slice(values, &tensor.shape())
}

fn not_contiguous(name: &str) -> Error {
    Error::invalid(CALL, format!("tensor {name}"), "a contiguous tensor", "a strided one")
}
