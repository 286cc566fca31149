//! Form of a quantized matrix: recipes, blocks, sizes.

use super::element::{E2M1_MAX, E4M3_MAX};
use super::{FP8_BLOCK, Hadamard, MX_BLOCK, NVFP4_BLOCK};
use crate::error::{Error, Result};

/// 448 · 6: the largest value that an NVFP4 block of scale 448 holds.
pub(super) const BOUND: f32 = E4M3_MAX * E2M1_MAX;

/// Which of a matrix's dimensions blocks run along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Along its rows.
    Rows,
    /// Along its columns.
    Columns,
}

/// Whose arithmetic NVFP4 follows. They share format and packing, and differ in the order of operations, in what a
/// zero block's scale is, and in what NaN and infinity give; `docs/quantization.md` has both in full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// TransformerEngine's: training.
    Te,
    /// nvidia-modelopt's: checkpoints. One-dimensional blocks to nearest, with one amax a matrix.
    ModelOpt,
}

/// Elements that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blocks {
    /// A run of a row (or column).
    Line,
    /// A square tile, its scale repeated for each of its lines: both directions then hold the same values.
    Tile,
}

/// Elements that share an amax, the second-level scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AmaxScope {
    /// The matrix.
    Matrix,
    /// Each row (column-wise: each column).
    Line,
}

/// How values become E2M1 codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// Stochastically, each direction with random bits of its own.
    Stochastic(Random),
}

/// Where a matrix's random bits come from: they depend on these numbers and an element's place, nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Random {
    /// The run's seed.
    pub seed: u64,
    /// Tells apart the quantizations of a run: a number never used twice with one seed.
    pub stream: u32,
    /// Number of the matrix's first row in the whole matrix, where it is a shard, so that shards round as the whole
    /// does. A multiple of 16 where columns are quantized.
    pub first_row: usize,
}

/// The NVFP4 format: E2M1 codes in blocks of 16, an E4M3 scale a block, a binary32 amax a matrix or row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nvfp4 {
    pub(crate) recipe: Recipe,
    pub(crate) blocks: Blocks,
    pub(crate) scope: AmaxScope,
    pub(crate) rounding: Rounding,
    pub(crate) hadamard: Option<Hadamard>,
}

impl Nvfp4 {
    /// TransformerEngine's recipe: blocks of 1×16, to nearest, one amax, no transform.
    pub const TE: Self = Self::plain(Recipe::Te);
    /// nvidia-modelopt's recipe.
    pub const MODELOPT: Self = Self::plain(Recipe::ModelOpt);

    const fn plain(recipe: Recipe) -> Self {
        Self { recipe, blocks: Blocks::Line, scope: AmaxScope::Matrix, rounding: Rounding::Nearest, hadamard: None }
    }

    /// A recipe by its name, `te` or `modelopt`.
    ///
    /// # Errors
    /// Any other name.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "te" => Ok(Self::TE),
            "modelopt" => Ok(Self::MODELOPT),
            _ => Err(Error::invalid("Nvfp4::named", "name", "te or modelopt", format!("{name:?}"))),
        }
    }

    /// With blocks of 16×16 (weights).
    pub const fn tiled(self) -> Self {
        Self { blocks: Blocks::Tile, ..self }
    }

    /// With one amax a row.
    pub const fn row_scaled(self) -> Self {
        Self { scope: AmaxScope::Line, ..self }
    }

    /// Rounded stochastically (gradients).
    pub const fn stochastic(self, random: Random) -> Self {
        Self { rounding: Rounding::Stochastic(random), ..self }
    }

    /// With a Hadamard transform of every 16 elements of a column, of the column-wise direction only, before its
    /// amax is taken (bf16 matrices).
    pub const fn hadamard(self, transform: Hadamard) -> Self {
        Self { hadamard: Some(transform), ..self }
    }

    /// The recipe.
    pub const fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// The shape of blocks.
    pub const fn blocks(&self) -> Blocks {
        self.blocks
    }

    /// The part of a matrix that has an amax of its own.
    pub const fn scope(&self) -> AmaxScope {
        self.scope
    }

    /// How codes are rounded.
    pub const fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// The transform of the column-wise direction.
    pub const fn transform(&self) -> Option<Hadamard> {
        self.hadamard
    }

    /// Refuses combinations that no recipe defines.
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        let plain = Self::plain(self.recipe);
        let varied = [
            (self.blocks != plain.blocks, "16x16 blocks"),
            (self.scope != plain.scope, "an amax a row"),
            (self.rounding != plain.rounding, "stochastic rounding"),
            (self.hadamard.is_some(), "a Hadamard transform"),
        ];
        let found: Vec<&str> = varied.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        let only = |expected: &str| Err(Error::invalid(call, "format", expected, found.join(" and ")));
        match self.recipe {
            Recipe::ModelOpt if !found.is_empty() => only("nothing but 1x16 blocks to nearest in recipe modelopt"),
            Recipe::Te if self.blocks == Blocks::Tile && found.len() > 1 => only("16x16 blocks and nothing besides"),
            Recipe::Te if self.scope == AmaxScope::Line && found.len() > 1 => only("an amax a row and nothing besides"),
            _ => Ok(()),
        }
    }

    /// Sizes of the quantized form of a `[rows, columns]` matrix in one direction.
    ///
    /// Column-wise it is the transpose that is quantized: its rows are the matrix's columns. Elements are counted to
    /// the end of a last, partial block in scales, and in codes too by [`Recipe::ModelOpt`]; [`Recipe::Te`] crops
    /// the codes.
    ///
    /// # Errors
    /// [`Recipe::Te`] with an odd number of elements in a line: two codes share a byte. Lines that overflow.
    pub fn sizes(&self, dims: [usize; 2], direction: Direction) -> Result<Nvfp4Sizes> {
        let [lines, len] = match direction {
            Direction::Rows => dims,
            Direction::Columns => [dims[1], dims[0]],
        };
        let (coded, expected) = match self.recipe {
            Recipe::ModelOpt => (len.checked_next_multiple_of(NVFP4_BLOCK), "whole blocks that fit the address space"),
            Recipe::Te => (Some(len).filter(|len| len.is_multiple_of(2)), "an even number"),
        };
        let coded = coded.ok_or_else(|| {
            let name = match direction {
                Direction::Rows => "columns of the matrix",
                Direction::Columns => "rows of the matrix",
            };
            Error::invalid("Nvfp4::sizes", name, expected, len)
        })?;
        let amax = match self.scope {
            AmaxScope::Matrix => 1,
            AmaxScope::Line => lines,
        };
        Ok(Nvfp4Sizes { codes: [lines, coded / 2], scales: [lines, len.div_ceil(NVFP4_BLOCK)], amax })
    }

    /// The second-level scale that is stored beside codes and scales in a checkpoint: `weight_scale_2 = amax / 2688`.
    pub fn second_scale(amax: f32) -> f32 {
        amax / BOUND
    }
}

/// Sizes of an NVFP4 matrix's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nvfp4Sizes {
    /// Bytes of packed codes, per line and in it.
    pub codes: [usize; 2],
    /// Scales, per line and in it.
    pub scales: [usize; 2],
    /// Number of amaxes.
    pub amax: usize,
}

/// How an MXFP8 scale follows from its block's largest magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MxScale {
    /// Rounded up, so that nothing saturates; NaN elements do not count (TransformerEngine). A finite magnitude from
    /// 248 · 2¹²⁰ on, next to the largest of f32, gets the code of 256 and the scale 2¹²⁰, which are read as an infinity.
    Ceil,
    /// Rounded down, as OCP MX 1.0 has it; elements up to twice the largest saturate.
    Floor,
}

/// The MXFP8 format: E4M3 elements in blocks of 32, with an E8M0 scale a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mxfp8 {
    /// The scale's rule.
    pub scale: MxScale,
    /// 1×32 (column-wise 32×1), or 32×32.
    pub blocks: Blocks,
}

impl Mxfp8 {
    /// TransformerEngine's: blocks of 1×32, scales rounded up.
    pub const TE: Self = Self { scale: MxScale::Ceil, blocks: Blocks::Line };

    /// Shape of the scales of a `[rows, columns]` matrix. Codes have the matrix's shape in both directions.
    pub fn scale_dims(dims: [usize; 2], direction: Direction) -> [usize; 2] {
        match direction {
            Direction::Rows => [dims[0], dims[1].div_ceil(MX_BLOCK)],
            Direction::Columns => [dims[0].div_ceil(MX_BLOCK), dims[1]],
        }
    }
}

/// Shape of the scales of a `[rows, columns]` matrix in fp8 blocks, in bytes: of each row, an f32 a block of
/// [`FP8_BLOCK`].
pub fn fp8_block_scale_dims(dims: [usize; 2]) -> [usize; 2] {
    [dims[0], dims[1].div_ceil(FP8_BLOCK).saturating_mul(size_of::<f32>())]
}
