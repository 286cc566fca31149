//! Products of up to four rows with a weight by a kernel (`kernels/gemv.cu`): bf16 and f16.

use candle_core::{Result, Tensor};
use candle_nn::Linear;

use super::cuda::{DEFAULT_SHARED, Grid, int, is_half, is_plain, output};
use super::params::{GEMV_MOST_ROWS, GEMV_WARPS, GemvParams};

/// Most rows of the weight: with more (an output layer's) cuBLAS is as quick, as its blocks read x fewer times.
const MOST_OUTPUTS: usize = 32_768;

/// `x wᵀ` and the bias where there is one; `None` where there is no kernel.
pub(super) fn gemv(of: &Linear, x: &Tensor) -> Result<Option<Tensor>> {
    let (w, bias) = (of.weight(), of.bias());
    let ([rows, inputs], [outputs, columns]) = (x.dims(), w.dims()) else { return Ok(None) };
    let (rows, inputs, outputs, dtype) = (*rows, *inputs, *outputs, x.dtype());
    let shared = rows * inputs * dtype.size_in_bytes();
    let served = is_half(dtype)
        && (1..=GEMV_MOST_ROWS as usize).contains(&rows)
        && inputs == *columns
        && inputs.is_multiple_of(8)
        && (1..=MOST_OUTPUTS).contains(&outputs)
        && shared <= DEFAULT_SHARED
        && [Some(x), Some(w), bias].into_iter().flatten().all(|t| is_plain(t, x) && !t.track_op())
        && bias.is_none_or(|bias| bias.dims() == [outputs]);
    if !served {
        return Ok(None);
    }
    let tensors = [Some(x), Some(w), bias];
    let y = output((x.device(), dtype), (rows, outputs), tensors, |gpu, [x, w, bias], y| {
        let params = GemvParams { x, w, bias, y, inputs: int(inputs)?, outputs: int(outputs)? };
        let warps = GEMV_WARPS as usize;
        let grid = Grid { blocks: [outputs.div_ceil(warps), 1, 1], threads: 32 * warps, shared };
        // SAFETY: the kernel's struct, and the kernel of this number of rows; all shapes were compared above, and the
        // result is `[rows, outputs]`.
        unsafe { gpu.launch(&gpu.kernels.gemv.of(dtype)?[rows - 1], grid, &params) }
    })?;
    Ok(Some(y))
}
