//! Memory and order of a GPU.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
#[cfg(feature = "candle")]
use cudarc::driver::{CudaSlice, DevicePtrMut};

use crate::device::{Device, sealed::Sealed};
use crate::dtype::DType;
use crate::error::{Error, Result};

use super::launch::Functions;

/// Every allocation has at least this size, so that no tensor has a null pointer, which kernels read as "none".
const LEAST_BYTES: usize = 16;

/// `CU_STREAM_PER_THREAD`. Buffers freed on another thread than the one that last used them would not be behind its work.
const PER_THREAD: sys::CUstream = 0x2 as sys::CUstream;

/// A stream of a GPU with this crate's kernels loaded.
#[derive(Clone)]
pub struct Cuda {
    pub(super) inner: Arc<Inner>,
    poison: bool,
    portable: bool,
}

// Fields are dropped in order: modules go before the context that holds them.
pub(super) struct Inner {
    pub(super) functions: Functions,
    pub(super) stream: Arc<CudaStream>,
    pub(super) context: Arc<CudaContext>,
    /// Multiprocessors: blocks of a persistent kernel.
    pub(super) processors: usize,
    /// Fault word and first NaN logit.
    pub(super) status: CUdeviceptr,
    pool: sys::CUmemoryPool,
}

// SAFETY: the pool and the functions are handles that the driver lets any thread use; the context is bound to the
// calling thread before each use; what happens on the stream is ordered by the driver.
unsafe impl Send for Inner {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: every buffer holds an `Arc` of this, so all have been freed on the stream; `status` came from
            // the pool and is freed once.
            unsafe {
                let _ = result::free_async(self.status, self.stream.cu_stream());
                let _ = result::stream::synchronize(self.stream.cu_stream());
                let _ = result::mem_pool::destroy(self.pool);
            }
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda {{ ordinal: {}, arch: sm_{} }}", self.inner.context.ordinal(), self.inner.functions.arch)
    }
}

/// A driver error as this crate's.
pub(super) fn driver(call: &'static str, operation: &str) -> impl FnOnce(DriverError) -> Error {
    let operation = operation.to_string();
    move |e| Error::Device { call, operation, message: format!("{e:?}") }
}

impl Cuda {
    /// GPU `ordinal` of this process, its primary context, and a stream of its own.
    ///
    /// # Errors
    /// [`Error::Device`]: no driver, no such GPU, or no kernels for it in this build.
    pub fn new(ordinal: usize) -> Result<Self> {
        const CALL: &str = "Cuda::new";
        // SAFETY: libcuda's initialisers are the driver's own; nothing of it is called here.
        let found = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"]
            .iter()
            .any(|n| unsafe { libloading::Library::new(*n) }.is_ok());
        if !found {
            return Err(Error::Device {
                call: CALL,
                operation: "load the driver".to_string(),
                message: "neither libcuda.so.1 nor libcuda.so can be loaded; is an NVIDIA driver installed?"
                    .to_string(),
            });
        }
        let context = CudaContext::new(ordinal).map_err(driver(CALL, &format!("open GPU {ordinal}")))?;
        let stream = context.new_stream().map_err(driver(CALL, "create a stream"))?;
        Self::on(stream)
    }

    /// Kernels on a stream of the host framework, in its context.
    ///
    /// # Errors
    /// [`Error::Device`]: no kernels for the GPU in this build, or one without memory pools.
    pub fn on(stream: Arc<CudaStream>) -> Result<Self> {
        const CALL: &str = "Cuda::on";
        if stream.cu_stream() == PER_THREAD {
            let found = "the per-thread default stream, which is another one on every thread";
            return Err(Error::invalid(
                CALL,
                "stream",
                "a stream of its own (candle: Device::new_cuda_with_stream)",
                found,
            ));
        }
        let context = Arc::clone(stream.context());
        context.bind_to_thread().map_err(driver(CALL, "bind the context"))?;
        let (major, minor) = context.compute_capability().map_err(driver(CALL, "ask for the compute capability"))?;
        let functions = Functions::load((major as u32, minor as u32))?;
        let processors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(driver(CALL, "ask for the number of multiprocessors"))?;
        let processors = usize::try_from(processors).unwrap_or(1);
        let pool = pool(&context)?;
        let status = {
            // SAFETY: pool and stream are alive; the 16 bytes are written before anything reads them.
            unsafe { result::mem_pool::alloc_async(pool, LEAST_BYTES, stream.cu_stream()) }
        }
        .map_err(driver(CALL, "allocate the status words"))?;
        let cuda = Self {
            inner: Arc::new(Inner { functions, stream, context, processors, status, pool }),
            poison: false,
            portable: false,
        };
        cuda.reset_status(CALL)?;
        Ok(cuda)
    }

    /// The same device, filling every buffer that it allocates with the byte 0xFF: NaN in all floating types, −1 in
    /// the integer types. For tests.
    pub fn poisoning(&self) -> Self {
        Self { poison: true, ..self.clone() }
    }

    /// The same device without the kernels that one architecture alone has: what other GPUs run.
    pub fn portable(&self) -> Self {
        Self { portable: true, ..self.clone() }
    }

    /// Whether work on `stream` is in the order of this device's.
    #[cfg(feature = "candle")]
    pub(crate) fn is_on(&self, stream: &CudaStream) -> bool {
        stream.cu_stream() == self.inner.stream.cu_stream() && stream.context() == &self.inner.context
    }

    /// The stream of all work on this device, borrowed.
    #[cfg(feature = "candle")]
    pub(crate) fn raw_stream(&self) -> &CudaStream {
        &self.inner.stream
    }

    /// Whether calls may take the Hopper kernels.
    pub(super) fn hopper(&self) -> bool {
        self.inner.functions.hopper() && !self.portable
    }

    /// The stream of all work on this device.
    pub fn stream(&self) -> Stream {
        Stream(Arc::clone(&self.inner.stream))
    }

    /// Name of the GPU.
    ///
    /// # Errors
    /// A driver's error.
    pub fn name(&self) -> Result<String> {
        self.inner.context.name().map_err(driver("Cuda::name", "ask for the name"))
    }

    /// Waits for the stream, and returns the fault that a kernel has raised since the last call, if any.
    ///
    /// # Errors
    /// The fault; a driver's error.
    pub fn check(&self) -> Result<()> {
        self.faults("Cuda::check").map(drop)
    }

    /// Marks the end of the work enqueued so far.
    ///
    /// # Errors
    /// A driver's error.
    pub fn record(&self) -> Result<Event> {
        let event = self.inner.stream.record_event(None).map_err(driver("Cuda::record", "record an event"))?;
        Ok(Event(event))
    }

    pub(super) fn bind(&self, call: &'static str) -> Result<()> {
        self.inner.context.bind_to_thread().map_err(driver(call, "bind the context"))
    }

    /// Refuses another stream than this device's.
    pub(super) fn on_stream(&self, call: &'static str, stream: &Stream) -> Result<()> {
        if stream.0.cu_stream() == self.inner.stream.cu_stream() {
            return Ok(());
        }
        Err(Error::invalid(call, "stream", "the device's own (Cuda::stream)", "another"))
    }

    pub(super) fn reset_status(&self, call: &'static str) -> Result<()> {
        self.write_bytes(call, self.inner.status, &[0u64.to_ne_bytes(), u64::MAX.to_ne_bytes()].concat())
    }

    /// Waits for the stream; returns the position of the first NaN logit, or the fault as an error.
    pub(super) fn faults(&self, call: &'static str) -> Result<Option<u64>> {
        let mut bytes = [0u8; 16];
        self.read_bytes(call, self.inner.status, &mut bytes)?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect();
        let (fault, nan) = (words[0], words[1]);
        if fault != 0 || nan != u64::MAX {
            self.reset_status(call)?;
        }
        let detail = fault & 0xffff_ffff_ffff;
        let (name, expected, found) = match fault >> 48 {
            0 => return Ok((nan != u64::MAX).then_some(nan)),
            1 => (format!("zone {detail}"), "slots inside the layout, behind the zone before", "others"),
            2 => (format!("map[{detail}]"), "a row of the tensor behind it", "none of its rows"),
            3 => (format!("out.map[{detail}]"), "a row of the output, or a negative entry", "none of its rows"),
            4 => (format!("tensor ids, token {detail}"), "experts, as `route` gave them", "another number"),
            _ => ("tensor aux.sums".to_string(), "the sums of at least this rank's tokens", "no tokens"),
        };
        Err(Error::invalid(call, format!("{name} (seen by a kernel)"), expected, found))
    }

    pub(super) fn write_bytes(&self, call: &'static str, to: CUdeviceptr, from: &[u8]) -> Result<()> {
        self.bind(call)?;
        // SAFETY: callers give a pointer of at least `from.len()` bytes; pageable memory is staged before the call
        // returns, so `from` may go.
        unsafe { result::memcpy_htod_async(to, from, self.inner.stream.cu_stream()) }
            .map_err(driver(call, "copy to the GPU"))
    }

    /// Copies to the host and waits for the stream.
    pub(super) fn read_bytes(&self, call: &'static str, from: CUdeviceptr, to: &mut [u8]) -> Result<()> {
        self.bind(call)?;
        let stream = self.inner.stream.cu_stream();
        if !to.is_empty() {
            // SAFETY: callers give a pointer of at least `to.len()` bytes; `to` lives past the wait below.
            unsafe { result::memcpy_dtoh_async(to, from, stream) }.map_err(driver(call, "copy from the GPU"))?;
        }
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(stream) }.map_err(driver(call, "wait for the stream"))
    }
}

/// A memory pool of this crate's own: it keeps freed memory for the next allocation, which the context's default pool
/// does not, and whose setting is the host framework's.
fn pool(context: &CudaContext) -> Result<sys::CUmemoryPool> {
    const CALL: &str = "Cuda::on";
    // SAFETY: a plain C struct of integers, enums with a zero value and a pointer; its reserved bytes must be zero.
    let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    let location = [sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32, context.cu_device()];
    // SAFETY: a location is the type and then the device's number, two ints, in every version of CUDA; newer bindings
    // wrap the second in a union, which is why it is not set by name.
    unsafe { (&raw mut props.location).cast::<[i32; 2]>().write(location) };
    let mut keep = u64::MAX;
    // SAFETY: `props` is initialised as the driver documents it.
    let pool = unsafe { result::mem_pool::create(&props) }.map_err(driver(CALL, "create a memory pool"))?;
    // SAFETY: the attribute is a u64, which `keep` is; the pool was just made.
    let set = unsafe {
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut keep).cast())
    };
    set.map_err(driver(CALL, "configure the memory pool"))?;
    Ok(pool)
}

/// Owned memory of a GPU, given back in the order of its stream.
pub struct DeviceBuffer {
    ptr: CUdeviceptr,
    bytes: usize,
    owner: Arc<Inner>,
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer {{ bytes: {} }}", self.bytes)
    }
}

impl DeviceBuffer {
    /// The memory as the driver bindings' own: whoever holds it gives it back to this crate's pool, in the order of the
    /// stream. `T` is the element type that the buffer was allocated for.
    #[cfg(feature = "candle")]
    pub(crate) fn into_slice<T: cudarc::driver::DeviceRepr>(mut self) -> CudaSlice<T> {
        let ptr = std::mem::take(&mut self.ptr);
        let stream = &self.owner.stream;
        // SAFETY: the allocation has that many bytes, `drop` leaves it alone now, and the slice frees it with
        // `cuMemFreeAsync` on the stream that `drop` would have used. A pool that is destroyed before stays until then.
        let mut slice = unsafe { stream.upgrade_device_ptr(ptr, self.bytes / size_of::<T>()) };
        // Records the work that fills the memory, for readers on other streams.
        drop(slice.device_ptr_mut(stream));
        slice
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.ptr == 0 {
            return;
        }
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if self.owner.context.bind_to_thread().is_ok() {
            // SAFETY: the pointer came from this crate's pool and is freed once; kernels that use it are earlier on
            // the stream.
            let _ = unsafe { result::free_async(self.ptr, self.owner.stream.cu_stream()) };
        }
    }
}

/// Borrowed memory of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRef<'a> {
    pub(super) ptr: CUdeviceptr,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

impl DeviceRef<'_> {
    /// `len` bytes of device memory.
    ///
    /// # Safety
    /// They stay allocated and unwritten for the lifetime, on the stream of the [`Cuda`] that uses them: its kernels
    /// may still read after the last call returned, so memory may be freed or written only behind them. `ptr` is not
    /// null and a multiple of the element's size.
    pub unsafe fn from_raw(ptr: u64, len: usize) -> Self {
        Self { ptr, len, owner: PhantomData }
    }
}

/// Exclusively borrowed memory of a GPU.
#[derive(Debug)]
pub struct DeviceMut<'a> {
    pub(super) ptr: CUdeviceptr,
    len: usize,
    owner: PhantomData<&'a mut [u8]>,
}

impl DeviceMut<'_> {
    /// `len` bytes of device memory.
    ///
    /// # Safety
    /// As [`DeviceRef::from_raw`], and nothing else reads or writes them for the lifetime.
    pub unsafe fn from_raw(ptr: u64, len: usize) -> Self {
        Self { ptr, len, owner: PhantomData }
    }
}

/// The order of work on a [`Cuda`].
#[derive(Debug, Clone)]
pub struct Stream(pub(super) Arc<CudaStream>);

impl Stream {
    /// The stream, for the host framework.
    pub fn raw(&self) -> &Arc<CudaStream> {
        &self.0
    }
}

/// Completion of work on a [`Cuda`].
#[derive(Debug)]
pub struct Event(pub(super) CudaEvent);

/// Tile counters do not exist on this device: kernels of one stream run one after another.
#[derive(Debug, Clone, Copy)]
pub enum NoCounters {}

impl Sealed for Cuda {}

impl Device for Cuda {
    type Buffer = DeviceBuffer;
    type Ref<'a> = DeviceRef<'a>;
    type Mut<'a> = DeviceMut<'a>;
    type Counters = NoCounters;
    type Stream = Stream;
    type Event = Event;

    fn alloc(&self, dtype: DType, count: usize) -> Result<DeviceBuffer> {
        const CALL: &str = "Cuda::alloc";
        let bytes = count
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::invalid(CALL, "count", "a size that fits the address space", count))?;
        self.bind(CALL)?;
        let stream = self.inner.stream.cu_stream();
        // SAFETY: pool and stream are alive; the content is unspecified by contract.
        let ptr = unsafe { result::mem_pool::alloc_async(self.inner.pool, bytes.max(LEAST_BYTES), stream) }
            .map_err(driver(CALL, &format!("allocate {bytes} bytes")))?;
        let buffer = DeviceBuffer { ptr, bytes, owner: Arc::clone(&self.inner) };
        if self.poison && bytes > 0 {
            // SAFETY: the buffer has that many bytes.
            unsafe { result::memset_d8_async(ptr, 0xff, bytes, stream) }.map_err(driver(CALL, "poison a buffer"))?;
        }
        Ok(buffer)
    }

    fn view(buffer: &DeviceBuffer) -> DeviceRef<'_> {
        DeviceRef { ptr: buffer.ptr, len: buffer.bytes, owner: PhantomData }
    }

    fn view_mut(buffer: &mut DeviceBuffer) -> DeviceMut<'_> {
        DeviceMut { ptr: buffer.ptr, len: buffer.bytes, owner: PhantomData }
    }

    fn len(view: DeviceRef<'_>) -> usize {
        view.len
    }

    fn len_mut(view: &DeviceMut<'_>) -> usize {
        view.len
    }

    fn slice<'a>(view: Self::Ref<'a>, range: Range<usize>) -> Self::Ref<'a> {
        assert!(range.start <= range.end && range.end <= view.len, "{range:?} of {} bytes", view.len);
        DeviceRef { ptr: view.ptr + range.start as u64, len: range.len(), owner: PhantomData }
    }

    fn slice_mut<'a>(view: Self::Mut<'a>, range: Range<usize>) -> Self::Mut<'a> {
        assert!(range.start <= range.end && range.end <= view.len, "{range:?} of {} bytes", view.len);
        DeviceMut { ptr: view.ptr + range.start as u64, len: range.len(), owner: PhantomData }
    }

    fn shorten<'s, 'l: 's>(view: Self::Ref<'l>) -> Self::Ref<'s> {
        view
    }

    fn reborrow<'s>(view: &'s mut DeviceMut<'_>) -> DeviceMut<'s> {
        DeviceMut { ptr: view.ptr, len: view.len, owner: PhantomData }
    }

    fn downgrade<'s>(view: &'s DeviceMut<'_>) -> DeviceRef<'s> {
        DeviceRef { ptr: view.ptr, len: view.len, owner: PhantomData }
    }

    fn zero(&self, view: DeviceMut<'_>) -> Result<()> {
        const CALL: &str = "Cuda::zero";
        if view.len == 0 {
            return Ok(());
        }
        self.bind(CALL)?;
        // SAFETY: the view has that many bytes, exclusively.
        unsafe { result::memset_d8_async(view.ptr, 0, view.len, self.inner.stream.cu_stream()) }
            .map_err(driver(CALL, "fill with zeros"))
    }

    fn copy(&self, from: DeviceRef<'_>, to: DeviceMut<'_>) -> Result<()> {
        const CALL: &str = "Cuda::copy";
        if from.len != to.len {
            return Err(Error::invalid(CALL, "to", format!("{} bytes", from.len), to.len));
        }
        if from.len == 0 {
            return Ok(());
        }
        self.bind(CALL)?;
        // SAFETY: both views have that many bytes, and borrows keep them apart.
        unsafe { result::memcpy_dtod_async(to.ptr, from.ptr, from.len, self.inner.stream.cu_stream()) }
            .map_err(driver(CALL, "copy on the GPU"))
    }
}
