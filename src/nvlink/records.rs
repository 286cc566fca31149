//! The ranks' records of a prepare, stored into each other's memory.

use std::sync::Arc;

use crate::comm::{Communicator, Tag};
use crate::cuda::Cuda;
use crate::cuda::nvlink::{MOST_CHOICES, PeerCall, ZONE_UNIT, control_bytes};
use crate::cuda::peers::StopWord;
use crate::dtype::DType;
use crate::ep::dispatcher_state::RecordExchange;
use crate::error::{Error, Result};
use crate::kernels::Origin;
use crate::nccl::{NcclComm, PeerMemory, TravelingRow};
use crate::plan::routing_record::RecordSizes;
use crate::tensor::{Tensor, TensorRef};

const CALL: &str = "prepare";

/// The group's memory beside its zones: control words, then room for all ranks' records.
#[derive(Debug)]
pub(super) struct Words {
    memory: PeerMemory,
    records_at: usize,
    /// Of one rank's at most.
    record_bytes: usize,
}

impl Words {
    /// Where records begin, and bytes of all.
    fn sizes(ranks: usize, max_tokens: usize) -> (usize, usize, usize) {
        let record = RecordSizes { max_tokens, top_k: MOST_CHOICES, weights: false }.bytes();
        let at = control_bytes(ranks, max_tokens).next_multiple_of(ZONE_UNIT);
        (at, record, at + ranks * record)
    }

    /// Bytes for so many ranks of so many tokens at most.
    pub(super) fn bytes(ranks: usize, max_tokens: usize) -> usize {
        Self::sizes(ranks, max_tokens).2
    }

    /// In memory of so many bytes.
    pub(super) fn new(memory: PeerMemory, ranks: usize, max_tokens: usize) -> Self {
        let (records_at, record_bytes, _) = Self::sizes(ranks, max_tokens);
        Self { memory, records_at, record_bytes }
    }

    pub(super) fn addresses(&self) -> &[u64] {
        self.memory.addresses()
    }

    pub(super) fn memory(&self) -> &PeerMemory {
        &self.memory
    }
}

/// A communicator as NCCL's.
pub(super) fn nccl_of<'a>(call: &'static str, comm: &'a mut dyn Communicator<Cuda>) -> Result<&'a mut NcclComm> {
    comm.native().ok_or_else(|| Error::invalid(call, "communicator", "NCCL's", "another"))
}

/// Records by stores.
#[derive(Debug)]
pub(super) struct StoredRecords {
    pub(super) words: Arc<Words>,
    pub(super) stop: Arc<StopWord>,
    pub(super) device: Cuda,
}

impl RecordExchange<Cuda> for StoredRecords {
    fn exchange(
        &mut self,
        comm: &mut dyn Communicator<Cuda>,
        tag: Tag,
        rank: usize,
        own: TensorRef<'_, Cuda>,
    ) -> Result<Option<Tensor<Cuda>>> {
        let (bytes, Words { records_at, record_bytes, .. }) = (own.count(), &*self.words);
        if bytes > *record_bytes || !bytes.is_multiple_of(4) {
            return Ok(None);
        }
        let comm = nccl_of(CALL, comm)?;
        let (device, addresses) = (&self.device, self.words.addresses());
        if device.is_capturing()? {
            let held = (self.words.memory().hold(), Arc::clone(&self.stop));
            device.hold_in_graph(Arc::new(held));
        }
        let (origin, timeout) = (Origin { rank, layer: tag.layer }, comm.timeout());
        let peers = PeerCall {
            call: CALL,
            origin,
            words: addresses,
            zones: addresses,
            zone: *records_at,
            timeout,
            stop: &self.stop,
            max_sms: 0,
        };
        let row = TravelingRow { dtype: DType::U8, bytes, weights: 0, scales: 0 };
        // SAFETY: all ranks' memory has room for so many bytes of each rank behind the words, and all make this call.
        comm.around_kernel(CALL, tag, row, || unsafe { device.nvlink_exchange(&peers, own) })?;
        let dims = [addresses.len(), bytes];
        // SAFETY: peers write there in the next exchange alone, which is behind what reads this on the stream.
        unsafe { self.words.memory().tensor(*records_at, DType::U8, &dims, Arc::new(())) }.map(Some)
    }
}
