//! Steps of an optimizer on the CPU.

use half::bf16;
use rayon::prelude::*;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::optimizer::{
    AdamWTensor, AdamWUpdate, COEFFICIENTS, Convert, GROUP_STATE, LEAF, LEAF_SUMS, OptimizerDevice, SETTINGS,
    STATE_NUMBERS, SquareSums, SquaredTensor, StepControl, coefficient, state,
};
use crate::quant::philox::{self, philox4x32};
use crate::tensor::{TensorMut, TensorRef};

use super::Cpu;
use super::element::{Float, with_float};
use super::heuristics::{TASK_ELEMENTS, TASK_LEAVES};

impl OptimizerDevice for Cpu {
    fn square_sums(&self, call: SquareSums<'_, Self>) -> Result<()> {
        const CALL: &str = "square_sums";
        call.check(CALL)?;
        let SquareSums { tensors, out } = call;
        let out = out.into_slice::<f64>()?;
        for tensor in &tensors {
            let to = &mut out[tensor.node..tensor.node + tensor.nodes()];
            with_float!(CALL, "gradient", tensor.gradient.dtype(), T => nodes::<T>(tensor, to))?;
        }
        Ok(())
    }

    fn step_control(&self, call: StepControl<'_, Self>) -> Result<()> {
        step_control(call)
    }

    fn adamw(&self, call: AdamWUpdate<'_, Self>) -> Result<()> {
        call.check("adamw")?;
        let numbers = &call.coefficients.as_slice::<f64>()?[call.group * COEFFICIENTS..][..COEFFICIENTS];
        if numbers[coefficient::SKIP] != 0.0 {
            return Ok(());
        }
        let numbers = Numbers::new(numbers, call.seed);
        call.tensors.into_iter().try_for_each(|t| update_tensor(&numbers, t))
    }

    fn convert(&self, call: Convert<'_, Self>) -> Result<()> {
        fn run<A: Float, B: Float<Acc = f32>>(from: TensorRef<'_, Cpu>, to: TensorMut<'_, Cpu>) -> Result<()> {
            use super::element::Acc;
            let (from, to) = (from.as_slice::<A>()?, to.into_slice::<B>()?);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = B::from_acc(from.to_acc().as_f64() as f32));
            Ok(())
        }
        const CALL: &str = "convert";
        call.check(CALL)?;
        let Convert { from, to } = call;
        let of = from.dtype();
        match to.dtype() {
            DType::F32 => with_float!(CALL, "from", of, T => run::<T, f32>(from, to)),
            // From f64 only f32 is asked for; anything else is exact in f32.
            DType::F16 => with_float!(CALL, "from", of, T => run::<T, half::f16>(from, to)),
            _ => with_float!(CALL, "from", of, T => run::<T, bf16>(from, to)),
        }
    }
}

/// The nodes of a gradient.
fn nodes<T: Float>(tensor: &SquaredTensor<'_, Cpu>, out: &mut [f64]) -> Result<()> {
    let values = tensor.gradient.as_slice::<T>()?;
    let (per_row, leaves) = (tensor.leaves_of_row(), tensor.leaves());
    let leaf = |i: usize| {
        let (row, at) = (i / per_row, i % per_row * LEAF);
        let row = &values[row * tensor.width..][..tensor.width];
        leaf(&row[at..(at + LEAF).min(row.len())])
    };
    let size = 1usize.checked_shl(tensor.height).unwrap_or(usize::MAX);
    out.par_iter_mut().enumerate().for_each(|(i, out)| {
        let first = i.saturating_mul(size);
        *out = tree(&leaf, first, size.min((leaves - first).next_power_of_two()), leaves);
    });
    Ok(())
}

/// Sum of leaves `first ‥ first + size` in a binary tree, `size` a power of two; those from `end` on are zeros.
fn tree(leaf: &(impl Fn(usize) -> f64 + Sync), first: usize, size: usize, end: usize) -> f64 {
    match size {
        _ if first >= end => 0.0,
        0 | 1 => leaf(first),
        _ => {
            let half = size / 2;
            let [left, right] = [first, first + half];
            let sum = |at| tree(leaf, at, half, end);
            match size <= TASK_LEAVES {
                true => sum(left) + sum(right),
                false => {
                    let (left, right) = rayon::join(|| sum(left), || sum(right));
                    left + right
                }
            }
        }
    }
}

/// Sum of squares of a leaf.
fn leaf<T: Float>(values: &[T]) -> f64 {
    use super::element::Acc;
    let mut sums = [0f64; LEAF_SUMS];
    for chunk in values.chunks(LEAF_SUMS) {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            let value = value.to_acc().as_f64();
            *sum += value * value;
        }
    }
    let mut lanes: [f64; LEAF_SUMS / 4] =
        std::array::from_fn(|l| (sums[4 * l] + sums[4 * l + 1]) + (sums[4 * l + 2] + sums[4 * l + 3]));
    let mut half = lanes.len() / 2;
    while half > 0 {
        let (left, right) = lanes.split_at_mut(half);
        left.iter_mut().zip(right).for_each(|(left, right)| *left += *right);
        half /= 2;
    }
    lanes[0]
}

/// The norm's square over all weights.
fn total(call: &StepControl<'_, Cpu>) -> Result<Option<f64>> {
    const CALL: &str = "step_control";
    let Some(norm) = &call.norm else { return Ok(None) };
    let (nodes, order) = (norm.nodes.as_slice::<f64>()?, norm.order.as_slice::<i32>()?);
    let starts = norm.starts.as_slice::<i32>()?;
    let mut total = 0.0;
    for ends in starts.windows(2) {
        let range = ends[0].max(0) as usize..ends[1].max(0) as usize;
        let outside = || Error::invalid(CALL, "order", format!("nodes below {}", nodes.len()), format!("{range:?}"));
        let order = order.get(range.clone()).ok_or_else(outside)?;
        let values: Option<Vec<f64>> = order.iter().map(|at| nodes.get(*at as usize).copied()).collect();
        let values = values.ok_or_else(outside)?;
        total += tree(&|i| values[i], 0, values.len().next_power_of_two(), values.len());
    }
    Ok(Some(total))
}

fn step_control(call: StepControl<'_, Cpu>) -> Result<()> {
    call.check("step_control")?;
    let total = total(&call)?;
    let StepControl { max_norm, scaling, settings, state: kept, coefficients, .. } = call;
    let (settings, kept) = (settings.as_slice::<f64>()?, kept.into_slice::<f64>()?);
    let (kept, groups) = kept.split_at_mut(STATE_NUMBERS);
    let inverse = 1.0 / kept[state::SCALE];
    let mut factor = inverse;
    let mut skip = false;
    if let Some(total) = total {
        let norm = total.sqrt() * inverse;
        kept[state::NORM] = norm;
        skip = !norm.is_finite();
        if let Some(most) = max_norm.filter(|most| norm > *most) {
            factor = inverse * (most / norm);
        }
    }
    if let Some(scaling) = scaling {
        if skip {
            kept[state::SCALE] = (kept[state::SCALE] * scaling.backoff).max(scaling.min);
            kept[state::GOOD] = 0.0;
        } else {
            kept[state::GOOD] += 1.0;
            if kept[state::GOOD] >= f64::from(scaling.interval) {
                kept[state::SCALE] = (kept[state::SCALE] * scaling.growth).min(scaling.max);
                kept[state::GOOD] = 0.0;
            }
        }
    }
    kept[state::FACTOR] = factor;
    kept[state::SKIP] = f64::from(skip);
    kept[if skip { state::SKIPPED } else { state::STEP }] += 1.0;
    let rows = settings.chunks(SETTINGS).zip(groups.chunks_mut(GROUP_STATE));
    for ((settings, powers), to) in rows.zip(coefficients.into_slice::<f64>()?.chunks_mut(COEFFICIENTS)) {
        let [rate, beta1, beta2, epsilon, decay] = [0, 1, 2, 3, 4].map(|i| settings[i]);
        if !skip {
            powers[0] *= beta1;
            powers[1] *= beta2;
        }
        to[coefficient::SKIP] = f64::from(skip);
        to[coefficient::FACTOR] = factor;
        to[coefficient::FIRST] = 1.0 - beta1;
        to[coefficient::SECOND] = 1.0 - beta2;
        to[coefficient::RATE] = rate / (1.0 - powers[0]);
        to[coefficient::ROOT] = 1.0 / (1.0 - powers[1]).sqrt();
        to[coefficient::EPSILON] = epsilon;
        to[coefficient::DECAY] = rate * decay;
        to[coefficient::STEP] = kept[state::STEP];
    }
    Ok(())
}

/// The numbers of a step, in f32.
struct Numbers {
    factor: f32,
    first: f32,
    second: f32,
    rate: f32,
    root: f32,
    epsilon: f32,
    decay: f32,
    step: u32,
    key: [u32; 2],
}

impl Numbers {
    fn new(row: &[f64], seed: u64) -> Self {
        let at = |i: usize| row[i] as f32;
        Self {
            factor: at(coefficient::FACTOR),
            first: at(coefficient::FIRST),
            second: at(coefficient::SECOND),
            rate: at(coefficient::RATE),
            root: at(coefficient::ROOT),
            epsilon: at(coefficient::EPSILON),
            decay: at(coefficient::DECAY),
            step: row[coefficient::STEP] as u64 as u32,
            key: philox::key(seed),
        }
    }

    /// New moments and weight.
    #[inline(always)]
    fn element(&self, g: f32, m: f32, v: f32, w: f32) -> (f32, f32, f32) {
        let g = g * self.factor;
        let m = m + self.first * (g - m);
        let v = v + self.second * (g * g - v);
        let w = w - (self.decay * w + self.rate * (m / (v.sqrt() * self.root + self.epsilon)));
        (m, v, w)
    }
}

/// Elements that one task changes.
struct ElementRun<'a, G, M> {
    gradient: &'a [G],
    main: &'a mut [f32],
    first: &'a mut [M],
    second: &'a mut [M],
    number: u32,
    /// Number of the first in the whole parameter.
    element: u64,
}

/// A type that moments are kept in.
trait Moment: Float<Acc = f32> {
    fn update<G: Float<Acc = f32>>(numbers: &Numbers, run: ElementRun<'_, G, Self>);
}

impl Moment for f32 {
    fn update<G: Float<Acc = f32>>(numbers: &Numbers, run: ElementRun<'_, G, f32>) {
        let ElementRun { gradient, main, first, second, .. } = run;
        for (((g, w), m), v) in gradient.iter().zip(main).zip(first).zip(second) {
            (*m, *v, *w) = numbers.element(g.to_acc(), *m, *v, *w);
        }
    }
}

impl Moment for bf16 {
    fn update<G: Float<Acc = f32>>(numbers: &Numbers, run: ElementRun<'_, G, bf16>) {
        let ElementRun { gradient, main, first, second, number, element } = run;
        let mut words = [0; 4];
        let elements = (element..).zip(gradient).zip(main).zip(first).zip(second);
        for (i, ((((e, g), w), m), v)) in elements.enumerate() {
            if i == 0 || e % 4 == 0 {
                let block = e / 4;
                words = philox4x32([block as u32, (block >> 32) as u32, number, numbers.step], numbers.key);
            }
            let word = words[(e % 4) as usize];
            let (new_m, new_v, new_w) = numbers.element(g.to_acc(), m.to_f32(), v.to_f32(), *w);
            (*m, *v, *w) = (stochastic(new_m, word >> 16), stochastic(new_v, word & 0xffff), new_w);
        }
    }
}

/// A number in bf16, rounded up where `bits` (16 of them) carry over.
fn stochastic(value: f32, bits: u32) -> bf16 {
    match value.is_finite() {
        true => bf16::from_bits(((value.to_bits() + bits) >> 16) as u16),
        false => bf16::from_f32(value),
    }
}

fn update_tensor(numbers: &Numbers, t: AdamWTensor<'_, Cpu>) -> Result<()> {
    match (t.gradient.dtype(), t.first.dtype()) {
        (DType::F32, DType::F32) => update::<f32, f32>(numbers, t),
        (DType::F16, DType::F32) => update::<half::f16, f32>(numbers, t),
        (_, DType::F32) => update::<bf16, f32>(numbers, t),
        (DType::F32, _) => update::<f32, bf16>(numbers, t),
        (DType::F16, _) => update::<half::f16, bf16>(numbers, t),
        _ => update::<bf16, bf16>(numbers, t),
    }
}

fn update<G: Float<Acc = f32>, M: Moment>(numbers: &Numbers, t: AdamWTensor<'_, Cpu>) -> Result<()> {
    let AdamWTensor { count, gradient, main, rounded, first, second, number, element } = t;
    let gradient = &gradient.as_slice::<G>()?[..count];
    let main = &mut main.into_slice::<f32>()?[..count];
    let first = &mut first.into_slice::<M>()?[..count];
    let second = &mut second.into_slice::<M>()?[..count];
    let moments = first.par_chunks_mut(TASK_ELEMENTS).zip(second.par_chunks_mut(TASK_ELEMENTS));
    let tasks = gradient.par_chunks(TASK_ELEMENTS).zip(main.par_chunks_mut(TASK_ELEMENTS)).zip(moments);
    tasks.enumerate().for_each(|(i, ((gradient, main), (first, second)))| {
        let element = element + (i * TASK_ELEMENTS) as u64;
        M::update(numbers, ElementRun { gradient, main, first, second, number, element });
    });
    match rounded {
        None => Ok(()),
        Some(rounded) if rounded.dtype() == DType::F16 => round::<half::f16>(main, rounded),
        Some(rounded) => round::<bf16>(main, rounded),
    }
}

fn round<P: Float<Acc = f32>>(main: &[f32], rounded: TensorMut<'_, Cpu>) -> Result<()> {
    let rounded = &mut rounded.into_slice::<P>()?[..main.len()];
    let tasks = rounded.par_chunks_mut(TASK_ELEMENTS).zip(main.par_chunks(TASK_ELEMENTS));
    tasks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, from)| *to = P::from_acc(*from)));
    Ok(())
}
