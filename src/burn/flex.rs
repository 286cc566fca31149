//! Flex, burn's CPU back end.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::flex::{FlexDevice, FlexTensor};
use burn::tensor::ops::{FloatTensor, IntTensor, IntTensorOps};
use burn::tensor::{DType, TensorMetadata};

use crate::cpu::{Cpu, Element};
use crate::device::Waited;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::backend::{
    DispatchOperands, DispatchOutputs, LayerBackend, LayerCall, Named, NativeMemory, Operands, Outputs, ResultSpec,
    RouteOutputs, core_dtype, data, float, unfit_ids,
};
use super::dispatch::{NativeDispatch, NativeOutputs, contiguous, run_dispatch, run_route};
use super::group::DeviceGroup;
use super::run::run_forward;

const CALL: &str = "ExpertParallelMoE";

impl NativeMemory for Flex {
    type Core = Cpu;
    type Output = Tensor<Cpu>;

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

    fn begin(_: &Cpu) -> Result<Waited> {
        Ok(Waited::Nothing)
    }

    fn end(_: &Cpu) -> Result<Waited> {
        Ok(Waited::Nothing)
    }
}

fn slice<'a, T: Element + burn::tensor::Element>(name: &str, tensor: &'a FlexTensor) -> Result<TensorRef<'a, Cpu>> {
    let values = tensor.as_slice::<T>().ok_or_else(|| not_contiguous(name))?;
    TensorRef::from_slice(values, &tensor.shape())
}

fn not_contiguous(name: &str) -> Error {
    Error::invalid(CALL, format!("tensor {name}"), "a contiguous tensor", "a strided one")
}

impl LayerBackend for Flex {
    fn moe_forward(call: &LayerCall, operands: Operands<FlexTensor>) -> Result<Outputs<Self>> {
        // Nothing tracks gradients here, so nothing is kept.
        Ok(run_forward::<Self>(call, &operands.map(Self::contiguous), false)?.0)
    }

    type Dispatch = Arc<NativeDispatch<Self>>;

    fn moe_route(
        call: &LayerCall,
        logits: FloatTensor<Self>,
        selection_bias: Option<FloatTensor<Self>>,
    ) -> Result<RouteOutputs<Self>> {
        run_route(call, &Self::contiguous(logits), selection_bias.map(Self::contiguous).as_ref())
    }

    fn moe_dispatch(call: &LayerCall, tokens: DispatchOperands<Self>) -> Result<DispatchOutputs<Self>> {
        let NativeOutputs { rows, weights, dispatch } = run_dispatch::<Self>(call, &contiguous(tokens), false)?;
        Ok(DispatchOutputs { rows, weights, load: dispatch.load(), dispatch: Arc::new(dispatch) })
    }

    fn moe_combine(dispatch: &Self::Dispatch, outputs: FloatTensor<Self>) -> Result<FloatTensor<Self>> {
        dispatch.combine(&Self::contiguous(outputs))
    }

    fn moe_segments(dispatch: &Self::Dispatch) -> Result<Vec<Range<usize>>> {
        dispatch.segments()
    }

    fn group_of_one(config: GroupConfig, _: &Self::Device) -> Result<DeviceGroup> {
        Ok(EpGroup::single(config)?.into())
    }
}
