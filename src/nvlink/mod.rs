//! Tokens between the GPUs of a host by this crate's own kernels, which store into windows of the peers' memory.
//!
//! ```text
//! zones       memory that rows arrive in, and who has it
//! records     the ranks' records of a prepare
//! memory      the group's memory on all ranks, and when it is given back
//! dispatcher  the dispatcher's calls over it
//! join        whether every rank can have it
//! ```

mod dispatcher;
mod join;
mod memory;
mod records;
mod zones;

pub(crate) use dispatcher::NvLink;
