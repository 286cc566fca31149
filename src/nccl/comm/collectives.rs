//! The collectives of a communicator.

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Exchange, NativeCommunicator, ReduceOp, Tag, check_blocks};
use crate::cuda::{Cuda, DeviceMut, DeviceRef};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::nccl::NcclComm;
use crate::nccl::comm::one_sided::{BlockExchange, OneSided};
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::ffi::enqueue::PeerBuffer;
use crate::nccl::ffi::sys::RedOp;

impl NcclComm {
    /// Memory to which the ranks' peers may write, by its address and bytes: the ranks must agree on it.
    fn place(&self, (address, bytes): (u64, usize)) -> Detail {
        match self.session.comm_handle.copy_engines {
            true => Detail::Place(self.session.comm_handle.place_number(address, bytes)),
            false => Detail::Plain,
        }
    }

    /// A collective without any bytes, on all ranks.
    fn nothing(&mut self, subject: CollectiveInfo) -> Result<()> {
        self.session.count.enqueued(subject.number);
        Ok(())
    }

    /// Passes a check of this rank's arguments, or of what it needs for the collective, or tells the others that it
    /// failed.
    pub(in crate::nccl) fn check<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        refuse_on_error(self, tag, checked)
    }

    /// The pieces of a buffer, one a rank but for this one, and this rank's.
    fn pieces(&self, base: u64, sizes: &[usize]) -> (Vec<PeerBuffer>, usize) {
        let (mut at, mut own, mut pieces) = (0, 0, Vec::with_capacity(sizes.len()));
        for (peer, &bytes) in sizes.iter().enumerate() {
            match peer == self.session.comm_handle.rank {
                true => own = at,
                false => pieces.push(PeerBuffer { peer, address: base + at as u64, bytes }),
            }
            at += bytes;
        }
        (pieces, own)
    }

    /// Pieces of the given sizes to and from all ranks; this rank's own is copied.
    pub(in crate::nccl) fn scatter_pieces(
        &mut self,
        subject: CollectiveInfo,
        send: DeviceRef<'_>,
        send_bytes: &[usize],
        mut recv: DeviceMut<'_>,
        recv_bytes: &[usize],
    ) -> Result<()> {
        let (sends, from) = self.pieces(send.address(), send_bytes);
        let (receives, to) = self.pieces(recv.address(), recv_bytes);
        let own = recv_bytes[self.session.comm_handle.rank];
        let (mine, place) = (from..from + own, to..to + own);
        let copied = self.cuda.copy(Cuda::slice(send, mine), Cuda::slice_mut(Cuda::reborrow(&mut recv), place));
        self.session.check_begun(subject, copied)?;
        // SAFETY: the views have those bytes, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.exchange(&sends, &receives) })
    }
}

/// Blocks that a rank sends, `size` of them from one address, and receives to another without room for its own.
pub(in crate::nccl) fn blocks(
    rank: usize,
    size: usize,
    from: u64,
    to: u64,
    bytes: usize,
) -> (Vec<PeerBuffer>, Vec<PeerBuffer>) {
    let others = || (0..size).filter(|peer| *peer != rank);
    let sends = others().map(|peer| PeerBuffer { peer, address: from + (peer * bytes) as u64, bytes });
    let receives = others().enumerate().map(|(i, peer)| PeerBuffer { peer, address: to + (i * bytes) as u64, bytes });
    (sends.collect(), receives.collect())
}

impl NativeCommunicator for Cuda {
    type Native = NcclComm;
}

impl Communicator<Cuda> for NcclComm {
    fn rank(&self) -> usize {
        self.session.comm_handle.rank
    }

    fn size(&self) -> usize {
        self.session.comm_handle.size
    }

    fn calls(&self) -> u64 {
        self.session.count.calls()
    }

    fn device(&self) -> Option<&Cuda> {
        Some(&self.cuda)
    }

    fn uses_copy_engines(&self) -> bool {
        self.session.comm_handle.copy_engines
    }

    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<Cuda>>> {
        match self.session.comm_handle.copy_engines {
            true => self.window_memory(tag, dtype, dims).map(Some),
            false => Ok(None),
        }
    }

    fn ended(&self) -> bool {
        self.failure().is_some()
    }

    fn native(&mut self) -> Option<&mut NcclComm> {
        Some(self)
    }

    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "all_gather";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype()).and_then(|()| {
            Error::check_shape(CALL, "recv", &[self.session.comm_handle.size * send.count()], &[recv.count()])
        });
        self.check(tag, checked)?;
        let bytes = Cuda::len(send.data());
        let (from, to) = (send.data().address(), recv.into_data().address());
        let detail = self.place((to, self.session.comm_handle.size * bytes));
        let subject =
            self.session.begin(CollectiveCall { operation: CALL, tag, dtype: send.dtype(), detail, bytes })?;
        if bytes == 0 {
            return self.nothing(subject);
        }
        let place = to + (self.session.comm_handle.rank * bytes) as u64;
        if from != place
            && self.session.comm_handle.in_window(to, self.session.comm_handle.size * bytes)
            && !self.session.comm_handle.in_window(from, bytes)
        {
            // Copy engines gather where both ends are windows: so it is gathered in place.
            // SAFETY: the place is this rank's part of `recv`, of as many bytes.
            let own = unsafe { DeviceMut::from_raw(place, bytes) };
            let copied = self.cuda.copy(send.data(), own);
            self.session.check_begun(subject, copied)?;
            // SAFETY: as below; the rank's part is where NCCL looks for it.
            return self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_gather(place, to, bytes) });
        }
        // SAFETY: `recv` has `size` times the bytes of `send`; both are given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_gather(from, to, bytes) })
    }

    fn gather_in_place(&mut self, tag: Tag, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "gather_in_place";
        let (size, dtype, all) = (self.session.comm_handle.size, buffer.dtype(), Cuda::len(buffer.as_ref().data()));
        let checked = match all.is_multiple_of(size) {
            true => Ok(all / size),
            false => Err(Error::invalid(CALL, "buffer", format!("a block for each of {size} ranks"), all)),
        };
        let bytes = self.check(tag, checked)?;
        let to = buffer.into_data().address();
        let call = CollectiveCall { operation: "all_gather", tag, dtype, detail: self.place((to, all)), bytes };
        let subject = self.session.begin(call)?;
        if bytes == 0 {
            return self.nothing(subject);
        }
        let own = to + (self.session.comm_handle.rank * bytes) as u64;
        // SAFETY: `own` is this rank's block of `buffer`, which is given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_gather(own, to, bytes) })
    }

    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "reduce_scatter";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype()).and_then(|()| {
            Error::check_shape(CALL, "send", &[self.session.comm_handle.size * recv.count()], &[send.count()])
        });
        self.check(tag, checked)?;
        let (dtype, bytes) = (send.dtype(), Cuda::len(send.data()));
        let detail = Detail::Reduce(ReduceOp::Sum);
        let subject = self.session.begin(CollectiveCall { operation: CALL, tag, dtype, detail, bytes })?;
        match bytes {
            0 => self.nothing(subject),
            _ => self.sum_blocks(subject, false, send, recv),
        }
    }

    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        let (dtype, bytes) = (buffer.dtype(), Cuda::len(buffer.as_ref().data()));
        let call = CollectiveCall { operation: "all_reduce", tag, dtype, detail: Detail::Reduce(op), bytes };
        let subject = self.session.begin(call)?;
        match bytes {
            0 => self.nothing(subject),
            _ => self.join_all(subject, op, buffer),
        }
    }

    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cuda>) -> Result<()> {
        self.check(tag, exchange.check(self.session.comm_handle.size))?;
        let detail = Detail::Pieces { send: exchange.send_bytes.to_vec(), recv: exchange.recv_bytes.to_vec() };
        let call = CollectiveCall { operation: "all_to_all_v", tag, dtype: exchange.dtype, detail, bytes: 0 };
        let subject = self.session.begin(call)?;
        let Exchange { send, send_bytes, recv, recv_bytes, .. } = exchange;
        self.scatter_pieces(subject, send.data(), send_bytes, recv.into_data(), recv_bytes)
    }

    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        let size = self.session.comm_handle.size;
        let checked = check_blocks(size, &send, &recv).and_then(|block| {
            let comm_handle = &self.session.comm_handle;
            let (from, to) = (send.data().address(), recv.as_ref().data().address());
            let puts = block > 0 && comm_handle.in_window(to, (size - 1) * block);
            match puts && !comm_handle.in_window(from, size * block) {
                true => {
                    Err(Error::invalid("exchange_blocks", "send", "memory of the communicator, as recv is", "other"))
                }
                false => Ok(block),
            }
        });
        let block = self.check(tag, checked)?;
        let (dtype, bytes) = (send.dtype(), Cuda::len(send.data()));
        let (from, to) = (send.data().address(), recv.into_data().address());
        let detail = self.place((to, (size - 1) * block));
        let subject = self.session.begin(CollectiveCall { operation: "exchange_blocks", tag, dtype, detail, bytes })?;
        if size == 1 || block == 0 {
            return self.nothing(subject);
        }
        if let Some((window, offset)) = self.session.comm_handle.place(to, (size - 1) * block) {
            let (puts, blocks) = (OneSided::of(self.library()), BlockExchange { from, bytes: block, window, offset });
            let puts = self.session.check_begun(subject, puts)?;
            // SAFETY: the views have those bytes, as checked, and windows stay as long as the communicator. That peers
            // have given the same place they have compared, or, as processes that do not compare, promised.
            return self.enqueue(subject, |comm_stream| unsafe { puts.exchange(comm_stream, blocks) });
        }
        let (sends, receives) = blocks(self.session.comm_handle.rank, size, from, to, block);
        // SAFETY: the views have those bytes, as checked, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.exchange(&sends, &receives) })
    }

    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "broadcast";
        let checked = match root < self.session.comm_handle.size {
            true => Ok(()),
            false => Err(Error::invalid(CALL, "root", format!("a rank below {}", self.session.comm_handle.size), root)),
        };
        self.check(tag, checked)?;
        let (dtype, bytes) = (buffer.dtype(), Cuda::len(buffer.as_ref().data()));
        let subject =
            self.session.begin(CollectiveCall { operation: CALL, tag, dtype, detail: Detail::Root(root), bytes })?;
        let address = buffer.into_data().address();
        if bytes == 0 {
            return self.nothing(subject);
        }
        // SAFETY: the view has those bytes, and memory it is of is given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.broadcast(address, bytes, root) })
    }

    fn barrier(&mut self, tag: Tag) -> Result<()> {
        const CALL: &str = "barrier";
        let word = Tensor::zeros(&self.cuda, DType::I32, &[1]);
        let mut word = self.check(tag, word)?;
        let subject = self.session.begin(CollectiveCall {
            operation: CALL,
            tag,
            dtype: DType::U8,
            detail: Detail::Plain,
            bytes: 0,
        })?;
        let address = word.view_mut().into_data().address();
        // SAFETY: the tensor has one element and is given back in the stream's order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_reduce(address, 1, DType::I32, RedOp::SUM) })?;
        self.cuda.finish(CALL)
    }

    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.session.refuse(tag, reason)
    }
}
