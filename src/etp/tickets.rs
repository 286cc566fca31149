//! Memory of gathered weights and unsharded gradients, reused from weight to weight.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

use super::recorded::refused;

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Usage {
    /// A gathered weight.
    Gathered,
    /// A weight that has been de-quantised, where what collectives fill is memory of the communicators.
    Unpacked,
    /// What arrives of one that travels quantised.
    Arrived,
    /// A gradient of the whole weight, to be reduce-scattered.
    Gradient,
    /// What the reduce-scatter brings.
    Reduced,
    /// Amaxes of shards that travel in NVFP4.
    Amaxes,
}

/// Buffers of one key are one buffer, but for the parity: weights that are in use at the same time differ in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    pub dims: Vec<usize>,
    pub dtype: DType,
    pub usage: Usage,
    pub parity: usize,
}

impl Key {
    /// For tags: the same on all ranks. Sizes are compared beside them.
    pub fn number(&self) -> u64 {
        (self.usage as u64) << 32 | self.parity as u64
    }
}

/// The right to a key's buffer, for good; it holds no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(usize);

/// A buffer that is out. Only the cache makes one, so it takes back nothing else.
#[derive(Debug)]
pub(super) struct Loan<D: Device> {
    pub tensor: Tensor<D>,
    ticket: Ticket,
}

#[derive(Debug)]
struct Slot<D: Device> {
    key: Key,
    buffer: Option<Tensor<D>>,
    out: bool,
    /// Its memory is a communicator's and is not given back.
    stays: bool,
    /// Such memory has not come back, and is not asked for by one rank alone.
    lost: bool,
}

/// The cache.
#[derive(Debug)]
pub(super) struct Tickets<D: Device> {
    device: D,
    slots: Vec<Slot<D>>,
    allocations: u64,
    /// Calls are recorded: nothing may be allocated.
    pub fixed: bool,
}

impl<D: Device> Tickets<D> {
    pub fn new(device: D) -> Self {
        Self { device, slots: Vec::new(), allocations: 0, fixed: false }
    }

    /// The ticket of a key.
    pub fn reserve(&mut self, key: Key) -> Ticket {
        let found = self.slots.iter().position(|slot| slot.key == key);
        Ticket(found.unwrap_or_else(|| {
            self.slots.push(Slot { key, buffer: None, out: false, stays: false, lost: false });
            self.slots.len() - 1
        }))
    }

    /// True if the buffer is not out.
    pub fn is_free(&self, ticket: Ticket) -> bool {
        !self.slots[ticket.0].out
    }

    /// Lends the buffer, allocated at its first use.
    ///
    /// # Errors
    /// It is out: two uses that may overlap were given one key.
    pub fn take(&mut self, ticket: Ticket) -> Result<Loan<D>> {
        let device = self.device.clone();
        self.take_with(ticket, (false, |key: &Key| Tensor::empty(&device, key.dtype, &key.dims)))
    }

    /// The same with memory of `make`'s, which `stays` where it is a communicator's.
    ///
    /// # Errors
    /// As [`take`](Self::take), and those of `make`.
    pub fn take_with(
        &mut self,
        ticket: Ticket,
        (stays, make): (bool, impl FnOnce(&Key) -> Result<Tensor<D>>),
    ) -> Result<Loan<D>> {
        let slot = &mut self.slots[ticket.0];
        if slot.out {
            let found = format!("{:?} in use", slot.key);
            return Err(Error::invalid("etp", "buffer", "one that is not in use", found));
        }
        let tensor = match slot.buffer.take() {
            Some(tensor) => tensor,
            None if slot.lost => {
                let found = format!("{:?} lost with a collective: a new chain is needed", slot.key);
                return Err(Error::invalid("etp", "buffer", "one that is the communicators'", found));
            }
            None if self.fixed => return Err(refused("etp", "allocate a chain's buffer, as a first use does")),
            None => {
                let made = make(&slot.key)?;
                (self.allocations, slot.stays) = (self.allocations + 1, stays);
                made
            }
        };
        slot.out = true;
        Ok(Loan { tensor, ticket })
    }

    /// Takes a buffer back.
    pub fn put(&mut self, loan: Loan<D>) {
        let slot = &mut self.slots[loan.ticket.0];
        slot.out = false;
        slot.buffer = Some(loan.tensor);
    }

    /// Drops the memory that is not out, but for what would not be given back; tickets stay valid.
    pub fn clear(&mut self) {
        self.slots.iter_mut().filter(|slot| !slot.stays).for_each(|slot| slot.buffer = None);
    }

    /// Marks a buffer as never coming back (its holder is gone with it): the next use allocates, but what all ranks
    /// allocate together.
    pub fn forget(&mut self, ticket: Ticket) {
        let slot = &mut self.slots[ticket.0];
        (slot.out, slot.lost) = (false, slot.stays);
    }

    /// Bytes of a usage, lent or not.
    pub fn bytes(&self, usage: Usage) -> usize {
        let there = |slot: &&Slot<D>| slot.key.usage == usage && (slot.out || slot.buffer.is_some());
        let size = |slot: &Slot<D>| slot.key.dims.iter().product::<usize>() * slot.key.dtype.size();
        self.slots.iter().filter(there).map(size).sum()
    }

    /// Buffers allocated so far.
    pub fn allocations(&self) -> u64 {
        self.allocations
    }
}

impl<D: Device> Loan<D> {
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    fn key(parity: usize, dtype: DType) -> Key {
        Key { dims: vec![4, 2], dtype, usage: Usage::Gathered, parity }
    }

    #[test]
    fn equal_keys_share_and_others_do_not() {
        let mut tickets = Tickets::new(Cpu::new());
        let a = tickets.reserve(key(0, DType::F32));
        assert_eq!(a, tickets.reserve(key(0, DType::F32)));
        let others = [key(1, DType::F32), key(0, DType::BF16), Key { usage: Usage::Gradient, ..key(0, DType::F32) }];
        for other in others {
            let b = tickets.reserve(other);
            assert_ne!(a, b);
        }
        assert_eq!((tickets.bytes(Usage::Gathered), tickets.allocations()), (0, 0), "a ticket holds no memory");
    }

    #[test]
    fn what_all_ranks_have_together_no_rank_allocates_alone() {
        for stays in [false, true] {
            let mut tickets = Tickets::new(Cpu::new());
            let a = tickets.reserve(key(0, DType::F32));
            let make = |key: &Key| Tensor::empty(&Cpu::new(), key.dtype, &key.dims);
            drop(tickets.take_with(a, (stays, make)).unwrap());
            tickets.forget(a);
            let again = tickets.take_with(a, (stays, make)).map(drop);
            match stays {
                false => again.unwrap(),
                true => assert!(again.unwrap_err().to_string().contains("a new chain is needed")),
            }
        }
    }

    #[test]
    fn a_buffer_is_lent_once_at_a_time_and_keeps_its_address() {
        let mut tickets = Tickets::new(Cpu::new());
        let a = tickets.reserve(key(0, DType::F32));
        let loan = tickets.take(a).unwrap();
        let address = loan.tensor.as_bytes().as_ptr();
        assert!(tickets.take(a).is_err() && !tickets.is_free(a));
        tickets.put(loan);
        let again = tickets.take(a).unwrap();
        assert_eq!((again.tensor.as_bytes().as_ptr(), tickets.allocations()), (address, 1));
        tickets.put(again);
        tickets.clear();
        assert_eq!(tickets.bytes(Usage::Gathered), 0);
        assert!(tickets.take(a).is_ok(), "a ticket outlives its memory");
        assert_eq!(tickets.allocations(), 2);
    }
}
