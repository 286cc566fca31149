//! Prepare over NVLink (`kernels/sm90_nvlink_plan.cu`): the ranks' records, and where the kernel can hold its share of the
//! choices, the plan from them too.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{Capacity, DevicePlan, PlanFor, PlanIds};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::device::Cuda;
use super::heuristics::{NVLINK_EXCHANGE_BLOCKS, NVLINK_EXCHANGE_BYTES, NVLINK_PLAN_BLOCKS, NVLINK_PLAN_CHOICES};
use super::launch::Grid;
use super::layout::at;
use super::nvlink::{PeerCall, absent};
use super::params;
use super::routing_records::{OwnRecord, PlanDescription, PlanSizes, RowMaps, empty_slot_maps, empty_zones};
use super::tile_config::NVLINK_PLAN_SMEM;

const CALL: &str = "prepare";

/// A plan that a kernel makes while it exchanges the records.
pub(crate) struct NvLinkPlan<'a> {
    of: PlanFor<'a>,
    /// What the kernel is told, but for the peers.
    p: params::NvLinkPlanParams,
    grid: Grid,
    description: PlanDescription,
    sizes: PlanSizes,
    /// Rows that no rank's slots exceed.
    layout_rows: i64,
    /// `None`: the host waits for their sizes.
    maps: Option<RowMaps>,
    /// All ranks' records, for a host that waits.
    records: Option<Tensor<Cuda>>,
    /// What blocks tell each other, held until the last kernel.
    _scratch: [Tensor<Cuda>; 2],
}

/// How the work is cut: blocks, and tokens of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    blocks: usize,
    tokens: usize,
    /// Bytes of shared memory.
    shared: usize,
}

impl Cut {
    /// Into so many blocks at most; `None`: they have no room for that.
    fn new(of: &PlanFor<'_>, most: usize) -> Option<Self> {
        let (experts, ranks, k) = (of.num_experts, of.ranks, of.spec.top_k);
        let all = ranks.checked_mul(of.max_tokens)?;
        let blocks = all.checked_mul(k)?.div_ceil(NVLINK_PLAN_CHOICES).clamp(1, most);
        let tokens = all.div_ceil(blocks);
        let (locals, choices) = (experts / ranks, tokens.checked_mul(k)?);
        // As the kernel lays them out (`hold`).
        let warps = (params::NVLINK_THREADS / params::WARP_THREADS) as usize;
        let wide = 4 * experts + 3 * locals + 5 + 3 * ranks;
        let narrow = (2 + warps).checked_mul(experts)?.checked_add(2 * choices)?.checked_add(2 * tokens)?;
        let shared = narrow.checked_mul(4)?.checked_add(8 * wide)?;
        (shared <= NVLINK_PLAN_SMEM as usize).then_some(Self { blocks, tokens, shared })
    }
}

/// Blocks of a plan at most, on a GPU with so many SMs to use, for a group whose kernels take at most `max_sms` of them (0:
/// any number).
fn most_blocks(usable_sms: usize, max_sms: usize) -> usize {
    let of_group = if max_sms == 0 { usize::MAX } else { max_sms };
    NVLINK_PLAN_BLOCKS.min(usable_sms).min(of_group).max(1)
}

impl<'a> NvLinkPlan<'a> {
    /// Room for the plan of these choices, in zones, by blocks on at most `max_sms` SMs (0: any number); `None`: blocks have
    /// no room for so many.
    ///
    /// # Errors
    /// Shapes and types that a record cannot have; no memory.
    pub(crate) fn new(device: &Cuda, call: PlanIds<'a, Cuda>, max_sms: usize) -> Result<Option<Self>> {
        let PlanIds { of, ids, errors } = call;
        let PlanFor { rank, ranks, num_experts, max_tokens, spec, .. } = of;
        let Some(cut) = Cut::new(&of, most_blocks(device.usable_sms(), max_sms)) else { return Ok(None) };
        let record = OwnRecord { rank, num_experts, max_tokens, spec, ids }.params()?;
        let mut description = PlanDescription::new(device, of, errors)?;
        let record = params::WriteRecordParams { errors: description.p.errors, ..record };
        let (sizes, layout_rows) = (PlanSizes::of(&description.p, max_tokens), description.p.rows);
        let bytes = |bytes: usize| Tensor::empty(device, DType::U8, &[bytes]);
        let mut counts = bytes(2 * cut.blocks * num_experts.next_multiple_of(4))?;
        let mut tallies = bytes(4 * cut.blocks * (2 * ranks + 1))?;
        let mut records = None;
        let mut maps = None;
        if of.waits() {
            records = Some(Tensor::empty(device, DType::U8, &[ranks, description.p.size as usize])?);
        } else {
            maps = Some(empty_maps(device, &mut description, &sizes)?);
        }
        let p = params::NvLinkPlanParams {
            record,
            exchange: 1,
            maps: i64::from(maps.is_some()),
            block_tokens: cut.tokens as i64,
            counts: at(&mut counts),
            tallies: at(&mut tallies),
            records: records.as_mut().map_or(0, at),
            report: device.inner.report.address(),
            ..Default::default()
        };
        let grid = Grid { shared: cut.shared as u32, ..Grid::new(cut.blocks, params::NVLINK_THREADS) };
        Ok(Some(Self { of, p, grid, description, sizes, layout_rows, maps, records, _scratch: [counts, tallies] }))
    }

    /// Bytes of a rank's record.
    pub(crate) fn record_bytes(&self) -> usize {
        self.description.p.size as usize
    }

    /// Exchanges the records and plans, as far as the host knows the sizes.
    ///
    /// # Safety
    /// As [`Cuda::nvlink_exchange`].
    pub(crate) unsafe fn exchange(&mut self, device: &Cuda, peers: &PeerCall<'_>, bank: usize) -> Result<()> {
        (self.p.call, self.p.bank) = (peers.params(device)?, bank as i64);
        // SAFETY: the caller's promise.
        unsafe { self.launch(device) }
    }

    /// # Safety
    /// The call's peers are set, as [`Cuda::nvlink_exchange`] asks.
    unsafe fn launch(&mut self, device: &Cuda) -> Result<()> {
        let kernels = &device.kernels().sm90.as_ref().ok_or_else(|| absent(CALL))?.nvlink;
        // Slots of all ranks are laid out alike, also where each has as many rows as it needs.
        self.p.plan = params::RecordsPlanParams { rows: self.layout_rows, ..self.description.p };
        self.p.map_rows = self.description.p.rows;
        // SAFETY: every tensor has the size that `params.h` states for it, and is held until the kernel has been enqueued;
        // the kernel checks what the records hold; the rest is the caller's promise.
        unsafe { device.launch(CALL, &kernels.plan, self.grid, &self.p) }
    }

    /// The plan, and where the host has waited for its sizes, all ranks' records. To be called once the records have been
    /// exchanged.
    ///
    /// # Errors
    /// No memory; a wait in a capture.
    pub(crate) fn finish(mut self, device: &Cuda) -> Result<(DevicePlan<Cuda>, Option<Tensor<Cuda>>)> {
        let maps = match self.maps.take() {
            Some(maps) => maps,
            None => self.maps_of_known_sizes(device)?,
        };
        Ok((self.description.finish(device, &self.of, self.sizes, maps), self.records))
    }

    /// Waits for the sizes, and writes the maps.
    fn maps_of_known_sizes(&mut self, device: &Cuda) -> Result<RowMaps> {
        self.sizes.read(device, &self.description, self.of.spec.capacity == Capacity::Eager)?;
        let maps = empty_maps(device, &mut self.description, &self.sizes)?;
        (self.p.exchange, self.p.maps, self.p.records) = (0, 1, 0);
        // SAFETY: `exchange` has set the peers, whose records stay in their bank until this rank's next call but one.
        unsafe { self.launch(device) }?;
        Ok(maps)
    }
}

/// Room for maps of these sizes.
fn empty_maps(device: &Cuda, description: &mut PlanDescription, sizes: &PlanSizes) -> Result<RowMaps> {
    let p = &mut description.p;
    p.padded_tokens = sizes.padded_tokens as i64;
    let [row, weight] = empty_slot_maps(device, p, sizes.rows)?;
    let ret = Tensor::empty(device, DType::I32, &[0, p.top_k as usize])?;
    let zones = empty_zones(device, p, p.tokens as usize)?;
    Ok(RowMaps { row, weight, ret, messages: None, zones: Some(zones) })
}

impl Cuda {
    /// Brings a record of each rank to all, into `out`, `[R, bytes]`.
    ///
    /// # Safety
    /// As [`Cuda::nvlink_dispatch`], with room for two banks of this size from the call's zone on, alike on all ranks, each
    /// with room for all records; the bytes are as many on all ranks, a multiple of 4.
    pub(crate) unsafe fn nvlink_exchange(
        &self,
        peers: &PeerCall<'_>,
        bank: usize,
        own: TensorRef<'_, Self>,
        out: TensorMut<'_, Self>,
    ) -> Result<()> {
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(peers.call))?.nvlink;
        let bytes = own.count() * own.dtype().size();
        Error::check_shape(peers.call, "records", &[peers.words.len(), bytes], out.dims())?;
        let p = params::NvLinkExchangeParams {
            call: peers.params(self)?,
            bank: bank as i64,
            source: own.data().ptr,
            bytes: bytes as i64,
            out: out.into_data().ptr,
        };
        let pieces = bytes.div_ceil(NVLINK_EXCHANGE_BYTES).min(NVLINK_EXCHANGE_BLOCKS);
        let grid = Grid::new(peers.blocks(self, pieces), params::NVLINK_THREADS);
        // SAFETY: the caller's promise.
        unsafe { self.launch(peers.call, &kernels.exchange, grid, &p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DispatchSpec;

    #[test]
    fn a_plan_leaves_room_for_collectives_of_other_streams() {
        // A whole Hopper, most of it reserved, a group's bound, a bound above all others.
        let of = [(132, 0), (132, 8), (40, 0), (40, 8), (2, 8), (132, 1), (132, 200)];
        assert_eq!(of.map(|(usable, max)| most_blocks(usable, max)), [64, 8, 40, 8, 2, 1, 64]);
        // A plan of another group beside it, or a collective of 50 blocks, on the smallest GPU of this kind.
        const { assert!(2 * NVLINK_PLAN_BLOCKS + 4 <= 132 && NVLINK_PLAN_BLOCKS + 50 <= 114) };
    }

    #[test]
    fn work_is_cut_into_blocks_that_hold_their_share() {
        let cut = |experts, ranks, max_tokens, top_k, most| {
            let spec = DispatchSpec::new(0, top_k);
            let row_order = crate::plan::RowOrder::Zones;
            Cut::new(
                &PlanFor { rank: 0, ranks, num_experts: experts, max_tokens, tokens: 1, spec: &spec, row_order },
                most,
            )
        };
        let of =
            |experts, ranks, max_tokens, most| cut(experts, ranks, max_tokens, 8, most).map(|c| (c.blocks, c.tokens));
        assert_eq!(of(256, 2, 4096, 64), Some((64, 128)));
        assert_eq!(of(256, 2, 1024, 64), Some((32, 64)));
        assert_eq!(of(128, 2, 8192, 60), Some((60, 274)));
        assert_eq!(of(128, 2, 1, 64), Some((1, 2)));
        assert_eq!(of(128, 2, 0, 64), Some((1, 0)));
        assert_eq!(of(128, 2, 1000, 1), Some((1, 2000)));
        assert_eq!(of(256, 8, 8192, 64).map(|(blocks, _)| blocks), Some(64));
        // Counts of each warp, or choices, would not fit.
        assert_eq!([of(2048, 2, 64, 64), of(256, 8, 8192, 4), of(usize::MAX / 16, 2, 1, 1)], [None; 3]);
        assert_eq!(cut(8, 2, usize::MAX, 8, 64), None);
    }
}
