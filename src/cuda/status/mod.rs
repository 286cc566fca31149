//! Errors that kernels find: words on the GPU that they raise, and a copy of them on the host that costs no waiting.
//!
//! Where several are met before anybody asks, one is told, the same whatever the order of threads, blocks and kernels,
//! and the others are forgotten with it, as most of them follow from it:
//!
//! 1. a rank that was waited for in vain: what follows has read rows that nobody had written, a router's among it;
//! 2. else a NaN logit, the first by (token, expert);
//! 3. else the fault of the largest code (`Fault` in `kernels/common/params.h`), so what is wrong with ranks' records
//!    before a capacity, that before ids, and these before maps and segments, which are made from them;
//! 4. of one code the smallest detail, which is the first in a tensor's order; of ranks that were waited for, what this one
//!    has waited for before what others have told it; of several capacities the one that would have needed most rows, of
//!    these the smallest and the highest rank, with that rank's layer.

#[cfg(test)]
mod tests;

use std::sync::PoisonError;

use crate::error::{Error, IdProblem, Result};
use crate::kernels::Origin;
use crate::plan::routing_record::BadId;

use super::device::Cuda;
use super::fault_site::{FaultSite, MappedCall, site};
use super::launch::Grid;
use super::params;
use super::status_words::{BYTES, CLEAR, FAULT, NAN, WORDS};

/// Calls whose kernels raise faults that name them.
const PREPARE: &str = "prepare";
const ROUTE_BWD: &str = "route_bwd";
/// Bits of a fault that are its detail.
const DETAIL: u64 = (1 << params::FAULT_DETAIL_BITS) - 1;
/// Bits of a capacity's word that are a layout's rows.
const ROWS: u64 = (1 << 32) - 1;
/// Ranks and layers that kernels tell apart.
const ORIGINS: usize = 1 << params::ORIGIN_BITS;

impl Cuda {
    /// Waits for the stream, and returns the fault that a kernel has raised since the last call, if any.
    ///
    /// # Errors
    /// The fault; a driver's error.
    pub fn check(&self) -> Result<()> {
        self.faults("Cuda::check")
    }

    /// Has the words copied to the host when the stream gets there: by a kernel, as a copy's start takes longer.
    pub(super) fn report(&self, call: &'static str) -> Result<()> {
        let p = params::RowsOpParams {
            source: self.inner.status,
            out: self.inner.report.address(),
            width: WORDS as i64,
            ..Default::default()
        };
        // SAFETY: the words and their mirror live until the stream has been waited for, and the host reads through
        // atomics.
        unsafe { self.launch(call, &self.kernels().plan.report, Grid::new(1, params::WARP_THREADS), &p) }
    }

    /// The number by which kernels know a rank and layer, for as long as the stream lives: captured graphs hold it.
    pub(super) fn origin(&self, call: &'static str, of: Origin) -> Result<i64> {
        numbered(call, &mut self.inner.origins.lock().unwrap_or_else(PoisonError::into_inner), of)
    }

    /// A call that follows maps and segments, and the operand that they are of, as a fault's detail has them.
    pub(super) fn site(&self, call: MappedCall, of: Origin, operand: params::Operand) -> Result<i64> {
        Ok(site(call, self.origin(call.name(), of)?, operand))
    }

    /// Clears the words when the stream gets there.
    pub(super) fn reset_status(&self, call: &'static str) -> Result<()> {
        self.not_captured(call, "clear the status words")?;
        self.bind(call)?;
        self.inner.report.clear_words(call)
    }

    /// Has what kernels of this stream have found so far told to nobody: a failure source of its own that goes had failed,
    /// and they went on with memory that nobody had written. What work that follows finds is told. Streams that have adopted
    /// the source forget what they have found by their next wait.
    #[cfg(feature = "nccl")]
    pub(crate) fn forget_faults_of_failed_source(&self, call: &'static str) {
        self.inner.failure_sources.note_end_of_failed();
        // Nothing may be enqueued behind what may never end.
        let stuck = self.inner.functions.stuck.is();
        if stuck || self.reset_status(call).is_err() {
            // By the next wait then, which takes what work that follows has found for the same.
            self.inner.failure_sources.note_uncleared();
        }
    }

    /// Waits for the stream; returns and clears what kernels have found, the one error that is told of it.
    pub(super) fn faults(&self, call: &'static str) -> Result<()> {
        let mut bytes = [0u8; BYTES];
        self.read_bytes(call, self.inner.status, &mut bytes)?;
        if self.inner.failure_sources.take_failed() {
            // Behind a communicator that has ended: its kernels went on with memory that nobody had written.
            self.reset_status(call)?;
            self.inner.report.clear_mirror();
            return Ok(());
        }
        let mut words = CLEAR;
        words.iter_mut().zip(bytes.as_chunks().0).for_each(|(word, b)| *word = u64::from_ne_bytes(*b));
        let origins = self.inner.origins.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(error) = (Raised { call, words, origins: &origins }).error() else {
            // Kernels copy no words that tell nothing.
            self.inner.report.clear_mirror();
            return Ok(());
        };
        self.reset_status(call)?;
        self.inner.report.clear_mirror();
        Err(error)
    }

    /// The error of a fault that a kernel has told the host of.
    #[cfg(feature = "nccl")]
    pub(super) fn error_of(&self, call: &'static str, fault: u64) -> Option<Error> {
        let mut words = CLEAR;
        words[FAULT] = fault;
        let origins = self.inner.origins.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Raised { call, words, origins: &origins }.error()
    }
}

fn numbered(call: &'static str, known: &mut Vec<Origin>, of: Origin) -> Result<i64> {
    let number = known.iter().position(|o| *o == of).unwrap_or(known.len());
    if number == known.len() {
        if number == ORIGINS {
            let most = format!("at most {ORIGINS} layers and ranks on one stream");
            return Err(Error::invalid(call, "layer", most, format!("{of:?} beside as many others")));
        }
        known.push(of);
    }
    Ok(number as i64)
}

/// Faults that kernels have raised.
struct Raised<'a> {
    /// The call that asks.
    call: &'static str,
    words: [u64; WORDS],
    origins: &'a [Origin],
}

impl Raised<'_> {
    fn word(&self, word: params::StatusWord) -> u64 {
        self.words[word as usize]
    }

    fn origin(&self, number: u64) -> Origin {
        self.origins.get(number as usize).copied().unwrap_or_default()
    }

    /// The fault in the words, as the error that the CPU returns where it finds the same; `None`: nothing.
    fn error(&self) -> Option<Error> {
        let (nan, fault) = (self.word(params::STATUS_NAN), self.word(params::STATUS_FAULT));
        // The smallest detail of the largest code is what was raised first, in the order of the tensors.
        let (code, detail) = (fault >> params::FAULT_DETAIL_BITS, DETAIL - (fault & DETAIL));
        if nan != CLEAR[NAN] && code != params::FAULT_PEER {
            let Origin { rank, layer } = self.origin(nan % ORIGINS as u64);
            let place = nan >> params::ORIGIN_BITS;
            let token = (place >> params::NAN_EXPERT_BITS) as usize;
            let expert = (place & ((1 << params::NAN_EXPERT_BITS) - 1)) as usize;
            return Some(Error::NanLogits { call: "route", rank, layer, token, expert });
        }
        if fault == CLEAR[FAULT] {
            return None;
        }
        Some(match code {
            params::FAULT_SEGMENT | params::FAULT_MAP => self.mapped(code, detail),
            params::FAULT_ID => self.routed_id(detail),
            params::FAULT_SUMS => {
                let Origin { rank, layer } = self.origin(detail % ORIGINS as u64);
                Error::EmptySums { call: ROUTE_BWD, rank, layer }
            }
            params::FAULT_CHOICE => self.choice(fault, detail),
            params::FAULT_CAPACITY => self.capacity(),
            params::FAULT_RECORD => self.record(fault, detail),
            params::FAULT_PEER => self.late_peer(detail),
            code => Error::UnknownFault { call: self.call, code, detail },
        })
    }

    /// A segment, or an entry of a map, in the call whose site is in the detail.
    fn mapped(&self, code: u64, detail: u64) -> Error {
        let Some(FaultSite { call, map, origin, entry }) = FaultSite::of(detail) else {
            return Error::UnknownFault { call: self.call, code, detail };
        };
        let (call, Origin { rank, layer }) = (call.name(), self.origin(origin));
        if code == params::FAULT_MAP {
            let found = self.found(params::STATUS_MAP_FOUND, entry).map(|found| i64::from(found as i32));
            return Error::RowMap { call, rank, layer, map: map.to_string(), entry: entry as usize, found };
        }
        let half = |at| self.found(params::STATUS_SEGMENT_FOUND + at, entry).map(u64::from);
        let whole = |at| Some((half(at)? | half(at + 2)? << 32) as i64);
        let found = whole(0).zip(whole(4));
        Error::Segment { call, rank, layer, segment: entry as usize, found }
    }

    /// The value that was met at an entry; `None` where that was not the same in all calls that met one there.
    fn found(&self, words: params::StatusWord, entry: u64) -> Option<u32> {
        let (largest, smallest) = (self.word(words), self.word(words + 1));
        let of_entry = |word: u64| u64::from(u32::MAX) - (word >> 32) == entry;
        let one = of_entry(largest) && of_entry(smallest) && largest as u32 == !(smallest as u32);
        one.then_some(largest as u32)
    }

    fn choice(&self, fault: u64, detail: u64) -> Error {
        let sizes = self.word(params::STATUS_CHOICE_SIZES);
        let (num_experts, k) = ((sizes >> 32) as usize, (sizes & ROWS) as usize);
        let choice = (detail >> params::ORIGIN_BITS) as usize;
        if self.word(params::STATUS_CHOICE) != fault || k == 0 {
            // The walk that tells the id did not run: a driver's error came between.
            let expected = "-1, or an expert that the token has not chosen yet";
            return Error::invalid(
                self.call,
                format!("topk_ids, choice {choice} (seen by a kernel)"),
                expected,
                "another number",
            );
        }
        let Origin { rank, layer } = self.origin(detail % ORIGINS as u64);
        let problem = match self.word(params::STATUS_CHOICE_FIRST).checked_sub(1) {
            Some(first) => IdProblem::Duplicate { first: first as usize },
            None => IdProblem::OutOfRange { num_experts },
        };
        let id = self.word(params::STATUS_CHOICE_ID) as i64;
        Error::ExpertId { call: PREPARE, rank, layer, token: choice / k, k: choice % k, id, problem }
    }

    /// A bad id that a rank has masked, as that rank's own prepare would tell it; else a record with another problem.
    fn record(&self, fault: u64, detail: u64) -> Error {
        let Origin { rank, layer } = self.origin(detail % ORIGINS as u64);
        if self.word(params::STATUS_RECORD) != fault {
            let peer = (detail >> params::ORIGIN_BITS) as usize;
            return Error::OddRecord { call: self.call, rank, layer, peer };
        }
        let [rank, token, k, id, first] = std::array::from_fn(|i| self.words[params::STATUS_RECORD_BAD as usize + i]);
        BadId {
            rank: rank as usize,
            layer: self.word(params::STATUS_RECORD_LAYER) as u32,
            token: token as usize,
            k: k as usize,
            id: id as i64,
            first: first.checked_sub(1).map(|first| first as usize),
        }
        .error(self.word(params::STATUS_RECORD_EXPERTS) as usize)
    }

    /// A rank that was waited for in vain (`give_up` in `kernels/common/nvlink.cuh`).
    fn late_peer(&self, detail: u64) -> Error {
        let (Origin { rank, layer }, about) = (self.origin(detail % ORIGINS as u64), detail >> params::ORIGIN_BITS);
        let peer = (about & ((1 << params::NVLINK_PEER_BITS) - 1)) as usize;
        let problem = match (about >> params::NVLINK_PEER_BITS) as params::NvLinkPhase {
            params::NVLINK_WAIT_READY => "did not come to the call in time",
            params::NVLINK_WAIT_DONE => "did not end the call in time",
            params::NVLINK_WAIT_ROW => "did not send a row in time",
            params::NVLINK_WAIT_MARK => "did not send an expert's rows in time",
            _ => "had given up, in this call or an earlier one",
        };
        Error::LatePeer { call: self.call, rank, layer, peer, problem }
    }

    /// The first id of a backward that names no expert.
    fn routed_id(&self, detail: u64) -> Error {
        let (choice, Origin { rank, layer }) = (detail >> params::ORIGIN_BITS, self.origin(detail % ORIGINS as u64));
        // Of another choice, where this one's number has more bits than the words keep of it: nothing is known then.
        let below = |word| {
            let word = self.word(word);
            (u64::from(u32::MAX) - (word >> 32) == choice).then_some(word as u32)
        };
        let words = (below(params::STATUS_ID), below(params::STATUS_ID_TOP_K), below(params::STATUS_ID_EXPERTS));
        let (Some(id), Some(top_k @ 1..), Some(num_experts)) = words else {
            let name = format!("tensor ids, choice {choice}, on rank {rank}, layer {layer}");
            return Error::invalid(ROUTE_BWD, name, "an expert, as `route` gave it", "another number");
        };
        let (choice, top_k) = (choice as usize, top_k as usize);
        let problem = IdProblem::NotRouted { num_experts: num_experts as usize };
        let (token, k, id) = (choice / top_k, choice % top_k, i64::from(id as i32));
        Error::ExpertId { call: ROUTE_BWD, rank, layer, token, k, id, problem }
    }

    fn capacity(&self) -> Error {
        const RANKS: u64 = 1 << params::NEEDED_RANK_BITS;
        let (word, rows) = (self.word(params::STATUS_NEEDED_RANK), self.word(params::STATUS_NEEDED_ROWS));
        let Origin { layer, .. } = self.origin(word % ORIGINS as u64);
        let rank = (word >> params::ORIGIN_BITS) % RANKS;
        let needed = word >> (params::ORIGIN_BITS + params::NEEDED_RANK_BITS);
        let (rank, needed, capacity) = (rank as usize, needed as usize, (ROWS - (rows & ROWS)) as usize);
        Error::Capacity { rank, layer, needed, capacity }
    }
}
