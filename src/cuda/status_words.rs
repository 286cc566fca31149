//! The words that kernels raise errors in, and their copy on the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, result};

use crate::error::Result;

use super::driver::driver;
use super::failure::StuckFlag;
use super::params;

/// The words are `StatusWord`s of `kernels/common/params.h`.
pub(super) const WORDS: usize = params::STATUS_WORDS as usize;
pub(super) const FAULT: usize = params::STATUS_FAULT as usize;
pub(super) const NAN: usize = params::STATUS_NAN as usize;
pub(super) const BYTES: usize = WORDS * 8;
pub(super) const CLEAR: [u64; WORDS] = {
    let mut words = [0; WORDS];
    words[NAN] = u64::MAX;
    words
};

/// The words, and their copy in memory that the GPU writes and the host reads.
pub(super) struct StatusWords {
    pub(super) words: CUdeviceptr,
    /// Page-locked, so that kernels can write it.
    mirror: *mut AtomicU64,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    stuck: StuckFlag,
}

// SAFETY: the host touches the mirror through atomics alone.
unsafe impl Send for StatusWords {}
// SAFETY: as above.
unsafe impl Sync for StatusWords {}

impl Drop for StatusWords {
    fn drop(&mut self) {
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if !self.stuck.is() && self.context.bind_to_thread().is_ok() {
            // SAFETY: both were allocated by `new` and are freed once, when no copy is under way any more.
            unsafe {
                let _ = result::stream::synchronize(self.stream.cu_stream());
                let _ = result::free_sync(self.words);
                let _ = result::free_host(self.mirror.cast());
            }
        }
    }
}

impl StatusWords {
    pub(super) fn new(stream: &Arc<CudaStream>, stuck: &StuckFlag) -> Result<Self> {
        const CALL: &str = "Cuda::on";
        let context = Arc::clone(stream.context());
        // SAFETY: plain allocations, freed by `drop`.
        let words = unsafe { result::malloc_sync(BYTES) }.map_err(driver(CALL, "allocate the status words"))?;
        // SAFETY: as above.
        let mirror = unsafe { result::malloc_host(BYTES, 0) };
        if mirror.is_err() {
            // SAFETY: nobody has them yet.
            let _ = unsafe { result::free_sync(words) };
        }
        let mirror = mirror.map_err(driver(CALL, "allocate the status words"))?;
        let status = Self { words, mirror: mirror.cast(), stream: Arc::clone(stream), context, stuck: stuck.clone() };
        status.clear_mirror();
        Ok(status)
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < WORDS);
        // SAFETY: the mirror has that many words, is aligned to pages, and lives as long as `self`.
        unsafe { &*self.mirror.add(i) }
    }

    /// Has the stream clear the words when it gets there. The context is bound.
    pub(super) fn clear_words(&self, call: &'static str) -> Result<()> {
        let parts = [(self.words, 0, BYTES), (self.words + (NAN * size_of::<u64>()) as u64, 0xff, size_of::<u64>())];
        parts.into_iter().try_for_each(|(at, byte, bytes)| {
            // SAFETY: there are so many bytes of words behind the address, for as long as `self` lives.
            unsafe { result::memset_d8_async(at, byte, bytes, self.stream.cu_stream()) }
                .map_err(driver(call, "clear the status words"))
        })
    }

    pub(super) fn clear_mirror(&self) {
        CLEAR.iter().enumerate().for_each(|(i, v)| self.word(i).store(*v, Ordering::Relaxed));
    }

    /// Where kernels put the copy: page-locked memory has one address for the host and the GPU.
    pub(super) fn address(&self) -> u64 {
        self.mirror as u64
    }

    /// Whether a copy that has arrived shows an error.
    pub(super) fn raised(&self) -> bool {
        [FAULT, NAN].into_iter().any(|i| self.word(i).load(Ordering::Relaxed) != CLEAR[i])
    }
}
