//! Memory that packets arrive in: two banks, which calls take in turns, with an area for each rank in both.

use std::sync::Arc;

use crate::comm::Tag;
use crate::cuda::Cuda;
use crate::cuda::nvlink_low_latency::{PACKET_BYTES, PacketBanks};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::row_transport::HandleCall;
use crate::error::{Error, Result};
use crate::nccl::{PeerMemory, TravelingRow};
use crate::nvlink::memory::{END, nccl, release_unheld};
use crate::nvlink::records::Words;

/// The banks, and those that were too small.
#[derive(Debug, Default)]
pub(super) struct Banks {
    memory: Option<PeerMemory>,
    /// Packets of a rank in a bank.
    area: usize,
    /// Graphs may still write there.
    old: Vec<PeerMemory>,
}

impl Banks {
    /// Areas of at least so many packets for such rows (collective where they have to be made).
    pub(super) fn reserve(
        &mut self,
        core: &mut DispatcherState<Cuda>,
        step: &HandleCall<'_, Cuda>,
        words: &Words,
        (row, area): (TravelingRow, usize),
    ) -> Result<()> {
        // Ranks that have gone on without each other number their steps differently.
        let (call, tag) = (step.call, Tag { sequence: 0, ..DispatcherState::tag(step.handle, step.op) });
        if self.memory.is_some() && self.area >= area {
            return Ok(());
        }
        core.device.not_captured(call, "allocate banks of packets")?;
        // As a rank meets that has room for its own rows: one whose rows are others, or that has refused the call, shows here,
        // while all ranks have what they had.
        nccl(core)?.around_kernel(call, tag, row, || Ok(()))?;
        let before = std::mem::take(&mut self.old).into_iter().chain(self.memory.take());
        self.old = release_unheld(core, tag, before.collect())?;
        let (rank, ranks) = (core.rank(), core.ranks());
        let bytes = area.checked_mul(2 * ranks * PACKET_BYTES);
        let bytes = bytes.ok_or_else(|| Error::invalid(call, "packets", "as many as memory has room for", area));
        let bytes = core.check_or_refuse(tag, bytes)?;
        let (mut memory, reached) = nccl(core)?.peer_memory_found(tag, bytes)?;
        let device = core.device.clone();
        let mut ready = || {
            device.poison_banks(call, memory.part(0, bytes)?, bytes / PACKET_BYTES)?;
            let memory = memory.part(0, bytes)?;
            device.write_last_call(call, words.low_latency_control()?, PacketBanks { memory, rank, ranks, area })
        };
        let ready = reached.and_then(|()| ready());
        core.check_or_refuse(tag, ready)?;
        // Nobody writes before all have cleared theirs.
        core.comm.barrier(tag)?;
        (self.memory, self.area) = (Some(memory), area);
        Ok(())
    }

    /// Gives back all that nobody holds (collective), and the control words, of a dispatcher that ends before its
    /// communicator.
    ///
    /// # Errors
    /// A collective's.
    pub(super) fn release(self, core: &mut DispatcherState<Cuda>, words: Arc<Words>) -> Result<()> {
        let words = Arc::into_inner(words).map(Words::into_memory);
        let all = words.into_iter().chain(self.memory).chain(self.old).collect();
        release_unheld(core, END, all).map(drop)
    }

    /// The banks, which a call has reserved.
    pub(super) fn memory(&self, call: &'static str) -> Result<&PeerMemory> {
        self.memory.as_ref().ok_or_else(|| Error::invalid(call, "banks", "some", "none"))
    }

    /// Packets of a rank in a bank.
    pub(super) fn area(&self) -> usize {
        self.area
    }
}
