//! A module's parameters as a layer takes them, where the routed experts are quantized.

use candle_core::Tensor;

use crate::adapter::QuantizedExperts;
use crate::error::{Error, Result};
use crate::layer::{ParamKind, Params, PerParam};
use crate::tensor::TensorRef;

use super::device::CandleDevice;

/// Parameters as a layer takes them, of views in the parameters' order and experts that are quantized.
pub(super) fn params_of<'a, D: CandleDevice>(
    params: &PerParam<Option<Tensor>>,
    views: &'a [TensorRef<'_, D>],
    experts: &'a QuantizedExperts<D>,
) -> Result<Params<'a, D>> {
    let mut views = views.iter().map(TensorRef::borrow);
    let all = PerParam::from_fn(|kind| params.get(kind).and_then(|_| views.next()));
    let missing = || Error::invalid("ExpertParallelMoE", ParamKind::Router.name(), "a tensor", "none");
    let router = all.router.ok_or_else(missing)?;
    Ok(Params { router, up: &experts.up, down: &experts.down, others: all })
}
