//! How the ranks are spread, and the communicators of each.

use std::time::Duration;

use candle_core::Device;
use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::etp;

use crate::Failure;
use crate::device::{Endpoint, endpoints};
use crate::sharded::{Experts, Sharded};
use crate::world::World;

/// Rank w has the experts of EP rank `w % ep`. Of the ranks with the same experts, `etp` in a row share the shards of
/// each weight; those at the same place among these are replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    pub ranks: usize,
    /// Ranks that have other experts each.
    pub ep: usize,
    /// Ranks that share each expert weight; `None`: weights are whole, without a chain.
    pub etp: Option<usize>,
    /// Copy engines carry shards and gradients.
    pub engines: bool,
}

impl Mesh {
    /// Groups of `ep` ranks, each with all experts and tokens of its own.
    pub fn groups(&self) -> usize {
        self.ranks / self.ep
    }

    /// Ranks that share a weight.
    pub fn shards(&self) -> usize {
        self.etp.unwrap_or(1)
    }

    /// Ranks with the same shard.
    pub fn replicas(&self) -> usize {
        self.groups() / self.shards()
    }

    /// Number of a rank's EP group, and its place in it.
    pub fn expert(&self, w: usize) -> (usize, usize) {
        (w / self.ep, w % self.ep)
    }

    /// The same of the ranks that share its shards.
    pub fn shard(&self, w: usize) -> (usize, usize) {
        let n = self.shards();
        (w / self.ep / n * self.ep + w % self.ep, w / self.ep % n)
    }

    /// The same of the ranks with the same shard.
    pub fn replica(&self, w: usize) -> (usize, usize) {
        let each = self.ep * self.shards();
        (w % each, w / each)
    }

    /// The rank with shard `n` of the experts of EP rank `p`, in replica `r`.
    pub fn rank(&self, p: usize, n: usize, r: usize) -> usize {
        (r * self.shards() + n) * self.ep + p
    }
}

/// How a rank reaches the others.
pub struct Place {
    /// Those of its EP group.
    pub experts: Endpoint,
    /// Where experts are sharded.
    pub sharded: Option<Comms>,
    /// All ranks, for the optimizer.
    pub optimizer: AllRanks,
}

/// A communicator of all ranks.
pub enum AllRanks {
    /// There is one.
    Alone,
    Cpu(ThreadComm),
    #[cfg(feature = "nccl")]
    Gpus(moebius::nccl::NcclComm),
}

/// Communicators of a rank with sharded experts.
pub enum Comms {
    Cpu(Of<Cpu, ThreadComm>),
    #[cfg(feature = "nccl")]
    Gpus(Of<moebius::cuda::Cuda, moebius::nccl::NcclComm>),
}

/// The same on one device; `W` is that of all ranks.
pub struct Of<D: etp::ShardDevice, W> {
    pub device: D,
    pub world: W,
    /// The ranks that share its shards: one for gathers, one for reductions.
    pub shards: etp::Comms<D>,
    /// The ranks with the same shard.
    pub replicas: Box<dyn Communicator<D>>,
}

impl Comms {
    /// The rank's access to all ranks, and its experts without weights.
    pub fn join(self, mesh: Mesh) -> Result<(World, Box<dyn Experts>), Failure> {
        Ok(match self {
            Comms::Cpu(Of { device, world, shards, replicas }) => {
                (World::Threads(world), Box::new(Sharded::new(mesh, &device, shards, replicas)?))
            }
            #[cfg(feature = "nccl")]
            Comms::Gpus(Of { device, world, shards, replicas }) => {
                (World::Gpus(world), Box::new(Sharded::new(mesh, &device, shards, replicas)?))
            }
        })
    }
}

/// Each rank's place; `devices` has as many as there are ranks.
pub fn places(mesh: Mesh, devices: &[Device], timeout: Duration) -> Result<Vec<Place>, Failure> {
    if mesh.etp.is_none() {
        let places = endpoints(devices, timeout)?.into_iter().zip(all_ranks(devices, timeout)?);
        return Ok(places.map(|(experts, optimizer)| Place { experts, sharded: None, optimizer }).collect());
    }
    match devices {
        [Device::Cpu, ..] if mesh.engines => Err("copy engines are GPUs', over NCCL".into()),
        [Device::Cpu, ..] => Ok(on_threads(mesh, timeout)),
        #[cfg(feature = "nccl")]
        gpus => gpus::places(mesh, gpus, timeout),
        #[cfg(not(feature = "nccl"))]
        _ => Err("--etp on GPUs wants a build with --features nccl".into()),
    }
}

/// A communicator of all ranks, for each.
fn all_ranks(devices: &[Device], timeout: Duration) -> Result<Vec<AllRanks>, Failure> {
    match devices {
        [_] => Ok(vec![AllRanks::Alone]),
        [Device::Cpu, ..] => Ok(ThreadWorld::create(devices.len(), timeout).into_iter().map(AllRanks::Cpu).collect()),
        #[cfg(feature = "nccl")]
        several => gpus::all_ranks(several, timeout),
        #[cfg(not(feature = "nccl"))]
        several => Err(format!("{} GPUs want a build with --features nccl", several.len()).into()),
    }
}

/// The place of one rank of several processes; `endpoint` reaches all of them.
pub fn of_process(mesh: Mesh, rank: usize, endpoint: Endpoint) -> Result<Place, Failure> {
    match (mesh.etp, endpoint) {
        #[cfg(feature = "nccl")]
        (None, Endpoint::Gpus(device, world)) if mesh.ranks > 1 => gpus::whole_of_process(rank, (device, world)),
        (None, experts) => Ok(Place { experts, sharded: None, optimizer: AllRanks::Alone }),
        #[cfg(feature = "nccl")]
        (Some(_), Endpoint::Gpus(device, world)) => gpus::of_process(mesh, rank, (device, world)),
        _ => Err(format!("rank {rank}: --processes with --etp wants ranks on GPUs, over NCCL").into()),
    }
}

fn on_threads(mesh: Mesh, timeout: Duration) -> Vec<Place> {
    let create = |members: &[usize]| Ok(ThreadWorld::create(members.len(), timeout));
    let split = |place: &dyn Fn(usize) -> (usize, usize)| split(mesh.ranks, place, create).unwrap_or_default();
    let lane = || split(&|w| mesh.shard(w)).into_iter().map(|comm| Box::new(comm) as Box<dyn Communicator<Cpu>>);
    let replicas = split(&|w| mesh.replica(w)).into_iter().map(|comm| Box::new(comm) as Box<dyn Communicator<Cpu>>);
    let lanes = lane().zip(lane()).map(|(gather, reduce)| etp::Comms { gather, reduce });
    let experts = split(&|w| mesh.expert(w)).into_iter().map(Endpoint::Cpu);
    let world = ThreadWorld::create(mesh.ranks, timeout).into_iter();
    let optimizers = ThreadWorld::create(mesh.ranks, timeout).into_iter().map(AllRanks::Cpu);
    let places = experts.zip(world).zip(lanes).zip(replicas).zip(optimizers);
    let place = |((((experts, world), shards), replicas), optimizer)| {
        let comms = Of { device: Cpu::new(), world, shards, replicas };
        Place { experts, sharded: Some(Comms::Cpu(comms)), optimizer }
    };
    places.map(place).collect()
}

/// Has `create` make, for each group that `place` names, a value a rank from its members' places in it.
pub fn split<C>(
    ranks: usize,
    place: impl Fn(usize) -> (usize, usize),
    create: impl Fn(&[usize]) -> Result<Vec<C>, Failure>,
) -> Result<Vec<C>, Failure> {
    let mut places: Vec<((usize, usize), usize)> = (0..ranks).map(|w| (place(w), w)).collect();
    places.sort_unstable();
    let mut all: Vec<(usize, C)> = Vec::with_capacity(ranks);
    for group in places.chunk_by(|a, b| a.0.0 == b.0.0) {
        let members: Vec<usize> = group.iter().map(|(_, w)| *w).collect();
        all.extend(members.iter().copied().zip(create(&members)?));
    }
    all.sort_unstable_by_key(|(w, _)| *w);
    Ok(all.into_iter().map(|(_, comm)| comm).collect())
}

#[cfg(feature = "nccl")]
mod gpus {
    use std::time::Duration;

    use candle_core::Device;
    use moebius::comm::{Communicator, Op, Solo, Tag};
    use moebius::cuda::Cuda;
    use moebius::etp;
    use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};

    use super::{AllRanks, Comms, Mesh, Of, Place, split};
    use crate::Failure;
    use crate::device::Endpoint;

    pub fn all_ranks(devices: &[Device], timeout: Duration) -> Result<Vec<AllRanks>, Failure> {
        if devices.len() == 1 {
            return Ok(vec![AllRanks::Alone]);
        }
        let gpus = devices.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
        let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, timeout)?;
        Ok(comms.into_iter().map(AllRanks::Gpus).collect())
    }

    /// The place of one rank of several processes with whole weights, which all ranks call.
    pub fn whole_of_process(rank: usize, (gpu, mut world): (Device, NcclComm)) -> Result<Place, Failure> {
        let (tag, cuda) = (Tag { layer: 0, op: Op::User, sequence: 0 }, world.cuda().clone());
        let all = world.split_on(tag, Some(0), rank, &cuda)?;
        let all = all.ok_or_else(|| Failure::from("a split without a part for this rank"))?;
        Ok(Place { experts: Endpoint::Gpus(gpu, world), sharded: None, optimizer: AllRanks::Gpus(all) })
    }

    pub fn places(mesh: Mesh, devices: &[Device], timeout: Duration) -> Result<Vec<Place>, Failure> {
        let library = NcclLibrary::open()?;
        let gpus = devices.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
        let among = |gpus: &[Cuda], members: &[usize]| -> Result<Vec<NcclComm>, Failure> {
            let own: Vec<Cuda> = members.iter().map(|w| gpus[*w].clone()).collect();
            Ok(NcclComm::threads(&library, &own, timeout)?)
        };
        let boxed = |gpus: &[Cuda], members: &[usize]| -> Result<Vec<Box<dyn Communicator<Cuda>>>, Failure> {
            if let [alone] = members {
                return Ok(vec![Box::new(Solo::new(gpus[*alone].clone()))]);
            }
            Ok(among(gpus, members)?.into_iter().map(|comm| Box::new(comm) as Box<_>).collect())
        };
        let by_engines = |gpus: &[Cuda], members: &[usize]| -> Result<Vec<Box<dyn Communicator<Cuda>>>, Failure> {
            let own: Vec<Cuda> = members.iter().map(|w| gpus[*w].clone()).collect();
            let comms = NcclWorld::with_copy_engines(&library, &own, timeout)?.communicators(timeout)?;
            Ok(comms.into_iter().map(|comm| Box::new(comm) as Box<_>).collect())
        };
        let streams = || gpus.iter().map(Cuda::with_new_stream).collect::<moebius::Result<Vec<_>>>();
        let lane = || -> Result<_, Failure> {
            let beside = streams()?;
            split(
                mesh.ranks,
                |w| mesh.shard(w),
                |members| match mesh.engines {
                    true => by_engines(&beside, members),
                    false => boxed(&beside, members),
                },
            )
        };
        let lanes = lane()?.into_iter().zip(lane()?).map(|(gather, reduce)| etp::Comms { gather, reduce });
        let beside = streams()?;
        let replicas = split(mesh.ranks, |w| mesh.replica(w), |members| boxed(&beside, members))?;
        let endpoint = |members: &[usize]| -> Result<Vec<Endpoint>, Failure> {
            if let [alone] = members {
                return Ok(vec![Endpoint::Gpu(devices[*alone].clone())]);
            }
            let comms = among(&gpus, members)?.into_iter().zip(members);
            Ok(comms.map(|(comm, w)| Endpoint::Gpus(devices[*w].clone(), comm)).collect())
        };
        let experts = split(mesh.ranks, |w| mesh.expert(w), endpoint)?;
        let world = among(&gpus, &(0..mesh.ranks).collect::<Vec<_>>())?;
        let places = experts.into_iter().zip(world).zip(lanes).zip(replicas).zip(gpus.clone());
        let places = places.zip(all_ranks(devices, timeout)?);
        let place = |(((((experts, world), shards), replicas), device), optimizer)| Place {
            experts,
            sharded: Some(Comms::Gpus(Of { device, world, shards, replicas })),
            optimizer,
        };
        Ok(places.map(place).collect())
    }

    /// The same of one rank, which all ranks call: parts of the communicator of all.
    pub fn of_process(mesh: Mesh, rank: usize, (gpu, mut world): (Device, NcclComm)) -> Result<Place, Failure> {
        let device = world.cuda().clone();
        let mut part = |(number, engines): (u64, bool), (color, key): (usize, usize), cuda: &Cuda| {
            let (tag, place) = (Tag { layer: 0, op: Op::User, sequence: number }, (Some(color), key));
            let own = match engines {
                true => world.split_with_copy_engines(tag, place.0, place.1, cuda)?,
                false => world.split_on(tag, place.0, place.1, cuda)?,
            };
            own.ok_or_else(|| Failure::from("a split without a part for this rank"))
        };
        let boxed = |comm: NcclComm| -> Box<dyn Communicator<Cuda>> {
            match comm.size() {
                1 => Box::new(Solo::new(comm.cuda().clone())),
                _ => Box::new(comm),
            }
        };
        let experts = part((1, false), mesh.expert(rank), &device)?;
        let replicas = boxed(part((2, false), mesh.replica(rank), &device.with_new_stream()?)?);
        let optimizer = match mesh.ranks {
            1 => AllRanks::Alone,
            _ => AllRanks::Gpus(part((5, false), (0, rank), &device)?),
        };
        let gather = boxed(part((3, mesh.engines), mesh.shard(rank), &device.with_new_stream()?)?);
        let reduce = boxed(part((4, mesh.engines), mesh.shard(rank), &device.with_new_stream()?)?);
        let experts = match experts.size() {
            1 => Endpoint::Gpu(gpu),
            _ => Endpoint::Gpus(gpu, experts),
        };
        let shards = etp::Comms { gather, reduce };
        Ok(Place { experts, sharded: Some(Comms::Gpus(Of { device, world, shards, replicas })), optimizer })
    }
}
