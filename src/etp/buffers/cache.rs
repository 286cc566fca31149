//! Memory of gathered weights and unsharded gradients, reused from weight to weight.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::CALL;
use crate::tensor::Tensor;

/// Purpose of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::etp) enum BufferUsage {
    /// A gathered weight.
    GatheredWeight,
    /// A weight that has been de-quantized, where what collectives fill is memory of the communicators.
    Unpacked,
    /// Bytes that arrive of a weight that is sent quantized.
    Arrived,
    /// A gradient of the whole weight, to be reduce-scattered.
    Gradient,
    /// Result of the reduce-scatter.
    Reduced,
    /// Amaxes of shards that are sent in NVFP4.
    Amaxes,
}

/// Buffers of one key are one buffer, but for the parity: weights that are in use at the same time differ in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::etp) struct BufferKey {
    pub dims: Vec<usize>,
    pub dtype: DType,
    pub usage: BufferUsage,
    pub parity: usize,
}

impl BufferKey {
    /// For tags: the same on all ranks. Sizes are compared beside them.
    pub fn number(&self) -> u64 {
        (self.usage as u64) << 32 | self.parity as u64
    }
}

/// The right to a key's buffer, for good; it holds no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::etp) struct BufferId(usize);

/// A buffer that is out. Only the cache makes one, so it takes back nothing else.
#[derive(Debug)]
pub(in crate::etp) struct Buffer<D: Device> {
    pub tensor: Tensor<D>,
    buffer_id: BufferId,
}

#[derive(Debug)]
struct CacheEntry<D: Device> {
    key: BufferKey,
    buffer: Option<Tensor<D>>,
    out: bool,
    /// Its memory is a communicator's and is not given back.
    stays: bool,
    /// Such memory has not come back, and is not asked for by one rank alone.
    lost: bool,
}

/// The cache.
#[derive(Debug)]
pub(in crate::etp) struct BufferCache<D: Device> {
    device: D,
    entries: Vec<CacheEntry<D>>,
    allocations: u64,
    /// Calls are captured: nothing may be allocated.
    pub fixed: bool,
}

impl<D: Device> BufferCache<D> {
    pub fn new(device: D) -> Self {
        Self { device, entries: Vec::new(), allocations: 0, fixed: false }
    }

    /// The buffer id of a key.
    pub fn reserve(&mut self, key: BufferKey) -> BufferId {
        let found = self.entries.iter().position(|entry| entry.key == key);
        BufferId(found.unwrap_or_else(|| {
            self.entries.push(CacheEntry { key, buffer: None, out: false, stays: false, lost: false });
            self.entries.len() - 1
        }))
    }

    /// True if the buffer is not out.
    pub fn is_free(&self, buffer_id: BufferId) -> bool {
        !self.entries[buffer_id.0].out
    }

    /// Lends the buffer, allocated at its first use.
    ///
    /// # Errors
    /// It is out: two uses that may overlap were given one key.
    pub fn take(&mut self, buffer_id: BufferId) -> Result<Buffer<D>> {
        let device = self.device.clone();
        self.take_with(buffer_id, false, |key| Tensor::empty(&device, key.dtype, &key.dims))
    }

    /// The same with memory of `make`'s, which `stays` where it is a communicator's.
    ///
    /// # Errors
    /// As [`take`](Self::take), and those of `make`.
    pub fn take_with(
        &mut self,
        buffer_id: BufferId,
        stays: bool,
        make: impl FnOnce(&BufferKey) -> Result<Tensor<D>>,
    ) -> Result<Buffer<D>> {
        let entry = &mut self.entries[buffer_id.0];
        if entry.out {
            let found = format!("{:?} in use", entry.key);
            return Err(Error::invalid("etp", "buffer", "one that is not in use", found));
        }
        let tensor = match entry.buffer.take() {
            Some(tensor) => tensor,
            None if entry.lost => {
                let found = format!("{:?} lost with a collective: a new chain is needed", entry.key);
                return Err(Error::invalid("etp", "buffer", "one that is the communicators'", found));
            }
            None if self.fixed => {
                return Err(Error::not_capturable(CALL, "allocate a chain's buffer, as a first use does"));
            }
            None => {
                let made = make(&entry.key)?;
                (self.allocations, entry.stays) = (self.allocations + 1, stays);
                made
            }
        };
        entry.out = true;
        Ok(Buffer { tensor, buffer_id })
    }

    /// Takes a buffer back.
    pub fn put(&mut self, buffer: Buffer<D>) {
        let entry = &mut self.entries[buffer.buffer_id.0];
        entry.out = false;
        entry.buffer = Some(buffer.tensor);
    }

    /// Drops the memory that is not out, but for what would not be given back; buffer ids stay valid.
    pub fn clear(&mut self) {
        self.entries.iter_mut().filter(|entry| !entry.stays).for_each(|entry| entry.buffer = None);
    }

    /// Marks a buffer as never coming back (its holder is gone with it): the next use allocates, but what all ranks
    /// allocate together.
    pub fn forget(&mut self, buffer_id: BufferId) {
        let entry = &mut self.entries[buffer_id.0];
        (entry.out, entry.lost) = (false, entry.stays);
    }

    /// Bytes of a usage, taken or not.
    pub fn bytes(&self, usage: BufferUsage) -> usize {
        let there = |entry: &&CacheEntry<D>| entry.key.usage == usage && (entry.out || entry.buffer.is_some());
        let size = |entry: &CacheEntry<D>| entry.key.dims.iter().product::<usize>() * entry.key.dtype.size();
        self.entries.iter().filter(there).map(size).sum()
    }

    /// Buffers allocated so far.
    pub fn allocations(&self) -> u64 {
        self.allocations
    }
}

impl<D: Device> Buffer<D> {
    pub fn buffer_id(&self) -> BufferId {
        self.buffer_id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    fn key(parity: usize, dtype: DType) -> BufferKey {
        BufferKey { dims: vec![4, 2], dtype, usage: BufferUsage::GatheredWeight, parity }
    }

    #[test]
    fn equal_keys_share_and_others_do_not() {
        let mut cache = BufferCache::new(Cpu::new());
        let a = cache.reserve(key(0, DType::F32));
        assert_eq!(a, cache.reserve(key(0, DType::F32)));
        let others =
            [key(1, DType::F32), key(0, DType::BF16), BufferKey { usage: BufferUsage::Gradient, ..key(0, DType::F32) }];
        for other in others {
            let b = cache.reserve(other);
            assert_ne!(a, b);
        }
        assert_eq!(
            (cache.bytes(BufferUsage::GatheredWeight), cache.allocations()),
            (0, 0),
            "a buffer id holds no memory"
        );
    }

    #[test]
    fn what_all_ranks_have_together_no_rank_allocates_alone() {
        for stays in [false, true] {
            let mut cache = BufferCache::new(Cpu::new());
            let a = cache.reserve(key(0, DType::F32));
            let make = |key: &BufferKey| Tensor::empty(&Cpu::new(), key.dtype, &key.dims);
            drop(cache.take_with(a, stays, make).unwrap());
            cache.forget(a);
            let again = cache.take_with(a, stays, make).map(drop);
            match stays {
                false => again.unwrap(),
                true => assert!(again.unwrap_err().to_string().contains("a new chain is needed")),
            }
        }
    }

    #[test]
    fn a_buffer_is_taken_once_at_a_time_and_keeps_its_address() {
        let mut cache = BufferCache::new(Cpu::new());
        let a = cache.reserve(key(0, DType::F32));
        let buffer = cache.take(a).unwrap();
        let address = buffer.tensor.as_bytes().as_ptr();
        assert!(cache.take(a).is_err() && !cache.is_free(a));
        cache.put(buffer);
        let again = cache.take(a).unwrap();
        assert_eq!((again.tensor.as_bytes().as_ptr(), cache.allocations()), (address, 1));
        cache.put(again);
        cache.clear();
        assert_eq!(cache.bytes(BufferUsage::GatheredWeight), 0);
        assert!(cache.take(a).is_ok(), "a buffer id outlives its memory");
        assert_eq!(cache.allocations(), 2);
    }
}
