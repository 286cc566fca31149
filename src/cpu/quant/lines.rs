//! Lines of a strided matrix as binary32, and lines of binary32 as what an output holds.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::cpu::heuristics::TASK_ELEMENTS;
use crate::cpu::{Cpu, Float};
use crate::dtype::DType;
use crate::error::Result;
use crate::quant::{Layout, Matrix};
use crate::tensor::TensorMut;

#[derive(Clone, Copy)]
enum MatrixElements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// A matrix whose lines can be read.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    elements: MatrixElements<'a>,
    layout: Layout,
}

impl<'a> Lines<'a> {
    pub(super) fn of(matrix: Matrix<'a, Cpu>) -> Result<Self> {
        let base = matrix.base();
        let elements = match matrix.dtype() {
            DType::BF16 => MatrixElements::Bf16(base.as_slice()?),
            DType::F16 => MatrixElements::F16(base.as_slice()?),
            _ => MatrixElements::F32(base.as_slice()?),
        };
        Ok(Self { elements, layout: matrix.layout() })
    }

    pub(super) fn count(&self) -> usize {
        self.layout.dims[0]
    }

    /// Elements of a line.
    pub(super) fn len(&self) -> usize {
        self.layout.dims[1]
    }

    /// Reads lines to rows of `width` elements each, at least a line's; the rest of a row is not written.
    pub(super) fn load(&self, lines: Range<usize>, width: usize, panel: &mut [f32]) {
        match self.elements {
            MatrixElements::F32(values) => widen(values, self.layout, lines, width, panel),
            MatrixElements::Bf16(values) => widen(values, self.layout, lines, width, panel),
            MatrixElements::F16(values) => widen(values, self.layout, lines, width, panel),
        }
    }
}

fn widen<T: Float<Acc = f32>>(from: &[T], layout: Layout, lines: Range<usize>, width: usize, panel: &mut [f32]) {
    let Layout { offset, dims: [_, len], strides: [across, along] } = layout;
    let first = offset + lines.start * across;
    if along <= across {
        for (line, row) in panel.chunks_exact_mut(width).take(lines.len()).enumerate() {
            let line = first + line * across;
            for (k, value) in row[..len].iter_mut().enumerate() {
                *value = from[line + k * along].to_acc();
            }
        }
        return;
    }
    // Lines lie beside one another: what is near in memory is read together.
    for k in 0..len {
        for line in 0..lines.len() {
            panel[line * width + k] = from[first + k * along + line * across].to_acc();
        }
    }
}

/// Lines of `len` elements each of F32, BF16 or F16, every one made by `make(line, scratch)`: the scratch it returns
/// from, of at least `len` values, is rounded to the output's type.
pub(super) fn write_lines(
    out: TensorMut<'_, Cpu>,
    [len, scratch]: [usize; 2],
    make: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<()> {
    fn narrow<T: Float<Acc = f32>>(out: &mut [T], sizes: [usize; 2], make: impl Fn(usize, &mut [f32]) + Sync) {
        let [len, scratch] = sizes;
        let lines = TASK_ELEMENTS.div_ceil(len);
        out.par_chunks_mut(len * lines).enumerate().for_each_init(
            || vec![0.0; scratch],
            |scratch, (task, out)| {
                for (line, out) in out.chunks_exact_mut(len).enumerate() {
                    make(task * lines + line, scratch);
                    for (to, from) in out.iter_mut().zip(scratch.iter()) {
                        *to = T::from_acc(*from);
                    }
                }
            },
        );
    }
    // Scratch is for a line, whose length may be larger than any memory where there is none.
    if out.dims().contains(&0) {
        return Ok(());
    }
    match out.dtype() {
        DType::BF16 => narrow(out.into_slice::<bf16>()?, [len, scratch], make),
        DType::F16 => narrow(out.into_slice::<f16>()?, [len, scratch], make),
        _ => narrow(out.into_slice::<f32>()?, [len, scratch], make),
    }
    Ok(())
}

pub(super) fn first_non_finite(matrix: Matrix<'_, Cpu>) -> Result<Option<[usize; 2]>> {
    let lines = Lines::of(matrix)?;
    let len = lines.len();
    // One of the two may be larger than any memory.
    if len == 0 || lines.count() == 0 {
        return Ok(None);
    }
    let first = |values: &mut Vec<f32>, line| {
        lines.load(line..line + 1, len, values);
        Some([line, values.iter().position(|v| !v.is_finite())?])
    };
    let found = (0..lines.count()).into_par_iter().map_init(|| vec![0.0; len], first);
    Ok(found.find_first(Option::is_some).flatten())
}
