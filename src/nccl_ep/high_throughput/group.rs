//! A rank's EP group: the library's buffers for one number of experts, tokens and bytes.

use std::fmt;
use std::sync::Arc;

use crate::cuda::Cuda;
use crate::error::Result;
use crate::nccl::{NcclComm, SharedComm};
use crate::nccl_ep::raw_group::RawGroup;
use crate::nccl_ep::result::blank;
use crate::nccl_ep::rules::{check_domain, check_gpu, check_sms, narrow};
use crate::nccl_ep::tensor::WindowRanges;
use crate::nccl_ep::{NcclEpLibrary, sys};

use super::HighThroughputOptions;

/// A rank's membership in an EP group. Cheap to clone; destroyed with its last clone and handle, when all ranks must be
/// done with it: a peer may still read what this rank has finished with.
#[derive(Clone)]
pub struct HighThroughputGroup {
    raw_group: Arc<RawGroup>,
    options: HighThroughputOptions,
    /// Where rows must lie; `None`: anywhere.
    places: Option<WindowRanges>,
}

impl fmt::Debug for HighThroughputGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HighThroughputGroup {{ options: {:?}, ranks: {} }}", self.options, self.raw_group.ranks)
    }
}

/// Where a group is made.
#[derive(Debug)]
pub(in crate::nccl_ep) struct GroupPlace {
    pub cuda: Cuda,
    pub comm: SharedComm,
    /// Windows that rows are read from and written to in place.
    pub windows: Option<WindowRanges>,
}

impl HighThroughputGroup {
    /// Joins a group (collective).
    ///
    /// # Errors
    /// [`NcclEpError`](crate::nccl_ep::NcclEpError) names the rule that the options, the GPU or the ranks break, before the
    /// library is called.
    pub fn new(library: &NcclEpLibrary, comm: &NcclComm, options: HighThroughputOptions) -> Result<Self> {
        let place = GroupPlace { cuda: comm.cuda().clone(), comm: comm.shared(), windows: None };
        Self::on(library, place, options)
    }

    pub(in crate::nccl_ep) fn on(
        library: &NcclEpLibrary,
        place: GroupPlace,
        options: HighThroughputOptions,
    ) -> Result<Self> {
        let GroupPlace { cuda, comm: shared, windows: places } = place;
        const CALL: &str = "HighThroughputGroup::new";
        options.check(shared.size())?;
        check_gpu(&cuda)?;
        check_sms(CALL, options.max_sms, cuda.sm_count())?;
        let mut config: sys::ncclEpGroupConfig_t = blank();
        config.algorithm = sys::ncclEpAlgorithm_t::NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = narrow(CALL, "num_experts", options.num_experts)?;
        config.max_dispatch_tokens_per_rank = narrow(CALL, "max_tokens", options.max_tokens)?;
        config.max_recv_tokens_per_rank = narrow(CALL, "capacity", options.capacity.unwrap_or(0))?;
        config.max_token_bytes = narrow(CALL, "max_row_bytes", options.max_row_bytes)?;
        config.max_num_sms = narrow(CALL, "max_sms", options.max_sms)?;
        config.num_topk = narrow(CALL, "max_top_k", options.max_top_k)?;
        config.overflow_policy = match (options.capacity, options.trap) {
            (Some(_), false) => sys::ncclEpOverflowPolicy_t::NCCL_EP_OVERFLOW_DROP,
            _ => sys::ncclEpOverflowPolicy_t::NCCL_EP_OVERFLOW_TRAP,
        };
        if places.is_some() {
            config.zero_copy = sys::ncclEpZeroCopyMode_t::NCCL_EP_ZERO_COPY_ON;
        }
        check_domain(CALL, &shared, options.num_experts)?;
        Ok(Self { places, raw_group: RawGroup::join(CALL, library, cuda, shared, config)?, options })
    }

    /// Options that the group was made with.
    pub fn options(&self) -> &HighThroughputOptions {
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

    pub(in crate::nccl_ep) fn places(&self) -> Option<&WindowRanges> {
        self.places.as_ref()
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.raw_group.cuda
    }

    /// The group as the library has it, for callers that go beyond this crate's functions.
    pub fn raw(&self) -> sys::ncclEpGroup_t {
        self.raw_group.raw
    }

    /// The library.
    pub fn library(&self) -> &NcclEpLibrary {
        &self.raw_group.library
    }

    /// The library's group, from which handles are made.
    pub(in crate::nccl_ep) fn raw_group(&self) -> &Arc<RawGroup> {
        &self.raw_group
    }
}
