//! The dispatcher's calls: each is one kernel on every rank, met and watched as a collective of the communicator.

use std::sync::Arc;

use crate::comm::Op;
use crate::cuda::Cuda;
use crate::cuda::nvlink::{
    ARRIVED_AT, ByGroups, CombineCall, DispatchCall, MOST_CHOICES, PeerCall, QuantizedRow, ZoneLayout, few_rows,
    group_experts, lists_rows,
};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::packing::ReceivedRows;
use crate::ep::row_transport::{HandleCall, ProductOfReceived, ReturnRows, RowTransport};
use crate::ep::{
    DispatchInputs, DispatcherKind, GroupConfig, Handle, MovementSms, Overlap, ReturnFormat, RowOrder, WorkBesideRows,
};
use crate::error::{Error, Result};
use crate::kernels::Arrivals;
use crate::nccl::TravelingRow;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::memory::{GroupMemory, nccl};
use super::records::hold_in_graph;
use super::zones::{ReceivedSizes, ZonePlace, Zones};

const CALL: &str = "dispatch_rows_with_product";
/// Rows of a message from which products start while they come, unless told otherwise, and bytes of a row up to which they
/// do: longer rows have longer products, of which it is no measurable part. `kernels/notes/nvlink.md`.
const OVERLAP_TOKENS: usize = 1024;
const OVERLAP_ROW_BYTES: usize = 8192;

/// Dispatcher between the GPUs of a host. Rows arrive in zones, one for each source rank, and stay there as long as they
/// are needed; a dispatch that finds no zone free copies them. A token's outputs are summed per rank in the tokens'
/// dtype, or in the group's [`ReturnFormat`], then over ranks in f32.
#[derive(Debug)]
pub(crate) struct NvLink {
    pub(super) core: DispatcherState<Cuda>,
    pub(super) memory: GroupMemory,
    /// Where products run while rows travel.
    pub(super) movement_sms: MovementSms,
}

impl NvLink {
    /// Rows that a message may have in any step: zones have room for these, so that no larger step makes new ones.
    fn most_rows(&self, step: &HandleCall<'_, Cuda>) -> Result<usize> {
        Ok(step.handle.zones(step.call)?.zone_rows.max(self.core.config.max_tokens_per_rank))
    }

    /// Zones of at least so many bytes (collective where they have to be made).
    fn reserve(&mut self, step: &HandleCall<'_, Cuda>, bytes: usize) -> Result<()> {
        let tag = DispatcherState::tag(step.handle, step.op);
        self.memory.reserve(&mut self.core, step.call, tag, bytes)
    }

    /// What returns to this rank: a row of each rank for each of its tokens, or of each choice; and weights.
    fn returning(&self, step: &HandleCall<'_, Cuda>, tokens: usize, row: usize, accumulator: DType) -> ZoneLayout {
        let k = step.handle.spec().top_k;
        let rows = if self.core.config.in_k_order { k } else { self.core.ranks() };
        ZoneLayout::new(tokens * rows * row, tokens * k * accumulator.size(), 0)
    }

    /// The same of sums that return quantized; a forward's, so that no weights do.
    fn returning_quantized(&self, tokens: usize, row: QuantizedRow) -> ZoneLayout {
        let rows = tokens * self.core.ranks();
        ZoneLayout::new(rows * row.codes, 0, rows * row.scales)
    }

    /// Bytes for what returns of rows of so many bytes, whichever call it is of.
    fn most_returning(&self, step: &HandleCall<'_, Cuda>, tokens: usize, row: usize, accumulator: DType) -> usize {
        let plain = self.returning(step, tokens, row, accumulator).bytes;
        match self.core.config.return_format {
            ReturnFormat::Tokens => plain,
            // Elements have two bytes at least.
            ReturnFormat::Mxfp8 => plain.max(self.returning_quantized(tokens, QuantizedRow::of(row / 2)).bytes),
        }
    }

    /// How sums of rows of so many elements travel where they are not of the rows' type.
    fn quantized(&self, step: &HandleCall<'_, Cuda>, width: usize) -> Option<QuantizedRow> {
        let mxfp8 = self.core.config.return_format == ReturnFormat::Mxfp8;
        (mxfp8 && step.op == Op::Combine).then(|| QuantizedRow::of(width))
    }

    /// The zones, which a call has reserved.
    fn reserved(&mut self, call: &'static str) -> Result<&mut Zones> {
        self.memory.zones.as_mut().ok_or_else(|| Error::invalid(call, "zones", "some", "none"))
    }

    /// Passes this rank's part before a call, or tells the others that it failed.
    fn ready<T>(&mut self, step: &HandleCall<'_, Cuda>, own: Result<T>) -> Result<T> {
        self.core.check_or_refuse(DispatcherState::tag(step.handle, step.op), own)
    }

    /// Has the graph under way hold what its replays write to.
    fn hold_in_graph(&self, place: &ZonePlace) -> Result<()> {
        let GroupMemory { words, zones, host, .. } = &self.memory;
        let zones = || zones.as_ref().map(|zones| zones.memory().hold());
        hold_in_graph(&self.core.device, host, || (words.memory().hold(), zones(), place.graph_lease()))
    }

    /// A call of all ranks.
    fn meet(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        row: TravelingRow,
        Meeting { zone, overlapped_sms }: Meeting,
        calls: impl FnOnce(&Cuda, &PeerCall<'_>) -> Result<()>,
    ) -> Result<()> {
        let Self { core, memory, .. } = self;
        let (device, overlapped) = (core.device.clone(), overlapped_sms.is_some());
        let max_sms = overlapped_sms.unwrap_or(core.config.max_sms);
        let (words, host) = (memory.words.addresses(), &memory.host);
        let zones = memory.zones.as_ref().map(Zones::addresses).unwrap_or_default();
        let comm = nccl(core)?;
        let (call, origin, timeout) = (step.call, step.handle.origin(), comm.timeout());
        let peers = PeerCall { call, origin, words, zones, zone, timeout, host, max_sms, overlapped };
        let tag = DispatcherState::tag(step.handle, step.op);
        comm.around_kernel(call, tag, row, || calls(&device, &peers))
    }

    /// A zone for what arrives, its tensors there, and where it does not stay, tensors that it is copied to.
    fn place(&mut self, step: &HandleCall<'_, Cuda>, arriving: &ReceivedSizes) -> Result<Arrival> {
        let device = self.core.device.clone();
        let capturing = device.is_capturing()?;
        let zones = self.reserved(step.call)?;
        let place = zones.free(capturing);
        let arrived = arriving.tensors(|at, dtype, dims| zones.tensor(&place, at, dtype, dims))?;
        let copies = match place.keeps() {
            true => None,
            false => Some(arriving.tensors(|_, dtype, dims| Tensor::empty(&device, dtype, dims))?),
        };
        device.poison_zone(step.call, zones.part(&place, arriving.layout().bytes)?)?;
        self.hold_in_graph(&place)?;
        Ok(Arrival { place, arrived, copies })
    }

    /// Room for what arrives, what travels of a row, and what is sent.
    fn prepared<'a>(
        &mut self,
        step: &HandleCall<'a, Cuda>,
        inputs: &'a DispatchInputs<'_, Cuda>,
    ) -> Result<(Arrival, TravelingRow, DispatchCall<'a>)> {
        let maps = step.handle.zones(step.call)?;
        let tokens = inputs.tokens.borrow();
        let (ranks, k) = (self.core.ranks(), step.handle.spec().top_k);
        let arriving = |zone_rows| ReceivedSizes {
            rows: ranks * zone_rows,
            dtype: tokens.dtype(),
            width: tokens.row_bytes() / tokens.dtype().size(),
            weights: inputs.weights.as_ref().map(|w| (k, w.dtype())),
            scales: inputs.scales.as_ref().map(TensorRef::row_bytes),
        };
        // And for the way back, so that it finds memory there.
        let row = tokens.row_bytes().max(step.handle.spec().returning_bytes());
        let accumulator = tokens.dtype().accumulator();
        let most = self.most_rows(step)?;
        let bytes = arriving(most).layout().bytes.max(self.most_returning(step, most, row, accumulator));
        self.reserve(step, bytes)?;
        let arriving = arriving(maps.zone_rows);
        let arrival = self.place(step, &arriving);
        let arrival = self.ready(step, arrival)?;
        let (weights, scales) = (arriving.weight_bytes(), arriving.scales.unwrap_or(0));
        let row = TravelingRow { dtype: tokens.dtype(), bytes: tokens.row_bytes(), weights, scales };
        let sent = DispatchCall {
            tokens,
            weights: inputs.weights.as_ref().map(TensorRef::borrow),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
            maps,
            layout: arriving.layout(),
        };
        Ok((arrival, row, sent))
    }

    /// Where this rank's own sums arrive, in a zone that they leave within the call; rows are of a type that can be added.
    fn returning_zone(&mut self, step: &HandleCall<'_, Cuda>, dtype: DType, layout: ZoneLayout) -> Result<usize> {
        let device = self.core.device.clone();
        device.check_nvlink_sums(step.call, dtype)?;
        let zones = self.reserved(step.call)?;
        let place = zones.passing();
        device.poison_zone(step.call, zones.part(&place, layout.bytes)?)?;
        self.hold_in_graph(&place)?;
        Ok(place.offset)
    }
}

/// Where a call's kernel works.
#[derive(Debug, Clone, Copy)]
struct Meeting {
    /// Where in its memory this rank receives.
    zone: usize,
    /// The kernel's SMs where products run meanwhile; `None`: none do.
    overlapped_sms: Option<usize>,
}

impl Meeting {
    fn alone(zone: usize) -> Self {
        Self { zone, overlapped_sms: None }
    }
}

/// Where rows are to arrive.
#[derive(Debug)]
struct Arrival {
    place: ZonePlace,
    arrived: ReceivedRows<Cuda>,
    copies: Option<ReceivedRows<Cuda>>,
}

impl Arrival {
    /// The rows, where no later call writes.
    fn kept(self, device: &Cuda) -> Result<ReceivedRows<Cuda>> {
        let Some(mut copies) = self.copies else { return Ok(self.arrived) };
        let pairs = [
            (&self.arrived.rows, &mut copies.rows),
            (&self.arrived.weights, &mut copies.weights),
            (&self.arrived.scales, &mut copies.scales),
        ];
        for (from, to) in pairs {
            if let (Some(from), Some(to)) = (from, to) {
                device.copy(from.view().data(), to.view_mut().into_data())?;
            }
        }
        Ok(copies)
    }
}

impl RowTransport<Cuda> for NvLink {
    const KIND: DispatcherKind = DispatcherKind::NvLink;
    const ROW_ORDER: RowOrder = RowOrder::Zones;
    const MOST_CHOICES: usize = MOST_CHOICES;

    fn core(&mut self) -> &mut DispatcherState<Cuda> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<Cuda>> {
        let Self { mut core, memory, .. } = *self;
        // It holds the words too.
        core.records = None;
        memory.release(&mut core)?;
        Ok(core)
    }

    fn may_overlap_products(&self) -> bool {
        lists_rows(self.core.config.max_tokens_per_rank, self.core.ranks(), self.movement_sms.dispatch)
    }

    fn overlaps_products(&self, handle: &Handle<Cuda>, row_bytes: usize) -> bool {
        let GroupConfig { overlap, num_experts, .. } = self.core.config;
        // Of the plan's sizes, which all ranks have alike.
        let gains = |rows: usize| match overlap {
            Overlap::Auto => rows >= OVERLAP_TOKENS && row_bytes <= OVERLAP_ROW_BYTES,
            // Of fewer rows products are made by kernels that wait for none.
            _ => !few_rows(rows * self.core.ranks() * handle.spec().top_k, num_experts),
        };
        RowTransport::may_overlap_products(self) && handle.zones(CALL).is_ok_and(|maps| gains(maps.zone_rows))
    }

    fn overlaps(&self, handle: &Handle<Cuda>) -> WorkBesideRows {
        // Of the plan's sizes, which all ranks have alike.
        let gains = |rows: usize| match self.core.config.overlap {
            Overlap::Off => false,
            Overlap::Auto => rows >= OVERLAP_TOKENS,
            Overlap::Sms(_) => true,
        };
        match self.movement_sms.dispatch > 0 && handle.zones(CALL).is_ok_and(|maps| gains(maps.zone_rows)) {
            true => WorkBesideRows::EarlyProduct,
            false => WorkBesideRows::None,
        }
    }

    fn send(&mut self, step: &HandleCall<'_, Cuda>, inputs: &DispatchInputs<'_, Cuda>) -> Result<ReceivedRows<Cuda>> {
        let (arrival, row, sent) = self.prepared(step, inputs)?;
        let zone = arrival.place.offset;
        // SAFETY: the memory is this group's alone, and all ranks have reserved room for this layout in each zone.
        self.meet(step, row, Meeting::alone(zone), |device, peers| unsafe { device.nvlink_dispatch(peers, sent) })?;
        arrival.kept(&self.core.device)
    }

    fn send_beside(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        work: &mut dyn FnMut(usize),
    ) -> Result<ReceivedRows<Cuda>> {
        let (arrival, row, sent) = self.prepared(step, inputs)?;
        let sms = self.movement_sms.dispatch;
        let meeting = Meeting { zone: arrival.place.offset, overlapped_sms: Some(sms) };
        self.meet(step, row, meeting, |device, peers| {
            // SAFETY: as in `send`.
            unsafe { device.nvlink_dispatch(peers, sent) }?;
            work(sms);
            Ok(())
        })?;
        arrival.kept(&self.core.device)
    }

    fn send_with_product(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        product: &mut ProductOfReceived<'_, Cuda>,
    ) -> Result<ReceivedRows<Cuda>> {
        let local_experts = self.core.config.num_experts / self.core.ranks();
        let by = ByGroups { kept: step.handle.kept_ids(), local_experts, blocks: self.movement_sms.dispatch };
        // SAFETY: the calls that bring rows, and so write there, are this rank's too, on its stream.
        let groups = unsafe { self.memory.words.memory().tensor(ARRIVED_AT, DType::I64, &[1], Arc::new(())) };
        let groups = self.ready(step, groups)?;
        let (arrival, row, sent) = self.prepared(step, inputs)?;
        let meeting = Meeting { zone: arrival.place.offset, overlapped_sms: Some(by.blocks) };
        self.meet(step, row, meeting, |device, peers| {
            // SAFETY: as in `send`; the group's tokens can be listed (`overlaps_products`).
            unsafe { device.nvlink_dispatch_by_groups(peers, sent, by) }?;
            let experts = group_experts(local_experts);
            let arrivals = Arrivals { groups: groups.view(), experts, movement_sms: by.blocks };
            product(&arrival.arrived, Some(arrivals));
            Ok(())
        })?;
        arrival.kept(&self.core.device)
    }

    fn check_combine(&self, call: &'static str, expert_out: TensorRef<'_, Cuda>) -> Result<()> {
        match self.core.config.return_format {
            ReturnFormat::Tokens => Ok(()),
            ReturnFormat::Mxfp8 => QuantizedRow::check_width(call, expert_out.row_bytes() / expert_out.dtype().size()),
        }
    }

    fn return_sums(&mut self, step: &HandleCall<'_, Cuda>, back: ReturnRows<'_, Cuda>) -> Result<()> {
        self.returned(step, back, None)
    }

    fn return_sums_with_products(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        back: ReturnRows<'_, Cuda>,
        work: &mut dyn FnMut(usize),
    ) -> Result<()> {
        self.returned(step, back, Some(work))
    }
}

impl NvLink {
    /// Returns rows, with work of this rank's meanwhile if there is some.
    fn returned(
        &mut self,
        step: &HandleCall<'_, Cuda>,
        back: ReturnRows<'_, Cuda>,
        work: Option<&mut dyn FnMut(usize)>,
    ) -> Result<()> {
        let maps = step.handle.zones(step.call)?;
        let ReturnRows { rows, with_weights, weights, mut out, mut out_weights } = back;
        let rows = rows.borrow();
        let (row, accumulator) = (rows.row_bytes(), rows.dtype().accumulator());
        let most = self.most_rows(step)?;
        self.reserve(step, self.most_returning(step, most, row, accumulator))?;
        let quantized = self.quantized(step, row / rows.dtype().size());
        let layout = match quantized {
            Some(row) => self.returning_quantized(maps.zone_rows, row),
            None => self.returning(step, maps.zone_rows, row, accumulator),
        };
        let zone = self.returning_zone(step, rows.dtype(), layout);
        let zone = self.ready(step, zone)?;
        let weight_bytes = if with_weights { step.handle.spec().top_k * accumulator.size() } else { 0 };
        let scales = quantized.map_or(0, |row| row.scales);
        let row = TravelingRow { dtype: rows.dtype(), bytes: row, weights: weight_bytes, scales };
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
            quantized,
        };
        let sms = self.movement_sms.back;
        let meeting = Meeting { zone, overlapped_sms: work.is_some().then_some(sms) };
        self.meet(step, row, meeting, |device, peers| {
            // SAFETY: as in `send`; rows of this type can be added, and of this width quantized (`check_combine`).
            unsafe { device.nvlink_combine(peers, returned) }?;
            if let Some(work) = work {
                work(sms);
            }
            Ok(())
        })
    }
}
