//! The shared expert: one expert that every token visits, on this rank's own tokens.
//!
//! It runs through the routed experts' kernels, as a layout of one segment; its gate is a routing weight.

use std::sync::Arc;

use crate::config::{SharedConfig, WeightAt};
use crate::error::Result;
use crate::kernels::{
    BiasGrad, Down, DownBwd, Kernels, Linear, LinearBwd, RowDest, RowSource, Segments, Sigmoid, SlotWeights, Up,
    UpDgrad, Wgrad,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::definition::Layer;
use super::gradients::GradientsMut;
use super::mode::Mode;
use super::params::{Inputs, Params, borrow};

/// State of the shared expert that backward needs.
#[derive(Debug)]
pub(super) struct SharedContext<D: Kernels> {
    /// `[T, G·S]`, unless recomputed.
    pre: Option<Tensor<D>>,
    /// sigmoid(x·gate), accumulator type `[T, 1]`.
    gate: Option<Tensor<D>>,
}

impl<D: Kernels> SharedContext<D> {
    pub(super) fn bytes(&self) -> usize {
        self.pre.as_ref().map_or(0, Tensor::bytes) + self.gate.as_ref().map_or(0, Tensor::bytes)
    }

    fn slot_weights(&self) -> Result<Option<SlotWeights<'_, D>>> {
        let Some(gate) = &self.gate else { return Ok(None) };
        let values = gate.view().reshape(&[gate.dims()[0]])?;
        Ok(Some(SlotWeights { values, map: None, at: WeightAt::Output }))
    }
}

/// The shared expert's parameters, as stacks of one expert.
struct SharedParams<'a, D: Kernels> {
    config: SharedConfig,
    up: TensorRef<'a, D>,
    up_bias: Option<TensorRef<'a, D>>,
    down: TensorRef<'a, D>,
    down_bias: Option<TensorRef<'a, D>>,
}

impl<'a, D: Kernels> SharedParams<'a, D> {
    /// `None` where the layer has no shared expert (the shapes were checked).
    fn of(layer: &Layer, params: &'a Params<'_, D>) -> Result<Option<Self>> {
        let (Some(config), Some(up), Some(down)) =
            (layer.config.shared, &params.others.shared_up, &params.others.shared_down)
        else {
            return Ok(None);
        };
        let h = layer.config.hidden;
        let up = up.borrow().reshape(&[1, layer.config.activation.gate_factor() * config.intermediate, h])?;
        let down = down.borrow().reshape(&[1, h, config.intermediate])?;
        let bias = |bias: &'a Option<TensorRef<'_, D>>| {
            bias.as_ref().map(|bias| bias.borrow().reshape(&[1, bias.rows()])).transpose()
        };
        let (up_bias, down_bias) = (bias(&params.others.shared_up_bias)?, bias(&params.others.shared_down_bias)?);
        Ok(Some(Self { config, up, up_bias, down, down_bias }))
    }

    /// Up of x, and what it writes.
    fn up(
        &self,
        layer: &Layer,
        device: &D,
        x: TensorRef<'_, D>,
        mut outputs: SharedUpOutputs<D>,
        movement_sms: Option<usize>,
    ) -> Result<SharedUpOutputs<D>> {
        let SharedUpOutputs { segments, hidden, pre } = &mut outputs;
        device.up(Up {
            rows: RowSource::direct(x.borrow()),
            segments,
            weight: self.up.borrow().into(),
            bias: borrow(&self.up_bias),
            slot_weights: None,
            activation: layer.config.activation,
            pre: pre.as_mut().map(Tensor::view_mut),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms,
        })?;
        Ok(outputs)
    }

    /// Room for what up writes of x; `keep`: pre-activations too.
    fn up_outputs(&self, device: &D, x: TensorRef<'_, D>, keep: bool) -> Result<SharedUpOutputs<D>> {
        let (tokens, dtype) = (x.rows(), x.dtype());
        let pre = keep.then(|| Tensor::empty(device, dtype, &[tokens, self.up.dims()[1]])).transpose()?;
        let hidden = Tensor::empty(device, dtype, &[tokens, self.config.intermediate])?;
        Ok(SharedUpOutputs { segments: device.single_segment(tokens)?, hidden, pre })
    }
}

/// What up writes.
#[derive(Debug)]
struct SharedUpOutputs<D: Kernels> {
    /// Of all tokens.
    segments: Arc<Segments<D>>,
    /// Activations `[T, S]`.
    hidden: Tensor<D>,
    /// Pre-activations `[T, G·S]`, if they are to be kept.
    pre: Option<Tensor<D>>,
}

/// A shared expert before its first product, for which it has taken the memory.
pub(super) struct ReadySharedExpert<'a, D: Kernels> {
    layer: &'a Layer,
    params: SharedParams<'a, D>,
    outputs: SharedUpOutputs<D>,
    /// Weight of the gate `[1, H]`, and room for its logits and values.
    gate: Option<(TensorRef<'a, D>, [Tensor<D>; 2])>,
}

impl<'a, D: Kernels> ReadySharedExpert<'a, D> {
    /// `None` where the layer has none.
    pub(super) fn new(
        layer: &'a Layer,
        device: &D,
        mode: Mode,
        x: TensorRef<'_, D>,
        params: &'a Params<'_, D>,
    ) -> Result<Option<Self>> {
        let Some(shared) = SharedParams::of(layer, params)? else { return Ok(None) };
        let outputs = shared.up_outputs(device, x.borrow(), mode.backward && !layer.config.recompute)?;
        let room = || Tensor::empty(device, x.dtype().accumulator(), &[x.rows(), 1]);
        let gate = match &params.others.shared_gate {
            Some(weight) => Some((weight.borrow(), [room()?, room()?])),
            None => None,
        };
        Ok(Some(Self { layer, params: shared, outputs, gate }))
    }

    /// Lists its tiles, so that nothing stands between a movement of rows, which is enqueued next, and up.
    pub(super) fn list_tiles(&self, device: &D) -> Result<()> {
        device.list_tiles(&self.outputs.segments)
    }

    /// Enqueues up first, beside a movement on so many SMs where there is one, and then the gate.
    pub(super) fn start(
        self,
        device: &D,
        x: TensorRef<'_, D>,
        movement_sms: Option<usize>,
    ) -> Result<PendingSharedExpert<D>> {
        let Self { layer, params, outputs, gate } = self;
        let SharedUpOutputs { hidden, pre, .. } = params.up(layer, device, x.borrow(), outputs, movement_sms)?;
        let gate = match gate {
            None => None,
            Some((weight, [mut logit, mut gate])) => {
                device.linear(Linear { x: x.borrow(), weight: weight.borrow(), bias: None, out: logit.view_mut() })?;
                device.sigmoid(Sigmoid { value: logit.view(), grad: None, out: gate.view_mut() })?;
                Some(gate)
            }
        };
        Ok(PendingSharedExpert { hidden, saved: SharedContext { pre, gate } })
    }
}

/// A shared expert on its way: all but the product that goes into the layer's output.
#[derive(Debug)]
pub(super) struct PendingSharedExpert<D: Kernels> {
    /// `[T, S]`.
    hidden: Tensor<D>,
    saved: SharedContext<D>,
}

/// The part of the shared expert that needs no output; `None` where the layer has none.
pub(super) fn begin<D: Kernels>(
    layer: &Layer,
    device: &D,
    mode: Mode,
    x: TensorRef<'_, D>,
    params: &Params<'_, D>,
) -> Result<Option<PendingSharedExpert<D>>> {
    let ready = ReadySharedExpert::new(layer, device, mode, x.borrow(), params)?;
    ready.map(|ready| ready.start(device, x, None)).transpose()
}

/// Adds the shared expert's output to `y`.
pub(super) fn finish<D: Kernels>(
    layer: &Layer,
    device: &D,
    mode: Mode,
    pending: Option<PendingSharedExpert<D>>,
    params: &Params<'_, D>,
    mut y: TensorMut<'_, D>,
) -> Result<Option<SharedContext<D>>> {
    let (Some(shared), Some(PendingSharedExpert { hidden, saved })) = (SharedParams::of(layer, params)?, pending)
    else {
        return Ok(None);
    };
    let segments = device.single_segment(hidden.dims()[0])?;
    let call = Down {
        rows: RowSource::direct(hidden.view()),
        segments: &segments,
        weight: shared.down.borrow().into(),
        bias: borrow(&shared.down_bias),
        slot_weights: saved.slot_weights()?,
        out: RowDest::adding(y.reborrow()),
    };
    device.down(call)?;
    Ok(mode.backward.then_some(saved))
}

/// Adds the shared expert's gradient to `d_x`; writes its parameters' where they are wanted.
pub(super) fn backward<D: Kernels>(
    layer: &Layer,
    device: &D,
    saved: SharedContext<D>,
    inputs: &Inputs<'_, '_, D>,
    (d_y, mut d_x): (TensorRef<'_, D>, TensorMut<'_, D>),
    into: &mut GradientsMut<'_, D>,
) -> Result<()> {
    let Some(shared) = SharedParams::of(layer, inputs.params)? else { return Ok(()) };
    let x = inputs.x;
    let tokens = x.rows();
    let segments = device.single_segment(tokens)?;
    let (s, up_rows, acc) = (shared.config.intermediate, shared.up.dims()[1], x.dtype().accumulator());
    let recomputed = match saved.pre {
        Some(_) => None,
        None => shared.up(layer, device, x, shared.up_outputs(device, x, true)?, None)?.pre,
    };
    let Some(pre) = saved.pre.as_ref().or(recomputed.as_ref()) else { return Ok(()) };
    let mut d_pre = Tensor::empty(device, x.dtype(), &[tokens, up_rows])?;
    let mut hidden = Tensor::empty(device, x.dtype(), &[tokens, s])?;
    let mut d_gate = Tensor::empty(device, acc, &[tokens])?;
    let call = DownBwd {
        grad: RowSource::direct(d_y.borrow()),
        segments: &segments,
        weight: shared.down.borrow().into(),
        bias: borrow(&shared.down_bias),
        pre: pre.view(),
        slot_weights: saved.slot_weights()?,
        activation: layer.config.activation,
        d_pre: d_pre.view_mut(),
        hidden: Some(hidden.view_mut()),
        d_slot_weights: Some(d_gate.view_mut()),
    };
    device.down_bwd(call)?;
    let dgrad = UpDgrad {
        d_pre: d_pre.view(),
        segments: &segments,
        weight: shared.up.borrow().into(),
        input_weight: None,
        out: RowDest::adding(d_x.reborrow()),
    };
    device.up_dgrad(dgrad)?;
    let sums = WeightSums { device, segments: &segments };
    let params = &mut into.params;
    if let Some(out) = &mut params.shared_up {
        sums.wgrad([d_pre.view(), x.borrow()], out.reborrow(), (&mut params.shared_up_bias, None))?;
    }
    if let Some(out) = &mut params.shared_down {
        let on_bias = saved.slot_weights()?.map(|weights| weights.values);
        sums.wgrad([d_y.borrow(), hidden.view()], out.reborrow(), (&mut params.shared_down_bias, on_bias))?;
    }
    match (&saved.gate, &inputs.params.others.shared_gate) {
        (Some(gate), Some(weight)) => {
            let mut d_logit = Tensor::empty(device, acc, &[tokens, 1])?;
            let d_gate = d_gate.reshape(&[tokens, 1])?;
            let sigmoid = Sigmoid { value: gate.view(), grad: Some(d_gate.view()), out: d_logit.view_mut() };
            device.sigmoid(sigmoid)?;
            let linear = LinearBwd {
                x: x.borrow(),
                weight: weight.borrow(),
                d_out: d_logit.view(),
                d_x: Some(d_x.reborrow()),
                d_weight: into.params.shared_gate.as_mut().map(TensorMut::reborrow),
                d_bias: None,
            };
            device.linear_bwd(linear)
        }
        _ => Ok(()),
    }
}

/// Sums over this rank's tokens.
struct WeightSums<'a, D: Kernels> {
    device: &'a D,
    segments: &'a Segments<D>,
}

impl<D: Kernels> WeightSums<'_, D> {
    /// Gradient of one of the two matrices, in its parameter's shape, and of its bias where there is one: `on_bias` are
    /// the factors of the tokens in its sum.
    fn wgrad(
        &self,
        [left, right]: [TensorRef<'_, D>; 2],
        out: TensorMut<'_, D>,
        (bias, on_bias): (&mut Option<TensorMut<'_, D>>, Option<TensorRef<'_, D>>),
    ) -> Result<()> {
        let on_bias = borrow(&on_bias);
        let rows = left.dims()[1];
        let mut out = out.reshape(&[1, rows, right.dims()[1]])?;
        let mut bias = bias.as_mut().map(|bias| bias.reborrow().reshape(&[1, rows])).transpose()?;
        let call = Wgrad {
            left: RowSource::direct(left.borrow()),
            right: RowSource::direct(right.borrow()),
            slot_weights: None,
            segments: self.segments,
            out: out.reborrow(),
            bias: bias.as_mut().map(|out| BiasGrad { slot_weights: on_bias, out: out.reborrow() }),
            accumulate: false,
            movement_sms: None,
        };
        self.device.wgrad(call)
    }
}
