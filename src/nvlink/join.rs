//! Whether every rank can have the dispatcher.

use crate::comm::{Op, Tag};
use crate::cuda::Cuda;
use crate::cuda::nvlink::{MOST_RANKS, control_bytes};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::agree_on_found;
use crate::ep::select::DispatcherOrReason;
use crate::error::{Error, Result};

use super::dispatcher::{NvLink, nccl};

const CALL: &str = "Group::new";

impl NvLink {
    /// Checks the GPUs on every rank (one collective), and makes the control words.
    ///
    /// # Errors
    /// The ranks could not be asked; no memory that all ranks reach.
    pub(crate) fn join(mut core: DispatcherState<Cuda>) -> Result<DispatcherOrReason<Cuda>> {
        let found = examine(&mut core);
        if let Err(error) = agree_on_found(&mut core, CALL, found)? {
            return Ok(Err(Box::new((core, error))));
        }
        let bytes = control_bytes(core.ranks(), core.config.max_tokens_per_rank);
        let words = nccl(&mut core)?.peer_memory(Tag { layer: 0, op: Op::Init, sequence: 0 }, bytes)?;
        Ok(Ok(Box::new(Self { core, words, zones: None })))
    }
}

/// Whether this rank can have it.
fn examine(core: &mut DispatcherState<Cuda>) -> Result<()> {
    let ranks = core.ranks();
    if ranks > MOST_RANKS {
        return Err(Error::invalid(CALL, "ranks", format!("at most {MOST_RANKS} (nvlink)"), ranks));
    }
    if !core.device.has_nvlink_kernels() {
        return Err(Error::invalid(CALL, "GPU", "one of compute capability 9.0 (nvlink)", "another"));
    }
    nccl(core)?.check_peer_memory()
}
