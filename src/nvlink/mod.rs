//! Tokens between the GPUs of a host by this crate's own kernels, which store into windows of the peers' memory.
//!
//! ```text
//! zones       memory that rows arrive in, and who has it
//! dispatcher  the dispatcher's calls over it
//! join        whether every rank can have it
//! ```

mod dispatcher;
mod join;
mod zones;

pub(crate) use dispatcher::NvLink;
