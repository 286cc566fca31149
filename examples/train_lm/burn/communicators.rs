//! The communicators of a rank in burn: of ranks on one thread each, or of a process.

use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::etp::{Comms, ShardDevice};

use crate::Failure;
use crate::mesh::{Mesh, split};
use crate::ranks::TIMEOUT;

/// A communicator of a rank.
type Comm<D> = Box<dyn Communicator<D>>;

/// A rank's device, and its communicators.
pub struct RankComms<D: ShardDevice> {
    pub device: D,
    /// Those that have other experts each.
    pub experts: Comm<D>,
    /// All ranks, for what they tell each other.
    pub world: Comm<D>,
    /// All ranks, for the optimizer; none where there is one.
    pub optimizer: Option<Comm<D>>,
    /// All ranks, for sums of gradients, beside the layers' own work.
    pub sums: Comm<D>,
    /// Where experts are sharded: the ranks that share its shards, and those with the same shard.
    pub sharded: Option<(Comms<D>, Comm<D>)>,
}

/// The stream of a communicator's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommStream {
    /// The device's, in order with the layers' work.
    OfDevice,
    /// One of its own, beside that.
    Own,
    /// One of its own, where copy engines do the work.
    OwnByEngines,
}

/// The group and the place in it of a rank.
type GroupOf = fn(&Mesh, usize) -> (usize, usize);

/// The communicators of every rank, in the order in which all ranks make them.
fn communicators(mesh: Mesh) -> Vec<(GroupOf, CommStream)> {
    let all: GroupOf = |_, rank| (0, rank);
    let mut wanted = vec![
        (Mesh::expert as GroupOf, CommStream::OfDevice),
        (all, CommStream::OfDevice),
        (all, CommStream::OfDevice),
        (all, CommStream::Own),
    ];
    if mesh.etp.is_some() {
        let shards = if mesh.engines { CommStream::OwnByEngines } else { CommStream::Own };
        wanted.extend([(Mesh::shard as GroupOf, shards), (Mesh::shard, shards), (Mesh::replica, CommStream::Own)]);
    }
    wanted
}

impl<D: ShardDevice> RankComms<D> {
    /// Of the communicators that [`communicators`] lists.
    fn of(mesh: Mesh, device: D, made: Vec<Comm<D>>) -> Result<Self, Failure> {
        let mut made = made.into_iter();
        let mut next = || made.next().ok_or_else(|| Failure::from("a communicator too few"));
        let (experts, world, optimizer, sums) = (next()?, next()?, next()?, next()?);
        let sharded = match mesh.etp {
            Some(_) => Some((Comms { gather: next()?, reduce: next()? }, next()?)),
            None => None,
        };
        Ok(Self { device, experts, world, optimizer: (mesh.ranks > 1).then_some(optimizer), sums, sharded })
    }

    /// Of ranks that are threads: `create` makes a communicator for each of these members.
    fn on_threads(
        mesh: Mesh,
        devices: Vec<D>,
        create: impl Fn(&[usize], CommStream) -> Result<Vec<Comm<D>>, Failure>,
    ) -> Result<Vec<Self>, Failure> {
        let mut of_ranks: Vec<Vec<Comm<D>>> = devices.iter().map(|_| Vec::new()).collect();
        for (place, stream) in communicators(mesh) {
            let made = split(mesh.ranks, |rank| place(&mesh, rank), |members| create(members, stream))?;
            of_ranks.iter_mut().zip(made).for_each(|(rank, comm)| rank.push(comm));
        }
        devices.into_iter().zip(of_ranks).map(|(device, made)| Self::of(mesh, device, made)).collect()
    }
}

/// Threads on the CPU.
///
/// # Errors
/// Copy engines, which are GPUs'.
pub fn on_cpu(mesh: Mesh) -> Result<Vec<RankComms<Cpu>>, Failure> {
    if mesh.engines {
        return Err("copy engines are GPUs', over NCCL".into());
    }
    RankComms::on_threads(mesh, vec![Cpu::new(); mesh.ranks], |members, _| {
        Ok(ThreadWorld::create(members.len(), TIMEOUT).into_iter().map(|comm| Box::new(comm) as Box<_>).collect())
    })
}

#[cfg(feature = "burn-cuda")]
pub use gpus::{Gpu, on_gpus};
#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
pub use processes::Process;

#[cfg(feature = "burn-cuda")]
mod gpus {
    use burn::backend::cuda::CudaDevice;
    use moebius::comm::Solo;
    use moebius::cuda::Cuda;

    use super::{Comm, CommStream, Mesh, RankComms};
    use crate::Failure;

    pub type Gpu = burn::backend::Cuda<f32, i32>;

    /// Each rank's GPU and communicators. They are made before any tensor of burn's, which panics where there is no GPU.
    pub fn on_gpus(mesh: Mesh) -> Result<Vec<(CudaDevice, RankComms<Cuda>)>, Failure> {
        let devices = || (0..mesh.ranks).map(CudaDevice::new);
        let gpus = devices().map(|device| moebius::burn::cuda(&device)).collect::<moebius::Result<Vec<_>>>()?;
        let create = |members: &[usize], stream: CommStream| -> Result<Vec<Comm<Cuda>>, Failure> {
            let own = |rank: &usize| match stream {
                CommStream::OfDevice => Ok(gpus[*rank].clone()),
                _ => gpus[*rank].with_new_stream(),
            };
            let own = members.iter().map(own).collect::<moebius::Result<Vec<_>>>()?;
            match &own[..] {
                [alone] => Ok(vec![Box::new(Solo::new(alone.clone()))]),
                several => among(several, stream),
            }
        };
        Ok(devices().zip(RankComms::on_threads(mesh, gpus.clone(), create)?).collect())
    }

    #[cfg(feature = "nccl")]
    fn among(gpus: &[Cuda], stream: CommStream) -> Result<Vec<Comm<Cuda>>, Failure> {
        use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};
        let (library, timeout) = (NcclLibrary::open()?, crate::ranks::TIMEOUT);
        let comms = match stream {
            CommStream::OwnByEngines => {
                NcclWorld::with_copy_engines(&library, gpus, timeout)?.communicators(timeout)?
            }
            _ => NcclComm::threads(&library, gpus, timeout)?,
        };
        Ok(comms.into_iter().map(|comm| Box::new(comm) as Box<_>).collect())
    }

    #[cfg(not(feature = "nccl"))]
    fn among(_: &[Cuda], _: CommStream) -> Result<Vec<Comm<Cuda>>, Failure> {
        Err("several GPUs want a build with --features nccl".into())
    }
}

#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
mod processes {
    use burn::backend::cuda::CudaDevice;
    use moebius::comm::{Communicator, Op, Solo, Tag};
    use moebius::cuda::Cuda;
    use moebius::nccl::{NcclComm, NcclLibrary};
    use moebius::ranks::{Bootstrap, Identity};

    use super::{Comm, CommStream, Mesh, RankComms, communicators};
    use crate::Failure;

    /// This process, as one rank of several, on the GPU of its number on its host.
    pub struct Process {
        identity: Identity,
        comm: NcclComm,
    }

    impl Process {
        /// Joins the ranks that the launcher's environment tells of.
        pub fn join() -> Result<Self, Failure> {
            let identity = Identity::from_env()?;
            let cuda = moebius::burn::cuda(&CudaDevice::new(identity.local_rank))?;
            let job = Bootstrap::from_env(crate::ranks::TIMEOUT)?;
            let comm = NcclComm::join(&NcclLibrary::open()?, &job, &cuda)?;
            Ok(Self { identity, comm })
        }

        pub fn rank(&self) -> usize {
            self.identity.rank
        }

        pub fn world(&self) -> usize {
            self.identity.world
        }

        /// Bytes that every rank tells, in rank order.
        pub fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
            let cuda = self.comm.cuda().clone();
            crate::rank_results::gather_over(&cuda, &mut self.comm, tag, own)
        }

        /// The rank's GPU and communicators, which all ranks ask for: parts of the communicator of all.
        pub fn comms(self, mesh: Mesh) -> Result<(CudaDevice, RankComms<Cuda>), Failure> {
            let Self { identity, mut comm } = self;
            let cuda = comm.cuda().clone();
            let part =
                |(sequence, (place, stream)): (u64, (super::GroupOf, CommStream))| -> Result<Comm<Cuda>, Failure> {
                    let tag = Tag { layer: 0, op: Op::User, sequence };
                    let (color, key) = place(&mesh, identity.rank);
                    let own = match stream {
                        CommStream::OfDevice => comm.split_on(tag, Some(color), key, &cuda)?,
                        CommStream::Own => comm.split_on(tag, Some(color), key, &cuda.with_new_stream()?)?,
                        CommStream::OwnByEngines => {
                            comm.split_with_copy_engines(tag, Some(color), key, &cuda.with_new_stream()?)?
                        }
                    };
                    let own = own.ok_or_else(|| Failure::from("a split without a part for this rank"))?;
                    Ok(match own.size() {
                        1 => Box::new(Solo::new(own.cuda().clone())),
                        _ => Box::new(own),
                    })
                };
            let made = (1..).zip(communicators(mesh)).map(part).collect::<Result<Vec<_>, Failure>>()?;
            Ok((CudaDevice::new(identity.local_rank), RankComms::of(mesh, cuda, made)?))
        }
    }
}
