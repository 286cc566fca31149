//! Flex, burn's CPU back end.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use burn::tensor::TensorMetadata;

use crate::cpu::{Cpu, Element};
use crate::error::{Error, Result};
use crate::tensor::TensorRef;

use super::backend::{Call, HostBackend, MoeBackend, Operands, Outputs, core_dtype, run_forward};

const CALL: &str = "ExpertParallelMoE";

impl HostBackend for Flex {
    fn contiguous(tensor: FlexTensor) -> FlexTensor {
        if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
    }

    fn view(tensor: &FlexTensor) -> Result<TensorRef<'_, Cpu>> {
        match tensor.dtype() {
            DType::F64 => slice::<f64>(tensor),
            DType::F32 => slice::<f32>(tensor),
            DType::F16 => slice::<half::f16>(tensor),
            DType::BF16 => slice::<half::bf16>(tensor),
            other => Err(core_dtype(CALL, "input", other).err().unwrap_or_else(not_contiguous)),
        }
    }
}

fn slice<T: Element + burn::tensor::Element>(tensor: &FlexTensor) -> Result<TensorRef<'_, Cpu>> {
    let values = tensor.as_slice::<T>().ok_or_else(not_contiguous)?;
    TensorRef::from_slice(values, &tensor.shape())
}

fn not_contiguous() -> Error {
    Error::invalid(CALL, "input", "a contiguous tensor", "a strided one")
}

impl MoeBackend for Flex {
    fn moe_forward(call: &Call, operands: Operands<FlexTensor>) -> Result<Outputs<Self>> {
        let operands = operands.map(Self::contiguous);
        // Nothing tracks gradients here, so nothing is kept.
        Ok(run_forward::<Self>(call, &operands, false)?.0)
    }
}
