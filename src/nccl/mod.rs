//! Ranks on several GPUs, over NCCL.
//!
//! NCCL is found at run time ([`NcclLibrary`]); a build needs nothing of it.

mod board;
#[cfg(feature = "nccl-ep")]
mod built;
mod comm;
mod error;
mod lane;
mod library;
mod link;
mod notice;
mod notices;
mod sums;
pub mod sys;
#[cfg(test)]
mod tests;
mod watch;
mod wire;
mod world;

#[cfg(feature = "nccl-ep")]
pub(crate) use built::Shared;
pub use comm::{NcclComm, Raw};
pub use error::NcclError;
pub use library::{NcclLibrary, VARIABLE};
pub use world::NcclWorld;

use crate::error::Error;

/// What the operating system refused.
fn system(operation: &'static str, error: std::io::Error) -> Error {
    Error::Device { call: "nccl", operation: operation.to_string(), message: error.to_string() }
}
