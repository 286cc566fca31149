//! Collectives between the ranks of a group.
//!
//! [`Communicator`] is the little that the dispatchers need; [`ThreadComm`](crate::cpu::ThreadComm) implements it
//! between threads of one process, `moebius::nccl` between GPUs. Every call carries a [`Tag`], which says what it is for.
//!
//! Compared before anything is exchanged are the call, its tag, dtype and arguments (reduction, root), and its
//! sizes. Ranks that disagree get an error each ([`TagMismatch`](crate::CommError::TagMismatch) and its like), exchange
//! nothing, and go on. That is so
//!
//! * between threads always, on the CPU and on GPUs;
//! * between processes over NCCL where asked for, by `MOEBIUS_CHECKED=1` or `NcclComm::join_checked`, but for sizes
//!   that differ from rank to rank (`all_to_all_v`), which follow from prepare's exchange;
//! * between processes otherwise not: a message between hosts before each would take longer than most collectives do.
//!   But prepare's exchange holds the layer and all numbers of its spec, so ranks in different layers get an error each
//!   there ([`ConfigMismatch`](crate::Error::ConfigMismatch)) at no cost, and what follows belongs to its handle.
//!
//! Sends and puts between two ranks are compared nowhere.

pub(crate) mod agree;
#[cfg(all(test, loom))]
mod nvlink_loom_tests;
#[cfg(all(test, loom))]
mod nvlink_overlap_loom_tests;
#[cfg(all(test, loom))]
mod nvlink_rows_loom_tests;
pub(crate) mod refusal;
pub(crate) mod rendezvous;
mod solo;
#[cfg(not(loom))]
pub(crate) mod symmetric;

use std::fmt;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

pub use crate::tag::{Op, Tag};
pub use solo::Solo;
#[cfg(not(loom))]
pub use symmetric::{PeerSignals, Put, Span, SymmetricMemory};

/// How an all-reduce joins values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum, in rank order 0, 1, 2, …: the same bits on every rank and in every run.
    Sum,
    /// Maximum; NaN wins.
    Max,
}

/// Collectives over the ranks of a group. `&mut self`: one thread drives a rank, as NCCL demands.
///
/// On the CPU all calls block until done or failed; they fail on every rank or on none, within the communicator's
/// timeout. On a GPU they are enqueued: what is found before is returned, what is found later by every later call and
/// by every wait of the device. Buffers are row-major and contiguous; sizes are checked before anything is exchanged.
pub trait Communicator<D: Device>: fmt::Debug + Send {
    /// This rank, `0..size`.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// Collectives called so far on this rank (each call below counts one).
    fn calls(&self) -> u64;
    /// The device in whose order collectives are enqueued, where that is one that the communicator was made with.
    fn device(&self) -> Option<&D> {
        None
    }
    /// Gathers `send` of every rank, in rank order, on every rank. `recv` has `size` times the bytes of `send`,
    /// whose size is the same on all ranks.
    ///
    /// # Errors
    /// [`CommError`](crate::CommError): calls, tags, arguments or sizes of the ranks differ, a rank refused, is gone or
    /// has not come in time, or the communicator has ended before; buffers whose sizes do not fit each other; the
    /// device's.
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()>;
    /// The same of parts that lie in their places: this rank's is block `rank` of `buffer` (`[size, …]`). For
    /// communicators with memory of their own ([`uses_copy_engines`](Self::uses_copy_engines)).
    ///
    /// # Errors
    /// As all collectives; a communicator without.
    fn gather_in_place(&mut self, tag: Tag, buffer: TensorMut<'_, D>) -> Result<()> {
        let _ = (tag, buffer);
        Err(Error::invalid("gather_in_place", "communicator", "one with memory of its own", "one without"))
    }
    /// Sums `send` (`[size, …]`) over the ranks in rank order, in `f32` for types below it, and leaves row block
    /// `rank` in `recv` (`[…]`).
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); a type that cannot be added.
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()>;
    /// Joins `buffer` of every rank, in place; the result is the same on all ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); a type that cannot be joined so.
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, D>) -> Result<()>;
    /// Sends `send_bytes[p]` bytes to each rank p and receives `recv_bytes[p]` from it. Both buffers hold the
    /// pieces back to back in rank order; their dtype is [`DType::U8`].
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); another type than U8, or counts that do not fit the buffers or the peers'.
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, D>) -> Result<()>;
    /// Sends row block p of `send` (`[size, …]`) to each other rank p, and receives in `recv` (`[size − 1, …]`) what
    /// these send to this one, in rank order. This rank's own block stays where it is, and nothing of it is copied.
    /// `recv` lies in [`memory`](Self::memory) of the communicator's, at the same place, on all ranks or on none: peers
    /// write there.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()>;
    /// Copies `buffer` of `root` to every rank.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather); a root that is no rank.
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, D>) -> Result<()>;
    /// Waits for every rank.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn barrier(&mut self, tag: Tag) -> Result<()>;
    /// Takes part in whatever collective the other ranks call next, as a failure: nothing is exchanged, each of them
    /// gets [`CommError::Refused`](crate::CommError::Refused) with this rank and `reason` at once, and the
    /// communicator stays usable; between processes over NCCL it does not, and the group is to be made again. For a
    /// rank that meets an error of its own where the others expect it.
    ///
    /// # Errors
    /// The meeting itself failed (a rank is gone, or none came).
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()>;
    /// Whether collectives over [`memory`](Self::memory) are the device's copy engines' and take nothing from kernels
    /// that run beside.
    fn uses_copy_engines(&self) -> bool {
        false
    }
    /// Memory that this communicator's collectives move best, uninitialized; `None`: any will do. Collective: all ranks
    /// ask for the same sizes in the same order. It stays until the communicator ends.
    ///
    /// # Errors
    /// No memory to be had; a collective's.
    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<D>>> {
        let _ = (tag, dtype, dims);
        Ok(None)
    }
    /// Whether it has failed for good: every later call returns why, whatever kind of error that was. One that wraps
    /// another says what that does. A collective that fails on a communicator which has not ended has given its device no
    /// work: the caller uses the collective's memory again.
    fn ended(&self) -> bool {
        false
    }
    /// The device's own kind of communicator, where this is one or wraps one: for dispatchers of libraries that build
    /// on it. What they do through it passes a wrapper by.
    fn native(&mut self) -> Option<&mut D::Native>
    where
        D: NativeCommunicator,
    {
        None
    }
}

/// A device that has a kind of communicator of its own: GPUs have NCCL's.
pub trait NativeCommunicator: Device {
    /// The communicator.
    type Native: Communicator<Self>;
}

/// Checks the buffers of [`Communicator::exchange_blocks`]; bytes of a block.
pub(crate) fn check_blocks<D: Device>(size: usize, send: &TensorRef<'_, D>, recv: &TensorMut<'_, D>) -> Result<usize> {
    const CALL: &str = "exchange_blocks";
    Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype())?;
    let (count, size) = (send.count(), size.max(1));
    if !count.is_multiple_of(size) {
        return Err(Error::invalid(CALL, "send", format!("{size} equal blocks"), format!("{:?}", send.dims())));
    }
    Error::check_shape(CALL, "recv", &[count - count / size], &[recv.count()])?;
    Ok(count / size * send.dtype().size())
}

/// Arguments of [`Communicator::all_to_all_v`].
#[derive(Debug)]
pub struct Exchange<'a, D: Device> {
    /// Bytes to send, back to back in rank order.
    pub send: TensorRef<'a, D>,
    /// Bytes for each rank.
    pub send_bytes: &'a [usize],
    /// Room for the bytes received, back to back in rank order.
    pub recv: TensorMut<'a, D>,
    /// Bytes from each rank.
    pub recv_bytes: &'a [usize],
    /// Type of the bytes' elements; ranks must agree.
    pub dtype: DType,
}

impl<D: Device> Exchange<'_, D> {
    /// Checks that buffers and sizes agree for `size` ranks.
    pub(crate) fn check(&self, size: usize) -> Result<()> {
        use crate::error::Error;
        const CALL: &str = "all_to_all_v";
        Error::check_dtype(CALL, "send", DType::U8, self.send.dtype())?;
        Error::check_dtype(CALL, "recv", DType::U8, self.recv.dtype())?;
        Error::check_shape(CALL, "send_bytes", &[size], &[self.send_bytes.len()])?;
        Error::check_shape(CALL, "recv_bytes", &[size], &[self.recv_bytes.len()])?;
        let total = |bytes: &[usize]| bytes.iter().fold(0, |sum: usize, b| sum.saturating_add(*b));
        Error::check_shape(CALL, "send", &[total(self.send_bytes)], &[self.send.count()])?;
        Error::check_shape(CALL, "recv", &[total(self.recv_bytes)], &[self.recv.count()])
    }
}
