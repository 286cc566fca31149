//! A rank's membership, as the library has it, in a group of either mode.

use std::sync::Arc;

use crate::cuda::Cuda;
use crate::error::Result;
use crate::nccl::SharedComm;

use super::rules::NcclEpResult;
use super::{NcclEpError, NcclEpLibrary, result, sys};

/// The library's group of either mode, and the values that it needs.
pub(super) struct RawGroup {
    pub(super) library: NcclEpLibrary,
    pub(super) cuda: Cuda,
    comm: SharedComm,
    pub(super) ranks: usize,
    pub(super) raw: sys::ncclEpGroup_t,
}

// SAFETY: the library lets any thread use a group, one at a time; every call passes the communicator's gate.
unsafe impl Send for RawGroup {}
// SAFETY: as above.
unsafe impl Sync for RawGroup {}

impl RawGroup {
    /// Joins (collective), with a configuration that was checked.
    pub(super) fn join(
        call: &'static str,
        library: &NcclEpLibrary,
        cuda: Cuda,
        comm: SharedComm,
        mut config: sys::ncclEpGroupConfig_t,
    ) -> Result<Arc<Self>> {
        cuda.not_captured(call, "create an EP group")?;
        cuda.bind(call)?;
        config.version = sys::NCCL_EP_API_VERSION;
        let made = comm.with(|comm| {
            // SAFETY: the communicator lives while `with` runs; its GPU was bound above; the options were checked.
            unsafe { result::create_group(library.functions(), comm.cast(), &config) }
        });
        let raw = made.ok_or(NcclEpError::Ended { call })??;
        let (library, ranks) = (library.clone(), comm.size());
        Ok(Arc::new(Self { library, cuda, comm, ranks, raw }))
    }

    /// Runs calls while nobody frees the communicator, with its GPU bound.
    pub(super) fn with<T>(
        &self,
        call: &'static str,
        calls: impl FnOnce(&sys::Library, sys::cudaStream_t) -> NcclEpResult<T>,
    ) -> Result<T> {
        self.cuda.bind(call)?;
        let stream: sys::cudaStream_t = self.cuda.stream().cu_stream().cast();
        match self.comm.with(|_| calls(self.library.functions(), stream)) {
            Some(done) => Ok(done?),
            None => Err(NcclEpError::Ended { call }.into()),
        }
    }
}

impl Drop for RawGroup {
    fn drop(&mut self) {
        // Nothing can be reported from here. Where the communicator is gone, so are the group's peers: what it holds
        // stays until the process ends.
        if self.cuda.bind("Group::drop").is_err() {
            return;
        }
        // SAFETY: handles keep the group, so there are none; the communicator lives while `with` runs.
        let ended = self.comm.with(|_| unsafe { result::group_destroy(self.library.functions(), self.raw) });
        if let Some(Err(error)) = ended {
            tracing::warn!(%error, "an EP group was not destroyed");
        }
    }
}
