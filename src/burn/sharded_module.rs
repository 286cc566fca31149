//! A layer's module whose parameters are shards: how it is made, and what a save takes of it.

use std::sync::Arc;

use burn::tensor::backend::Backend;

use crate::adapter::{
    ErasedLayerShards, ErasedResidentWeight, FrameworkDevice, NewExperts, QuantizedExperts, StoredExperts, TypedSource,
    param_shard,
};
use crate::checkpoint::RankBlock;
use crate::error::{Error, Result};
use crate::etp::{Payload, ShardDevice, ShardPlace, ShardSource, Shards, WeightSpec};
use crate::layer::{ParamKind, PerParam};

use super::backend::{CoreDevice, MoeBackend, NativeMemory};
use super::etp::{OtherRanksAt, ShardHolder, ShardList, ShardedParams};
use super::module::ExpertParallelMoE;
use super::shard_param::{FloatParam, ParamSource, cut, part_of};

/// Where a layer's shards go.
pub(super) struct ShardsTo<'a, B: MoeBackend> {
    /// Over the ranks that hold the same experts.
    pub(super) experts: &'a ShardedParams<B::Native>,
    /// How the experts' weights travel.
    pub(super) payload: Payload,
    /// Over all ranks: router and shared expert; the experts' biases go with the experts then.
    pub(super) dense: Option<&'a ShardedParams<B::Native>>,
}

impl<B: MoeBackend> Clone for ShardsTo<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: MoeBackend> Copy for ShardsTo<'_, B> {}

impl<'a, B: MoeBackend> ShardsTo<'a, B> {
    /// Whose shard a parameter is, if it is one.
    fn of(&self, kind: ParamKind) -> Option<&'a ShardedParams<B::Native>> {
        match (kind, self.dense) {
            (ParamKind::Up | ParamKind::Down, _) => Some(self.experts),
            (ParamKind::SelectionBias, _) | (_, None) => None,
            (ParamKind::UpBias | ParamKind::DownBias, Some(_)) => Some(self.experts),
            (_, dense) => dense,
        }
    }

    /// The chain of what is no expert, where it is one of its own.
    fn apart(&self) -> Option<&'a ShardedParams<B::Native>> {
        self.dense.filter(|dense| !Arc::ptr_eq(dense.chain(), self.experts.chain()))
    }
}

/// Sizes of a parameter's weight as its chain cuts it.
fn cut_dims(kind: ParamKind, dims: &[usize]) -> Vec<usize> {
    match kind {
        ParamKind::Up | ParamKind::Down => dims.to_vec(),
        _ => Shards::lines(dims).to_vec(),
    }
}

/// The shards of a layer's parameters, by kind.
type ParamSources<B> = PerParam<Option<Arc<ParamSource<<B as super::backend::LayerBackend>::Native>>>>;

impl<B: Backend> ExpertParallelMoE<B> {
    /// Refuses experts that are no parameters.
    pub(super) fn check_dense(&self, call: &'static str) -> Result<()> {
        let stored = self.sharded.as_ref().is_some_and(ErasedLayerShards::is_stored);
        match stored || self.quantized.is_some() {
            false => Ok(()),
            true => Err(Error::invalid(call, "experts", "parameters", "quantized ones, as they are stored")),
        }
    }
}

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// The module with `experts.up` and `experts.down` sharded over the ranks of a chain, to which they are added: their
    /// parameters become this rank's shards, `[1, S, C]` as [`Chain::shards`](crate::etp::Chain::shards) cuts
    /// `[L, G·I, H]` and `[L, H, I]`, under the same ids; the [`Payload`] says how they travel. The ranks of the chain
    /// hold the same experts, and this rank's shard is cut from its own. Whole weights are there one layer at a time, if
    /// each is sharded as soon as it is made or loaded.
    ///
    /// A forward runs in a [`Phase::Forward`](crate::etp::Phase::Forward) of [`ShardedParams`], a backward in a
    /// [`Phase::Backward`](crate::etp::Phase::Backward); the shards' gradients are not among backward's, but come with
    /// [`ShardedParams::finish`].
    ///
    /// # Errors
    /// Experts that are sharded already; a group on another device than the chain's, or on a GPU on another stream, whose
    /// work would be in no order with the chain's; a chain that is in use. After an error of a pass every rank of the
    /// chain calls [`Chain::recover`](crate::etp::Chain::recover).
    pub fn into_sharded(self, shards: &ShardedParams<B::Native>, payload: Payload) -> Result<Self> {
        self.shard("ExpertParallelMoE::into_sharded", ShardsTo { experts: shards, payload, dense: None })
    }

    /// [`into_sharded`](Self::into_sharded) with all else sharded too: the experts' biases in the experts' chain, and
    /// router and shared expert, which all ranks hold, in that of `dense`, which is one of all ranks. With one rank a
    /// group the two are one: give the same twice. Parameters keep ids and numbers of dimensions; their elements are
    /// those of this rank's shard `[S, C]` of the weight's [lines](Shards::lines). The selection bias has no gradient
    /// and stays whole.
    ///
    /// Both begin and end each pass, and both are given the module. After an error every rank calls
    /// [`Chain::recover_all`](crate::etp::Chain::recover_all) with both chains.
    ///
    /// # Errors
    /// As [`into_sharded`](Self::into_sharded); a chain of the ranks with the same experts as `dense`, where the group has
    /// several ranks.
    pub fn into_all_sharded(
        self,
        experts: &ShardedParams<B::Native>,
        payload: Payload,
        dense: &ShardedParams<B::Native>,
    ) -> Result<Self> {
        self.shard("ExpertParallelMoE::into_all_sharded", ShardsTo { experts, payload, dense: Some(dense) })
    }

    fn shard(mut self, call: &'static str, to: ShardsTo<'_, B>) -> Result<Self> {
        self.check_dense(call)?;
        if self.sharded.is_some() {
            return Err(Error::invalid(call, "experts", "whole weights", "shards"));
        }
        self.check_chains(call, to)?;
        let (layer, local) = (self.layer.clone(), self.group.local_experts());
        let sources = PerParam::try_from_fn(|kind| -> Result<_> {
            let (Some(shards), Some(dims)) = (to.of(kind), kind.dims(layer.config(), local)) else { return Ok(None) };
            let Some(param) = self.float_param_mut(kind) else { return Ok(None) };
            cut(shards.chain(), kind.name(), param, &cut_dims(kind, &dims)).map(Some)
        })?;
        self.with_sources(call, to, sources)
    }

    /// The same of a module whose parameters are this rank's shards already.
    pub(super) fn with_shards(self, call: &'static str, to: ShardsTo<'_, B>) -> Result<Self> {
        self.check_chains(call, to)?;
        let (layer, local) = (self.layer.clone(), self.group.local_experts());
        let sources = PerParam::try_from_fn(|kind| -> Result<_> {
            let (Some(shards), Some(dims)) = (to.of(kind), kind.dims(layer.config(), local)) else { return Ok(None) };
            let Some(param) = self.float_param(kind) else { return Ok(None) };
            let cut = shards.chain().shards(&cut_dims(kind, &dims))?;
            ParamSource::of(shards.chain().device(), kind.name(), param, cut.shard_dims()).map(Some)
        })?;
        self.with_sources(call, to, sources)
    }

    /// Refuses chains whose work is in no order with the group's, or whose ranks are not those of `to`.
    fn check_chains(&self, call: &'static str, to: ShardsTo<'_, B>) -> Result<()> {
        let Some(group) = self.group.on::<CoreDevice<B>>() else {
            let found = format!("one of {}", self.group.erased().device());
            return Err(Error::invalid(call, "group", "one of the chain's device", found));
        };
        for shards in [Some(to.experts), to.dense].into_iter().flatten() {
            if CoreDevice::<B>::ENQUEUES && !shards.chain().device().shares_stream_with(group.lock().device()) {
                let expected = "one on the chain's device, stream and all (a clone of it)";
                return Err(Error::invalid(call, "group", expected, "one on another stream, or another GPU"));
            }
        }
        if to.dense.is_some() && to.apart().is_none() && self.group.ranks() > 1 {
            let found = "the chain of the ranks with the same experts";
            return Err(Error::invalid(call, "dense", "a chain of all ranks", found));
        }
        Ok(())
    }

    /// Adds the shards to their chains: all of them, or after an error none.
    fn with_sources(mut self, call: &'static str, to: ShardsTo<'_, B>, sources: ParamSources<B>) -> Result<Self> {
        let (layer, local) = (self.layer.clone(), self.group.local_experts());
        let is_expert = |kind: ParamKind| matches!(kind, ParamKind::Up | ParamKind::Down);
        // Whose shard each parameter beside the experts' weights is, and what its chain is to know of it.
        let resident = sources.as_ref().try_map(|kind, source| -> Result<_> {
            let (Some(source), Some(shards), false) = (source, to.of(kind), is_expert(kind)) else { return Ok(None) };
            let dims = kind.dims(layer.config(), local).unwrap_or_default();
            let name = format!("layer {} {}", layer.number(), kind.name());
            let mut spec = WeightSpec::new(name, layer.number(), &Shards::lines(&dims), source.dtype);
            spec.resident = true;
            shards.check(&spec, source)?;
            Ok(Some((shards, spec, Arc::clone(source), dims)))
        })?;
        let (Some(up), Some(down)) = (sources.up, sources.down) else {
            return Err(Error::invalid(call, "experts", "weights", "none"));
        };
        let typed = |source: &Arc<ParamSource<B::Native>>| TypedSource {
            dtype: source.dtype,
            source: Arc::clone(source) as Arc<dyn ShardSource<CoreDevice<B>>>,
        };
        let experts = NewExperts::new(to.experts.chain(), to.payload, (&layer, local), [typed(&up), typed(&down)])?;
        experts.check()?;
        // The chains would take all of them: nothing is added before this is known.
        let resident = resident.try_map(|_, new| -> Result<_> {
            let Some((shards, spec, source, dims)) = new else { return Ok(None) };
            let id = shards.add(spec, source)?;
            Ok(Some(ErasedResidentWeight { chain: CoreDevice::<B>::erase(shards.chain().clone()), id, dims }))
        })?;
        let sharded = experts.add(resident)?;
        let first = match to.apart() {
            Some(dense) => OtherRanksAt::Chain(dense.chain().clone()),
            None => OtherRanksAt::Layer(self.group.clone(), layer.number()),
        };
        to.experts.register(sharded.ids.into_iter().zip([up, down]), first);
        self.sharded = Some(sharded);
        Ok(self)
    }

    /// The module of which `up` and `down` are placeholders, with experts that lie in a chain as they are stored.
    pub(super) fn with_stored(
        mut self,
        call: &'static str,
        shards: &ShardedParams<B::Native>,
        experts: &QuantizedExperts<CoreDevice<B>>,
    ) -> Result<Self> {
        self.check_chains(call, ShardsTo { experts: shards, payload: Payload::Plain, dense: None })?;
        let experts = StoredExperts::Device(experts, ShardPlace::Device);
        let sharded = ErasedLayerShards::stored(shards.chain(), &self.layer, experts)?;
        shards.register([], OtherRanksAt::Layer(self.group.clone(), self.layer.number()));
        self.sharded = Some(sharded);
        Ok(self)
    }

    /// This rank's parts of the layer, whole or shards, for
    /// [`Checkpoint::save_parts`](crate::checkpoint::Checkpoint::save_parts): nothing is copied before it is written.
    ///
    /// # Errors
    /// Parameters of types that the layer has not; [quantized](ShardedParams::load_quantized) experts.
    pub fn to_parts(&self) -> Result<RankBlock<'static>> {
        self.check_dense("ExpertParallelMoE::to_parts")?;
        let group = self.group.membership();
        let params = PerParam::try_from_fn(|kind| -> Result<_> {
            let Some(param) = self.float_param(kind) else { return Ok(None) };
            let shard = param_shard(&self.layer, group, self.sharded.as_ref(), kind)?;
            part_of::<B::Native>(kind.name(), B::Native::contiguous(param.native()), shard).map(Some)
        })?;
        Ok(RankBlock { layer: self.layer.number() as usize, params })
    }
}

impl<B: MoeBackend> ShardHolder for ExpertParallelMoE<B> {
    type Backend = B;

    fn shard_lists(&self) -> Vec<ShardList<'_, B>> {
        let Some(sharded) = &self.sharded else { return Vec::new() };
        let name = format!("layer {}", self.layer.number());
        let experts: [(_, &dyn FloatParam<B>); 2] =
            [(sharded.ids[0], &self.experts.up), (sharded.ids[1], &self.experts.down)];
        let mut lists =
            vec![ShardList { chain: sharded.chain().clone(), name: name.clone(), params: experts.to_vec() }];
        if sharded.is_stored() {
            // Placeholders.
            lists[0].params.clear();
        }
        for (kind, resident) in sharded.resident.present() {
            let Some(param) = self.float_param(kind) else { continue };
            match lists.iter_mut().find(|list| list.chain.is(&resident.chain)) {
                Some(list) => list.params.push((resident.id, param)),
                None => {
                    let (chain, name) = (resident.chain.clone(), name.clone());
                    lists.push(ShardList { chain, name, params: vec![(resident.id, param)] });
                }
            }
        }
        lists
    }
}
