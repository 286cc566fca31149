//! Whether every rank can have the dispatcher.

use std::collections::HashMap;

use crate::cuda::Cuda;
use crate::ep::DispatcherKind;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::agree_on_found;
use crate::ep::select::DispatcherOrReason;
use crate::error::Result;
use crate::nccl::SharedComm;
use crate::nccl_ep::NcclEpLibrary;
use crate::nccl_ep::rules::{check_domain, check_experts, check_gpu, check_sms, check_tokens};
use crate::nccl_ep::tensor::WindowRanges;

use super::collective::nccl;
use super::state::{Algorithm, NcclEp};
use super::window_pool::WindowPool;

const CALL: &str = "Group::new";

impl NcclEp {
    /// Checks the library, the GPUs and the experts on every rank (one collective).
    ///
    /// # Errors
    /// The ranks could not be asked.
    pub(crate) fn join(mut core: DispatcherState<Cuda>) -> Result<DispatcherOrReason<Cuda>> {
        let found = examine(&mut core);
        let (library, shared) = match agree_on_found(&mut core, CALL, found)? {
            Ok(found) => found,
            Err(error) => return Ok(Err(Box::new((core, error)))),
        };
        let mode = mode(&core);
        Ok(Ok(Box::new(Self {
            groups: Vec::new(),
            low: Vec::new(),
            windows: WindowPool::default(),
            outgrown: Vec::new(),
            places: WindowRanges::default(),
            mode,
            library,
            shared,
            agreed: Vec::new(),
            routings: HashMap::new(),
            core,
        })))
    }
}

/// The algorithm that the group's configuration asks for.
fn mode(core: &DispatcherState<Cuda>) -> Algorithm {
    match core.config.dispatcher {
        DispatcherKind::NcclEpLowLatency => Algorithm::LowLatency,
        _ => Algorithm::HighThroughput,
    }
}

/// The library and the communicator, where this rank can have them.
fn examine(core: &mut DispatcherState<Cuda>) -> Result<(NcclEpLibrary, SharedComm)> {
    let experts = core.config.num_experts;
    check_experts(experts, core.ranks())?;
    check_tokens(CALL, core.config.max_tokens_per_rank.next_multiple_of(4))?;
    let high = mode(core) == Algorithm::HighThroughput;
    check_gpu(&core.device)?;
    check_sms(CALL, core.config.max_sms, core.device.sm_count())?;
    let comm = nccl(core)?;
    let shared = comm.shared();
    if high {
        check_domain(CALL, &shared, experts)?;
    }
    Ok((NcclEpLibrary::open(comm.library())?, shared))
}
