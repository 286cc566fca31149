//! Weight gradients by themselves: f32 sums of 16-bit rows, adding, every place a segment can end at, and sums that run
//! beside a movement of rows.

use std::ops::Range;

use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::{Kernels, Origin, ReduceRows, RowSource, Segments, Wgrad};
use moebius::{DType, Result, Tensor};

use crate::gathered_rows::gathered_rows;
use crate::harness::{Random, distance, tests, tolerance};

tests!(
    sums_end_where_segments_do_in_every_type,
    padding_of_two_operands_in_order_is_not_multiplied,
    a_movement_beside_changes_no_bit,
    rows_in_order_are_there_when_they_are_multiplied,
);

/// Segment ends around the kernels' steps of 16 and 64 slots, empty segments, and one that is much larger.
const COUNTS: [i64; 17] = [0, 1, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 300, 385, 449, 640, 0];
/// Types of the operands and of the sums.
const TYPES: [(DType, DType); 5] = [
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F16),
    (DType::F16, DType::F32),
    (DType::F32, DType::F32),
];
/// Rows that a map chooses from.
const ROWS: usize = 90;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

const LEFT: Option<Side> = Some(Side::Left);
const RIGHT: Option<Side> = Some(Side::Right);

#[derive(Debug)]
struct Setting {
    dtype: DType,
    out: DType,
    /// The operand that lies behind a map.
    mapped: Option<Side>,
    accumulate: bool,
    m: usize,
    n: usize,
}

/// Where segments lie.
struct Layout {
    counts: Vec<i64>,
    offsets: Vec<i64>,
    slots: usize,
}

impl Layout {
    /// `next` says where the next segment begins after one's end.
    fn new(counts: &[i64], next: impl Fn(i64) -> i64) -> Self {
        let mut offsets = Vec::new();
        let slots = counts.iter().fold(0, |at, count| {
            offsets.push(at);
            next(at + count)
        });
        Self { counts: counts.to_vec(), offsets, slots: slots as usize }
    }

    /// Some slots of padding behind each segment.
    fn padded() -> Self {
        const PADDING: i64 = 5;
        Self::new(&COUNTS, |end| end + PADDING)
    }

    /// Segments that begin at multiples of `alignment`.
    fn aligned(counts: &[i64], alignment: i64) -> Self {
        Self::new(counts, |end| (end + alignment - 1) / alignment * alignment)
    }

    fn segments(&self) -> impl Iterator<Item = Range<usize>> {
        self.offsets.iter().zip(&self.counts).map(|(offset, count)| *offset as usize..(offset + count) as usize)
    }

    fn is_padding(&self, slot: usize) -> bool {
        !self.segments().any(|segment| segment.contains(&slot))
    }
}

/// What a sum is made of, on the host and on the GPU, and what was there before.
struct Operands {
    layout: Layout,
    segments: Segments<Cuda>,
    map: Vec<i32>,
    map_on_gpu: Tensor<Cuda>,
    /// Left and right rows, as numbers too.
    values: [Vec<f64>; 2],
    rows: [Tensor<Cuda>; 2],
    before: Tensor<Cpu>,
}

impl Operands {
    /// Padding of rows in slot order is NaN, which must not come near a sum.
    fn new(cuda: &Cuda, s: &Setting, layout: Layout) -> Result<Self> {
        let mut random = Random::new(5);
        let slots = layout.slots;
        let map: Vec<i32> = (0..slots).map(|_| (random.next() % ROWS as u64) as i32).collect();
        let mut rows = |side: Side, width: usize| -> Result<(Vec<f64>, Tensor<Cuda>)> {
            let in_order = s.mapped != Some(side);
            let count = if in_order { slots } else { ROWS };
            let mut values = random.tensor(&[count, width], s.dtype, 1.0)?.to_f64();
            for slot in (0..slots).filter(|slot| in_order && layout.is_padding(*slot)) {
                values[slot * width..][..width].fill(f64::NAN);
            }
            let tensor = cuda.write(&values, s.dtype, &[count, width])?;
            Ok((values, tensor))
        };
        let (left, left_rows) = rows(Side::Left, s.m)?;
        let (right, right_rows) = rows(Side::Right, s.n)?;
        let put = |values: &[i64]| Tensor::from_vec(values.to_vec(), &[values.len()])?.to(cuda);
        Ok(Self {
            segments: Segments::new(put(&layout.offsets)?, put(&layout.counts)?, slots),
            map_on_gpu: Tensor::from_vec(map.clone(), &[slots])?.to(cuda)?,
            map,
            values: [left, right],
            rows: [left_rows, right_rows],
            before: random.tensor(&[layout.counts.len(), s.m, s.n], s.out, 3.0)?,
            layout,
        })
    }

    /// The sums and what was there before, by definition.
    fn expected(&self, s: &Setting) -> Vec<f64> {
        let [left, right] = &self.values;
        let mut out = self.before.to_f64();
        if !s.accumulate {
            out.fill(0.0);
        }
        for (out, segment) in out.chunks_mut(s.m * s.n).zip(self.layout.segments()) {
            for slot in segment {
                let row = |side| if s.mapped == Some(side) { self.map[slot] as usize } else { slot };
                let left = &left[row(Side::Left) * s.m..][..s.m];
                let right = &right[row(Side::Right) * s.n..][..s.n];
                for (out, l) in out.chunks_mut(s.n).zip(left) {
                    out.iter_mut().zip(right).for_each(|(out, r)| *out += l * r);
                }
            }
        }
        out
    }

    /// The sums on a device; with a movement enqueued last before them, beside that.
    fn sums(&self, device: &Cuda, s: &Setting, mut movement: Option<&mut Movement>) -> Result<Vec<f64>> {
        let mut out = self.before.to(device)?;
        let source = |side: Side| {
            let rows = self.rows[side as usize].view();
            match s.mapped == Some(side) {
                true => RowSource::mapped(rows, self.map_on_gpu.view()),
                false => RowSource::direct(rows),
            }
        };
        let movement_sms = movement.as_deref_mut().map(|movement| movement.start(device)).transpose()?;
        device.wgrad(Wgrad {
            left: source(Side::Left),
            right: source(Side::Right),
            slot_weights: None,
            segments: &self.segments,
            out: out.view_mut(),
            bias: None,
            accumulate: s.accumulate,
            movement_sms,
        })?;
        // Looked at first: while the sums travel to the host it may end.
        movement.map_or(Ok(()), |movement| movement.must_have_ended(device))?;
        device.read(out.view())
    }
}

fn check(cuda: &Cuda, s: &Setting, layout: Layout) -> Result<()> {
    let operands = Operands::new(cuda, s, layout)?;
    let want = operands.expected(s);
    // With no more than two SMs one cluster walks over all tiles.
    for device in [cuda.clone(), cuda.reserving_sms(10_000), cuda.portable()] {
        let off = distance(&operands.sums(&device, s, None)?, &want);
        // Rows are the same numbers on both sides, products exact in f32: only the sum's order and the result's type.
        assert!(off <= tolerance(s.out), "{s:?}, {} slots, {device:?}: off by {off:e}", operands.layout.slots);
    }
    Ok(())
}

fn sums_end_where_segments_do_in_every_type(cuda: &Cuda) -> Result<()> {
    for (dtype, out) in TYPES {
        for (mapped, accumulate) in [(RIGHT, false), (LEFT, false), (RIGHT, true), (LEFT, true)] {
            for (m, n) in [(136, 72), (72, 264)] {
                check(cuda, &Setting { dtype, out, mapped, accumulate, m, n }, Layout::padded())?;
            }
        }
    }
    // So wide that a cluster has several tiles.
    for (mapped, m, n) in [(LEFT, 40, 2056), (RIGHT, 2056, 40)] {
        let s = Setting { dtype: DType::BF16, out: DType::BF16, mapped, accumulate: false, m, n };
        check(cuda, &s, Layout::padded())?;
    }
    cuda.check()
}

/// TMA then brings both sides, and of a segment's last step padding, or the next segment's rows, on both: NaN of one
/// would spoil a sum even against zeros of the other. Without padding the last segment ends where the rows do.
fn padding_of_two_operands_in_order_is_not_multiplied(cuda: &Cuda) -> Result<()> {
    const COUNTS: [i64; 14] = [3, 0, 1, 15, 16, 17, 63, 0, 64, 65, 129, 0, 301, 77];
    for alignment in [1, 8, 64, 128] {
        for (dtype, out) in TYPES {
            for accumulate in [false, true] {
                for (m, n) in [(136, 72), (72, 264)] {
                    let s = Setting { dtype, out, mapped: None, accumulate, m, n };
                    check(cuda, &s, Layout::aligned(&COUNTS, alignment))?;
                }
            }
        }
    }
    cuda.check()
}

/// Stands for a movement of rows: as many blocks as that has SMs, which let the next kernel start as soon as all of them
/// run, and then add so many rows that they are likely to be at it when the first sums are done. Small integers, so that
/// its own sums are exact.
struct Movement {
    sms: usize,
    source: Tensor<Cuda>,
    map: Tensor<Cuda>,
    out: Tensor<Cuda>,
}

impl Movement {
    const SOURCE_ROWS: usize = 16;
    const ADDED_ROWS: usize = 4096;
    const WIDTH: usize = 4096;

    fn new(cuda: &Cuda, sms: usize) -> Result<Self> {
        let values: Vec<f64> = (0..Self::SOURCE_ROWS * Self::WIDTH).map(|i| (i / Self::WIDTH) as f64).collect();
        let map = (0..sms * Self::ADDED_ROWS).map(|i| (i % Self::SOURCE_ROWS) as i32).collect();
        Ok(Self {
            sms,
            source: cuda.write(&values, DType::F32, &[Self::SOURCE_ROWS, Self::WIDTH])?,
            map: Tensor::from_vec(map, &[sms, Self::ADDED_ROWS])?.to(cuda)?,
            out: Tensor::empty(cuda, DType::F32, &[sms, Self::WIDTH])?,
        })
    }

    /// Enqueues it, and says how many SMs it takes.
    fn start(&mut self, cuda: &Cuda) -> Result<usize> {
        let (source, map, out) = (self.source.view(), self.map.view(), self.out.view_mut());
        cuda.reduce_rows(ReduceRows { source, map, origin: Origin::default(), out })?;
        Ok(self.sms)
    }

    /// What follows in the stream is behind it, though a kernel between the two started early.
    fn must_have_ended(&self, cuda: &Cuda) -> Result<()> {
        let sum: usize = (0..Self::ADDED_ROWS).map(|i| i % Self::SOURCE_ROWS).sum();
        let ended = cuda.read(self.out.view())?.iter().all(|v| *v == sum as f64);
        assert!(ended, "what follows a movement on {} SMs did not wait for it", self.sms);
        Ok(())
    }
}

/// The sums then come from two launches, or from one that has all experts. The first starts while the movement runs, on
/// the SMs that it leaves, and ends behind it. Each tile is summed as ever, however many SMs there are.
fn a_movement_beside_changes_no_bit(cuda: &Cuda) -> Result<()> {
    // Of the 17 experts the first launch has all beside 2 SMs, 15 beside 16, and beside 32 eight, behind which comes
    // one without slots; beside 130 two, of which one has none (`WGRAD_UNDER_RETURN` in `src/cuda/heuristics.rs`).
    const SMS: [usize; 4] = [2, 16, 32, 130];
    // Zeros have a sign.
    let bits = |sums: Vec<f64>| sums.into_iter().map(f64::to_bits).collect::<Vec<_>>();
    for (dtype, out) in [(DType::BF16, DType::BF16), (DType::F16, DType::F32)] {
        for (mapped, accumulate) in [LEFT, RIGHT, None].into_iter().flat_map(|side| [(side, false), (side, true)]) {
            let s = Setting { dtype, out, mapped, accumulate, m: 2056, n: 16 };
            let operands = Operands::new(cuda, &s, Layout::padded())?;
            let want = operands.expected(&s);
            let alone = operands.sums(cuda, &s, None)?;
            // As in `check`.
            let off = distance(&alone, &want);
            assert!(off <= tolerance(out), "{s:?}: off by {off:e}");
            let alone = bits(alone);
            let few = cuda.reserving_sms(10_000);
            assert!(bits(operands.sums(&few, &s, None)?) == alone, "{s:?}: other bits on few SMs");
            for device in [cuda, &few] {
                for sms in SMS {
                    let mut movement = Movement::new(cuda, sms)?;
                    let beside = bits(operands.sums(device, &s, Some(&mut movement))?);
                    assert!(beside == alone, "{s:?}, {device:?}: other bits beside {sms} SMs");
                }
            }
        }
    }
    cuda.check()
}

/// A segment of four whole steps and one of two slots: the last is the only one that is not brought while the sums
/// before leave, so what is not waited for shows. Of 300 runs, five did where arrivals could overtake the announcement
/// of what they stand for.
fn rows_in_order_are_there_when_they_are_multiplied(cuda: &Cuda) -> Result<()> {
    const RUNS: usize = 600;
    const COUNTS: [i64; 4] = [239, 250, 258, 253];
    let (wide, narrow, padding, run) = (16384, 512, 3, 256);
    let mut random = Random::new(6);
    let offsets: Vec<i64> =
        COUNTS.iter().scan(0, |at, count| Some(std::mem::replace(at, *at + count + padding))).collect();
    let slots = COUNTS.iter().map(|count| (count + padding) as usize).sum();
    let mut rows = |width: usize| -> Result<Tensor<Cuda>> {
        let source = random.tensor(&[97, width], DType::BF16, 1.0)?.to(cuda)?;
        gathered_rows(cuda, &source, (0..slots).map(|_| (random.next() % 97) as i32).collect())
    };
    let (left, right) = (rows(wide)?, rows(narrow)?);
    let put = |values: &[i64]| Tensor::from_vec(values.to_vec(), &[COUNTS.len()])?.to(cuda);
    let segments = Segments::new(put(&offsets)?, put(&COUNTS)?, slots);
    // Sums of the columns of 256 rows of the result at a time: any tile that differs changes one.
    let lines = COUNTS.len() * wide;
    let map = Tensor::from_vec((0..lines as i32).collect(), &[lines / run, run])?.to(cuda)?;
    let sums = || -> Result<Vec<f64>> {
        let mut out = Tensor::zeros(cuda, DType::F32, &[COUNTS.len(), wide, narrow])?;
        let call = Wgrad {
            left: RowSource::direct(left.view()),
            right: RowSource::direct(right.view()),
            slot_weights: None,
            segments: &segments,
            out: out.view_mut(),
            bias: None,
            accumulate: true,
            movement_sms: None,
        };
        cuda.wgrad(call)?;
        let source = out.view().reshape(&[lines, narrow])?;
        let mut sums = Tensor::empty(cuda, DType::F32, &[lines / run, narrow])?;
        cuda.reduce_rows(ReduceRows { source, map: map.view(), origin: Origin::default(), out: sums.view_mut() })?;
        cuda.read(sums.view())
    };
    let first = sums()?;
    for i in 0..RUNS {
        assert!(sums()? == first, "run {i} differs");
    }
    cuda.check()
}
