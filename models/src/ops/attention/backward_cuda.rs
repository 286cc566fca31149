//! Attention's backward by three kernels on a GPU (`kernels/attention_backward.cu`), for what the forward has kernels
//! for.

use candle_core::{DType, Result, Tensor};

use super::AttentionOptions;
use super::backward::BackwardOutput;
use super::forward_cuda::{AttentionCall, fits, strides};
use crate::ops::cuda::{Grid, new_tensor, write};
use crate::ops::kernel_table::{AttentionHeads, DOTS_VALUES};
use crate::ops::params::{AttentionBackwardParams, AttentionParams, THREADS};

/// Memory for what backward makes, which is still to be written.
fn unwritten([q, k, v]: [&Tensor; 3], call: &AttentionCall) -> Result<BackwardOutput> {
    let device = q.device().as_cuda_device()?;
    let like = |t: &Tensor| new_tensor(device, t.dtype(), t.shape());
    let dots = new_tensor(device, DType::F32, (call.sequences, call.heads, call.queries))?;
    Ok(BackwardOutput { d_q: like(q)?, d_k: like(k)?, d_v: like(v)?, dots })
}

/// Gradients by kernels from the operands and, `[y, of, log_sums]`, the result, its gradient (both `[B, S, heads, V]`)
/// and the logarithms of the rows' sums; `None` where no kernel serves them.
pub(super) fn backward(
    operands: [&Tensor; 3],
    [y, of, log_sums]: [&Tensor; 3],
    options: &AttentionOptions<'_>,
) -> Result<Option<BackwardOutput>> {
    // The sums are those of the forward's kernel: candle's operations round scores to 16 bits.
    let Some(call) = AttentionCall::of(operands, options)?.filter(AttentionCall::has_enough_queries) else {
        return Ok(None);
    };
    let output = unwritten(operands, &call)?;
    let of = if fits(of, y) { of.clone() } else { of.to_dtype(y.dtype())?.force_contiguous()? };
    write_gradients(&call, operands, [&y.contiguous()?, &of, &log_sums.contiguous()?], &output)?;
    Ok(Some(output))
}

/// Writes all of `output`. The result and the sums are contiguous, and the result's gradient [`fits`].
pub(super) fn write_gradients(
    call: &AttentionCall,
    [q, k, v]: [&Tensor; 3],
    [y, of, log_sums]: [&Tensor; 3],
    output: &BackwardOutput,
) -> Result<()> {
    let heads = AttentionHeads::ALL[call.kernel];
    let shape = [call.sequences, call.queries, call.heads, heads.value];
    if y.dims() != shape || of.dims() != shape || log_sums.elem_count() != output.dots.elem_count() {
        return Err(candle_core::Error::msg(format!(
            "attention: expected a gradient of {shape:?}, found {:?}",
            of.dims()
        )));
    }
    // A row of values takes a thread for eight entries.
    let rows = THREADS as usize * 8 / heads.value;
    let dots_grid = grid([(call.queries * call.heads).div_ceil(rows), 1, call.sequences], 0);
    let blocks_of_keys = call.positions.div_ceil(heads.keys.rows) * heads.keys.blocks;
    let keys_grid = grid([blocks_of_keys, call.key_heads, call.sequences], heads.keys_shared());
    let blocks_of_queries = call.queries.div_ceil(heads.queries.rows);
    let queries_grid = grid([blocks_of_queries, call.heads, call.sequences], heads.queries_shared());
    // It lies as the result does, by positions and then heads.
    let d_out_strides = strides(&of.transpose(1, 2)?);
    let inputs = [q, k, v, y, of, log_sums].map(Some);
    let BackwardOutput { d_q, d_k, d_v, dots } = output;
    write(q.device(), inputs, [d_q, d_k, d_v, dots], |gpu, [q, k, v, out, d_out, log_sums], [d_q, d_k, d_v, dots]| {
        let forward = AttentionParams { q, k, v, out, log_sums, ..call.params };
        let params = AttentionBackwardParams { forward, d_out, dots, d_q, d_k, d_v, d_out_strides };
        let dtype = output.d_q.dtype();
        let of_value = DOTS_VALUES.iter().position(|value| *value == heads.value);
        let of_value = of_value.ok_or_else(|| candle_core::Error::msg("attention: values without a kernel"))?;
        let kernels = [
            (&gpu.kernels.attention_dots.of(dtype)?[of_value], dots_grid),
            (&gpu.kernels.attention_backward_keys.of(dtype)?[call.kernel], keys_grid),
            (&gpu.kernels.attention_backward_queries.of(dtype)?[call.kernel], queries_grid),
        ];
        for (kernel, grid) in kernels {
            // SAFETY: the kernels' struct, and the kernels of these heads; operands were compared when the call was
            // made, the others above, and what is written was allocated for it. Products of rows are written by the
            // first kernel, before the others read them.
            unsafe { gpu.launch(kernel, grid, &params) }?;
        }
        Ok(())
    })
}

fn grid(blocks: [usize; 3], shared: usize) -> Grid {
    Grid { blocks, threads: THREADS as usize, shared }
}
