//! Errors that kernels find: words on the GPU that they raise, and a copy of them on the host that costs no waiting.
//!
//! Where several are met before anybody asks, one is told, the same whatever the order of threads, blocks and kernels, and
//! the others are forgotten with it, as most of them follow from it:
//!
//! 1. a NaN logit, the first by (token, expert);
//! 2. else the fault of the largest code (`Fault` in `kernels/common/common.cuh`), so what is wrong with ranks' records before
//!    a capacity, that before ids, and these before maps and segments, which are made from them;
//! 3. of one code the smallest detail, which is the first in a tensor's order; of several capacities the one that would
//!    have needed most rows, of these the smallest and the highest rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, result};

use crate::ep::deferred_errors;
use crate::error::{Error, Result};

use super::device::{Cuda, driver};
use super::launch::Grid;
use super::params;
use super::sync::StuckFlag;

/// Fault; first NaN logit; rows that would have been needed, above the 16 bits of their rank; the same above the 32 bits of
/// what is left of those there are.
const WORDS: usize = 4;
const BYTES: usize = WORDS * 8;
const CLEAR: [u64; WORDS] = [0, u64::MAX, 0, 0];
/// Bits of a NaN logit's position that are its expert's (`router.cu`).
const EXPERT_BITS: u32 = 24;
/// Bits of a fault that are its detail.
const DETAIL: u64 = (1 << 48) - 1;
/// Bits of the last word that are a layout's rows.
const ROWS: u64 = (1 << 32) - 1;

/// The words, and their copy in memory that the GPU writes and the host reads.
pub(super) struct Status {
    pub(super) words: CUdeviceptr,
    /// Page-locked, so that kernels can write it.
    mirror: *mut AtomicU64,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    stuck: StuckFlag,
}

// SAFETY: the host touches the mirror through atomics alone.
unsafe impl Send for Status {}
// SAFETY: as above.
unsafe impl Sync for Status {}

impl Drop for Status {
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

impl Status {
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
        let p = params::RowsOp {
            source: self.inner.status,
            out: self.inner.report.address(),
            width: WORDS as i64,
            ..Default::default()
        };
        // SAFETY: the words and their mirror live until the stream has been waited for, and the host reads through atomics.
        unsafe { self.launch(call, &self.kernels().prepare.report, Grid::new(1, 32), &p) }
    }

    pub(super) fn reset_status(&self, call: &'static str) -> Result<()> {
        let bytes: Vec<u8> = CLEAR.iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.write_bytes(call, self.inner.status, &bytes)
    }

    /// Waits for the stream; returns and clears what kernels have found, the one error that is told of it.
    pub(super) fn faults(&self, call: &'static str) -> Result<()> {
        let mut bytes = [0u8; BYTES];
        self.read_bytes(call, self.inner.status, &mut bytes)?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect();
        let Some(told) = told(call, &words) else { return Ok(()) };
        self.reset_status(call)?;
        self.inner.report.clear_mirror();
        Err(told)
    }
}

/// What the words say; `None`: nothing.
fn told(call: &'static str, words: &[u64]) -> Option<Error> {
    let word = |i: usize| words.get(i).copied().unwrap_or(CLEAR[i]);
    let (fault, nan) = (word(0), word(1));
    if nan != CLEAR[1] {
        let (token, expert) = ((nan >> EXPERT_BITS) as usize, (nan & ((1 << EXPERT_BITS) - 1)) as usize);
        return Some(Error::NanLogits { call: "route", token, expert });
    }
    if fault == CLEAR[0] {
        return None;
    }
    // The smallest detail of the largest code is what was raised first, in the order of the tensors.
    let detail = DETAIL - (fault & DETAIL);
    let (name, expected, found) = match fault >> 48 {
        1 => (format!("segment {detail}"), "slots inside the layout, behind the segment before", "others"),
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
            format!("{} {detail}", deferred_errors::RAISED),
            "ids that are experts or -1, none twice in a token, and a spec like the other ranks'",
            "others",
        ),
        _ => {
            let (rank, needed) = ((word(2) & 0xffff) as usize, (word(2) >> 16) as usize);
            let capacity = (ROWS - (word(3) & ROWS)) as usize;
            return Some(Error::Capacity { rank, needed, capacity });
        }
    };
    Some(Error::invalid(call, format!("{name} (seen by a kernel)"), expected, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `raise_fault` of `common.cuh` writes it.
    fn fault(words: &mut [u64; WORDS], code: u64, detail: u64) {
        words[0] = words[0].max(code << 48 | (DETAIL - detail));
    }

    /// As `raise_capacity` does.
    fn capacity(words: &mut [u64; WORDS], [needed, rank, rows]: [u64; 3]) {
        fault(words, 7, rows);
        words[2] = words[2].max(needed << 16 | rank);
        words[3] = words[3].max(needed << 32 | (ROWS - rows));
    }

    /// As the router does.
    fn nan(words: &mut [u64; WORDS], token: u64, expert: u64) {
        words[1] = words[1].min(token << EXPERT_BITS | expert);
    }

    type Raise = Box<dyn Fn(&mut [u64; WORDS])>;

    /// What is told when all of these are raised, in every order that begins with another of them.
    fn met(all: &[Raise]) -> String {
        let one = |first: usize| {
            let mut words = CLEAR;
            all.iter().cycle().skip(first).take(all.len()).for_each(|raise| raise(&mut words));
            let forward = told("check", &words);
            words = CLEAR;
            all.iter().rev().cycle().skip(first).take(all.len()).for_each(|raise| raise(&mut words));
            assert_eq!(told("check", &words).map(|e| e.to_string()), forward.as_ref().map(|e| e.to_string()));
            forward.expect("something was raised").to_string()
        };
        let said: Vec<String> = (0..all.len()).map(one).collect();
        assert!(said.iter().all(|text| *text == said[0]), "{said:?}");
        said[0].clone()
    }

    fn of(code: u64, detail: u64) -> Raise {
        Box::new(move |words| fault(words, code, detail))
    }

    #[test]
    fn nothing_and_each_alone() {
        assert_eq!(told("check", &CLEAR).map(|e| e.to_string()), None);
        let named = [
            "segment 5",
            "map[5]",
            "out.map[5]",
            "ids, token 5",
            "aux.sums",
            "topk_ids, choice 5",
            "",
            "record of rank 5",
        ];
        for (code, name) in (1..).zip(named).filter(|(code, _)| *code != 7) {
            let text = met(&[of(code, 5)]);
            assert!(text.contains(name) && text.contains("seen by a kernel"), "{text}");
        }
        let nan: Raise = Box::new(|words| nan(words, 3, 4));
        let text = met(&[nan]);
        assert_eq!(text, Error::NanLogits { call: "route", token: 3, expert: 4 }.to_string());
    }

    #[test]
    fn what_is_told_of_several_does_not_depend_on_their_order() {
        // Of one kind the first in the tensor; of several kinds the largest code.
        assert!(met(&[of(2, 9), of(2, 0), of(2, 4)]).contains("map[0]"));
        assert!(met(&[of(1, 0), of(6, 8), of(2, 3), of(6, 7)]).contains("choice 7"));
        // A NaN goes before everything, the first of them.
        let nans: [Raise; 2] = [Box::new(|words| nan(words, 6, 0)), Box::new(|words| nan(words, 5, 9))];
        let [later, first] = nans;
        let text = met(&[of(8, 1), later, of(4, 0), first]);
        assert_eq!(text, Error::NanLogits { call: "route", token: 5, expert: 9 }.to_string());
    }

    #[test]
    fn a_capacity_is_told_with_its_own_need() {
        let raise = |of: [u64; 3]| -> Raise { Box::new(move |words| capacity(words, of)) };
        let text = |needed, rank, capacity| Error::Capacity { rank, needed, capacity }.to_string();
        // Two layers: the need of the one is not told with the capacity of the other.
        let (small, large) = ([9, 1, 8], [120, 0, 100]);
        assert_eq!(met(&[raise(small), raise(large)]), text(120, 0, 100));
        assert_eq!(met(&[raise([120, 1, 100]), raise(large), raise(small), of(6, 0)]), text(120, 1, 100));
        assert_eq!(met(&[raise([i32::MAX as u64, 65_535, 0])]), text(i32::MAX as usize, 65_535, 0));
        assert_eq!(met(&[raise([1 << 31, 0, (1 << 31) - 1])]), text(1 << 31, 0, (1 << 31) - 1));
    }
}
