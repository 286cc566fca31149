//! Dispatch and combine in candle's autograd graph.
//!
//! A dispatch is a node, the token, whose inputs are x, the routing weights, and an anchor that always tracks
//! gradients; its value means nothing. From the token hang the received rows, their weights, and every combine. So
//! candle runs a dispatch's backward wherever a loss reaches one of its combines, also on a rank whose experts got no
//! rows or whose x nobody tracks: the other ranks are in the same collectives.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, TensorId,
};

use crate::adapter::{DispatchTokens, DispatchedPart, DispatchedRows, GuardedCall, PendingDispatch};
use crate::error::Error;
use crate::layer::Layer;

use super::device::{CandleDevice, CandleTensors, copy_of, into_candle};
use super::given_outputs::{GivenOutputs, with_outputs};
use super::group::TypedGroup;
use super::pending::{BackwardStage, PendingCollectives, remember};
use super::precomputed::Precomputed;

/// A dispatch's routing in the graph.
#[derive(Debug, Clone)]
pub(super) struct RoutingNode {
    /// The node that combines hang from; absent where no backward will follow.
    pub(super) token: Option<Tensor>,
    pub(super) routing: Arc<dyn CombineRouting>,
}

/// A dispatch's routing, whatever its device.
pub(super) trait CombineRouting: Debug + Send + Sync {
    /// Slots of each local expert; waits for the device.
    fn segments(&self) -> Result<Vec<Range<usize>>>;
    /// Their offsets and counts, I64 `[L]`.
    fn segment_tensors(&self) -> Result<[Tensor; 2]>;
    /// Sums of the experts' outputs.
    fn combine(self: Arc<Self>, token: Option<&Tensor>, outputs: &Tensor) -> Result<Tensor>;
    /// The same into `y`, without gradients.
    fn combine_into(&self, outputs: &Tensor, y: &Tensor) -> Result<()>;
    /// Tells the other ranks that this one does not come to the combine, for this reason, which it gives back.
    fn refuse_combine(&self, error: Error) -> Error;
}

/// One dispatch in candle's graph.
#[derive(Debug)]
struct DispatchStep<D: CandleDevice> {
    pending: PendingDispatch<D, Tensor>,
    device: Device,
    /// A backward, of this or of a combine, has failed; the other ranks know.
    failed: AtomicBool,
}

/// Dispatches on the device of a group. `anchor` always tracks gradients; absent where no backward will follow.
pub(super) fn dispatch<D: CandleDevice>(
    on: TypedGroup<'_, D>,
    layer: &Layer,
    anchor: Option<&Tensor>,
    tokens: DispatchTokens<&Tensor, &Tensor>,
) -> Result<DispatchedRows<Tensor, RoutingNode>> {
    let DispatchTokens { x, weights, .. } = tokens;
    let call = GuardedCall { layer, group: on.group, tensors: &CandleTensors };
    let DispatchedRows { rows, weights: slot_weights, load, routing } = call.dispatch(tokens, anchor.is_some())?;
    let pending = PendingDispatch::new(routing);
    let step = Arc::new(DispatchStep { pending, device: on.device.clone(), failed: AtomicBool::new(false) });
    let Some(anchor) = anchor else {
        let [rows, weights] = [rows, slot_weights].map(|t| step.constant(t));
        let routing = RoutingNode { token: None, routing: step };
        return Ok(DispatchedRows { rows: rows?, weights: weights?, load, routing });
    };
    let token = anchor.apply_op3(x, weights, DispatchOp { step: step.clone() })?;
    remember(&token, &step);
    let received = |output, value| {
        let value = Precomputed::new(value, on.device)?;
        token.apply_op1(ReceivedOp { step: step.clone(), output, value })
    };
    let (rows, weights) = (received(DispatchedPart::Rows, rows)?, received(DispatchedPart::Weights, slot_weights)?);
    Ok(DispatchedRows { rows, weights, load, routing: RoutingNode { token: Some(token), routing: step } })
}

/// The memory of the caller's for what a dispatch brings.
#[derive(Debug, Clone, Copy)]
pub struct DispatchedRowsMut<'a> {
    /// Received rows `[N, H]` of x's type, N the rank's capacity of rows.
    pub rows: &'a Tensor,
    /// Their routing weights `[N]`, f32 (f64 for f64 tokens).
    pub weights: &'a Tensor,
}

/// Dispatches into memory of the caller's, without gradients.
pub(super) fn dispatch_into<D: CandleDevice>(
    on: TypedGroup<'_, D>,
    layer: &Layer,
    tokens: DispatchTokens<&Tensor, &Tensor>,
    into: DispatchedRowsMut<'_>,
) -> Result<DispatchedRows<Tensor, RoutingNode>> {
    const CALL: &str = "DispatchCombine::dispatch_into";
    let device = on.group.lock().device().clone();
    let outputs = [("received rows", into.rows), ("received weights", into.weights)];
    let inputs = [tokens.x, tokens.ids, tokens.weights];
    let refuse = |error| layer.refuse_forward(&mut on.group.lock(), error);
    let (load, routing) = with_outputs(&device, CALL, &outputs, &inputs, refuse, |tensors| {
        let DispatchedRows { load, routing, .. } =
            GuardedCall { layer, group: on.group, tensors }.dispatch(tokens, false)?;
        Ok((load, routing))
    })?;
    let pending = PendingDispatch::new(routing);
    let step = DispatchStep { pending, device: on.device.clone(), failed: AtomicBool::new(false) };
    let (rows, weights) = (into.rows.detach(), into.weights.detach());
    Ok(DispatchedRows { rows, weights, load, routing: RoutingNode { token: None, routing: Arc::new(step) } })
}

impl<D: CandleDevice> CombineRouting for DispatchStep<D> {
    fn segments(&self) -> Result<Vec<Range<usize>>> {
        Ok(self.pending.routing.segments()?)
    }

    fn segment_tensors(&self) -> Result<[Tensor; 2]> {
        let device = self.pending.routing.group.lock().device().clone();
        let [offsets, counts] = self.pending.routing.segment_tensors().map(|t| copy_of(&device, t.view()));
        Ok([self.constant(offsets?)?, self.constant(counts?)?])
    }

    fn combine(self: Arc<Self>, token: Option<&Tensor>, outputs: &Tensor) -> Result<Tensor> {
        let y = self.pending.routing.combine(&CandleTensors, outputs)?;
        let Some(token) = token else { return Ok(self.constant(y)?) };
        let value = Precomputed::new(y, &self.device)?;
        token.apply_op2(outputs, CombineOp { step: self, value, ran: AtomicBool::new(false) })
    }

    fn combine_into(&self, outputs: &Tensor, y: &Tensor) -> Result<()> {
        const CALL: &str = "Dispatched::combine_into";
        let routing = &self.pending.routing;
        let device = routing.group.lock().device().clone();
        let refuse = |error| self.refuse_combine(error);
        let work = |tensors: &GivenOutputs<'_, D>| routing.combine(tensors, outputs).map(drop);
        Ok(with_outputs(&device, CALL, &[("y", y)], &[outputs], refuse, work)?)
    }

    fn refuse_combine(&self, error: Error) -> Error {
        let routing = &self.pending.routing;
        routing.layer.refuse_combine(&mut routing.group.lock(), error)
    }
}

impl<D: CandleDevice> DispatchStep<D> {
    fn constant(&self, t: crate::Tensor<D>) -> crate::Result<Tensor> {
        let dims = t.dims().to_vec();
        into_candle(t, &dims, &self.device)
    }

    /// A gradient, if that of `like` is asked for.
    fn wanted(&self, gradient: crate::Tensor<D>, like: &Tensor) -> crate::Result<Option<Tensor>> {
        match like.track_op() {
            true => self.constant(gradient).map(Some),
            false => Ok(None),
        }
    }

    fn noting_failure<T>(&self, result: crate::Result<T>) -> crate::Result<T> {
        if result.is_err() {
            self.failed.store(true, Ordering::Release);
        }
        result
    }
}

impl<D: CandleDevice> PendingCollectives for DispatchStep<D> {
    fn stage(&self) -> BackwardStage {
        match self.pending.is_waiting() {
            _ if self.failed.load(Ordering::Acquire) => BackwardStage::Reported,
            true => BackwardStage::Waiting,
            false => BackwardStage::Over,
        }
    }

    fn group(&self) -> usize {
        self.pending.routing.group.address()
    }

    fn layer_vars(&self) -> Vec<TensorId> {
        Vec::new()
    }

    fn refuse(&self, reason: &str) {
        let call = "Dispatched::combine, backward";
        let reason = Error::Framework { call, framework: "candle", message: reason.to_string() };
        let routing = &self.pending.routing;
        routing.layer.refuse_backward(&mut routing.group.lock(), reason);
    }
}

/// The token of a dispatch: of the anchor, x and the routing weights.
struct DispatchOp<D: CandleDevice> {
    step: Arc<DispatchStep<D>>,
}

impl<D: CandleDevice> CustomOp3 for DispatchOp<D> {
    fn name(&self) -> &'static str {
        "moebius-dispatch"
    }

    fn cpu_fwd(
        &self,
        anchor: &CpuStorage,
        at: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((anchor.try_clone(at)?, Shape::from(())))
    }

    fn cuda_fwd(
        &self,
        anchor: &CudaStorage,
        at: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Ok((anchor.try_clone(at)?, Shape::from(())))
    }

    fn bwd(
        &self,
        _: &Tensor,
        x: &Tensor,
        weights: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let step = &self.step;
        let arrived = step.pending.take_cotangents()?;
        // Made whether wanted or not: the other ranks are in the collective.
        let made = step.pending.routing.dispatch_bwd(&CandleTensors, &arrived);
        let [d_x, d_weights] = step.noting_failure(made)?;
        Ok((None, step.wanted(d_x, x)?, step.wanted(d_weights, weights)?))
    }
}

/// Gives an output of a dispatch a place in the graph.
struct ReceivedOp<D: CandleDevice> {
    step: Arc<DispatchStep<D>>,
    output: DispatchedPart,
    value: Precomputed,
}

impl<D: CandleDevice> CustomOp1 for ReceivedOp<D> {
    fn name(&self) -> &'static str {
        "moebius-received"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.step.pending.set_cotangent(self.output, gradient.clone())?;
        Ok(Some(token.zeros_like()?))
    }
}

/// A combine: of its dispatch's token and the experts' outputs.
struct CombineOp<D: CandleDevice> {
    step: Arc<DispatchStep<D>>,
    value: Precomputed,
    /// Backward has run.
    ran: AtomicBool,
}

impl<D: CandleDevice> CustomOp2 for CombineOp<D> {
    fn name(&self) -> &'static str {
        "moebius-combine"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(
        &self,
        token: &Tensor,
        outputs: &Tensor,
        _: &Tensor,
        d_y: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.step.pending.check_combine(self.ran.swap(true, Ordering::AcqRel))?;
        let made = self.step.pending.routing.combine_bwd(&CandleTensors, d_y);
        let d_outputs = self.step.noting_failure(made)?;
        Ok((Some(token.zeros_like()?), self.step.wanted(d_outputs, outputs)?))
    }
}
