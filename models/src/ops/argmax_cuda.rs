//! The largest of a row by a kernel (`kernels/argmax.cu`): bf16 and f16.

use candle_core::{DType, Result, Tensor};

use super::cuda::{Grid, int, is_half, is_plain, output};
use super::params::{ArgmaxParams, ROW_THREADS};

/// Place of the first of each row's largest entries, U32 `[T, 1]`; `None` where there is no kernel.
pub(super) fn argmax(x: &Tensor) -> Result<Option<Tensor>> {
    let [rows, size] = *x.dims() else { return Ok(None) };
    if rows == 0 || size == 0 || !is_half(x.dtype()) || !is_plain(x, x) {
        return Ok(None);
    }
    let dtype = x.dtype();
    let places = output((x.device(), DType::U32), (rows, 1), [Some(x)], |gpu, [x], out| {
        let params = ArgmaxParams { x, out, size: int(size)? };
        let grid = Grid { blocks: [rows, 1, 1], threads: ROW_THREADS as usize, shared: 0 };
        // SAFETY: the kernel's struct; x is `[rows, size]`, and the result has an entry for each row.
        unsafe { gpu.launch(gpu.kernels.argmax.of(dtype)?, grid, &params) }
    })?;
    Ok(Some(places))
}
