//! The chain: a model's sharded weights in the order of their use.
//!
//! ```text
//! schedule          the order of the weights in both directions, and which of them must not share memory
//! collective_state  where a weight's gather and its reduce-scatter stand
//! add               weights that come to a chain
//! entry             how a call enters it: in a capture, outside of any, or to give up
//! pass              beginning and end of a pass over the model
//! gather            weights in, a step ahead; amaxes: when shards that are sent quantized are cast
//! reduce            gradients out, a step late
//! microbatches      numbers of backward passes, which ranks compare before sums over replicas
//! replica_sums      sums over replicas on a thread of their own, beside the step's last backward
//! finish            the end of a step: gradients whole, summed over replicas, given
//! capture           passes that are captured and run again without the host
//! report            memory held, bytes moved
//! stored_weight     frozen weights, as they are stored
//! ```

pub(in crate::etp) mod add;
mod amaxes;
pub(in crate::etp) mod capture;
pub(in crate::etp) mod collective_state;
mod entry;
pub(in crate::etp) mod finish;
pub(in crate::etp) mod gather;
mod microbatches;
pub(in crate::etp) mod pass;
pub(in crate::etp) mod reduce;
mod replica_sums;
pub(in crate::etp) mod report;
pub(in crate::etp) mod schedule;
pub(in crate::etp) mod stored_weight;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, Op, Tag};
use crate::compare::{ComparedField, compare_fields, gather_numbers};
use crate::error::{Error, Result};

use crate::etp::buffers::cache::{Buffer, BufferCache, BufferId, BufferKey, BufferUsage};
use crate::etp::chain::collective_state::{
    ActivePass, ChainTraffic, JoinedAmaxes, MainGradient, PendingGather, PendingReduction, ReplicaSums, StateMachine,
};
use crate::etp::chain::schedule::Acquisition;
use crate::etp::collective_thread::CollectiveThread;
use crate::etp::shards::quantized::QuantizedShard;
use crate::etp::shards::source::ShardSource;
use crate::etp::{CALL, Comms, EtpOptions, Reduction, Scale, ShardDevice, Shards, WeightId, WeightSpec};

/// Sharded weights of a model on one rank; see the [module](super). Shared by the model's layers, used by one thread
/// at a time.
pub struct Chain<D: ShardDevice> {
    pub(in crate::etp) device: D,
    pub(in crate::etp) options: EtpOptions,
    rank: usize,
    ranks: usize,
    inner: Mutex<ChainState<D>>,
    /// Number of a test's capture, where devices have none, or 0.
    #[cfg(test)]
    pub(in crate::etp) test_capture: std::sync::atomic::AtomicU64,
}

impl<D: ShardDevice> fmt::Debug for Chain<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chain<rank {} of {}>", self.rank, self.ranks)
    }
}

/// State that changes.
pub(in crate::etp) struct ChainState<D: ShardDevice> {
    pub weights: Vec<ChainWeight<D>>,
    pub uses: Vec<UseState<D>>,
    /// Acquisitions of a forward and of a backward; empty until the first forward has ended.
    pub steps: [Vec<Acquisition>; 2],
    /// The last forward has a backward of other uses than `steps` has.
    pub other_backward: bool,
    pub active: Option<ActivePass>,
    pub cache: BufferCache<D>,
    pub gathers: CollectiveThread<D>,
    /// Of reductions, where they do not take turns with gathers.
    pub apart: Option<CollectiveThread<D>>,
    /// Sums over the replicas, where the chain makes them itself.
    pub replicas: Option<ReplicaSums<D>>,
    /// Gradients under way, the oldest first.
    pub pending_reductions: VecDeque<PendingReduction<D>>,
    /// Gradients handed in since the ranks last agreed, for tags.
    pub reduced: u64,
    pub traffic: ChainTraffic,
    /// Passes since the ranks last agreed, for tags.
    pub passes: u64,
    /// Backward passes since gradients were last given.
    pub microbatches: u64,
    /// The ranks have compared these: a `finish` that failed behind it is repeated by itself.
    pub compared: bool,
    /// Passes so far, to tell one from another.
    pub serial: u64,
    /// Number of the shards' state: what was cast in another is cast anew.
    pub epoch: u64,
    /// Passes may be captured: main gradients stay where they are, and are zeros where nothing has been added.
    pub capturable: bool,
    /// The capture that the last call was part of, and so all that is under way.
    pub capture: Option<u64>,
    /// The last pass was captured: whether it has run, and with it its casts, is not known.
    pub unknown: bool,
    /// Amaxes of shards that are sent in NVFP4.
    pub amaxes: Option<JoinedAmaxes<D>>,
}

/// A weight and what belongs to it.
pub(in crate::etp) struct ChainWeight<D: ShardDevice> {
    pub spec: WeightSpec,
    pub shards: Arc<Shards>,
    pub source: Arc<dyn ShardSource<D>>,
    /// Where it is sent quantized.
    pub quantized: Option<Arc<QuantizedShard<D>>>,
    /// Main gradient of the shard, from the first gradient on.
    pub main: Option<MainGradient<D>>,
    /// State of its reduce-scatter.
    pub reduce: StateMachine,
    pub gradient: Option<BufferId>,
}

/// One use of a weight in a forward, and its mirror in backward.
pub(in crate::etp) struct UseState<D: ShardDevice> {
    pub weight: usize,
    pub state: StateMachine,
    /// For the weight.
    pub buffer_id: BufferId,
    /// For what arrives, if it is sent quantized.
    pub arrived: Option<BufferId>,
    /// A gather under way.
    pub pending_gather: Option<PendingGather<D>>,
    /// Buffer that a step left for a later one.
    pub kept: Option<Buffer<D>>,
    /// The pass (its serial number) that has it in use, or had it last.
    pub holder: u64,
    /// The last forward's backward uses it too.
    pub backward: bool,
}

impl<D: ShardDevice> Chain<D> {
    /// An empty chain (collective: options are compared over the ranks).
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on every rank; communicators of different groups; no thread to be had.
    pub fn new(device: D, comms: Comms<D>, options: EtpOptions) -> Result<Self> {
        let Comms { mut gather, reduce } = comms;
        let (rank, ranks) = (gather.rank(), gather.size());
        compare(&device, (&mut *gather, &*reduce), &options)?;
        if (reduce.rank(), reduce.size()) != (rank, ranks) {
            let found = format!("rank {} of {}", reduce.rank(), reduce.size());
            return Err(Error::invalid("Chain::new", "comms.reduce", format!("rank {rank} of {ranks}"), found));
        }
        if options.ahead == 0 {
            return Err(Error::invalid("Chain::new", "ahead", "at least 1 (prefetch: false turns it off)", 0));
        }
        if options.replicas == 0 {
            return Err(Error::invalid("Chain::new", "replicas", "at least 1", 0));
        }
        let gathers = CollectiveThread::start("gather", &device, gather)?;
        let apart = match options.in_turn {
            true => None,
            false => Some(CollectiveThread::start("reduce", &device, reduce)?),
        };
        let inner = ChainState {
            weights: Vec::new(),
            uses: Vec::new(),
            steps: [Vec::new(), Vec::new()],
            other_backward: false,
            active: None,
            cache: BufferCache::new(device.clone()),
            gathers,
            apart,
            replicas: None,
            pending_reductions: VecDeque::new(),
            reduced: 0,
            traffic: ChainTraffic::default(),
            passes: 0,
            microbatches: 0,
            compared: false,
            serial: 0,
            epoch: 0,
            capturable: false,
            capture: None,
            unknown: false,
            amaxes: None,
        };
        Ok(Self {
            device,
            options,
            rank,
            ranks,
            inner: Mutex::new(inner),
            #[cfg(test)]
            test_capture: 0.into(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks N that share each weight.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The device of the computation.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// How the chain works.
    pub fn options(&self) -> &EtpOptions {
        &self.options
    }

    /// The cut of a weight of these sizes.
    ///
    /// # Errors
    /// As [`Shards::new`].
    pub fn shards(&self, dims: &[usize]) -> Result<Shards> {
        Shards::new(dims, self.ranks, self.options.pad)
    }

    /// Factor of each gradient.
    pub(in crate::etp) fn factor(&self) -> f64 {
        match self.options.scale {
            Scale::Sum => 1.0,
            Scale::Mean => 1.0 / (self.ranks * self.options.replicas) as f64,
        }
    }

    /// The state is consistent between statements that can panic, so a poisoned lock carries no information.
    pub(in crate::etp) fn lock(&self) -> MutexGuard<'_, ChainState<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: ShardDevice> ChainState<D> {
    pub fn has_order(&self) -> bool {
        !self.steps[0].is_empty()
    }

    pub fn order_error(&self, weight: &str, expected: &str, found: &str) -> Error {
        Error::WeightState { call: CALL, weight: weight.into(), expected: expected.into(), found: found.into() }
    }

    /// The collective thread of reductions.
    pub fn reductions(&self) -> &CollectiveThread<D> {
        self.apart.as_ref().unwrap_or(&self.gathers)
    }

    /// Weights that are sent quantized.
    pub fn quantized(&self) -> impl Iterator<Item = &Arc<QuantizedShard<D>>> {
        self.weights.iter().filter_map(|weight| weight.quantized.as_ref())
    }

    pub fn weight(&self, id: WeightId) -> Result<&ChainWeight<D>> {
        let there = format!("one of {}", self.weights.len());
        self.weights.get(id.0).ok_or_else(|| Error::invalid(CALL, "weight", there, id.0))
    }

    /// Key of a weight's buffers; of equal keys but for the parity, one buffer serves in turn.
    pub fn key(&self, weight: usize, usage: BufferUsage, parity: usize) -> BufferKey {
        let weight = &self.weights[weight];
        BufferKey { dims: weight.shards.gathered_dims().to_vec(), dtype: weight.spec.dtype, usage, parity }
    }

    /// Key of the buffer that a weight is read from.
    pub fn read_key(&self, weight: usize, parity: usize) -> BufferKey {
        let apart = self.gathers.has_own_memory && self.weights[weight].quantized.is_some();
        self.key(weight, if apart { BufferUsage::Unpacked } else { BufferUsage::GatheredWeight }, parity)
    }

    /// The same of the buffer for what arrives of it, if it is sent quantized.
    pub fn arrived_key(&self, weight: usize, parity: usize) -> Option<BufferKey> {
        let dims = vec![self.weights[weight].quantized.as_ref()?.bytes()];
        Some(BufferKey { dims, dtype: crate::DType::U8, usage: BufferUsage::Arrived, parity })
    }
}

/// Finds the first option in which the ranks differ: one all-gather.
fn compare<D: ShardDevice>(
    device: &D,
    (comm, reduce): (&mut dyn Communicator<D>, &dyn Communicator<D>),
    options: &EtpOptions,
) -> Result<()> {
    let device = &comm.device().unwrap_or(device).clone();
    // All but the seed from `in_turn` on decide the order of the collective threads' collectives.
    let number = ComparedField::number;
    let named = |name, value: bool, text| ComparedField { text, ..number(name, u64::from(value)) };
    let truth = |value| (value != 0).to_string();
    let fields = [
        number("pad", options.pad as u64),
        named("reduction", options.reduction == Reduction::Pairwise, |pairwise| {
            format!("{:?}", if pairwise == 0 { Reduction::Native } else { Reduction::Pairwise })
        }),
        named("scale", options.scale == Scale::Mean, |mean| {
            format!("{:?}", if mean == 0 { Scale::Sum } else { Scale::Mean })
        }),
        number("replicas", options.replicas as u64),
        named("in_turn", options.in_turn, truth),
        named("prefetch", options.prefetch, truth),
        number("ahead", if options.prefetch { options.ahead as u64 } else { 0 }),
        number("seed", options.seed),
        named("gather.uses_copy_engines", comm.uses_copy_engines(), truth),
        named("reduce.uses_copy_engines", reduce.uses_copy_engines(), truth),
    ];
    let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
    let all = gather_numbers(device, comm, tag, &ComparedField::values(&fields))?;
    compare_fields("Chain::new", comm.rank(), &fields, &all)
}
