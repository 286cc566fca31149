//! Where a bench's ranks run, and how they reach each other.

use std::time::Duration;

use candle_core::Device;
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};

use crate::{Result, ranks};

/// Within which a rank waits for the others: loading takes minutes.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A rank's place.
pub struct Place {
    pub rank: usize,
    pub ranks: usize,
    pub device: Device,
    pub endpoint: Endpoint,
}

/// How a rank reaches the others.
pub enum Endpoint {
    /// There are none.
    Alone,
    Threads(moebius::cpu::ThreadComm),
    #[cfg(feature = "nccl")]
    Gpus(moebius::nccl::NcclComm),
}

impl Endpoint {
    /// The group of all ranks.
    pub fn group(self, config: GroupConfig, device: &Device) -> Result<DeviceGroup> {
        Ok(match self {
            Endpoint::Alone => DeviceGroup::single(GroupConfig::one_rank(config.num_experts), device)?,
            Endpoint::Threads(comm) => EpGroup::new(Group::new(Cpu::new(), Box::new(comm), config)?).into(),
            #[cfg(feature = "nccl")]
            Endpoint::Gpus(comm) => {
                let cuda = comm.cuda().clone();
                DeviceGroup::new(EpGroup::new(Group::new(cuda, Box::new(comm), config)?), device)?
            }
        })
    }
}

fn device(cpu: bool) -> Device {
    #[cfg(feature = "cuda")]
    if !cpu {
        match ranks::gpu(0) {
            Ok(device) => return device,
            Err(e) => crate::output::complain(format_args!("no GPU ({e})")),
        }
    }
    let _ = cpu;
    Device::Cpu
}

/// The places of ranks that are threads of this process.
pub fn places(ranks: usize, cpu: bool) -> Result<Vec<Place>> {
    let place = |rank, device, endpoint| Place { rank, ranks, device, endpoint };
    match ranks {
        0 => Err("--ranks: expected 1 at least, found 0".into()),
        1 => Ok(vec![place(0, device(cpu), Endpoint::Alone)]),
        _ if cpu => {
            let comms = ThreadWorld::create(ranks, TIMEOUT).into_iter().enumerate();
            Ok(comms.map(|(rank, comm)| place(rank, Device::Cpu, Endpoint::Threads(comm))).collect())
        }
        #[cfg(feature = "nccl")]
        _ => {
            use moebius::nccl::{NcclComm, NcclLibrary};
            let devices = (0..ranks).map(ranks::gpu).collect::<Result<Vec<_>>>()?;
            let gpus = devices.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
            let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, TIMEOUT)?;
            let places = devices.into_iter().zip(comms).enumerate();
            Ok(places.map(|(rank, (device, comm))| place(rank, device, Endpoint::Gpus(comm))).collect())
        }
        #[cfg(not(feature = "nccl"))]
        _ => Err(ranks::NO_NCCL.into()),
    }
}

/// The place of this process, where it is one rank of several.
pub fn place_of(me: &moebius::ranks::Identity) -> Result<Place> {
    #[cfg(feature = "nccl")]
    {
        let (device, comm) = ranks::join(me, TIMEOUT)?;
        Ok(Place { rank: me.rank, ranks: me.world, device, endpoint: Endpoint::Gpus(comm) })
    }
    #[cfg(not(feature = "nccl"))]
    Err(format!("rank {} of {}: {}", me.rank, me.world, ranks::NO_NCCL).into())
}
