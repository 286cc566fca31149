//! What ranks tell each other beside NCCL: that one refuses a collective, or is gone. Posted by whoever hears of it,
//! looked at before each collective and, while one runs, by the watchdog.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::comm::Tag;
use crate::error::CommError;

/// The notices of one communicator.
#[derive(Debug, Default)]
pub(super) struct Notices(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Ranks that left, and the last collective that each took part in.
    left: BTreeMap<usize, u64>,
    /// The refusals by the number of the collective.
    refused: BTreeMap<u64, Refusal>,
}

#[derive(Debug, Clone)]
struct Refusal {
    peer: usize,
    reason: String,
}

/// A rank's own collective, for an error about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    pub(super) rank: usize,
    /// Number of the collective, from 1, the same on all ranks.
    pub(super) number: u64,
    pub(super) operation: &'static str,
    pub(super) tag: Tag,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank takes part in no collective after this one.
    pub(super) fn leave(&self, rank: usize, last: u64) {
        let mut state = self.lock();
        let known = state.left.entry(rank).or_insert(last);
        *known = last.min(*known);
    }

    /// A rank fails in this collective.
    pub(super) fn refuse(&self, peer: usize, number: u64, reason: &str) {
        self.lock().refused.entry(number).or_insert_with(|| Refusal { peer, reason: reason.to_string() });
    }

    /// Why a collective will not end, if that is known.
    pub(super) fn fault(&self, subject: Subject) -> Option<CommError> {
        let Subject { rank, number, operation, tag } = subject;
        let state = self.lock();
        // A refusal of an earlier one has ended the communicator too.
        if let Some((_, Refusal { peer, reason })) = state.refused.range(..=number).next() {
            return Some(CommError::Refused { operation, tag, rank, peer: *peer, reason: reason.clone() });
        }
        let (peer, _) = state.left.iter().find(|(peer, last)| **last < number && **peer != rank)?;
        Some(CommError::PeerGone { operation, tag, rank, peer: *peer })
    }
}
