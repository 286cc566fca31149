#![doc = include_str!("../README.md")]

pub mod balance;
pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod cpu;
pub mod ep;
pub mod etp;
pub mod kernels;
pub mod layer;
pub mod metrics;
pub mod quant;
pub mod ranks;
pub mod weights;

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "nccl-ep")]
pub mod nccl_ep;

#[cfg(any(feature = "candle", feature = "burn"))]
mod adapter;
mod aux_loss;
mod device;
mod dtype;
mod error;
mod fingerprint;
mod host_memory;
mod lazy;
mod tensor;

pub use config::MoeConfig;
pub use device::{Device, Waited};
pub use dtype::DType;
pub use error::{CheckpointError, CommError, Error, IdProblem, Result, printable};
pub use lazy::Lazy;
pub use tensor::{Shape, Tensor, TensorMut, TensorRef};
