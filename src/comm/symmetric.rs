//! Memory that every rank of a group has alike, and that the others can write: what one-sided transports stand on.

use std::fmt;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::{Communicator, Tag};

/// Signals that a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerSignals {
    /// The rank that sends them.
    pub peer: usize,
    /// How many they are.
    pub count: usize,
}

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
    ///
    /// # Errors
    /// As [`Communicator::all_gather`]; [`Error::OutOfMemory`](crate::Error::OutOfMemory) or a device's, which the
    /// other ranks are told; a library without windows.
    fn allocate(&mut self, tag: Tag, bytes: usize) -> Result<Self::Window>;
    /// Gives it up (collective).
    ///
    /// # Errors
    /// As [`Communicator::all_gather`].
    fn release(&mut self, tag: Tag, window: Self::Window) -> Result<()>;
    /// Ranks whose parts this rank's device can address, this one among them: those of one host's fast links.
    ///
    /// # Errors
    /// The communicator has ended; the library's.
    fn team(&self, window: &Self::Window) -> Result<Vec<usize>>;
    /// Address of a peer's part as this rank's device sees it; `None` where it cannot.
    ///
    /// # Errors
    /// A peer that is no rank; the communicator has ended; the library's.
    fn address(&self, window: &Self::Window, peer: usize) -> Result<Option<u64>>;
    /// Copies a tensor's bytes into the own part.
    ///
    /// # Errors
    /// Bytes past the end of the window; the device's.
    fn store(&mut self, window: &mut Self::Window, offset: usize, from: TensorRef<'_, D>) -> Result<()>;
    /// Copies bytes of the own part into a tensor.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    fn load(&mut self, window: &Self::Window, offset: usize, to: TensorMut<'_, D>) -> Result<()>;
    /// Copies into the part of another rank, and signals it.
    ///
    /// # Errors
    /// A peer that is no rank, over NCCL this rank itself; bytes past the end of either window; the communicator has
    /// ended, or has copy engines exchange its blocks; no memory; the library's.
    fn put(&mut self, tag: Tag, put: Put<'_, Self::Window>) -> Result<()>;
    /// Signals another rank, behind the puts to it so far.
    ///
    /// # Errors
    /// A peer that is no rank, over NCCL this rank itself; the communicator has ended, or has copy engines exchange its
    /// blocks; the library's.
    fn signal(&mut self, tag: Tag, peer: usize) -> Result<()>;
    /// Waits for signals of other ranks.
    ///
    /// # Errors
    /// As [`signal`](Self::signal); [`CommError::Timeout`](crate::CommError::Timeout) where the signals do not come.
    fn wait(&mut self, tag: Tag, signals: &[PeerSignals]) -> Result<()>;
}
