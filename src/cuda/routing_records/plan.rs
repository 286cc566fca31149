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
use crate::plan::{
    Capacity, DevicePlan, HostCounts, MessageMaps, Overflow, Plan, PlanFor, PlanRecords, RowOrder, ZoneMaps,
};
use crate::tensor::{Tensor, TensorMut};

use super::all_to_all::AllToAllCounts;
use super::stats_layout::{StatsLayout, lazy_stats};
use super::{CALL, check_errors, sizes};

pub(in crate::cuda) fn plan(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<DevicePlan<Cuda>> {
    let PlanRecords { of, records, errors } = call;
    let (waits, open, most) = (of.waits(), of.spec.capacity == Capacity::Eager, of.max_tokens);
    Error::check_shape(CALL, "records", &[of.ranks, sizes(of.max_tokens, of.spec).bytes()], records.dims())?;
    let mut counting = PlanInProgress::new(device, PlanDescription::new(device, of, errors)?)?;
    counting.description.p.records = records.data().ptr;
    counting.segments(device)?;
    let all_to_all = if of.sends() { Some(counting.all_to_all(device)?) } else { None };
    let description = &counting.description;
    let mut sizes = PlanSizes::of(&description.p, most);
    if waits {
        sizes.read(device, description, open)?;
    }
    let maps = counting.maps(device, &of, &sizes, all_to_all)?;
    device.report(CALL)?;
    Ok(counting.description.finish(device, &of, sizes, maps))
}

impl PlanFor<'_> {
    /// The rank and layer, for errors.
    pub(in crate::cuda) fn origin(&self) -> Origin {
        Origin { rank: self.rank, layer: self.spec.layer }
    }

    /// The rank sends rows to each rank apart, and so has messages.
    fn sends(&self) -> bool {
        matches!(self.row_order, RowOrder::UniqueRows | RowOrder::Zones)
    }
}

/// What kernels are told of a plan, with room for its segments, statistics and kept ids.
pub(in crate::cuda) struct PlanDescription {
    pub(in crate::cuda) p: params::RecordsPlanParams,
    stats_layout: StatsLayout,
    choices: usize,
    offsets: Tensor<Cuda>,
    counts: Tensor<Cuda>,
    stats: Tensor<Cuda>,
    kept_ids: Tensor<Cuda>,
}

/// A plan in the making by kernels one behind the other.
struct PlanInProgress {
    description: PlanDescription,
    /// Blocks that walk over all choices.
    walk: Grid,
    // Memory that the kernels pass on to each other, held until the last of them.
    _before: Tensor<Cuda>,
    _scratch: Tensor<Cuda>,
}

/// Sizes that the host may have waited for.
pub(in crate::cuda) struct PlanSizes {
    pub(in crate::cuda) rows: usize,
    pub(in crate::cuda) padded_tokens: usize,
    counts: Option<HostCounts>,
    values: Vec<usize>,
}

/// Maps that the rows' movement follows.
pub(in crate::cuda) struct RowMaps {
    pub(in crate::cuda) row: Tensor<Cuda>,
    pub(in crate::cuda) weight: Tensor<Cuda>,
    pub(in crate::cuda) ret: Tensor<Cuda>,
    pub(in crate::cuda) messages: Option<MessageMaps<Cuda>>,
    pub(in crate::cuda) zones: Option<ZoneMaps<Cuda>>,
}

/// Room for the row and the weight of each slot.
pub(in crate::cuda) fn empty_slot_maps(
    device: &Cuda,
    p: &mut params::RecordsPlanParams,
    rows: usize,
) -> Result<[Tensor<Cuda>; 2]> {
    let map = || Tensor::empty(device, DType::I32, &[rows]);
    let (mut row, mut weight) = (map()?, map()?);
    (p.rows, p.row_map, p.weight_map) = (rows as i64, at(&mut row), at(&mut weight));
    Ok([row, weight])
}

impl PlanDescription {
    pub(in crate::cuda) fn new(device: &Cuda, of: PlanFor<'_>, errors: TensorMut<'_, Cuda>) -> Result<Self> {
        let PlanFor { rank, ranks, num_experts: experts, max_tokens, tokens, spec, .. } = of;
        let (sizes, k) = (sizes(max_tokens, spec), spec.top_k);
        check_errors(errors.as_ref().dims(), ranks)?;
        let stats_layout = StatsLayout { experts, locals: experts / ranks, ranks };
        let choices = max_tokens.checked_mul(k).and_then(|n| n.checked_mul(ranks));
        let choices = check_number(CALL, "choices of all ranks", choices)?;
        let of_type = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
        let (mut offsets, mut counts) =
            (of_type(DType::I64, &[stats_layout.locals])?, of_type(DType::I64, &[stats_layout.locals])?);
        let mut stats = of_type(DType::I64, &[stats_layout.count()])?;
        let mut kept_ids = of_type(DType::I32, &[tokens, k])?;
        let mut p = params::RecordsPlanParams {
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
            host_waits: i64::from(of.waits()),
            padded_tokens: max_tokens as i64,
            offsets: at(&mut offsets),
            counts: at(&mut counts),
            stats: at(&mut stats),
            kept: at(&mut kept_ids),
            errors: errors.into_data().ptr,
            fault: device.inner.status,
            origin: device.origin(CALL, of.origin())?,
            ..Default::default()
        };
        if let Capacity::Static(rows) = spec.capacity {
            (p.rows, p.may_drop) = (rows as i64, i64::from(spec.overflow == Overflow::Drop));
        }
        Ok(Self { p, stats_layout, choices, offsets, counts, stats, kept_ids })
    }

    /// The plan of these sizes and maps.
    pub(in crate::cuda) fn finish(
        self,
        device: &Cuda,
        of: &PlanFor<'_>,
        sizes: PlanSizes,
        maps: RowMaps,
    ) -> DevicePlan<Cuda> {
        let PlanSizes { rows, padded_tokens, counts, .. } = sizes;
        let (total_tokens, first_token) = match &counts {
            Some(counts) => (counts.tokens.iter().sum(), counts.tokens[..of.rank].iter().sum()),
            None => (of.tokens, 0),
        };
        let plan = Plan {
            tokens: of.tokens,
            total_tokens,
            first_token,
            segments: Arc::new(Segments::new(self.offsets, self.counts, rows).with_origin(of.origin())),
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

impl PlanInProgress {
    fn new(device: &Cuda, mut description: PlanDescription) -> Result<Self> {
        let PlanDescription { p, choices, stats_layout, .. } = &mut description;
        let experts = stats_layout.experts;
        let chunk = choices.div_ceil(PLAN_CHUNKS).next_multiple_of(32).max(32);
        let chunks = choices.div_ceil(chunk);
        let mut before = Tensor::empty(device, DType::I32, &[experts, chunks])?;
        let mut scratch = Tensor::empty(device, DType::I64, &[3, experts])?;
        (p.chunk, p.chunks) = (chunk as i64, chunks as i64);
        (p.before, p.scratch) = (at(&mut before), at(&mut scratch));
        let walk = Grid { shared: (experts * 4) as u32, ..Grid::new(chunks, params::WARP_THREADS) };
        Ok(Self { description, walk, _before: before, _scratch: scratch })
    }

    /// Counts choices, and from them segments and statistics.
    fn segments(&self, device: &Cuda) -> Result<()> {
        let kernels = &device.kernels().routing_records;
        let PlanDescription { p, stats_layout, .. } = &self.description;
        let scan = Grid::warps_of(stats_layout.experts, params::PLAN_THREADS);
        let one = Grid::new(1, params::PLAN_SEGMENTS_THREADS);
        // SAFETY: every tensor has the size that `params.h` states for it; the kernels check what the records hold.
        unsafe {
            device.launch(CALL, &kernels.count, self.walk, p)?;
            device.launch(CALL, &kernels.scan, scan, p)?;
            device.launch(CALL, &kernels.segments, one, p)
        }
    }

    fn all_to_all(&mut self, device: &Cuda) -> Result<AllToAllCounts> {
        let PlanDescription { p, choices, stats, stats_layout, .. } = &mut self.description;
        AllToAllCounts::new(device, p, (*choices, self.walk), stats, *stats_layout)
    }

    /// Writes the maps of a plan of these sizes.
    fn maps(
        &mut self,
        device: &Cuda,
        of: &PlanFor<'_>,
        sizes: &PlanSizes,
        all_to_all: Option<AllToAllCounts>,
    ) -> Result<RowMaps> {
        let PlanDescription { p, stats_layout, .. } = &mut self.description;
        let k = p.top_k as usize;
        let arriving = match of.row_order {
            RowOrder::UniqueRows => of.tokens,
            RowOrder::Zones => 0,
            _ => stats_layout.ranks * sizes.padded_tokens,
        };
        let [mut row, mut weight] = empty_slot_maps(device, p, sizes.rows)?;
        let mut ret = Tensor::empty(device, DType::I32, &[arriving, k])?;
        for map in [&mut row, &mut weight] {
            device.fill_bytes(CALL, map.view_mut().into_data(), 0xff)?;
        }
        (p.padded_tokens, p.return_map) = (sizes.padded_tokens as i64, at(&mut ret));
        let (mut messages, mut zones) = (None, None);
        match all_to_all {
            Some(all_to_all) if of.row_order == RowOrder::Zones => {
                zones = Some(all_to_all.zones(device, p, of.tokens)?);
            }
            Some(all_to_all) => {
                messages = Some(all_to_all.number(device, p, stats_layout.messages(&sizes.values))?);
            }
            None => {
                // SAFETY: as for the segments, for this many rows.
                unsafe { device.launch(CALL, &device.kernels().routing_records.slots, self.walk, p) }?;
            }
        }
        Ok(RowMaps { row, weight, ret, messages, zones })
    }
}

impl PlanSizes {
    /// Those of a plan that the host does not wait for, of so many tokens of a rank at most.
    pub(in crate::cuda) fn of(p: &params::RecordsPlanParams, max_tokens: usize) -> Self {
        Self { rows: p.rows as usize, padded_tokens: max_tokens, counts: None, values: Vec::new() }
    }

    /// Waits for what the records say: how many rows of each rank, and of the layout where that is open.
    pub(in crate::cuda) fn read(&mut self, device: &Cuda, of: &PlanDescription, open: bool) -> Result<()> {
        let stats_layout = of.stats_layout;
        self.values = stats_layout.read(device, &of.stats)?;
        let counts = stats_layout.counts(&self.values);
        self.padded_tokens = counts.tokens.iter().copied().max().unwrap_or(0);
        self.counts = Some(counts);
        if open {
            self.rows = check_number(CALL, "rows", Some(self.values[stats_layout.tail()]))?;
        }
        Ok(())
    }
}
