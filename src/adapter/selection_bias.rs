//! Balancing by the router's selection bias, whatever tensor holds it.

use crate::balance;
use crate::error::{Error, Result};
use crate::layer::ParamKind;
use crate::metrics::Load;

/// The values of a selection bias, moved towards an even load by a step `u`
/// ([`update_selection_bias`](balance::update_selection_bias)); `values`: as they are, if the router has one.
pub(crate) fn moved_selection_bias(
    call: &'static str,
    values: Option<Vec<f32>>,
    load: &Load,
    u: f32,
) -> Result<Vec<f32>> {
    let missing = || Error::invalid(call, ParamKind::SelectionBias.name(), "a tensor", "none");
    let mut values = values.ok_or_else(missing)?;
    balance::update_selection_bias(&mut values, &load.tokens_per_expert, u)?;
    Ok(values)
}
