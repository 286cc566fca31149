//! A gradient of a whole weight on its way to its shards.

use crate::error::Result;
use crate::etp::{Chain, GradientBuffer};
use crate::layer::{BackwardProgress, Layer, RefusalGuard};

use super::group::FrameworkDevice;

/// Sends a gradient on its way. The other ranks of the layer are on theirs to its next collective, and are told of an
/// error.
pub(super) fn submit<D: FrameworkDevice>(
    chain: &Chain<D>,
    gradient: GradientBuffer<'_, D>,
    progress: &BackwardProgress,
    layer: &Layer,
    entry: &mut RefusalGuard<'_, D>,
) -> Result<()> {
    chain.submit(gradient).map_err(|e| {
        progress.set_refused();
        layer.refuse_backward(entry.enter(), e)
    })
}
