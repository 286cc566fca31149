//! A module whose experts are shards of a chain: the layer takes gathered weights, the chain takes their gradients.

use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::Tensor;

use crate::ep::Group;
use crate::error::{Error, Result};
use crate::etp::{Chain, GradientBuffer, Payload, ShardDevice, WeightId, WeightSpec};
use crate::kernels::Scalar;
use crate::layer::{Context, Cotangents, Gradients, Inputs, Layer, ParamKind, ParamViews, Params, Wanted};
use crate::tensor::{TensorMut, TensorRef};
use crate::weights::WeightSource;

use super::etp::VarShard;
use super::host::Host;

/// A layer's `up` and `down` that are gathered for each use.
pub(super) trait ExpertWeights<D: Host>: Debug + Send + Sync {
    /// `up` and `down` as a layer takes them.
    fn sources(&self) -> Result<Sources<'_, D>>;
    /// Rooms for their gradients.
    fn gradient_buffers(&self) -> Result<[Box<dyn WeightGradient<D> + '_>; 2]>;
}

/// `up` and `down` as a layer takes them.
pub(super) type Sources<'a, D> = [Box<dyn WeightSource<D> + 'a>; 2];

/// Memory for the gradient of a whole weight.
pub(super) trait WeightGradient<D: Host> {
    fn view_mut(&mut self) -> Result<TensorMut<'_, D>>;
    /// Hands the gradient in.
    fn submit(self: Box<Self>) -> Result<()>;
}

/// The experts of a module, whatever their device.
#[derive(Clone)]
pub(super) struct Sharded {
    /// An `Arc<dyn ExpertWeights<D>>`, D the group's device.
    experts: Arc<dyn Any + Send + Sync>,
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
    pub(super) fn new<D: Host + ShardDevice>(
        (chain, payload): (&Arc<Chain<D>>, Payload),
        layer: &Layer,
        local: usize,
        shards: [(ParamKind, &Tensor); 2],
    ) -> Result<Self> {
        let mut sources = Vec::new();
        for (role, shard) in shards {
            let missing = || Error::invalid("ExpertParallelMoE::sharded", role.name(), "a weight", "none");
            let dims = role.dims(layer.config(), local).ok_or_else(missing)?;
            let source = VarShard::on(chain.device(), shard);
            let name = format!("layer {} {}", layer.number(), role.name());
            let mut spec = WeightSpec::new(name, layer.number(), &dims, source.dtype()?);
            spec.recompute = role == ParamKind::Up && layer.config().recompute;
            spec.payload = payload;
            sources.push((spec, Arc::new(source)));
        }
        let ids: Vec<WeightId> =
            sources.into_iter().map(|(spec, source)| chain.add(spec, source)).collect::<Result<_>>()?;
        let ids = [ids[0], ids[1]];
        let experts: Arc<dyn ExpertWeights<D>> = Arc::new(Chained { chain: Arc::clone(chain), ids });
        Ok(Self { experts: Arc::new(experts), ids })
    }

    /// The experts, for a layer that works on a `D`.
    pub(super) fn experts<D: Host>(&self, call: &'static str) -> Result<Arc<dyn ExpertWeights<D>>> {
        let experts = self.experts.downcast_ref::<Arc<dyn ExpertWeights<D>>>();
        experts.map(Arc::clone).ok_or_else(|| Error::invalid(call, "chain", "one of the group's device", "another"))
    }
}

/// Weights of a chain.
#[derive(Debug)]
struct Chained<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    ids: [WeightId; 2],
}

impl<D: Host + ShardDevice> ExpertWeights<D> for Chained<D> {
    fn sources(&self) -> Result<Sources<'_, D>> {
        let [up, down] = self.ids;
        Ok([Box::new(self.chain.source(up)?), Box::new(self.chain.source(down)?)])
    }

    fn gradient_buffers(&self) -> Result<[Box<dyn WeightGradient<D> + '_>; 2]> {
        let room = |id| -> Result<Box<dyn WeightGradient<D> + '_>> {
            Ok(Box::new(ChainGradient { room: self.chain.gradient_buffer(id)?, chain: &self.chain }))
        };
        let [up, down] = self.ids;
        Ok([room(up)?, room(down)?])
    }
}

struct ChainGradient<'a, D: ShardDevice> {
    room: GradientBuffer<'a, D>,
    chain: &'a Chain<D>,
}

impl<D: Host + ShardDevice> WeightGradient<D> for ChainGradient<'_, D> {
    fn view_mut(&mut self) -> Result<TensorMut<'_, D>> {
        self.room.view_mut()
    }

    fn submit(self: Box<Self>) -> Result<()> {
        let Self { room, chain } = *self;
        chain.submit(room)
    }
}

/// The parameters, with experts from elsewhere if there are sources of them.
pub(super) fn with_sources<'a, D: Host>(
    views: &'a ParamViews<'_, D>,
    sources: Option<&'a Sources<'_, D>>,
) -> Params<'a, D> {
    let params = views.params();
    match sources {
        None => params,
        Some([up, down]) => Params { up: &**up, down: &**down, ..params },
    }
}

/// A layer's backward.
pub(super) struct Backward<'a, D: Host> {
    pub(super) layer: &'a Layer,
    pub(super) group: &'a mut Group<D>,
    pub(super) context: Context<D>,
    pub(super) wanted: Wanted,
    /// Whether the gradients of `up` and `down` are to leave for their main gradients.
    pub(super) submit: [bool; 2],
}

impl<D: Host> Backward<'_, D> {
    /// With gathered experts.
    pub(super) fn run(
        self,
        experts: &dyn ExpertWeights<D>,
        (x, views): (TensorRef<'_, D>, &ParamViews<'_, D>),
        cotangents: Cotangents<'_, D, Scalar<'_, D>>,
    ) -> Result<Gradients<D>> {
        let Self { layer, group, context, wanted, submit } = self;
        let gradient_buffers = || -> Result<_> {
            let sources = experts.sources()?;
            Ok((sources, if wanted.experts { Some(experts.gradient_buffers()?) } else { None }))
        };
        let (sources, mut gradient_buffers) = gradient_buffers().map_err(|e| layer.refuse_backward(group, e))?;
        let beside = match &mut gradient_buffers {
            Some([up, down]) => up.view_mut().and_then(|up| Ok(Some([up, down.view_mut()?]))),
            None => Ok(None),
        };
        let beside = beside.map_err(|e| layer.refuse_backward(group, e))?;
        let params = with_sources(views, Some(&sources));
        let cotangents = Cotangents { y: cotangents.y.as_ref().map(TensorRef::borrow), aux: cotangents.aux.borrow() };
        let inputs = (Inputs { x: x.borrow(), params: &params }, cotangents);
        let gradients = layer.backward_with_expert_grads(group, context, inputs, (wanted, beside))?;
        if let Some([up, down]) = gradient_buffers {
            // In the order in which backward uses the weights.
            for (room, wanted) in [(down, submit[1]), (up, submit[0])] {
                if wanted {
                    // The other ranks of the layer are on their way to its next collective.
                    room.submit().map_err(|e| layer.refuse_backward(group, e))?;
                }
            }
        }
        Ok(gradients)
    }
}
