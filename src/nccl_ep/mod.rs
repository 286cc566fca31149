//! Tokens between GPUs by NVIDIA's NCCL EP (`libnccl_ep`), found at run time.
//!
//! Three layers: [`sys`] is the library's interface as its header declares it, [`result`] its calls with no exception
//! leaving them, and [`Group`] and [`Handle`] what cannot be misused: they check what the library would end the process
//! for, and own what must outlive it. [`NcclEp`] is a [`TokenDispatcher`](crate::ep::TokenDispatcher) of these.
//!
//! The library needs GPUs of compute capability 9.0, NCCL 2.30.4, rows of a multiple of 16 bytes and 8 numbers, experts
//! that are a multiple of 4 in an NVLink domain, at most 8192 tokens of a rank and 32 choices of a token. It compiles its kernels with nvcc when they are first used, about 2 seconds each
//! ([`Compiler`]); they stay in a folder of the user's.

mod calls;
mod dispatcher;
mod environment;
mod error;
mod group;
mod handle;
mod library;
mod low;
mod low_handle;
mod low_latency;
pub mod result;
mod routing;
pub mod sys;
mod tensor;
mod windows;

pub use dispatcher::NcclEp;
pub use environment::Compiler;
pub use error::EpError;
pub use group::{Group, GroupOptions};
pub use handle::{Counters, Direction, Handle, HandleOptions, RowsBack, RowsOut};
pub use library::{EpLibrary, VARIABLE};
pub use low_handle::{Arrival, Departure, Layout, LowLatencyHandle, SentBack};
pub use low_latency::{LowLatencyGroup, LowLatencyOptions};
