//! A communicator's watchdog: one thread that sees every collective end, or ends the communicator.
//!
//! A collective whose peer is gone never ends by itself, and the host may be waiting for it inside the driver, or
//! inside NCCL, which connects ranks at the first use of a way between them. So the thread looks at the oldest
//! collective that has not ended: its time, what the library reports, what other ranks have posted. The first failure
//! is kept in the [`CommHandle`], for every later call and every wait of the device, before the communicator is
//! aborted, which lets the waits return.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{CommError, Result};

use crate::nccl::control::peer_events::{CollectiveInfo, PeerEvents};
use crate::nccl::ffi::comm_handle::{CommHandle, Work};

/// Pause between two looks at a collective that runs.
const LOOK: Duration = Duration::from_millis(2);

/// How much longer than the communicator's timeout it waits where kernels may wait for peers themselves: they give up
/// first, and their memory is in use until then.
pub(in crate::nccl) const KERNEL_MARGIN: Duration = Duration::from_secs(1);

/// One collective that runs.
struct RunningCollective {
    subject: CollectiveInfo,
    timeout: Duration,
    /// When it was enqueued, or became the oldest: what is behind another does not run yet.
    since: Instant,
    /// `None` while the host is inside NCCL.
    work: Option<Box<dyn Work>>,
}

/// A function that tells the other ranks that this one takes part in nothing any more, by the first and the last
/// collective that have not ended; and, where its own part of one is what failed, of which and why: they may be inside
/// it, and wait for what will not come. Returns when the communicator may be aborted.
pub(in crate::nccl) type EndNotice = Box<dyn Fn(Option<(CollectiveInfo, &str)>, (u64, u64)) + Send>;

struct WatchShared {
    comm_handle: Arc<CommHandle>,
    peer_events: Arc<PeerEvents>,
    queue: Mutex<WatchQueue>,
    wakeup: Condvar,
    end_notice: Mutex<EndNotice>,
}

#[derive(Default)]
struct WatchQueue {
    running: VecDeque<RunningCollective>,
    /// Work that has ended, for the rank's own thread to drop: the driver frees an event under a lock that a thread
    /// which waits for the GPU may hold, and this one must not wait for that.
    spent: Vec<Box<dyn Work>>,
    closed: bool,
}

/// The watchdog's handle. Dropping it waits until every collective has ended, one way or the other, or the communicator
/// has.
pub(in crate::nccl) struct Watchdog {
    shared: Arc<WatchShared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watchdog {{ running: {} }}", self.shared.lock().running.len())
    }
}

impl Watchdog {
    pub(in crate::nccl) fn start(
        comm_handle: Arc<CommHandle>,
        peer_events: Arc<PeerEvents>,
        end_notice: EndNotice,
    ) -> Result<Self> {
        let name = format!("nccl-watch-{}", comm_handle.rank);
        let (queue, wakeup, end_notice) = (Mutex::default(), Condvar::new(), Mutex::new(end_notice));
        let shared = Arc::new(WatchShared { comm_handle, peer_events, queue, wakeup, end_notice });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name).spawn(move || own.run());
        Ok(Self { shared, thread: Some(thread.map_err(|e| crate::nccl::system("start a thread", e))?) })
    }

    /// The host is about to enter NCCL for a collective.
    pub(in crate::nccl) fn enter(&self, subject: CollectiveInfo, timeout: Duration) {
        let mut queue = self.shared.lock();
        queue.running.push_back(RunningCollective { subject, timeout, since: Instant::now(), work: None });
        let spent = std::mem::take(&mut queue.spent);
        drop(queue);
        self.shared.wakeup.notify_one();
        drop(spent);
    }

    /// For what is watched beside the rank's own calls.
    pub(in crate::nccl) fn handle(&self) -> WatchHandle {
        WatchHandle(Arc::clone(&self.shared))
    }

    /// Number of the oldest collective that has not ended, the one included that the host is inside of.
    pub(in crate::nccl) fn oldest(&self) -> Option<u64> {
        self.shared.lock().running.front().map(|running| running.subject.number)
    }

    /// The host is out again, and has enqueued this; `None`: nothing that is to be watched.
    pub(in crate::nccl) fn entered(&self, work: Option<Box<dyn Work>>) {
        let mut queue = self.shared.lock();
        // Behind it may stand what has been watched since.
        let inside = queue.running.iter().rposition(|running| running.work.is_none());
        let left = match (inside, work) {
            (Some(at), Some(work)) => {
                queue.running[at].work = Some(work);
                None
            }
            (Some(at), None) => {
                queue.running.remove(at);
                None
            }
            (None, work) => work,
        };
        // The driver frees an event under a lock of its own.
        drop(queue);
        drop(left);
    }
}

/// A place to have work watched.
pub(in crate::nccl) struct WatchHandle(Arc<WatchShared>);

impl WatchHandle {
    /// Watches work that has been enqueued, behind what is watched already.
    pub(in crate::nccl) fn watch(&self, subject: CollectiveInfo, timeout: Duration, work: Box<dyn Work>) {
        let mut queue = self.0.lock();
        queue.running.push_back(RunningCollective { subject, timeout, since: Instant::now(), work: Some(work) });
        let spent = std::mem::take(&mut queue.spent);
        drop(queue);
        self.0.wakeup.notify_one();
        drop(spent);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.wakeup.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported; nothing can be done about it here.
            let _ = thread.join();
        }
    }
}

impl WatchShared {
    fn lock(&self) -> MutexGuard<'_, WatchQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.lock();
        loop {
            match self.check_running(&mut queue) {
                Some(failure) => {
                    // First the reason, then what lets the waits return.
                    let failure = self.comm_handle.fail(failure);
                    tracing::error!(rank = self.comm_handle.rank, %failure, "communicator aborted");
                    let number =
                        |running: Option<&RunningCollective>| running.map_or(0, |running| running.subject.number);
                    let unfinished = (number(queue.running.front()), number(queue.running.back()));
                    let broken = match (&failure, queue.running.front()) {
                        (CommError::Transport { reason, .. }, Some(oldest)) => Some((oldest.subject, &reason[..])),
                        _ => None,
                    };
                    let WatchQueue { running, spent, .. } = &mut *queue;
                    spent.extend(running.drain(..).filter_map(|r| r.work));
                    drop(queue);
                    self.end_notice.lock().unwrap_or_else(PoisonError::into_inner)(broken, unfinished);
                    self.comm_handle.abort();
                    return;
                }
                None if queue.running.is_empty() && queue.closed => return,
                None => {}
            }
            // A poisoned lock carries no information: the queue is whole between statements.
            queue = match queue.running.is_empty() {
                true => self.wakeup.wait(queue).unwrap_or_else(PoisonError::into_inner),
                false => self.wakeup.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Forgets what has ended; says why the oldest that has not will not.
    fn check_running(&self, queue: &mut WatchQueue) -> Option<CommError> {
        while let Some(oldest) = queue.running.front() {
            let CollectiveInfo { rank, operation, tag, .. } = oldest.subject;
            match oldest.work.as_ref().map_or(Ok(false), |work| work.ended()) {
                Ok(true) => {
                    let ended = queue.running.pop_front();
                    queue.spent.extend(ended.and_then(|r| r.work));
                    if let Some(next) = queue.running.front_mut() {
                        next.since = Instant::now();
                    }
                    continue;
                }
                Ok(false) | Err(_) if self.comm_handle.is_over() => {
                    // The rank's own thread has ended the communicator, and told the others.
                    let WatchQueue { running, spent, .. } = queue;
                    spent.extend(running.drain(..).filter_map(|r| r.work));
                    return None;
                }
                Ok(false) => {}
                Err(reason) => return Some(CommError::Transport { operation, tag, rank, reason }),
            }
            if let Some(fault) = self.peer_events.fault(oldest.subject) {
                return Some(fault);
            }
            if let Some(error) = self.comm_handle.asynchronous() {
                return Some(CommError::Transport { operation, tag, rank, reason: error.to_string() });
            }
            if oldest.since.elapsed() >= oldest.timeout {
                let timeout = oldest.timeout;
                return Some(CommError::Timeout { operation, tag, rank, missing: Vec::new(), timeout });
            }
            return None;
        }
        None
    }
}
