//! The CPU: host memory, kernels on rayon's threads and the `gemm` crate's inner loops.

mod device;
mod element;
mod experts;
mod gemm;
mod kernels;
mod plan;
mod router;
mod rows;

pub use device::{Cpu, HostBuffer};
pub use element::Element;
