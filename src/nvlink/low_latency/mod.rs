//! Few tokens between the GPUs of a host, forward only: rows travel in packets, each with the number of its call, by
//! which the receiver knows that it has come.
//!
//! ```text
//! banks       memory that packets arrive in
//! records     the ranks' records of a prepare, with patience
//! dispatcher  the dispatcher's calls over it
//! ```

mod banks;
mod dispatcher;
mod records;

pub(crate) use dispatcher::NvLinkLowLatency;
