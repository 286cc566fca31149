//! A rank's place among the others, as far as hosts see it: what it has called, what the others are told of it, and how
//! its communicator ends. Knows nothing of a GPU.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::{Op, Tag};
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};

use crate::nccl::control::call_count::CallCount;
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::control::plane::{CompareError, ControlPlane};
use crate::nccl::control::watchdog::{EndNotice, WatchHandle, Watchdog};
use crate::nccl::ffi::comm_handle::{CommHandle, Work};

/// A rank's place. Dropping it is to [`close`](Self::close) it.
#[derive(Debug)]
pub(in crate::nccl) struct Session {
    pub(in crate::nccl) timeout: Duration,
    pub(in crate::nccl) control: ControlPlane,
    pub(in crate::nccl) count: Arc<CallCount>,
    /// Ends before the communicator.
    watchdog: Option<Watchdog>,
    pub(in crate::nccl) comm_handle: Arc<CommHandle>,
    /// A rank that is gone ends no more than the collectives, which need all.
    outlives_ranks: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl Session {
    pub(in crate::nccl) fn new(comm_handle: Arc<CommHandle>, control: ControlPlane, timeout: Duration) -> Result<Self> {
        let (rank, size, own) = (comm_handle.rank, comm_handle.size, control.clone());
        let end_notice: EndNotice = Box::new(move |broken, (first, last)| {
            if let Some((subject, reason)) = broken {
                own.post_refusal(subject, reason);
            }
            own.give_up(rank, size, first, last);
        });
        let watchdog = Watchdog::start(Arc::clone(&comm_handle), Arc::clone(control.peer_events()), end_notice)?;
        Ok(Self {
            timeout,
            control,
            count: Arc::default(),
            watchdog: Some(watchdog),
            comm_handle,
            outlives_ranks: false,
        })
    }

    /// Tells the peers that the rank takes part in nothing any more, and waits until its collectives have ended.
    pub(in crate::nccl) fn close(&mut self) {
        let Some(watchdog) = self.watchdog.take() else { return };
        self.control.announce_departure(self.comm_handle.rank, self.count.last());
        // A panic inside NCCL's call has enqueued nothing.
        watchdog.entered(None);
        drop(watchdog);
        if let Some(peer) = self.control.peer_events().aborted() {
            let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
            self.comm_handle.fail(CommError::PeerGone { operation: "drop", tag, rank: self.comm_handle.rank, peer });
        }
    }

    /// What has more watched than its calls.
    pub(in crate::nccl) fn watch(&self) -> Option<WatchHandle> {
        self.watchdog.as_ref().map(Watchdog::handle)
    }

    /// Whether a collective to which a rank will not come is that collective's error alone, and what needs no collective goes
    /// on. One that has begun before the rank was gone ends the communicator as ever: nothing else ends it.
    pub(in crate::nccl) fn outlive_ranks(&mut self, outlives: bool) {
        self.outlives_ranks = outlives;
    }

    pub(in crate::nccl) fn outlives_ranks(&self) -> bool {
        self.outlives_ranks
    }

    pub(in crate::nccl) fn check_alive(&self) -> Result<()> {
        self.comm_handle.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Counts a collective, and compares it with what the other ranks are about to call.
    pub(in crate::nccl) fn begin(&mut self, call: CollectiveCall) -> Result<CollectiveInfo> {
        let (operation, tag) = (call.operation, call.tag);
        let subject = CollectiveInfo { rank: self.comm_handle.rank, number: self.count.call(), operation, tag };
        self.check_alive()?;
        match self.control.compare_call(subject, call, self.timeout) {
            Ok(()) => Ok(subject),
            Err(CompareError::Differ(error)) => Err(error.into()),
            // Hosts that know that the rank is gone do not enter the collective; one that does not know it yet fails in it.
            Err(CompareError::Over(error @ CommError::PeerGone { .. })) if self.outlives_ranks => Err(error.into()),
            // Others may be inside the collective: without this rank it never ends.
            Err(CompareError::Over(error)) => Err(self.end(error)),
        }
    }

    /// Tells the others that this rank fails where they expect it.
    pub(in crate::nccl) fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        const CALL: &str = "refuse";
        let number = self.count.call();
        let subject = CollectiveInfo { rank: self.comm_handle.rank, number, operation: CALL, tag };
        self.check_alive()?;
        if !self.control.compares_calls() {
            self.control.post_refusal(subject, reason);
            let (rank, peer, reason) = (subject.rank, subject.rank, reason.to_string());
            self.end(CommError::Refused { operation: CALL, tag, rank, peer, reason });
            return Ok(());
        }
        let detail = Detail::Refusal(reason.to_string());
        let call = CollectiveCall { operation: CALL, tag, dtype: DType::U8, detail, bytes: 0 };
        match self.control.refuse_call(subject, (call, reason), self.timeout) {
            // Its own refusal, coming back.
            Ok(()) | Err(CompareError::Differ(CommError::Refused { .. })) => Ok(()),
            Err(CompareError::Differ(error)) => Err(error.into()),
            Err(CompareError::Over(error)) => Err(self.end(error)),
        }
    }

    /// Runs a collective's calls with the watchdog looking on, then has it watch `work`, which they have enqueued.
    /// `None` from the calls: the communicator has ended. Where either fails the others may be inside the collective.
    pub(in crate::nccl) fn run<T>(
        &mut self,
        subject: CollectiveInfo,
        calls: impl FnOnce(&CommHandle) -> Option<Result<T>>,
        work: impl FnOnce() -> Result<Option<Box<dyn Work>>>,
    ) -> Result<T> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.enter(subject, self.timeout);
        }
        let value = match calls(&self.comm_handle) {
            Some(Ok(value)) => value,
            Some(Err(error)) => return Err(self.fail_collective(subject, error)),
            None => return Err(self.ended(subject.operation, subject.tag)),
        };
        self.count.enqueued(subject.number);
        // Work that nobody can see the end of would be nobody's failure until time is up.
        let work = work().map_err(|error| self.fail_collective(subject, error))?;
        if let Some(watchdog) = &self.watchdog {
            watchdog.entered(work);
        }
        Ok(value)
    }

    /// The others may have begun a collective that this rank could not: it ends the communicator.
    pub(in crate::nccl) fn fail_collective(&mut self, subject: CollectiveInfo, error: Error) -> Error {
        let CollectiveInfo { rank, operation, tag, .. } = subject;
        if let Some(failure) = self.comm_handle.failure() {
            // The watchdog's work: the call was ended from outside.
            return failure.into();
        }
        self.control.post_refusal(subject, &error.to_string());
        self.end(CommError::Transport { operation, tag, rank, reason: error.to_string() });
        error
    }

    /// The same of what goes between a collective's beginning and its calls, or between two of its calls: the others,
    /// which wait in the next, are told at once.
    pub(in crate::nccl) fn check_begun<T>(&mut self, subject: CollectiveInfo, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.fail_collective(subject, error))
    }

    pub(in crate::nccl) fn end(&self, error: CommError) -> Error {
        let first = self.comm_handle.fail(error);
        // Of a call that has failed half of the work may have been enqueued.
        let oldest = self.watchdog.as_ref().and_then(Watchdog::oldest).unwrap_or(self.count.last() + 1);
        if let Some(watchdog) = &self.watchdog {
            watchdog.entered(None);
        }
        self.control.give_up(self.comm_handle.rank, self.comm_handle.size, oldest, self.count.last());
        self.comm_handle.abort();
        first.into()
    }

    pub(in crate::nccl) fn ended(&self, operation: &'static str, tag: Tag) -> Error {
        let reason = "the communicator has ended".to_string();
        let unknown = || CommError::Poisoned { operation, tag, rank: self.comm_handle.rank, reason };
        self.comm_handle.failure().unwrap_or_else(unknown).into()
    }
}
