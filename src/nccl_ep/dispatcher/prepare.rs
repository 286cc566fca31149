//! Prepare that the GPUs do among themselves.

use std::sync::Arc;

use crate::comm::{Op, ReduceOp, Tag};
use crate::cuda::Cuda;
use crate::cuda::plan::{self, ExternalPlan};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::{Capacity, DispatchSpec, Handle, Overflow, Plan, Reporting, Stats};
use crate::error::Result;
use crate::kernels::{Kernels, Origin};
use crate::lazy::Lazy;
use crate::tensor::{Tensor, TensorRef};

use super::library_handle::LibraryHandle;
use super::state::{Algorithm, NcclEp};

impl NcclEp {
    /// Routing that the GPUs make among themselves: nothing waits for them, but for the number of rows where the
    /// capacity is open. For specs that all ranks have met with before, where what only the device sees is reported
    /// later; `None` where the host has to plan.
    pub(super) fn prepare_on_device(
        &mut self,
        ids: TensorRef<'_, Cuda>,
        weights: Option<TensorRef<'_, Cuda>>,
        spec: &DispatchSpec,
    ) -> Result<Option<Handle<Cuda>>> {
        const CALL: &str = "prepare";
        let open = spec.capacity == Capacity::Eager;
        let small = self.mode == Algorithm::HighThroughput && !open && self.fixed(spec).is_none();
        let Some(bytes) = self.known_row() else { return Ok(None) };
        if !plans_on_device(spec) || small {
            return Ok(None);
        }
        let (device, experts) = (self.core.device.clone(), self.core.config.num_experts);
        let tag = Tag { layer: spec.layer, op: Op::Prepare, sequence: self.core.next() };
        // All ranks were told of a rank masked in a prepare by records, but one that has asked knows it no more: so it
        // is told again, and they take the same way.
        let masked = self.core.take_masked();
        let checked = masked.and_then(|()| self.late()).and_then(|()| self.core.check_call(ids, weights, spec));
        let examined = checked.and_then(|()| plan::examined(&device, ids, spec, experts, self.core.rank()));
        let (kept_ids, mut loads) = match examined {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.core.check_or_refuse(tag, Err(error))?;
                return Ok(None);
            }
        };
        self.core
            .comm
            .all_reduce(tag, ReduceOp::Sum, loads.view_mut())
            .map_err(|e| self.core.as_peer_error(CALL, e))?;
        self.core.count();
        let routing = match self.mode {
            Algorithm::HighThroughput => self.plan_high_throughput(spec, tag, bytes, &kept_ids)?,
            Algorithm::LowLatency => self.plan_low_latency(spec, (tag, bytes), &kept_ids, &loads)?,
        };
        let planned = self.planned(spec, routing, kept_ids, loads);
        self.core.check_or_refuse(tag, planned).map(Some)
    }

    /// The handle of a routing that the GPUs have made: this rank's own affair.
    fn planned(
        &mut self,
        spec: &DispatchSpec,
        routing: DeviceRouting,
        kept_ids: Tensor<Cuda>,
        loads: Tensor<Cuda>,
    ) -> Result<Handle<Cuda>> {
        let device = &self.core.device.clone();
        let DeviceRouting { routed, padded, starts, total, rows } = routing;
        let origin = Origin { rank: self.core.rank(), layer: spec.layer };
        let from = ExternalPlan { loads: &loads, starts: &starts, total: &total, origin, rows };
        let (segments, row_map) = plan::external_layout(device, &from)?;
        let tokens = kept_ids.view().rows();
        let local = starts.view().count();
        let counts = CountLayout { first: self.core.rank() * local, local, alignment: spec.alignment, rows };
        let stats = lazy_stats(device, [loads, total], padded, counts);
        let plan = Plan {
            tokens,
            total_tokens: tokens,
            first_token: 0,
            segments: Arc::new(segments),
            stats,
            kept_ids,
            weight_map: of_slots(device, &row_map)?,
            row_map,
            return_map: Tensor::empty(device, DType::I32, &[0, spec.top_k])?,
            messages: None,
            zones: None,
        };
        let mut handle = self.core.accept(spec, plan);
        self.attach_routing(&mut handle, routed);
        Ok(handle)
    }

    /// The library's routing for high throughput, which is the plan.
    fn plan_high_throughput(
        &mut self,
        spec: &DispatchSpec,
        tag: Tag,
        bytes: usize,
        kept_ids: &Tensor<Cuda>,
    ) -> Result<DeviceRouting> {
        let routed = self.route_high(spec, (tag, bytes), kept_ids.view());
        let (routed, [padded, starts, total]) = routed.map_err(|e| self.core.as_peer_error("prepare", e))?;
        let rows = match spec.capacity {
            Capacity::Static(rows) => Ok(rows),
            Capacity::Eager => plan::number(&self.core.device, &total).map(|rows| usize::try_from(rows).unwrap_or(0)),
        };
        let rows = self.core.check_or_refuse(tag, rows)?;
        Ok(DeviceRouting { routed: LibraryHandle::HighThroughput(routed), padded: Some(padded), starts, total, rows })
    }
}

/// Routing of a prepare without the host.
pub(super) struct DeviceRouting {
    pub(super) routed: LibraryHandle,
    /// Padded rows of each local expert, where the library says; else from the loads.
    pub(super) padded: Option<Tensor<Cuda>>,
    pub(super) starts: Tensor<Cuda>,
    pub(super) total: Tensor<Cuda>,
    /// Rows N of the layout.
    pub(super) rows: usize,
}

/// Whether the host leaves the plan to the library, once all ranks have met with the spec.
pub(super) fn plans_on_device(spec: &DispatchSpec) -> bool {
    let drops = spec.capacity != Capacity::Eager && spec.overflow == Overflow::Drop;
    spec.reporting == Reporting::Deferred && spec.expert_capacity.is_none() && !drops
}

/// A map of slots to themselves, for weights as for rows.
fn of_slots(device: &Cuda, row_map: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    let mut map = Tensor::empty(device, row_map.dtype(), row_map.dims())?;
    device.copy(row_map.view().data(), map.view_mut().into_data())?;
    Ok(map)
}

/// Whose counts are read later.
struct CountLayout {
    /// The first local expert, and how many.
    first: usize,
    local: usize,
    alignment: usize,
    /// Rows N of the layout.
    rows: usize,
}

/// Counts as the GPU left them: choices of all experts, this rank's padded rows with nothing dropped, and those of each
/// expert.
fn lazy_stats(
    device: &Cuda,
    [loads, total]: [Tensor<Cuda>; 2],
    padded: Option<Tensor<Cuda>>,
    of: CountLayout,
) -> Lazy<Stats> {
    let device = device.clone();
    Lazy::from_fn(move || {
        let whole = |t: &Tensor<Cuda>| -> Result<Vec<usize>> {
            Ok(device.read(t.view())?.iter().map(|n| *n as usize).collect())
        };
        let needed_rows = whole(&total)?.first().copied().unwrap_or(0);
        let expert_load = whole(&loads)?;
        let padded = match &padded {
            Some(padded) => whole(padded)?,
            None => expert_load[of.first..of.first + of.local]
                .iter()
                .map(|n| n.next_multiple_of(of.alignment.max(1)))
                .collect(),
        };
        let mut end = 0;
        let inside = |n: &usize| {
            let start = end;
            end = of.rows.min(end + n);
            end - start
        };
        Ok(Stats { padded_counts: padded.iter().map(inside).collect(), needed_rows, expert_load, dropped: 0 })
    })
}
