//! Weights in: gathers, started one step ahead, and the memory that holds them.

use std::fmt;
use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorRef};
use crate::weights::{AcquiredWeight, WeightGuard, WeightSource};

use crate::etp::buffers::cache::{Buffer, BufferId, BufferUsage};
use crate::etp::buffers::stream_pair::TransferBuffer;
use crate::etp::chain::collective_state::{ActivePass, CollectiveState, PendingGather};
use crate::etp::chain::microbatches::other_passes;
use crate::etp::chain::schedule::Acquisition;
use crate::etp::chain::{Chain, ChainState, UseState};
use crate::etp::collective::{Collective, GatherInput};
use crate::etp::shards::in_place;
use crate::etp::shards::quantized::{GatheredShards, QuantizedShard};
use crate::etp::{CALL, Payload, Phase, ShardDevice, Shards, WeightId};

/// In place of a pass's number: no pass, but the whole weight.
const NO_PASS: u64 = 0;

/// A sharded weight as a layer takes it: gathered when it is acquired, let go when the guard is dropped.
pub struct ShardedWeight<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    id: WeightId,
    shards: Arc<Shards>,
    dtype: DType,
    backward: bool,
}

impl<D: ShardDevice> ShardedWeight<'_, D> {
    /// The same for a forward that no backward goes back through, as nothing tracks gradients there: frozen layers
    /// before the first that is trained. A backward leaves out what the last forward before it acquired so. All ranks
    /// say it of the same uses.
    pub fn without_backward(self) -> Self {
        self.with_backward(false)
    }

    pub(crate) fn with_backward(self, backward: bool) -> Self {
        Self { backward, ..self }
    }
}

impl<D: ShardDevice> fmt::Debug for ShardedWeight<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardedWeight<{:?} {:?}>", self.id, self.shards.dims())
    }
}

impl<D: ShardDevice> WeightSource<D> for ShardedWeight<'_, D> {
    fn dims(&self) -> &[usize] {
        self.shards.dims()
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn is_gathered(&self) -> bool {
        true
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        let mut inner = self.chain.enter(CALL)?;
        let options = &self.chain.options;
        let ahead = if options.prefetch { options.ahead } else { 0 };
        let (buffer, step, serial) = inner.acquire(self.id, ahead, self.backward)?;
        let shards = Arc::clone(&self.shards);
        let hold = GatheredWeight { chain: self.chain, buffer: Some(buffer), shards, step, serial };
        Ok(WeightGuard::acquired(Box::new(hold), None))
    }
}

/// A gathered weight in use.
struct GatheredWeight<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    buffer: Option<Buffer<D>>,
    shards: Arc<Shards>,
    step: Acquisition,
    serial: u64,
}

impl<D: ShardDevice> fmt::Debug for GatheredWeight<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GatheredWeight<{:?}>", self.step)
    }
}

impl<D: ShardDevice> AcquiredWeight<D> for GatheredWeight<'_, D> {
    fn tensor(&self) -> Result<TensorRef<'_, D>> {
        let inner = self.chain.lock();
        let now = inner.active.map(|active| active.serial);
        match &self.buffer {
            Some(buffer) if now == Some(self.serial) => self.shards.strip(buffer.tensor.view()),
            _ => {
                let now = now.map_or("after it".to_string(), |now| format!("in pass {now}"));
                let weight = inner.uses.get(self.step.node).map_or(0, |node| node.weight);
                let name = inner.weights.get(weight).map_or("", |weight| &weight.spec.name);
                Err(inner.order_error(name, &format!("a read in pass {}, which gathered it", self.serial), &now))
            }
        }
    }
}

impl<D: ShardDevice> Drop for GatheredWeight<'_, D> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.chain.lock().release(buffer, self.step, self.serial);
        }
    }
}

impl<D: ShardDevice> Chain<D> {
    /// A weight as a layer takes it.
    ///
    /// # Errors
    /// A weight that there is not.
    pub fn source(&self, id: WeightId) -> Result<ShardedWeight<'_, D>> {
        let inner = self.lock();
        let weight = inner.weight(id)?;
        let (shards, dtype) = (Arc::clone(&weight.shards), weight.spec.dtype);
        Ok(ShardedWeight { chain: self, id, shards, dtype, backward: true })
    }

    /// The whole weight, to be saved (collective), between passes.
    ///
    /// # Errors
    /// A pass that runs; the collective's.
    pub fn whole(&self, id: WeightId) -> Result<Tensor<D>> {
        let mut inner = self.lock_outside_capture("Chain::whole")?;
        let weight = inner.weight(id)?;
        let (shards, dtype) = (Arc::clone(&weight.shards), weight.spec.dtype);
        if inner.active.is_some() {
            return Err(inner.order_error(&weight.spec.name, "to be read whole between passes", "a pass that runs"));
        }
        let key = inner.key(id.0, BufferUsage::GatheredWeight, 0);
        let buffer_id = inner.cache.reserve(key);
        // From the shards themselves.
        // Below `Tag::PASSES`.
        let sequence = u64::MAX - 2 - id.0 as u64;
        let gather = WeightGather { buffer_id, arrived: None, sequence, serial: NO_PASS };
        let pending_gather = inner.start(id.0, gather, false)?;
        let buffer = inner.finish_gather(pending_gather)?;
        let copied = shards.strip(buffer.tensor.view()).and_then(|view| {
            let mut whole = Tensor::empty(&self.device, dtype, shards.dims())?;
            self.device.copy(view.data(), whole.view_mut().into_data())?;
            Ok(whole)
        });
        inner.cache.put(buffer);
        copied
    }
}

/// Bits of a payload's number where ranks compare it, below the weight's.
const PAYLOAD_BITS: u32 = 8;

/// A weight's gather, before it is started.
#[derive(Debug, Clone, Copy)]
struct WeightGather {
    /// The buffer that the weight is read from.
    buffer_id: BufferId,
    /// Where its codes arrive, if it is sent quantized.
    arrived: Option<BufferId>,
    /// Of its tag.
    sequence: u64,
    /// Of its pass.
    serial: u64,
}

impl<D: ShardDevice> ChainState<D> {
    /// The buffer of the pass's next weight, gathered, and its step; starts the gathers of those after.
    fn acquire(&mut self, id: WeightId, ahead: usize, backward: bool) -> Result<(Buffer<D>, Acquisition, u64)> {
        let name = self.weight(id)?.spec.name.clone();
        let Some(active) = self.active else {
            return Err(self.order_error(&name, "a pass", "none"));
        };
        if !self.has_order() {
            self.compare_first_use(id.0, active)?;
            let node = self.add_use(id.0, active)?;
            let buffer = self.gather_now(node, active)?;
            self.advance_pass(node, active, backward);
            return Ok((buffer, Acquisition { node, fetch: true, keep: false }, active.serial));
        }
        let steps = &self.steps[active.phase as usize];
        let step = steps.get(active.cursor).copied();
        let expected = step.map(|step| self.uses[step.node].weight);
        let (Some(step), true) = (step, expected == Some(id.0)) else {
            let expected = expected.map_or("the end of the pass", |weight| &self.weights[weight].spec.name);
            let expected = format!("{expected} next, as the first forward had it");
            return Err(self.order_error(&name, &expected, "another order"));
        };
        let buffer = self.arrive(step, active)?;
        self.advance_pass(step.node, active, backward);
        self.run_ahead(active.cursor + 1, ahead, active);
        Ok((buffer, step, active.serial))
    }

    /// Starts the gathers of `ahead` steps of the pass from the `first` on.
    pub fn run_ahead(&mut self, first: usize, ahead: usize, active: ActivePass) {
        let steps = &self.steps[active.phase as usize];
        let next = steps.iter().skip(first).take(ahead).filter(|next| next.fetch).map(|next| next.node);
        for node in next.collect::<Vec<usize>>() {
            // In the order of their use, on every rank.
            if !self.ahead(node, active) {
                break;
            }
        }
    }

    /// The pass is one acquisition further.
    fn advance_pass(&mut self, node: usize, active: ActivePass, backward: bool) {
        let of = &mut self.uses[node];
        of.holder = active.serial;
        if active.phase == Phase::Forward && of.backward != backward {
            (of.backward, self.other_backward) = (backward, true);
        }
        if let Some(active) = &mut self.active {
            active.cursor += 1;
        }
    }

    /// Refuses, on every rank, another weight than the other ranks acquire, and one that ranks send in different payloads,
    /// before anything of it travels: two of either can have as many bytes, and codes of one would be read as the other's.
    /// In the first forward alone, which waits for every gather anyway.
    fn compare_first_use(&self, weight: usize, active: ActivePass) -> Result<()> {
        let ((rank, ranks), spec) = (self.gathers.rank, &self.weights[weight].spec);
        if ranks == 1 {
            return Ok(());
        }
        let own = (weight as u64) << PAYLOAD_BITS | spec.payload.number();
        let all = self.gathers.compare(self.first_use_tag(weight, active), own).map_err(other_passes)?;
        // Payloads of different weights tell nothing.
        let differs = |shift: u32| all.iter().position(|other| other >> shift != own >> shift);
        if let Some(peer) = differs(PAYLOAD_BITS) {
            let (field, value) = ("weight whose turn it is".to_string(), spec.name.clone());
            let number = all[peer] >> PAYLOAD_BITS;
            let theirs = usize::try_from(number).ok().and_then(|number| self.weights.get(number));
            let peer_value = theirs.map_or_else(|| format!("number {number}"), |weight| weight.spec.name.clone());
            return Err(Error::ConfigMismatch { call: CALL, field, rank, value, peer, peer_value });
        }
        let Some(peer) = differs(0) else { return Ok(()) };
        let (field, value) = (format!("payload of {}", spec.name), format!("{:?}", spec.payload));
        let number = all[peer] & ((1 << PAYLOAD_BITS) - 1);
        let theirs = Payload::of_number(number);
        let peer_value = theirs.map_or_else(|| format!("number {number}"), |payload| format!("{payload:?}"));
        Err(Error::ConfigMismatch { call: CALL, field, rank, value, peer, peer_value })
    }

    /// Tag of what ranks compare before a use in the first forward.
    fn first_use_tag(&self, weight: usize, active: ActivePass) -> Tag {
        let sequence = active.number << 32 | self.uses.len() as u64;
        Tag { layer: self.weights[weight].spec.layer, op: Op::Init, sequence }
    }

    /// One more use in the first forward.
    fn add_use(&mut self, weight: usize, active: ActivePass) -> Result<usize> {
        let buffer_id = self.reserve_any(weight, active)?;
        let arrived = self.arrived_key(weight, 0).map(|key| self.cache.reserve(key));
        let (state, pending_gather, kept) = Default::default();
        self.uses.push(UseState { weight, state, buffer_id, arrived, pending_gather, kept, holder: 0, backward: true });
        Ok(self.uses.len() - 1)
    }

    /// A buffer where nothing is known of what follows, so that any free one will do. Which are free each rank's guards
    /// decide, and what a failed forward has left; where ranks write each other's memory they settle on one.
    fn reserve_any(&mut self, weight: usize, active: ActivePass) -> Result<BufferId> {
        let together = self.gathers.has_own_memory && self.weights[weight].quantized.is_none();
        let tag = self.first_use_tag(weight, active);
        let mut least = 0;
        loop {
            let (buffer_id, parity) = self.free_from(weight, least);
            if !together {
                return Ok(buffer_id);
            }
            let all = self.gathers.compare(tag, parity as u64)?;
            least = all.iter().fold(parity, |least, other| least.max(*other as usize));
            if all.iter().all(|other| *other as usize == least) {
                return Ok(buffer_id);
            }
        }
    }

    /// The first free buffer from a parity on, and its own.
    fn free_from(&mut self, weight: usize, least: usize) -> (BufferId, usize) {
        let mut parity = least;
        loop {
            let key = self.read_key(weight, parity);
            let buffer_id = self.cache.reserve(key);
            if self.cache.is_free(buffer_id) {
                return (buffer_id, parity);
            }
            parity += 1;
        }
    }

    /// The buffer that a step reads: one that is kept, one under way, or one gathered now.
    fn arrive(&mut self, step: Acquisition, active: ActivePass) -> Result<Buffer<D>> {
        let node = &mut self.uses[step.node];
        if let Some(buffer) = node.kept.take() {
            return Ok(buffer);
        }
        let Some(pending_gather) = node.pending_gather.take() else { return self.gather_now(step.node, active) };
        let serial = pending_gather.serial;
        let landed = self.finish_gather(pending_gather);
        let (node, weights) = (&mut self.uses[step.node], &self.weights);
        let name = &weights[node.weight].spec.name;
        let buffer = landed.inspect_err(|_| node.state.reset())?;
        node.state.transition(CollectiveState::DataReady, name)?;
        if serial == active.serial {
            return Ok(buffer);
        }
        node.state.reset();
        let found = self.order_error(name, &format!("a gather for pass {}", active.serial), &format!("pass {serial}"));
        self.cache.put(buffer);
        Err(found)
    }

    fn gather_now(&mut self, node: usize, active: ActivePass) -> Result<Buffer<D>> {
        let weight = self.uses[node].weight;
        // Checked first: a weight that is still in use must not be gathered over.
        let (at, name) = (&mut self.uses[node], &self.weights[weight].spec.name);
        at.state.transition(CollectiveState::DataReadySync, name)?;
        let gathered = self.begin(node, active, false).and_then(|pending_gather| self.finish_gather(pending_gather));
        gathered.inspect_err(|_| self.uses[node].state.reset())
    }

    /// Starts a later step's gather, if it is not under way; tells whether it is. Where it cannot start, the step
    /// itself gathers, and reports what is wrong; but for want of memory, where collective threads take turns or calls
    /// are captured: that is told in its turn.
    fn ahead(&mut self, node: usize, active: ActivePass) -> bool {
        let at = &self.uses[node];
        if at.state.state() == CollectiveState::AsyncWait {
            return true;
        }
        if at.state.state() != CollectiveState::None || !self.cache.is_free(at.arrived.unwrap_or(at.buffer_id)) {
            return false;
        }
        // On a collective thread of gathers alone it is tried again at its use, in the same place among them; in a
        // capture all collective threads' collectives have one order.
        let again = self.apart.is_some() && self.capture.is_none();
        let Ok(pending_gather) = self.begin(node, active, again) else { return false };
        self.traffic.ahead += 1;
        let (node, weights) = (&mut self.uses[node], &self.weights);
        node.pending_gather = Some(pending_gather);
        // The state is None, as just seen.
        let moved = node.state.transition(CollectiveState::AsyncWait, &weights[node.weight].spec.name);
        debug_assert!(moved.is_ok());
        true
    }

    /// Starts a step's gather; `again`: what cannot be started will be tried again, and the others need not be told.
    fn begin(&mut self, node: usize, active: ActivePass, again: bool) -> Result<PendingGather<D>> {
        let sequence = active.number << 32 | node as u64;
        let at = &self.uses[node];
        let gather = WeightGather { buffer_id: at.buffer_id, arrived: at.arrived, sequence, serial: active.serial };
        self.start(at.weight, gather, again)
    }

    fn start(&mut self, weight: usize, gather: WeightGather, again: bool) -> Result<PendingGather<D>> {
        let WeightGather { buffer_id: own, arrived, sequence, serial } = gather;
        let buffer_id = arrived.unwrap_or(own);
        let tag = Tag { layer: self.weights[weight].spec.layer, op: Op::Weights, sequence };
        let epoch = self.active.map_or(self.epoch, |active| active.epoch);
        let cast = match arrived {
            Some(_) => self.cast(weight, tag, epoch)?,
            None => Ok(()),
        };
        let mut into = match self.gathers.take(&mut self.cache, buffer_id) {
            Ok(into) => into,
            Err(error) if again => return Err(error),
            Err(error) => {
                // The others' next collective would not be this rank's next: it has its turn, and fails.
                let pending = self.gathers.refuse(tag, error);
                return Ok(PendingGather { pending, buffer_id: None, quantized: None, serial });
            }
        };
        let weight = &self.weights[weight];
        let quantized = weight.quantized.clone().filter(|_| arrived.is_some());
        self.traffic.gathers += 1;
        self.traffic.gathered_bytes += into.tensor.bytes() as u64;
        let (shard, ready) = match &quantized {
            _ if self.gathers.has_own_memory => {
                let (compute, rank) = (&self.gathers.streams.compute, self.gathers.rank);
                let place = into.tensor.view_mut();
                let placed = cast.and_then(|()| match &quantized {
                    Some(quantized) => quantized.put(compute, place),
                    None => in_place::place_plain(compute, rank, &*weight.source, place),
                });
                (GatherInput::Placed, placed)
            }
            Some(quantized) => (GatherInput::ShardCodes(Arc::clone(quantized)), cast),
            None => (GatherInput::Plain(Arc::clone(&weight.source)), cast),
        };
        let after = ready.and_then(|()| self.gathers.streams.compute.record_event());
        let into = TransferBuffer::new(into, &self.gathers.streams);
        let pending = self.gathers.enqueue_after(Collective::Gather { tag, shard, into }, after);
        Ok(PendingGather {
            pending,
            buffer_id: Some(buffer_id),
            quantized: quantized.map(|quantized| (quantized, own)),
            serial,
        })
    }

    /// Waits for a gather, and makes a weight of what it brings.
    fn finish_gather(&mut self, mut pending_gather: PendingGather<D>) -> Result<Buffer<D>> {
        let quantized = pending_gather.quantized.take();
        let buffer = self.arrived(pending_gather)?;
        match quantized {
            Some((quantized, buffer_id)) => self.unpack(&quantized, buffer, buffer_id),
            None => Ok(buffer),
        }
    }

    /// Waits for a gather, and takes what it brings as it were sent.
    fn arrived(&mut self, pending_gather: PendingGather<D>) -> Result<Buffer<D>> {
        let (mut buffers, outcome) = self.gathers.receive(pending_gather.pending);
        match (buffers.pop(), outcome) {
            (Some(buffer), Ok(())) => Ok(buffer),
            (buffer, outcome) => Err(other_passes(self.lost(buffer, pending_gather.buffer_id, outcome))),
        }
    }

    /// De-quantizes what has arrived.
    fn unpack(&mut self, quantized: &QuantizedShard<D>, arrived: Buffer<D>, buffer_id: BufferId) -> Result<Buffer<D>> {
        let unpacked = self.cache.take(buffer_id).and_then(|mut into| {
            let shards = GatheredShards { bytes: arrived.tensor.view(), amaxes: self.amaxes_of(quantized.joined()) };
            let done = quantized.dequantize(&self.gathers.streams.compute, shards, into.tensor.view_mut());
            match done {
                Ok(()) => Ok(into),
                Err(error) => {
                    self.cache.put(into);
                    Err(error)
                }
            }
        });
        self.cache.put(arrived);
        unpacked
    }

    /// A guard is dropped: the buffer stays for a later step, or is free.
    fn release(&mut self, buffer: Buffer<D>, step: Acquisition, serial: u64) {
        let current = self.active.is_some_and(|active| active.serial == serial);
        // The order may have been forgotten meanwhile, and learned anew.
        let node = self.uses.get_mut(step.node).filter(|node| node.holder == serial);
        match node {
            Some(node) if current && step.keep => node.kept = Some(buffer),
            node => {
                if let Some(node) = node {
                    node.state.reset();
                }
                self.cache.put(buffer);
            }
        }
    }

    /// Waits for gathers under way and gives up what they bring, and what steps have kept.
    pub fn drop_gathers(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for i in 0..self.uses.len() {
            let node = &mut self.uses[i];
            let (pending_gather, kept) = (node.pending_gather.take(), node.kept.take());
            if pending_gather.is_some() || kept.is_some() {
                node.state.reset();
            }
            if let Some(buffer) = kept {
                self.cache.put(buffer);
            }
            match pending_gather.map(|pending_gather| self.arrived(pending_gather)) {
                Some(Ok(buffer)) => self.cache.put(buffer),
                Some(Err(error)) => outcome = outcome.and(Err(error)),
                None => {}
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests;
