//! The dispatchers of GPUs that are not of every device: NVLink's, and NCCL EP's where it is built in.

use crate::cuda::{Cuda, preferred_dispatchers};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::select::DispatcherOrReason;
use crate::ep::{DispatcherKind, GroupConfig, LibraryDispatchers};
use crate::error::Result;
use crate::nvlink::{NvLink, NvLinkLowLatency};

impl LibraryDispatchers for Cuda {
    fn preferred_dispatchers(config: &GroupConfig, ranks: usize) -> &'static [DispatcherKind] {
        preferred_dispatchers(config, ranks)
    }

    fn library_dispatcher(
        kind: DispatcherKind,
        core: DispatcherState<Cuda>,
        source: &'static str,
    ) -> Result<DispatcherOrReason<Cuda>> {
        match kind {
            DispatcherKind::NvLink => NvLink::join(core),
            DispatcherKind::NvLinkLowLatency => NvLinkLowLatency::join(core),
            _ => nccl_ep(kind, core, source),
        }
    }
}

#[cfg(feature = "nccl-ep")]
fn nccl_ep(_: DispatcherKind, core: DispatcherState<Cuda>, _: &'static str) -> Result<DispatcherOrReason<Cuda>> {
    crate::nccl_ep::NcclEp::join(core)
}

#[cfg(not(feature = "nccl-ep"))]
fn nccl_ep(
    kind: DispatcherKind,
    core: DispatcherState<Cuda>,
    source: &'static str,
) -> Result<DispatcherOrReason<Cuda>> {
    crate::cuda::dispatcher_not_built(kind, core, source)
}
