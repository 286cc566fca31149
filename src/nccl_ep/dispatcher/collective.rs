//! The library's collectives as ones of the communicator.

use crate::comm::Tag;
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::error::Result;
use crate::nccl::NcclComm;
use crate::nccl_ep::NcclEpError;

/// A collective of the library, met and watched as one of the communicator.
pub(super) fn around<T>(
    core: &mut DispatcherState<Cuda>,
    named: (&'static str, DType, usize),
    tag: Tag,
    calls: impl FnOnce() -> Result<T>,
) -> Result<T> {
    nccl(core)?.around(named, tag, calls)
}

/// NCCL's communicator, which the library builds on.
pub(super) fn nccl(core: &mut DispatcherState<Cuda>) -> Result<&mut NcclComm> {
    core.comm.native().ok_or_else(|| NcclEpError::Communicator { found: "another".to_string() }.into())
}
