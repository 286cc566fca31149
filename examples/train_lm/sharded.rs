//! Experts of a rank as shards of a chain, and what they cost.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_nn::VarBuilder;
use moebius::Tensor;
use moebius::candle::{CandleDevice, DeviceGroup, ExpertParallelMoE, GradientType, WeightVar, finish_sharded};
use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::etp::{self, Chain, EtpOptions, Payload, Phase, Reduction, ShardDevice};
use moebius::layer::Layer;

use crate::Failure;
use crate::lm::{Param, is_share};
use crate::mesh::Mesh;
use crate::output::say;

/// Parts that a layer is made from.
pub struct Parts<'a> {
    pub group: &'a DeviceGroup,
    pub vb: VarBuilder<'a>,
    pub payload: Payload,
}

/// Sharded experts of a rank, whatever its device.
pub trait Experts {
    /// This rank's shard of an EP rank's share of a parameter; others as they are.
    fn cut(&mut self, param: &Param, own: (Vec<usize>, Vec<f32>)) -> Result<(Vec<usize>, Vec<f32>), Failure>;
    /// A layer whose experts are shards.
    fn module(&self, layer: Layer, parts: Parts<'_>) -> Result<ExpertParallelMoE, Failure>;
    /// The layers, once they are there.
    fn adopt(&mut self, layers: &[ExpertParallelMoE]);
    /// Says that the next backward is the step's last: sums over replicas begin beside it.
    fn last_backward(&self) -> Result<(), Failure>;
    /// Begins a pass, and ends it.
    fn begin(&self, phase: Phase) -> Result<(), Failure>;
    fn end(&self) -> Result<(), Failure>;
    /// The shards' gradients, summed over all ranks.
    fn finish(&mut self, gradients: &mut GradStore) -> Result<(), Failure>;
    /// Memory that the chain holds, and bytes that it has moved in `passes` forwards with their backwards.
    fn cost(&self, passes: usize) -> Cost;
}

/// The chain of a rank.
pub struct Sharded<D: ShardDevice> {
    chain: Arc<Chain<D>>,
    vars: Vec<WeightVar>,
    /// Elements of the whole weights of this rank's experts.
    elements: usize,
}

/// A rank's chain, without weights. Gradients are sums over the ranks: each rank's loss is its part of the whole. Copy
/// engines take one collective at a time, started a layer ahead.
pub fn chain<D: ShardDevice>(
    mesh: Mesh,
    device: &D,
    comms: etp::Comms<D>,
    replicas: Box<dyn Communicator<D>>,
) -> Result<Arc<Chain<D>>, Failure> {
    let (reduction, replicated) = (Reduction::Pairwise, mesh.replicas());
    let (in_turn, ahead) = if mesh.engines { (true, 2) } else { (false, 1) };
    let options = EtpOptions { reduction, replicas: replicated, in_turn, ahead, ..EtpOptions::default() };
    let chain = Arc::new(Chain::new(device.clone(), comms, options)?.with_replicas(replicas)?);
    if mesh.engines && !chain.uses_copy_engines() {
        return Err("these ranks' communicators have no copy engines".into());
    }
    Ok(chain)
}

impl<D: ShardDevice> Sharded<D> {
    /// A chain without weights.
    pub fn new(
        mesh: Mesh,
        device: &D,
        comms: etp::Comms<D>,
        replicas: Box<dyn Communicator<D>>,
    ) -> Result<Self, Failure> {
        Ok(Self { chain: chain(mesh, device, comms, replicas)?, vars: Vec::new(), elements: 0 })
    }
}

impl<D: CandleDevice> Experts for Sharded<D> {
    fn cut(
        &mut self,
        param: &Param,
        (dims, values): (Vec<usize>, Vec<f32>),
    ) -> Result<(Vec<usize>, Vec<f32>), Failure> {
        if !is_share(&param.name) {
            return Ok((dims, values));
        }
        self.elements += values.len();
        let cut = self.chain.shards(&dims)?;
        let whole = Tensor::<Cpu>::from_vec(values, &dims)?;
        let shard = cut.cut(&Cpu::new(), whole.view(), self.chain.rank())?;
        Ok((cut.shard_dims().to_vec(), shard.as_slice::<f32>()?.to_vec()))
    }

    fn module(&self, layer: Layer, Parts { group, vb, payload }: Parts<'_>) -> Result<ExpertParallelMoE, Failure> {
        Ok(ExpertParallelMoE::sharded(layer, group, &self.chain, payload, vb)?)
    }

    fn adopt(&mut self, layers: &[ExpertParallelMoE]) {
        self.vars = layers.iter().flat_map(ExpertParallelMoE::shards).collect();
    }

    fn last_backward(&self) -> Result<(), Failure> {
        Ok(self.chain.last_backward()?)
    }

    fn begin(&self, phase: Phase) -> Result<(), Failure> {
        Ok(self.chain.begin(phase)?)
    }

    fn end(&self) -> Result<(), Failure> {
        Ok(self.chain.end()?)
    }

    fn finish(&mut self, gradients: &mut GradStore) -> Result<(), Failure> {
        Ok(finish_sharded(&self.chain, None, &self.vars, gradients, GradientType::AsSummed)?)
    }

    fn cost(&self, passes: usize) -> Cost {
        let own = self.vars.iter().map(|WeightVar { var, .. }| var.elem_count()).sum();
        let width = self.vars.first().map_or(0, |WeightVar { var, .. }| var.dtype().size_in_bytes());
        Cost::of_chain(&self.chain, (own, width), self.elements * passes)
    }
}

/// Runs a pass.
pub fn pass<R>(experts: &dyn Experts, phase: Phase, run: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    experts.begin(phase)?;
    let result = run()?;
    experts.end()?;
    Ok(result)
}

/// Memory and traffic of a rank's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Bytes of the shards.
    pub shards: usize,
    /// Bytes of the optimizer's state.
    pub optimizer: usize,
    /// Bytes of the chain.
    pub memory: etp::ChainMemory,
    /// Bytes moved for each element of the experts' weights in a forward and its backward.
    pub moved: f64,
}

impl Cost {
    /// Of a chain with so many elements of so many bytes on this rank, which has moved those of `passed` elements.
    pub fn of_chain<D: ShardDevice>(chain: &Chain<D>, (own, width): (usize, usize), passed: usize) -> Self {
        let (memory, traffic) = (chain.memory(), chain.traffic());
        let moved = traffic.gathered_bytes + traffic.reduced_bytes;
        // Two moments in f32, and main weights where the shards are not in f32.
        let optimizer = own * if width == size_of::<f32>() { 8 } else { 12 };
        Self { shards: own * width, optimizer, memory, moved: moved as f64 / passed as f64 }
    }

    /// As numbers, exact below 2⁵³.
    pub fn numbers(&self) -> [f64; 9] {
        let etp::ChainMemory { main, gathered, quantized, arrived, gradients, reduced } = self.memory;
        let [a, b, c, d, e, f, g, h] =
            [self.shards, self.optimizer, main, gathered, quantized, arrived, gradients, reduced].map(|n| n as f64);
        [a, b, c, d, e, f, g, h, self.moved]
    }

    /// From these.
    pub fn of([shards, optimizer, rest @ .., moved]: [f64; 9]) -> Self {
        let [main, gathered, quantized, arrived, gradients, reduced] = rest.map(|n| n as usize);
        let memory = etp::ChainMemory { main, gathered, quantized, arrived, gradients, reduced };
        Self { shards: shards as usize, optimizer: optimizer as usize, memory, moved }
    }
}

/// Prints a table of the ranks' costs.
pub fn print(costs: &[Cost]) {
    say("memory of the expert weights in KiB, and bytes moved per element and microbatch");
    say("rank  shards  AdamW  main gradients  quantized  gathered  gradients  reduced  total  bytes/element");
    for (rank, cost) in costs.iter().enumerate() {
        let m = &cost.memory;
        let quantized = m.quantized + m.arrived;
        let parts = [cost.shards, cost.optimizer, m.main, quantized, m.gathered, m.gradients, m.reduced];
        let total = parts.iter().sum::<usize>();
        let [shards, adam, main, quantized, gathered, gradients, reduced] = parts.map(|bytes| bytes as f64 / 1024.0);
        say(format_args!(
            "{rank:>4} {shards:>7.0} {adam:>6.0} {main:>15.0} {quantized:>10.0} {gathered:>9.0} {gradients:>10.0} {reduced:>8.0} \
             {:>6.0} {:>14.3}",
            total as f64 / 1024.0,
            cost.moved
        ));
    }
}
