//! Products with quantized weights: which kernel makes one, and its launch.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{QuantizedRef, WeightFormat};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::{DECODE_NARROW_BLOCKS, DECODE_ROWS, few_rows};
use super::kernel_table::Product;
use super::launch::{Grid, argument};
use super::params;
use super::tensor_map::TensorMapSpec;
use super::tile_config::SM90_W4A16;

/// Columns of a weight that the kernels for few rows take in a step, and a thread of a quad in one
/// (`kernels/w4a16_decode.cu`).
const STEP: usize = params::DECODE_STEP as usize;
const THREAD_STEP: i64 = params::DECODE_THREAD_STEP as i64;
/// Columns of a warp's tile there, of gate and up together.
const WARP_COLUMNS: usize = params::DECODE_WARP_COLUMNS as usize;
/// Warps of a block of those of tiles of 8 rows, and of up to 16.
const DECODE8_WARPS: usize = params::DECODE8_WARPS as usize;
const DECODE16_WARPS: usize = params::DECODE16_WARPS as usize;
/// Rows of a tile of the kernels for many rows (`kernels/sm90_w4a16.cu`).
const BLOCK_N: u32 = params::W4A16_BLOCK_N;

/// Checked weights, as kernels take them.
pub(super) struct QuantizedOperand {
    pub(super) format: WeightFormat,
    pub(super) params: params::QuantWeightParams,
}

/// A kernel for some products, beside those that make any.
#[derive(Debug, Clone, Copy)]
pub(super) struct TunedKernel<'a> {
    /// Rows and columns of a tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    kernel: &'a Kernel,
    /// Rows come by TMA.
    mapped: bool,
    threads: u32,
    shared: u32,
    /// Blocks, where each walks through tiles.
    most: usize,
}

/// Which kernels for few rows: of tiles of 8 rows, or of up to 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecodeTiles {
    Eight,
    Sixteen,
}

/// A kernel for few rows.
#[derive(Debug, PartialEq, Eq)]
struct FewRowsKernel {
    /// Rows of a tile.
    rows: usize,
    warps: usize,
    tiles: DecodeTiles,
}

/// The kernel for few rows that serves so many rows of so many experts, if any does: tiles whose rows, of `pitch` bytes
/// each, fit the shared memory that a block may have.
fn few_rows_kernel(rows: i64, experts: i64, pitch: usize, smem: usize) -> Option<FewRowsKernel> {
    if few_rows(rows, experts) && 8 * pitch <= smem / 2 {
        return Some(FewRowsKernel { rows: 8, warps: DECODE8_WARPS, tiles: DecodeTiles::Eight });
    }
    let tile = [16, 8].into_iter().find(|tile| tile * pitch <= smem)?;
    (rows <= DECODE_ROWS * experts).then_some(FewRowsKernel {
        rows: tile,
        warps: DECODE16_WARPS,
        tiles: DecodeTiles::Sixteen,
    })
}

/// How a product with a quantized weight is launched.
pub(super) struct QuantizedLaunch<'a> {
    pub(super) call: &'static str,
    pub(super) product: Product,
    pub(super) dtype: DType,
    /// Of the kernel for any product.
    pub(super) grid: Grid,
    /// The kernel that takes its place.
    pub(super) tuned: Option<TunedKernel<'a>>,
}

impl QuantizedOperand {
    pub(super) fn new(call: &'static str, weight: &QuantizedRef<'_, Cuda>) -> Result<Self> {
        weight.check(call)?;
        let [_, rows, columns] = weight.dims;
        let words = weight.codes.data().ptr.is_multiple_of(16) && columns.is_multiple_of(8);
        if !words {
            let expected = "a multiple of 8 columns, and codes at a multiple of 16 bytes";
            return Err(Error::invalid(call, "weight", expected, format!("{:?}", weight.dims)));
        }
        let params = params::QuantWeightParams {
            codes: weight.codes.data().ptr,
            scales: weight.scales.data().ptr,
            factors: weight.factors.as_ref().map_or(0, |f| f.data().ptr),
            format: match weight.format {
                WeightFormat::Nvfp4 => params::WEIGHT_NVFP4,
                WeightFormat::Mxfp4 => params::WEIGHT_MXFP4,
                WeightFormat::Fp8Block => params::WEIGHT_FP8,
            },
            rows: rows as i64,
            columns: columns as i64,
            code_bytes: weight.format.code_dims(weight.dims)[2] as i64,
            blocks: weight.format.scales(weight.dims, weight.parts).1[2] as i64,
            parts: weight.parts as i64,
        };
        Ok(Self { format: weight.format, params })
    }

    /// The kernel that serves a product of `p` best, if it is not one for any. A tile's columns are divided by
    /// `factor`.
    pub(super) fn tuned<'a>(
        &self,
        device: &'a Cuda,
        dtype: DType,
        p: &params::GemmParams,
        product: Option<Product>,
        factor: usize,
    ) -> Option<TunedKernel<'a>> {
        let product = product.filter(|product| matches!(product, Product::Up | Product::Down))?;
        let parts = self.params.parts == 1 || self.params.parts == 2 && factor == 2;
        let serves = dtype == DType::BF16
            && self.params.scales.is_multiple_of(16)
            && p.vector_a == 1
            && p.k % THREAD_STEP == 0
            && parts;
        if !serves {
            return None;
        }
        let pitch = ((p.k as usize).div_ceil(STEP) * STEP + 32) * dtype.size();
        // Those for few rows sum in another order than those for many.
        let few_rows = (!device.is_batch_invariant())
            .then(|| few_rows_kernel(p.m, p.groups, pitch, device.decode_shared()))
            .flatten();
        if let Some(FewRowsKernel { rows, warps, tiles }) = few_rows {
            let (wide, threads) = (warps * WARP_COLUMNS / factor, warps as u32 * params::WARP_THREADS);
            let shared = (rows * pitch) as u32;
            let kernels = &device.kernels().w4a16_decode;
            // Blocks of the filled tiles, of which there are at most as many as rows, and as experts.
            let blocks = p.m.min(p.groups) as usize * (p.n as usize).div_ceil(wide);
            let (kernels, columns) = match tiles {
                DecodeTiles::Eight if blocks <= DECODE_NARROW_BLOCKS => (&kernels.eight_narrow, wide / 4),
                DecodeTiles::Eight => (&kernels.eight, wide),
                DecodeTiles::Sixteen => (&kernels.sixteen, wide),
            };
            let (kernel, mapped) = (kernels.of(product, self.format)?, false);
            return Some(TunedKernel { rows, columns, kernel, mapped, threads, shared, most: usize::MAX });
        }
        let words = [p.out, p.pre_out].iter().all(|at| at.is_multiple_of(16)) && p.n % 8 == 0 && p.a_rows > 0;
        let kernel = device.sm90_kernels().filter(|_| words)?.w4a16.of(product, self.format)?;
        Some(TunedKernel {
            rows: BLOCK_N as usize,
            columns: SM90_W4A16.tile / factor,
            kernel,
            mapped: true,
            threads: SM90_W4A16.threads,
            shared: SM90_W4A16.shared,
            most: device.usable_sms(),
        })
    }

    /// Enqueues a product.
    pub(super) fn launch(
        &self,
        device: &Cuda,
        QuantizedLaunch { call, product, dtype, grid, tuned }: QuantizedLaunch<'_>,
        p: &params::GemmParams,
    ) -> Result<()> {
        let (kernel, grid) = match tuned {
            Some(TunedKernel { kernel, threads, shared, most, .. }) => {
                let blocks = (grid.blocks.0.min(most), 1);
                (kernel, Grid { blocks, shared, ..Grid::new(0, threads) })
            }
            None => (device.kernels().w4a16.of(self.format).of(product).of(dtype), grid),
        };
        // Rows as TMA takes them.
        let rows = match tuned {
            Some(TunedKernel { mapped: true, .. }) => {
                let sizes = &[p.k as u64, p.a_rows as u64];
                Some(TensorMapSpec { call, dtype: DType::BF16, base: p.a, sizes }.boxes(BLOCK_N)?)
            }
            _ => None,
        };
        let mut arguments: Vec<_> =
            [argument(p), argument(&self.params)].into_iter().chain(rows.as_ref().map(argument)).collect();
        // SAFETY: callers have checked every tensor in `p`, `new` those of the weight; maps and segments, which only
        // the device knows, are checked by the kernel.
        unsafe { device.launch_with(call, kernel, grid, &mut arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_few_rows_fit_every_gpu() {
        let pitch = |k: usize| (k.div_ceil(STEP) * STEP + 32) * 2;
        let of = |rows, k, smem| {
            few_rows_kernel(rows, 16, pitch(k), smem)
                .map(|few_rows_kernel| (few_rows_kernel.rows, few_rows_kernel.warps))
        };
        // Blocks of capability 8.6, 8.9 and 12.0 may have 99 KB, of 8.0 and 9.0 more than these kernels want.
        for (smem, four, seven) in [(99 << 10, Some((8, 8)), None), (115_712, Some((8, 8)), Some((8, 8)))] {
            assert_eq!(of(16 * 6, 2048, smem), Some((8, 4)));
            assert_eq!(of(16 * 7, 2048, smem), Some((16, 8)));
            assert_eq!(of(16 * 32, 4096, smem), four);
            assert_eq!(of(1, 6912, smem), seven);
            assert_eq!(of(16 * 33, 2048, smem), None);
            for k in (64..16384).step_by(64) {
                assert!(of(1, k, smem).is_none_or(|(rows, _)| rows * pitch(k) <= smem), "{k} in {smem}");
            }
        }
    }
}
