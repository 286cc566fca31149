//! Memory of a GPU: owned, shared and borrowed.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
#[cfg(feature = "nccl-ep")]
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr};
#[cfg(feature = "candle")]
use cudarc::driver::{CudaSlice, DevicePtrMut};

use crate::device::{Device, sealed::Sealed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::TensorMut;

use super::device::{Cuda, Event};
use super::driver::driver;
use super::memory::{Arena, MemoryBlock};
use super::page_locked::PageLockedBlock;

/// Owned memory of a GPU, given back in the order of its stream.
pub struct DeviceBuffer {
    ptr: CUdeviceptr,
    bytes: usize,
    arena: Arc<Arena>,
    owner: Owner,
}

/// Whose memory a buffer is.
enum Owner {
    /// The workspace's.
    Arena(MemoryBlock),
    /// Page-locked memory of the host.
    PageLocked(PageLockedBlock),
    /// A window's: its owner counts the buffers of it by this.
    #[cfg(feature = "nccl-ep")]
    Window(Arc<AtomicUsize>),
    /// Somebody's who keeps it for as long as this is held.
    #[cfg(feature = "nccl")]
    External(#[allow(dead_code, reason = "kept alive, not read")] Arc<dyn Send + Sync>),
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer {{ bytes: {} }}", self.bytes)
    }
}

impl DeviceBuffer {
    fn is_on_host(&self) -> bool {
        matches!(self.owner, Owner::PageLocked(_))
    }

    /// The memory as the driver bindings' own: it leaves the workspace, and whoever holds it gives it back to the
    /// driver, in the order of the stream. `T` is the element type that the buffer was allocated for.
    #[cfg(feature = "candle")]
    pub(crate) fn into_slice<T: cudarc::driver::DeviceRepr>(mut self) -> Result<CudaSlice<T>> {
        let stream = Arc::clone(self.arena.stream());
        let ptr = match &mut self.owner {
            Owner::Arena(block) => self.arena.give_away(block),
            Owner::PageLocked(_) => {
                return Err(Error::invalid(
                    "DeviceBuffer",
                    "memory",
                    "the workspace's",
                    "page-locked memory of the host",
                ));
            }
            #[cfg(feature = "nccl-ep")]
            Owner::Window(_) => return Err(Error::invalid("DeviceBuffer", "memory", "the workspace's", "a window's")),
            #[cfg(feature = "nccl")]
            Owner::External(_) => {
                return Err(Error::invalid("DeviceBuffer", "memory", "the workspace's", "a window's"));
            }
        };
        // SAFETY: the block has that many bytes and is the arena's no longer; the slice frees it with
        // `cuMemFreeAsync` on the arena's stream. A pool whose arena is dropped before stays.
        let mut slice = unsafe { stream.upgrade_device_ptr(ptr, self.bytes / size_of::<T>()) };
        // Records the work that fills the memory, for readers on other streams.
        drop(slice.device_ptr_mut(&stream));
        Ok(slice)
    }
}

#[cfg(feature = "nccl")]
impl Cuda {
    /// A buffer of memory that `owner` keeps.
    ///
    /// # Safety
    /// The memory stays as long as the owner, and meanwhile nobody writes it but in the order of the streams that are
    /// given the buffer.
    pub(crate) unsafe fn external(&self, ptr: u64, bytes: usize, owner: Arc<dyn Send + Sync>) -> DeviceBuffer {
        DeviceBuffer { ptr, bytes, arena: self.inner.arena(), owner: Owner::External(owner) }
    }
}

#[cfg(feature = "nccl-ep")]
impl Cuda {
    /// A buffer of memory that its owner keeps, `buffers` counting it until it is dropped.
    ///
    /// # Safety
    /// The memory stays while the count is above zero, and meanwhile nobody writes it but in the order of the stream.
    pub(crate) unsafe fn borrowed(&self, ptr: u64, bytes: usize, buffers: &Arc<AtomicUsize>) -> DeviceBuffer {
        buffers.fetch_add(1, Ordering::AcqRel);
        DeviceBuffer { ptr, bytes, arena: self.inner.arena(), owner: Owner::Window(Arc::clone(buffers)) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Arena(block) => self.arena.free(*block),
            Owner::PageLocked(block) => self.arena.free_page_locked(block),
            #[cfg(feature = "nccl-ep")]
            Owner::Window(buffers) => drop(buffers.fetch_sub(1, Ordering::AcqRel)),
            #[cfg(feature = "nccl")]
            Owner::External(_) => {}
        }
    }
}

/// Borrowed memory of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRef<'a> {
    pub(super) ptr: CUdeviceptr,
    len: usize,
    /// It is page-locked memory of the host, which kernels reach through the host link.
    on_host: bool,
    owner: PhantomData<&'a [u8]>,
}

impl DeviceRef<'_> {
    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.ptr
    }

    /// `len` bytes of device memory.
    ///
    /// # Safety
    /// They stay allocated and unwritten for the lifetime, on the stream of the [`Cuda`] that uses them: its kernels
    /// may still read after the last call returned, so memory may be freed or written only behind them; where the calls
    /// are captured ([`Cuda::capture`]), only when the graph is gone. `ptr` is not null and a multiple of the element's
    /// size.
    pub unsafe fn from_raw(ptr: u64, len: usize) -> Self {
        Self { ptr, len, on_host: false, owner: PhantomData }
    }
}

/// Exclusively borrowed memory of a GPU.
#[derive(Debug)]
pub struct DeviceMut<'a> {
    pub(super) ptr: CUdeviceptr,
    len: usize,
    /// As in [`DeviceRef`].
    on_host: bool,
    owner: PhantomData<&'a mut [u8]>,
}

impl DeviceMut<'_> {
    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.ptr
    }

    /// `len` bytes of device memory.
    ///
    /// # Safety
    /// As [`DeviceRef::from_raw`], and nothing else reads or writes them for the lifetime.
    pub unsafe fn from_raw(ptr: u64, len: usize) -> Self {
        Self { ptr, len, on_host: false, owner: PhantomData }
    }
}

impl Cuda {
    /// Page-locked memory of the host as a buffer, zeros but for what `fill` makes of it.
    pub(super) fn page_locked_buffer(
        &self,
        call: &'static str,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<DeviceBuffer> {
        self.not_captured(call, "lock memory of the host")?;
        self.bind(call)?;
        let arena = self.inner.arena();
        let mut block = arena.alloc_page_locked(call, bytes)?;
        fill(block.bytes_mut());
        Ok(DeviceBuffer { ptr: block.address(), bytes, arena, owner: Owner::PageLocked(block) })
    }

    /// Sets every byte.
    pub(super) fn fill_bytes(&self, call: &'static str, to: DeviceMut<'_>, byte: u8) -> Result<()> {
        if to.len == 0 {
            return Ok(());
        }
        self.bind(call)?;
        // SAFETY: the view has that many bytes, exclusively.
        unsafe { result::memset_d8_async(to.ptr, byte, to.len, self.inner.stream.cu_stream()) }
            .map_err(driver(call, &format!("fill with {byte:#04x}")))
    }

    /// Sets every 8 bytes to a number.
    pub(super) fn fill_word(&self, to: TensorMut<'_, Cuda>, word: u64) -> Result<()> {
        const CALL: &str = "fill";
        let to = to.into_data();
        self.bind(CALL)?;
        for (half, value) in [word as u32, (word >> 32) as u32].into_iter().enumerate() {
            let stream = self.inner.stream.cu_stream();
            // SAFETY: a column of 4 bytes, 8 apart, inside the view's words.
            unsafe { sys::cuMemsetD2D32Async(to.ptr + 4 * half as u64, 8, value, 1, to.len / 8, stream) }
                .result()
                .map_err(driver(CALL, "fill"))?;
        }
        Ok(())
    }

    pub(super) fn write_bytes(&self, call: &'static str, to: CUdeviceptr, from: &[u8]) -> Result<()> {
        self.not_captured(call, "copy from the host")?;
        self.bind(call)?;
        // SAFETY: callers give a pointer of at least `from.len()` bytes; `from` is copied before the call returns or,
        // where the GPU reads it later, waited for below.
        unsafe { result::memcpy_htod_async(to, from, self.inner.stream.cu_stream()) }
            .map_err(driver(call, "copy to the GPU"))?;
        match self.reads_in_place(from) {
            true => self.read_bytes(call, 0, &mut []),
            false => Ok(()),
        }
    }

    /// Whether the driver may have the GPU read this memory of the host itself, instead of copying it first: it is
    /// page-locked, or the GPU follows the host's page tables (Grace).
    fn reads_in_place(&self, memory: &[u8]) -> bool {
        use sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as KIND;
        if self.inner.host_tables {
            return true;
        }
        let mut kind = 0u32;
        // SAFETY: the result is written to a local, of the attribute's size; the address is looked up and not followed.
        let known = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), KIND, memory.as_ptr() as u64) };
        known == sys::CUresult::CUDA_SUCCESS
    }
}

impl Sealed for Cuda {}

impl Device for Cuda {
    type Buffer = DeviceBuffer;
    type Ref<'a> = DeviceRef<'a>;
    type Mut<'a> = DeviceMut<'a>;
    type Event = Event;

    fn alloc(&self, dtype: DType, count: usize) -> Result<DeviceBuffer> {
        const CALL: &str = "Cuda::alloc";
        let bytes = count
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::invalid(CALL, "count", "a size that fits the address space", count))?;
        self.bind(CALL)?;
        let arena = self.inner.arena();
        let block = arena.alloc(CALL, bytes)?;
        let mut buffer = DeviceBuffer { ptr: block.ptr, bytes, arena, owner: Owner::Arena(block) };
        if self.poisons() {
            self.fill_bytes(CALL, Self::view_mut(&mut buffer), 0xff)?;
        }
        Ok(buffer)
    }

    fn view(buffer: &DeviceBuffer) -> DeviceRef<'_> {
        DeviceRef { ptr: buffer.ptr, len: buffer.bytes, on_host: buffer.is_on_host(), owner: PhantomData }
    }

    fn view_mut(buffer: &mut DeviceBuffer) -> DeviceMut<'_> {
        DeviceMut { ptr: buffer.ptr, len: buffer.bytes, on_host: buffer.is_on_host(), owner: PhantomData }
    }

    fn len(view: DeviceRef<'_>) -> usize {
        view.len
    }

    fn len_mut(view: &DeviceMut<'_>) -> usize {
        view.len
    }

    fn slice<'a>(view: Self::Ref<'a>, range: Range<usize>) -> Self::Ref<'a> {
        assert!(range.start <= range.end && range.end <= view.len, "{range:?} of {} bytes", view.len);
        DeviceRef { ptr: view.ptr + range.start as u64, len: range.len(), ..view }
    }

    fn slice_mut<'a>(view: Self::Mut<'a>, range: Range<usize>) -> Self::Mut<'a> {
        assert!(range.start <= range.end && range.end <= view.len, "{range:?} of {} bytes", view.len);
        DeviceMut { ptr: view.ptr + range.start as u64, len: range.len(), ..view }
    }

    fn split_mut<'a>(view: Self::Mut<'a>, at: usize) -> (Self::Mut<'a>, Self::Mut<'a>) {
        assert!(at <= view.len, "{at} of {} bytes", view.len);
        let part = |ptr, len| DeviceMut { ptr, len, on_host: view.on_host, owner: PhantomData };
        (part(view.ptr, at), part(view.ptr + at as u64, view.len - at))
    }

    fn shorten<'s, 'l: 's>(view: Self::Ref<'l>) -> Self::Ref<'s> {
        view
    }

    fn reborrow<'s>(view: &'s mut DeviceMut<'_>) -> DeviceMut<'s> {
        DeviceMut { ptr: view.ptr, len: view.len, on_host: view.on_host, owner: PhantomData }
    }

    fn downgrade<'s>(view: &'s DeviceMut<'_>) -> DeviceRef<'s> {
        DeviceRef { ptr: view.ptr, len: view.len, on_host: view.on_host, owner: PhantomData }
    }

    fn zero(&self, view: DeviceMut<'_>) -> Result<()> {
        self.fill_bytes("Cuda::zero", view, 0)
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
        let (stream, bytes) = (self.inner.stream.cu_stream(), from.len);
        // The kinds are named where they are known: then a copy engine carries what crosses the host link, in a capture
        // too, whose memory the driver cannot look up yet. Page-locked memory has one address for the host and the GPU.
        // SAFETY: both views have that many bytes, and borrows keep them apart; what is the host's is page-locked, and is
        // freed behind the work of all streams.
        let copied = unsafe {
            match (from.on_host, to.on_host) {
                (false, false) => sys::cuMemcpyDtoDAsync_v2(to.ptr, from.ptr, bytes, stream),
                (true, false) => sys::cuMemcpyHtoDAsync_v2(to.ptr, from.ptr as *const c_void, bytes, stream),
                (false, true) => sys::cuMemcpyDtoHAsync_v2(to.ptr as *mut c_void, from.ptr, bytes, stream),
                (true, true) => sys::cuMemcpyAsync(to.ptr, from.ptr, bytes, stream),
            }
        };
        copied.result().map_err(driver(CALL, "copy"))
    }
}
