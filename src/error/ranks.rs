//! Errors before there is a communicator.

use std::fmt;
use std::time::Duration;

use super::text::printable;

/// A rank does not know who it is, or the ranks did not find each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// No launcher has set this process's rank.
    #[error(
        "identity: no launcher found: none of {looked_for} is set; start with moebius-run, torchrun, mpirun or srun"
    )]
    NotLaunched {
        /// Variables that would have told.
        looked_for: String,
    },
    /// Some variables of a launcher are set, others are not.
    #[error("identity: {present} set, but not {missing}{hint}")]
    Partial {
        /// Variables that are set.
        present: String,
        /// Variables that are needed beside them.
        missing: String,
        /// Advice; may be empty.
        hint: &'static str,
    },
    /// Two launchers' variables contradict each other.
    #[error("identity: {variable} = {value}, but {other} = {other_value}; unset one, or choose by MOEBIUS_LAUNCHER")]
    Conflict {
        /// A variable.
        variable: &'static str,
        /// Its value.
        value: usize,
        /// The variable it contradicts.
        other: &'static str,
        /// Its value.
        other_value: usize,
    },
    /// A variable's value is impossible.
    #[error("identity: {variable}: expected {expected}, found {found}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// Values that it may have.
        expected: String,
        /// Its value; never a secret.
        found: String,
    },
    /// The launcher tells of no address where the ranks could meet.
    #[error("bootstrap: {launcher} names no address; set MOEBIUS_ADDRESS to host:port of rank 0 on every rank")]
    NoAddress {
        /// Who started this rank.
        launcher: Launcher,
    },
    /// The operating system refused.
    #[error("bootstrap on rank {rank}: {operation} {address}: {message}")]
    Network {
        /// This rank.
        rank: usize,
        /// The operation asked of the system.
        operation: &'static str,
        /// The address concerned.
        address: String,
        /// The system's message.
        message: String,
    },
    /// Rank 0: not every rank came in time.
    #[error("bootstrap on rank 0: ranks {missing:?} did not come within {timeout:?}{}", list(refused))]
    Missing {
        /// Ranks that had not come.
        missing: Vec<usize>,
        /// The configured limit.
        timeout: Duration,
        /// The first few connections that were refused, and why: often the missing ranks.
        refused: Vec<String>,
    },
    /// Rank 0: these ranks came, and were gone before they had the id.
    #[error("bootstrap on rank 0: ranks {ranks:?} left before they had the id")]
    Left {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Rank 0 did not answer.
    #[error("bootstrap on rank {rank}: no answer from rank 0 at {address} within {timeout:?}; last: {last}")]
    Unreachable {
        /// This rank.
        rank: usize,
        /// Where rank 0 should be.
        address: String,
        /// The configured limit.
        timeout: Duration,
        /// How the last attempt ended.
        last: String,
    },
    /// Rank 0 refused this rank.
    #[error("bootstrap on rank {rank}: rank 0 at {address} refused: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Where rank 0 is.
        address: String,
        /// Why.
        reason: Refusal,
    },
    /// Rank 0 gave up, since other ranks did not come.
    #[error("bootstrap on rank {rank}: rank 0 gave up: {count} ranks did not come, among them {missing:?}")]
    GaveUp {
        /// This rank.
        rank: usize,
        /// How many were missing.
        count: usize,
        /// Those below 1024.
        missing: Vec<usize>,
    },
    /// Rank 0 could not make the id.
    #[error("bootstrap on rank {rank}: rank 0 failed: {}", printable(.reason))]
    RootFailed {
        /// This rank.
        rank: usize,
        /// The start of its error, as text.
        reason: String,
    },
    /// The process that answers at the address is no rank 0 of this version.
    #[error("bootstrap on rank {rank}: {address} does not speak this protocol: {problem}")]
    Message {
        /// This rank.
        rank: usize,
        /// Who answered.
        address: String,
        /// The problem with the answer.
        problem: &'static str,
    },
}

/// Why rank 0 turned a connection away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The first message is not one of this protocol and version.
    #[error("message not of this protocol and version")]
    Malformed,
    /// Another token than rank 0's.
    #[error("wrong token")]
    JobToken,
    /// Another round than rank 0's.
    #[error("rank 0 is in round {0}")]
    Round(u32),
    /// Another number of ranks than rank 0's.
    #[error("rank 0 expects a world of {0} ranks")]
    World(u32),
    /// No rank of this world.
    #[error("rank {0} is out of range")]
    OutOfRange(u32),
    /// This rank is there already, or is 0.
    #[error("rank {0} is there already")]
    Duplicate(u32),
}

fn list(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; refused: {}", refused.join(", ")) }
}

/// The program that started this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// The caller of [`Identity::new`](crate::ranks::Identity::new).
    Explicit,
    /// `moebius-run`.
    Moebius,
    /// torchrun, or its variables set by hand.
    Torchrun,
    /// mpirun: Open MPI, or one that speaks PMI (MPICH, Intel MPI).
    Mpirun,
    /// `srun`.
    Slurm,
}

impl Launcher {
    /// Lower-case name, as in `MOEBIUS_LAUNCHER`.
    pub const fn name(self) -> &'static str {
        match self {
            Launcher::Explicit => "explicit",
            Launcher::Moebius => "moebius",
            Launcher::Torchrun => "torchrun",
            Launcher::Mpirun => "mpirun",
            Launcher::Slurm => "slurm",
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
