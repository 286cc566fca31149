//! burn's CUDA back end, without fusion.
//!
//! burn keeps its stream to itself. A tensor's address is asked of burn's client, which has enqueued all that was asked
//! of it before it answers; the order of burn's work and this crate's is then made on the GPU through the context that
//! both share ([`Cuda::follow_context`], [`Cuda::lead_context`]). Results are written into memory of burn's pool.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Shape, TensorMetadata};
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement, kernel};

use crate::cuda::{Cuda, DeviceMut, DeviceRef};
use crate::device::Waited;
use crate::dtype::DType;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::backend::{Named, NativeMemory, ResultSpec, core_dtype, unfit_ids};
use super::cuda_output::CudaOutput;
use super::expert_sums::{ErasedExpertSums, SharedExpertSums};
use super::group::DeviceGroup;
use super::native::NativeGroup;

const CALL: &str = "ExpertParallelMoE";

/// Address of a tensor without elements: nothing reads it, and null means "none" to kernels.
const NOWHERE: u64 = 256;
/// burn's allocations have at least this size here.
const LEAST_BYTES: usize = 16;

type Primitive = CubeTensor<CudaRuntime>;

/// This crate's kernels on burn's GPU, with a stream of their own in burn's context.
///
/// # Errors
/// [`Error::Device`]: no driver, no such GPU, or no kernels for it in this build.
pub fn cuda(device: &CudaDevice) -> Result<Cuda> {
    Cuda::new(device.index)
}

/// Address of a tensor's first element, once burn has enqueued all that was asked of it before.
fn address(name: &str, tensor: &Primitive, bytes: usize) -> Result<u64> {
    if bytes == 0 {
        return Ok(NOWHERE);
    }
    let named = |expected: String, found: String| Error::invalid(CALL, format!("tensor {name}"), expected, found);
    let resource = tensor
        .client
        .get_resource(tensor.handle.clone())
        .map_err(|e| named("memory that burn's client knows".to_string(), e.to_string()))?;
    // The allocation stays while the tensor holds its handle.
    let (ptr, size) = (resource.resource().ptr, resource.resource().size);
    match usize::try_from(size).is_ok_and(|size| size >= bytes) {
        true => Ok(ptr),
        false => Err(named(format!("{bytes} bytes"), format!("{size} bytes"))),
    }
}

/// Refuses a tensor of another GPU than the core's.
fn check_gpu(core: &Cuda, Named { name, tensor }: Named<'_, Primitive>) -> Result<()> {
    if tensor.device.index == core.ordinal() {
        return Ok(());
    }
    let expected = format!("one on the group's GPU {}", core.ordinal());
    Err(Error::invalid(CALL, format!("tensor {name}"), expected, format!("one on GPU {}", tensor.device.index)))
}

/// The tensor, its elements behind each other. burn's rows are padded, also those of no elements, which it would copy by a
/// launch over no block: the driver refuses that, and burn's next read fails for it.
fn contiguous(tensor: Primitive) -> Primitive {
    if tensor.shape().num_elements() > 0 {
        return kernel::into_contiguous(tensor);
    }
    let shape = tensor.shape();
    let CubeTensor { client, handle, device, dtype, .. } = tensor;
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// Address of a contiguous tensor on the core's GPU, and its bytes; elements are of this type as the core names it.
fn locate(core: &Cuda, Named { name, tensor }: Named<'_, Primitive>, dtype: DType) -> Result<(u64, usize)> {
    check_gpu(core, Named { name, tensor })?;
    if !tensor.is_contiguous() {
        return Err(Error::invalid(CALL, format!("tensor {name}"), "a contiguous tensor", "a strided one"));
    }
    let bytes = tensor.shape().num_elements() * dtype.size();
    Ok((address(name, tensor, bytes)?, bytes))
}

/// Elements of a contiguous tensor, of this type as the core names it.
fn view<'a>(core: &Cuda, Named { name, tensor }: Named<'a, Primitive>, dtype: DType) -> Result<TensorRef<'a, Cuda>> {
    let (ptr, bytes) = locate(core, Named { name, tensor }, dtype)?;
    // SAFETY: the memory has that many bytes from `ptr` on and stays burn's tensor's for 'a; between `begin` and
    // `end` nothing else writes it, and burn frees and reuses it behind the work before `end`.
    let data = unsafe { DeviceRef::from_raw(ptr, bytes) };
    TensorRef::new(data, dtype, &tensor.shape())
}

/// A tensor whose address other threads need not ask burn for: it would give them a stream of their own.
#[derive(Debug)]
pub struct CudaShared {
    tensor: Primitive,
    ptr: u64,
    dtype: DType,
}

impl<F: FloatElement, I: IntElement, T: BoolElement> NativeMemory for CubeBackend<CudaRuntime, F, I, T> {
    type Core = Cuda;
    type Output = CudaOutput;
    type Shared = CudaShared;

    fn together<R: Send>(like: &Primitive, calls: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        let mut made = None;
        // On the thread that all calls of burn's client go through, which they then do not wait for.
        let ran = like.client.exclusive(|| made = Some(calls()));
        made.unwrap_or_else(|| {
            let found = ran.err().map_or_else(|| "nothing".to_string(), |e| e.to_string());
            Err(Error::invalid(CALL, "burn's client", "one that runs calls", found))
        })
    }

    fn contiguous(tensor: Primitive) -> Primitive {
        contiguous(tensor)
    }

    fn view<'a>(core: &Cuda, Named { name, tensor }: Named<'a, Primitive>) -> Result<TensorRef<'a, Cuda>> {
        let dtype = core_dtype(CALL, name, tensor.dtype)?;
        view(core, Named { name, tensor }, dtype)
    }

    fn share(core: &Cuda, Named { name, tensor }: Named<'_, Primitive>) -> Result<CudaShared> {
        let dtype = core_dtype(CALL, name, tensor.dtype)?;
        let (ptr, _) = locate(core, Named { name, tensor }, dtype)?;
        Ok(CudaShared { tensor: tensor.clone(), ptr, dtype })
    }

    fn view_shared<'a>(_: &Cuda, shared: &'a CudaShared) -> Result<TensorRef<'a, Cuda>> {
        let CudaShared { tensor, ptr, dtype } = shared;
        let shape = tensor.shape();
        // SAFETY: `share` found that many bytes there, which stay burn's tensor's while `shared` holds it: nobody
        // writes a tensor that is held twice. What reads it waits for what wrote it (`begin`), and burn's later work,
        // which may get the memory once it is given back, for what read it (`end`).
        let data = unsafe { DeviceRef::from_raw(*ptr, shape.num_elements() * dtype.size()) };
        TensorRef::new(data, *dtype, &shape)
    }

    fn contiguous_ids(tensor: Primitive) -> Primitive {
        contiguous(tensor)
    }

    fn view_ids<'a>(core: &Cuda, Named { name, tensor }: Named<'a, Primitive>) -> Result<TensorRef<'a, Cuda>> {
        let dtype = match tensor.dtype {
            burn::tensor::DType::I32 | burn::tensor::DType::U32 => DType::I32,
            burn::tensor::DType::I64 => DType::I64,
            other => return Err(unfit_ids(CALL, name, other)),
        };
        view(core, Named { name, tensor }, dtype)
    }

    fn output(core: &Cuda, like: &Primitive, ResultSpec { dtype, dims }: ResultSpec<'_>) -> Result<CudaOutput> {
        check_gpu(core, Named { name: "beside a result", tensor: like })?;
        let shape = Shape::from(dims.to_vec());
        let bytes = shape.num_elements() * dtype.size();
        let handle = like.client.empty(bytes.max(LEAST_BYTES));
        let (client, device) = (like.client.clone(), like.device.clone());
        let tensor = CubeTensor::new_contiguous(client, device, shape, handle, burn_dtype(dtype)?);
        let ptr = address("for a result", &tensor, bytes)?;
        Ok(CudaOutput { tensor, ptr, dtype, dims: dims.to_vec() })
    }

    fn in_place(core: &Cuda, Named { name, tensor }: Named<'_, Primitive>) -> Result<Option<CudaOutput>> {
        if !tensor.handle.can_mut() || !tensor.is_contiguous() {
            return Ok(None);
        }
        let dtype = core_dtype(CALL, name, tensor.dtype)?;
        let (ptr, _) = locate(core, Named { name, tensor }, dtype)?;
        Ok(Some(CudaOutput { tensor: tensor.clone(), ptr, dtype, dims: tensor.shape().to_vec() }))
    }

    fn view_mut(output: &mut CudaOutput) -> Result<TensorMut<'_, Cuda>> {
        let bytes = output.dims.iter().product::<usize>() * output.dtype.size();
        // SAFETY: `output` allocated that many bytes at `ptr`, which nobody else knows before `float` or `int` hands
        // them over, or `in_place` found a tensor there that only its lender holds, who reads it behind `end`; what used
        // the memory before is burn's work from before `begin`.
        let data = unsafe { DeviceMut::from_raw(output.ptr, bytes) };
        TensorMut::new(data, output.dtype, &output.dims)
    }

    fn float(output: CudaOutput) -> Result<FloatTensor<Self>> {
        Ok(output.tensor)
    }

    fn int(output: CudaOutput) -> Result<IntTensor<Self>> {
        Ok(output.tensor)
    }

    fn erase_sums(sums: SharedExpertSums<CudaOutput>) -> ErasedExpertSums {
        ErasedExpertSums::Cuda(sums)
    }

    fn named_sums(sums: &ErasedExpertSums) -> Option<&SharedExpertSums<CudaOutput>> {
        match sums {
            ErasedExpertSums::Cuda(sums) => Some(sums),
            ErasedExpertSums::Cpu(_) => None,
        }
    }

    fn begin(core: &Cuda) -> Result<Waited> {
        core.follow_context()
    }

    fn end(core: &Cuda) -> Result<Waited> {
        core.lead_context()
    }
}

impl<F: FloatElement, I: IntElement, T: BoolElement> NativeGroup for CubeBackend<CudaRuntime, F, I, T> {
    fn native_group(config: GroupConfig, device: &CudaDevice) -> Result<DeviceGroup> {
        Ok(EpGroup::new(cuda(device)?.group(config)?).into())
    }
}

fn burn_dtype(dtype: DType) -> Result<burn::tensor::DType> {
    match dtype {
        DType::F32 => Ok(burn::tensor::DType::F32),
        DType::F16 => Ok(burn::tensor::DType::F16),
        DType::BF16 => Ok(burn::tensor::DType::BF16),
        DType::I32 => Ok(burn::tensor::DType::I32),
        DType::I64 => Ok(burn::tensor::DType::I64),
        other => Err(Error::invalid(CALL, "result", "f32, f16, bf16, i32 or i64", other)),
    }
}
