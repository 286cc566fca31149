//! Products of few rows: each row's bits are those of the kernels for many rows.

use moebius::config::{Activation, WeightAt};
use moebius::cuda::Cuda;
use moebius::kernels::{Down, Kernels, Linear, RowDest, RowSource, Segments, SlotWeights, Up};
use moebius::{DType, Result, Tensor};

use crate::harness::{Random, tests};

tests!(rows_of_experts_have_the_bits_of_many, rows_of_zeros_have_them_too, logits_have_the_bits_of_many_tokens);

/// Rows of each expert: on average so many that the kernels for many rows serve them, and so few that those for few do,
/// with one that has more than a tile, and one that has its last rows alone.
const MANY: [usize; 6] = [40, 0, 140, 17, 64, 3];
const FEW: [usize; 6] = [1, 0, 9, 0, 0, 2];

#[derive(Debug, Clone, Copy)]
struct Setting {
    dtype: DType,
    n: usize,
    k: usize,
    activation: Activation,
    bias: bool,
    weights: Option<WeightAt>,
    zeros: bool,
}

/// Rows and weights of slots, the layout that they have, and where each few row stands among the many.
struct Rows {
    counts: [usize; 6],
    slots: Vec<usize>,
}

impl Rows {
    /// The last rows of each expert's many.
    fn of(counts: [usize; 6]) -> Self {
        let starts = MANY.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)));
        let slots = starts.zip(MANY).zip(counts).flat_map(|((start, many), count)| start + many - count..start + many);
        Self { counts, slots: slots.collect() }
    }

    fn segments(&self, cuda: &Cuda) -> Result<Segments<Cuda>> {
        let offsets = self.counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + *count as i64)));
        let put = |values: Vec<i64>| Tensor::from_vec(values, &[6])?.to(cuda);
        let counts = self.counts.iter().map(|count| *count as i64).collect();
        Ok(Segments::new(put(offsets.collect())?, put(counts)?, self.slots.len()))
    }

    /// The rows of these slots out of those of all.
    fn take<T: Copy>(&self, all: &[T], width: usize) -> Vec<T> {
        self.slots.iter().flat_map(|slot| all[slot * width..][..width].iter().copied()).collect()
    }
}

/// Outputs of up, its pre-activations, and outputs of down, of some of the rows.
fn products(cuda: &Cuda, s: Setting, rows: &Rows) -> Result<[Vec<f64>; 3]> {
    let mut random = Random::new(11);
    let Setting { dtype, n, k, .. } = s;
    let all = MANY.iter().sum::<usize>();
    let scale = if s.zeros { 0.0 } else { 1.0 };
    let x = random.tensor(&[all, k], dtype, scale)?.to_f64();
    let hidden = random.tensor(&[all, n], dtype, scale)?.to_f64();
    let weights: Vec<f32> = random.tensor(&[all], DType::F32, 1.0)?.to_f64().iter().map(|w| *w as f32).collect();
    let up = random.tensor(&[6, 2 * n, k], dtype, (k as f64).powf(-0.5))?.to(cuda)?;
    let down = random.tensor(&[6, k, n], dtype, (n as f64).powf(-0.5))?.to(cuda)?;
    let biases = [random.tensor(&[6, 2 * n], dtype, 1.0)?.to(cuda)?, random.tensor(&[6, k], dtype, 1.0)?.to(cuda)?];
    let count = rows.slots.len();
    let segments = rows.segments(cuda)?;
    // Up's rows lie behind a map.
    let map: Vec<i32> = rows.slots.iter().map(|slot| *slot as i32).collect();
    let (x, map) = (cuda.write(&x, dtype, &[all, k])?, Tensor::from_vec(map, &[count])?.to(cuda)?);
    let hidden = cuda.write(&rows.take(&hidden, n), dtype, &[count, n])?;
    let weights = Tensor::from_vec(rows.take(&weights, 1), &[count])?.to(cuda)?;
    let slot_weights = || s.weights.map(|at| SlotWeights { values: weights.view(), map: None, at });
    let of = |width| Tensor::empty(cuda, dtype, &[count, width]);
    let (mut out, mut pre, mut sums) = (of(n)?, of(2 * n)?, of(k)?);
    cuda.up(Up {
        rows: RowSource::mapped(x.view(), map.view()),
        segments: &segments,
        weight: up.view().into(),
        bias: s.bias.then(|| biases[0].view()),
        slot_weights: slot_weights(),
        activation: s.activation,
        pre: Some(pre.view_mut()),
        out: RowDest::direct(out.view_mut()),
        movement_sms: None,
    })?;
    cuda.down(Down {
        rows: RowSource::direct(hidden.view()),
        segments: &segments,
        weight: down.view().into(),
        bias: s.bias.then(|| biases[1].view()),
        slot_weights: slot_weights(),
        out: RowDest::direct(sums.view_mut()),
    })?;
    Ok([cuda.read(out.view())?, cuda.read(pre.view())?, cuda.read(sums.view())?])
}

fn check(cuda: &Cuda, s: Setting) -> Result<()> {
    let (many, few) = (Rows::of(MANY), Rows::of(FEW));
    let [all, some] = [products(cuda, s, &many)?, products(cuda, s, &few)?];
    for (name, width, all, some) in
        [("up", s.n, &all[0], &some[0]), ("pre", 2 * s.n, &all[1], &some[1]), ("down", s.k, &all[2], &some[2])]
    {
        let want: Vec<u64> = few.take(all, width).iter().map(|v| v.to_bits()).collect();
        let got: Vec<u64> = some.iter().map(|v| v.to_bits()).collect();
        let differ = want.iter().zip(&got).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 0, "{name}: {differ} of {} elements in {s:?}", want.len());
        assert!(some.iter().all(|v| v.is_finite()), "{name}: {s:?}");
    }
    Ok(())
}

fn rows_of_experts_have_the_bits_of_many(cuda: &Cuda) -> Result<()> {
    let clamped = Activation::ClampedGlu { alpha: 1.702, limit: 7.0 };
    for dtype in [DType::BF16, DType::F16] {
        // Whole steps of 64, a part of one, and columns that fill no block.
        for (n, k) in [(768, 2048), (72, 264), (8, 8), (136, 1032)] {
            for (activation, bias, weights) in [
                (Activation::SiluGlu, false, None),
                (Activation::GeluGlu, true, Some(WeightAt::Output)),
                (clamped, true, Some(WeightAt::Activation)),
                (Activation::SiluGlu, true, Some(WeightAt::Input)),
            ] {
                check(cuda, Setting { dtype, n, k, activation, bias, weights, zeros: false })?;
            }
        }
    }
    Ok(())
}

/// Sums of products that are all zeros, of either sign.
fn rows_of_zeros_have_them_too(cuda: &Cuda) -> Result<()> {
    let (activation, weights) = (Activation::SiluGlu, Some(WeightAt::Output));
    for dtype in [DType::BF16, DType::F16] {
        check(cuda, Setting { dtype, n: 72, k: 264, activation, bias: false, weights, zeros: true })?;
    }
    Ok(())
}

/// With Hopper's kernels, and without, where long sums are cut into parts.
fn logits_have_the_bits_of_many_tokens(cuda: &Cuda) -> Result<()> {
    check_logits(cuda)?;
    check_logits(&cuda.portable())
}

fn check_logits(cuda: &Cuda) -> Result<()> {
    const TOKENS: usize = 200;
    for dtype in [DType::BF16, DType::F16] {
        for (experts, hidden, bias) in [(128, 2048, false), (8, 4104, true), (60, 264, true), (3, 8, false)] {
            let mut random = Random::new(7);
            let x = random.tensor(&[TOKENS, hidden], dtype, 1.0)?.to_f64();
            let weight = random.tensor(&[experts, hidden], dtype, (hidden as f64).powf(-0.5))?.to(cuda)?;
            let biases = random.tensor(&[experts], dtype, 1.0)?.to(cuda)?;
            let logits = |first: usize, count: usize| -> Result<Vec<f64>> {
                let x = cuda.write(&x[first * hidden..][..count * hidden], dtype, &[count, hidden])?;
                let mut out = Tensor::empty(cuda, DType::F32, &[count, experts])?;
                let bias = bias.then(|| biases.view());
                cuda.linear(Linear { x: x.view(), weight: weight.view(), bias, out: out.view_mut() })?;
                cuda.read(out.view())
            };
            let all = logits(0, TOKENS)?;
            for (first, count) in [(0, 1), (199, 1), (3, 8), (100, 9), (50, 63), (0, 64), (7, 65)] {
                let want = all[first * experts..][..count * experts].iter().map(|v| v.to_bits());
                let got = logits(first, count)?;
                let differ = want.zip(&got).filter(|(a, b)| *a != b.to_bits()).count();
                assert_eq!(differ, 0, "{dtype}, {experts} x {hidden}: {count} tokens from {first} on");
            }
        }
    }
    Ok(())
}
