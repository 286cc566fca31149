//! Products with quantized weights by Hopper's dense kernels: some experts' weights are made 16-bit in a scratch, their
//! rows are multiplied, and the next experts' weights take the scratch.
//!
//! The gradients with respect to rows sum over a weight's rows, so that a kernel which reads codes would make each
//! weight a number once for every tile of rows, across its blocks. Made once, it costs bytes alone
//! (`kernels/notes/w4a16.md`).

use crate::dtype::DType;
use crate::error::Result;
use crate::quant::WeightFormat;
use crate::tensor::Tensor;

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::DEQUANTIZE_ROWS;
use super::kernel_table::Product;
use super::launch::{Grid, argument};
use super::layout::{Tiles, at};
use super::params;
use super::sm90_grouped_gemm::{self, Sm90Launch};
use super::w4a16::QuantizedOperand;

/// Threads of a block that de-quantizes, and eights of elements that it takes (`kernels/sm90_dequantize.cu`).
const THREADS: u32 = params::QUANT_THREADS;
const SPAN: usize = params::DEQUANTIZE_SPAN as usize;

/// Experts whose weights are 16-bit at the same time. Sizes alone choose how many: a captured step stays right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertChunks {
    experts: usize,
    /// Of each chunk but the last.
    pub(super) each: usize,
}

impl ExpertChunks {
    /// Chunks of nearly one size, of as many experts of `bytes` each as `room` holds, one at least.
    fn new(experts: usize, bytes: usize, room: usize) -> Self {
        let most = (room / bytes.max(1)).clamp(1, experts.max(1));
        let chunks = experts.div_ceil(most).max(1);
        Self { experts, each: experts.div_ceil(chunks).max(1) }
    }

    fn count(self) -> usize {
        self.experts.div_ceil(self.each)
    }
}

/// How a product's weights become 16-bit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dequantizing<'a> {
    pub(super) chunks: ExpertChunks,
    kernel: &'a Kernel,
}

/// How Hopper's dense kernels, where they serve a product of this type, take a quantized weight; `None` where other
/// kernels are to make it.
pub(super) fn dequantizing<'a>(
    device: &'a Cuda,
    dtype: DType,
    weight: &QuantizedOperand,
    product: Product,
    p: &params::GemmParams,
) -> Option<Dequantizing<'a>> {
    let wanted = match product {
        // Whatever the number of rows: a row's gradient does not depend on it.
        Product::DownBwd | Product::Dgrad => true,
        // These kernels sum in another order than the portable ones.
        Product::Up | Product::Down => {
            let many = p.m > DEQUANTIZE_ROWS.saturating_mul(p.groups);
            weight.format == WeightFormat::Fp8Block && many && !device.is_batch_invariant()
        }
    };
    let elements = (weight.params.rows * weight.params.columns) as usize;
    // Numbered in 32 bits by the kernel, and so are the blocks of a launch.
    let fits = i32::try_from(elements / 8).is_ok() && i32::try_from(blocks(elements) as i64 * p.groups).is_ok();
    let kernels = device.sm90_kernels().filter(|_| wanted && fits && p.groups > 0)?;
    let kernel = kernels.dequantize.of(weight.format).of(dtype)?;
    let chunks = ExpertChunks::new(p.groups as usize, dtype.size() * elements, device.weight_scratch());
    Some(Dequantizing { chunks, kernel })
}

/// Blocks that de-quantize an expert of so many elements.
fn blocks(elements: usize) -> usize {
    (elements / 8).div_ceil(SPAN)
}

/// A product by chunks.
pub(super) struct DequantizedLaunch<'a> {
    pub(super) call: &'static str,
    pub(super) device: &'a Cuda,
    pub(super) product: Product,
    pub(super) dtype: DType,
    /// Hopper's for the product.
    pub(super) kernel: &'a Kernel,
    pub(super) weight: &'a QuantizedOperand,
    pub(super) dequantizing: Dequantizing<'a>,
    /// Listed by chunk.
    pub(super) tiles: &'a Tiles,
    /// Where the numbers of the experts' rows are.
    pub(super) counts: u64,
}

impl DequantizedLaunch<'_> {
    /// Enqueues the product that `p` describes, of which weights and tiles are a chunk's.
    pub(super) fn run(&self, p: &params::GemmParams) -> Result<()> {
        let Self { call, device, product, dtype, kernel, weight, tiles, .. } = *self;
        let chunks = self.dequantizing.chunks;
        let elements = (weight.params.rows * weight.params.columns) as usize;
        let mut scratch = Tensor::empty(device, dtype, &[chunks.each, elements])?;
        let scratch = at(&mut scratch);
        // A bias has a number for each of the expert's outputs.
        let bias_bytes = (weight.params.rows as usize * dtype.size()) as u64;
        let grid = p.m_tiles as usize * p.n_tiles as usize;
        for chunk in 0..chunks.count() {
            let first = chunk * chunks.each;
            let experts = chunks.each.min(chunks.experts - first);
            self.dequantize(scratch, first, experts)?;
            let part = params::GemmParams {
                b: scratch,
                groups: experts as i64,
                bias: if p.bias == 0 { 0 } else { p.bias + first as u64 * bias_bytes },
                tiles: tiles.list_of(chunk),
                tile_count: tiles.count_of(chunk),
                ticket: tiles.ticket_of(chunk),
                ..*p
            };
            let launch = Sm90Launch { call, kernel, product, dtype, blocks: grid, movement_sms: None };
            // SAFETY: callers have checked every tensor in `p`; the scratch has these experts' weights, and the bias
            // theirs from the first of them on; maps and segments, which only the device knows, are checked by the
            // kernels.
            unsafe { sm90_grouped_gemm::launch(device, launch, &part) }?;
        }
        // The scratch is given back behind the last kernel that reads it, in the stream's order.
        Ok(())
    }

    /// Enqueues the de-quantizing of `experts` from `first` on.
    fn dequantize(&self, out: u64, first: usize, experts: usize) -> Result<()> {
        let Self { call, device, weight, counts, .. } = *self;
        let kernel = self.dequantizing.kernel;
        let blocks = blocks((weight.params.rows * weight.params.columns) as usize);
        let p = params::DequantizeExpertsParams {
            counts: counts + (first * size_of::<i64>()) as u64,
            out,
            first: first as i64,
            blocks: blocks as i64,
        };
        let mut arguments = [argument(&p), argument(&weight.params)];
        // SAFETY: `QuantizedOperand::new` has checked codes, scales and factors, which hold these experts; counts have
        // an entry for each; `out` has room for a chunk's weights.
        unsafe { device.launch_with(call, kernel, Grid::new(blocks * experts, THREADS), &mut arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_the_room_and_are_of_nearly_one_size() {
        let chunks = |experts, bytes, room| {
            let made = ExpertChunks::new(experts, bytes, room);
            (made.count(), made.each)
        };
        assert_eq!(chunks(128, 1, 128), (1, 128));
        assert_eq!(chunks(128, 1, 127), (2, 64));
        assert_eq!(chunks(128, 10, 299), (5, 26));
        assert_eq!(chunks(7, 10, 30), (3, 3));
        // An expert that is larger than the room; one expert; none.
        assert_eq!(chunks(3, 10, 9), (3, 1));
        assert_eq!(chunks(1, 10, 0), (1, 1));
        assert_eq!(chunks(0, 10, 100), (0, 1));
        for experts in 1..40 {
            for most in 1..50 {
                let made = ExpertChunks::new(experts, 16, 16 * most);
                assert!(made.each <= most && made.each * made.count() >= experts, "{experts} by {most}: {made:?}");
                assert!(made.each * (made.count() - 1) < experts, "{experts} by {most}: {made:?}");
            }
        }
    }
}
