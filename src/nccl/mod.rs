//! Ranks on several GPUs, over NCCL, which is found at run time ([`NcclLibrary`]); a build needs nothing of it.
//!
//! * [`NcclComm::threads`]: ranks as threads of this process. Their hosts meet before each collective and compare it,
//!   so a disagreement or a refusal is an error on each rank and the communicator goes on.
//! * [`NcclComm::join`]: ranks as processes. They hear at once of one that refuses or dies; that ends the communicator.
//! * [`NcclComm::split`], [`NcclComm::group`]: parts of them.
//!
//! Collectives are enqueued. What goes wrong later, a watchdog finds; see [`NcclComm`]. `docs/nccl.md` is the guide.
//!
//! ```text
//! library, sys                                  finding NCCL, and its interface
//! world, wire, message                          how ranks join
//! comm: collectives, pairs, symmetric, sums     a rank's communicator and its calls; lane: NCCL's own
//! seat                                          the same as hosts see it, without a GPU
//! board, notices, watch, link                   what ranks hear of each other, and how a communicator ends
//! built                                         what libraries on top need
//! ```

mod board;
#[cfg(feature = "nccl-ep")]
mod built;
mod collectives;
mod comm;
mod engines;
mod error;
mod lane;
mod library;
mod link;
mod message;
mod notices;
mod pairs;
mod puts;
mod seat;
mod spoken;
mod sums;
mod symmetric;
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
#[cfg(feature = "nccl-ep")]
pub(crate) use library::reason;
pub use library::{NcclLibrary, VARIABLE};
pub use symmetric::NcclWindow;
pub use world::NcclWorld;

use crate::error::Error;

/// The page's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/nccl.md")]
struct Page;

/// What the operating system refused.
fn system(operation: &'static str, error: std::io::Error) -> Error {
    Error::Device { call: "nccl", operation: operation.to_string(), message: error.to_string() }
}
