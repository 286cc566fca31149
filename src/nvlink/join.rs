//! Whether every rank can have the dispatcher.

use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::compare::gather_numbers;
use crate::cuda::Cuda;
use crate::cuda::nvlink::MOST_RANKS;
use crate::cuda::peers::{GpuId, HostWords};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::agree_on_found;
use crate::ep::select::DispatcherOrReason;
use crate::ep::{DispatcherKind, GroupConfig, TokenDispatcher};
use crate::error::{Error, Result};

use super::dispatcher::NvLink;
use super::memory::{GroupMemory, nccl};
use super::records::{StoredRecords, Words};

pub(super) const CALL: &str = "Group::new";
pub(super) const TAG: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };

/// What a group has once its ranks have found that all of them can have it.
pub(super) struct Joined<T> {
    pub(super) core: DispatcherState<Cuda>,
    /// Control words of all ranks, behind a collective.
    pub(super) words: Arc<Words>,
    pub(super) host: Arc<HostWords>,
    /// What the kind's own check has made.
    pub(super) checked: T,
}

/// The same, or the state it was to have and the reason why not, the same on all ranks.
pub(super) type JoinedOrReason<T> = std::result::Result<Joined<T>, Box<(DispatcherState<Cuda>, Error)>>;

/// Checks the GPUs on every rank (collectives), and makes the control words. `check` is told how many SMs products may
/// fill on every rank.
///
/// # Errors
/// The ranks could not be asked; NCCL's windows fail where it has them.
pub(super) fn join_words<T>(
    mut core: DispatcherState<Cuda>,
    kind: DispatcherKind,
    check: impl FnOnce(&GroupConfig, usize) -> Result<T>,
) -> Result<JoinedOrReason<T>> {
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
    // From what all ranks have told, so that all find the same.
    let checked = match check(&core.config, usable as usize) {
        Ok(checked) => checked,
        Err(error) => return Ok(Err(Box::new((core, error)))),
    };
    let found = examine(&mut core, kind, &gpus);
    let host = match agree_on_found(&mut core, CALL, found)? {
        Ok(host) => host,
        Err(error) => return Ok(Err(Box::new((core, error)))),
    };
    nccl(&mut core)?.stop_kernels_by(&host);
    let (ranks, max_tokens) = (core.ranks(), core.config.max_tokens_per_rank);
    let bytes = Words::bytes(ranks, max_tokens, core.config.patience.is_some());
    let (words, reached) = nccl(&mut core)?.peer_memory_found(TAG, bytes)?;
    // Behind this collective all words are zeros.
    if let Err(error) = agree_on_found(&mut core, CALL, reached)? {
        nccl(&mut core)?.release_peer_memory(TAG, words)?;
        return Ok(Err(Box::new((core, error))));
    }
    let mut words = Words::new(words, ranks, max_tokens);
    let numbered = words.number_calls_of_tests(&core.device, CALL);
    core.check_or_refuse(TAG, numbered)?;
    let words = Arc::new(words);
    let records = StoredRecords {
        words: Arc::clone(&words),
        host: Arc::clone(&host),
        device: core.device.clone(),
        max_sms: core.config.max_sms,
    };
    core.records = Some(Box::new(records));
    Ok(Ok(Joined { core, words, host, checked }))
}

impl NvLink {
    /// # Errors
    /// As [`join_words`].
    pub(crate) fn join(core: DispatcherState<Cuda>) -> Result<DispatcherOrReason<Cuda>> {
        let movement_sms = |config: &GroupConfig, usable| config.overlap.movement_sms(CALL, config.max_sms, usable);
        Ok(join_words(core, DispatcherKind::NvLink, movement_sms)?.map(|joined| {
            let Joined { core, words, host, checked } = joined;
            let made: Box<dyn TokenDispatcher<Cuda>> =
                Box::new(Self { core, memory: GroupMemory::new(words, host), movement_sms: checked });
            made
        }))
    }
}

/// Whether this rank can have it, among these GPUs; and the words that its kernels share with the host.
fn examine(core: &mut DispatcherState<Cuda>, kind: DispatcherKind, gpus: &[GpuId]) -> Result<Arc<HostWords>> {
    let ranks = core.ranks();
    if ranks > MOST_RANKS {
        return Err(Error::invalid(CALL, "ranks", format!("at most {MOST_RANKS} ({kind})"), ranks));
    }
    if !core.device.has_nvlink_kernels() {
        return Err(Error::invalid(CALL, "GPU", format!("one of compute capability 9.0 ({kind})"), "another"));
    }
    nccl(core)?.check_peer_memory()?;
    for (peer, gpu) in gpus.iter().enumerate() {
        // One that this process does not see shows when its memory is asked for.
        if core.device.reaches(CALL, *gpu)? == Some(false) {
            let expected = format!("GPUs that reach each other's memory over NVLink ({kind})");
            return Err(Error::invalid(CALL, "GPU", expected, format!("that of rank {peer}, which this one does not")));
        }
    }
    Ok(Arc::new(HostWords::new(&core.device, CALL)?))
}
