//! Blocks exchanged by copy engines: each rank writes into the others' windows, and signals say when.
//!
//! NCCL's all-to-all of copy engines brings a rank's own block too, and within a GPU the driver copies with a kernel:
//! beside a kernel that fills the GPU it waits for the end of that, and what all other ranks exchange with this one
//! waits as well. Puts move what has to be moved.

use std::ffi::c_void;

use crate::comm::PeerSignals;
use crate::error::Result;
use crate::nccl::NcclLibrary;
use crate::nccl::ffi::enqueue::{CommStream, EnqueueError};
use crate::nccl::ffi::sys::{CommPtr, DataType, Status, StreamPtr, WaitSignal, WindowPtr};

/// The only signal and context that NCCL 2.30 has.
const SIGNAL: i32 = 0;

type PutSignal = unsafe extern "C" fn(
    *const c_void,
    usize,
    DataType,
    i32,
    WindowPtr,
    usize,
    i32,
    i32,
    u32,
    CommPtr,
    StreamPtr,
) -> Status;
type Signal = unsafe extern "C" fn(i32, i32, i32, u32, CommPtr, StreamPtr) -> Status;
type Wait = unsafe extern "C" fn(i32, *mut WaitSignal, CommPtr, StreamPtr) -> Status;

/// Calls of a library that can put (2.29).
#[derive(Debug, Clone, Copy)]
pub(in crate::nccl) struct OneSided {
    put: PutSignal,
    signal: Signal,
    wait: Wait,
}

/// Whether a call was enqueued.
type Outcome = std::result::Result<(), EnqueueError>;

/// A put to a peer.
#[derive(Debug, Clone, Copy)]
pub(in crate::nccl) struct OneSidedPut {
    pub(in crate::nccl) from: u64,
    pub(in crate::nccl) bytes: usize,
    pub(in crate::nccl) peer: usize,
    pub(in crate::nccl) window: WindowPtr,
    /// Into the peer's part of the window.
    pub(in crate::nccl) offset: usize,
}

/// Equal blocks, one for each rank, to be exchanged.
#[derive(Debug, Clone, Copy)]
pub(in crate::nccl) struct BlockExchange {
    /// This rank's, one behind another.
    pub(in crate::nccl) from: u64,
    /// Of each.
    pub(in crate::nccl) bytes: usize,
    /// Where the others' go: a place in the same window on all ranks, with room for all but a rank's own, in rank
    /// order.
    pub(in crate::nccl) window: WindowPtr,
    pub(in crate::nccl) offset: usize,
}

impl OneSided {
    pub(in crate::nccl) fn of(library: &NcclLibrary) -> Result<Self> {
        let functions = library.functions();
        let put = library.newer("ncclPutSignal", functions.put_signal)?;
        let signal = library.newer("ncclSignal", functions.signal)?;
        Ok(Self { put, signal, wait: library.newer("ncclWaitSignal", functions.wait_signal)? })
    }

    /// Signals a peer, behind what was put there before.
    pub(in crate::nccl) fn signal(self, comm_stream: &CommStream<'_>, peer: usize) -> Outcome {
        // SAFETY: nothing but NCCL's own memory is written.
        unsafe {
            comm_stream.other("ncclSignal", |comm, stream| (self.signal)(peer as i32, SIGNAL, 0, 0, comm, stream))
        }
    }

    /// Writes into a peer's part of a window, and signals it then.
    ///
    /// # Safety
    /// `from` has those bytes, and the peer's part of the window room for them, until the stream has passed.
    pub(in crate::nccl) unsafe fn put(self, comm_stream: &CommStream<'_>, put: OneSidedPut) -> Outcome {
        let (from, peer) = (put.from as *const c_void, put.peer as i32);
        let to = (put.window, put.offset);
        // SAFETY: as the caller promises.
        unsafe {
            comm_stream.other("ncclPutSignal", |comm, stream| {
                (self.put)(from, put.bytes, DataType::U8, peer, to.0, to.1, SIGNAL, 0, 0, comm, stream)
            })
        }
    }

    /// Takes these signals.
    pub(in crate::nccl) fn wait(
        self,
        comm_stream: &CommStream<'_>,
        signals: impl Iterator<Item = PeerSignals>,
    ) -> Outcome {
        let describe = |PeerSignals { peer, count }| WaitSignal {
            count: count as i32,
            peer: peer as i32,
            index: SIGNAL,
            context: 0,
        };
        let mut list: Vec<WaitSignal> = signals.filter(|signals| signals.count > 0).map(describe).collect();
        if list.is_empty() {
            return Ok(());
        }
        let count = list.len() as i32;
        // SAFETY: the list has that many entries and is read before the call returns.
        unsafe {
            comm_stream.other("ncclWaitSignal", |comm, stream| (self.wait)(count, list.as_mut_ptr(), comm, stream))
        }
    }

    /// Writes this rank's blocks to the others and waits for theirs, in the stream's order. A peer's first signal says
    /// that its window may be written to, its second that its block has arrived.
    ///
    /// # Safety
    /// `from` has a block for each rank and the window room for those of the others, on all ranks, until the stream has
    /// passed.
    pub(in crate::nccl) unsafe fn exchange(self, comm_stream: &CommStream<'_>, blocks: BlockExchange) -> Outcome {
        let BlockExchange { from, bytes, window, offset } = blocks;
        let (rank, size) = (comm_stream.comm_handle.rank, comm_stream.comm_handle.size);
        // Each rank begins with another peer.
        let peers = || (1..size).map(|i| (rank + i) % size);
        peers().try_for_each(|peer| self.signal(comm_stream, peer))?;
        self.wait(comm_stream, peers().map(|peer| PeerSignals { peer, count: 1 }))?;
        for peer in peers() {
            // There too, a rank has no place for its own.
            let place = rank - usize::from(rank > peer);
            let (from, offset) = (from + (peer * bytes) as u64, offset + place * bytes);
            // SAFETY: as the caller promises.
            unsafe { self.put(comm_stream, OneSidedPut { from, bytes, peer, window, offset })? };
        }
        self.wait(comm_stream, peers().map(|peer| PeerSignals { peer, count: 1 }))
    }
}
