//! Rows between the GPUs of a host by stores into each other's memory (`kernels/sm90_nvlink_dispatch.cu`,
//! `sm90_nvlink_groups.cu`, `sm90_nvlink_combine.cu`, `sm90_nvlink_combine_mxfp8.cu`; the protocol is described in
//! `common/nvlink.cuh`).

use std::time::Duration;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Origin;
use crate::plan::ZoneMaps;
use crate::quant::MX_BLOCK;
use crate::tensor::{TensorMut, TensorRef};

use super::buffer::DeviceMut;
use super::device::Cuda;
use super::heuristics::{self, NVLINK_LAG, NVLINK_TEST_DELAY};
use super::launch::Grid;
use super::layout::{aligned, pointer};
use super::params::{self, type_code};
use super::peers::HostWords;
use super::tile_config::{NVLINK_ITEMS_SMEM, NVLINK_SUM_SMEM};

/// Ranks of a group at most.
pub(crate) const MOST_RANKS: usize = params::NVLINK_RANKS as usize;
/// Choices of a token at most.
pub(crate) const MOST_CHOICES: usize = params::NVLINK_TOP_K as usize;
/// What a zone begins at a multiple of.
pub(crate) const ZONE_UNIT: usize = params::NVLINK_ZONE_UNIT as usize;

/// Bytes of a rank's control words.
pub(crate) fn control_bytes(ranks: usize, max_tokens: usize) -> usize {
    (params::NVLINK_ROWS as usize + ranks * max_tokens) * 8
}

/// Where the parts of what arrives lie in a zone: rows from its start on, then the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ZoneLayout {
    pub(crate) weights: usize,
    pub(crate) scales: usize,
    pub(crate) bytes: usize,
}

impl ZoneLayout {
    /// So many bytes of rows, of weights and of scales.
    pub(crate) fn new(rows: usize, weights: usize, scales: usize) -> Self {
        let weights_at = rows.next_multiple_of(ZONE_UNIT);
        let scales_at = (weights_at + weights).next_multiple_of(ZONE_UNIT);
        Self { weights: weights_at, scales: scales_at, bytes: (scales_at + scales).next_multiple_of(ZONE_UNIT) }
    }
}

/// Bytes of a row whose sum returns as MXFP8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuantizedRow {
    pub(crate) codes: usize,
    pub(crate) scales: usize,
}

impl QuantizedRow {
    /// What scales of a row are a multiple of: they are stored and loaded in words.
    const SCALE_UNIT: usize = 16;

    /// Of so many elements, a multiple of a block's.
    pub(crate) fn of(width: usize) -> Self {
        Self { codes: width, scales: width.div_ceil(MX_BLOCK).next_multiple_of(Self::SCALE_UNIT) }
    }

    /// Refuses rows whose sums cannot be quantized.
    pub(crate) fn check_width(call: &'static str, width: usize) -> Result<()> {
        if width.is_multiple_of(MX_BLOCK) {
            return Ok(());
        }
        let expected = format!("rows of a multiple of {MX_BLOCK} elements, as they return as MXFP8 (return_format)");
        Err(Error::invalid(call, "tensor expert_out", expected, width))
    }
}

/// A rank's part in a call of all ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerCall<'a> {
    pub(crate) call: &'static str,
    /// Rank and layer, for errors.
    pub(crate) origin: Origin,
    /// Control words of each rank, as this GPU reaches them.
    pub(crate) words: &'a [u64],
    /// Memory of each for zones.
    pub(crate) zones: &'a [u64],
    /// Where in its memory this rank receives.
    pub(crate) zone: usize,
    /// How long a kernel waits for a peer.
    pub(crate) timeout: Duration,
    /// What ends its waits before, and is told of those that it gives up.
    pub(crate) host: &'a HostWords,
    /// Blocks of the kernel at most; 0: as many as the GPU has SMs.
    pub(crate) max_sms: usize,
    /// A product starts while the call's kernel runs.
    pub(crate) overlapped: bool,
}

/// Tokens to send.
#[derive(Debug)]
pub(crate) struct DispatchCall<'a> {
    pub(crate) tokens: TensorRef<'a, Cuda>,
    pub(crate) weights: Option<TensorRef<'a, Cuda>>,
    pub(crate) scales: Option<TensorRef<'a, Cuda>>,
    pub(crate) maps: &'a ZoneMaps<Cuda>,
    pub(crate) layout: ZoneLayout,
}

/// How tokens are sent by groups of experts, while a product of theirs runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByGroups<'a> {
    /// Kept ids `[T, K]`.
    pub(crate) kept: TensorRef<'a, Cuda>,
    /// Experts of a rank.
    pub(crate) local_experts: usize,
    /// Blocks of the kernel: even, at most 16, the same on all ranks.
    pub(crate) blocks: usize,
}

/// Blocks of the kernel that sends by groups at most.
const MOST_GROUP_BLOCKS: usize = params::NVLINK_MARK_BLOCKS as usize;
/// Where the word lies among a rank's control words that tells how many groups have come.
pub(crate) const ARRIVED_AT: usize = params::NVLINK_ARRIVED as usize * 8;

/// Experts of a group where a rank has so many.
pub(crate) fn group_experts(local_experts: usize) -> usize {
    local_experts.div_ceil(params::NVLINK_GROUPS as usize).max(1)
}

/// Whether so many rows of so many experts are few, for which products wait for none.
pub(crate) fn few_rows(rows: usize, experts: usize) -> bool {
    heuristics::few_rows(i64::try_from(rows).unwrap_or(i64::MAX), experts as i64)
}

/// Whether so many blocks can list the rows of so many tokens to so many ranks.
pub(crate) fn lists_rows(tokens: usize, ranks: usize, blocks: usize) -> bool {
    let room = params::NVLINK_ITEMS_SMEM as usize / size_of::<u32>();
    (1..=MOST_GROUP_BLOCKS).contains(&blocks) && tokens.div_ceil(blocks).saturating_mul(ranks) <= room
}

/// Rows of slots to return.
#[derive(Debug)]
pub(crate) struct CombineCall<'a> {
    /// `[N, H]`.
    pub(crate) rows: TensorRef<'a, Cuda>,
    /// `[N]`; zeros where absent.
    pub(crate) weights: Option<TensorRef<'a, Cuda>>,
    /// Whether weights travel.
    pub(crate) with_weights: bool,
    /// `[T, H]`.
    pub(crate) out: TensorMut<'a, Cuda>,
    /// `[T, K]`.
    pub(crate) out_weights: Option<TensorMut<'a, Cuda>>,
    pub(crate) maps: &'a ZoneMaps<Cuda>,
    /// Kept ids `[T, K]`.
    pub(crate) kept: TensorRef<'a, Cuda>,
    pub(crate) layout: ZoneLayout,
    /// Every slot's row travels, and the token's rank adds them in the order of k.
    pub(crate) in_k_order: bool,
    /// Sums travel as these, and so are not in the order of k; their scales lie where the layout has them.
    pub(crate) quantized: Option<QuantizedRow>,
}

impl PeerCall<'_> {
    pub(super) fn params(&self, device: &Cuda) -> Result<params::NvLinkCall> {
        let fits = (1..=MOST_RANKS).contains(&self.words.len()) && self.words.len() == self.zones.len();
        if !fits || self.origin.rank >= self.words.len() {
            let found = format!("{} of rank {}", self.words.len(), self.origin.rank);
            return Err(Error::invalid(self.call, "ranks", format!("at most {MOST_RANKS}"), found));
        }
        let mut p = params::NvLinkCall {
            rank: self.origin.rank as i64,
            ranks: self.words.len() as i64,
            zone: self.zone as i64,
            timeout: i64::try_from(self.timeout.as_nanos()).unwrap_or(i64::MAX),
            // A device of tests: ranks, blocks and warps meet in other orders.
            delay: if device.poisons() { NVLINK_TEST_DELAY } else { 0 },
            stop: self.host.address(),
            fault: device.inner.status,
            origin: device.origin(self.call, self.origin)?,
            ..Default::default()
        };
        p.words[..self.words.len()].copy_from_slice(self.words);
        p.zones[..self.zones.len()].copy_from_slice(self.zones);
        Ok(p)
    }

    /// Blocks for so many pieces of work, of a block each.
    pub(super) fn blocks(&self, device: &Cuda, pieces: usize) -> usize {
        let usable = device.usable_sms();
        let most = if self.max_sms == 0 { usable } else { self.max_sms.min(usable) };
        pieces.clamp(1, most)
    }
}

impl DispatchCall<'_> {
    fn params(&self, device: &Cuda, peers: &PeerCall<'_>) -> Result<params::NvLinkDispatchParams> {
        Ok(params::NvLinkDispatchParams {
            call: peers.params(device)?,
            rows: part(&Some(self.tokens), 0),
            weights: part(&self.weights, self.layout.weights),
            scales: part(&self.scales, self.layout.scales),
            token_rows: self.maps.token_rows.view().data().ptr,
            tokens: self.tokens.rows() as i64,
            max_tokens: self.maps.zone_rows as i64,
        })
    }
}

/// The largest of these words that rows of so many bytes from here on consist of.
fn word(address: u64, bytes: usize) -> i64 {
    let fits = |word: &&i64| bytes.is_multiple_of(**word as usize) && address.is_multiple_of(**word as u64);
    [16, 4, 2].iter().find(fits).copied().unwrap_or(1)
}

pub(super) fn part(t: &Option<TensorRef<'_, Cuda>>, at: usize) -> params::NvLinkPart {
    let Some(t) = t else { return params::NvLinkPart::default() };
    let (source, bytes) = (t.data().ptr, t.row_bytes());
    params::NvLinkPart { source, bytes: bytes as i64, word: word(source, bytes), at: at as i64 }
}

pub(super) fn absent(call: &'static str) -> Error {
    Error::invalid(call, "GPU", "one of compute capability 9.0", "another")
}

impl Cuda {
    /// Whether this GPU has the kernels.
    pub(crate) fn has_nvlink_kernels(&self) -> bool {
        self.kernels().sm90.is_some()
    }

    /// Whether rows of this type can be added. To be asked before the ranks meet for it.
    ///
    /// # Errors
    /// Another type than the kernels'.
    pub(crate) fn check_nvlink_sums(&self, call: &'static str, dtype: DType) -> Result<()> {
        type_code(call, "rows", dtype).map(drop)
    }

    /// Has the calls over a rank's control words, which are zeros, be numbered from shortly before the last of their numbers
    /// on where the device is one of tests, so that these see the numbers begin anew. To be called on all ranks or on none.
    ///
    /// # Errors
    /// A driver's error.
    pub(crate) fn number_calls_of_tests(&self, call: &'static str, words: DeviceMut<'_>, last: u64) -> Result<()> {
        if self.poisons() { self.write_bytes(call, words.ptr, &(last - 2).to_ne_bytes()) } else { Ok(()) }
    }

    /// Fills what peers are about to write on a device that poisons its buffers.
    ///
    /// # Errors
    /// A driver's error.
    pub(crate) fn poison_zone(&self, call: &'static str, zone: DeviceMut<'_>) -> Result<()> {
        if self.poisons() { self.fill_bytes(call, zone, 0xff) } else { Ok(()) }
    }

    /// Sends tokens to the ranks that keep a choice of theirs; ends when all of theirs have come.
    ///
    /// # Safety
    /// `peers` tells of memory that every rank has for this group, with room for the layout in each zone; all ranks make
    /// the same calls.
    pub(crate) unsafe fn nvlink_dispatch(&self, peers: &PeerCall<'_>, sent: DispatchCall<'_>) -> Result<()> {
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(peers.call))?.nvlink;
        let tokens = sent.tokens.rows();
        let p = sent.params(self, peers)?;
        let warps = (params::NVLINK_THREADS / params::WARP_THREADS) as usize;
        let blocks = peers.blocks(self, tokens.div_ceil(warps));
        let pairs = peers.overlapped && blocks.is_multiple_of(2);
        let grid = Grid { pairs, ..Grid::new(blocks, params::NVLINK_THREADS) };
        // SAFETY: the maps have the sizes that `params.h` states; the rest is the caller's promise.
        unsafe { self.launch(peers.call, &kernels.dispatch, grid, &p) }
    }

    /// The same by groups of experts, on few SMs; a product that is enqueued next starts early and waits for their rows itself.
    ///
    /// # Safety
    /// As [`Cuda::nvlink_dispatch`]; `by` lists the tokens that are sent, as [`lists_rows`] allows.
    pub(crate) unsafe fn nvlink_dispatch_by_groups(
        &self,
        peers: &PeerCall<'_>,
        sent: DispatchCall<'_>,
        by: ByGroups<'_>,
    ) -> Result<()> {
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(peers.call))?.nvlink;
        let group_experts = group_experts(by.local_experts);
        let p = params::NvLinkGroupsParams {
            sent: sent.params(self, peers)?,
            kept: by.kept.data().ptr,
            top_k: by.kept.row_bytes() as i64 / DType::I32.size() as i64,
            local_experts: by.local_experts as i64,
            group_experts: group_experts as i64,
            groups: by.local_experts.div_ceil(group_experts) as i64,
        };
        let one = Grid::new(by.blocks, params::NVLINK_THREADS);
        let grid = Grid { shared: NVLINK_ITEMS_SMEM, pairs: true, ..one };
        // SAFETY: the caller's promise.
        unsafe { self.launch(peers.call, &kernels.groups, grid, &p) }
    }

    /// Returns rows of slots to their tokens' ranks, and adds those of this rank's tokens.
    ///
    /// # Safety
    /// As [`Cuda::nvlink_dispatch`]; rows are of a type that can be added, and of a width that can be quantized where they are.
    pub(crate) unsafe fn nvlink_combine(&self, peers: &PeerCall<'_>, back: CombineCall<'_>) -> Result<()> {
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(peers.call))?.nvlink;
        let (dtype, tokens) = (back.rows.dtype(), back.out.rows());
        let width = back.rows.row_bytes() / dtype.size();
        let fast = aligned(back.rows, width) && aligned(back.out.as_ref(), width);
        let maps = back.maps;
        let p = params::NvLinkCombineParams {
            call: peers.params(self)?,
            rows: back.rows.data().ptr,
            width: width as i64,
            word: if fast { 16 } else { dtype.size() as i64 },
            in_k_order: i64::from(back.in_k_order),
            weights: pointer(&back.weights),
            with_weights: i64::from(back.with_weights),
            weights_at: back.layout.weights as i64,
            out: back.out.into_data().ptr,
            out_weights: back.out_weights.map_or(0, |t| t.into_data().ptr),
            token_rows: maps.token_rows.view().data().ptr,
            row_slots: maps.row_slots.view().data().ptr,
            row_tokens: maps.row_tokens.view().data().ptr,
            kept: back.kept.data().ptr,
            arrived: maps.arrived.view().data().ptr,
            tokens: tokens as i64,
            max_tokens: maps.zone_rows as i64,
            top_k: back.kept.row_bytes() as i64 / DType::I32.size() as i64,
            lag: NVLINK_LAG.min(tokens) as i64,
            scales_at: back.layout.scales as i64,
            scale_bytes: back.quantized.map_or(0, |row| row.scales as i64),
        };
        let pieces = (peers.words.len() * maps.zone_rows.max(tokens)).div_ceil(params::NVLINK_SUM_GROUPS as usize);
        let blocks = peers.blocks(self, pieces);
        let pairs = peers.overlapped && blocks.is_multiple_of(2);
        let grid = Grid { shared: NVLINK_SUM_SMEM, pairs, ..Grid::new(blocks, params::NVLINK_SUM_THREADS) };
        let combine = if back.quantized.is_some() { &kernels.combine_mxfp8 } else { &kernels.combine };
        // SAFETY: as in `nvlink_dispatch`.
        unsafe { self.launch(peers.call, combine.of(dtype), grid, &p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_zone_lie_behind_each_other() {
        let layout = ZoneLayout::new(1000, 96, 0);
        assert_eq!(layout, ZoneLayout { weights: 1024, scales: 1280, bytes: 1280 });
        assert_eq!(ZoneLayout::new(0, 0, 0).bytes, 0);
        assert_eq!([word(256, 48), word(256, 36), word(8, 48), word(256, 6), word(1, 16)], [16, 4, 4, 2, 1]);
    }

    #[test]
    fn a_quantized_row_has_a_scale_for_each_block() {
        let bytes = |width| {
            let row = QuantizedRow::of(width);
            [row.codes, row.scales]
        };
        assert_eq!([bytes(32), bytes(96), bytes(512), bytes(544)], [[32, 16], [96, 16], [512, 16], [544, 32]]);
        assert_eq!([bytes(2048), bytes(7168)], [[2048, 64], [7168, 224]]);
        assert!(QuantizedRow::check_width("combine", 96).is_ok());
        for width in [1, 16, 48, 7169] {
            let error = QuantizedRow::check_width("combine", width).expect_err("no whole blocks").to_string();
            let parts = ["combine", "expert_out", "multiple of 32", &width.to_string()];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
