//! Attention's forward by one kernel on a GPU (`kernels/attention.cu`): bf16 and f16, of the sizes of heads that families
//! have. Everything else is candle's operations'.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::{AttentionOptions, Output};
use crate::ops::cuda::{Module, address, grid, int, lend, module};

const MODULE: Module = module!("attention");
const THREADS: usize = 128;
/// Keys of a step.
const STEP: usize = 64;
/// Below so many queries candle's operations are quicker: most of a block's rows would be empty.
const FEWEST_QUERIES: usize = 16;

/// Entries of a query and key, and of a value, with a kernel, and the queries of its block.
const HEADS: [(usize, usize, usize); 4] = [(64, 64, 128), (128, 128, 128), (192, 128, 64), (256, 256, 64)];

/// Entries between neighbors along batch, head and position, as the kernel has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Strides([i64; 3]);

/// As the kernel has them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct KernelSizes {
    heads: i32,
    keys: i32,
    queries: i32,
    positions: i32,
    first: i32,
    first_key: i32,
    window: i32,
    chunk: i32,
    scale: f32,
    q: Strides,
    k: Strides,
    v: Strides,
}

// SAFETY: plain numbers, laid out as in the kernel.
unsafe impl DeviceRepr for KernelSizes {}

/// As [`attention`](super::attention), where there is a kernel for it; with the logarithms of the rows' sums where
/// `log_sums`.
pub(super) fn forward(
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions<'_>,
    log_sums: bool,
) -> Result<Option<Output>> {
    let (b, heads, queries, dim) = q.dims4()?;
    let (_, keys, positions, _) = k.dims4()?;
    let Some(&(_, value, rows)) = HEADS.iter().find(|(d, value, _)| (*d, *value) == (dim, v.dims()[3])) else {
        return Ok(None);
    };
    // Rows of whole loads of 16 bytes.
    let fits = |t: &Tensor| {
        let (layout, like) = (t.layout(), (q.dtype(), q.device()));
        let aligned = layout.stride()[..3].iter().chain([&layout.start_offset()]).all(|n| n.is_multiple_of(8));
        t.dtype() == like.0 && t.device().same_device(like.1) && layout.stride()[3] == 1 && aligned
    };
    let sinks = options.sinks.is_none_or(|s| s.dtype() == q.dtype() && s.dims() == [heads] && s.is_contiguous());
    let served = q.device().is_cuda()
        && [DType::BF16, DType::F16].contains(&q.dtype())
        && [q, k, v].into_iter().all(fits)
        && sinks
        && queries >= FEWEST_QUERIES
        && b > 0
        && heads.is_multiple_of(keys)
        && k.dims() == [b, keys, positions, dim]
        && v.dims() == [b, keys, positions, value]
        && positions >= queries;
    if !served {
        return Ok(None);
    }
    let log_sums = match log_sums {
        true => Some(Tensor::zeros((b, heads, queries), DType::F32, q.device())?),
        false => None,
    };
    let op = Forward { k, v, options, rows, log_sums: log_sums.as_ref() };
    let y = q.apply_op1_no_bwd(&op)?;
    let log_sums = log_sums.map(|sums| sums.reshape((b, keys, heads / keys, queries, 1))).transpose()?;
    Ok(Some(Output { y, log_sums }))
}

struct Forward<'a> {
    k: &'a Tensor,
    v: &'a Tensor,
    options: &'a AttentionOptions<'a>,
    /// Queries of a block.
    rows: usize,
    /// `[B, heads, S]`
    log_sums: Option<&'a Tensor>,
}

impl CustomOp1 for Forward<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("attention: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match q.dtype() {
            DType::BF16 => self.run::<bf16>("bf16", q, layout),
            _ => self.run::<f16>("f16", q, layout),
        }
    }
}

impl Forward<'_> {
    fn run<T>(&self, dtype: &str, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)>
    where
        T: CudaDType + DeviceRepr,
    {
        let (b, heads, queries, dim) = layout.shape().dims4()?;
        let (_, keys, positions, value) = self.v.dims4()?;
        let AttentionOptions { first, window, chunk, scale, .. } = *self.options;
        let strides = |layout: &Layout| {
            let stride = layout.stride();
            Strides([stride[0] as i64, stride[1] as i64, stride[2] as i64])
        };
        let sizes = KernelSizes {
            heads: int(heads)?,
            keys: int(keys)?,
            queries: int(queries)?,
            positions: int(positions)?,
            first: int(first)?,
            first_key: int(first + queries - positions)?,
            window: int(window.unwrap_or(0).min(i32::MAX as usize))?,
            chunk: int(chunk.unwrap_or(0).min(i32::MAX as usize))?,
            scale: scale as f32,
            q: strides(layout),
            k: strides(self.k.layout()),
            v: strides(self.v.layout()),
        };
        let device = q.device().clone();
        // SAFETY: the kernel writes all of it before anything reads it.
        let out = unsafe { device.alloc::<T>(b * queries * heads * value)? };
        {
            let slice = q.as_cuda_slice::<T>()?;
            let stream = slice.stream().clone();
            let (q, _q) = slice.device_ptr(&stream);
            let q = q + (layout.start_offset() * size_of::<T>()) as u64;
            let ((ks, kl), (vs, vl)) = (self.k.storage_and_layout(), self.v.storage_and_layout());
            let (k, _k) = address::<T>(&ks, kl.start_offset())?;
            let (v, _v) = address::<T>(&vs, vl.start_offset())?;
            let sinks = self.options.sinks.map(Tensor::storage_and_layout);
            let sinks = sinks.as_ref().map(|(s, l)| address::<T>(s, l.start_offset())).transpose()?;
            let sinks = sinks.as_ref().map_or(0, |(address, _)| *address);
            let (out, _out) = out.device_ptr(&stream);
            let shared = (self.rows * dim + STEP * (dim + value)) * size_of::<T>();
            let function = MODULE.kernel_with(&device, &format!("attention_forward_{dtype}_{dim}_{value}"), shared)?;
            let config = grid([queries.div_ceil(self.rows), heads, b], THREADS, shared)?;
            let mut launch = |_: &CudaDevice, lent: &[u64]| {
                let log_sums = lent.first().copied().unwrap_or(0);
                let mut builder = stream.launch_builder(&function);
                builder.arg(&q).arg(&k).arg(&v).arg(&sinks).arg(&out).arg(&log_sums).arg(&sizes);
                // SAFETY: the arguments are the kernel's, in its order; `forward` has compared the tensors' shapes, their
                // memory is lent or locked for reading until the kernel is on the stream that frees it too, and what it
                // writes was allocated for it.
                unsafe { builder.launch(config) }.w()?;
                Ok(())
            };
            match self.log_sums {
                Some(sums) => lend::<f32>(&[sums], &mut launch)?,
                None => launch(&device, &[])?,
            }
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from((b, queries, heads, value))))
    }
}
