//! A step of layers whose ranks, each with experts of its own, also share the memory of all experts: each weight of the
//! chain is the stack of all ranks' experts, of which a layer takes its rank's part.

use std::sync::Arc;
use std::thread;

use moebius::ep::{DispatcherKind, Group, GroupConfig, Overlap};
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase, Shard, ShardSource, WeightId, WeightSpec};
use moebius::layer::{Context, Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind, Params, PerParam};
use moebius::weights::{AcquiredWeight, WeightGuard, WeightSource};
use moebius::{DType, MoeConfig, Result, Tensor, TensorMut, TensorRef};

use super::test_ranks::{Chained, MINUTE, ON};
use super::world::{Run, mesh, through};

const LAYERS: usize = 2;
const MICROBATCHES: usize = 2;
/// Deviation of weights by which outputs are about as large as inputs: no softmax makes a small difference a large one.
pub const EVEN: f64 = 0.2;

/// What is run.
#[derive(Debug, Clone)]
pub struct Shape {
    pub config: MoeConfig,
    /// Of a rank; a rank has one fewer than the one before it.
    pub tokens: usize,
    pub dtype: DType,
    /// As which weights are gathered.
    pub payload: Payload,
}

/// A rank's results.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Bytes of outputs and gradients of x, per microbatch.
    pub values: Vec<Vec<u8>>,
    /// Of the whole stack of each weight, summed over the microbatches. All ranks have the same.
    pub gradients: Vec<Vec<f32>>,
}

impl Shape {
    /// Weights and inputs: of so many ranks of experts.
    fn run<D: Chained>(&self, device: &D, ep: usize, (dispatcher, in_k_order): (DispatcherKind, bool)) -> Run {
        let (config, dtype, payload) = (self.config.clone(), self.dtype, self.payload);
        Run { config, dtype, payload, dispatcher, in_k_order, deviation: EVEN, ..Run::new(device, ep, 1) }
    }
}

/// One rank's experts of a weight that has all.
#[derive(Debug)]
struct Part<W> {
    whole: W,
    dims: [usize; 3],
    rank: usize,
}

/// The same, acquired.
#[derive(Debug)]
struct AcquiredPart<'a, D: Chained> {
    whole: WeightGuard<'a, D>,
    dims: [usize; 3],
    rank: usize,
}

/// Where a rank's experts are in the bytes of all.
fn part(dims: [usize; 3], dtype: DType, rank: usize) -> std::ops::Range<usize> {
    let bytes = dims.iter().product::<usize>() * dtype.size();
    rank * bytes..(rank + 1) * bytes
}

impl<D: Chained, W: WeightSource<D>> WeightSource<D> for Part<W> {
    fn dims(&self) -> &[usize] {
        &self.dims
    }

    fn dtype(&self) -> Option<DType> {
        self.whole.dtype()
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        let mut whole = self.whole.acquire()?;
        let ready = whole.ready.take();
        Ok(WeightGuard::acquired(Box::new(AcquiredPart { whole, dims: self.dims, rank: self.rank }), ready))
    }

    fn is_gathered(&self) -> bool {
        self.whole.is_gathered()
    }
}

impl<D: Chained> AcquiredWeight<D> for AcquiredPart<'_, D> {
    fn tensor(&self) -> Result<TensorRef<'_, D>> {
        let whole = self.whole.tensor()?;
        let own = D::slice(whole.data(), part(self.dims, whole.dtype(), self.rank));
        TensorRef::new(own, whole.dtype(), &self.dims)
    }
}

/// Where a rank's weights are, and what becomes of their gradients.
enum Weights<D: Chained> {
    Whole { all: Vec<[Tensor<D>; 2]>, sums: Vec<Vec<f32>> },
    Sharded { chain: Box<Chain<D>>, ids: Vec<[WeightId; 2]> },
}

type Source<'a, D> = Box<dyn WeightSource<D> + 'a>;

impl<D: Chained> Weights<D> {
    fn whole(device: &D, run: &Run, rank: usize) -> Self {
        let weight = |l, which| device.host(&through(run.payload, &run.weight(rank, l, which)));
        Weights::Whole { all: (0..LAYERS).map(|l| [weight(l, 0), weight(l, 1)]).collect(), sums: Vec::new() }
    }

    /// `run` is of one rank that has all experts.
    fn sharded(device: &D, run: &Run, comms: Comms<D>) -> Result<Self> {
        let chain = Chain::new(device.clone(), comms, EtpOptions { pad: 0, ..ON })?;
        let add = |l: usize, which: usize| -> Result<WeightId> {
            let all = run.weight(0, l, which);
            let own = chain.shards(all.dims())?.cut(device, device.host(&all).view(), chain.rank())?;
            let name = format!("layers.{l}.{}", ["up", "down"][which]);
            let mut spec = WeightSpec::new(name, l as u32, all.dims(), run.dtype);
            spec.payload = run.payload;
            chain.add(spec, Arc::new(Shard::new(own)) as Arc<dyn ShardSource<D>>)
        };
        let ids = (0..LAYERS).map(|l| Ok([add(l, 0)?, add(l, 1)?])).collect::<Result<_>>()?;
        Ok(Weights::Sharded { chain: Box::new(chain), ids })
    }

    fn begin(&self, phase: Phase) -> Result<()> {
        if let Weights::Sharded { chain, .. } = self { chain.begin(phase) } else { Ok(()) }
    }

    fn end(&self) -> Result<()> {
        if let Weights::Sharded { chain, .. } = self { chain.end() } else { Ok(()) }
    }

    /// Up and down of a layer, as the rank's experts have them.
    fn sources(&self, run: &Run, l: usize, rank: usize) -> Result<[Source<'_, D>; 2]> {
        Ok(match self {
            Weights::Whole { all, .. } => [Box::new(all[l][0].view()), Box::new(all[l][1].view())],
            Weights::Sharded { chain, ids } => {
                let [up, down] = run.dims();
                let own = |which: usize, dims| -> Result<Source<'_, D>> {
                    Ok(Box::new(Part { whole: chain.source(ids[l][which])?, dims, rank }))
                };
                [own(0, up)?, own(1, down)?]
            }
        })
    }

    /// Takes the gradients of up and down of a layer.
    fn take(&mut self, device: &D, (l, rank): (usize, usize), of: [Tensor<D>; 2]) -> Result<()> {
        match self {
            Weights::Whole { sums, .. } => {
                sums.resize(2 * LAYERS, Vec::new());
                for (which, t) in of.iter().enumerate() {
                    let new = device.values(t.view()).into_iter().map(|v| v as f32);
                    let sum = &mut sums[2 * l + which];
                    sum.resize(t.view().count(), 0.0);
                    sum.iter_mut().zip(new).for_each(|(sum, v)| *sum += v);
                }
            }
            Weights::Sharded { chain, ids } => {
                // In the order of backward.
                for which in [1, 0] {
                    let own = of[which].view();
                    let mut buffer = chain.gradient_buffer(ids[l][which])?;
                    let mut all: TensorMut<'_, D> = buffer.view_mut()?;
                    device.zero(all.reborrow().into_data())?;
                    let dims = <[usize; 3]>::try_from(own.dims()).expect("a stack");
                    device.copy(own.data(), D::slice_mut(all.into_data(), part(dims, own.dtype(), rank)))?;
                    chain.submit(buffer)?;
                }
            }
        }
        Ok(())
    }

    /// What this rank has of each weight's gradient.
    fn gradients(self, device: &D) -> Result<Vec<Vec<f32>>> {
        match self {
            Weights::Whole { sums, .. } => Ok(sums),
            Weights::Sharded { chain, .. } => {
                let mut found = Vec::new();
                chain.finish(None, |_, gradient| {
                    found.push(device.floats(gradient));
                    Ok(())
                })?;
                Ok(found)
            }
        }
    }
}

/// One rank.
struct Rank<D: Chained> {
    run: Run,
    device: D,
    group: Group<D>,
    layers: Vec<Layer>,
    routers: Vec<Tensor<D>>,
    weights: Weights<D>,
    tokens: usize,
}

impl<D: Chained> Rank<D> {
    /// Forward and backward of all layers; outputs and gradients of x.
    fn microbatch(&mut self, batch: usize) -> Result<Vec<Vec<u8>>> {
        let Self { run, device, group, layers, routers, weights, tokens } = self;
        let (rank, dims) = (group.rank(), [*tokens, run.config.hidden]);
        let mut xs = vec![device.host(&run.tensor([2, 0, batch, rank], &dims, 1.0))];
        let mut contexts: Vec<Context<D>> = Vec::new();
        weights.begin(Phase::Forward)?;
        for l in 0..LAYERS {
            let [up, down] = weights.sources(run, l, rank)?;
            let params = Params { router: routers[l].view(), up: &*up, down: &*down, others: PerParam::none() };
            let mode = Mode { backward: true, noise: None };
            let forward = layers[l].forward(group, mode, xs[l].view(), &params)?;
            contexts.push(forward.context.expect("a context"));
            xs.push(forward.y);
        }
        weights.end()?;
        weights.begin(Phase::Backward)?;
        let mut d = device.host(&run.tensor([3, 0, batch, rank], &dims, 1.0));
        for l in (0..LAYERS).rev() {
            let context = contexts.pop().expect("one a layer");
            let mut gradients = {
                let [up, down] = weights.sources(run, l, rank)?;
                let params = Params { router: routers[l].view(), up: &*up, down: &*down, others: PerParam::none() };
                let inputs = Inputs { x: xs[l].view(), params: &params };
                let cotangents = Cotangents { y: Some(d.view()), aux: 0.0 };
                layers[l].backward(group, context, inputs, cotangents, GradientMask::ALL)?
            };
            let of = [ParamKind::Up, ParamKind::Down].map(|kind| gradients.take(kind).expect("a gradient"));
            weights.take(device, (l, rank), of)?;
            d = gradients.x.expect("a gradient");
        }
        weights.end()?;
        Ok(xs[1..].iter().chain([&d]).map(|t| device.bytes(t.view())).collect())
    }

    fn step(mut self) -> Result<Step> {
        let mut values = Vec::new();
        for batch in 0..MICROBATCHES {
            values.extend(self.microbatch(batch)?);
        }
        let gradients = self.weights.gradients(&self.device)?;
        Ok(Step { values, gradients })
    }
}

/// A step with weights that each rank has of its own experts alone.
pub fn whole_step<D: Chained>(device: &D, shape: &Shape, over: (DispatcherKind, bool)) -> Vec<Step> {
    step(device, shape, over, false)
}

/// The same with each weight's stack of all experts shared by all ranks.
pub fn sharded_step<D: Chained>(device: &D, shape: &Shape, over: (DispatcherKind, bool)) -> Vec<Step> {
    step(device, shape, over, true)
}

fn step<D: Chained>(device: &D, shape: &Shape, over: (DispatcherKind, bool), sharded: bool) -> Vec<Step> {
    let ranks = device.up_to(4);
    let (run, of_all) = (shape.run(device, ranks, over), shape.run(device, 1, over));
    let comms = |purpose| mesh(device, (ranks, purpose), |w| (0, w), MINUTE);
    let all = comms("").into_iter().zip(comms("gather").into_iter().zip(comms("reduce"))).enumerate();
    let mut steps: Vec<Step> = thread::scope(|scope| {
        let start = |(rank, (experts, (gather, reduce)))| {
            let (run, of_all, device) = (run.clone(), &of_all, device.of_rank(rank));
            scope.spawn(move || -> Result<Step> {
                // Of weights that are gathered no product waits for rows, whatever the group allows.
                let config = GroupConfig { overlap: Overlap::Sms(4), ..run.group(shape.tokens) };
                let group = Group::new(device.clone(), experts, config)?;
                assert_eq!(group.dispatcher_kind(), run.dispatcher);
                let weights = match sharded {
                    true => Weights::sharded(&device, of_all, Comms { gather, reduce })?,
                    false => Weights::whole(&device, &run, rank),
                };
                let layer = |l| Layer::new(run.config.clone(), l as u32);
                let layers = (0..LAYERS).map(layer).collect::<Result<_>>()?;
                let dims = [run.config.router.num_experts, run.config.hidden];
                let routers = (0..LAYERS).map(|l| device.host(&run.tensor([0, l, 0, 0], &dims, EVEN))).collect();
                let tokens = shape.tokens - rank;
                Rank { run, device, group, layers, routers, weights, tokens }.step()
            })
        };
        let threads: Vec<_> = all.map(start).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked").expect("a rank failed")).collect()
    });
    join(&mut steps);
    steps
}

/// Gives each rank the whole gradients, of which each has had a part: its experts, or its shard of all.
fn join(steps: &mut [Step]) {
    let weights = steps[0].gradients.len();
    let whole = |i: usize| steps.iter().flat_map(|step| step.gradients[i].clone()).collect();
    let all: Vec<Vec<f32>> = (0..weights).map(whole).collect();
    steps.iter_mut().for_each(|step| step.gradients.clone_from(&all));
}
