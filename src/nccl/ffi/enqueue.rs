//! NCCL's calls on one stream, over bytes of device memory.

use std::ffi::c_void;

use crate::dtype::DType;

use crate::nccl::NcclError;
use crate::nccl::ffi::comm_handle::CommHandle;
use crate::nccl::ffi::sys::{CommPtr, DataType, Functions, RedOp, Status, StreamPtr};

/// A communicator and the stream of its work.
pub(in crate::nccl) struct CommStream<'a> {
    pub(in crate::nccl) comm_handle: &'a CommHandle,
    pub(in crate::nccl) stream: StreamPtr,
}

/// Some device memory to send or to receive into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nccl) struct PeerBuffer {
    pub(in crate::nccl) peer: usize,
    pub(in crate::nccl) address: u64,
    pub(in crate::nccl) bytes: usize,
}

/// Why a call was not enqueued: `None`, where the communicator has ended.
pub(in crate::nccl) type EnqueueError = Option<NcclError>;

fn code(dtype: DType) -> DataType {
    match dtype {
        DType::F64 => DataType::F64,
        DType::F32 => DataType::F32,
        DType::F16 => DataType::F16,
        DType::BF16 => DataType::BF16,
        DType::I64 => DataType::I64,
        DType::I32 => DataType::I32,
        DType::U8 => DataType::U8,
    }
}

impl CommStream<'_> {
    fn call(
        &self,
        function: &'static str,
        call: impl FnOnce(&Functions, CommPtr) -> Status,
    ) -> Result<(), EnqueueError> {
        match self.comm_handle.call(function, call) {
            Some(done) => done.map_err(Some),
            None => Err(None),
        }
    }

    /// One call of these functions, made by the caller.
    ///
    /// # Safety
    /// Memory that the call reads and writes lives until the stream has passed.
    pub(in crate::nccl) unsafe fn other(
        &self,
        function: &'static str,
        call: impl FnOnce(CommPtr, StreamPtr) -> Status,
    ) -> Result<(), EnqueueError> {
        self.call(function, |_, comm| call(comm, self.stream))
    }

    /// # Safety
    /// `from` has `bytes` bytes, and `to` that many for each rank, until the stream has passed.
    pub(in crate::nccl) unsafe fn all_gather(&self, from: u64, to: u64, bytes: usize) -> Result<(), EnqueueError> {
        // SAFETY: as the caller promises.
        self.call("ncclAllGather", |f, comm| unsafe {
            (f.all_gather)(from as *const c_void, to as *mut c_void, bytes, DataType::U8, comm, self.stream)
        })
    }

    /// # Safety
    /// `buffer` has `count` elements until the stream has passed.
    pub(in crate::nccl) unsafe fn all_reduce(
        &self,
        buffer: u64,
        count: usize,
        dtype: DType,
        operation: RedOp,
    ) -> Result<(), EnqueueError> {
        // SAFETY: as the caller promises.
        self.call("ncclAllReduce", |f, comm| unsafe {
            (f.all_reduce)(
                buffer as *const c_void,
                buffer as *mut c_void,
                count,
                code(dtype),
                operation,
                comm,
                self.stream,
            )
        })
    }

    /// # Safety
    /// `to` has `count` elements and `from` as many for each rank, until the stream has passed.
    pub(in crate::nccl) unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DType,
    ) -> Result<(), EnqueueError> {
        let (from, to, code) = (from as *const c_void, to as *mut c_void, code(dtype));
        // SAFETY: as the caller promises.
        self.call("ncclReduceScatter", |f, comm| unsafe {
            (f.reduce_scatter)(from, to, count, code, RedOp::SUM, comm, self.stream)
        })
    }

    /// # Safety
    /// `buffer` has `bytes` bytes until the stream has passed.
    pub(in crate::nccl) unsafe fn broadcast(&self, buffer: u64, bytes: usize, root: usize) -> Result<(), EnqueueError> {
        let (from, to) = (buffer as *const c_void, buffer as *mut c_void);
        // SAFETY: as the caller promises.
        self.call("ncclBroadcast", |f, comm| unsafe {
            (f.broadcast)(from, to, bytes, DataType::U8, root as i32, comm, self.stream)
        })
    }

    /// Sends and receives at once; empty pieces and none of either are left out.
    ///
    /// # Safety
    /// The pieces have that many bytes until the stream has passed.
    pub(in crate::nccl) unsafe fn exchange(
        &self,
        sends: &[PeerBuffer],
        receives: &[PeerBuffer],
    ) -> Result<(), EnqueueError> {
        if sends.iter().chain(receives).all(|piece| piece.bytes == 0) {
            return Ok(());
        }
        // SAFETY: as the caller promises. A group that was begun is ended whatever happens in it.
        self.call("ncclGroupEnd", |f, comm| unsafe {
            let mut status = (f.group_start)();
            if status != Status::SUCCESS {
                return status;
            }
            for p in sends.iter().filter(|p| p.bytes > 0) {
                if status == Status::SUCCESS {
                    let from = p.address as *const c_void;
                    status = (f.send)(from, p.bytes, DataType::U8, p.peer as i32, comm, self.stream);
                }
            }
            for p in receives.iter().filter(|p| p.bytes > 0) {
                if status == Status::SUCCESS {
                    let to = p.address as *mut c_void;
                    status = (f.recv)(to, p.bytes, DataType::U8, p.peer as i32, comm, self.stream);
                }
            }
            let ended = (f.group_end)();
            if status == Status::SUCCESS { ended } else { status }
        })
    }
}
