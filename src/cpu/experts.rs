//! Grouped GEMMs of the experts: up, down, and their gradients.
//!
//! Work is cut into tiles of up to [`ROW_TILE`] slots of one expert; each tile gathers its rows, multiplies and runs
//! its epilogue while they are in cache. Tiles own disjoint rows of the outputs, so results do not depend on the
//! number of threads. Padding slots and experts without tokens appear in no tile.

use std::ops::Range;

use num_traits::Zero;
use rayon::prelude::*;

use crate::config::WeightAt;
use crate::error::{Error, Result};
use crate::kernels::{BiasGrad, Down, DownBwd, RowDest, SlotWeights, Up, UpDgrad, Wgrad};
use crate::quant::QuantizedRef;
use crate::tensor::{TensorMut, TensorRef, dims3};
use crate::weights::Weight;

use super::element::{Acc, Element, Float, with_float};
use super::gemm::{Mat, by_columns, by_rows, product, store, to_acc};
use super::heuristics::{ROW_TILE, WGRAD_ROWS, WGRAD_SLOTS};
use super::segments::{RowView, SegmentList};
use super::{Cpu, activation};

/// Tiles of the filled slots, in slot order, with their expert.
fn tiles(segments: &SegmentList) -> Vec<(usize, Range<usize>)> {
    let of_segment = |(j, z): (usize, &Range<usize>)| {
        let z = z.clone();
        z.clone().step_by(ROW_TILE).map(move |s| (j, s..z.end.min(s + ROW_TILE))).collect::<Vec<_>>()
    };
    segments.filled.iter().enumerate().flat_map(of_segment).collect()
}

/// Cuts segment slices into the slices of [`tiles`].
fn cut<T>(parts: Vec<&mut [T]>, width: usize) -> impl Iterator<Item = &mut [T]> {
    parts.into_iter().flat_map(move |p| p.chunks_mut(ROW_TILE * width))
}

/// As [`cut`], of a buffer that may be absent.
fn cut_option<'a, T>(segments: &SegmentList, buffer: Option<&'a mut [T]>, width: usize) -> Vec<Option<&'a mut [T]>> {
    match buffer {
        Some(b) => cut(segments.split(b, width), width).map(Some).collect(),
        None => tiles(segments).iter().map(|_| None).collect(),
    }
}

/// A stack of weights.
enum WeightStack<'a, T> {
    Dense(&'a [T]),
    Quantized(Box<QuantizedRef<'a, Cpu>>),
}

impl<'a, T: Float> WeightStack<'a, T> {
    fn new(call: &'static str, weight: Weight<'a, Cpu>) -> Result<Self> {
        match weight {
            Weight::Dense(weight) => {
                Error::check_dtype(call, "weight", T::DTYPE, weight.dtype())?;
                Ok(WeightStack::Dense(weight.as_slice()?))
            }
            Weight::Quantized(weight) => {
                weight.check(call)?;
                Ok(WeightStack::Quantized(Box::new(weight)))
            }
        }
    }

    /// One matrix of `len` elements as accumulators; of a quantized stack, for as long as a tile needs it.
    fn expert(&self, j: usize, len: usize) -> Result<std::borrow::Cow<'a, [T::Acc]>> {
        match self {
            WeightStack::Dense(stack) => Ok(expert(stack, j, len)),
            WeightStack::Quantized(weight) => {
                Ok(weight.dequantize(j)?.into_iter().map(|v| T::Acc::of(f64::from(v))).collect::<Vec<_>>().into())
            }
        }
    }
}

/// Rows of one stacked matrix or vector as accumulators.
fn expert<'a, T: Float>(stack: &'a [T], j: usize, len: usize) -> std::borrow::Cow<'a, [T::Acc]> {
    to_acc(&stack[j * len..(j + 1) * len])
}

fn slot_weights<'a, A: Float>(
    call: &'static str,
    values: Option<TensorRef<'a, Cpu>>,
    segments: &SegmentList,
) -> Result<Option<&'a [A]>> {
    let Some(values) = values else { return Ok(None) };
    Error::check_shape(call, "slot_weights", &[segments.rows], values.dims())?;
    Error::check_dtype(call, "slot_weights", A::DTYPE, values.dtype())?;
    values.as_slice::<A>().map(Some)
}

fn bias_of<'a, T: Float>(
    call: &'static str,
    bias: Option<TensorRef<'a, Cpu>>,
    dims: [usize; 2],
) -> Result<Option<&'a [T]>> {
    let Some(bias) = bias else { return Ok(None) };
    Error::check_shape(call, "bias", &dims, bias.dims())?;
    Error::check_dtype(call, "bias", T::DTYPE, bias.dtype())?;
    bias.as_slice::<T>().map(Some)
}

fn out_of<'a, T: Float>(
    call: &'static str,
    name: &str,
    out: Option<TensorMut<'a, Cpu>>,
    dims: &[usize],
) -> Result<Option<&'a mut [T]>> {
    let Some(out) = out else { return Ok(None) };
    Error::check_shape(call, name, dims, out.dims())?;
    Error::check_dtype(call, name, T::DTYPE, out.dtype())?;
    out.into_slice::<T>().map(Some)
}

/// Weight that applies at one of `places`, if any.
fn applies<'a>(weights: &Option<SlotWeights<'a, Cpu>>, places: &[WeightAt]) -> Option<TensorRef<'a, Cpu>> {
    weights.as_ref().filter(|w| places.contains(&w.at)).map(|w| w.values)
}

/// Runs `tile(side, expert, slots)` over all tiles, and stores the accumulators of the rows that it returns.
///
/// `sides` are what each tile writes beside its rows, one element a tile.
fn write_rows<T: Float, S: Send>(
    call: &'static str,
    segments: &SegmentList,
    dest: RowDest<'_, Cpu>,
    width: usize,
    sides: Vec<S>,
    tile: impl Fn(S, usize, Range<usize>) -> Result<Vec<T::Acc>> + Sync,
) -> Result<()> {
    Error::check_shape(call, "out", &[segments.rows, width], dest.base.dims())?;
    let out = dest.base.into_slice::<T>()?;
    let parts: Vec<_> = cut(segments.split(out, width), width).collect();
    tiles(segments).into_par_iter().zip(parts).zip(sides).try_for_each(|(((j, slots), out), side)| {
        store(out, &tile(side, j, slots)?, dest.accumulate);
        Ok(())
    })
}

pub(super) fn up(call: Up<'_, Cpu>) -> Result<()> {
    with_float!("up", "rows", call.rows.base.dtype(), T => up_as::<T>(call))
}

fn up_as<T: Float>(call: Up<'_, Cpu>) -> Result<()> {
    const CALL: &str = "up";
    let [experts, n, h] = dims3(CALL, "weight", call.weight.dims())?;
    let segments = SegmentList::new(CALL, call.segments, experts)?;
    let inner = n / call.activation.gate_factor();
    if n % call.activation.gate_factor() != 0 {
        return Err(Error::invalid(CALL, "weight", "an even number of rows for a gated activation", n));
    }
    let rows = RowView::<T>::new(CALL, "rows", call.rows, h, &segments)?;
    let weight = WeightStack::<T>::new(CALL, call.weight)?;
    let bias = bias_of::<T>(CALL, call.bias, [experts, n])?;
    let at_input = slot_weights::<T::Acc>(CALL, applies(&call.slot_weights, &[WeightAt::Input]), &segments)?;
    let at_activation = slot_weights::<T::Acc>(CALL, applies(&call.slot_weights, &[WeightAt::Activation]), &segments)?;
    let pre = out_of::<T>(CALL, "pre", call.pre, &[segments.rows, n])?;
    let pre = cut_option(&segments, pre, n);

    write_rows::<T, _>(CALL, &segments, call.out, inner, pre, |pre, j, slots| {
        let x = rows.get(slots.clone());
        let mut sums = vec![T::Acc::zero(); slots.len() * n];
        by_rows(&mut sums, &x, &weight.expert(j, n * h)?, [n, h]);
        let bias = bias.map(|b| expert(b, j, n));
        let mut out = vec![T::Acc::zero(); slots.len() * inner];
        for ((s, sums), out) in slots.clone().zip(sums.chunks_exact_mut(n)).zip(out.chunks_exact_mut(inner)) {
            if let Some(w) = at_input {
                sums.iter_mut().for_each(|v| *v *= w[s]);
            }
            if let Some(bias) = &bias {
                sums.iter_mut().zip(bias.iter()).for_each(|(v, b)| *v += *b);
            }
            activation::forward(call.activation, sums, out);
            if let Some(w) = at_activation {
                out.iter_mut().for_each(|v| *v *= w[s]);
            }
        }
        if let Some(pre) = pre {
            store(pre, &sums, false);
        }
        Ok(out)
    })
}

pub(super) fn down(call: Down<'_, Cpu>) -> Result<()> {
    with_float!("down", "rows", call.rows.base.dtype(), T => down_as::<T>(call))
}

fn down_as<T: Float>(call: Down<'_, Cpu>) -> Result<()> {
    const CALL: &str = "down";
    let [experts, h, inner] = dims3(CALL, "weight", call.weight.dims())?;
    let segments = SegmentList::new(CALL, call.segments, experts)?;
    let rows = RowView::<T>::new(CALL, "rows", call.rows, inner, &segments)?;
    let weight = WeightStack::<T>::new(CALL, call.weight)?;
    let bias = bias_of::<T>(CALL, call.bias, [experts, h])?;
    let at_output = slot_weights::<T::Acc>(CALL, applies(&call.slot_weights, &[WeightAt::Output]), &segments)?;
    let on_bias = applies(&call.slot_weights, &[WeightAt::Output, WeightAt::Activation]);
    let on_bias = slot_weights::<T::Acc>(CALL, on_bias, &segments)?;

    let sides = vec![(); tiles(&segments).len()];
    write_rows::<T, _>(CALL, &segments, call.out, h, sides, |(), j, slots| {
        let x = rows.get(slots.clone());
        let mut sums = vec![T::Acc::zero(); slots.len() * h];
        by_rows(&mut sums, &x, &weight.expert(j, h * inner)?, [h, inner]);
        let bias = bias.map(|b| expert(b, j, h));
        for (s, sums) in slots.zip(sums.chunks_exact_mut(h)) {
            if let Some(w) = at_output {
                sums.iter_mut().for_each(|v| *v *= w[s]);
            }
            if let Some(bias) = &bias {
                let w = on_bias.map_or(num_traits::One::one(), |w| w[s]);
                sums.iter_mut().zip(bias.iter()).for_each(|(v, b)| *v += w * *b);
            }
        }
        Ok(sums)
    })
}

pub(super) fn down_bwd(call: DownBwd<'_, Cpu>) -> Result<()> {
    with_float!("down_bwd", "grad", call.grad.base.dtype(), T => down_bwd_as::<T>(call))
}

fn down_bwd_as<T: Float>(call: DownBwd<'_, Cpu>) -> Result<()> {
    const CALL: &str = "down_bwd";
    let [experts, h, inner] = dims3(CALL, "weight", call.weight.dims())?;
    let n = inner * call.activation.gate_factor();
    let segments = SegmentList::new(CALL, call.segments, experts)?;
    let grad = RowView::<T>::new(CALL, "grad", call.grad, h, &segments)?;
    let weight = WeightStack::<T>::new(CALL, call.weight)?;
    let bias = bias_of::<T>(CALL, call.bias, [experts, h])?;
    Error::check_shape(CALL, "pre", &[segments.rows, n], call.pre.dims())?;
    let pre = call.pre.as_slice::<T>()?;
    let weights = applies(&call.slot_weights, &[WeightAt::Output, WeightAt::Activation]);
    let weights = slot_weights::<T::Acc>(CALL, weights, &segments)?;
    let hidden = out_of::<T>(CALL, "hidden", call.hidden, &[segments.rows, inner])?;
    let d_weights = call.d_slot_weights.filter(|_| weights.is_some());
    let d_weights = out_of::<T::Acc>(CALL, "d_slot_weights", d_weights, &[segments.rows])?;
    let sides = cut_option(&segments, hidden, inner).into_iter().zip(cut_option(&segments, d_weights, 1)).collect();

    write_rows::<T, _>(CALL, &segments, RowDest::direct(call.d_pre), n, sides, |(out, d_weights), j, slots| {
        let g = grad.get(slots.clone());
        let mut d_hidden = vec![T::Acc::zero(); slots.len() * inner];
        by_columns(&mut d_hidden, &g, &weight.expert(j, h * inner)?, [h, inner]);
        let pre = to_acc(&pre[slots.start * n..slots.end * n]);
        let bias = bias.map(|b| expert(b, j, h));
        let mut hidden = vec![T::Acc::zero(); slots.len() * inner];
        let mut d_pre = vec![T::Acc::zero(); slots.len() * n];
        let mut dots = vec![T::Acc::zero(); slots.len()];
        for (r, s) in slots.clone().enumerate() {
            let w = weights.map_or(num_traits::One::one(), |w| w[s]);
            let h_row = &mut hidden[r * inner..(r + 1) * inner];
            dots[r] = activation::backward(
                call.activation,
                &pre[r * n..(r + 1) * n],
                &d_hidden[r * inner..(r + 1) * inner],
                w,
                h_row,
                &mut d_pre[r * n..(r + 1) * n],
            );
            h_row.iter_mut().for_each(|v| *v *= w);
            if let Some(bias) = &bias {
                dots[r] += g[r * h..(r + 1) * h].iter().zip(bias.iter()).map(|(g, b)| *g * *b).sum::<T::Acc>();
            }
        }
        if let Some(out) = out {
            store(out, &hidden, false);
        }
        if let Some(out) = d_weights {
            out.copy_from_slice(&dots);
        }
        Ok(d_pre)
    })
}

pub(super) fn up_dgrad(call: UpDgrad<'_, Cpu>) -> Result<()> {
    with_float!("up_dgrad", "d_pre", call.d_pre.dtype(), T => up_dgrad_as::<T>(call))
}

fn up_dgrad_as<T: Float>(call: UpDgrad<'_, Cpu>) -> Result<()> {
    const CALL: &str = "up_dgrad";
    let [experts, n, h] = dims3(CALL, "weight", call.weight.dims())?;
    let segments = SegmentList::new(CALL, call.segments, experts)?;
    Error::check_shape(CALL, "d_pre", &[segments.rows, n], call.d_pre.dims())?;
    let d_pre = call.d_pre.as_slice::<T>()?;
    let weight = WeightStack::<T>::new(CALL, call.weight)?;
    let (input, d_weights) = match call.input_weight {
        None => (None, None),
        Some(b) => {
            let values = slot_weights::<T::Acc>(CALL, Some(b.values), &segments)?;
            let rows = RowView::<T>::new(CALL, "input_weight.rows", b.rows, h, &segments)?;
            (values.map(|v| (v, rows)), out_of::<T::Acc>(CALL, "d_slot_weights", b.d_slot_weights, &[segments.rows])?)
        }
    };
    let sides = cut_option(&segments, d_weights, 1);

    write_rows::<T, _>(CALL, &segments, call.out, h, sides, |d_weights, j, slots| {
        let d = to_acc(&d_pre[slots.start * n..slots.end * n]);
        let mut sums = vec![T::Acc::zero(); slots.len() * h];
        by_columns(&mut sums, &d, &weight.expert(j, n * h)?, [n, h]);
        if let Some((w, rows)) = &input {
            let x = rows.get(slots.clone());
            let dots: Vec<T::Acc> = sums
                .chunks_exact(h)
                .zip(x.chunks_exact(h))
                .map(|(d, x)| d.iter().zip(x).map(|(d, x)| *d * *x).sum())
                .collect();
            for (s, row) in slots.zip(sums.chunks_exact_mut(h)) {
                row.iter_mut().for_each(|v| *v *= w[s]);
            }
            if let Some(out) = d_weights {
                out.copy_from_slice(&dots);
            }
        }
        Ok(sums)
    })
}

pub(super) fn wgrad(call: Wgrad<'_, Cpu>) -> Result<()> {
    with_float!("wgrad", "left", call.left.base.dtype(), T => {
        match in_accumulator::<T>(&call.out) {
            true => wgrad_as::<T, <T as Float>::Acc>(call),
            false => wgrad_as::<T, T>(call),
        }
    })
}

/// Whether a gradient is in the type of its sums rather than its weight's.
fn in_accumulator<T: Float>(out: &TensorMut<'_, Cpu>) -> bool {
    out.dtype() == <T::Acc as Element>::DTYPE
}

/// A weight gradient of rows in `T` into one in `O`.
fn wgrad_as<T: Float, O: Float<Acc = T::Acc>>(call: Wgrad<'_, Cpu>) -> Result<()> {
    const CALL: &str = "wgrad";
    let [experts, m, p] = dims3(CALL, "out", call.out.dims())?;
    let segments = SegmentList::new(CALL, call.segments, experts)?;
    let left = RowView::<T>::new(CALL, "left", call.left, m, &segments)?;
    let right = RowView::<T>::new(CALL, "right", call.right, p, &segments)?;
    let weights = slot_weights::<T::Acc>(CALL, call.slot_weights, &segments)?;
    let out = call.out.into_slice::<O>()?;
    let accumulate = call.accumulate;
    out.par_chunks_mut(m * p).enumerate().for_each(|(j, out)| {
        let segment = segments.filled[j].clone();
        if segment.is_empty() {
            if !accumulate {
                out.fill(O::default());
            }
            return;
        }
        let mut sums = vec![T::Acc::zero(); m * p];
        for start in segment.clone().step_by(WGRAD_SLOTS) {
            let slots = start..segment.end.min(start + WGRAD_SLOTS);
            let mut l = left.get(slots.clone());
            let r = right.get(slots.clone());
            if let Some(w) = weights {
                for (row, s) in l.to_mut().chunks_exact_mut(m).zip(slots.clone()) {
                    row.iter_mut().for_each(|v| *v *= w[s]);
                }
            }
            let (l, r) = (Mat::rows(&l, slots.len(), m), Mat::rows(&r, slots.len(), p));
            sums.par_chunks_mut(WGRAD_ROWS * p).enumerate().for_each(|(b, sums)| {
                product(sums, start > segment.start, l.columns(b * WGRAD_ROWS, sums.len() / p).t(), r);
            });
        }
        store(out, &sums, accumulate);
    });
    match call.bias {
        Some(bias) if in_accumulator::<T>(&bias.out) => {
            bias_grad::<T, T::Acc>(bias, accumulate, &left, &segments, [experts, m])
        }
        Some(bias) => bias_grad::<T, T>(bias, accumulate, &left, &segments, [experts, m]),
        None => Ok(()),
    }
}

fn bias_grad<T: Float, O: Float<Acc = T::Acc>>(
    bias: BiasGrad<'_, Cpu>,
    accumulate: bool,
    left: &RowView<'_, T>,
    segments: &SegmentList,
    dims: [usize; 2],
) -> Result<()> {
    const CALL: &str = "wgrad";
    let weights = slot_weights::<T::Acc>(CALL, bias.slot_weights, segments)?;
    Error::check_shape(CALL, "bias.out", &dims, bias.out.dims())?;
    let m = dims[1];
    bias.out.into_slice::<O>()?.par_chunks_mut(m).enumerate().for_each(|(j, out)| {
        let mut sums = vec![T::Acc::zero(); m];
        let segment = segments.filled[j].clone();
        for start in segment.clone().step_by(WGRAD_SLOTS) {
            let slots = start..segment.end.min(start + WGRAD_SLOTS);
            let rows = left.get(slots.clone());
            for (row, s) in rows.chunks_exact(m).zip(slots) {
                let w = weights.map_or(num_traits::One::one(), |w| w[s]);
                sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += w * *v);
            }
        }
        store(out, &sums, accumulate);
    });
    Ok(())
}
