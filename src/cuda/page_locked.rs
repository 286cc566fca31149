//! Page-locked memory of the host, which copy engines read and write beside the GPU's kernels.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};

use crate::error::{Error, Result};

use super::driver::driver;

/// A run of page-locked bytes, which its owner frees.
#[derive(Debug)]
pub(super) struct PageLockedBlock {
    bytes: *mut u8,
    len: usize,
}

// SAFETY: the memory is the whole process's, and is written through `bytes_mut` alone, by whoever owns the block.
unsafe impl Send for PageLockedBlock {}
// SAFETY: as above.
unsafe impl Sync for PageLockedBlock {}

impl PageLockedBlock {
    /// `len` zeros; the context is bound to the thread.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: the host has no memory, or may lock no more; a driver's.
    pub(super) fn new(call: &'static str, len: usize) -> Result<Self> {
        // For every context of the process, and at one address for the host and the GPU.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a plain allocation, which `free` ends.
        let allocated = unsafe { result::malloc_host(len.max(1), flags) };
        let bytes = allocated.map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Error::OutOfMemory { call, name: "page-locked memory of the host".to_string(), bytes: len }
            }
            _ => driver(call, &format!("lock {len} bytes of the host"))(error),
        })?;
        // SAFETY: the driver has just given that many bytes.
        unsafe { bytes.cast::<u8>().write_bytes(0, len.max(1)) };
        Ok(Self { bytes: bytes.cast(), len })
    }

    /// Address of the first byte, for the GPU.
    pub(super) fn address(&self) -> CUdeviceptr {
        self.bytes as CUdeviceptr
    }

    pub(super) fn bytes(&self) -> usize {
        self.len
    }

    /// The bytes, before the GPU is told of them.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block has that many bytes, all of them written by `new`, and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.bytes, self.len) }
    }

    /// A word that the host and kernels share, of eight bytes; the block has it.
    #[cfg(feature = "nccl")]
    pub(super) fn word(&self, i: usize) -> &std::sync::atomic::AtomicU64 {
        assert!((i + 1) * 8 <= self.len, "word {i} of {} bytes", self.len);
        // SAFETY: the block begins at a page and has the bytes; whoever shares it reads and writes them as words.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.bytes.cast::<u64>().add(i)) }
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// Called once, and nothing reads or writes the memory any more.
    pub(super) unsafe fn free(&self) {
        // SAFETY: the memory is `malloc_host`'s, and the caller vouches for the rest. An error is an earlier one's.
        let _ = unsafe { result::free_host(self.bytes.cast::<c_void>()) };
    }
}
