//! A communicator that fails, delays, hides or counts, as a test says.
#![allow(dead_code, reason = "each suite uses some of it")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use moebius::comm::{Communicator, Exchange, Op, ReduceOp, Tag};
use moebius::{CommError, DType, Device, Error, Result, Tensor, TensorMut, TensorRef};

/// All-reduces with the sizes of their buffers.
pub type Reduced = Arc<Mutex<Vec<(ReduceOp, Vec<usize>)>>>;

/// Exchanges of blocks with the sizes of what was sent and received.
pub type Moved = Arc<Mutex<Vec<(Vec<usize>, Vec<usize>)>>>;

/// Bytes to each rank of all-gathers (one number) and all-to-alls, by what they served.
pub type Sent = Arc<Mutex<Vec<(Op, Vec<usize>)>>>;

/// Purposes of the collectives entered so far.
pub type Entered = Arc<Mutex<Vec<Op>>>;

/// Which of its windows a rank has let a collective write, by the collective's number: all the same one, as each writes
/// to that place of the others'.
pub type Windows = Arc<Mutex<BTreeMap<u64, Option<usize>>>>;

/// Where a buffer lies.
pub type Address<D> = fn(&TensorMut<'_, D>) -> usize;

/// What the fields say of it.
#[derive(Debug)]
pub struct FaultyComm<D: Device> {
    /// The communicator itself.
    pub inner: Box<dyn Communicator<D>>,
    /// In place of the number of ranks.
    pub size: Option<usize>,
    /// Does not tell its device.
    pub hides_device: bool,
    /// Has memory of its own for collectives, of this device.
    pub memory: Option<D>,
    /// So many of the first requests of it fail, which the other ranks are told.
    pub failing_requests: usize,
    /// Where memory is, and what the ranks' collectives have written: another window than the other ranks' is an error.
    pub windows: Option<(Address<D>, Windows)>,
    /// Its windows so far.
    pub own: Vec<usize>,
    /// Its part of the first collective from this number on fails: as over NCCL the communicator has ended then, on all
    /// ranks.
    pub fails_from: Option<u64>,
    /// Every collective of this name takes so much longer.
    pub slow: Option<(&'static str, Duration)>,
    /// Ends with a failure, and returns it from there on.
    pub ends_with_failure: bool,
    /// That failure.
    pub ended: Option<CommError>,
    /// All-reduces so far.
    pub reduced: Reduced,
    /// Exchanges so far.
    pub moved: Moved,
    /// All-gathers and all-to-alls so far.
    pub sent: Sent,
    /// Collectives so far, the one under way among them.
    pub entered: Entered,
}

impl<D: Device> FaultyComm<D> {
    /// The communicator as it is.
    pub fn new(inner: Box<dyn Communicator<D>>) -> Self {
        let (reduced, moved, sent, entered) = Default::default();
        Self {
            inner,
            size: None,
            hides_device: false,
            memory: None,
            failing_requests: 0,
            windows: None,
            own: Vec::new(),
            fails_from: None,
            slow: None,
            ends_with_failure: false,
            ended: None,
            reduced,
            moved,
            sent,
            entered,
        }
    }

    /// Whether the ranks write the same window.
    fn in_one_window(&mut self, tag: Tag, recv: &TensorMut<'_, D>) -> Result<()> {
        let Some((address, all)) = &self.windows else { return Ok(()) };
        let (at, number) = (address(recv), self.inner.calls());
        let own = self.own.iter().position(|window| *window == at);
        let first = *all.lock().unwrap().entry(number).or_insert(own);
        if first == own {
            return Ok(());
        }
        self.inner.refuse(tag, "another window")?;
        let message = format!("window {own:?} where the others have {first:?}");
        Err(Error::Device { call: "collective", operation: "write".into(), message })
    }

    fn linger(&self, name: &str) {
        if let Some((_, time)) = self.slow.filter(|(slow, _)| *slow == name) {
            thread::sleep(time);
        }
    }

    /// A collective, unless the communicator has ended or ends here.
    fn call(&mut self, tag: Tag, run: impl FnOnce(&mut dyn Communicator<D>) -> Result<()>) -> Result<()> {
        self.entered.lock().unwrap().push(tag.op);
        if let Some(failure) = &self.ended {
            return Err(failure.clone().into());
        }
        let (operation, rank, reason) = ("copy", self.inner.rank(), "an illegal address".to_string());
        if self.fails_from.is_some_and(|first| self.inner.calls() >= first) {
            self.inner.refuse(tag, &reason)?;
            let failure = CommError::Transport { operation, tag, rank, reason };
            return Err(self.ended.insert(failure).clone().into());
        }
        let done = run(&mut *self.inner);
        if let (true, Err(Error::Comm(failure))) = (self.ends_with_failure, &done) {
            self.ended = Some(failure.clone());
        }
        done
    }
}

impl<D: Device> Communicator<D> for FaultyComm<D> {
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
        self.inner.device().filter(|_| !self.hides_device)
    }
    fn uses_copy_engines(&self) -> bool {
        self.memory.is_some() || self.inner.uses_copy_engines()
    }
    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<D>>> {
        match &self.memory {
            Some(_) if self.failing_requests > 0 => {
                self.failing_requests -= 1;
                self.inner.refuse(tag, "out of memory")?;
                Err(Error::Device { call: "memory", operation: "allocate".into(), message: "out of memory".into() })
            }
            // All ranks together, as windows are registered.
            Some(device) => {
                self.inner.barrier(tag)?;
                let mut made = Tensor::empty(device, dtype, dims)?;
                self.own.extend(self.windows.as_ref().map(|(address, _)| address(&made.view_mut())));
                Ok(Some(made))
            }
            None => self.inner.memory(tag, dtype, dims),
        }
    }
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.in_one_window(tag, &recv)?;
        self.sent.lock().unwrap().push((tag.op, vec![send.count() * send.dtype().size()]));
        self.call(tag, |inner| inner.all_gather(tag, send, recv))
    }
    fn gather_in_place(&mut self, tag: Tag, mut buffer: TensorMut<'_, D>) -> Result<()> {
        let Some(device) = &self.memory else {
            self.in_one_window(tag, &buffer)?;
            let bytes = buffer.count() * buffer.dtype().size() / self.size();
            self.sent.lock().unwrap().push((tag.op, vec![bytes]));
            return self.call(tag, |inner| inner.gather_in_place(tag, buffer));
        };
        let count = buffer.count() / self.size();
        let mut own = Tensor::empty(device, buffer.dtype(), &[count])?;
        let bytes = own.bytes();
        let block = D::slice_mut(buffer.reborrow().into_data(), self.rank() * bytes..(self.rank() + 1) * bytes);
        device.copy(D::downgrade(&block), own.view_mut().into_data())?;
        // What has not arrived is not there.
        device.zero(block)?;
        self.all_gather(tag, own.view(), buffer)
    }
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.linger("reduce_scatter");
        self.call(tag, |inner| inner.reduce_scatter(tag, send, recv))
    }
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, D>) -> Result<()> {
        self.reduced.lock().unwrap().push((op, buffer.dims().to_vec()));
        self.call(tag, |inner| inner.all_reduce(tag, op, buffer))
    }
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, D>) -> Result<()> {
        self.linger("all_to_all_v");
        self.sent.lock().unwrap().push((tag.op, exchange.send_bytes.to_vec()));
        self.call(tag, |inner| inner.all_to_all_v(tag, exchange))
    }
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.in_one_window(tag, &recv)?;
        self.moved.lock().unwrap().push((send.dims().to_vec(), recv.dims().to_vec()));
        self.call(tag, |inner| inner.exchange_blocks(tag, send, recv))
    }
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, D>) -> Result<()> {
        self.call(tag, |inner| inner.broadcast(tag, root, buffer))
    }
    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.call(tag, |inner| inner.barrier(tag))
    }
    fn ended(&self) -> bool {
        self.ended.is_some() || self.inner.ended()
    }
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.call(tag, |inner| inner.refuse(tag, reason))
    }
}
