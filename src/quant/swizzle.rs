//! Order in which tensor cores read block scales: tiles of 128×4 bytes, 512 each.

/// Rows of a tile.
pub const TILE_ROWS: usize = 128;
/// Columns of a tile.
pub const TILE_COLUMNS: usize = 4;

/// Place of scale (i, j) among the swizzled scales of a matrix with `columns` columns of scales.
///
/// Row-major tiles; within one, the 32 rows of each quarter lie beside one another.
pub fn swizzled_index(i: usize, j: usize, columns: usize) -> usize {
    let tile = i / TILE_ROWS * columns.div_ceil(TILE_COLUMNS) + j / TILE_COLUMNS;
    tile * TILE_ROWS * TILE_COLUMNS + i % 32 * 16 + i % TILE_ROWS / 32 * 4 + j % TILE_COLUMNS
}

/// Bytes of the swizzled scales of a `[rows, columns]` matrix of scales: padded to whole tiles. `usize::MAX` where
/// they are more than memory has.
pub fn swizzled_len(rows: usize, columns: usize) -> usize {
    let tiles = rows.div_ceil(TILE_ROWS).saturating_mul(columns.div_ceil(TILE_COLUMNS));
    tiles.saturating_mul(TILE_ROWS * TILE_COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_is_a_bijection() {
        for (rows, columns) in [(128, 4), (256, 12), (384, 8)] {
            let mut seen = vec![false; swizzled_len(rows, columns)];
            for i in 0..rows {
                for j in 0..columns {
                    assert!(!std::mem::replace(&mut seen[swizzled_index(i, j, columns)], true));
                }
            }
            assert!(seen.into_iter().all(|s| s));
        }
    }

    #[test]
    fn first_tile() {
        // Row 33, column 2: second quarter, its second row.
        assert_eq!(swizzled_index(33, 2, 8), 16 + 4 + 2);
        assert_eq!(swizzled_index(0, 4, 8), 512);
        assert_eq!(swizzled_index(128, 0, 5), 1024);
    }
}
