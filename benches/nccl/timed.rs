//! A communicator that notes when each of its collectives began and ended on the GPU.

use std::sync::{Arc, Mutex, PoisonError};

use moebius::comm::{Communicator, Exchange, ReduceOp, Tag};
use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::{CudaEvent, sys::CUevent_flags};
use moebius::nccl::NcclComm;
use moebius::{Error, Result, TensorMut, TensorRef};

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
#[derive(Debug)]
pub struct Timed {
    pub inner: NcclComm,
    pub spans: Spans,
}

fn failed(e: impl std::fmt::Debug) -> Error {
    Error::Device { call: "bench", operation: "event".into(), message: format!("{e:?}") }
}

/// A point in time on the GPU.
pub fn event(cuda: &Cuda) -> Result<CudaEvent> {
    cuda.stream().raw().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed)
}

/// Milliseconds between two.
pub fn between(from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
    from.elapsed_ms(to).map(f64::from).map_err(failed)
}

impl Timed {
    pub fn new(inner: NcclComm) -> Self {
        Self { inner, spans: Spans::default() }
    }

    pub fn cuda(&self) -> &Cuda {
        self.inner.cuda()
    }

    fn spanned(&mut self, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        let from = event(self.inner.cuda())?;
        call(&mut self.inner)?;
        let to = event(self.inner.cuda())?;
        self.spans.0.lock().unwrap_or_else(PoisonError::into_inner).push((from, to));
        Ok(())
    }
}

impl Communicator<Cuda> for Timed {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn calls(&self) -> u64 {
        self.inner.calls()
    }
    fn ended(&self) -> bool {
        self.inner.ended()
    }
    fn as_any(&mut self) -> Option<&mut dyn std::any::Any> {
        self.inner.as_any()
    }
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.all_gather(tag, send, recv))
    }
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.reduce_scatter(tag, send, recv))
    }
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.all_reduce(tag, op, buffer))
    }
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.all_to_all_v(tag, exchange))
    }
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.exchange_blocks(tag, send, recv))
    }
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.spanned(|c| c.broadcast(tag, root, buffer))
    }
    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.inner.barrier(tag)
    }
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.inner.refuse(tag, reason)
    }
}
