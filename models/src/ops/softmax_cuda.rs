//! Softmax of rows and its gradient by kernels (`kernels/softmax.cu`): f32, bf16 and f16.

use candle_core::{Result, Tensor};

use super::cuda::{int, is_kernel_float, is_plain, output, plain};
use super::params::{SoftmaxBackwardParams, SoftmaxParams};

/// Rows and their size, where there are kernels for them.
fn rows_of(x: &Tensor) -> Option<(usize, usize)> {
    let size = *x.dims().last()?;
    let served = is_kernel_float(x.dtype()) && x.elem_count() > 0 && is_plain(x, x);
    served.then(|| (x.elem_count() / size, size))
}

/// `None` where there is no kernel.
pub(super) fn softmax(x: &Tensor) -> Result<Option<Tensor>> {
    let Some((rows, size)) = rows_of(x) else { return Ok(None) };
    let dtype = x.dtype();
    let y = output((x.device(), dtype), x.shape(), [Some(x)], |gpu, [x], out| {
        let params = SoftmaxParams { x, out, rows: int(rows)?, size: int(size)? };
        let (kernel, grid) = gpu.kernels.softmax.of(dtype)?.of(rows, size, false);
        // SAFETY: the kernel's struct; x has so many rows, and the result its shape.
        unsafe { gpu.launch(kernel, grid, &params) }
    })?;
    Ok(Some(y))
}

/// Gradient of x from the result and its gradient; `None` where there is no kernel.
pub(super) fn gradient(y: &Tensor, of: &Tensor) -> Result<Option<Tensor>> {
    let Some((rows, size)) = rows_of(y) else { return Ok(None) };
    if of.dims() != y.dims() {
        return Ok(None);
    }
    let (of, dtype) = (plain(of, y)?, y.dtype());
    let d_x = output((y.device(), dtype), y.shape(), [Some(y), Some(&of)], |gpu, [y, d_out], d_x| {
        let params = SoftmaxBackwardParams { y, d_out, d_x, rows: int(rows)?, size: int(size)? };
        let (kernel, grid) = gpu.kernels.softmax_backward.of(dtype)?.of(rows, size, false);
        // SAFETY: the kernel's struct; all have the result's shape.
        unsafe { gpu.launch(kernel, grid, &params) }
    })?;
    Ok(Some(d_x))
}
