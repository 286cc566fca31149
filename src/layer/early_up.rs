//! The up product that starts while its rows are still coming.

use crate::config::WeightAt;
use crate::dtype::DType;
use crate::ep::{ArrivingRows, Handle};
use crate::error::{Error, Result};
use crate::kernels::{Kernels, RowDest, SlotWeights, Up};
use crate::tensor::{Tensor, TensorRef};
use crate::weights::WeightGuard;

use super::definition::Layer;
use super::params::Params;

/// What up writes.
#[derive(Debug)]
pub(super) struct UpOutputs<D: Kernels> {
    /// Activations h `[N, I]`.
    pub(super) hidden: Tensor<D>,
    /// Pre-activations `[N, G·I]`, if they are to be kept.
    pub(super) pre: Option<Tensor<D>>,
}

/// Up during dispatch: its memory and weights are there before rows are sent, so that nothing stands between the two.
#[derive(Debug)]
pub(super) struct EarlyUp<'a, 'p, D: Kernels> {
    layer: &'a Layer,
    handle: &'a Handle<D>,
    params: &'a Params<'p, D>,
    weight: WeightGuard<'a, D>,
    outputs: UpOutputs<D>,
    done: Result<()>,
}

impl<'a, 'p, D: Kernels> EarlyUp<'a, 'p, D> {
    /// Takes what it needs.
    pub(super) fn new(
        layer: &'a Layer,
        device: &D,
        handle: &'a Handle<D>,
        params: &'a Params<'p, D>,
        (dtype, keep): (DType, bool),
    ) -> Result<Self> {
        let pre = match keep {
            true => Some(handle.slot_tensor(device, dtype, layer.config.up_rows())?),
            false => None,
        };
        let hidden = handle.slot_tensor(device, dtype, layer.config.intermediate)?;
        device.list_tiles(handle.segments())?;
        let weight = params.up.acquire()?;
        device.wait(weight.ready.as_ref())?;
        let done = Err(Error::invalid("Layer::forward", "up during dispatch", "a call", "none"));
        Ok(Self { layer, handle, params, weight, outputs: UpOutputs { hidden, pre }, done })
    }

    /// Enqueues the product of rows that are on their way.
    pub(super) fn start(&mut self, device: &D, arriving: ArrivingRows<'_, D>) {
        self.done = self.up(device, &arriving);
    }

    fn up(&mut self, device: &D, arriving: &ArrivingRows<'_, D>) -> Result<()> {
        let UpOutputs { hidden, pre } = &mut self.outputs;
        let config = &self.layer.config;
        // Up has no use for weights elsewhere.
        let weights = arriving.weights.as_ref().filter(|_| config.weight_at == WeightAt::Activation);
        let map = Some(arriving.weight_map.borrow());
        device.up(Up {
            rows: arriving.rows.borrow(),
            segments: self.handle.segments(),
            weight: self.weight.weight()?,
            bias: self.params.others.up_bias.as_ref().map(TensorRef::borrow),
            slot_weights: weights.map(|w| SlotWeights { values: w.borrow(), map, at: config.weight_at }),
            activation: config.activation,
            pre: pre.as_mut().map(Tensor::view_mut),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        })
    }

    /// What it has written.
    pub(super) fn finish(self) -> Result<UpOutputs<D>> {
        self.done.map(|()| self.outputs)
    }
}
