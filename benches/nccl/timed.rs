//! When each of a communicator's collectives began and ended on the GPU.

use std::sync::{Arc, Mutex, PoisonError};

use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::{CudaEvent, sys::CUevent_flags};
use moebius::nccl::NcclComm;
use moebius::{Error, Result};

use crate::wrapped::{About, Wrapped};

/// Spans of the collectives since they were last taken.
#[derive(Debug, Clone, Default)]
pub struct Spans(Arc<Mutex<Vec<(CudaEvent, CudaEvent)>>>);

impl Spans {
    /// Forgets them.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Milliseconds that collectives took; the GPU is idle.
    pub fn take(&self) -> Result<f64> {
        let spans = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        spans.iter().map(|(from, to)| from.elapsed_ms(to).map(f64::from).map_err(failed)).sum()
    }
}

/// A rank's communicator with a note of its spans.
pub type Timed = Wrapped<Spans>;

fn failed(e: impl std::fmt::Debug) -> Error {
    Error::Device { call: "bench", operation: "event".into(), message: format!("{e:?}") }
}

/// A point in time on the GPU.
pub fn event(cuda: &Cuda) -> Result<CudaEvent> {
    cuda.stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed)
}

/// Milliseconds between two.
pub fn between(from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
    from.elapsed_ms(to).map(f64::from).map_err(failed)
}

impl Timed {
    pub fn new(inner: NcclComm) -> Self {
        Self { inner, about: Spans::default() }
    }

    pub fn cuda(&self) -> &Cuda {
        self.inner.cuda()
    }
}

impl About for Spans {
    fn about(&mut self, inner: &mut NcclComm, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        let from = event(inner.cuda())?;
        call(inner)?;
        let to = event(inner.cuda())?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((from, to));
        Ok(())
    }
}
