//! Handles of either mode: the library's routing of a step, in memory of ours.

use std::ffi::c_int;
use std::sync::Arc;

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorRef};

use super::raw_group::RawGroup;
use super::result::{self, blank};
use super::rules::NcclEpResult;
use super::sys;
use super::tensor::TensorDescriptor;

/// A handle as the library has it. It keeps the group.
pub(super) struct RawHandle {
    raw_group: Arc<RawGroup>,
    raw: sys::ncclEpHandle_t,
    // Freed in the order of the stream, so behind what the library still does with it.
    memory: Tensor<Cuda>,
}

// SAFETY: the library lets any thread use a handle, one at a time, which `&mut self` sees to.
unsafe impl Send for RawHandle {}
// SAFETY: nothing is called through a shared reference.
unsafe impl Sync for RawHandle {}

/// Sizes that a handle is made with, checked.
pub(super) struct HandleSizes {
    pub(super) layout: sys::ncclEpLayout_t,
    /// Of segments; 0 where the layout has none.
    pub(super) alignment: usize,
    /// Choices of a token.
    pub(super) top_k: usize,
}

impl RawHandle {
    /// A handle that waits for its first update.
    pub(super) fn new(call: &'static str, raw_group: &Arc<RawGroup>, shape: HandleSizes) -> Result<Self> {
        let mut config: sys::ncclEpHandleConfig_t = blank();
        config.dispatch_output_per_expert_alignment = shape.alignment;
        let shape = result::RawHandleSizes { layout: shape.layout, config: &config, top_k: shape.top_k as c_int };
        // SAFETY: the group lives; the shape was checked.
        let bytes =
            raw_group.with(call, |library, _| unsafe { result::handle_mem_size(library, raw_group.raw, shape) })?;
        let mut memory = Tensor::empty(&raw_group.cuda, DType::U8, &[bytes])?;
        let mut tensor_descriptor = TensorDescriptor::of_mut(call, memory.view_mut())?;
        // SAFETY: as above; the memory has the size asked for and goes after the handle.
        let raw = raw_group.with(call, |library, _| unsafe {
            result::init_handle(library, raw_group.raw, shape, tensor_descriptor.pointer())
        })?;
        Ok(Self { raw_group: Arc::clone(raw_group), raw, memory })
    }

    /// As the library has it.
    pub(super) fn raw(&self) -> sys::ncclEpHandle_t {
        self.raw
    }

    /// Bytes of its memory on the GPU.
    pub(super) fn bytes(&self) -> usize {
        self.memory.view().count()
    }

    /// Runs calls with the handle, as [`RawGroup::with`].
    pub(super) fn with<T>(
        &mut self,
        call: &'static str,
        calls: impl FnOnce(&sys::Library, sys::ncclEpHandle_t, sys::cudaStream_t) -> NcclEpResult<T>,
    ) -> Result<T> {
        let raw = self.raw;
        self.raw_group.with(call, |library, stream| calls(library, raw, stream))
    }
}

impl Drop for RawHandle {
    fn drop(&mut self) {
        // Nothing can be reported from here. A handle of a communicator that is gone is only memory.
        // SAFETY: the handle lives and is not used again.
        let _ = self.with("Handle::drop", |library, raw, _| unsafe { result::handle_destroy(library, raw) });
    }
}

/// The tokens of `ids [T, K]`, I32 or I64, at most so many.
pub(super) fn check_ids(call: &'static str, ids: TensorRef<'_, Cuda>, (top_k, most): (usize, usize)) -> Result<usize> {
    let tokens = ids.rows();
    Error::check_shape(call, "ids", &[tokens, top_k], ids.dims())?;
    if !matches!(ids.dtype(), DType::I32 | DType::I64) {
        return Err(Error::invalid(call, "tensor ids", "i32 or i64", ids.dtype()));
    }
    if tokens > most {
        return Err(Error::invalid(call, "tensor ids", format!("at most {most} tokens"), tokens));
    }
    Ok(tokens)
}
