//! A layer's forward on one device, and its outputs' place in candle's graph.

use std::sync::{Arc, Mutex};

use candle_core::{Result, Shape, Tensor};

use crate::adapter::{
    ErasedLayerShards, ErasedQuantizedExperts, LastForward, LayerOutput, LayerShards, OutputCotangents,
    QuantizedExperts, acquire_resident, match_device, resident_sources, with_sources,
};
use crate::error::Error;
use crate::layer::{AuxValue, Forward, ForwardInfo, Inputs, Layer, Mode, ParamKind, PerParam, RefusalGuard};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::device::{CandleDevice, copy_of, into_candle, with_views};
use super::given_outputs::check_apart;
use super::group::{DeviceGroup, TypedGroup};
use super::op::{BackwardState, InputOp, OutputOp, PendingBackward};
use super::params::{contiguous, named, views_of};
use super::pending::{remember, remember_output};
use super::precomputed::Precomputed;
use super::quantized_params::params_of;
use super::views_mut::with_views_mut;

const CALL: &str = "ExpertParallelMoE::forward";

/// Inputs of a forward.
pub(super) struct ForwardInputs<'a> {
    pub(super) layer: &'a Layer,
    pub(super) params: &'a PerParam<Option<Tensor>>,
    /// Where `up` and `down` are gathered from, if their parameters are shards.
    pub(super) sharded: Option<&'a ErasedLayerShards>,
    /// `up` and `down`, where they are quantized and so no parameters.
    pub(super) quantized: Option<&'a ErasedQuantizedExperts>,
    /// The tokens, in the caller's shape and graph.
    pub(super) x: &'a Tensor,
    /// x as `[T, H]`, contiguous.
    pub(super) flat: &'a Tensor,
    /// The auxiliary losses' gradient comes with y's, multiplied by this.
    pub(super) aux_scale: Option<f64>,
}

/// Result of a forward.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// Same shape and dtype as the input.
    pub y: Tensor,
    /// Auxiliary losses' sum, a scalar (f64 for f64 tokens, else f32) that carries gradients: add it to the loss.
    pub aux: Tensor,
    /// The losses apart, for the host.
    pub losses: Lazy<AuxValue>,
    /// Router logits `[T, E]`, detached.
    pub logits: Tensor,
    /// Chosen experts `[T, K]`, U32, detached.
    pub ids: Tensor,
    /// Routing weights `[T, K]`, detached.
    pub weights: Tensor,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

impl MoeOutput {
    /// What the module keeps of it.
    pub(super) fn last_forward(&self) -> LastForward {
        LastForward { losses: self.losses.clone(), load: self.load.clone() }
    }
}

/// A layer's forward, on the device of its group.
pub(super) fn forward(group: &DeviceGroup, call: &ForwardInputs<'_>, mode: Mode) -> Result<MoeOutput> {
    let device = group.device();
    match_device!(group.erased(), group => forward_on(TypedGroup { group, device }, call, mode))
}

fn forward_on<D: CandleDevice>(on: TypedGroup<'_, D>, call: &ForwardInputs<'_>, mode: Mode) -> Result<MoeOutput> {
    let experts = Experts::of(&on, CALL, call)?;
    let Forward { y, aux, routing, context } =
        guarded_forward(&on, GuardedForward { name: CALL, call, experts: &experts, mode }, |entry, inputs| {
            call.layer.forward(entry.enter(), mode, inputs.x, inputs.params)
        })?;
    let device = on.group.lock().device().clone();
    let losses = aux.value().clone();
    let aux = {
        let mut total = crate::Tensor::empty(&device, y.dtype().accumulator(), &[])?;
        aux.write(total.view_mut())?;
        total
    };
    let (y, aux) = match context {
        None => (into_candle(y, call.x.dims(), on.device)?, into_candle(aux, &[], on.device)?),
        Some(context) => {
            let step = Arc::new(PendingBackward {
                layer: call.layer.clone(),
                group: on.group.clone(),
                device: on.device.clone(),
                x: call.flat.detach(),
                tracks_x: call.x.track_op(),
                params: call.params.clone(),
                experts: experts.chain,
                quantized: experts.quantized,
                aux_scale: call.aux_scale.unwrap_or(0.0),
                progress: context.progress(),
                state: Mutex::new(BackwardState::Ready {
                    context: Box::new(context),
                    arrived: OutputCotangents::default(),
                }),
            });
            let mut token = Tensor::zeros((), candle_core::DType::F32, on.device)?;
            // Not the `[T, H]` of it: candle would sum the gradient once more on its way to x.
            token = token.apply_op2(call.x, InputOp { step: step.clone(), input: None })?;
            // The selection bias has no gradient: with one of zeros an optimizer's weight decay would move it.
            for (kind, t) in call.params.present().filter(|(kind, _)| *kind != ParamKind::SelectionBias) {
                token = token.apply_op2(t, InputOp { step: step.clone(), input: Some(kind) })?;
            }
            remember(&token, &step);
            let emit = |output, value: crate::Tensor<D>, shape: &Shape| {
                let value = Precomputed::shaped(value, shape.clone(), on.device)?;
                token.apply_op1(OutputOp { step: step.clone(), output, value })
            };
            let y = emit(LayerOutput::Y, y, call.x.shape())?;
            remember_output(&y, &token, &step);
            (y, emit(LayerOutput::Aux, aux, &Shape::from(()))?)
        }
    };
    // The context may hold the routing too; what nobody else holds moves over.
    let data = |t: Arc<crate::Tensor<D>>| {
        let dims = t.dims().to_vec();
        let own = Arc::try_unwrap(t).or_else(|shared| copy_of(&device, shared.view()))?;
        into_candle(own, &dims, on.device)
    };
    Ok(MoeOutput {
        y,
        aux,
        losses,
        logits: data(routing.logits)?,
        ids: data(routing.ids)?,
        weights: data(routing.weights)?,
        load: routing.load,
    })
}

/// Where the experts' weights come from, if they are no parameters.
struct Experts<D: CandleDevice> {
    chain: Option<LayerShards<D>>,
    quantized: Option<Arc<QuantizedExperts<D>>>,
}

impl<D: CandleDevice> Experts<D> {
    /// Those of a call, on the group's device; the other ranks are told where they are not there.
    fn of(on: &TypedGroup<'_, D>, name: &'static str, call: &ForwardInputs<'_>) -> crate::Result<Self> {
        let refused = |e| call.layer.refuse_forward(&mut on.group.lock(), e);
        let chain = call.sharded.map(|sharded| sharded.experts(name)).transpose().map_err(refused)?;
        let quantized = call.quantized.map(|experts| experts.experts(name)).transpose().map_err(refused)?;
        Ok(Self { chain, quantized })
    }
}

/// A forward of the layer, with its name in errors.
struct GuardedForward<'a, D: CandleDevice> {
    name: &'static str,
    call: &'a ForwardInputs<'a>,
    experts: &'a Experts<D>,
    mode: Mode,
}

/// Runs one of the layer's forwards on the call's tensors.
fn guarded_forward<D: CandleDevice, R>(
    on: &TypedGroup<'_, D>,
    GuardedForward { name, call, experts, mode }: GuardedForward<'_, D>,
    run: impl FnOnce(&mut RefusalGuard<'_, D>, Inputs<'_, '_, D>) -> crate::Result<R>,
) -> crate::Result<R> {
    let (chain, quantized) = (experts.chain.as_ref(), experts.quantized.as_deref());
    let mut group = on.group.lock();
    let device = group.device().clone();
    // Errors of candle's tensors are this rank's alone; the other ranks, which are in forward, are told.
    RefusalGuard::forward(call.layer, &mut group).run(|entry| {
        let params = contiguous(name, call.params)?;
        with_views(&device, name, &named(call.flat, &params), |views| {
            let x = views[0].borrow();
            if let Some(experts) = quantized {
                let params = &params_of(&params, &views[1..], experts)?;
                return run(entry, Inputs { x, params });
            }
            let resident = chain.map(|chain| resident_sources(&chain.resident, mode.backward)).transpose()?;
            let guards = resident.as_ref().map(|resident| acquire_resident(&device, resident)).transpose()?;
            let gathered = chain.map(|chain| &chain.resident).zip(guards.as_ref());
            let weights = views_of(&params, &views[1..], gathered)?;
            let sources = chain.map(|chain| chain.sources(mode.backward)).transpose()?;
            let params = &with_sources(&weights, sources.as_ref());
            run(entry, Inputs { x, params })
        })
    })
}

/// A layer's forward into `y`, of which nothing is kept.
pub(super) fn forward_into(group: &DeviceGroup, call: &ForwardInputs<'_>, y: &Tensor) -> crate::Result<LastForward> {
    let device = group.device();
    match_device!(group.erased(), group => forward_into_on(TypedGroup { group, device }, call, y))
}

fn forward_into_on<D: CandleDevice>(
    on: TypedGroup<'_, D>,
    call: &ForwardInputs<'_>,
    y: &Tensor,
) -> crate::Result<LastForward> {
    const CALL: &str = "ExpertParallelMoE::forward_into";
    let (experts, mode, outputs) = (Experts::of(&on, CALL, call)?, Mode::default(), [("y", y)]);
    let used: Vec<&Tensor> = call.params.present().map(|(_, t)| t).chain([call.flat]).collect();
    let forward = GuardedForward { name: CALL, call, experts: &experts, mode };
    let ForwardInfo { aux, routing, .. } = guarded_forward(&on, forward, |entry, inputs| {
        Error::check_shape(CALL, "y", call.x.dims(), y.dims())?;
        check_apart(CALL, &outputs, &used)?;
        with_views_mut(&entry.device().clone(), CALL, &outputs, |mut views| {
            let Some(y) = views.pop() else { return Err(Error::invalid(CALL, "y", "one", "none")) };
            call.layer.forward_into(entry.enter(), mode, inputs, y.reshape(call.flat.dims())?)
        })
    })?;
    Ok(LastForward { losses: aux.value().clone(), load: routing.load })
}
