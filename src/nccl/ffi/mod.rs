//! NCCL as it is: the library, its interface and its calls on one communicator.

pub(in crate::nccl) mod comm_handle;
pub(in crate::nccl) mod enqueue;
pub(in crate::nccl) mod library;
pub mod sys;
