//! A decode step's attention by kernels on a GPU (`kernels/slot_attention.cu`): bf16 heads of 64, 128 or 256 entries.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, PushKernelArg};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use half::bf16;

use super::slots::SlotOptions;
use crate::ops::cuda::{Module, address, grid, int, is_plain, module};

const MODULE: Module = module!("slot_attention");
const THREADS: usize = 128;
/// Blocks that fill a GPU: two for each of some 130 SMs.
const BLOCKS: usize = 264;
/// Most runs of slots that a head's attention is cut into.
const MOST_SPLITS: usize = 64;
/// Slots of a block's step: the least that a run has.
const STEP: usize = 64;
/// Query heads of a block.
const GROUP: usize = 16;

/// Sizes of `slot_attention`, as the kernel has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AttentionSizes {
    heads: i32,
    keys: i32,
    slots: i32,
    splits: i32,
    q_stride: i32,
    scale: f32,
}

// SAFETY: plain numbers, laid out as in the kernel.
unsafe impl DeviceRepr for AttentionSizes {}

/// Attention over slots.
struct Attend<'a> {
    k: &'a Tensor,
    v: &'a Tensor,
    options: SlotOptions<'a>,
}

/// As [`slot_attention`](super::slot_attention); `None` where no kernel does it.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: &SlotOptions<'_>) -> Result<Option<Tensor>> {
    let (b, heads, one, dim) = q.dims4()?;
    let (_, keys, slots, _) = k.dims4()?;
    let filled = options.filled;
    let served = q.dtype() == DType::BF16
        && [64, 128, 256].contains(&dim)
        && [Some(q), Some(k), Some(v), options.sinks].into_iter().flatten().all(|t| is_plain(t, q))
        && b > 0
        && one == 1
        && heads.is_multiple_of(keys)
        && [k, v].iter().all(|t| t.dims() == [b, keys, slots, dim])
        && options.sinks.is_none_or(|sinks| sinks.dims() == [heads])
        && filled.dims() == [1]
        && filled.dtype() == DType::U32;
    match served {
        true => q.apply_op1_no_bwd(&Attend { k, v, options: *options }).map(Some),
        false => Ok(None),
    }
}

impl CustomOp1 for Attend<'_> {
    fn name(&self) -> &'static str {
        "decode-attention"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("decode attention: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (b, keys, slots, dim) = self.k.dims4()?;
        let (heads, device) = (layout.dims()[1], q.device().clone());
        let parts = (heads / keys).div_ceil(GROUP);
        let splits = (BLOCKS / (b * keys * parts)).clamp(1, MOST_SPLITS.min(slots.div_ceil(STEP)));
        let sizes = AttentionSizes {
            heads: int(heads)?,
            keys: int(keys)?,
            slots: int(slots)?,
            splits: int(splits)?,
            q_stride: int(heads * dim)?,
            scale: self.options.scale as f32,
        };
        let rows = b * heads;
        // The only run of a head is its result.
        let runs = if splits == 1 { 0 } else { rows * splits };
        // SAFETY: the kernels write all of these before anything reads them.
        let (partial, stats, out) = unsafe {
            (
                device.alloc::<f32>((runs * dim).max(1))?,
                device.alloc::<f32>((runs * 2).max(1))?,
                device.alloc::<bf16>(rows * dim)?,
            )
        };
        {
            let q = q.as_cuda_slice::<bf16>()?;
            let stream = q.stream().clone();
            let (q, _q) = q.device_ptr(&stream);
            let q = q + (layout.start_offset() * size_of::<bf16>()) as u64;
            let ((ks, kl), (vs, vl)) = (self.k.storage_and_layout(), self.v.storage_and_layout());
            let (k, _k) = address::<bf16>(&ks, kl.start_offset())?;
            let (v, _v) = address::<bf16>(&vs, vl.start_offset())?;
            let (fs, fl) = self.options.filled.storage_and_layout();
            let (filled, _filled) = address::<u32>(&fs, fl.start_offset())?;
            let sinks = self.options.sinks.map(Tensor::storage_and_layout);
            let sinks = sinks.as_ref().map(|(s, l)| address::<bf16>(s, l.start_offset())).transpose()?;
            let sinks = sinks.as_ref().map_or(0, |(address, _)| *address);
            let ((partial, _p), (stats, _s), (out, _o)) =
                (partial.device_ptr(&stream), stats.device_ptr(&stream), out.device_ptr(&stream));
            // Keys and values of a step, of two steps where they fit, and the queries.
            let stages = if dim == 256 { 1 } else { 2 };
            let shared = (stages * 2 * STEP + GROUP) * dim * size_of::<bf16>();
            let function = MODULE.kernel_with(&device, &format!("slot_attention_{dim}"), shared)?;
            let config = grid([splits, parts, b * keys], THREADS, shared)?;
            let mut builder = stream.launch_builder(&function);
            builder.arg(&q).arg(&k).arg(&v).arg(&filled).arg(&sinks).arg(&partial).arg(&stats).arg(&out).arg(&sizes);
            // SAFETY: the arguments are the kernel's, in its order; q, k, v and sinks have the sizes that `attend` has
            // compared, and what it writes was allocated for it. All memory is freed on the stream that the kernel is on.
            unsafe { builder.launch(config) }.w()?;
            if splits > 1 {
                let function = MODULE.kernel(&device, "slot_combine")?;
                let config = grid([rows, 1, 1], dim, 0)?;
                let (heads, splits) = (sizes.heads, sizes.splits);
                let mut builder = stream.launch_builder(&function);
                builder.arg(&partial).arg(&stats).arg(&sinks).arg(&out).arg(&heads).arg(&splits);
                // SAFETY: as above.
                unsafe { builder.launch(config) }.w()?;
            }
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from((b, 1, heads, dim))))
    }
}
