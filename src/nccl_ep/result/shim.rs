//! The functions of `shim.cpp`, and what one of them returned as a result.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::nccl_ep::{NcclEpError, sys};

pub(super) type Object = *mut c_void;

unsafe extern "C" {
    pub(super) fn moebius_ep_get_version(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        version: *mut c_int,
    ) -> c_int;
    pub(super) fn moebius_ep_create_group(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        group: *mut sys::ncclEpGroup_t,
        comm: sys::ncclComm_t,
        config: *const sys::ncclEpGroupConfig_t,
    ) -> c_int;
    pub(super) fn moebius_ep_object(message: *mut c_char, capacity: usize, function: Object, object: Object) -> c_int;
    pub(super) fn moebius_ep_handle_mem_size(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        group: sys::ncclEpGroup_t,
        layout: sys::ncclEpLayout_t,
        config: *const sys::ncclEpHandleConfig_t,
        size: *mut usize,
        top_k: c_int,
    ) -> c_int;
    pub(super) fn moebius_ep_init_handle(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        handle: *mut sys::ncclEpHandle_t,
        group: sys::ncclEpGroup_t,
        layout: sys::ncclEpLayout_t,
        config: *const sys::ncclEpHandleConfig_t,
        top_k: c_int,
        memory: *const sys::ncclEpTensor_t,
    ) -> c_int;
    pub(super) fn moebius_ep_update_handle(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        handle: sys::ncclEpHandle_t,
        ids: *const sys::ncclEpTensor_t,
        info: *const sys::ncclEpLayoutInfo_t,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_dispatch(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        handle: sys::ncclEpHandle_t,
        inputs: *const sys::ncclEpDispatchInputs_t,
        outputs: *const sys::ncclEpDispatchOutputs_t,
        info: *const sys::ncclEpLayoutInfo_t,
        config: *const sys::ncclEpDispatchConfig_t,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_combine(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        handle: sys::ncclEpHandle_t,
        inputs: *const sys::ncclEpCombineInputs_t,
        outputs: *const sys::ncclEpCombineOutputs_t,
        config: *const sys::ncclEpCombineConfig_t,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_complete(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        handle: sys::ncclEpHandle_t,
        config: *const sys::ncclEpCompleteConfig_t,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_mask(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        group: sys::ncclEpGroup_t,
        mask: *mut c_int,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_mask_clean(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        group: sys::ncclEpGroup_t,
        stream: sys::cudaStream_t,
    ) -> c_int;
    pub(super) fn moebius_ep_async_error(
        message: *mut c_char,
        capacity: usize,
        function: Object,
        group: sys::ncclEpGroup_t,
        error: *mut c_int,
    ) -> c_int;
    #[cfg(test)]
    fn moebius_ep_test(message: *mut c_char, capacity: usize, kind: c_int) -> c_int;
}

/// Longest message kept of an exception.
const ROOM: usize = 2048;

/// Runs one function of the shim.
pub(super) fn guarded(
    function: &'static str,
    call: impl FnOnce(*mut c_char, usize) -> c_int,
) -> Result<(), NcclEpError> {
    let mut message = [0 as c_char; ROOM];
    match call(message.as_mut_ptr(), ROOM) {
        0 => Ok(()),
        code if code > 0 => Err(NcclEpError::Call { function, code, name: status(code) }),
        _ => {
            // SAFETY: the shim ends what it writes with a zero, and what it does not write is zero.
            let message = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned();
            Err(NcclEpError::Thrown { function, message })
        }
    }
}

/// NCCL's statuses in words.
fn status(code: c_int) -> &'static str {
    match code {
        1 => "a CUDA call failed",
        2 => "a system call failed",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "a peer or the network failed",
        7 => "in progress",
        8 => "timeout",
        _ => "a status that this version does not know",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(kind: c_int) -> Result<(), NcclEpError> {
        // SAFETY: the function throws, which the shim catches, or returns its argument.
        guarded("test", |message, capacity| unsafe { moebius_ep_test(message, capacity, kind) })
    }

    #[test]
    fn exceptions_and_statuses_become_errors() {
        assert_eq!(test(0), Err(NcclEpError::Thrown { function: "test", message: "thrown on purpose".into() }));
        let other = "something that is no std::exception".to_string();
        assert_eq!(test(1), Err(NcclEpError::Thrown { function: "test", message: other }));
        assert_eq!(test(4), Err(NcclEpError::Call { function: "test", code: 4, name: "invalid argument" }));
        let unknown = "a status that this version does not know";
        assert_eq!(test(77), Err(NcclEpError::Call { function: "test", code: 77, name: unknown }));
    }
}
