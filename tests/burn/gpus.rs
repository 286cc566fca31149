//! The suite's cases over several GPUs: a rank each, on threads, over NCCL. Each is there for every number of ranks, and
//! ignored where there are not as many GPUs.

use std::thread;

use moebius::burn::DeviceGroup;
use moebius::comm::{Communicator, Solo};
use moebius::cuda::Cuda;
use moebius::ep::{Group, GroupConfig};

use super::gpu::{Gpu, gpu};
use super::sharded::{Links, Mesh, Meshed};
use super::support::*;
use super::{dense, dispatch, gradients, nccl_gpus, reduce, sharded};
use crate::trials::Trials;

/// Runs `rank` on a thread and a GPU for each rank.
pub fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, DeviceGroup) -> T + Sync) -> Vec<T> {
    let comms = nccl_gpus::communicators(ranks, LONG);
    thread::scope(|s| {
        let run = &rank;
        let start = |(number, comm): (usize, moebius::nccl::NcclComm)| {
            s.spawn(move || {
                work_on(u16::try_from(number).unwrap());
                let cuda = comm.cuda().clone();
                let group = Group::new(cuda, Box::new(comm), GroupConfig::new(E, 64)).unwrap();
                run(number, group.into())
            })
        };
        let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl Meshed for Gpu {
    fn links(mesh: Mesh) -> Vec<(u16, Links<Self>)> {
        let create = |name: &'static str, members: &[usize]| -> Vec<Box<dyn Communicator<Cuda>>> {
            match *members {
                [alone] => {
                    let own = nccl_gpus::first(alone + 1).1[alone].with_new_stream().unwrap();
                    vec![Box::new(Solo::new(own))]
                }
                _ => nccl_gpus::among(members, name, LONG).into_iter().map(|comm| Box::new(comm) as Box<_>).collect(),
            }
        };
        (0..).zip(mesh.links(create)).collect()
    }

    fn device_of(comm: &Box<dyn Communicator<Cuda>>) -> Cuda {
        comm.device().expect("a communicator that was made with a GPU").clone()
    }

    fn group(device: Cuda, experts: Box<dyn Communicator<Cuda>>) -> DeviceGroup {
        Group::new(device, experts, GroupConfig::new(E, 64)).unwrap().into()
    }
}

/// A test over so many ranks.
type Case = (&'static str, fn(usize));

const CASES: [Case; 8] = [
    ("matches_a_dense_model", |ranks| dense::matches_a_dense_model::<Gpu>(&[ranks])),
    ("each_output_alone_gives_its_part", |ranks| dense::each_output_alone::<Gpu>(ranks)),
    ("gradients_are_those_of_finite_differences", |ranks| gradients::finite_differences::<Gpu>(ranks)),
    ("dispatch_and_combine_with_identity_experts", |ranks| dispatch::identity_experts::<Gpu>(&[ranks])),
    ("dispatch_and_combine_make_the_module", |ranks| dispatch::as_the_module::<Gpu>(&[ranks])),
    ("several_dispatches_in_flight", |ranks| dispatch::several_in_flight::<Gpu>(&[ranks])),
    ("sharded_experts_train_as_whole_ones", |world| {
        sharded::as_whole_ones::<Gpu>(Mesh { world, ep: world / 2 }, false, true);
    }),
    ("gradients_are_summed_over_the_ranks", |ranks| reduce::of_a_layer::<Gpu>(ranks)),
];

/// Adds them all.
pub fn add(trials: &mut Trials) {
    let found = nccl_gpus::available().unwrap_or(0);
    for ranks in [2, 4] {
        for (name, run) in CASES {
            trials.add_gpus(format!("nccl::r{ranks}::{name}"), (ranks, found), move || {
                let _alone = gpu();
                run(ranks);
            });
        }
    }
}
