//! The plan from all ranks' records.

use std::sync::Arc;

use crate::cuda::device::Cuda;
use crate::cuda::launch::Grid;
use crate::cuda::params;
use crate::cuda::plan::{CHUNKS, check_number};
use crate::cuda::zones::at;
use crate::dtype::DType;
use crate::ep::{Capacity, Gathered, Known, Messages, Overflow, Plan, PlanRecords, Transport};
use crate::error::{Error, Result};
use crate::kernels::Zones;
use crate::tensor::Tensor;

use super::crossing::Crossing;
use super::numbers::{Numbers, read_later};
use super::{CALL, check_heard, sizes};

pub(in crate::cuda) fn plan(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<Gathered<Cuda>> {
    let of = Of { rank: call.rank, tokens: call.tokens, sends: call.transport == Transport::UniqueRows };
    let (waits, open, most) = (call.waits(), call.spec.capacity == Capacity::Eager, call.max_tokens);
    let mut counting = Counting::new(device, call)?;
    counting.zones(device)?;
    let crossing = if of.sends { Some(counting.crossing(device)?) } else { None };
    let mut settled = Settled { rows: counting.p.rows as usize, room: most, known: None, values: Vec::new() };
    if waits {
        settled.read(device, &counting, open)?;
    }
    let maps = counting.maps(device, &of, &settled, crossing)?;
    device.report(CALL)?;
    Ok(counting.gathered(device, &of, settled, maps))
}

/// Of which rank the plan is.
struct Of {
    rank: usize,
    tokens: usize,
    /// It sends rows, and so has messages.
    sends: bool,
}

/// A plan in the making: what the kernels are told, and what they leave.
struct Counting {
    p: params::Records,
    numbers: Numbers,
    /// Blocks that walk over all choices.
    walk: Grid,
    choices: usize,
    offsets: Tensor<Cuda>,
    counts: Tensor<Cuda>,
    stats: Tensor<Cuda>,
    kept_ids: Tensor<Cuda>,
    // What the kernels leave each other, until the last of them.
    _before: Tensor<Cuda>,
    _scratch: Tensor<Cuda>,
}

/// Sizes that the host may have waited for.
struct Settled {
    rows: usize,
    room: usize,
    known: Option<Known>,
    values: Vec<usize>,
}

/// What the rows' movement follows.
struct Maps {
    row: Tensor<Cuda>,
    weight: Tensor<Cuda>,
    ret: Tensor<Cuda>,
    messages: Option<Messages<Cuda>>,
}

impl Counting {
    fn new(device: &Cuda, call: PlanRecords<'_, Cuda>) -> Result<Self> {
        let asked = i64::from(call.waits());
        let PlanRecords { rank, ranks, num_experts: experts, max_tokens, tokens, spec, records, heard, .. } = call;
        let (sizes, k) = (sizes(max_tokens, spec), spec.top_k);
        Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
        check_heard(heard.as_ref().dims(), ranks)?;
        let numbers = Numbers { experts, locals: experts / ranks, ranks };
        let choices = max_tokens.checked_mul(k).and_then(|n| n.checked_mul(ranks));
        let choices = check_number(CALL, "choices of all ranks", choices)?;
        let chunk = choices.div_ceil(CHUNKS).next_multiple_of(32).max(32);
        let chunks = choices.div_ceil(chunk);
        let of = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
        let (mut before, mut scratch) = (of(DType::I32, &[experts, chunks])?, of(DType::I64, &[3, experts])?);
        let (mut offsets, mut counts) = (of(DType::I64, &[numbers.locals])?, of(DType::I64, &[numbers.locals])?);
        let (mut stats, mut kept_ids) = (of(DType::I64, &[numbers.count()])?, of(DType::I32, &[tokens, k])?);
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
            asked,
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
        Ok(Self { p, numbers, walk, choices, offsets, counts, stats, kept_ids, _before: before, _scratch: scratch })
    }

    /// Counts choices, and from them zones and statistics.
    fn zones(&self, device: &Cuda) -> Result<()> {
        // SAFETY: every tensor has the size that `params.h` states for it; the kernels check what the records hold.
        unsafe {
            device.launch(CALL, "records_count", self.walk, &self.p)?;
            device.launch(CALL, "records_scan", Grid::new(self.numbers.experts.div_ceil(8), 256), &self.p)?;
            device.launch(CALL, "records_zones", Grid::new(1, 1024), &self.p)
        }
    }

    fn crossing(&mut self, device: &Cuda) -> Result<Crossing> {
        Crossing::new(device, &mut self.p, (self.choices, self.walk), &mut self.stats, self.numbers)
    }

    /// Writes the maps of a plan of these sizes.
    fn maps(&mut self, device: &Cuda, of: &Of, settled: &Settled, crossing: Option<Crossing>) -> Result<Maps> {
        let (k, p) = (self.p.top_k as usize, &mut self.p);
        let arriving = if of.sends { of.tokens } else { self.numbers.ranks * settled.room };
        let map = |dims: &[usize]| Tensor::empty(device, DType::I32, dims);
        let (mut row, mut weight) = (map(&[settled.rows])?, map(&[settled.rows])?);
        let mut ret = map(&[arriving, k])?;
        for map in [&mut row, &mut weight] {
            device.fill_bytes(CALL, map.view_mut().into_data(), 0xff)?;
        }
        (p.rows, p.room) = (settled.rows as i64, settled.room as i64);
        (p.row_map, p.weight_map, p.return_map) = (at(&mut row), at(&mut weight), at(&mut ret));
        let messages = match crossing {
            Some(crossing) => Some(crossing.number(device, p, self.numbers.messages(&settled.values))?),
            None => {
                // SAFETY: as for the zones, for this many rows.
                unsafe { device.launch(CALL, "records_slots", self.walk, p) }?;
                None
            }
        };
        Ok(Maps { row, weight, ret, messages })
    }

    fn gathered(self, device: &Cuda, of: &Of, settled: Settled, maps: Maps) -> Gathered<Cuda> {
        let Settled { rows, room, known, .. } = settled;
        let (total_tokens, first_token) = match &known {
            Some(known) => (known.tokens.iter().sum(), known.tokens[..of.rank].iter().sum()),
            None => (of.tokens, 0),
        };
        let plan = Plan {
            tokens: of.tokens,
            total_tokens,
            first_token,
            zones: Arc::new(Zones::new(self.offsets, self.counts, rows)),
            stats: read_later(device, self.stats, self.numbers),
            kept_ids: self.kept_ids,
            row_map: maps.row,
            weight_map: maps.weight,
            return_map: maps.ret,
            messages: maps.messages,
        };
        Gathered { plan, room, known }
    }
}

impl Settled {
    /// Waits for what the records say: how many rows of each rank, and of the layout where that is open.
    fn read(&mut self, device: &Cuda, counting: &Counting, open: bool) -> Result<()> {
        let numbers = counting.numbers;
        self.values = numbers.read(device, &counting.stats)?;
        let known = numbers.known(&self.values);
        self.room = known.tokens.iter().copied().max().unwrap_or(0);
        self.known = Some(known);
        if open {
            self.rows = check_number(CALL, "rows", Some(self.values[numbers.tail()]))?;
        }
        Ok(())
    }
}
