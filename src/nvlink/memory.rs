//! The group's memory on all ranks: control words, zones, and zones that were too small. What a group leaves is the next
//! one's of the same communicator.

use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::compare::gather_numbers;
use crate::cuda::Cuda;
use crate::cuda::peers::HostWords;
use crate::ep::dispatcher_state::DispatcherState;
use crate::error::Result;
use crate::nccl::{NcclComm, PeerMemory};

use super::records::{Words, nccl_of};
use super::zones::Zones;

/// Of the end of a dispatcher, which is no step's.
pub(super) const END: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
/// Zones that rows stay in where the configuration asks for none: what a layer's forward and backward keep.
const KEPT_ZONES: usize = 2;

/// Memory that all ranks reach.
#[derive(Debug)]
pub(super) struct GroupMemory {
    /// Control words of all ranks, and their records.
    pub(super) words: Arc<Words>,
    pub(super) zones: Option<Zones>,
    /// Zones that were too small, and in which tensors lay when there were new ones.
    old: Vec<PeerMemory>,
    /// Ends the waits of kernels, and tells of those that were given up.
    pub(super) host: Arc<HostWords>,
}

/// NCCL's communicator, whose windows the memory is.
pub(super) fn nccl(core: &mut DispatcherState<Cuda>) -> Result<&mut NcclComm> {
    nccl_of("Group::new", &mut *core.comm)
}

impl GroupMemory {
    pub(super) fn new(words: Arc<Words>, host: Arc<HostWords>) -> Self {
        Self { words, zones: None, old: Vec::new(), host }
    }

    /// Zones of at least so many bytes (collective where they have to be made).
    pub(super) fn reserve(
        &mut self,
        core: &mut DispatcherState<Cuda>,
        call: &'static str,
        tag: Tag,
        bytes: usize,
    ) -> Result<()> {
        if self.zones.as_ref().is_some_and(|zones| zones.bytes() >= bytes) {
            return Ok(());
        }
        core.device.not_captured(call, "allocate zones")?;
        let kept = if core.config.windows == 0 { KEPT_ZONES } else { core.config.windows };
        let before = std::mem::take(&mut self.old).into_iter().chain(self.zones.take().map(Zones::into_memory));
        self.old = release_unheld(core, tag, before.collect())?;
        let memory = nccl(core)?.peer_memory(tag, Zones::bytes_of(bytes, kept))?;
        self.zones = Some(Zones::new(memory, bytes, kept));
        Ok(())
    }

    /// Gives back all that nobody holds (collective), of a dispatcher that ends before its communicator.
    ///
    /// # Errors
    /// A collective's.
    pub(super) fn release(self, core: &mut DispatcherState<Cuda>) -> Result<()> {
        let Self { words, zones, old, host: _stops } = self;
        let words = Arc::into_inner(words).map(Words::into_memory);
        let all = words.into_iter().chain(zones.map(Zones::into_memory)).chain(old).collect();
        release_unheld(core, END, all).map(drop)
    }
}

/// Gives back memory in which no rank has a tensor or a graph (collective where there is any), and returns the rest.
pub(super) fn release_unheld(
    core: &mut DispatcherState<Cuda>,
    tag: Tag,
    all: Vec<PeerMemory>,
) -> Result<Vec<PeerMemory>> {
    if all.is_empty() {
        return Ok(all);
    }
    let device = core.device.clone();
    let own: Vec<u64> = all.iter().map(|memory| u64::from(memory.is_held())).collect();
    let of_ranks = gather_numbers(&device, &mut *core.comm, tag, &own)?;
    let mut left = Vec::new();
    for (i, memory) in all.into_iter().enumerate() {
        match of_ranks.chunks_exact(own.len()).all(|held| held[i] == 0) {
            true => nccl(core)?.release_peer_memory(tag, memory)?,
            false => left.push(memory),
        }
    }
    Ok(left)
}
