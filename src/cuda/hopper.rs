//! Launch of the Hopper kernels: which calls they serve, and the descriptors of the copy engine.

use cudarc::driver::sys::{self, CUtensorMap};

use crate::dtype::DType;
use crate::error::Result;

use super::device::{Cuda, driver};
use super::launch::{Grid, HOPPER, ROWS};
use super::params;

/// Which product a kernel makes, as far as its operands' layout depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    /// Gate and up rows of `[E, 2 n, k]`.
    Up,
    /// Rows of `[E, n, k]`.
    Down,
    /// Columns of `[E, k, n]`.
    Dgrad,
    /// Sums over slots.
    Wgrad,
}

/// Whether the Hopper kernels can serve a product: 16-bit types, everything in whole 16-byte words.
pub(super) fn serves(device: &Cuda, dtype: DType, p: &params::Gemm) -> bool {
    let words = [p.a, p.b, p.out, p.pre, p.pre_out, p.hidden].iter().all(|at| at.is_multiple_of(16));
    device.hopper()
        && matches!(dtype, DType::BF16 | DType::F16)
        && words
        && p.vector_a == 1
        && p.vector_b == 1
        // A row past a tile's end is read as row 0.
        && p.a_rows > 0
        && p.n % 8 == 0
        && p.k % 8 == 0
}

/// Launches a kernel of blocks that stay, at most one a multiprocessor.
///
/// # Safety
/// As [`Cuda::launch`], for the kernel of `product`.
pub(super) unsafe fn launch(
    device: &Cuda,
    call: &'static str,
    kernel: &str,
    (product, dtype, blocks): (Product, DType, usize),
    p: &params::Gemm,
) -> Result<()> {
    if blocks == 0 {
        return Ok(());
    }
    let (n, k, groups) = (p.n as u64, p.k as u64, p.groups as u64);
    let map = |base, dims: &[u64], rows| tensor_map(call, dtype, (base, dims), Piece::of_rows(rows));
    // Boxes: 64 columns (128 bytes) by as many rows as one load brings. Those of weights are 32 rows high.
    let (a, b) = match product {
        Product::Up => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[k, 2 * n, groups], 32)?),
        Product::Down => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[k, n, groups], 32)?),
        Product::Dgrad => (map(p.a, &[k, p.a_rows as u64], 128)?, map(p.b, &[n, k, groups], 32)?),
        Product::Wgrad => (map(p.a, &[p.m as u64, p.a_rows as u64], 64)?, map(p.b, &[n, p.b_rows as u64], 64)?),
    };
    // The epilogue of the gradient through the activation: gate and up are planes of a row, so that a box over the last
    // column of one does not reach into the other. No other kernel reads these.
    let planes = |base, planes| tensor_map(call, dtype, (base, &[n, planes, p.m as u64]), Piece::EPILOGUE);
    let (pre, d_pre, hidden) = match p.pre {
        0 => (b, b, b),
        pre => (planes(pre, 2)?, planes(p.out, 2)?, if p.hidden == 0 { b } else { planes(p.hidden, 1)? }),
    };
    // Those over rows work in clusters of two.
    let (shape, multiple) = if product == Product::Wgrad { (HOPPER, 1) } else { (ROWS, 2) };
    let blocks = blocks.min(device.inner.processors / multiple * multiple).next_multiple_of(multiple);
    let grid = Grid { shared: shape.shared, ..Grid::new(blocks, shape.threads) };
    let mut arguments = [
        (&raw const *p).cast_mut().cast(),
        (&raw const a).cast_mut().cast(),
        (&raw const b).cast_mut().cast(),
        (&raw const pre).cast_mut().cast(),
        (&raw const d_pre).cast_mut().cast(),
        (&raw const hidden).cast_mut().cast(),
    ];
    // SAFETY: the kernels take at most these six, in this order; the rest is the caller's promise.
    unsafe { device.launch_with(call, kernel, grid, &mut arguments) }
}

/// What one load or store of the copy engine moves.
struct Piece {
    shape: [u32; 3],
    swizzle: sys::CUtensorMapSwizzle,
}

impl Piece {
    /// 16 rows of 32 columns of one plane.
    const EPILOGUE: Self = Self { shape: [32, 1, 16], swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B };

    /// Rows of 64 columns.
    fn of_rows(rows: u32) -> Self {
        Self { shape: [64, rows, 1], swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B }
    }
}

/// Descriptor of a matrix or a stack of them, innermost size first.
fn tensor_map(call: &'static str, dtype: DType, (base, sizes): (u64, &[u64]), moved: Piece) -> Result<CUtensorMap> {
    let mut dims = [1u64; 3];
    // An empty tensor is described as one row, and never read.
    dims.iter_mut().zip(sizes).for_each(|(d, size)| *d = (*size).max(1));
    let strides = [dims[0] * 2, dims[0] * dims[1] * 2];
    let steps = [1, 1, 1];
    let kind = match dtype {
        DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let mut map = std::mem::MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: the arrays have at least as many entries as `sizes` (strides one fewer); the map is written in full on success, and
    // is plain words besides.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            sizes.len() as u32,
            base as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            moved.shape.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            moved.swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .map_err(driver(call, "describe a tensor to the copy engine"))?;
        Ok(map.assume_init())
    }
}
