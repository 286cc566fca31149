//! Time limits that a test reaches by design, on machines whose threads stand still now and then.
#![allow(dead_code, reason = "each suite uses some of it")]

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Attempts, each with five times the limit of the one before.
const ATTEMPTS: usize = 4;

/// A result found within a limit. `None` from `attempt`: a rank that was to be in time was late, or the attempt took
/// longer than the limit explains; the next one gives it more. What is always late fails all of them.
pub fn in_time<T>(first: Duration, attempt: impl Fn(Duration) -> Option<T>) -> T {
    let limits = std::iter::successors(Some(first), |limit| Some(*limit * 5)).take(ATTEMPTS);
    limits.into_iter().find_map(attempt).expect("ranks that are in time at the longest limit")
}

/// Ranks that one waits for, however they end.
pub struct Countdown {
    left: Mutex<usize>,
    changed: Condvar,
}

/// Counts as one when it is dropped.
pub struct Counted<'a>(&'a Countdown);

impl Countdown {
    pub fn new(count: usize) -> Self {
        Self { left: Mutex::new(count), changed: Condvar::new() }
    }

    /// To be taken once by each that is counted.
    pub fn counted(&self) -> Counted<'_> {
        Counted(self)
    }

    /// Until all have been dropped.
    pub fn wait(&self) {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(left, |left| *left > 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_all();
    }
}
