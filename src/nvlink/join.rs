//! Whether every rank can have the dispatcher.

use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::compare::gather_numbers;
use crate::cuda::Cuda;
use crate::cuda::nvlink::MOST_RANKS;
use crate::cuda::peers::{GpuId, HostWords};
use crate::ep::GroupConfig;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::agree_on_found;
use crate::ep::select::DispatcherOrReason;
use crate::error::{Error, Result};

use super::dispatcher::NvLink;
use super::memory::{GroupMemory, nccl};
use super::records::{StoredRecords, Words};

const CALL: &str = "Group::new";
const TAG: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };

impl NvLink {
    /// Checks the GPUs on every rank (collectives), and makes the control words.
    ///
    /// # Errors
    /// The ranks could not be asked; NCCL's windows fail where it has them.
    pub(crate) fn join(mut core: DispatcherState<Cuda>) -> Result<DispatcherOrReason<Cuda>> {
        let own = core.device.gpu_id(CALL);
        let (gpus, usable) = {
            let own = core.check_or_refuse(TAG, own)?;
            let device = core.device.clone();
            let usable = device.sms_of_waiting_products() as u64;
            let all = gather_numbers(&device, &mut *core.comm, TAG, &[&own[..], &[usable]].concat())?;
            let ranks = all.as_chunks::<{ size_of::<GpuId>() / size_of::<u64>() + 1 }>().0;
            let gpus: Vec<GpuId> = ranks.iter().filter_map(|rank| rank.first_chunk().copied()).collect();
            (gpus, ranks.iter().filter_map(|rank| rank.last().copied()).min().unwrap_or(0))
        };
        let GroupConfig { overlap, max_sms, .. } = core.config;
        // From what all ranks have told, so that all find the same.
        let movement_sms = match overlap.movement_sms(CALL, max_sms, usable as usize) {
            Ok(sms) => sms,
            Err(error) => return Ok(Err(Box::new((core, error)))),
        };
        let found = examine(&mut core, &gpus);
        let host = match agree_on_found(&mut core, CALL, found)? {
            Ok(host) => host,
            Err(error) => return Ok(Err(Box::new((core, error)))),
        };
        nccl(&mut core)?.stop_kernels_by(&host);
        let (ranks, max_tokens) = (core.ranks(), core.config.max_tokens_per_rank);
        let bytes = Words::bytes(ranks, max_tokens);
        let (words, reached) = nccl(&mut core)?.peer_memory_found(TAG, bytes)?;
        // Behind this collective all words are zeros.
        if let Err(error) = agree_on_found(&mut core, CALL, reached)? {
            nccl(&mut core)?.release_peer_memory(TAG, words)?;
            return Ok(Err(Box::new((core, error))));
        }
        let mut words = words;
        let numbered = words.part(0, 8).and_then(|epoch| core.device.number_calls_of_tests(CALL, epoch));
        core.check_or_refuse(TAG, numbered)?;
        let words = Arc::new(Words::new(words, ranks, max_tokens));
        let records = StoredRecords {
            words: Arc::clone(&words),
            host: Arc::clone(&host),
            device: core.device.clone(),
            max_sms: core.config.max_sms,
        };
        core.records = Some(Box::new(records));
        Ok(Ok(Box::new(Self { core, memory: GroupMemory::new(words, host), movement_sms })))
    }
}

/// Whether this rank can have it, among these GPUs; and the words that its kernels share with the host.
fn examine(core: &mut DispatcherState<Cuda>, gpus: &[GpuId]) -> Result<Arc<HostWords>> {
    let ranks = core.ranks();
    if ranks > MOST_RANKS {
        return Err(Error::invalid(CALL, "ranks", format!("at most {MOST_RANKS} (nvlink)"), ranks));
    }
    if !core.device.has_nvlink_kernels() {
        return Err(Error::invalid(CALL, "GPU", "one of compute capability 9.0 (nvlink)", "another"));
    }
    nccl(core)?.check_peer_memory()?;
    for (peer, gpu) in gpus.iter().enumerate() {
        // One that this process does not see shows when its memory is asked for.
        if core.device.reaches(CALL, *gpu)? == Some(false) {
            let expected = "GPUs that reach each other's memory over NVLink (nvlink)";
            return Err(Error::invalid(CALL, "GPU", expected, format!("that of rank {peer}, which this one does not")));
        }
    }
    Ok(Arc::new(HostWords::new(&core.device, CALL)?))
}
