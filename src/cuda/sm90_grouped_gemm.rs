//! Launch of Hopper's row GEMMs, and which calls they serve.

use crate::dtype::DType;
use crate::error::Result;

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::WIDE_SUM;
use super::kernel_table::{Half, Product, Sm90Kernels};
use super::launch::{Grid, argument};
use super::params;
use super::tensor_map::TensorMapSpec;
use super::tile_config::SM90_GROUPED_GEMM;

impl Product {
    fn wide(self, k: usize) -> bool {
        matches!(self, Self::Down | Self::Dgrad) && k >= WIDE_SUM
    }

    /// Columns of weights in a tile of a sum of `k` (`kernels/sm90/grouped_gemm_mainloop.cuh`).
    pub(super) fn columns(self, k: usize) -> usize {
        match self {
            Self::Up => params::GROUPED_GEMM_UP_COLUMNS as usize,
            _ if self.wide(k) => params::GROUPED_GEMM_WIDE_COLUMNS as usize,
            _ => params::GROUPED_GEMM_COLUMNS as usize,
        }
    }

    /// The kernels of a sum of `k`.
    pub(super) fn kernels(self, sm90: &Sm90Kernels<Kernel>, k: usize) -> &Half<Kernel> {
        sm90.gemm(self, self.wide(k))
    }
}

/// Whether the Hopper kernels can serve a product: 16-bit types, everything in whole 16-byte words.
pub(super) fn serves(device: &Cuda, dtype: DType, p: &params::GemmParams) -> bool {
    let words = [p.a, p.b, p.out, p.pre, p.pre_out, p.hidden].iter().all(|at| at.is_multiple_of(16));
    device.sm90()
        && matches!(dtype, DType::BF16 | DType::F16)
        && words
        && p.vector_a == 1
        && p.vector_b == 1
        // Rows past a tile's end are read as its first, and rows that a map does not have as row 0.
        && p.a_rows > 0
        && p.n % 8 == 0
        && p.k % 8 == 0
}

/// Launches a kernel of blocks that stay, at most one an SM.
///
/// # Safety
/// As [`Cuda::launch`], for the kernel of `product`.
pub(super) unsafe fn launch(
    device: &Cuda,
    call: &'static str,
    kernel: &Kernel,
    product: Product,
    dtype: DType,
    blocks: usize,
    p: &params::GemmParams,
) -> Result<()> {
    if blocks == 0 {
        return Ok(());
    }
    let (n, k, groups) = (p.n as u64, p.k as u64, p.groups as u64);
    let map = |base, sizes: &[u64], rows| TensorMapSpec { call, dtype, base, sizes }.boxes(rows);
    // Boxes: 64 columns (128 bytes) by as many rows as one load brings. Those of weights are 32 rows high.
    let (a, b) = match product {
        Product::Up => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[k, 2 * n, groups], 32)?),
        Product::Down => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[k, n, groups], 32)?),
        Product::Dgrad | Product::DownBwd => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[n, k, groups], 32)?),
    };
    // Tensor maps of the epilogues' reads and writes: gate and up are planes of a row, so that a box over the last
    // column of one does not reach into the other.
    let planes = |base, planes| {
        let matrices = TensorMapSpec { call, dtype, base, sizes: &[n, planes, p.m as u64] };
        if product == Product::DownBwd { matrices.plane_boxes() } else { matrices.wide_plane_boxes() }
    };
    let or_none = |base: u64, count| if base == 0 { Ok(b) } else { planes(base, count) };
    let (pre, gated, plain) = match product {
        Product::DownBwd => (planes(p.pre, 2)?, planes(p.out, 2)?, or_none(p.hidden, 1)?),
        _ => (b, or_none(p.pre_out, 2)?, planes(p.out, 1)?),
    };
    // Blocks work in pairs.
    let blocks = blocks.min(device.usable_sms() / 2 * 2).next_multiple_of(2);
    let grid = Grid { shared: SM90_GROUPED_GEMM.shared, ..Grid::new(blocks, SM90_GROUPED_GEMM.threads) };
    let [a, b, pre, gated, plain] = [&a, &b, &pre, &gated, &plain].map(argument);
    let mut arguments = [argument(p), a, b, pre, gated, plain];
    // SAFETY: the kernels take at most these six, in this order; the rest is the caller's promise.
    unsafe { device.launch_with(call, kernel, grid, &mut arguments) }
}
