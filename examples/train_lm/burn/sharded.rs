//! Experts of a rank in burn as shards of a chain.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::optim::GradientsParams;
use moebius::burn::{ExpertParallelMoE, MoeBackend, NativeBackend, ShardedParams};
use moebius::comm::Communicator;
use moebius::etp::{Chain, Comms, Payload, Phase};

use super::model::Model;
use crate::Failure;
use crate::mesh::Mesh;
use crate::sharded::{Cost, chain};

/// The chain of a rank.
pub struct Sharded<Bk: NativeBackend> {
    shards: ShardedParams<Bk>,
    /// Elements of the whole weights of this rank's experts, and of this rank's shards.
    elements: usize,
    own: usize,
    /// Bytes of an element of the shards.
    width: usize,
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> Sharded<Bk> {
    /// Shards the experts of a model whose weights are whole.
    pub fn new(
        mesh: Mesh,
        device: &Bk::Core,
        (comms, replicas): (Comms<Bk::Core>, Box<dyn Communicator<Bk::Core>>),
    ) -> Result<Self, Failure> {
        let shards = ShardedParams::new(chain(mesh, device, comms, replicas)?).with_gradients_as_summed();
        Ok(Self { shards, elements: 0, own: 0, width: 0 })
    }

    /// Makes the experts of a model shards.
    pub fn shard(&mut self, mut model: Model<Autodiff<Bk>>, payload: Payload) -> Result<Model<Autodiff<Bk>>, Failure> {
        let elements = |moe: &ExpertParallelMoE<Autodiff<Bk>>| {
            let (up, down) = (moe.experts.up.dims(), moe.experts.down.dims());
            up.iter().product::<usize>() + down.iter().product::<usize>()
        };
        let mut layers = Vec::with_capacity(model.layers.len());
        for mut layer in model.layers {
            self.elements += elements(&layer.moe);
            layer.moe = layer.moe.into_sharded(&self.shards, payload)?;
            self.own += elements(&layer.moe);
            self.width = layer.moe.experts.up.dtype().size();
            layers.push(layer);
        }
        model.layers = layers;
        Ok(model)
    }

    /// Says that the next backward is the step's last: sums over replicas begin beside it.
    pub fn last_backward(&self) -> Result<(), Failure> {
        Ok(self.shards.last_backward()?)
    }

    /// Runs a pass.
    pub fn pass<R>(
        &self,
        phase: Phase,
        model: &Model<Autodiff<Bk>>,
        run: impl FnOnce() -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.shards.begin(phase, layers(model))?;
        let result = run()?;
        self.shards.end()?;
        Ok(result)
    }

    /// The shards' gradients, summed over all ranks.
    pub fn finish(&self, model: &Model<Autodiff<Bk>>, gradients: &mut GradientsParams) -> Result<(), Failure> {
        Ok(self.shards.finish(None, layers(model), gradients)?)
    }

    /// Memory that the chain holds, and bytes that it has moved in `passes` forwards with their backwards.
    pub fn cost(&self, passes: usize) -> Cost {
        let chain: &Arc<Chain<Bk::Core>> = self.shards.chain();
        Cost::of_chain(chain, (self.own, self.width), self.elements * passes)
    }
}

fn layers<Bk: MoeBackend<Native = Bk> + NativeBackend>(
    model: &Model<Autodiff<Bk>>,
) -> impl Iterator<Item = &ExpertParallelMoE<Autodiff<Bk>>> {
    model.layers.iter().map(|layer| &layer.moe)
}
