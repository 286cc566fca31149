//! NCCL as it is: the library, its interface, its calls on one communicator and its windows.

pub(in crate::nccl) mod comm_handle;
pub(in crate::nccl) mod enqueue;
pub(in crate::nccl) mod library;
pub mod sys;
pub(in crate::nccl) mod windows;
