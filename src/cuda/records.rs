//! Prepare of several ranks on the GPU (`kernels/records.cu`, `messages.cu`): this rank's record, and the plan from all
//! ranks'.

use std::sync::Arc;

use crate::dtype::DType;
use crate::ep::record::{self, Record, Sizes, Status, WORDS};
use crate::ep::{
    Capacity, DispatchSpec, Gathered, Known, Messages, Overflow, Plan, PlanRecords, RecordIds, Stats, Transport, heard,
};
use crate::error::{Error, Result};
use crate::kernels::Zones;
use crate::lazy::Lazy;
use crate::tensor::Tensor;

use super::device::Cuda;
use super::launch::Grid;
use super::params;
use super::plan::{CHUNKS, COUNTS};

// `kernels/common/records.cuh` has the same numbers.
const _: () = assert!(WORDS == 24 && record::HEADER == 512 && heard::WORDS == 8);
const _: () = assert!(record::FIRST_FIELD == 9 && record::PENDING == 18);

const CALL: &str = "prepare";
/// Most blocks that write a record.
const BLOCKS: usize = 256;

/// Whether blocks have room to count so many experts' choices; records of these specs carry no weights.
pub(super) fn plans(spec: &DispatchSpec, experts: usize) -> bool {
    !record::needs_weights(spec) && experts <= COUNTS
}

fn sizes(max_tokens: usize, spec: &DispatchSpec) -> Sizes {
    Sizes { max_tokens, top_k: spec.top_k, weights: false }
}

pub(super) fn record(device: &Cuda, call: RecordIds<'_, Cuda>) -> Result<()> {
    let RecordIds { rank, num_experts, max_tokens, spec, ids, heard, out } = call;
    let wide = match ids.dtype() {
        DType::I64 => 1,
        DType::I32 => 0,
        other => return Err(Error::invalid(CALL, "tensor topk_ids", "i32 or i64", other)),
    };
    let sizes = sizes(max_tokens, spec);
    Error::check_shape(CALL, "record", &[sizes.bytes()], out.dims())?;
    Error::check_shape(CALL, "topk_ids", &[ids.rows().min(max_tokens), spec.top_k], ids.dims())?;
    check_heard(heard.as_ref().dims(), 1)?;
    let own = Record {
        fields: record::fields(spec),
        backward: spec.backward,
        tokens: ids.rows(),
        ..Record::failed(Status::Ready)
    };
    let mut header = [0; WORDS];
    let bytes = own.encode(Sizes { max_tokens: 0, ..sizes });
    header.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, word)| *to = u64::from_le_bytes(*word));
    let p = params::RecordIds {
        ids: ids.data().ptr,
        wide,
        choices: ids.count() as i64,
        top_k: spec.top_k as i64,
        experts: num_experts as i64,
        rank: rank as i64,
        record: out.into_data().ptr,
        heard: heard.into_data().ptr,
        header,
    };
    let blocks = ids.count().div_ceil(256).clamp(1, BLOCKS);
    // SAFETY: the record has room for a header and `max_tokens` tokens' ids, of which there are no more; `heard` has its
    // words; the kernel checks the ids.
    unsafe { device.launch(CALL, "record_ids", Grid::new(blocks, 256), &p) }
}

fn check_heard(dims: &[usize], ranks: usize) -> Result<()> {
    match dims {
        [bytes] if *bytes >= heard::bytes(ranks) => Ok(()),
        dims => Err(Error::invalid(CALL, "heard", format!("{} bytes", heard::bytes(ranks)), format!("{dims:?}"))),
    }
}

/// Where statistics lie among the numbers that the kernels leave.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    experts: usize,
    locals: usize,
    ranks: usize,
}

impl Numbers {
    fn tail(self) -> usize {
        self.experts + self.locals
    }

    /// Where each rank's own begin.
    fn ranks_at(self) -> usize {
        self.tail() + 5
    }

    /// Where counts of messages begin: choices from each rank, their tokens, choices to each rank, their tokens.
    fn messages_at(self) -> usize {
        self.ranks_at() + 3 * self.ranks
    }

    fn count(self) -> usize {
        self.messages_at() + 4 * self.ranks
    }

    fn stats(self, values: &[usize]) -> Stats {
        Stats {
            expert_load: values[..self.experts].to_vec(),
            padded_counts: values[self.experts..self.tail()].to_vec(),
            needed_rows: values[self.tail()],
            dropped: values[self.tail() + 1],
        }
    }

    fn messages(self, values: &[usize]) -> [Vec<usize>; 4] {
        let of = |i: usize| values[self.messages_at() + i * self.ranks..][..self.ranks].to_vec();
        [of(0), of(1), of(2), of(3)]
    }

    /// What the records say; the number of rows stands in the statistics.
    fn known(self, values: &[usize]) -> Known {
        let of = |i: usize| values[self.ranks_at() + i..].iter().step_by(3).take(self.ranks).copied();
        let [troubled, needed, short] = [2, 3, 4].map(|i| values[self.tail() + i]);
        let ranks = |i: usize, value: usize| of(i).enumerate().filter(move |(_, v)| *v == value).map(|(r, _)| r);
        Known {
            tokens: of(0).collect(),
            absent: ranks(1, 0).collect(),
            pending: ranks(2, 1).collect(),
            troubled: troubled != 0,
            overflow: (needed > 0).then_some((short, needed)),
        }
    }

    fn read(self, device: &Cuda, from: &Tensor<Cuda>) -> Result<Vec<usize>> {
        let mut bytes = vec![0; self.count() * 8];
        // Not `download`: what this rank alone has met must not keep it from what all ranks do next.
        device.read_bytes(CALL, from.view().data().ptr, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| usize::try_from(i64::from_ne_bytes(*b)).unwrap_or(0)).collect())
    }
}

pub(super) fn plan(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<Gathered<Cuda>> {
    let waits = call.waits();
    let PlanRecords { rank, ranks, num_experts: experts, max_tokens, tokens, spec, transport, records, heard } = call;
    let (sizes, k) = (sizes(max_tokens, spec), spec.top_k);
    Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
    check_heard(heard.as_ref().dims(), ranks)?;
    let numbers = Numbers { experts, locals: experts / ranks, ranks };
    let choices = ranks * max_tokens * k;
    let chunk = choices.div_ceil(CHUNKS).next_multiple_of(32).max(32);
    let chunks = choices.div_ceil(chunk);
    let of = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
    let (mut before, mut scratch) = (of(DType::I32, &[experts, chunks])?, of(DType::I64, &[3, experts])?);
    let (mut offsets, mut counts) = (of(DType::I64, &[numbers.locals])?, of(DType::I64, &[numbers.locals])?);
    let (mut stats, mut kept_ids) = (of(DType::I64, &[numbers.count()])?, of(DType::I32, &[tokens, k])?);
    let at = |t: &mut Tensor<Cuda>| t.view_mut().into_data().ptr;
    let mut p = params::Records {
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
        asked: i64::from(waits),
        room: max_tokens as i64,
        chunk: chunk as i64,
        chunks: chunks as i64,
        before: at(&mut before),
        scratch: at(&mut scratch),
        offsets: at(&mut offsets),
        counts: at(&mut counts),
        stats: at(&mut stats),
        kept: at(&mut kept_ids),
        heard: heard.into_data().ptr,
        fault: device.inner.status,
        ..Default::default()
    };
    if let Capacity::Static(rows) = spec.capacity {
        (p.rows, p.may_drop) = (rows as i64, i64::from(spec.overflow == Overflow::Drop));
    }
    let walk = Grid { shared: (experts * 4) as u32, ..Grid::new(chunks, 32) };
    // SAFETY: every tensor has the size that `params.h` states for it; the kernels check what the records hold.
    unsafe {
        device.launch(CALL, "records_count", walk, &p)?;
        device.launch(CALL, "records_scan", Grid::new(experts.div_ceil(8), 256), &p)?;
        device.launch(CALL, "records_zones", Grid::new(1, 1024), &p)?;
    }
    let sends = transport == Transport::UniqueRows;
    let messages =
        if sends { Some(Crossing::new(device, &mut p, (choices, walk), &mut stats, numbers)?) } else { None };
    let (mut rows, mut room, mut known) = (p.rows as usize, max_tokens, None);
    let mut values = Vec::new();
    if waits {
        values = numbers.read(device, &stats)?;
        let all = numbers.known(&values);
        room = all.tokens.iter().copied().max().unwrap_or(0);
        known = Some(all);
    }
    if spec.capacity == Capacity::Eager {
        rows = values[numbers.tail()];
        if rows > i32::MAX as usize {
            return Err(Error::invalid(CALL, "rows", format!("at most {}", i32::MAX), rows));
        }
    }
    let (mut row_map, mut weight_map) = (of(DType::I32, &[rows])?, of(DType::I32, &[rows])?);
    let mut return_map = of(DType::I32, &[if sends { tokens } else { ranks * room }, k])?;
    for map in [&mut row_map, &mut weight_map] {
        device.fill_bytes(CALL, map.view_mut().into_data(), 0xff)?;
    }
    (p.rows, p.room) = (rows as i64, room as i64);
    (p.row_map, p.weight_map, p.return_map) = (at(&mut row_map), at(&mut weight_map), at(&mut return_map));
    let messages = match messages {
        Some(crossing) => Some(crossing.number(device, &mut p, numbers.messages(&values))?),
        None => {
            // SAFETY: as above, for this many rows.
            unsafe { device.launch(CALL, "records_slots", walk, &p) }?;
            None
        }
    };
    device.report(CALL)?;
    let (total_tokens, first_token) = match &known {
        Some(known) => (known.tokens.iter().sum(), known.tokens[..rank].iter().sum()),
        None => (tokens, 0),
    };
    let plan = Plan {
        tokens,
        total_tokens,
        first_token,
        zones: Arc::new(Zones { offsets, counts, rows }),
        stats: read_later(device, stats, numbers),
        kept_ids,
        row_map,
        weight_map,
        return_map,
        messages,
    };
    Ok(Gathered { plan, room, known })
}

/// Messages between two ranks, counted but not yet numbered. Holds what the kernels leave each other.
struct Crossing {
    _places: Tensor<Cuda>,
    _counts: Tensor<Cuda>,
    walk: Grid,
}

impl Crossing {
    /// Settles where choices are kept and counts the messages, behind the other numbers in `stats`.
    fn new(
        device: &Cuda,
        p: &mut params::Records,
        (choices, walk): (usize, Grid),
        stats: &mut Tensor<Cuda>,
        numbers: Numbers,
    ) -> Result<Self> {
        let kinds = 4 * numbers.ranks;
        let mut places = Tensor::empty(device, DType::I32, &[choices, 2])?;
        let mut counts = Tensor::empty(device, DType::I32, &[kinds, p.chunks as usize])?;
        (p.places, p.crossing) = (places.view_mut().into_data().ptr, counts.view_mut().into_data().ptr);
        p.totals = stats.view_mut().into_data().ptr + 8 * numbers.messages_at() as u64;
        let few = Grid { shared: (kinds * 4) as u32, ..walk };
        // SAFETY: every tensor has the size that `params.h` states for it; the totals lie inside `stats`.
        unsafe {
            device.launch(CALL, "messages_places", walk, p)?;
            device.launch(CALL, "messages_count", few, p)?;
            device.launch(CALL, "messages_scan", Grid::new(kinds.div_ceil(8), 256), p)?;
        }
        Ok(Self { _places: places, _counts: counts, walk: few })
    }

    /// Writes the maps.
    fn number(self, device: &Cuda, p: &mut params::Records, counts: [Vec<usize>; 4]) -> Result<Messages<Cuda>> {
        let [slots_from, recv_rows, slots_at, send_rows] = counts;
        let list = |counts: &[usize]| Tensor::empty(device, DType::I32, &[counts.iter().sum()]);
        let mut return_slots = list(&slots_from)?;
        let (mut send_choices, mut send_tokens) = (list(&slots_at)?, list(&send_rows)?);
        p.return_slots = return_slots.view_mut().into_data().ptr;
        p.send_choices = send_choices.view_mut().into_data().ptr;
        p.send_tokens = send_tokens.view_mut().into_data().ptr;
        // SAFETY: as above; the lists have as many entries as have been counted, which the kernel counts again.
        unsafe { device.launch(CALL, "messages_number", self.walk, p) }?;
        Ok(Messages { send_tokens, send_choices, return_slots, send_rows, recv_rows, slots_from, slots_at })
    }
}

fn read_later(device: &Cuda, stats: Tensor<Cuda>, numbers: Numbers) -> Lazy<Stats> {
    let device = device.clone();
    Lazy::later(move || {
        let values = numbers.read(&device, &stats)?;
        device.faults(CALL)?;
        Ok(numbers.stats(&values))
    })
}
