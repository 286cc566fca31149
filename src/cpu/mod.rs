//! The CPU: host memory, kernels on rayon's threads and the `gemm` crate's inner loops.

mod activation;
mod collective;
mod device;
mod element;
mod etp;
mod experts;
mod gemm;
mod group;
mod heuristics;
mod kernels;
mod optimizer;
mod ordered;
mod permute;
mod plan;
mod quant;
mod records;
pub(crate) mod router;
mod segments;
mod threads;
#[cfg(not(loom))]
mod windows;

pub(crate) use collective::{add_pairwise, sum_ranks};
pub use device::{Cpu, HostBuffer};
pub use element::Element;
pub(crate) use element::Float;
pub use threads::{ThreadComm, ThreadWorld};
#[cfg(not(loom))]
pub use windows::ThreadWindow;
