//! Weights in: gathers, started one step ahead, and the memory that holds them.

use std::fmt;
use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Tensor, TensorRef};
use crate::weights::{Lease, WeightGuard, WeightSource};

use super::beside::Sent;
use super::chain::{CALL, Chain, Inner, Node};
use super::lane::{Job, Pending, Travels};
use super::links::Step;
use super::packed::Packed;
use super::pass::Active;
use super::placed;
use super::state::{Machine, State};
use super::tickets::{Loan, Ticket, Usage};
use super::{ShardDevice, Shards, WeightId};

/// In place of a pass's number: no pass, but the whole weight.
const WHOLE: u64 = 0;

/// A gather under way.
pub(super) struct Flight<D: ShardDevice> {
    pending: Pending<D>,
    /// Of the buffer that is filled; none of a refusal in its place.
    ticket: Option<Ticket>,
    /// If that is not the weight: what makes it one, and the weight's own.
    packed: Option<(Arc<Packed<D>>, Ticket)>,
    /// The pass it is for.
    serial: u64,
}

/// A sharded weight as a layer takes it: gathered when it is acquired, let go when the guard is dropped.
pub struct Gathered<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    id: WeightId,
    shards: Arc<Shards>,
    dtype: DType,
}

impl<D: ShardDevice> fmt::Debug for Gathered<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gathered<{:?} {:?}>", self.id, self.shards.dims())
    }
}

impl<D: ShardDevice> WeightSource<D> for Gathered<'_, D> {
    fn dims(&self) -> &[usize] {
        self.shards.dims()
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }

    fn acquire(&self, stream: &D::Stream) -> Result<WeightGuard<'_, D>> {
        self.chain.device.in_order(CALL, stream)?;
        let mut inner = self.chain.enter(CALL)?;
        let options = &self.chain.options;
        let ahead = if options.prefetch { options.ahead } else { 0 };
        let (loan, step, serial) = inner.acquire(self.id, ahead)?;
        let shards = Arc::clone(&self.shards);
        let hold = Hold { chain: self.chain, loan: Some(loan), shards, step, serial };
        Ok(WeightGuard::leased(Box::new(hold), None))
    }
}

/// A gathered weight in use.
struct Hold<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    loan: Option<Loan<D>>,
    shards: Arc<Shards>,
    step: Step,
    serial: u64,
}

impl<D: ShardDevice> fmt::Debug for Hold<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hold<{:?}>", self.step)
    }
}

impl<D: ShardDevice> Lease<D> for Hold<'_, D> {
    fn tensor(&self) -> Result<TensorRef<'_, D>> {
        let inner = self.chain.lock();
        let now = inner.active.map(|active| active.serial);
        match &self.loan {
            Some(loan) if now == Some(self.serial) => self.shards.strip(loan.tensor.view()),
            _ => {
                let now = now.map_or("after it".to_string(), |now| format!("in pass {now}"));
                let weight = inner.nodes.get(self.step.node).map_or(0, |node| node.weight);
                let name = inner.weights.get(weight).map_or("", |weight| &weight.spec.name);
                Err(inner.trouble(name, &format!("a read in pass {}, which gathered it", self.serial), &now))
            }
        }
    }
}

impl<D: ShardDevice> Drop for Hold<'_, D> {
    fn drop(&mut self) {
        if let Some(loan) = self.loan.take() {
            self.chain.lock().release(loan, self.step, self.serial);
        }
    }
}

impl<D: ShardDevice> Chain<D> {
    /// A weight as a layer takes it.
    ///
    /// # Errors
    /// A weight that there is not.
    pub fn source(&self, id: WeightId) -> Result<Gathered<'_, D>> {
        let inner = self.lock();
        let weight = inner.weight(id)?;
        Ok(Gathered { chain: self, id, shards: Arc::clone(&weight.shards), dtype: weight.spec.dtype })
    }

    /// The whole weight, to be saved (collective), between passes.
    ///
    /// # Errors
    /// A pass that runs; the collective's.
    pub fn whole(&self, id: WeightId) -> Result<Tensor<D>> {
        let mut inner = self.not_recorded("Chain::whole")?;
        let weight = inner.weight(id)?;
        let (shards, dtype) = (Arc::clone(&weight.shards), weight.spec.dtype);
        if inner.active.is_some() {
            return Err(inner.trouble(&weight.spec.name, "to be read whole between passes", "a pass that runs"));
        }
        let key = inner.key(id.0, Usage::Gathered, 0);
        let ticket = inner.tickets.reserve(key);
        // From the shards themselves.
        let flight = inner.start(id.0, (ticket, None), (u64::MAX - 1 - id.0 as u64, WHOLE), false)?;
        let loan = inner.land(flight)?;
        let copied = shards.strip(loan.tensor.view()).and_then(|view| {
            let mut whole = Tensor::empty(&self.device, dtype, shards.dims())?;
            self.device.copy(view.data(), whole.view_mut().into_data())?;
            Ok(whole)
        });
        inner.tickets.put(loan);
        copied
    }
}

impl<D: ShardDevice> Inner<D> {
    /// The buffer of the pass's next weight, gathered, and its step; starts the gathers of those after.
    fn acquire(&mut self, id: WeightId, ahead: usize) -> Result<(Loan<D>, Step, u64)> {
        let name = self.weight(id)?.spec.name.clone();
        let Some(active) = self.active else {
            return Err(self.trouble(&name, "a pass", "none"));
        };
        if !self.is_linked() {
            let node = self.meet(id.0, active)?;
            let loan = self.gather_now(node, active)?;
            self.hold(node, active);
            return Ok((loan, Step { node, fetch: true, keep: false }, active.serial));
        }
        let steps = &self.steps[active.phase as usize];
        let step = steps.get(active.cursor).copied();
        let expected = step.map(|step| self.nodes[step.node].weight);
        let (Some(step), true) = (step, expected == Some(id.0)) else {
            let expected = expected.map_or("the end of the pass", |weight| &self.weights[weight].spec.name);
            let expected = format!("{expected} next, as the first forward had it");
            return Err(self.trouble(&name, &expected, "another order"));
        };
        let loan = self.arrive(step, active)?;
        self.hold(step.node, active);
        self.run_ahead((active.cursor + 1, ahead), active);
        Ok((loan, step, active.serial))
    }

    /// Starts the gathers of so many steps of the pass from the `first` on.
    pub fn run_ahead(&mut self, (first, ahead): (usize, usize), active: Active) {
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
    fn hold(&mut self, node: usize, active: Active) {
        self.nodes[node].holder = active.serial;
        if let Some(active) = &mut self.active {
            active.cursor += 1;
        }
    }

    /// One more use in the first forward.
    fn meet(&mut self, weight: usize, active: Active) -> Result<usize> {
        let ticket = self.unforeseen(weight, active)?;
        let arrived = self.arrived_key(weight, 0).map(|key| self.tickets.reserve(key));
        let state = Machine::default();
        self.nodes.push(Node { weight, state, ticket, arrived, flight: None, kept: None, holder: 0 });
        Ok(self.nodes.len() - 1)
    }

    /// A buffer where nothing is known of what follows, so that any free one will do. Which are free each rank's guards
    /// decide, and what a failed forward has left; where ranks write each other's memory they settle on one.
    fn unforeseen(&mut self, weight: usize, active: Active) -> Result<Ticket> {
        let together = self.gathers.has_memory && self.weights[weight].packed.is_none();
        let layer = self.weights[weight].spec.layer;
        let tag = Tag { layer, op: Op::Init, sequence: active.number << 32 | self.nodes.len() as u64 };
        let mut least = 0;
        loop {
            let (ticket, parity) = self.free_from(weight, least);
            if !together {
                return Ok(ticket);
            }
            let all = self.gathers.compare(tag, parity as u64)?;
            least = all.iter().fold(parity, |least, other| least.max(*other as usize));
            if all.iter().all(|other| *other as usize == least) {
                return Ok(ticket);
            }
        }
    }

    /// The first free buffer from a parity on, and its own.
    fn free_from(&mut self, weight: usize, least: usize) -> (Ticket, usize) {
        let mut parity = least;
        loop {
            let key = self.read_key(weight, parity);
            let ticket = self.tickets.reserve(key);
            if self.tickets.is_free(ticket) {
                return (ticket, parity);
            }
            parity += 1;
        }
    }

    /// The buffer that a step reads: one that is kept, one under way, or one gathered now.
    fn arrive(&mut self, step: Step, active: Active) -> Result<Loan<D>> {
        let node = &mut self.nodes[step.node];
        if let Some(loan) = node.kept.take() {
            return Ok(loan);
        }
        let Some(flight) = node.flight.take() else { return self.gather_now(step.node, active) };
        let serial = flight.serial;
        let landed = self.land(flight);
        let (node, weights) = (&mut self.nodes[step.node], &self.weights);
        let name = &weights[node.weight].spec.name;
        let loan = landed.inspect_err(|_| node.state.reset())?;
        node.state.go(State::DataReady, name)?;
        if serial == active.serial {
            return Ok(loan);
        }
        node.state.reset();
        let found = self.trouble(name, &format!("a gather for pass {}", active.serial), &format!("pass {serial}"));
        self.tickets.put(loan);
        Err(found)
    }

    fn gather_now(&mut self, node: usize, active: Active) -> Result<Loan<D>> {
        let weight = self.nodes[node].weight;
        // Checked first: a weight that is still in use must not be gathered over.
        let (at, name) = (&mut self.nodes[node], &self.weights[weight].spec.name);
        at.state.go(State::DataReadySync, name)?;
        let gathered = self.begin(node, active, false).and_then(|flight| self.land(flight));
        gathered.inspect_err(|_| self.nodes[node].state.reset())
    }

    /// Starts a later step's gather, if it is not under way; tells whether it is. Where it cannot start, the step itself
    /// gathers, and reports what is wrong; but for want of memory, where lanes take turns or calls are recorded: that is
    /// told in its turn.
    fn ahead(&mut self, node: usize, active: Active) -> bool {
        let at = &self.nodes[node];
        if at.state.state() == State::AsyncWait {
            return true;
        }
        if at.state.state() != State::None || !self.tickets.is_free(at.arrived.unwrap_or(at.ticket)) {
            return false;
        }
        // On a lane of gathers alone it is tried again at its use, in the same place among them; in a recording all lanes'
        // jobs have one order.
        let again = self.apart.is_some() && self.recording.is_none();
        let Ok(flight) = self.begin(node, active, again) else { return false };
        self.traffic.ahead += 1;
        let (node, weights) = (&mut self.nodes[node], &self.weights);
        node.flight = Some(flight);
        // The state is None, as just seen.
        let moved = node.state.go(State::AsyncWait, &weights[node.weight].spec.name);
        debug_assert!(moved.is_ok());
        true
    }

    /// Starts a step's gather; `again`: what cannot be started will be tried again, and the others need not be told.
    fn begin(&mut self, node: usize, active: Active, again: bool) -> Result<Flight<D>> {
        let sequence = active.number << 32 | node as u64;
        let at = &self.nodes[node];
        self.start(at.weight, (at.ticket, at.arrived), (sequence, active.serial), again)
    }

    fn start(
        &mut self,
        weight: usize,
        (own, arrived): (Ticket, Option<Ticket>),
        (sequence, serial): (u64, u64),
        again: bool,
    ) -> Result<Flight<D>> {
        let ticket = arrived.unwrap_or(own);
        let tag = Tag { layer: self.weights[weight].spec.layer, op: Op::Weights, sequence };
        let epoch = self.active.map_or(self.epoch, |active| active.epoch);
        let cast = match arrived {
            Some(_) => self.cast(weight, (tag, epoch))?,
            None => Ok(()),
        };
        let mut into = match self.gathers.take(&mut self.tickets, ticket) {
            Ok(into) => into,
            Err(error) if again => return Err(error),
            Err(error) => {
                // The others' next job would not be this rank's next: it has its turn, and fails.
                let pending = self.gathers.refuse(tag, error);
                return Ok(Flight { pending, ticket: None, packed: None, serial });
            }
        };
        let weight = &self.weights[weight];
        let packed = weight.packed.clone().filter(|_| arrived.is_some());
        self.traffic.gathers += 1;
        self.traffic.gathered_bytes += into.tensor.bytes() as u64;
        let (shard, ready) = match &packed {
            _ if self.gathers.has_memory => {
                let (home, rank) = (&self.gathers.between.home, self.gathers.rank);
                let place = into.tensor.view_mut();
                let placed = cast.and_then(|()| match &packed {
                    Some(packed) => packed.put(home, place),
                    None => placed::place_plain(home, rank, &*weight.source, place),
                });
                (Travels::Placed, placed)
            }
            Some(packed) => (Travels::Cast(Arc::clone(packed)), cast),
            None => (Travels::Plain(Arc::clone(&weight.source)), cast),
        };
        let after = ready.and_then(|()| self.gathers.between.home.mark());
        let into = Sent::new(into, &self.gathers.between);
        let pending = self.gathers.give_after(Job::Gather { tag, shard, into }, after);
        Ok(Flight { pending, ticket: Some(ticket), packed: packed.map(|packed| (packed, own)), serial })
    }

    /// Waits for a gather, and makes a weight of what it brings.
    fn land(&mut self, mut flight: Flight<D>) -> Result<Loan<D>> {
        let packed = flight.packed.take();
        let loan = self.arrived(flight)?;
        match packed {
            Some((packed, ticket)) => self.unpack(&packed, loan, ticket),
            None => Ok(loan),
        }
    }

    /// Waits for a gather, and takes what it brings as it travelled.
    fn arrived(&mut self, flight: Flight<D>) -> Result<Loan<D>> {
        let (mut loans, outcome) = self.gathers.receive(flight.pending);
        match (loans.pop(), outcome) {
            (Some(loan), Ok(())) => Ok(loan),
            (loan, outcome) => Err(self.lost(loan, flight.ticket, outcome)),
        }
    }

    /// De-quantises what has arrived.
    fn unpack(&mut self, packed: &Packed<D>, arrived: Loan<D>, ticket: Ticket) -> Result<Loan<D>> {
        let unpacked = self.tickets.take(ticket).and_then(|mut into| {
            let from = (arrived.tensor.view(), self.amaxes_of(packed.joined()));
            let done = packed.dequantise(&self.gathers.between.home, from, into.tensor.view_mut());
            match done {
                Ok(()) => Ok(into),
                Err(error) => {
                    self.tickets.put(into);
                    Err(error)
                }
            }
        });
        self.tickets.put(arrived);
        unpacked
    }

    /// A guard is dropped: the buffer stays for a later step, or is free.
    fn release(&mut self, loan: Loan<D>, step: Step, serial: u64) {
        let current = self.active.is_some_and(|active| active.serial == serial);
        // The order may have been forgotten meanwhile, and learnt anew.
        let node = self.nodes.get_mut(step.node).filter(|node| node.holder == serial);
        match node {
            Some(node) if current && step.keep => node.kept = Some(loan),
            node => {
                if let Some(node) = node {
                    node.state.reset();
                }
                self.tickets.put(loan);
            }
        }
    }

    /// Waits for gathers under way and gives up what they bring, and what steps have kept.
    pub fn drop_gathers(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for i in 0..self.nodes.len() {
            let node = &mut self.nodes[i];
            let (flight, kept) = (node.flight.take(), node.kept.take());
            if flight.is_some() || kept.is_some() {
                node.state.reset();
            }
            if let Some(loan) = kept {
                self.tickets.put(loan);
            }
            match flight.map(|flight| self.arrived(flight)) {
                Some(Ok(loan)) => self.tickets.put(loan),
                Some(Err(error)) => outcome = outcome.and(Err(error)),
                None => {}
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::super::rig::ranks;
    use super::super::tickets::Key;
    use super::super::{EtpOptions, Payload, Phase, Shard, ShardSource, WeightSpec};
    use super::*;
    use crate::cpu::Cpu;
    use crate::dtype::DType;
    use crate::error::{CommError, Error};

    const DIMS: [usize; 2] = [4, 16];

    /// What both ranks' next gather comes to where rank 1 has no room for a usage of its buffers.
    fn without_room(payload: Payload, usage: Usage, in_turn: bool) -> Vec<[Result<()>; 2]> {
        ranks(2, |comms| {
            let options = EtpOptions { pad: 0, in_turn, ..EtpOptions::default() };
            let chain = Chain::new(Cpu::new(), (), comms, options).unwrap();
            let shard = Shard::new(Tensor::zeros(&Cpu::new(), DType::F32, &[2, 16]).unwrap());
            let mut spec = WeightSpec::new("w", 0, &DIMS, DType::F32);
            spec.payload = payload;
            let id = chain.add(spec, Arc::new(shard) as Arc<dyn ShardSource<Cpu>>).unwrap();
            chain.begin(Phase::Forward).unwrap();
            let mut inner = chain.lock();
            let active = inner.active.unwrap();
            let node = inner.meet(id.0, active).unwrap();
            let key = match usage {
                Usage::Amaxes => Key { dims: vec![1], dtype: DType::F32, usage, parity: 0 },
                Usage::Arrived => inner.arrived_key(id.0, 0).unwrap(),
                usage => inner.key(id.0, usage, 0),
            };
            let ticket = inner.tickets.reserve(key);
            let held = (chain.rank() == 1).then(|| inner.tickets.take(ticket).unwrap());
            let gather = |inner: &mut Inner<Cpu>| {
                let flight = inner.begin(node, active, false)?;
                let loan = inner.land(flight)?;
                inner.tickets.put(loan);
                Ok(())
            };
            let first = gather(&mut inner);
            held.into_iter().for_each(|loan| inner.tickets.put(loan));
            [first, gather(&mut inner)]
        })
    }

    /// The others are told in the gather's turn, so that the lanes' next jobs meet.
    #[test]
    fn a_rank_without_room_refuses_in_its_turn() {
        let cases = [
            (Payload::Plain, Usage::Gathered),
            (Payload::Mxfp8, Usage::Arrived),
            (Payload::Nvfp4, Usage::Arrived),
            (Payload::Nvfp4, Usage::Amaxes),
        ];
        for ((payload, usage), in_turn) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
            let case = format!("{payload:?} {usage:?}, in turn: {in_turn}");
            let [[told, met], [own, after]] = <[_; 2]>::try_from(without_room(payload, usage, in_turn)).unwrap();
            assert!(matches!(told, Err(Error::Comm(CommError::Refused { peer: 1, .. }))), "{case}: {told:?}");
            assert!(own.as_ref().is_err_and(|e| e.to_string().contains("in use")), "{case}: {own:?}");
            assert!(met.is_ok() && after.is_ok(), "{case}: {met:?} {after:?}");
        }
    }
}
