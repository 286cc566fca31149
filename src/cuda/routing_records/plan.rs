//! The plan from all ranks' records.

use std::sync::Arc;

use crate::cuda::device::Cuda;
use crate::cuda::heuristics::PLAN_CHUNKS;
use crate::cuda::launch::Grid;
use crate::cuda::layout::{at, check_number};
use crate::cuda::params;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Origin, Segments};
use crate::plan::{Capacity, DevicePlan, HostCounts, MessageMaps, Overflow, Plan, PlanRecords, RowOrder, ZoneMaps};
use crate::tensor::Tensor;

use super::all_to_all::AllToAllCounts;
use super::stats_layout::{StatsLayout, lazy_stats};
use super::{CALL, check_errors, sizes};

pub(in crate::cuda) fn plan(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<DevicePlan<Cuda>> {
    let origin = Origin { rank: call.rank, layer: call.spec.layer };
    let of = PlanTarget { rank: call.rank, origin, tokens: call.tokens, row_order: call.row_order };
    let (waits, open, most) = (call.waits(), call.spec.capacity == Capacity::Eager, call.max_tokens);
    let mut counting = PlanInProgress::new(device, call)?;
    counting.segments(device)?;
    let all_to_all = if of.sends() { Some(counting.all_to_all(device)?) } else { None };
    let mut sizes = PlanSizes { rows: counting.p.rows as usize, padded_tokens: most, counts: None, values: Vec::new() };
    if waits {
        sizes.read(device, &counting, open)?;
    }
    let maps = counting.maps(device, &of, &sizes, all_to_all)?;
    device.report(CALL)?;
    Ok(counting.gathered(device, &of, sizes, maps))
}

/// Of which rank the plan is.
struct PlanTarget {
    rank: usize,
    /// The rank and layer, for errors.
    origin: Origin,
    tokens: usize,
    row_order: RowOrder,
}

impl PlanTarget {
    /// It sends rows to each rank apart, and so has messages.
    fn sends(&self) -> bool {
        matches!(self.row_order, RowOrder::UniqueRows | RowOrder::Zones)
    }
}

/// A plan in the making: what the kernels are told, and what they leave.
struct PlanInProgress {
    p: params::RecordsPlanParams,
    stats_layout: StatsLayout,
    /// Blocks that walk over all choices.
    walk: Grid,
    choices: usize,
    offsets: Tensor<Cuda>,
    counts: Tensor<Cuda>,
    stats: Tensor<Cuda>,
    kept_ids: Tensor<Cuda>,
    // Memory that the kernels pass on to each other, held until the last of them.
    _before: Tensor<Cuda>,
    _scratch: Tensor<Cuda>,
}

/// Sizes that the host may have waited for.
struct PlanSizes {
    rows: usize,
    padded_tokens: usize,
    counts: Option<HostCounts>,
    values: Vec<usize>,
}

/// Maps that the rows' movement follows.
struct RowMaps {
    row: Tensor<Cuda>,
    weight: Tensor<Cuda>,
    ret: Tensor<Cuda>,
    messages: Option<MessageMaps<Cuda>>,
    zones: Option<ZoneMaps<Cuda>>,
}

impl PlanInProgress {
    fn new(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<Self> {
        let host_waits = i64::from(call.waits());
        let PlanRecords { rank, ranks, num_experts: experts, max_tokens, tokens, spec, records, errors, .. } = call;
        let (sizes, k) = (sizes(max_tokens, spec), spec.top_k);
        Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
        check_errors(errors.as_ref().dims(), ranks)?;
        let stats_layout = StatsLayout { experts, locals: experts / ranks, ranks };
        let choices = max_tokens.checked_mul(k).and_then(|n| n.checked_mul(ranks));
        let choices = check_number(CALL, "choices of all ranks", choices)?;
        let chunk = choices.div_ceil(PLAN_CHUNKS).next_multiple_of(32).max(32);
        let chunks = choices.div_ceil(chunk);
        let of = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
        let (mut before, mut scratch) = (of(DType::I32, &[experts, chunks])?, of(DType::I64, &[3, experts])?);
        let (mut offsets, mut counts) =
            (of(DType::I64, &[stats_layout.locals])?, of(DType::I64, &[stats_layout.locals])?);
        let (mut stats, mut kept_ids) = (of(DType::I64, &[stats_layout.count()])?, of(DType::I32, &[tokens, k])?);
        let mut p = params::RecordsPlanParams {
            records: records.data().ptr,
            size: sizes.bytes() as i64,
            ranks: ranks as i64,
            rank: rank as i64,
            max_tokens: max_tokens as i64,
            tokens: tokens as i64,
            top_k: k as i64,
            experts: experts as i64,
            alignment: spec.alignment as i64,
            factor: spec.expert_capacity.map_or(-1.0, |c| c.factor),
            rows: i64::MAX,
            may_drop: 1,
            host_waits,
            padded_tokens: max_tokens as i64,
            chunk: chunk as i64,
            chunks: chunks as i64,
            before: at(&mut before),
            scratch: at(&mut scratch),
            offsets: at(&mut offsets),
            counts: at(&mut counts),
            stats: at(&mut stats),
            kept: at(&mut kept_ids),
            errors: errors.into_data().ptr,
            fault: device.inner.status,
            origin: device.origin(CALL, Origin { rank, layer: spec.layer })?,
            ..Default::default()
        };
        if let Capacity::Static(rows) = spec.capacity {
            (p.rows, p.may_drop) = (rows as i64, i64::from(spec.overflow == Overflow::Drop));
        }
        let walk = Grid { shared: (experts * 4) as u32, ..Grid::new(chunks, params::WARP_THREADS) };
        Ok(Self {
            p,
            stats_layout,
            walk,
            choices,
            offsets,
            counts,
            stats,
            kept_ids,
            _before: before,
            _scratch: scratch,
        })
    }

    /// Counts choices, and from them segments and statistics.
    fn segments(&self, device: &Cuda) -> Result<()> {
        let kernels = &device.kernels().routing_records;
        let scan = Grid::warps_of(self.stats_layout.experts, params::PLAN_THREADS);
        let one = Grid::new(1, params::PLAN_SEGMENTS_THREADS);
        // SAFETY: every tensor has the size that `params.h` states for it; the kernels check what the records hold.
        unsafe {
            device.launch(CALL, &kernels.count, self.walk, &self.p)?;
            device.launch(CALL, &kernels.scan, scan, &self.p)?;
            device.launch(CALL, &kernels.segments, one, &self.p)
        }
    }

    fn all_to_all(&mut self, device: &Cuda) -> Result<AllToAllCounts> {
        AllToAllCounts::new(device, &mut self.p, (self.choices, self.walk), &mut self.stats, self.stats_layout)
    }

    /// Writes the maps of a plan of these sizes.
    fn maps(
        &mut self,
        device: &Cuda,
        of: &PlanTarget,
        sizes: &PlanSizes,
        all_to_all: Option<AllToAllCounts>,
    ) -> Result<RowMaps> {
        let (k, p) = (self.p.top_k as usize, &mut self.p);
        let arriving = match of.row_order {
            RowOrder::UniqueRows => of.tokens,
            RowOrder::Zones => 0,
            _ => self.stats_layout.ranks * sizes.padded_tokens,
        };
        let map = |dims: &[usize]| Tensor::empty(device, DType::I32, dims);
        let (mut row, mut weight) = (map(&[sizes.rows])?, map(&[sizes.rows])?);
        let mut ret = map(&[arriving, k])?;
        for map in [&mut row, &mut weight] {
            device.fill_bytes(CALL, map.view_mut().into_data(), 0xff)?;
        }
        (p.rows, p.padded_tokens) = (sizes.rows as i64, sizes.padded_tokens as i64);
        (p.row_map, p.weight_map, p.return_map) = (at(&mut row), at(&mut weight), at(&mut ret));
        let (mut messages, mut zones) = (None, None);
        match all_to_all {
            Some(all_to_all) if of.row_order == RowOrder::Zones => {
                zones = Some(all_to_all.zones(device, p, of.tokens)?);
            }
            Some(all_to_all) => {
                messages = Some(all_to_all.number(device, p, self.stats_layout.messages(&sizes.values))?);
            }
            None => {
                // SAFETY: as for the segments, for this many rows.
                unsafe { device.launch(CALL, &device.kernels().routing_records.slots, self.walk, p) }?;
            }
        }
        Ok(RowMaps { row, weight, ret, messages, zones })
    }

    fn gathered(self, device: &Cuda, of: &PlanTarget, sizes: PlanSizes, maps: RowMaps) -> DevicePlan<Cuda> {
        let PlanSizes { rows, padded_tokens, counts, .. } = sizes;
        let (total_tokens, first_token) = match &counts {
            Some(counts) => (counts.tokens.iter().sum(), counts.tokens[..of.rank].iter().sum()),
            None => (of.tokens, 0),
        };
        let plan = Plan {
            tokens: of.tokens,
            total_tokens,
            first_token,
            segments: Arc::new(Segments::new(self.offsets, self.counts, rows).with_origin(of.origin)),
            stats: lazy_stats(device, self.stats, self.stats_layout),
            kept_ids: self.kept_ids,
            row_map: maps.row,
            weight_map: maps.weight,
            return_map: maps.ret,
            messages: maps.messages,
            zones: maps.zones,
        };
        DevicePlan { plan, padded_tokens, counts }
    }
}

impl PlanSizes {
    /// Waits for what the records say: how many rows of each rank, and of the layout where that is open.
    fn read(&mut self, device: &Cuda, counting: &PlanInProgress, open: bool) -> Result<()> {
        let stats_layout = counting.stats_layout;
        self.values = stats_layout.read(device, &counting.stats)?;
        let counts = stats_layout.counts(&self.values);
        self.padded_tokens = counts.tokens.iter().copied().max().unwrap_or(0);
        self.counts = Some(counts);
        if open {
            self.rows = check_number(CALL, "rows", Some(self.values[stats_layout.tail()]))?;
        }
        Ok(())
    }
}
