//! A sum with its norm, and the largest of a row (`kernels/rows.cu`): bf16 and f16.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Error, Layout, Result, Shape, Tensor};
use half::{bf16, f16};

use super::cuda::{Module, address, grid, int, is_plain, module, type_name};

const MODULE: Module = module!("rows");
const THREADS: usize = 512;
/// Longest row whose sum stays in what a block has of shared memory without being asked for more.
const LONGEST: usize = (48 << 10) / size_of::<f32>();

/// `x + y` and its root mean square norm, `[T, H]` each; `None` where there is no kernel.
pub(super) fn add_rms_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Result<Option<[Tensor; 2]>> {
    let [rows, size] = *x.dims() else { return Ok(None) };
    let served = type_name(x.dtype()).is_some()
        && rows > 0
        && size.is_multiple_of(8)
        && (1..=LONGEST).contains(&size)
        && [x, y, weight].into_iter().all(|t| is_plain(t, x) && !t.track_op())
        && y.dims() == x.dims()
        && weight.dims() == [size];
    if !served {
        return Ok(None);
    }
    let both = x.apply_op2_no_bwd(y, &AddNorm { weight, eps })?;
    let half = |which: usize| both.narrow(0, which * rows, rows);
    Ok(Some([half(0)?, half(1)?]))
}

/// Place of the first of each row's largest entries, U32 `[T, 1]`; `None` where there is no kernel.
pub(super) fn argmax(x: &Tensor) -> Result<Option<Tensor>> {
    let [rows, size] = *x.dims() else { return Ok(None) };
    if rows == 0 || size == 0 || type_name(x.dtype()).is_none() || !is_plain(x, x) {
        return Ok(None);
    }
    x.apply_op1_no_bwd(&ArgMax).map(Some)
}

struct AddNorm<'a> {
    weight: &'a Tensor,
    eps: f64,
}

impl CustomOp2 for AddNorm<'_> {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("add_rms_norm: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, x: &CudaStorage, lx: &Layout, y: &CudaStorage, ly: &Layout) -> Result<(CudaStorage, Shape)> {
        match x.dtype() {
            DType::BF16 => self.run::<bf16>("bf16", (x, lx), (y, ly)),
            _ => self.run::<f16>("f16", (x, lx), (y, ly)),
        }
    }
}

impl AddNorm<'_> {
    fn run<T: CudaDType + DeviceRepr>(
        &self,
        dtype: &str,
        (x, lx): (&CudaStorage, &Layout),
        (y, ly): (&CudaStorage, &Layout),
    ) -> Result<(CudaStorage, Shape)> {
        let (rows, size) = lx.shape().dims2()?;
        let device = x.device().clone();
        // SAFETY: the kernel writes all of it before anything reads it.
        let out = unsafe { device.alloc::<T>(2 * rows * size)? };
        {
            let (x, y) = (x.as_cuda_slice::<T>()?, y.as_cuda_slice::<T>()?);
            let stream = x.stream().clone();
            let ((x, _x), (y, _y), (to, _out)) =
                (x.device_ptr(&stream), y.device_ptr(&stream), out.device_ptr(&stream));
            let at = |address: u64, layout: &Layout| address + (layout.start_offset() * size_of::<T>()) as u64;
            let (x, y) = (at(x, lx), at(y, ly));
            let (storage, layout) = self.weight.storage_and_layout();
            let (weight, _weight) = address::<T>(&storage, layout.start_offset())?;
            let function = MODULE.kernel(&device, &format!("add_rms_norm_{dtype}"))?;
            let config = grid([rows, 1, 1], THREADS, size * size_of::<f32>())?;
            let (rows, size, eps) = (int(rows)?, int(size)?, self.eps as f32);
            let mut builder = stream.launch_builder(&function);
            builder.arg(&x).arg(&y).arg(&weight).arg(&to).arg(&rows).arg(&size).arg(&eps);
            // SAFETY: the arguments are the kernel's, in its order, of the shapes that `add_rms_norm` has compared; their
            // memory is locked for reading or allocated for this, and freed on the stream that the kernel is on.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from((2 * rows, size))))
    }
}

struct ArgMax;

impl CustomOp1 for ArgMax {
    fn name(&self) -> &'static str {
        "argmax"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("argmax: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match x.dtype() {
            DType::BF16 => largest::<bf16>("bf16", x, layout),
            _ => largest::<f16>("f16", x, layout),
        }
    }
}

fn largest<T: CudaDType + DeviceRepr>(dtype: &str, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let (rows, size) = layout.shape().dims2()?;
    let device = x.device().clone();
    // SAFETY: the kernel writes all of it before anything reads it.
    let out = unsafe { device.alloc::<u32>(rows)? };
    {
        let x = x.as_cuda_slice::<T>()?;
        let stream = x.stream().clone();
        let ((x, _x), (to, _out)) = (x.device_ptr(&stream), out.device_ptr(&stream));
        let x = x + (layout.start_offset() * size_of::<T>()) as u64;
        let function = MODULE.kernel(&device, &format!("argmax_{dtype}"))?;
        let config = grid([rows, 1, 1], THREADS, 0)?;
        let size = int(size)?;
        let mut builder = stream.launch_builder(&function);
        builder.arg(&x).arg(&to).arg(&size);
        // SAFETY: the arguments are the kernel's, in its order, of the shape that `argmax` has found; the memory is locked
        // for reading or allocated for this, and freed on the stream that the kernel is on.
        unsafe { builder.launch(config) }.w()?;
    }
    Ok((CudaStorage::wrap_cuda_slice(out, device), Shape::from((rows, 1))))
}
