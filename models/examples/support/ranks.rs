//! Ranks that are processes, one GPU each.
#![allow(dead_code, reason = "every user takes a part")]

use std::error::Error;

use candle_core::Device;
use moebius::ranks::{Identity, RankError};

type AnyError = Box<dyn Error + Send + Sync>;

/// This process's place among several, where a launcher has started it so (`docs/ranks.md`). A process without a
/// launcher's variables, or with some of them alone, as a batch script has, is by itself.
///
/// # Errors
/// Variables that cannot be, or contradict each other.
pub fn identity() -> Result<Option<Identity>, AnyError> {
    match Identity::from_env() {
        Ok(me) => Ok((me.world > 1).then_some(me)),
        Err(moebius::Error::Rank(RankError::NotLaunched { .. } | RankError::Partial { .. })) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// candle's device of a GPU, whose steps can be captured.
///
/// # Errors
/// A GPU that is not there, or cannot be used.
pub fn gpu(ordinal: usize) -> Result<Device, AnyError> {
    #[cfg(feature = "cuda")]
    let device = moebius::candle::device_for_capture(ordinal);
    #[cfg(not(feature = "cuda"))]
    let device = Device::new_cuda_with_stream(ordinal);
    device.map_err(|e| {
        // The rest is a backtrace.
        let e = e.to_string().lines().next().unwrap_or_default().to_string();
        format!("GPU {ordinal} cannot be used: {e}").into()
    })
}

/// What a build without NCCL answers.
pub const NO_NCCL: &str = "ranks on several GPUs reach each other over NCCL; build with --features nccl";

/// Joins the other processes, on the GPU of this rank's number on its host; collectives end within `timeout`.
///
/// # Errors
/// A GPU that cannot be used; ranks that do not find each other in time.
#[cfg(feature = "nccl")]
pub fn join(me: &Identity, timeout: std::time::Duration) -> Result<(Device, moebius::nccl::NcclComm), AnyError> {
    use moebius::nccl::{NcclComm, NcclLibrary};
    let device = gpu(me.local_rank)?;
    let cuda = moebius::candle::cuda(&device)?;
    let bootstrap = moebius::ranks::Bootstrap::from_env(timeout)?;
    let comm = NcclComm::join(&NcclLibrary::open()?, &bootstrap, &cuda)?;
    Ok((device, comm))
}
