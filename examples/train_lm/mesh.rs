//! How the ranks are spread, and the communicators of each.

use std::time::Duration;

use candle_core::Device;
use moebius::comm::{ThreadComm, ThreadWorld};

use crate::Failure;
use crate::device::{Seat, seats};

/// Rank w has the experts of EP rank `w % ep`. Of the ranks with the same experts, `etp` in a row share the shards of
/// each weight; those at the same place among these are replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    pub ranks: usize,
    /// Ranks that have other experts each.
    pub ep: usize,
    /// Ranks that share each expert weight; `None`: weights are whole, without a chain.
    pub etp: Option<usize>,
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

    /// The rank with shard `n` of the experts of EP rank `p`, in replica `r`.
    pub fn rank(&self, p: usize, n: usize, r: usize) -> usize {
        (r * self.shards() + n) * self.ep + p
    }
}

/// How a rank reaches the others.
pub struct Place {
    /// Those of its EP group.
    pub experts: Seat,
    /// Where experts are sharded.
    pub sharded: Option<Comms>,
}

/// Communicators of a rank with sharded experts.
#[derive(Debug)]
pub struct Comms {
    pub world: ThreadComm,
    /// The ranks that share its shards: one for gathers, one for reductions.
    pub shards: [ThreadComm; 2],
    /// The ranks with the same shard.
    pub replicas: ThreadComm,
}

/// Each rank's place; `devices` has as many as there are ranks.
pub fn places(mesh: Mesh, devices: &[Device], timeout: Duration) -> Result<Vec<Place>, Failure> {
    let whole = |experts| Place { experts, sharded: None };
    if mesh.etp.is_none() {
        return Ok(seats(devices, timeout)?.into_iter().map(whole).collect());
    }
    let (ep, n) = (mesh.ep, mesh.shards());
    let experts = split(mesh.ranks, |w| (w / ep, w % ep), timeout).into_iter().map(Seat::Cpu);
    let shards = || split(mesh.ranks, |w| (w / ep / n * ep + w % ep, w / ep % n), timeout);
    let world = ThreadWorld::create(mesh.ranks, timeout);
    let replicas = split(mesh.ranks, |w| (w % (ep * n), w / (ep * n)), timeout);
    let comms = world.into_iter().zip(shards()).zip(shards()).zip(replicas);
    let comms = comms.map(|(((world, gather), reduce), replicas)| Comms { world, shards: [gather, reduce], replicas });
    Ok(experts.zip(comms).map(|(experts, comms)| Place { experts, sharded: Some(comms) }).collect())
}

/// A communicator for each rank, over the group that `place` names, at its place in it.
fn split(ranks: usize, place: impl Fn(usize) -> (usize, usize), timeout: Duration) -> Vec<ThreadComm> {
    let mut places: Vec<((usize, usize), usize)> = (0..ranks).map(|w| (place(w), w)).collect();
    places.sort_unstable();
    let mut all: Vec<(usize, ThreadComm)> = Vec::with_capacity(ranks);
    for group in places.chunk_by(|a, b| a.0.0 == b.0.0) {
        let comms = ThreadWorld::create(group.len(), timeout);
        all.extend(group.iter().map(|(_, w)| *w).zip(comms));
    }
    all.sort_unstable_by_key(|(w, _)| *w);
    all.into_iter().map(|(_, comm)| comm).collect()
}
