//! How a call enters a chain: within a capture, outside of any, or to give up what is under way.

use std::sync::MutexGuard;

use crate::error::{Error, Result};

use crate::etp::ShardDevice;
use crate::etp::chain::{Chain, ChainState};

impl<D: ShardDevice> Chain<D> {
    /// Number of the capture that calls are part of.
    pub(in crate::etp) fn capture_number(&self) -> Option<u64> {
        #[cfg(test)]
        if let number @ 1.. = self.test_capture.load(std::sync::atomic::Ordering::SeqCst) {
            return Some(number);
        }
        self.device.capture_number()
    }

    /// The chain's state, for a call that may be part of a capture.
    pub(in crate::etp) fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, ChainState<D>>> {
        self.device.check_not_captured_elsewhere(call)?;
        let (mut inner, capture) = (self.lock(), self.capture_number());
        if capture.is_some() && !(inner.capturable && inner.has_order()) {
            return Err(Error::not_capturable(call, "use a chain that is not ready for it (Chain::prepare_capture)"));
        }
        if capture != inner.capture && inner.is_under_way() {
            return Err(match capture {
                Some(_) => {
                    Error::not_capturable(call, "go on with a pass, or gradients, under way before it (Chain::drain)")
                }
                None => inner.order_error("(chain)", "Chain::recover first", "a capture that ended within a pass"),
            });
        }
        inner.set_capture(capture);
        Ok(inner)
    }

    /// The same for a call that may not.
    pub(in crate::etp) fn lock_outside_capture(&self, call: &'static str) -> Result<MutexGuard<'_, ChainState<D>>> {
        self.outside(call).and_then(|()| self.enter(call))
    }

    /// The same, to give up whatever is under way.
    pub(in crate::etp) fn lock_to_abandon(&self, call: &'static str) -> Result<MutexGuard<'_, ChainState<D>>> {
        self.outside(call).and_then(|()| self.device.check_not_captured_elsewhere(call))?;
        let mut inner = self.lock();
        inner.set_capture(None);
        Ok(inner)
    }

    fn outside(&self, call: &'static str) -> Result<()> {
        match self.capture_number() {
            None => Ok(()),
            Some(_) => Err(Error::not_capturable(call, "wait for collectives that other threads have begun")),
        }
    }
}

impl<D: ShardDevice> ChainState<D> {
    fn set_capture(&mut self, capture: Option<u64>) {
        self.capture = capture;
        self.cache.fixed = capture.is_some();
        for thread in [Some(&self.gathers), self.apart.as_ref()].into_iter().flatten() {
            thread.set_capturing(capture.is_some());
        }
    }

    fn is_under_way(&self) -> bool {
        self.active.is_some()
            || !self.pending_reductions.is_empty()
            || self.replicas.as_ref().is_some_and(|replicas| !replicas.pending.is_empty())
            || self.uses.iter().any(|node| node.pending_gather.is_some())
    }
}
