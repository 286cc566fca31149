//! A decode step's attention by kernels on a GPU (`kernels/cache_attention.cu`): bf16 heads of 64, 128 or 256 entries.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::cache::CacheAttentionOptions;
use crate::ops::cuda::{Grid, Launcher, int, is_plain, new_tensor, output, with_addresses_mut};
use crate::ops::kernel_table::{CACHE_DIMS, cache_attention_shared};
use crate::ops::params::{CACHE_HEADS, CACHE_MOST_RUNS, CACHE_STEP, CacheAttentionParams, CacheCombineParams, THREADS};

/// Blocks that fill a GPU: two for each of some 130 SMs.
const BLOCKS: usize = 264;

/// As [`cache_attention`](super::cache_attention); `None` where no kernel does it.
pub(super) fn cache_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &CacheAttentionOptions<'_>,
) -> Result<Option<Tensor>> {
    let (sequences, heads, one, dim) = q.dims4()?;
    let (_, key_heads, positions, _) = k.dims4()?;
    let CacheAttentionOptions { filled, sinks, scale, .. } = *options;
    let Some(kernel) = CACHE_DIMS.iter().position(|d| *d == dim) else { return Ok(None) };
    let served = q.dtype() == DType::BF16
        && [Some(q), Some(k), Some(v), sinks].into_iter().flatten().all(|t| is_plain(t, q))
        && sequences > 0
        && one == 1
        && heads.is_multiple_of(key_heads)
        && [k, v].iter().all(|t| t.dims() == [sequences, key_heads, positions, dim])
        && sinks.is_none_or(|sinks| sinks.dims() == [heads])
        && filled.dims() == [1]
        && filled.dtype() == DType::U32;
    if !served {
        return Ok(None);
    }
    let parts = (heads / key_heads).div_ceil(CACHE_HEADS as usize);
    let most = (CACHE_MOST_RUNS as usize).min(positions.div_ceil(CACHE_STEP as usize));
    let runs = (BLOCKS / (sequences * key_heads * parts)).clamp(1, most);
    let grid = Grid {
        blocks: [runs, parts, sequences * key_heads],
        threads: THREADS as usize,
        shared: cache_attention_shared(dim),
    };
    let (like, inputs) = ((q.device(), q.dtype()), [Some(q), Some(k), Some(v), Some(filled), sinks]);
    let y = output(like, (sequences, 1, heads, dim), inputs, |gpu, [q, k, v, filled, sinks], out| {
        let params = CacheAttentionParams {
            q,
            k,
            v,
            filled,
            sinks,
            out,
            heads: int(heads)?,
            key_heads: int(key_heads)?,
            positions: int(positions)?,
            runs: int(runs)?,
            scale: scale as f32,
            ..Default::default()
        };
        let launch = CacheLaunch { gpu, device: like.0.as_cuda_device()?, kernel, grid };
        match runs {
            // The only run of a head is its result.
            1 => launch.attend(&params),
            _ => launch.attend_and_combine(params, [sequences * heads, dim]),
        }
    })?;
    Ok(Some(y))
}

/// A launch whose shapes have been compared.
struct CacheLaunch<'a> {
    gpu: &'a Launcher,
    /// Where the sums of runs are made.
    device: &'a CudaDevice,
    /// Which of the table's.
    kernel: usize,
    grid: Grid,
}

impl CacheLaunch<'_> {
    fn attend(&self, params: &CacheAttentionParams) -> Result<()> {
        // SAFETY: the kernel's struct, and the kernel of these heads; `cache_attention` has compared the shapes of what
        // it reads, and what it writes was allocated for it.
        unsafe { self.gpu.launch(&self.gpu.kernels.cache_attention[self.kernel], self.grid, params) }
    }

    /// The runs of `rows` heads of D entries, and their sum.
    fn attend_and_combine(&self, params: CacheAttentionParams, [rows, dim]: [usize; 2]) -> Result<()> {
        let runs = params.runs as usize;
        let made = |width: usize| new_tensor(self.device, DType::F32, (rows, runs, width));
        with_addresses_mut(&[&made(dim)?, &made(2)?], |sums| {
            let (partial, stats) = (sums[0], sums[1]);
            self.attend(&CacheAttentionParams { partial, stats, ..params })?;
            let CacheAttentionParams { sinks, out, heads, runs, .. } = params;
            let params = CacheCombineParams { partial, stats, sinks, out, heads, runs };
            let grid = Grid { blocks: [rows, 1, 1], threads: dim, shared: 0 };
            // SAFETY: the kernel's struct; the sums have the shape that the first kernel has written, and are freed on
            // the stream that the kernels are on.
            unsafe { self.gpu.launch(&self.gpu.kernels.cache_combine, grid, &params) }
        })
    }
}
