//! A module whose experts are shards of a chain: the layer takes gathered weights, the chain takes their gradients.

use std::fmt::{self, Debug};
use std::sync::Arc;

#[cfg(feature = "candle")]
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::ep::Membership;
use crate::error::{Error, Result};
#[cfg(feature = "candle")]
use crate::etp::Shard;
use crate::etp::{
    Chain, GradientBuffer, NewQuantized, NewShard, Payload, QuantizedWeight, ShardDevice, ShardPlace, ShardSource,
    ShardedQuantized, ShardedWeight, Shards, StoredSpec, WeightId, WeightSpec,
};
use crate::layer::{
    BackwardProgress, Context, GradientsMut, Layer, ParamKind, ParamViews, Params, PerParam, RefusalGuard,
};
use crate::optim::ParamShard;
#[cfg(feature = "candle")]
use crate::tensor::Tensor;
use crate::weights::WeightSource;

use super::group::{ErasedChain, FrameworkDevice};
use super::quantized::QuantizedExperts;
use super::resident_weights::{ErasedResidentWeight, ResidentWeights, downcast_resident};
use super::submit::submit;

/// This rank's shard of a weight.
pub(crate) struct TypedSource<D: ShardDevice> {
    pub(crate) dtype: DType,
    pub(crate) source: Arc<dyn ShardSource<D>>,
}

/// A layer's sharded weights, of chains whose device is known at run time only: its experts', and what else of it is
/// shards.
#[derive(Clone)]
pub(crate) struct ErasedLayerShards {
    chain: ErasedChain,
    /// Of `up` and `down`.
    pub(crate) ids: [WeightId; 2],
    /// The same where they stay quantized, as they are stored.
    stored: Option<[QuantizedWeight; 2]>,
    /// Its resident weights, each in its chain.
    pub(crate) resident: PerParam<Option<ErasedResidentWeight>>,
}

impl Debug for ErasedLayerShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ErasedLayerShards<{:?}>", self.ids)
    }
}

/// Experts as they are stored, on their way to a chain.
pub(crate) enum StoredExperts<'a, D: FrameworkDevice> {
    /// They lie on the device, and their shards are to lie there, or on the host.
    Device(&'a QuantizedExperts<D>, ShardPlace),
    /// They lie on the host, and so are their shards to.
    #[cfg(feature = "candle")]
    OnHost(&'a QuantizedExperts<Cpu>),
}

/// A layer's shards of `up` and `down`, on their way to a chain.
pub(crate) struct NewExperts<D: FrameworkDevice> {
    chain: Arc<Chain<D>>,
    shards: [NewShard<D>; 2],
}

impl<D: FrameworkDevice> NewExperts<D> {
    /// Of a rank that has `local` experts.
    pub(crate) fn new(
        chain: &Arc<Chain<D>>,
        payload: Payload,
        (layer, local): (&Layer, usize),
        [up, down]: [TypedSource<D>; 2],
    ) -> Result<Self> {
        let new = |kind: ParamKind, TypedSource { dtype, source }: TypedSource<D>| -> Result<_> {
            let missing = || Error::invalid("ExpertParallelMoE::sharded", kind.name(), "a weight", "none");
            let dims = kind.dims(layer.config(), local).ok_or_else(missing)?;
            let name = format!("layer {} {}", layer.number(), kind.name());
            let mut spec = WeightSpec::new(name, layer.number(), &dims, dtype);
            spec.recompute = kind == ParamKind::Up && layer.config().recompute;
            spec.payload = payload;
            Ok(NewShard::new(spec, source))
        };
        let shards = [new(ParamKind::Up, up)?, new(ParamKind::Down, down)?];
        Ok(Self { chain: Arc::clone(chain), shards })
    }

    /// Whether the chain would take both: asked before the layer's other shards go to theirs.
    pub(crate) fn check(&self) -> Result<()> {
        self.chain.check(&self.shards)
    }

    /// Gives both to the chain, or after an error neither; `resident`: what else of the layer is shards.
    pub(crate) fn add(self, resident: PerParam<Option<ErasedResidentWeight>>) -> Result<ErasedLayerShards> {
        let ids = self.chain.add_all(self.shards)?;
        Ok(ErasedLayerShards { chain: D::erase(self.chain), ids, stored: None, resident })
    }
}

impl ErasedLayerShards {
    /// Adds a layer's experts to a chain, frozen and as they are stored: both weights, or after an error neither.
    pub(crate) fn stored<D: FrameworkDevice>(
        chain: &Arc<Chain<D>>,
        layer: &Layer,
        experts: StoredExperts<'_, D>,
    ) -> Result<Self> {
        let of = |kind: ParamKind| StoredSpec {
            name: format!("layer {} {}", layer.number(), kind.name()),
            layer: layer.number(),
            recompute: kind == ParamKind::Up && layer.config().recompute,
        };
        let (up, down) = (of(ParamKind::Up), of(ParamKind::Down));
        let new = match experts {
            StoredExperts::Device(experts, place) => {
                [chain.cut_quantized(up, &experts.up, place)?, chain.cut_quantized(down, &experts.down, place)?]
            }
            #[cfg(feature = "candle")]
            StoredExperts::OnHost(experts) => {
                [chain.host_quantized(up, &experts.up)?, chain.host_quantized(down, &experts.down)?]
            }
        };
        let stored = NewQuantized::add_both(chain, new)?;
        let ids = stored.each_ref().map(QuantizedWeight::id);
        Ok(Self { chain: D::erase(Arc::clone(chain)), ids, stored: Some(stored), resident: PerParam::none() })
    }

    /// Adds a layer's experts of floating type to a chain of one rank, frozen, in page-locked memory of the host: both
    /// weights, or after an error neither.
    #[cfg(feature = "candle")]
    pub(crate) fn dense_on_host<D: FrameworkDevice>(
        chain: &Arc<Chain<D>>,
        of: (&Layer, usize),
        weights: [&Tensor<Cpu>; 2],
    ) -> Result<Self> {
        let shard = |weight: &Tensor<Cpu>| -> Result<_> {
            let (dtype, cut) = (weight.dtype(), chain.shards(weight.dims())?);
            let shard = Shard::on_host(chain.device(), dtype, cut.shard_dims(), weight.as_bytes())?;
            Ok(TypedSource { dtype, source: Arc::new(shard) as Arc<dyn ShardSource<D>> })
        };
        let [up, down] = weights;
        NewExperts::new(chain, Payload::Plain, of, [shard(up)?, shard(down)?])?.add(PerParam::none())
    }

    /// Whether a parameter is a shard.
    pub(crate) fn has(&self, kind: ParamKind) -> bool {
        matches!(kind, ParamKind::Up | ParamKind::Down) || self.resident.get(kind).is_some()
    }

    /// Whether the experts are frozen, as they are stored.
    #[cfg(feature = "burn")]
    pub(crate) fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    /// The experts' chain.
    #[cfg(feature = "burn")]
    pub(crate) fn chain(&self) -> &ErasedChain {
        &self.chain
    }

    /// The cut of the weight of a parameter that is a shard, of these sizes, and this rank's place in it.
    fn cut(&self, kind: ParamKind, dims: &[usize]) -> Result<(Shards, usize)> {
        match self.resident.get(kind) {
            Some(resident) => resident.chain.cut(&Shards::lines(dims)),
            None => self.chain.cut(dims),
        }
    }

    /// The experts, for a layer that works on a `D`.
    pub(crate) fn experts<D: FrameworkDevice>(&self, call: &'static str) -> Result<LayerShards<D>> {
        match D::downcast(&self.chain) {
            Some(chain) => Ok(LayerShards {
                chain: Arc::clone(chain),
                ids: self.ids,
                stored: self.stored.clone(),
                resident: downcast_resident(&self.resident, call)?,
            }),
            None => Err(Error::invalid(call, "chain", "one of the group's device", "another")),
        }
    }
}

/// A rank's part of a layer's parameter, where shards are those of `sharded`.
pub(crate) fn param_shard(
    layer: &Layer,
    group: &Membership,
    sharded: Option<&ErasedLayerShards>,
    kind: ParamKind,
) -> Result<ParamShard> {
    let missing = || Error::invalid("ExpertParallelMoE", kind.name(), "a parameter of the configuration", "another");
    let dims = kind.dims(layer.config(), group.local_experts).ok_or_else(missing)?;
    let of_ranks = |dims: &[usize]| match kind.is_replicated() {
        true => Ok(ParamShard::whole(dims)),
        false => ParamShard::of_experts(dims, group.rank, group.ranks),
    };
    match sharded.filter(|sharded| sharded.has(kind)) {
        None => of_ranks(&dims),
        Some(sharded) => {
            let (cut, place) = sharded.cut(kind, &dims)?;
            of_ranks(cut.dims())?.shard(&cut, place)
        }
    }
}

/// A layer's sharded weights.
#[derive(Debug)]
pub(crate) struct LayerShards<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    ids: [WeightId; 2],
    stored: Option<[QuantizedWeight; 2]>,
    pub(crate) resident: ResidentWeights<D>,
}

/// A gathered expert weight as a layer takes it.
#[derive(Debug)]
pub(crate) enum ExpertSource<'a, D: ShardDevice> {
    /// Of floating type.
    Dense(ShardedWeight<'a, D>),
    /// As it is stored.
    Stored(ShardedQuantized<'a, D>),
}

impl<D: ShardDevice> ExpertSource<'_, D> {
    fn source(&self) -> &dyn WeightSource<D> {
        match self {
            Self::Dense(weight) => weight,
            Self::Stored(weight) => weight,
        }
    }
}

impl<D: FrameworkDevice> LayerShards<D> {
    /// Whether the experts are frozen, whatever else is trained.
    pub(crate) fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    /// Whether a parameter is a shard.
    pub(crate) fn has(&self, kind: ParamKind) -> bool {
        matches!(kind, ParamKind::Up | ParamKind::Down) || self.resident.get(kind).is_some()
    }

    /// `up` and `down` as a layer takes them; `backward`: a backward goes back through what it computes.
    pub(crate) fn sources(&self, backward: bool) -> Result<[ExpertSource<'_, D>; 2]> {
        if let Some([up, down]) = &self.stored {
            let [up, down] = [self.chain.quantized_source(up)?, self.chain.quantized_source(down)?];
            return Ok([up, down].map(|source| ExpertSource::Stored(source.with_backward(backward))));
        }
        let [up, down] = [self.chain.source(self.ids[0])?, self.chain.source(self.ids[1])?];
        Ok([up, down].map(|source| ExpertSource::Dense(source.with_backward(backward))))
    }

    /// Memory for the gradients that a backward of `context` makes of them.
    pub(crate) fn gradients(&self, context: &Context<D>) -> Result<ShardedExpertGradients<'_, D>> {
        let [up, down] = self.ids;
        Ok(ShardedExpertGradients {
            chain: &self.chain,
            progress: context.progress(),
            up: self.chain.gradient_buffer(up)?,
            down: self.chain.gradient_buffer(down)?,
        })
    }
}

/// Memory of a chain for the gradients of whole weights, of which each rank gets its shard's.
pub(crate) struct ShardedExpertGradients<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    progress: Arc<BackwardProgress>,
    up: GradientBuffer<'a, D>,
    down: GradientBuffer<'a, D>,
}

impl<D: FrameworkDevice> ShardedExpertGradients<'_, D> {
    /// Has a backward write there.
    pub(crate) fn view_in<'b>(&'b mut self, into: &mut GradientsMut<'b, D>) -> Result<()> {
        into.set(ParamKind::Up, self.up.view_mut()?);
        into.set(ParamKind::Down, self.down.view_mut()?);
        Ok(())
    }

    /// Sends the gradients that are wanted, of `up` and of `down`, on their way to the ranks' main gradients.
    pub(crate) fn submit(self, layer: &Layer, entry: &mut RefusalGuard<'_, D>, wanted: [bool; 2]) -> Result<()> {
        let Self { chain, progress, up, down } = self;
        // In the order in which backward uses the weights.
        for (gradient, wanted) in [(down, wanted[1]), (up, wanted[0])] {
            if wanted {
                submit(chain, gradient, &progress, layer, entry)?;
            }
        }
        Ok(())
    }
}

/// The parameters, with experts from elsewhere if there are sources of them.
pub(crate) fn with_sources<'a, D: FrameworkDevice>(
    views: &'a ParamViews<'_, D>,
    sources: Option<&'a [ExpertSource<'_, D>; 2]>,
) -> Params<'a, D> {
    let params = views.params();
    match sources {
        None => params,
        Some([up, down]) => Params { up: up.source(), down: down.source(), ..params },
    }
}
