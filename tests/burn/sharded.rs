//! Experts sharded over ranks beside whole ones, on a mesh of EP by ETP: outputs, gradients and whole training steps.

use std::sync::Arc;
use std::thread;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, list_param_ids};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use moebius::MoeConfig;
use moebius::burn::{
    CoreDevice, DeviceGroup, ExpertParallelMoE, MoeBackend, ReduceOptions, ShardedParams, reduce_gradients_over,
};
use moebius::comm::{Communicator, Solo};
use moebius::config::Payload;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Phase, Shards};

use super::support::*;
use crate::trials::tests;

const STEPS: usize = 3;

type Comm<S> = Box<dyn Communicator<CoreDevice<S>>>;

/// A rank of a world, whose experts are those of EP rank `rank % ep`.
pub struct Place<S: Meshed> {
    rank: usize,
    group: DeviceGroup,
    shards: ShardedParams<S>,
    /// The ranks with the same experts.
    data: Comm<S>,
    world: Comm<S>,
}

/// How ranks are spread: `ep` of them divide the experts, and those with the same experts share their shards.
#[derive(Debug, Clone, Copy)]
pub struct Mesh {
    pub world: usize,
    pub ep: usize,
}

/// A rank's device, and how it reaches the others.
pub struct Links<S: Meshed> {
    /// That of the layers and of the chain.
    pub device: CoreDevice<S>,
    pub experts: Comm<S>,
    pub gather: Comm<S>,
    pub reduce: Comm<S>,
    pub data: Comm<S>,
    pub world: Comm<S>,
}

/// A back end whose ranks form meshes.
pub trait Meshed: Subject + MoeBackend<Native = Self> {
    /// Each rank's, and the number of its device.
    fn links(mesh: Mesh) -> Vec<(u16, Links<Self>)>;

    /// A communicator's device.
    fn device_of(comm: &Comm<Self>) -> CoreDevice<Self>;

    /// A group on a device.
    fn group(device: CoreDevice<Self>, experts: Comm<Self>) -> DeviceGroup;
}

impl Mesh {
    /// A rank's part, and its place in it, of those that share experts, and of those that divide them.
    fn data(self, rank: usize) -> (usize, usize) {
        (rank % self.ep, rank / self.ep)
    }

    fn experts(self, rank: usize) -> (usize, usize) {
        (rank / self.ep, rank % self.ep)
    }

    /// A value a rank from those that `create` makes for each part's members.
    pub fn parts<C>(
        self,
        place: impl Fn(usize) -> (usize, usize),
        create: impl Fn(&[usize]) -> Vec<C>,
    ) -> std::vec::IntoIter<C> {
        let mut places: Vec<_> = (0..self.world).map(|rank| (place(rank), rank)).collect();
        places.sort_unstable();
        let mut all = Vec::new();
        for part in places.chunk_by(|a, b| a.0.0 == b.0.0) {
            let members: Vec<usize> = part.iter().map(|(_, rank)| *rank).collect();
            all.extend(create(&members).into_iter().zip(members).map(|(comm, rank)| (rank, comm)));
        }
        all.sort_unstable_by_key(|(rank, _)| *rank);
        all.into_iter().map(|(_, comm)| comm).collect::<Vec<_>>().into_iter()
    }

    /// All ranks' links, of the communicators that `create` makes for some purpose and some ranks.
    pub fn links<S: Meshed>(
        self,
        create: impl Fn(&'static str, &[usize]) -> Vec<Comm<S>>,
    ) -> impl Iterator<Item = Links<S>> {
        let of = |name, place: fn(Self, usize) -> (usize, usize)| {
            self.parts(|rank| place(self, rank), |members| create(name, members))
        };
        let (experts, world) = (of("experts", Self::experts), of("world", |_, rank| (0, rank)));
        let [gather, reduce, data] = ["gather", "reduce", "data"].map(|name| of(name, Self::data));
        let all: Vec<_> = experts.zip(world).zip(gather.zip(reduce)).zip(data).collect();
        all.into_iter().map(|(((experts, world), (gather, reduce)), data)| {
            let device = S::device_of(&experts);
            Links { device, experts, gather, reduce, data, world }
        })
    }
}

impl Meshed for Flex {
    fn links(mesh: Mesh) -> Vec<(u16, Links<Self>)> {
        let create = |_: &'static str, members: &[usize]| -> Vec<Comm<Self>> {
            ThreadWorld::create(members.len(), LONG).into_iter().map(|comm| Box::new(comm) as Box<_>).collect()
        };
        mesh.links(create).map(|links| (0, links)).collect()
    }

    fn device_of(_: &Comm<Self>) -> Cpu {
        Cpu::poisoning()
    }

    fn group(device: Cpu, experts: Comm<Self>) -> DeviceGroup {
        Group::new(device, experts, GroupConfig::new(E, 64)).unwrap().into()
    }
}

fn on_mesh<S: Meshed, T: Send>(mesh: Mesh, prefetch: bool, run: impl Fn(Place<S>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let seat = |(rank, (number, links)): (usize, (u16, Links<S>))| {
            let run = &run;
            scope.spawn(move || {
                work_on(number);
                let Links { device, experts, gather, reduce, data, world } = links;
                let group = S::group(device.clone(), experts);
                let options = EtpOptions { prefetch, ..EtpOptions::default() };
                let chain = Arc::new(Chain::new(device, Comms { gather, reduce }, options).unwrap());
                run(Place { rank, group, shards: ShardedParams::new(chain), data, world })
            })
        };
        let threads: Vec<_> = S::links(mesh).into_iter().enumerate().map(seat).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Two layers, one behind the other.
#[derive(Module, Debug)]
struct Model<B: MoeBackend> {
    layers: Vec<ExpertParallelMoE<B>>,
}

impl<B: MoeBackend> Model<B> {
    fn new(config: &MoeConfig, group: &DeviceGroup) -> Self {
        let layer = |number| {
            let block = block(config, group.rank(), group.ranks());
            ExpertParallelMoE::from_block(block, number, group, &here::<B>()).unwrap()
        };
        Self { layers: (0..2).map(layer).collect() }
    }

    fn sharded(self, shards: &ShardedParams<B::Native>, payload: Payload) -> Self {
        let sharded = |moe: ExpertParallelMoE<B>| moe.into_sharded(shards, payload).unwrap();
        Self { layers: self.layers.into_iter().map(sharded).collect() }
    }

    fn forward(&self, x: Tensor<B, 2>) -> moebius::Result<(Tensor<B, 2>, Tensor<B, 1>)> {
        let (mut x, mut aux) = (x, Tensor::zeros([1], &here::<B>()));
        for layer in &self.layers {
            let out = layer.forward_full(x.clone(), None)?;
            (x, aux) = (out.y + x, aux + out.aux);
        }
        Ok((x, aux))
    }
}

/// What a rank has found in a step.
#[derive(Debug, PartialEq)]
struct Step {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// Gradients as the optimizer takes them, and weights behind its step: of `up` and `down` of each layer, then of
    /// routers and biases.
    experts: Vec<[Vec<f32>; 2]>,
    others: Vec<[Vec<f32>; 2]>,
}

/// Steps of a rank with whole experts, or with sharded ones.
fn train<S: Meshed>(config: &MoeConfig, place: Place<S>, payload: Option<Payload>) -> Vec<Step> {
    let Place { rank, group, shards, mut data, mut world } = place;
    let mut model = Model::<Autodiff<S>>::new(config, &group);
    if let Some(payload) = payload {
        model = model.sharded(&shards, payload);
    }
    let mut optimizer = AdamWConfig::new().init();
    let step = |_| {
        let x =
            tensor::<Autodiff<S>, 2>(inputs_of(rank, config.hidden).0, [TOKENS[rank], config.hidden]).require_grad();
        let pass = |phase| payload.map(|_| shards.begin(phase, &model.layers).unwrap());
        let end = || payload.map(|_| shards.end().unwrap());
        pass(Phase::Forward);
        let (y, aux) = model.forward(x.clone()).unwrap();
        end();
        let loss = y.clone().powi_scalar(2).sum() + aux;
        pass(Phase::Backward);
        let mut all = loss.backward();
        end();
        let dx = floats(x.grad(&all).unwrap());
        let mut gradients = GradientsParams::from_module(&mut all, &model);
        // Expert weights are summed over the ranks that hold the same, the rest but for experts' biases over all.
        let experts: Vec<_> = model.layers.iter().flat_map(|moe| moe.expert_ids()).collect();
        let weights: Vec<_> = model.layers.iter().flat_map(|moe| [moe.experts.up.id, moe.experts.down.id]).collect();
        let ids = list_param_ids::<_, Autodiff<S>>(&model);
        let others: Vec<_> = ids.into_iter().filter(|id| !experts.contains(id)).collect();
        let mut sum = |comm: &mut Comm<S>, except: &[_]| {
            let device = S::device_of(comm);
            reduce_gradients_over(&mut **comm, &device, &model, ReduceOptions::except(except), &mut gradients).unwrap();
        };
        sum(&mut world, &experts);
        match payload {
            None => sum(&mut data, &others),
            Some(_) => {
                sum(&mut data, &[&others[..], &weights[..]].concat());
                shards.finish(None, &model.layers, &mut gradients).unwrap();
            }
        }
        let weight = |moe: &ExpertParallelMoE<Autodiff<S>>| [moe.experts.up.clone(), moe.experts.down.clone()];
        let params = |model: &Model<Autodiff<S>>| {
            model.layers.iter().flat_map(weight).map(|p| floats(p.val())).collect::<Vec<_>>()
        };
        let of = model.layers.iter().flat_map(weight).map(|p| floats(gradients.get::<S, 3>(p.id).unwrap()));
        let of: Vec<_> = of.collect();
        let small = |model: &Model<Autodiff<S>>| {
            let of = |moe: &ExpertParallelMoE<Autodiff<S>>| {
                [
                    moe.router.weight.clone(),
                    moe.experts.up_bias.clone().unwrap(),
                    moe.experts.down_bias.clone().unwrap(),
                ]
            };
            model.layers.iter().flat_map(of).collect::<Vec<_>>()
        };
        let d_small: Vec<_> = small(&model).iter().map(|p| floats(gradients.get::<S, 2>(p.id).unwrap())).collect();
        model = optimizer.step(1e-2, model.clone(), gradients);
        let others = small(&model).iter().map(|p| floats(p.val())).zip(d_small).map(|(w, d)| [d, w]).collect();
        Step { y: floats(y), dx, experts: of.into_iter().zip(params(&model)).map(|(d, w)| [d, w]).collect(), others }
    };
    (0..STEPS).map(step).collect()
}

/// A rank's shard of a whole weight; padding is zeros.
fn cut(whole: &[f32], dims: &[usize], ranks: usize, rank: usize) -> Vec<f32> {
    let whole = CoreTensor::from_vec(whole.to_vec(), dims).unwrap();
    let shards = Shards::new(dims, ranks, EtpOptions::default().pad).unwrap();
    shards.cut(&Cpu::new(), whole.view(), rank).unwrap().as_slice::<f32>().unwrap().to_vec()
}

/// Whole steps beside those of whole experts, to the bit: sums of the ranks' gradients are made in rank order in f32
/// either way, or have two terms.
pub fn as_whole_ones<S: Meshed>(mesh: Mesh, recompute: bool, prefetch: bool) {
    let Mesh { world, ep } = mesh;
    let mut config = config();
    config.recompute = recompute;
    let whole = on_mesh::<S, _>(mesh, prefetch, |place| train(&config, place, None));
    let sharded = on_mesh::<S, _>(mesh, prefetch, |place| train(&config, place, Some(Payload::Plain)));
    let (local, at) = (E / ep, format!("{world} ranks, EP {ep}, recompute {recompute}"));
    let dims = [vec![local, 2 * I, H], vec![local, H, I]];
    for (rank, (whole, sharded)) in whole.iter().zip(&sharded).enumerate() {
        for (step, (whole, sharded)) in whole.iter().zip(sharded).enumerate() {
            assert_eq!((&whole.y, &whole.dx), (&sharded.y, &sharded.dx), "rank {rank} of {at}, step {step}");
            assert_eq!(whole.others, sharded.others, "rank {rank} of {at}, step {step}");
            for (i, (whole, shard)) in whole.experts.iter().zip(&sharded.experts).enumerate() {
                let of = |t: &Vec<f32>| cut(t, &dims[i % 2], world / ep, rank / ep);
                assert_eq!(shard, &whole.each_ref().map(of), "gradient and weight {i} of rank {rank} of {at}");
                assert!(whole[0].iter().any(|v| *v != 0.0));
            }
        }
    }
}

fn training_with_sharded_experts_is_training_with_whole_ones() {
    let of = |world, ep| Mesh { world, ep };
    as_whole_ones::<Flex>(of(1, 1), false, true);
    as_whole_ones::<Flex>(of(2, 1), false, true);
    as_whole_ones::<Flex>(of(4, 1), true, true);
    as_whole_ones::<Flex>(of(4, 2), false, true);
    as_whole_ones::<Flex>(of(4, 2), true, false);
}

/// What the shards are rounded to is the experts', however many ranks share them.
fn shards_sent_quantized_give_what_a_rank_alone_does() {
    let mut config = config();
    (config.hidden, config.intermediate) = (32, 16);
    let y = |ranks: usize, payload: Payload| {
        on_mesh::<Flex, _>(Mesh { world: ranks, ep: 1 }, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<B>::new(&config, &group).sharded(&shards, payload);
            let x = tensor::<B, 2>(inputs_of(rank, config.hidden).0, [TOKENS[rank], config.hidden]);
            shards.begin(Phase::Forward, &model.layers).unwrap();
            let (y, _) = model.forward(x).unwrap();
            shards.end().unwrap();
            floats(y)
        })
    };
    let plain = y(1, Payload::Plain);
    for payload in [Payload::Nvfp4, Payload::Mxfp8] {
        let alone = y(1, payload);
        assert_ne!(alone[0], plain[0], "{payload:?} rounds");
        for ranks in [2, 4] {
            assert_eq!(y(ranks, payload)[0], alone[0], "{payload:?} over {ranks} ranks");
        }
    }
}

fn frozen_shards_have_no_gradient() {
    let config = config();
    on_mesh::<Flex, _>(Mesh { world: 2, ep: 1 }, true, |place| {
        let Place { rank, group, shards, .. } = place;
        let model = Model::<B>::new(&config, &group).no_grad().sharded(&shards, Payload::Plain);
        let x = tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H]).require_grad();
        shards.begin(Phase::Forward, &model.layers).unwrap();
        let (y, _) = model.forward(x.clone()).unwrap();
        shards.end().unwrap();
        shards.begin(Phase::Backward, &model.layers).unwrap();
        let mut all = y.sum().backward();
        shards.end().unwrap();
        assert!(x.grad(&all).is_some());
        let mut gradients = GradientsParams::from_module(&mut all, &model);
        shards.finish(None, &model.layers, &mut gradients).unwrap();
        assert!(gradients.is_empty());
        assert_eq!(shards.chain().traffic().reductions, 0);
    });
}

fn alone() -> ShardedParams<Flex> {
    let comm = || Box::new(Solo::new(Cpu::new())) as Box<dyn Communicator<Cpu>>;
    let chain = Chain::new(Cpu::new(), Comms { gather: comm(), reduce: comm() }, EtpOptions::default()).unwrap();
    ShardedParams::new(Arc::new(chain))
}

fn wrong_use_is_refused() {
    let (shards, other) = (alone(), alone());
    let moe = module::<B>(&config(), single()).into_sharded(&shards, Payload::Plain).unwrap();
    let x = || tensor::<B, 2>(inputs(0).0, [TOKENS[0], H]);
    let text = |error: Option<moebius::Error>| error.map(|e| e.to_string()).unwrap_or_default();
    let error = text(moe.forward(x()).err());
    assert!(error.contains("expected a pass, found none"), "{error}");
    let error = text(other.begin(Phase::Forward, [&moe]).err());
    assert!(error.contains("one of another"), "{error}");
    let none: [&ExpertParallelMoE<B>; 0] = [];
    let error = text(shards.begin(Phase::Forward, none).err());
    assert!(error.contains("all 2") && error.contains("0"), "{error}");
    let error = text(moe.to_block().err());
    assert!(error.contains("whole weights"), "{error}");
    let error = text(moe.clone().into_sharded(&other, Payload::Plain).err());
    assert!(error.contains("whole weights"), "{error}");
    let mut wrong = moe.clone();
    wrong.experts.up = moe.experts.down.clone();
    let error = text(shards.begin(Phase::Forward, [&wrong]).err());
    assert!(error.contains("shard"), "{error}");
    // And goes on: without autodiff too, of the same parameters.
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let y = floats(moe.forward(x()).unwrap());
    shards.end().unwrap();
    let valid = burn::module::AutodiffModule::valid(&moe);
    shards.begin(Phase::Forward, [&valid]).unwrap();
    assert_eq!(floats(valid.forward(x().inner()).unwrap()), y);
    shards.end().unwrap();
    let whole = module::<Flex>(&config(), single()).forward(x().inner()).unwrap();
    assert_eq!(floats(whole), y);
}

tests! {
    fn();
    training_with_sharded_experts_is_training_with_whole_ones,
    shards_sent_quantized_give_what_a_rank_alone_does,
    frozen_shards_have_no_gradient,
    wrong_use_is_refused,
}
