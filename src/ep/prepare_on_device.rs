//! Prepare whose records the device writes and plans from: what a device does whose host runs ahead of it.

use crate::comm::Tag;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use super::dispatcher_state::{DispatcherState, ExchangedPlan, PREPARE};
use super::{Capacity, DispatchSpec, Handle, PlanFor, PlanIds, PlanRecords, RecordIds, Reporting, RowOrder};
use crate::plan::deferred_errors;
use crate::plan::routing_record::{self, RoutingRecord};

impl<D: Kernels> DispatcherState<D> {
    /// Whether the device plans from records.
    pub(super) fn plans_on_device(&self, row_order: RowOrder, spec: &DispatchSpec) -> bool {
        matches!(row_order, RowOrder::AllRows | RowOrder::UniqueRows | RowOrder::Zones)
            && spec.reporting == Reporting::Deferred
            && self.device.plans_records(spec, self.config.num_experts)
    }

    /// [`DispatcherState::prepare`] with the records written, exchanged and planned on the device. The host learns
    /// nothing of them, or, where it has to know how many rows the plan has, what it would have learned.
    pub(super) fn prepare_on_device(
        &mut self,
        tag: Tag,
        row_order: RowOrder,
        ids: TensorRef<'_, D>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let mut errors = match self.errors.take() {
            Some(errors) => errors,
            None => {
                let new = self.empty_errors();
                self.refuse_own_error(tag, new)?
            }
        };
        let prepared = self.exchange_records(tag, row_order, ids, spec, &mut errors);
        self.errors = Some(errors);
        let (handle, pending) = prepared?;
        let Some(peer) = pending else { return Ok(handle) };
        // The same on all ranks, but for those that have asked.
        self.take_device_error()?;
        let reason = "it holds an error of an earlier call".to_string();
        Err(Error::Peer { call: PREPARE, rank: self.rank(), peer, reason })
    }

    /// Error words that the device keeps of records, before the first.
    fn empty_errors(&self) -> Result<Tensor<D>> {
        let mut new = Tensor::empty(&self.device, DType::U8, &[deferred_errors::bytes(self.ranks())])?;
        // A copy from the host, which cannot be captured: a fill would become part of the graph, and this memory
        // outlives a capture.
        self.device.upload(&vec![0; new.bytes()], new.view_mut())?;
        Ok(new)
    }

    /// A handle, and the first rank that holds an error of an earlier call.
    fn exchange_records(
        &mut self,
        tag: Tag,
        row_order: RowOrder,
        ids: TensorRef<'_, D>,
        spec: &DispatchSpec,
        errors: &mut Tensor<D>,
    ) -> Result<(Handle<D>, Option<usize>)> {
        let (rank, ranks, sizes) = (self.rank(), self.ranks(), self.sizes(spec));
        let tokens = match self.check_ids(ids, spec) {
            Ok(tokens) => tokens,
            Err(error) => return self.fail(tag, row_order, spec, error),
        };
        let (num_experts, max_tokens) = (self.config.num_experts, self.max_tokens(spec));
        let by_transport = match &mut self.records {
            Some(records) => {
                let (ids, errors) = (ids.borrow(), errors.view_mut());
                let of = PlanFor { rank, ranks, num_experts, max_tokens, tokens, spec, row_order };
                let choices = PlanIds { of, ids, errors };
                records.plan(&mut *self.comm, tag, choices).transpose()
            }
            None => None,
        };
        let (gathered, records) = match by_transport {
            Some(planned) => {
                let planned = self.exchanged(spec, planned)?;
                self.refuse_own_error(tag, planned)?
            }
            None => self.plan_by_records(tag, row_order, ids, spec, errors)?,
        };
        let Some(counts) = gathered.counts else {
            let absent = if spec.backward { Vec::new() } else { vec![rank] };
            return Ok((self.handle(spec, gathered.plan, absent, vec![gathered.padded_tokens; ranks]), None));
        };
        if counts.failed {
            let unread = || Error::invalid(PREPARE, "records", "those that the host waits for", "none");
            let all = records.ok_or_else(unread).and_then(|records| self.device.download(records.view()));
            let all = self.refuse_own_error(tag, all)?;
            let all: Vec<RoutingRecord> =
                all.chunks_exact(sizes.bytes()).map(|b| RoutingRecord::decode(b, sizes)).collect();
            let unknown = || Error::invalid(PREPARE, "records", "what is wrong with them", "nothing");
            return Err(routing_record::problem(&all, rank, num_experts).unwrap_or_else(unknown));
        }
        if let (Some((rank, needed)), Capacity::Static(capacity)) = (counts.overflow, spec.capacity) {
            return Err(Error::Capacity { rank, layer: spec.layer, needed, capacity });
        }
        let rows = if row_order == RowOrder::AllRows { vec![gathered.padded_tokens; ranks] } else { counts.tokens };
        Ok((self.handle(spec, gathered.plan, counts.absent, rows), counts.pending.first().copied()))
    }

    /// A record, an exchange and a plan, one after the other.
    fn plan_by_records(
        &mut self,
        tag: Tag,
        row_order: RowOrder,
        ids: TensorRef<'_, D>,
        spec: &DispatchSpec,
        errors: &mut Tensor<D>,
    ) -> Result<ExchangedPlan<D>> {
        let device = self.device.clone();
        let (rank, ranks, num_experts) = (self.rank(), self.ranks(), self.config.num_experts);
        let (max_tokens, tokens) = (self.max_tokens(spec), ids.rows());
        let own = Tensor::empty(&device, DType::U8, &[self.sizes(spec).bytes()]);
        let mut own = self.refuse_own_error(tag, own)?;
        let (out, ids) = (own.view_mut(), ids.borrow());
        let recorded =
            device.record_ids(RecordIds { rank, num_experts, max_tokens, spec, ids, errors: errors.view_mut(), out });
        if let Err(error) = recorded {
            return self.fail(tag, row_order, spec, error);
        }
        let records = self.exchange(tag, spec, &own)?;
        let of = PlanFor { rank, ranks, num_experts, max_tokens, tokens, spec, row_order };
        let planned = device.plan_records(PlanRecords { of, records: records.view(), errors: errors.view_mut() });
        Ok((self.refuse_own_error(tag, planned)?, Some(records)))
    }

    /// Returns and clears what the device has found, from what it has kept of records if that is it. One error a call.
    pub(super) fn take_device_error(&mut self) -> Result<()> {
        if let Some(pending_error) = self.pending_error.take() {
            return Err(pending_error);
        }
        // First, as it would keep the memory below from being read.
        let raised = self.device.check();
        let rank = self.comm.rank();
        let Some(errors) = &mut self.errors else { return raised };
        let bytes = match self.device.download(errors.view()) {
            Ok(bytes) => bytes,
            Err(error) => return raised.and(Err(error)),
        };
        let kept = deferred_errors::error(&bytes, rank, self.config.num_experts);
        if kept.is_some() {
            self.device.zero(errors.view_mut().into_data())?;
        }
        let (now, pending_error) = deferred_errors::split_errors(raised, kept);
        self.pending_error = pending_error;
        now
    }
}
