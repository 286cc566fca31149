//! Where an example runs its layer.

use std::error::Error;

use candle_core::Device;
use clap::ValueEnum;

/// A choice on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// This machine's cores; ranks are threads
    Cpu,
    /// The first NVIDIA GPU, one rank (a build with --features cuda)
    Cuda,
}

impl Place {
    /// candle's device.
    ///
    /// # Errors
    /// A build or a machine without CUDA; several ranks on one GPU.
    pub fn open(self, ranks: usize) -> Result<Device, Box<dyn Error + Send + Sync>> {
        match self {
            Place::Cpu => Ok(Device::Cpu),
            Place::Cuda if !cfg!(feature = "cuda") => {
                Err("--device cuda: this build has no CUDA; build with --features \
                cuda, which needs nvcc (CUDA 12.0 or later) and CUDA_COMPUTE_CAP or a GPU to ask"
                    .into())
            }
            Place::Cuda if ranks != 1 => {
                Err(format!("--device cuda: one GPU is one rank; give --ranks 1 instead of {ranks}").into())
            }
            Place::Cuda => Device::new_cuda_with_stream(0).map_err(|e| {
                // The rest is a backtrace.
                let e = e.to_string().lines().next().unwrap_or_default().to_string();
                format!("--device cuda: no GPU can be used: {e}; `nvidia-smi` lists this machine's").into()
            }),
        }
    }
}
