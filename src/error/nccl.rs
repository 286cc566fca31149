//! Errors of the library itself.

use std::time::Duration;

use super::text::printable;

/// NCCL is not there, is not usable, or refused a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library cannot be loaded.
    #[error("NCCL: {path} ({source_of_path}) cannot be loaded: {message}")]
    Load {
        /// The file that was looked for.
        path: String,
        /// Who asked for it.
        source_of_path: &'static str,
        /// The loader's message.
        message: String,
    },
    /// The library lacks a function.
    #[error("NCCL: {path} ({source_of_path}) has no {symbol}; is it NCCL, of version {needed} or later?")]
    Symbol {
        /// The library.
        path: String,
        /// Who asked for it.
        source_of_path: &'static str,
        /// The function.
        symbol: &'static str,
        /// The oldest version that has all.
        needed: &'static str,
    },
    /// The library is too old.
    #[error("NCCL: {path} ({source_of_path}) is version {found}; {needed} or later is needed: {reason}")]
    Version {
        /// The library.
        path: String,
        /// Who asked for it.
        source_of_path: &'static str,
        /// Its version.
        found: String,
        /// The oldest version that will do.
        needed: &'static str,
        /// The feature that the older ones lack.
        reason: &'static str,
    },
    /// A call failed.
    #[error("NCCL: {function}: {name} ({code}){}{detail}", if detail.is_empty() { "" } else { ": " })]
    Call {
        /// The function.
        function: &'static str,
        /// Its status.
        code: i32,
        /// The library's text for it.
        name: String,
        /// The library's last message; may be empty.
        detail: String,
    },
    /// Not all ranks joined in time.
    #[error("NCCL: rank {rank} of {size}: the communicator was not made within {timeout:?}; did every rank start?")]
    Init {
        /// This rank.
        rank: usize,
        /// Ranks expected.
        size: usize,
        /// The configured limit.
        timeout: Duration,
    },
    /// The communicator has ended before this call: a collective failed or was refused, a rank was lost, or it ran past its
    /// timeout, as this rank's first error over it says. It takes no more calls: drop it, and join the ranks anew.
    #[error(
        "NCCL: rank {rank}: the communicator has ended, as an earlier error of this rank says why (a collective failed, \
         was refused or timed out, or a rank was lost): drop it and join again"
    )]
    Ended {
        /// This rank.
        rank: usize,
    },
    /// Collectives cannot be the copy engines' on some rank; told alike by all that tried, when the communicator was
    /// made.
    #[error("NCCL: rank {rank}: copy engines are of no use to this communicator: rank {peer}: {}", printable(.reason))]
    Engines {
        /// This rank.
        rank: usize,
        /// The first rank with trouble.
        peer: usize,
        /// The error.
        reason: String,
    },
    /// The library has no such function.
    #[error("NCCL: version {found} has no {function}")]
    Missing {
        /// The function.
        function: &'static str,
        /// The library's version.
        found: String,
    },
}
