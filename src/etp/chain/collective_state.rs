//! Where a weight's gather and its reduce-scatter stand, and what a chain keeps of what is under way.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensor::Tensor;

use crate::etp::buffers::cache::{Buffer, BufferId};
use crate::etp::collective_thread::{CollectiveThread, PendingCollective};
use crate::etp::shards::quantized::QuantizedShard;
use crate::etp::{Phase, ShardDevice};

/// State of a weight's gather, or of its gradient's reduce-scatter; each weight has one of each.
///
/// ```text
/// None → AsyncWait → DataReady → None     started ahead of its use
/// None → DataReadySync → None             done when it was asked for
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CollectiveState {
    /// Nothing under way, no memory held.
    #[default]
    None,
    /// A collective is under way.
    AsyncWait,
    /// A collective that was started ahead has brought its data, which are in use.
    DataReady,
    /// A collective that nobody had started ahead has brought its data, which are in use.
    DataReadySync,
}

/// A [`CollectiveState`] that moves along its edges only.
#[derive(Debug, Default)]
pub(in crate::etp) struct StateMachine(CollectiveState);

impl StateMachine {
    pub fn state(&self) -> CollectiveState {
        self.0
    }

    /// Moves on; in every build, as the check costs nothing beside a collective.
    pub fn transition(&mut self, to: CollectiveState, weight: &str) -> Result<()> {
        use CollectiveState::*;
        match (self.0, to) {
            (None, AsyncWait) | (AsyncWait, DataReady) | (DataReady, None) | (None, DataReadySync) => {}
            (DataReadySync, None) => {}
            (from, to) => {
                return Err(Error::WeightState {
                    call: "etp",
                    weight: weight.to_string(),
                    expected: format!("a state that leads to {to:?}"),
                    found: format!("{from:?}"),
                });
            }
        }
        self.0 = to;
        Ok(())
    }

    /// Back to the start, from anywhere: what was under way is given up.
    pub fn reset(&mut self) {
        self.0 = CollectiveState::None;
    }
}

/// Amaxes of all experts of all weights that are sent in NVFP4, `F32`, in the order of registration.
pub(in crate::etp) struct JoinedAmaxes<D: ShardDevice> {
    /// Of which state of the shards.
    pub epoch: u64,
    pub buffer: Buffer<D>,
}

/// The pass that runs.
#[derive(Debug, Clone, Copy)]
pub(in crate::etp) struct ActivePass {
    pub phase: Phase,
    /// Acquisitions so far.
    pub cursor: usize,
    /// Among the passes on which the ranks agree.
    pub number: u64,
    pub serial: u64,
    /// The chain's epoch at its beginning, on which the ranks agree wherever in the pass they say that shards have
    /// changed.
    pub epoch: u64,
}

/// Main gradient of a shard.
pub(in crate::etp) struct MainGradient<D: ShardDevice> {
    pub sums: Tensor<D>,
    /// Nothing has been added since it was last given: what it holds is the last step's.
    pub first: bool,
    /// Its replicas' are in it, but it has not been given: a `finish` failed in between.
    pub summed: bool,
}

/// A reduce-scatter under way.
pub(in crate::etp) struct PendingReduction<D: ShardDevice> {
    pub weight: usize,
    pub pending: PendingCollective<D>,
    pub cache: [BufferId; 2],
    /// It is of the step's last backward.
    pub last: bool,
}

/// The chain's own way to the replicas.
pub(in crate::etp) struct ReplicaSums<D: ShardDevice> {
    pub thread: CollectiveThread<D>,
    pub last: Option<LastBackward>,
    /// Sums that have begun, the oldest first.
    pub pending: Vec<PendingSum<D>>,
    /// A sum has failed: main gradients are neither the replicas' nor this rank's until the chain has recovered.
    pub failed: bool,
    /// All ranks have their sums: a `finish` that failed behind it is repeated by itself.
    pub met: bool,
}

/// The backward pass that is the step's last.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::etp) enum LastBackward {
    /// It is the next.
    Announced,
    /// It has begun, and ended if `over`.
    Begun {
        /// Gradients that each weight's main gradient still gets in it.
        remaining: Vec<usize>,
        over: bool,
    },
}

/// A main gradient's sum under way.
pub(in crate::etp) struct PendingSum<D: ShardDevice> {
    pub weight: usize,
    pub bytes: usize,
    pub pending: PendingCollective<D>,
}

/// A gather under way.
pub(in crate::etp) struct PendingGather<D: ShardDevice> {
    pub pending: PendingCollective<D>,
    /// Of the buffer that is filled; none of a refusal in its place.
    pub buffer_id: Option<BufferId>,
    /// If that is not the weight: what makes it one, and the weight's own.
    pub quantized: Option<(Arc<QuantizedShard<D>>, BufferId)>,
    /// The pass it is for.
    pub serial: u64,
}

/// Collectives of a chain so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainTraffic {
    /// Gathers.
    pub gathers: u64,
    /// Those that were started ahead of their use.
    pub ahead: u64,
    /// Bytes of whole weights, padding included, as they were sent.
    pub gathered_bytes: u64,
    /// Shards quantized.
    pub casts: u64,
    /// Reduce-scatters.
    pub reductions: u64,
    /// Bytes of whole gradients, padding included.
    pub reduced_bytes: u64,
    /// Sums over replicas on the chain's own thread ([`Chain::with_replicas`](crate::etp::Chain::with_replicas)).
    pub sums: u64,
    /// Those that began while a backward ran.
    pub sums_beside: u64,
    /// Buffers allocated.
    pub allocations: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_five_edges_are_allowed() {
        use CollectiveState::*;
        let all = [None, AsyncWait, DataReady, DataReadySync];
        let edges = [
            (None, AsyncWait),
            (AsyncWait, DataReady),
            (DataReady, None),
            (None, DataReadySync),
            (DataReadySync, None),
        ];
        for from in all {
            for to in all {
                let mut machine = StateMachine(from);
                let moved = machine.transition(to, "w");
                assert_eq!(moved.is_ok(), edges.contains(&(from, to)), "{from:?} to {to:?}");
                assert_eq!(machine.state(), if moved.is_ok() { to } else { from });
            }
        }
    }
}
