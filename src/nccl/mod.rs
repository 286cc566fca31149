//! Ranks on several GPUs, over NCCL.
//!
//! NCCL is found at run time ([`NcclLibrary`]); a build needs nothing of it.

mod comm;
mod error;
mod library;
mod link;
pub mod sys;

#[cfg(feature = "nccl-ep")]
pub(crate) use comm::Shared;
pub use comm::{NcclComm, Raw};
pub use error::NcclError;
pub use library::{NcclLibrary, VARIABLE};

use crate::error::Error;

/// What the operating system refused.
fn system(operation: &'static str, error: std::io::Error) -> Error {
    Error::Device { call: "nccl", operation: operation.to_string(), message: error.to_string() }
}
