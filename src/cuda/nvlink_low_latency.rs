//! Few rows between the GPUs of a host by packets over NVLink (`kernels/sm90_nvlink_low_latency.cu`; the protocol is
//! described in `common/nvlink_low_latency.cuh`).

use std::time::Duration;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::ZoneMaps;
use crate::tensor::{TensorMut, TensorRef};

use super::buffer::DeviceMut;
use super::device::Cuda;
use super::launch::Grid;
use super::nvlink::{PeerCall, absent, part};
use super::params;

/// Bytes of a rank's control words for these calls.
pub(crate) const LOW_LATENCY_CONTROL_BYTES: usize = params::LOW_LATENCY_WORDS as usize * 8;
/// Bytes of a packet.
pub(crate) const PACKET_BYTES: usize = params::PACKET_BYTES as usize;
const PAYLOAD: usize = params::PACKET_PAYLOAD as usize;
/// Bytes of a record at most: a packet a thread of the exchange, whose lanes then stay together.
pub(crate) const MOST_RECORD_BYTES: usize = params::NVLINK_THREADS as usize * PAYLOAD;
const WARP: usize = params::WARP_THREADS as usize;
const WARPS: usize = params::LOW_LATENCY_THREADS as usize / WARP;

/// Packets that carry so many bytes.
pub(crate) fn packets(bytes: usize) -> usize {
    bytes.div_ceil(PAYLOAD)
}

/// Packets that carry a row of so many elements, whole ones each.
fn sum_packets(dtype: DType, width: usize) -> usize {
    width.div_ceil(PAYLOAD / dtype.size())
}

/// Packets of a sum of so many bytes at most, whatever its type.
pub(crate) fn most_sum_packets(bytes: usize) -> usize {
    bytes.div_ceil(PAYLOAD / DType::F32.size() * DType::F32.size())
}

/// Blocks of a call at most, whose kernels may take so many SMs. Where the group bounds its SMs or the device reserves some,
/// one an SM: each block may get an SM of its own.
fn most_blocks(sms: usize, bounded: bool) -> usize {
    let blocks_of_sm = if bounded { 1 } else { params::LOW_LATENCY_BLOCKS as usize };
    sms * blocks_of_sm
}

/// A rank's part in a call of low latency.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LowLatencyPeers<'a> {
    /// Its zones are the banks.
    pub(crate) peers: PeerCall<'a>,
    /// Where the control words of these calls lie behind the others.
    pub(crate) control: usize,
    /// Packets of each rank in a bank.
    pub(crate) area: usize,
    /// After how long a call goes on without a rank; `None`: it gives up when its time is over.
    pub(crate) patience: Option<Duration>,
}

impl LowLatencyPeers<'_> {
    fn params(&self, device: &Cuda) -> Result<params::LowLatencyCall> {
        let nanoseconds = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX).max(1);
        Ok(params::LowLatencyCall {
            call: self.peers.params(device)?,
            control: self.control as i64,
            area: self.area as i64,
            patience: self.patience.map_or(0, nanoseconds),
        })
    }

    /// Blocks for so many packets of a rank. They run at once as long as nothing of another stream keeps some from starting:
    /// unlike a cooperative launch, this one is not refused then, and ranks wait until that has ended, or for as long as the
    /// call allows.
    fn grid(&self, device: &Cuda, packets: usize) -> Grid {
        let bounded = self.peers.max_sms > 0 || device.reserves_sms();
        let most = most_blocks(self.peers.blocks(device, usize::MAX), bounded);
        Grid::new(packets.div_ceil(WARP * WARPS).clamp(1, most), params::LOW_LATENCY_THREADS)
    }

    /// Refuses rows that do not fit the ranks' areas.
    fn check_room(&self, packets: usize) -> Result<()> {
        if packets <= self.area {
            return Ok(());
        }
        Err(Error::invalid(self.peers.call, "packets", format!("at most {} of a rank", self.area), packets))
    }
}

/// A rank's two banks, of an area of so many packets for each rank.
#[derive(Debug)]
pub(crate) struct PacketBanks<'a> {
    pub(crate) memory: DeviceMut<'a>,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) area: usize,
}

/// Tokens to send, and where those that arrive go.
#[derive(Debug)]
pub(crate) struct LowLatencyDispatch<'a> {
    pub(crate) tokens: TensorRef<'a, Cuda>,
    pub(crate) weights: Option<TensorRef<'a, Cuda>>,
    pub(crate) scales: Option<TensorRef<'a, Cuda>>,
    pub(crate) maps: &'a ZoneMaps<Cuda>,
    /// `[R max_tokens, H]`, and the same of the other two where they are sent.
    pub(crate) out_rows: TensorMut<'a, Cuda>,
    pub(crate) out_weights: Option<TensorMut<'a, Cuda>>,
    pub(crate) out_scales: Option<TensorMut<'a, Cuda>>,
}

/// Rows of slots to return.
#[derive(Debug)]
pub(crate) struct LowLatencyCombine<'a> {
    /// `[N, H]`.
    pub(crate) rows: TensorRef<'a, Cuda>,
    /// `[T, H]`.
    pub(crate) out: TensorMut<'a, Cuda>,
    pub(crate) maps: &'a ZoneMaps<Cuda>,
    pub(crate) top_k: usize,
}

impl Cuda {
    /// Brings a record of each rank to all, into `out`, `[R, bytes]`, and in place of those of ranks that do not come within
    /// the patience one without tokens.
    ///
    /// # Safety
    /// As [`Cuda::low_latency_dispatch`]; records are as long on all ranks, of a multiple of 4 bytes.
    pub(crate) unsafe fn low_latency_exchange(
        &self,
        peers: &LowLatencyPeers<'_>,
        layer: u32,
        own: TensorRef<'_, Self>,
        out: TensorMut<'_, Self>,
    ) -> Result<()> {
        let call = peers.peers.call;
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(call))?.nvlink;
        let bytes = own.count() * own.dtype().size();
        Error::check_shape(call, "records", &[peers.peers.words.len(), bytes], out.dims())?;
        peers.check_room(packets(bytes))?;
        let p = params::LowLatencyExchangeParams {
            call: peers.params(self)?,
            layer: i64::from(layer),
            source: own.data().ptr,
            bytes: bytes as i64,
            out: out.into_data().ptr,
        };
        let grid = Grid::new(1, params::NVLINK_THREADS);
        // SAFETY: the caller's promise.
        unsafe { self.launch(call, &kernels.low_latency_exchange, grid, &p) }
    }

    /// Ranks that this rank's calls have begun to go on without since this was last asked, a bit each, from its control
    /// words. Waits for the device.
    ///
    /// # Errors
    /// A driver's error; a capture.
    pub(crate) fn take_late_ranks(&self, call: &'static str, control: DeviceMut<'_>) -> Result<u64> {
        let (at, mut late) = (control.ptr + 8 * params::LOW_LATENCY_LATE as u64, [0; 8]);
        self.read_bytes(call, at, &mut late)?;
        if late != [0; 8] {
            self.write_bytes(call, at, &[0; 8])?;
        }
        Ok(u64::from_ne_bytes(late))
    }

    /// Sends tokens to the ranks that keep a choice of theirs; ends when all of theirs have come.
    ///
    /// # Safety
    /// `peers` tells of memory that every rank has for this group alone, with two banks of areas for all ranks; all ranks
    /// make the same calls.
    pub(crate) unsafe fn low_latency_dispatch(
        &self,
        peers: &LowLatencyPeers<'_>,
        sent: LowLatencyDispatch<'_>,
    ) -> Result<()> {
        let call = peers.peers.call;
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(call))?.nvlink;
        let given = [Some(&sent.tokens), sent.weights.as_ref(), sent.scales.as_ref()];
        let row: usize = given.into_iter().flatten().map(|t| packets(t.row_bytes())).sum();
        let (tokens, max_tokens) = (sent.tokens.rows(), sent.maps.zone_rows);
        peers.check_room(row * max_tokens)?;
        let mutable = |t: Option<TensorMut<'_, Self>>| t.map_or(0, |t| t.into_data().ptr);
        let p = params::LowLatencyDispatchParams {
            call: peers.params(self)?,
            rows: part(&Some(sent.tokens), 0),
            weights: part(&sent.weights, 0),
            scales: part(&sent.scales, 0),
            out_rows: sent.out_rows.into_data().ptr,
            out_weights: mutable(sent.out_weights),
            out_scales: mutable(sent.out_scales),
            token_rows: sent.maps.token_rows.view().data().ptr,
            row_tokens: sent.maps.row_tokens.view().data().ptr,
            arrived: sent.maps.arrived.view().data().ptr,
            tokens: tokens as i64,
            max_tokens: max_tokens as i64,
        };
        // As much may come from each rank, however few tokens this one has.
        let grid = peers.grid(self, row * max_tokens);
        // SAFETY: the maps have the sizes that `params.h` states; the rest is the caller's promise.
        unsafe { self.launch(call, &kernels.low_latency_dispatch, grid, &p) }
    }

    /// Returns rows of slots to their tokens' ranks, and adds those of this rank's tokens.
    ///
    /// # Safety
    /// As [`Cuda::low_latency_dispatch`]; rows are of a type that can be added.
    pub(crate) unsafe fn low_latency_combine(
        &self,
        peers: &LowLatencyPeers<'_>,
        back: LowLatencyCombine<'_>,
    ) -> Result<()> {
        let call = peers.peers.call;
        let kernels = &self.kernels().sm90.as_ref().ok_or_else(|| absent(call))?.nvlink;
        let (dtype, tokens) = (back.rows.dtype(), back.out.rows());
        let width = back.rows.row_bytes() / dtype.size();
        let row = sum_packets(dtype, width);
        peers.check_room(row * back.maps.zone_rows)?;
        let p = params::LowLatencyCombineParams {
            call: peers.params(self)?,
            rows: back.rows.data().ptr,
            out: back.out.into_data().ptr,
            width: width as i64,
            slots: back.rows.rows() as i64,
            token_rows: back.maps.token_rows.view().data().ptr,
            row_slots: back.maps.row_slots.view().data().ptr,
            arrived: back.maps.arrived.view().data().ptr,
            tokens: tokens as i64,
            max_tokens: back.maps.zone_rows as i64,
            top_k: back.top_k as i64,
        };
        // Of the rows that go back, which may be as many for each rank.
        let grid = peers.grid(self, row * back.maps.zone_rows);
        // SAFETY: as in `low_latency_dispatch`.
        unsafe { self.launch(call, kernels.low_latency_combine.of(dtype), grid, &p) }
    }

    /// Notes the last call that this rank has made, by its control words, as the last of each of these banks, which are new.
    /// Waits for the device.
    ///
    /// # Errors
    /// A driver's error; memory that has no room for them.
    pub(crate) fn write_last_call(
        &self,
        call: &'static str,
        control: DeviceMut<'_>,
        banks: PacketBanks<'_>,
    ) -> Result<()> {
        let PacketBanks { memory, rank, ranks, area } = banks;
        Error::check_shape(call, "banks", &[2 * ranks * area * PACKET_BYTES], &[Self::len_mut(&memory)])?;
        let mut last = [0; 8];
        self.read_bytes(call, control.ptr + 8 * params::LOW_LATENCY_EPOCH as u64, &mut last)?;
        // Where the rank would receive from itself.
        let own = [rank, ranks + rank].map(|at| memory.ptr + (at * area * PACKET_BYTES) as u64);
        own.into_iter().try_for_each(|at| self.write_bytes(call, at, &last))
    }

    /// Fills banks of so many packets, which are zeros, with packets that have no tag on a device that poisons its buffers.
    ///
    /// # Errors
    /// A driver's error.
    pub(crate) fn poison_banks(&self, call: &'static str, banks: DeviceMut<'_>, packets: usize) -> Result<()> {
        if !self.poisons() {
            return Ok(());
        }
        let mut packet = [0xff; PACKET_BYTES];
        packet[PAYLOAD..].fill(0);
        self.write_bytes(call, banks.ptr, &packet.repeat(packets))
    }
}

#[cfg(test)]
mod tests;
