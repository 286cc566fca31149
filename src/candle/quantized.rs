//! Modules whose routed experts stay quantized: loaded as they are stored, or quantized where they lie.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::adapter::{ErasedQuantizedExperts, QuantizedExperts, match_device};
use crate::checkpoint::QuantizedBlock;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::layer::{ParamKind, PerParam};
use crate::quant::{Quantized, WeightFormat};

use super::device::{CandleDevice, with_views};
use super::error::framework;
use super::group::DeviceGroup;
use super::module::ExpertParallelMoE;
use super::options::{Parameters, tensor};

impl ExpertParallelMoE {
    /// From a loaded block whose routed experts are quantized; `number` as in [`from_block`](Self::from_block). The
    /// experts, their biases included, are frozen: gradients flow through them to the tokens, the router and a shared
    /// expert, which are variables where `params` says so.
    ///
    /// # Errors
    /// As [`from_block`](Self::from_block); a device's, where there is no memory.
    pub fn from_quantized(
        block: QuantizedBlock<Cpu>,
        number: impl Into<Option<u32>>,
        group: impl Into<DeviceGroup>,
        params: Parameters,
    ) -> Result<Self> {
        Self::of_quantized("ExpertParallelMoE::from_quantized", block, number.into(), group.into(), params)
    }

    pub(super) fn of_quantized(
        call: &'static str,
        block: QuantizedBlock<Cpu>,
        number: Option<u32>,
        group: DeviceGroup,
        params: Parameters,
    ) -> Result<Self> {
        let layer = group.erased().layer(call, (&block.config).into(), number)?;
        let (experts, params) = unpack(call, block, &group, params)?;
        let quantized = Some(ErasedQuantizedExperts::on_device_of(group.erased(), experts)?);
        Ok(Self { quantized, ..Self::of(layer, group, params) })
    }

    /// The same module with its routed experts in NVFP4 (ModelOpt's recipe, an amax an expert and weight), quantized on
    /// their device. They are frozen then, their biases included; see [`from_quantized`](Self::from_quantized). Weights
    /// in bf16 take 3.6 times the memory.
    ///
    /// # Errors
    /// Experts that are quantized already, or shards; f64 weights; rows of no multiple of 16 entries; weights that are
    /// not finite.
    pub fn to_nvfp4(&self) -> Result<Self> {
        let quantized = match_device!(self.group.erased(), group => self.nvfp4_on(group.lock().device()))?;
        let detached = |kind: ParamKind, t: &Option<Tensor>| match kind {
            ParamKind::Up | ParamKind::Down => None,
            ParamKind::UpBias | ParamKind::DownBias => t.as_ref().map(Tensor::detach),
            _ => t.clone(),
        };
        let params = PerParam::from_fn(|kind| detached(kind, &self.params[kind]));
        Ok(Self { params, quantized: Some(quantized), ..self.clone() })
    }

    fn nvfp4_on<D: CandleDevice>(&self, device: &D) -> Result<ErasedQuantizedExperts> {
        let stack = |kind: ParamKind| match (self.param(kind), &self.sharded) {
            (Some(t), None) => Ok(nvfp4(device, kind.name(), t)?),
            _ => Err(Error::invalid(CALL, kind.name(), "a whole weight of floating type", "a shard, or quantized")),
        };
        let experts = QuantizedExperts { up: stack(ParamKind::Up)?, down: stack(ParamKind::Down)? };
        Ok(D::erase(Arc::new(experts)))
    }

    /// Bytes of the routed experts' weights that are quantized, and their format; `None` where they are not.
    pub fn quantized(&self) -> Option<(WeightFormat, usize)> {
        self.quantized.as_ref().map(|experts| (experts.format(), experts.bytes()))
    }
}

const CALL: &str = "ExpertParallelMoE::to_nvfp4";

/// The experts of a block that are quantized, on the host, and its other parameters as candle's: variables where
/// `params` says so, but for the experts' biases, which are frozen with them.
pub(super) fn unpack(
    call: &'static str,
    block: QuantizedBlock<Cpu>,
    group: &DeviceGroup,
    params: Parameters,
) -> Result<(QuantizedExperts<Cpu>, PerParam<Option<Tensor>>)> {
    let (config, local) = (block.config.clone(), group.local_experts());
    let (up, down, mut others) = block.into_parts();
    let params = PerParam::try_from_fn(|kind| -> Result<Option<Tensor>> {
        let Some(expected) = kind.dims(&config, local) else { return Ok(None) };
        let check = |found: &[usize]| Error::check_shape(call, kind.name(), &expected, found);
        let params = match kind {
            ParamKind::Up => return Ok(check(up.dims()).map(|()| None)?),
            ParamKind::Down => return Ok(check(down.dims()).map(|()| None)?),
            ParamKind::UpBias | ParamKind::DownBias => Parameters::Frozen,
            _ => params,
        };
        let missing = || Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none");
        let t = others[kind].take().ok_or_else(missing)?;
        check(t.dims())?;
        tensor(t, group.device(), params).map(Some)
    })?;
    Ok((QuantizedExperts { up, down }, params))
}

/// A stack `[L, out, in]` in NVFP4.
fn nvfp4<D: CandleDevice>(device: &D, name: &str, weight: &Tensor) -> crate::Result<Quantized<D>> {
    let weight = weight.detach().contiguous().map_err(framework(CALL))?;
    with_views(device, CALL, &[(name, &weight)], |views| Quantized::nvfp4(device, CALL, name, views[0].borrow()))
}
