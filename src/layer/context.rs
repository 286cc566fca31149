//! What a forward leaves for its backward.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::dtype::DType;
use crate::ep::{Handle, Received};
use crate::kernels::{Jitter, Kernels};
use crate::tensor::Tensor;

use super::overlap::LayerOverlap;
use super::shared_expert::SharedContext;

/// State of a forward that its backward needs; consumed by it. The adapter keeps the inputs themselves (x and
/// parameters).
#[derive(Debug)]
pub struct Context<D: Kernels> {
    pub(super) handle: Handle<D>,
    pub(super) dtype: DType,
    pub(super) logits: Arc<Tensor<D>>,
    pub(super) ids: Arc<Tensor<D>>,
    pub(super) weights: Arc<Tensor<D>>,
    pub(super) jitter: Option<Jitter>,
    pub(super) aux_sums: Option<Arc<Tensor<D>>>,
    pub(super) received: Received<D>,
    pub(super) pre: Option<Tensor<D>>,
    pub(super) shared: Option<SharedContext<D>>,
    pub(super) overlap: LayerOverlap,
    pub(super) progress: Arc<BackwardProgress>,
}

/// How far a context's backward has come.
#[derive(Debug, Default)]
pub(crate) struct BackwardProgress(AtomicU8);

impl BackwardProgress {
    pub(super) const ROWS: u8 = 1;
    pub(super) const ALL: u8 = 2;
    const REFUSED: u8 = 3;

    pub(super) fn set(&self, to: u8) {
        self.0.store(to, Ordering::Release);
    }

    /// The other ranks have been told of a failure after the last collective.
    pub(crate) fn set_refused(&self) {
        self.set(Self::REFUSED);
    }
}

#[cfg(any(feature = "candle", feature = "burn"))]
impl BackwardProgress {
    /// The rows have come, on every rank: from here on the experts' gradients are written.
    pub(crate) fn has_rows(&self) -> bool {
        self.0.load(Ordering::Acquire) >= Self::ROWS
    }
}

#[cfg(feature = "candle")]
impl BackwardProgress {
    /// No collective is left, so that the other ranks do not hear of what fails from here on.
    pub(crate) fn has_exchanged_all(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::ALL
    }
}

impl<D: Kernels> Context<D> {
    /// Bytes that the context holds.
    pub fn bytes(&self) -> usize {
        let of = |t: &Option<Tensor<D>>| t.as_ref().map_or(0, Tensor::bytes);
        let shared = self.shared.as_ref().map_or(0, SharedContext::bytes);
        self.logits.bytes()
            + self.ids.bytes()
            + self.weights.bytes()
            + self.aux_sums.as_ref().map_or(0, |t| t.bytes())
            + of(&self.received.rows)
            + of(&self.received.weights)
            + of(&self.pre)
            + shared
    }

    /// The routing that forward made.
    pub fn handle(&self) -> &Handle<D> {
        &self.handle
    }

    /// How far its backward has come, to be asked when it has failed.
    #[cfg(any(feature = "candle", feature = "burn"))]
    pub(crate) fn progress(&self) -> Arc<BackwardProgress> {
        Arc::clone(&self.progress)
    }
}
