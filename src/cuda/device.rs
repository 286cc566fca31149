//! A GPU and its stream.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use crate::error::Result;
use crate::kernels::Origin;

use super::capture_state::CaptureState;
use super::context_kernels::{ContextKernels, Kernel};
use super::driver::driver;
use super::failure::FailureSources;
use super::heuristics;
use super::kernel_table::{Sm90Kernels, Table};
use super::memory::{Arena, Memory};
use super::status_words::StatusWords;

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
    /// Most bytes of quantized weights that are 16-bit at a time.
    weight_scratch: usize,
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
    /// Its L2 holds less than `SMALL_L2`.
    pub(super) small_l2: bool,
    /// The GPU follows the host's page tables (Grace), and so reads any memory of the host itself.
    pub(super) host_tables: bool,
    /// Words that kernels raise errors in (`report`'s).
    pub(super) status: CUdeviceptr,
    pub(super) report: StatusWords,
    /// Where buffers come from: the workspace, or a graph's own while one is captured.
    arena: RwLock<Arc<Arena>>,
    pub(super) capture_state: CaptureState,
    /// The ranks and layers that calls were made for, by the numbers that kernels know them by.
    pub(super) origins: Mutex<Vec<Origin>>,
    /// Sources of failures from outside that may spoil the work on the stream.
    pub(super) failure_sources: FailureSources,
}

impl CudaState {
    /// A stream of its context, with the context's kernels. Status words and workspace are new; the words are yet to be
    /// cleared.
    pub(super) fn new(stream: Arc<CudaStream>, functions: Arc<ContextKernels>) -> Result<Self> {
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
        let l2 = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
            .map_err(driver(CALL, "ask for the size of L2"))?;
        let small_l2 = usize::try_from(l2).is_ok_and(|bytes| bytes < heuristics::SMALL_L2);
        let report = StatusWords::new(&stream, &functions.stuck)?;
        let arena = RwLock::new(Arena::new(&stream, &functions.stuck)?);
        let status = report.words;
        let (failure_sources, origins, capture_state) =
            (FailureSources::default(), Mutex::default(), CaptureState::default());
        Ok(Self {
            functions,
            stream,
            context,
            sm_count,
            small_l2,
            host_tables,
            status,
            report,
            arena,
            capture_state,
            origins,
            failure_sources,
        })
    }

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
            // Kernels that may still run some day keep the context that they run in.
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

impl Cuda {
    pub(super) fn of(inner: CudaState) -> Self {
        Self {
            inner: Arc::new(inner),
            poison: false,
            portable: false,
            batch_invariant: false,
            weight_scratch: heuristics::WEIGHT_SCRATCH,
            reserved_sms: 0,
        }
    }

    /// The same settings over another stream.
    pub(super) fn on_stream_of(&self, other: &Self) -> Self {
        Self { inner: Arc::clone(&other.inner), ..self.clone() }
    }

    /// The same device, filling every buffer that it allocates with the byte 0xFF: NaN in all floating types, −1 in
    /// the integer types. For tests.
    pub fn poisoning(&self) -> Self {
        Self { poison: true, ..self.clone() }
    }

    /// The same device, filling none.
    pub(super) fn without_poison(&self) -> Self {
        Self { poison: false, ..self.clone() }
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
    /// quantized weights too; for all others it has anyway. With NVFP4 and MXFP4 the kernel for many rows then serves few
    /// rows as well, which costs time in decoding; with fp8 blocks on Hopper the one for few rows serves many
    /// (`docs/invariance.md`).
    pub fn batch_invariant(&self) -> Self {
        Self { batch_invariant: true, ..self.clone() }
    }

    /// Whether no kernel may be chosen by the number of rows where kernels sum in different orders.
    pub(super) fn is_batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// The same device, on which products that de-quantize experts' weights first (`docs/quantization.md`) have at most so
    /// many bytes of them in 16 bits at a time, but one expert's at least; 512 MiB unless it is set. Less memory takes
    /// more time; results are the same to the bit.
    pub fn limiting_weight_scratch(&self, bytes: usize) -> Self {
        Self { weight_scratch: bytes, ..self.clone() }
    }

    /// Most bytes of quantized weights that are 16-bit at a time, of more than one expert.
    pub(super) fn weight_scratch(&self) -> usize {
        self.weight_scratch
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

    /// The same device, reserving so many more SMs.
    pub(super) fn reserving_more(&self, sms: usize) -> Self {
        self.reserving_sms(self.reserved_sms.saturating_add(sms))
    }

    /// SMs that a product may fill which waits for its rows; 0: products here wait for none.
    #[cfg(feature = "nccl")]
    pub(crate) fn sms_of_waiting_products(&self) -> usize {
        if self.sm90() { self.usable_sms() } else { 0 }
    }

    /// Whether some are reserved.
    pub(super) fn reserves_sms(&self) -> bool {
        self.reserved_sms > 0
    }

    /// Whether work on `stream` is in the order of this device's.
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

    /// Most bytes of the GPU that the driver has had reserved for this process's tensors so far: the highest marks of the
    /// GPU's own pool, in which a host framework's tensors are, of this device's workspace and of graphs, added up. An
    /// upper bound, as the three need not have been at their highest at once. Contexts, kernels' code and a communication
    /// library's buffers are not in it.
    ///
    /// # Errors
    /// A driver's error.
    pub fn highest_reserved(&self) -> Result<u64> {
        const CALL: &str = "Cuda::highest_reserved";
        self.bind(CALL)?;
        self.inner.arena().highest_reserved().map_err(driver(CALL, "ask for the memory of pools and graphs"))
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
            self.inner.failure_sources.check()?;
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
