//! A rank's communicator: how it is made, its collectives, and the memory they move.

pub(in crate::nccl) mod collectives;
pub(in crate::nccl) mod communicator;
pub(in crate::nccl) mod copy_engines;
mod heuristics;
pub(in crate::nccl) mod init;
pub(in crate::nccl) mod one_sided;
pub(in crate::nccl) mod p2p;
pub(in crate::nccl) mod peer_memory;
pub(in crate::nccl) mod reduce;
pub(in crate::nccl) mod replays;
pub(in crate::nccl) mod session;
#[cfg(feature = "nccl-ep")]
pub(in crate::nccl) mod shared_comm;
pub(in crate::nccl) mod symmetric;
