//! Several GPUs: ranks over NCCL, whose connections are made once and lent to every test.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use moebius::Error;
use moebius::comm::Solo;
use moebius::cuda::Cuda;
use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};

use super::Endpoint;

/// Time for connections to be made.
const CONNECT: Duration = Duration::from_secs(60);

/// The GPUs of this machine with NCCL, and the connections between the first so many of them.
struct Gpus {
    library: NcclLibrary,
    gpus: Vec<Cuda>,
    worlds: BTreeMap<usize, NcclWorld>,
    /// Connections between these GPUs on a stream beside the first, by the stream's name, and whether copy engines move
    /// what they can.
    beside: BTreeMap<(Vec<usize>, &'static str, bool), NcclWorld>,
}

static GPUS: OnceLock<Result<Mutex<Gpus>, String>> = OnceLock::new();

/// Opens NCCL and every GPU; each buffer starts as NaN.
fn gpus() -> &'static Result<Mutex<Gpus>, String> {
    GPUS.get_or_init(|| {
        let first = Cuda::new(0).map_err(|e| e.to_string())?;
        let others = (1..).map_while(|ordinal| Cuda::new(ordinal).ok());
        let gpus = std::iter::once(first).chain(others).map(|cuda| cuda.poisoning()).collect();
        let library = NcclLibrary::open().map_err(|e| e.to_string())?;
        Ok(Mutex::new(Gpus { library, gpus, worlds: BTreeMap::new(), beside: BTreeMap::new() }))
    })
}

/// Number of GPUs that tests may use.
///
/// # Errors
/// Why there is none: no NCCL, no driver, no GPU.
pub fn available() -> Result<usize, String> {
    let gpus = gpus().as_ref().map_err(Clone::clone)?;
    Ok(gpus.lock().unwrap_or_else(PoisonError::into_inner).gpus.len())
}

/// NCCL and the first GPUs.
pub fn first(count: usize) -> (NcclLibrary, Vec<Cuda>) {
    let gpus = gpus().as_ref().expect("GPUs").lock().unwrap_or_else(PoisonError::into_inner);
    (gpus.library.clone(), gpus.gpus[..count].to_vec())
}

/// Communicators between the first GPUs.
pub fn communicators(ranks: usize, timeout: Duration) -> Vec<NcclComm> {
    let mut gpus = gpus().as_ref().expect("GPUs").lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(world) = gpus.worlds.get(&ranks) {
        match world.communicators(timeout) {
            Ok(comms) => return comms,
            // A test has ended it: the next gets another.
            Err(_) => drop(gpus.worlds.remove(&ranks)),
        }
    }
    let world = NcclWorld::new(&gpus.library, &gpus.gpus[..ranks], CONNECT).expect("a world");
    let comms = world.communicators(timeout).expect("communicators of a new world");
    gpus.worlds.insert(ranks, world);
    comms
}

/// How long communicators of an earlier test may take to end.
const END: Duration = Duration::from_secs(5);

/// Communicators between these GPUs, each on a stream of that name beside its GPU's own; without a name on its own.
pub fn among(ranks: &[usize], purpose: &'static str, timeout: Duration) -> Vec<NcclComm> {
    for_purpose(ranks, (purpose, false), timeout)
}

/// The same, with copy engines where that is asked for.
pub fn for_purpose(ranks: &[usize], (purpose, engines): (&'static str, bool), timeout: Duration) -> Vec<NcclComm> {
    let key = (ranks.to_vec(), purpose, engines);
    let mut gpus = gpus().as_ref().expect("GPUs").lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(world) = gpus.beside.get(&key) {
        let until = Instant::now() + END;
        loop {
            match world.communicators(timeout) {
                Ok(comms) => return comms,
                // Helper threads drop them a moment after the test.
                Err(Error::Invalid { .. }) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                Err(_) => break,
            }
        }
        drop(gpus.beside.remove(&key));
    }
    let stream = |gpu: &Cuda| if purpose.is_empty() { gpu.clone() } else { gpu.with_new_stream().expect("a stream") };
    let own: Vec<Cuda> = ranks.iter().map(|rank| stream(&gpus.gpus[*rank])).collect();
    let make = if engines { NcclWorld::with_copy_engines } else { NcclWorld::new };
    let world = make(&gpus.library, &own, CONNECT).expect("a world");
    let comms = world.communicators(timeout).expect("communicators of a new world");
    gpus.beside.insert(key, world);
    comms
}

/// Ends the connections before the process does.
pub fn close() {
    if let Some(Ok(gpus)) = GPUS.get() {
        let mut gpus = gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.worlds.clear();
        gpus.beside.clear();
    }
}

/// Endpoints on the first GPUs; a rank alone sits on the device at hand.
pub fn endpoints(device: &Cuda, ranks: usize, timeout: Duration) -> Vec<Endpoint<Cuda>> {
    if ranks == 1 {
        return vec![Endpoint { device: device.clone(), comm: Box::new(Solo::new(device.clone())) }];
    }
    let endpoint = |comm: NcclComm| Endpoint { device: comm.cuda().clone(), comm: Box::new(comm) };
    communicators(ranks, timeout).into_iter().map(endpoint).collect()
}
