//! A module's variables, found or made, and its shards in the chains.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;

use crate::adapter::{ErasedLayerShards, ErasedResidentWeight, NewExperts};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::etp::{Chain, Payload, Shards};
use crate::fnv1a::fnv1a;
use crate::host_memory::reserved;
use crate::layer::{Layer, ParamKind, PerParam};

use crate::candle::device::CandleDevice;
use crate::candle::etp::VarShard;
use crate::candle::group::DeviceGroup;
use crate::candle::initial::{ShardInit, full_name, uniform};
use crate::candle::sharded_weights::{LayerPlace, NewShardedTensor, ShardedTensor, ShardedWeights, check_shard};

/// Where a layer's shards are: the chain that its experts are added to, and more.
#[derive(Debug)]
pub struct ShardedIn<'a, D: CandleDevice = Cpu> {
    /// Over the ranks that hold the same experts.
    pub chain: &'a Arc<Chain<D>>,
    /// How the experts' shards travel.
    pub payload: Payload,
    /// Whose chain router and shared expert are shards of, too, and whose names theirs stand behind; the experts' biases
    /// are sharded with the experts then.
    pub weights: Option<&'a ShardedWeights<'a, D>>,
}

/// Variables of a module, and its shards if there is a chain for them.
pub(super) type LayerVariables<'a, D> = (PerParam<Option<Tensor>>, Option<NewLayerShards<'a, D>>);

/// Finds or makes a module's variables, and asks the chains for its shards.
pub(super) fn variables<'a, D: CandleDevice>(
    call: &'static str,
    layer: &Layer,
    group: &DeviceGroup,
    vb: candle_nn::VarBuilder<'_>,
    chain: Option<ShardedIn<'a, D>>,
) -> Result<LayerVariables<'a, D>> {
    let (config, local) = (layer.config(), group.local_experts());
    group.membership().check_experts(call, config.router.num_experts)?;
    if let Some(chain) = &chain {
        chain.check_device(call, group)?;
    }
    let params = PerParam::try_from_fn(|kind| -> Result<Option<Tensor>> {
        let Some(dims) = kind.dims(config, local) else { return Ok(None) };
        let init = kind.fan_in(config).map_or(Init::Const(0.0), uniform);
        let dtype = match (kind, vb.dtype()) {
            // Its small steps would be rounded away, as no other copy of it is kept.
            (ParamKind::SelectionBias, DType::BF16 | DType::F16) => DType::F32,
            (_, dtype) => dtype,
        };
        // A host without the memory would end the process as candle allocates.
        let check_memory = |dims: &[usize]| -> crate::Result<()> {
            if vb.device().is_cpu() && !vb.contains_tensor(kind.name()) {
                let bytes = dims.iter().fold(dtype.size_in_bytes(), |bytes, n| bytes.saturating_mul(*n));
                reserved::<u8>(call, kind.name(), bytes)?;
            }
            Ok(())
        };
        let Some(chain) = &chain else {
            check_memory(&dims)?;
            return vb.get_with_hints_dtype(dims, kind.name(), init, dtype).map(Some);
        };
        let (cut, rank, is_shard) = chain.cut(kind, &dims)?;
        let shard = ShardInit {
            name: kind.name(),
            full_name: full_name(&vb, kind.name()),
            dims: &dims,
            rank,
            shape: if is_shard { cut.shard_dims().to_vec() } else { dims.clone() },
            cut,
            before: if kind.is_replicated() { 0 } else { group.rank() * dims.iter().product::<usize>() },
            init,
            dtype,
            // That of the parameter's own chain: the dense parameters' chain may have another than the experts'.
            seed: chain.of(kind).unwrap_or(chain.chain).options().seed,
        };
        check_memory(&shard.shape)?;
        shard.tensor(&vb).map(Some)
    })?;
    let shards = match chain {
        Some(in_chain) => in_chain.check(layer, local, &params)?,
        None => None,
    };
    Ok((params, shards))
}

/// Experts' weights that a builder has not, and will make.
pub(super) fn missing_experts(vb: &candle_nn::VarBuilder<'_>) -> Vec<ParamKind> {
    let missing = |kind: &ParamKind| is_expert_weight(*kind) && !vb.contains_tensor(kind.name());
    ParamKind::ALL.into_iter().filter(missing).collect()
}

/// Draws experts that were made anew by their place among all ranks' experts. candle draws them on each rank by itself: on
/// GPUs, whose generators begin alike, every rank would have the same ones. The router, which all ranks have, is the seed.
pub(super) fn redraw_experts(
    layer: &Layer,
    group: &DeviceGroup,
    vb: &candle_nn::VarBuilder<'_>,
    (params, kinds): (&PerParam<Option<Tensor>>, &[ParamKind]),
) -> Result<()> {
    let Some(router) = &params.router else { return Ok(()) };
    let router = router.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let seed = fnv1a(bytemuck::cast_slice::<f32, u8>(&router));
    for &kind in kinds {
        let (Some(t), Some(dims)) = (&params[kind], kind.dims(layer.config(), group.local_experts())) else { continue };
        let shard = ShardInit {
            name: kind.name(),
            full_name: full_name(vb, kind.name()),
            dims: &dims,
            cut: Shards::new(&Shards::lines(&dims), 1, 1)?,
            rank: 0,
            shape: dims.clone(),
            before: group.rank() * dims.iter().product::<usize>(),
            init: kind.fan_in(layer.config()).map_or(Init::Const(0.0), uniform),
            dtype: t.dtype(),
            seed,
        };
        shard.redraw(t)?;
    }
    Ok(())
}

pub(in crate::candle) fn is_expert_weight(kind: ParamKind) -> bool {
    matches!(kind, ParamKind::Up | ParamKind::Down)
}

impl<'a, D: CandleDevice> ShardedIn<'a, D> {
    pub(super) fn check_device(&self, call: &'static str, group: &DeviceGroup) -> crate::Result<()> {
        if self.chain.device().is(group.device()) {
            return Ok(());
        }
        let found = D::other(group.device());
        Err(Error::invalid(call, "group", "the chain's device", found))
    }

    /// The cut of a parameter of these sizes, this rank's place in it, and whether it is cut at all.
    fn cut(&self, kind: ParamKind, dims: &[usize]) -> crate::Result<(Shards, usize, bool)> {
        match self.of(kind) {
            _ if is_expert_weight(kind) => Ok((self.chain.shards(dims)?, self.chain.rank(), true)),
            Some(chain) => Ok((ShardedTensor::cut(chain, dims)?, chain.rank(), true)),
            None => Ok((Shards::new(&Shards::lines(dims), 1, 1)?, 0, false)),
        }
    }

    /// The chain that a parameter beside the experts' weights is cut for.
    fn of(&self, kind: ParamKind) -> Option<&Arc<Chain<D>>> {
        let weights = self.weights.filter(|_| kind != ParamKind::SelectionBias && !is_expert_weight(kind))?;
        Some(if kind.is_replicated() { weights.chain() } else { self.chain })
    }

    /// A module's shards, once the chains are known to take all of them.
    pub(super) fn check(
        self,
        layer: &Layer,
        local: usize,
        params: &PerParam<Option<Tensor>>,
    ) -> crate::Result<Option<NewLayerShards<'a, D>>> {
        let (Some(up), Some(down)) = (&params.up, &params.down) else { return Ok(None) };
        for (kind, t) in [(ParamKind::Up, up), (ParamKind::Down, down)] {
            check_shard(kind.name(), t)?;
        }
        let resident = params.as_ref().try_map(|kind, t| -> crate::Result<_> {
            let (Some(t), Some(weights), Some(chain)) = (t, self.weights, self.of(kind)) else { return Ok(None) };
            let dims = kind.dims(layer.config(), local).unwrap_or_default();
            let of = LayerPlace { layer: layer.number(), resident: true };
            NewShardedTensor::new(chain, weights.full_name(kind.name()), &dims, t.clone(), of).map(Some)
        })?;
        let shard = |t: &Tensor| VarShard::on(self.chain.device(), t).into_shard();
        let experts = NewExperts::new(self.chain, self.payload, (layer, local), [shard(up)?, shard(down)?])?;
        experts.check()?;
        Ok(Some(NewLayerShards { weights: self.weights, resident, experts }))
    }
}

/// A layer's shards, which their chains would take, and have not got yet.
pub(super) struct NewLayerShards<'a, D: CandleDevice> {
    weights: Option<&'a ShardedWeights<'a, D>>,
    pub(super) resident: PerParam<Option<NewShardedTensor<D>>>,
    experts: NewExperts<D>,
}

impl<D: CandleDevice> NewLayerShards<'_, D> {
    /// Adds them.
    pub(super) fn add(self) -> crate::Result<ErasedLayerShards> {
        let Self { weights, resident, experts } = self;
        let resident = resident.try_map(|kind, new| -> crate::Result<_> {
            let Some(shard) = new.map(NewShardedTensor::add).transpose()? else { return Ok(None) };
            let chain = D::erase(Arc::clone(&shard.chain));
            let weight = ErasedResidentWeight { chain, id: shard.id, dims: shard.dims.clone() };
            if let Some(weights) = weights.filter(|_| kind.is_replicated()) {
                weights.register(shard);
            }
            Ok(Some(weight))
        })?;
        experts.add(resident)
    }
}
