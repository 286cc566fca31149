//! The windows that a communicator keeps.

use std::sync::Arc;

use crate::nccl::ffi::sys::WindowPtr;
use crate::nccl::ffi::windows::{EngineMemory, NcclWindow, RegisteredWindow};

use super::{CommHandle, lock};

impl CommHandle {
    /// Keeps a window until it is taken back or the communicator ends.
    pub(in crate::nccl) fn retain_window(&self, window: RegisteredWindow) {
        lock(&self.windows).push(window);
    }

    /// The kept windows that nobody holds and all ranks' kernels may reach, of `bytes` and no more than twice that, as bits
    /// by their number, which all ranks have alike.
    pub(in crate::nccl) fn free_windows(&self, bytes: usize) -> u64 {
        let windows = lock(&self.windows);
        let fits = |window: &RegisteredWindow| {
            let free = window.shared && Arc::strong_count(&window.block) == 1;
            free && (bytes..=bytes.saturating_mul(2)).contains(&window.window.bytes())
        };
        windows.iter().take(64).enumerate().filter(|(_, window)| fits(window)).fold(0, |bits, (i, _)| bits | 1 << i)
    }

    /// The window of that number, and its memory.
    pub(in crate::nccl) fn window(&self, number: usize) -> Option<(NcclWindow, Arc<EngineMemory>)> {
        let windows = lock(&self.windows);
        let RegisteredWindow { window, block, .. } = windows.get(number)?;
        Some((NcclWindow::new(window.base(), window.bytes(), window.raw()), Arc::clone(block)))
    }

    /// Takes the window back that begins there.
    pub(in crate::nccl) fn take_window(&self, address: u64) -> Option<RegisteredWindow> {
        let mut windows = lock(&self.windows);
        let at = windows.iter().position(|window| window.window.base() == address)?;
        Some(windows.remove(at))
    }

    /// Whether memory lies in a window that is kept.
    pub(in crate::nccl) fn in_window(&self, address: u64, bytes: usize) -> bool {
        self.place(address, bytes).is_some()
    }

    /// The window that is kept of some memory, and where in it that lies.
    pub(in crate::nccl) fn place(&self, address: u64, bytes: usize) -> Option<(WindowPtr, usize)> {
        lock(&self.windows).iter().find_map(|window| window.place(address, bytes))
    }

    /// The same as a number, of which all ranks have the same for a place; 0: in no window.
    pub(in crate::nccl) fn place_number(&self, address: u64, bytes: usize) -> u64 {
        let windows = lock(&self.windows);
        let mut all = windows.iter().enumerate().filter(|_| bytes > 0);
        let place = all.find_map(|(i, window)| Some((i, window.place(address, bytes)?.1)));
        place.map_or(0, |(i, offset)| (i as u64 + 1) << 48 | offset as u64)
    }
}
