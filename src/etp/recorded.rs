//! Chains whose passes are recorded (CUDA graphs), and run again without the host.
//!
//! In a recording the helper threads enqueue one at a time, while whoever gave them a job waits: no two threads may add to
//! a graph at once. The event that a collective waits for is of the recording, and so is its stream from there on; the
//! event that the computation takes its result behind joins the streams again. Hence a recording begins with nothing under
//! way and ends so, has no buffer that is not there before, and decides nothing that a later run might have to decide
//! otherwise: sums are added to what is there, and each forward casts. What is under way belongs to one recording or to
//! none, and a call in another is refused before it touches anything.

use std::sync::MutexGuard;

use crate::error::{Error, Result};

use super::chain::{Chain, Inner};
use super::reduce::Main;
use super::{Reduction, ShardDevice};

impl<D: ShardDevice> Chain<D> {
    /// Makes the chain ready for recordings of its passes (`Cuda::capture`), between passes and after an eager step that has
    /// used every buffer (on every rank). A recording has whole passes: gradients that are handed in between a backward's `begin`
    /// and its `end` have reached their main gradients at that `end`, others at once; [`finish`](Self::finish) may be
    /// part of it, or follow its run. Where shards travel quantised, each forward casts them from here on, eager ones too: what
    /// recordings have left, and whether they have run, the host does not know. All ranks hold the same weights at the same
    /// calls of it, as they then start the same gathers ahead: gathers and reductions have one order.
    ///
    /// A recording that fails within a pass is given up like any failed step, with [`recover`](Self::recover) on every rank; the
    /// next can follow at once. One that is complete goes on with the buffers, the order and the shards that it has seen,
    /// whatever [`clear`](Self::clear), [`relink`](Self::relink) and [`replace`](Self::replace) do later. Recordings are
    /// dropped before the chain.
    ///
    /// # Errors
    /// A pass that runs, no forward yet; [`Reduction::Native`], whose sums take memory of another stream;
    /// [`Error::NotCapturable`]: lanes of copy engines ([`Communicator::memory`](crate::comm::Communicator::memory)), a
    /// recording under way; those of the gradients under way.
    pub fn prepare_recording(&self) -> Result<()> {
        const CALL: &str = "Chain::prepare_recording";
        let mut inner = self.not_recorded(CALL)?;
        if inner.active.is_some() || !inner.is_linked() {
            return Err(inner.trouble("(chain)", "a linked chain between passes, to be recorded", "another"));
        }
        if self.options.reduction == Reduction::Native {
            return Err(Error::invalid(
                CALL,
                "reduction",
                "Pairwise",
                "Native, whose sums take another stream's memory",
            ));
        }
        if inner.gathers.has_memory || inner.reductions().has_memory {
            return Err(refused(CALL, "record what copy engines move"));
        }
        inner.drop_gathers().and(inner.settle(self))?;
        for Main { sums, first } in inner.weights.iter_mut().filter_map(|weight| weight.main.as_mut()) {
            if *first {
                self.device.zero(sums.view_mut().into_data())?;
                *first = false;
            }
        }
        inner.recorded = true;
        Ok(())
    }

    /// Number of the recording that calls are part of.
    pub(super) fn recording(&self) -> Option<u64> {
        #[cfg(test)]
        if let number @ 1.. = self.pretended.load(std::sync::atomic::Ordering::SeqCst) {
            return Some(number);
        }
        self.device.recording()
    }

    /// The chain's state, for a call that may be part of a recording.
    pub(super) fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, Inner<D>>> {
        self.device.not_recorded_elsewhere(call)?;
        let (mut inner, recording) = (self.lock(), self.recording());
        if recording.is_some() && !(inner.recorded && inner.is_linked()) {
            return Err(refused(call, "use a chain that is not ready for it (Chain::prepare_recording)"));
        }
        if recording != inner.recording && inner.is_under_way() {
            return Err(match recording {
                Some(_) => refused(call, "go on with a pass, or gradients, under way before it (Chain::drain)"),
                None => inner.trouble("(chain)", "Chain::recover first", "a recording that ended within a pass"),
            });
        }
        inner.is_within(recording);
        Ok(inner)
    }

    /// The same for a call that may not.
    pub(super) fn not_recorded(&self, call: &'static str) -> Result<MutexGuard<'_, Inner<D>>> {
        self.outside(call).and_then(|()| self.enter(call))
    }

    /// The same, to give up whatever is under way.
    pub(super) fn give_up(&self, call: &'static str) -> Result<MutexGuard<'_, Inner<D>>> {
        self.outside(call).and_then(|()| self.device.not_recorded_elsewhere(call))?;
        let mut inner = self.lock();
        inner.is_within(None);
        Ok(inner)
    }

    fn outside(&self, call: &'static str) -> Result<()> {
        match self.recording() {
            None => Ok(()),
            Some(_) => Err(refused(call, "wait for collectives that other threads have begun")),
        }
    }
}

impl<D: ShardDevice> Inner<D> {
    fn is_within(&mut self, recording: Option<u64>) {
        self.recording = recording;
        self.tickets.fixed = recording.is_some();
        for lane in [Some(&self.gathers), self.apart.as_ref()].into_iter().flatten() {
            lane.record(recording.is_some());
        }
    }

    fn is_under_way(&self) -> bool {
        self.active.is_some() || !self.reducing.is_empty() || self.nodes.iter().any(|node| node.flight.is_some())
    }
}

/// What a recording cannot have.
pub(super) fn refused(call: &'static str, operation: &str) -> Error {
    Error::NotCapturable { call, operation: operation.to_string() }
}

#[cfg(test)]
mod tests;
