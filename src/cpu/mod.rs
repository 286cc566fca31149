//! The CPU: host memory, kernels on rayon's threads and the `gemm` crate's inner loops.

mod activation;
mod collective;
mod device;
mod element;
mod experts;
mod gemm;
mod group;
mod kernels;
mod ordered;
mod plan;
mod records;
mod router;
mod rows;
mod segments;

pub(crate) use collective::{add_pairwise, sum_ranks};
pub use device::{Cpu, HostBuffer};
pub use element::Element;
pub(crate) use element::Float;
#[cfg(feature = "cuda")]
pub(crate) use router::jitter_key;
