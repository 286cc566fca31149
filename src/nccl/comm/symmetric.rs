//! Windows: memory of all ranks that each can write.

use std::ffi::{c_int, c_void};

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::{Communicator, PeerSignals, Put, Span, SymmetricMemory, Tag};
use crate::cuda::{Cuda, DeviceMut, DeviceRef};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use crate::nccl::comm::communicator::CommParts;
use crate::nccl::comm::one_sided::{self, OneSided};
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::ffi::sys::{self, CommPtr, Status, WindowPtr};
use crate::nccl::ffi::windows::NcclWindow;
use crate::nccl::{NcclComm, NcclLibrary};

/// NCCL wants windows of whole pages.
const PAGE: usize = 4096;

impl NcclWindow {
    fn own(&self, span: Span) -> DeviceRef<'_> {
        // SAFETY: callers have checked the span; the memory is the window's, and given back behind its uses.
        unsafe { DeviceRef::from_raw(self.base() + span.offset as u64, span.bytes) }
    }

    fn own_mut(&mut self, span: Span) -> DeviceMut<'_> {
        // SAFETY: as above. Peers write where they agree with this rank to write.
        unsafe { DeviceMut::from_raw(self.base() + span.offset as u64, span.bytes) }
    }
}

/// Calls of a library that can register windows.
pub(in crate::nccl) struct Registering<'a> {
    library: &'a NcclLibrary,
    alloc: unsafe extern "C" fn(*mut *mut c_void, usize) -> Status,
    free: unsafe extern "C" fn(*mut c_void) -> Status,
    register: unsafe extern "C" fn(CommPtr, *mut c_void, usize, *mut WindowPtr, c_int) -> Status,
}

impl<'a> Registering<'a> {
    pub(in crate::nccl) fn of(library: &'a NcclLibrary) -> Result<Self> {
        let functions = library.functions();
        let alloc = library.newer("ncclMemAlloc", functions.mem_alloc)?;
        let free = library.newer("ncclMemFree", functions.mem_free)?;
        let register = library.newer("ncclCommWindowRegister", functions.window_register)?;
        Ok(Self { library, alloc, free, register })
    }

    /// Memory for a window, of the GPU that is the thread's.
    pub(in crate::nccl) fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut memory: *mut c_void = std::ptr::null_mut();
        // SAFETY: the result is written to a local.
        let status = unsafe { (self.alloc)(&raw mut memory, size(bytes)) };
        self.library.check("ncclMemAlloc", std::ptr::null_mut(), status)?;
        Ok(memory as u64)
    }

    /// Gives back memory of `allocate` that is in no window.
    pub(in crate::nccl) fn free(&self, memory: u64) {
        // SAFETY: as callers keep to.
        let _ = unsafe { (self.free)(memory as *mut c_void) };
    }

    /// Makes memory of `allocate`, of as many bytes, a window (collective); the communicator lives during the call.
    pub(in crate::nccl) fn register(&self, comm: CommPtr, memory: u64, bytes: usize) -> Result<NcclWindow> {
        const CALL: &str = "ncclCommWindowRegister";
        let mut window: WindowPtr = std::ptr::null_mut();
        let to = memory as *mut c_void;
        // SAFETY: the memory has that many bytes and is NCCL's own; the communicator lives during the call.
        let status = unsafe { (self.register)(comm, to, size(bytes), &raw mut window, sys::WINDOW_SYMMETRIC) };
        self.library.check(CALL, comm, status)?;
        match window.is_null() {
            false => Ok(NcclWindow::new(memory, bytes, window)),
            // How NCCL says that this machine has no symmetric memory.
            true => {
                self.library.check(CALL, comm, Status::INVALID_ARGUMENT)?;
                Err(Error::invalid(CALL, "window", "one", "none"))
            }
        }
    }
}

/// Bytes of a window.
fn size(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(PAGE)
}

impl NcclComm {
    /// A call that signals those peers, or waits for theirs.
    fn signals(
        &self,
        call: &'static str,
        tag: Tag,
        peers: impl Iterator<Item = usize> + Clone,
    ) -> Result<CollectiveInfo> {
        let comm_handle = &self.session.comm_handle;
        let subject = self.aside(call, tag, peers.clone())?;
        if let Some(peer) = peers.into_iter().find(|peer| *peer == comm_handle.rank) {
            return Err(Error::invalid(call, "peer", "another rank", format!("{peer}, this one")));
        }
        match comm_handle.copy_engines {
            false => Ok(subject),
            // There is one signal, which would be taken for another's.
            true => {
                Err(Error::invalid(call, "communicator", "one whose own exchanges need no signals", "copy engines'"))
            }
        }
    }

    /// A call about windows that all ranks make, of the same number of bytes.
    fn of_window<T>(
        &mut self,
        operation: &'static str,
        tag: Tag,
        bytes: usize,
        calls: impl FnOnce(CommParts<'_>) -> Result<T>,
    ) -> Result<T> {
        self.together(CollectiveCall { operation, tag, dtype: DType::U8, detail: Detail::Plain, bytes }, calls)
    }
}

impl SymmetricMemory<Cuda> for NcclComm {
    type Window = NcclWindow;

    fn allocate(&mut self, tag: Tag, bytes: usize) -> Result<NcclWindow> {
        let library = self.library().clone();
        let registering = Registering::of(&library)?;
        // Before the ranks meet: one without memory tells the others, and the communicator works on.
        let memory = self.cuda.bind("allocate").and_then(|()| registering.allocate(bytes));
        let memory = self.check(tag, memory)?;
        let made = self.of_window("allocate", tag, bytes, |raw| registering.register(raw.comm, memory, bytes));
        // Where the communicator has ended, a window may have been made over it.
        if made.is_err() && self.session.comm_handle.failure().is_none() {
            registering.free(memory);
        }
        made
    }

    fn release(&mut self, tag: Tag, window: NcclWindow) -> Result<()> {
        let library = self.library().clone();
        let functions = *library.functions();
        let free = library.newer("ncclMemFree", functions.mem_free)?;
        let deregister = library.newer("ncclCommWindowDeregister", functions.window_deregister)?;
        // The stream's work with the window comes first, here and at the peers.
        self.barrier(tag)?;
        self.of_window("release", tag, window.bytes, |raw| {
            // SAFETY: the window is this communicator's and nobody uses it any more.
            let status = unsafe { deregister(raw.comm, window.window) };
            library.check("ncclCommWindowDeregister", raw.comm, status)?;
            // SAFETY: the memory was the window's alone.
            let status = unsafe { free(window.address as *mut c_void) };
            Ok(library.check("ncclMemFree", std::ptr::null_mut(), status)?)
        })
    }

    fn team(&self, window: &NcclWindow) -> Result<Vec<usize>> {
        let reach = |peer| Ok(self.address(window, peer)?.map(|_| peer));
        (0..self.session.comm_handle.size).filter_map(|peer| reach(peer).transpose()).collect()
    }

    fn address(&self, window: &NcclWindow, peer: usize) -> Result<Option<u64>> {
        const CALL: &str = "address";
        self.aside(CALL, Tag { layer: 0, op: crate::comm::Op::User, sequence: 0 }, std::iter::once(peer))?;
        if peer == self.session.comm_handle.rank {
            return Ok(Some(window.address));
        }
        let library = self.library();
        let get = library.newer("ncclGetPeerDevicePointer", library.functions().get_peer_pointer)?;
        self.with_raw(|raw| {
            let mut address: *mut c_void = std::ptr::null_mut();
            // SAFETY: the window is this communicator's, which lives during the call; the result is a local.
            let status = unsafe { get(window.window, 0, peer as i32, &raw mut address) };
            library.check("ncclGetPeerDevicePointer", raw.comm, status)?;
            Ok((!address.is_null()).then_some(address as u64))
        })
    }

    fn store(&mut self, window: &mut NcclWindow, offset: usize, from: TensorRef<'_, Cuda>) -> Result<()> {
        let span = Span { offset, bytes: Cuda::len(from.data()) };
        span.check("store", "span", window.bytes)?;
        self.cuda.copy(from.data(), window.own_mut(span))
    }

    fn load(&mut self, window: &NcclWindow, offset: usize, to: TensorMut<'_, Cuda>) -> Result<()> {
        let to = to.into_data();
        let span = Span { offset, bytes: Cuda::len_mut(&to) };
        span.check("load", "span", window.bytes)?;
        self.cuda.copy(window.own(span), to)
    }

    fn put(&mut self, tag: Tag, put: Put<'_, NcclWindow>) -> Result<()> {
        const CALL: &str = "put";
        let Span { bytes, .. } = put.span;
        put.span.check(CALL, "from", put.from.bytes)?;
        Span { offset: put.offset, bytes }.check(CALL, "to", put.to.bytes)?;
        let subject = self.signals(CALL, tag, std::iter::once(put.peer))?;
        if bytes == 0 {
            return self.signal(tag, put.peer);
        }
        let puts = OneSided::of(self.library())?;
        let (from, offset, peer) = (put.from.own(put.span).address(), put.offset, put.peer);
        let put = one_sided::OneSidedPut { from, bytes, peer, window: put.to.window, offset };
        // SAFETY: both spans are inside their windows, which live until `release`, behind a barrier of all ranks.
        self.enqueue_aside(subject, |comm_stream| unsafe { puts.put(comm_stream, put) })
    }

    fn signal(&mut self, tag: Tag, peer: usize) -> Result<()> {
        const CALL: &str = "signal";
        let subject = self.signals(CALL, tag, std::iter::once(peer))?;
        let puts = OneSided::of(self.library())?;
        self.enqueue_aside(subject, |comm_stream| puts.signal(comm_stream, peer))
    }

    fn wait(&mut self, tag: Tag, signals: &[PeerSignals]) -> Result<()> {
        const CALL: &str = "wait";
        let subject = self.signals(CALL, tag, signals.iter().map(|signals| signals.peer))?;
        let puts = OneSided::of(self.library())?;
        if signals.iter().all(|signals| signals.count == 0) {
            return Ok(());
        }
        self.enqueue_aside(subject, |comm_stream| puts.wait(comm_stream, signals.iter().copied()))
    }
}
