//! A rank's `ncclComm_t`: every call of it passes here, so that it is never used while or after it is freed.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::peers::HostWords;
use crate::cuda::{FailureSource, StuckFlag};
use crate::error::{CommError, Error, Result};
use crate::ranks::UniqueId;

use crate::nccl::ffi::sys::{CommPtr, Config, Functions, RawComm, RawUniqueId, Status, WindowPtr};
use crate::nccl::ffi::windows::{EngineMemory, NcclWindow, RegisteredWindow};
use crate::nccl::{NcclError, NcclLibrary, NcclOptions};

/// How long the end of a communicator waits for a call that is under way, before it ends that from outside.
const GRACE: Duration = Duration::from_millis(200);
/// How long a stream is given to end after its communicator.
const ABORTED: Duration = Duration::from_secs(3);
/// Longest wait for the end itself.
const END: Duration = Duration::from_secs(10);
/// Pause between two looks at what the others say while a rank joins.
const LOOK: Duration = Duration::from_millis(5);
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

/// Result of an attempt to join; `None` where this rank is to be in no part.
type JoinResult = Result<Option<CommHandle>>;

/// A rank on its way into a communicator.
pub(in crate::nccl) struct PendingJoin {
    place: RankPlace,
    joined: mpsc::Receiver<JoinResult>,
}

impl PendingJoin {
    /// Runs a call that blocks until the peers make it too, and `ready` with what it made, on a thread of its own.
    fn start(
        library: NcclLibrary,
        (function, place): (&'static str, RankPlace),
        bind: impl FnOnce() -> Result<()> + Send + 'static,
        make: impl FnOnce() -> Option<(LiveComm, Status)> + Send + 'static,
        ready: impl FnOnce(&CommHandle) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let (send, joined) = mpsc::channel();
        let name = format!("nccl-init-{}", place.rank);
        let probe = move || {
            bind()?;
            let Some((LiveComm(comm), status)) = make() else {
                return Err(NcclError::Ended { rank: place.rank }.into());
            };
            library.check(function, std::ptr::null_mut(), status)?;
            // No communicator: this rank is to be in no part.
            let comm_handle = (!comm.is_null()).then(|| CommHandle::new(library, place, comm));
            comm_handle.as_ref().map_or(Ok(()), ready)?;
            Ok(comm_handle)
        };
        // Nobody listens any more where time is up.
        let run = move || drop(send.send(probe()));
        thread::Builder::new().name(name).spawn(run).map_err(|e| crate::nccl::system("start a thread", e))?;
        Ok(Self { place, joined })
    }

    /// Waits until all ranks have joined; `None` where this one is to be in no part. An attempt that does not end in
    /// time, or that `fault` says will not, is left behind with the thread it runs on: NCCL has no way to call it off.
    pub(in crate::nccl) fn finish(
        self,
        timeout: Duration,
        fault: impl Fn() -> Option<CommError>,
    ) -> Result<Option<CommHandle>> {
        let RankPlace { rank, size, .. } = self.place;
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match self.joined.recv_timeout(left.min(LOOK)) {
                Ok(joined) => return joined,
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => return Err(NcclError::Init { rank, size, timeout }.into()),
            }
            if let Some(fault) = fault() {
                return Err(fault.into());
            }
        }
    }
}

impl CommHandle {
    /// Begins to join a communicator. `bind` makes the rank's GPU the calling thread's; `ready` is the first user.
    pub(in crate::nccl) fn start(
        library: &NcclLibrary,
        id: UniqueId,
        place: RankPlace,
        bind: impl FnOnce() -> Result<()> + Send + 'static,
        ready: impl FnOnce(&CommHandle) -> Result<()> + Send + 'static,
    ) -> Result<PendingJoin> {
        let RankPlace { rank, size, copy_engines, options } = place;
        let (functions, id) = (*library.functions(), RawUniqueId { internal: id.map(|byte| byte as _) });
        let make = move || {
            let (mut comm, mut config) = (std::ptr::null_mut(), Config::of(copy_engines, options));
            // SAFETY: the result and the configuration are locals that outlive the call, which blocks.
            let status = unsafe {
                (functions.comm_init_rank_config)(&raw mut comm, size as i32, id, rank as i32, &raw mut config)
            };
            Some((LiveComm(comm), wait_until_done(&functions, comm, status)))
        };
        PendingJoin::start(library.clone(), ("ncclCommInitRankConfig", place), bind, make, ready)
    }

    /// Begins to join the part of this communicator that has a color, or none.
    pub(in crate::nccl) fn split(
        self: &Arc<Self>,
        place: RankPlace,
        (color, key): (i32, i32),
        bind: impl FnOnce() -> Result<()> + Send + 'static,
        ready: impl FnOnce(&CommHandle) -> Result<()> + Send + 'static,
    ) -> Result<PendingJoin> {
        let parent = Arc::clone(self);
        // No configuration means the parent's.
        let own = place.copy_engines || place.options != self.options;
        let make = move || {
            parent.with(|functions, comm| {
                let (mut child, mut config) = (std::ptr::null_mut(), Config::of(place.copy_engines, place.options));
                let config = if own { &raw mut config } else { std::ptr::null_mut() };
                // SAFETY: the communicator lives while the gate is held; result and configuration are locals.
                let status = unsafe { (functions.comm_split)(comm, color, key, &raw mut child, config) };
                (LiveComm(child), wait_until_done(functions, child, status))
            })
        };
        PendingJoin::start(self.library.clone(), ("ncclCommSplit", place), bind, make, ready)
    }

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

    /// All of them count as stuck where one is: what frees memory that another GPU can reach waits for that one too.
    fn is_stuck(&self) -> bool {
        self.gpus().iter().any(StuckFlag::is)
    }

    fn set_stuck(&self, stuck: bool) {
        self.gpus().iter().for_each(|gpu| gpu.set(stuck));
    }

    /// Whether the stream comes to an end after its communicator.
    fn stream_ends(&self) -> bool {
        let since = Instant::now();
        let Some(work) = self.mark.get().and_then(|mark| mark()) else { return true };
        while work.ended() == Ok(false) {
            if since.elapsed() >= ABORTED {
                return false;
            }
            thread::sleep(PAUSE);
        }
        true
    }

    /// Has these words stop kernels that may wait before the communicator ends.
    pub(in crate::nccl) fn stop_by(&self, words: &Arc<HostWords>) {
        let mut stops = lock(&self.stops);
        stops.retain(|stop| stop.strong_count() > 0);
        stops.push(Arc::downgrade(words));
    }

    /// Ends the waits of this crate's kernels; tells whether there may be some.
    fn stop_kernels(&self) -> bool {
        let stops: Vec<_> = lock(&self.stops).iter().filter_map(Weak::upgrade).collect();
        stops.iter().for_each(|stop| stop.stop());
        !stops.is_empty()
    }

    /// Keeps a window until it is taken back or the communicator ends.
    pub(in crate::nccl) fn retain_window(&self, window: RegisteredWindow) {
        lock(&self.windows).push(window);
    }

    /// The kept windows that nobody holds and all ranks' kernels may reach, of `bytes` and no more than twice that, as bits
    /// by their number, which all ranks have alike.
    pub(in crate::nccl) fn free_windows(&self, bytes: usize) -> u64 {
        let windows = lock(&self.windows);
        let fits = |window: &RegisteredWindow| {
            let free = window.shared && Arc::strong_count(&window.block) == 1;
            free && (bytes..=bytes.saturating_mul(2)).contains(&window.window.bytes())
        };
        windows.iter().take(64).enumerate().filter(|(_, window)| fits(window)).fold(0, |bits, (i, _)| bits | 1 << i)
    }

    /// The window of that number, and its memory.
    pub(in crate::nccl) fn window(&self, number: usize) -> Option<(NcclWindow, Arc<EngineMemory>)> {
        let windows = lock(&self.windows);
        let RegisteredWindow { window, block, .. } = windows.get(number)?;
        Some((NcclWindow::new(window.base(), window.bytes(), window.raw()), Arc::clone(block)))
    }

    /// Takes the window back that begins there.
    pub(in crate::nccl) fn take_window(&self, address: u64) -> Option<RegisteredWindow> {
        let mut windows = lock(&self.windows);
        let at = windows.iter().position(|window| window.window.base() == address)?;
        Some(windows.remove(at))
    }

    /// Whether memory lies in a window that is kept.
    pub(in crate::nccl) fn in_window(&self, address: u64, bytes: usize) -> bool {
        self.place(address, bytes).is_some()
    }

    /// The window that is kept of some memory, and where in it that lies.
    pub(in crate::nccl) fn place(&self, address: u64, bytes: usize) -> Option<(WindowPtr, usize)> {
        lock(&self.windows).iter().find_map(|window| window.place(address, bytes))
    }

    /// The same as a number, of which all ranks have the same for a place; 0: in no window.
    pub(in crate::nccl) fn place_number(&self, address: u64, bytes: usize) -> u64 {
        let windows = lock(&self.windows);
        let mut all = windows.iter().enumerate().filter(|_| bytes > 0);
        let place = all.find_map(|(i, window)| Some((i, window.place(address, bytes)?.1)));
        place.map_or(0, |(i, offset)| (i as u64 + 1) << 48 | offset as u64)
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

    /// Whether a call that is stuck can be ended beside it.
    pub(in crate::nccl) fn can_revoke(&self) -> bool {
        self.library.functions().comm_revoke.is_some()
    }

    /// Ends what runs and frees the communicator. A call that is stuck is ended first.
    pub(in crate::nccl) fn abort(&self) {
        let kernels = self.stop_kernels();
        let mut gate = match self.lock_within(GRACE) {
            Some(gate) => gate,
            None => {
                let comm = self.shared.load(Ordering::SeqCst);
                if let Some(revoke) = self.library.functions().comm_revoke.filter(|_| !comm.is_null()) {
                    // SAFETY: who frees the communicator holds the gate, and its holder is inside a call. NCCL allows
                    // this one beside another; it does not free.
                    unsafe { end(LiveComm(comm), move |comm| revoke(comm, 0)) };
                }
                // A library that cannot be called back keeps its call, and what is left is the call's.
                match self.lock_within(END) {
                    Some(gate) => gate,
                    None => {
                        self.set_stuck(true);
                        return;
                    }
                }
            }
        };
        let alive = gate.take();
        drop(gate);
        let Some(alive) = alive else { return };
        self.shared.store(std::ptr::null_mut(), Ordering::SeqCst);
        let Functions { comm_abort, comm_revoke, .. } = *self.library.functions();
        // It ends kernels, and frees nothing.
        // SAFETY: called below, with a communicator that lives.
        let revoke = move |comm| comm_revoke.map_or(Status::SUCCESS, |revoke| unsafe { revoke(comm, 0) });
        if self.is_stuck() {
            // SAFETY: the communicator lives, and with `gate` emptied nobody uses it again.
            drop(unsafe { ending(alive, revoke) });
            return;
        }
        if self.copy_engines || kernels {
            // Flags that copy engines wait for lie in memory, which no abort writes: until the stream is seen to end,
            // nothing that waits for the GPU may be dropped. This crate's kernels wait no more, but may still be storing
            // into peers' memory, which an abort takes away.
            self.set_stuck(true);
            // SAFETY: as above.
            let revoked = unsafe { ending(alive, revoke) };
            if !self.stream_ends() {
                return;
            }
            self.set_stuck(false);
            if revoked.is_none_or(|revoked| revoked.recv_timeout(END).is_err()) {
                return;
            }
        }
        // SAFETY: as above.
        unsafe { end(alive, move |comm| comm_abort(comm)) };
    }

    /// The gate, where no call is under way.
    fn try_gate(&self) -> Option<MutexGuard<'_, Option<LiveComm>>> {
        match self.gate.try_lock() {
            Ok(gate) => Some(gate),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn lock_within(&self, limit: Duration) -> Option<MutexGuard<'_, Option<LiveComm>>> {
        let until = Instant::now() + limit;
        loop {
            match self.try_gate() {
                Some(gate) => return Some(gate),
                None if Instant::now() >= until => return None,
                None => thread::sleep(PAUSE),
            }
        }
    }
}

/// Ends a communicator. What peers have left behind can hold up NCCL's own end: then it is left to itself. Nothing can
/// be reported from here.
///
/// # Safety
/// `how` may be called with the communicator, now and later.
unsafe fn end(comm: LiveComm, how: impl FnOnce(CommPtr) -> Status + Send + 'static) {
    // SAFETY: as the caller promises.
    if let Some(ended) = unsafe { ending(comm, how) } {
        let _ = ended.recv_timeout(END);
    }
}

/// Begins to; `None`: there is no thread to be had.
///
/// # Safety
/// As [`end`].
unsafe fn ending(comm: LiveComm, how: impl FnOnce(CommPtr) -> Status + Send + 'static) -> Option<mpsc::Receiver<()>> {
    let (send, ended) = mpsc::channel();
    let run = move || {
        let LiveComm(comm) = { comm };
        let _ = how(comm);
        // Nobody listens any more where time is up.
        let _ = send.send(());
    };
    thread::Builder::new().name("nccl-end".to_string()).spawn(run).ok().map(|_| ended)
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

impl Drop for CommHandle {
    fn drop(&mut self) {
        let failed = self.failure().is_some();
        let alive = lock(&self.gate).take();
        // Until what reads and writes them is known to have ended, nobody gets their memory.
        let windows = ManuallyDrop::new(std::mem::take(&mut *lock(&self.windows)));
        if let Some(alive) = alive.filter(|_| !self.is_stuck()) {
            let functions = *self.library.functions();
            // Work that a peer will never join in is not waited for.
            let how = if failed { functions.comm_abort } else { functions.comm_destroy };
            let run = move |comm| {
                // On the thread that ends the communicator, for which `end` waits so long and no longer.
                let free = !failed && RegisteredWindow::end(&windows, &functions, comm);
                // SAFETY: the communicator lives and nobody else can use it any more.
                let status = unsafe { how(comm) };
                if free {
                    drop(ManuallyDrop::into_inner(windows));
                }
                status
            };
            // SAFETY: as above.
            unsafe { end(alive, run) };
        }
    }
}
