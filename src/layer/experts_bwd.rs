//! Gradients of the routed experts: down's and the activation's, up's, and those of the weights.

use crate::config::WeightAt;
use crate::ep::{ArrivingRows, Handle};
use crate::error::{Error, Result};
use crate::kernels::{
    BiasGrad, DownBwd, GatherRows, InputWeightBwd, Kernels, RowDest, RowSource, SlotWeights, UpDgrad, Wgrad,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};
use crate::weights::WeightGuard;

use super::context::Context;
use super::definition::Layer;
use super::forward::RoutedExperts;
use super::gradients::GradientsMut;
use super::params::{Inputs, borrow};

/// The order of the weights' gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WgradOrder {
    /// Down's, then up's.
    DownFirst,
    /// Up's, the longer one, during the movement that was enqueued last, which takes so many SMs, then down's.
    UpFirst { movement_sms: usize },
}

/// Gradients of the routed experts on the way: memory that they have until the last is made.
#[derive(Debug)]
pub(super) struct ExpertsBwd<'a, 'p, D: Kernels> {
    stage: RoutedExperts<'a, 'p, D>,
    x: TensorRef<'a, D>,
    /// Pre-activations of forward, or made again.
    saved: Option<&'a Tensor<D>>,
    recomputed: Option<Tensor<D>>,
    /// Of down, which the first product reads.
    weight: Option<WeightGuard<'a, D>>,
    d_pre: Tensor<D>,
    /// Down's right operand, where its weight has a gradient.
    hidden: Option<Tensor<D>>,
    d_slot_weights: Option<Tensor<D>>,
    /// The output's gradient in slot order, where two products read it so.
    in_order: Option<Tensor<D>>,
    done: Result<()>,
}

impl<'a, 'p, D: Kernels> ExpertsBwd<'a, 'p, D> {
    /// Takes memory and down's weight, and makes pre-activations again where forward has kept none. `down`: its weight has
    /// a gradient.
    pub(super) fn new(
        layer: &'a Layer,
        device: &D,
        context: &'a Context<D>,
        inputs: &'a Inputs<'_, 'p, D>,
        down: bool,
    ) -> Result<Self> {
        let (config, params, handle) = (&layer.config, inputs.params, &context.handle);
        let stage = RoutedExperts { layer, params, handle, received: &context.received, dtype: context.dtype };
        let x = inputs.x.borrow();
        let recomputed = match &context.pre {
            Some(_) => None,
            None => {
                let mut pre = handle.slot_tensor(device, context.dtype, config.up_rows())?;
                stage.up(device, context.received.source(x.borrow(), handle), Some(pre.view_mut()))?;
                Some(pre)
            }
        };
        let d_pre = handle.slot_tensor(device, context.dtype, config.up_rows())?;
        let hidden = match down {
            true => Some(handle.slot_tensor(device, context.dtype, config.intermediate)?),
            false => None,
        };
        let d_slot_weights = Some(Tensor::empty(device, context.dtype.accumulator(), &[handle.rows()])?);
        let weight = params.down.acquire()?;
        device.wait(weight.ready.as_ref())?;
        let done = Err(Error::invalid("Layer::backward", "down's gradient during combine_bwd", "a call", "none"));
        let (saved, weight, in_order) = (context.pre.as_ref(), Some(weight), None);
        Ok(Self { stage, x, saved, recomputed, weight, d_pre, hidden, d_slot_weights, in_order, done })
    }

    /// Enqueues the first product, of gradient rows that are on their way.
    pub(super) fn start(&mut self, device: &D, arriving: ArrivingRows<'_, D>) {
        self.done = self.down_bwd(device, arriving.rows);
    }

    /// What has been started, or why it could not be.
    pub(super) fn started(self) -> Result<Self> {
        let Self { done, .. } = self;
        done.map(|()| Self { done: Ok(()), ..self })
    }

    /// Routing weights on the rows, and on the bias.
    fn slot_weights(&self) -> (Option<TensorRef<'_, D>>, Option<TensorRef<'_, D>>) {
        match (self.stage.layer.config.weight_at, self.stage.slot_weights().map(|w| w.values)) {
            (WeightAt::Input, values) => (values, None),
            (_, values) => (None, values),
        }
    }

    fn rows(&self) -> RowSource<'_, D> {
        self.stage.received.source(self.x.borrow(), self.stage.handle)
    }

    /// Through down and the activation.
    pub(super) fn down_bwd(&mut self, device: &D, grad: RowSource<'_, D>) -> Result<()> {
        let Self { stage, saved, recomputed, weight, d_pre, hidden, d_slot_weights, in_order, .. } = self;
        let RoutedExperts { layer, params, handle, dtype, .. } = *stage;
        let config = &layer.config;
        // Two products read these rows.
        *in_order = match &grad.map {
            Some(map) if device.orders_rows(dtype, config.intermediate) => {
                let mut rows = handle.slot_tensor(device, dtype, config.hidden)?;
                let (source, origin) = (grad.base.borrow(), handle.origin());
                device.gather_rows(GatherRows { source, map: map.borrow(), origin, out: rows.view_mut() })?;
                Some(rows)
            }
            _ => None,
        };
        let grad = match in_order {
            Some(rows) => RowSource::direct(rows.view()),
            None => grad.borrow(),
        };
        let weights = stage.slot_weights();
        let (Some(pre), Some(weight)) = (saved.or(recomputed.as_ref()), weight.take()) else {
            return Err(Error::invalid("Layer::backward", "pre-activations", "a tensor", "none"));
        };
        device.down_bwd(DownBwd {
            grad: grad.borrow(),
            segments: handle.segments(),
            weight: weight.weight()?,
            bias: borrow(&params.others.down_bias),
            pre: pre.view(),
            slot_weights: weights.as_ref().map(SlotWeights::borrow),
            activation: config.activation,
            d_pre: d_pre.view_mut(),
            hidden: hidden.as_mut().map(Tensor::view_mut),
            d_slot_weights: d_slot_weights.as_mut().map(Tensor::view_mut),
        })
    }

    /// Gradients of both weights and their biases, from the output's gradient.
    pub(super) fn wgrads(
        &mut self,
        device: &D,
        grad: RowSource<'_, D>,
        into: &mut GradientsMut<'_, D>,
        order: WgradOrder,
    ) -> Result<()> {
        let movement_sms = match order {
            WgradOrder::DownFirst => None,
            WgradOrder::UpFirst { movement_sms } => Some(movement_sms),
        };
        let grads = ExpertGrads { device, handle: self.stage.handle, accumulate: into.accumulate, movement_sms };
        if movement_sms.is_some() {
            self.up_wgrad(&grads, into)?;
        }
        let grads = ExpertGrads { movement_sms: movement_sms.filter(|_| into.params.up.is_none()), ..grads };
        let (in_order, hidden) = (self.in_order.take(), self.hidden.take());
        let grad = match &in_order {
            Some(rows) => RowSource::direct(rows.view()),
            None => grad.borrow(),
        };
        if let (Some(weight), Some(hidden)) = (&mut into.params.down, &hidden) {
            let weights = SumWeights { on_weight: None, on_bias: self.slot_weights().1 };
            grads.wgrad([grad, RowSource::direct(hidden.view())], weights, weight, into.params.down_bias.as_mut())?;
        }
        drop(in_order);
        if movement_sms.is_some() { Ok(()) } else { self.up_wgrad(&grads, into) }
    }

    fn up_wgrad(&self, grads: &ExpertGrads<'_, D>, into: &mut GradientsMut<'_, D>) -> Result<()> {
        let Some(weight) = &mut into.params.up else { return Ok(()) };
        let weights = SumWeights { on_weight: self.slot_weights().0, on_bias: None };
        let rows = [RowSource::direct(self.d_pre.view()), self.rows()];
        grads.wgrad(rows, weights, weight, into.params.up_bias.as_mut())
    }

    /// Through up, to the received rows `[N, H]`, in `place` where there is one.
    pub(super) fn dgrad(&mut self, device: &D, place: Option<Tensor<D>>) -> Result<Tensor<D>> {
        let RoutedExperts { layer, params, handle, dtype, .. } = self.stage;
        let mut d_rows = place.map_or_else(|| handle.slot_tensor(device, dtype, layer.config.hidden), Ok)?;
        let weight = params.up.acquire()?;
        device.wait(weight.ready.as_ref())?;
        let mut d_slot_weights = self.d_slot_weights.take();
        let input_weight = self.slot_weights().0.map(|values| InputWeightBwd {
            values,
            rows: self.rows(),
            d_slot_weights: d_slot_weights.as_mut().map(Tensor::view_mut),
        });
        device.up_dgrad(UpDgrad {
            d_pre: self.d_pre.view(),
            segments: handle.segments(),
            weight: weight.weight()?,
            input_weight,
            out: RowDest::direct(d_rows.view_mut()),
        })?;
        self.d_slot_weights = d_slot_weights;
        Ok(d_rows)
    }

    /// Gradient of the slot weights `[N]`, once all products that add to it are enqueued.
    pub(super) fn take_d_slot_weights(&mut self) -> Option<Tensor<D>> {
        self.d_slot_weights.take()
    }
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
    /// The next starts during the movement that was enqueued last, which takes so many SMs.
    movement_sms: Option<usize>,
}

impl<D: Kernels> ExpertGrads<'_, D> {
    /// Gradients of a weight and of its bias, from left and right rows.
    fn wgrad(
        &self,
        [left, right]: [RowSource<'_, D>; 2],
        weights: SumWeights<'_, D>,
        out: &mut TensorMut<'_, D>,
        bias: Option<&mut TensorMut<'_, D>>,
    ) -> Result<()> {
        self.device.wgrad(Wgrad {
            left: left.borrow(),
            right: right.borrow(),
            slot_weights: borrow(&weights.on_weight),
            segments: self.handle.segments(),
            out: out.reborrow(),
            bias: bias.map(|out| BiasGrad { slot_weights: borrow(&weights.on_bias), out: out.reborrow() }),
            accumulate: self.accumulate,
            movement_sms: self.movement_sms,
        })
    }
}
