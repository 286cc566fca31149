//! The crate's router as an operation: logits of the user's to experts and weights.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

use crate::comm::Op;
use crate::dtype::DType;
use crate::ep::EpGroup;
use crate::layer::{Layer, RefusalGuard, RoutingGrads, RoutingMut};

use super::error::framework;
use super::group::On;
use super::host::{Host, into_candle, routing_ids, with_views};
use super::precomputed::Precomputed;

const ROUTE: &str = "DispatchCombine::route";
const ROUTE_BWD: &str = "DispatchCombine::route, backward";

/// Experts and weights of this rank's tokens.
#[derive(Debug, Clone)]
pub struct Routed {
    /// Chosen experts `[T, K]`, U32, best first, before any drop.
    pub ids: Tensor,
    /// Their weights `[T, K]`, f32 (f64 of f64 logits); tracked.
    pub weights: Tensor,
}

/// Routes on the device of a group.
pub(super) fn route<D: Host>(
    on: On<'_, D>,
    layer: &Layer,
    logits: &Tensor,
    selection_bias: Option<&Tensor>,
) -> Result<Routed> {
    let mut group = on.group.lock();
    let device = group.device().clone();
    // The other ranks are on their way to prepare.
    let (ids, weights) = RefusalGuard::forward(layer, &mut group).run(|entry| {
        let contiguous = |t: &Tensor| t.contiguous().map_err(framework(ROUTE));
        let (logits, bias) = (contiguous(logits)?, selection_bias.map(contiguous).transpose()?);
        let mut named = vec![("logits", &logits)];
        named.extend(bias.as_ref().map(|bias| ("selection_bias", bias)));
        with_views(&device, ROUTE, &named, |views| {
            let choices = [views[0].rows(), layer.config().router.top_k];
            let mut ids = crate::Tensor::empty(&device, DType::I32, &choices)?;
            let mut weights = crate::Tensor::empty(&device, views[0].dtype().accumulator(), &choices)?;
            let into = RoutingMut { ids: ids.view_mut(), weights: weights.view_mut() };
            layer.route_into(entry.enter(), views[0].borrow(), views.get(1).copied(), into)?;
            Ok((ids, weights))
        })
    })?;
    drop(group);
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
struct RouteOp<D: Host> {
    layer: Layer,
    group: EpGroup<D>,
    device: Device,
    ids: Tensor,
    value: Precomputed,
}

impl<D: Host> RouteOp<D> {
    fn gradient(&self, logits: &Tensor, d_weights: &Tensor) -> crate::Result<crate::Tensor<D>> {
        let mut group = self.group.lock();
        let device = group.device().clone();
        // The other ranks are on their way to the collectives of earlier layers.
        RefusalGuard::of(&self.layer, &mut group, Op::CombineBwd).run(|entry| {
            let contiguous = |t: &Tensor| t.contiguous().map_err(framework(ROUTE_BWD));
            let (logits, d_weights) = (contiguous(logits)?, contiguous(d_weights)?);
            let ids = routing_ids(&device, &self.ids)?;
            let named = [("logits", &logits), ("gradient of weights", &d_weights)];
            with_views(&device, ROUTE_BWD, &named, |views| {
                let mut d_logits = crate::Tensor::empty(&device, views[0].dtype(), views[0].dims())?;
                let grads = RoutingGrads { logits: views[0].borrow(), ids: ids.view(), weights: views[1].borrow() };
                self.layer.route_backward_into(entry.enter(), grads, d_logits.view_mut())?;
                Ok(d_logits)
            })
        })
    }
}

impl<D: Host> CustomOp1 for RouteOp<D> {
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
        let d_logits = self.gradient(logits, d_weights)?;
        Ok(Some(into_candle(d_logits, logits.dims(), &self.device)?))
    }
}
