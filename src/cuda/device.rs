//! A GPU and its stream.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use crate::error::{Error, Result};
use crate::kernels::Origin;

use super::graph::Captures;
use super::kernel_table::{Sm90Kernels, Table};
use super::launch::{ContextKernels, Kernel};
use super::memory::{Arena, Memory};
use super::status::StatusWords;
use super::sync::FailureSource;

/// `CU_STREAM_PER_THREAD`. Buffers freed on another thread than the one that last used them would not be behind its
/// work.
const PER_THREAD: sys::CUstream = 0x2 as sys::CUstream;

/// A stream of a GPU with this crate's kernels loaded.
///
/// Making one, and dropping the last clone, is for a program's start and end, not for its steps: the driver then waits
/// for all work of the context, and launches of other threads may be held up until it is done.
#[derive(Clone)]
pub struct Cuda {
    pub(super) inner: Arc<CudaState>,
    poison: bool,
    portable: bool,
    /// Results of quantized experts do not depend on the number of rows.
    batch_invariant: bool,
    /// SMs that kernels leave alone which else fill the GPU.
    reserved_sms: usize,
}

// Fields are dropped in order: modules go before the context that holds them.
pub(super) struct CudaState {
    pub(super) functions: Arc<ContextKernels>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) context: Arc<CudaContext>,
    /// SMs: blocks of a persistent kernel.
    pub(super) sm_count: usize,
    /// The GPU follows the host's page tables (Grace), and so reads any memory of the host itself.
    pub(super) host_tables: bool,
    /// Words that kernels raise errors in (`report`'s).
    pub(super) status: CUdeviceptr,
    pub(super) report: StatusWords,
    /// Where buffers come from: the workspace, or a graph's own while one is recorded.
    arena: RwLock<Arc<Arena>>,
    /// A graph is being recorded.
    pub(super) capturing: AtomicBool,
    pub(super) captures: Captures,
    /// The ranks and layers that calls were made for, by the numbers that kernels know them by.
    pub(super) origins: Mutex<Vec<Origin>>,
    /// Sources of failures from outside that may spoil the work on the stream.
    pub(super) failure_sources: Mutex<Vec<Weak<dyn FailureSource>>>,
}

impl CudaState {
    pub(super) fn arena(&self) -> Arc<Arena> {
        Arc::clone(&self.arena.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn exchange_arena(&self, arena: Arc<Arena>) {
        *self.arena.write().unwrap_or_else(PoisonError::into_inner) = arena;
    }
}

// SAFETY: the functions are handles that the driver lets any thread use; the context is bound to the
// calling thread before each use; what happens on the stream is ordered by the driver.
unsafe impl Send for CudaState {}
// SAFETY: as above; what changes after construction is behind locks.
unsafe impl Sync for CudaState {}

impl Drop for CudaState {
    fn drop(&mut self) {
        if self.functions.stuck.is() {
            // What may still run some day keeps what it runs in.
            std::mem::forget((Arc::clone(&self.functions), Arc::clone(&self.stream), Arc::clone(&self.context)));
            return;
        }
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the stream is alive; kernels must not run on when their modules are unloaded.
            let _ = unsafe { result::stream::synchronize(self.stream.cu_stream()) };
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
        Ok(Self { inner: Self::with(stream, Arc::clone(functions))?.inner, ..self.clone() })
    }

    fn with(stream: Arc<CudaStream>, functions: Arc<ContextKernels>) -> Result<Self> {
        const CALL: &str = "Cuda::on";
        let context = Arc::clone(stream.context());
        let sm_count = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(driver(CALL, "ask for the number of SMs"))?;
        let sm_count = usize::try_from(sm_count).unwrap_or(1);
        let host_tables = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)
            .map_err(driver(CALL, "ask whether the GPU follows the host's page tables"))?
            != 0;
        let report = StatusWords::new(&stream, &functions.stuck)?;
        let arena = RwLock::new(Arena::new(&stream, &functions.stuck)?);
        let (status, capturing) = (report.words, AtomicBool::new(false));
        let (failure_sources, origins, captures) = (Mutex::default(), Mutex::default(), Captures::default());
        let inner = CudaState {
            functions,
            stream,
            context,
            sm_count,
            host_tables,
            status,
            report,
            arena,
            capturing,
            captures,
            origins,
            failure_sources,
        };
        let cuda =
            Self { inner: Arc::new(inner), poison: false, portable: false, batch_invariant: false, reserved_sms: 0 };
        cuda.reset_status(CALL)?;
        Ok(cuda)
    }

    /// The same device, filling every buffer that it allocates with the byte 0xFF: NaN in all floating types, −1 in
    /// the integer types. For tests.
    pub fn poisoning(&self) -> Self {
        Self { poison: true, ..self.clone() }
    }

    /// Whether buffers are filled.
    pub(super) fn poisons(&self) -> bool {
        self.poison
    }

    /// The same device without the kernels that one architecture alone has: what other GPUs run.
    pub fn portable(&self) -> Self {
        Self { portable: true, ..self.clone() }
    }

    /// The same device, on which a token's result has the same bits whatever other tokens a call holds for experts with
    /// NVFP4 and MXFP4 weights too; for all others it has anyway. The kernel for many rows then serves few rows as well,
    /// which costs time in decoding (`docs/invariance.md`).
    pub fn batch_invariant(&self) -> Self {
        Self { batch_invariant: true, ..self.clone() }
    }

    /// Whether no kernel may be chosen by the number of rows where kernels sum in different orders.
    pub(super) fn is_batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// The same device whose largest kernels leave so many of its SMs (at most all but two) to what runs on
    /// other streams meanwhile. They fill the GPU for as long as they run, so that collectives beside them would else
    /// wait for their end, and the next such kernel for the collectives'. Results are the same to the bit.
    pub fn reserving_sms(&self, sms: usize) -> Self {
        Self { reserved_sms: sms, ..self.clone() }
    }

    /// SMs that a kernel may fill.
    pub(super) fn usable_sms(&self) -> usize {
        self.inner.sm_count.saturating_sub(self.reserved_sms).max(self.inner.sm_count.min(2))
    }

    /// Whether work on `stream` is in the order of this device's.
    #[cfg(feature = "candle")]
    pub(crate) fn is_on(&self, stream: &CudaStream) -> bool {
        stream.cu_stream() == self.inner.stream.cu_stream() && stream.context() == &self.inner.context
    }

    /// The kernels of the GPU.
    pub(super) fn kernels(&self) -> &Table<Kernel> {
        &self.inner.functions.table
    }

    /// The Hopper kernels, where calls may take them.
    pub(super) fn sm90_kernels(&self) -> Option<&Sm90Kernels<Kernel>> {
        self.kernels().sm90.as_ref().filter(|_| !self.portable)
    }

    /// Whether calls may take the Hopper kernels.
    pub(super) fn sm90(&self) -> bool {
        self.sm90_kernels().is_some()
    }

    /// Shared memory that a block of the kernels of few rows with quantized weights may take.
    pub(super) fn decode_shared(&self) -> usize {
        self.inner.functions.decode_shared
    }

    /// The stream of all work on this device, for the host framework.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    /// Compute capability of the GPU.
    #[cfg(feature = "nccl-ep")]
    pub(crate) fn capability(&self) -> Result<(u32, u32)> {
        let found = self.inner.context.compute_capability();
        let (major, minor) = found.map_err(driver("Cuda::capability", "ask for the compute capability"))?;
        Ok((major as u32, minor as u32))
    }

    /// SMs of the GPU.
    #[cfg(feature = "nccl-ep")]
    pub(crate) fn sm_count(&self) -> usize {
        self.inner.sm_count
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
        self.faults("Cuda::check")
    }

    /// Memory that this device has taken: the workspace that its groups' layers share.
    pub fn memory(&self) -> Memory {
        self.inner.arena().memory()
    }

    /// Bytes of the GPU that nobody has taken, as the driver counts.
    ///
    /// # Errors
    /// A driver's error.
    pub fn free_memory(&self) -> Result<usize> {
        const CALL: &str = "Cuda::free_memory";
        self.bind(CALL)?;
        result::mem_get_info().map(|(free, _)| free).map_err(driver(CALL, "ask for free memory"))
    }

    /// Counts [`Memory::peak`] from what is in use now.
    pub fn reset_peak(&self) {
        self.inner.arena().reset_peak();
    }

    /// Gives memory that no tensor is in back to the driver.
    pub fn trim(&self) {
        self.inner.arena().trim();
    }

    /// Marks the end of the work enqueued so far.
    ///
    /// # Errors
    /// A driver's error.
    pub fn record(&self) -> Result<Event> {
        let event = self.inner.stream.record_event(None).map_err(driver("Cuda::record", "record an event"))?;
        Ok(Event(event))
    }

    /// Makes the context the thread's.
    ///
    /// # Errors
    /// A driver's error; where a guard has failed, its failure: what an aborted communicator takes with it may be what
    /// a kernel still reads, and then the whole context is lost with it.
    pub(crate) fn bind(&self, call: &'static str) -> Result<()> {
        self.inner.context.bind_to_thread().or_else(|error| {
            self.check_failure_sources()?;
            Err(driver(call, "bind the context")(error))
        })
    }
}

/// Completion of work on a [`Cuda`].
#[derive(Debug)]
pub struct Event(pub(super) CudaEvent);

impl Event {
    /// Whether the work has ended. Does not wait.
    ///
    /// # Errors
    /// A driver's error, also of that work.
    pub fn is_done(&self) -> Result<bool> {
        self.0.try_is_complete().map_err(driver("Event::is_done", "ask the event"))
    }
}
