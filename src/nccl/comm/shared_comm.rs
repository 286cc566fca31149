//! Access for libraries that build on NCCL's communicators: to keep one, and to have their collectives watched.

use std::sync::Arc;

use crate::nccl::NcclComm;
use crate::nccl::ffi::comm_handle::CommHandle;
use crate::nccl::ffi::sys::CommPtr;

/// A communicator that is shared with what is built on it: freed with its last user, or when it fails.
#[derive(Debug, Clone)]
pub(crate) struct SharedComm(Arc<CommHandle>);

impl SharedComm {
    /// Ranks.
    pub(crate) fn size(&self) -> usize {
        self.0.size
    }

    /// Runs calls while nobody frees the communicator. `None`: it has been freed.
    pub(crate) fn with<T>(&self, calls: impl FnOnce(CommPtr) -> T) -> Option<T> {
        self.0.with(|_, comm| calls(comm))
    }
}

impl NcclComm {
    /// The communicator, for what is built on it.
    pub(crate) fn shared(&self) -> SharedComm {
        SharedComm(Arc::clone(&self.session.comm_handle))
    }
}
