//! Errors between ranks.

use std::time::Duration;

use super::text::printable_lines;
use crate::tag::Tag;

/// A collective operation failed. All ranks of a collective get an error, or none does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Not every rank arrived in time. The communicator is unusable afterwards.
    #[error("{operation} [{tag}] on rank {rank}: {} did not arrive within {timeout:?}", late(missing))]
    Timeout {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// Ranks that had not arrived; empty where that cannot be known.
        missing: Vec<usize>,
        /// The configured limit.
        timeout: Duration,
    },
    /// Ranks met in one collective with different purposes; no data was exchanged and the communicator stays usable.
    #[error("{operation} on rank {rank}: called for [{tag}], but rank {peer} called {peer_operation} for [{peer_tag}]")]
    TagMismatch {
        /// This rank's collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// A rank that disagrees.
        peer: usize,
        /// Its collective.
        peer_operation: &'static str,
        /// Purpose of the peer's call.
        peer_tag: Tag,
    },
    /// Ranks disagree about sizes; no data was exchanged.
    #[error("{operation} [{tag}] on rank {rank}: expected {expected} bytes from rank {peer}, it sends {found}")]
    SizeMismatch {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// A rank that disagrees.
        peer: usize,
        /// Bytes this rank expects.
        expected: usize,
        /// Bytes the peer sends.
        found: usize,
    },
    /// Ranks disagree about another argument (dtype, reduction, root); no data was exchanged.
    #[error("{operation} [{tag}] on rank {rank}: this rank asks for {value}, rank {peer} for {peer_value}")]
    ArgumentMismatch {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// A rank that disagrees.
        peer: usize,
        /// This rank's arguments.
        value: String,
        /// Its arguments.
        peer_value: String,
    },
    /// A rank met an error of its own before it could take part; no data was exchanged.
    #[error("{operation} [{tag}] on rank {rank}: rank {peer} failed: {}", printable_lines(.reason))]
    Refused {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// The rank that failed.
        peer: usize,
        /// Its error, as text.
        reason: String,
    },
    /// A rank left: its communicator was dropped, by an early return or a panic.
    #[error("{operation} [{tag}] on rank {rank}: rank {peer} has left the group")]
    PeerGone {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// The rank that left.
        peer: usize,
    },
    /// The transport failed: a GPU, the library between the ranks, or the network.
    #[error("{operation} [{tag}] on rank {rank}: {reason}")]
    Transport {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// The reason, as far as it is known.
        reason: String,
    },
    /// The communicator failed earlier.
    #[error("{operation} [{tag}] on rank {rank}: the communicator is unusable since: {reason}")]
    Poisoned {
        /// The collective.
        operation: &'static str,
        /// Purpose of the call.
        tag: Tag,
        /// This rank.
        rank: usize,
        /// The first failure.
        reason: String,
    },
}

fn late(missing: &[usize]) -> String {
    if missing.is_empty() { "some rank".to_string() } else { format!("ranks {missing:?}") }
}
