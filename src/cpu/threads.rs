//! Ranks as threads of one process.
//!
//! Every collective is one meeting: each rank deposits what the call is for, its sizes and a copy of its bytes; the
//! last to arrive compares them; then each takes what is its own. A rank that meets an error before it could take
//! part [refuses](Communicator::refuse), so the others hear of it at once. A rank that is dropped (early return,
//! panic) is gone for good, and its peers are told at once.

use std::time::Duration;

use crate::comm::agree::{CollectiveCall, Detail, Verdict, compare_calls, failed};
use crate::comm::refusal::refuse_on_error;
use crate::comm::rendezvous::{Arc, Rendezvous, Round};
use crate::comm::{Communicator, Exchange, ReduceOp, Tag, check_blocks};
#[cfg(not(loom))]
use crate::comm::{PeerSignals, Put, Span, SymmetricMemory};
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::host_memory;
use crate::tensor::{TensorMut, TensorRef};

#[cfg(not(loom))]
use super::windows::{ThreadWindow, WindowRegistry};
use super::{Cpu, sum_ranks};

/// Factory of the communicators of a group of threads.
#[derive(Debug)]
pub struct ThreadWorld;

impl ThreadWorld {
    /// Communicators of `ranks` ranks, in rank order, to be moved to one thread each; every collective ends within
    /// `timeout`.
    pub fn create(ranks: usize, timeout: Duration) -> Vec<ThreadComm> {
        let world = Arc::new(Rendezvous::new(ranks));
        #[cfg(not(loom))]
        let windows = Arc::<WindowRegistry>::default();
        let comm = |rank| ThreadComm {
            rank,
            size: ranks,
            timeout,
            calls: 0,
            world: Arc::clone(&world),
            #[cfg(not(loom))]
            windows: Arc::clone(&windows),
        };
        (0..ranks).map(comm).collect()
    }
}

/// One rank's communicator between threads. Dropping it tells the peers that the rank has left.
#[derive(Debug)]
pub struct ThreadComm {
    rank: usize,
    size: usize,
    timeout: Duration,
    calls: u64,
    world: Arc<Rendezvous<Deposit, Verdict>>,
    #[cfg(not(loom))]
    windows: Arc<WindowRegistry>,
}

impl Drop for ThreadComm {
    fn drop(&mut self) {
        self.world.mark_departed(self.rank);
    }
}

/// Deposit of a rank at a meeting.
#[derive(Debug)]
struct Deposit {
    call: CollectiveCall,
    bytes: Vec<u8>,
}

impl ThreadComm {
    /// Exchanges deposits with the other ranks; fails on all of them where their calls disagree.
    fn rendezvous(
        &mut self,
        operation: &'static str,
        tag: Tag,
        dtype: DType,
        detail: Detail,
        bytes: &[u8],
    ) -> Result<Arc<Round<Deposit, Verdict>>> {
        // A rank without memory for a copy refuses, which needs none.
        let copy = host_memory::copied(operation, "a copy of what this rank brings", bytes);
        let copy = self.check(tag, copy)?;
        self.calls += 1;
        let (rank, timeout) = (self.rank, self.timeout);
        let call = CollectiveCall { operation, tag, dtype, detail, bytes: bytes.len() };
        let message = Deposit { call, bytes: copy };
        let round = self
            .world
            .exchange(rank, message, timeout, |all| compare_calls(all.iter().map(|m| &m.call)))
            .map_err(|failure| failed((operation, tag), rank, timeout, failure))?;
        match round.verdict.as_ref().and_then(|errors| errors.get(rank)) {
            Some(error) => Err(error.clone().into()),
            None => Ok(round),
        }
    }

    /// Passes a check of this rank's arguments, or tells the others that it failed.
    fn check<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        refuse_on_error(self, tag, checked)
    }
}

impl Communicator<Cpu> for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        const CALL: &str = "all_gather";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype())
            .and_then(|()| Error::check_shape(CALL, "recv", &[self.size * send.count()], &[recv.count()]));
        self.check(tag, checked)?;
        let round = self.rendezvous(CALL, tag, send.dtype(), Detail::Plain, send.data())?;
        let piece = send.data().len();
        if piece > 0 {
            let pieces = recv.into_data().chunks_exact_mut(piece);
            pieces.zip(&round.deposits).for_each(|(to, from)| to.copy_from_slice(&from.bytes));
        }
        Ok(())
    }

    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        const CALL: &str = "reduce_scatter";
        let checked = Error::check_dtype(CALL, "recv", send.dtype(), recv.dtype())
            .and_then(|()| Error::check_shape(CALL, "send", &[self.size * recv.count()], &[send.count()]));
        self.check(tag, checked)?;
        let round = self.rendezvous(CALL, tag, send.dtype(), Detail::Reduce(ReduceOp::Sum), send.data())?;
        let (piece, dtype) = (recv.count() * recv.dtype().size(), recv.dtype());
        let own = self.rank * piece..(self.rank + 1) * piece;
        let parts: Vec<&[u8]> = round.deposits.iter().map(|m| &m.bytes[own.clone()]).collect();
        sum_ranks(ReduceOp::Sum, dtype, &parts, recv.into_data());
        Ok(())
    }

    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, mut buffer: TensorMut<'_, Cpu>) -> Result<()> {
        let dtype = buffer.dtype();
        let round = self.rendezvous("all_reduce", tag, dtype, Detail::Reduce(op), buffer.as_ref().data())?;
        let parts: Vec<&[u8]> = round.deposits.iter().map(|m| &m.bytes[..]).collect();
        sum_ranks(op, dtype, &parts, buffer.reborrow().into_data());
        Ok(())
    }

    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cpu>) -> Result<()> {
        self.check(tag, exchange.check(self.size))?;
        let detail = Detail::Pieces { send: exchange.send_bytes.to_vec(), recv: exchange.recv_bytes.to_vec() };
        let round = self.rendezvous("all_to_all_v", tag, exchange.dtype, detail, exchange.send.data())?;
        let mut unfilled = exchange.recv.into_data();
        for (message, &bytes) in round.deposits.iter().zip(exchange.recv_bytes) {
            let start: usize = match &message.call.detail {
                Detail::Pieces { send, .. } => send[..self.rank].iter().sum(),
                _ => 0,
            };
            let (piece, rest) = std::mem::take(&mut unfilled).split_at_mut(bytes);
            piece.copy_from_slice(&message.bytes[start..start + bytes]);
            unfilled = rest;
        }
        Ok(())
    }

    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        let bytes = self.check(tag, check_blocks(self.size, &send, &recv))?;
        let round = self.rendezvous("exchange_blocks", tag, send.dtype(), Detail::Plain, send.data())?;
        let own = self.rank * bytes..(self.rank + 1) * bytes;
        let from = round.deposits.iter().enumerate().filter(|(peer, _)| *peer != self.rank);
        if bytes > 0 {
            let to = recv.into_data().chunks_exact_mut(bytes);
            to.zip(from).for_each(|(to, (_, from))| to.copy_from_slice(&from.bytes[own.clone()]));
        }
        Ok(())
    }

    fn broadcast(&mut self, tag: Tag, root: usize, mut buffer: TensorMut<'_, Cpu>) -> Result<()> {
        const CALL: &str = "broadcast";
        let checked = match root < self.size {
            true => Ok(()),
            false => Err(Error::invalid(CALL, "root", format!("a rank below {}", self.size), root)),
        };
        self.check(tag, checked)?;
        let round = self.rendezvous(CALL, tag, buffer.dtype(), Detail::Root(root), buffer.as_ref().data())?;
        buffer.reborrow().into_data().copy_from_slice(&round.deposits[root].bytes);
        Ok(())
    }

    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.rendezvous("barrier", tag, DType::U8, Detail::Plain, &[]).map(drop)
    }

    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        match self.rendezvous("refuse", tag, DType::U8, Detail::Refusal(reason.to_string()), &[]) {
            // Its own refusal, coming back.
            Err(Error::Comm(CommError::Refused { .. })) => Ok(()),
            other => other.map(drop),
        }
    }
}

#[cfg(not(loom))]
impl SymmetricMemory<Cpu> for ThreadComm {
    type Window = ThreadWindow;

    fn allocate(&mut self, tag: Tag, bytes: usize) -> Result<ThreadWindow> {
        // The size is compared as that of what each would bring.
        self.rendezvous(
            "allocate",
            tag,
            DType::U8,
            Detail::Pieces { send: vec![bytes; self.size], recv: vec![bytes; self.size] },
            &[],
        )?;
        let number = self.calls;
        Ok(ThreadWindow { number, parts: self.windows.window(number, self.size, bytes)? })
    }

    fn release(&mut self, tag: Tag, window: ThreadWindow) -> Result<()> {
        self.rendezvous("release", tag, DType::U8, Detail::Root(window.number as usize), &[])?;
        self.windows.forget(window.number);
        Ok(())
    }

    fn team(&self, _: &ThreadWindow) -> Result<Vec<usize>> {
        Ok((0..self.size).collect())
    }

    fn address(&self, window: &ThreadWindow, peer: usize) -> Result<Option<u64>> {
        check_peer("address", peer, self.size)?;
        Ok(Some(window.part(peer).as_ptr() as u64))
    }

    fn store(&mut self, window: &mut ThreadWindow, offset: usize, from: TensorRef<'_, Cpu>) -> Result<()> {
        let bytes = from.data().len();
        Span { offset, bytes }.check("store", "span", window.bytes())?;
        window.part(self.rank)[offset..offset + bytes].copy_from_slice(from.data());
        Ok(())
    }

    fn load(&mut self, window: &ThreadWindow, offset: usize, to: TensorMut<'_, Cpu>) -> Result<()> {
        let to = to.into_data();
        Span { offset, bytes: to.len() }.check("load", "span", window.bytes())?;
        to.copy_from_slice(&window.part(self.rank)[offset..offset + to.len()]);
        Ok(())
    }

    fn put(&mut self, tag: Tag, put: Put<'_, ThreadWindow>) -> Result<()> {
        const CALL: &str = "put";
        check_peer(CALL, put.peer, self.size)?;
        let Span { offset, bytes } = put.span;
        put.span.check(CALL, "from", put.from.bytes())?;
        Span { offset: put.offset, bytes }.check(CALL, "to", put.to.bytes())?;
        // Copied out first: both may be parts of one window, and even the same.
        let copy = host_memory::copied(CALL, "a copy of the part", &put.from.part(self.rank)[offset..offset + bytes])?;
        put.to.part(put.peer)[put.offset..put.offset + bytes].copy_from_slice(&copy);
        self.signal(tag, put.peer)
    }

    fn signal(&mut self, _: Tag, peer: usize) -> Result<()> {
        check_peer("signal", peer, self.size)?;
        self.windows.signal(self.rank, peer);
        Ok(())
    }

    fn wait(&mut self, tag: Tag, signals: &[PeerSignals]) -> Result<()> {
        let (rank, timeout) = (self.rank, self.timeout);
        for &PeerSignals { peer, count } in signals {
            check_peer("wait", peer, self.size)?;
            if !self.windows.take(peer, rank, count, timeout) {
                let missing = vec![peer];
                return Err(CommError::Timeout { operation: "wait", tag, rank, missing, timeout }.into());
            }
        }
        Ok(())
    }
}

#[cfg(not(loom))]
fn check_peer(call: &'static str, peer: usize, size: usize) -> Result<()> {
    match peer < size {
        true => Ok(()),
        false => Err(Error::invalid(call, "peer", format!("a rank below {size}"), peer)),
    }
}
