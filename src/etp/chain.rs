//! The chain: a model's sharded weights in the order of their use.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, Op, Tag};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

use super::lane::{Job, Lane};
use super::links::{Link, Step, arrival_parities, gather_parities, gradient_parities, schedule};
use super::packed::Packed;
use super::reduce::{Main, Reducing};
use super::source::ShardSource;
use super::state::{Machine, State};
use super::tickets::{Key, Loan, Ticket, Tickets, Usage};
use super::{Comms, EtpOptions, Phase, Reduction, Scale, ShardDevice, Shards, WeightId, WeightSpec};

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
    pub reductions: Lane<D>,
    /// Gradients under way, the oldest first.
    pub reducing: VecDeque<Reducing<D>>,
    /// Gradients handed in since the ranks last agreed, for tags.
    pub reduced: u64,
    pub traffic: Traffic,
    /// Passes since the ranks last agreed, for tags.
    passes: u64,
    /// Passes so far, to tell one from another.
    serial: u64,
    /// Number of the shards' state: what was cast in another is cast anew.
    pub epoch: u64,
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

/// The pass that runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    pub phase: Phase,
    /// Acquisitions so far.
    pub cursor: usize,
    /// Among the passes on which the ranks agree.
    pub number: u64,
    pub serial: u64,
    /// [`Inner::epoch`] at its beginning, on which the ranks agree wherever in the pass they say that shards have changed.
    pub epoch: u64,
}

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
    /// Shards quantised; in NVFP4 each with one all-reduce of four bytes an expert.
    pub casts: u64,
    /// Reduce-scatters.
    pub reductions: u64,
    /// Bytes of whole gradients, padding included.
    pub reduced_bytes: u64,
    /// Buffers allocated.
    pub allocations: u64,
}

impl<D: ShardDevice> Chain<D> {
    /// An empty chain (collective: options are compared over the ranks).
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on every rank; communicators of different groups; no thread to be had.
    pub fn new(device: D, stream: D::Stream, comms: Comms<D>, options: EtpOptions) -> Result<Self> {
        let Comms { mut gather, reduce } = comms;
        let (rank, ranks) = (gather.rank(), gather.size());
        compare(&device, &mut *gather, &options)?;
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
        let inner = Inner {
            weights: Vec::new(),
            nodes: Vec::new(),
            steps: [Vec::new(), Vec::new()],
            active: None,
            tickets: Tickets::new(device.clone()),
            gathers: Lane::start("gather", &device, gather)?,
            reductions: Lane::start("reduce", &device, reduce)?,
            reducing: VecDeque::new(),
            reduced: 0,
            traffic: Traffic::default(),
            passes: 0,
            serial: 0,
            epoch: 0,
        };
        Ok(Self { device, stream, options, rank, ranks, inner: Mutex::new(inner) })
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
        let packed = Packed::new(&inner.gathers.between.away, form, cut)?.map(Arc::new);
        inner.weights.push(Weight { spec, shards, source, packed, main: None, reduce, gradient: None });
        Ok(WeightId(inner.weights.len() - 1))
    }

    /// Replaces the source of a weight's shard, between passes; on every rank where shards travel quantised.
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

    /// Says, on every rank before the same pass, that shards have changed otherwise than after [`finish`](Self::finish), so that
    /// those which travel quantised are cast anew. Said within a pass, it counts from the next.
    pub fn changed(&self) {
        self.lock().epoch += 1;
    }

    /// Begins a pass over the model. The first forward links the chain: every gather of it is waited for.
    ///
    /// # Errors
    /// A pass that was not ended (after an error: [`recover`](Self::recover)); a backward before any forward.
    pub fn begin(&self, phase: Phase) -> Result<()> {
        self.device.refuse_recording("Chain::begin")?;
        let mut inner = self.lock();
        if let Some(active) = inner.active {
            let found = format!("a {:?} pass that was not ended", active.phase);
            return Err(inner.trouble("(chain)", "no pass", &found));
        }
        if phase == Phase::Backward && !inner.is_linked() {
            return Err(inner.trouble("(chain)", "a forward before a backward", "none"));
        }
        inner.passes += 1;
        inner.serial += 1;
        let (number, serial, epoch) = (inner.passes, inner.serial, inner.epoch);
        inner.active = Some(Active { phase, cursor: 0, number, serial, epoch });
        Ok(())
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// No pass; weights that the pass has not used.
    pub fn end(&self) -> Result<()> {
        let mut inner = self.lock();
        let Some(active) = inner.active else { return Err(inner.trouble("(chain)", "a pass", "none")) };
        if !inner.is_linked() {
            inner.link(self.options.ahead);
        }
        let expected = inner.steps[active.phase as usize].len();
        if active.cursor != expected {
            let found = format!("{} of {expected} weights used", active.cursor);
            return Err(inner.trouble("(chain)", "all weights of the linked order used", &found));
        }
        inner.active = None;
        Ok(())
    }

    /// Forgets the linked order, for a model that has changed; the next forward links anew.
    ///
    /// # Errors
    /// A pass that runs.
    pub fn relink(&self) -> Result<()> {
        let mut inner = self.lock();
        if inner.active.is_some() {
            return Err(inner.trouble("(chain)", "no pass", "one that runs"));
        }
        inner.settle(self)?;
        inner.unlink();
        Ok(())
    }

    /// Waits for what is under way: gathers are given up and repeated where they are needed, gradients reach their main
    /// gradient. All ranks drain at the same point.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn drain(&self) -> Result<()> {
        self.device.refuse_recording("Chain::drain")?;
        let mut inner = self.lock();
        let gathers = inner.drop_gathers();
        gathers.and(inner.settle(self))
    }

    /// After a failed step, on every rank (collective): gives up the pass, all that is under way and the main
    /// gradients. Ranks that wait in a collective of the step are told `reason`. The chain works on afterwards, unless
    /// a rank is lost, or the ranks are processes over NCCL: there a refusal ends the communicators, and the chain with them.
    ///
    /// # Errors
    /// A rank that is lost.
    pub fn recover(&self, reason: Option<&Error>) -> Result<()> {
        self.device.refuse_recording("Chain::recover")?;
        let mut inner = self.lock();
        let job = |op| {
            let tag = Tag { layer: 0, op, sequence: u64::MAX };
            Job::Recover { tag, reason: reason.map(ToString::to_string) }
        };
        // Both before any waiting, or one lane could wait for a rank that waits for the other.
        let waiting = [inner.gathers.give(job(Op::Weights)), inner.reductions.give(job(Op::GradReduce))];
        // Their errors are the failure that this is the end of.
        let _ = inner.drop_gathers();
        inner.give_up_gradients();
        inner.active = None;
        (inner.passes, inner.reduced) = (0, 0);
        // Some ranks may have cast what others have not.
        inner.epoch += 1;
        if !inner.is_linked() {
            inner.unlink();
        }
        waiting.into_iter().map(|pending| pending.wait().outcome).fold(Ok(()), Result::and)
    }

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

    /// Memory that the chain holds.
    pub fn memory(&self) -> Memory {
        let inner = self.lock();
        Memory {
            main: inner.weights.iter().filter_map(|w| w.main.as_ref()).map(|main| main.sums.bytes()).sum(),
            gathered: inner.tickets.bytes(Usage::Gathered),
            quantised: inner.packed().map(|packed| packed.kept()).sum(),
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

    /// Drops buffers that are not in use; later passes allocate them anew.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.tickets.clear();
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

    /// Weights that travel quantised.
    fn packed(&self) -> impl Iterator<Item = &Arc<Packed<D>>> {
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

    /// The same of the buffer for what arrives of it, if it travels quantised.
    pub fn arrived_key(&self, weight: usize, parity: usize) -> Option<Key> {
        let dims = vec![self.weights[weight].packed.as_ref()?.bytes()];
        Some(Key { dims, dtype: crate::DType::U8, usage: Usage::Arrived, parity })
    }

    /// Makes what the first forward met the order.
    fn link(&mut self, ahead: usize) {
        let of = |node: &Node<D>| {
            let spec = &self.weights[node.weight].spec;
            Link { weight: node.weight, layer: spec.layer, recompute: spec.recompute }
        };
        let links: Vec<Link> = self.nodes.iter().map(of).collect();
        let same = |a: usize, b: usize| {
            let key = |i: usize| self.key(links[i].weight, Usage::Gathered, 0);
            key(a) == key(b)
        };
        let same_arrivals = |a: usize, b: usize| {
            let key = |i: usize| self.arrived_key(links[i].weight, 0);
            key(a) == key(b)
        };
        let arrivals = arrival_parities(&links, ahead, same_arrivals);
        // What arrives quantised needs no room for the weight itself before its turn.
        let packed = self.weights.iter().all(|weight| weight.packed.is_some());
        let ahead = if packed { 1 } else { ahead };
        let (gather, gradient) = (gather_parities(&links, ahead, same), gradient_parities(&links, D::ENQUEUES, same));
        for (i, link) in links.iter().enumerate() {
            let key = self.key(link.weight, Usage::Gathered, gather[i]);
            self.nodes[i].ticket = self.tickets.reserve(key);
            let key = self.arrived_key(link.weight, arrivals[i]);
            self.nodes[i].arrived = key.map(|key| self.tickets.reserve(key));
            let key = self.key(link.weight, Usage::Gradient, gradient[i]);
            let ticket = self.tickets.reserve(key);
            // A weight that is used twice has one gradient buffer.
            self.weights[link.weight].gradient.get_or_insert(ticket);
        }
        self.steps = [Phase::Forward, Phase::Backward].map(|phase| schedule(&links, phase));
    }

    fn unlink(&mut self) {
        self.nodes.clear();
        self.steps = [Vec::new(), Vec::new()];
        self.weights.iter_mut().for_each(|weight| weight.gradient = None);
    }
}

fn check_source<D: ShardDevice>(spec: &WeightSpec, shards: &Shards, source: &dyn ShardSource<D>) -> Result<()> {
    source.read(&mut |shard| {
        Error::check_shape("Chain", &spec.name, &shards.shard_dims(), shard.dims())?;
        Error::check_dtype("Chain", &spec.name, spec.dtype, shard.dtype())
    })
}

/// Finds the first option in which the ranks differ: one all-gather.
fn compare<D: ShardDevice>(device: &D, comm: &mut dyn Communicator<D>, options: &EtpOptions) -> Result<()> {
    let device = &comm.device().unwrap_or(device).clone();
    let stream = &device.own_stream();
    let names = ["pad", "reduction", "scale", "replicas"];
    let pairwise = options.reduction == Reduction::Pairwise;
    let mean = options.scale == Scale::Mean;
    let own = [options.pad as u64, u64::from(pairwise), u64::from(mean), options.replicas as u64];
    let bytes: Vec<u8> = own.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let mut send = Tensor::empty(device, crate::DType::U8, &[bytes.len()])?;
    device.upload(stream, &bytes, send.view_mut())?;
    let mut recv = Tensor::empty(device, crate::DType::U8, &[comm.size(), bytes.len()])?;
    comm.all_gather(Tag { layer: 0, op: Op::Init, sequence: 0 }, send.view(), recv.view_mut())?;
    let all = device.download(stream, recv.view())?;
    let all: Vec<u64> = all.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect();
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
