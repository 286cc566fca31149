//! Joining of ranks' values, for the communicator between threads.

use std::ops::Range;

use half::{bf16, f16};

use crate::comm::ReduceOp;
use crate::dtype::DType;

use super::element::{Acc, Float};

/// Joins equally long byte strings of one dtype in order, floating types in their accumulator type.
pub(crate) fn sum_ranks(op: ReduceOp, dtype: DType, parts: &[&[u8]], out: &mut [u8]) {
    match dtype {
        DType::F64 => floats::<f64>(op, parts, out),
        DType::F32 => floats::<f32>(op, parts, out),
        DType::F16 => floats::<f16>(op, parts, out),
        DType::BF16 => floats::<bf16>(op, parts, out),
        DType::I64 => integers(op, parts, out, i64::wrapping_add),
        DType::I32 => integers(op, parts, out, i32::wrapping_add),
        DType::U8 => integers(op, parts, out, u8::wrapping_add),
    }
}

fn floats<T: Float>(op: ReduceOp, parts: &[&[u8]], out: &mut [u8]) {
    match op {
        ReduceOp::Sum => join(parts, out, T::to_acc, |a, b| a + b, T::from_acc),
        ReduceOp::Max => join(parts, out, T::to_acc, larger, T::from_acc),
    }
}

fn integers<T: bytemuck::Pod + Ord>(op: ReduceOp, parts: &[&[u8]], out: &mut [u8], add: impl Fn(T, T) -> T) {
    match op {
        ReduceOp::Sum => join(parts, out, |v: T| v, add, |v| v),
        ReduceOp::Max => join(parts, out, |v: T| v, T::max, |v| v),
    }
}

/// Adds `scale` times the sum of `parts`, joined in pairs as ((0 + 1) + (2 + 3)) + …, to `main`, which is of the parts'
/// accumulator type; the `first` is added to zeros. A tree over 2N parts is a tree over the sums of N pairs: the same
/// bits wherever it is cut.
pub(crate) fn add_pairwise(dtype: DType, parts: &[&[u8]], scale: f64, first: bool, main: &mut [u8]) {
    fn run<T: Float>(parts: &[&[u8]], (scale, first): (f64, bool), main: &mut [u8]) {
        let (size, scale) = (size_of::<T>(), T::Acc::of(scale));
        for (i, bytes) in main.chunks_exact_mut(size_of::<T::Acc>()).enumerate() {
            let sum = tree::<T>(parts, i * size..(i + 1) * size);
            let before = if first { T::Acc::of(0.0) } else { bytemuck::pod_read_unaligned::<T::Acc>(bytes) };
            let value = before + scale * sum;
            bytes.copy_from_slice(bytemuck::bytes_of(&value));
        }
    }
    let how = (scale, first);
    match dtype {
        DType::F64 => run::<f64>(parts, how, main),
        DType::F32 => run::<f32>(parts, how, main),
        DType::F16 => run::<f16>(parts, how, main),
        DType::BF16 => run::<bf16>(parts, how, main),
        DType::I64 | DType::I32 | DType::U8 => {}
    }
}

fn tree<T: Float>(parts: &[&[u8]], at: Range<usize>) -> T::Acc {
    match parts {
        [] => T::Acc::of(0.0),
        [part] => bytemuck::pod_read_unaligned::<T>(&part[at]).to_acc(),
        _ => {
            let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
            tree::<T>(left, at.clone()) + tree::<T>(right, at)
        }
    }
}

/// The larger of two; NaN wins.
fn larger<A: Acc>(a: A, b: A) -> A {
    if a.is_nan() || a >= b { a } else { b }
}

/// Bytes need not be aligned: each element is read and written by copy.
fn join<T: bytemuck::Pod, A>(
    parts: &[&[u8]],
    out: &mut [u8],
    to: impl Fn(T) -> A,
    add: impl Fn(A, A) -> A,
    from: impl Fn(A) -> T,
) {
    let size = size_of::<T>();
    for (i, to_bytes) in out.chunks_exact_mut(size).enumerate() {
        let mut values = parts.iter().map(|p| to(bytemuck::pod_read_unaligned(&p[i * size..(i + 1) * size])));
        if let Some(first) = values.next() {
            let value = from(values.fold(first, &add));
            to_bytes.copy_from_slice(bytemuck::bytes_of(&value));
        }
    }
}
