//! Where an example runs its layer.

use std::error::Error;

use candle_core::Device;
use clap::ValueEnum;

/// A choice on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// This machine's cores; ranks are threads
    Cpu,
    /// NVIDIA GPUs, one a rank, ranks are threads (a build with --features cuda; several: --features nccl)
    Cuda,
}

impl Place {
    /// candle's devices, one a rank.
    ///
    /// # Errors
    /// A build or a machine without CUDA; fewer GPUs than ranks.
    pub fn open(self, ranks: usize) -> Result<Vec<Device>, Box<dyn Error + Send + Sync>> {
        match self {
            Place::Cpu => Ok(vec![Device::Cpu; ranks]),
            Place::Cuda if !cfg!(feature = "cuda") => {
                Err("--device cuda: this build has no CUDA; build with --features \
                cuda, which needs nvcc (CUDA 12.0 or later) and CUDA_COMPUTE_CAP or a GPU to ask"
                    .into())
            }
            Place::Cuda if ranks != 1 && !cfg!(feature = "nccl") => {
                Err(format!("--device cuda: {ranks} ranks are {ranks} GPUs, which want a build with --features nccl")
                    .into())
            }
            Place::Cuda => (0..ranks).map(gpu).collect(),
        }
    }
}

/// candle's device of a GPU, on a stream that all threads share.
///
/// # Errors
/// A GPU that is not there, or cannot be used.
pub fn gpu(ordinal: usize) -> Result<Device, Box<dyn Error + Send + Sync>> {
    Device::new_cuda_with_stream(ordinal).map_err(|e| {
        // The rest is a backtrace.
        let e = e.to_string().lines().next().unwrap_or_default().to_string();
        format!("--device cuda: GPU {ordinal} cannot be used: {e}; `nvidia-smi` lists this machine's").into()
    })
}

#[cfg(feature = "candle")]
pub use endpoints::{Endpoint, endpoints};

#[cfg(feature = "candle")]
mod endpoints {
    use std::error::Error;
    use std::time::Duration;

    use candle_core::Device;
    use moebius::candle::{DeviceGroup, EpGroup};
    use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
    use moebius::ep::{Group, GroupConfig};

    type AnyError = Box<dyn Error + Send + Sync>;

    /// How a rank reaches the others, from a device of candle's.
    #[allow(clippy::large_enum_variant, reason = "one a rank, which is moved once")]
    pub enum Endpoint {
        /// Threads on the CPU.
        Cpu(ThreadComm),
        /// A GPU alone.
        Gpu(Device),
        /// One GPU of several.
        #[cfg(feature = "nccl")]
        Gpus(Device, moebius::nccl::NcclComm),
    }

    impl Endpoint {
        /// Joins the group of all ranks.
        ///
        /// # Errors
        /// Errors of joining.
        pub fn join(self, config: GroupConfig) -> Result<DeviceGroup, AnyError> {
            Ok(match self {
                Endpoint::Cpu(comm) => EpGroup::new(Group::new(Cpu::new(), Box::new(comm), config)?).into(),
                Endpoint::Gpu(device) => DeviceGroup::single(config, &device)?,
                #[cfg(feature = "nccl")]
                Endpoint::Gpus(device, comm) => {
                    let cuda = comm.cuda().clone();
                    let group = Group::new(cuda.clone(), Box::new(comm), config)?;
                    DeviceGroup::new(EpGroup::new(group), &device)?
                }
            })
        }
    }

    /// An endpoint for each rank, to be moved to its thread.
    ///
    /// # Errors
    /// GPUs that cannot be used, or cannot reach each other.
    pub fn endpoints(devices: &[Device], timeout: Duration) -> Result<Vec<Endpoint>, AnyError> {
        match devices {
            [Device::Cpu, ..] => {
                Ok(ThreadWorld::create(devices.len(), timeout).into_iter().map(Endpoint::Cpu).collect())
            }
            [one] => Ok(vec![Endpoint::Gpu(one.clone())]),
            #[cfg(feature = "nccl")]
            several => {
                let library = moebius::nccl::NcclLibrary::open()?;
                let gpus = several.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
                let comms = moebius::nccl::NcclComm::threads(&library, &gpus, timeout)?;
                Ok(several.iter().cloned().zip(comms).map(|(device, comm)| Endpoint::Gpus(device, comm)).collect())
            }
            #[cfg(not(feature = "nccl"))]
            several => Err(format!("{} GPUs want a build with --features nccl", several.len()).into()),
        }
    }
}
