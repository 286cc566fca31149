//! Access for libraries that build on NCCL's communicators: to keep one, and to have their collectives watched.

use std::sync::Arc;

use crate::comm::Tag;
use crate::comm::agree::{CollectiveCall, Detail};
use crate::dtype::DType;
use crate::error::Result;

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

    /// A collective of another library, of rows of `bytes`: counted, compared over the ranks where they are threads,
    /// and watched. As [`NcclComm::collective_raw`], for calls that reach the communicator through [`SharedComm`].
    pub(crate) fn around<T>(
        &mut self,
        (operation, dtype, bytes): (&'static str, DType, usize),
        tag: Tag,
        calls: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let subject = self.session.begin(CollectiveCall { operation, tag, dtype, detail: Detail::Plain, bytes })?;
        self.run_watched(subject, |_| Some(calls()))
    }
}
