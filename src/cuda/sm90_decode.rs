//! Hopper's products of few rows (`kernels/sm90_decode.cu`): which calls they serve.

use crate::dtype::DType;

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::{DECODE_LINEAR_ROWS, few_rows};
use super::kernel_table::Product;
use super::launch::Grid;
use super::params;
use super::sm90_grouped_gemm;
use super::tile_config::{SM90_DECODE, SM90_DECODE_LINEAR};

/// Weight rows of a block.
pub(super) const COLUMNS: usize = params::SM90_DECODE_COLUMNS as usize;

/// The kernel that makes a product of experts with so few rows, if the kernels for many rows would serve it too: sums
/// are the same, so this changes no result. `gated`: the product is up's, of gate and up.
pub(super) fn expert_kernel<'a>(
    device: &'a Cuda,
    dtype: DType,
    p: &params::GemmParams,
    product: Option<Product>,
) -> Option<&'a Kernel> {
    let few = few_rows(p.m, p.groups) && sm90_grouped_gemm::serves(device, dtype, p);
    let kernels = device.sm90_kernels().filter(|_| few)?;
    match product? {
        Product::Up => kernels.decode_up.of(dtype),
        Product::Down => kernels.decode_down.of(dtype),
        Product::DownBwd | Product::Dgrad => None,
    }
}

/// The kernel that makes the router's logits of so few tokens, where that for many would serve them too.
pub(super) fn linear_kernel(device: &Cuda, dtype: DType, tokens: usize) -> Option<&Kernel> {
    device.sm90_kernels().filter(|_| tokens <= DECODE_LINEAR_ROWS)?.decode_linear.of(dtype)
}

/// The grid of so many blocks of the experts' kernels.
pub(super) fn grid(blocks: usize) -> Grid {
    Grid { shared: SM90_DECODE.shared, ..Grid::new(blocks, SM90_DECODE.threads) }
}

/// Tiles of the logits' kernel, and its grid.
pub(super) fn linear_grid(tokens: usize, experts: usize) -> ((usize, usize), Grid) {
    let (m_tiles, n_tiles) = (tokens.div_ceil(SM90_DECODE.tile), experts.div_ceil(SM90_DECODE_LINEAR.tile));
    let blocks = m_tiles.saturating_mul(n_tiles);
    let grid = Grid { shared: SM90_DECODE_LINEAR.shared, ..Grid::new(blocks, SM90_DECODE_LINEAR.threads) };
    ((m_tiles, n_tiles), grid)
}
