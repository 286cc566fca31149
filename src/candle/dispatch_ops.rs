//! Dispatch and combine in candle's autograd graph.
//!
//! A dispatch is a node, the token, whose inputs are x, the routing weights, and an anchor that always tracks
//! gradients; its value means nothing. From the token hang the received rows, their weights, and every combine. So
//! candle runs a dispatch's backward wherever a loss reaches one of its combines, also on a rank whose experts got no
//! rows or whose x nobody tracks: the other ranks are in the same collectives.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, TensorId,
};

use crate::adapter::{DispatchedCotangents, DispatchedPart};
use crate::comm::Op;
use crate::ep::EpGroup;
use crate::error::Error;
use crate::layer::{
    DispatchContext, DispatchedRowGrads, DispatchedRowsMut, Layer, RefusalGuard, RoutedTokens, TokenGradsMut,
};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::TensorRef;

use super::error::framework;
use super::group::On;
use super::host::{Host, copy_of, into_candle, routing_ids, with_views};
use super::pending::{BackwardStage, PendingCollectives, remember};
use super::precomputed::Precomputed;

const DISPATCH: &str = "DispatchCombine::dispatch";
const COMBINE: &str = "Dispatched::combine";
const DISPATCH_BWD: &str = "DispatchCombine::dispatch, backward";
const COMBINE_BWD: &str = "Dispatched::combine, backward";

/// Inputs of a dispatch.
pub(super) struct DispatchCall<'a> {
    pub(super) layer: &'a Layer,
    /// Always tracks gradients; absent where no backward will follow.
    pub(super) anchor: Option<&'a Tensor>,
    /// `[T, H]`.
    pub(super) x: &'a Tensor,
    /// `[T, K]`.
    pub(super) ids: &'a Tensor,
    /// `[T, K]`.
    pub(super) weights: &'a Tensor,
}

/// Outputs of a dispatch.
pub(super) struct DispatchOutput {
    pub(super) rows: Tensor,
    pub(super) weights: Tensor,
    pub(super) load: Lazy<Load>,
    /// The node that combines hang from; absent where no backward will follow.
    pub(super) token: Option<Tensor>,
    pub(super) routing: Arc<dyn DispatchRouting>,
}

/// A dispatch's routing, whatever its device.
pub(super) trait DispatchRouting: Debug + Send + Sync {
    /// Offsets and counts of the local experts' slots, `[2, L]`; waits for the device.
    fn segments(&self) -> Result<[Vec<f64>; 2]>;
    /// The same as tensors, I64 `[L]`.
    fn segment_tensors(&self) -> Result<[Tensor; 2]>;
    /// Sums of the experts' outputs.
    fn combine(self: Arc<Self>, token: Option<&Tensor>, outputs: &Tensor) -> Result<Tensor>;
}

/// One dispatch, until its backward.
struct PendingDispatch<D: Host> {
    layer: Layer,
    group: EpGroup<D>,
    device: Device,
    context: DispatchContext<D>,
    /// Gradients of what dispatch brought, as they arrive; none once backward has run.
    arrived: Mutex<Option<DispatchedCotangents<Tensor>>>,
    /// A backward, of this or of a combine, has failed; the other ranks know.
    failed: AtomicBool,
}

impl<D: Host> Debug for PendingDispatch<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dispatch<layer {}, {:?}>", self.layer.number(), self.context.handle().sequence())
    }
}

/// Dispatches on the device of a group.
pub(super) fn dispatch<D: Host>(on: On<'_, D>, call: &DispatchCall<'_>) -> Result<DispatchOutput> {
    let DispatchCall { layer, anchor, x, ids, weights } = *call;
    let mut group = on.group.lock();
    let device = group.device().clone();
    // Errors of candle's tensors are this rank's alone; the other ranks, which are in prepare, are told.
    let (context, rows, slot_weights) = RefusalGuard::forward(layer, &mut group).run(|entry| {
        let ids = routing_ids(&device, ids)?;
        let [x, weights] = [x.contiguous(), weights.contiguous()].map(|t| t.map_err(framework(DISPATCH)));
        let (x, weights) = (x?, weights?);
        with_views(&device, DISPATCH, &[("x", &x), ("weights", &weights)], |views| {
            let tokens = RoutedTokens { x: views[0].borrow(), ids: ids.view(), weights: views[1].borrow() };
            let context = layer.prepare_dispatch(entry.enter(), &tokens, anchor.is_some())?;
            RefusalGuard::of(layer, entry.enter(), Op::Dispatch).run(|entry| {
                let (dtype, slots) = (context.dtype(), [context.handle().rows(), layer.config().hidden]);
                let mut rows = crate::Tensor::empty(&device, dtype, &slots)?;
                let mut weights = crate::Tensor::empty(&device, dtype.accumulator(), &slots[..1])?;
                let into = DispatchedRowsMut { rows: rows.view_mut(), weights: weights.view_mut() };
                layer.dispatch_into(entry.enter(), &context, &tokens, into)?;
                Ok((context, rows, weights))
            })
        })
    })?;
    drop(group);
    let load = context.handle().load();
    let step = Arc::new(PendingDispatch {
        layer: layer.clone(),
        group: on.group.clone(),
        device: on.device.clone(),
        context,
        arrived: Mutex::new(Some(DispatchedCotangents::default())),
        failed: AtomicBool::new(false),
    });
    let Some(anchor) = anchor else {
        let [rows, weights] = [rows, slot_weights].map(|t| {
            let dims = t.dims().to_vec();
            into_candle(t, &dims, on.device)
        });
        return Ok(DispatchOutput { rows: rows?, weights: weights?, load, token: None, routing: step });
    };
    let token = anchor.apply_op3(x, weights, DispatchOp { step: step.clone() })?;
    remember(&token, &step);
    let received = |output, value| {
        let value = Precomputed::new(value, on.device)?;
        token.apply_op1(ReceivedOp { step: step.clone(), output, value })
    };
    let (rows, weights) = (received(DispatchedPart::Rows, rows)?, received(DispatchedPart::Weights, slot_weights)?);
    Ok(DispatchOutput { rows, weights, load, token: Some(token), routing: step })
}

impl<D: Host> DispatchRouting for PendingDispatch<D> {
    fn segments(&self) -> Result<[Vec<f64>; 2]> {
        let segments = self.context.handle().segments();
        let group = self.group.lock();
        let read = |t: &crate::Tensor<D>| group.device().read(t.view());
        Ok([read(&segments.offsets)?, read(&segments.counts)?])
    }

    fn segment_tensors(&self) -> Result<[Tensor; 2]> {
        let segments = self.context.handle().segments();
        let device = self.group.lock().device().clone();
        let of = |t: &crate::Tensor<D>| into_candle(copy_of(&device, t.view())?, t.dims(), &self.device);
        Ok([of(&segments.offsets)?, of(&segments.counts)?])
    }

    fn combine(self: Arc<Self>, token: Option<&Tensor>, outputs: &Tensor) -> Result<Tensor> {
        let y = self.combined(outputs)?;
        let Some(token) = token else {
            let dims = y.dims().to_vec();
            return Ok(into_candle(y, &dims, &self.device)?);
        };
        let value = Precomputed::new(y, &self.device)?;
        token.apply_op2(outputs, CombineOp { step: self, value, ran: AtomicBool::new(false) })
    }
}

impl<D: Host> PendingDispatch<D> {
    fn arrived(&self) -> std::sync::MutexGuard<'_, Option<DispatchedCotangents<Tensor>>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn noting_failure<T>(&self, result: crate::Result<T>) -> crate::Result<T> {
        if result.is_err() {
            self.failed.store(true, Ordering::Release);
        }
        result
    }

    fn consumed(&self, call: &'static str) -> Error {
        Error::ContextConsumed { call, rank: self.group.rank() }
    }

    fn combined(&self, outputs: &Tensor) -> crate::Result<crate::Tensor<D>> {
        let (layer, context) = (&self.layer, &self.context);
        let mut group = self.group.lock();
        let device = group.device().clone();
        RefusalGuard::of(layer, &mut group, Op::Combine).run(|entry| {
            let outputs = outputs.contiguous().map_err(framework(COMBINE))?;
            let dims = [context.handle().tokens(), layer.config().hidden];
            let mut y = crate::Tensor::empty(&device, context.dtype(), &dims)?;
            with_views(&device, COMBINE, &[("outputs", &outputs)], |views| {
                layer.combine_into(entry.enter(), context, views[0].borrow(), y.view_mut())
            })?;
            Ok(y)
        })
    }

    /// Gradient of the experts' outputs.
    fn combine_backward(&self, d_y: &Tensor) -> crate::Result<crate::Tensor<D>> {
        let (layer, context) = (&self.layer, &self.context);
        context.handle().check_backward(COMBINE_BWD)?;
        let mut group = self.group.lock();
        let device = group.device().clone();
        RefusalGuard::of(layer, &mut group, Op::CombineBwd).run(|entry| {
            let d_y = d_y.contiguous().map_err(framework(COMBINE_BWD))?;
            let dims = [context.handle().rows(), layer.config().hidden];
            let mut d_outputs = crate::Tensor::empty(&device, context.dtype(), &dims)?;
            with_views(&device, COMBINE_BWD, &[("gradient of y", &d_y)], |views| {
                layer.combine_backward_into(entry.enter(), context, views[0].borrow(), d_outputs.view_mut())
            })?;
            Ok(d_outputs)
        })
    }

    /// Gradients of x and of the routing weights.
    fn dispatch_backward(&self, arrived: DispatchedCotangents<Tensor>) -> crate::Result<[crate::Tensor<D>; 2]> {
        let (layer, context) = (&self.layer, &self.context);
        context.handle().check_backward(DISPATCH_BWD)?;
        let mut group = self.group.lock();
        let device = group.device().clone();
        RefusalGuard::of(layer, &mut group, Op::DispatchBwd).run(|entry| {
            let contiguous = |t: Option<Tensor>| t.map(|t| t.contiguous()).transpose().map_err(framework(DISPATCH_BWD));
            let (rows, weights) = (contiguous(arrived.rows)?, contiguous(arrived.weights)?);
            let (handle, hidden, dtype) = (context.handle(), layer.config().hidden, context.dtype());
            let zeros = match &rows {
                None => Some(crate::Tensor::zeros(&device, dtype, &[handle.rows(), hidden])?),
                Some(_) => None,
            };
            let mut d_x = crate::Tensor::empty(&device, dtype, &[handle.tokens(), hidden])?;
            let choices = [handle.tokens(), handle.spec().top_k];
            let mut d_weights = crate::Tensor::empty(&device, dtype.accumulator(), &choices)?;
            let named = [("gradient of rows", &rows), ("gradient of received weights", &weights)];
            let named: Vec<_> = named.into_iter().filter_map(|(name, t)| Some((name, t.as_ref()?))).collect();
            with_views(&device, DISPATCH_BWD, &named, |views| {
                let rows = match &zeros {
                    Some(zeros) => zeros.view(),
                    None => views[0].borrow(),
                };
                let weights = views.get(usize::from(zeros.is_none())).map(TensorRef::borrow);
                let grads = DispatchedRowGrads { rows, weights };
                let into = TokenGradsMut { x: d_x.view_mut(), weights: d_weights.view_mut() };
                layer.dispatch_backward_into(entry.enter(), context, grads, into)
            })?;
            Ok([d_x, d_weights])
        })
    }
}

impl<D: Host> PendingCollectives for PendingDispatch<D> {
    fn stage(&self) -> BackwardStage {
        match *self.arrived() {
            _ if self.failed.load(Ordering::Acquire) => BackwardStage::Reported,
            Some(_) => BackwardStage::Waiting,
            None => BackwardStage::Over,
        }
    }

    fn group(&self) -> usize {
        self.group.address()
    }

    fn layer_vars(&self) -> Vec<TensorId> {
        Vec::new()
    }

    fn refuse(&self, reason: &str) {
        let reason = Error::Framework { call: COMBINE_BWD, framework: "candle", message: reason.to_string() };
        self.layer.refuse_backward(&mut self.group.lock(), reason);
    }
}

/// The token of a dispatch: of the anchor, x and the routing weights.
struct DispatchOp<D: Host> {
    step: Arc<PendingDispatch<D>>,
}

impl<D: Host> CustomOp3 for DispatchOp<D> {
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
        let Some(arrived) = step.arrived().take() else { return Err(step.consumed(DISPATCH_BWD).into()) };
        // Made whether wanted or not: the other ranks are in the collective.
        let [d_x, d_weights] = step.noting_failure(step.dispatch_backward(arrived))?;
        let own = |g, like: &Tensor| match like.track_op() {
            true => into_candle(g, like.dims(), &step.device).map(Some),
            false => Ok(None),
        };
        Ok((None, own(d_x, x)?, own(d_weights, weights)?))
    }
}

/// Gives an output of a dispatch a place in the graph.
struct ReceivedOp<D: Host> {
    step: Arc<PendingDispatch<D>>,
    output: DispatchedPart,
    value: Precomputed,
}

impl<D: Host> CustomOp1 for ReceivedOp<D> {
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
        match &mut *self.step.arrived() {
            Some(arrived) => arrived.set(self.output, gradient.clone()),
            None => return Err(self.step.consumed(DISPATCH_BWD).into()),
        }
        Ok(Some(token.zeros_like()?))
    }
}

/// A combine: of its dispatch's token and the experts' outputs.
struct CombineOp<D: Host> {
    step: Arc<PendingDispatch<D>>,
    value: Precomputed,
    /// Backward has run.
    ran: AtomicBool,
}

impl<D: Host> CustomOp2 for CombineOp<D> {
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
        if self.ran.swap(true, Ordering::AcqRel) || self.step.arrived().is_none() {
            return Err(self.step.consumed(COMBINE_BWD).into());
        }
        let d_outputs = self.step.noting_failure(self.step.combine_backward(d_y))?;
        let d_outputs = match outputs.track_op() {
            true => Some(into_candle(d_outputs, outputs.dims(), &self.step.device)?),
            false => None,
        };
        Ok((Some(token.zeros_like()?), d_outputs))
    }
}
