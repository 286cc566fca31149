//! Resident weights: parameters of a module beside the experts' weights that are shards too. They are gathered before the
//! layer runs and released after it, as it reads them all along.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::etp::{Chain, GradientBuffer, ShardDevice, ShardedWeight, WeightId};
use crate::layer::{BackwardProgress, GradientsMut, Layer, ParamKind, PerParam, RefusalGuard};
use crate::tensor::{TensorMut, TensorRef};
use crate::weights::{Weight, WeightGuard, WeightSource};

use super::group::{ErasedChain, FrameworkDevice};
use super::submit::submit;

/// A resident weight of a chain whose device is known at run time only.
#[derive(Clone)]
pub(crate) struct ErasedResidentWeight {
    pub(crate) chain: ErasedChain,
    pub(crate) id: WeightId,
    /// The parameter's sizes; the chain cuts it into lines.
    pub(crate) dims: Vec<usize>,
}

/// A resident weight of a chain.
#[derive(Debug)]
pub(crate) struct ResidentWeight<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    id: WeightId,
    dims: Vec<usize>,
}

/// The weights, for a layer that works on a `D`.
pub(super) fn downcast_resident<D: FrameworkDevice>(
    resident: &PerParam<Option<ErasedResidentWeight>>,
    call: &'static str,
) -> Result<ResidentWeights<D>> {
    resident.as_ref().try_map(|kind, resident| {
        let Some(ErasedResidentWeight { chain, id, dims }) = resident else { return Ok(None) };
        let Some(chain) = D::downcast(chain) else {
            return Err(Error::invalid(call, kind.name(), "in a chain of the group's device", "in another's"));
        };
        Ok(Some(ResidentWeight { chain: Arc::clone(chain), id: *id, dims: dims.clone() }))
    })
}

/// A module's resident weights.
pub(crate) type ResidentWeights<D> = PerParam<Option<ResidentWeight<D>>>;
/// Their sources.
pub(crate) type ResidentSources<'a, D> = PerParam<Option<ShardedWeight<'a, D>>>;
/// Them gathered.
pub(crate) type ResidentGuards<'a, D> = PerParam<Option<WeightGuard<'a, D>>>;
/// Resident weights with what has gathered them.
pub(crate) type GatheredWeights<'a, 'g, D> = (&'a ResidentWeights<D>, &'a ResidentGuards<'g, D>);

/// Where resident weights come from; `backward`: a backward goes back through what they are used for.
pub(crate) fn resident_sources<D: FrameworkDevice>(
    resident: &ResidentWeights<D>,
    backward: bool,
) -> Result<ResidentSources<'_, D>> {
    resident.as_ref().try_map(|_, resident| {
        let Some(resident) = resident else { return Ok(None) };
        Ok(Some(resident.chain.source(resident.id)?.with_backward(backward)))
    })
}

/// Gathers them, in the order of the parameters.
pub(crate) fn acquire_resident<'a, D: FrameworkDevice>(
    device: &D,
    sources: &'a ResidentSources<'_, D>,
) -> Result<ResidentGuards<'a, D>> {
    sources.as_ref().try_map(|_, source| {
        let Some(source) = source else { return Ok(None) };
        let guard = source.acquire()?;
        device.wait(guard.ready.as_ref())?;
        Ok(Some(guard))
    })
}

/// A resident weight in its parameter's sizes.
pub(crate) fn resident_view<'a, D: FrameworkDevice>(
    resident: &ResidentWeight<D>,
    guard: &'a WeightGuard<'_, D>,
) -> Result<TensorRef<'a, D>> {
    match guard.weight()? {
        Weight::Dense(lines) => TensorRef::new(lines.data(), lines.dtype(), &resident.dims),
        Weight::Quantized(_) => Err(Error::invalid("ExpertParallelMoE", "weight", "a dense one", "a quantized one")),
    }
}

/// Memory of chains for the gradients of resident weights.
pub(crate) struct ResidentGradients<'a, D: ShardDevice>(
    PerParam<Option<(&'a ResidentWeight<D>, GradientBuffer<'a, D>)>>,
);

impl<'a, D: FrameworkDevice> ResidentGradients<'a, D> {
    /// For those that are wanted: that somebody tracks, and weights whose bias somebody does.
    pub(crate) fn new(resident: &'a ResidentWeights<D>, wanted: impl Fn(ParamKind) -> bool) -> Result<Self> {
        let of = |kind, resident: &'a Option<ResidentWeight<D>>| {
            let Some(resident) = resident.as_ref().filter(|_| wanted(kind)) else { return Ok(None) };
            Ok(Some((resident, resident.chain.gradient_buffer(resident.id)?)))
        };
        resident.as_ref().try_map(of).map(Self)
    }

    /// Has a backward write there.
    pub(crate) fn view_in<'b>(&'b mut self, into: &mut GradientsMut<'b, D>) -> Result<()> {
        for (kind, memory) in self.0.as_mut() {
            let Some((resident, buffer)) = memory else { continue };
            let lines = buffer.view_mut()?;
            let dtype = lines.dtype();
            into.set(kind, TensorMut::new(lines.into_data(), dtype, &resident.dims)?);
        }
        Ok(())
    }

    /// Sends those that somebody tracks on their way.
    pub(crate) fn submit(
        self,
        (layer, progress): (&Layer, &BackwardProgress),
        entry: &mut RefusalGuard<'_, D>,
        tracked: impl Fn(ParamKind) -> bool,
    ) -> Result<()> {
        for (_, (resident, gradient)) in self.0.into_present().filter(|(kind, _)| tracked(*kind)) {
            submit(&resident.chain, gradient, progress, layer, entry)?;
        }
        Ok(())
    }
}
