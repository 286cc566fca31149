//! The ranks' records of a prepare, stored into each other's memory.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Tag};
use crate::cuda::nvlink::{MOST_CHOICES, PeerCall, ZONE_UNIT, control_bytes};
use crate::cuda::nvlink_low_latency::{LOW_LATENCY_CONTROL_BYTES, PACKET_BYTES, PacketBanks, packets};
use crate::cuda::nvlink_plan::NvLinkPlan;
use crate::cuda::peers::HostWords;
use crate::cuda::{Cuda, DeviceMut};
use crate::dtype::DType;
use crate::ep::PlanIds;
use crate::ep::dispatcher_state::{ExchangedPlan, RecordExchange};
use crate::error::{Error, Result};
use crate::kernels::Origin;
use crate::nccl::{NcclComm, PeerMemory, TravelingRow};
use crate::plan::routing_record::RecordSizes;
use crate::tensor::{Tensor, TensorRef};

pub(super) const CALL: &str = "prepare";

/// The group's memory beside its zones: control words, then two banks with room for all ranks' records, then the control
/// words of low latency, and with patience two banks of packets of records.
#[derive(Debug)]
pub(super) struct Words {
    memory: PeerMemory,
    records_at: usize,
    /// Of one rank's at most.
    record_bytes: usize,
    /// Of all ranks'.
    bank_bytes: usize,
}

impl Words {
    /// In memory of so many bytes.
    pub(super) fn new(memory: PeerMemory, ranks: usize, max_tokens: usize) -> Self {
        let (records_at, record_bytes) = Self::sizes(ranks, max_tokens);
        Self { memory, records_at, record_bytes, bank_bytes: ranks * record_bytes }
    }

    /// Where the words of low latency begin.
    pub(super) fn low_latency_at(&self) -> usize {
        self.records_at + 2 * self.bank_bytes
    }

    /// This rank's, which kernels alone write.
    pub(super) fn low_latency_control(&self) -> Result<DeviceMut<'_>> {
        self.memory.shared_part(self.low_latency_at(), LOW_LATENCY_CONTROL_BYTES)
    }

    /// The banks of packets of records on this rank, in memory that has some.
    pub(super) fn record_banks(&self, rank: usize) -> Result<PacketBanks<'_>> {
        let ((at, area), ranks) = (self.record_packets(), self.addresses().len());
        Ok(PacketBanks { memory: self.memory.shared_part(at, 2 * ranks * area * PACKET_BYTES)?, rank, ranks, area })
    }

    /// Where the packets of records begin, and how many each rank has in a bank.
    pub(super) fn record_packets(&self) -> (usize, usize) {
        (self.low_latency_at() + LOW_LATENCY_CONTROL_BYTES, packets(self.record_bytes))
    }

    /// Has calls be numbered from where numbers are about to begin anew, on a device of tests.
    pub(super) fn number_calls_of_tests(&mut self, device: &Cuda, call: &'static str) -> Result<()> {
        let low_latency_at = self.low_latency_at();
        device.number_calls_of_tests(call, self.memory.part(0, 8)?, u32::MAX.into())?;
        device.number_calls_of_tests(call, self.memory.part(low_latency_at, 8)?, u16::MAX.into())
    }

    /// Where records begin, and bytes of one.
    fn sizes(ranks: usize, max_tokens: usize) -> (usize, usize) {
        // Behind the records lie packets.
        let record =
            RecordSizes { max_tokens, top_k: MOST_CHOICES, weights: false }.bytes().next_multiple_of(PACKET_BYTES);
        (control_bytes(ranks, max_tokens).next_multiple_of(ZONE_UNIT), record)
    }

    /// Bytes for so many ranks of so many tokens at most; `in_packets`: also for records in packets.
    pub(super) fn bytes(ranks: usize, max_tokens: usize, in_packets: bool) -> usize {
        let (records_at, record) = Self::sizes(ranks, max_tokens);
        let of_packets = if in_packets { packets(record) * PACKET_BYTES } else { 0 };
        records_at + 2 * ranks * (record + of_packets) + LOW_LATENCY_CONTROL_BYTES
    }

    pub(super) fn addresses(&self) -> &[u64] {
        self.memory.addresses()
    }

    pub(super) fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    pub(super) fn into_memory(self) -> PeerMemory {
        self.memory
    }

    /// A rank's part in an exchange of records, by one block, into the banks of records.
    pub(super) fn record_call<'a>(&'a self, origin: Origin, host: &'a HostWords, timeout: Duration) -> PeerCall<'a> {
        let (words, zone) = (self.addresses(), self.records_at);
        PeerCall { call: CALL, origin, words, zones: words, zone, timeout, host, max_sms: 1, overlapped: false }
    }
}

/// A communicator as NCCL's.
pub(super) fn nccl_of<'a>(call: &'static str, comm: &'a mut dyn Communicator<Cuda>) -> Result<&'a mut NcclComm> {
    comm.native().ok_or_else(|| Error::invalid(call, "communicator", "NCCL's", "another"))
}

/// Has a graph under way, if there is one, hold what its replays write to, and ask whether their kernels have given up.
pub(super) fn hold_in_graph<T: Send + Sync + 'static>(
    device: &Cuda,
    host: &Arc<HostWords>,
    written: impl FnOnce() -> T,
) -> Result<()> {
    if device.is_capturing()? {
        device.hold_in_graph(Arc::new((written(), Arc::clone(host))));
        device.ask_in_replays(Arc::clone(host) as _);
    }
    Ok(())
}

/// Records by stores.
#[derive(Debug)]
pub(super) struct StoredRecords {
    pub(super) words: Arc<Words>,
    pub(super) host: Arc<HostWords>,
    pub(super) device: Cuda,
    /// Blocks of a kernel at most; 0: as the kernels choose.
    pub(super) max_sms: usize,
}

impl StoredRecords {
    /// Whether a bank has room for records of so many bytes.
    fn carries(&self, bytes: usize) -> bool {
        bytes <= self.words.record_bytes && bytes.is_multiple_of(4)
    }

    /// A kernel of all ranks that brings records of so many bytes, by `calls`.
    fn meet(
        &self,
        comm: &mut dyn Communicator<Cuda>,
        tag: Tag,
        (rank, bytes): (usize, usize),
        calls: impl FnOnce(&Cuda, &PeerCall<'_>, usize) -> Result<()>,
    ) -> Result<()> {
        let comm = nccl_of(CALL, comm)?;
        let (device, words) = (&self.device, &self.words);
        hold_in_graph(device, &self.host, || words.memory().hold())?;
        let origin = Origin { rank, layer: tag.layer };
        let peers = PeerCall { max_sms: self.max_sms, ..words.record_call(origin, &self.host, comm.timeout()) };
        let row = TravelingRow { dtype: DType::U8, bytes, weights: 0, scales: 0 };
        comm.around_kernel(CALL, tag, row, || calls(device, &peers, words.bank_bytes))
    }
}

impl RecordExchange<Cuda> for StoredRecords {
    fn exchange(
        &mut self,
        comm: &mut dyn Communicator<Cuda>,
        tag: Tag,
        rank: usize,
        own: TensorRef<'_, Cuda>,
    ) -> Result<Option<Tensor<Cuda>>> {
        let bytes = own.count();
        if !self.carries(bytes) {
            return Ok(None);
        }
        let all = Tensor::empty(&self.device, DType::U8, &[self.words.addresses().len(), bytes]);
        let mut all = refuse_on_error(comm, tag, all)?;
        let out = all.view_mut();
        // SAFETY: all ranks' memory has room for two banks of all records behind the words, and all make this call.
        self.meet(comm, tag, (rank, bytes), |device, peers, bank| unsafe {
            device.nvlink_exchange(peers, bank, own, out)
        })?;
        Ok(Some(all))
    }

    fn plan(
        &mut self,
        comm: &mut dyn Communicator<Cuda>,
        tag: Tag,
        choices: PlanIds<'_, Cuda>,
    ) -> Result<Option<Result<ExchangedPlan<Cuda>>>> {
        let rank = choices.of.rank;
        let made = NvLinkPlan::new(&self.device, choices, self.max_sms);
        let Some(mut plan) = refuse_on_error(comm, tag, made)? else { return Ok(None) };
        let bytes = plan.record_bytes();
        if !self.carries(bytes) {
            return Ok(None);
        }
        // SAFETY: as in `exchange`.
        self.meet(comm, tag, (rank, bytes), |device, peers, bank| unsafe { plan.exchange(device, peers, bank) })?;
        Ok(Some(plan.finish(&self.device)))
    }
}
