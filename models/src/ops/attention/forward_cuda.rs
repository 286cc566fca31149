//! Attention's forward by one kernel on a GPU (`kernels/attention.cu`): bf16 and f16, of the sizes of heads that families
//! have. Everything else is candle's operations'.

use candle_core::{DType, Result, Tensor};

use super::{AttentionOptions, Output};
use crate::ops::cuda::{Grid, int, is_half, output, with_addresses_mut};
use crate::ops::kernel_table::AttentionHeads;
use crate::ops::params::{AttentionParams, Strides, THREADS};

/// Below so many queries candle's operations are quicker: most of a block's rows would be empty.
pub(super) const FEWEST_QUERIES: usize = 16;

/// A call that kernels serve.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionCall {
    pub sequences: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub queries: usize,
    pub positions: usize,
    /// Which of [`AttentionHeads::ALL`] it has.
    pub kernel: usize,
    /// Without pointers.
    pub params: AttentionParams,
}

impl AttentionCall {
    /// `None` where no kernel serves it.
    pub fn of([q, k, v]: [&Tensor; 3], options: &AttentionOptions<'_>) -> Result<Option<Self>> {
        let (sequences, heads, queries, dim) = q.dims4()?;
        let (_, key_heads, positions, _) = k.dims4()?;
        let value = v.dims()[3];
        let same = |of: &AttentionHeads| (of.dim, of.value) == (dim, value);
        let Some(kernel) = AttentionHeads::ALL.iter().position(same) else { return Ok(None) };
        let AttentionOptions { first, window, chunk, sinks, scale, .. } = *options;
        let served = q.device().is_cuda()
            && is_half(q.dtype())
            && [q, k, v].into_iter().all(|t| fits(t, q))
            && sinks.is_none_or(|s| s.dtype() == q.dtype() && s.dims() == [heads] && s.is_contiguous())
            && queries > 0
            && sequences > 0
            && heads.is_multiple_of(key_heads)
            && k.dims() == [sequences, key_heads, positions, dim]
            && v.dims() == [sequences, key_heads, positions, value]
            && positions >= queries;
        if !served {
            return Ok(None);
        }
        let params = AttentionParams {
            q_strides: strides(q),
            k_strides: strides(k),
            v_strides: strides(v),
            heads: int(heads)?,
            key_heads: int(key_heads)?,
            queries: int(queries)?,
            positions: int(positions)?,
            first: int(first)?,
            first_key: int(first + queries - positions)?,
            window: int(window.unwrap_or(0).min(i32::MAX as usize))?,
            chunk: int(chunk.unwrap_or(0).min(i32::MAX as usize))?,
            scale: scale as f32,
            ..Default::default()
        };
        Ok(Some(Self { sequences, heads, key_heads, queries, positions, kernel, params }))
    }

    /// That kernels are quicker than candle's operations.
    pub fn has_enough_queries(&self) -> bool {
        self.queries >= FEWEST_QUERIES
    }
}

/// Of the same type and device, in rows of whole loads of 16 bytes.
pub(super) fn fits(t: &Tensor, like: &Tensor) -> bool {
    let layout = t.layout();
    let (rows, entries) = layout.stride().split_at(layout.stride().len() - 1);
    let aligned = rows.iter().chain([&layout.start_offset()]).all(|n| n.is_multiple_of(8));
    t.dtype() == like.dtype() && t.device().same_device(like.device()) && entries == [1] && aligned
}

/// As [`masked_attention`](super::masked_attention), where there is a kernel for it; with the logarithms of the rows' sums
/// where `log_sums`.
pub(super) fn forward(
    operands: [&Tensor; 3],
    options: &AttentionOptions<'_>,
    log_sums: bool,
) -> Result<Option<Output>> {
    let call = AttentionCall::of(operands, options)?.filter(AttentionCall::has_enough_queries);
    call.map(|call| run(&call, operands, options.sinks, log_sums)).transpose()
}

/// By the kernel, however few the queries are.
pub(super) fn run(
    call: &AttentionCall,
    [q, k, v]: [&Tensor; 3],
    sinks: Option<&Tensor>,
    log_sums: bool,
) -> Result<Output> {
    let AttentionCall { sequences, heads, key_heads, queries, kernel, params, .. } = *call;
    let log_sums = match log_sums {
        true => Some(Tensor::zeros((sequences, heads, queries), DType::F32, q.device())?),
        false => None,
    };
    let block = AttentionHeads::ALL[kernel];
    let grid = Grid {
        blocks: [queries.div_ceil(block.rows), heads, sequences],
        threads: THREADS as usize,
        shared: block.shared(),
    };
    let (like, inputs) = ((q.device(), q.dtype()), [Some(q), Some(k), Some(v), sinks]);
    let y = output(like, (sequences, queries, heads, block.value), inputs, |gpu, [q, k, v, sinks], out| {
        let written: Vec<&Tensor> = log_sums.iter().collect();
        with_addresses_mut(&written, |written| {
            let log_sums = written.first().copied().unwrap_or(0);
            let params = AttentionParams { q, k, v, sinks, out, log_sums, ..params };
            // SAFETY: the kernel's struct, and the kernel of these heads; all shapes were compared above, and what it
            // writes was allocated for it.
            unsafe { gpu.launch(&gpu.kernels.attention_forward.of(like.1)?[kernel], grid, &params) }
        })
    })?;
    let log_sums =
        log_sums.map(|sums| sums.reshape((sequences, key_heads, heads / key_heads, queries, 1))).transpose()?;
    Ok(Output { y, log_sums })
}

pub(super) fn strides(t: &Tensor) -> Strides {
    let stride = t.stride();
    Strides { sequence: stride[0] as i64, head: stride[1] as i64, row: stride[2] as i64 }
}
