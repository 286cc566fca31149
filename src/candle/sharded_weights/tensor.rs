//! One weight of a chain, and this rank's shard of it.

use std::sync::Arc;

use candle_core::{Tensor, Var};

use crate::error::Error;
use crate::etp::{Chain, NO_LAYER, NewShard, Shards, WeightId, WeightSpec};
use crate::optim::ParamShard;
use crate::weights::{Weight, WeightSource};

use crate::candle::device::{CandleDevice, copy_of, dtype_of, into_candle, with_views};
use crate::candle::error::framework;
use crate::candle::etp::VarShard;
use crate::candle::optimizer::AdamWParam;

pub(super) const CALL: &str = "sharded weights";

/// A weight of a chain, and this rank's shard of it.
#[derive(Debug)]
pub(in crate::candle) struct ShardedTensor<D: CandleDevice> {
    pub(in crate::candle) chain: Arc<Chain<D>>,
    pub(in crate::candle) id: WeightId,
    pub(in crate::candle) name: String,
    pub(in crate::candle) dims: Vec<usize>,
    pub(in crate::candle) shard: Tensor,
    /// A layer's.
    pub(super) resident: bool,
    /// This rank's part.
    pub(in crate::candle) part: ParamShard,
}

/// Refuses a shard that is computed: the chain keeps the gradient, so there is none for the variables that it is
/// computed from.
pub(in crate::candle) fn check_shard(name: &str, shard: &Tensor) -> crate::Result<()> {
    if shard.track_op() && !shard.is_variable() {
        return Err(Error::invalid(CALL, name, "a variable, or a constant", "a computed shard"));
    }
    Ok(())
}

/// How a weight is used.
#[derive(Debug, Clone, Copy)]
pub(in crate::candle) struct LayerPlace {
    /// Number of the layer that it belongs to.
    pub(in crate::candle) layer: u32,
    /// It is in use while the layer's other weights are.
    pub(in crate::candle) resident: bool,
}

/// By itself.
pub(super) const ALONE: LayerPlace = LayerPlace { layer: NO_LAYER, resident: false };

/// A weight that its chain would take, and has not got yet.
pub(in crate::candle) struct NewShardedTensor<D: CandleDevice> {
    chain: Arc<Chain<D>>,
    new: NewShard<D>,
    dims: Vec<usize>,
    shard: Tensor,
    part: ParamShard,
}

impl<D: CandleDevice> NewShardedTensor<D> {
    /// Asks the chain.
    pub(in crate::candle) fn new(
        chain: &Arc<Chain<D>>,
        name: String,
        dims: &[usize],
        shard: Tensor,
        of: LayerPlace,
    ) -> crate::Result<Self> {
        if !chain.device().is(shard.device()) {
            let found = D::other(shard.device());
            return Err(Error::invalid(CALL, name, "a tensor on the chain's device", found));
        }
        check_shard(&name, &shard)?;
        let cut = ShardedTensor::cut(chain, dims)?;
        let part = ParamShard::whole(cut.dims()).shard(&cut, chain.rank())?;
        let dtype = dtype_of(CALL, &name, shard.dtype())?;
        let mut spec = WeightSpec::new(name, of.layer, cut.dims(), dtype);
        spec.resident = of.resident;
        let new = NewShard::new(spec, Arc::new(VarShard::on(chain.device(), &shard)));
        chain.check(std::slice::from_ref(&new))?;
        Ok(Self { chain: Arc::clone(chain), new, dims: dims.to_vec(), shard, part })
    }

    /// Adds it to the chain.
    pub(in crate::candle) fn add(self) -> crate::Result<ShardedTensor<D>> {
        let Self { chain, new: NewShard { spec, source }, dims, shard, part } = self;
        let (name, resident) = (spec.name.clone(), spec.resident);
        let id = chain.add(spec, source)?;
        Ok(ShardedTensor { chain, id, name, dims, shard, resident, part })
    }
}

impl<D: CandleDevice> ShardedTensor<D> {
    /// The cut of a weight of sizes `dims`.
    pub(in crate::candle) fn cut(chain: &Chain<D>, dims: &[usize]) -> crate::Result<Shards> {
        chain.shards(&Shards::lines(dims))
    }

    /// The whole weight, in memory of candle's (collective); `backward`: a backward gathers it again.
    pub(super) fn gather(&self, backward: bool) -> crate::Result<Tensor> {
        let (device, source) = (self.chain.device(), self.chain.source(self.id)?.with_backward(backward));
        let guard = source.acquire()?;
        device.wait(guard.ready.as_ref())?;
        let Weight::Dense(whole) = guard.weight()? else {
            return Err(Error::invalid(CALL, &self.name, "a dense weight", "a quantized one"));
        };
        into_candle(copy_of(device, whole)?, &self.dims, self.shard.device())
    }

    /// Hands the whole weight's gradient in.
    pub(super) fn submit(&self, gradient: &Tensor) -> crate::Result<()> {
        Error::check_shape(CALL, &self.name, &self.dims, gradient.dims())?;
        let gradient = gradient.contiguous().map_err(framework(CALL))?;
        let device = self.chain.device();
        let mut buffer = self.chain.gradient_buffer(self.id)?;
        with_views(device, CALL, &[(&self.name, &gradient)], |views| {
            let into = buffer.view_mut()?;
            Error::check_dtype(CALL, &self.name, into.dtype(), views[0].dtype())?;
            device.copy(views[0].data(), into.into_data())
        })?;
        self.chain.submit(buffer)
    }

    /// The variable, if the weight is trained.
    pub(in crate::candle) fn var(&self) -> Option<Var> {
        self.shard.is_variable().then(|| Var::from_tensor(&self.shard).ok()).flatten()
    }

    /// The variable as an optimizer is told of it.
    pub(in crate::candle) fn optimizer_param(&self, name: String) -> Option<AdamWParam> {
        Some(AdamWParam::new(name, &self.var()?).with_shard(self.part.clone()))
    }
}
