//! Tokens between the GPUs of a host by this crate's own kernels, which store into windows of the peers' memory.
//!
//! ```text
//! zones       memory that rows arrive in, and who has it
//! records     the ranks' records of a prepare
//! memory      the group's memory on all ranks, and when it is given back
//! dispatcher  the dispatcher's calls over it
//! join        whether every rank can have it
//! low_latency the dispatcher of few tokens, over the same windows
//! ```

mod dispatcher;
mod join;
mod low_latency;
mod memory;
mod records;
mod zones;

pub(crate) use dispatcher::NvLink;
pub(crate) use low_latency::NvLinkLowLatency;
