//! Forward: the stages in order.

use std::sync::Arc;

use tracing::trace_span;

use crate::comm::{Op, Tag};
use crate::compare::{ComparedField, compare_fields, gather_numbers};
use crate::config::{CapacityOrder, Fingerprint};
use crate::dtype::DType;
use crate::ep::{DispatchInputs, DispatchSpec, Group, Handle, Received};
use crate::error::Result;
use crate::kernels::{
    Down, Jitter, Kernels, Linear, Origin, RenormalizeKept, Route, RouteAndPlan, RowDest, RowSource, SlotWeights, Up,
};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::context::Context;
use super::definition::Layer;
use super::early_up::{EarlyUp, UpOutputs};
use super::mode::{Mode, Noise};
use super::outputs::{Forward, ForwardInfo, Routing};
use super::overlap::{LayerOverlap, shared_beside_rows};
use super::params::{Inputs, Params, borrow};
use super::payload::{self, EncodedTokens};
use super::refuse::refuse_on_error;
use super::shared_expert::ReadySharedExpert;
use super::{aux_losses, check, shared_expert};

const CALL: &str = "Layer::forward";

impl Layer {
    /// Forward over all ranks of the group.
    ///
    /// `x` is `[T, H]`; T may differ between ranks and be 0. Collectives: prepare, dispatch, combine; one more where
    /// auxiliary losses are over ranks, and one more where jitter needs global token numbers.
    ///
    /// # Errors
    /// Mis-shaped tensors, NaN logits, capacity: on every rank, and the group is usable afterwards between threads.
    /// [`Error::Comm`](crate::Error::Comm) where a rank is lost.
    pub fn forward<D: Kernels>(
        &self,
        group: &mut Group<D>,
        mode: Mode,
        x: TensorRef<'_, D>,
        params: &Params<'_, D>,
    ) -> Result<Forward<D>> {
        forward(self, group, mode, x, params)
    }

    /// [`forward`](Self::forward) into memory of the caller: `y` is `[T, H]` of x's type, overwritten.
    ///
    /// On a GPU with one rank, or with several over all-gather with a static capacity, nothing is allocated and nothing
    /// waits for the device once calls of these sizes have been seen (`Cuda::memory` counts), so the call can be
    /// captured into a graph (`Cuda::capture`).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        mode: Mode,
        inputs: Inputs<'_, '_, D>,
        y: TensorMut<'_, D>,
    ) -> Result<ForwardInfo<D>> {
        forward_into(self, group, mode, inputs, y)
    }
}

fn forward<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    mode: Mode,
    x: TensorRef<'_, D>,
    params: &Params<'_, D>,
) -> Result<Forward<D>> {
    // Shapes are checked below, where the other ranks are told.
    let y = Tensor::empty(group.device(), x.dtype(), &[x.rows(), layer.config.hidden]);
    let mut y = refuse_on_error(layer, group, Op::Prepare, y)?;
    let ForwardInfo { aux, routing, context } =
        forward_into(layer, group, mode, Inputs { x: x.borrow(), params }, y.view_mut())?;
    Ok(Forward { y, aux, routing, context })
}

fn forward_into<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    mode: Mode,
    Inputs { x, params }: Inputs<'_, '_, D>,
    mut y: TensorMut<'_, D>,
) -> Result<ForwardInfo<D>> {
    let overlap = LayerOverlap::of(layer, group, params, x.dtype());
    let spec = spec::<D>(layer, mode, x.dtype(), overlap.formula(layer, x.dtype()));
    let device = group.device().clone();
    let noise = mode.noise.filter(|_| layer.config.router.jitter > 0.0);
    check::patience(CALL, &layer.config.aux, group.config().patience, noise.is_some())?;
    let jitter = noise.map(|noise| jitter(layer, group, noise, x)).transpose()?;
    // The others wait in prepare, and are told there of an error that is this rank's alone.
    let checked = check::inputs(CALL, layer, group, x, params);
    let checked = checked.and_then(|tokens| check::output(CALL, layer, x, tokens, &y));
    let pending = checked.and_then(|()| {
        let routed = trace_span!("route")
            .in_scope(|| route_tokens(layer, group, RoutedBy { x: x.borrow(), params, jitter, spec: &spec }))?;
        Ok((routed, EncodedTokens::new(&layer.config, &device, x)?))
    });
    let ((routed, prepared), packed) = refuse_on_error(layer, group, Op::Prepare, pending)?;
    let by_weight = spec.expert_capacity.filter(|c| c.order == CapacityOrder::Probability);
    let (handle, slot_weights) = match prepared {
        Some((handle, slot_weights)) => (handle, Some(slot_weights)),
        None => {
            let weights = by_weight.map(|_| routed.weights.view());
            let prepare = || group.dispatcher().prepare(routed.ids.view(), weights, &spec);
            (trace_span!("prepare").in_scope(prepare)?, None)
        }
    };
    let (aux, aux_sums) = aux_losses::losses(layer, group, &handle, routed.logits.view(), routed.ids.view())?;

    let kept = kept_weights(layer, &device, &handle, &routed);
    let kept = refuse_on_error(layer, group, Op::Dispatch, kept)?;
    // Those that the slots have already need no way to them.
    let slot_weights = slot_weights.filter(|_| kept.is_none() && packed.is_none());
    let weights = kept.as_ref().unwrap_or(&routed.weights);
    let inputs = match &packed {
        Some(packed) => packed.inputs(weights.view()),
        None => {
            let weights = slot_weights.is_none().then(|| weights.view());
            DispatchInputs { tokens: x.borrow(), weights, scales: None }
        }
    };
    let begin =
        || trace_span!("shared expert").in_scope(|| shared_expert::begin(layer, &device, mode, x.borrow(), params));
    let keep = mode.backward && !layer.config.recompute;
    let overlapped =
        overlap == LayerOverlap::Yes && group.dispatcher().overlaps_products(&handle, x.dtype(), layer.config.hidden);
    // Where rows take their time, this rank's own tokens have theirs.
    let beside = shared_beside_rows(layer, group, &handle, x.dtype());
    let early = (overlapped && !beside).then(|| EarlyUp::new(layer, &device, &handle, params, (x.dtype(), keep)));
    let shared = beside.then(|| ReadySharedExpert::new(layer, &device, mode, x.borrow(), params));
    let ready = early.transpose().and_then(|early| {
        let shared = shared.transpose()?.flatten();
        shared.iter().try_for_each(|ready| ready.list_tiles(&device))?;
        Ok((early, shared))
    });
    let (mut early, mut shared) = refuse_on_error(layer, group, Op::Dispatch, ready)?;
    let mut pending = None;
    let received = trace_span!("dispatch").in_scope(|| match (&mut early, shared.is_some()) {
        (Some(up), _) => {
            group.dispatcher().dispatch_rows_with_product(&handle, inputs, &mut |rows| up.start(&device, rows))
        }
        (None, false) => group.dispatcher().dispatch_rows(&handle, inputs),
        (None, true) => group.dispatcher().dispatch_rows_overlapped(&handle, inputs, &mut |sms| {
            let _span = trace_span!("shared expert").entered();
            let start = |ready: ReadySharedExpert<'_, D>| ready.start(&device, x.borrow(), (sms > 0).then_some(sms));
            pending = Some(shared.take().map(start).transpose());
            Ok(())
        }),
    })?;
    let early = early.map(EarlyUp::finish).transpose();
    let unpacked = match packed {
        Some(packed) => packed.unpack(&device, received),
        None => Ok(received),
    };
    let ready = pending.transpose().and_then(|pending| Ok((pending, unpacked?, early?)));
    let (pending, received, early) = refuse_on_error(layer, group, Op::Combine, ready)?;
    let received = Received { weights: slot_weights.or(received.weights), ..received };

    let experts = RoutedExperts { layer, params, handle: &handle, received: &received, dtype: x.dtype() };
    let place = group.dispatcher().place_for_return(&handle, x.dtype(), layer.config.hidden);
    let computed = place.and_then(|place| {
        let UpOutputs { hidden, pre } = match early {
            Some(outputs) => outputs,
            None => experts.up_of_received(&device, x.borrow(), keep)?,
        };
        Ok((trace_span!("down").in_scope(|| experts.down(&device, hidden, place))?, pre))
    });
    let (out, pre) = refuse_on_error(layer, group, Op::Combine, computed)?;
    trace_span!("combine").in_scope(|| group.dispatcher().combine(&handle, out.view(), y.reborrow()))?;
    drop(out);
    // What fails from here on the others do not hear of: they may be in a collective of another communicator next, where a
    // refusal in this one would wait for them.
    let pending = pending.map_or_else(begin, Ok)?;
    let shared = trace_span!("shared expert")
        .in_scope(|| shared_expert::finish(layer, &device, mode, pending, params, y.reborrow()))?;

    let routing = routed.routing(handle.load());
    let RouterOutput { logits, ids, weights } = routed;
    let dtype = x.dtype();
    let context = mode.backward.then_some(Context {
        handle,
        dtype,
        logits,
        ids,
        weights,
        jitter,
        aux_sums,
        received,
        pre,
        shared,
        overlap,
        progress: Arc::default(),
    });
    Ok(ForwardInfo { aux, routing, context })
}

pub(super) fn spec<D: Kernels>(layer: &Layer, mode: Mode, dtype: DType, formula: Fingerprint) -> DispatchSpec {
    let options = layer.dispatch;
    DispatchSpec {
        layer: layer.number,
        top_k: layer.config.router.top_k,
        alignment: options.alignment,
        capacity: options.capacity,
        max_tokens: options.max_tokens,
        overflow: options.overflow,
        expert_capacity: layer.config.router.expert_capacity,
        formula,
        returns: payload::returns(&layer.config, dtype),
        backward: mode.backward,
        reporting: options.reporting.unwrap_or(D::REPORTING),
    }
}

/// A step's noise: its numbering of tokens takes a collective of its own, since the
/// router runs before prepare. In it ranks compare the noise.
fn jitter<D: Kernels>(layer: &Layer, group: &mut Group<D>, noise: Noise, x: TensorRef<'_, D>) -> Result<Jitter> {
    let (rank, ranks) = (group.rank(), group.ranks());
    let mut first_token = 0;
    if ranks > 1 {
        let device = group.device().clone();
        let tag = Tag { layer: layer.number, op: Op::Count, sequence: noise.step };
        let compared =
            [ComparedField::number("noise.seed", noise.seed), ComparedField::number("noise.step", noise.step)];
        let own = [&ComparedField::values(&compared)[..], &[x.rows() as u64]].concat();
        let gathered = gather_numbers(&device, group.dispatcher().communicator(), tag, &own);
        let all = gathered.map_err(|error| error.of_call(CALL, rank))?;
        let of_ranks = all.as_chunks::<3>().0;
        let noises: Vec<u64> = of_ranks.iter().flat_map(|[seed, step, _]| [*seed, *step]).collect();
        compare_fields(CALL, rank, &compared, &noises)?;
        first_token = of_ranks.iter().take(rank).map(|[.., tokens]| tokens).sum();
    }
    Ok(Jitter { seed: noise.seed, step: noise.step, layer: layer.number, first_token })
}

/// Outputs of the router; shared by the result and the context.
struct RouterOutput<D: Kernels> {
    logits: Arc<Tensor<D>>,
    ids: Arc<Tensor<D>>,
    weights: Arc<Tensor<D>>,
}

impl<D: Kernels> RouterOutput<D> {
    fn routing(&self, load: Lazy<Load>) -> Routing<D> {
        Routing { logits: self.logits.clone(), ids: self.ids.clone(), weights: self.weights.clone(), load }
    }
}

/// What routing takes.
struct RoutedBy<'a, 'p, D: Kernels> {
    x: TensorRef<'a, D>,
    params: &'a Params<'p, D>,
    jitter: Option<Jitter>,
    spec: &'a DispatchSpec,
}

/// The router's outputs; where device and dispatcher plan in the same go, also the handle and the slots' weights.
type RoutedTokens<D> = (RouterOutput<D>, Option<(Handle<D>, Tensor<D>)>);

fn route_tokens<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    RoutedBy { x, params, jitter, spec }: RoutedBy<'_, '_, D>,
) -> Result<RoutedTokens<D>> {
    let tokens = x.rows();
    let device = group.device().clone();
    let config = &layer.config.router;
    let acc = x.dtype().accumulator();
    let mut logits = Tensor::empty(&device, acc, &[tokens, config.num_experts])?;
    let mut ids = Tensor::empty(&device, DType::I32, &[tokens, config.top_k])?;
    let mut weights = Tensor::empty(&device, acc, &[tokens, config.top_k])?;
    let prepared = group.dispatcher().route_and_prepare(RouteAndPlan {
        linear: router_product(x.borrow(), params, logits.view_mut()),
        config,
        selection_bias: borrow(&params.others.selection_bias),
        jitter,
        ids: ids.view_mut(),
        weights: weights.view_mut(),
        spec,
    })?;
    if prepared.is_none() {
        device.linear(router_product(x.borrow(), params, logits.view_mut()))?;
        device.route(Route {
            config,
            logits: logits.view(),
            selection_bias: borrow(&params.others.selection_bias),
            jitter,
            origin: Origin { rank: group.rank(), layer: layer.number() },
            reporting: spec.reporting,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
        })?;
    }
    let routed = RouterOutput { logits: Arc::new(logits), ids: Arc::new(ids), weights: Arc::new(weights) };
    Ok((routed, prepared))
}

fn router_product<'s, D: Kernels>(
    x: TensorRef<'s, D>,
    params: &'s Params<'_, D>,
    out: TensorMut<'s, D>,
) -> Linear<'s, D> {
    Linear { x, weight: params.router.borrow(), bias: borrow(&params.others.router_bias), out }
}

/// The weights to use where choices were dropped and the rest is to keep their sum.
fn kept_weights<D: Kernels>(
    layer: &Layer,
    device: &D,
    handle: &Handle<D>,
    routed: &RouterOutput<D>,
) -> Result<Option<Tensor<D>>> {
    if !layer.renormalizes_kept() {
        return Ok(None);
    }
    let mut out = Tensor::empty(device, routed.weights.dtype(), routed.weights.dims())?;
    let keep =
        RenormalizeKept { weights: routed.weights.view(), kept: handle.kept_ids(), grad: None, out: out.view_mut() };
    device.renormalize_kept(keep)?;
    Ok(Some(out))
}

/// The routed experts of this rank on the rows that one handle brought.
#[derive(Debug)]
pub(super) struct RoutedExperts<'a, 'p, D: Kernels> {
    pub(super) layer: &'a Layer,
    pub(super) params: &'a Params<'p, D>,
    pub(super) handle: &'a Handle<D>,
    pub(super) received: &'a Received<D>,
    pub(super) dtype: DType,
}

impl<D: Kernels> RoutedExperts<'_, '_, D> {
    /// Routing weight of each slot.
    pub(super) fn slot_weights(&self) -> Option<SlotWeights<'_, D>> {
        let at = self.layer.config.weight_at;
        self.received.weights.as_ref().map(|w| SlotWeights { values: w.view(), map: None, at })
    }

    /// Activations of the received rows, and pre-activations if they are to be kept.
    fn up_of_received(&self, device: &D, x: TensorRef<'_, D>, keep: bool) -> Result<UpOutputs<D>> {
        let mut pre = match keep {
            true => Some(self.handle.slot_tensor(device, self.dtype, self.layer.config.up_rows())?),
            false => None,
        };
        let rows = self.received.source(x.borrow(), self.handle);
        let hidden = trace_span!("up").in_scope(|| self.up(device, rows, pre.as_mut().map(Tensor::view_mut)))?;
        Ok(UpOutputs { hidden, pre })
    }

    /// Activations h `[N, I]` of the received rows; pre-activations where asked for.
    pub(super) fn up(
        &self,
        device: &D,
        rows: RowSource<'_, D>,
        mut pre: Option<TensorMut<'_, D>>,
    ) -> Result<Tensor<D>> {
        let mut hidden = self.handle.slot_tensor(device, self.dtype, self.layer.config.intermediate)?;
        let weight = self.params.up.acquire()?;
        device.wait(weight.ready.as_ref())?;
        device.up(Up {
            rows: rows.borrow(),
            segments: self.handle.segments(),
            weight: weight.weight()?,
            bias: borrow(&self.params.others.up_bias),
            slot_weights: self.slot_weights(),
            activation: self.layer.config.activation,
            pre: pre.as_mut().map(TensorMut::reborrow),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        })?;
        Ok(hidden)
    }

    fn down(&self, device: &D, hidden: Tensor<D>, place: Option<Tensor<D>>) -> Result<Tensor<D>> {
        let width = self.layer.config.hidden;
        let mut out = place.map_or_else(|| self.handle.slot_tensor(device, self.dtype, width), Ok)?;
        let weight = self.params.down.acquire()?;
        device.wait(weight.ready.as_ref())?;
        let call = Down {
            rows: RowSource::direct(hidden.view()),
            segments: self.handle.segments(),
            weight: weight.weight()?,
            bias: borrow(&self.params.others.down_bias),
            slot_weights: self.slot_weights(),
            out: RowDest::direct(out.view_mut()),
        };
        device.down(call)?;
        Ok(out)
    }
}
