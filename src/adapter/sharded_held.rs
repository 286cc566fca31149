//! Parameters of a module beside the experts' weights that are shards too: gathered before the layer runs, in use until
//! it is through, as it reads them all along.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::etp::{Chain, GradientBuffer, ShardDevice, ShardedWeight, WeightId};
use crate::layer::{BackwardProgress, GradientsMut, Layer, ParamKind, PerParam, RefusalGuard};
use crate::tensor::{TensorMut, TensorRef};
use crate::weights::{Weight, WeightGuard, WeightSource};

use super::group::{ErasedChain, FrameworkDevice};
use super::submit::submit;

/// A parameter's weight in a chain, whatever its device.
#[derive(Clone)]
pub(crate) struct HeldId {
    pub(crate) chain: ErasedChain,
    pub(crate) id: WeightId,
    /// The parameter's sizes; the chain cuts it into lines.
    pub(crate) dims: Vec<usize>,
}

/// The same on a `D`.
#[derive(Debug)]
pub(crate) struct HeldWeight<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    id: WeightId,
    dims: Vec<usize>,
}

pub(super) fn held_on<D: FrameworkDevice>(
    held: &PerParam<Option<HeldId>>,
    call: &'static str,
) -> Result<PerParam<Option<HeldWeight<D>>>> {
    held.as_ref().try_map(|kind, held| {
        let Some(HeldId { chain, id, dims }) = held else { return Ok(None) };
        let Some(chain) = D::downcast(chain) else {
            return Err(Error::invalid(call, kind.name(), "in a chain of the group's device", "in another's"));
        };
        Ok(Some(HeldWeight { chain: Arc::clone(chain), id: *id, dims: dims.clone() }))
    })
}

/// Sources of held weights.
pub(crate) type HeldSources<'a, D> = PerParam<Option<ShardedWeight<'a, D>>>;
/// Held weights that are gathered.
pub(crate) type HeldGuards<'a, D> = PerParam<Option<WeightGuard<'a, D>>>;

/// Where held weights come from; `backward`: a backward goes back through what they are used for.
pub(crate) fn sources<D: FrameworkDevice>(
    held: &PerParam<Option<HeldWeight<D>>>,
    backward: bool,
) -> Result<HeldSources<'_, D>> {
    held.as_ref().try_map(|_, held| {
        let Some(held) = held else { return Ok(None) };
        Ok(Some(held.chain.source(held.id)?.with_backward(backward)))
    })
}

/// Gathers them, in the order of the parameters.
pub(crate) fn acquire<'a, D: FrameworkDevice>(
    device: &D,
    sources: &'a HeldSources<'_, D>,
) -> Result<HeldGuards<'a, D>> {
    sources.as_ref().try_map(|_, source| {
        let Some(source) = source else { return Ok(None) };
        let guard = source.acquire()?;
        device.wait(guard.ready.as_ref())?;
        Ok(Some(guard))
    })
}

/// A held weight in its parameter's sizes.
pub(crate) fn view<'a, D: FrameworkDevice>(
    held: &HeldWeight<D>,
    guard: &'a WeightGuard<'_, D>,
) -> Result<TensorRef<'a, D>> {
    match guard.weight()? {
        Weight::Dense(lines) => TensorRef::new(lines.data(), lines.dtype(), &held.dims),
        Weight::Quantized(_) => Err(Error::invalid("ExpertParallelMoE", "weight", "a dense one", "a quantized one")),
    }
}

/// Memory of chains for the gradients of held weights.
pub(crate) struct HeldGradients<'a, D: ShardDevice>(PerParam<Option<(&'a HeldWeight<D>, GradientBuffer<'a, D>)>>);

impl<'a, D: FrameworkDevice> HeldGradients<'a, D> {
    /// For those that are wanted.
    pub(crate) fn new(held: &'a PerParam<Option<HeldWeight<D>>>, wanted: impl Fn(ParamKind) -> bool) -> Result<Self> {
        let of = |kind, held: &'a Option<HeldWeight<D>>| {
            let Some(held) = held.as_ref().filter(|_| wanted(kind)) else { return Ok(None) };
            Ok(Some((held, held.chain.gradient_buffer(held.id)?)))
        };
        held.as_ref().try_map(of).map(Self)
    }

    /// Has a backward write there.
    pub(crate) fn view_in<'b>(&'b mut self, into: &mut GradientsMut<'b, D>) -> Result<()> {
        for (kind, memory) in self.0.as_mut() {
            let Some((held, buffer)) = memory else { continue };
            let lines = buffer.view_mut()?;
            let dtype = lines.dtype();
            into.set(kind, TensorMut::new(lines.into_data(), dtype, &held.dims)?);
        }
        Ok(())
    }

    /// Sends them on their way.
    pub(crate) fn submit(
        self,
        layer: &Layer,
        progress: &BackwardProgress,
        entry: &mut RefusalGuard<'_, D>,
    ) -> Result<()> {
        for (_, (held, gradient)) in self.0.into_present() {
            submit(&held.chain, gradient, progress, layer, entry)?;
        }
        Ok(())
    }
}
