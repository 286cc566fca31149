//! Backward: the stages mirrored.

use tracing::trace_span;

use crate::comm::Op;
use crate::ep::{ArrivingRows, DispatchGrads, Group};
use crate::error::{Error, Result};
use crate::kernels::{AuxBwd, Kernels, LinearBwd, Origin, RenormalizeKept, RouteBwd, Scalar};
use crate::tensor::{Tensor, TensorMut};

use super::context::{BackwardProgress, Context};
use super::definition::Layer;
use super::experts_bwd::{ExpertsBwd, WgradOrder};
use super::gradients::{Cotangents, GradientMask, GradientRequest, Gradients, GradientsMut};
use super::overlap::LayerOverlap;
use super::params::{Inputs, borrow};
use super::refuse::refuse_on_error;
use super::{check, shared_expert};

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

    // Either products run while rows travel, or one follows the other, with less memory.
    let stage =
        |into: &GradientsMut<'_, D>| ExpertsBwd::new(layer, &device, &context, &inputs, into.params.down.is_some());
    let overlapped = context.overlap == LayerOverlap::Yes
        && group.dispatcher().overlaps_products(&context.handle, context.dtype, layer.config.hidden);
    let early = overlapped.then(|| stage(&into)).transpose();
    let mut early = refuse_on_error(layer, group, Op::CombineBwd, early)?;
    let d_out = trace_span!("combine_bwd").in_scope(|| match &mut early {
        Some(experts) => {
            let mut start = |arriving: ArrivingRows<'_, D>| experts.start(&device, arriving);
            group.dispatcher().combine_bwd_rows_with_product(&context.handle, d_y, &mut start)
        }
        None => group.dispatcher().combine_bwd_rows(&context.handle, d_y),
    })?;
    context.progress.set(BackwardProgress::ROWS);
    let place = group.dispatcher().place_for_return(&context.handle, context.dtype, layer.config.hidden);
    let computed = trace_span!("experts_bwd").in_scope(|| {
        let mut experts = match early {
            Some(experts) => experts.started()?,
            None => {
                let mut experts = stage(&into)?;
                experts.down_bwd(&device, d_out.source(d_y.borrow(), &context.handle))?;
                // Before the rows' gradient takes its room: a device may need as much for the sums.
                experts.wgrads(
                    &device,
                    d_out.source(d_y.borrow(), &context.handle),
                    &mut into,
                    WgradOrder::DownFirst,
                )?;
                experts
            }
        };
        let d_rows = experts.dgrad(&device, place?)?;
        Ok((experts, d_rows))
    });
    let (mut experts, d_rows) = refuse_on_error(layer, group, Op::DispatchBwd, computed)?;
    let d_out = overlapped.then_some(d_out);
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
    let d_slot_weights = experts.take_d_slot_weights();
    let grads = DispatchGrads {
        rows: d_rows.view(),
        weights: d_slot_weights.as_ref().map(Tensor::view),
        d_tokens: d_x.reborrow(),
        d_weights: Some(d_weights.view_mut()),
    };
    let mut summed = Ok(());
    trace_span!("dispatch_bwd").in_scope(|| match &d_out {
        Some(d_out) => group.dispatcher().dispatch_bwd_with_products(&context.handle, grads, &mut |sms| {
            let grad = d_out.source(d_y.borrow(), &context.handle);
            summed = experts.wgrads(&device, grad, &mut into, WgradOrder::UpFirst { movement_sms: sms });
        }),
        None => group.dispatcher().dispatch_bwd(&context.handle, grads),
    })?;
    context.progress.set(BackwardProgress::ALL);
    if let Err(error) = summed {
        // The movement that the others were in went well: they are told where they meet this rank next.
        context.progress.set_refused();
        return Err(layer.refuse_backward(group, error));
    }
    drop((d_rows, d_slot_weights, experts, d_out));

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
    if spec.formula != context.overlap.formula(layer, context.dtype) {
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
