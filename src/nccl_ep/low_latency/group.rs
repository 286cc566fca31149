//! Groups for low latency: few tokens a rank, forward only, and ranks that may be late.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::cuda::Cuda;
use crate::error::Result;
use crate::nccl::{NcclComm, SharedComm};
use crate::nccl_ep::raw_group::RawGroup;
use crate::nccl_ep::result::blank;
use crate::nccl_ep::rules::{check_gpu, narrow};
use crate::nccl_ep::{NcclEpLibrary, sys};

use super::LowLatencyOptions;

/// Shortest time limit: the library counts whole milliseconds, and takes none as no time at all.
const SHORTEST: Duration = Duration::from_millis(1);

/// A rank's membership in a group for low latency. Cheap to clone; destroyed with its last clone and handle, when all
/// ranks must be done with it.
#[derive(Clone)]
pub struct LowLatencyGroup {
    raw_group: Arc<RawGroup>,
    pub(super) options: LowLatencyOptions,
    sms: usize,
}

impl fmt::Debug for LowLatencyGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LowLatencyGroup {{ options: {:?}, ranks: {} }}", self.options, self.raw_group.ranks)
    }
}

impl LowLatencyGroup {
    /// Joins a group (collective).
    ///
    /// # Errors
    /// [`NcclEpError`](crate::nccl_ep::NcclEpError) names the rule that the options, the GPU or the ranks break, before the
    /// library is called.
    pub fn new(library: &NcclEpLibrary, comm: &NcclComm, options: LowLatencyOptions) -> Result<Self> {
        Self::on(library, (comm.cuda().clone(), comm.shared()), options)
    }

    pub(in crate::nccl_ep) fn on(
        library: &NcclEpLibrary,
        (cuda, shared): (Cuda, SharedComm),
        options: LowLatencyOptions,
    ) -> Result<Self> {
        const CALL: &str = "LowLatencyGroup::new";
        let sms = cuda.sm_count();
        options.check(shared.size(), sms)?;
        check_gpu(&cuda)?;
        let mut config: sys::ncclEpGroupConfig_t = blank();
        config.algorithm = sys::ncclEpAlgorithm_t::NCCL_EP_ALGO_LOW_LATENCY;
        config.num_experts = narrow(CALL, "num_experts", options.num_experts)?;
        config.max_dispatch_tokens_per_rank = narrow(CALL, "max_tokens", options.max_tokens)?;
        config.max_token_bytes = narrow(CALL, "max_row_bytes", options.max_row_bytes)?;
        config.max_num_sms = narrow(CALL, "max_sms", options.max_sms)?;
        if let Some(timeout) = options.timeout {
            config.enable_mask = 1;
            config.timeout_ns = u64::try_from(timeout.max(SHORTEST).as_nanos()).unwrap_or(u64::MAX);
        }
        Ok(Self { raw_group: RawGroup::join(CALL, library, cuda, shared, config)?, options, sms })
    }

    /// Options that the group was made with.
    pub fn options(&self) -> &LowLatencyOptions {
        &self.options
    }

    /// Ranks R.
    pub fn ranks(&self) -> usize {
        self.raw_group.ranks
    }

    /// Experts of a rank.
    pub fn local_experts(&self) -> usize {
        self.options.num_experts / self.raw_group.ranks
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.raw_group.cuda
    }

    /// The group as the library has it, for callers that go beyond this crate's functions.
    pub fn raw(&self) -> sys::ncclEpGroup_t {
        self.raw_group.raw
    }

    pub(in crate::nccl_ep) fn sms(&self) -> usize {
        self.sms
    }

    /// The library's group, from which handles are made.
    pub(in crate::nccl_ep) fn raw_group(&self) -> &Arc<RawGroup> {
        &self.raw_group
    }
}
