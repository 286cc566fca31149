//! A rank's `ncclComm_t`: every call of it passes here, so that it is never used while or after it is freed.

mod end;
mod join;
mod windows;

use std::fmt;
use std::sync::atomic::AtomicPtr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Duration;

use crate::cuda::peers::HostWords;
use crate::cuda::{FailureSource, StuckFlag};
use crate::error::{CommError, Error};

use crate::nccl::ffi::sys::{CommPtr, Functions, RawComm, Status};
use crate::nccl::ffi::windows::RegisteredWindow;
use crate::nccl::{NcclError, NcclLibrary, NcclOptions};

pub(in crate::nccl) use join::PendingJoin;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// One rank's communicator as the library has it.
pub(in crate::nccl) struct CommHandle {
    library: NcclLibrary,
    pub(in crate::nccl) rank: usize,
    pub(in crate::nccl) size: usize,
    /// Held during every call: `Some` while the communicator lives.
    gate: Mutex<Option<LiveComm>>,
    /// The same pointer, for the one call that may be made while another is stuck.
    shared: AtomicPtr<RawComm>,
    /// The first failure.
    failure: Mutex<Option<CommError>>,
    /// Whether collectives over windows are the copy engines'.
    pub(in crate::nccl) copy_engines: bool,
    /// What collectives may take of the GPU.
    pub(in crate::nccl) options: NcclOptions,
    /// Windows that stay as long as the communicator does.
    windows: Mutex<Vec<RegisteredWindow>>,
    /// The GPUs of its ranks in this process. Where one is stuck, NCCL's end of a communicator would free memory, wait
    /// for that GPU, and never return: what there is stays.
    gpus: OnceLock<Vec<StuckFlag>>,
    /// Marks the end of what its stream has been given.
    mark: OnceLock<StreamMark>,
    /// What ends the waits of this crate's own kernels for peers.
    stops: Mutex<Vec<Weak<HostWords>>>,
}

/// Work that was enqueued.
pub(in crate::nccl) trait Work: Send {
    /// Whether it has ended; an error where the device has failed.
    fn ended(&self) -> std::result::Result<bool, String>;
}

/// A function that marks the end of the work that a stream has been given; `None`: the device has failed.
pub(in crate::nccl) type StreamMark = Box<dyn Fn() -> Option<Box<dyn Work>> + Send + Sync>;

/// A pointer that the gate guards.
#[derive(Debug, Clone, Copy)]
struct LiveComm(CommPtr);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the gate sees to.
unsafe impl Send for LiveComm {}

impl fmt::Debug for CommHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, .. } = self;
        write!(f, "CommHandle {{ rank: {rank}, size: {size}, failure: {:?} }}", self.failure())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A rank of a communicator to be.
#[derive(Debug, Clone, Copy)]
pub(in crate::nccl) struct RankPlace {
    pub(in crate::nccl) rank: usize,
    pub(in crate::nccl) size: usize,
    /// Collectives over windows are to be the copy engines'.
    pub(in crate::nccl) copy_engines: bool,
    /// What collectives may take of the GPU.
    pub(in crate::nccl) options: NcclOptions,
}

impl CommHandle {
    /// Takes over a communicator.
    pub(in crate::nccl) fn new(
        library: NcclLibrary,
        RankPlace { rank, size, copy_engines, options }: RankPlace,
        comm: CommPtr,
    ) -> Self {
        let (gate, shared) = (Mutex::new(Some(LiveComm(comm))), AtomicPtr::new(comm));
        let (failure, windows, gpus, mark) = (Mutex::new(None), Mutex::default(), OnceLock::new(), OnceLock::new());
        let stops = Mutex::default();
        Self { library, rank, size, gate, shared, failure, copy_engines, options, windows, gpus, mark, stops }
    }

    /// Says on which GPUs of this process its ranks are; the first time counts.
    pub(in crate::nccl) fn on(&self, gpus: impl FnOnce() -> Vec<StuckFlag>) {
        self.gpus.get_or_init(gpus);
    }

    pub(in crate::nccl) fn gpus(&self) -> &[StuckFlag] {
        self.gpus.get().map_or(&[], Vec::as_slice)
    }

    /// Says what marks the end of its stream's work; the first time counts.
    pub(in crate::nccl) fn marked(&self, mark: StreamMark) {
        self.mark.get_or_init(|| mark);
    }

    pub(in crate::nccl) fn library(&self) -> &NcclLibrary {
        &self.library
    }

    /// The first failure, if any.
    pub(in crate::nccl) fn failure(&self) -> Option<CommError> {
        lock(&self.failure).clone()
    }

    /// Keeps a failure if it is the first; returns the first.
    pub(in crate::nccl) fn fail(&self, error: CommError) -> CommError {
        lock(&self.failure).get_or_insert(error).clone()
    }

    /// Whether it has failed, and been ended or is being so. What it has enqueued may still run.
    pub(in crate::nccl) fn is_over(&self) -> bool {
        self.try_gate().is_some_and(|gate| gate.is_none()) && self.failure().is_some()
    }

    /// Runs calls of the library with the communicator, while nobody frees it. `None`: it has been freed.
    pub(in crate::nccl) fn with<T>(&self, calls: impl FnOnce(&Functions, CommPtr) -> T) -> Option<T> {
        let gate = lock(&self.gate);
        gate.map(|LiveComm(comm)| calls(self.library.functions(), comm))
    }

    /// One call that returns a status. `None`: the communicator has been freed.
    pub(in crate::nccl) fn call(
        &self,
        function: &'static str,
        call: impl FnOnce(&Functions, CommPtr) -> Status,
    ) -> Option<std::result::Result<(), NcclError>> {
        self.with(|functions, comm| {
            let status = call(functions, comm);
            self.library.check(function, comm, wait_until_done(functions, comm, status))
        })
    }

    /// The fault that the library has found since the last look; `None` where nothing, or where another call is under
    /// way.
    pub(in crate::nccl) fn asynchronous(&self) -> Option<NcclError> {
        let gate = self.try_gate()?;
        let LiveComm(comm) = (*gate)?;
        let mut found = Status::SUCCESS;
        // SAFETY: the communicator lives while the gate is held; the result is a local.
        let status = unsafe { (self.library.functions().comm_get_async_error)(comm, &raw mut found) };
        let found = if status == Status::SUCCESS { found } else { status };
        if found == Status::IN_PROGRESS {
            return None;
        }
        self.library.check("ncclCommGetAsyncError", comm, found).err()
    }

    /// The gate, where no call is under way.
    fn try_gate(&self) -> Option<MutexGuard<'_, Option<LiveComm>>> {
        match self.gate.try_lock() {
            Ok(gate) => Some(gate),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The status of a call when it is over. An environment that makes communicators return at once (NCCL_COMM_BLOCKING)
/// is waited for here.
fn wait_until_done(functions: &Functions, comm: CommPtr, status: Status) -> Status {
    let mut status = status;
    while status == Status::IN_PROGRESS && !comm.is_null() {
        thread::sleep(PAUSE / 20);
        // SAFETY: the communicator is the caller's; the result is a local.
        let asked = unsafe { (functions.comm_get_async_error)(comm, &raw mut status) };
        if asked != Status::SUCCESS {
            return asked;
        }
    }
    status
}

impl FailureSource for CommHandle {
    fn failure(&self) -> Option<Error> {
        CommHandle::failure(self).map(Error::from)
    }
}
