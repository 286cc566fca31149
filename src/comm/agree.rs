//! Comparison of calls before ranks exchange anything: the call, its purpose, its arguments and its sizes.

use std::time::Duration;

use crate::dtype::DType;
use crate::error::CommError;

use super::rendezvous::Failure;
use super::{ReduceOp, Tag};

/// One rank's side of a collective.
#[derive(Debug)]
pub(crate) struct CollectiveCall {
    pub operation: &'static str,
    pub tag: Tag,
    pub dtype: DType,
    pub detail: Detail,
    /// Bytes that this rank brings, where all bring as many.
    pub bytes: usize,
}

/// Further arguments on which the ranks must agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Detail {
    Plain,
    Reduce(ReduceOp),
    Root(usize),
    Pieces {
        send: Vec<usize>,
        recv: Vec<usize>,
    },
    /// Where peers write, by a number that all ranks have for it; 0: nowhere that they could.
    #[cfg(feature = "nccl")]
    Place(u64),
    /// What travels beside a row: bytes of weights above those of scales, in halves.
    #[cfg(feature = "nccl")]
    Beside(u64),
    Refusal(String),
}

/// One error a rank, where the calls do not fit together.
pub(crate) type Verdict = Option<Vec<CommError>>;

/// Why a rank did not meet the others.
pub(crate) fn failed(
    (operation, tag): (&'static str, Tag),
    rank: usize,
    timeout: Duration,
    failure: Failure,
) -> CommError {
    match failure {
        Failure::Gone(peer) => CommError::PeerGone { operation, tag, rank, peer },
        Failure::Timeout(missing) => CommError::Timeout { operation, tag, rank, missing, timeout },
        Failure::Poisoned(missing) => {
            CommError::Poisoned { operation, tag, rank, reason: format!("ranks {missing:?} did not arrive in time") }
        }
    }
}

/// Compares the calls of all ranks.
pub(crate) fn compare_calls<'a>(messages: impl Iterator<Item = &'a CollectiveCall>) -> Verdict {
    let messages: Vec<&CollectiveCall> = messages.collect();
    let all = 0..messages.len();
    let each = |error: &dyn Fn(usize) -> CommError| Some(all.clone().map(error).collect());
    // For every rank that finds no fault with a peer of its own, the fault of another pair is its error.
    let refusing = |r: usize| {
        let refused = |p: &usize| matches!(messages[*p].detail, Detail::Refusal(_));
        all.clone().filter(|p| *p != r).find(refused).or_else(|| Some(r).filter(refused))
    };
    if refusing(0).is_some() {
        return each(&|r| {
            let (m, peer) = (messages[r], refusing(r).unwrap_or(r));
            let reason = match &messages[peer].detail {
                Detail::Refusal(reason) => reason.clone(),
                _ => String::new(),
            };
            CommError::Refused { operation: m.operation, tag: m.tag, rank: r, peer, reason }
        });
    }
    let differing = |same: &dyn Fn(&CollectiveCall, &CollectiveCall) -> bool, r: usize| {
        all.clone().find(|p| !same(messages[r], messages[*p]))
    };

    let same_call = |a: &CollectiveCall, b: &CollectiveCall| a.operation == b.operation && a.tag == b.tag;
    if differing(&same_call, 0).is_some() {
        return each(&|r| {
            let (m, peer) = (messages[r], differing(&same_call, r).unwrap_or(r));
            CommError::TagMismatch {
                operation: m.operation,
                tag: m.tag,
                rank: r,
                peer,
                peer_operation: messages[peer].operation,
                peer_tag: messages[peer].tag,
            }
        });
    }
    let same_arguments = |a: &CollectiveCall, b: &CollectiveCall| argument(a) == argument(b);
    if differing(&same_arguments, 0).is_some() {
        return each(&|r| {
            let (m, peer) = (messages[r], differing(&same_arguments, r).unwrap_or(r));
            let (value, peer_value) = (argument(m), argument(messages[peer]));
            CommError::ArgumentMismatch { operation: m.operation, tag: m.tag, rank: r, peer, value, peer_value }
        });
    }
    let wrong_size = |r: usize| all.clone().find_map(|p| sizes(&messages, r, p).map(|(want, has)| (r, p, want, has)));
    if all.clone().any(|r| wrong_size(r).is_some()) {
        return each(&|r| {
            let m = messages[r];
            let found = wrong_size(r).or_else(|| all.clone().find_map(wrong_size));
            let (rank, peer, expected, found) = found.unwrap_or((r, r, 0, 0));
            CommError::SizeMismatch { operation: m.operation, tag: m.tag, rank, peer, expected, found }
        });
    }
    None
}

/// Arguments on which ranks must agree besides operation, tag and sizes.
fn argument(m: &CollectiveCall) -> String {
    match &m.detail {
        Detail::Reduce(op) => format!("{op:?} of {}", m.dtype),
        Detail::Root(root) => format!("{} from root {root}", m.dtype),
        #[cfg(feature = "nccl")]
        Detail::Place(place) => match place {
            0 => format!("{} in no window", m.dtype),
            _ => format!("{} at place {place:#x} of the windows", m.dtype),
        },
        #[cfg(feature = "nccl")]
        Detail::Beside(parts) => {
            format!("rows of {} with {} bytes of weights and {} of scales", m.dtype, parts >> 32, *parts as u32)
        }
        _ => m.dtype.to_string(),
    }
}

/// Bytes that rank r wants of p and bytes that p sends, where they differ.
fn sizes(messages: &[&CollectiveCall], r: usize, p: usize) -> Option<(usize, usize)> {
    let (expected, found) = match (&messages[r].detail, &messages[p].detail) {
        (Detail::Pieces { recv, .. }, Detail::Pieces { send, .. }) => (recv[p], send[r]),
        _ => (messages[r].bytes, messages[p].bytes),
    };
    (expected != found).then_some((expected, found))
}
