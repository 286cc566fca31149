//! Rows of fp8 blocks on the CPU.

use rayon::prelude::*;

use super::lines::{Lines, write_lines};
use crate::cpu::Cpu;
use crate::cpu::heuristics::TASK_ELEMENTS;
use crate::error::Result;
use crate::quant::{DequantizeFp8Block, QuantizeFp8Block};
use crate::quant::{E4M3, E4M3_MAX, FP8_BLOCK, check, e4m3_nearest, fp8_block_scale_dims};

/// Bytes of a scale.
const SCALE: usize = size_of::<f32>();
/// Least and largest scale: no smaller one is normal, and the largest power of two stands for an infinite one, by which infinities
/// and zeros would be divided to NaN.
const SCALES: [f32; 2] = [f32::MIN_POSITIVE, f32::from_bits(254 << 23)];

/// Scale of a block with these elements. `f32::max` skips NaN.
fn scale_of(values: &[f32]) -> f32 {
    let amax = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    (amax / E4M3_MAX).clamp(SCALES[0], SCALES[1])
}

/// A row's codes and scales.
fn quantize_row(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = values.chunks(FP8_BLOCK).zip(codes.chunks_mut(FP8_BLOCK)).zip(scales.chunks_exact_mut(SCALE));
    for ((values, codes), to) in blocks {
        let scale = scale_of(values);
        to.copy_from_slice(&scale.to_ne_bytes());
        for (code, value) in codes.iter_mut().zip(values) {
            *code = e4m3_nearest(value / scale);
        }
    }
}

pub(super) fn quantize(call: QuantizeFp8Block<'_, Cpu>) -> Result<()> {
    check::quantize_fp8_block("quantize_fp8_block", &call)?;
    let lines = Lines::of(call.matrix)?;
    let columns = lines.len();
    if lines.count() == 0 || columns == 0 {
        return Ok(());
    }
    let (each, width) = (TASK_ELEMENTS.div_ceil(columns), fp8_block_scale_dims([1, columns])[1]);
    let (codes, scales) = (call.rows.codes.into_data(), call.rows.scales.into_data());
    let panels = codes.par_chunks_mut(each * columns).zip(scales.par_chunks_mut(each * width));
    panels.enumerate().for_each_init(Vec::new, |panel: &mut Vec<f32>, (index, (codes, scales))| {
        panel.resize(codes.len(), 0.0);
        lines.load(index * each..index * each + codes.len() / columns, columns, panel);
        let rows = panel.chunks_exact(columns).zip(codes.chunks_exact_mut(columns)).zip(scales.chunks_exact_mut(width));
        rows.for_each(|((values, codes), scales)| quantize_row(values, codes, scales));
    });
    Ok(())
}

pub(super) fn dequantize(call: &'static str, calls: Vec<DequantizeFp8Block<'_, Cpu>>) -> Result<()> {
    // All are checked before the first is written.
    let dims = calls.iter().map(|c| check::dequantize_fp8_block(call, c)).collect::<Result<Vec<_>>>()?;
    calls.into_iter().zip(dims).try_for_each(|(call, [_, columns])| dequantize_one(call, columns))
}

fn dequantize_one(call: DequantizeFp8Block<'_, Cpu>, columns: usize) -> Result<()> {
    let (codes, width) = (call.codes.data(), fp8_block_scale_dims([1, columns])[1]);
    let scales: &[u8] = call.scales.data();
    write_lines(call.out, [columns, columns], |row, values| {
        let codes = &codes[row * columns..(row + 1) * columns];
        let (scales, _) = scales[row * width..(row + 1) * width].as_chunks();
        let blocks = values.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK)).zip(scales);
        for ((values, codes), scale) in blocks {
            let scale = f32::from_ne_bytes(*scale);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = E4M3[*code as usize] * scale;
            }
        }
    })
}
