//! Work of two devices of one memory, each with a stream: what is handed from one to the other, and in which order.
//!
//! A buffer that crosses to the other stream is used there after everything that its own stream had been given when it
//! left, and on its own stream after everything that the other had been given when it came back. Where calls run to
//! their end all of this is nothing.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

use super::ShardDevice;
use super::tickets::Loan;

/// The device of the computation, and the one that a communicator's work is on.
pub(super) struct Beside<D: ShardDevice> {
    pub home: D,
    pub away: D,
}

impl<D: ShardDevice> fmt::Debug for Beside<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} beside {:?}", self.away, self.home)
    }
}

impl<D: ShardDevice> Beside<D> {
    /// A communicator's device beside that of the computation, which is to hear of its failures.
    pub fn new(home: &D, away: Option<&D>) -> Arc<Self> {
        let away = away.unwrap_or(home).clone();
        home.heed(&away);
        Arc::new(Self { home: home.clone(), away })
    }

    /// Later work there waits for the work here so far.
    pub fn leave(&self) -> Result<()> {
        self.away.wait(&self.away.own_stream(), self.home.mark()?.as_ref())
    }

    /// Later work here waits for the work there so far.
    pub fn come_back(&self) -> Result<()> {
        self.home.wait(&self.home.own_stream(), self.away.mark()?.as_ref())
    }

    /// Runs work there between the work here before it and after it.
    pub fn visit<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.leave()?;
        let done = work();
        self.come_back().and(done)
    }
}

/// A buffer on the other stream. Dropped there, it is still in order when its own stream gets its memory.
pub(super) struct Sent<D: ShardDevice> {
    loan: Option<Loan<D>>,
    between: Arc<Beside<D>>,
}

impl<D: ShardDevice> fmt::Debug for Sent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.loan.fmt(f)
    }
}

impl<D: ShardDevice> Sent<D> {
    pub fn new(loan: Loan<D>, between: &Arc<Beside<D>>) -> Self {
        Self { loan: Some(loan), between: Arc::clone(between) }
    }

    /// The buffer, to be used there.
    pub fn loan(&mut self) -> Option<&mut Loan<D>> {
        self.loan.as_mut()
    }

    /// The buffer, by a caller who keeps the order.
    pub fn received(mut self) -> Option<Loan<D>> {
        self.loan.take()
    }
}

impl<D: ShardDevice> Drop for Sent<D> {
    fn drop(&mut self) {
        let Some(loan) = self.loan.take() else { return };
        if self.between.come_back().is_err() {
            // What the other stream still does with the memory is not known: nobody gets it.
            std::mem::forget(loan);
        }
    }
}
