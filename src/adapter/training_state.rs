//! A module's training state beside its parameters: settings, the step's number, and the last forward's figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::layer::{AuxValue, Noise};
use crate::lazy::Lazy;
use crate::metrics::Load;

/// State beside the parameters that the clones of a module share.
#[derive(Debug)]
pub(crate) struct TrainingState {
    seed: u64,
    /// Of the next training forward's noise.
    step: AtomicU64,
    /// Factor of the auxiliary losses' gradient.
    aux_scale: f64,
    last: Mutex<Option<LastForward>>,
}

/// Figures that the last forward has left to be read.
#[derive(Debug, Clone)]
pub(crate) struct LastForward {
    pub(crate) losses: Lazy<AuxValue>,
    pub(crate) load: Lazy<Load>,
}

impl Default for TrainingState {
    fn default() -> Self {
        Self::new(Noise { seed: 0, step: 0 }, 1.0)
    }
}

impl TrainingState {
    /// Of a module that has not run: the next training forward's noise, and the factor of the auxiliary losses'
    /// gradient.
    pub(crate) fn new(noise: Noise, aux_scale: f64) -> Self {
        Self { seed: noise.seed, step: AtomicU64::new(noise.step), aux_scale, last: Mutex::default() }
    }

    /// The settings, for a module of its own.
    #[cfg(feature = "candle")]
    pub(crate) fn settings(&self) -> Self {
        Self::new(self.noise(), self.aux_scale)
    }

    /// The next training forward's noise.
    pub(crate) fn noise(&self) -> Noise {
        Noise { seed: self.seed, step: self.step.load(Ordering::Relaxed) }
    }

    /// The same, for that forward.
    pub(crate) fn next_noise(&self) -> Noise {
        Noise { seed: self.seed, step: self.step.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn aux_scale(&self) -> f64 {
        self.aux_scale
    }

    /// Keeps a forward's figures.
    pub(crate) fn store(&self, last: LastForward) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    /// Forgets the figures of the last forward: one that is captured leaves none.
    #[cfg(feature = "candle")]
    pub(crate) fn forget(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The last forward's figures.
    pub(crate) fn last(&self, call: &'static str) -> Result<LastForward> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.ok_or_else(|| Error::invalid(call, "forward", "one before this call, not captured", "none"))
    }
}
