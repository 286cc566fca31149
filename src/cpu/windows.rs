//! Windows between threads: memory that every rank of a group has alike, and that the others can write.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

use super::Cpu;

/// The ranks' parts of one window.
pub(super) type WindowParts = Arc<Vec<Mutex<Vec<u8>>>>;

/// Windows and signals that the threads of a group share.
#[derive(Debug, Default)]
pub(super) struct WindowRegistry {
    windows: Mutex<HashMap<u64, WindowParts>>,
    /// Signals from one rank to another that nobody has waited for.
    signals: Mutex<HashMap<(usize, usize), usize>>,
    signaled: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data behind these locks is whole between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WindowRegistry {
    /// The parts of the window that a call of this number made, which its first rank makes.
    pub(super) fn window(&self, number: u64, ranks: usize, bytes: usize) -> Result<WindowParts> {
        let mut windows = lock(&self.windows);
        if let Some(parts) = windows.get(&number) {
            return Ok(Arc::clone(parts));
        }
        let part = |_| Tensor::empty(&Cpu::poisoning(), DType::U8, &[bytes])?.into_vec().map(Mutex::new);
        let parts = Arc::new((0..ranks).map(part).collect::<Result<_>>()?);
        windows.insert(number, Arc::clone(&parts));
        Ok(parts)
    }

    pub(super) fn forget(&self, number: u64) {
        lock(&self.windows).remove(&number);
    }

    pub(super) fn signal(&self, from: usize, to: usize) {
        *lock(&self.signals).entry((from, to)).or_insert(0) += 1;
        self.signaled.notify_all();
    }

    /// Takes so many signals; false when they have not come in time.
    pub(super) fn take(&self, from: usize, to: usize, count: usize, timeout: Duration) -> bool {
        let start = Instant::now();
        let mut signals = lock(&self.signals);
        loop {
            let there = signals.entry((from, to)).or_insert(0);
            if *there >= count {
                *there -= count;
                return true;
            }
            let Some(left) = timeout.checked_sub(start.elapsed()) else { return false };
            signals = self.signaled.wait_timeout(signals, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A window between threads.
#[derive(Debug)]
pub struct ThreadWindow {
    pub(super) number: u64,
    pub(super) parts: WindowParts,
}

impl ThreadWindow {
    /// A rank's part.
    pub(super) fn part(&self, rank: usize) -> MutexGuard<'_, Vec<u8>> {
        lock(&self.parts[rank])
    }

    pub(super) fn bytes(&self) -> usize {
        self.part(0).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_window_larger_than_memory_is_an_error() {
        let windows = WindowRegistry::default();
        assert!(matches!(windows.window(1, 2, 1 << 58), Err(Error::OutOfMemory { .. })));
        assert_eq!(windows.window(1, 2, 8).map(|parts| parts.len()).ok(), Some(2));
    }
}
