//! Events that ranks tell each other beside NCCL: that one refuses a collective, or is gone. Posted by whoever hears of
//! it, looked at before each collective and, while one runs, by the watchdog.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::comm::Tag;
use crate::error::CommError;

use crate::nccl::control::call_descriptor::CallDescriptor;

/// How long a collective goes on after a process is gone: one that exits without dropping its communicator may have
/// done its part.
const GRACE: Duration = Duration::from_millis(300);

/// What the replay of a graph with collectives is called, all of which are one.
pub(in crate::nccl) const REPLAY: &str = "replay";

/// Announced calls that are remembered: others have been compared long since, or never will be.
const ANNOUNCED: usize = 64;

/// The messages of one communicator.
#[derive(Debug, Default)]
pub(in crate::nccl) struct PeerEvents {
    /// Whether this rank compares its collectives with the others' before each.
    pub(in crate::nccl) checked: bool,
    /// Number of ranks that are processes.
    size: usize,
    state: Mutex<EventState>,
}

#[derive(Debug, Default)]
struct EventState {
    /// Ranks that left, and the last collective that each took part in.
    left: BTreeMap<usize, u64>,
    /// Ranks whose processes are gone without a word, and since when.
    lost: BTreeMap<usize, Instant>,
    /// The refusals by the number of the collective.
    refused: BTreeMap<u64, PeerRefusal>,
    /// Those that ranks meet for, so that others need not hear of them here, but for one that replays a graph and does not
    /// come.
    met: BTreeMap<u64, PeerRefusal>,
    /// A rank that has aborted its communicator.
    aborted: Option<usize>,
    /// A rank that compares its collectives, or does not, unlike this one.
    unlike: Option<usize>,
    /// Calls that ranks are about to make, by the collective's number.
    called: BTreeMap<u64, BTreeMap<usize, CallDescriptor>>,
}

#[derive(Debug, Clone)]
struct PeerRefusal {
    peer: usize,
    reason: String,
}

/// A rank's own collective, for an error about it.
#[derive(Debug, Clone, Copy)]
pub(in crate::nccl) struct CollectiveInfo {
    pub(in crate::nccl) rank: usize,
    /// Number of the collective, from 1, the same on all ranks.
    pub(in crate::nccl) number: u64,
    pub(in crate::nccl) operation: &'static str,
    pub(in crate::nccl) tag: Tag,
}

impl PeerEvents {
    pub(in crate::nccl) fn new(checked: bool, size: usize) -> Arc<Self> {
        Arc::new(Self { checked, size, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank takes part in no collective after this one.
    pub(in crate::nccl) fn record_departure(&self, rank: usize, last: u64) {
        let mut state = self.lock();
        let known = state.left.entry(rank).or_insert(last);
        *known = last.min(*known);
    }

    /// A rank's process is gone; nobody knows what it took part in.
    pub(in crate::nccl) fn lose(&self, rank: usize) {
        let mut state = self.lock();
        state.lost.entry(rank).or_insert_with(Instant::now);
        state.aborted.get_or_insert(rank);
    }

    /// A rank aborts its communicator.
    pub(in crate::nccl) fn abort(&self, rank: usize) {
        self.lock().aborted.get_or_insert(rank);
    }

    /// The first rank that has: what it has aborted the others cannot end in order.
    pub(in crate::nccl) fn aborted(&self) -> Option<usize> {
        self.lock().aborted
    }

    /// Whether every rank of `size` but this one has left, aborted or is gone.
    pub(in crate::nccl) fn others_ended(&self, rank: usize, size: usize) -> bool {
        let state = self.lock();
        let ended = |peer| state.left.contains_key(&peer) || state.lost.contains_key(&peer);
        (0..size).all(|peer| peer == rank || ended(peer))
    }

    /// A rank fails in this collective.
    pub(in crate::nccl) fn refuse(&self, peer: usize, number: u64, reason: &str) {
        self.lock().refused.entry(number).or_insert_with(|| PeerRefusal { peer, reason: reason.to_string() });
    }

    /// A rank meets the others to refuse this collective.
    pub(in crate::nccl) fn refuse_meeting(&self, peer: usize, number: u64, reason: &str) {
        self.lock().met.entry(number).or_insert_with(|| PeerRefusal { peer, reason: reason.to_string() });
    }

    /// All ranks have met there: none of them replays a graph.
    pub(in crate::nccl) fn have_met(&self, number: u64) {
        self.lock().met.remove(&number);
    }

    /// Whether a rank compares its collectives.
    pub(in crate::nccl) fn compares(&self, rank: usize, checked: bool) {
        if checked != self.checked {
            self.lock().unlike.get_or_insert(rank);
        }
    }

    /// A rank is about to make this collective.
    pub(in crate::nccl) fn call(&self, rank: usize, number: u64, call: CallDescriptor) {
        if let Some(reason) = call.refusal() {
            self.refuse_meeting(rank, number, reason);
        }
        let mut state = self.lock();
        let calls = state.called.entry(number).or_default();
        calls.insert(rank, call);
        if self.checked {
            return;
        }
        // Nobody takes them: what is known to be the same everywhere is done with, and so is what lies far behind.
        if calls.len() == self.size && calls.values().all(|call| calls.values().next() == Some(call)) {
            state.called.remove(&number);
        }
        while state.called.len() > ANNOUNCED {
            state.called.pop_first();
        }
    }

    /// Calls of `size` ranks, in their order, once all have said theirs; until then who has not.
    pub(in crate::nccl) fn called(&self, number: u64, size: usize) -> Result<Vec<CallDescriptor>, Vec<usize>> {
        let mut state = self.lock();
        let of = |state: &EventState, rank| state.called.get(&number).is_some_and(|calls| calls.contains_key(&rank));
        let missing: Vec<usize> = (0..size).filter(|rank| !of(&state, *rank)).collect();
        match missing.is_empty() {
            true => {
                // None of them replays a graph.
                state.met.remove(&number);
                Ok(state.called.remove(&number).unwrap_or_default().into_values().collect())
            }
            false => Err(missing),
        }
    }

    /// Why a collective will not end, if that is known.
    pub(in crate::nccl) fn fault(&self, subject: CollectiveInfo) -> Option<CommError> {
        let CollectiveInfo { rank, number, operation, tag } = subject;
        let state = self.lock();
        if let Some(peer) = state.unlike {
            let says = |checked| format!("MOEBIUS_CHECKED={}", u8::from(checked));
            let (value, peer_value) = (says(self.checked), says(!self.checked));
            return Some(CommError::ArgumentMismatch { operation, tag, rank, peer, value, peer_value });
        }
        if !self.checked {
            let differing = state.called.range(..=number).find_map(|(_, calls)| {
                let own = calls.get(&rank)?;
                let (peer, theirs) = calls.iter().find(|(_, call)| !call.is_same_call(own))?;
                Some((own.call(operation), *peer, theirs.call(operation)))
            });
            if let Some((own, peer, theirs)) = differing {
                let (peer_operation, peer_tag) = (theirs.operation, theirs.tag);
                let (operation, tag) = (own.operation, own.tag);
                return Some(CommError::TagMismatch { operation, tag, rank, peer, peer_operation, peer_tag });
            }
        }
        // A refusal of an earlier one has ended the communicator too. What this rank has refused itself it need not
        // hear.
        let refused = state.refused.range(..=number).find(|(_, refusal)| refusal.peer != rank);
        let met = || state.met.get_key_value(&number).filter(|(_, met)| operation == REPLAY && met.peer != rank);
        let refused = refused.or_else(met);
        if let Some((_, PeerRefusal { peer, reason })) = refused {
            return Some(CommError::Refused { operation, tag, rank, peer: *peer, reason: reason.clone() });
        }
        let left = state.left.iter().find(|(peer, last)| **last < number && **peer != rank).map(|(peer, _)| peer);
        let lost = || state.lost.iter().find(|(_, since)| since.elapsed() >= GRACE).map(|(peer, _)| peer);
        let peer = left.or_else(lost)?;
        Some(CommError::PeerGone { operation, tag, rank, peer: *peer })
    }
}
