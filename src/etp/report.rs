//! What a chain holds, and what it has moved.

use super::chain::Chain;
use super::state::State;
use super::tickets::Usage;
use super::{Reduction, ShardDevice, WeightId};

/// Bytes of a chain's memory on this rank, its shards not counted: those are the optimiser's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Main gradients.
    pub main: usize,
    /// Buffers of gathered weights.
    pub gathered: usize,
    /// Shards in the form in which they travel, where that is quantised.
    pub quantised: usize,
    /// What arrives of quantised shards, before it is de-quantised.
    pub arrived: usize,
    /// Buffers of unsharded gradients.
    pub gradients: usize,
    /// Buffers that reductions fill.
    pub reduced: usize,
}

/// Collectives of a chain so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Gathers.
    pub gathers: u64,
    /// Those that were started ahead of their use.
    pub ahead: u64,
    /// Bytes of whole weights, padding included, as they travelled.
    pub gathered_bytes: u64,
    /// Shards quantised.
    pub casts: u64,
    /// Reduce-scatters.
    pub reductions: u64,
    /// Bytes of whole gradients, padding included.
    pub reduced_bytes: u64,
    /// Buffers allocated.
    pub allocations: u64,
}

impl<D: ShardDevice> Chain<D> {
    /// States of a weight's gather (of its last use in the order) and of its reduce-scatter.
    pub fn states(&self, id: WeightId) -> (State, State) {
        let inner = self.lock();
        let node = inner.nodes.iter().rev().find(|node| node.weight == id.0);
        let reduce = inner.weights.get(id.0).map_or(State::None, |w| w.reduce.state());
        (node.map_or(State::None, |node| node.state.state()), reduce)
    }

    /// Weights in linked order; empty before the first forward has ended.
    pub fn order(&self) -> Vec<WeightId> {
        let inner = self.lock();
        match inner.is_linked() {
            true => inner.nodes.iter().map(|node| WeightId(node.weight)).collect(),
            false => Vec::new(),
        }
    }

    /// Whether gathers and reductions (in pairs) are copy engines', in memory of the lanes' communicators
    /// ([`Communicator::copies_beside`](crate::comm::Communicator::copies_beside)).
    pub fn copies_beside(&self) -> bool {
        let inner = self.lock();
        let pairwise = self.options.reduction == Reduction::Pairwise;
        inner.gathers.has_memory && inner.reductions().has_memory && pairwise
    }

    /// Memory that the chain holds.
    pub fn memory(&self) -> Memory {
        let inner = self.lock();
        Memory {
            main: inner.weights.iter().filter_map(|w| w.main.as_ref()).map(|main| main.sums.bytes()).sum(),
            gathered: inner.tickets.bytes(Usage::Gathered) + inner.tickets.bytes(Usage::Unpacked),
            quantised: inner.packed().map(|packed| packed.kept()).sum::<usize>() + inner.tickets.bytes(Usage::Amaxes),
            arrived: inner.tickets.bytes(Usage::Arrived),
            gradients: inner.tickets.bytes(Usage::Gradient),
            reduced: inner.tickets.bytes(Usage::Reduced),
        }
    }

    /// Collectives so far.
    pub fn traffic(&self) -> Traffic {
        let inner = self.lock();
        let casts = inner.packed().map(|packed| packed.casts()).sum();
        Traffic { allocations: inner.tickets.allocations(), casts, ..inner.traffic }
    }

    /// Drops buffers that are not in use; later passes allocate them anew. Memory of the lanes' communicators stays.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.tickets.clear();
    }
}
