//! Products with quantised weights: which kernel makes one, and its launch.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{QuantisedRef, WeightFormat};

use super::device::Cuda;
use super::hopper::Product;
use super::launch::{DECODE_SHARED, Grid};
use super::params;

/// Threads of a block of the kernels for few rows, and what its warps make of a tile (`kernels/w4a16_decode.cu`).
const THREADS: u32 = 256;
const WARPS: usize = 8;
/// Columns of a weight that these kernels take in a step, and a thread of a quad in one.
const STEP: usize = 256;
const THREAD_STEP: i64 = 64;
/// Rows of an expert, on average, up to which they serve.
const FEW: i64 = 32;

/// Checked weights, as kernels take them.
pub(super) struct Quantised {
    format: WeightFormat,
    params: params::QuantWeight,
}

/// A launch of the kernels for few rows.
pub(super) struct FewRows {
    /// Rows and columns of a tile.
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) shared: u32,
}

impl Quantised {
    pub(super) fn new(call: &'static str, weight: &QuantisedRef<'_, Cuda>) -> Result<Self> {
        weight.check(call)?;
        let [_, rows, columns] = weight.dims;
        let words = weight.codes.data().ptr.is_multiple_of(16) && columns.is_multiple_of(8);
        if !words {
            let expected = "a multiple of 8 columns, and codes at a multiple of 16 bytes";
            return Err(Error::invalid(call, "weight", expected, format!("{:?}", weight.dims)));
        }
        let params = params::QuantWeight {
            codes: weight.codes.data().ptr,
            scales: weight.scales.data().ptr,
            factors: weight.factors.as_ref().map_or(0, |f| f.data().ptr),
            format: match weight.format {
                WeightFormat::Nvfp4 => 0,
                WeightFormat::Mxfp4 => 1,
                WeightFormat::Fp8Block => 2,
            },
            rows: rows as i64,
            columns: columns as i64,
            code_bytes: weight.format.code_dims(weight.dims)[2] as i64,
            blocks: weight.format.scales(weight.dims, weight.parts).1[2] as i64,
            parts: weight.parts as i64,
        };
        Ok(Self { format: weight.format, params })
    }

    /// Whether the kernels for few rows serve a product of `p`, and how. A tile's columns are divided by `factor`.
    pub(super) fn few_rows(
        &self,
        dtype: DType,
        p: &params::Gemm,
        (product, factor): (Option<Product>, usize),
    ) -> Option<FewRows> {
        let forward = matches!(product, Some(Product::Up | Product::Down));
        let serves = forward
            && dtype == DType::BF16
            && self.format != WeightFormat::Fp8Block
            && self.params.scales.is_multiple_of(16)
            && p.vector_a == 1
            && p.k % THREAD_STEP == 0
            && p.m <= FEW * p.groups
            && (self.params.parts == 1 || self.params.parts == 2 && factor == 2);
        let pitch = ((p.k as usize).div_ceil(STEP) * STEP + 32) * dtype.size();
        let rows = [16, 8].into_iter().find(|rows| rows * pitch <= DECODE_SHARED as usize).filter(|_| serves)?;
        Some(FewRows { rows, columns: WARPS * 32 / factor, shared: (rows * pitch) as u32 })
    }

    /// Enqueues a product; `decode`: shared memory of the kernel for few rows.
    pub(super) fn launch(
        &self,
        (device, call): (&Cuda, &'static str),
        (product, suffix): (&str, &str),
        (grid, decode): (Grid, Option<u32>),
        p: &params::Gemm,
    ) -> Result<()> {
        let format = match self.format {
            WeightFormat::Nvfp4 => "nvfp4",
            WeightFormat::Mxfp4 => "mxfp4",
            WeightFormat::Fp8Block => "fp8",
        };
        let (kernel, grid) = match decode {
            Some(shared) => (format!("decode_{product}_{format}"), Grid { threads: THREADS, shared, ..grid }),
            None => (format!("{product}_{format}_{suffix}"), grid),
        };
        let mut arguments = [(&raw const *p).cast_mut().cast(), (&raw const self.params).cast_mut().cast()];
        // SAFETY: callers have checked every tensor in `p`, `new` those of the weight; maps and zones, which only the
        // device knows, are checked by the kernel.
        unsafe { device.launch_with(call, &kernel, grid, &mut arguments) }
    }
}
