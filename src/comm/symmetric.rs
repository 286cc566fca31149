//! Memory that every rank of a group has alike, and that the others can write: what one-sided transports stand on.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::{Communicator, Tag};

/// Some bytes of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Where they begin.
    pub offset: usize,
    /// How many they are.
    pub bytes: usize,
}

impl Span {
    /// Refuses what is not inside a window of so many bytes.
    pub(crate) fn check(self, call: &'static str, name: &str, bytes: usize) -> Result<()> {
        match self.offset.checked_add(self.bytes) {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(Error::invalid(call, name, format!("inside the window's {bytes} bytes"), format!("{self:?}"))),
        }
    }
}

/// A copy from one's own part of a window into a peer's part of the same or another.
#[derive(Debug)]
pub struct Put<'a, W> {
    /// Whose part is written.
    pub peer: usize,
    /// The window read here.
    pub from: &'a W,
    /// The part of the window.
    pub span: Span,
    /// The window written there.
    pub to: &'a W,
    /// Where in it.
    pub offset: usize,
}

/// Windows: memory of one size on every rank, made and given up by all ranks together. Each rank reads and writes its
/// own part; any rank puts into another's, which learns of it by a signal.
///
/// A put and the signal after it are ordered: who has waited for the signal sees the bytes. Signals of a pair of ranks
/// count; a wait takes as many as it names. Work is enqueued as the device's other work is.
pub trait SymmetricMemory<D: Device>: Communicator<D> {
    /// A rank's handle of a window. Dropped without [`release`](Self::release), its memory is not given back.
    type Window: fmt::Debug + Send;

    /// Makes a window of `bytes` on every rank (collective; the same number on all). Its content is unspecified.
    fn allocate(&mut self, tag: Tag, bytes: usize) -> Result<Self::Window>;
    /// Gives it up (collective).
    fn release(&mut self, tag: Tag, window: Self::Window) -> Result<()>;
    /// Ranks whose parts this rank's device can address, this one among them: those of one host's fast links.
    fn team(&self, window: &Self::Window) -> Result<Vec<usize>>;
    /// Address of a peer's part as this rank's device sees it; `None` where it cannot.
    fn address(&self, window: &Self::Window, peer: usize) -> Result<Option<u64>>;
    /// Copies a tensor's bytes into the own part.
    fn store(&mut self, window: &mut Self::Window, offset: usize, from: TensorRef<'_, D>) -> Result<()>;
    /// Copies bytes of the own part into a tensor.
    fn load(&mut self, window: &Self::Window, offset: usize, to: TensorMut<'_, D>) -> Result<()>;
    /// Copies into the part of another rank, and signals it.
    fn put(&mut self, tag: Tag, put: Put<'_, Self::Window>) -> Result<()>;
    /// Signals another rank, behind the puts to it so far.
    fn signal(&mut self, tag: Tag, peer: usize) -> Result<()>;
    /// Waits for so many signals of each rank named.
    fn wait(&mut self, tag: Tag, signals: &[(usize, usize)]) -> Result<()>;
}

/// The ranks' parts of one window.
pub(super) type Parts = Arc<Vec<Mutex<Vec<u8>>>>;

/// State that the threads of a group share for their windows.
#[derive(Debug, Default)]
pub(super) struct WindowRegistry {
    windows: Mutex<HashMap<u64, Parts>>,
    /// Signals from one rank to another that nobody has waited for.
    signals: Mutex<HashMap<(usize, usize), usize>>,
    signaled: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is whole between statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WindowRegistry {
    /// The parts of the window that a call of this number made, which its first rank makes.
    pub(super) fn window(&self, number: u64, ranks: usize, bytes: usize) -> Result<Parts> {
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
    pub(super) parts: Parts,
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

    #[test]
    fn a_window_larger_than_memory_is_an_error() {
        let windows = WindowRegistry::default();
        assert!(matches!(windows.window(1, 2, 1 << 58), Err(Error::OutOfMemory { .. })));
        assert_eq!(windows.window(1, 2, 8).map(|parts| parts.len()).ok(), Some(2));
    }
}
