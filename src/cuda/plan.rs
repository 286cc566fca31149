//! Layouts: the plan of a step.
//!
//! A group of one rank plans on the GPU ([`plan_on_device`], `kernels/plan.cu`): an eager layout gets as many rows
//! as it may need, since its size would be the GPU's to know. Several ranks plan there from records (`routing_records`).
//! Everything else is planned on the host, which has all ranks' ids then, by the CPU's code, and the maps are copied
//! over.

use std::sync::{Arc, OnceLock};

use crate::config::CapacityOrder;
use crate::cpu::Cpu;
#[cfg(feature = "nccl-ep")]
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Kernels, Origin, Segments};
use crate::lazy::Lazy;
use crate::plan::{Capacity, DispatchSpec, HostPlanRequest, MessageMaps, Overflow, Plan, PlanRequest, Stats, ZoneMaps};
use crate::tensor::Tensor;
#[cfg(feature = "nccl-ep")]
use crate::tensor::TensorRef;

use super::device::Cuda;
use super::heuristics::{LOOP_BLOCKS, PLAN_CHUNKS, PLAN_CLEARED, PLAN_SMALL};
use super::launch::Grid;
use super::layout::{PlannedTiles, TileOrder, at, check_number};
use super::params::{self, PLAN_THREADS, WARP_THREADS};
use super::tile_config::{DEFAULT_SMEM, PLAN_SMALL_WARPS, plan_small_shared};

const CALL: &str = "prepare";

/// Counts that fit a block's shared memory without asking for more.
pub(super) const COUNTS: usize = DEFAULT_SMEM as usize / 4;

/// Rows of a layout and whether slots past them are dropped.
fn rows(spec: &DispatchSpec, choices: usize, experts: usize) -> Result<(usize, bool)> {
    check_number("prepare", "choices", Some(choices))?;
    let (rows, may_drop) = match spec.capacity {
        Capacity::Static(rows) => (Some(rows), spec.overflow == Overflow::Drop),
        // Every expert that is chosen may have `alignment - 1` rows of padding.
        Capacity::Eager => {
            let padding = choices.min(experts).checked_mul(spec.alignment - 1);
            (padding.and_then(|p| p.checked_add(choices)), false)
        }
    };
    Ok((check_number("prepare", "rows", rows)?, may_drop))
}

pub(super) fn plan_on_device(device: &Cuda, call: PlanRequest<'_, Cuda>) -> Result<Option<Plan<Cuda>>> {
    let experts = call.num_experts;
    earlier_faults(device)?;
    let planned = plan_on_gpu(device, call)?;
    Ok(planned.map(|planned| with_stats(device, planned, experts)))
}

/// Reports faults that kernels of an earlier step have raised and nobody has asked for.
pub(super) fn earlier_faults(device: &Cuda) -> Result<()> {
    match device.inner.report.raised() && !device.inner.capture_state.is_under_way() {
        true => device.faults("prepare"),
        false => Ok(()),
    }
}

/// Ids that a rank may send elsewhere: `[T, K]`, bad ones masked, and how many chose each expert, `I64 [E]`. `None`:
/// the GPU cannot plan so many experts. Errors name `rank`.
#[cfg(feature = "nccl-ep")]
pub(crate) fn examined(
    device: &Cuda,
    ids: TensorRef<'_, Cuda>,
    spec: &DispatchSpec,
    experts: usize,
    rank: usize,
) -> Result<Option<(Tensor<Cuda>, Tensor<Cuda>)>> {
    earlier_faults(device)?;
    let spec = DispatchSpec { alignment: 1, capacity: Capacity::Eager, expert_capacity: None, ..*spec };
    let Some((plan, stats)) = plan_alone(device, ids, &spec, experts, rank)? else { return Ok(None) };
    let mut loads = Tensor::empty(device, DType::I64, &[experts])?;
    let bytes = experts * DType::I64.size();
    device.copy(Cuda::slice(stats.view().data(), 0..bytes), loads.view_mut().into_data())?;
    Ok(Some((plan.kept_ids, loads)))
}

/// Description by another library of all ranks' choices.
#[cfg(feature = "nccl-ep")]
pub(crate) struct ExternalPlan<'a> {
    /// Choices of each expert over all ranks, `I64 [E]`.
    pub(crate) loads: &'a Tensor<Cuda>,
    /// First slot of each local expert, `I64 [L]`.
    pub(crate) starts: &'a Tensor<Cuda>,
    /// Padded rows with nothing dropped, `I64 [1]`.
    pub(crate) total: &'a Tensor<Cuda>,
    /// The rank and layer that it is made for.
    pub(crate) origin: Origin,
    /// Rows N of the layout.
    pub(crate) rows: usize,
}

/// A number that the host cannot go on without; what kernels have found meanwhile stays for who asks for it.
#[cfg(feature = "nccl-ep")]
pub(crate) fn number(device: &Cuda, from: &Tensor<Cuda>) -> Result<i64> {
    let mut word = [0; 8];
    Error::check_shape("prepare", "number", &[1], from.dims())?;
    Error::check_dtype("prepare", "number", DType::I64, from.dtype())?;
    device.read_bytes("prepare", from.view().data().ptr, &mut word)?;
    Ok(i64::from_ne_bytes(word))
}

/// The layout of another library's plan: segments, and the map of filled slots to themselves.
#[cfg(feature = "nccl-ep")]
pub(crate) fn external_layout(device: &Cuda, from: &ExternalPlan<'_>) -> Result<(Segments<Cuda>, Tensor<Cuda>)> {
    let groups = from.starts.view().count();
    let mut offsets = Tensor::empty(device, DType::I64, &[groups])?;
    let mut counts = Tensor::empty(device, DType::I64, &[groups])?;
    let mut row_map = Tensor::empty(device, DType::I32, &[from.rows])?;
    let p = params::ExternalLayoutParams {
        loads: from.loads.view().data().ptr,
        starts: from.starts.view().data().ptr,
        total: from.total.view().data().ptr,
        first: (from.origin.rank * groups) as i64,
        groups: groups as i64,
        rows: from.rows as i64,
        offsets: at(&mut offsets),
        counts: at(&mut counts),
        row_map: at(&mut row_map),
        fault: device.inner.status,
        origin: device.origin(CALL, from.origin)?,
    };
    let grid = Grid::threads_of(from.rows.max(groups).max(1), PLAN_THREADS);
    // SAFETY: every tensor has the size that `params.h` states for it.
    unsafe { device.launch(CALL, &device.kernels().plan.plan_external_layout, grid, &p) }?;
    device.report(CALL)?;
    Ok((Segments::new(offsets, counts, from.rows).with_origin(from.origin), row_map))
}

/// A plan, but for its statistics, and these as kernels leave them.
type PlanAndStats = (Plan<Cuda>, Tensor<Cuda>);

/// The plan of these ids as those of a rank without others; errors name `rank`.
#[cfg(feature = "nccl-ep")]
pub(super) fn plan_alone(
    device: &Cuda,
    ids: TensorRef<'_, Cuda>,
    spec: &DispatchSpec,
    num_experts: usize,
    rank: usize,
) -> Result<Option<PlanAndStats>> {
    let (tokens, row_order) = ([ids.rows()], crate::plan::RowOrder::Local);
    let (ranks, weights, ids) = (1, None, ids.borrow());
    plan_on_gpu(device, PlanRequest { rank, ranks, num_experts, ids, weights, tokens: &tokens, spec, row_order })
}

pub(super) fn plan_on_gpu(device: &Cuda, call: PlanRequest<'_, Cuda>) -> Result<Option<PlanAndStats>> {
    let Some(layout) = LocalLayout::new(device, &call)? else { return Ok(None) };
    layout.enqueue(device)?;
    Ok(Some(layout.into_plan()))
}

/// The plan of one rank's choices before a kernel has made it: its tensors, and what the kernel takes.
pub(super) struct LocalLayout {
    pub(super) params: params::LocalPlanParams,
    /// Tokens T.
    tokens: usize,
    origin: Origin,
    offsets: Tensor<Cuda>,
    counts: Tensor<Cuda>,
    stats: Tensor<Cuda>,
    kept_ids: Tensor<Cuda>,
    row_map: Tensor<Cuda>,
    weight_map: Tensor<Cuda>,
    return_map: Tensor<Cuda>,
    tiles: Option<Tensor<Cuda>>,
    _before: Tensor<Cuda>,
}

impl LocalLayout {
    /// `None`: the GPU cannot plan for such a request.
    pub(super) fn new(device: &Cuda, call: &PlanRequest<'_, Cuda>) -> Result<Option<Self>> {
        let (spec, experts, k) = (call.spec, call.num_experts, call.spec.top_k);
        let by_weight = spec.expert_capacity.is_some_and(|c| c.order == CapacityOrder::Probability);
        if by_weight || experts > COUNTS {
            return Ok(None);
        }
        let (tokens, choices) = (call.ids.rows(), call.ids.count());
        let wide = match call.ids.dtype() {
            DType::I64 => 1,
            DType::I32 => 0,
            other => return Err(Error::invalid(CALL, "tensor topk_ids", "i32 or i64", other)),
        };
        let (rows, may_drop) = rows(spec, choices, experts)?;
        let limit = spec.expert_capacity.map_or(i64::MAX, |c| c.limit(choices, experts) as i64);
        let (chunk, chunks) = chunks(choices, rows, experts);
        let of = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
        let mut before = of(DType::I32, &[experts, chunks])?;
        let (mut offsets, mut counts) = (of(DType::I64, &[experts])?, of(DType::I64, &[experts])?);
        let mut stats = of(DType::I64, &[2 * experts + 2])?;
        let (mut kept_ids, mut return_map) = (of(DType::I32, &[tokens, k])?, of(DType::I32, &[tokens, k])?);
        let (mut row_map, mut weight_map) = (of(DType::I32, &[rows])?, of(DType::I32, &[rows])?);
        let list = PlannedTiles::new(rows, experts);
        let mut tiles = list.empty(device)?;
        let origin = Origin { rank: call.rank, layer: spec.layer };
        let params = params::LocalPlanParams {
            ids: call.ids.data().ptr,
            wide,
            choices: choices as i64,
            top_k: k as i64,
            experts: experts as i64,
            alignment: spec.alignment as i64,
            expert_limit: limit,
            rows: rows as i64,
            may_drop: i64::from(may_drop),
            chunk: chunk as i64,
            chunks: chunks as i64,
            before: at(&mut before),
            offsets: at(&mut offsets),
            counts: at(&mut counts),
            stats: at(&mut stats),
            kept: at(&mut kept_ids),
            row_map: at(&mut row_map),
            weight_map: at(&mut weight_map),
            return_map: at(&mut return_map),
            slot_weights: 0,
            tile_rows: list.tile as i64,
            max_tiles: list.most as i64,
            tiles: tiles.as_mut().map_or(0, at),
            paired: i64::from(list.order == TileOrder::Pairs),
            fault: device.inner.status,
            report: device.inner.report.address(),
            origin: device.origin(CALL, origin)?,
        };
        Ok(Some(Self {
            params,
            tokens,
            origin,
            offsets,
            counts,
            stats,
            kept_ids,
            row_map,
            weight_map,
            return_map,
            tiles,
            _before: before,
        }))
    }

    /// Has the kernels of `plan.cu` make it.
    fn enqueue(&self, device: &Cuda) -> Result<()> {
        let p = &self.params;
        let (choices, rows, experts) = (p.choices as usize, p.rows as usize, p.experts as usize);
        let chunks = p.chunks as usize;
        let shared = (experts * 4) as u32;
        let walk = Grid { shared, ..Grid::new(chunks, WARP_THREADS) };
        // A warp scans an expert's chunks; all clear maps.
        let scanning = Grid::warps_of(experts, PLAN_THREADS).blocks.0;
        let blocks = scanning.max(rows.div_ceil(PLAN_CLEARED).min(LOOP_BLOCKS));
        let kernels = &device.kernels().plan;
        let small = is_small(choices, rows, experts);
        let warps = if small { chunks } else { PLAN_SMALL_WARPS };
        let one = Grid::new(1, warps as u32 * WARP_THREADS);
        // SAFETY: every tensor has the size that `params.h` states for it; the kernels check the ids.
        unsafe {
            if small {
                let grid = Grid { shared: plan_small_shared(experts, warps), ..one };
                return device.launch(CALL, &kernels.plan_small, grid, p);
            }
            device.launch(CALL, &kernels.plan_count, walk, p)?;
            device.launch(CALL, &kernels.plan_scan, Grid::new(blocks, PLAN_THREADS), p)?;
            device.launch(CALL, &kernels.plan_segments, one, p)?;
            device.launch(CALL, &kernels.plan_slots, walk, p)
        }
    }

    pub(super) fn into_plan(self) -> PlanAndStats {
        let (rows, tokens) = (self.params.rows as usize, self.tokens);
        let unread = Lazy::from_fn(|| Err(Error::invalid(CALL, "stats", "a plan's", "none yet")));
        let Self { offsets, counts, origin, .. } = self;
        let tiles = self.tiles.map_or_else(OnceLock::new, OnceLock::from);
        let plan = Plan {
            tokens,
            total_tokens: tokens,
            first_token: 0,
            segments: Arc::new(Segments { offsets, counts, rows, origin, tiles }),
            stats: unread,
            kept_ids: self.kept_ids,
            row_map: self.row_map,
            weight_map: self.weight_map,
            return_map: self.return_map,
            messages: None,
            zones: None,
        };
        (plan, self.stats)
    }
}

/// Whether one block plans alone.
fn is_small(choices: usize, rows: usize, experts: usize) -> bool {
    choices <= PLAN_SMALL && rows <= 2 * PLAN_SMALL && experts * PLAN_SMALL_WARPS <= COUNTS
}

/// Choices that a warp walks, and the number of such chunks: of one block no more warps than have choices, or experts, to
/// work on, as every step waits for all of them.
fn chunks(choices: usize, rows: usize, experts: usize) -> (usize, usize) {
    let small = is_small(choices, rows, experts);
    let warps = if small { choices.max(experts).div_ceil(32).clamp(1, PLAN_SMALL_WARPS) } else { PLAN_CHUNKS };
    let chunk = choices.div_ceil(warps).next_multiple_of(32).max(32);
    (chunk, if small { warps } else { choices.div_ceil(chunk) })
}

/// The plan with its statistics, which are read as the kernels leave them when somebody asks.
pub(super) fn with_stats(device: &Cuda, (plan, stats): PlanAndStats, experts: usize) -> Plan<Cuda> {
    let device = device.clone();
    let stats = Lazy::from_fn(move || {
        let values: Vec<usize> =
            device.to_host(stats.view())?.as_slice::<i64>()?.iter().map(|n| usize::try_from(*n).unwrap_or(0)).collect();
        Ok(Stats {
            expert_load: values[..experts].to_vec(),
            padded_counts: values[experts..2 * experts].to_vec(),
            needed_rows: values[2 * experts],
            dropped: values[2 * experts + 1],
        })
    });
    Plan { stats, ..plan }
}

pub(super) fn plan(device: &Cuda, call: HostPlanRequest<'_>) -> Result<Plan<Cuda>> {
    let plan = Cpu::new().plan(call)?;
    let messages = |m: MessageMaps<Cpu>| -> Result<MessageMaps<Cuda>> {
        Ok(MessageMaps {
            send_tokens: m.send_tokens.to(device)?,
            send_choices: m.send_choices.to(device)?,
            return_slots: m.return_slots.to(device)?,
            send_rows: m.send_rows,
            recv_rows: m.recv_rows,
            slots_from: m.slots_from,
            slots_at: m.slots_at,
        })
    };
    let zones = |z: ZoneMaps<Cpu>| -> Result<ZoneMaps<Cuda>> {
        Ok(ZoneMaps {
            token_rows: z.token_rows.to(device)?,
            row_slots: z.row_slots.to(device)?,
            row_tokens: z.row_tokens.to(device)?,
            arrived: z.arrived.to(device)?,
            zone_rows: z.zone_rows,
        })
    };
    Ok(Plan {
        tokens: plan.tokens,
        total_tokens: plan.total_tokens,
        first_token: plan.first_token,
        segments: Arc::new(
            Segments::new(plan.segments.offsets.to(device)?, plan.segments.counts.to(device)?, plan.segments.rows)
                .with_origin(plan.segments.origin),
        ),
        stats: plan.stats,
        kept_ids: plan.kept_ids.to(device)?,
        row_map: plan.row_map.to(device)?,
        weight_map: plan.weight_map.to(device)?,
        return_map: plan.return_map.to(device)?,
        messages: plan.messages.map(messages).transpose()?,
        zones: plan.zones.map(zones).transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_maps_cannot_number_is_refused() {
        let eager = DispatchSpec { capacity: Capacity::Eager, alignment: 128, ..DispatchSpec::new(0, 8) };
        let fixed = |rows| DispatchSpec { capacity: Capacity::Static(rows), ..eager };
        let most = i32::MAX as usize;
        assert_eq!(rows(&eager, 1000, 4).ok(), Some((1000 + 4 * 127, false)));
        assert_eq!(rows(&fixed(most), most, 4).ok(), Some((most, fixed(0).overflow == Overflow::Drop)));
        for (spec, choices) in [(fixed(most + 1), 8), (fixed(8), most + 1), (eager, most - 4 * 127 + 1)] {
            let error = rows(&spec, choices, 4).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains("at most 2147483647"), "{spec:?}, {choices}: {error}");
        }
    }
}
