//! A point in time that every wait of a call shares.

use std::time::{Duration, Instant};

/// Longer waits are cut to this: a clock cannot hold `Duration::MAX`.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    at: Instant,
}

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout.min(LONGEST) }
    }

    pub fn extended(self, more: Duration) -> Self {
        Self { at: self.at + more.min(LONGEST) }
    }

    /// Time left, never zero; `None` when it is over.
    pub fn left(self) -> Option<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}
