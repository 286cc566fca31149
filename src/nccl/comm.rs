//! One rank's communicator between GPUs.

use std::sync::Arc;
use std::time::Duration;

use crate::comm::agree::{Call, Detail};
use crate::comm::{Communicator, Exchange, Op, ReduceOp, Tag, check_blocks};
use crate::cuda::{Cuda, DeviceRef, Event};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::NcclLibrary;
use super::board::Board;
use super::lane::{Lane, Piece, Refused};
use super::link::Link;
use super::notices::Subject;
use super::sums::Sums;
use super::sys::{CommPtr, Functions, Reduction, StreamPtr};
use super::watch::{Watch, Work};

/// A rank's communicator between GPUs, on the stream of its [`Cuda`].
///
/// Collectives are enqueued; the host waits for a GPU only in [`barrier`](Communicator::barrier) and for what is summed
/// on the host (see [`all_reduce`](Communicator::all_reduce) below). A failure is kept: every later call returns it, and
/// so does every wait of the [`Cuda`] while this communicator lives. Then the communicator has been aborted, and what its
/// collectives wrote is worth nothing.
///
/// Sums keep the trait's promise: in rank order, in f32, the same bits on every rank and in every run. `F32`, `F16` and
/// `BF16` are exchanged piece by piece and added by this crate's kernel, which moves as many bytes as NCCL's own ring;
/// integers are NCCL's to add; `F64`, and the maximum of floating types, where a NaN must win, pass through the host.
///
/// Dropping it tells the peers that the rank has left, and waits until its collectives have ended.
#[derive(Debug)]
pub struct NcclComm {
    pub(super) cuda: Cuda,
    pub(super) timeout: Duration,
    pub(super) board: Board,
    pub(super) calls: u64,
    /// The last collective that was enqueued.
    entered: u64,
    pub(super) sums: Sums,
    /// Ends before the link.
    watch: Option<Watch>,
    pub(super) link: Arc<Link>,
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        self.board.leave(self.link.rank, self.entered);
        if let Some(watch) = self.watch.take() {
            // A panic inside NCCL's call has enqueued nothing.
            watch.entered(None);
        }
        if let Some(peer) = self.board.notices().aborted() {
            let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
            self.link.fail(CommError::PeerGone { operation: "drop", tag, rank: self.link.rank, peer });
        }
    }
}

/// What other libraries that build on NCCL need of a communicator.
#[derive(Debug, Clone, Copy)]
pub struct Raw<'a> {
    /// NCCL's functions.
    pub functions: &'a Functions,
    /// The communicator.
    pub comm: CommPtr,
    /// The stream of all its work.
    pub stream: StreamPtr,
}

/// Work on a GPU up to an event.
struct Until {
    cuda: Cuda,
    event: Event,
}

impl Work for Until {
    fn ended(&self) -> std::result::Result<bool, String> {
        self.cuda.bind("watch").and_then(|()| self.event.is_done()).map_err(|e| e.to_string())
    }
}

impl NcclComm {
    pub(super) fn new(link: Arc<Link>, cuda: &Cuda, board: Board, timeout: Duration) -> Result<Self> {
        let (rank, farewell) = (link.rank, board.clone());
        let farewell = Box::new(move |last| farewell.give_up(rank, last));
        let watch = Watch::start(Arc::clone(&link), Arc::clone(board.notices()), farewell)?;
        let guard: Arc<dyn crate::cuda::Guard> = link.clone();
        cuda.guard(&guard);
        Ok(Self {
            cuda: cuda.clone(),
            timeout,
            board,
            calls: 0,
            entered: 0,
            sums: Sums::default(),
            watch: Some(watch),
            link,
        })
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The library.
    pub fn library(&self) -> &NcclLibrary {
        self.link.library()
    }

    /// Within which every collective ends.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Why the communicator has ended, if it has.
    pub fn failure(&self) -> Option<CommError> {
        self.link.failure()
    }

    /// Runs calls of NCCL, or of a library that takes its communicators, while nobody frees the communicator. Not
    /// watched: for what ends without the peers.
    ///
    /// # Errors
    /// What `calls` returns; the failure that ended the communicator.
    pub fn with_raw<T>(&self, calls: impl FnOnce(Raw<'_>) -> Result<T>) -> Result<T> {
        self.cuda.bind("NcclComm::with_raw")?;
        let stream = self.stream();
        match self.link.with(|functions, comm| calls(Raw { functions, comm, stream })) {
            Some(result) => result,
            None => Err(self.ended("with_raw", Tag { layer: 0, op: Op::User, sequence: 0 })),
        }
    }

    /// The same for what all ranks call together: counted, compared over the ranks where they are threads, and watched.
    ///
    /// # Errors
    /// What `calls` returns, which ends the communicator on all ranks; a collective's own errors.
    pub fn collective_raw<T>(
        &mut self,
        operation: &'static str,
        tag: Tag,
        calls: impl FnOnce(Raw<'_>) -> Result<T>,
    ) -> Result<T> {
        self.together(Call { operation, tag, dtype: DType::U8, detail: Detail::Plain, bytes: 0 }, calls)
    }

    pub(super) fn together<T>(&mut self, call: Call, calls: impl FnOnce(Raw<'_>) -> Result<T>) -> Result<T> {
        let subject = self.begin(call)?;
        self.guarded(subject, |Lane { link, stream }| {
            link.with(|functions, comm| calls(Raw { functions, comm, stream: *stream }))
        })
    }

    /// Sends to one rank, which receives.
    ///
    /// # Errors
    /// As a collective's; the ranks' hosts do not meet for it.
    pub fn send(&mut self, tag: Tag, peer: usize, from: TensorRef<'_, Cuda>) -> Result<()> {
        let piece = Piece { peer, address: from.data().address(), bytes: Cuda::len(from.data()) };
        self.pair("send", tag, &[piece], &[])
    }

    /// Receives what one rank sends.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn recv(&mut self, tag: Tag, peer: usize, to: TensorMut<'_, Cuda>) -> Result<()> {
        let to = to.into_data();
        let piece = Piece { peer, address: to.address(), bytes: Cuda::len_mut(&to) };
        self.pair("recv", tag, &[], &[piece])
    }

    /// Sends to one rank and receives from another at once, as rings do.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn send_recv(
        &mut self,
        tag: Tag,
        (to, from): (usize, usize),
        (send, recv): (TensorRef<'_, Cuda>, TensorMut<'_, Cuda>),
    ) -> Result<()> {
        let recv = recv.into_data();
        let sent = Piece { peer: to, address: send.data().address(), bytes: Cuda::len(send.data()) };
        let received = Piece { peer: from, address: recv.address(), bytes: Cuda::len_mut(&recv) };
        self.pair("send_recv", tag, &[sent], &[received])
    }

    /// Calls between some of the ranks only: they count on nobody else, so they are not in the ranks' common count.
    fn pair(&mut self, operation: &'static str, tag: Tag, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        let subject = self.aside(operation, tag, sends.iter().chain(receives).map(|piece| piece.peer))?;
        // SAFETY: the views have those bytes, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.exchange(sends, receives) })
    }

    /// The subject of a call that concerns these peers only.
    pub(super) fn aside(
        &self,
        operation: &'static str,
        tag: Tag,
        mut peers: impl Iterator<Item = usize>,
    ) -> Result<Subject> {
        let (rank, size) = (self.link.rank, self.link.size);
        if let Some(peer) = peers.find(|peer| *peer >= size) {
            return Err(Error::invalid(operation, "peer", format!("a rank below {size}"), peer));
        }
        self.alive()?;
        Ok(Subject { rank, number: self.calls, operation, tag })
    }

    pub(super) fn stream(&self) -> StreamPtr {
        self.cuda.stream().raw().cu_stream().cast()
    }

    fn alive(&self) -> Result<()> {
        self.link.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Counts a collective and meets the other ranks before it.
    pub(super) fn begin(&mut self, call: Call) -> Result<Subject> {
        self.calls += 1;
        let (operation, tag) = (call.operation, call.tag);
        let subject = Subject { rank: self.link.rank, number: self.calls, operation, tag };
        self.alive()?;
        match self.board.meet(subject, call, self.timeout) {
            Ok(()) => Ok(subject),
            Err(error) if self.board.meets() => Err(error.into()),
            // Others may be inside the collective: without this rank it never ends.
            Err(error) => Err(self.end(error)),
        }
    }

    /// Runs a collective's calls with the watchdog looking on, then has it watch what they enqueued. `None` from them: the
    /// communicator has ended.
    pub(super) fn guarded<T>(
        &mut self,
        subject: Subject,
        calls: impl FnOnce(&Lane<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        if let Err(error) = self.cuda.bind(subject.operation) {
            return Err(self.broken(subject, error));
        }
        if let Some(watch) = &self.watch {
            watch.enter(subject, self.timeout);
        }
        match calls(&Lane { link: &self.link, stream: self.stream() }) {
            Some(Ok(value)) => self.watched(subject).map(|()| value),
            Some(Err(error)) => Err(self.broken(subject, error)),
            None => Err(self.ended(subject.operation, subject.tag)),
        }
    }

    /// The same for calls of NCCL alone.
    pub(super) fn enqueue(
        &mut self,
        subject: Subject,
        calls: impl FnOnce(&Lane<'_>) -> std::result::Result<(), Refused>,
    ) -> Result<()> {
        self.guarded(subject, |lane| match calls(lane) {
            Ok(()) => Some(Ok(())),
            Err(refused) => refused.map(|error| Err(error.into())),
        })
    }

    /// A collective without any bytes, on all ranks.
    fn nothing(&mut self, subject: Subject) -> Result<()> {
        self.entered = subject.number;
        Ok(())
    }

    /// Watches what has been enqueued; not inside a recording, which runs later and any number of times.
    fn watched(&mut self, subject: Subject) -> Result<()> {
        self.entered = subject.number;
        let work: Option<Box<dyn Work>> = match self.cuda.is_capturing()? {
            true => None,
            false => Some(Box::new(Until { event: self.cuda.record()?, cuda: self.cuda.clone() })),
        };
        if let Some(watch) = &self.watch {
            watch.entered(work);
        }
        Ok(())
    }

    /// The others may have begun a collective that this rank could not: it ends the communicator.
    fn broken(&mut self, subject: Subject, error: Error) -> Error {
        let Subject { rank, operation, tag, .. } = subject;
        if let Some(failure) = self.link.failure() {
            // The watchdog's work: the call was ended from outside.
            return failure.into();
        }
        self.board.post_refusal(subject, &error.to_string());
        self.end(CommError::Transport { operation, tag, rank, reason: error.to_string() });
        error
    }

    pub(super) fn end(&self, error: CommError) -> Error {
        let first = self.link.fail(error);
        if let Some(watch) = &self.watch {
            watch.entered(None);
        }
        self.board.give_up(self.link.rank, self.calls);
        self.link.abort();
        first.into()
    }

    fn ended(&self, operation: &'static str, tag: Tag) -> Error {
        let reason = "the communicator has ended".to_string();
        let unknown = || CommError::Poisoned { operation, tag, rank: self.link.rank, reason };
        self.link.failure().unwrap_or_else(unknown).into()
    }

    /// Passes a check of this rank's arguments, or tells the others that it failed.
    fn check(&mut self, tag: Tag, checked: Result<()>) -> Result<()> {
        if let Err(error) = &checked {
            // The first error is the one to report, whatever becomes of the meeting.
            let _ = self.refuse(tag, &error.to_string());
        }
        checked
    }

    /// The pieces of a buffer, one a rank but for this one, and this rank's.
    fn pieces(&self, base: u64, sizes: &[usize]) -> (Vec<Piece>, usize) {
        let (mut at, mut own, mut pieces) = (0, 0, Vec::with_capacity(sizes.len()));
        for (peer, &bytes) in sizes.iter().enumerate() {
            match peer == self.link.rank {
                true => own = at,
                false => pieces.push(Piece { peer, address: base + at as u64, bytes }),
            }
            at += bytes;
        }
        (pieces, own)
    }

    /// Pieces of the given sizes to and from all ranks; this rank's own is copied.
    pub(super) fn scatter_pieces(
        &mut self,
        subject: Subject,
        (send, send_bytes): (DeviceRef<'_>, &[usize]),
        (recv, recv_bytes): (TensorMut<'_, Cuda>, &[usize]),
    ) -> Result<()> {
        let mut recv = recv.into_data();
        let (sends, from) = self.pieces(send.address(), send_bytes);
        let (receives, to) = self.pieces(recv.address(), recv_bytes);
        let own = recv_bytes[self.link.rank];
        self.cuda
            .copy(Cuda::slice(send, from..from + own), Cuda::slice_mut(Cuda::reborrow(&mut recv), to..to + own))?;
        // SAFETY: the views have those bytes, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.exchange(&sends, &receives) })
    }
}

/// What a rank sends of `size` blocks from one address, and receives to another without room for its own.
pub(super) fn blocks((rank, size): (usize, usize), (from, to): (u64, u64), bytes: usize) -> (Vec<Piece>, Vec<Piece>) {
    let others = || (0..size).filter(|peer| *peer != rank);
    let sends = others().map(|peer| Piece { peer, address: from + (peer * bytes) as u64, bytes });
    let receives = others().enumerate().map(|(i, peer)| Piece { peer, address: to + (i * bytes) as u64, bytes });
    (sends.collect(), receives.collect())
}

impl Communicator<Cuda> for NcclComm {
    fn rank(&self) -> usize {
        self.link.rank
    }

    fn size(&self) -> usize {
        self.link.size
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn device(&self) -> Option<&Cuda> {
        Some(&self.cuda)
    }

    fn as_any(&mut self) -> Option<&mut dyn std::any::Any> {
        Some(self)
    }

    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "all_gather";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype())
            .and_then(|()| Error::check_shape(CALL, "recv", &[self.link.size * send.count()], &[recv.count()]));
        self.check(tag, checked)?;
        let bytes = Cuda::len(send.data());
        let detail = Detail::Plain;
        let subject = self.begin(Call { operation: CALL, tag, dtype: send.dtype(), detail, bytes })?;
        let (from, to) = (send.data().address(), recv.into_data().address());
        if bytes == 0 {
            return self.nothing(subject);
        }
        // SAFETY: `recv` has `size` times the bytes of `send`; both are given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.all_gather(from, to, bytes) })
    }

    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "reduce_scatter";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype())
            .and_then(|()| Error::check_shape(CALL, "send", &[self.link.size * recv.count()], &[send.count()]));
        self.check(tag, checked)?;
        let (dtype, bytes) = (send.dtype(), Cuda::len(send.data()));
        let detail = Detail::Reduce(ReduceOp::Sum);
        let subject = self.begin(Call { operation: CALL, tag, dtype, detail, bytes })?;
        match bytes {
            0 => self.nothing(subject),
            _ => self.sum_blocks(subject, send, recv),
        }
    }

    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        let (dtype, bytes) = (buffer.dtype(), Cuda::len(buffer.as_ref().data()));
        let call = Call { operation: "all_reduce", tag, dtype, detail: Detail::Reduce(op), bytes };
        let subject = self.begin(call)?;
        match bytes {
            0 => self.nothing(subject),
            _ => self.join_all(subject, op, buffer),
        }
    }

    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cuda>) -> Result<()> {
        self.check(tag, exchange.check(self.link.size))?;
        let detail = Detail::Pieces { send: exchange.send_bytes.to_vec(), recv: exchange.recv_bytes.to_vec() };
        let call = Call { operation: "all_to_all_v", tag, dtype: exchange.payload, detail, bytes: 0 };
        let subject = self.begin(call)?;
        let Exchange { send, send_bytes, recv, recv_bytes, .. } = exchange;
        self.scatter_pieces(subject, (send.data(), send_bytes), (recv, recv_bytes))
    }

    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cuda>, recv: TensorMut<'_, Cuda>) -> Result<()> {
        let checked = check_blocks(self.link.size, &send, &recv);
        let block = *checked.as_ref().unwrap_or(&0);
        self.check(tag, checked.map(drop))?;
        let (dtype, bytes) = (send.dtype(), Cuda::len(send.data()));
        let call = Call { operation: "exchange_blocks", tag, dtype, detail: Detail::Plain, bytes };
        let subject = self.begin(call)?;
        let (sends, receives) =
            blocks((self.link.rank, self.link.size), (send.data().address(), recv.into_data().address()), block);
        if receives.is_empty() || block == 0 {
            return self.nothing(subject);
        }
        // SAFETY: the views have those bytes, as checked, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.exchange(&sends, &receives) })
    }

    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cuda>) -> Result<()> {
        const CALL: &str = "broadcast";
        let checked = match root < self.link.size {
            true => Ok(()),
            false => Err(Error::invalid(CALL, "root", format!("a rank below {}", self.link.size), root)),
        };
        self.check(tag, checked)?;
        let (dtype, bytes) = (buffer.dtype(), Cuda::len(buffer.as_ref().data()));
        let subject = self.begin(Call { operation: CALL, tag, dtype, detail: Detail::Root(root), bytes })?;
        let address = buffer.into_data().address();
        if bytes == 0 {
            return self.nothing(subject);
        }
        // SAFETY: the view has those bytes, and memory it is of is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.broadcast(address, bytes, root) })
    }

    fn barrier(&mut self, tag: Tag) -> Result<()> {
        const CALL: &str = "barrier";
        let subject = self.begin(Call { operation: CALL, tag, dtype: DType::U8, detail: Detail::Plain, bytes: 0 })?;
        let mut word = Tensor::zeros(&self.cuda, DType::I32, &[1])?;
        let address = word.view_mut().into_data().address();
        // SAFETY: the tensor has one element and is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.all_reduce(address, 1, DType::I32, Reduction::SUM) })?;
        self.cuda.finish(CALL)
    }

    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        const CALL: &str = "refuse";
        self.calls += 1;
        let subject = Subject { rank: self.link.rank, number: self.calls, operation: CALL, tag };
        self.alive()?;
        let detail = Detail::Refusal(reason.to_string());
        let call = Call { operation: CALL, tag, dtype: DType::U8, detail, bytes: 0 };
        self.board.refuse(subject, call, self.timeout)?;
        if !self.board.meets() {
            let (rank, peer, reason) = (subject.rank, subject.rank, reason.to_string());
            self.end(CommError::Refused { operation: CALL, tag, rank, peer, reason });
        }
        Ok(())
    }
}
