//! The crate's router as an operation: logits of the user's to experts and weights.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use crate::adapter::{DispatchTokens, GuardedCall};
use crate::ep::EpGroup;
use crate::layer::Layer;

use super::device::{CandleDevice, CandleTensors, into_candle};
use super::group::TypedGroup;
use super::precomputed::Precomputed;

/// Experts and weights of this rank's tokens.
#[derive(Debug, Clone)]
pub struct Routed {
    /// Chosen experts `[T, K]`, U32, best first, before any drop.
    pub ids: Tensor,
    /// Their weights `[T, K]`, f32 (f64 of f64 logits); tracked.
    pub weights: Tensor,
}

/// Routes on the device of a group.
pub(super) fn route<D: CandleDevice>(
    on: TypedGroup<'_, D>,
    layer: &Layer,
    logits: &Tensor,
    selection_bias: Option<&Tensor>,
) -> Result<Routed> {
    let call = GuardedCall { layer, group: on.group, tensors: &CandleTensors };
    let [ids, weights] = call.route(logits, selection_bias)?;
    let choices = ids.dims().to_vec();
    let ids = into_candle(ids, &choices, on.device)?;
    if !logits.track_op() {
        return Ok(Routed { ids, weights: into_candle(weights, &choices, on.device)? });
    }
    let value = Precomputed::new(weights, on.device)?;
    let (layer, group, device) = (layer.clone(), on.group.clone(), on.device.clone());
    let weights = logits.apply_op1(RouteOp { layer, group, device, ids: ids.clone(), value })?;
    Ok(Routed { ids, weights })
}

/// Weights of chosen experts, of logits.
struct RouteOp<D: CandleDevice> {
    layer: Layer,
    group: EpGroup<D>,
    device: Device,
    ids: Tensor,
    value: Precomputed,
}

impl<D: CandleDevice> CustomOp1 for RouteOp<D> {
    fn name(&self) -> &'static str {
        "moebius-route"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, d_weights: &Tensor) -> Result<Option<Tensor>> {
        let call = GuardedCall { layer: &self.layer, group: &self.group, tensors: &CandleTensors };
        let d_logits = call.route_bwd(DispatchTokens { x: logits, ids: &self.ids, weights: d_weights })?;
        Ok(Some(into_candle(d_logits, logits.dims(), &self.device)?))
    }
}
