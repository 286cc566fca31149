//! Routing: whose plan it is, and the library's groups and handles for it.

use std::sync::Arc;

use crate::comm::{Op, ReduceOp, Tag};
use crate::cuda::Cuda;
use crate::cuda::plan::{self, Foreign};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::core::Core;
use crate::ep::{Capacity, DispatchSpec, Handle, Overflow, Plan, Reporting, Stats};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::lazy::Lazy;
use crate::tensor::{Tensor, TensorRef};

use super::dispatcher::{Kept, Mode, NcclEp, Routed, around, told};
use super::handle::{Counters, HandleOptions};
use super::low::Low;
use super::{EpError, Group, GroupOptions};

/// What a rank tells of itself that fails begins so.
const FAILED: char = '!';

impl NcclEp {
    /// What the library would not do.
    pub(super) fn rules(&self, spec: &DispatchSpec) -> Result<()> {
        if self.mode == Mode::LowLatency {
            return self.low_rules(spec);
        }
        match spec.capacity {
            Capacity::Static(found) if !found.is_multiple_of(spec.alignment.max(1)) => {
                let expected = format!("a multiple of the alignment {}", spec.alignment);
                Err(EpError::Capacity { expected, found }.into())
            }
            _ => Ok(()),
        }
    }

    /// Most tokens of a rank, as the library takes them: by fours.
    pub(super) fn max_tokens(&self) -> usize {
        self.core.config.max_tokens_per_rank.next_multiple_of(4)
    }

    /// Bytes of the rows that were met last.
    pub(super) fn known_row(&self) -> Option<usize> {
        match self.mode {
            Mode::HighThroughput => self.groups.last().map(|g| g.options().max_row_bytes),
            Mode::LowLatency => self.low.last().map(Low::row_bytes),
        }
    }

    /// The capacity of the library's group. It has none below the tokens of a rank: what the host has planned to fit there
    /// goes through a group that is open.
    pub(super) fn fixed(&self, spec: &DispatchSpec) -> Option<usize> {
        match spec.capacity {
            Capacity::Static(rows) => Some(rows).filter(|rows| *rows >= self.max_tokens()),
            Capacity::Eager => None,
        }
    }

    /// Routing that the GPUs make among themselves: nothing waits for them, but for the number of rows where the capacity
    /// is open. For specs that all ranks have met with before, where what only the device sees is reported later; `None`
    /// where the host has to plan.
    pub(super) fn prepare_behind(
        &mut self,
        ids: TensorRef<'_, Cuda>,
        spec: &DispatchSpec,
    ) -> Result<Option<Handle<Cuda>>> {
        const CALL: &str = "prepare";
        let open = spec.capacity == Capacity::Eager;
        let small = self.mode == Mode::HighThroughput && !open && self.fixed(spec).is_none();
        let Some(bytes) = self.known_row() else { return Ok(None) };
        if !planned_behind(spec) || small {
            return Ok(None);
        }
        let (device, experts) = (self.core.device.clone(), self.core.config.num_experts);
        let tag = Tag { layer: spec.layer, op: Op::Prepare, sequence: self.core.next() };
        let checked = self.core.check_call(ids, spec);
        let examined = checked.and_then(|()| plan::examined(&device, ids, (spec, experts)));
        let (kept_ids, mut loads) = match examined {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.core.agree(tag, Err(error))?;
                return Ok(None);
            }
        };
        self.core.comm.all_reduce(tag, ReduceOp::Sum, loads.view_mut()).map_err(|e| self.core.explain(CALL, e))?;
        let behind = match self.mode {
            Mode::HighThroughput => self.high_behind(spec, (tag, bytes), &kept_ids)?,
            Mode::LowLatency => self.low_behind(spec, (tag, bytes), (&kept_ids, &loads))?,
        };
        let Behind { routed, padded, starts, total, rows } = behind;
        let from = Foreign { loads: &loads, starts: &starts, total: &total, rank: self.core.rank(), rows };
        let (zones, row_map) = plan::received(&device, &from)?;
        let tokens = kept_ids.view().rows();
        let local = starts.view().count();
        let counts = Counted { first: self.core.rank() * local, local, alignment: spec.alignment, rows };
        let stats = stats_later(&device, [loads, total], (padded, counts));
        let plan = Plan {
            tokens,
            total_tokens: tokens,
            first_token: 0,
            zones: Arc::new(zones),
            stats,
            kept_ids,
            weight_map: of_slots(&device, &row_map)?,
            row_map,
            return_map: Tensor::empty(&device, DType::I32, &[0, spec.top_k])?,
            messages: None,
        };
        let mut handle = self.core.accept(spec, plan);
        handle.carried.0 = Some(Box::new(Kept::new(routed)));
        Ok(Some(handle))
    }

    /// The library's routing for high throughput, which is the plan.
    fn high_behind(
        &mut self,
        spec: &DispatchSpec,
        (tag, bytes): (Tag, usize),
        kept_ids: &Tensor<Cuda>,
    ) -> Result<Behind> {
        let device = self.core.device.clone();
        let group = self.group(spec, bytes)?;
        let options = HandleOptions { top_k: spec.top_k, alignment: spec.alignment };
        let local = group.local_experts();
        let of = |size| Tensor::empty(&device, DType::I64, &[size]);
        let (mut padded, mut starts, mut total) = (of(local)?, of(local)?, of(1)?);
        let routed = around(&mut self.core, ("nccl_ep_update", DType::U8, bytes), tag, || {
            let mut routed = super::Handle::new(&group, options)?;
            let counters = Counters { counts: padded.view_mut(), offsets: starts.view_mut(), total: total.view_mut() };
            routed.update(kept_ids.view(), counters)?;
            Ok(routed)
        })
        .map_err(|e| self.core.explain("prepare", e))?;
        let rows = match spec.capacity {
            Capacity::Static(rows) => rows,
            Capacity::Eager => usize::try_from(plan::number(&device, &total)?).unwrap_or(0),
        };
        Ok(Behind { routed: Routed::High(routed), padded: Some(padded), starts, total, rows })
    }

    /// The group for rows of so many bytes; a new one is compared over the ranks first.
    fn group(&mut self, spec: &DispatchSpec, row_bytes: usize) -> Result<Group> {
        let capacity = self.fixed(spec);
        // What the host has planned fits, so the library need not look for rows to drop, nor clear room for them.
        let trap = !planned_behind(spec);
        let windows = capacity.is_some() && self.core.config.windows > 0;
        let fits = |o: &GroupOptions| {
            let policy = capacity.is_none() || o.trap == trap;
            o.capacity == capacity && policy && o.max_row_bytes >= row_bytes && o.max_top_k >= spec.top_k
        };
        let same = |g: &&Group| g.places().is_some() == windows && fits(g.options());
        if let Some(group) = self.groups.iter().rev().find(same) {
            return Ok(group.clone());
        }
        self.core.device.not_captured("prepare", "create an EP group")?;
        let known = |of: fn(&GroupOptions) -> usize| self.groups.iter().map(|g| of(g.options())).max().unwrap_or(0);
        let options = GroupOptions {
            num_experts: self.core.config.num_experts,
            max_tokens: self.max_tokens(),
            capacity,
            max_row_bytes: row_bytes.max(known(|o| o.max_row_bytes)),
            max_top_k: spec.top_k.max(known(|o| o.max_top_k)),
            trap,
        };
        self.compare(spec, (options.max_row_bytes, options.max_top_k), options.check(self.core.ranks()))?;
        let (library, on) = (self.library.clone(), (self.core.device.clone(), self.shared.clone()));
        let options = (options, windows.then(|| self.places.clone()));
        let tag = Tag { layer: spec.layer, op: Op::Init, sequence: self.groups.len() as u64 };
        let group =
            around(&mut self.core, ("nccl_ep_group", DType::U8, row_bytes), tag, || Group::on(&library, on, options))?;
        self.groups.push(group.clone());
        Ok(group)
    }

    /// Refuses options in which the ranks differ: the library does not look.
    pub(super) fn compare(
        &mut self,
        spec: &DispatchSpec,
        (bytes, top_k): (usize, usize),
        checked: std::result::Result<(), EpError>,
    ) -> Result<()> {
        let own = format!("{bytes:?} bytes, top_k {top_k}");
        // What a rank cannot do is told behind a mark.
        let failed = checked.as_ref().err().map(|error| format!("{FAILED}{error}"));
        let all = told(&mut self.core, failed.as_ref().unwrap_or(&own))?;
        checked?;
        let failure = |(peer, text): (usize, &String)| Some((peer, text.strip_prefix(FAILED)?.to_string()));
        if let Some((peer, reason)) = all.iter().enumerate().find_map(failure) {
            return Err(Error::Peer { call: "prepare", rank: self.core.rank(), peer, reason });
        }
        match all.iter().position(|theirs| *theirs != own) {
            None => Ok(()),
            Some(peer) => Err(Error::ConfigMismatch {
                field: format!("rows of layer {}", spec.layer),
                rank: self.core.rank(),
                value: own,
                peer,
                peer_value: all[peer].clone(),
            }),
        }
    }

    /// The library's handle of a planned routing, for rows of so many bytes.
    pub(super) fn route(&mut self, handle: &Handle<Cuda>, row_bytes: usize) -> Result<Routed> {
        let spec = handle.spec();
        if self.mode == Mode::LowLatency {
            return self.route_low(spec, (Core::tag(handle, Op::Prepare), row_bytes), handle.kept_ids());
        }
        let group = self.group(spec, row_bytes)?;
        let options = HandleOptions { top_k: spec.top_k, alignment: spec.alignment };
        let (device, ids) = (self.core.device.clone(), handle.kept_ids());
        let tag = Core::tag(handle, Op::Prepare);
        around(&mut self.core, ("nccl_ep_update", DType::U8, row_bytes), tag, || {
            let mut routed = super::Handle::new(&group, options)?;
            let of = |size| Tensor::empty(&device, DType::I64, &[size]);
            let local = group.local_experts();
            // The plan has these already.
            let (mut counts, mut offsets, mut total) = (of(local)?, of(local)?, of(1)?);
            let counters = Counters { counts: counts.view_mut(), offsets: offsets.view_mut(), total: total.view_mut() };
            routed.update(ids, counters)?;
            Ok(Routed::High(routed))
        })
    }
}

/// What a prepare without the host has.
pub(super) struct Behind {
    pub(super) routed: Routed,
    /// Padded rows of each local expert, where the library says; else from the loads.
    pub(super) padded: Option<Tensor<Cuda>>,
    pub(super) starts: Tensor<Cuda>,
    pub(super) total: Tensor<Cuda>,
    /// Rows N of the layout.
    pub(super) rows: usize,
}

/// Whether the host leaves the plan to the library, once all ranks have met with the spec.
fn planned_behind(spec: &DispatchSpec) -> bool {
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
struct Counted {
    /// The first local expert, and how many.
    first: usize,
    local: usize,
    alignment: usize,
    /// Rows N of the layout.
    rows: usize,
}

/// Counts as the GPU left them: choices of all experts, this rank's padded rows with nothing dropped, and those of each
/// expert.
fn stats_later(
    device: &Cuda,
    [loads, total]: [Tensor<Cuda>; 2],
    (padded, of): (Option<Tensor<Cuda>>, Counted),
) -> Lazy<Stats> {
    let device = device.clone();
    Lazy::later(move || {
        let whole = |t: &Tensor<Cuda>| -> Result<Vec<usize>> {
            Ok(device.read(&device.stream(), t.view())?.iter().map(|n| *n as usize).collect())
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
