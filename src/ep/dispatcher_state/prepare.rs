//! Prepare: this rank's checks, the exchange of records where there is one, and the plan by whoever makes it.

use crate::comm::{Op, Tag};
use crate::error::{Error, Result};
use crate::kernels::{Kernels, RouteAndPlan, RoutedPlan};
use crate::plan::routing_record::{self, RoutingRecord};
use crate::tensor::{Tensor, TensorRef};

use super::{DispatcherState, PREPARE, TransportRules};
use crate::ep::handle::Handle;
use crate::ep::{DispatchSpec, HostPlanRequest, PlanRequest, Reporting, RowOrder};

impl<D: Kernels> DispatcherState<D> {
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
    pub(in crate::ep) fn route_and_plan(
        &mut self,
        call: RouteAndPlan<'_, D>,
    ) -> Result<Option<(Handle<D>, Tensor<D>)>> {
        let spec = *call.spec;
        // What a prepare refuses is left to it.
        let other_experts = call.config.num_experts != self.config.num_experts;
        if other_experts || self.check_sizes(&spec).is_err() || self.check_spec(&spec).is_err() {
            return Ok(None);
        }
        let routed = self.device.route_and_plan(call)?;
        Ok(routed.map(|RoutedPlan { plan, slot_weights }| (self.alone(&spec, plan), slot_weights)))
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
    use super::*;
    use crate::config::{CapacityOrder, ExpertCapacity};

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
