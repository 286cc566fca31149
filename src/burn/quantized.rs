//! Modules whose routed experts are quantized where they lie.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::adapter::{FrameworkDevice, QuantizedExperts};
use crate::error::{Error, Result};
use crate::layer::ParamKind;
use crate::quant::{Quantized, WeightFormat};

use super::backend::{CoreDevice, MoeBackend, Named, NativeMemory, between};
use super::module::ExpertParallelMoE;
use super::shard_param::FloatParam;

const CALL: &str = "ExpertParallelMoE::to_nvfp4";

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// The same module with its routed experts in NVFP4 (ModelOpt's recipe, an amax an expert and weight), quantized on
    /// their device. They are frozen then, their biases included, and are not in a record; see
    /// [`from_quantized`](Self::from_quantized). Weights in bf16 take 3.6 times the memory. Waits for the device.
    ///
    /// # Errors
    /// Experts that are quantized or shards already; weights whose rows are no multiple of 16 entries, that are in f64, or
    /// not finite; tensors of another device than the group's.
    pub fn to_nvfp4(&self) -> Result<Self> {
        let group = B::Native::core_group(&self.group);
        let elsewhere = || Error::invalid(CALL, "group", "one of the tensors' device", "another");
        let core = group.ok_or_else(elsewhere)?.lock().device().clone();
        let stack = |kind: ParamKind, param: &Param<Tensor<B, 3>>| match (&self.sharded, &self.quantized) {
            (None, None) => nvfp4::<B>(&core, kind.name(), param),
            _ => Err(Error::invalid(CALL, kind.name(), "a whole weight of floating type", "a shard, or quantized")),
        };
        let up = stack(ParamKind::Up, &self.experts.up)?;
        let down = stack(ParamKind::Down, &self.experts.down)?;
        let quantized = <CoreDevice<B> as FrameworkDevice>::erase(Arc::new(QuantizedExperts { up, down }));
        let mut moe = Self { quantized: Some(quantized), ..self.clone() };
        (moe.experts.up, moe.experts.down) = (placeholder(&self.experts.up), placeholder(&self.experts.down));
        moe.freeze_experts();
        Ok(moe)
    }
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// Bytes of the routed experts' weights that are quantized, and their format; `None` where they are not.
    pub fn quantized(&self) -> Option<(WeightFormat, usize)> {
        self.quantized.as_ref().map(|experts| (experts.format(), experts.bytes()))
    }
}

/// A stack `[L, out, in]` in NVFP4.
fn nvfp4<B: MoeBackend>(
    core: &CoreDevice<B>,
    name: &'static str,
    param: &Param<Tensor<B, 3>>,
) -> Result<Quantized<CoreDevice<B>>> {
    let weight = B::Native::contiguous(param.native());
    let view = B::Native::view(core, Named { name, tensor: &weight })?;
    between::<B::Native, _>(core, |_| (), || Quantized::nvfp4(core, CALL, name, view))
}

/// A tensor that nothing reads, in a weight's place.
fn placeholder<B: MoeBackend>(of: &Param<Tensor<B, 3>>) -> Param<Tensor<B, 3>> {
    let of = of.val();
    Param::initialized(ParamId::new(), Tensor::zeros([1, 1, 1], (&of.device(), of.dtype())))
}
