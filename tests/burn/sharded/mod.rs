//! Experts sharded over ranks beside whole ones, on a mesh of EP by ETP: outputs, gradients and whole training steps.

pub mod refused;
pub mod training;

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

/// The tests by name.
pub fn cases() -> Vec<(&'static str, fn())> {
    [training::cases(), refused::cases()].concat()
}
