//! Attention's forward by FlashAttention 2, of `candle-flash-attn`: bf16 and f16, where nothing is trained, as the crate
//! gives no sums to a backward.

use candle_core::{Result, Tensor};
use candle_flash_attn::flash_attn_windowed;

use super::AttentionOptions;
use super::forward_cuda::fits;
use crate::ops::cuda::is_half;

/// Entries of the largest head that is taken: its kernels of larger ones need more shared memory than some GPUs have.
const MOST_DIM: usize = 256;

/// As [`masked_attention`](super::masked_attention). `None` where FlashAttention does not serve the operands: with sinks or
/// chunks, and where a value has another size than a key.
pub(super) fn forward([q, k, v]: [&Tensor; 3], options: &AttentionOptions<'_>) -> Result<Option<Tensor>> {
    let (sequences, heads, queries, dim) = q.dims4()?;
    let (_, key_heads, positions, _) = k.dims4()?;
    let AttentionOptions { window, chunk, sinks, scale, .. } = *options;
    let served = q.device().is_cuda()
        && is_half(q.dtype())
        && [q, k, v].into_iter().all(|t| fits(t, q))
        && sinks.is_none()
        && chunk.is_none_or(|chunk| options.first + queries <= chunk)
        && window != Some(0)
        && (1..=MOST_DIM).contains(&dim)
        && dim.is_multiple_of(8)
        && sequences > 0
        && queries > 0
        && positions >= queries
        && heads.is_multiple_of(key_heads)
        && [k, v].into_iter().all(|t| t.dims() == [sequences, key_heads, positions, dim]);
    if !served {
        return Ok(None);
    }
    // Its windows do not count a query's own position, and its causal kernels take none.
    let before = window.filter(|&window| window < positions).map(|window| window - 1);
    let tokens_first = |t: &Tensor| t.transpose(1, 2);
    let (q, k, v) = (tokens_first(q)?, tokens_first(k)?, tokens_first(v)?);
    flash_attn_windowed(&q, &k, &v, scale as f32, before, Some(0)).map(Some)
}
