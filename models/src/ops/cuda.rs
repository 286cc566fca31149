//! What launches of kernels over candle's tensors share.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, SyncOnDrop, sys,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::{CpuStorage, CudaStorage, DType, Error, InplaceOp1, Layout, Result, Storage, Tensor};

/// Kernels of one file.
#[derive(Debug)]
pub(crate) struct Module {
    pub name: &'static str,
    pub ptx: &'static str,
}

impl Module {
    pub fn kernel(&self, device: &CudaDevice, name: &str) -> Result<CudaFunction> {
        Ok(device.get_or_load_custom_func(name, self.name, self.ptx)?.into_cuda_function())
    }

    /// One whose blocks have more shared memory than 48 KiB.
    pub fn kernel_with(&self, device: &CudaDevice, name: &str, shared: usize) -> Result<CudaFunction> {
        let function = self.kernel(device, name)?;
        let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(most, int(shared)?).w()?;
        Ok(function)
    }
}

/// PTX of a file of `kernels`.
macro_rules! module {
    ($file:literal) => {
        $crate::ops::cuda::Module {
            name: concat!("moebius-models-", $file),
            ptx: include_str!(concat!(env!("OUT_DIR"), "/", $file, ".ptx")),
        }
    };
}
pub(crate) use module;

/// What kernels of several types are named by.
pub(crate) fn type_name(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::BF16 => Some("bf16"),
        DType::F16 => Some("f16"),
        _ => None,
    }
}

/// Contiguous on this GPU, of this type, and at a place that loads of 16 bytes take.
pub(crate) fn is_plain(t: &Tensor, like: &Tensor) -> bool {
    t.is_contiguous()
        && t.dtype() == like.dtype()
        && t.device().is_cuda()
        && t.device().same_device(like.device())
        && t.layout().start_offset().is_multiple_of(8)
}

/// Shape of work.
pub(crate) fn grid(blocks: [usize; 3], threads: usize, shared: usize) -> Result<LaunchConfig> {
    let of = |n: usize| Ok::<u32, Error>(int(n)? as u32);
    Ok(LaunchConfig {
        grid_dim: (of(blocks[0])?, of(blocks[1])?, of(blocks[2])?),
        block_dim: (of(threads)?, 1, 1),
        shared_mem_bytes: of(shared)?,
    })
}

/// A size as kernels take it.
pub(crate) fn int(value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::msg(format!("kernels: a size of {value}")))
}

/// Where a tensor's elements begin on its GPU; valid while the guard lives, for work of the device's one stream.
pub(crate) fn address<'a, T: CudaDType + DeviceRepr + 'a>(
    storage: &'a Storage,
    start: usize,
) -> Result<(u64, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = storage else {
        return Err(Error::msg("kernels: a tensor of another device"));
    };
    let slice = storage.as_cuda_slice::<T>()?;
    let (address, guard) = slice.device_ptr(slice.stream());
    Ok((address + (start * size_of::<T>()) as u64, guard))
}

/// Enqueues work on memory that is lent: where the first element of each tensor lies.
type Launch<'f> = dyn FnMut(&CudaDevice, &[u64]) -> Result<()> + 'f;

/// Lends the memory of tensors for writing to work that `launch` enqueues on the device's stream.
pub(crate) fn lend<T: CudaDType + DeviceRepr>(tensors: &[&Tensor], launch: &mut Launch<'_>) -> Result<()> {
    let Some((first, rest)) = tensors.split_first() else { return Ok(()) };
    let run: RefCell<&mut Launch<'_>> = RefCell::new(launch);
    first.inplace_op1(&Lend::<T> { rest, lent: Vec::new(), run: &run, of: PhantomData })
}

struct Lend<'a, 'f, T> {
    rest: &'a [&'a Tensor],
    lent: Vec<u64>,
    run: &'a RefCell<&'f mut Launch<'f>>,
    of: PhantomData<T>,
}

impl<T: CudaDType + DeviceRepr> InplaceOp1 for Lend<'_, '_, T> {
    fn name(&self) -> &'static str {
        "kernels"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Err(Error::msg("kernels: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let device = storage.device().clone();
        let slice = storage.as_cuda_slice_mut::<T>()?;
        let stream = slice.stream().clone();
        let (address, _guard) = slice.device_ptr_mut(&stream);
        let mut lent = self.lent.clone();
        lent.push(address + (layout.start_offset() * size_of::<T>()) as u64);
        match self.rest {
            [] => {
                let mut run = self.run.borrow_mut();
                (**run)(&device, &lent)
            }
            [next, rest @ ..] => next.inplace_op1(&Lend::<T> { rest, lent, run: self.run, of: PhantomData }),
        }
    }
}
