//! Kernels of a decode step's attention on a GPU: heads of the projections to their slots, and attention over these
//! (`kernels/slot_attention.cu`). They do bf16 heads of 64, 128 or 256 entries; everything else is candle's operations'.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use half::bf16;

use super::cuda::{Module, address, int, lend};
use super::slots::{SlotOptions, SlotRows};

const MODULE: Module = Module {
    name: "moebius-models-slot-attention",
    ptx: include_str!(concat!(env!("OUT_DIR"), "/slot_attention.ptx")),
};
const THREADS: u32 = 128;
/// Blocks that fill a GPU: four for each of some 130 multiprocessors.
const BLOCKS: usize = 528;
/// Most runs of slots that a head's attention is cut into.
const MOST_SPLITS: usize = 64;
/// Fewest slots of a run.
const RUN: usize = 32;

/// Sizes of `slot_rows`, as the kernel has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RowSizes {
    sequences: i32,
    heads: i32,
    keys: i32,
    dim: i32,
    rotated: i32,
    slots: i32,
    strides: [i32; 3],
    eps: f32,
}

// SAFETY: plain numbers, laid out as in the kernel.
unsafe impl DeviceRepr for RowSizes {}

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

// SAFETY: as above.
unsafe impl DeviceRepr for AttentionSizes {}

/// Whether the kernels do heads of this type, size and number.
pub(super) fn serves(like: &Tensor, dim: usize) -> bool {
    like.device().is_cuda() && like.dtype() == DType::BF16 && [64, 128, 256].contains(&dim)
}

/// Queries `[B, heads · D]` normalized and rotated in place, keys and values `[B, key heads · D]` the same way to their
/// slots.
pub(super) fn rows(rows: &SlotRows<'_>) -> Result<()> {
    let [k_slots, v_slots] = rows.held;
    let (sequences, keys, slots, dim) = k_slots.dims4()?;
    let heads = rows.q.dim(1)? / dim;
    let mut read = vec![rows.k, rows.v, rows.cos, rows.sin];
    read.extend(rows.weights.into_iter().flatten());
    let guards: Vec<_> = read.iter().map(|t| t.storage_and_layout()).collect();
    let mut pointers = Vec::new();
    for (storage, layout) in &guards {
        pointers.push(address::<bf16>(storage, layout.start_offset())?);
    }
    let (slot_storage, slot_layout) = rows.slot.storage_and_layout();
    let (slot, _slot_guard) = address::<u32>(&slot_storage, slot_layout.start_offset())?;
    let weights = match rows.weights {
        Some(_) => [pointers[4].0, pointers[5].0],
        None => [0; 2],
    };
    let stride = |t: &Tensor| int(t.stride()[0]);
    let sizes = RowSizes {
        sequences: int(sequences)?,
        heads: int(heads)?,
        keys: int(keys)?,
        dim: int(dim)?,
        rotated: if rows.rotated { int(2 * rows.cos.dim(1)?)? } else { 0 },
        slots: int(slots)?,
        strides: [stride(rows.q)?, stride(rows.k)?, stride(rows.v)?],
        eps: rows.eps as f32,
    };
    let work = sequences * (heads + 2 * keys);
    let mut launch = |device: &CudaDevice, lent: &[u64]| {
        let function = MODULE.kernel(device, "slot_rows")?;
        let config = LaunchConfig {
            grid_dim: (work.div_ceil(4) as u32, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: (4 * dim * size_of::<f32>()) as u32,
        };
        let stream = device.cuda_stream();
        let mut builder = stream.launch_builder(&function);
        builder.arg(&lent[0]).arg(&pointers[0].0).arg(&pointers[1].0).arg(&lent[1]).arg(&lent[2]).arg(&slot);
        builder.arg(&weights[0]).arg(&weights[1]).arg(&pointers[2].0).arg(&pointers[3].0).arg(&sizes);
        // SAFETY: the arguments are the kernel's, in its order; every tensor has the shape that `SlotRows::check` has
        // found, and its memory is lent or read-locked until the kernel is on the stream that frees it too.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    };
    lend::<bf16>(&[rows.q, k_slots, v_slots], &mut launch)
}

/// Attention over slots.
struct Attend<'a> {
    k: &'a Tensor,
    v: &'a Tensor,
    options: SlotOptions<'a>,
    heads: usize,
}

/// As [`slot_attention`](super::slot_attention), of `q [B, heads · D]` whose rows may lie apart.
pub(super) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: &SlotOptions<'_>) -> Result<Tensor> {
    let (b, keys, _, dim) = k.dims4()?;
    let heads = q.dim(1)? / dim;
    if v.dims() != k.dims() || q.dim(0)? != b || heads % keys != 0 {
        return Err(Error::msg(format!("decode attention: {:?} over {:?} and {:?}", q.dims(), k.dims(), v.dims())));
    }
    q.apply_op1_no_bwd(&Attend { k, v, options: *options, heads })
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
        let (heads, device) = (self.heads, q.device().clone());
        let group = [4, 2, 1].into_iter().find(|group| (heads / keys) % group == 0).unwrap_or(1);
        let parts = heads / keys / group;
        let splits = (BLOCKS / (b * keys * parts).max(1)).clamp(1, MOST_SPLITS.min(slots.div_ceil(RUN)));
        let sizes = AttentionSizes {
            heads: int(heads)?,
            keys: int(keys)?,
            slots: int(slots)?,
            splits: int(splits)?,
            q_stride: int(layout.stride()[0])?,
            scale: self.options.scale as f32,
        };
        // SAFETY: the kernels write all of these before anything reads them.
        let (partial, stats, out) = unsafe {
            let rows = b * heads;
            (
                device.alloc::<f32>(rows * splits * dim)?,
                device.alloc::<f32>(rows * splits * 2)?,
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
            let function = MODULE.kernel(&device, &format!("slot_attention_{dim}_{group}"))?;
            let config = LaunchConfig {
                grid_dim: (splits as u32, parts as u32, (b * keys) as u32),
                block_dim: (THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            let mut builder = stream.launch_builder(&function);
            builder.arg(&q).arg(&k).arg(&v).arg(&filled).arg(&partial).arg(&stats).arg(&sizes);
            // SAFETY: the arguments are the kernel's, in its order; q, k and v have the sizes above, and what it writes
            // was allocated for them. All memory is freed on the stream that the kernel is on.
            unsafe { builder.launch(config) }.w()?;
            let function = MODULE.kernel(&device, "slot_combine")?;
            let config = LaunchConfig {
                grid_dim: ((b * heads) as u32, 1, 1),
                block_dim: (dim as u32, 1, 1),
                shared_mem_bytes: 0,
            };
            let (heads, splits) = (sizes.heads, sizes.splits);
            let mut builder = stream.launch_builder(&function);
            builder.arg(&partial).arg(&stats).arg(&sinks).arg(&out).arg(&heads).arg(&splits);
            // SAFETY: as above; sinks, where there are any, are one a head.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from((b, 1, heads, dim))))
    }
}
