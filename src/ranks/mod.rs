//! Ranks that are processes: who this one is, how a group's id reaches all of them, and how a world divides.
//!
//! * [`Identity`]: rank, world, local rank and rendezvous address, from `moebius-run`, torchrun, mpirun or Slurm.
//! * [`Bootstrap`]: carries the 128 bytes with which a communicator is made from rank 0 to all others, over TCP.
//! * [`Mesh`]: the groups of a world: experts, sliced experts, data, tensor.
//!
//! # What is trusted
//! The bootstrap is for that one id and never for payload. Rank 0 answers a connection only if it shows the job's
//! [`JobToken`], which keeps out strangers and other jobs that can connect; it travels in the clear and does not keep out
//! whoever can read the network. NCCL itself, which takes over from there, authenticates nobody: its ports must be
//! reachable by the job's own machines only.

mod address;
mod bootstrap;
mod deadline;
mod env;
mod exchange;
#[doc(hidden)]
pub mod fuzzing;
mod join;
mod mesh;
mod message;
mod nodes;
mod root;
mod token;

pub use crate::error::{Launcher, RankError, Refusal};
pub use bootstrap::Bootstrap;
pub use env::{Identity, VARIABLES};
pub use mesh::{Axis, AxisSize, GroupMember, Mesh};
pub use message::UniqueId;
pub use root::Root;
pub use token::JobToken;

/// The page's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/ranks.md")]
struct RanksPage;

/// More ranks than any job has; keeps what a wrong number can reserve small.
pub(crate) const MAX_WORLD: usize = 1 << 16;
