//! The end of a communicator, whatever its calls, its stream and its peers do.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::StuckFlag;
use crate::cuda::peers::HostWords;

use crate::nccl::ffi::sys::{CommPtr, Functions, Status};
use crate::nccl::ffi::windows::RegisteredWindow;

use super::{CommHandle, LiveComm, PAUSE, lock};

/// How long the end of a communicator waits for a call that is under way, before it ends that from outside.
const GRACE: Duration = Duration::from_millis(200);
/// How long a stream is given to end after its communicator.
const ABORTED: Duration = Duration::from_secs(3);
/// Longest wait for the end itself.
const END: Duration = Duration::from_secs(10);

impl CommHandle {
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
