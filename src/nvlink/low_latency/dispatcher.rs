//! The dispatcher's calls: each is one kernel on every rank, met and watched as a collective of the communicator.

use std::sync::Arc;

use crate::cuda::Cuda;
use crate::cuda::nvlink::{MOST_CHOICES, PeerCall};
use crate::cuda::nvlink_low_latency::{
    LowLatencyCombine, LowLatencyDispatch, LowLatencyPeers, most_sum_packets, packets,
};
use crate::cuda::peers::HostWords;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::packing::ReceivedRows;
use crate::ep::row_transport::{HandleCall, ReturnRows, RowTransport};
use crate::ep::select::DispatcherOrReason;
use crate::ep::{DispatchInputs, DispatcherKind, GroupConfig, RowOrder};
use crate::error::{Error, Result};
use crate::nccl::TravelingRow;
use crate::nvlink::join::{CALL, Joined, TAG, join_words};
use crate::nvlink::memory::nccl;
use crate::nvlink::records::{Words, hold_in_graph};
use crate::nvlink::zones::ReceivedSizes;
use crate::tensor::{Tensor, TensorRef};

use super::banks::Banks;
use super::records::PacketRecords;

/// Dispatcher of few tokens between the GPUs of a host, forward only. Rows are brought from packets into plain tensors. A
/// token's outputs are summed per rank in the tokens' dtype, then over ranks in f32.
#[derive(Debug)]
pub(crate) struct NvLinkLowLatency {
    core: DispatcherState<Cuda>,
    /// Control words of all ranks.
    words: Arc<Words>,
    banks: Banks,
    /// Ends the waits of kernels, and tells of those that were given up.
    host: Arc<HostWords>,
}

impl NvLinkLowLatency {
    /// Checks on every rank whether it can have it (collectives), and makes the control words.
    ///
    /// # Errors
    /// As [`join_words`].
    pub(crate) fn join(core: DispatcherState<Cuda>) -> Result<DispatcherOrReason<Cuda>> {
        let kind = DispatcherKind::NvLinkLowLatency;
        let joined = match join_words(core, kind, |_, _| Ok(()))? {
            Ok(joined) => joined,
            Err(reason) => return Ok(Err(reason)),
        };
        let Joined { mut core, words, host, .. } = joined;
        if let Some(patience) = core.config.patience {
            let (words, host, device) = (Arc::clone(&words), Arc::clone(&host), core.device.clone());
            // Peers may be sending records already, but not to where this lies.
            let written = words
                .record_banks(core.rank())
                .and_then(|banks| device.write_last_call(CALL, words.low_latency_control()?, banks));
            core.check_or_refuse(TAG, written)?;
            core.records = Some(Box::new(PacketRecords { words, host, device, patience }));
            nccl(&mut core)?.outlive_ranks(true);
        }
        Ok(Ok(Box::new(Self { core, words, banks: Banks::default(), host })))
    }

    /// Room for rows of so many packets there, and of so many back (collective where there is less).
    fn reserve(&mut self, step: &HandleCall<'_, Cuda>, row: TravelingRow, row_packets: usize) -> Result<()> {
        // For the most rows that a step may have, so that no larger step makes new banks.
        let rows = step.handle.zones(step.call)?.zone_rows.max(self.core.config.max_tokens_per_rank);
        self.banks.reserve(&mut self.core, step, &self.words, (row, rows.saturating_mul(row_packets)))
    }

    /// Passes this rank's part before a call, or tells the others that it failed.
    fn ready<T>(&mut self, step: &HandleCall<'_, Cuda>, own: Result<T>) -> Result<T> {
        self.core.check_in_step(DispatcherState::tag(step.handle, step.op), own)
    }

    /// A call of all ranks.
    fn meet(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        row: TravelingRow,
        calls: impl FnOnce(&Cuda, &LowLatencyPeers<'_>) -> Result<()>,
    ) -> Result<()> {
        let Self { core, words, banks, host } = self;
        let device = core.device.clone();
        let memory = banks.memory(step.call)?;
        hold_in_graph(&device, host, || (words.memory().hold(), memory.hold()))?;
        let GroupConfig { max_sms, patience, .. } = core.config;
        let comm = nccl(core)?;
        let peers = PeerCall {
            call: step.call,
            origin: step.handle.origin(),
            words: words.addresses(),
            zones: memory.addresses(),
            zone: 0,
            timeout: comm.timeout(),
            host,
            max_sms,
            overlapped: false,
        };
        let peers = LowLatencyPeers { peers, control: words.low_latency_at(), area: banks.area(), patience };
        let tag = DispatcherState::tag(step.handle, step.op);
        match patience {
            Some(_) => comm.around_uncounted_kernel(|| calls(&device, &peers)),
            None => comm.around_kernel(step.call, tag, row, || calls(&device, &peers)),
        }
    }
}

impl RowTransport<Cuda> for NvLinkLowLatency {
    const KIND: DispatcherKind = DispatcherKind::NvLinkLowLatency;
    const ROW_ORDER: RowOrder = RowOrder::Zones;
    const MOST_CHOICES: usize = MOST_CHOICES;
    const FORWARD_ONLY: bool = true;

    fn core(&mut self) -> &mut DispatcherState<Cuda> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<Cuda>> {
        let Self { mut core, words, banks, .. } = *self;
        // It holds the words too.
        core.records = None;
        banks.release(&mut core, words)?;
        nccl(&mut core)?.outlive_ranks(false);
        Ok(core)
    }

    fn check_late(&mut self) -> Result<()> {
        const CALL: &str = "check";
        let device = &self.core.device;
        if self.core.config.patience.is_none() || device.is_capturing()? {
            return Ok(());
        }
        let late = device.take_late_ranks(CALL, self.words.low_latency_control()?)?;
        let late: Vec<usize> = (0..self.core.ranks()).filter(|rank| late >> rank & 1 == 1).collect();
        if late.is_empty() { Ok(()) } else { Err(Error::LateRanks { call: CALL, rank: self.core.rank(), late }) }
    }

    fn send(&mut self, step: &HandleCall<'_, Cuda>, inputs: &DispatchInputs<'_, Cuda>) -> Result<ReceivedRows<Cuda>> {
        let maps = step.handle.zones(step.call)?;
        let tokens = inputs.tokens.borrow();
        let (ranks, k) = (self.core.ranks(), step.handle.spec().top_k);
        let arriving = ReceivedSizes {
            rows: ranks * maps.zone_rows,
            dtype: tokens.dtype(),
            width: tokens.row_bytes() / tokens.dtype().size(),
            weights: inputs.weights.as_ref().map(|w| (k, w.dtype())),
            scales: inputs.scales.as_ref().map(TensorRef::row_bytes),
        };
        let (weights, scales) = (arriving.weight_bytes(), arriving.scales.unwrap_or(0));
        let row = TravelingRow { dtype: tokens.dtype(), bytes: tokens.row_bytes(), weights, scales };
        // And for the way back, so that it finds memory there.
        let back = most_sum_packets(row.bytes.max(step.handle.spec().returning_bytes()));
        self.reserve(step, row, back.max(packets(row.bytes) + packets(weights) + packets(scales)))?;
        let device = self.core.device.clone();
        let received = arriving.tensors(|_, dtype, dims| Tensor::empty(&device, dtype, dims));
        let mut received = self.ready(step, received)?;
        let Some(rows) = &mut received.rows else { return Ok(received) };
        let sent = LowLatencyDispatch {
            tokens,
            weights: inputs.weights.as_ref().map(TensorRef::borrow),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
            maps,
            out_rows: rows.view_mut(),
            out_weights: received.weights.as_mut().map(Tensor::view_mut),
            out_scales: received.scales.as_mut().map(Tensor::view_mut),
        };
        // SAFETY: the memory is this group's alone, and all ranks have reserved room for these rows.
        self.meet(step, row, |device, peers| unsafe { device.low_latency_dispatch(peers, sent) })?;
        Ok(received)
    }

    fn return_sums(&mut self, step: &HandleCall<'_, Cuda>, back: ReturnRows<'_, Cuda>) -> Result<()> {
        let maps = step.handle.zones(step.call)?;
        let ReturnRows { rows, mut out, .. } = back;
        let rows = rows.borrow();
        let checked = self.core.device.check_nvlink_sums(step.call, rows.dtype());
        self.ready(step, checked)?;
        let row = TravelingRow { dtype: rows.dtype(), bytes: rows.row_bytes(), weights: 0, scales: 0 };
        self.reserve(step, row, most_sum_packets(row.bytes))?;
        let top_k = step.handle.spec().top_k;
        let returned = LowLatencyCombine { rows, out: out.reborrow(), maps, top_k };
        // SAFETY: as in `send`; rows of this type can be added.
        self.meet(step, row, |device, peers| unsafe { device.low_latency_combine(peers, returned) })
    }
}
