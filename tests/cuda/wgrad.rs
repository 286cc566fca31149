//! Weight gradients by themselves: f32 sums of 16-bit rows, adding, and every place a segment can end at.

use moebius::cuda::Cuda;
use moebius::kernels::{Kernels, Origin, ReduceRows, RowSource, Segments, Wgrad};
use moebius::{DType, Result, Tensor};

use crate::gathered_rows::gathered_rows;
use crate::harness::{Random, distance, tests, tolerance};

tests!(sums_end_where_segments_do_in_every_type, rows_in_order_are_there_when_they_are_multiplied);

/// Segment ends around the kernels' steps of 16 and 64 slots, empty segments, and one that is much larger.
const COUNTS: [i64; 17] = [0, 1, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 300, 385, 449, 640, 0];
/// Slots of padding behind each segment.
const PADDING: i64 = 5;

struct Setting {
    dtype: DType,
    out: DType,
    mapped_left: bool,
    accumulate: bool,
    m: usize,
    n: usize,
}

/// The sum and what was there before, by definition.
fn expected(s: &Setting, left: &[f64], right: &[f64], map: &[i32], offsets: &[i64], before: &[f64]) -> Vec<f64> {
    let mut out = if s.accumulate { before.to_vec() } else { vec![0.0; before.len()] };
    for (e, (offset, count)) in offsets.iter().zip(COUNTS).enumerate() {
        let segment = *offset as usize..(offset + count) as usize;
        for (slot, row) in segment.clone().zip(&map[segment]) {
            let (l, r) = if s.mapped_left { (*row as usize, slot) } else { (slot, *row as usize) };
            for i in 0..s.m {
                for j in 0..s.n {
                    out[(e * s.m + i) * s.n + j] += left[l * s.m + i] * right[r * s.n + j];
                }
            }
        }
    }
    out
}

fn check(cuda: &Cuda, s: &Setting) -> Result<()> {
    const ROWS: usize = 90;
    let mut random = Random::new(5);
    let mut offsets = Vec::new();
    let slots = COUNTS.iter().fold(0, |at, count| {
        offsets.push(at);
        at + count + PADDING
    }) as usize;
    let map: Vec<i32> = (0..slots).map(|_| (random.next() % ROWS as u64) as i32).collect();
    let inside = |slot: usize| offsets.iter().zip(COUNTS).any(|(o, c)| (*o..o + c).contains(&(slot as i64)));
    // Padding of the rows in slot order is NaN, which must not come near a sum.
    let mut rows = |mapped: bool, width: usize| -> Result<(Vec<f64>, Tensor<Cuda>)> {
        let count = if mapped { ROWS } else { slots };
        let mut values = random.tensor(&[count, width], s.dtype, 1.0)?.to_f64();
        for slot in (0..slots).filter(|slot| !mapped && !inside(*slot)) {
            values[slot * width..][..width].fill(f64::NAN);
        }
        let tensor = cuda.write(&values, s.dtype, &[count, width])?;
        Ok((values, tensor))
    };
    let (left, left_rows) = rows(s.mapped_left, s.m)?;
    let (right, right_rows) = rows(!s.mapped_left, s.n)?;
    let put = |values: &[i64]| Tensor::from_vec(values.to_vec(), &[COUNTS.len()])?.to(cuda);
    let segments = Segments::new(put(&offsets)?, put(&COUNTS)?, slots);
    let on_gpu = Tensor::from_vec(map.clone(), &[slots])?.to(cuda)?;
    let dims = [COUNTS.len(), s.m, s.n];
    let before = random.tensor(&dims, s.out, 3.0)?;
    let before_values = before.to_f64();
    let want = expected(s, &left, &right, &map, &offsets, &before_values);
    // With no more than two SMs one cluster walks over all tiles.
    for device in [cuda.clone(), cuda.reserving_sms(10_000), cuda.portable()] {
        let mut out = before.to(cuda)?;
        let (l, r) = match s.mapped_left {
            true => (RowSource::mapped(left_rows.view(), on_gpu.view()), RowSource::direct(right_rows.view())),
            false => (RowSource::direct(left_rows.view()), RowSource::mapped(right_rows.view(), on_gpu.view())),
        };
        let call = Wgrad {
            left: l,
            right: r,
            slot_weights: None,
            segments: &segments,
            out: out.view_mut(),
            bias: None,
            accumulate: s.accumulate,
            movement_sms: None,
        };
        device.wgrad(call)?;
        let off = distance(&cuda.read(out.view())?, &want);
        let Setting { dtype, out, mapped_left, accumulate, m, n } = s;
        let name =
            format!("{dtype:?} to {out:?}, left mapped {mapped_left}, adding {accumulate}, {m} x {n}, {device:?}");
        // Rows are the same numbers on both sides, products exact in f32: only the sum's order and the result's type.
        assert!(off <= tolerance(s.out), "{name}: off by {off:e}");
    }
    Ok(())
}

fn sums_end_where_segments_do_in_every_type(cuda: &Cuda) -> Result<()> {
    for (dtype, out) in [
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
        (DType::F32, DType::F32),
    ] {
        for (mapped_left, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
            for (m, n) in [(136, 72), (72, 264)] {
                check(cuda, &Setting { dtype, out, mapped_left, accumulate, m, n })?;
            }
        }
    }
    // So wide that a cluster has several tiles.
    for (mapped_left, m, n) in [(true, 40, 2056), (false, 2056, 40)] {
        check(cuda, &Setting { dtype: DType::BF16, out: DType::BF16, mapped_left, accumulate: false, m, n })?;
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
