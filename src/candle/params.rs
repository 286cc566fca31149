//! A module's x and parameters as a layer takes them: contiguous, named, viewed.

use candle_core::Tensor;

use crate::error::Result;
use crate::layer::{ParamViews, PerParam};
use crate::tensor::TensorRef;

use super::error::framework;
use super::host::Host;

/// The parameters in contiguous memory; as they are where they lie so.
pub(super) fn contiguous(call: &'static str, params: &PerParam<Option<Tensor>>) -> Result<PerParam<Option<Tensor>>> {
    let of = |t: &Option<Tensor>| t.as_ref().map(Tensor::contiguous).transpose().map_err(framework(call));
    params.as_ref().try_map(|_, t| of(t))
}

/// x and the parameters, with their names.
pub(super) fn named<'a>(x: &'a Tensor, params: &'a PerParam<Option<Tensor>>) -> Vec<(&'static str, &'a Tensor)> {
    std::iter::once(("x", x)).chain(params.present().map(|(kind, t)| (kind.name(), t))).collect()
}

/// Views of parameters, given in the parameters' order.
pub(super) fn views_of<'a, D: Host>(
    params: &PerParam<Option<Tensor>>,
    views: &[TensorRef<'a, D>],
) -> Result<ParamViews<'a, D>> {
    let mut views = views.iter().copied();
    ParamViews::collect(|kind| Ok(params.get(kind).and_then(|_| views.next())))
}
