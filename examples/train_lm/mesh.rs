//! How the ranks are spread, and the communicators of each.

use std::time::Duration;

use moebius::comm::{ThreadComm, ThreadWorld};

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

/// A rank's communicators.
#[derive(Debug)]
pub struct Comms {
    pub world: ThreadComm,
    /// The ranks of its EP group.
    pub experts: ThreadComm,
    /// The ranks that share its shards: one for gathers, one for reductions.
    pub shards: [ThreadComm; 2],
    /// The ranks with the same shard.
    pub replicas: ThreadComm,
}

impl Comms {
    /// Those of every rank.
    pub fn create(mesh: Mesh, timeout: Duration) -> Vec<Self> {
        let (ep, n) = (mesh.ep, mesh.shards());
        let shards = || split(mesh.ranks, |w| (w / ep / n * ep + w % ep, w / ep % n), timeout);
        let world = ThreadWorld::create(mesh.ranks, timeout).into_iter();
        let experts = split(mesh.ranks, |w| (w / ep, w % ep), timeout);
        let replicas = split(mesh.ranks, |w| (w % (ep * n), w / (ep * n)), timeout);
        let all = world.zip(experts).zip(shards()).zip(shards()).zip(replicas);
        all.map(|((((world, experts), gather), reduce), replicas)| Self {
            world,
            experts,
            shards: [gather, reduce],
            replicas,
        })
        .collect()
    }
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
