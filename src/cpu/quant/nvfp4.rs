//! NVFP4 on the CPU.

use rayon::prelude::*;

use super::lines::{Lines, write_lines};
use crate::cpu::Cpu;
use crate::error::Result;
use crate::quant::Hadamard;
use crate::quant::Matrix;
use crate::quant::nvfp4::{Bits, Factors, block_factor, magnitude, max_nan};
use crate::quant::{Amax, Dequantize, Nvfp4Mut, Quantize};
use crate::quant::{AmaxScope, Blocks, Direction, Nvfp4, Recipe, Rounding};
use crate::quant::{NVFP4_BLOCK, check, decode_fp4};
use crate::tensor::TensorMut;

const CALL: &str = "quantize_cast_only";
/// Lines of a panel: a row of tiles.
const PANEL_LINES: usize = NVFP4_BLOCK;

pub(super) fn amax(name: &'static str, calls: Vec<Amax<'_, Cpu>>) -> Result<()> {
    calls.iter().try_for_each(|call| check::amax(name, call))?;
    for call in calls {
        let Amax { format, matrix, rows, columns } = call;
        match (rows, columns) {
            // Both have the same largest magnitude.
            (Some(rows), Some(columns)) if format.scope == AmaxScope::Matrix && format.hadamard.is_none() => {
                let rows = amax_of(format, matrix, Direction::Rows, rows)?;
                columns.into_slice::<f32>()?.copy_from_slice(rows);
            }
            (rows, columns) => {
                // Where one is as good as the other, the rows, which usually are what lies together.
                let columns_as = match format.scope == AmaxScope::Matrix && format.hadamard.is_none() {
                    true => Direction::Rows,
                    false => Direction::Columns,
                };
                if let Some(rows) = rows {
                    amax_of(format, matrix, Direction::Rows, rows)?;
                }
                if let Some(columns) = columns {
                    amax_of(format, matrix, columns_as, columns)?;
                }
            }
        }
    }
    Ok(())
}

fn amax_of<'a>(
    format: &Nvfp4,
    matrix: Matrix<'_, Cpu>,
    direction: Direction,
    out: TensorMut<'a, Cpu>,
) -> Result<&'a [f32]> {
    let out = out.into_slice::<f32>()?;
    let panels = Panels::new(format, matrix, direction)?;
    match format.scope {
        AmaxScope::Line => {
            out.par_chunks_mut(PANEL_LINES).enumerate().for_each_init(Vec::new, |panel, (index, out)| {
                panels.load(index, panel);
                for (amax, line) in out.iter_mut().zip(panel.chunks_exact(panels.width.max(1))) {
                    *amax = magnitude(line);
                }
                if panels.width == 0 {
                    out.fill(0.0);
                }
            });
        }
        // However many lines of nothing there are.
        AmaxScope::Matrix if panels.width == 0 => out.fill(0.0),
        AmaxScope::Matrix => {
            let panel_max = |panel: &mut Vec<f32>, index| {
                panels.load(index, panel);
                magnitude(panel)
            };
            let indices = (0..panels.lines.count().div_ceil(PANEL_LINES)).into_par_iter();
            out.fill(indices.map_init(Vec::new, panel_max).reduce(|| 0.0, max_nan));
        }
    }
    Ok(out)
}

/// The lines to quantize, 16 at a time, transformed and padded with zeros to whole blocks.
struct Panels<'a> {
    lines: Lines<'a>,
    width: usize,
    transform: Option<Hadamard>,
}

impl<'a> Panels<'a> {
    fn new(format: &Nvfp4, matrix: Matrix<'a, Cpu>, direction: Direction) -> Result<Self> {
        let lines = Lines::of(matrix.towards(direction))?;
        let width = lines.len().next_multiple_of(NVFP4_BLOCK);
        Ok(Self { lines, width, transform: format.hadamard.filter(|_| direction == Direction::Columns) })
    }

    fn load(&self, index: usize, panel: &mut Vec<f32>) {
        let lines = index * PANEL_LINES..self.lines.count().min((index + 1) * PANEL_LINES);
        panel.clear();
        panel.resize(lines.len() * self.width, 0.0);
        if self.width == 0 {
            return;
        }
        self.lines.load(lines, self.width, panel);
        if let Some(transform) = self.transform {
            panel.as_chunks_mut().0.iter_mut().for_each(|block| transform.apply(block));
        }
    }
}

pub(super) fn cast(call: Quantize<'_, Cpu>) -> Result<()> {
    check::quantize(CALL, &call)?;
    let Quantize { format, matrix, rows, columns } = call;
    // Both sides are checked before the first writes.
    let rows = rows.map(|side| Cast::new(format, matrix, Direction::Rows, side)).transpose()?;
    let columns = columns.map(|side| Cast::new(format, matrix, Direction::Columns, side)).transpose()?;
    rows.into_iter().chain(columns).for_each(Cast::run);
    Ok(())
}

/// One direction's work.
struct Cast<'a> {
    format: &'a Nvfp4,
    panels: Panels<'a>,
    bits: Option<Bits>,
    amax: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<'a> Cast<'a> {
    fn new(format: &'a Nvfp4, matrix: Matrix<'a, Cpu>, direction: Direction, side: Nvfp4Mut<'a, Cpu>) -> Result<Self> {
        let panels = Panels::new(format, matrix, direction)?;
        let bits = match format.rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic(random) => {
                let counts = [panels.lines.count(), panels.width / NVFP4_BLOCK];
                Some(Bits::new(CALL, random, direction, counts)?)
            }
        };
        let amax = side.amax.into_slice::<f32>()?;
        Ok(Self { format, panels, bits, amax, codes: side.codes.into_data(), scales: side.scales.into_data() })
    }

    fn run(self) {
        let Self { format, panels, bits, amax, codes, scales } = self;
        let (lines, blocks) = (panels.lines.count(), panels.width / NVFP4_BLOCK);
        if lines == 0 || blocks == 0 {
            return;
        }
        let bytes = codes.len() / lines;
        let outputs = codes.par_chunks_mut(PANEL_LINES * bytes).zip(scales.par_chunks_mut(PANEL_LINES * blocks));
        outputs.enumerate().for_each_init(Vec::new, |panel, (index, (codes, scales))| {
            panels.load(index, panel);
            let tiles = match format.blocks {
                Blocks::Line => None,
                Blocks::Tile => Some(tile_magnitudes(panel, panels.width)),
            };
            let rows = panel.chunks_exact(panels.width);
            for (line, ((values, codes), scales)) in
                rows.zip(codes.chunks_exact_mut(bytes)).zip(scales.chunks_exact_mut(blocks)).enumerate()
            {
                let line = index * PANEL_LINES + line;
                let factors = Factors::new(format.recipe, if amax.len() == 1 { amax[0] } else { amax[line] });
                let parts = values.as_chunks().0.iter().zip(codes.chunks_mut(NVFP4_BLOCK / 2)).zip(scales);
                for (block, ((values, codes), scale)) in parts.enumerate() {
                    *scale = factors.scale(tiles.as_ref().map_or_else(|| magnitude(values), |tiles| tiles[block]));
                    factors.encode(values, *scale, bits.map(|bits| bits.of(line, block)), codes);
                }
            }
        });
    }
}

/// Largest magnitude of each tile of a panel.
fn tile_magnitudes(panel: &[f32], width: usize) -> Vec<f32> {
    let mut tiles = vec![0.0; width / NVFP4_BLOCK];
    for line in panel.chunks_exact(width) {
        for (tile, values) in tiles.iter_mut().zip(line.chunks_exact(NVFP4_BLOCK)) {
            *tile = max_nan(*tile, magnitude(values));
        }
    }
    tiles
}

pub(super) fn dequantize(call: &'static str, calls: Vec<Dequantize<'_, Cpu>>) -> Result<()> {
    // All are checked before the first is written.
    let dims = calls.iter().map(|c| check::dequantize(call, c)).collect::<Result<Vec<_>>>()?;
    calls.into_iter().zip(dims).try_for_each(|(call, [_, len])| dequantize_one(call, len))
}

fn dequantize_one(call: Dequantize<'_, Cpu>, len: usize) -> Result<()> {
    let Dequantize { format, codes, scales, amax, out } = call;
    let amax = amax.as_slice::<f32>()?;
    let (bytes, blocks) = (codes.row_bytes(), scales.row_bytes());
    let (codes, scales, recipe) = (codes.data(), scales.data(), format.recipe);
    write_lines(out, [len, bytes * 2], |line, values| {
        let amax = if amax.len() == 1 { amax[0] } else { amax[line] };
        let scales = &scales[line * blocks..(line + 1) * blocks];
        let factors: Vec<f32> = scales.iter().map(|scale| block_factor(recipe, *scale, amax)).collect();
        decode_fp4(&codes[line * bytes..(line + 1) * bytes], &factors, NVFP4_BLOCK, values);
        if recipe == Recipe::ModelOpt {
            // Its table has +0 for code 8.
            values.iter_mut().for_each(|value| *value += 0.0);
        }
    })
}
