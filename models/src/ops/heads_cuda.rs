//! Heads by a kernel (`kernels/head_rows.cu`): bf16.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use half::bf16;

use super::cuda::{Module, address, grid, int, is_plain, lend, module};
use super::heads::HeadRows;

const MODULE: Module = module!("head_rows");
/// Heads of a block.
const WARPS: usize = 4;

/// As the kernel has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Sizes {
    sequences: i32,
    len: i32,
    heads: i32,
    keys: i32,
    dim: i32,
    rotated: i32,
    slots: i32,
    eps: f32,
}

// SAFETY: plain numbers, laid out as in the kernel.
unsafe impl DeviceRepr for Sizes {}

/// Whether there is a kernel, and every tensor is as it takes them.
pub(super) fn serves(rows: &HeadRows<'_>) -> bool {
    let (qkv, [heads, keys, dim]) = (rows.qkv, rows.sizes);
    let [tokens, columns] = qkv.dims() else { return false };
    let len = tokens / rows.sequences.max(1);
    let angle = |t: &&Tensor| is_plain(t, qkv) && matches!(t.dims(), [rows, half] if *rows == len && 2 * half <= dim);
    qkv.dtype() == DType::BF16
        && is_plain(qkv, qkv)
        && !qkv.track_op()
        && len > 0
        && len * rows.sequences == *tokens
        && *columns == (heads + 2 * keys) * dim
        // A block's rows in shared memory.
        && dim <= 1024
        && rows.weights.iter().flatten().all(|t| is_plain(t, qkv) && t.dims() == [dim] && !t.track_op())
        && rows.angles.iter().flatten().all(angle)
        && rows.angles.is_none_or(|[cos, sin]| cos.dims() == sin.dims())
}

pub(super) fn split(rows: &HeadRows<'_>) -> Result<[Tensor; 3]> {
    let [heads, keys, dim] = rows.sizes;
    let (b, len) = (rows.sequences, rows.qkv.dim(0)? / rows.sequences);
    let out = rows.qkv.apply_op1_no_bwd(&Op { rows, slots: None })?;
    let part = |from: usize, heads: usize| {
        out.narrow(0, from * b * len * dim, heads * b * len * dim)?.reshape((b, heads, len, dim))
    };
    Ok([part(0, heads)?, part(heads, keys)?, part(heads + keys, keys)?])
}

pub(super) fn put(rows: &HeadRows<'_>, slots: [&Tensor; 2], slot: &Tensor) -> Result<Tensor> {
    let [heads, keys, dim] = rows.sizes;
    let fits = |t: &&Tensor| {
        let dims = t.dims();
        is_plain(t, rows.qkv) && dims.len() == 4 && [dims[0], dims[1], dims[3]] == [rows.sequences, keys, dim]
    };
    if !slots.iter().all(fits) || slots[0].dims() != slots[1].dims() || slot.dims() != [1] || slot.dtype() != DType::U32
    {
        let found: Vec<&[usize]> = slots.into_iter().chain([slot]).map(Tensor::dims).collect();
        return Err(Error::msg(format!(
            "heads: slots {found:?} of {} sequences, {keys} heads of {dim}",
            rows.sequences
        )));
    }
    let q = rows.qkv.apply_op1_no_bwd(&Op { rows, slots: Some((slots, slot)) })?;
    q.reshape((rows.sequences, heads, 1, dim))
}

/// Gives queries, then keys and values where these do not go to slots.
struct Op<'a> {
    rows: &'a HeadRows<'a>,
    slots: Option<([&'a Tensor; 2], &'a Tensor)>,
}

impl CustomOp1 for Op<'_> {
    fn name(&self) -> &'static str {
        "heads"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("heads: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, qkv: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let ([heads, keys, dim], sequences) = (self.rows.sizes, self.rows.sequences);
        let tokens = layout.dims()[0];
        let len = tokens / sequences;
        let slots = match self.slots {
            Some(([k, _], _)) => k.dim(2)?,
            None => len,
        };
        let sizes = Sizes {
            sequences: int(sequences)?,
            len: int(len)?,
            heads: int(heads)?,
            keys: int(keys)?,
            dim: int(dim)?,
            rotated: match self.rows.angles {
                Some([cos, _]) => int(2 * cos.dim(1)?)?,
                None => 0,
            },
            slots: int(slots)?,
            eps: self.rows.eps as f32,
        };
        let device = qkv.device().clone();
        let made = if self.slots.is_some() { heads } else { heads + 2 * keys };
        // SAFETY: the kernel writes all of it before anything reads it.
        let out = unsafe { device.alloc::<bf16>(tokens * made * dim)? };
        {
            let slice = qkv.as_cuda_slice::<bf16>()?;
            let stream = slice.stream().clone();
            let (qkv, _qkv) = slice.device_ptr(&stream);
            let qkv = qkv + (layout.start_offset() * size_of::<bf16>()) as u64;
            let read: Vec<_> = self.rows.weights.iter().chain(&self.rows.angles).flatten().collect();
            let guards: Vec<_> = read.iter().map(|t| t.storage_and_layout()).collect();
            let mut addresses = Vec::new();
            for (storage, layout) in &guards {
                addresses.push(address::<bf16>(storage, layout.start_offset())?);
            }
            let mut addresses = addresses.iter().map(|(address, _)| *address);
            let mut pair = |there: bool| match there {
                true => [addresses.next().unwrap_or(0), addresses.next().unwrap_or(0)],
                false => [0; 2],
            };
            let (weights, angles) = (pair(self.rows.weights.is_some()), pair(self.rows.angles.is_some()));
            let slot = self.slots.map(|(_, slot)| slot.storage_and_layout());
            let slot =
                slot.as_ref().map(|(storage, layout)| address::<u32>(storage, layout.start_offset())).transpose()?;
            let slot = slot.as_ref().map_or(0, |(address, _)| *address);
            let (out, _out) = out.device_ptr(&stream);
            let function = MODULE.kernel(&device, "head_rows")?;
            let blocks = (tokens * (heads + 2 * keys)).div_ceil(WARPS);
            let config = grid([blocks, 1, 1], 32 * WARPS, WARPS * dim * size_of::<f32>())?;
            let bytes = |heads: usize| (tokens * heads * dim * size_of::<bf16>()) as u64;
            let mut launch = |_: &CudaDevice, lent: &[u64]| {
                let [k, v] = match lent {
                    [k, v] => [*k, *v],
                    _ => [out + bytes(heads), out + bytes(heads + keys)],
                };
                let mut builder = stream.launch_builder(&function);
                builder.arg(&qkv).arg(&out).arg(&k).arg(&v).arg(&slot);
                builder.arg(&weights[0]).arg(&weights[1]).arg(&angles[0]).arg(&angles[1]).arg(&sizes);
                // SAFETY: the arguments are the kernel's, in its order; `serves` and `put` have compared the tensors'
                // shapes, their memory is lent or locked for reading until the kernel is on the stream that frees it
                // too, and what else it writes was allocated for it.
                unsafe { builder.launch(config) }.w()?;
                Ok(())
            };
            match self.slots {
                Some((slots, _)) => lend::<bf16>(&slots, &mut launch)?,
                None => launch(&device, &[])?,
            }
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from(tokens * made * dim)))
    }
}
