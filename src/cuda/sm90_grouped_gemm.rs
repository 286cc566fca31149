//! Launch of Hopper's row GEMMs, and which calls they serve.

use crate::dtype::DType;
use crate::error::Result;

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::{SQUARE_SUM, WIDE_SUM};
use super::kernel_table::{Half, Product, Sm90Kernels, TileShape};
use super::launch::{Grid, argument};
use super::params;
use super::tensor_map::TensorMapSpec;
use super::tile_config::SM90_GROUPED_GEMM;

/// Columns that tiles of 192 make of so many: the last one takes 128 where those are enough.
const fn columns_of_usual_tiles(n: usize) -> usize {
    const USUAL: usize = params::GROUPED_GEMM_COLUMNS as usize;
    match n % USUAL {
        0 => n,
        1..=128 => n / USUAL * USUAL + 128,
        _ => n.next_multiple_of(USUAL),
    }
}

impl Product {
    /// The shape of the tiles of `n` columns that are sums of `k`, on a GPU whose L2 is small or not.
    fn shape(self, n: usize, k: usize, small_l2: bool) -> TileShape {
        const SQUARE: usize = params::GROUPED_GEMM_SQUARE_COLUMNS as usize;
        match self {
            Self::Down | Self::Dgrad if k >= WIDE_SUM => TileShape::Wide,
            Self::DownBwd if k < SQUARE_SUM => {
                let (square, usual) = (n.next_multiple_of(SQUARE), columns_of_usual_tiles(n));
                if small_l2 || usual - square.min(usual) >= usual / 8 { TileShape::Square } else { TileShape::Usual }
            }
            _ => TileShape::Usual,
        }
    }

    /// Columns of weights in a tile of this shape.
    fn columns(self, shape: TileShape) -> usize {
        match (self, shape) {
            (Self::Up, _) => params::GROUPED_GEMM_UP_COLUMNS as usize,
            (_, TileShape::Usual) => params::GROUPED_GEMM_COLUMNS as usize,
            (_, TileShape::Wide) => params::GROUPED_GEMM_WIDE_COLUMNS as usize,
            (_, TileShape::Square) => params::GROUPED_GEMM_SQUARE_COLUMNS as usize,
        }
    }

    /// The kernels of `p`, and columns of weights in a tile of theirs.
    pub(super) fn kernels<'a>(
        self,
        device: &Cuda,
        sm90: &'a Sm90Kernels<Kernel>,
        p: &params::GemmParams,
    ) -> (&'a Half<Kernel>, usize) {
        let shape = self.shape(p.n as usize, p.k as usize, device.inner.small_l2);
        (sm90.gemm(self, shape), self.columns(shape))
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

/// A launch of so many blocks of work.
pub(super) struct Sm90Launch<'a> {
    pub(super) call: &'static str,
    pub(super) kernel: &'a Kernel,
    pub(super) product: Product,
    pub(super) dtype: DType,
    pub(super) blocks: usize,
    /// SMs of the kernel that is still bringing its rows, or others.
    pub(super) movement_sms: Option<usize>,
}

/// Launches a kernel of blocks that stay, at most one an SM. Where a movement of rows was enqueued last, of those that it waits
/// for (`p.arrived`) or of others, it starts while that runs, on the SMs that it leaves, and then on all; where the device
/// reserves SMs, on those that are left beside both all along.
///
/// # Safety
/// As [`Cuda::launch`], for the kernel of `product`; with `movement_sms` a movement was enqueued last, which writes nothing
/// that the kernel reads but rows that it waits for.
pub(super) unsafe fn launch(device: &Cuda, launch: Sm90Launch<'_>, p: &params::GemmParams) -> Result<()> {
    let Sm90Launch { call, kernel, product, dtype, blocks, movement_sms } = launch;
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
        // Of as many rows as the epilogue sends at a time.
        let rows = match product {
            Product::DownBwd => params::GROUPED_GEMM_BWD_BOX_ROWS,
            _ => params::GROUPED_GEMM_BOX_ROWS,
        };
        TensorMapSpec { call, dtype, base, sizes: &[n, planes, p.m as u64] }.plane_boxes(rows)
    };
    let or_none = |base: u64, count| if base == 0 { Ok(b) } else { planes(base, count) };
    let (pre, gated, plain) = match product {
        Product::DownBwd => (planes(p.pre, 2)?, planes(p.out, 2)?, or_none(p.hidden, 1)?),
        _ => (b, or_none(p.pre_out, 2)?, planes(p.out, 1)?),
    };
    // Blocks work in pairs.
    let usable = match movement_sms {
        Some(sms) if device.reserves_sms() => device.reserving_more(sms).usable_sms(),
        _ => device.usable_sms(),
    };
    let blocks = blocks.min(usable / 2 * 2).next_multiple_of(2);
    let programmatic = movement_sms.is_some();
    let grid = Grid { shared: SM90_GROUPED_GEMM.shared, programmatic, ..Grid::new(blocks, SM90_GROUPED_GEMM.threads) };
    let [a, b, pre, gated, plain] = [&a, &b, &pre, &gated, &plain].map(argument);
    let mut arguments = [argument(p), a, b, pre, gated, plain];
    // SAFETY: the kernels take at most these six, in this order; the rest is the caller's promise.
    unsafe { device.launch_with(call, kernel, grid, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_square_where_sums_are_short_and_they_save_an_eighth_of_the_columns_or_l2_is_small() {
        let shape = |n, k, small_l2| Product::DownBwd.shape(n, k, small_l2);
        assert_eq!(shape(200, 2048, false), TileShape::Square);
        for n in [768, 1024, 2880, 128 + 192, 8] {
            assert_eq!(shape(n, 2048, false), TileShape::Usual, "{n}");
            assert_eq!(shape(n, 2048, true), TileShape::Square, "{n}");
        }
        assert_eq!(shape(200, 4096, true), TileShape::Usual);
        assert_eq!(Product::Down.shape(1024, 2048, true), TileShape::Usual);
        assert_eq!(Product::Down.shape(1024, 8192, true), TileShape::Wide);
        assert_eq!([1024, 768, 8, 321].map(columns_of_usual_tiles), [1088, 768, 128, 384]);
    }
}
