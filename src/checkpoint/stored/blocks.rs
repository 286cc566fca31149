//! Sizes of fp8 blocks that a checkpoint's files name, and which of them a tensor's scales are laid out by.

use crate::quant::FP8_BLOCK;

/// Rows and columns of a block where the files name none.
const USUAL: [usize; 2] = [FP8_BLOCK; 2];

/// Rows and columns of fp8 blocks, as the files name them; groups of layers may differ.
#[derive(Debug, Clone, Default)]
pub(in crate::checkpoint) struct Fp8Blocks {
    sizes: Vec<[usize; 2]>,
}

impl Fp8Blocks {
    /// Most sizes that the files of one checkpoint may name.
    pub const MOST: usize = 8;

    /// Adds a size, of at least one row and column; false if there are too many.
    pub fn add(&mut self, size: [usize; 2]) -> bool {
        if self.sizes.contains(&size) {
            return true;
        }
        if self.sizes.len() == Self::MOST {
            return false;
        }
        // Of sizes that mean the same, products read this one.
        let at = if size == USUAL { 0 } else { self.sizes.len() };
        self.sizes.insert(at, size);
        true
    }

    /// Whether the files name a size.
    pub fn are_named(&self) -> bool {
        !self.sizes.is_empty()
    }

    fn sizes(&self) -> &[[usize; 2]] {
        if self.sizes.is_empty() { &[USUAL] } else { &self.sizes }
    }

    /// The size of block by which scales of shape `scales` cover matrices of shape `codes`, of two dimensions at least;
    /// else what shape was expected. Several sizes that fit are an error unless they divide such a matrix alike.
    pub fn of_grid(&self, codes: &[usize], scales: &[usize]) -> Result<[usize; 2], String> {
        let (_, matrix) = codes.split_at(codes.len() - 2);
        let mut fitting = self.sizes().iter().filter(|size| grid(codes, **size) == scales);
        let Some(first) = fitting.next() else {
            let expected = |size: &[usize; 2]| format!("shape {:?} (blocks of {})", grid(codes, *size), text(*size));
            return Err(self.sizes().iter().map(expected).collect::<Vec<_>>().join(" or "));
        };
        // A block ends with the matrix, so all sizes beyond it are one.
        let clipped = |size: &[usize; 2]| [size[0].min(matrix[0]), size[1].min(matrix[1])];
        match fitting.find(|other| clipped(other) != clipped(first)) {
            None => Ok(*first),
            Some(other) => {
                let [first, other] = [*first, *other].map(text);
                Err(format!("a shape that not both blocks of {first} and of {other} give, which the files name"))
            }
        }
    }
}

/// Shape of the scales of matrices of shape `codes`.
fn grid(codes: &[usize], [rows, columns]: [usize; 2]) -> Vec<usize> {
    let mut grid = codes.to_vec();
    let last = grid.len() - 1;
    grid[last - 1] = codes[last - 1].div_ceil(rows);
    grid[last] = codes[last].div_ceil(columns);
    grid
}

fn text([rows, columns]: [usize; 2]) -> String {
    format!("{rows}x{columns}")
}
