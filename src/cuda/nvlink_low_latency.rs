//! Few rows between the GPUs of a host by packets over NVLink (`kernels/sm90_nvlink_low_latency.cu`; the protocol is
//! described in `common/nvlink_low_latency.cuh`).

use std::time::Duration;

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

    /// Blocks for so many packets of a rank, all of which run at once.
    fn grid(&self, device: &Cuda, packets: usize) -> Grid {
        let blocks_of_sm = params::LOW_LATENCY_BLOCKS as usize;
        let most = self.peers.blocks(device, usize::MAX) * blocks_of_sm;
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
        let grid = peers.grid(self, row * tokens.max(max_tokens.min(tokens * peers.peers.words.len())));
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
        let grid = peers.grid(self, row * tokens);
        // SAFETY: as in `low_latency_dispatch`.
        unsafe { self.launch(call, kernels.low_latency_combine.of(dtype), grid, &p) }
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
mod tests {
    use super::*;
    use crate::cuda::nvlink::control_bytes;
    use crate::cuda::peers::HostWords;
    use crate::kernels::{Kernels, Origin};
    use crate::plan::routing_record::{HEADER, PENDING};
    use crate::tensor::Tensor;

    #[test]
    fn rows_fit_their_packets() {
        assert_eq!([packets(14336), packets(14), packets(15), packets(0)], [1024, 1, 2, 0]);
        assert_eq!([sum_packets(DType::BF16, 7168), sum_packets(DType::F32, 7)], [1024, 3]);
        for (dtype, width) in [(DType::BF16, 7168), (DType::F16, 9), (DType::F32, 7), (DType::F32, 4096)] {
            assert!(sum_packets(dtype, width) <= most_sum_packets(width * dtype.size()), "{dtype} {width}");
        }
    }

    const CALL: &str = "test";
    const RANKS: usize = 2;
    const LAYER: u32 = 5;
    /// Bytes of a record: a header, and ids.
    const RECORD: usize = HEADER + 400;
    const AREA: usize = RECORD.div_ceil(PAYLOAD);
    /// Long enough for packets that are there.
    const PATIENCE: Duration = Duration::from_millis(20);

    /// The memory of two ranks on one GPU, where the test does what the second would.
    struct Ranks {
        cuda: Cuda,
        memory: [Tensor<Cuda>; RANKS],
        host: HostWords,
        control: usize,
    }

    impl Ranks {
        /// `None`: there is no GPU that has the kernels.
        fn new() -> Option<Self> {
            let Ok(cuda) = Cuda::new(0) else {
                println!("skipped: no GPU");
                return None;
            };
            if !cuda.has_nvlink_kernels() {
                println!("skipped: no GPU of compute capability 9.0");
                return None;
            }
            let control = control_bytes(RANKS, 1).next_multiple_of(PACKET_BYTES);
            let bytes = control + LOW_LATENCY_CONTROL_BYTES + 2 * RANKS * AREA * PACKET_BYTES;
            let memory = [0; RANKS].map(|_| Tensor::zeros(&cuda, DType::U8, &[bytes]).expect("room"));
            let host = HostWords::new(&cuda, CALL).expect("words");
            Some(Self { cuda, memory, host, control })
        }

        /// Where a word of low latency lies in a rank's memory.
        fn word(&self, rank: usize, word: params::LowLatencyWord) -> u64 {
            self.memory[rank].view().data().address() + (self.control + 8 * word as usize) as u64
        }

        fn read(&self, rank: usize, word: params::LowLatencyWord) -> u64 {
            let mut bytes = [0; 8];
            self.cuda.read_bytes(CALL, self.word(rank, word), &mut bytes).expect("a word");
            u64::from_le_bytes(bytes)
        }

        fn write(&self, address: u64, bytes: &[u8]) {
            self.cuda.write_bytes(CALL, address, bytes).expect("written");
        }

        /// Where a rank has the header of the other.
        fn header(&self, rank: usize, epoch: u32) -> u64 {
            let at = epoch as usize % 2 * params::NVLINK_RANKS as usize + (1 - rank);
            self.word(rank, params::LOW_LATENCY_HEADERS) + (at * PACKET_BYTES) as u64
        }

        /// The epoch and the ranks that are gone on with, of the header that a rank has of the other.
        fn read_header(&self, rank: usize, epoch: u32) -> (u32, u32) {
            let mut bytes = [0; 8];
            self.cuda.read_bytes(CALL, self.header(rank, epoch), &mut bytes).expect("a header");
            let word = |at| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
            (word(0), word(4))
        }

        /// Where the first rank's packets of the second begin.
        fn area(&self, epoch: u32) -> u64 {
            let bank = (epoch as usize % 2 * RANKS + 1) * AREA * PACKET_BYTES;
            self.word(0, 0) + (LOW_LATENCY_CONTROL_BYTES + bank) as u64
        }

        /// The second rank's packet of this number of a record.
        fn send_packet(&self, epoch: u32, record: &[u8], number: usize) {
            let payload = &record[number * PAYLOAD..RECORD.min((number + 1) * PAYLOAD)];
            let mut packet = [0; PACKET_BYTES];
            packet[..payload.len()].copy_from_slice(payload);
            packet[PAYLOAD..].copy_from_slice(&(epoch as u16).to_le_bytes());
            self.write(self.area(epoch) + (number * PACKET_BYTES) as u64, &packet);
        }

        /// The second rank's header of a call, in which it counts on both.
        fn send_header(&self, epoch: u32) {
            let words = [epoch, 3, LAYER + 1, 0];
            self.write(self.header(0, epoch), &words.map(u32::to_le_bytes).concat());
        }

        /// The first rank's exchange of this record: both ranks' records as it has them.
        fn exchange(&self, own: &[u8]) -> [Vec<u8>; RANKS] {
            let addresses = [0, 1].map(|rank: usize| self.memory[rank].view().data().address());
            let peers = PeerCall {
                call: CALL,
                origin: Origin { rank: 0, layer: LAYER },
                words: &addresses,
                zones: &addresses,
                zone: self.control + LOW_LATENCY_CONTROL_BYTES,
                timeout: PATIENCE,
                host: &self.host,
                max_sms: 1,
                overlapped: false,
            };
            let peers = LowLatencyPeers { peers, control: self.control, area: AREA, patience: Some(PATIENCE) };
            let mut sent = Tensor::zeros(&self.cuda, DType::U8, &[RECORD]).expect("room");
            self.cuda.upload(own, sent.view_mut()).expect("a record");
            let mut all = Tensor::zeros(&self.cuda, DType::U8, &[RANKS, RECORD]).expect("room");
            // SAFETY: both ranks' memory has the words and two banks, and nobody else uses it.
            unsafe { self.cuda.low_latency_exchange(&peers, LAYER, sent.view(), all.view_mut()) }.expect("an exchange");
            let all = self.cuda.download(all.view()).expect("records");
            [0, 1].map(|rank| all[rank * RECORD..][..RECORD].to_vec())
        }
    }

    fn record(of: usize) -> Vec<u8> {
        (0..RECORD).map(|i| (31 * of + 7 * i) as u8 | 1).collect()
    }

    /// A rank's own record as that of a rank without tokens.
    fn without_tokens(own: &[u8]) -> Vec<u8> {
        let mut record = own.to_vec();
        // Its kind, its tokens, and whether it holds an error.
        for word in [0, 1, PENDING] {
            record[8 * word..][..8].fill(0);
        }
        record[HEADER..].fill(0xff);
        record
    }

    /// A record that comes whole is taken; one of which a packet is missing, wherever that is, is none, and its rank is late.
    #[test]
    fn a_record_that_comes_in_part_is_none() {
        let Some(ranks) = Ranks::new() else { return };
        let [own, other] = [record(0), record(1)];
        let mut epoch = 0;
        for missing in [None, Some(0), Some(1), Some(AREA / 2), Some(AREA - 1), None] {
            // As after a meeting: the second rank counts on the first, and is counted on.
            ranks.write(ranks.word(0, params::LOW_LATENCY_ABSENT), &[0; 8]);
            epoch += 1;
            ranks.send_header(epoch);
            (0..AREA).filter(|number| Some(*number) != missing).for_each(|i| ranks.send_packet(epoch, &other, i));
            let [mine, theirs] = ranks.exchange(&own);
            let expected = if missing.is_some() { without_tokens(&own) } else { other.clone() };
            assert!(mine == own && theirs == expected, "without packet {missing:?}");
            let late = u64::from(missing.is_some()) << 1;
            let (absent, told) = (params::LOW_LATENCY_ABSENT, params::LOW_LATENCY_LATE);
            assert_eq!([absent, told].map(|word| ranks.read(0, word)), [late; 2], "without packet {missing:?}");
            ranks.write(ranks.word(0, told), &[0; 8]);
        }
    }

    /// A rank that never comes again is not taken for one that is ahead, however many calls are made without it: its epoch
    /// stays, and those of the others come round.
    #[test]
    fn a_rank_that_is_gone_does_not_come_to_be_ahead() {
        let Some(ranks) = Ranks::new() else { return };
        let own = record(0);
        ranks.send_header(1);
        (0..AREA).for_each(|i| ranks.send_packet(1, &record(1), i));
        ranks.exchange(&own);
        // Now it is late, once.
        ranks.exchange(&own);
        assert_eq!(ranks.read(0, params::LOW_LATENCY_LATE), 2);
        ranks.write(ranks.word(0, params::LOW_LATENCY_LATE), &[0; 8]);
        for _quarter in 0..9 {
            let ended = (ranks.read(0, params::LOW_LATENCY_EPOCH) as u32).wrapping_add(1 << 30);
            ranks.write(ranks.word(0, params::LOW_LATENCY_EPOCH), &u64::from(ended).to_le_bytes());
            for _call in 0..3 {
                let [_, theirs] = ranks.exchange(&own);
                assert!(theirs == without_tokens(&own));
                let epoch = ranks.read(0, params::LOW_LATENCY_EPOCH) as u32;
                let (said, with) = ranks.read_header(1, epoch);
                assert_eq!((said, with & 3), (epoch, 1), "the first rank goes on alone");
            }
        }
        assert_eq!(ranks.read(0, params::LOW_LATENCY_LATE), 0, "told once");
    }

    /// Packets that nobody has used are gone before their tag comes round, those of a rank that is absent among them.
    #[test]
    fn banks_are_cleared_before_tags_come_again() {
        // Calls in which both banks are cleared: `SWEEPS` of each.
        const CALLS: u32 = 2 * 4096;
        let Some(ranks) = Ranks::new() else { return };
        ranks.exchange(&record(0));
        for bank in 0..2 {
            ranks.write(ranks.area(bank), &[0x5a; AREA * PACKET_BYTES]);
        }
        for _call in 0..CALLS {
            ranks.exchange(&record(0));
        }
        for bank in 0..2 {
            let mut left = vec![0; AREA * PACKET_BYTES];
            ranks.cuda.read_bytes(CALL, ranks.area(bank), &mut left).expect("a bank");
            assert!(left.iter().all(|byte| *byte == 0), "bank {bank}");
        }
    }
}
