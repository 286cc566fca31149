//! The auxiliary losses of a forward, for the host and for the device.

use std::sync::Arc;

use crate::aux_loss::{AuxValue, Sums, aux_value};
use crate::comm::{Op, ReduceOp, Tag};
use crate::config::{AuxConfig, RouterConfig};
use crate::dtype::DType;
use crate::ep::{Group, Handle};
use crate::error::Result;
use crate::kernels::{AuxSums, AuxTotal, Kernels, Origin, Scalar};
use crate::lazy::Lazy;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::definition::Layer;
use super::refuse::refuse_on_error;

/// The call whose losses they are.
const CALL: &str = "Layer::forward";

/// Auxiliary losses of one forward. The device has the sums that they follow from; the host reads them when it asks.
#[derive(Debug, Clone)]
pub struct AuxLoss<D: Kernels> {
    value: Lazy<AuxValue>,
    /// Absent where no loss is asked for.
    on_device: Option<Arc<DeviceAuxLoss<D>>>,
    device: D,
    /// Accumulator type.
    dtype: DType,
}

#[derive(Debug)]
struct DeviceAuxLoss<D: Kernels> {
    router: RouterConfig,
    aux: AuxConfig,
    sums: Arc<Tensor<D>>,
}

impl<D: Kernels> AuxLoss<D> {
    /// The losses, which waits for the device, once.
    ///
    /// # Errors
    /// As [`Lazy::get`].
    pub fn get(&self) -> Result<&AuxValue> {
        self.value.get()
    }

    /// The losses, to be read by whoever asks, when they ask.
    pub fn value(&self) -> &Lazy<AuxValue> {
        &self.value
    }

    /// Writes their sum ([`AuxValue::total`], rounded to that type) to one element of the accumulator type, on the
    /// layer's stream: on a GPU nothing waits, and the call can be captured.
    ///
    /// # Errors
    /// Another type or size; a driver's error.
    pub fn write(&self, mut out: TensorMut<'_, D>) -> Result<()> {
        Scalar::Device(out.as_ref()).check("AuxLoss::write", "out", self.dtype)?;
        let Some(DeviceAuxLoss { router, aux, sums }) = self.on_device.as_deref() else {
            return self.device.zero(out.into_data());
        };
        self.device.aux_total(AuxTotal { config: router, aux, sums: sums.view(), out: out.reborrow() })
    }
}

/// The losses, and the sums that their gradient needs.
pub(super) type AuxAndSums<D> = (AuxLoss<D>, Option<Arc<Tensor<D>>>);

pub(super) fn losses<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    handle: &Handle<D>,
    logits: TensorRef<'_, D>,
    ids: TensorRef<'_, D>,
) -> Result<AuxAndSums<D>> {
    let config = &layer.config;
    let (device, dtype) = (group.device().clone(), logits.dtype());
    if config.aux.is_off() {
        return Ok((AuxLoss { value: Lazy::ready(AuxValue::default()), on_device: None, device, dtype }, None));
    }
    let summed = config.aux.over_ranks && group.ranks() > 1;
    let own = Tensor::empty(&device, dtype, &[Sums::len(config.router.num_experts)]).and_then(|mut sums| {
        let call = AuxSums {
            config: &config.router,
            aux: &config.aux,
            logits: logits.borrow(),
            ids: ids.borrow(),
            origin: Origin { rank: group.rank(), layer: layer.number() },
            out: sums.view_mut(),
        };
        device.aux_sums(call)?;
        Ok(sums)
    });
    let mut sums = refuse_on_error(layer, group, if summed { Op::Aux } else { Op::Dispatch }, own)?;
    if summed {
        let tag = Tag { layer: layer.number, op: Op::Aux, sequence: handle.sequence() };
        let reduced = group.dispatcher().communicator().all_reduce(tag, ReduceOp::Sum, sums.view_mut());
        reduced.map_err(|error| error.of_call(CALL, group.rank()))?;
    }
    let sums = Arc::new(sums);
    let own = DeviceAuxLoss { router: config.router.clone(), aux: config.aux, sums: sums.clone() };
    let (on_device, reads) = (Arc::new(own), device.clone());
    let value = {
        let of = Arc::clone(&on_device);
        Lazy::from_fn(move || Ok(aux_value(&of.router, &of.aux, &reads.read(of.sums.view())?)))
    };
    Ok((AuxLoss { value, on_device: Some(on_device), device, dtype }, Some(sums)))
}
