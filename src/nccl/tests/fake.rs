//! A library of functions that do as told.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::nccl::ffi::comm_handle::{CommHandle, RankPlace};
use crate::nccl::ffi::sys::{
    CommPtr, Config, DataType, Functions, RawUniqueId, RedOp, Status, StreamPtr, WaitSignal, WindowPtr,
};
use crate::nccl::{NcclLibrary, NcclOptions};

/// A call of what exchanges blocks.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Asked {
    /// From, to whom, where there.
    Put(u64, c_int, usize),
    Signal(c_int),
    /// Peers, and how many signals of each.
    Wait(Vec<(c_int, c_int)>),
}

/// Target of a `ncclComm_t` of these tests.
#[derive(Default)]
pub(super) struct Fake {
    pub(super) aborts: AtomicU32,
    pub(super) destroys: AtomicU32,
    pub(super) revoked: AtomicBool,
    pub(super) asynchronous: AtomicI32,
    /// A gather does not return before the communicator is revoked.
    pub(super) stuck: AtomicBool,
    /// A gather has begun.
    pub(super) inside: AtomicBool,
    /// Result of a send.
    pub(super) send: AtomicI32,
    pub(super) groups: AtomicI32,
    /// Result of a put.
    pub(super) put: AtomicI32,
    pub(super) steps: Mutex<Vec<Asked>>,
    /// Result of a window's registration, and whether there is a window then.
    pub(super) register: AtomicI32,
    pub(super) no_window: AtomicBool,
}

/// # Safety
/// A pointer to a living [`Fake`].
unsafe fn fake<'a>(comm: CommPtr) -> &'a Fake {
    // SAFETY: as the caller promises.
    unsafe { &*comm.cast::<Fake>() }
}

const OK: Status = Status::SUCCESS;

unsafe extern "C" fn get_version(to: *mut c_int) -> Status {
    // SAFETY: the caller's local.
    unsafe { *to = 23007 };
    OK
}
pub(super) unsafe extern "C" fn old_version(to: *mut c_int) -> Status {
    // SAFETY: the caller's local.
    unsafe { *to = 21005 };
    OK
}
unsafe extern "C" fn get_unique_id(_: *mut RawUniqueId) -> Status {
    OK
}
/// Joins nobody before the test's end.
unsafe extern "C" fn init(_: *mut CommPtr, _: c_int, _: RawUniqueId, _: c_int, _: *mut Config) -> Status {
    loop {
        thread::park();
    }
}
unsafe extern "C" fn split(_: CommPtr, _: c_int, _: c_int, _: *mut CommPtr, _: *mut Config) -> Status {
    OK
}
unsafe extern "C" fn destroy(comm: CommPtr) -> Status {
    // SAFETY: a test's.
    unsafe { fake(comm) }.destroys.fetch_add(1, SeqCst);
    OK
}
unsafe extern "C" fn abort(comm: CommPtr) -> Status {
    // SAFETY: a test's.
    unsafe { fake(comm) }.aborts.fetch_add(1, SeqCst);
    OK
}
unsafe extern "C" fn revoke(comm: CommPtr, _: c_int) -> Status {
    // SAFETY: a test's.
    unsafe { fake(comm) }.revoked.store(true, SeqCst);
    OK
}
unsafe extern "C" fn asynchronous(comm: CommPtr, to: *mut Status) -> Status {
    // SAFETY: a test's, and the caller's local.
    unsafe { *to = Status(fake(comm).asynchronous.load(SeqCst)) };
    OK
}
unsafe extern "C" fn error_string(status: Status) -> *const c_char {
    let text: &CStr = if status == Status::REMOTE_ERROR { c"remote error" } else { c"unknown" };
    text.as_ptr()
}
unsafe extern "C" fn last_error(_: CommPtr) -> *const c_char {
    c" it happened \n".as_ptr()
}
unsafe extern "C" fn group() -> Status {
    OK
}
unsafe extern "C" fn all_gather(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: DataType,
    comm: CommPtr,
    _: StreamPtr,
) -> Status {
    // SAFETY: a test's.
    let comm = unsafe { fake(comm) };
    comm.inside.store(true, SeqCst);
    while comm.stuck.load(SeqCst) {
        if comm.revoked.load(SeqCst) {
            return Status(3);
        }
        thread::sleep(Duration::from_millis(1));
    }
    OK
}
unsafe extern "C" fn reduce(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: DataType,
    _: RedOp,
    _: CommPtr,
    _: StreamPtr,
) -> Status {
    OK
}
unsafe extern "C" fn broadcast(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: DataType,
    _: c_int,
    _: CommPtr,
    _: StreamPtr,
) -> Status {
    OK
}
unsafe extern "C" fn send(_: *const c_void, _: usize, _: DataType, _: c_int, comm: CommPtr, _: StreamPtr) -> Status {
    // SAFETY: a test's.
    let comm = unsafe { fake(comm) };
    comm.groups.fetch_add(1, SeqCst);
    Status(comm.send.load(SeqCst))
}
unsafe extern "C" fn recv(_: *mut c_void, _: usize, _: DataType, _: c_int, comm: CommPtr, _: StreamPtr) -> Status {
    // SAFETY: a test's.
    unsafe { fake(comm) }.groups.fetch_add(100, SeqCst);
    OK
}

unsafe extern "C" fn put_signal(
    from: *const c_void,
    _: usize,
    _: DataType,
    peer: c_int,
    _: WindowPtr,
    offset: usize,
    _: c_int,
    _: c_int,
    _: c_uint,
    comm: CommPtr,
    _: StreamPtr,
) -> Status {
    // SAFETY: a test's.
    let fake = unsafe { fake(comm) };
    fake.steps.lock().unwrap().push(Asked::Put(from as u64, peer, offset));
    Status(fake.put.load(SeqCst))
}
unsafe extern "C" fn signal(peer: c_int, _: c_int, _: c_int, _: c_uint, comm: CommPtr, _: StreamPtr) -> Status {
    // SAFETY: a test's.
    unsafe { fake(comm) }.steps.lock().unwrap().push(Asked::Signal(peer));
    OK
}
unsafe extern "C" fn wait_signal(count: c_int, list: *mut WaitSignal, comm: CommPtr, _: StreamPtr) -> Status {
    // SAFETY: the caller's list, and a test's.
    let (list, fake) = unsafe { (std::slice::from_raw_parts(list, count as usize), fake(comm)) };
    let waits = list.iter().map(|wait| (wait.peer, wait.count)).collect();
    fake.steps.lock().unwrap().push(Asked::Wait(waits));
    OK
}
unsafe extern "C" fn allocate(to: *mut *mut c_void, bytes: usize) -> Status {
    assert!(bytes > 0 && bytes.is_multiple_of(4096), "whole pages");
    // SAFETY: the caller's local.
    unsafe { *to = 4096 as *mut c_void };
    OK
}
pub(super) unsafe extern "C" fn no_memory(_: *mut *mut c_void, _: usize) -> Status {
    Status(1)
}
unsafe extern "C" fn free(_: *mut c_void) -> Status {
    OK
}
unsafe extern "C" fn register(comm: CommPtr, _: *mut c_void, _: usize, to: *mut WindowPtr, _: c_int) -> Status {
    // SAFETY: a test's.
    let comm = unsafe { fake(comm) };
    if !comm.no_window.load(SeqCst) {
        // SAFETY: the caller's local.
        unsafe { *to = to.cast() };
    }
    Status(comm.register.load(SeqCst))
}

pub(super) fn functions() -> Functions {
    Functions {
        get_version,
        get_unique_id,
        comm_init_rank_config: init,
        comm_split: split,
        comm_destroy: destroy,
        comm_abort: abort,
        comm_get_async_error: asynchronous,
        get_error_string: error_string,
        get_last_error: last_error,
        group_start: group,
        group_end: group,
        all_gather,
        all_reduce: reduce,
        reduce_scatter: reduce,
        broadcast,
        send,
        recv,
        comm_revoke: Some(revoke),
        mem_alloc: Some(allocate),
        mem_free: Some(free),
        window_register: Some(register),
        window_deregister: None,
        get_peer_pointer: None,
        query_properties: None,
        put_signal: Some(put_signal),
        signal: Some(signal),
        wait_signal: Some(wait_signal),
    }
}

pub(super) fn library() -> NcclLibrary {
    NcclLibrary::of(functions(), "a fake".to_string(), "a test").expect("a library")
}

/// Lives until the process ends: a communicator may outlive its test's stack.
pub(super) fn comm_handle() -> (Arc<CommHandle>, &'static Fake) {
    comm_handle_of(0, 2)
}

pub(super) fn comm_handle_of(rank: usize, size: usize) -> (Arc<CommHandle>, &'static Fake) {
    comm_handle_at(RankPlace { rank, size, copy_engines: false, options: NcclOptions::default() })
}

pub(super) fn comm_handle_at(place: RankPlace) -> (Arc<CommHandle>, &'static Fake) {
    let fake: &'static Fake = Box::leak(Box::default());
    let comm = (&raw const *fake).cast_mut().cast();
    (Arc::new(CommHandle::new(library(), place, comm)), fake)
}
