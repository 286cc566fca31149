//! Errors that kernels find: words on the GPU that they raise, and a copy of them on the host that costs no waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, result};

use crate::ep::heard;
use crate::error::{Error, Result};

use super::device::{Cuda, driver};
use super::launch::Grid;
use super::params;

/// Fault; first NaN logit; rows that would have been needed, above the 16 bits of their rank.
const WORDS: usize = 4;
const BYTES: usize = WORDS * 8;
const CLEAR: [u64; WORDS] = [0, u64::MAX, 0, 0];
/// Bits of a NaN logit's position that are its expert's (`router.cu`).
const EXPERT_BITS: u32 = 24;
/// Bits of a fault that are its detail.
const DETAIL: u64 = (1 << 48) - 1;

/// The words, and their copy in memory that the GPU writes and the host reads.
pub(super) struct Status {
    pub(super) words: CUdeviceptr,
    /// Page-locked, so that kernels can write it.
    mirror: *mut AtomicU64,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

// SAFETY: the host touches the mirror through atomics alone.
unsafe impl Send for Status {}
// SAFETY: as above.
unsafe impl Sync for Status {}

impl Drop for Status {
    fn drop(&mut self) {
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: both were allocated by `new` and are freed once, when no copy is under way any more.
            unsafe {
                let _ = result::stream::synchronize(self.stream.cu_stream());
                let _ = result::free_sync(self.words);
                let _ = result::free_host(self.mirror.cast());
            }
        }
    }
}

impl Status {
    pub(super) fn new(stream: &Arc<CudaStream>) -> Result<Self> {
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
        let status = Self { words, mirror: mirror.cast(), stream: Arc::clone(stream), context };
        status.clear_mirror();
        Ok(status)
    }

    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < WORDS);
        // SAFETY: the mirror has that many words, is aligned to pages, and lives as long as `self`.
        unsafe { &*self.mirror.add(i) }
    }

    fn clear_mirror(&self) {
        CLEAR.iter().enumerate().for_each(|(i, v)| self.word(i).store(*v, Ordering::Relaxed));
    }

    /// Where kernels put the copy: page-locked memory has one address for the host and the GPU.
    pub(super) fn address(&self) -> u64 {
        self.mirror as u64
    }

    /// Whether a copy that has arrived shows an error.
    pub(super) fn raised(&self) -> bool {
        self.word(0).load(Ordering::Relaxed) != CLEAR[0] || self.word(1).load(Ordering::Relaxed) != CLEAR[1]
    }
}

impl Cuda {
    /// Has the words copied to the host when the stream gets there: by a kernel, as a copy's start takes longer.
    pub(super) fn report(&self, call: &'static str) -> Result<()> {
        let p = params::Rows {
            source: self.inner.status,
            out: self.inner.report.address(),
            width: WORDS as i64,
            ..Default::default()
        };
        // SAFETY: the words and their mirror live until the stream has been waited for, and the host reads through atomics.
        unsafe { self.launch(call, "report", Grid::new(1, 32), &p) }
    }

    pub(super) fn reset_status(&self, call: &'static str) -> Result<()> {
        let bytes: Vec<u8> = CLEAR.iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.write_bytes(call, self.inner.status, &bytes)
    }

    /// Waits for the stream; returns and clears the first error that kernels have found.
    pub(super) fn faults(&self, call: &'static str) -> Result<()> {
        let mut bytes = [0u8; BYTES];
        self.read_bytes(call, self.inner.status, &mut bytes)?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect();
        let (fault, nan) = (words[0], words[1]);
        if fault == CLEAR[0] && nan == CLEAR[1] {
            return Ok(());
        }
        self.reset_status(call)?;
        self.inner.report.clear_mirror();
        if nan != CLEAR[1] {
            let expert = nan & ((1 << EXPERT_BITS) - 1);
            return Err(Error::NanLogits {
                call: "route",
                token: (nan >> EXPERT_BITS) as usize,
                expert: expert as usize,
            });
        }
        // The smallest detail of the largest code is what was raised first, in the order of the tensors.
        let detail = DETAIL - (fault & DETAIL);
        let (name, expected, found) = match fault >> 48 {
            1 => (format!("zone {detail}"), "slots inside the layout, behind the zone before", "others"),
            2 => (format!("map[{detail}]"), "a row of the tensor behind it", "none of its rows"),
            3 => (format!("out.map[{detail}]"), "a row of the output, or a negative entry", "none of its rows"),
            4 => (format!("tensor ids, token {detail}"), "experts, as `route` gave them", "another number"),
            5 => ("tensor aux.sums".to_string(), "the sums of at least this rank's tokens", "no tokens"),
            6 => (
                format!("topk_ids, choice {detail}"),
                "-1, or an expert that the token has not chosen yet",
                "another number",
            ),
            8 => (
                format!("{} {detail}", heard::RAISED),
                "ids that are experts or -1, none twice in a token, and a spec like the other ranks'",
                "others",
            ),
            _ => {
                let (rank, needed) = ((words[2] & 0xffff) as usize, (words[2] >> 16) as usize);
                return Err(Error::Capacity { rank, needed, capacity: detail as usize });
            }
        };
        Err(Error::invalid(call, format!("{name} (seen by a kernel)"), expected, found))
    }
}
