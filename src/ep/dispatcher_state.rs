//! Code that all dispatchers of this crate share: prepare, and the checks before every collective.
//!
//! A rank that finds an error of its own still takes part in the collective that the others wait in, as a failure:
//! in prepare through its record, elsewhere through [`Communicator::refuse`]. It returns its error, they return
//! [`Error::Peer`] at once, and the group works again.

use std::fmt;
use std::sync::Arc;

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Op, Tag};
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::kernels::{Kernels, Origin, RouteAndPlan, RoutedPlan};
use crate::plan::Overflow;
use crate::plan::routing_record::{self, BadId, RecordSizes, RecordStatus, RoutingRecord};
use crate::plan::waits;
use crate::tensor::{Tensor, TensorRef};

use super::handle::{Agreement, Handle};
use super::{DevicePlan, DispatchSpec, GroupConfig, HostPlanRequest, Plan, PlanIds, PlanRequest, Reporting, RowOrder};

pub(super) const PREPARE: &str = "prepare";

/// Rules of the transport that a prepare checks its rows against.
#[derive(Debug)]
pub struct TransportRules {
    /// The order in which it brings rows.
    pub row_order: RowOrder,
    /// An error where it cannot serve the spec.
    pub accepted: Result<()>,
}

/// A way of its own in which the ranks' records of a prepare reach all ranks (one collective).
pub trait RecordExchange<D: Kernels>: fmt::Debug + Send {
    /// All ranks' records `[R, bytes]`, which stay until the next exchange; `None`, alike on all ranks: these it does not
    /// carry, and the communicator gathers them.
    fn exchange(
        &mut self,
        comm: &mut dyn Communicator<D>,
        tag: Tag,
        rank: usize,
        own: TensorRef<'_, D>,
    ) -> Result<Option<Tensor<D>>>;

    /// The same with the plan in one, from choices that the device has. The outer result is that of the ranks' meeting, with
    /// `None` where [`exchange`](Self::exchange) is to do it (a rank may differ in that); the inner what this rank made of it.
    fn plan(
        &mut self,
        comm: &mut dyn Communicator<D>,
        tag: Tag,
        choices: PlanIds<'_, D>,
    ) -> Result<Option<Result<ExchangedPlan<D>>>>;
}

/// A plan from records that have been exchanged, and these, where the host has waited for them.
pub type ExchangedPlan<D> = (DevicePlan<D>, Option<Tensor<D>>);

/// State of a dispatcher.
#[derive(Debug)]
pub struct DispatcherState<D: Kernels> {
    pub device: D,
    pub comm: Box<dyn Communicator<D>>,
    pub config: GroupConfig,
    /// Says which group a handle belongs to.
    identity: Arc<()>,
    /// Prepares whose exchange took place. All ranks know that alike, whatever each makes of what it learned.
    sequence: u64,
    /// The last of them in which all ranks had the same spec and none failed. Known alike, too.
    compared: u64,
    deferred: Option<BadId>,
    /// Errors that the device has found in records.
    pub(super) errors: Option<Tensor<D>>,
    /// An error that was found beside one that has been told.
    pub(super) pending_error: Option<Error>,
    /// `None`: the communicator gathers records.
    pub records: Option<Box<dyn RecordExchange<D>>>,
}

impl<D: Kernels> DispatcherState<D> {
    pub fn new(device: D, comm: Box<dyn Communicator<D>>, config: GroupConfig) -> Self {
        Self {
            device,
            comm,
            config,
            identity: Arc::new(()),
            sequence: 0,
            compared: 0,
            deferred: None,
            errors: None,
            pending_error: None,
            records: None,
        }
    }

    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub fn ranks(&self) -> usize {
        self.comm.size()
    }

    pub fn take_deferred(&mut self) -> Result<()> {
        self.take_masked()?;
        self.take_device_error()
    }

    /// The same of what records told: the host knows it and waits for nothing.
    pub fn take_masked(&mut self) -> Result<()> {
        match self.deferred.take() {
            Some(bad) => Err(bad.error(self.config.num_experts)),
            None => Ok(()),
        }
    }

    /// Tag of a collective that belongs to a handle.
    pub fn tag(handle: &Handle<D>, op: Op) -> Tag {
        Tag { layer: handle.spec.layer, op, sequence: handle.sequence }
    }

    /// Refuses a handle of another group.
    pub fn check_handle(&self, call: &'static str, handle: &Handle<D>) -> Result<()> {
        if Arc::ptr_eq(&self.identity, &handle.group) {
            return Ok(());
        }
        Err(Error::invalid(call, "handle", "a handle that this group prepared", "one of another group"))
    }

    /// Passes this rank's checks before a collective, or tells the others that they failed.
    pub fn check_or_refuse<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        refuse_on_error(&mut *self.comm, tag, checked)
    }

    /// The same in a step, in which ranks with patience go on without this one anyway: they are not told.
    pub fn check_in_step<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        match self.config.patience {
            Some(_) => checked,
            None => self.check_or_refuse(tag, checked),
        }
    }

    /// With patience, ranks plan from the records that have come to each of them, so that nothing may depend on all ranks'
    /// tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a spec by which choices may be dropped.
    pub fn check_patience(&self, call: &'static str, spec: &DispatchSpec) -> Result<()> {
        let beside = "beside GroupConfig::patience";
        match (self.config.patience, spec.overflow, spec.expert_capacity) {
            (Some(_), Overflow::Drop, _) => {
                Err(Error::invalid(call, "spec.overflow", format!("Overflow::Error {beside}"), "Overflow::Drop"))
            }
            (Some(_), _, Some(_)) => {
                Err(Error::invalid(call, "spec.expert_capacity", format!("none {beside}"), "some"))
            }
            _ => Ok(()),
        }
    }

    /// The same of what a rank needs for an exchange or makes of one: the others hear of it where they are next. That a
    /// capacity is too small, or that nothing of this can be captured, all of them see.
    pub(super) fn refuse_own_error<T>(&mut self, tag: Tag, made: Result<T>) -> Result<T> {
        match made {
            Err(Error::Capacity { .. } | Error::NotCapturable { .. }) => made,
            other => self.check_in_step(tag, other),
        }
    }

    /// A collective's error, in terms of the call it served.
    pub fn as_peer_error(&self, call: &'static str, error: Error) -> Error {
        error.of_call(call, self.rank())
    }

    /// Routing of all ranks' tokens: one collective, an all-gather of a record per rank (none for
    /// [`RowOrder::Local`]). `transport`: the order of its rows, and whether it takes the spec.
    pub fn prepare(
        &mut self,
        transport: TransportRules,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let row_order = transport.row_order;
        let handle = self.prepare_any(transport, ids, weights, spec);
        handle.map_err(|error| match error {
            Error::NotCapturable { .. } => Error::not_capturable(PREPARE, uncapturable_part(row_order, spec)),
            other => other,
        })
    }

    fn prepare_any(
        &mut self,
        TransportRules { row_order, accepted }: TransportRules,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let tag = Tag { layer: spec.layer, op: Op::Prepare, sequence: self.sequence + 1 };
        // Where sizes are refused there is no record of that size either.
        let sizes = self.check_sizes(spec);
        self.check_in_step(tag, sizes)?;
        let checked = self.check_spec(spec).and(accepted).and_then(|()| Self::check_weights(ids, weights));
        if let Err(error) = checked {
            return self.fail(tag, row_order, spec, error);
        }
        if self.plans_on_device(row_order, spec) {
            return self.prepare_on_device(tag, row_order, ids, spec);
        }
        if row_order == RowOrder::Local
            && spec.reporting == Reporting::Deferred
            && let Some(handle) = self.plan_on_device(ids, spec)?
        {
            return Ok(handle);
        }
        // An error that an earlier prepare has left on the device comes first.
        let before = if self.errors.is_some() { self.take_device_error() } else { Ok(()) };
        let own = match before.and_then(|()| self.own_record(ids, weights, spec)) {
            Ok(own) => own,
            Err(error) => return self.fail(tag, row_order, spec, error),
        };
        let records = match row_order {
            RowOrder::Local => vec![own],
            RowOrder::UniqueRows | RowOrder::AllRows | RowOrder::Slots | RowOrder::Zones => {
                self.gather(tag, spec, &own)?
            }
        };
        if let Some(error) = routing_record::problem(&records, self.rank(), self.config.num_experts) {
            return Err(error);
        }
        if row_order == RowOrder::Local {
            self.sequence += 1;
        }
        self.compared = self.sequence;
        self.deferred = self.deferred.or(routing_record::masked(&records));
        let planned = self.plan(row_order, &records, spec);
        self.refuse_own_error(tag, planned)
    }

    /// Counts a prepare whose exchange, not this module's, took place: straight after it, so that what a rank makes of
    /// it alone does not come between the ranks' counts.
    pub fn count(&mut self) {
        self.sequence += 1;
    }

    /// A handle of a plan that was made without the ranks' records, of the prepare counted last.
    pub fn accept(&self, spec: &DispatchSpec, plan: Plan<D>) -> Handle<D> {
        let absent = if spec.backward { Vec::new() } else { vec![self.rank()] };
        let tokens = vec![plan.tokens];
        Handle { in_slots: true, ..self.handle(spec, plan, absent, tokens) }
    }

    /// Whether the ranks' specs were the same in the prepare of this number or a later one; the same on all ranks,
    /// whatever each made of the records.
    pub fn has_compared(&self, sequence: u64) -> bool {
        self.compared >= sequence
    }

    /// The number of the next prepare.
    pub fn next(&self) -> u64 {
        self.sequence + 1
    }

    /// The only rank's plan without waiting for the device, where that can make it.
    fn plan_on_device(&mut self, ids: TensorRef<'_, D>, spec: &DispatchSpec) -> Result<Option<Handle<D>>> {
        let tokens = vec![self.check_ids(ids, spec)?];
        let request = PlanRequest {
            rank: 0,
            ranks: 1,
            num_experts: self.config.num_experts,
            ids: ids.borrow(),
            weights: None,
            tokens: &tokens,
            spec,
            row_order: RowOrder::Local,
        };
        Ok(self.device.plan_on_device(request)?.map(|plan| self.alone(spec, plan)))
    }

    /// The only rank's tokens routed and planned for at once, where the device has that: a handle, and the slots' weights.
    pub(super) fn route_and_plan(&mut self, call: RouteAndPlan<'_, D>) -> Result<Option<(Handle<D>, Tensor<D>)>> {
        let spec = *call.spec;
        // What a prepare refuses is left to it.
        let other_experts = call.config.num_experts != self.config.num_experts;
        if other_experts || self.check_sizes(&spec).is_err() || self.check_spec(&spec).is_err() {
            return Ok(None);
        }
        let routed = self.device.route_and_plan(call)?;
        Ok(routed.map(|RoutedPlan { plan, slot_weights }| (self.alone(&spec, plan), slot_weights)))
    }

    /// The handle of the only rank's plan, which counts as a prepare.
    fn alone(&mut self, spec: &DispatchSpec, plan: Plan<D>) -> Handle<D> {
        self.sequence += 1;
        let (absent, tokens) = (if spec.backward { Vec::new() } else { vec![0] }, vec![plan.tokens]);
        self.handle(spec, plan, absent, tokens)
    }

    /// A handle of the last prepare that was counted.
    pub(super) fn handle(
        &self,
        spec: &DispatchSpec,
        plan: Plan<D>,
        absent: Vec<usize>,
        tokens: Vec<usize>,
    ) -> Handle<D> {
        Handle {
            spec: *spec,
            rank: self.rank(),
            sequence: self.sequence,
            agreement: Agreement { absent },
            plan,
            group: Arc::clone(&self.identity),
            tokens,
            in_slots: false,
            _kept_routing: None,
        }
    }

    /// Checks this rank's choices and packs them.
    fn own_record(
        &mut self,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<RoutingRecord> {
        let k = spec.top_k;
        let tokens = self.check_ids(ids, spec)?;
        let weights = match (routing_record::needs_weights(spec), weights) {
            (false, _) => Vec::new(),
            (true, None) => {
                let needed = "weights, to keep by probability";
                return Err(Error::invalid(PREPARE, "tensor topk_weights", needed, "none"));
            }
            (true, Some(w)) => self.device.read(w)?,
        };
        let bytes = self.device.download(ids)?;
        let origin = Origin { rank: self.rank(), layer: spec.layer };
        let (ids, bad) = routing_record::mask_bad_ids(&bytes, ids.dtype(), origin, k, self.config.num_experts)?;
        let status = match (self.deferred.take(), bad) {
            // A deferred error that nobody asked for comes first.
            (Some(bad), _) => RecordStatus::BadId(bad),
            (None, None) => RecordStatus::Ready,
            (None, Some(bad)) if spec.reporting == Reporting::Deferred => RecordStatus::Deferred(bad),
            (None, Some(bad)) => RecordStatus::BadId(bad),
        };
        let (fields, values, backward) = (routing_record::fields(spec), *spec.formula.values(), spec.backward);
        Ok(RoutingRecord { status, fields, values, backward, pending: false, tokens, ids, weights })
    }

    /// Most tokens of a rank in a call.
    pub(super) fn max_tokens(&self, spec: &DispatchSpec) -> usize {
        spec.max_tokens.unwrap_or(self.config.max_tokens_per_rank)
    }

    pub(super) fn sizes(&self, spec: &DispatchSpec) -> RecordSizes {
        let weights = routing_record::needs_weights(spec);
        RecordSizes { max_tokens: self.max_tokens(spec), top_k: spec.top_k, weights }
    }

    /// Takes part as a failure and returns this rank's error. Hosts that do not read records have to be told otherwise.
    pub(super) fn fail<T>(&mut self, tag: Tag, row_order: RowOrder, spec: &DispatchSpec, error: Error) -> Result<T> {
        if self.plans_on_device(row_order, spec) && !waits(row_order, spec) {
            return self.check_in_step(tag, Err(error));
        }
        // The rank returns its own error, whatever becomes of the exchange.
        if self.ranks() > 1 {
            let _ = self.gather(tag, spec, &RoutingRecord::failed(RecordStatus::Failed(error.to_string())));
        }
        Err(error)
    }

    /// Every rank's record, in rank order.
    fn gather(&mut self, tag: Tag, spec: &DispatchSpec, own: &RoutingRecord) -> Result<Vec<RoutingRecord>> {
        let sizes = self.sizes(spec);
        let send = Tensor::empty(&self.device, DType::U8, &[sizes.bytes()]).and_then(|mut send| {
            self.device.upload(&own.encode(sizes)?, send.view_mut())?;
            Ok(send)
        });
        let send = self.refuse_own_error(tag, send)?;
        let recv = self.exchange(tag, spec, &send)?;
        let bytes = self.device.download(recv.view());
        let bytes = self.refuse_own_error(tag, bytes)?;
        Ok(bytes.chunks_exact(sizes.bytes()).map(|b| RoutingRecord::decode(b, sizes)).collect())
    }

    /// The same as the device has them.
    pub(super) fn exchange(&mut self, tag: Tag, spec: &DispatchSpec, own: &Tensor<D>) -> Result<Tensor<D>> {
        let gathered = self.gather_records(tag, own);
        self.exchanged(spec, gathered)
    }

    /// What an exchange of records comes to: it counts as a prepare, or its error is told in terms of that.
    pub(super) fn exchanged<T>(&mut self, spec: &DispatchSpec, result: Result<T>) -> Result<T> {
        match result {
            Ok(all) => {
                self.sequence += 1;
                Ok(all)
            }
            Err(Error::Comm(CommError::SizeMismatch { rank, peer, expected, found, .. })) => {
                let what = format!("a routing record of {expected} bytes (top_k = {})", spec.top_k);
                let field = "spec.top_k, spec.max_tokens or spec.expert_capacity".to_string();
                let peer_value = format!("a routing record of {found} bytes");
                Err(Error::ConfigMismatch { call: PREPARE, field, rank, value: what, peer, peer_value })
            }
            Err(error) => Err(self.as_peer_error(PREPARE, error)),
        }
    }

    fn gather_records(&mut self, tag: Tag, own: &Tensor<D>) -> Result<Tensor<D>> {
        let rank = self.rank();
        if let Some(records) = &mut self.records
            && let Some(all) = records.exchange(&mut *self.comm, tag, rank, own.view())?
        {
            return Ok(all);
        }
        let recv = Tensor::empty(&self.device, DType::U8, &[self.ranks(), own.bytes()]);
        let mut recv = self.refuse_own_error(tag, recv)?;
        self.comm.all_gather(tag, own.view(), recv.view_mut())?;
        Ok(recv)
    }

    fn plan(&self, row_order: RowOrder, records: &[RoutingRecord], spec: &DispatchSpec) -> Result<Handle<D>> {
        let tokens: Vec<usize> = records.iter().map(|r| r.tokens).collect();
        let ids: Vec<i32> = records.iter().flat_map(|r| &r.ids).copied().collect();
        let weights: Vec<f64> = records.iter().flat_map(|r| &r.weights).copied().collect();
        let plan = self.device.plan(HostPlanRequest {
            rank: self.rank(),
            ranks: self.ranks(),
            num_experts: self.config.num_experts,
            ids: &ids,
            weights: routing_record::needs_weights(spec).then_some(&weights[..]),
            tokens: &tokens,
            spec,
            row_order,
        })?;
        let absent = (0..records.len()).filter(|r| !records[*r].backward).collect();
        Ok(Handle { in_slots: row_order == RowOrder::Slots, ..self.handle(spec, plan, absent, tokens) })
    }
}

/// The part of a prepare that cannot be captured.
fn uncapturable_part(row_order: RowOrder, spec: &DispatchSpec) -> &'static str {
    match row_order {
        _ if routing_record::needs_weights(spec) => "an expert capacity by probability, which the host plans",
        RowOrder::AllRows | RowOrder::Zones => {
            "the host's part in it, which deferred reporting with a static capacity has in a first step only"
        }
        _ => {
            "the host's part in it, which every step has (dispatchers that plan on the GPU alone have none: all-gather)"
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::comm::ReduceOp;
    use crate::config::{CapacityOrder, ExpertCapacity};
    use crate::cpu::{Cpu, ThreadComm, ThreadWorld};
    use crate::ep::DispatcherKind;

    const IDS: [i32; 4] = [0, 1, 1, 0];

    fn core(comm: ThreadComm) -> DispatcherState<Cpu> {
        let config = GroupConfig { dispatcher: DispatcherKind::AllGather, ..GroupConfig::new(2, 4) };
        DispatcherState::new(Cpu::default(), Box::new(comm), config)
    }

    fn on_both(body: impl Fn(DispatcherState<Cpu>) + Sync) {
        std::thread::scope(|threads| {
            for comm in ThreadWorld::create(2, Duration::from_secs(20)) {
                let body = &body;
                threads.spawn(move || body(core(comm)));
            }
        });
    }

    /// A prepare by records, whose number is to be the same on both ranks.
    fn by_records(core: &mut DispatcherState<Cpu>, expected: u64) -> Handle<Cpu> {
        let ids = Tensor::from_vec(IDS.to_vec(), &[2, 2]).expect("ids");
        let spec = DispatchSpec::new(0, 2);
        let handle = core
            .prepare(TransportRules { row_order: RowOrder::Slots, accepted: Ok(()) }, ids.view(), None, &spec)
            .expect("a handle");
        assert_eq!(handle.sequence, expected);
        assert!(core.has_compared(expected) && !core.has_compared(expected + 1));
        handle
    }

    /// Prepares as a dispatcher that leaves the plan to a library: loads are summed, and the rest is each rank's own.
    fn by_loads(core: &mut DispatcherState<Cpu>, own: Result<()>) -> Result<Handle<Cpu>> {
        let spec = DispatchSpec::new(0, 2);
        let tag = Tag { layer: 0, op: Op::Prepare, sequence: core.next() };
        let mut loads = Tensor::from_vec(vec![2_i64, 2], &[2]).expect("loads");
        core.comm.all_reduce(tag, ReduceOp::Sum, loads.view_mut()).map_err(|e| core.as_peer_error(PREPARE, e))?;
        core.count();
        core.check_or_refuse(tag, own)?;
        let request = HostPlanRequest {
            rank: 0,
            ranks: 1,
            num_experts: 2,
            ids: &IDS,
            weights: None,
            tokens: &[2],
            spec: &spec,
            row_order: RowOrder::Local,
        };
        Ok(core.accept(&spec, core.device.plan(request)?))
    }

    #[test]
    fn an_error_behind_the_exchange_leaves_the_ranks_counting_alike() {
        on_both(|mut core| {
            by_records(&mut core, 1);
            let failing = core.rank() == 0;
            let own = if failing { Err(Error::invalid("test", "memory", "some", "none")) } else { Ok(()) };
            match (failing, by_loads(&mut core, own)) {
                (true, Err(Error::Invalid { .. })) => {}
                (false, Ok(handle)) => {
                    // Rank 0's error is met where the rows would go.
                    let tag = DispatcherState::tag(&handle, Op::Dispatch);
                    let met = core.comm.barrier(tag).map_err(|e| core.as_peer_error("dispatch", e));
                    assert!(matches!(met, Err(Error::Peer { call: "dispatch", peer: 0, .. })), "{met:?}");
                }
                (_, other) => panic!("{other:?}"),
            }
            let handle = by_loads(&mut core, Ok(())).expect("a handle");
            assert_eq!(handle.sequence, 3);
            core.comm.barrier(DispatcherState::tag(&handle, Op::Dispatch)).expect("both are there");
            by_records(&mut core, 4);
        });
    }

    #[test]
    fn specs_that_differ_are_not_compared_on_any_rank() {
        on_both(|mut core| {
            let ids = Tensor::from_vec(IDS.to_vec(), &[2, 2]).expect("ids");
            let spec = DispatchSpec { alignment: 1 << core.rank(), ..DispatchSpec::new(0, 2) };
            let differs =
                core.prepare(TransportRules { row_order: RowOrder::Slots, accepted: Ok(()) }, ids.view(), None, &spec);
            assert!(matches!(differs, Err(Error::ConfigMismatch { .. })), "{differs:?}");
            assert!(!core.has_compared(1));
            by_records(&mut core, 2);
        });
    }

    #[test]
    fn what_keeps_a_prepare_out_of_a_graph_is_named() {
        let plain = DispatchSpec::new(0, 2);
        let by = |order| {
            let limit = ExpertCapacity { factor: 1.0, order, renormalize: false };
            DispatchSpec { expert_capacity: Some(limit), ..plain }
        };
        for row_order in [RowOrder::Local, RowOrder::AllRows, RowOrder::UniqueRows, RowOrder::Slots, RowOrder::Zones] {
            assert!(uncapturable_part(row_order, &by(CapacityOrder::Probability)).contains("by probability"));
            let advised = uncapturable_part(row_order, &by(CapacityOrder::Position)).contains("static capacity");
            // No others have a prepare that a static capacity keeps from waiting.
            assert_eq!(advised, matches!(row_order, RowOrder::AllRows | RowOrder::Zones), "{row_order:?}");
        }
    }
}
