//! Launches of kernels over candle's tensors.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, sys};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Device, Error, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};
use moebius::candle::{StorageMut, with_storages_mut};

use super::captured_results::{keep, made_before};
use super::kernel_table::{Kernel, KernelTable, kernels};

/// Bytes of shared memory that a block has without asking for more.
pub(super) const DEFAULT_SHARED: usize = 48 << 10;

/// Whether kernels of several types have this one.
pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Whether kernels of rows have this type.
pub(super) fn is_kernel_float(dtype: DType) -> bool {
    is_half(dtype) || dtype == DType::F32
}

/// Contiguous on this GPU, of this type, and at a place that loads of 16 bytes take.
pub(super) fn is_plain(t: &Tensor, like: &Tensor) -> bool {
    t.is_contiguous()
        && t.dtype() == like.dtype()
        && t.device().is_cuda()
        && t.device().same_device(like.device())
        && t.layout().start_offset().is_multiple_of(8)
}

/// `t` in the type of `like`, as [`is_plain`] has it.
pub(super) fn plain(t: &Tensor, like: &Tensor) -> Result<Tensor> {
    if is_plain(t, like) { Ok(t.clone()) } else { t.to_dtype(like.dtype())?.force_contiguous() }
}

/// A size as kernels take it.
pub(super) fn int(value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::msg(format!("kernels: a size of {value}")))
}

/// Blocks and threads of a launch, and its bytes of shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub blocks: [usize; 3],
    pub threads: usize,
    pub shared: usize,
}

/// A GPU's stream, and the kernels of its context.
pub(super) struct Launcher {
    pub stream: Arc<CudaStream>,
    pub kernels: Arc<KernelTable<Kernel>>,
}

impl Launcher {
    fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let kernels = kernels(stream.context())?;
        Ok(Self { stream, kernels })
    }

    /// Enqueues a kernel of one parameter.
    ///
    /// # Safety
    /// `params` is the struct that the kernel takes, and its pointers are valid for what the kernel does with them.
    pub unsafe fn launch<P>(&self, kernel: &Kernel, grid: Grid, params: &P) -> Result<()> {
        let of = |n: usize| Ok::<u32, Error>(int(n)? as u32);
        let mut argument: *mut c_void = (&raw const *params).cast_mut().cast();
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: of(grid.blocks[0])?,
            gridDimY: of(grid.blocks[1])?,
            gridDimZ: of(grid.blocks[2])?,
            blockDimX: of(grid.threads)?,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: of(grid.shared)?,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: u32::from(kernel.early),
        };
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: the function is of the stream's context; configuration and argument are copied before the call returns;
        // a kernel that is started early waits itself for what it reads; the rest is the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&raw const config, kernel.function, &raw mut argument, std::ptr::null_mut()) }
            .result()
            .map_err(|e| Error::msg(format!("launch {}: {e}", kernel.name)))
    }
}

/// A new tensor of a device, type and shape, which `launch` enqueues kernels to write all of. It is given where the
/// elements of `inputs` begin, 0 for one that is not there, and where those of the result do.
pub(super) fn output<const N: usize>(
    (device, dtype): (&Device, DType),
    shape: impl Into<Shape>,
    inputs: [Option<&Tensor>; N],
    launch: impl FnOnce(&Launcher, [u64; N], u64) -> Result<()>,
) -> Result<Tensor> {
    let out = new_tensor(device.as_cuda_device()?, dtype, shape)?;
    write(device, inputs, [&out], |launcher, inputs, [to]| launch(launcher, inputs, to))?;
    Ok(out)
}

/// Calls `launch`, which enqueues kernels to write `outputs`, with where the elements of `inputs` begin, 0 for one that
/// is not there, and where those of the outputs do. No tensor is among the outputs twice, or among the inputs too.
pub(super) fn write<const N: usize, const M: usize>(
    device: &Device,
    inputs: [Option<&Tensor>; N],
    outputs: [&Tensor; M],
    launch: impl FnOnce(&Launcher, [u64; N], [u64; M]) -> Result<()>,
) -> Result<()> {
    write_asked(device, inputs, outputs.map(Some), launch)
}

/// The same where some outputs are not there, whose address is 0.
pub(super) fn write_asked<const N: usize, const M: usize>(
    device: &Device,
    inputs: [Option<&Tensor>; N],
    outputs: [Option<&Tensor>; M],
    launch: impl FnOnce(&Launcher, [u64; N], [u64; M]) -> Result<()>,
) -> Result<()> {
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let asked: Vec<&Tensor> = outputs.iter().copied().flatten().collect();
    with_addresses(inputs, |inputs| {
        with_addresses_mut(&asked, |to| {
            let mut to = to.iter().copied();
            let to = outputs.map(|output| output.and_then(|_| to.next()).unwrap_or_default());
            launch(&launcher, inputs, to)
        })
    })
}

/// A tensor whose numbers are to be written before anything reads them.
pub(super) fn new_tensor(device: &CudaDevice, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    if let Some(made) = made_before(&shape, dtype) {
        return Ok(made);
    }
    // SAFETY: numbers, which the caller writes before anything reads them.
    let out = unsafe { device.alloc_uninit(&shape, dtype)? };
    let out = Tensor::from_storage(Storage::Cuda(out), shape, BackpropOp::none(), false);
    keep(&out);
    Ok(out)
}

/// Runs `f` with where the elements of tensors begin, 0 for one that is not there; nobody writes them until it has
/// enqueued its work on the device's one stream, which frees them too.
fn with_addresses<const N: usize, R>(
    tensors: [Option<&Tensor>; N],
    f: impl FnOnce([u64; N]) -> Result<R>,
) -> Result<R> {
    let storages = tensors.map(|t| t.map(Tensor::storage_and_layout));
    let (mut addresses, mut guards) = ([0; N], Vec::new());
    for (to, tensor) in addresses.iter_mut().zip(&storages) {
        let Some((storage, layout)) = tensor else { continue };
        let Storage::Cuda(storage) = &**storage else {
            return Err(Error::msg("kernels: a tensor of another device"));
        };
        let (address, guard) = address(storage, layout)?;
        *to = address;
        guards.push(guard);
    }
    f(addresses)
}

/// Runs `f` with where the elements of tensors begin, which its work on the device's stream may write. Each has a storage
/// of its own.
pub(super) fn with_addresses_mut<R>(tensors: &[&Tensor], f: impl FnOnce(&[u64]) -> Result<R>) -> Result<R> {
    with_storages_mut(tensors, |storages| {
        let storages = storages.into_iter().map(|(storage, layout)| match storage {
            StorageMut::Cuda(storage) => Ok((storage.device().cuda_stream(), storage, layout)),
            StorageMut::Cpu(_) => Err(Error::msg("kernels: a tensor of the CPU")),
        });
        let mut storages: Vec<_> = storages.collect::<Result<_>>()?;
        let (mut addresses, mut guards) = (Vec::new(), Vec::new());
        for (stream, storage, layout) in &mut storages {
            let (address, guard) = address_mut(storage, layout, stream)?;
            addresses.push(address);
            guards.push(guard);
        }
        f(&addresses)
    })
}

/// A function's result on a storage, by the type of its elements.
macro_rules! of_type {
    ($dtype:expr, $function:ident($($argument:expr),+)) => {
        match $dtype {
            DType::BF16 => $function::<bf16>($($argument),+),
            DType::F16 => $function::<f16>($($argument),+),
            DType::F32 => $function::<f32>($($argument),+),
            DType::U32 => $function::<u32>($($argument),+),
            other => Err(Error::msg(format!("kernels: expected bf16, f16, f32 or u32, found {other:?}"))),
        }
    };
}

/// Where a tensor's elements begin on its GPU; valid while the guard lives, for work of the device's one stream.
fn address<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<(u64, SyncOnDrop<'a>)> {
    fn of<'a, T: CudaDType + DeviceRepr + 'a>(storage: &'a CudaStorage) -> Result<(u64, SyncOnDrop<'a>)> {
        let slice = storage.as_cuda_slice::<T>()?;
        Ok(slice.device_ptr(slice.stream()))
    }
    let dtype = storage.dtype();
    let (start, guard) = of_type!(dtype, of(storage))?;
    Ok((start + offset(layout, dtype), guard))
}

/// The same for writing.
fn address_mut<'a>(
    storage: &'a mut CudaStorage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    fn of<'a, T: CudaDType + DeviceRepr + 'a>(
        storage: &'a mut CudaStorage,
        stream: &'a CudaStream,
    ) -> Result<(u64, SyncOnDrop<'a>)> {
        Ok(storage.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream))
    }
    let dtype = storage.dtype();
    let (start, guard) = of_type!(dtype, of(storage, stream))?;
    Ok((start + offset(layout, dtype), guard))
}

/// Bytes from a storage's begin to a tensor's.
fn offset(layout: &Layout, dtype: DType) -> u64 {
    (layout.start_offset() * dtype.size_in_bytes()) as u64
}
