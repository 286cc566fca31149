//! A rank's communicator with something done about each of its collectives.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moebius::Result;
use moebius::comm::{Communicator, Exchange, ReduceOp, Tag};
use moebius::cuda::Cuda;
use moebius::nccl::NcclComm;
use moebius::{DType, Tensor, TensorMut, TensorRef};

/// Action around a collective.
pub trait About: fmt::Debug + Send {
    fn about(&mut self, inner: &mut NcclComm, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()>;

    /// The same of all-reduces.
    fn about_all_reduce(&mut self, inner: &mut NcclComm, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        self.about(inner, call)
    }
}

#[derive(Debug)]
pub struct Wrapped<A> {
    pub inner: NcclComm,
    pub about: A,
}

/// Leaves collectives out while it is set, so that what a chain does besides is timed without them: buffers keep what
/// earlier ones have left there. All ranks set and clear it between the same two passes.
///
/// All-reduces go on: what a chain joins by them are a step's amaxes, 4 bytes an expert, and without them weights would
/// be zeros, which a GPU multiplies faster.
#[derive(Debug, Clone, Default)]
pub struct Silent(Arc<AtomicBool>);

impl Silent {
    pub fn set(&self, silent: bool) {
        self.0.store(silent, Ordering::Release);
    }
}

impl About for Silent {
    fn about(&mut self, inner: &mut NcclComm, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        if self.0.load(Ordering::Acquire) { Ok(()) } else { call(inner) }
    }

    fn about_all_reduce(&mut self, inner: &mut NcclComm, call: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        call(inner)
    }
}

impl<A: About> Communicator<Cuda> for Wrapped<A> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn calls(&self) -> u64 {
        self.inner.calls()
    }
    fn device(&self) -> Option<&Cuda> {
        self.inner.device()
    }
    fn ended(&self) -> bool {
        self.inner.ended()
    }
    fn native(&mut self) -> Option<&mut NcclComm> {
        self.inner.native()
    }
    fn uses_copy_engines(&self) -> bool {
        self.inner.uses_copy_engines()
    }
    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<Cuda>>> {
        self.inner.memory(tag, dtype, dims)
    }
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.all_gather(tag, send, recv))
    }
    fn gather_in_place(&mut self, tag: Tag, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.gather_in_place(tag, buffer))
    }
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.reduce_scatter(tag, send, recv))
    }
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about_all_reduce(&mut self.inner, |c| c.all_reduce(tag, op, buffer))
    }
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.all_to_all_v(tag, exchange))
    }
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.exchange_blocks(tag, send, recv))
    }
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.about.about(&mut self.inner, |c| c.broadcast(tag, root, buffer))
    }
    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.inner.barrier(tag)
    }
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.inner.refuse(tag, reason)
    }
}
