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
//! ffi       finding NCCL, its interface, its calls on one communicator, how that ends; windows
//! comm      how ranks join; a rank's communicator and its calls; what libraries on top need
//! options   what a communicator's collectives may take of a GPU
//! control   what ranks tell each other: calls compared, refusals, ends; the watchdog
//! ```

mod comm;
mod control;
mod ffi;
mod options;
#[cfg(test)]
mod tests;

pub use crate::error::NcclError;
pub(crate) use comm::communicator::TravelingRow;
pub use comm::communicator::{CommParts, NcclComm};
pub use comm::init::NcclWorld;
pub(crate) use comm::peer_memory::PeerMemory;
#[cfg(feature = "nccl-ep")]
pub(crate) use comm::shared_comm::SharedComm;
#[cfg(feature = "nccl-ep")]
pub(crate) use ffi::library::reason;
pub use ffi::library::{LIBRARY_VARIABLE, NcclLibrary};
pub use ffi::sys;
pub use ffi::windows::NcclWindow;
pub use options::NcclOptions;

use crate::error::Error;

/// The page's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/nccl.md")]
struct NcclPage;

/// Error of an operation that the operating system refused.
fn system(operation: &'static str, error: std::io::Error) -> Error {
    Error::Device { call: "nccl", operation: operation.to_string(), message: error.to_string() }
}
