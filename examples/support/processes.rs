//! Ranks as processes that a launcher has started.

use std::error::Error;
use std::time::Duration;

#[cfg(feature = "candle")]
use moebius::comm::Tag;

#[cfg(feature = "candle")]
use super::device::Endpoint;

type AnyError = Box<dyn Error + Send + Sync>;

/// This process, as one rank of several.
pub struct Process {
    pub rank: usize,
    pub world: usize,
    /// On the GPU of this rank's number on its host.
    #[cfg(feature = "candle")]
    pub endpoint: Endpoint,
}

impl Process {
    /// Joins the ranks that the launcher's environment tells of (`docs/ranks.md`).
    ///
    /// # Errors
    /// No launcher; a GPU that cannot be used; ranks that are missing within `timeout`.
    #[cfg(all(feature = "nccl", feature = "candle"))]
    pub fn join(timeout: Duration) -> Result<Self, AnyError> {
        use moebius::nccl::{NcclComm, NcclLibrary};
        use moebius::ranks::{Bootstrap, Identity};
        let me = Identity::from_env()?;
        let device = super::device::gpu(me.local_rank)?;
        let (job, cuda) = (Bootstrap::from_env(timeout)?, moebius::candle::cuda(&device)?);
        let comm = NcclComm::join(&NcclLibrary::open()?, &job, &cuda)?;
        Ok(Self { rank: me.rank, world: me.world, endpoint: Endpoint::Gpus(device, comm) })
    }

    /// As above.
    ///
    /// # Errors
    /// Always: this build has no NCCL, or no candle.
    #[cfg(not(all(feature = "nccl", feature = "candle")))]
    pub fn join(_: Duration) -> Result<Self, AnyError> {
        Err("--processes: candle's ranks reach each other over NCCL; build with --features candle,nccl".into())
    }

    /// Bytes that every rank tells, in rank order.
    ///
    /// # Errors
    /// The collective's.
    #[cfg(feature = "candle")]
    pub fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, AnyError> {
        match &mut self.endpoint {
            #[cfg(feature = "nccl")]
            Endpoint::Gpus(_, comm) => {
                let cuda = comm.cuda().clone();
                super::rank_results::gather_over(&cuda, comm, tag, own)
            }
            Endpoint::Cpu(comm) => super::rank_results::gather_over(&moebius::cpu::Cpu::new(), comm, tag, own),
            Endpoint::Gpu(_) => Ok(vec![own.to_vec()]),
        }
    }
}
