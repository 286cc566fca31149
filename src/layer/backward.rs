//! Backward: the stages mirrored.

use tracing::trace_span;

use crate::comm::Op;
use crate::config::WeightAt;
use crate::ep::{DispatchGrads, Group, Handle, Received};
use crate::error::{Error, Result};
use crate::kernels::{
    AuxBwd, BiasGrad, DownBwd, GatherRows, InputWeightBwd, Kernels, LinearBwd, Origin, RenormalizeKept, RouteBwd,
    RowDest, RowSource, Scalar, SlotWeights, UpDgrad, Wgrad,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::context::{BackwardProgress, Context};
use super::definition::Layer;
use super::forward::{RoutedExperts, borrow};
use super::gradients::{Cotangents, GradientMask, GradientRequest, Gradients, GradientsMut};
use super::params::Inputs;
use super::refuse::refuse_on_error;
use super::{check, payload, shared_expert};

const CALL: &str = "Layer::backward";

/// Gradients on the way from the routing weights to the router.
struct RouterGrads<D: Kernels> {
    logits: Tensor<D>,
    weights: Tensor<D>,
}

impl Layer {
    /// Backward over all ranks of the group, with the same `x` and parameters as forward. Collectives:
    /// combine_bwd, dispatch_bwd.
    ///
    /// # Errors
    /// [`Error::BackwardNotAgreed`] before any collective; otherwise as forward.
    pub fn backward<'a, D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'a, D, impl Into<Scalar<'a, D>>>,
        wanted: GradientMask,
    ) -> Result<Gradients<D>> {
        let request = GradientRequest { wanted, given: GradientsMut::none() };
        backward(self, group, context, inputs, cotangents.scalar(), request)
    }

    /// [`backward`](Self::backward) with some gradients (of x, of parameters) in memory of the caller, and others in new
    /// memory.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_with<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'_, D, Scalar<'_, D>>,
        request: GradientRequest<'_, D>,
    ) -> Result<Gradients<D>> {
        backward(self, group, context, inputs, cotangents, request)
    }

    /// [`backward`](Self::backward) into memory of the caller; see [`forward_into`](Self::forward_into).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_into<'a, D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'a, D, impl Into<Scalar<'a, D>>>,
        into: GradientsMut<'_, D>,
    ) -> Result<()> {
        backward_into(self, group, context, inputs, cotangents.scalar(), into).map(drop)
    }
}

fn backward<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    context: Context<D>,
    inputs: Inputs<'_, '_, D>,
    cotangents: Cotangents<'_, D, Scalar<'_, D>>,
    request: GradientRequest<'_, D>,
) -> Result<Gradients<D>> {
    context.handle.check_backward(CALL)?;
    // Shapes are checked below, where the other ranks are told.
    let gradients = Gradients::empty(layer, group, &inputs, &request);
    let mut gradients = refuse_on_error(layer, group, Op::CombineBwd, gradients)?;
    let mut given = request.given;
    let mut into = gradients.view_mut();
    into.accumulate = given.accumulate;
    if let Some(x) = &mut given.x {
        into.x = Some(x.reborrow());
    }
    given.params.as_mut().map(|kind, memory| {
        if let Some(memory) = memory {
            into.set(kind, memory.reborrow());
        }
    });
    let router = backward_into(layer, group, context, inputs, cotangents, into)?;
    (gradients.logits, gradients.weights) = (router.logits, router.weights);
    Ok(gradients)
}

fn backward_into<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    context: Context<D>,
    inputs: Inputs<'_, '_, D>,
    cotangents: Cotangents<'_, D, Scalar<'_, D>>,
    mut into: GradientsMut<'_, D>,
) -> Result<RouterGrads<D>> {
    context.handle.check_backward(CALL)?;
    let checked = check_inputs(layer, group, &context, &inputs, &cotangents)
        .and_then(|()| check::gradients(CALL, layer, group, &inputs, &into));
    refuse_on_error(layer, group, Op::CombineBwd, checked)?;
    let device = group.device().clone();
    let dims = [context.handle.tokens(), layer.config.hidden];
    let zeros = match &cotangents.y {
        None => Tensor::zeros(&device, context.dtype, &dims).map(Some),
        Some(_) => Ok(None),
    };
    let zeros = refuse_on_error(layer, group, Op::CombineBwd, zeros)?;
    let Some(d_y) = zeros.as_ref().map(Tensor::view).or_else(|| borrow(&cotangents.y)) else {
        return Err(Error::invalid(CALL, "gradient of y", "a tensor", "none"));
    };

    let d_out = trace_span!("combine_bwd").in_scope(|| group.dispatcher().combine_bwd_rows(&context.handle, d_y))?;
    context.progress.set(BackwardProgress::ROWS);
    let place = group.dispatcher().place_for_return(&context.handle, context.dtype, layer.config.hidden);
    let computed = trace_span!("experts_bwd").in_scope(|| {
        experts(
            layer,
            &device,
            &context,
            &inputs,
            OutputGrads { d_out: &d_out, d_y: d_y.borrow(), place: place? },
            &mut into,
        )
    });
    let (d_rows, d_slot_weights) = refuse_on_error(layer, group, Op::DispatchBwd, computed)?;
    drop(d_out);
    // Router and shared expert add to the gradient of x, so it is made also where nobody wants it.
    let unwanted = match &into.x {
        Some(_) => Ok(None),
        None => Tensor::empty(&device, context.dtype, &dims).map(Some),
    };
    let weights = &context.weights;
    let memory = unwanted.and_then(|x| Ok((x, Tensor::empty(&device, weights.dtype(), weights.dims())?)));
    let (mut unwanted, mut d_weights) = refuse_on_error(layer, group, Op::DispatchBwd, memory)?;
    let mut given = into.x.take();
    let d_x = given.as_mut().map(TensorMut::reborrow).or(unwanted.as_mut().map(Tensor::view_mut));
    let Some(mut d_x) = d_x else {
        return Err(Error::invalid(CALL, "gradient of x", "a tensor", "none"));
    };
    let grads = DispatchGrads {
        rows: d_rows.view(),
        weights: Some(d_slot_weights.view()),
        d_tokens: d_x.reborrow(),
        d_weights: Some(d_weights.view_mut()),
    };
    trace_span!("dispatch_bwd").in_scope(|| group.dispatcher().dispatch_bwd(&context.handle, grads))?;
    context.progress.set(BackwardProgress::ALL);
    drop((d_rows, d_slot_weights));

    let router = trace_span!("route_bwd").in_scope(|| {
        let origin = Origin { rank: group.rank(), layer: layer.number() };
        let grads = RouterCotangents { origin, weights: d_weights, d_aux: cotangents.aux };
        router(layer, &device, &context, &inputs, grads, d_x.reborrow(), &mut into)
    })?;
    if let Some(saved) = context.shared {
        trace_span!("shared expert_bwd")
            .in_scope(|| shared_expert::backward(layer, &device, saved, &inputs, (d_y, d_x), &mut into))?;
    }
    Ok(router)
}

/// Checks that backward gets what forward had, and a gradient of the output's shape.
fn check_inputs<D: Kernels>(
    layer: &Layer,
    group: &Group<D>,
    context: &Context<D>,
    inputs: &Inputs<'_, '_, D>,
    cotangents: &Cotangents<'_, D, Scalar<'_, D>>,
) -> Result<()> {
    check::inputs(CALL, layer, group, inputs.x, inputs.params)?;
    let spec = context.handle.spec();
    let (own, found) = (layer.number(), spec.layer);
    if own != found {
        return Err(Error::invalid(CALL, "context", format!("one of layer {own}"), format!("one of layer {found}")));
    }
    // The sizes of two formulas may be the same.
    if spec.formula != payload::formula(layer.fingerprint, layer.config.payload, context.dtype) {
        return Err(Error::invalid(CALL, "context", "one of this configuration", "one of another"));
    }
    let dims = [context.handle.tokens(), layer.config.hidden];
    Error::check_shape(CALL, "x", &dims, inputs.x.dims())?;
    Error::check_dtype(CALL, "x", context.dtype, inputs.x.dtype())?;
    if let Some(y) = &cotangents.y {
        Error::check_shape(CALL, "gradient of y", &dims, y.dims())?;
        Error::check_dtype(CALL, "gradient of y", context.dtype, y.dtype())?;
    }
    cotangents.aux.check(CALL, "gradient of aux", context.dtype.accumulator())
}

/// The output's gradient, as the routed experts need it.
struct OutputGrads<'a, D: Kernels> {
    /// The rows of it that dispatch has brought here.
    d_out: &'a Received<D>,
    /// `[T, H]`.
    d_y: TensorRef<'a, D>,
    /// Memory for the gradient of the received rows that saves a copy on their way back.
    place: Option<Tensor<D>>,
}

/// Gradients of the routed experts into `into`; gives those of the received rows `[N, H]` and the slot weights `[N]`.
fn experts<D: Kernels>(
    layer: &Layer,
    device: &D,
    context: &Context<D>,
    inputs: &Inputs<'_, '_, D>,
    OutputGrads { d_out, d_y, place }: OutputGrads<'_, D>,
    into: &mut GradientsMut<'_, D>,
) -> Result<(Tensor<D>, Tensor<D>)> {
    let (config, params, handle) = (&layer.config, inputs.params, &context.handle);
    let stage = RoutedExperts { layer, params, handle, received: &context.received, dtype: context.dtype };
    let x = inputs.x.borrow();
    let rows = context.received.source(x, handle);
    let grad = d_out.source(d_y.borrow(), handle);
    // Two products read these rows.
    let in_order = match &grad.map {
        Some(map) if device.orders_rows(context.dtype, config.intermediate) => {
            let mut rows = handle.slot_tensor(device, context.dtype, config.hidden)?;
            let (source, origin) = (grad.base.borrow(), handle.origin());
            let call = GatherRows { source, map: map.borrow(), origin, out: rows.view_mut() };
            device.gather_rows(call)?;
            Some(rows)
        }
        _ => None,
    };
    let grad = in_order.as_ref().map_or(grad, |rows| RowSource::direct(rows.view()));
    let slot_weights = stage.slot_weights();
    let at_input = config.weight_at == WeightAt::Input;
    let (on_rows, on_bias) = match slot_weights.map(|w| w.values) {
        values if at_input => (values, None),
        values => (None, values),
    };

    let recomputed = match &context.pre {
        Some(_) => None,
        None => {
            let mut pre = handle.slot_tensor(device, context.dtype, config.up_rows())?;
            stage.up(device, rows.borrow(), Some(pre.view_mut()))?;
            Some(pre)
        }
    };
    let Some(pre) = context.pre.as_ref().or(recomputed.as_ref()) else {
        return Err(Error::invalid(CALL, "pre-activations", "a tensor", "none"));
    };

    let mut d_pre = handle.slot_tensor(device, context.dtype, config.up_rows())?;
    let mut hidden = match into.params.down.is_some() {
        true => Some(handle.slot_tensor(device, context.dtype, config.intermediate)?),
        false => None,
    };
    let mut d_slot_weights = Tensor::empty(device, context.dtype.accumulator(), &[handle.rows()])?;
    let weight = params.down.acquire()?;
    device.wait(weight.ready.as_ref())?;
    let call = DownBwd {
        grad: grad.borrow(),
        segments: handle.segments(),
        weight: weight.weight()?,
        bias: borrow(&params.others.down_bias),
        pre: pre.view(),
        slot_weights: slot_weights.as_ref().map(SlotWeights::borrow),
        activation: config.activation,
        d_pre: d_pre.view_mut(),
        hidden: hidden.as_mut().map(Tensor::view_mut),
        d_slot_weights: Some(d_slot_weights.view_mut()),
    };
    device.down_bwd(call)?;
    drop(weight);

    // Before the rows' gradient takes its room: a device may need as much for the sums.
    let grads = ExpertGrads { device, handle, accumulate: into.accumulate };
    let out = &mut into.params;
    if let (Some(weight), Some(hidden)) = (&mut out.down, &hidden) {
        let weights = SumWeights { on_weight: None, on_bias };
        grads.wgrad(grad, RowSource::direct(hidden.view()), weights, weight, out.down_bias.as_mut())?;
    }
    drop(in_order);
    if let Some(weight) = &mut out.up {
        let weights = SumWeights { on_weight: borrow(&on_rows), on_bias: None };
        grads.wgrad(RowSource::direct(d_pre.view()), rows.borrow(), weights, weight, out.up_bias.as_mut())?;
    }
    drop(hidden);

    let mut d_rows = place.map_or_else(|| handle.slot_tensor(device, context.dtype, config.hidden), Ok)?;
    let weight = params.up.acquire()?;
    device.wait(weight.ready.as_ref())?;
    let input_weight = on_rows.as_ref().map(|values| InputWeightBwd {
        values: values.borrow(),
        rows: rows.borrow(),
        d_slot_weights: Some(d_slot_weights.view_mut()),
    });
    let call = UpDgrad {
        d_pre: d_pre.view(),
        segments: handle.segments(),
        weight: weight.weight()?,
        input_weight,
        out: RowDest::direct(d_rows.view_mut()),
    };
    device.up_dgrad(call)?;
    drop(weight);
    Ok((d_rows, d_slot_weights))
}

/// Weights of the slots in the sums over them.
struct SumWeights<'a, D: Kernels> {
    on_weight: Option<TensorRef<'a, D>>,
    on_bias: Option<TensorRef<'a, D>>,
}

/// Weight gradients in one handle's layout.
struct ExpertGrads<'a, D: Kernels> {
    device: &'a D,
    handle: &'a Handle<D>,
    accumulate: bool,
}

impl<D: Kernels> ExpertGrads<'_, D> {
    /// Gradients of a weight and of its bias.
    fn wgrad(
        &self,
        left: RowSource<'_, D>,
        right: RowSource<'_, D>,
        weights: SumWeights<'_, D>,
        out: &mut TensorMut<'_, D>,
        bias: Option<&mut TensorMut<'_, D>>,
    ) -> Result<()> {
        let call = Wgrad {
            left: left.borrow(),
            right: right.borrow(),
            slot_weights: borrow(&weights.on_weight),
            segments: self.handle.segments(),
            out: out.reborrow(),
            bias: bias.map(|out| BiasGrad { slot_weights: borrow(&weights.on_bias), out: out.reborrow() }),
            accumulate: self.accumulate,
        };
        self.device.wgrad(call)
    }
}

/// Gradients that reach the router.
struct RouterCotangents<'a, D: Kernels> {
    /// Whose router it is, for errors.
    origin: Origin,
    /// Of the routing weights, `[T, K]`.
    weights: Tensor<D>,
    /// Of the auxiliary losses.
    d_aux: Scalar<'a, D>,
}

/// From the routing weights' gradient to logits, router and x.
fn router<D: Kernels>(
    layer: &Layer,
    device: &D,
    context: &Context<D>,
    inputs: &Inputs<'_, '_, D>,
    RouterCotangents { origin, mut weights, d_aux }: RouterCotangents<'_, D>,
    mut d_x: TensorMut<'_, D>,
    into: &mut GradientsMut<'_, D>,
) -> Result<RouterGrads<D>> {
    let (config, params) = (&layer.config, inputs.params);
    if layer.renormalizes_kept() {
        let mut d_weights = Tensor::empty(device, weights.dtype(), weights.dims())?;
        let keep = RenormalizeKept {
            weights: context.weights.view(),
            kept: context.handle.kept_ids(),
            grad: Some(weights.view()),
            out: d_weights.view_mut(),
        };
        device.renormalize_kept(keep)?;
        weights = d_weights;
    }
    let mut logits = Tensor::empty(device, context.logits.dtype(), context.logits.dims())?;
    let aux =
        context.aux_sums.as_ref().map(|sums| AuxBwd { aux: &config.aux, sums: sums.view(), d_loss: d_aux.borrow() });
    let call = RouteBwd {
        config: &config.router,
        logits: context.logits.view(),
        jitter: context.jitter,
        ids: context.ids.view(),
        d_weights: weights.view(),
        aux,
        origin,
        d_logits: logits.view_mut(),
    };
    device.route_bwd(call)?;
    let linear = LinearBwd {
        x: inputs.x.borrow(),
        weight: params.router.borrow(),
        d_out: logits.view(),
        d_x: Some(d_x.reborrow()),
        d_weight: into.params.router.as_mut().map(TensorMut::reborrow),
        d_bias: into.params.router_bias.as_mut().map(TensorMut::reborrow),
    };
    device.linear_bwd(linear)?;
    Ok(RouterGrads { logits, weights })
}
