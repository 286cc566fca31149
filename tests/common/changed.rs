//! A communicator of which something is changed.
#![allow(dead_code, reason = "each suite uses some of it")]

use std::sync::{Arc, Mutex};

use moebius::comm::{Communicator, Exchange, Op, ReduceOp, Tag};
use moebius::{DType, Device, Error, Result, Tensor, TensorMut, TensorRef};

/// All-reduces with the sizes of their buffers.
pub type Reduced = Arc<Mutex<Vec<(ReduceOp, Vec<usize>)>>>;

/// Exchanges of blocks with the sizes of what was sent and received.
pub type Moved = Arc<Mutex<Vec<(Vec<usize>, Vec<usize>)>>>;

/// Bytes to each rank of all-gathers (one number) and all-to-alls, by what they served.
pub type Sent = Arc<Mutex<Vec<(Op, Vec<usize>)>>>;

/// What the collectives entered so far are for.
pub type Entered = Arc<Mutex<Vec<Op>>>;

/// A communicator, changed as the fields say.
#[derive(Debug)]
pub struct Changed<D: Device> {
    /// The communicator itself.
    pub inner: Box<dyn Communicator<D>>,
    /// In place of the number of ranks.
    pub size: Option<usize>,
    /// Does not tell its device.
    pub silent: bool,
    /// Has memory of its own for collectives, of this device.
    pub memory: Option<D>,
    /// So many of the first requests of it fail, which the other ranks are told.
    pub scarce: usize,
    /// All-reduces so far.
    pub reduced: Reduced,
    /// Exchanges so far.
    pub moved: Moved,
    /// All-gathers and all-to-alls so far.
    pub sent: Sent,
    /// Collectives so far, the one under way among them.
    pub entered: Entered,
}

impl<D: Device> Changed<D> {
    /// Nothing is changed yet.
    pub fn new(inner: Box<dyn Communicator<D>>) -> Self {
        let (reduced, moved, sent, entered) = Default::default();
        Self { inner, size: None, silent: false, memory: None, scarce: 0, reduced, moved, sent, entered }
    }

    fn entering(&mut self, tag: Tag) -> &mut dyn Communicator<D> {
        self.entered.lock().unwrap().push(tag.op);
        &mut *self.inner
    }
}

impl<D: Device> Communicator<D> for Changed<D> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.size.unwrap_or_else(|| self.inner.size())
    }
    fn calls(&self) -> u64 {
        self.inner.calls()
    }
    fn device(&self) -> Option<&D> {
        self.inner.device().filter(|_| !self.silent)
    }
    fn copies_beside(&self) -> bool {
        self.memory.is_some() || self.inner.copies_beside()
    }
    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<D>>> {
        match &self.memory {
            Some(_) if self.scarce > 0 => {
                self.scarce -= 1;
                self.inner.refuse(tag, "out of memory")?;
                Err(Error::Device { call: "memory", operation: "allocate".into(), message: "out of memory".into() })
            }
            // All ranks together, as windows are registered.
            Some(device) => self.inner.barrier(tag).and_then(|()| Tensor::empty(device, dtype, dims)).map(Some),
            None => self.inner.memory(tag, dtype, dims),
        }
    }
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.sent.lock().unwrap().push((tag.op, vec![send.count() * send.dtype().size()]));
        self.entering(tag).all_gather(tag, send, recv)
    }
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.entering(tag).reduce_scatter(tag, send, recv)
    }
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, D>) -> Result<()> {
        self.reduced.lock().unwrap().push((op, buffer.dims().to_vec()));
        self.entering(tag).all_reduce(tag, op, buffer)
    }
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, D>) -> Result<()> {
        self.sent.lock().unwrap().push((tag.op, exchange.send_bytes.to_vec()));
        self.entering(tag).all_to_all_v(tag, exchange)
    }
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.moved.lock().unwrap().push((send.dims().to_vec(), recv.dims().to_vec()));
        self.entering(tag).exchange_blocks(tag, send, recv)
    }
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, D>) -> Result<()> {
        self.entering(tag).broadcast(tag, root, buffer)
    }
    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.entering(tag).barrier(tag)
    }
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.entering(tag).refuse(tag, reason)
    }
}
