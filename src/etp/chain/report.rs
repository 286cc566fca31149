//! Memory that a chain holds, and bytes that it has moved.

use crate::etp::buffers::cache::BufferUsage;
use crate::etp::chain::collective_state::{ChainTraffic, CollectiveState};
use crate::etp::chain::{Chain, ChainWeight};
use crate::etp::{Reduction, ShardDevice, WeightId};

/// Bytes of a chain's memory on this rank, its shards not counted: those are the optimizer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainMemory {
    /// Main gradients.
    pub main: usize,
    /// Buffers of gathered weights.
    pub gathered: usize,
    /// Shards in the form in which they are sent, where that is quantized.
    pub quantized: usize,
    /// Bytes that arrive of quantized shards, before they are de-quantized.
    pub arrived: usize,
    /// Buffers of unsharded gradients.
    pub gradients: usize,
    /// Buffers that reductions fill.
    pub reduced: usize,
}

impl<D: ShardDevice> Chain<D> {
    /// States of a weight's gather (of its last use in the order) and of its reduce-scatter.
    pub fn states(&self, id: WeightId) -> (CollectiveState, CollectiveState) {
        let inner = self.lock();
        let node = inner.uses.iter().rev().find(|node| node.weight == id.0);
        let reduce = inner.weights.get(id.0).map_or(CollectiveState::None, |w| w.reduce.state());
        (node.map_or(CollectiveState::None, |node| node.state.state()), reduce)
    }

    /// Weights in the order of the first forward; empty before the first forward has ended.
    pub fn order(&self) -> Vec<WeightId> {
        let inner = self.lock();
        match inner.has_order() {
            true => inner.uses.iter().map(|node| WeightId(node.weight)).collect(),
            false => Vec::new(),
        }
    }

    /// Whether gathers and reductions (in pairs) are copy engines', in memory of the collective threads' communicators
    /// ([`Communicator::uses_copy_engines`](crate::comm::Communicator::uses_copy_engines)).
    pub fn uses_copy_engines(&self) -> bool {
        let inner = self.lock();
        let pairwise = self.options.reduction == Reduction::Pairwise;
        inner.gathers.has_own_memory && inner.reductions().has_own_memory && pairwise
    }

    /// Memory that the chain holds.
    pub fn memory(&self) -> ChainMemory {
        let inner = self.lock();
        let summing = inner.replicas.iter().flat_map(|replicas| &replicas.pending).map(|sum| sum.bytes);
        ChainMemory {
            main: inner.weights.iter().filter_map(|w| w.main.as_ref()).map(|main| main.sums.bytes()).sum::<usize>()
                + summing.sum::<usize>(),
            gathered: inner.cache.bytes(BufferUsage::GatheredWeight) + inner.cache.bytes(BufferUsage::Unpacked),
            quantized: inner.quantized().map(|quantized| quantized.kept()).sum::<usize>()
                + inner.cache.bytes(BufferUsage::Amaxes),
            arrived: inner.cache.bytes(BufferUsage::Arrived),
            gradients: inner.cache.bytes(BufferUsage::Gradient),
            reduced: inner.cache.bytes(BufferUsage::Reduced),
        }
    }

    /// Bytes of shards that lie in memory of the host ([`ShardDevice::page_locked`]).
    pub fn bytes_on_host(&self) -> usize {
        let inner = self.lock();
        let on_host = inner.weights.iter().filter(|weight| weight.source.is_on_host());
        let bytes =
            |weight: &ChainWeight<D>| weight.shards.shard_dims().iter().product::<usize>() * weight.spec.dtype.size();
        on_host.map(bytes).sum()
    }

    /// Collectives so far.
    pub fn traffic(&self) -> ChainTraffic {
        let inner = self.lock();
        let casts = inner.quantized().map(|quantized| quantized.casts()).sum();
        ChainTraffic { allocations: inner.cache.allocations(), casts, ..inner.traffic }
    }

    /// Drops buffers that are not in use; later passes allocate them anew. Memory of the collective threads'
    /// communicators stays.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.cache.clear();
    }
}
