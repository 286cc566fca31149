//! The chain: a model's sharded weights in the order of their use.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, Op, Tag};
use crate::error::{Error, Result};

use super::casts::Amaxes;
use super::lane::{Lane, told};
use super::links::Step;
use super::packed::Packed;
use super::pass::Active;
use super::reduce::{Main, Reducing};
use super::report::Traffic;
use super::source::ShardSource;
use super::state::Machine;
use super::tickets::{Key, Loan, Ticket, Tickets, Usage};
use super::{Comms, EtpOptions, Reduction, Scale, ShardDevice, Shards, WeightId, WeightSpec};

/// The call that errors name.
pub(super) const CALL: &str = "etp";

/// Sharded weights of a model on one rank; see the [module](super). Shared by the model's layers, used by one thread
/// at a time.
pub struct Chain<D: ShardDevice> {
    pub(super) device: D,
    pub(super) stream: D::Stream,
    pub(super) options: EtpOptions,
    rank: usize,
    ranks: usize,
    inner: Mutex<Inner<D>>,
    /// Number of a test's recording, where devices have none, or 0.
    #[cfg(test)]
    pub(super) pretended: std::sync::atomic::AtomicU64,
}

impl<D: ShardDevice> fmt::Debug for Chain<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chain<rank {} of {}>", self.rank, self.ranks)
    }
}

/// What changes.
pub(super) struct Inner<D: ShardDevice> {
    pub weights: Vec<Weight<D>>,
    pub nodes: Vec<Node<D>>,
    /// Acquisitions of a forward and of a backward; empty until the first forward has ended.
    pub steps: [Vec<Step>; 2],
    pub active: Option<Active>,
    pub tickets: Tickets<D>,
    pub gathers: Lane<D>,
    /// Of reductions, where they do not take turns with gathers.
    pub apart: Option<Lane<D>>,
    /// Gradients under way, the oldest first.
    pub reducing: VecDeque<Reducing<D>>,
    /// Gradients handed in since the ranks last agreed, for tags.
    pub reduced: u64,
    pub traffic: Traffic,
    /// Passes since the ranks last agreed, for tags.
    pub passes: u64,
    /// Passes so far, to tell one from another.
    pub serial: u64,
    /// Number of the shards' state: what was cast in another is cast anew.
    pub epoch: u64,
    /// Passes may be recorded: main gradients stay where they are, and are zeros where nothing has been added.
    pub recorded: bool,
    /// The recording that the last call was part of, and so all that is under way.
    pub recording: Option<u64>,
    /// The last pass was recorded: whether it has run, and with it its casts, is not known.
    pub unknown: bool,
    /// Amaxes of shards that travel in NVFP4.
    pub amaxes: Option<Amaxes<D>>,
}

/// A weight and what belongs to it.
pub(super) struct Weight<D: ShardDevice> {
    pub spec: WeightSpec,
    pub shards: Arc<Shards>,
    pub source: Arc<dyn ShardSource<D>>,
    /// Where it travels quantised.
    pub packed: Option<Arc<Packed<D>>>,
    /// Main gradient of the shard, from the first gradient on.
    pub main: Option<Main<D>>,
    /// State of its reduce-scatter.
    pub reduce: Machine,
    pub gradient: Option<Ticket>,
}

/// One use of a weight in a forward, and its mirror in backward.
pub(super) struct Node<D: ShardDevice> {
    pub weight: usize,
    pub state: Machine,
    /// For the weight.
    pub ticket: Ticket,
    /// For what arrives, if it travels quantised.
    pub arrived: Option<Ticket>,
    /// A gather under way.
    pub flight: Option<super::gather::Flight<D>>,
    /// What a step left for a later one.
    pub kept: Option<Loan<D>>,
    /// The pass (its serial number) that has it in use, or had it last.
    pub holder: u64,
}

impl<D: ShardDevice> Chain<D> {
    /// An empty chain (collective: options are compared over the ranks).
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on every rank; communicators of different groups; no thread to be had.
    pub fn new(device: D, stream: D::Stream, comms: Comms<D>, options: EtpOptions) -> Result<Self> {
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
        let gathers = Lane::start("gather", &device, gather)?;
        let apart = match options.in_turn {
            true => None,
            false => Some(Lane::start("reduce", &device, reduce)?),
        };
        let inner = Inner {
            weights: Vec::new(),
            nodes: Vec::new(),
            steps: [Vec::new(), Vec::new()],
            active: None,
            tickets: Tickets::new(device.clone()),
            gathers,
            apart,
            reducing: VecDeque::new(),
            reduced: 0,
            traffic: Traffic::default(),
            passes: 0,
            serial: 0,
            epoch: 0,
            recorded: false,
            recording: None,
            unknown: false,
            amaxes: None,
        };
        Ok(Self {
            device,
            stream,
            options,
            rank,
            ranks,
            inner: Mutex::new(inner),
            #[cfg(test)]
            pretended: 0.into(),
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

    /// Adds a weight whose shard on this rank is `source`, before the first forward.
    ///
    /// # Errors
    /// Sizes that cannot be cut; a source of another size or type; a form in which it cannot travel; a chain that is
    /// linked.
    pub fn add(&self, spec: WeightSpec, source: Arc<dyn ShardSource<D>>) -> Result<WeightId> {
        let shards = self.shards(&spec.dims)?;
        if !spec.dtype.is_float() {
            return Err(Error::invalid("Chain::add", &spec.name, "a floating type", spec.dtype));
        }
        check_source(&spec, &shards, &*source)?;
        let mut inner = self.lock();
        if inner.is_linked() || inner.active.is_some() {
            return Err(inner.trouble(&spec.name, "to be added before the first forward", "a chain in use"));
        }
        let (shards, reduce) = (Arc::new(shards), Machine::default());
        let (form, cut) = ((spec.payload, spec.dtype), (Arc::clone(&shards), self.rank));
        let joined = inner.packed().map(|packed| packed.joined()).sum();
        let packed = Packed::new(&inner.gathers.between, form, cut, joined)?.map(Arc::new);
        // Amaxes that were joined without its own are of no use.
        inner.epoch += u64::from(packed.is_some());
        inner.weights.push(Weight { spec, shards, source, packed, main: None, reduce, gradient: None });
        Ok(WeightId(inner.weights.len() - 1))
    }

    /// Replaces the source of a weight's shard, between passes; on every rank where shards travel quantised. Recordings
    /// that there are go on reading the one before it.
    ///
    /// # Errors
    /// A source of another size or type; a pass that runs; a weight that there is not.
    pub fn replace(&self, id: WeightId, source: Arc<dyn ShardSource<D>>) -> Result<()> {
        let mut inner = self.lock();
        let weight = inner.weight(id)?;
        check_source(&weight.spec, &weight.shards, &*source)?;
        if inner.active.is_some() {
            return Err(inner.trouble(&weight.spec.name, "to be replaced between passes", "a pass that runs"));
        }
        inner.weights[id.0].source = source;
        inner.epoch += 1;
        Ok(())
    }

    /// What each gradient is multiplied by.
    pub(super) fn factor(&self) -> f64 {
        match self.options.scale {
            Scale::Sum => 1.0,
            Scale::Mean => 1.0 / (self.ranks * self.options.replicas) as f64,
        }
    }

    /// The state is consistent between statements that can panic, so a poisoned lock carries no information.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: ShardDevice> Inner<D> {
    pub fn is_linked(&self) -> bool {
        !self.steps[0].is_empty()
    }

    pub fn trouble(&self, weight: &str, expected: &str, found: &str) -> Error {
        Error::WeightState { call: CALL, weight: weight.into(), expected: expected.into(), found: found.into() }
    }

    /// The lane of reductions.
    pub fn reductions(&self) -> &Lane<D> {
        self.apart.as_ref().unwrap_or(&self.gathers)
    }

    /// Weights that travel quantised.
    pub fn packed(&self) -> impl Iterator<Item = &Arc<Packed<D>>> {
        self.weights.iter().filter_map(|weight| weight.packed.as_ref())
    }

    pub fn weight(&self, id: WeightId) -> Result<&Weight<D>> {
        let there = format!("one of {}", self.weights.len());
        self.weights.get(id.0).ok_or_else(|| Error::invalid(CALL, "weight", there, id.0))
    }

    /// Key of a weight's buffers; of equal keys but for the parity, one buffer serves in turn.
    pub fn key(&self, weight: usize, usage: Usage, parity: usize) -> Key {
        let weight = &self.weights[weight];
        Key { dims: weight.shards.gathered_dims().to_vec(), dtype: weight.spec.dtype, usage, parity }
    }

    /// Key of the buffer that a weight is read from.
    pub fn read_key(&self, weight: usize, parity: usize) -> Key {
        let apart = self.gathers.has_memory && self.weights[weight].packed.is_some();
        self.key(weight, if apart { Usage::Unpacked } else { Usage::Gathered }, parity)
    }

    /// The same of the buffer for what arrives of it, if it travels quantised.
    pub fn arrived_key(&self, weight: usize, parity: usize) -> Option<Key> {
        let dims = vec![self.weights[weight].packed.as_ref()?.bytes()];
        Some(Key { dims, dtype: crate::DType::U8, usage: Usage::Arrived, parity })
    }
}

fn check_source<D: ShardDevice>(spec: &WeightSpec, shards: &Shards, source: &dyn ShardSource<D>) -> Result<()> {
    source.read(&mut |shard| {
        Error::check_shape("Chain", &spec.name, &shards.shard_dims(), shard.dims())?;
        Error::check_dtype("Chain", &spec.name, spec.dtype, shard.dtype())
    })
}

/// Finds the first option in which the ranks differ: one all-gather.
fn compare<D: ShardDevice>(
    device: &D,
    (comm, reduce): (&mut dyn Communicator<D>, &dyn Communicator<D>),
    options: &EtpOptions,
) -> Result<()> {
    let device = &comm.device().unwrap_or(device).clone();
    // The last four decide the order of the lanes' jobs.
    let names = ["pad", "reduction", "scale", "replicas", "in_turn", "prefetch", "ahead", "copies_beside"];
    let pairwise = options.reduction == Reduction::Pairwise;
    let mean = options.scale == Scale::Mean;
    let (replicas, in_turn, prefetch) =
        (options.replicas as u64, u64::from(options.in_turn), u64::from(options.prefetch));
    let ahead = if options.prefetch { options.ahead as u64 } else { 0 };
    let beside = u64::from(comm.copies_beside()) + 2 * u64::from(reduce.copies_beside());
    let own = [options.pad as u64, u64::from(pairwise), u64::from(mean), replicas, in_turn, prefetch, ahead, beside];
    let all = told(device, comm, Tag { layer: 0, op: Op::Init, sequence: 0 }, &own)?;
    for (i, (field, value)) in names.into_iter().zip(own).enumerate() {
        let theirs = all.iter().skip(i).step_by(names.len());
        if let Some((peer, other)) = theirs.enumerate().find(|(_, other)| **other != value) {
            let (field, rank) = (field.to_string(), comm.rank());
            let (value, peer_value) = (value.to_string(), other.to_string());
            return Err(Error::ConfigMismatch { field, rank, value, peer, peer_value });
        }
    }
    Ok(())
}
