//! What a GPU has been given of a communicator, as its watchdog sees it: collectives, and replays of graphs that have some
//! among them, each of which is counted and watched as one.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::{Op, Tag};
use crate::cuda::{Cuda, Event, ReplayGate};
use crate::error::{CommError, Result};

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

/// What a rank's replays pass, and who watches them. It ends with the communicator, which alone holds it.
pub(in crate::nccl) struct Replays {
    pub(in crate::nccl) cuda: Cuda,
    pub(in crate::nccl) comm_handle: Arc<CommHandle>,
    pub(in crate::nccl) timeout: Duration,
    pub(in crate::nccl) count: Arc<CallCount>,
    pub(in crate::nccl) watch: WatchHandle,
}

impl ReplayGate for Replays {
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
