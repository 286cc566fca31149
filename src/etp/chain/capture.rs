//! Chains whose passes are captured (CUDA graphs), and run again without the host.
//!
//! In a capture the helper threads enqueue one at a time, while whoever gave them a collective waits: no two threads
//! may add to a graph at once. The event that a collective waits for is of the capture, and so is its stream from there
//! on; the event that the computation takes its result behind joins the streams again. Hence a capture begins with
//! nothing under way and ends so, has no buffer that is not there before, and decides nothing that a later run might
//! have to decide otherwise: sums are added to what is there, and each forward casts. What is under way belongs to one
//! capture or to none, and a call in another is refused before it touches anything.

use crate::error::{Error, Result};

use crate::etp::chain::Chain;
use crate::etp::chain::collective_state::MainGradient;
use crate::etp::{Reduction, ShardDevice};

impl<D: ShardDevice> Chain<D> {
    /// Makes the chain ready for captures of its passes (`Cuda::capture`), between passes and after an eager step that
    /// has used every buffer (on every rank). A capture has whole passes: gradients that are handed in between a
    /// backward's `begin` and its `end` have reached their main gradients at that `end`, others at once;
    /// [`finish`](Self::finish) may be part of it, or follow its run. Where shards are sent quantized, each forward
    /// casts them from here on, eager ones too: what captures have left, and whether they have run, the host does not
    /// know. All ranks hold the same weights at the same calls of it, as they then start the same gathers ahead:
    /// gathers and reductions have one order.
    ///
    /// A capture that fails within a pass is given up like any failed step, with [`recover`](Self::recover) on every
    /// rank; the next can follow at once. One that is complete goes on with the buffers, the order and the shards that
    /// it has seen, whatever [`clear`](Self::clear), [`reset_order`](Self::reset_order) and [`replace`](Self::replace)
    /// do later. Captures are dropped before the chain.
    ///
    /// # Errors
    /// A pass that runs, no forward yet; [`Reduction::Native`], whose sums take memory of another stream;
    /// [`Error::NotCapturable`]: collective threads of copy engines
    /// ([`Communicator::memory`](crate::comm::Communicator::memory)), a capture under way; those of the gradients under
    /// way.
    pub fn prepare_capture(&self) -> Result<()> {
        const CALL: &str = "Chain::prepare_capture";
        let mut inner = self.lock_outside_capture(CALL)?;
        if inner.active.is_some() || !inner.has_order() {
            return Err(inner.order_error("(chain)", "an ordered chain between passes, to be captured", "another"));
        }
        if self.options.reduction == Reduction::Native {
            return Err(Error::invalid(
                CALL,
                "reduction",
                "Pairwise",
                "Native, whose sums take another stream's memory",
            ));
        }
        if inner.gathers.has_own_memory || inner.reductions().has_own_memory {
            return Err(Error::not_capturable(CALL, "capture what copy engines move"));
        }
        inner.drop_gathers().and(inner.finish_reductions(self))?;
        for MainGradient { sums, first, summed } in inner.weights.iter_mut().filter_map(|weight| weight.main.as_mut()) {
            if *first && !*summed {
                self.device.zero(sums.view_mut().into_data())?;
                *first = false;
            }
        }
        inner.capturable = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
