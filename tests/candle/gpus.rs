//! Ranks over several GPUs, each a thread with a device of candle's.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use candle_core::Device;
use moebius::candle::{DeviceGroup, EpGroup, cuda, device_for_capture};
use moebius::comm::{Communicator, Op, Tag};
use moebius::cuda::Cuda;
use moebius::ep::{Group, GroupConfig};
use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};

use crate::support::AnyResult;

/// For connections, and for a collective.
const LONG: Duration = Duration::from_secs(60);

/// Devices and the connections between them, by number of ranks.
static WORLDS: Mutex<BTreeMap<usize, (Vec<Device>, NcclWorld)>> = Mutex::new(BTreeMap::new());

/// GPUs of this machine, 0 where NCCL cannot be had.
pub fn available() -> usize {
    match NcclLibrary::open() {
        Ok(_) => (0..).map_while(|gpu| Device::new_cuda_with_stream(gpu).ok()).count(),
        Err(_) => 0,
    }
}

/// A rank's device, and two communicators of all ranks beside the layers', each on a stream of its own.
pub struct RankComms {
    pub cuda: Cuda,
    pub comms: [NcclComm; 2],
    /// And a third.
    pub world: NcclComm,
}

/// Runs a closure on each rank; results in rank order. One call at a time.
pub fn on_ranks<R: Send>(
    ranks: usize,
    config: &GroupConfig,
    run: impl Fn(&DeviceGroup) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let run = &run;
    on_communicators(ranks, move |comm, device| {
        let group = Group::new(comm.cuda().clone(), Box::new(comm), config.clone())?;
        run(&DeviceGroup::new(EpGroup::new(group), device)?)
    })
}

/// The same with communicators beside.
pub fn on_ranks_with_comms<R: Send>(
    ranks: usize,
    config: &GroupConfig,
    run: impl Fn(&DeviceGroup, RankComms) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let run = &run;
    on_communicators(ranks, move |mut comm, device| {
        let cuda = comm.cuda().clone();
        let mut beside = |sequence| -> AnyResult<NcclComm> {
            let (tag, rank) = (Tag { layer: 0, op: Op::Init, sequence }, comm.rank());
            Ok(comm.split_on(tag, Some(0), rank, &cuda.with_new_stream()?)?.ok_or("a part")?)
        };
        let comms = [beside(1)?, beside(2)?];
        let world = beside(3)?;
        let group = Group::new(cuda.clone(), Box::new(comm), config.clone())?;
        run(&DeviceGroup::new(EpGroup::new(group), device)?, RankComms { cuda, comms, world })
    })
}

/// Runs a closure on each rank, on devices whose work can be captured, with a communicator beside the group's.
pub fn on_ranks_for_capture<R: Send>(
    ranks: usize,
    config: &GroupConfig,
    run: impl Fn(&DeviceGroup, NcclComm) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let devices = (0..ranks).map(device_for_capture).collect::<Result<Vec<_>, _>>()?;
    let gpus = devices.iter().map(cuda).collect::<Result<Vec<_>, _>>()?;
    let world = NcclWorld::new(&NcclLibrary::open()?, &gpus, LONG)?;
    on_each(&devices, world.communicators(LONG)?, |mut comm, device| {
        let (tag, rank) = (Tag { layer: 0, op: Op::Init, sequence: 1 }, comm.rank());
        let beside = comm.split(tag, Some(0), rank)?.ok_or("a part")?;
        let group = Group::new(comm.cuda().clone(), Box::new(comm), config.clone())?;
        run(&DeviceGroup::new(EpGroup::new(group), device)?, beside)
    })
}

/// Runs a closure on a thread for each rank; results in rank order.
fn on_each<R: Send>(
    devices: &[Device],
    comms: Vec<NcclComm>,
    run: impl Fn(NcclComm, &Device) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    std::thread::scope(|scope| {
        let threads = comms.into_iter().zip(devices).map(|(comm, device)| {
            let run = &run;
            scope.spawn(move || run(comm, device))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

fn on_communicators<R: Send>(
    ranks: usize,
    run: impl Fn(NcclComm, &Device) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
    // A test that fails may have ended its connections: the next makes others.
    let (devices, world) = match worlds.remove(&ranks) {
        Some(world) => world,
        None => {
            let devices = (0..ranks).map(Device::new_cuda_with_stream).collect::<Result<Vec<_>, _>>()?;
            let gpus = devices.iter().map(cuda).collect::<Result<Vec<_>, _>>()?;
            let world = NcclWorld::new(&NcclLibrary::open()?, &gpus, LONG)?;
            (devices, world)
        }
    };
    let found = on_each(&devices, world.communicators(LONG)?, run)?;
    worlds.insert(ranks, (devices, world));
    Ok(found)
}

/// Ends the connections before the process does.
pub fn close() {
    WORLDS.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
