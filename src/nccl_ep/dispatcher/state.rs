//! What the dispatcher keeps from call to call.

use std::collections::HashMap;
use std::sync::Weak;

use crate::cuda::Cuda;
use crate::ep::dispatcher_state::DispatcherState;
use crate::nccl::SharedComm;
use crate::nccl_ep::NcclEpLibrary;
use crate::nccl_ep::high_throughput::HighThroughputGroup;
use crate::nccl_ep::tensor::WindowRanges;
use crate::plan::routing_record;

use super::library_handle::{LowLatencyState, SharedLibraryHandle};
use super::window_pool::WindowPool;

/// Dispatcher over NCCL EP, high throughput: rows arrive in the order of experts, and sums are made on the way back.
///
/// A spec's first prepare is compared over the ranks and planned on the host, as every one is that reports at once,
/// drops, or limits experts: the library gets what is kept, so it drops nothing. The others are planned by the library
/// on the GPUs; rows past a static capacity, which it drops, are an error that is reported later. Its order of slots
/// inside a segment is its own. A library's group is made for a capacity, a number of choices and bytes of a row when
/// they are first met, outside graphs, and lives as long as the dispatcher.
///
/// Every collective passes the communicator's meeting and watchdog: a rank that cannot take part tells the others
/// before they begin, where the ranks are threads; where they are processes it ends the communicator.
///
/// For low latency ([`NcclEpLowLatency`](crate::ep::DispatcherKind::NcclEpLowLatency)) the same, but: no backward; rows
/// travel by rank, are brought into the order of slots here, and each rank adds its experts' outputs before they
/// return.
#[derive(Debug)]
pub struct NcclEp {
    // Before the communicator, which they are built on.
    pub(super) groups: Vec<HighThroughputGroup>,
    pub(super) low: Vec<LowLatencyState>,
    pub(super) windows: WindowPool,
    /// Windows for smaller rows.
    pub(super) outgrown: Vec<WindowPool>,
    pub(super) places: WindowRanges,
    pub(super) mode: Algorithm,
    pub(super) library: NcclEpLibrary,
    pub(super) shared: SharedComm,
    /// Layers and specs that all ranks have met with.
    pub(super) agreed: Vec<(u32, routing_record::SpecFields)>,
    /// Data of live handles, by the number of their prepare.
    pub(super) routings: HashMap<u64, Weak<SharedLibraryHandle>>,
    pub(super) core: DispatcherState<Cuda>,
}

/// Which of the library's algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// Any number of tokens, forward and backward.
    HighThroughput,
    /// Few tokens, forward.
    LowLatency,
}
