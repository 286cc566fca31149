//! A module whose experts are shards of a chain: the layer takes gathered weights, the chain takes their gradients.

use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::etp::{Chain, GradientBuffer, Payload, ShardDevice, ShardedWeight, Shards, WeightId, WeightSpec};
use crate::kernels::Scalar;
use crate::layer::{
    Context, Cotangents, Gradients, GradientsMut, Inputs, Layer, ParamKind, ParamViews, Params, RefusalGuard, Wanted,
};
use crate::tensor::TensorRef;

use super::etp::VarShard;
use super::host::{DeviceChain, Host};

/// A layer's `up` and `down`, of this rank's shards.
#[derive(Clone, Copy)]
pub(super) struct ShardedParams<'a> {
    pub(super) up: &'a Tensor,
    pub(super) down: &'a Tensor,
}

/// The experts of a module, whatever their device.
#[derive(Clone)]
pub(super) struct Sharded {
    chain: DeviceChain,
    /// Of `up` and `down`.
    pub(super) ids: [WeightId; 2],
}

impl Debug for Sharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sharded<{:?}>", self.ids)
    }
}

impl Sharded {
    /// Adds a layer's shards to a chain.
    pub(super) fn new<D: Host>(
        chain: &Arc<Chain<D>>,
        payload: Payload,
        layer: &Layer,
        local: usize,
        shards: ShardedParams<'_>,
    ) -> Result<Self> {
        let spec = |kind: ParamKind, shard: &Tensor| -> Result<_> {
            let missing = || Error::invalid("ExpertParallelMoE::sharded", kind.name(), "a weight", "none");
            let dims = kind.dims(layer.config(), local).ok_or_else(missing)?;
            // The chain keeps the gradient, so there is none for the variables that a shard is computed from.
            if shard.track_op() && !shard.is_variable() {
                let expected = "a variable, or a constant";
                return Err(Error::invalid("ExpertParallelMoE::sharded", kind.name(), expected, "a computed shard"));
            }
            let source = VarShard::on(chain.device(), shard);
            let name = format!("layer {} {}", layer.number(), kind.name());
            let mut spec = WeightSpec::new(name, layer.number(), &dims, source.dtype()?);
            spec.recompute = kind == ParamKind::Up && layer.config().recompute;
            spec.payload = payload;
            Ok((spec, Arc::new(source)))
        };
        // Both are known to be sound before either is added.
        let (up, down) = (spec(ParamKind::Up, shards.up)?, spec(ParamKind::Down, shards.down)?);
        let ids = [chain.add(up.0, up.1)?, chain.add(down.0, down.1)?];
        Ok(Self { chain: D::hide(Arc::clone(chain)), ids })
    }

    /// The cut of a weight of these sizes, and this rank's place in the chain.
    pub(super) fn cut(&self, dims: &[usize]) -> Result<(Shards, usize)> {
        match &self.chain {
            DeviceChain::Cpu(chain) => Ok((chain.shards(dims)?, chain.rank())),
            #[cfg(feature = "cuda")]
            DeviceChain::Cuda(chain) => Ok((chain.shards(dims)?, chain.rank())),
        }
    }

    /// The experts, for a layer that works on a `D`.
    pub(super) fn experts<D: Host>(&self, call: &'static str) -> Result<Chained<D>> {
        match D::chain(&self.chain) {
            Some(chain) => Ok(Chained { chain: Arc::clone(chain), ids: self.ids }),
            None => Err(Error::invalid(call, "chain", "one of the group's device", "another")),
        }
    }
}

/// Weights of a chain.
#[derive(Debug)]
pub(super) struct Chained<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    ids: [WeightId; 2],
}

impl<D: Host> Chained<D> {
    /// `up` and `down` as a layer takes them.
    pub(super) fn sources(&self) -> Result<[ShardedWeight<'_, D>; 2]> {
        let [up, down] = self.ids;
        Ok([self.chain.source(up)?, self.chain.source(down)?])
    }

    /// Memory for their gradients.
    fn gradient_buffers(&self) -> Result<[GradientBuffer<'_, D>; 2]> {
        let [up, down] = self.ids;
        Ok([self.chain.gradient_buffer(up)?, self.chain.gradient_buffer(down)?])
    }
}

/// The parameters, with experts from elsewhere if there are sources of them.
pub(super) fn with_sources<'a, D: Host>(
    views: &'a ParamViews<'_, D>,
    sources: Option<&'a [ShardedWeight<'_, D>; 2]>,
) -> Params<'a, D> {
    let params = views.params();
    match sources {
        None => params,
        Some([up, down]) => Params { up, down, ..params },
    }
}

/// A layer's backward with gathered experts.
pub(super) struct Backward<'a, D: Host> {
    pub(super) layer: &'a Layer,
    pub(super) context: Context<D>,
    pub(super) wanted: Wanted,
    /// Whether the gradients of `up` and `down` are to leave for their main gradients.
    pub(super) submit: [bool; 2],
}

impl<D: Host> Backward<'_, D> {
    pub(super) fn run(
        self,
        entry: &mut RefusalGuard<'_, D>,
        experts: &Chained<D>,
        x: TensorRef<'_, D>,
        views: &ParamViews<'_, D>,
        cotangents: Cotangents<'_, D, Scalar<'_, D>>,
    ) -> Result<Gradients<D>> {
        let Self { layer, context, wanted, submit } = self;
        let progress = context.progress();
        let sources = experts.sources()?;
        let mut gradient_buffers = if wanted.experts { Some(experts.gradient_buffers()?) } else { None };
        let mut given = GradientsMut::none();
        if let Some([up, down]) = &mut gradient_buffers {
            given.set(ParamKind::Up, up.view_mut()?);
            given.set(ParamKind::Down, down.view_mut()?);
        }
        let params = with_sources(views, Some(&sources));
        let inputs = Inputs { x: x.borrow(), params: &params };
        let gradients = layer.backward_with(entry.enter(), context, inputs, cotangents, wanted, given)?;
        if let Some([up, down]) = gradient_buffers {
            // In the order in which backward uses the weights.
            for (gradient, wanted) in [(down, submit[1]), (up, submit[0])] {
                if wanted {
                    // The other ranks of the layer are on their way to its next collective.
                    experts.chain.submit(gradient).map_err(|e| {
                        progress.refused();
                        layer.refuse_backward(entry.enter(), e)
                    })?;
                }
            }
        }
        Ok(gradients)
    }
}
