//! The library's calls, each through a function of `shim.cpp` that no exception leaves, as results.
//!
//! The module is named as cudarc names the middle one of its three layers over a library: `sys` has the declarations,
//! `result` the calls with a `Result` in place of a status, and what is safe (`safe` there, the groups and handles here)
//! is made of these.

mod shim;

use std::ffi::c_int;

use super::NcclEpError;
use super::sys::{self, Library};

use shim::*;

/// The library's version: 0.2.0 is 200.
///
/// # Errors
/// [`NcclEpError`]: the library's status, or what it threw.
pub fn get_version(library: &Library) -> Result<i32, NcclEpError> {
    let mut version = 0;
    // SAFETY: the function is the library's of that name; the result is a local.
    guarded("ncclEpGetVersion", |message, capacity| unsafe {
        moebius_ep_get_version(message, capacity, library.ncclEpGetVersion as Object, &raw mut version)
    })?;
    Ok(version)
}

/// # Safety
/// The communicator lives; its GPU is the calling thread's; the configuration is one that the library takes.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn create_group(
    library: &Library,
    comm: sys::ncclComm_t,
    config: &sys::ncclEpGroupConfig_t,
) -> Result<sys::ncclEpGroup_t, NcclEpError> {
    let mut group = std::ptr::null_mut();
    // SAFETY: as the caller promises; the result is a local.
    guarded("ncclEpCreateGroup", |message, capacity| unsafe {
        moebius_ep_create_group(message, capacity, library.ncclEpCreateGroup as Object, &raw mut group, comm, config)
    })?;
    Ok(group)
}

/// # Safety
/// The group lives, as does its communicator, and is not used again; its handles are gone.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn group_destroy(library: &Library, group: sys::ncclEpGroup_t) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpGroupDestroy", |message, capacity| unsafe {
        moebius_ep_object(message, capacity, library.ncclEpGroupDestroy as Object, group.cast())
    })
}

/// # Safety
/// The handle lives and is not used again.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn handle_destroy(library: &Library, handle: sys::ncclEpHandle_t) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpHandleDestroy", |message, capacity| unsafe {
        moebius_ep_object(message, capacity, library.ncclEpHandleDestroy as Object, handle.cast())
    })
}

/// Sizes that a handle is made with.
#[derive(Debug, Clone, Copy)]
pub struct RawHandleSizes<'a> {
    /// Where rows lie.
    pub layout: sys::ncclEpLayout_t,
    /// Alignment.
    pub config: &'a sys::ncclEpHandleConfig_t,
    /// Choices of a token.
    pub top_k: c_int,
}

/// # Safety
/// The group lives; the shape is one that the library takes.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn handle_mem_size(
    library: &Library,
    group: sys::ncclEpGroup_t,
    shape: RawHandleSizes<'_>,
) -> Result<usize, NcclEpError> {
    let mut size = 0;
    // SAFETY: as the caller promises; the result is a local.
    guarded("ncclEpHandleMemSize", |message, capacity| unsafe {
        let function = library.ncclEpHandleMemSize as Object;
        moebius_ep_handle_mem_size(
            message,
            capacity,
            function,
            group,
            shape.layout,
            shape.config,
            &raw mut size,
            shape.top_k,
        )
    })?;
    Ok(size)
}

/// # Safety
/// The group lives; the shape is one that the library takes; the memory is as large as it asked for and outlives the
/// handle.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn init_handle(
    library: &Library,
    group: sys::ncclEpGroup_t,
    shape: RawHandleSizes<'_>,
    memory: *const sys::ncclEpTensor_t,
) -> Result<sys::ncclEpHandle_t, NcclEpError> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: as the caller promises; the result is a local.
    guarded("ncclEpInitHandle", |message, capacity| unsafe {
        let function = library.ncclEpInitHandle as Object;
        let RawHandleSizes { layout, config, top_k } = shape;
        moebius_ep_init_handle(message, capacity, function, &raw mut handle, group, layout, config, top_k, memory)
    })?;
    Ok(handle)
}

/// # Safety
/// The handle lives; tensors are of the sizes that the library documents, in memory that stays until the stream has
/// passed the call.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn update_handle(
    library: &Library,
    handle: sys::ncclEpHandle_t,
    ids: *const sys::ncclEpTensor_t,
    info: *const sys::ncclEpLayoutInfo_t,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpUpdateHandle", |message, capacity| unsafe {
        moebius_ep_update_handle(message, capacity, library.ncclEpUpdateHandle as Object, handle, ids, info, stream)
    })
}

/// Arguments of [`dispatch`].
#[derive(Debug)]
pub struct Dispatch {
    /// Tensors to send.
    pub inputs: sys::ncclEpDispatchInputs_t,
    /// Where it goes.
    pub outputs: sys::ncclEpDispatchOutputs_t,
    /// Low latency: counters.
    pub info: *const sys::ncclEpLayoutInfo_t,
    /// Direction, and what rows are made of.
    pub config: sys::ncclEpDispatchConfig_t,
}

/// # Safety
/// As [`update_handle`], for a handle that has been updated.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn dispatch(
    library: &Library,
    handle: sys::ncclEpHandle_t,
    call: &Dispatch,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    let Dispatch { inputs, outputs, info, config } = call;
    // SAFETY: as the caller promises.
    guarded("ncclEpDispatch", |message, capacity| unsafe {
        let function = library.ncclEpDispatch as Object;
        moebius_ep_dispatch(message, capacity, function, handle, inputs, outputs, *info, config, stream)
    })
}

/// Arguments of [`combine`].
#[derive(Debug)]
pub struct Combine {
    /// Tensors to sum.
    pub inputs: sys::ncclEpCombineInputs_t,
    /// Where sums go.
    pub outputs: sys::ncclEpCombineOutputs_t,
    /// Direction.
    pub config: sys::ncclEpCombineConfig_t,
}

/// # Safety
/// As [`dispatch`].
///
/// # Errors
/// As [`get_version`].
pub unsafe fn combine(
    library: &Library,
    handle: sys::ncclEpHandle_t,
    call: &Combine,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    let Combine { inputs, outputs, config } = call;
    // SAFETY: as the caller promises.
    guarded("ncclEpCombine", |message, capacity| unsafe {
        let function = library.ncclEpCombine as Object;
        moebius_ep_combine(message, capacity, function, handle, inputs, outputs, config, stream)
    })
}

/// Ends a call that only sent.
///
/// # Safety
/// As [`dispatch`]; the call's tensors and structs are still there.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn complete(
    library: &Library,
    handle: sys::ncclEpHandle_t,
    config: &sys::ncclEpCompleteConfig_t,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpComplete", |message, capacity| unsafe {
        moebius_ep_complete(message, capacity, library.ncclEpComplete as Object, handle, config, stream)
    })
}

/// Which ranks are taken part with (1) and which are skipped (0), to the GPU.
///
/// # Safety
/// The group lives and was made with masks; `to` has room for a number a rank, on the GPU.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn mask_query(
    library: &Library,
    group: sys::ncclEpGroup_t,
    to: *mut c_int,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpMaskQuery", |message, capacity| unsafe {
        moebius_ep_mask(message, capacity, library.ncclEpMaskQuery as Object, group, to, stream)
    })
}

/// Takes the mask from the host.
///
/// # Safety
/// As [`mask_query`]; `from` has a number a rank.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn mask_update(
    library: &Library,
    group: sys::ncclEpGroup_t,
    from: &[c_int],
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises; the library only reads.
    guarded("ncclEpMaskUpdate", |message, capacity| unsafe {
        moebius_ep_mask(message, capacity, library.ncclEpMaskUpdate as Object, group, from.as_ptr().cast_mut(), stream)
    })
}

/// Takes all ranks in again; they call together.
///
/// # Safety
/// As [`mask_query`]; nothing of the group runs.
///
/// # Errors
/// As [`get_version`].
pub unsafe fn mask_clean(
    library: &Library,
    group: sys::ncclEpGroup_t,
    stream: sys::cudaStream_t,
) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpMaskClean", |message, capacity| unsafe {
        moebius_ep_mask_clean(message, capacity, library.ncclEpMaskClean as Object, group, stream)
    })
}

/// Whether a rank was late since the flag was last cleared: 0 if not.
///
/// # Safety
/// As [`mask_query`].
///
/// # Errors
/// As [`get_version`].
pub unsafe fn async_error(library: &Library, group: sys::ncclEpGroup_t) -> Result<c_int, NcclEpError> {
    let mut error = 0;
    // SAFETY: as the caller promises; the result is a local.
    guarded("ncclEpGetAsyncError", |message, capacity| unsafe {
        moebius_ep_async_error(message, capacity, library.ncclEpGetAsyncError as Object, group, &raw mut error)
    })?;
    Ok(error)
}

/// Clears that flag.
///
/// # Safety
/// As [`mask_query`].
///
/// # Errors
/// As [`get_version`].
pub unsafe fn error_clear(library: &Library, group: sys::ncclEpGroup_t) -> Result<(), NcclEpError> {
    // SAFETY: as the caller promises.
    guarded("ncclEpErrorClear", |message, capacity| unsafe {
        moebius_ep_object(message, capacity, library.ncclEpErrorClear as Object, group.cast())
    })
}

/// Zeros with the two numbers that every struct of the interface begins with.
pub(super) fn blank<T>() -> T {
    // SAFETY: used for structs of the interface only: integers and pointers, for which the interface asks for zeros.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: size and magic are the first two u32 of each.
    unsafe { (&raw mut value).cast::<[u32; 2]>().write([size_of::<T>() as u32, sys::NCCL_EP_MAGIC]) };
    value
}
