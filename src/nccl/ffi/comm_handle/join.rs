//! How a rank joins a communicator: on a thread of its own, as the library's call blocks until the peers make it too.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{CommError, Result};
use crate::ranks::UniqueId;

use crate::nccl::ffi::sys::{Config, RawUniqueId, Status};
use crate::nccl::{NcclError, NcclLibrary};

use super::{CommHandle, LiveComm, RankPlace, wait_until_done};

/// Pause between two looks at what the others say while a rank joins.
const LOOK: Duration = Duration::from_millis(5);
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
}
