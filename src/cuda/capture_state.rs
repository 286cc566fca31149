//! The captures of a device: whether one is under way, its number, and its hooks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::CaptureHook;

use super::failure::{FailureSource, ReplayGate};

/// State of a device's captures.
#[derive(Default)]
pub(super) struct CaptureState {
    /// A graph is being captured.
    under_way: AtomicBool,
    /// So far, one under way counted.
    begun: AtomicU64,
    /// Called before a capture ends.
    hooks: Mutex<Vec<Weak<CaptureHook>>>,
    /// What replays of the one under way have to pass.
    gates: Mutex<Vec<Weak<dyn ReplayGate>>>,
    /// What the graph under way holds beside memory of its devices.
    held: Mutex<Vec<Arc<dyn Send + Sync>>>,
    /// What may fail in replays of the one under way, each once.
    sources: Mutex<Vec<Arc<dyn FailureSource>>>,
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
        self.gates().clear();
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    /// One more thing that the graph under way holds.
    #[cfg(feature = "nccl")]
    pub(super) fn hold(&self, held: Arc<dyn Send + Sync>) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).push(held);
    }

    /// What has been added since the last call.
    pub(super) fn take_held(&self) -> Vec<Arc<dyn Send + Sync>> {
        std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Something that may fail in replays of the graph under way.
    #[cfg(feature = "nccl")]
    pub(super) fn add_source(&self, source: Arc<dyn FailureSource>) {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if !sources.iter().any(|known| Arc::ptr_eq(known, &source)) {
            sources.push(source);
        }
    }

    /// What has been added since the last call.
    pub(super) fn take_sources(&self) -> Vec<Arc<dyn FailureSource>> {
        std::mem::take(&mut *self.sources.lock().unwrap_or_else(PoisonError::into_inner))
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

    fn gates(&self) -> MutexGuard<'_, Vec<Weak<dyn ReplayGate>>> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has replays of the capture under way pass this, once each.
    #[cfg(feature = "nccl")]
    pub(super) fn add_gate(&self, gate: Weak<dyn ReplayGate>) {
        let mut gates = self.gates();
        if !gates.iter().any(|known| known.ptr_eq(&gate)) {
            gates.push(gate);
        }
    }

    /// What replays of the capture that ends have to pass.
    pub(super) fn take_gates(&self) -> Vec<Weak<dyn ReplayGate>> {
        std::mem::take(&mut self.gates())
    }

    /// The hooks that are alive.
    pub(super) fn hooks(&self) -> Vec<Arc<CaptureHook>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
