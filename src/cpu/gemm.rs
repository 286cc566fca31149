//! Matrix products: rows by a weight ([`super::ordered`]), a checked wrapper of the `gemm` crate for sums over rows,
//! and the dense products of router and shared gate.

use std::borrow::Cow;

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::kernels::{Linear, LinearBwd};
use crate::tensor::{TensorMut, TensorRef, dims2};

use super::Cpu;
use super::element::{Acc, Float, with_float};
use super::heuristics::ROW_TILE;
use super::ordered::{OrderedProduct, WeightLayout};

/// A strided matrix over a slice.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a, A> {
    data: &'a [A],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, A> Mat<'a, A> {
    /// A row-major matrix.
    pub(super) fn rows(data: &'a [A], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "matrix of {rows} x {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Its transpose.
    pub(super) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Columns `start .. start + count` of a row-major matrix.
    pub(super) fn columns(self, start: usize, count: usize) -> Self {
        assert!(self.col_stride == 1 && start + count <= self.cols, "columns {start}+{count} of {}", self.cols);
        let data = if self.rows == 0 { self.data } else { &self.data[start..] };
        Self { data, cols: count, ..self }
    }
}

/// `x · wᵀ` of rows `[m, k]` and a weight `[n, k]`. One thread: tasks are spread above.
pub(super) fn by_rows<A: Acc>(out: &mut [A], x: &[A], weight: &[A], [n, k]: [usize; 2]) {
    OrderedProduct { out, x, weight, layout: WeightLayout::Rows, k, n }.run();
}

/// `x · w` of rows `[m, k]` and a weight `[k, n]`. One thread: tasks are spread above.
pub(super) fn by_columns<A: Acc>(out: &mut [A], x: &[A], weight: &[A], [k, n]: [usize; 2]) {
    OrderedProduct { out, x, weight, layout: WeightLayout::Columns, k, n }.run();
}

/// `dst = lhs · rhs` or `dst += lhs · rhs`, `dst` row-major and dense. One thread: tasks are spread above. The order of
/// sums depends on all three sizes, so this is for sums over rows: gradients of weights.
pub(super) fn product<A: Acc>(dst: &mut [A], add: bool, lhs: Mat<'_, A>, rhs: Mat<'_, A>) {
    let (m, n, k) = (lhs.rows, rhs.cols, lhs.cols);
    assert!(dst.len() == m * n && rhs.rows == k, "product of {m} x {k} and {} x {n}", rhs.rows);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            dst.fill(A::zero());
        }
        return;
    }
    let last = |a: &Mat<'_, A>| (a.rows - 1) * a.row_stride + (a.cols - 1) * a.col_stride;
    assert!(last(&lhs) < lhs.data.len() && last(&rhs) < rhs.data.len(), "operand out of its slice");
    // SAFETY: the asserts above keep every address (row·row_stride + col·col_stride) of the three matrices inside
    // their slices; `dst` is exclusively borrowed, so it overlaps neither operand; A is f32 or f64, which `gemm`
    // handles.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            n as isize,
            add,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            A::one(),
            A::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Values in their accumulator type: the same memory where that is the type already.
pub(super) fn to_acc<T: Float>(values: &[T]) -> Cow<'_, [T::Acc]> {
    if T::DTYPE == <T::Acc as super::Element>::DTYPE {
        return Cow::Borrowed(bytemuck::cast_slice(values));
    }
    Cow::Owned(values.iter().map(|v| v.to_acc()).collect())
}

/// Stores accumulators, or adds them.
pub(super) fn store<T: Float>(out: &mut [T], values: &[T::Acc], add: bool) {
    for (o, &v) in out.iter_mut().zip(values) {
        *o = T::from_acc(if add { o.to_acc() + v } else { v });
    }
}

/// Values of any floating tensor as accumulators `A`: the same memory where they are.
fn widen<'a, A: Acc>(call: &'static str, name: &str, t: TensorRef<'a, Cpu>) -> Result<Cow<'a, [A]>> {
    if t.dtype() == A::DTYPE {
        return t.as_slice().map(Cow::Borrowed);
    }
    with_float!(call, name, t.dtype(), T => {
        Ok(t.as_slice::<T>()?.iter().map(|v| A::of(v.to_acc().as_f64())).collect())
    })
}

/// Stores accumulators into any floating tensor.
fn narrow<A: Acc>(call: &'static str, name: &str, values: &[A], out: TensorMut<'_, Cpu>) -> Result<()> {
    with_float!(call, name, out.dtype(), T => {
        for (o, v) in out.into_slice::<T>()?.iter_mut().zip(values) {
            *o = T::from_acc(<T as Float>::Acc::of(v.as_f64()));
        }
        Ok(())
    })
}

pub(super) fn linear(call: Linear<'_, Cpu>) -> Result<()> {
    const CALL: &str = "linear";
    let [t, h] = dims2(CALL, "x", call.x.dims())?;
    let [e, _] = weight_dims(CALL, call.weight.dims())?;
    Error::check_shape(CALL, "weight", &[e, h], call.weight.dims())?;
    Error::check_shape(CALL, "out", &[t, e], call.out.dims())?;
    if let Some(bias) = &call.bias {
        Error::check_shape(CALL, "bias", &[e], bias.dims())?;
    }
    Error::check_dtype(CALL, "out", call.x.dtype().accumulator(), call.out.dtype())?;
    with_float!(CALL, "x", call.x.dtype(), T => linear_as::<T>(call, h, e))
}

fn linear_as<T: Float>(call: Linear<'_, Cpu>, h: usize, e: usize) -> Result<()> {
    let weight = widen::<T::Acc>("linear", "weight", call.weight)?;
    let bias = call.bias.map(|b| widen::<T::Acc>("linear", "bias", b)).transpose()?;
    let x = call.x.as_slice::<T>()?;
    let out = call.out.into_slice::<T::Acc>()?;
    let tile = ROW_TILE;
    out.par_chunks_mut(tile * e).zip(x.par_chunks(tile * h)).for_each(|(out, x)| {
        by_rows(out, &to_acc(x), &weight, [e, h]);
        if let Some(bias) = &bias {
            out.chunks_exact_mut(e).for_each(|row| row.iter_mut().zip(&**bias).for_each(|(o, b)| *o += *b));
        }
    });
    Ok(())
}

pub(super) fn linear_bwd(call: LinearBwd<'_, Cpu>) -> Result<()> {
    const CALL: &str = "linear_bwd";
    let [t, h] = dims2(CALL, "x", call.x.dims())?;
    let [e, _] = weight_dims(CALL, call.weight.dims())?;
    Error::check_shape(CALL, "weight", &[e, h], call.weight.dims())?;
    Error::check_shape(CALL, "d_out", &[t, e], call.d_out.dims())?;
    Error::check_dtype(CALL, "d_out", call.x.dtype().accumulator(), call.d_out.dtype())?;
    for (name, expected, found) in [
        ("d_x", vec![t, h], call.d_x.as_ref().map(|d| d.dims())),
        ("d_weight", vec![e, h], call.d_weight.as_ref().map(|d| d.dims())),
        ("d_bias", vec![e], call.d_bias.as_ref().map(|d| d.dims())),
    ] {
        if let Some(found) = found {
            Error::check_shape(CALL, name, &expected, found)?;
        }
    }
    with_float!(CALL, "x", call.x.dtype(), T => linear_bwd_as::<T>(call, h, e))
}

fn linear_bwd_as<T: Float>(call: LinearBwd<'_, Cpu>, h: usize, e: usize) -> Result<()> {
    const CALL: &str = "linear_bwd";
    let d_out = call.d_out.as_slice::<T::Acc>()?;
    let rows = d_out.len() / e;
    if let Some(d_x) = call.d_x {
        let weight = widen::<T::Acc>(CALL, "weight", call.weight)?;
        let d_x = d_x.into_slice::<T>()?;
        let tile = ROW_TILE;
        d_x.par_chunks_mut(tile * h).zip(d_out.par_chunks(tile * e)).for_each(|(d_x, d_out)| {
            let rows = d_out.len() / e;
            let mut sum = vec![<T::Acc as num_traits::Zero>::zero(); rows * h];
            by_columns(&mut sum, d_out, &weight, [e, h]);
            store(d_x, &sum, true);
        });
    }
    if let Some(d_weight) = call.d_weight {
        let x = to_acc(call.x.as_slice::<T>()?);
        let mut sum = vec![<T::Acc as num_traits::Zero>::zero(); e * h];
        product(&mut sum, false, Mat::rows(d_out, rows, e).t(), Mat::rows(&x, rows, h));
        narrow(CALL, "d_weight", &sum, d_weight)?;
    }
    if let Some(d_bias) = call.d_bias {
        let mut sum = vec![<T::Acc as num_traits::Zero>::zero(); e];
        d_out.chunks_exact(e).for_each(|row| sum.iter_mut().zip(row).for_each(|(s, d)| *s += *d));
        narrow(CALL, "d_bias", &sum, d_bias)?;
    }
    Ok(())
}

/// The sizes of a weight, neither of them zero.
fn weight_dims(call: &'static str, dims: &[usize]) -> Result<[usize; 2]> {
    match dims2(call, "weight", dims)? {
        [0, _] => Err(Error::invalid(call, "tensor weight", "at least one row", format!("{dims:?}"))),
        sizes => Ok(sizes),
    }
}
