//! Experts sharded over ranks beside whole ones, on a mesh of EP by ETP: outputs, gradients and whole training steps.

use std::sync::{Arc, Barrier};
use std::thread;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use moebius::burn::{
    CoreDevice, DeviceGroup, ExpertParallelMoE, LoadAs, MoeBackend, ReduceOptions, ShardedLoad, ShardedParams,
    reduce_gradients_over,
};
use moebius::checkpoint::{Block, Checkpoint, LoadOptions};
use moebius::comm::{Communicator, Solo};
use moebius::config::Payload;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Phase, Shards};
use moebius::layer::ParamKind;
use moebius::{CommError, Error, MoeConfig};

use super::support::*;
use crate::goldens::golden_of;
use crate::trials::tests;

const STEPS: usize = 3;

pub type Comm<S> = Box<dyn Communicator<CoreDevice<S>>>;

/// A rank of a world, whose experts are those of EP rank `rank % ep`.
pub struct Place<S: Meshed> {
    pub rank: usize,
    pub group: DeviceGroup,
    pub shards: ShardedParams<S>,
    /// The ranks with the same experts.
    pub data: Comm<S>,
    pub world: Comm<S>,
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
    fn group_of(device: CoreDevice<Self>, experts: Comm<Self>, config: GroupConfig) -> DeviceGroup;

    /// The same for the suite's layers.
    fn group(device: CoreDevice<Self>, experts: Comm<Self>) -> DeviceGroup {
        Self::group_of(device, experts, GroupConfig::new(E, 64))
    }
}

impl Mesh {
    /// A rank's part, and its place in it, of those that share experts, and of those that divide them.
    pub fn data(self, rank: usize) -> (usize, usize) {
        (rank % self.ep, rank / self.ep)
    }

    pub fn experts(self, rank: usize) -> (usize, usize) {
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

    fn group_of(device: Cpu, experts: Comm<Self>, config: GroupConfig) -> DeviceGroup {
        Group::new(device, experts, config).unwrap().into()
    }
}

pub fn on_mesh<S: Meshed, T: Send>(mesh: Mesh, prefetch: bool, run: impl Fn(Place<S>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let endpoint = |(rank, (number, links)): (usize, (u16, Links<S>))| {
            let (run, all) = (&run, all_have_tokens());
            scope.spawn(move || {
                set_all_have_tokens(all);
                work_on(number);
                let Links { device, experts, gather, reduce, data, world } = links;
                let group = S::group(device.clone(), experts);
                let options = EtpOptions { prefetch, ..EtpOptions::default() };
                let chain = Arc::new(Chain::new(device, Comms { gather, reduce }, options).unwrap());
                run(Place { rank, group, shards: ShardedParams::new(chain), data, world })
            })
        };
        let threads: Vec<_> = S::links(mesh).into_iter().enumerate().map(endpoint).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Two layers, one behind the other.
#[derive(Module, Debug)]
pub struct Model<B: MoeBackend> {
    pub layers: Vec<ExpertParallelMoE<B>>,
}

impl<B: MoeBackend> Model<B> {
    pub fn new(config: &MoeConfig, group: &DeviceGroup) -> Self {
        let layer = |number| {
            let block = block(config, group.rank(), group.ranks());
            ExpertParallelMoE::from_block(block, number, group, &here::<B>()).unwrap()
        };
        Self { layers: (0..2).map(layer).collect() }
    }

    pub fn sharded(self, shards: &ShardedParams<B::Native>, payload: Payload) -> Self {
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

/// The results of a rank's step.
#[derive(Debug, PartialEq)]
struct Step {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// Gradients as the optimizer takes them, and weights behind its step: of `up` and `down` of each layer, then of
    /// routers and biases.
    experts: Vec<[Vec<f32>; 2]>,
    others: Vec<[Vec<f32>; 2]>,
    /// Gradients of the same as this rank's backward made them, before any sum; none of experts that are sharded.
    own_experts: Vec<Vec<f32>>,
    own_others: Vec<Vec<f32>>,
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
        let x = tensor::<Autodiff<S>, 2>(inputs_of(rank, config.hidden).0, [token_counts()[rank], config.hidden])
            .require_grad();
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
        let weight = |moe: &ExpertParallelMoE<Autodiff<S>>| [moe.experts.up.clone(), moe.experts.down.clone()];
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
        let own_of = |param: &Param<Tensor<Autodiff<S>, 2>>, gradients: &GradientsParams| {
            gradients.get::<S, 2>(param.id).map_or_else(|| vec![0.0; param.shape().num_elements()], floats)
        };
        let own_others: Vec<_> = small(&model).iter().map(|param| own_of(param, &gradients)).collect();
        let own_experts = match payload {
            Some(_) => Vec::new(),
            None => {
                model.layers.iter().flat_map(weight).map(|p| floats(gradients.get::<S, 3>(p.id).unwrap())).collect()
            }
        };
        // Expert weights and biases are summed over the ranks that hold the same, the rest over all.
        let experts: Vec<_> = model.layers.iter().flat_map(|moe| moe.expert_ids()).collect();
        let biases: Vec<_> = model.layers.iter().flat_map(|moe| moe.expert_bias_ids()).collect();
        let mut sum = |comm: &mut Comm<S>, options: ReduceOptions<'_>| {
            let device = S::device_of(comm);
            reduce_gradients_over(&mut **comm, &device, &model, options, &mut gradients).unwrap();
        };
        sum(&mut world, ReduceOptions::except(&experts));
        match payload {
            None => sum(&mut data, ReduceOptions::only(&experts)),
            Some(_) => {
                sum(&mut data, ReduceOptions::only(&biases));
                shards.finish(None, &model.layers, &mut gradients).unwrap();
            }
        }
        let params = |model: &Model<Autodiff<S>>| {
            model.layers.iter().flat_map(weight).map(|p| floats(p.val())).collect::<Vec<_>>()
        };
        let of = model.layers.iter().flat_map(weight).map(|p| floats(gradients.get::<S, 3>(p.id).unwrap()));
        let of: Vec<_> = of.collect();
        let d_small: Vec<_> = small(&model).iter().map(|p| floats(gradients.get::<S, 2>(p.id).unwrap())).collect();
        model = optimizer.step(1e-2, model.clone(), gradients);
        let others = small(&model).iter().map(|p| floats(p.val())).zip(d_small).map(|(w, d)| [d, w]).collect();
        let experts = of.into_iter().zip(params(&model)).map(|(d, w)| [d, w]).collect();
        Step { y: floats(y), dx, experts, others, own_experts, own_others }
    };
    (0..STEPS).map(step).collect()
}

/// A gradient is the sum of what these ranks' backwards made: of so many terms in some order, each addition rounds by
/// 2⁻²⁴ of the magnitudes' sum at most.
fn is_sum(name: &str, found: &[f32], terms: &[&[f32]]) {
    for (i, found) in found.iter().enumerate() {
        let term = || terms.iter().map(|term| f64::from(term[i]));
        let (sum, size) = (term().sum::<f64>(), term().map(f64::abs).sum::<f64>());
        let bound = terms.len() as f64 * size / f64::from(1u32 << 24);
        assert!((f64::from(*found) - sum).abs() <= bound, "{name}, element {i}: {found} for {sum}");
    }
}

/// Every gradient that a step's optimizer gets beside the ranks' own: of routers over all ranks, of experts and their
/// biases over those that hold the same.
fn are_sums(name: &str, ep: usize, steps: &[&Step]) {
    for (rank, step) in steps.iter().enumerate() {
        let same: Vec<&Step> = steps.iter().skip(rank % ep).step_by(ep).copied().collect();
        for (i, [found, _]) in step.others.iter().enumerate() {
            // A router and two biases a layer.
            let over = if i % 3 == 0 { steps } else { &same };
            let terms: Vec<&[f32]> = over.iter().map(|step| &step.own_others[i][..]).collect();
            is_sum(&format!("{name}, parameter {i} of rank {rank}"), found, &terms);
        }
        for (i, _) in step.own_experts.iter().enumerate() {
            let terms: Vec<&[f32]> = same.iter().map(|step| &step.own_experts[i][..]).collect();
            is_sum(&format!("{name}, weight {i} of rank {rank}"), &step.experts[i][0], &terms);
        }
    }
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
    for (name, runs) in [("whole", &whole), ("sharded", &sharded)] {
        for step in 0..STEPS {
            let steps: Vec<&Step> = runs.iter().map(|rank| &rank[step]).collect();
            are_sums(&format!("{name}, {at}, step {step}"), ep, &steps);
        }
    }
    assert!(whole[0][0].own_experts.len() == 4 && sharded[0][0].own_experts.is_empty());
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

/// The experts are the shards' rounded values, however many ranks share them.
pub fn sent_quantized<S: Meshed>(numbers: &[usize]) {
    let mut config = config();
    (config.hidden, config.intermediate) = (32, 16);
    let y = |ranks: usize, payload: Payload| {
        on_mesh::<S, _>(Mesh { world: ranks, ep: 1 }, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<Autodiff<S>>::new(&config, &group).sharded(&shards, payload);
            let x = tensor::<Autodiff<S>, 2>(inputs_of(rank, config.hidden).0, [token_counts()[rank], config.hidden]);
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
        for &ranks in numbers {
            assert_eq!(y(ranks, payload)[0], alone[0], "{payload:?} over {ranks} ranks");
        }
    }
}

fn shards_sent_quantized_give_what_a_rank_alone_does() {
    sent_quantized::<Flex>(&[2, 4]);
}

pub fn frozen<S: Meshed>(mesh: Mesh) {
    let config = config();
    on_mesh::<S, _>(mesh, true, |place| {
        let Place { rank, group, shards, .. } = place;
        let model = Model::<Autodiff<S>>::new(&config, &group).no_grad().sharded(&shards, Payload::Plain);
        let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]).require_grad();
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

fn frozen_shards_have_no_gradient() {
    frozen::<Flex>(Mesh { world: 2, ep: 1 });
}

/// Forward and backward of a model, whose gradients the chain then has; those of burn.
pub fn passes<S: Meshed>(model: &Model<Autodiff<S>>, shards: &ShardedParams<S>, rank: usize) -> GradientsParams {
    let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]);
    shards.begin(Phase::Forward, &model.layers).unwrap();
    let (y, aux) = model.forward(x).unwrap();
    shards.end().unwrap();
    shards.begin(Phase::Backward, &model.layers).unwrap();
    let mut all = (y.powi_scalar(2).sum() + aux).backward();
    shards.end().unwrap();
    GradientsParams::from_module(&mut all, model)
}

/// Gradients of the layers' expert weights.
pub fn of_experts<S: Meshed>(model: &Model<Autodiff<S>>, gradients: &GradientsParams) -> Vec<Vec<f32>> {
    let ids = model.layers.iter().flat_map(|moe| [moe.experts.up.id, moe.experts.down.id]);
    ids.map(|id| floats(gradients.get::<S, 3>(id).unwrap())).collect()
}

/// Whatever is wrong with the modules of a `finish`, the sums are there for the next.
pub fn sums_are_kept<S: Meshed>(mesh: Mesh) {
    let config = config();
    let run = |wrong: bool| {
        on_mesh::<S, _>(mesh, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<Autodiff<S>>::new(&config, &group).sharded(&shards, Payload::Plain);
            let mut gradients = passes(&model, &shards, rank);
            if wrong {
                let [first, second] = &model.layers[..] else { panic!("two layers") };
                let (mut other, mut typed) = (second.clone(), second.clone());
                other.experts.up = first.experts.down.clone();
                typed.experts.up = typed.experts.up.map(|up| up.cast(DType::F16).detach().require_grad());
                let whole = Model::<Autodiff<S>>::new(&config, &group).layers.remove(0);
                let cases: [(Vec<&ExpertParallelMoE<Autodiff<S>>>, &str); 6] = [
                    (vec![first], "all 4"),
                    (vec![], "all 4"),
                    (vec![first, &whole], "all 4"),
                    (vec![first, second, first], "each once"),
                    (vec![first, &other], "shard"),
                    (vec![first, &typed], "f16"),
                ];
                for (modules, word) in cases {
                    let error = shards.finish(None, modules, &mut gradients).err();
                    let error = error.map(|e| e.to_string().to_lowercase());
                    assert!(error.as_ref().is_some_and(|e| e.contains(word)), "{word}: {error:?}");
                    assert!(gradients.get::<S, 3>(first.experts.up.id).is_none(), "all sums or none");
                }
            }
            shards.finish(None, &model.layers, &mut gradients).unwrap();
            // The next step's are not added to these.
            let next = |gradients: &mut GradientsParams| {
                shards.finish(None, &model.layers, gradients).unwrap();
                of_experts(&model, gradients)
            };
            (of_experts(&model, &gradients), next(&mut passes(&model, &shards, rank)))
        })
    };
    let expected = run(false);
    assert_eq!(run(true), expected);
    assert!(expected.iter().all(|(one, next)| one == next && one.iter().flatten().any(|v| *v != 0.0)));
}

fn sums_are_kept_until_all_modules_are_given() {
    sums_are_kept::<Flex>(Mesh { world: 1, ep: 1 });
    sums_are_kept::<Flex>(Mesh { world: 2, ep: 1 });
    sums_are_kept::<Flex>(Mesh { world: 4, ep: 2 });
}

/// The last rank's modules are refused: it has its own error, every other rank one that is no timeout, and all go on.
pub fn begin_is_told<S: Meshed>(mesh: Mesh) {
    let config = config();
    // Where all are in the collective in which the last is missing, none waits for another's recovery.
    let together = mesh.ep == 1 || mesh.ep == mesh.world;
    let all_failed = Barrier::new(if together { mesh.world } else { 1 });
    let y = |wrong: bool| {
        on_mesh::<S, _>(mesh, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<S>::new(&config, &group).sharded(&shards, Payload::Plain);
            let forward = |modules: &[ExpertParallelMoE<S>]| {
                shards.begin(Phase::Forward, modules)?;
                let (y, _) = model.forward(tensor::<S, 2>(inputs(rank).0, [token_counts()[rank], H]))?;
                shards.end()?;
                Ok(floats(y))
            };
            // In the first pass, whose order nobody knows, and in the second.
            for pass in 0..2 {
                if wrong {
                    let last = rank + 1 == mesh.world;
                    let outcome = forward(if last { &model.layers[..1] } else { &model.layers });
                    all_failed.wait();
                    let error = outcome.unwrap_err();
                    let as_meant = match &error {
                        Error::Invalid { .. } => last && error.to_string().contains("all 4"),
                        Error::Peer { reason, .. } | Error::Comm(CommError::Refused { reason, .. }) => {
                            !last && reason.contains("all 4")
                        }
                        _ => false,
                    };
                    assert!(as_meant, "rank {rank} of {mesh:?}, pass {pass}: {error:?}");
                    shards.chain().recover(Some(&error)).unwrap();
                }
                forward(&model.layers).unwrap();
            }
            forward(&model.layers).unwrap()
        })
    };
    assert_eq!(y(true), y(false));
}

fn a_rank_that_cannot_begin_tells_the_others() {
    for (world, ep) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
        begin_is_told::<Flex>(Mesh { world, ep });
    }
}

/// A checkpoint's experts as shards, a step, and back under the published names, over any number of ranks that share them.
fn sharded_experts_of_a_checkpoint_are_saved_whole() {
    let dir = &golden_of("qwen3_moe");
    let checkpoint = Checkpoint::open(dir).unwrap();
    let layers = checkpoint.moe_layers().to_vec();
    let hidden = checkpoint.block_config(layers[0]).unwrap().hidden;
    let block = |ranks: usize, train: bool| {
        let mesh = Mesh { world: ranks, ep: 1 };
        let mut found = on_mesh::<Flex, _>(mesh, true, |place| {
            let Place { group, shards, .. } = place;
            // Shards alone, or of whole weights.
            let load = |&layer: &usize| match ranks {
                1 => {
                    let load = LoadAs::default();
                    let moe = ExpertParallelMoE::<B>::from_checkpoint(&checkpoint, layer, &group, load, &device());
                    moe.unwrap().into_sharded(&shards, Payload::Plain).unwrap()
                }
                _ => {
                    let from = ShardedLoad { checkpoint: &checkpoint, layer, dtype: None, payload: Payload::Plain };
                    shards.load::<B>(from, &group, &device()).unwrap()
                }
            };
            let mut model = Model { layers: layers.iter().map(load).collect() };
            if train {
                // The same tokens on every rank, so that their number decides nothing but a power of two.
                let x = tensor::<B, 2>(values(7, 3 * hidden, 1.0), [3, hidden]);
                shards.begin(Phase::Forward, &model.layers).unwrap();
                let (y, _) = model.forward(x).unwrap();
                shards.end().unwrap();
                shards.begin(Phase::Backward, &model.layers).unwrap();
                let mut all = y.powi_scalar(2).mean().mul_scalar(1.0 / ranks as f64).backward();
                shards.end().unwrap();
                let mut gradients = GradientsParams::from_module(&mut all, &model);
                for moe in &model.layers {
                    gradients.remove::<Flex, 2>(moe.router.weight.id);
                }
                shards.finish(None, &model.layers, &mut gradients).unwrap();
                model = SgdConfig::new().init().step(0.5, model, gradients);
            }
            let blocks = shards.to_blocks(&model.layers).unwrap();
            assert!(model.layers[0].to_block().is_err_and(|e| e.to_string().contains("whole weights")));
            blocks
        });
        let first = found.remove(0);
        for other in &found {
            for (a, b) in first.iter().zip(other) {
                assert_eq!(bytes(a), bytes(b), "the same on all ranks");
            }
        }
        first
    };
    let saved = |blocks: &[Block]| {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<_> = layers.iter().zip(blocks).map(|(layer, block)| block.params.at_layer(*layer)).collect();
        checkpoint.save(folder.path(), &all).unwrap();
        let again = Checkpoint::open(folder.path()).unwrap();
        let options = || LoadOptions { rank: 0, ranks: 1, dtype: None };
        layers.iter().map(|layer| bytes(&again.load_block(*layer, options()).unwrap())).collect::<Vec<_>>()
    };
    let options = || LoadOptions { rank: 0, ranks: 1, dtype: None };
    let stored: Vec<_> = layers.iter().map(|layer| bytes(&checkpoint.load_block(*layer, options()).unwrap())).collect();
    let trained = saved(&block(1, true));
    assert_ne!(trained, stored, "a step changes them");
    for ranks in [1, 2, 4] {
        assert_eq!(saved(&block(ranks, false)), stored, "{ranks} ranks");
        assert_eq!(saved(&block(ranks, true)), trained, "{ranks} ranks");
    }
}

/// A block's parameters by name, as bytes.
fn bytes(block: &Block) -> Vec<(&'static str, Vec<u8>)> {
    let views = block.params.views().unwrap();
    ParamKind::ALL.into_iter().filter_map(|kind| Some((kind.name(), views.get(kind)?.data().to_vec()))).collect()
}

fn alone() -> ShardedParams<Flex> {
    let comm = || Box::new(Solo::new(Cpu::new())) as Box<dyn Communicator<Cpu>>;
    let chain = Chain::new(Cpu::new(), Comms { gather: comm(), reduce: comm() }, EtpOptions::default()).unwrap();
    ShardedParams::new(Arc::new(chain))
}

fn wrong_use_is_refused() {
    let (shards, other) = (alone(), alone());
    let moe = module::<B>(&config(), single()).into_sharded(&shards, Payload::Plain).unwrap();
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
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
    let error = text(shards.begin(Phase::Forward, [&moe, &moe]).err());
    assert!(error.contains("each once"), "{error}");
    let mut typed = moe.clone();
    typed.experts.down = typed.experts.down.map(|down| down.cast(DType::F64).detach().require_grad());
    let error = text(shards.begin(Phase::Forward, [&typed]).err()).to_lowercase();
    assert!(error.contains("shard") && error.contains("f64"), "{error}");
    // The other chain's weights have the same numbers.
    let of_other = module::<B>(&config(), single()).into_sharded(&other, Payload::Plain).unwrap();
    let error = text(shards.begin(Phase::Forward, [&of_other]).err());
    assert!(error.contains("one of another"), "{error}");
    let error = text(shards.to_blocks([&of_other]).err());
    assert!(error.contains("one of another"), "{error}");
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

/// `experts.down` of an odd inner size cannot be sent in NVFP4, while all else of the layer can: none of it is in the
/// chain afterwards, which trains other layers as one that was never asked.
fn a_layer_that_is_refused_leaves_nothing_in_its_chain() {
    let config = config();
    let run = |asked: bool| {
        on_mesh::<Flex, _>(Mesh { world: 2, ep: 1 }, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let mut odd = config.clone();
            odd.intermediate = 5;
            let all = |shards: &ShardedParams<Flex>, payload, config: &MoeConfig| {
                let layers = Model::<B>::new(config, &group).layers.into_iter();
                let layers = layers.map(|moe| moe.into_all_sharded(shards, payload, shards));
                layers.collect::<moebius::Result<Vec<_>>>().map(|layers| Model { layers })
            };
            if asked {
                let error = all(&shards, Payload::Nvfp4, &odd).unwrap_err();
                let Error::Shard { call, rank: at, weight, expected, found } = &error else { panic!("{error:?}") };
                assert_eq!((*call, *at, &weight[..]), ("Chain::add", rank, "layer 0 experts.down"), "{error}");
                assert!(expected.contains("even number") && found.contains('5'), "{error}");
            }
            let model = all(&shards, Payload::Plain, &config).unwrap();
            let mut gradients = passes(&model, &shards, rank);
            shards.finish(None, &model.layers, &mut gradients).unwrap();
            (of_experts(&model, &gradients), shards.chain().order())
        })
    };
    assert_eq!(run(true), run(false));
}

/// A pass has the parameters of all its modules, or those of before.
fn a_begin_that_fails_changes_no_parameter() {
    let shards = alone();
    let moe = module::<B>(&config(), single()).into_sharded(&shards, Payload::Plain).unwrap();
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
    let forward = || {
        let y = floats(moe.forward(x()).unwrap());
        shards.end().unwrap();
        y
    };
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let y = forward();
    let mut half = moe.clone();
    half.experts.up = half.experts.up.map(|up| up.mul_scalar(2.0).detach().require_grad());
    let doubled = half.clone();
    half.experts.down = moe.experts.up.clone();
    assert!(shards.begin(Phase::Forward, [&half]).is_err());
    // The chain's own call gathers what it has.
    shards.chain().begin(Phase::Forward).unwrap();
    assert_eq!(forward(), y);
    // A pass that runs goes on with what it has begun with.
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let error = shards.begin(Phase::Forward, [&doubled]).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("not ended")), "{error:?}");
    assert_eq!(forward(), y);
    shards.begin(Phase::Forward, [&doubled]).unwrap();
    assert_ne!(forward(), y);
}

tests! {
    fn();
    training_with_sharded_experts_is_training_with_whole_ones,
    shards_sent_quantized_give_what_a_rank_alone_does,
    frozen_shards_have_no_gradient,
    sums_are_kept_until_all_modules_are_given,
    a_rank_that_cannot_begin_tells_the_others,
    sharded_experts_of_a_checkpoint_are_saved_whole,
    a_begin_that_fails_changes_no_parameter,
    a_layer_that_is_refused_leaves_nothing_in_its_chain,
    wrong_use_is_refused,
}
