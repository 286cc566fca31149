//! A communicator's watchdog: one thread that sees every collective end, or ends the communicator.
//!
//! A collective whose peer is gone never ends by itself, and the host may be waiting for it inside the driver, or
//! inside NCCL, which connects ranks at the first use of a way between them. So the thread looks at the oldest
//! collective that has not ended: its time, what the library reports, what other ranks have posted. The first failure
//! is kept in the [`Link`], for every later call and every wait of the device, before the communicator is aborted,
//! which lets the waits return.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{CommError, Result};

use super::link::Link;
use super::notices::{Notices, Subject};

/// Pause between two looks at a collective that runs.
const LOOK: Duration = Duration::from_millis(2);

/// Work that was enqueued.
pub(super) trait Work: Send {
    /// Whether it has ended; an error where the device has failed.
    fn ended(&self) -> std::result::Result<bool, String>;
}

/// One collective that runs.
struct Running {
    subject: Subject,
    timeout: Duration,
    /// When it was enqueued, or became the oldest: what is behind another does not run yet.
    since: Instant,
    /// `None` while the host is inside NCCL.
    work: Option<Box<dyn Work>>,
}

/// What tells the other ranks that this one takes part in nothing any more, by the first and the last collective that have
/// not ended; and, where its own part of one is what failed, of which and why: they may be inside it, and wait for what
/// will not come. Returns when the communicator may be aborted.
pub(super) type Farewell = Box<dyn Fn(Option<(Subject, &str)>, (u64, u64)) + Send>;

struct Shared {
    link: Arc<Link>,
    notices: Arc<Notices>,
    queue: Mutex<Queue>,
    changed: Condvar,
    farewell: Mutex<Farewell>,
}

#[derive(Default)]
struct Queue {
    running: VecDeque<Running>,
    /// Work that has ended, for the rank's own thread to drop: the driver frees an event under a lock that a thread
    /// which waits for the GPU may hold, and this one must not wait for that.
    spent: Vec<Box<dyn Work>>,
    closed: bool,
}

/// The watchdog's handle. Dropping it waits until every collective has ended, one way or the other, or the communicator has.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch {{ running: {} }}", self.shared.lock().running.len())
    }
}

impl Watch {
    pub(super) fn start(link: Arc<Link>, notices: Arc<Notices>, farewell: Farewell) -> Result<Self> {
        let name = format!("nccl-watch-{}", link.rank);
        let (queue, changed, farewell) = (Mutex::default(), Condvar::new(), Mutex::new(farewell));
        let shared = Arc::new(Shared { link, notices, queue, changed, farewell });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(name).spawn(move || own.run());
        Ok(Self { shared, thread: Some(thread.map_err(|e| super::system("start a thread", e))?) })
    }

    /// The host is about to enter NCCL for a collective.
    pub(super) fn enter(&self, subject: Subject, timeout: Duration) {
        let mut queue = self.shared.lock();
        queue.running.push_back(Running { subject, timeout, since: Instant::now(), work: None });
        let spent = std::mem::take(&mut queue.spent);
        drop(queue);
        self.shared.changed.notify_one();
        drop(spent);
    }

    /// Number of the oldest collective that has not ended, the one included that the host is inside of.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.shared.lock().running.front().map(|running| running.subject.number)
    }

    /// The host is out again, and has enqueued this; `None`: nothing that is to be watched.
    pub(super) fn entered(&self, work: Option<Box<dyn Work>>) {
        let mut queue = self.shared.lock();
        match (queue.running.back_mut(), &work) {
            (Some(last), Some(_)) => last.work = work,
            (Some(last), None) if last.work.is_none() => drop(queue.running.pop_back()),
            _ => {}
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported; nothing can be done about it here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.lock();
        loop {
            match self.look(&mut queue) {
                Some(failure) => {
                    // First the reason, then what lets the waits return.
                    let failure = self.link.fail(failure);
                    tracing::error!(rank = self.link.rank, %failure, "communicator aborted");
                    let number = |running: Option<&Running>| running.map_or(0, |running| running.subject.number);
                    let unfinished = (number(queue.running.front()), number(queue.running.back()));
                    let broken = match (&failure, queue.running.front()) {
                        (CommError::Transport { reason, .. }, Some(oldest)) => Some((oldest.subject, &reason[..])),
                        _ => None,
                    };
                    let Queue { running, spent, .. } = &mut *queue;
                    spent.extend(running.drain(..).filter_map(|r| r.work));
                    drop(queue);
                    self.farewell.lock().unwrap_or_else(PoisonError::into_inner)(broken, unfinished);
                    self.link.abort();
                    return;
                }
                None if queue.running.is_empty() && queue.closed => return,
                None => {}
            }
            // A poisoned lock carries no information: the queue is whole between statements.
            queue = match queue.running.is_empty() {
                true => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                false => self.changed.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Forgets what has ended; says why the oldest that has not will not.
    fn look(&self, queue: &mut Queue) -> Option<CommError> {
        while let Some(oldest) = queue.running.front() {
            let Subject { rank, operation, tag, .. } = oldest.subject;
            match oldest.work.as_ref().map_or(Ok(false), |work| work.ended()) {
                Ok(true) => {
                    let ended = queue.running.pop_front();
                    queue.spent.extend(ended.and_then(|r| r.work));
                    if let Some(next) = queue.running.front_mut() {
                        next.since = Instant::now();
                    }
                    continue;
                }
                Ok(false) | Err(_) if self.link.is_over() => {
                    // The rank's own thread has ended the communicator, and told the others.
                    let Queue { running, spent, .. } = queue;
                    spent.extend(running.drain(..).filter_map(|r| r.work));
                    return None;
                }
                Ok(false) => {}
                Err(reason) => return Some(CommError::Transport { operation, tag, rank, reason }),
            }
            if let Some(fault) = self.notices.fault(oldest.subject) {
                return Some(fault);
            }
            if let Some(error) = self.link.asynchronous() {
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
