//! Descriptors of TMA, which moves boxes of a tensor between global and shared memory.

use cudarc::driver::sys::{self, CUtensorMap};

use crate::dtype::DType;
use crate::error::{Error, Result};

use super::driver::driver;

/// A matrix, or a stack of them, with rows one after the other.
pub(super) struct TensorMapSpec<'a> {
    pub(super) call: &'static str,
    pub(super) dtype: DType,
    pub(super) base: u64,
    /// Columns, rows and, for a stack, matrices.
    pub(super) sizes: &'a [u64],
}

impl TensorMapSpec<'_> {
    /// Boxes of 128 bytes by `rows`, with the chunks of 16 bytes of a row permuted in shared memory (swizzle of 128
    /// bytes). What lies outside the matrix is read as zeros and not written.
    pub(super) fn boxes(&self, rows: u32) -> Result<CUtensorMap> {
        self.describe(|bytes| [128 / bytes, rows, 1])
    }

    /// Boxes of 128 bytes of one row in each of so many matrices, permuted likewise.
    pub(super) fn plane_boxes(&self, matrices: u32) -> Result<CUtensorMap> {
        self.describe(|bytes| [128 / bytes, 1, matrices])
    }

    fn describe(&self, shape: impl Fn(u32) -> [u32; 3]) -> Result<CUtensorMap> {
        use sys::CUtensorMapDataType as Kind;
        let (kind, bytes) = match self.dtype {
            DType::BF16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
            DType::F16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
            DType::F32 => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
            other => return Err(Error::invalid(self.call, "type", "bf16, f16 or f32", other)),
        };
        let mut dims = [1u64; 3];
        // An empty tensor is described as one row, and never touched.
        dims.iter_mut().zip(self.sizes).for_each(|(d, size)| *d = (*size).max(1));
        let strides = [dims[0] * bytes, dims[0] * dims[1] * bytes];
        let (shape, steps) = (shape(bytes as u32), [1u32; 3]);
        let mut map = std::mem::MaybeUninit::<CUtensorMap>::zeroed();
        // SAFETY: the arrays have at least as many entries as there are sizes (three at most, strides one fewer); the
        // map is written in full on success, and is plain words besides.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                kind,
                self.sizes.len().min(3) as u32,
                self.base as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                shape.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
            .map_err(driver(self.call, "describe a tensor to TMA"))?;
            Ok(map.assume_init())
        }
    }
}
