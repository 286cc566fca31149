//! The ranks' records of a prepare by packets: a rank that does not come within the patience has no tokens.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::{Communicator, Tag};
use crate::cuda::Cuda;
use crate::cuda::nvlink::PeerCall;
use crate::cuda::nvlink_low_latency::{LowLatencyPeers, MOST_RECORD_BYTES};
use crate::cuda::peers::HostWords;
use crate::dtype::DType;
use crate::ep::PlanIds;
use crate::ep::dispatcher_state::{ExchangedPlan, RecordExchange};
use crate::error::{Error, Result};
use crate::kernels::Origin;
use crate::nvlink::records::{CALL, Words, hold_in_graph, nccl_of};
use crate::tensor::{Tensor, TensorRef};

/// Records by packets.
#[derive(Debug)]
pub(super) struct PacketRecords {
    pub(super) words: Arc<Words>,
    pub(super) host: Arc<HostWords>,
    pub(super) device: Cuda,
    pub(super) patience: Duration,
}

impl RecordExchange<Cuda> for PacketRecords {
    fn exchange(
        &mut self,
        comm: &mut dyn Communicator<Cuda>,
        tag: Tag,
        rank: usize,
        own: TensorRef<'_, Cuda>,
    ) -> Result<Option<Tensor<Cuda>>> {
        let Self { words, host, device, patience } = self;
        let bytes = own.count();
        if bytes > MOST_RECORD_BYTES || !bytes.is_multiple_of(4) {
            let expected =
                format!("a record of words, of at most {MOST_RECORD_BYTES} bytes: fewer tokens a rank, or no patience");
            return Err(Error::invalid(CALL, "max_tokens_per_rank", expected, format!("{bytes} bytes")));
        }
        let mut all = Tensor::empty(device, DType::U8, &[words.addresses().len(), bytes])?;
        hold_in_graph(device, host, || words.memory().hold())?;
        let (zone, area) = words.record_packets();
        let peers = PeerCall { zone, ..words.record_call(Origin { rank, layer: tag.layer }, host, *patience) };
        let peers = LowLatencyPeers { peers, control: words.low_latency_at(), area, patience: Some(*patience) };
        // SAFETY: all ranks' words have room for two banks of packets of all records behind the control words of low latency,
        // and all ranks make this call.
        nccl_of(CALL, comm)?.around_uncounted_kernel(|| unsafe {
            device.low_latency_exchange(&peers, tag.layer, own.borrow(), all.view_mut())
        })?;
        Ok(Some(all))
    }

    /// A plan of its own kernels, from records that have come.
    fn plan(
        &mut self,
        _: &mut dyn Communicator<Cuda>,
        _: Tag,
        _: PlanIds<'_, Cuda>,
    ) -> Result<Option<Result<ExchangedPlan<Cuda>>>> {
        Ok(None)
    }
}
