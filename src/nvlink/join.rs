//! Whether every rank can have the dispatcher; the dispatchers of GPUs that are not of every device.

use crate::comm::{Op, Tag};
use crate::cuda::nvlink::{MOST_RANKS, control_bytes};
use crate::cuda::{Cuda, preferred_dispatchers};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::gather_reports;
use crate::ep::select::NcclEpOrReason;
use crate::ep::{DispatcherKind, GroupConfig, LibraryDispatchers};
use crate::error::{Error, Result};

use super::dispatcher::{NvLink, nccl};

const CALL: &str = "Group::new";

impl LibraryDispatchers for Cuda {
    fn preferred_dispatchers(config: &GroupConfig, ranks: usize) -> &'static [DispatcherKind] {
        preferred_dispatchers(config, ranks)
    }

    fn library_dispatcher(core: DispatcherState<Cuda>, source: &'static str) -> Result<NcclEpOrReason<Cuda>> {
        match core.config.dispatcher {
            DispatcherKind::NvLink => NvLink::join(core),
            _ => nccl_ep(core, source),
        }
    }
}

#[cfg(feature = "nccl-ep")]
fn nccl_ep(core: DispatcherState<Cuda>, _: &'static str) -> Result<NcclEpOrReason<Cuda>> {
    crate::nccl_ep::NcclEp::join(core)
}

#[cfg(not(feature = "nccl-ep"))]
fn nccl_ep(core: DispatcherState<Cuda>, source: &'static str) -> Result<NcclEpOrReason<Cuda>> {
    let found = "NcclEp (feature nccl-ep)";
    Ok(Err(Box::new((core, Error::invalid(CALL, source, "one that this build has", found)))))
}

impl NvLink {
    /// Checks the GPUs on every rank (one collective), and makes the control words.
    ///
    /// # Errors
    /// The ranks could not be asked; no memory that all ranks reach.
    fn join(mut core: DispatcherState<Cuda>) -> Result<NcclEpOrReason<Cuda>> {
        let found = examine(&mut core);
        let reason = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let refusals = gather_reports(&mut core, &reason)?;
        if let Err(error) = found {
            return Ok(Err(Box::new((core, error))));
        }
        if let Some((peer, reason)) = refusals.into_iter().enumerate().find(|(_, reason)| !reason.is_empty()) {
            let error = Error::Peer { call: CALL, rank: core.rank(), peer, reason };
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
