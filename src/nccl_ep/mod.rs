//! Tokens between GPUs by NVIDIA's NCCL EP (`libnccl_ep`), found at run time.
//!
//! Three layers: [`sys`] is the library's interface as its header declares it, [`result`] its calls with no exception
//! leaving them, and [`HighThroughputGroup`] and [`HighThroughputHandle`] what cannot be misused: they check what the
//! library would end the process for, and own what must outlive it. [`NcclEp`] is a
//! [`TokenDispatcher`](crate::ep::TokenDispatcher) of these.
//!
//! ```text
//! sys, result                     the interface; calls through shim.cpp
//! library                         finding it, and the compiler and folder for its kernels
//! raw_group, raw_handle           groups and handles of either mode
//! rules, tensor                   what they must keep to; how memory is described to the library
//! high_throughput, low_latency    groups and handles of one mode
//! dispatcher                      the layer's calls over these: joining, prepare, rows there and back, windows
//! ```
//!
//! The library needs GPUs of compute capability 9.0, NCCL 2.30.4, rows of a multiple of 16 bytes and 8 numbers, experts
//! that are a multiple of 4 in an NVLink domain, at most 8192 tokens of a rank and 32 choices of a token. It compiles
//! its kernels with nvcc when they are first used, about 2 seconds each ([`Compiler`]); they stay in a folder of the
//! user's.

mod dispatcher;
mod high_throughput;
mod library;
mod low_latency;
mod raw_group;
mod raw_handle;
pub mod result;
mod rules;
pub mod sys;
mod tensor;

pub use crate::error::NcclEpError;
pub use dispatcher::NcclEp;
pub use high_throughput::{
    CombineArgs, DispatchArgs, HandleOptions, HighThroughputGroup, HighThroughputHandle, HighThroughputOptions,
    PassDirection, UpdateCounters,
};
pub use library::{Compiler, NCCL_EP_LIBRARY_VARIABLE, NcclEpLibrary};
pub use low_latency::{
    LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyGroup, LowLatencyHandle, LowLatencyLayout,
    LowLatencyOptions, LowLatencyReceiveArgs,
};
