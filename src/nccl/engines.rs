//! Memory whose collectives are the copy engines': they need no multiprocessor, and so run beside kernels that take
//! all of them.
//!
//! NCCL (2.28 or later) moves windows that way for communicators made with its policy `NCCL_CTA_POLICY_ZERO`. A window is
//! registered by all ranks together, and stays until the communicator ends.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::comm::{SymmetricMemory, Tag};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{Shape, Tensor};

use super::sys::{CommPtr, Functions, Status};
use super::{NcclComm, NcclLibrary, NcclWindow};

/// Memory of `ncclMemAlloc`.
struct Block {
    library: NcclLibrary,
    cuda: Cuda,
    address: u64,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block {{ address: {:#x} }}", self.address)
    }
}

impl Drop for Block {
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
pub(super) struct Registered {
    window: NcclWindow,
    block: Arc<Block>,
}

impl Registered {
    pub(super) fn holds(&self, address: u64, bytes: usize) -> bool {
        let start = self.window.base();
        address >= start && address - start + bytes as u64 <= self.window.bytes() as u64
    }

    /// Ends a communicator's windows once the GPU has done all that any of its streams was given; tells whether it has,
    /// and nothing of their memory is used any more.
    pub(super) fn end(all: &[Self], functions: &Functions, comm: CommPtr) -> bool {
        let Some(first) = all.first() else { return true };
        let Some(deregister) = functions.window_deregister else { return false };
        let done = first.block.cuda.finish_all("NcclComm").is_ok();
        // SAFETY: the windows are the communicator's, which lives, and the GPU has done with them.
        let ended = |of: &Self| unsafe { deregister(comm, of.window.raw()) } == Status::SUCCESS;
        done && all.iter().all(ended)
    }
}

impl NcclComm {
    /// Memory of all ranks that this communicator's collectives move by copy engines (collective).
    pub(super) fn window_memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Tensor<Cuda>> {
        let shape = Shape::new(dims);
        let bytes = self.check(tag, shape)?.count() * dtype.size();
        let window = self.allocate(tag, bytes)?;
        let (library, cuda, address) = (self.library().clone(), self.cuda.clone(), window.base());
        let block = Arc::new(Block { library, cuda, address });
        self.seat.link.keep(Registered { window, block: Arc::clone(&block) });
        // SAFETY: the memory has that many bytes and lives as long as the block; the tensor alone writes it, and peers
        // where collectives that are given it let them.
        let buffer = unsafe { self.cuda.held((address, bytes), block) };
        Tensor::from_buffer(buffer, dtype, dims)
    }
}
