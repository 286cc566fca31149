//! A rank's communicator whose collectives can be left out, so that what a chain does besides is timed without them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moebius::Result;
use moebius::comm::{Communicator, Exchange, ReduceOp, Tag};
use moebius::cuda::Cuda;
use moebius::nccl::NcclComm;
use moebius::{DType, Tensor, TensorMut, TensorRef};

/// As the communicator it has, but where `silent` is set collectives that move tensors do nothing: buffers keep what
/// earlier ones have left there. All-reduces go on: what a chain joins by them are a step's amaxes, 4 bytes an expert, and
/// without them weights would be zeros, which a GPU multiplies faster. It is set and cleared by all ranks between the same
/// two passes.
#[derive(Debug)]
pub struct Silenced {
    pub inner: NcclComm,
    pub silent: Arc<AtomicBool>,
}

impl Silenced {
    fn unless(&mut self, collective: impl FnOnce(&mut NcclComm) -> Result<()>) -> Result<()> {
        if self.silent.load(Ordering::Acquire) { Ok(()) } else { collective(&mut self.inner) }
    }
}

impl Communicator<Cuda> for Silenced {
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

    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.all_gather(tag, send, recv))
    }

    fn gather_in_place(&mut self, tag: Tag, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.gather_in_place(tag, buffer))
    }

    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.reduce_scatter(tag, send, recv))
    }

    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.inner.all_reduce(tag, op, buffer)
    }

    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.all_to_all_v(tag, exchange))
    }

    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.exchange_blocks(tag, send, recv))
    }

    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        self.unless(|inner| inner.broadcast(tag, root, buffer))
    }

    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.inner.barrier(tag)
    }

    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.inner.refuse(tag, reason)
    }

    fn copies_beside(&self) -> bool {
        self.inner.copies_beside()
    }

    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<Cuda>>> {
        self.inner.memory(tag, dtype, dims)
    }

    fn ended(&self) -> bool {
        self.inner.ended()
    }
}
