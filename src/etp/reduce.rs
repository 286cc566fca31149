//! Gradients out: reduce-scatters that end one step late, and the main gradients that they add to.

use std::fmt;
use std::sync::Arc;

use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::beside::{Beside, Sent};
use super::chain::{CALL, Chain, Inner};
use super::lane::{Job, Pending};
use super::recorded::refused;
use super::state::State;
use super::tickets::{Key, Loan, Ticket, Usage};
use super::{Reduction, ShardDevice, Shards, Shares, WeightId};

/// Main gradient of a shard.
pub(super) struct Main<D: ShardDevice> {
    pub sums: Tensor<D>,
    /// Nothing has been added since it was last given: what it holds is the last step's.
    pub first: bool,
}

/// A reduce-scatter under way.
pub(super) struct Reducing<D: ShardDevice> {
    weight: usize,
    pending: Pending<D>,
    tickets: [Ticket; 2],
}

/// Room for the gradient of a whole weight, until it is [submitted](Chain::submit).
pub struct Room<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    id: WeightId,
    shards: Arc<Shards>,
    loan: Option<Loan<D>>,
}

impl<D: ShardDevice> fmt::Debug for Room<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room<{:?} {:?}>", self.id, self.shards.dims())
    }
}

impl<D: ShardDevice> Room<'_, D> {
    /// The memory, of the weight's sizes and type; its content is unspecified.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_, D>> {
        let missing = || Error::invalid(CALL, "room", "a buffer", "none");
        let tensor = &mut self.loan.as_mut().ok_or_else(missing)?.tensor;
        let dtype = tensor.dtype();
        let bytes = self.shards.dims().iter().product::<usize>() * dtype.size();
        TensorMut::new(D::slice_mut(tensor.view_mut().into_data(), 0..bytes), dtype, self.shards.dims())
    }
}

impl<D: ShardDevice> Drop for Room<'_, D> {
    fn drop(&mut self) {
        if let Some(loan) = self.loan.take() {
            self.chain.lock().tickets.put(loan);
        }
    }
}

impl<D: ShardDevice> Chain<D> {
    /// Room for a weight's gradient on this rank's tokens. Where the lanes' communicators have memory of their own
    /// (`Chain::copies_beside`), ranks ask for a size's first in the same order: it is allocated by all together.
    ///
    /// # Errors
    /// Room that was asked for before and not submitted; no forward before; the collective's, where an earlier gradient
    /// has to leave first.
    pub fn room(&self, id: WeightId) -> Result<Room<'_, D>> {
        let mut inner = self.enter(CALL)?;
        let weight = inner.weight(id)?;
        let shards = Arc::clone(&weight.shards);
        let Some(ticket) = weight.gradient else {
            return Err(inner.trouble(&weight.spec.name, "a forward before its gradient", "none"));
        };
        if !inner.tickets.is_free(ticket) {
            // The order of a backward keeps its buffers apart; another order waits here.
            inner.settle(self)?;
        }
        let mut loan = inner.take_for_reduction(ticket)?;
        drop(inner);
        let bytes = loan.tensor.bytes();
        let padding = shards.padding() * loan.tensor.view().row_bytes();
        let tail = D::slice_mut(loan.tensor.view_mut().into_data(), bytes - padding..bytes);
        let zeroed = self.device.zero(tail);
        let room = Room { chain: self, id, shards, loan: Some(loan) };
        zeroed.map(|()| room)
    }

    /// Hands a gradient in: its reduce-scatter starts, and the one before it reaches its main gradient. Every rank
    /// submits the same weights in the same order, one gradient for each backward.
    ///
    /// # Errors
    /// Those of the reduce-scatter before it, and of this one where nothing runs ahead.
    pub fn submit(&self, mut room: Room<'_, D>) -> Result<()> {
        let mut inner = self.enter("Chain::submit")?;
        if !std::ptr::eq(room.chain, self) {
            let own = inner.trouble("(chain)", "room of this chain", "another chain's");
            // The room's own chain takes it back without this one's lock.
            drop(inner);
            drop(room);
            return Err(own);
        }
        let Some(gradient) = room.loan.take() else { return Ok(()) };
        // An earlier one that this would wait behind in any case, or that has its buffer, ends here.
        // Where nobody waits, a layer's are under way together.
        let most = if D::ENQUEUES { 2 } else { 1 };
        while inner.reducing.len() >= most || !inner.has_room(room.id.0, self.options.reduction) {
            if let Err(error) = inner.settle_first(self) {
                return Err(inner.refuse_reduction(room.id.0, gradient, error));
            }
        }
        // Between a recording's passes nothing may be left under way.
        let ahead = self.options.prefetch && (inner.active.is_some() || inner.recording.is_none());
        let state = if ahead { State::AsyncWait } else { State::DataReadySync };
        inner.reduce(room.id.0, gradient, (self.options.reduction, state))?;
        if ahead { Ok(()) } else { inner.settle(self) }
    }

    /// Ends the accumulation: adds what is under way, sums main gradients over the replicas where there are any, calls
    /// `give` with each weight's gradient (`[S, C]`, accumulator type, padding zeros) in the order of registration, and
    /// starts the next step's from zero. Weights that have had no gradient yet are left out.
    ///
    /// # Errors
    /// Those of the collectives and of `give`; a communicator of another size than
    /// [`EtpOptions::replicas`](super::EtpOptions::replicas).
    pub fn finish(
        &self,
        mut replicas: Option<&mut dyn Communicator<D>>,
        mut give: impl FnMut(WeightId, TensorRef<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let size = replicas.as_ref().map_or(1, |comm| comm.size());
        if size != self.options.replicas {
            return Err(Error::invalid("Chain::finish", "replicas", self.options.replicas, size));
        }
        let mut inner = self.enter("Chain::finish")?;
        inner.settle(self)?;
        let recorded = inner.recorded;
        // The optimiser's step follows.
        inner.epoch += 1;
        for (i, weight) in inner.weights.iter_mut().enumerate() {
            let Some(Main { sums, first }) = &mut weight.main else { continue };
            if *first {
                // No gradient since the last time.
                self.device.zero(sums.view_mut().into_data())?;
            }
            if let Some(comm) = replicas.as_deref_mut().filter(|comm| comm.size() > 1) {
                let tag = Tag { layer: weight.spec.layer, op: Op::GradReduce, sequence: u64::MAX - 1 - i as u64 };
                self.over_replicas(comm, tag, sums)?;
            }
            give(WeightId(i), sums.view())?;
            match recorded {
                true => self.device.zero(sums.view_mut().into_data())?,
                false => *first = true,
            }
        }
        Ok(())
    }

    fn over_replicas(&self, comm: &mut dyn Communicator<D>, tag: Tag, main: &mut Tensor<D>) -> Result<()> {
        let between = Beside::new(&self.device, comm.device());
        if self.options.reduction == Reduction::Native {
            return between.visit(|| comm.all_reduce(tag, ReduceOp::Sum, main.view_mut()));
        }
        let [rows, width] = [main.view().rows(), main.dims()[1]];
        let mut shares = Tensor::empty(&self.device, main.dtype(), &[comm.size() * rows, width])?;
        between.visit(|| comm.all_gather(tag, main.view(), shares.view_mut()))?;
        let shares = Shares::together(shares.view(), main.view().count(), (1.0, true))?;
        self.device.add_shares(&self.stream, shares, main.view_mut())
    }
}

impl<D: ShardDevice> Inner<D> {
    fn reduce(&mut self, index: usize, gradient: Loan<D>, (how, state): (Reduction, State)) -> Result<()> {
        let key = self.reduced_key(index, how);
        let weight = &mut self.weights[index];
        if let Err(error) = weight.reduce.go(state, &weight.spec.name) {
            self.tickets.put(gradient);
            return Err(error);
        }
        let (bytes, from) = (gradient.tensor.bytes(), gradient.ticket());
        let ticket = self.tickets.reserve(key);
        let into = match self.take_for_reduction(ticket) {
            Ok(into) => into,
            Err(error) => {
                self.weights[index].reduce.reset();
                return Err(self.refuse_reduction(index, gradient, error));
            }
        };
        let tag = self.next_reduction(index);
        self.traffic.reductions += 1;
        self.traffic.reduced_bytes += bytes as u64;
        let [gradient, into] = [gradient, into].map(|loan| Sent::new(loan, &self.reductions().between));
        let pending = self.reductions().give(Job::Reduce { tag, how, gradient, into });
        self.reducing.push_back(Reducing { weight: index, pending, tickets: [from, ticket] });
        Ok(())
    }

    fn next_reduction(&mut self, index: usize) -> Tag {
        self.reduced += 1;
        let sequence = self.reduced << 32 | index as u64;
        Tag { layer: self.weights[index].spec.layer, op: Op::GradReduce, sequence }
    }

    /// In place of a reduction that this rank cannot give: the others, which wait in it, are told in its turn. That is
    /// not waited for, as they may wait for this rank elsewhere.
    fn refuse_reduction(&mut self, index: usize, gradient: Loan<D>, error: Error) -> Error {
        self.tickets.put(gradient);
        let tag = self.next_reduction(index);
        drop(self.reductions().refuse(tag, error.clone()));
        error
    }

    fn take_for_reduction(&mut self, ticket: Ticket) -> Result<Loan<D>> {
        let lane = self.apart.as_ref().unwrap_or(&self.gathers);
        lane.take(&mut self.tickets, ticket)
    }

    /// Whether a weight's reduction has a buffer to fill, or none is under way that would give one back.
    fn has_room(&mut self, index: usize, how: Reduction) -> bool {
        let key = self.reduced_key(index, how);
        let ticket = self.tickets.reserve(key);
        self.reducing.is_empty() || self.tickets.is_free(ticket)
    }

    fn reduced_key(&self, index: usize, how: Reduction) -> Key {
        let weight = &self.weights[index];
        let [rows, width] = weight.shards.shard_dims();
        let dims = match how {
            Reduction::Native => [rows, width],
            // This rank's own is added where it lies.
            Reduction::Pairwise => [rows * (weight.shards.ranks() - 1), width],
        };
        Key { dims: dims.to_vec(), dtype: weight.spec.dtype, usage: Usage::Reduced, parity: 0 }
    }

    /// Waits for the gradients under way, and adds them; the first error, if there is one.
    pub fn settle(&mut self, chain: &Chain<D>) -> Result<()> {
        let mut outcome = Ok(());
        while !self.reducing.is_empty() {
            let settled = self.settle_first(chain);
            outcome = outcome.and(settled);
        }
        outcome
    }

    /// The same of the oldest.
    fn settle_first(&mut self, chain: &Chain<D>) -> Result<()> {
        let Some(reducing) = self.reducing.pop_front() else { return Ok(()) };
        let index = reducing.weight;
        let landed = self.land_gradient(reducing);
        let weight = &mut self.weights[index];
        let added = landed.and_then(|[gradient, reduced]| {
            let moved = match weight.reduce.state() {
                State::AsyncWait => weight.reduce.go(State::DataReady, &weight.spec.name),
                _ => Ok(()),
            };
            let views = (gradient.tensor.view(), reduced.tensor.view());
            let added = moved.and_then(|()| add(chain, (weight, self.recorded), views));
            [gradient, reduced].into_iter().for_each(|loan| self.tickets.put(loan));
            added
        });
        self.weights[index].reduce.reset();
        added
    }

    fn put_all(&mut self, loans: [Loan<D>; 2]) {
        loans.into_iter().for_each(|loan| self.tickets.put(loan));
    }

    /// The buffers of a reduction that has ended: a gradient, and what has come of the others.
    fn land_gradient(&mut self, reducing: Reducing<D>) -> Result<[Loan<D>; 2]> {
        let (mut loans, outcome) = self.reductions().receive(reducing.pending);
        let (reduced, gradient) = (loans.pop(), loans.pop());
        let (Some(reduced), Some(gradient)) = (reduced, gradient) else {
            reducing.tickets.into_iter().for_each(|ticket| self.tickets.forget(ticket));
            return Err(outcome.err().unwrap_or_else(|| Error::invalid(CALL, "reduction", "buffers", "none")));
        };
        match outcome {
            Ok(()) => Ok([gradient, reduced]),
            Err(error) => {
                self.put_all([gradient, reduced]);
                Err(error)
            }
        }
    }

    /// Forgets the gradients under way and the main gradients.
    pub fn give_up_gradients(&mut self, chain: &Chain<D>) {
        while let Some(reducing) = self.reducing.pop_front() {
            let index = reducing.weight;
            if let Ok(loans) = self.land_gradient(reducing) {
                self.put_all(loans);
            }
            self.weights[index].reduce.reset();
        }
        for weight in &mut self.weights {
            let main = weight.main.take().filter(|_| self.recorded);
            weight.main = main.and_then(|mut main| {
                let zeroed = chain.device.zero(main.sums.view_mut().into_data());
                zeroed.is_ok().then_some(main)
            });
        }
    }
}

/// Adds what has come of a weight's gradient to its main gradient.
fn add<'a, D: ShardDevice>(
    chain: &Chain<D>,
    (weight, recorded): (&mut super::chain::Weight<D>, bool),
    (gradient, reduced): (TensorRef<'a, D>, TensorRef<'a, D>),
) -> Result<()> {
    let (shards, dtype) = (&weight.shards, weight.spec.dtype);
    let Main { sums, first } = match &mut weight.main {
        Some(main) => main,
        empty => {
            if chain.recording().is_some() {
                return Err(refused(CALL, "allocate a main gradient, as a first use does"));
            }
            let dims = shards.shard_dims();
            let make = if recorded { Tensor::zeros } else { Tensor::empty };
            empty.insert(Main { sums: make(&chain.device, dtype.accumulator(), &dims)?, first: !recorded })
        }
    };
    let shares = match chain.options.reduction {
        Reduction::Pairwise => {
            let [rows, bytes] = [shards.shard_dims()[0], shards.shard_dims()[0] * gradient.row_bytes()];
            let own = D::slice(gradient.data(), chain.rank() * bytes..(chain.rank() + 1) * bytes);
            let own = TensorRef::new(own, dtype, &[rows, shards.shard_dims()[1]])?;
            Shares { own, rank: chain.rank(), others: reduced, scale: chain.factor(), first: *first }
        }
        Reduction::Native => Shares::together(reduced, sums.view().count(), (chain.factor(), *first))?,
    };
    chain.device.add_shares(&chain.stream, shares, sums.view_mut())?;
    *first = false;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::rig::ranks;
    use super::super::{EtpOptions, Phase, Shard, ShardSource, WeightSpec};
    use super::*;
    use crate::cpu::Cpu;
    use crate::dtype::DType;
    use crate::error::CommError;
    use crate::weights::WeightSource;

    /// A rank that has no room for the others' shares refuses in the reduction's turn, and the next passes work.
    #[test]
    fn a_rank_without_room_for_shares_tells_the_others() {
        let found = ranks(2, |comms| {
            let options = EtpOptions { pad: 0, reduction: Reduction::Pairwise, ..EtpOptions::default() };
            let chain = Chain::new(Cpu::new(), (), comms, options).unwrap();
            let shard = Shard::new(Tensor::zeros(&Cpu::new(), DType::F32, &[2, 16]).unwrap());
            let spec = WeightSpec::new("w", 0, &[4, 16], DType::F32);
            let id = chain.add(spec, Arc::new(shard) as Arc<dyn ShardSource<Cpu>>).unwrap();
            let pass = |phase| {
                chain.begin(phase)?;
                drop(chain.source(id)?.acquire(&())?);
                if phase == Phase::Backward {
                    chain.submit(chain.room(id)?)?;
                }
                chain.end()
            };
            pass(Phase::Forward).unwrap();
            let held = (chain.rank() == 1).then(|| {
                let mut inner = chain.lock();
                let key = inner.reduced_key(id.0, Reduction::Pairwise);
                let ticket = inner.tickets.reserve(key);
                inner.tickets.take(ticket).unwrap()
            });
            let reduced = pass(Phase::Backward).and_then(|()| chain.drain());
            held.into_iter().for_each(|loan| chain.lock().tickets.put(loan));
            chain.recover(None).unwrap();
            pass(Phase::Forward).and_then(|()| pass(Phase::Backward)).unwrap();
            chain.drain().unwrap();
            reduced
        });
        let [told, own] = <[_; 2]>::try_from(found).unwrap();
        assert!(matches!(told, Err(Error::Comm(CommError::Refused { peer: 1, .. }))), "{told:?}");
        assert!(own.as_ref().is_err_and(|e| e.to_string().contains("in use")), "{own:?}");
    }
}
