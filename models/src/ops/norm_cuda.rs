//! Norms of rows and their gradients by kernels (`kernels/norm.cu`, `kernels/norm_backward.cu`): f32, bf16 and f16.

use candle_core::{DType, Result, Tensor};

use super::cuda::{DEFAULT_SHARED, Grid, int, is_kernel_float, is_plain, new_tensor, output, plain, write_asked};
use super::norm::{NormOptions, NormWeights};
use super::params::{NORM_COLUMN_THREADS, NormBackwardParams, NormParams};

/// Longest row that stays in what a block has of shared memory without being asked for more, beside its sums.
const LONGEST: usize = (DEFAULT_SHARED - 1024) / size_of::<f32>();

/// Columns of a block that adds them up.
const COLUMNS: usize = 32;

/// Blocks that add up columns: some for each SM of a large GPU.
const COLUMN_BLOCKS: usize = 1024;

/// Fewest rows of such a block: each of its warps has some.
const FEWEST_ROWS: usize = 64;

/// Rows and their size, where kernels take x with these weights.
fn rows_of<'a>(x: &Tensor, weights: impl IntoIterator<Item = &'a Tensor>) -> Option<(usize, usize)> {
    let size = *x.dims().last()?;
    let served = is_kernel_float(x.dtype())
        && x.elem_count() > 0
        && size <= LONGEST
        && is_plain(x, x)
        && weights.into_iter().all(|t| is_plain(t, x) && t.dims() == [size]);
    served.then(|| (x.elem_count() / size, size))
}

/// The fields of a forward that its options give.
fn params_of((rows, size): (usize, usize), options: NormOptions) -> Result<NormParams> {
    Ok(NormParams {
        rows: int(rows)?,
        size: int(size)?,
        centered: options.centered.into(),
        weight_offset: options.weight_offset as f32,
        eps: options.eps as f32,
        ..Default::default()
    })
}

/// Of x, and weight and bias where they are there; `None` where there is no kernel.
pub(super) fn norm(inputs: &[Tensor], options: NormOptions) -> Result<Option<Tensor>> {
    let x = &inputs[0];
    let Some((rows, size)) = rows_of(x, &inputs[1..]) else { return Ok(None) };
    let tensors = [Some(x), inputs.get(1), inputs.get(2)];
    let y = output((x.device(), x.dtype()), x.shape(), tensors, |gpu, [x_at, weight, bias], out| {
        let params = NormParams { x: x_at, weight, bias, out, ..params_of((rows, size), options)? };
        let (kernel, grid) = gpu.kernels.norm.of(x.dtype())?.of(rows, size, true);
        // SAFETY: the kernel's struct; all shapes were compared above, and the result has x's.
        unsafe { gpu.launch(kernel, grid, &params) }
    })?;
    Ok(Some(y))
}

/// `x + y` and its norm, `[T, H]` each; `None` where there is no kernel, or a gradient may be asked for.
pub(super) fn add_norm(
    x: &Tensor,
    y: &Tensor,
    weights: Option<NormWeights<'_>>,
    options: NormOptions,
) -> Result<Option<[Tensor; 2]>> {
    let of_weights = || weights.iter().flat_map(NormWeights::tensors);
    let Some((rows, size)) = rows_of(x, of_weights()) else { return Ok(None) };
    let tracked = [x, y].into_iter().chain(of_weights()).any(Tensor::track_op);
    if tracked || x.rank() != 2 || y.dims() != x.dims() || !is_plain(y, x) {
        return Ok(None);
    }
    let [weight, bias] = [weights.map(|w| w.weight), weights.and_then(|w| w.bias)];
    let (like, inputs) = ((x.device(), x.dtype()), [Some(x), Some(y), weight, bias]);
    let both = output(like, (2 * rows, size), inputs, |gpu, [x, y, weight, bias], sums| {
        let out = sums + (rows * size * like.1.size_in_bytes()) as u64;
        let params = NormParams { x, y, weight, bias, sums, out, ..params_of((rows, size), options)? };
        let (kernel, grid) = gpu.kernels.norm.of(like.1)?.of(rows, size, true);
        // SAFETY: the kernel's struct; all shapes were compared above, and the result is `[2 · rows, size]`.
        unsafe { gpu.launch(kernel, grid, &params) }
    })?;
    let half = |which: usize| both.narrow(0, which * rows, rows);
    Ok(Some([half(0)?, half(1)?]))
}

/// Gradients of x, weight and bias, of those that are there and `asked` for, from the result's; `None` where there is no
/// kernel.
pub(super) fn gradients(
    inputs: &[Tensor],
    options: NormOptions,
    of: &Tensor,
    asked: &[bool],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let x = &inputs[0];
    let Some((rows, size)) = rows_of(x, &inputs[1..]) else { return Ok(None) };
    if of.dims() != x.dims() {
        return Ok(None);
    }
    let of = plain(of, x)?;
    let (device, is_asked) = (x.device().as_cuda_device()?, |number: usize| asked.get(number) == Some(&true));
    let columns = size.div_ceil(COLUMNS);
    let rows_of_block = rows.div_ceil(COLUMN_BLOCKS.div_ceil(columns)).max(FEWEST_ROWS);
    let blocks = rows.div_ceil(rows_of_block);
    let d_x = is_asked(0).then(|| new_tensor(device, x.dtype(), x.shape())).transpose()?;
    let wide = |asked: bool, shape: (usize, usize)| asked.then(|| new_tensor(device, DType::F32, shape)).transpose();
    let stats = wide(is_asked(1) || is_asked(2), (rows, 2))?;
    let [d_weight, d_bias] = [wide(is_asked(1), (blocks, size))?, wide(is_asked(2), (blocks, size))?];
    let outputs = [d_x.as_ref(), stats.as_ref(), d_weight.as_ref(), d_bias.as_ref()];
    let tensors = [Some(x), inputs.get(1), Some(&of)];
    write_asked(x.device(), tensors, outputs, |gpu, [x_at, weight, d_out], [d_x, stats, d_weight, d_bias]| {
        let NormParams { rows: row_count, size: row_size, centered, weight_offset, eps, .. } =
            params_of((rows, size), options)?;
        let params = NormBackwardParams {
            x: x_at,
            weight,
            d_out,
            d_x,
            stats,
            d_weight,
            d_bias,
            rows: row_count,
            size: row_size,
            centered,
            weight_offset,
            eps,
            rows_of_block: int(rows_of_block)?,
        };
        let (of_rows, grid) = gpu.kernels.norm_backward.of(x.dtype())?.of(rows, size, true);
        // SAFETY: the kernel's struct; all shapes were compared above, and what it writes was allocated for it.
        unsafe { gpu.launch(of_rows, grid, &params) }?;
        if stats == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [columns, blocks, 1], threads: NORM_COLUMN_THREADS as usize, shared: 0 };
        // SAFETY: as above; the statistics are written by the kernel before this one.
        unsafe { gpu.launch(gpu.kernels.norm_weight_sums.of(x.dtype())?, grid, &params) }
    })?;
    let sum = |parts: Option<Tensor>| parts.map(|parts| parts.sum(0)?.to_dtype(x.dtype())).transpose();
    let all = [d_x, sum(d_weight)?, sum(d_bias)?];
    Ok(Some(all.into_iter().take(inputs.len()).collect()))
}
