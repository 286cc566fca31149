//! Work of two devices of one memory, each with a stream: what is handed from one to the other, and in which order.
//!
//! A buffer that crosses to the other stream is used there after everything that its own stream had been given when it
//! left, and on its own stream after everything that the other had been given when it came back. Where calls run to
//! their end all of this is nothing.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

use crate::etp::ShardDevice;
use crate::etp::buffers::cache::Buffer;

/// The device of the computation, and the one that a communicator's work is on.
pub(crate) struct StreamPair<D: ShardDevice> {
    pub compute: D,
    pub transfer: D,
}

impl<D: ShardDevice> fmt::Debug for StreamPair<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} beside {:?}", self.transfer, self.compute)
    }
}

impl<D: ShardDevice> StreamPair<D> {
    /// A communicator's device beside that of the computation, which is to hear of its failures.
    pub fn new(compute: &D, transfer: Option<&D>) -> Arc<Self> {
        let transfer = transfer.unwrap_or(compute).clone();
        compute.adopt_errors_of(&transfer);
        Arc::new(Self { compute: compute.clone(), transfer })
    }

    /// One stream as both.
    pub fn of_one(stream: &D) -> Self {
        Self { compute: stream.clone(), transfer: stream.clone() }
    }

    /// Later work there waits for the work here so far.
    pub fn fork(&self) -> Result<()> {
        self.transfer.wait(self.compute.record_event()?.as_ref())
    }

    /// Later work here waits for the work there so far.
    pub fn rejoin(&self) -> Result<()> {
        self.compute.wait(self.transfer.record_event()?.as_ref())
    }

    /// Runs work there between the work here before it and after it; the work's own error comes first.
    pub fn run_on_transfer<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.fork()?;
        let done = work();
        let rejoined = self.rejoin();
        done.and_then(|done| rejoined.map(|()| done))
    }
}

/// A buffer on the other stream. Dropped there, it is still in order when its own stream gets its memory.
pub(in crate::etp) struct TransferBuffer<D: ShardDevice, B = Buffer<D>> {
    buffer: Option<B>,
    streams: Arc<StreamPair<D>>,
}

impl<D: ShardDevice, B: fmt::Debug> fmt::Debug for TransferBuffer<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.buffer.fmt(f)
    }
}

impl<D: ShardDevice, B> TransferBuffer<D, B> {
    pub fn new(buffer: B, streams: &Arc<StreamPair<D>>) -> Self {
        Self { buffer: Some(buffer), streams: Arc::clone(streams) }
    }

    /// The buffer, to be used there.
    pub fn buffer(&mut self) -> Option<&mut B> {
        self.buffer.as_mut()
    }

    /// The buffer, by a caller who keeps the order.
    pub fn received(mut self) -> Option<B> {
        self.buffer.take()
    }
}

impl<D: ShardDevice, B> Drop for TransferBuffer<D, B> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.streams.rejoin().is_err() {
            // The other stream may still use the memory, so nobody gets it.
            std::mem::forget(buffer);
        }
    }
}
