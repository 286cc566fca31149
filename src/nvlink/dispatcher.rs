//! The dispatcher's calls: each is one kernel on every rank, met and watched as a collective of the communicator.

use crate::cuda::Cuda;
use crate::cuda::nvlink::{CombineCall, DispatchCall, MOST_CHOICES, PeerCall, ZoneLayout};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::packing::ReceivedRows;
use crate::ep::row_transport::{HandleCall, ReturnRows, RowTransport};
use crate::ep::{DispatchInputs, DispatcherKind, RowOrder};
use crate::error::{Error, Result};
use crate::nccl::{NcclComm, PeerMemory};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::zones::{ReceivedSizes, Zones};

/// Zones that rows stay in where the configuration asks for none: what a layer's forward and backward keep.
const KEPT_ZONES: usize = 2;

/// Dispatcher between the GPUs of a host. Rows arrive in zones, one for each source rank, and stay there as long as they
/// are needed; a dispatch that finds no zone free copies them. A token's outputs are summed per rank in the tokens'
/// dtype, then over ranks in f32.
#[derive(Debug)]
pub(crate) struct NvLink {
    pub(super) core: DispatcherState<Cuda>,
    /// Control words of all ranks.
    pub(super) words: PeerMemory,
    pub(super) zones: Option<Zones>,
}

/// NCCL's communicator, whose windows the memory is.
pub(super) fn nccl(core: &mut DispatcherState<Cuda>) -> Result<&mut NcclComm> {
    let other = || Error::invalid("Group::new", "communicator", "NCCL's", "another");
    core.comm.native().ok_or_else(other)
}

impl NvLink {
    /// Zones of at least so many bytes (collective where they have to be made).
    fn reserve(&mut self, step: &HandleCall<'_, Cuda>, bytes: usize) -> Result<()> {
        if self.zones.as_ref().is_some_and(|zones| zones.bytes() >= bytes) {
            return Ok(());
        }
        self.core.device.not_captured(step.call, "allocate zones")?;
        let kept = if self.core.config.windows == 0 { KEPT_ZONES } else { self.core.config.windows };
        let tag = DispatcherState::tag(step.handle, step.op);
        let memory = nccl(&mut self.core)?.peer_memory(tag, Zones::bytes_of(bytes, kept))?;
        // Tensors may lie in smaller ones, and keep these; peers are told of the new ones alone.
        self.zones = Some(Zones::new(memory, bytes, kept));
        Ok(())
    }

    /// What returns to this rank: a row of each rank for each of its tokens, or of each choice; and weights.
    fn returning(&self, step: &HandleCall<'_, Cuda>, tokens: usize, row: usize, accumulator: DType) -> ZoneLayout {
        let k = step.handle.spec().top_k;
        let rows = if self.core.config.in_k_order { k } else { self.core.ranks() };
        ZoneLayout::new(tokens * rows * row, tokens * k * accumulator.size(), 0)
    }

    fn check_choices(step: &HandleCall<'_, Cuda>) -> Result<()> {
        match step.handle.spec().top_k {
            ..=MOST_CHOICES => Ok(()),
            more => Err(Error::invalid(step.call, "spec.top_k", format!("at most {MOST_CHOICES} (nvlink)"), more)),
        }
    }

    /// The zones, which a call has reserved.
    fn reserved(&mut self, call: &'static str) -> Result<&mut Zones> {
        self.zones.as_mut().ok_or_else(|| Error::invalid(call, "zones", "some", "none"))
    }

    /// A call with rows for this rank from `zone` on in its memory.
    fn meet(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        rows: TensorRef<'_, Cuda>,
        zone: usize,
        calls: impl FnOnce(&Cuda, &PeerCall<'_>) -> Result<()>,
    ) -> Result<()> {
        let Self { core, words, zones } = self;
        let (device, max_sms) = (core.device.clone(), core.config.max_sms);
        let zones = zones.as_ref().map(Zones::addresses).unwrap_or_default();
        let comm = nccl(core)?;
        let (call, origin, timeout) = (step.call, step.handle.origin(), comm.timeout());
        let peers = PeerCall { call, origin, words: words.addresses(), zones, zone, timeout, max_sms };
        let tag = DispatcherState::tag(step.handle, step.op);
        comm.around((call, rows.dtype(), rows.row_bytes()), tag, || calls(&device, &peers))
    }

    /// A copy of what arrived where the next call writes.
    fn copied(&self, arrived: &ReceivedRows<Cuda>) -> Result<ReceivedRows<Cuda>> {
        let device = &self.core.device;
        let copy = |from: &Tensor<Cuda>| {
            let mut to = Tensor::empty(device, from.dtype(), from.dims())?;
            device.copy(from.view().data(), to.view_mut().into_data())?;
            Ok::<_, Error>(to)
        };
        Ok(ReceivedRows {
            rows: arrived.rows.as_ref().map(copy).transpose()?,
            weights: arrived.weights.as_ref().map(copy).transpose()?,
            scales: arrived.scales.as_ref().map(copy).transpose()?,
        })
    }
}

impl RowTransport<Cuda> for NvLink {
    const KIND: DispatcherKind = DispatcherKind::NvLink;
    const ROW_ORDER: RowOrder = RowOrder::Zones;

    fn core(&mut self) -> &mut DispatcherState<Cuda> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> DispatcherState<Cuda> {
        self.core
    }

    fn send(&mut self, step: &HandleCall<'_, Cuda>, inputs: &DispatchInputs<'_, Cuda>) -> Result<ReceivedRows<Cuda>> {
        Self::check_choices(step)?;
        let maps = step.handle.zones(step.call)?;
        let tokens = inputs.tokens.borrow();
        let arriving = ReceivedSizes {
            rows: self.core.ranks() * maps.zone_rows,
            dtype: tokens.dtype(),
            width: tokens.row_bytes() / tokens.dtype().size(),
            weights: inputs.weights.as_ref().map(|w| (step.handle.spec().top_k, w.dtype())),
            scales: inputs.scales.as_ref().map(TensorRef::row_bytes),
        };
        let layout = arriving.layout();
        // And for the way back, so that it finds memory there.
        let row = tokens.row_bytes().max(step.handle.spec().returning_bytes());
        let returning = self.returning(step, maps.zone_rows, row, tokens.dtype().accumulator());
        self.reserve(step, layout.bytes.max(returning.bytes))?;
        let capturing = self.core.device.is_capturing()?;
        let zones = self.reserved(step.call)?;
        let place = zones.free(capturing);
        let arrived = arriving.tensors(zones, &place);
        let arrived = self.core.check_or_refuse(DispatcherState::tag(step.handle, step.op), arrived)?;
        let sent = DispatchCall {
            tokens,
            weights: inputs.weights.as_ref().map(TensorRef::borrow),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
            maps,
            layout,
        };
        // SAFETY: the memory is this group's alone, and all ranks have reserved room for this layout in each zone.
        self.meet(step, tokens, place.offset, |device, peers| unsafe { device.nvlink_dispatch(peers, sent) })?;
        if place.keeps() { Ok(arrived) } else { self.copied(&arrived) }
    }

    fn return_sums(&mut self, step: &HandleCall<'_, Cuda>, back: ReturnRows<'_, Cuda>) -> Result<()> {
        Self::check_choices(step)?;
        let maps = step.handle.zones(step.call)?;
        let ReturnRows { rows, with_weights, weights, mut out, mut out_weights } = back;
        let rows = rows.borrow();
        let layout = self.returning(step, maps.zone_rows, rows.row_bytes(), rows.dtype().accumulator());
        self.reserve(step, layout.bytes)?;
        let zone = self.reserved(step.call)?.passing().offset;
        let returned = CombineCall {
            rows,
            weights: weights.as_ref().map(TensorRef::borrow),
            with_weights,
            out: out.reborrow(),
            out_weights: out_weights.as_mut().map(TensorMut::reborrow),
            maps,
            kept: step.handle.kept_ids(),
            layout,
            in_k_order: self.core.config.in_k_order,
        };
        // SAFETY: as in `send`.
        self.meet(step, rows, zone, |device, peers| unsafe { device.nvlink_combine(peers, returned) })
    }
}
