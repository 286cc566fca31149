//! Chains of sharded experts as replicas of each other: sums over them, behind backward and beside it.

use std::sync::{Arc, Barrier};
use std::thread;

use burn::backend::{Autodiff, Flex};
use burn::optim::GradientsParams;
use moebius::burn::ShardedParams;
use moebius::comm::{Communicator, Solo};
use moebius::config::Payload;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::etp::{Chain, Comms, EtpOptions};
use moebius::{CommError, Error};

use super::sharded::{Comm, Mesh, Meshed, Model, of_experts, passes};
use super::support::*;
use crate::trials::tests;

/// A rank of a chain, and the replicas' communicator where the chain has none of its own.
struct Replica {
    rank: usize,
    shards: ShardedParams<Flex>,
    caller: Option<ThreadComm>,
}

impl Replica {
    fn model(&self) -> Model<Autodiff<Flex>> {
        let group = Flex::group(Cpu::poisoning(), Box::new(Solo::new(Cpu::poisoning())));
        Model::new(&config(), &group).sharded(&self.shards, Payload::Plain)
    }

    /// The passes of a step of two microbatches; sums begin in the last backward where the chain has a communicator.
    fn passes(&self, model: &Model<Autodiff<Flex>>) -> GradientsParams {
        drop(passes(model, &self.shards, self.rank));
        if self.caller.is_none() {
            self.shards.last_backward().unwrap();
        }
        passes(model, &self.shards, self.rank)
    }

    /// `finish` of these of the model's layers.
    fn finish(
        &mut self,
        layers: &[moebius::burn::ExpertParallelMoE<Autodiff<Flex>>],
        gradients: &mut GradientsParams,
    ) -> moebius::Result<()> {
        let replicas = self.caller.as_mut().map(|comm| comm as &mut dyn Communicator<Cpu>);
        self.shards.finish(replicas, layers, gradients)
    }
}

/// Ranks whose layers are whole on each, in chains of N as replicas of each other; `own`: chains have the replicas'
/// communicators.
fn on_replicas<T: Send>([replicas, n]: [usize; 2], own: bool, run: impl Fn(Replica) -> T + Sync) -> Vec<T> {
    let mesh = Mesh { world: replicas * n, ep: n };
    // Those that divide the experts of a mesh divide the shards here.
    let comms = |place: fn(Mesh, usize) -> (usize, usize)| {
        mesh.parts(|rank| place(mesh, rank), |members| ThreadWorld::create(members.len(), LONG))
    };
    let ranks = comms(Mesh::experts).zip(comms(Mesh::experts)).zip(comms(Mesh::data));
    thread::scope(|scope| {
        let start = |(rank, ((gather, reduce), replica)): (usize, ((ThreadComm, ThreadComm), ThreadComm))| {
            let run = &run;
            scope.spawn(move || {
                let comms = Comms { gather: Box::new(gather) as Comm<Flex>, reduce: Box::new(reduce) };
                let options = EtpOptions { replicas, ..EtpOptions::default() };
                let chain = Chain::new(Cpu::poisoning(), comms, options).unwrap();
                let (chain, caller) = match own {
                    true => (chain.with_replicas(Box::new(replica)).unwrap(), None),
                    false => (chain, Some(replica)),
                };
                run(Replica { rank, shards: ShardedParams::new(Arc::new(chain)), caller })
            })
        };
        let threads: Vec<_> = ranks.enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const PARTS: [[usize; 2]; 5] = [[2, 1], [4, 1], [1, 2], [1, 4], [2, 2]];

/// The last rank is not given all modules: the other ranks of its chain hear of it, and the replicas of all of these,
/// before anyone calls again.
fn ranks_hear_of_a_finish_that_one_refuses() {
    for (parts, own) in PARTS.into_iter().flat_map(|parts| [(parts, false), (parts, true)]) {
        let world = parts[0] * parts[1];
        let all_failed = Barrier::new(world);
        let run = |wrong: bool| {
            on_replicas(parts, own, |mut replica| {
                let rank = replica.rank;
                let model = replica.model();
                let mut gradients = replica.passes(&model);
                if wrong {
                    let last = rank + 1 == world;
                    let modules = if last { &model.layers[..1] } else { &model.layers };
                    let outcome = replica.finish(modules, &mut gradients);
                    all_failed.wait();
                    let error = outcome.unwrap_err();
                    let as_meant = match &error {
                        Error::Comm(CommError::Refused { reason, .. }) => !last && reason.contains("all 4"),
                        error => last && error.to_string().contains("all 4"),
                    };
                    assert!(as_meant, "rank {rank} of {parts:?}, own: {own}: {error:?}");
                }
                replica.finish(&model.layers, &mut gradients).unwrap();
                of_experts(&model, &gradients)
            })
        };
        let expected = run(false);
        let [_, n] = parts;
        for (rank, sums) in expected.iter().enumerate() {
            assert_eq!(*sums, expected[rank % n], "the replicas' sums, {parts:?}");
        }
        assert_eq!(run(true), expected, "{parts:?}, own: {own}");
    }
}

/// Sums that begin beside the last backward are those of `finish`, to the bit.
fn sums_beside_backward_have_the_same_bits() {
    for parts in PARTS {
        let run = |own: bool| {
            on_replicas(parts, own, |mut replica| {
                let model = replica.model();
                let mut steps = Vec::new();
                for _ in 0..2 {
                    let mut gradients = replica.passes(&model);
                    replica.finish(&model.layers, &mut gradients).unwrap();
                    steps.push(of_experts(&model, &gradients));
                }
                let traffic = replica.shards.chain().traffic();
                let (sums, beside) = if own && parts[0] > 1 { (8, true) } else { (0, false) };
                assert_eq!((traffic.sums, traffic.sums_beside > 0), (sums, beside), "{traffic:?}");
                steps
            })
        };
        assert_eq!(run(true), run(false), "{parts:?}");
    }
}

tests! {
    fn();
    ranks_hear_of_a_finish_that_one_refuses,
    sums_beside_backward_have_the_same_bits,
}
