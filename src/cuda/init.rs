//! GPUs and streams, opened.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use crate::error::{Error, Result};

use super::context_kernels::ContextKernels;
use super::device::{Cuda, CudaState};
use super::driver::driver;

/// `CU_STREAM_PER_THREAD`. Buffers freed on another thread than the one that last used them would not be behind its
/// work.
const PER_THREAD: sys::CUstream = 0x2 as sys::CUstream;

impl Cuda {
    /// GPU `ordinal` of this process, its primary context, and a stream of its own.
    ///
    /// # Errors
    /// [`Error::Device`]: no driver, no such GPU, or no kernels for it in this build.
    pub fn new(ordinal: usize) -> Result<Self> {
        const CALL: &str = "Cuda::new";
        // SAFETY: libcuda's initializers are the driver's own; nothing of it is called here.
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
    /// [`Error::Device`]: no kernels for the GPU in this build, or one without memory pools. [`Error::Invalid`]: the
    /// per-thread default stream, which is another stream on every thread.
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
        let functions = Arc::new(ContextKernels::load(&context)?);
        Self::with(stream, functions)
    }

    /// The same GPU with another stream, whose work is in no order with this one's but for events
    /// ([`record`](Self::record), [`Kernels::wait`](crate::kernels::Kernels::wait)), and memory of its own. Where both
    /// have work, blocks of this stream's kernels go first: it is for collectives beside the computation.
    ///
    /// # Errors
    /// A driver's error.
    pub fn with_new_stream(&self) -> Result<Self> {
        const CALL: &str = "Cuda::with_new_stream";
        let CudaState { context, functions, .. } = &*self.inner;
        self.bind(CALL)?;
        let (_, first) = result::stream::get_priority_range().map_err(driver(CALL, "ask for priorities"))?;
        let stream = context.new_stream_with_priority(first).map_err(driver(CALL, "create a stream"))?;
        Ok(self.on_stream_of(&Self::with(stream, Arc::clone(functions))?))
    }

    fn with(stream: Arc<CudaStream>, functions: Arc<ContextKernels>) -> Result<Self> {
        let cuda = Self::of(CudaState::new(stream, functions)?);
        cuda.reset_status("Cuda::on")?;
        Ok(cuda)
    }
}
