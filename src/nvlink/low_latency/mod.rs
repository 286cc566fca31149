//! Few tokens between the GPUs of a host, forward only: rows travel in packets that say themselves that they have come.
//!
//! ```text
//! banks       memory that packets arrive in
//! dispatcher  the dispatcher's calls over it
//! ```

mod banks;
mod dispatcher;

pub(crate) use dispatcher::NvLinkLowLatency;
