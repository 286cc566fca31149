//! Windows of one size, and whose turn it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Result;
use crate::nccl::NcclWindow;
use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::tensor::WindowRange;

/// One window, and how many tensors lie in it.
#[derive(Debug)]
pub(super) struct CountedWindow {
    pub(super) window: NcclWindow,
    pub(super) buffers: Arc<AtomicUsize>,
}

/// Windows of one size that take turns.
#[derive(Debug, Default)]
pub(super) struct WindowRing {
    pub(super) windows: Vec<CountedWindow>,
    /// Collectives so far.
    turn: usize,
}

impl WindowRing {
    /// The window whose turn it is.
    pub(super) fn current(&self) -> Option<&CountedWindow> {
        self.windows.get(self.turn.checked_rem(self.windows.len())?)
    }

    /// The same, which nobody has.
    pub(super) fn free(&self, call: &'static str) -> Result<&CountedWindow> {
        let busy = || NcclEpError::Windows { call, windows: self.windows.len() };
        Ok(self.current().filter(|w| w.buffers.load(Ordering::Acquire) == 0).ok_or_else(busy)?)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum WindowDirection {
    Incoming,
    Outgoing,
}

/// A dispatcher's windows.
#[derive(Debug, Default)]
pub(super) struct WindowPool {
    pub(super) incoming: WindowRing,
    pub(super) outgoing: WindowRing,
    pub(super) bytes: usize,
    /// The way whose turn the collective under way takes, if it takes place.
    pub(super) pending: Option<WindowDirection>,
    /// Rows that had to be copied to or from a window, since the caller's memory was none.
    pub(super) copies: u64,
}

impl WindowPool {
    pub(super) fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// Calls that were given plain memory, and so copied.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    /// A collective is over. A turn is over on all ranks where it took place, and on none where one of them refused.
    pub(super) fn finish_collective(&mut self, took_place: bool) {
        match self.pending.take().filter(|_| took_place) {
            Some(WindowDirection::Incoming) => self.incoming.turn += 1,
            Some(WindowDirection::Outgoing) => self.outgoing.turn += 1,
            None => {}
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &CountedWindow> {
        self.incoming.windows.iter().chain(&self.outgoing.windows)
    }

    pub(super) fn place(of: &CountedWindow) -> WindowRange {
        WindowRange { base: of.window.base(), bytes: of.window.bytes(), window: of.window.raw() }
    }
}
