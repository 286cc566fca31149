//! Sizes of packets; the exchange of records with a rank that the test plays.

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

#[test]
fn blocks_keep_to_sms_that_are_bounded() {
    let blocks_of_sm = params::LOW_LATENCY_BLOCKS as usize;
    assert_eq!(most_blocks(132, false), 132 * blocks_of_sm);
    assert_eq!([most_blocks(16, true), most_blocks(1, true)], [16, 1]);
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

    /// As if the first rank had made so many calls over other memory.
    fn go_on(&self, calls: u32) {
        let epoch = self.read(0, params::LOW_LATENCY_EPOCH) + u64::from(calls);
        self.write(self.word(0, params::LOW_LATENCY_EPOCH), &epoch.to_le_bytes());
    }

    /// What the first rank has of the second in the bank of a call.
    fn read_area(&self, epoch: u32) -> Vec<u8> {
        let mut area = vec![0; AREA * PACKET_BYTES];
        self.cuda.read_bytes(CALL, self.area(epoch), &mut area).expect("a bank");
        area
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
        self.area_of(0, epoch)
    }

    /// Where a rank's packets of the other begin.
    fn area_of(&self, rank: usize, epoch: u32) -> u64 {
        let bank = (epoch as usize % 2 * RANKS + (1 - rank)) * AREA * PACKET_BYTES;
        self.word(rank, 0) + (LOW_LATENCY_CONTROL_BYTES + bank) as u64
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

/// A rank that finds the other past its call, where the tag of the last call in which it has sent is about to come again, sends
/// it nothing, and that call stays the last, however many it makes by itself.
#[test]
fn a_rank_sends_nothing_to_one_that_is_past_its_call() {
    let Some(ranks) = Ranks::new() else { return };
    let [own, other] = [record(0), record(1)];
    ranks.send_header(1);
    (0..AREA).for_each(|i| ranks.send_packet(1, &other, i));
    assert!(ranks.exchange(&own)[1] == other);
    ranks.send_header(60_000);
    for bank in 0..2 {
        ranks.write(ranks.area_of(1, bank), &[0; AREA * PACKET_BYTES]);
    }
    for call in 2..8 {
        assert!(ranks.exchange(&own)[1] == without_tokens(&own), "call {call}");
        assert_eq!(ranks.read(0, params::LOW_LATENCY_SENT + 1), 1, "call {call}");
        for bank in 0..2 {
            let mut sent = vec![0; AREA * PACKET_BYTES];
            ranks.cuda.read_bytes(CALL, ranks.area_of(1, bank), &mut sent).expect("a bank");
            assert!(sent.iter().all(|byte| *byte == 0), "call {call}");
        }
    }
    assert_eq!(ranks.read(0, params::LOW_LATENCY_LATE), 2, "told that it goes on alone");
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

/// Packets that nobody has used are gone before their tag comes round, those of a rank that is absent among them; also where
/// calls over other memory come between.
#[test]
fn banks_are_cleared_before_tags_come_again() {
    // Epochs in which both banks are cleared: `SWEEPS` of each parity.
    const EPOCHS: u32 = 2 * 4096;
    for period in [1, 3, 4] {
        let Some(ranks) = Ranks::new() else { return };
        ranks.exchange(&record(0));
        for bank in 0..2 {
            ranks.write(ranks.area(bank), &[0x5a; AREA * PACKET_BYTES]);
        }
        let mut used = [false; 2];
        for _call in 0..EPOCHS.div_ceil(period) + 1 {
            ranks.go_on(period - 1);
            ranks.exchange(&record(0));
            used[ranks.read(0, params::LOW_LATENCY_EPOCH) as usize % 2] = true;
        }
        for bank in (0..2).filter(|bank| used[*bank as usize]) {
            let left = ranks.read_area(bank);
            assert!(left.iter().all(|byte| *byte == 0), "period {period}, bank {bank}");
        }
    }
}

/// A record that has lain in a bank until its tag comes again is not taken for that of the call: its rank counts on nobody,
/// says so, and has cleared the bank behind that.
#[test]
fn a_bank_that_has_rested_is_cleared_first() {
    let Some(ranks) = Ranks::new() else { return };
    let [own, other] = [record(0), record(1)];
    for epoch in 1..3 {
        ranks.send_header(epoch);
        (0..AREA).for_each(|i| ranks.send_packet(epoch, &other, i));
        assert!(ranks.exchange(&own)[1] == other, "call {epoch}");
    }
    // Up to the calls with the tags of these, one of each bank.
    ranks.go_on(0x10000 - 2);
    for epoch in 0x10001..0x10003 {
        ranks.send_header(epoch);
        assert!(ranks.exchange(&own)[1] == without_tokens(&own), "call {epoch}: its record has not come");
        let (said, with) = ranks.read_header(1, epoch);
        assert_eq!((said, with & 3), (epoch, 1), "it counts on itself alone");
        assert!(ranks.read_area(epoch).iter().all(|byte| *byte == 0), "call {epoch}");
    }
    let told = [params::LOW_LATENCY_ABSENT, params::LOW_LATENCY_LATE].map(|word| ranks.read(0, word));
    assert_eq!(told, [2, 2], "it has begun to go on without the other");
    // Both meet again.
    for epoch in 0x10003..0x10005 {
        ranks.send_header(epoch);
        (0..AREA).for_each(|i| ranks.send_packet(epoch, &other, i));
        assert!(ranks.exchange(&own)[1] == other, "call {epoch}");
        assert_eq!(ranks.read(0, params::LOW_LATENCY_ABSENT), 0);
    }
}
