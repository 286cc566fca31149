//! The dispatcher: the library's calls as those of a group.
//!
//! ```text
//! calls        the trait: each of its functions, for either mode
//! steps        what these share: checks, the collective around a call, errors told, rows there and back
//! join         whether all ranks can have the dispatcher
//! groups       the library's groups and handles for what a spec asks for
//! prepare      routing that the GPUs make among themselves
//! windows      memory that rows arrive in and leave from
//! reports      what the ranks tell each other in text
//! low_latency  low latency: its groups, its handles in use (handle_pool), rows there and back (rows)
//! ```

mod calls;
mod groups;
mod join;
mod low_latency;
mod prepare;
mod reports;
mod steps;
mod windows;

use std::collections::HashMap;
use std::sync::{Mutex, Weak};

use crate::comm::{Op, Tag};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::error::Result;
use crate::nccl::{NcclComm, SharedComm};
use crate::plan::routing_record;

use low_latency::{LowLatencyRouting, LowLatencyState};
use windows::WindowPool;

use super::high_throughput;
use super::tensor::WindowRanges;
use super::{NcclEpError, NcclEpLibrary};

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
    groups: Vec<high_throughput::HighThroughputGroup>,
    low: Vec<LowLatencyState>,
    windows: WindowPool,
    /// Windows for smaller rows.
    outgrown: Vec<WindowPool>,
    places: WindowRanges,
    mode: Algorithm,
    library: NcclEpLibrary,
    shared: SharedComm,
    /// Layers and specs that all ranks have met with.
    agreed: Vec<(u32, routing_record::SpecFields)>,
    /// Data of live handles, by the number of their prepare.
    routings: HashMap<u64, Weak<SharedLibraryHandle>>,
    core: DispatcherState<Cuda>,
}

/// Which of the library's algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    /// Any number of tokens, forward and backward.
    HighThroughput,
    /// Few tokens, forward.
    LowLatency,
}

/// A library's handle, made when the size of its rows is known.
#[derive(Debug, Default)]
enum LibraryHandle {
    #[default]
    None,
    HighThroughput(high_throughput::HighThroughputHandle),
    LowLatency(LowLatencyRouting),
}

impl LibraryHandle {
    /// Most bytes of a row, if there is a handle.
    fn row_bytes(&self) -> Option<usize> {
        match self {
            LibraryHandle::None => None,
            LibraryHandle::HighThroughput(handle) => Some(handle.group().options().max_row_bytes),
            LibraryHandle::LowLatency(routed) => routed.row_bytes(),
        }
    }
}

/// The library's handle, kept by a handle of the layer.
type SharedLibraryHandle = Mutex<LibraryHandle>;

/// A collective of the library, met and watched as one of the communicator.
fn around<T>(
    core: &mut DispatcherState<Cuda>,
    named: (&'static str, DType, usize),
    tag: Tag,
    calls: impl FnOnce() -> Result<T>,
) -> Result<T> {
    nccl(core)?.around(named, tag, calls)
}

/// NCCL's communicator, which the library builds on.
fn nccl(core: &mut DispatcherState<Cuda>) -> Result<&mut NcclComm> {
    core.comm.native().ok_or_else(|| NcclEpError::Communicator { found: "another".to_string() }.into())
}

impl NcclEp {
    /// Ends the library's groups and gives the windows back (collective, where there are any).
    fn end(&mut self) -> Result<()> {
        if self.groups.is_empty() && self.low.is_empty() && self.windows.is_empty() {
            return Ok(());
        }
        // Peers may still read what this rank's groups hold.
        let checked = self.core.device.check();
        let met = self.core.comm.barrier(Tag { layer: 0, op: Op::Init, sequence: 0 });
        self.places.clear();
        self.end_windows();
        self.routings.clear();
        self.groups.clear();
        self.low.clear();
        checked.and(met)
    }
}

impl Drop for NcclEp {
    fn drop(&mut self) {
        // Nothing can be reported from here.
        let _ = self.end();
    }
}
