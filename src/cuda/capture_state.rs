//! The captures of a device: whether one is under way, its number, and its hooks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::CaptureHook;
use crate::error::Result;

use super::failure::ReplayWatch;

/// State of a device's captures.
#[derive(Default)]
pub(super) struct CaptureState {
    /// A graph is being captured.
    under_way: AtomicBool,
    /// So far, one under way counted.
    begun: AtomicU64,
    /// Called before a capture ends.
    hooks: Mutex<Vec<Weak<CaptureHook>>>,
    /// Who is to watch replays of the one under way.
    watches: Mutex<Vec<Weak<dyn ReplayWatch>>>,
    /// What the graph under way needs beside memory of its devices.
    needs: Mutex<Vec<Arc<dyn GraphNeed>>>,
}

/// Something that a graph's calls need beside memory of its devices. The graph holds it.
pub(crate) trait GraphNeed: Send + Sync {
    /// What has to be held while a replay is enqueued.
    ///
    /// # Errors
    /// It is there no more: the graph cannot run.
    fn enter(&self) -> Result<Arc<dyn Send + Sync>>;
}

impl CaptureState {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<CaptureHook>>> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One is under way from here on; false where one was already.
    pub(super) fn begin(&self) -> bool {
        !self.under_way.swap(true, Ordering::SeqCst)
    }

    /// Gives the one under way its number.
    pub(super) fn count(&self) {
        self.watches().clear();
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// One more thing that the graph under way needs.
    #[cfg(feature = "nccl")]
    pub(super) fn add_need(&self, need: Arc<dyn GraphNeed>) {
        self.needs.lock().unwrap_or_else(PoisonError::into_inner).push(need);
    }

    /// What has been added since the last call.
    pub(super) fn take_needs(&self) -> Vec<Arc<dyn GraphNeed>> {
        std::mem::take(&mut *self.needs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn end(&self) {
        self.under_way.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.load(Ordering::SeqCst)
    }

    /// Number of the one under way.
    pub(super) fn number(&self) -> Option<u64> {
        self.is_under_way().then(|| self.begun.load(Ordering::SeqCst))
    }

    /// Has every capture call this before it ends.
    pub(super) fn add_hook(&self, hook: &Arc<CaptureHook>) {
        let mut hooks = self.lock();
        hooks.retain(|hook| hook.strong_count() > 0);
        hooks.push(Arc::downgrade(hook));
    }

    fn watches(&self) -> MutexGuard<'_, Vec<Weak<dyn ReplayWatch>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has replays of the capture under way watched.
    #[cfg(feature = "nccl")]
    pub(super) fn watch(&self, watch: Weak<dyn ReplayWatch>) {
        let mut watches = self.watches();
        if !watches.iter().any(|known| known.ptr_eq(&watch)) {
            watches.push(watch);
        }
    }

    /// Who is to watch replays of the capture that ends.
    pub(super) fn take_watches(&self) -> Vec<Weak<dyn ReplayWatch>> {
        std::mem::take(&mut self.watches())
    }

    /// The hooks that are alive.
    pub(super) fn hooks(&self) -> Vec<Arc<CaptureHook>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
