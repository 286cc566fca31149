//! MXFP8 on the CPU.

use rayon::prelude::*;

use super::lines::{Lines, write_lines};
use crate::cpu::Cpu;
use crate::error::Result;
use crate::quant::nvfp4::max_nan;
use crate::quant::{Blocks, Direction, MxScale, Mxfp8};
use crate::quant::{DequantizeMxfp8, Mxfp8Mut, QuantizeMxfp8};
use crate::quant::{E4M3, E4M3_MAX, e4m3_nearest, e8m0, e8m0_ceil, e8m0_floor};
use crate::quant::{MX_BLOCK, check};

/// 2⁸ is the largest power of two in E4M3: what the OCP rule brings a block's own to.
const LARGEST_POWER: f32 = 256.0;
/// 2^(120): a block with an infinity is scaled as if its largest exponent were 128.
const INFINITE: u8 = 247;

/// Scale of a block with these magnitudes.
fn scale_of(rule: MxScale, values: impl Iterator<Item = f32>) -> u8 {
    match rule {
        // `f32::max` skips NaN.
        MxScale::Ceil => e8m0_ceil(values.fold(0.0f32, |max, v| max.max(v.abs())) * (1.0 / E4M3_MAX)),
        MxScale::Floor => match values.fold(0.0, |max, v| max_nan(max, v.abs())) {
            f32::INFINITY => INFINITE,
            max => e8m0_floor(max / LARGEST_POWER),
        },
    }
}

fn code_of(rule: MxScale, value: f32, scale: u8) -> u8 {
    match (rule, scale) {
        // 2^(127 − b), a subnormal where b = 254.
        (MxScale::Ceil, b) => e4m3_nearest(value * e8m0(254 - b.min(254))),
        // The reference divides by the number with these exponent bits, which is infinite.
        (MxScale::Floor, 255) => e4m3_nearest(value / f32::INFINITY),
        (MxScale::Floor, b) => e4m3_nearest(value / e8m0(b).max(f32::MIN_POSITIVE)),
    }
}

pub(super) fn quantize(call: QuantizeMxfp8<'_, Cpu>) -> Result<()> {
    check::quantize_mxfp8("quantize_mxfp8", &call)?;
    let lines = Lines::of(call.matrix)?;
    if lines.count() == 0 || lines.len() == 0 {
        return Ok(());
    }
    if let Some(side) = call.rows {
        one(call.format, lines, Direction::Rows, side);
    }
    if let Some(side) = call.columns {
        one(call.format, lines, Direction::Columns, side);
    }
    Ok(())
}

fn one(format: Mxfp8, lines: Lines<'_>, direction: Direction, side: Mxfp8Mut<'_, Cpu>) {
    let columns = lines.len();
    let [high, wide] = match (format.blocks, direction) {
        (Blocks::Tile, _) => [MX_BLOCK, MX_BLOCK],
        (Blocks::Line, Direction::Rows) => [1, MX_BLOCK],
        (Blocks::Line, Direction::Columns) => [MX_BLOCK, 1],
    };
    let scale_columns = Mxfp8::scale_dims([1, columns], direction)[1];
    // Scales of a panel of 32 rows.
    let panel_scales = match direction {
        Direction::Rows => MX_BLOCK * scale_columns,
        Direction::Columns => scale_columns,
    };
    let (codes, scales) = (side.codes.into_data(), side.scales.into_data());
    let panels = codes.par_chunks_mut(MX_BLOCK * columns).zip(scales.par_chunks_mut(panel_scales));
    panels.enumerate().for_each_init(Vec::new, |panel: &mut Vec<f32>, (index, (codes, scales))| {
        let rows = codes.len() / columns;
        panel.resize(codes.len(), 0.0);
        lines.load(index * MX_BLOCK..index * MX_BLOCK + rows, columns, panel);
        for top in (0..rows).step_by(high) {
            for left in (0..columns).step_by(wide) {
                let (bottom, right) = ((top + high).min(rows), (left + wide).min(columns));
                let places = || (top..bottom).flat_map(|i| (left..right).map(move |j| (i, j)));
                let scale = scale_of(format.scale, places().map(|(i, j)| panel[i * columns + j]));
                for (i, j) in places() {
                    codes[i * columns + j] = code_of(format.scale, panel[i * columns + j], scale);
                }
                match direction {
                    Direction::Rows => (top..bottom).for_each(|i| scales[i * scale_columns + left / MX_BLOCK] = scale),
                    Direction::Columns => scales[left..right].fill(scale),
                }
            }
        }
    });
}

pub(super) fn dequantize(call: &'static str, calls: Vec<DequantizeMxfp8<'_, Cpu>>) -> Result<()> {
    // All are checked before the first is written.
    let dims = calls.iter().map(|c| check::dequantize_mxfp8(call, c)).collect::<Result<Vec<_>>>()?;
    calls.into_iter().zip(dims).try_for_each(|(call, [_, columns])| dequantize_one(call, columns))
}

fn dequantize_one(call: DequantizeMxfp8<'_, Cpu>, columns: usize) -> Result<()> {
    let (codes, scales, direction) = (call.codes.data(), call.scales.data(), call.direction);
    let width = Mxfp8::scale_dims([1, columns], direction)[1];
    write_lines(call.out, [columns, columns], |row, values| {
        let codes = &codes[row * columns..(row + 1) * columns];
        for (j, (value, code)) in values.iter_mut().zip(codes).enumerate() {
            let scale = match direction {
                Direction::Rows => scales[row * width + j / MX_BLOCK],
                Direction::Columns => scales[row / MX_BLOCK * width + j],
            };
            *value = E4M3[*code as usize] * e8m0(scale);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::E4M3;

    #[test]
    fn magnitudes_next_to_the_largest_are_read_as_infinities() {
        let read = |v: f32| {
            let scale = scale_of(MxScale::Ceil, [v].into_iter());
            E4M3[usize::from(code_of(MxScale::Ceil, v, scale))] * e8m0(scale)
        };
        let limit = 248.0 * 2f32.powi(120);
        assert_eq!(read(limit.next_down()), 240.0 * 2f32.powi(120));
        assert_eq!([read(limit), read(f32::MAX), read(-f32::MAX)], [f32::INFINITY, f32::INFINITY, f32::NEG_INFINITY]);
    }
}
