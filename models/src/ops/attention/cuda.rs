//! What launches of kernels over candle's tensors share.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop};
use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::{CpuStorage, CudaStorage, Error, InplaceOp1, Layout, Result, Storage, Tensor};

/// Kernels of one file.
#[derive(Debug)]
pub(super) struct Module {
    pub name: &'static str,
    pub ptx: &'static str,
}

impl Module {
    pub fn kernel(&self, device: &CudaDevice, name: &str) -> Result<CudaFunction> {
        Ok(device.get_or_load_custom_func(name, self.name, self.ptx)?.into_cuda_function())
    }
}

/// A size as kernels take it.
pub(super) fn int(value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::msg(format!("attention: a size of {value}")))
}

/// Where a tensor's elements begin on its GPU; valid while the guard lives, for work of the device's one stream.
pub(super) fn address<'a, T: CudaDType + DeviceRepr + 'a>(
    storage: &'a Storage,
    start: usize,
) -> Result<(u64, SyncOnDrop<'a>)> {
    let Storage::Cuda(storage) = storage else {
        return Err(Error::msg("attention: a tensor of another device"));
    };
    let slice = storage.as_cuda_slice::<T>()?;
    let (address, guard) = slice.device_ptr(slice.stream());
    Ok((address + (start * size_of::<T>()) as u64, guard))
}

/// Enqueues work on memory that is lent: where the first element of each tensor lies.
type Launch<'f> = dyn FnMut(&CudaDevice, &[u64]) -> Result<()> + 'f;

/// Lends the memory of tensors for writing to work that `launch` enqueues on the device's stream.
pub(super) fn lend<T: CudaDType + DeviceRepr>(tensors: &[&Tensor], launch: &mut Launch<'_>) -> Result<()> {
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
        "attention"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Err(Error::msg("attention: a tensor of the CPU"))
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
