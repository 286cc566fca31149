//! Errors that a device has found in all ranks' records while the host did not wait: kept on the device, the same on
//! all ranks, until somebody asks.
//!
//! ```text
//! ERRORS_WORDS · 8 bytes  kind; for a capacity: rank, rows needed, rows there are; two of the device's own; its layer
//! R · HEADER bytes       headers of the records in question
//! ```

use crate::error::{Error, Result};

use super::routing_record::{self, HEADER, RecordSizes, RoutingRecord};

/// Words before the headers.
pub(crate) const ERRORS_WORDS: usize = 8;
/// The word that has the layer of a capacity.
pub(crate) const LAYER: usize = 6;
/// Nothing; must be zero, as the memory is cleared with it.
const NOTHING: u64 = 0;
/// A rank has failed or masked an id, or they disagree: the headers say which.
pub(crate) const RECORDS: u64 = 1;
/// A rank has too few rows.
pub(crate) const CAPACITY: u64 = 2;

/// Bytes of it.
pub(crate) fn bytes(ranks: usize) -> usize {
    ERRORS_WORDS * 8 + ranks * HEADER
}

/// Whether something is kept.
pub(crate) fn any(bytes: &[u8]) -> bool {
    word(bytes, 0) != NOTHING
}

fn word(bytes: &[u8], i: usize) -> u64 {
    bytes.as_chunks().0.get(i).map_or(NOTHING, |w| u64::from_le_bytes(*w))
}

/// Keeps the headers of these records.
pub(crate) fn store_headers(bytes: &mut [u8], records: &[u8]) {
    put(bytes, &[RECORDS]);
    let size = records.len() / ((bytes.len() - ERRORS_WORDS * 8) / HEADER);
    for (to, from) in bytes[ERRORS_WORDS * 8..].chunks_exact_mut(HEADER).zip(records.chunks_exact(size)) {
        to.copy_from_slice(&from[..HEADER]);
    }
}

/// A capacity that is too small.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SmallCapacity {
    pub rank: usize,
    pub layer: u32,
    pub needed: usize,
    pub capacity: usize,
}

/// Keeps a capacity that is too small.
pub(crate) fn store_capacity(bytes: &mut [u8], of: SmallCapacity) {
    put(bytes, &[CAPACITY, of.rank as u64, of.needed as u64, of.capacity as u64]);
    put(&mut bytes[LAYER * 8..], &[u64::from(of.layer)]);
}

fn put(bytes: &mut [u8], words: &[u64]) {
    bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
}

/// It as an error of `rank`.
pub(crate) fn error(bytes: &[u8], rank: usize, num_experts: usize) -> Option<Error> {
    let number = |i| word(bytes, i) as usize;
    match word(bytes, 0) {
        NOTHING => None,
        CAPACITY => {
            let layer = word(bytes, LAYER) as u32;
            Some(Error::Capacity { rank: number(1), layer, needed: number(2), capacity: number(3) })
        }
        _ => {
            let sizes = RecordSizes { max_tokens: 0, top_k: 0, weights: false };
            let headers = bytes[ERRORS_WORDS * 8..].chunks_exact(HEADER);
            let records: Vec<RoutingRecord> = headers.map(|header| RoutingRecord::decode(header, sizes)).collect();
            let masked = || routing_record::masked(&records).map(|bad| bad.error(num_experts));
            routing_record::problem(&records, rank, num_experts).or_else(masked)
        }
    }
}

/// Of an error that is kept here and one that the device's kernels have raised, what is told now and what by the next
/// call. What was raised may be the sign of what is kept, and is told with it then.
pub(crate) fn split_errors(raised: Result<()>, kept: Option<Error>) -> (Result<()>, Option<Error>) {
    match (raised, kept) {
        (raised, None) => (raised, None),
        (Ok(()), Some(kept)) => (Err(kept), None),
        (Err(raised), Some(kept)) => {
            let then = (!is_same_fault(&raised, &kept)).then_some(raised);
            (Err(kept), then)
        }
    }
}

fn is_same_fault(raised: &Error, kept: &Error) -> bool {
    let of_capacity = matches!(kept, Error::Capacity { .. });
    match raised {
        Error::Capacity { .. } => of_capacity,
        // Of a bad id in a record; one that another call has met is forgotten, as that of a later prepare is.
        Error::OddRecord { .. } | Error::ExpertId { .. } => !of_capacity,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::IdProblem;

    const KEPT: Error = Error::Capacity { rank: 1, layer: 2, needed: 9, capacity: 8 };

    fn reported(raised: Result<()>, kept: Option<Error>) -> (Option<String>, Option<String>) {
        let (now, then) = split_errors(raised, kept);
        (now.err().map(|e| e.to_string()), then.map(|e| e.to_string()))
    }

    fn record() -> Error {
        Error::OddRecord { call: "check", rank: 1, layer: 2, peer: 0 }
    }

    #[test]
    fn an_error_beside_the_kept_one_is_told_next() {
        let nan = || Error::NanLogits { call: "route", rank: 1, layer: 2, token: 3, expert: 1 };
        let map = || Error::invalid("check", "map[4] (seen by a kernel)", "a row", "none");
        // Of records of a later step, of which nothing could be kept any more.
        for other in [nan(), map(), record()] {
            assert_eq!(reported(Err(other.clone()), Some(KEPT)), (Some(KEPT.to_string()), Some(other.to_string())));
            assert_eq!(reported(Err(other.clone()), None), (Some(other.to_string()), None));
        }
        assert_eq!(reported(Ok(()), Some(KEPT)), (Some(KEPT.to_string()), None));
        assert_eq!(reported(Ok(()), None), (None, None));
    }

    #[test]
    fn the_sign_of_the_kept_one_is_told_with_it() {
        // The largest need of several prepares, of which the first is kept.
        let larger = Error::Capacity { rank: 0, layer: 2, needed: 11, capacity: 8 };
        for sign in [KEPT, larger] {
            assert_eq!(reported(Err(sign), Some(KEPT)), (Some(KEPT.to_string()), None));
        }
        let bad = || Error::Peer { call: "prepare", rank: 1, peer: 0, reason: "its records".into() };
        assert_eq!(reported(Err(record()), Some(bad())), (Some(bad().to_string()), None));
        let problem = IdProblem::OutOfRange { num_experts: 4 };
        let id = || Error::ExpertId { call: "prepare", rank: 0, layer: 2, token: 1, k: 0, id: 9, problem };
        assert_eq!(reported(Err(id()), Some(id())), (Some(id().to_string()), None));
        assert_eq!(reported(Err(id()), Some(KEPT)), (Some(KEPT.to_string()), Some(id().to_string())));
    }
}
