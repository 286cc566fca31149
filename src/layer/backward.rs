//! Backward: the stages mirrored.

use tracing::trace_span;

use crate::comm::Op;
use crate::config::WeightAt;
use crate::ep::{DispatchGrads, Group, Received};
use crate::error::{Error, Result};
use crate::kernels::{
    AuxBwd, BiasGrad, DownBwd, InputWeightBwd, KeepSum, Kernels, LinearBwd, RouteBwd, RowDest, RowSource, SlotWeights,
    UpDgrad, Wgrad,
};
use crate::tensor::{Tensor, TensorRef};

use super::forward::{Experts, borrow, refuse};
use super::{Context, Cotangents, Gradients, Inputs, Layer, Wanted, check, shared};

const CALL: &str = "Layer::backward";

pub(super) fn backward<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    context: Context<D>,
    inputs: Inputs<'_, D>,
    cotangents: Cotangents<'_, D>,
    wanted: Wanted,
) -> Result<Gradients<D>> {
    context.handle.check_backward(CALL)?;
    if let Err(e) = check_inputs(layer, group, &context, &inputs, &cotangents) {
        return Err(refuse(layer, group, Op::CombineBwd, e));
    }
    let (device, stream) = (group.device().clone(), group.stream().clone());
    let on = (&device, &stream);
    let dims = [context.handle.tokens(), layer.config.hidden];
    let zeros = match &cotangents.y {
        None => Some(Tensor::zeros(&device, context.dtype, &dims)?),
        Some(_) => None,
    };
    let Some(d_y) = zeros.as_ref().map(Tensor::view).or_else(|| borrow(&cotangents.y)) else {
        return Err(Error::invalid(CALL, "gradient of y", "a tensor", "none"));
    };

    let d_out = trace_span!("combine_bwd").in_scope(|| group.dispatcher().combine_bwd_rows(&context.handle, d_y))?;
    let computed =
        trace_span!("experts_bwd").in_scope(|| experts(layer, on, &context, &inputs, (&d_out, d_y), wanted.experts));
    let (mut gradients, d_rows, d_slot_weights) = match computed {
        Ok(computed) => computed,
        Err(e) => return Err(refuse(layer, group, Op::DispatchBwd, e)),
    };
    drop(d_out);
    let mut d_x = Tensor::empty(&device, context.dtype, &dims)?;
    let mut d_weights = Tensor::empty(&device, context.weights.dtype(), context.weights.dims())?;
    let grads = DispatchGrads {
        rows: d_rows.view(),
        weights: Some(d_slot_weights.view()),
        d_tokens: d_x.view_mut(),
        d_weights: Some(d_weights.view_mut()),
    };
    trace_span!("dispatch_bwd").in_scope(|| group.dispatcher().dispatch_bwd(&context.handle, grads))?;
    drop((d_rows, d_slot_weights));

    gradients.x = Some(d_x);
    gradients.weights = d_weights;
    trace_span!("route_bwd")
        .in_scope(|| router(layer, on, &context, &inputs, (&mut gradients, wanted.router), cotangents.aux))?;
    if let Some(saved) = context.shared {
        trace_span!("shared expert_bwd")
            .in_scope(|| shared::backward(layer, on, saved, &inputs, d_y, (&mut gradients, wanted.shared)))?;
    }
    gradients.x = gradients.x.filter(|_| wanted.x);
    Ok(gradients)
}

/// Checks that backward gets what forward had, and a gradient of the output's shape.
fn check_inputs<D: Kernels>(
    layer: &Layer,
    group: &Group<D>,
    context: &Context<D>,
    inputs: &Inputs<'_, D>,
    cotangents: &Cotangents<'_, D>,
) -> Result<()> {
    check::inputs(layer, group, inputs.x, inputs.params)?;
    let (own, found) = (layer.number(), context.handle.spec().layer);
    if own != found {
        return Err(Error::invalid(CALL, "context", format!("one of layer {own}"), format!("one of layer {found}")));
    }
    let dims = [context.handle.tokens(), layer.config.hidden];
    Error::check_shape(CALL, "x", &dims, inputs.x.dims())?;
    Error::check_dtype(CALL, "x", context.dtype, inputs.x.dtype())?;
    if let Some(y) = &cotangents.y {
        Error::check_shape(CALL, "gradient of y", &dims, y.dims())?;
        Error::check_dtype(CALL, "gradient of y", context.dtype, y.dtype())?;
    }
    Ok(())
}

/// Gradients of the routed experts; of the received rows `[N, H]`; and of the slot weights `[N]`.
fn experts<D: Kernels>(
    layer: &Layer,
    (device, stream): (&D, &D::Stream),
    context: &Context<D>,
    inputs: &Inputs<'_, D>,
    (d_out, d_y): (&Received<D>, TensorRef<'_, D>),
    wanted: bool,
) -> Result<(Gradients<D>, Tensor<D>, Tensor<D>)> {
    let (config, params, handle) = (&layer.config, inputs.params, &context.handle);
    let stage = Experts { layer, params, handle, received: &context.received, dtype: context.dtype };
    let x = inputs.x.borrow();
    let rows = context.received.source(x, handle);
    let grad = d_out.source(d_y.borrow(), handle);
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
            stage.up(device, stream, rows.borrow(), Some(pre.view_mut()))?;
            Some(pre)
        }
    };
    let Some(pre) = context.pre.as_ref().or(recomputed.as_ref()) else {
        return Err(Error::invalid(CALL, "pre-activations", "a tensor", "none"));
    };

    let mut d_pre = handle.slot_tensor(device, context.dtype, config.up_rows())?;
    let mut hidden = match wanted {
        true => Some(handle.slot_tensor(device, context.dtype, config.intermediate)?),
        false => None,
    };
    let mut d_slot_weights = Tensor::empty(device, context.dtype.accumulator(), &[handle.rows()])?;
    let weight = params.down.acquire(stream)?;
    device.wait(stream, weight.ready.as_ref())?;
    let call = DownBwd {
        grad: grad.borrow(),
        zones: handle.zones(),
        weight: weight.tensor.borrow(),
        bias: borrow(&params.down_bias),
        pre: pre.view(),
        slot_weights: slot_weights.as_ref().map(SlotWeights::borrow),
        activation: config.activation,
        d_pre: d_pre.view_mut(),
        hidden: hidden.as_mut().map(Tensor::view_mut),
        d_slot_weights: Some(d_slot_weights.view_mut()),
    };
    device.down_bwd(stream, call)?;
    drop(weight);

    let mut d_rows = handle.slot_tensor(device, context.dtype, config.hidden)?;
    let weight = params.up.acquire(stream)?;
    device.wait(stream, weight.ready.as_ref())?;
    let input_weight = on_rows.as_ref().map(|values| InputWeightBwd {
        values: values.borrow(),
        rows: rows.borrow(),
        d_slot_weights: Some(d_slot_weights.view_mut()),
    });
    let call = UpDgrad {
        d_pre: d_pre.view(),
        zones: handle.zones(),
        weight: weight.tensor.borrow(),
        input_weight,
        out: RowDest::direct(d_rows.view_mut()),
    };
    device.up_dgrad(stream, call)?;
    drop(weight);

    let mut gradients = empty(device, context)?;
    if let Some(hidden) = &hidden {
        let weights = ExpertGrads { device, stream, handle, biased: config.expert_bias };
        let down = weights.wgrad(grad, RowSource::direct(hidden.view()), (None, on_bias))?;
        let up = weights.wgrad(RowSource::direct(d_pre.view()), rows, (on_rows, None))?;
        (gradients.down, gradients.down_bias) = (Some(down.0), down.1);
        (gradients.up, gradients.up_bias) = (Some(up.0), up.1);
    }
    Ok((gradients, d_rows, d_slot_weights))
}

/// Weight gradients in one handle's layout.
struct ExpertGrads<'a, D: Kernels> {
    device: &'a D,
    stream: &'a D::Stream,
    handle: &'a crate::ep::Handle<D>,
    biased: bool,
}

impl<D: Kernels> ExpertGrads<'_, D> {
    /// Gradient of a weight and of its bias, with the slot weights of each.
    #[allow(clippy::type_complexity)]
    fn wgrad(
        &self,
        left: RowSource<'_, D>,
        right: RowSource<'_, D>,
        (on_weight, on_bias): (Option<TensorRef<'_, D>>, Option<TensorRef<'_, D>>),
    ) -> Result<(Tensor<D>, Option<Tensor<D>>)> {
        let zones = self.handle.zones();
        let experts = zones.offsets.dims()[0];
        let (m, p, dtype) = (left.base.dims()[1], right.base.dims()[1], left.base.dtype());
        let mut out = Tensor::empty(self.device, dtype, &[experts, m, p])?;
        let mut bias = match self.biased {
            true => Some(Tensor::empty(self.device, dtype, &[experts, m])?),
            false => None,
        };
        let call = Wgrad {
            left: left.borrow(),
            right: right.borrow(),
            slot_weights: borrow(&on_weight),
            zones,
            out: out.view_mut(),
            bias: bias.as_mut().map(|b| BiasGrad { slot_weights: borrow(&on_bias), out: b.view_mut() }),
            accumulate: false,
        };
        self.device.wgrad(self.stream, call)?;
        Ok((out, bias))
    }
}

/// Gradients with nothing but room for the router's.
fn empty<D: Kernels>(device: &D, context: &Context<D>) -> Result<Gradients<D>> {
    Ok(Gradients {
        x: None,
        router: None,
        router_bias: None,
        up: None,
        up_bias: None,
        down: None,
        down_bias: None,
        shared_up: None,
        shared_down: None,
        shared_gate: None,
        logits: Tensor::empty(device, context.logits.dtype(), context.logits.dims())?,
        weights: Tensor::empty(device, context.weights.dtype(), &[0, 0])?,
    })
}

/// From the routing weights' gradient to logits, router and x.
fn router<D: Kernels>(
    layer: &Layer,
    (device, stream): (&D, &D::Stream),
    context: &Context<D>,
    inputs: &Inputs<'_, D>,
    (gradients, wanted): (&mut Gradients<D>, bool),
    d_aux: f64,
) -> Result<()> {
    let (config, params) = (&layer.config, inputs.params);
    if layer.keeps_sum() {
        let mut d_weights = Tensor::empty(device, gradients.weights.dtype(), gradients.weights.dims())?;
        let keep = KeepSum {
            weights: context.weights.view(),
            kept: context.handle.kept_ids(),
            grad: Some(gradients.weights.view()),
            out: d_weights.view_mut(),
        };
        device.keep_sum(stream, keep)?;
        gradients.weights = d_weights;
    }
    let aux = context.aux_sums.as_ref().map(|sums| AuxBwd { aux: &config.aux, sums: sums.view(), d_loss: d_aux });
    let call = RouteBwd {
        config: &config.router,
        logits: context.logits.view(),
        jitter: context.jitter,
        ids: context.ids.view(),
        d_weights: gradients.weights.view(),
        aux,
        d_logits: gradients.logits.view_mut(),
    };
    device.route_bwd(stream, call)?;
    let of = |t: TensorRef<'_, D>| Tensor::empty(device, t.dtype(), t.dims());
    let mut d_router = of(params.router)?;
    let mut d_bias = params.router_bias.map(of).transpose()?;
    let linear = LinearBwd {
        x: inputs.x.borrow(),
        weight: params.router.borrow(),
        d_out: gradients.logits.view(),
        d_x: gradients.x.as_mut().map(Tensor::view_mut),
        d_weight: wanted.then(|| d_router.view_mut()),
        d_bias: d_bias.as_mut().filter(|_| wanted).map(Tensor::view_mut),
    };
    device.linear_bwd(stream, linear)?;
    gradients.router = wanted.then_some(d_router);
    gradients.router_bias = d_bias.filter(|_| wanted);
    Ok(())
}
