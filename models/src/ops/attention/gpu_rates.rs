//! Rates and memory of attention's kernels on a GPU. Both count for the whole GPU, so nothing may run beside them:
//!
//! ```text
//! cargo test --release -p moebius-models --features cuda --lib \
//!     attention::gpu_rates -- --ignored --nocapture --test-threads=1
//! ```

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle_core::{DType, Device, Result, Tensor};

use super::backward_cuda::backward;
use super::*;
use crate::testing::random;

/// Sizes of a causal attention of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    pub heads: usize,
    pub key_heads: usize,
    pub tokens: usize,
    pub dim: usize,
    pub value: usize,
}

/// Operands and a result's gradient in bf16.
pub struct AttentionInputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub of: Tensor,
}

impl AttentionShape {
    pub fn inputs(self, device: &Device) -> Result<AttentionInputs> {
        let Self { heads, key_heads, tokens, dim, value } = self;
        let of = |seed, dims: &[usize]| random(seed, dims).to_dtype(DType::BF16)?.to_device(device);
        Ok(AttentionInputs {
            q: of(1, &[1, heads, tokens, dim])?,
            k: of(2, &[1, key_heads, tokens, dim])?,
            v: of(3, &[1, key_heads, tokens, value])?,
            of: of(4, &[1, tokens, heads, value])?,
        })
    }

    /// Operations of the forward, Q Kᵀ and P V, and of the backward, these scores, dSᵀ Q and dS K, and dO Vᵀ and Pᵀ dO:
    /// a causal attention has half of S · S pairs.
    fn operations(self) -> [f64; 2] {
        let half = (self.tokens * self.tokens * self.heads) as f64;
        let (dim, value) = (self.dim as f64, self.value as f64);
        [half * (dim + value), half * (3.0 * dim + 2.0 * value)]
    }
}

pub fn causal_options(dim: usize, masks: &MaskCache) -> AttentionOptions<'_> {
    let scale = 1.0 / (dim as f64).sqrt();
    AttentionOptions { first: 0, window: None, chunk: None, sinks: None, scale, masks }
}

/// Median of `repeats` times, in ms of a call, each of a row of calls between two events of a stream that is at work.
pub fn median_ms(stream: &Arc<CudaStream>, repeats: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    const CALLS: usize = 5;
    keep_freed_memory(stream)?;
    let event = || stream.context().new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).w();
    for _ in 0..3 {
        call()?;
    }
    let mut times = Vec::new();
    for _ in 0..repeats {
        let (start, end) = (event()?, event()?);
        start.record(stream).w()?;
        for _ in 0..CALLS {
            call()?;
        }
        end.record(stream).w()?;
        times.push(f64::from(start.elapsed_ms(&end).w()?) / CALLS as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[repeats / 2])
}

/// One JSON line a shape. The backward has two and a half times the forward's operations and is to run at half of its
/// rate at least: five times its time.
#[test]
#[ignore = "needs a GPU and nothing beside it"]
fn backward_has_half_the_rate_of_the_forward() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let shape = |heads, key_heads, dim, value| AttentionShape { heads, key_heads, tokens: 8192, dim, value };
    let shapes = [
        shape(32, 32, 128, 128),
        shape(32, 4, 128, 128),
        shape(32, 32, 64, 64),
        shape(16, 16, 192, 128),
        shape(16, 16, 256, 256),
    ];
    let mut first = None;
    for shape in shapes {
        let AttentionInputs { q, k, v, of } = shape.inputs(&device)?;
        let masks = MaskCache::default();
        let options = causal_options(shape.dim, &masks);
        let Output { y, log_sums } = output([&q, &k, &v], &options, true)?;
        let log_sums = log_sums.ok_or_else(|| candle_core::Error::msg("no sums"))?;
        let forward_ms = median_ms(&stream, 9, || output([&q, &k, &v], &options, true).map(drop))?;
        let backward_ms = median_ms(&stream, 9, || {
            let found = backward([&q, &k, &v], [&y, &of, &log_sums], &options)?;
            found.map(drop).ok_or_else(|| candle_core::Error::msg("no kernel"))
        })?;
        let [forward, back] = shape.operations();
        let rate = |operations: f64, ms: f64| operations / ms / 1e9;
        let ratio = backward_ms / forward_ms;
        let AttentionShape { heads, key_heads, tokens, dim, value } = shape;
        println!(
            "{{\"workload\":\"attention, causal, bf16\",\"tokens\":{tokens},\"heads\":{heads},\
             \"key_heads\":{key_heads},\"dim\":{dim},\"value\":{value},\"forward_ms\":{forward_ms:.3},\"forward_tflops\":{:.0},\
             \"backward_ms\":{backward_ms:.3},\"backward_tflops\":{:.0},\"ratio\":{ratio:.2}}}",
            rate(forward, forward_ms),
            rate(back, backward_ms),
        );
        first.get_or_insert(ratio);
    }
    assert!(first.is_some_and(|ratio| ratio <= 5.0), "heads of 128: {first:?} times the forward's time");
    Ok(())
}

/// The pool of a stream's GPU.
fn default_pool(stream: &CudaStream) -> Result<sys::CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: the context's device, and a local.
    unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, stream.context().cu_device()) }.result().w()?;
    Ok(pool)
}

/// Has the GPU's pool keep what is freed. It would give it back at each wait, and the first call behind it would map it anew,
/// which is none of a kernel's time.
fn keep_freed_memory(stream: &CudaStream) -> Result<()> {
    let pool = default_pool(stream)?;
    let mut bytes = u64::MAX;
    let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device's pool, and the attribute is a number of 64 bits.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result().w()
}

/// Most bytes that work takes of the GPU's pool beside what is in use before it.
fn most_bytes<R>(device: &Device, work: impl FnOnce() -> Result<R>) -> Result<(u64, R)> {
    use sys::CUmemPool_attribute_enum::{CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH};
    let stream = device.as_cuda_device()?.cuda_stream();
    let pool = default_pool(&stream)?;
    let get = |attribute| -> Result<u64> {
        let mut bytes = 0u64;
        // SAFETY: the device's pool, and both attributes are numbers of 64 bits.
        unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result().w()?;
        Ok(bytes)
    };
    device.synchronize()?;
    let mut zero = 0u64;
    // SAFETY: as above; setting the high mark to 0 has it begin again at what is in use.
    unsafe { sys::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut zero).cast()) }.result().w()?;
    let before = get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    let result = work()?;
    device.synchronize()?;
    Ok((get(CU_MEMPOOL_ATTR_USED_MEM_HIGH)? - before, result))
}

/// A row of an attention's memory: all that is there at the most, and what goes in and comes out. The rest is at most a
/// fifth of it.
struct MemoryRow {
    phase: &'static str,
    /// Bytes of operands and results.
    given: u64,
    /// Most bytes: operands, what the forward keeps for backward, and what the work takes.
    most: u64,
}

impl MemoryRow {
    fn print_and_check(&self, shape: AttentionShape) {
        let AttentionShape { heads, key_heads, tokens, dim, value } = shape;
        let Self { phase, given, most } = *self;
        let (mib, ratio) = (|bytes: u64| bytes as f64 / f64::from(1 << 20), most as f64 / given as f64);
        println!(
            "{{\"workload\":\"attention, causal, bf16\",\"tokens\":{tokens},\"heads\":{heads},\
             \"key_heads\":{key_heads},\"dim\":{dim},\"value\":{value},\"phase\":\"{phase}\",\
             \"inputs_and_outputs_mib\":{:.1},\"peak_mib\":{:.1},\"peak_ratio\":{ratio:.3}}}",
            mib(given),
            mib(most),
        );
        assert!(most >= given && 5 * most <= 6 * given, "{phase}: {most} bytes for {given}");
    }
}

/// No matrix of scores, and no copy of a gradient: at 8192 tokens forward and backward have in memory what they are given
/// and give, and no more than a fifth beside, where the scores of one head alone would take 134 MB. One JSON line a
/// shape and phase; the first is Qwen3-30B-A3B's.
#[test]
#[ignore = "needs a GPU and nothing beside it"]
fn memory_is_inputs_and_outputs() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (heads, key_heads) in [(32, 4), (32, 32), (8, 2)] {
        let shape = AttentionShape { heads, key_heads, tokens: 8192, dim: 128, value: 128 };
        let AttentionInputs { q, k, v, of } = shape.inputs(&device)?;
        let masks = MaskCache::default();
        let options = causal_options(shape.dim, &masks);
        let bytes = |tensors: &[&Tensor]| -> u64 {
            tensors.iter().map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64).sum()
        };
        // Kernels are loaded, and their pool is made.
        drop(output([&q, &k, &v], &options, true)?);
        let operands = bytes(&[&q, &k, &v]);
        let (taken, Output { y, log_sums }) = most_bytes(&device, || output([&q, &k, &v], &options, true))?;
        let log_sums = log_sums.ok_or_else(|| candle_core::Error::msg("no sums"))?;
        MemoryRow { phase: "forward", given: operands + bytes(&[&y]), most: operands + taken }.print_and_check(shape);
        let (taken, found) = most_bytes(&device, || backward([&q, &k, &v], [&y, &of, &log_sums], &options))?;
        let found = found.ok_or_else(|| candle_core::Error::msg("no kernel"))?;
        let given = operands + bytes(&[&y, &of, &found.d_q, &found.d_k, &found.d_v]);
        let most = operands + bytes(&[&y, &of, &log_sums]) + taken;
        MemoryRow { phase: "backward", given, most }.print_and_check(shape);
    }
    Ok(())
}
