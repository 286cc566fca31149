//! The library's handle of a routing, for either mode, and what low latency keeps beside its handles.

use std::sync::Mutex;

use crate::cuda::Cuda;
use crate::nccl_ep::high_throughput::HighThroughputHandle;
use crate::nccl_ep::low_latency::{LowLatencyGroup, LowLatencyHandle};
use crate::tensor::Tensor;

use super::handle_pool::{HandlePool, PooledHandle};

/// A group of the library's, and its handles.
#[derive(Debug)]
pub(super) struct LowLatencyState {
    pub(super) group: LowLatencyGroup,
    pub(super) pool: HandlePool<LowLatencyHandle>,
}

impl LowLatencyState {
    /// Most bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.group.options().max_row_bytes
    }
}

/// A handle of the pool, and what is kept beside it.
#[derive(Debug)]
pub(super) struct LowLatencyRouting {
    pub(super) pooled: PooledHandle<LowLatencyHandle>,
    pub(super) bytes: usize,
    /// Slots of each row that the last dispatch brought.
    pub(super) back: Option<Tensor<Cuda>>,
}

impl LowLatencyRouting {
    /// Most bytes of a row.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        Some(self.bytes)
    }
}

/// A library's handle, made when the size of its rows is known.
#[derive(Debug, Default)]
pub(super) enum LibraryHandle {
    #[default]
    None,
    HighThroughput(HighThroughputHandle),
    LowLatency(LowLatencyRouting),
}

impl LibraryHandle {
    /// Most bytes of a row, if there is a handle.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        match self {
            LibraryHandle::None => None,
            LibraryHandle::HighThroughput(handle) => Some(handle.group().options().max_row_bytes),
            LibraryHandle::LowLatency(routed) => routed.row_bytes(),
        }
    }
}

/// The library's handle, kept by a handle of the layer.
pub(super) type SharedLibraryHandle = Mutex<LibraryHandle>;
