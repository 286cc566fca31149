//! When shards that travel quantised are cast: in the computation's order, before the first gather of a state, and
//! behind one all-reduce of the amaxes of all of them.

use crate::comm::Tag;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::ShardDevice;
use super::beside::Sent;
use super::chain::{CALL, Inner};
use super::lane::Job;
use super::recorded::refused;
use super::tickets::{Key, Loan, Ticket, Usage};

/// Amaxes of all experts of all weights that travel in NVFP4, `F32`, in the order of registration.
pub(super) struct Amaxes<D: ShardDevice> {
    /// Of which state of the shards.
    epoch: u64,
    loan: Loan<D>,
}

impl<D: ShardDevice> Inner<D> {
    /// Casts a weight's shard, if that has not been done in this state, on all ranks alike. The outer error is one of
    /// all ranks, which gather nothing then; the inner one is this rank's own, for the gather to tell.
    pub fn cast(&mut self, weight: usize, (tag, epoch): (Tag, u64)) -> Result<Result<()>> {
        let Some(packed) = self.weights[weight].packed.clone() else { return Ok(Ok(())) };
        if packed.is_of(epoch) {
            return Ok(Ok(()));
        }
        if packed.joined() > 0 && self.amaxes.as_ref().is_none_or(|amaxes| amaxes.epoch != epoch) {
            self.join_amaxes(tag, epoch)?;
        }
        if self.tickets.fixed && packed.kept() == 0 {
            return Ok(Err(refused(CALL, "allocate a cast, as a first use does")));
        }
        let home = self.gathers.between.home.clone();
        let amaxes = self.amaxes.as_mut().filter(|_| packed.joined() > 0).map(|amaxes| amaxes.loan.tensor.view_mut());
        Ok(packed.cast(&home, epoch, &*self.weights[weight].source, amaxes))
    }

    /// The amaxes, for a weight that has any.
    pub fn amaxes_of(&self, joined: usize) -> Option<TensorRef<'_, D>> {
        self.amaxes.as_ref().filter(|_| joined > 0).map(|amaxes| amaxes.loan.tensor.view())
    }

    /// The largest of all ranks' amaxes, of every weight that has any.
    fn join_amaxes(&mut self, tag: Tag, epoch: u64) -> Result<()> {
        let dims = vec![self.packed().map(|packed| packed.joined()).sum()];
        let key = Key { dims, dtype: DType::F32, usage: Usage::Amaxes, parity: 0 };
        if let Some(Amaxes { loan, .. }) = self.amaxes.take() {
            self.tickets.put(loan);
        }
        let ticket = self.tickets.reserve(key);
        // A rank that has no room for them, or whose own cannot be had, tells the others, which are in the all-reduce.
        let mut loan = match self.tickets.take(ticket) {
            Ok(loan) => loan,
            Err(error) => return self.gathers.refuse(tag, error).wait().outcome,
        };
        let after = self.own_amaxes(loan.tensor.view_mut()).and_then(|()| self.gathers.between.home.mark());
        let amaxes = Sent::new(loan, &self.gathers.between);
        let pending = self.gathers.give_after(Job::Join { tag, amaxes }, after);
        let (mut loans, outcome) = self.gathers.receive(pending);
        match (loans.pop(), outcome) {
            (Some(loan), Ok(())) => {
                self.amaxes = Some(Amaxes { epoch, loan });
                Ok(())
            }
            (loan, outcome) => Err(self.lost(loan, Some(ticket), outcome)),
        }
    }

    fn own_amaxes(&self, mut all: TensorMut<'_, D>) -> Result<()> {
        let home = &self.gathers.between.home;
        home.zero(all.reborrow().into_data())?;
        let weights = self.weights.iter().filter_map(|weight| Some((weight, weight.packed.as_ref()?)));
        for (weight, packed) in weights.filter(|(_, packed)| packed.joined() > 0) {
            packed.own_amaxes(home, &*weight.source, all.reborrow())?;
        }
        Ok(())
    }

    /// Takes back what a failed job has left of its buffer.
    pub fn lost(&mut self, loan: Option<Loan<D>>, ticket: Option<Ticket>, outcome: Result<()>) -> Error {
        match (loan, ticket) {
            (Some(loan), _) => self.tickets.put(loan),
            (None, Some(ticket)) => self.tickets.forget(ticket),
            (None, None) => {}
        }
        outcome.err().unwrap_or_else(|| Error::invalid(CALL, "job", "its buffer", "none"))
    }
}
