//! NVFP4's arithmetic on one block, in binary32 with one rounding an operation and no fused multiply-add, in the
//! order in which the two references have it.

use super::NVFP4_BLOCK as BLOCK;
use super::element::{E2M1_MAX, E4M3, E4M3_MAX, e2m1_compared, e2m1_nearest, e2m1_stochastic, e4m3_nearest};
use super::format::{BOUND, Direction, Random, Recipe};
use super::philox::{key, philox4x32};
use crate::error::{Error, Result};

/// The lesser of value and cap; NaN stays NaN (`f32::min` would drop it).
fn cap(value: f32, cap: f32) -> f32 {
    if value > cap { cap } else { value }
}

/// The larger of two magnitudes; NaN wins.
pub(crate) fn max_nan(left: f32, right: f32) -> f32 {
    if right > left || right.is_nan() { right } else { left }
}

/// An amax as a cast takes it: of zeros alone the formulas make NaN, and under any other amax they stay zeros.
pub(crate) fn amax_of_cast(amax: f32) -> f32 {
    if amax > 0.0 { amax } else { 1.0 }
}

/// max |x|, NaN if any is.
pub(crate) fn magnitude(values: &[f32]) -> f32 {
    // Magnitudes are ordered as their bits are, NaN above infinity.
    let max = f32::from_bits(values.iter().fold(0, |max, v| max.max(v.abs().to_bits())));
    // One NaN, whatever those of the input were.
    if max.is_nan() { f32::NAN } else { max }
}

/// Factors that one amax gives for all its blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factors {
    /// `S/6` and `1/S`.
    Te { multiplier: f32, decode: f32 },
    /// `amax / 2688`.
    ModelOpt { second: f32 },
}

/// Factor that brings a block's elements to E2M1's range.
#[derive(Debug, Clone, Copy)]
enum Range {
    Times(f32),
    Over(f32),
}

impl Factors {
    pub(crate) fn new(recipe: Recipe, amax: f32) -> Self {
        if recipe == Recipe::ModelOpt {
            return Factors::ModelOpt { second: amax / BOUND };
        }
        let mut encode = cap(BOUND / amax, f32::MAX);
        if encode == 0.0 {
            // An infinite amax.
            encode = 1.0;
        }
        Factors::Te { multiplier: encode * (1.0 / E2M1_MAX), decode: 1.0 / encode }
    }

    /// E4M3 scale of a block with this largest magnitude.
    pub(crate) fn scale(self, block: f32) -> u8 {
        match self {
            Factors::Te { multiplier, .. } => e4m3_nearest(cap(cap(block * multiplier, f32::MAX), E4M3_MAX)),
            Factors::ModelOpt { second } => {
                let d = block / (E2M1_MAX * second);
                let d = if d == 0.0 { 1.0 } else { d };
                e4m3_nearest(if d < E4M3[1] { E4M3[1] } else { cap(d, E4M3_MAX) })
            }
        }
    }

    fn range(self, scale: u8) -> Range {
        match self {
            Factors::Te { decode, .. } => Range::Times(cap(1.0 / (E4M3[scale as usize] * decode), f32::MAX)),
            Factors::ModelOpt { second } => Range::Over(E4M3[scale as usize] * second),
        }
    }

    /// Codes of a block's elements, two a byte; `random` holds a byte for each element, if any.
    ///
    /// `packed` may be shorter than the block: the rest is cropped.
    pub(crate) fn encode(self, values: &[f32; BLOCK], scale: u8, random: Option<[u8; BLOCK]>, packed: &mut [u8]) {
        let range = self.range(scale);
        let y = match range {
            Range::Times(factor) => values.map(|x| (x * factor).clamp(-E2M1_MAX, E2M1_MAX)),
            Range::Over(divisor) => values.map(|x| x / divisor),
        };
        let codes = match (random, range) {
            (Some(random), _) => std::array::from_fn(|k| e2m1_stochastic(y[k], random[k])),
            // TransformerEngine's comparisons are all false for NaN, ModelOpt's search passes every bound.
            (None, Range::Times(_)) => y.map(e2m1_compared),
            (None, Range::Over(_)) => y.map(e2m1_nearest),
        };
        for (byte, [even, odd]) in packed.iter_mut().zip(codes.as_chunks().0) {
            *byte = even | odd << 4;
        }
    }
}

/// The factor of a block's codes: block scale times the matrix's second-level scale.
pub(crate) fn block_factor(recipe: Recipe, scale: u8, amax: f32) -> f32 {
    match recipe {
        Recipe::Te => E4M3[scale as usize] * amax * (1.0 / BOUND),
        Recipe::ModelOpt => E4M3[scale as usize] * (amax / BOUND),
    }
}

/// Random bytes of a matrix's blocks in one direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bits {
    key: [u32; 2],
    stream: u32,
    direction: Direction,
    first_line: usize,
    first_block: usize,
}

impl Bits {
    /// Checks that places fit their counters: `lines` lines of `blocks` blocks.
    pub(crate) fn new(
        call: &'static str,
        random: Random,
        direction: Direction,
        [lines, blocks]: [usize; 2],
    ) -> Result<Self> {
        let first = random.first_row;
        let refuse = |expected: &str| Err(Error::invalid(call, "first_row", expected, first));
        let (first_line, first_block) = match direction {
            Direction::Rows => (first, 0),
            Direction::Columns if first.is_multiple_of(BLOCK) => (0, first / BLOCK),
            Direction::Columns => return refuse("a multiple of 16 where columns are quantized"),
        };
        let fits = |first: usize, count: usize| first.checked_add(count).is_some_and(|end| end as u64 <= 1 << 32);
        if !fits(first_line, lines) || !fits(first_block, blocks) {
            return refuse("fewer than 2^32 rows, columns and blocks of the whole matrix");
        }
        Ok(Self { key: key(random.seed), stream: random.stream, direction, first_line, first_block })
    }

    /// A byte for each element of a block: one Philox call, its words' bytes from the lowest.
    pub(crate) fn of(&self, line: usize, block: usize) -> [u8; BLOCK] {
        let side = match self.direction {
            Direction::Rows => 0,
            Direction::Columns => 1,
        };
        let counter = [(self.first_block + block) as u32, (self.first_line + line) as u32, side, self.stream];
        let words = philox4x32(counter, self.key);
        std::array::from_fn(|k| words[k / 4].to_le_bytes()[k % 4])
    }
}
