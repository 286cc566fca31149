//! What a GPU has been given of a communicator, as its watchdog sees it: collectives, and replays of graphs that have some
//! among them, each of which is counted and watched as one.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::comm::{Op, Tag};
use crate::cuda::{Cuda, Event, ReplayGate};
use crate::error::{CommError, Result};

use crate::nccl::comm::session::Session;
use crate::nccl::control::call_count::CallCount;
use crate::nccl::control::peer_events::{CollectiveInfo, REPLAY};
use crate::nccl::control::watchdog::{KERNEL_MARGIN, WatchHandle};
use crate::nccl::ffi::comm_handle::{CommHandle, Work};

/// Of a launch that is not watched yet.
const NO_TAG: Tag = Tag { layer: 0, op: Op::User, sequence: 0 };

/// Work on a GPU up to an event.
struct StreamWork {
    cuda: Cuda,
    event: Event,
}

impl Work for StreamWork {
    fn ended(&self) -> std::result::Result<bool, String> {
        self.cuda.bind("watch").and_then(|()| self.event.is_done()).map_err(|e| e.to_string())
    }
}

/// The watched work that a GPU has been given; not inside a capture, which runs later and any number of
/// times.
pub(in crate::nccl) fn work_so_far(cuda: &Cuda) -> Result<Option<Box<dyn Work>>> {
    Ok(match cuda.is_capturing()? {
        true => None,
        false => Some(Box::new(StreamWork { event: cuda.record()?, cuda: cuda.clone() })),
    })
}

/// Replays between their beginning and their watch, which a communicator that is dropped waits for.
#[derive(Debug, Default)]
struct ReplayDoor {
    state: Mutex<DoorState>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct DoorState {
    closed: bool,
    inside: usize,
}

impl ReplayDoor {
    fn lock(&self) -> MutexGuard<'_, DoorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more is inside, unless it is closed.
    fn enter(&self) -> bool {
        let mut state = self.lock();
        state.inside += usize::from(!state.closed);
        !state.closed
    }

    fn exit(&self) {
        self.lock().inside -= 1;
        self.left.notify_all();
    }

    /// Lets no more in, and waits until all have left. A replay inside may wait for room on its stream, until what is there
    /// ends: by itself, or by the communicator's watchdog, which therefore is to be there still.
    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while state.inside > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What a rank's replays pass, and who watches them. It ends with the communicator, which alone holds it, but for replays
/// that have come through its door.
pub(in crate::nccl) struct Replays {
    cuda: Cuda,
    comm_handle: Arc<CommHandle>,
    timeout: Duration,
    count: Arc<CallCount>,
    watch: WatchHandle,
    door: ReplayDoor,
    /// Whether a replay is one of the ranks' common calls.
    counts: AtomicBool,
}

impl fmt::Debug for Replays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replays").field("door", &self.door).finish_non_exhaustive()
    }
}

impl Replays {
    /// Those of a session's communicator; `None` where the session is closed.
    pub(in crate::nccl) fn of(session: &Session, cuda: &Cuda) -> Option<Self> {
        let (comm_handle, count) = (Arc::clone(&session.comm_handle), Arc::clone(&session.count));
        let (timeout, watch, door) = (session.timeout, session.watch()?, ReplayDoor::default());
        let counts = AtomicBool::new(true);
        Some(Self { cuda: cuda.clone(), comm_handle, timeout, count, watch, door, counts })
    }

    /// Whether every rank replays as often as each other from here on: where one may not, nobody counts or watches it.
    pub(in crate::nccl) fn count_replays(&self, counts: bool) {
        self.counts.store(counts, Ordering::SeqCst);
    }

    /// Lets no more replays pass, and waits until those that have are watched; before the session is closed.
    pub(in crate::nccl) fn close(&self) {
        self.door.close();
    }
}

impl ReplayGate for Replays {
    fn enter(&self) -> bool {
        self.door.enter()
    }

    fn exit(&self) {
        self.door.exit();
    }

    fn pass(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let (operation, tag, rank) = (REPLAY, NO_TAG, self.comm_handle.rank);
        let reason = || "the communicator has ended".to_string();
        let ended = || CommError::Poisoned { operation, tag, rank, reason: reason() };
        let refused = || self.comm_handle.failure().map_or(Ok(()), |failure| Err(failure.into()));
        // An abort takes memory that the graph's collectives use, and waits for this. A launch blocks where the stream's queue
        // is full, until what it waits for ends: only a library that ends kernels beside a call (2.29) may be kept out.
        let launched = match self.comm_handle.can_revoke() {
            true => self.comm_handle.with(|_, _| refused().and_then(|()| launch())),
            false => self.comm_handle.with(|_, _| refused()).map(|ready| ready.and_then(|()| launch())),
        };
        launched.unwrap_or_else(|| Err(self.comm_handle.failure().unwrap_or_else(ended).into()))
    }

    fn replayed(&self) -> Result<()> {
        if !self.counts.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Some(work) = work_so_far(&self.cuda)? else { return Ok(()) };
        // The other ranks replay as often, so that a replay has one number on all.
        let number = self.count.call();
        self.count.enqueued(number);
        let tag = Tag { sequence: number, ..NO_TAG };
        let subject = CollectiveInfo { rank: self.comm_handle.rank, number, operation: REPLAY, tag };
        self.watch.watch(subject, self.timeout + KERNEL_MARGIN, work);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_door_closes_behind_those_inside() {
        let (door, left) = (ReplayDoor::default(), AtomicBool::new(false));
        assert!(door.enter() && door.enter());
        door.exit();
        thread::scope(|scope| {
            let closing = scope.spawn(|| {
                door.close();
                assert!(left.load(Ordering::SeqCst), "closed over one that is inside");
            });
            // Nobody gets in any more, though one is inside still.
            while door.enter() {
                door.exit();
                thread::yield_now();
            }
            assert!(!closing.is_finished());
            left.store(true, Ordering::SeqCst);
            door.exit();
        });
        assert!(!door.enter());
        // Once more, as a drop behind another.
        door.close();
    }
}
