//! Collectives that an adapter runs itself, beside its layers'.

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Op, Tag};
use crate::ep::EpGroup;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layer::Layer;
use crate::tensor::Tensor;

fn tag(layer: u32, op: Op) -> Tag {
    Tag { layer, op, sequence: 0 }
}

/// Rank 0's parameter to all, of this rank's `values`; where they cannot be had, the other ranks are told.
pub(crate) fn broadcast<D: Kernels>(
    group: &EpGroup<D>,
    layer: u32,
    values: impl FnOnce(&D) -> Result<Tensor<D>>,
) -> Result<Tensor<D>> {
    let mut group = group.lock();
    let (device, tag) = (group.device().clone(), tag(layer, Op::Weights));
    let comm = group.dispatcher().communicator();
    let mut values = refuse_on_error(comm, tag, values(&device))?;
    comm.broadcast(tag, 0, values.view_mut())?;
    Ok(values)
}

/// Compares a layer's configuration over the ranks.
pub(super) fn compare_layer<D: Kernels>(group: &EpGroup<D>, call: &'static str, layer: &Layer) -> Result<()> {
    let mut group = group.lock();
    let device = group.device().clone();
    layer.compare_over_ranks(call, &device, group.dispatcher().communicator())
}

/// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
pub(super) fn refuse<D: Kernels>(group: &EpGroup<D>, layer: u32, op: Op, reason: &str) {
    group.lock().refuse(tag(layer, op), &reason);
}
