//! Memory that is registered with a communicator, and what keeps it.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::cuda::Cuda;

use crate::nccl::NcclLibrary;
use crate::nccl::ffi::sys::{CommPtr, Functions, Status, WindowPtr};

/// A rank's handle of a window of NCCL's (`ncclWindow_t`), over memory of `ncclMemAlloc`.
#[derive(Debug)]
pub struct NcclWindow {
    pub(in crate::nccl) address: u64,
    pub(in crate::nccl) bytes: usize,
    pub(in crate::nccl) window: WindowPtr,
}

// SAFETY: the window is a handle that NCCL lets any thread pass to its calls, one at a time, as the communicator sees
// to.
unsafe impl Send for NcclWindow {}

impl NcclWindow {
    /// NCCL's handle, for libraries that take it.
    pub fn raw(&self) -> WindowPtr {
        self.window
    }

    /// Address of this rank's part.
    pub fn base(&self) -> u64 {
        self.address
    }

    /// Bytes of each rank's part.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(in crate::nccl) fn new(address: u64, bytes: usize, window: WindowPtr) -> Self {
        Self { address, bytes, window }
    }
}

/// Memory of `ncclMemAlloc`.
pub(in crate::nccl) struct EngineMemory {
    pub(in crate::nccl) library: NcclLibrary,
    pub(in crate::nccl) cuda: Cuda,
    pub(in crate::nccl) address: u64,
}

impl fmt::Debug for EngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineMemory {{ address: {:#x} }}", self.address)
    }
}

impl Drop for EngineMemory {
    fn drop(&mut self) {
        let free = self.library.functions().mem_free;
        if let (Some(free), Ok(())) = (free, self.cuda.finish_all("NcclComm")) {
            // SAFETY: the memory is NCCL's, in no window any more, and the GPU has done with it.
            let _ = unsafe { free(self.address as *mut c_void) };
        }
    }
}

/// A window, and the memory that it keeps.
#[derive(Debug)]
pub(in crate::nccl) struct RegisteredWindow {
    pub(in crate::nccl) window: NcclWindow,
    pub(in crate::nccl) block: Arc<EngineMemory>,
    /// Memory that kernels of all ranks reach, which another group may have when nobody holds it any more.
    pub(in crate::nccl) shared: bool,
}

impl RegisteredWindow {
    /// The window, and where in it some memory lies.
    pub(in crate::nccl) fn place(&self, address: u64, bytes: usize) -> Option<(WindowPtr, usize)> {
        let offset = usize::try_from(address.checked_sub(self.window.base())?).ok()?;
        (offset.checked_add(bytes)? <= self.window.bytes()).then_some((self.window.raw(), offset))
    }

    /// Ends a communicator's windows once the GPU has done all that any of its streams was given; tells whether it has,
    /// and nothing of their memory is used any more.
    pub(in crate::nccl) fn end(all: &[Self], functions: &Functions, comm: CommPtr) -> bool {
        let Some(first) = all.first() else { return true };
        let Some(deregister) = functions.window_deregister else { return false };
        let done = first.block.cuda.finish_all("NcclComm").is_ok();
        // SAFETY: the windows are the communicator's, which lives, and the GPU has done with them.
        let ended = |of: &Self| unsafe { deregister(comm, of.window.raw()) } == Status::SUCCESS;
        done && all.iter().all(ended)
    }
}
