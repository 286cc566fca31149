//! Order between a device's stream and streams of the same context that the host framework hides.
//!
//! A framework that does not tell its stream can still be waited for, and be made to wait, through the context that
//! both share: an event that captures everything enqueued in the context, and a wait of everything enqueued in it
//! later. Neither holds up the host. Drivers before CUDA 12.5 have neither: there the host waits.

use std::ffi::{CStr, c_void};

use cudarc::driver::sys::{self, CUcontext, CUevent, CUresult};
use cudarc::driver::{CudaEvent, result};

use crate::device::Waited;
use crate::error::Result;

use super::device::Cuda;
use super::driver::driver;

/// `cuCtxRecordEvent` and `cuCtxWaitEvent`.
type ContextEvent = unsafe extern "C" fn(CUcontext, CUevent) -> CUresult;

/// CUDA version that has both.
const SINCE: i32 = 12050;

/// A function of the driver, which may be older than the bindings.
fn find(name: &CStr) -> Option<ContextEvent> {
    let mut found: *mut c_void = std::ptr::null_mut();
    let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    // SAFETY: the name ends in a zero; both results are written to locals.
    let answer = unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &raw mut found, SINCE, 0, &raw mut status) };
    if answer != CUresult::CUDA_SUCCESS || found.is_null() {
        return None;
    }
    // SAFETY: the driver gave the address under the name of a function of this type.
    Some(unsafe { std::mem::transmute::<*mut c_void, ContextEvent>(found) })
}

impl Cuda {
    /// Number of the GPU.
    pub fn ordinal(&self) -> usize {
        self.inner.context.ordinal()
    }

    /// Makes later work of this device wait for everything that has been enqueued in the context so far, on whatever
    /// stream. Refused while this device is under capture; no other stream of
    /// the context may be either.
    ///
    /// # Errors
    /// A driver's error.
    pub fn follow_context(&self) -> Result<Waited> {
        const CALL: &str = "Cuda::follow_context";
        self.not_captured(CALL, "wait for streams outside the graph")?;
        self.bind(CALL)?;
        let context = self.inner.context.cu_ctx();
        let Some(record) = find(c"cuCtxRecordEvent") else {
            result::ctx::synchronize().map_err(driver(CALL, "wait for the context"))?;
            return Ok(Waited::Host);
        };
        let event = self.event(CALL)?;
        // SAFETY: context and event are alive, and the event is the context's.
        unsafe { record(context, event.cu_event()) }.result().map_err(driver(CALL, "record the context's work"))?;
        self.inner.stream.wait(&event).map_err(driver(CALL, "wait for the context's work"))?;
        Ok(Waited::Device)
    }

    /// Makes everything that is enqueued in the context from now on, on whatever stream, wait for this device's work so
    /// far. Refused while this device is under capture; no other stream of
    /// the context may be either.
    ///
    /// # Errors
    /// A driver's error.
    pub fn lead_context(&self) -> Result<Waited> {
        const CALL: &str = "Cuda::lead_context";
        self.not_captured(CALL, "make streams outside the graph wait")?;
        self.bind(CALL)?;
        let context = self.inner.context.cu_ctx();
        let Some(wait) = find(c"cuCtxWaitEvent") else {
            self.inner.stream.synchronize().map_err(driver(CALL, "wait for the stream"))?;
            return Ok(Waited::Host);
        };
        let event = self.event(CALL)?;
        event.record(&self.inner.stream).map_err(driver(CALL, "record this device's work"))?;
        // SAFETY: context and event are alive, and the event is the context's.
        unsafe { wait(context, event.cu_event()) }.result().map_err(driver(CALL, "make the context wait"))?;
        Ok(Waited::Device)
    }

    fn event(&self, call: &'static str) -> Result<CudaEvent> {
        self.inner.context.new_event(None).map_err(driver(call, "create an event"))
    }
}
