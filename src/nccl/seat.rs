//! A rank's place among the others, as far as hosts see it: what it has called, what the others are told of it, and how
//! its communicator ends. Knows nothing of a GPU.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::agree::{Call, Detail};
use crate::comm::{Op, Tag};
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};

use super::board::{Board, Unmet};
use super::link::Link;
use super::notices::Subject;
use super::watch::{Farewell, Watch, Work};

/// A rank's place. Dropping it is to [`leave`](Self::leave).
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) timeout: Duration,
    pub(super) board: Board,
    pub(super) calls: u64,
    /// The last collective that was enqueued.
    pub(super) last: u64,
    /// Ends before the link.
    watch: Option<Watch>,
    pub(super) link: Arc<Link>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Seat {
    pub(super) fn new(link: Arc<Link>, board: Board, timeout: Duration) -> Result<Self> {
        let (place, own) = ((link.rank, link.size), board.clone());
        let farewell: Farewell = Box::new(move |broken, unfinished| {
            if let Some((subject, reason)) = broken {
                own.post_refusal(subject, reason);
            }
            own.give_up(place, unfinished);
        });
        let watch = Watch::start(Arc::clone(&link), Arc::clone(board.notices()), farewell)?;
        Ok(Self { timeout, board, calls: 0, last: 0, watch: Some(watch), link })
    }

    /// Tells the peers that the rank takes part in nothing any more, and waits until its collectives have ended.
    pub(super) fn leave(&mut self) {
        let Some(watch) = self.watch.take() else { return };
        self.board.leave(self.link.rank, self.last);
        // A panic inside NCCL's call has enqueued nothing.
        watch.entered(None);
        drop(watch);
        if let Some(peer) = self.board.notices().aborted() {
            let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
            self.link.fail(CommError::PeerGone { operation: "drop", tag, rank: self.link.rank, peer });
        }
    }

    pub(super) fn alive(&self) -> Result<()> {
        self.link.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Counts a collective and meets the other ranks before it.
    pub(super) fn begin(&mut self, call: Call) -> Result<Subject> {
        self.calls += 1;
        let (operation, tag) = (call.operation, call.tag);
        let subject = Subject { rank: self.link.rank, number: self.calls, operation, tag };
        self.alive()?;
        match self.board.meet(subject, call, self.timeout) {
            Ok(()) => Ok(subject),
            Err(Unmet::Differ(error)) => Err(error.into()),
            // Others may be inside the collective: without this rank it never ends.
            Err(Unmet::Over(error)) => Err(self.end(error)),
        }
    }

    /// Tells the others that this rank fails where they expect it.
    pub(super) fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        const CALL: &str = "refuse";
        self.calls += 1;
        let subject = Subject { rank: self.link.rank, number: self.calls, operation: CALL, tag };
        self.alive()?;
        if !self.board.meets() {
            self.board.post_refusal(subject, reason);
            let (rank, peer, reason) = (subject.rank, subject.rank, reason.to_string());
            self.end(CommError::Refused { operation: CALL, tag, rank, peer, reason });
            return Ok(());
        }
        let detail = Detail::Refusal(reason.to_string());
        let call = Call { operation: CALL, tag, dtype: DType::U8, detail, bytes: 0 };
        match self.board.meet(subject, call, self.timeout) {
            // Its own refusal, coming back.
            Ok(()) | Err(Unmet::Differ(CommError::Refused { .. })) => Ok(()),
            Err(Unmet::Differ(error)) => Err(error.into()),
            Err(Unmet::Over(error)) => Err(self.end(error)),
        }
    }

    /// Runs a collective's calls with the watchdog looking on, then has it watch `work`, which they have enqueued.
    /// `None` from the calls: the communicator has ended. Where either fails the others may be inside the collective.
    pub(super) fn run<T>(
        &mut self,
        subject: Subject,
        calls: impl FnOnce(&Link) -> Option<Result<T>>,
        work: impl FnOnce() -> Result<Option<Box<dyn Work>>>,
    ) -> Result<T> {
        if let Some(watch) = &self.watch {
            watch.enter(subject, self.timeout);
        }
        let value = match calls(&self.link) {
            Some(Ok(value)) => value,
            Some(Err(error)) => return Err(self.broken(subject, error)),
            None => return Err(self.ended(subject.operation, subject.tag)),
        };
        self.last = subject.number;
        // Work that nobody can see the end of would be nobody's failure until time is up.
        let work = work().map_err(|error| self.broken(subject, error))?;
        if let Some(watch) = &self.watch {
            watch.entered(work);
        }
        Ok(value)
    }

    /// The others may have begun a collective that this rank could not: it ends the communicator.
    pub(super) fn broken(&mut self, subject: Subject, error: Error) -> Error {
        let Subject { rank, operation, tag, .. } = subject;
        if let Some(failure) = self.link.failure() {
            // The watchdog's work: the call was ended from outside.
            return failure.into();
        }
        self.board.post_refusal(subject, &error.to_string());
        self.end(CommError::Transport { operation, tag, rank, reason: error.to_string() });
        error
    }

    /// The same of what goes between a collective's beginning and its calls, or between two of its calls: the others,
    /// which wait in the next, are told at once.
    pub(super) fn begun<T>(&mut self, subject: Subject, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.broken(subject, error))
    }

    pub(super) fn end(&self, error: CommError) -> Error {
        let first = self.link.fail(error);
        // Of a call that has failed half of the work may have been enqueued.
        let oldest = self.watch.as_ref().and_then(Watch::oldest).unwrap_or(self.last + 1);
        if let Some(watch) = &self.watch {
            watch.entered(None);
        }
        self.board.give_up((self.link.rank, self.link.size), (oldest, self.last));
        self.link.abort();
        first.into()
    }

    pub(super) fn ended(&self, operation: &'static str, tag: Tag) -> Error {
        let reason = "the communicator has ended".to_string();
        let unknown = || CommError::Poisoned { operation, tag, rank: self.link.rank, reason };
        self.link.failure().unwrap_or_else(unknown).into()
    }
}
