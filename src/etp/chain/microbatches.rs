//! Numbers of backward passes, which all ranks compare before sums over replicas begin, and the tags of these collectives.

use crate::comm::{Op, Tag};
use crate::error::{CommError, Error, Result};

use crate::etp::collective_thread::CollectiveThread;
use crate::etp::{NO_LAYER, ShardDevice};

/// Tag of the collective in which ranks compare their numbers of microbatches.
pub(super) const COUNTS: Tag = Tag { layer: 0, op: Op::GradReduce, sequence: Tag::PASSES };

/// Tag of the collective in which ranks compare their numbers of backward passes before the step's last.
pub(super) const LAST: Tag = Tag { layer: NO_LAYER, op: Op::GradReduce, sequence: Tag::PASSES };

/// Tag of the collective in which ranks meet behind their sums.
pub(super) const END: Tag = Tag { layer: NO_LAYER, op: Op::GradReduce, sequence: u64::MAX };

/// Tag of a weight's sum over replicas.
pub(super) fn sum_tag(layer: u32, weight: usize) -> Tag {
    Tag { layer, op: Op::GradReduce, sequence: u64::MAX - 2 - weight as u64 }
}

/// Compares the ranks' numbers of backward passes on a collective thread; the host waits for them.
pub(super) fn compare_counts<D: ShardDevice>(
    call: &'static str,
    thread: &CollectiveThread<D>,
    tag: Tag,
    own: u64,
) -> Result<()> {
    let all = thread.compare(tag, own).map_err(other_passes)?;
    same_count(call, own, &all)
}

/// Refuses numbers of microbatches of which one is not this rank's.
pub(super) fn same_count(call: &'static str, own: u64, all: &[u64]) -> Result<()> {
    match all.iter().enumerate().find(|(_, other)| **other != own) {
        None => Ok(()),
        Some((peer, other)) => Err(Error::invalid(call, "microbatches", format!("{other}, as on rank {peer}"), own)),
    }
}

/// The error of ranks of which one ends the step, or says that its last backward comes, while another begins one more
/// pass, or does the other of the two: they are in different comparisons, or one of them in a gather.
pub(super) fn other_passes(error: Error) -> Error {
    let place = |tag| match tag {
        COUNTS | END => "the end of the step",
        LAST => "Chain::last_backward",
        _ => "a further pass",
    };
    match error {
        Error::Comm(CommError::TagMismatch { tag, peer, peer_tag, .. }) if place(tag) != place(peer_tag) => {
            let theirs = place(peer_tag);
            let expected = format!("as many as on rank {peer}, which is in {theirs}");
            Error::invalid("Chain::finish", "microbatches", expected, place(tag))
        }
        error => error,
    }
}
