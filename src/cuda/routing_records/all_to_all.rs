//! Messages between two ranks (`kernels/all_to_all_plan.cu`).

use crate::cuda::device::Cuda;
use crate::cuda::launch::Grid;
use crate::cuda::layout::at;
use crate::cuda::params;
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::{MessageMaps, ZoneMaps};
use crate::tensor::Tensor;

use super::CALL;
use super::stats_layout::StatsLayout;

/// Messages between two ranks, counted but not yet numbered. Holds what the kernels leave each other.
pub(super) struct AllToAllCounts {
    _places: Tensor<Cuda>,
    _counts: Tensor<Cuda>,
    walk: Grid,
}

impl AllToAllCounts {
    /// Settles where choices are kept and counts the messages, behind the other numbers in `stats`.
    pub(super) fn new(
        device: &Cuda,
        p: &mut params::RecordsPlanParams,
        (choices, walk): (usize, Grid),
        stats: &mut Tensor<Cuda>,
        stats_layout: StatsLayout,
    ) -> Result<Self> {
        let kinds = 4 * stats_layout.ranks;
        let mut places = Tensor::empty(device, DType::I32, &[choices, 2])?;
        let mut counts = Tensor::empty(device, DType::I32, &[kinds, p.chunks as usize])?;
        (p.places, p.message_counts) = (at(&mut places), at(&mut counts));
        p.totals = at(stats) + 8 * stats_layout.messages_at() as u64;
        let kernels = &device.kernels().all_to_all_plan;
        let few = Grid { shared: (kinds * 4) as u32, ..walk };
        // SAFETY: every tensor has the size that `params.h` states for it; the totals lie inside `stats`.
        unsafe {
            device.launch(CALL, &kernels.places, walk, p)?;
            device.launch(CALL, &kernels.count, few, p)?;
            device.launch(CALL, &kernels.scan, Grid::warps_of(kinds, params::PLAN_THREADS), p)?;
        }
        Ok(Self { _places: places, _counts: counts, walk: few })
    }

    /// Writes the maps.
    pub(super) fn number(
        self,
        device: &Cuda,
        p: &mut params::RecordsPlanParams,
        counts: [Vec<usize>; 4],
    ) -> Result<MessageMaps<Cuda>> {
        let [slots_from, recv_rows, slots_at, send_rows] = counts;
        let list = |counts: &[usize]| Tensor::empty(device, DType::I32, &[counts.iter().sum()]);
        let mut return_slots = list(&slots_from)?;
        let (mut send_choices, mut send_tokens) = (list(&slots_at)?, list(&send_rows)?);
        p.return_slots = at(&mut return_slots);
        p.send_choices = at(&mut send_choices);
        p.send_tokens = at(&mut send_tokens);
        // SAFETY: as above; the lists have as many entries as have been counted, which the kernel counts again.
        unsafe { device.launch(CALL, &device.kernels().all_to_all_plan.number, self.walk, p) }?;
        Ok(MessageMaps { send_tokens, send_choices, return_slots, send_rows, recv_rows, slots_from, slots_at })
    }

    /// Writes the maps of messages that have a zone of `padded_tokens` rows each.
    pub(super) fn zones(
        self,
        device: &Cuda,
        p: &mut params::RecordsPlanParams,
        tokens: usize,
    ) -> Result<ZoneMaps<Cuda>> {
        let zones = empty_zones(device, p, tokens)?;
        // SAFETY: every tensor has the size that `params.h` states for it; no rank has more tokens than a zone has rows.
        unsafe { device.launch(CALL, &device.kernels().all_to_all_plan.zones, self.walk, p) }?;
        Ok(zones)
    }
}

/// Room for the maps of messages that have a zone of `padded_tokens` rows each, for a rank of so many tokens.
pub(in crate::cuda) fn empty_zones(
    device: &Cuda,
    p: &mut params::RecordsPlanParams,
    tokens: usize,
) -> Result<ZoneMaps<Cuda>> {
    let (ranks, zone_rows, k) = (p.ranks as usize, p.padded_tokens as usize, p.top_k as usize);
    let map = |dims: &[usize]| Tensor::empty(device, DType::I32, dims);
    let (mut token_rows, mut row_tokens) = (map(&[tokens, ranks])?, map(&[ranks, zone_rows])?);
    let mut row_slots = map(&[ranks, zone_rows, k])?;
    let mut arrived = Tensor::empty(device, DType::I64, &[ranks])?;
    (p.token_rows, p.row_slots) = (at(&mut token_rows), at(&mut row_slots));
    (p.row_tokens, p.arrived) = (at(&mut row_tokens), at(&mut arrived));
    Ok(ZoneMaps { token_rows, row_slots, row_tokens, arrived, zone_rows })
}
