//! Weights that come to a chain: all that are given together, or none of them.

use std::sync::Arc;

use crate::error::{Error, Result};

use crate::etp::chain::collective_state::StateMachine;
use crate::etp::chain::{Chain, ChainState, ChainWeight};
use crate::etp::shards::quantized::{QuantizedShard, ShardForm};
use crate::etp::shards::source::ShardSource;
use crate::etp::{Payload, ShardDevice, Shards, WeightId, WeightSpec};

const CALL: &str = "Chain::add";

/// A weight, and where this rank keeps its shard of it.
#[derive(Debug)]
pub struct NewShard<D: ShardDevice> {
    /// The weight.
    pub spec: WeightSpec,
    /// The shard.
    pub source: Arc<dyn ShardSource<D>>,
}

impl<D: ShardDevice> Clone for NewShard<D> {
    fn clone(&self) -> Self {
        Self { spec: self.spec.clone(), source: Arc::clone(&self.source) }
    }
}

impl<D: ShardDevice> NewShard<D> {
    /// From its parts.
    pub fn new(spec: WeightSpec, source: Arc<dyn ShardSource<D>>) -> Self {
        Self { spec, source }
    }
}

impl<D: ShardDevice> Chain<D> {
    /// Adds a weight whose shard on this rank is `source`, before the first forward.
    ///
    /// # Errors
    /// Sizes that cannot be cut; a source of another size or type; [`Error::Shard`], a form in which it cannot be sent, or
    /// a shard on the host for several ranks; a chain that has its order.
    pub fn add(&self, spec: WeightSpec, source: Arc<dyn ShardSource<D>>) -> Result<WeightId> {
        let [id] = self.add_all([NewShard { spec, source }])?;
        Ok(id)
    }

    /// Adds all of these weights, or after an error none: the weights of a layer.
    ///
    /// # Errors
    /// As [`add`](Self::add), of the first that is refused.
    pub fn add_all<const N: usize>(&self, shards: [NewShard<D>; N]) -> Result<[WeightId; N]> {
        let mut inner = self.lock();
        let forms = shards.iter().map(|shard| self.form(&inner, shard)).collect::<Result<Vec<_>>>()?;
        let first = inner.weights.len();
        shards.into_iter().zip(forms).for_each(|(shard, form)| inner.take(shard, form));
        Ok(std::array::from_fn(|i| WeightId(first + i)))
    }

    /// Whether the chain would take these weights now, of which it takes none: for a layer whose weights go to several
    /// chains, which are all asked before the first is given any.
    ///
    /// # Errors
    /// As [`add_all`](Self::add_all).
    pub fn check(&self, shards: &[NewShard<D>]) -> Result<()> {
        let inner = self.lock();
        shards.iter().try_for_each(|shard| self.form(&inner, shard).map(drop))
    }

    /// Replaces the source of a weight's shard, between passes; on every rank where shards are sent quantized. Captures
    /// that there are go on reading the one before it.
    ///
    /// # Errors
    /// A source of another size or type; a pass that runs; a weight that there is not.
    pub fn replace(&self, id: WeightId, source: Arc<dyn ShardSource<D>>) -> Result<()> {
        let mut inner = self.lock();
        let weight = inner.weight(id)?;
        check_source(&weight.spec, &weight.shards, &*source)?;
        if source.is_on_host() {
            self.check_on_host(&weight.spec)?;
        }
        if inner.active.is_some() {
            return Err(inner.order_error(&weight.spec.name, "to be replaced between passes", "a pass that runs"));
        }
        inner.weights[id.0].source = source;
        inner.epoch += 1;
        Ok(())
    }

    /// The form in which a weight's shards are sent, once nothing speaks against the weight.
    fn form(&self, inner: &ChainState<D>, NewShard { spec, source }: &NewShard<D>) -> Result<ShardForm> {
        if source.is_on_host() {
            self.check_on_host(spec)?;
        }
        let form = ShardForm::new(CALL, self.rank(), spec, self.shards(&spec.dims)?)?;
        check_source(spec, &form.shards, &**source)?;
        if inner.has_order() || inner.active.is_some() {
            return Err(inner.order_error(&spec.name, "to be added before the first forward", "a chain in use"));
        }
        Ok(form)
    }

    /// A communicator need not read the host's memory, nor does a cast; a copy within a rank does.
    fn check_on_host(&self, spec: &WeightSpec) -> Result<()> {
        let found = match (self.ranks(), spec.payload) {
            (1, Payload::Plain) => return Ok(()),
            (1, payload) => format!("one that is sent in {payload:?}"),
            (ranks, _) => format!("one of {ranks} ranks"),
        };
        let expected = "a chain of one rank, and a weight that is sent as it is, for a shard on the host".to_string();
        Err(Error::Shard { call: CALL, rank: self.rank(), weight: spec.name.clone(), expected, found })
    }
}

impl<D: ShardDevice> ChainState<D> {
    /// Takes a weight of a form that was found good. Nothing fails here, so that a chain takes all weights of a call.
    fn take(&mut self, NewShard { spec, source }: NewShard<D>, form: ShardForm) {
        let (shards, reduce) = (Arc::clone(&form.shards), StateMachine::default());
        let joined = self.quantized().map(|quantized| quantized.joined()).sum();
        let quantized = QuantizedShard::new(&self.gathers.streams, form, joined).map(Arc::new);
        // Amaxes that were joined without its own are of no use.
        self.epoch += u64::from(quantized.is_some());
        self.weights.push(ChainWeight { spec, shards, source, quantized, main: None, reduce, gradient: None });
    }
}

fn check_source<D: ShardDevice>(spec: &WeightSpec, shards: &Shards, source: &dyn ShardSource<D>) -> Result<()> {
    source.read(&mut |shard| {
        Error::check_shape("Chain", &spec.name, &shards.shard_dims(), shard.dims())?;
        Error::check_dtype("Chain", &spec.name, spec.dtype, shard.dtype())
    })
}
