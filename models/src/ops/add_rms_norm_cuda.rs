//! A sum with its root mean square norm by a kernel (`kernels/add_rms_norm.cu`): bf16 and f16.

use candle_core::{Result, Tensor};

use super::cuda::{DEFAULT_SHARED, Grid, int, is_half, is_plain, output};
use super::params::{AddRmsNormParams, ROW_THREADS};

/// Longest row whose sum stays in what a block has of shared memory without being asked for more.
const LONGEST: usize = DEFAULT_SHARED / size_of::<f32>();

/// `x + y` and its root mean square norm, `[T, H]` each; `None` where there is no kernel.
pub(super) fn add_rms_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Result<Option<[Tensor; 2]>> {
    let [rows, size] = *x.dims() else { return Ok(None) };
    let served = is_half(x.dtype())
        && rows > 0
        && size.is_multiple_of(8)
        && (1..=LONGEST).contains(&size)
        && [x, y, weight].into_iter().all(|t| is_plain(t, x) && !t.track_op())
        && y.dims() == x.dims()
        && weight.dims() == [size];
    if !served {
        return Ok(None);
    }
    let (like, inputs) = ((x.device(), x.dtype()), [Some(x), Some(y), Some(weight)]);
    let both = output(like, (2 * rows, size), inputs, |gpu, [x, y, weight], out| {
        let params = AddRmsNormParams { x, y, weight, out, rows: int(rows)?, size: int(size)?, eps: eps as f32 };
        let grid = Grid { blocks: [rows, 1, 1], threads: ROW_THREADS as usize, shared: size * size_of::<f32>() };
        // SAFETY: the kernel's struct; all shapes were compared above, and the result is `[2 · rows, size]`.
        unsafe { gpu.launch(gpu.kernels.add_rms_norm.of(like.1)?, grid, &params) }
    })?;
    let half = |which: usize| both.narrow(0, which * rows, rows);
    Ok(Some([half(0)?, half(1)?]))
}
