//! Numbers of a rank's collectives.

use std::sync::atomic::{AtomicU64, Ordering};

/// Collectives that a rank has called and enqueued; a replay of a graph that has some among them is one, on every rank.
#[derive(Debug, Default)]
pub(in crate::nccl) struct CallCount {
    called: AtomicU64,
    last: AtomicU64,
}

impl CallCount {
    /// Counts a call: its number, from 1.
    pub(in crate::nccl) fn call(&self) -> u64 {
        self.called.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(in crate::nccl) fn calls(&self) -> u64 {
        self.called.load(Ordering::SeqCst)
    }

    /// What this call has had to enqueue is.
    pub(in crate::nccl) fn enqueued(&self, number: u64) {
        self.last.store(number, Ordering::SeqCst);
    }

    /// The last that was enqueued.
    pub(in crate::nccl) fn last(&self) -> u64 {
        self.last.load(Ordering::SeqCst)
    }
}
