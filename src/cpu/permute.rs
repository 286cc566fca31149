//! Moving and adding rows, and the elementwise sigmoid.

use std::ops::Range;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{ConcatRows, GatherRows, Origin, ReduceRows, Sigmoid, SplitRows};
use crate::tensor::TensorRef;

use super::Cpu;
use super::element::{Acc, Float, with_acc, with_float};
use super::heuristics::{PARALLEL_BYTES, TASK_BYTES};

pub(super) fn gather_rows(call: GatherRows<'_, Cpu>) -> Result<()> {
    const CALL: &str = "gather_rows";
    let row = call.source.row_bytes();
    Error::check_dtype(CALL, "out", call.source.dtype(), call.out.dtype())?;
    Error::check_shape(CALL, "out", &[call.map.count(), row], &[call.out.rows(), call.out.row_bytes()])?;
    let map = row_map(CALL, call.map, call.source.rows(), call.origin)?;
    let (source, out) = (call.source.data(), call.out.into_data());
    in_tasks(row, out, &|rows, out| {
        for (&from, to) in map[rows].iter().zip(out.chunks_exact_mut(row)) {
            match usize::try_from(from) {
                Ok(from) => to.copy_from_slice(&source[from * row..(from + 1) * row]),
                Err(_) => to.fill(0),
            }
        }
    });
    Ok(())
}

pub(super) fn concat_rows(call: ConcatRows<'_, Cpu>) -> Result<()> {
    let at = call.check("concat_rows")?;
    let (left, right) = (call.left.data(), call.right.map_or(&[][..], |t| t.data()));
    in_tasks(at.whole, call.out.into_data(), &|rows, out| {
        for (row, out) in rows.zip(out.chunks_exact_mut(at.whole)) {
            let (begin, rest) = out.split_at_mut(at.left);
            let (middle, end) = rest.split_at_mut(at.right);
            begin.copy_from_slice(&left[row * at.left..][..at.left]);
            middle.copy_from_slice(&right[row * at.right..][..at.right]);
            end.fill(0);
        }
    });
    Ok(())
}

pub(super) fn split_rows(call: SplitRows<'_, Cpu>) -> Result<()> {
    let at = call.check("split_rows")?;
    let source = call.source.data();
    let part = |out: &mut [u8], first: usize, bytes: usize| {
        in_tasks(bytes, out, &|rows, out| {
            for (row, out) in rows.zip(out.chunks_exact_mut(bytes)) {
                out.copy_from_slice(&source[row * at.whole + first..][..bytes]);
            }
        });
    };
    part(call.left.into_data(), 0, at.left);
    if let Some(right) = call.right {
        part(right.into_data(), at.left, at.right);
    }
    Ok(())
}

pub(super) fn reduce_rows(call: ReduceRows<'_, Cpu>) -> Result<()> {
    const CALL: &str = "reduce_rows";
    Error::check_dtype(CALL, "out", call.source.dtype(), call.out.dtype())?;
    let (tokens, row) = (call.out.rows(), call.out.row_bytes());
    Error::check_shape(CALL, "map", &[tokens], &[call.map.rows()])?;
    Error::check_shape(CALL, "source", &[row], &[call.source.row_bytes()])?;
    let map = row_map(CALL, call.map, call.source.rows(), call.origin)?;
    let width = map.len().checked_div(tokens).unwrap_or(0);
    with_float!(CALL, "source", call.source.dtype(), T => {
        let source = call.source.as_slice::<T>()?;
        let h = row / size_of::<T>();
        in_tasks(h, call.out.into_slice::<T>()?, &|rows, out| {
            let mut acc = vec![<T as Float>::Acc::default(); h];
            for (t, to) in rows.zip(out.chunks_exact_mut(h)) {
                add_rows(source, &map[t * width..(t + 1) * width], &mut acc, to);
            }
        });
        Ok(())
    })
}

/// One output row: the chosen rows in the order of the map, rounded once.
fn add_rows<T: Float>(source: &[T], map: &[i32], acc: &mut [T::Acc], out: &mut [T]) {
    let h = out.len();
    let mut first = true;
    for from in map.iter().filter_map(|r| usize::try_from(*r).ok()) {
        let row = &source[from * h..(from + 1) * h];
        if first {
            acc.iter_mut().zip(row).for_each(|(a, v)| *a = v.to_acc());
        } else {
            acc.iter_mut().zip(row).for_each(|(a, v)| *a += v.to_acc());
        }
        first = false;
    }
    if first {
        out.fill(T::default());
    } else {
        out.iter_mut().zip(acc).for_each(|(o, a)| *o = T::from_acc(*a));
    }
}

pub(super) fn sigmoid(call: Sigmoid<'_, Cpu>) -> Result<()> {
    const CALL: &str = "sigmoid";
    Error::check_dtype(CALL, "out", call.value.dtype(), call.out.dtype())?;
    Error::check_shape(CALL, "out", &[call.value.count()], &[call.out.count()])?;
    if let Some(grad) = &call.grad {
        Error::check_dtype(CALL, "grad", call.value.dtype(), grad.dtype())?;
        Error::check_shape(CALL, "grad", &[call.value.count()], &[grad.count()])?;
    }
    with_acc!(CALL, "value", call.value.dtype(), A => {
        let value = call.value.as_slice::<A>()?;
        let grad = call.grad.map(|g| g.as_slice::<A>()).transpose()?;
        let one = A::of(1.0);
        in_tasks(1, call.out.into_slice::<A>()?, &|range, out| match grad {
            None => out.iter_mut().zip(&value[range]).for_each(|(o, v)| *o = one / (one + (-*v).exp())),
            Some(grad) => {
                let terms = value[range.clone()].iter().zip(&grad[range]);
                out.iter_mut().zip(terms).for_each(|(o, (s, g))| *o = *g * *s * (one - *s));
            }
        });
        Ok(())
    })
}

/// The entries of a row map, all below `rows`.
fn row_map<'a>(
    call: &'static str,
    map: TensorRef<'a, Cpu>,
    rows: usize,
    Origin { rank, layer }: Origin,
) -> Result<&'a [i32]> {
    Error::check_dtype(call, "map", DType::I32, map.dtype())?;
    let entries = map.as_slice::<i32>()?;
    match entries.iter().position(|r| usize::try_from(*r).is_ok_and(|r| r >= rows)) {
        None => Ok(entries),
        Some(entry) => {
            let (map, found) = ("map".to_string(), Some(i64::from(entries[entry])));
            Err(Error::RowMap { call, rank, layer, map, entry, found })
        }
    }
}

/// Runs `body` over blocks of rows of `width` elements, in parallel where that pays.
fn in_tasks<T: Send>(width: usize, out: &mut [T], body: &(impl Fn(Range<usize>, &mut [T]) + Sync)) {
    if width == 0 || out.is_empty() {
        return;
    }
    if size_of_val(out) < PARALLEL_BYTES {
        return body(0..out.len() / width, out);
    }
    let rows = (TASK_BYTES / (width * size_of::<T>())).max(1);
    out.par_chunks_mut(rows * width).enumerate().for_each(|(task, block)| {
        let first = task * rows;
        body(first..first + block.len() / width, block);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Tensor, TensorMut};
    use half::bf16;

    #[test]
    fn gather_copies_and_zeroes() -> Result<()> {
        let source = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], &[2, 2])?;
        let map = Tensor::from_vec(vec![1i32, -1, 0], &[3])?;
        let mut out = Tensor::empty(&Cpu::poisoning(), DType::F32, &[3, 2])?;
        let origin = Origin { rank: 2, layer: 9 };
        gather_rows(GatherRows { source: source.view(), map: map.view(), origin, out: out.view_mut() })?;
        assert_eq!(out.as_slice::<f32>()?, [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
        let far = Tensor::from_vec(vec![0i32, 2, 0], &[3])?;
        let error = gather_rows(GatherRows { source: source.view(), map: far.view(), origin, out: out.view_mut() });
        let text = error.err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(text, "gather_rows on rank 2, layer 9: map[1]: expected a row of its tensor, found 2");
        Ok(())
    }

    #[test]
    fn joined_rows_end_in_zeros_and_come_apart() -> Result<()> {
        // Few and many: serial and parallel.
        for rows in [0, 3, 20_000] {
            let bytes =
                |seed: usize, width: usize| (0..rows * width).map(|i| (i * seed % 251) as u8).collect::<Vec<_>>();
            let (left, right) = (bytes(7, 18), bytes(11, 4));
            let of = |values: &[u8], width| Tensor::from_vec(values.to_vec(), &[rows, width]);
            let (l, r) = (of(&left, 18)?, of(&right, 4)?);
            let empty = |width| Tensor::empty(&Cpu::poisoning(), DType::U8, &[rows, width]);
            let mut whole = empty(32)?;
            concat_rows(ConcatRows { left: l.view(), right: Some(r.view()), out: whole.view_mut() })?;
            for (i, row) in whole.as_slice::<u8>()?.chunks(32).enumerate() {
                assert_eq!((&row[..18], &row[18..22]), (&left[i * 18..][..18], &right[i * 4..][..4]));
                assert_eq!(row[22..], [0; 10]);
            }
            let (mut a, mut b) = (empty(18)?, empty(4)?);
            split_rows(SplitRows { source: whole.view(), left: a.view_mut(), right: Some(b.view_mut()) })?;
            assert!(a.as_bytes() == left && b.as_bytes() == right);
        }
        let narrow = Tensor::from_vec(vec![0u8; 42], &[2, 21])?;
        let (mut a, mut b) = (Tensor::from_vec(vec![0u8; 36], &[2, 18])?, Tensor::from_vec(vec![0u8; 8], &[2, 4])?);
        let error = split_rows(SplitRows { source: narrow.view(), left: a.view_mut(), right: Some(b.view_mut()) });
        assert!(matches!(error, Err(Error::Invalid { ref name, .. }) if name == "tensor source"), "{error:?}");
        Ok(())
    }

    /// Parallel and serial paths agree, and sums run in f32: 1 + 256·2⁻⁹ is 1.5 only if no term is lost to bf16.
    #[test]
    fn reduce_accumulates_in_f32() -> Result<()> {
        let (tokens, k, h) = (1000, 257, 256);
        let mut rows = vec![bf16::from_f32(1.0); h];
        rows.extend(vec![bf16::from_f32(2f32.powi(-9)); h]);
        let source = Tensor::from_vec(rows, &[2, h])?;
        let mut line = vec![1i32; k];
        line[0] = 0;
        let map = Tensor::from_vec(line.repeat(tokens), &[tokens, k])?;
        let mut out = Tensor::empty(&Cpu::poisoning(), DType::BF16, &[tokens, h])?;
        let origin = Origin::default();
        reduce_rows(ReduceRows { source: source.view(), map: map.view(), origin, out: out.view_mut() })?;
        assert!(out.as_slice::<bf16>()?.iter().all(|v| v.to_f32() == 1.5));
        Ok(())
    }

    #[test]
    fn sigmoid_and_slope() -> Result<()> {
        let x = [0f64, 2.0, -2.0];
        let mut y = [0f64; 3];
        sigmoid(Sigmoid {
            value: TensorRef::from_slice(&x, &[3])?,
            grad: None,
            out: TensorMut::from_slice(&mut y, &[3])?,
        })?;
        assert_eq!(y[0], 0.5);
        assert!((y[1] + y[2] - 1.0).abs() < 1e-15);
        let mut d = [0f64; 3];
        sigmoid(Sigmoid {
            value: TensorRef::from_slice(&y, &[3])?,
            grad: Some(TensorRef::from_slice(&[1.0, 3.0, 1.0], &[3])?),
            out: TensorMut::from_slice(&mut d, &[3])?,
        })?;
        assert_eq!(d[0], 0.25);
        assert!((d[1] - 3.0 * d[2]).abs() < 1e-15);
        Ok(())
    }
}
