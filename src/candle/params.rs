//! A module's x and parameters as a layer takes them: contiguous, named, viewed.

use candle_core::Tensor;

use crate::adapter::{GatheredWeights, resident_view};
use crate::error::Result;
use crate::layer::{ParamKind, ParamViews, PerParam};
use crate::tensor::TensorRef;

use super::device::CandleDevice;
use super::error::framework;

/// The parameters in contiguous memory; as they are where they lie so.
pub(super) fn contiguous(call: &'static str, params: &PerParam<Option<Tensor>>) -> Result<PerParam<Option<Tensor>>> {
    let of = |t: &Option<Tensor>| t.as_ref().map(Tensor::contiguous).transpose().map_err(framework(call));
    params.as_ref().try_map(|_, t| of(t))
}

/// x and the parameters, with their names.
pub(super) fn named<'a>(x: &'a Tensor, params: &'a PerParam<Option<Tensor>>) -> Vec<(&'static str, &'a Tensor)> {
    std::iter::once(("x", x)).chain(params.present().map(|(kind, t)| (kind.name(), t))).collect()
}

/// Views of parameters, given in the parameters' order; of those that are gathered, the whole weights.
pub(super) fn views_of<'a, D: CandleDevice>(
    params: &PerParam<Option<Tensor>>,
    views: &'a [TensorRef<'_, D>],
    gathered: Option<GatheredWeights<'a, '_, D>>,
) -> Result<ParamViews<'a, D>> {
    let all = views;
    let mut views = views.iter().map(TensorRef::borrow);
    // Experts that stay quantized are no tensors, and are given as sources: the first parameter stands for them.
    let stands_in = |kind| matches!(kind, ParamKind::Up | ParamKind::Down) && gathered.is_some();
    ParamViews::collect(|kind| {
        let own = match params.get(kind) {
            None if stands_in(kind) => all.first().map(TensorRef::borrow),
            None => None,
            Some(_) => views.next(),
        };
        let resident = gathered.and_then(|(resident, guards)| resident.get(kind).zip(guards.get(kind)));
        resident.map(|(resident, guard)| resident_view(resident, guard)).transpose().map(|whole| whole.or(own))
    })
}
