//! Collectives beside the computation: a helper thread with a communicator of its own runs one collective after
//! another.
//!
//! A rank has two collective threads, one for gathers and one for reductions, so neither waits behind the other; or
//! one, on which they take turns ([`EtpOptions::in_turn`](crate::etp::EtpOptions::in_turn)). Where the chain has a
//! communicator of the replicas, one more carries the sums over them. Every rank gives its
//! collective threads the same collectives in the same order: in place of one that it cannot give, its refusal. A
//! collective owns its buffers, so nobody can touch them while it runs.
//!
//! On a GPU the thread enqueues, on its communicator's stream, behind what the computation had been given when the
//! collective was; whoever takes the result has its own stream wait for the collective's event. No host waits for a
//! GPU. In a capture whoever gives a collective waits until it has been enqueued: no two threads may add to one graph
//! at a time, which the driver does not see to (it crashes). There the collectives of both collective threads have one
//! order on every rank, as on one collective thread: to be enqueued can mean to meet the other ranks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use crate::comm::{Communicator, Op, Tag};
use crate::device::CaptureHook;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

use crate::etp::buffers::cache::{Buffer, BufferCache, BufferId, BufferKey};
use crate::etp::buffers::stream_pair::{StreamPair, TransferBuffer};
use crate::etp::collective::{Collective, CollectiveResult};
use crate::etp::{CALL, ShardDevice};

/// A collective under way.
#[derive(Debug)]
pub(in crate::etp) struct PendingCollective<D: ShardDevice> {
    thread_name: &'static str,
    reply: ResultSlot<D>,
    /// The capture that it is part of.
    capture: Option<u64>,
    _under_way: CountGuard,
}

/// Where its outcome is.
#[derive(Debug)]
enum ResultSlot<D: ShardDevice> {
    Later(Receiver<CollectiveResult<D>>),
    Here(Box<CollectiveResult<D>>),
}

impl<D: ShardDevice> PendingCollective<D> {
    /// Waits until the collective is done or enqueued; nothing of it is left on its thread
    /// afterwards.
    pub fn wait(self) -> CollectiveResult<D> {
        self.reply.wait(self.thread_name)
    }
}

impl<D: ShardDevice> ResultSlot<D> {
    fn wait(self, thread_name: &'static str) -> CollectiveResult<D> {
        match self {
            Self::Later(reply) => reply.recv().unwrap_or_else(|_| CollectiveResult::failed(thread_ended(thread_name))),
            Self::Here(done) => *done,
        }
    }
}

fn thread_ended(thread_name: &'static str) -> Error {
    Error::Device {
        call: "etp",
        operation: format!("{thread_name} collective thread"),
        message: "its thread has ended".to_string(),
    }
}

/// A collective, what it comes behind, and where its outcome goes.
struct QueuedCollective<D: ShardDevice> {
    collective: Collective<D>,
    /// The end of the computation so far; an error is for the other ranks to hear, in the collective's turn.
    after: Result<Option<D::Event>>,
    reply: SyncSender<CollectiveResult<D>>,
    open: CountGuard,
}

/// Longest wait for the end of a thread without a collective: that of its communicator.
const IDLE: Duration = Duration::from_secs(30);
/// The same of one that has a collective, which may wait for ranks that do not come.
const BUSY: Duration = Duration::from_millis(200);

/// Counts of the work that a collective thread has been given.
#[derive(Debug, Default)]
struct ThreadCounters {
    /// Collectives that are not done, nor dropped with a thread that has ended.
    open: Arc<AtomicUsize>,
    /// Collectives whose results nobody has taken.
    under_way: Arc<AtomicUsize>,
    /// The capture that the last was part of, or 0.
    capture: AtomicU64,
    /// Calls are captured: a collective is enqueued before the next call.
    one_at_a_time: AtomicBool,
}

/// One of a number that there are, for as long as it lives.
#[derive(Debug)]
struct CountGuard(Arc<AtomicUsize>);

impl CountGuard {
    fn counting(number: &Arc<AtomicUsize>) -> Self {
        number.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(number))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ThreadCounters {
    /// The end of a capture. With collectives whose results nobody has taken it fails: the driver would take it, as
    /// NCCL sets what its captured streams depend on.
    fn finish_capture<D: ShardDevice>(&self, streams: &StreamPair<D>, failed: bool) -> Result<()> {
        if streams.compute.capture_number() != Some(self.capture.load(Ordering::SeqCst)) {
            return Ok(());
        }
        let left = self.under_way.load(Ordering::SeqCst) > 0;
        if failed || left {
            // The captured calls are given up, whether the streams join or not.
            let _ = streams.rejoin();
        }
        match left && !failed {
            true => {
                Err(Error::not_capturable("Cuda::capture", "end within a pass of a chain, with collectives under way"))
            }
            false => Ok(()),
        }
    }
}

/// A helper thread with its communicator.
pub(in crate::etp) struct CollectiveThread<D: ShardDevice> {
    name: &'static str,
    queue: Option<Sender<QueuedCollective<D>>>,
    counters: Arc<ThreadCounters>,
    /// Hook that captures call before they end.
    _ending: Arc<CaptureHook>,
    /// Told when the thread has let go of its communicator.
    thread_ended: Receiver<()>,
    /// Its communicator's device beside the chain's.
    pub streams: Arc<StreamPair<D>>,
    /// Whether its communicator has memory of its own to move ([`Communicator::uses_copy_engines`]).
    pub has_own_memory: bool,
    /// Its rank, and how many there are.
    pub rank: (usize, usize),
}

impl<D: ShardDevice> fmt::Debug for CollectiveThread<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collective thread<{}>", self.name)
    }
}

impl<D: ShardDevice> Drop for CollectiveThread<D> {
    /// Ends the thread, and its communicator with it: a process that ended meanwhile would take the libraries from
    /// under it. A collective that waits for other ranks is left to itself.
    fn drop(&mut self) {
        self.queue = None;
        let limit = if self.counters.open.load(Ordering::SeqCst) == 0 { IDLE } else { BUSY };
        // A thread that is later than this is left alone.
        let _ = self.thread_ended.recv_timeout(limit);
    }
}

impl<D: ShardDevice> CollectiveThread<D> {
    /// Starts the thread.
    pub fn start(name: &'static str, compute: &D, mut comm: Box<dyn Communicator<D>>) -> Result<Self> {
        if D::ENQUEUES && comm.device().is_none() {
            let expected = "a communicator that tells its device (Communicator::device)";
            return Err(Error::invalid("Chain::new", format!("comms.{name}"), expected, "one that does not"));
        }
        let (streams, has_own_memory) = (StreamPair::new(compute, comm.device()), comm.uses_copy_engines());
        let rank = (comm.rank(), comm.size());
        let (queue, accepted) = channel::<QueuedCollective<D>>();
        let (end, thread_ended) = sync_channel(1);
        let counters = Arc::<ThreadCounters>::default();
        let own = Arc::clone(&streams);
        let work = move || {
            for QueuedCollective { collective, after, reply, open } in accepted {
                let done = collective.run(&mut *comm, (&own, after));
                drop(open);
                // Whoever asked may be gone.
                let _ = reply.send(done);
            }
            drop((comm, own));
            let _ = end.send(());
        };
        let thread = thread::Builder::new().name(format!("etp {name}"));
        thread.spawn(work).map_err(|e| Error::Device {
            call: "Chain::new",
            operation: format!("{name} collective thread"),
            message: e.to_string(),
        })?;
        let (own, capture_counters) = (Arc::clone(&streams), Arc::clone(&counters));
        let ending: Arc<CaptureHook> = Arc::new(move |failed| capture_counters.finish_capture(&own, failed));
        compute.add_capture_hook(&ending);
        Ok(Self { name, queue: Some(queue), counters, _ending: ending, thread_ended, streams, has_own_memory, rank })
    }

    /// A buffer that its collectives are to move (collective where its communicator has memory for them).
    ///
    /// # Errors
    /// No memory; a collective's.
    fn allocate(&self, key: &BufferKey) -> Result<Tensor<D>> {
        let own = || Tensor::empty(&self.streams.compute, key.dtype, &key.dims);
        if !self.has_own_memory {
            return own();
        }
        let tag = Tag { layer: 0, op: Op::Init, sequence: key.number() };
        let collective = Collective::Allocate { tag, dtype: key.dtype, dims: key.dims.clone(), made: None };
        let CollectiveResult { made, outcome, .. } = self.enqueue(collective).wait();
        outcome?;
        made.map_or_else(own, Ok)
    }

    /// A number of each rank (collective); the host waits for the thread's collectives, not for the computation.
    ///
    /// # Errors
    /// The collective's.
    pub fn compare(&self, tag: Tag, own: u64) -> Result<Vec<u64>> {
        let CollectiveResult { numbers, outcome, .. } =
            self.enqueue_after(Collective::Compare { tag, own, all: Vec::new() }, Ok(None)).wait();
        outcome.map(|()| numbers)
    }

    /// Meets the other ranks behind the thread's collectives so far, of which none is waited for on a GPU.
    ///
    /// # Errors
    /// The collective's.
    pub fn meet(&self, tag: Tag) -> Result<()> {
        self.enqueue_after(Collective::Meet { tag }, Ok(None)).wait().outcome
    }

    /// Lends a buffer id's buffer, one that its collectives are to move.
    ///
    /// # Errors
    /// As [`BufferCache::take`] and [`allocate`](Self::allocate).
    pub fn take(&self, cache: &mut BufferCache<D>, buffer_id: BufferId) -> Result<Buffer<D>> {
        cache.take_with(buffer_id, self.has_own_memory, |key| self.allocate(key))
    }

    /// Says whether calls are captured from here on.
    pub fn set_capturing(&self, capturing: bool) {
        self.counters.one_at_a_time.store(capturing, Ordering::SeqCst);
    }

    /// Queues a collective, behind the computation so far.
    pub fn enqueue(&self, collective: Collective<D>) -> PendingCollective<D> {
        self.enqueue_after(collective, self.streams.compute.record_event())
    }

    /// The same behind an event, or behind what went wrong before it, which the other ranks are told in the
    /// collective's turn. In a capture it has been enqueued when this returns.
    pub fn enqueue_after(&self, collective: Collective<D>, after: Result<Option<D::Event>>) -> PendingCollective<D> {
        let (reply, receiver) = sync_channel(1);
        let capture = self.streams.compute.capture_number();
        self.counters.capture.store(capture.unwrap_or(0), Ordering::SeqCst);
        let queued = QueuedCollective { collective, after, reply, open: CountGuard::counting(&self.counters.open) };
        let refused = match &self.queue {
            Some(queue) => queue.send(queued).map_err(|refused| refused.0),
            None => Err(queued),
        };
        if let Err(QueuedCollective { collective, after, reply, .. }) = refused {
            let _ = reply.send(collective.end(after.and(Err(thread_ended(self.name)))));
        }
        let later = ResultSlot::Later(receiver);
        let here = self.counters.one_at_a_time.load(Ordering::SeqCst);
        let reply = if here { ResultSlot::Here(Box::new(later.wait(self.name))) } else { later };
        PendingCollective {
            thread_name: self.name,
            reply,
            capture,
            _under_way: CountGuard::counting(&self.counters.under_way),
        }
    }

    /// In place of a collective whose buffer is not to be had: the other ranks are told.
    pub fn refuse(&self, tag: Tag, error: Error) -> PendingCollective<D> {
        self.enqueue_after(Collective::Refuse { tag }, Err(error))
    }

    /// Waits for a collective and takes its buffers: on a GPU, has the computation wait.
    pub fn receive(&self, pending: PendingCollective<D>) -> (Vec<Buffer<D>>, Result<()>) {
        let (compute, capture) = (&self.streams.compute, pending.capture);
        let CollectiveResult { buffers, outcome, ready, .. } = pending.wait();
        if capture.is_some_and(|part| compute.capture_number() != Some(part)) {
            // Nothing has run, and nothing can be waited for.
            let over = Error::invalid(CALL, "collective", "of a capture under way", "of one that has ended");
            return (buffers.into_iter().filter_map(TransferBuffer::received).collect(), outcome.and(Err(over)));
        }
        let (known, waited) = self.wait_for(ready.as_ref());
        // A buffer that is not received is waited for as it is dropped.
        let buffers =
            if known { buffers.into_iter().filter_map(TransferBuffer::received).collect() } else { Vec::new() };
        (buffers, outcome.and(waited))
    }

    /// The same of a main gradient that was summed, which is no part of a capture.
    pub fn receive_sums(&self, pending: PendingCollective<D>) -> (Option<Tensor<D>>, Result<()>) {
        let CollectiveResult { sums, outcome, ready, .. } = pending.wait();
        let (known, waited) = self.wait_for(ready.as_ref());
        (sums.filter(|_| known).and_then(TransferBuffer::received), outcome.and(waited))
    }

    /// Has the computation wait for the end of a collective. Says whether its buffers are in order then.
    fn wait_for(&self, ready: Option<&D::Event>) -> (bool, Result<()>) {
        let waited = self.streams.compute.wait(ready);
        (waited.is_ok() && (ready.is_some() || !D::ENQUEUES), waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Cpu, ThreadWorld};
    use crate::dtype::DType;
    use crate::error::CommError;
    use crate::etp::buffers::cache::BufferUsage;
    use crate::etp::collective::GatherInput;
    use crate::etp::shards::source::{Shard, ShardSource};

    /// A rank whose computation cannot be waited for tells the others, which are in that collective; its next one
    /// meets theirs.
    #[test]
    fn an_error_before_a_collective_is_reported() {
        let broken = |rank: usize| match rank {
            1 => Err(Error::Device { call: "test", operation: "mark".into(), message: "out of luck".into() }),
            _ => Ok(None),
        };
        let work = |(rank, comm): (usize, crate::cpu::ThreadComm)| {
            let cpu = Cpu::new();
            let mut cache = BufferCache::new(cpu);
            let key = BufferKey { dims: vec![4, 2], dtype: DType::F32, usage: BufferUsage::GatheredWeight, parity: 0 };
            let buffer_id = cache.reserve(key);
            let collectives = CollectiveThread::start("gather", &cpu, Box::new(comm)).unwrap();
            let shard: Arc<dyn ShardSource<Cpu>> =
                Arc::new(Shard::new(Tensor::from_vec(vec![1f32; 4], &[2, 2]).unwrap()));
            let mut gather = |sequence, after| {
                let into = TransferBuffer::new(cache.take(buffer_id).unwrap(), &collectives.streams);
                let tag = Tag { layer: 0, op: Op::Weights, sequence };
                let collective = Collective::Gather { tag, shard: GatherInput::Plain(Arc::clone(&shard)), into };
                let (buffers, outcome) = collectives.receive(collectives.enqueue_after(collective, after));
                assert_eq!(buffers.len(), 1, "the buffer comes back");
                buffers.into_iter().for_each(|buffer| cache.put(buffer));
                outcome
            };
            (gather(0, broken(rank)), gather(1, Ok(None)))
        };
        let comms = ThreadWorld::create(2, Duration::from_secs(60));
        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = comms.into_iter().enumerate().map(|rank| scope.spawn(move || work(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let [(refused, met), (own, after)] = <[_; 2]>::try_from(outcomes).unwrap();
        let Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) = &refused else { panic!("{refused:?}") };
        assert!(reason.contains("out of luck"), "{reason}");
        assert!(matches!(own, Err(Error::Device { call: "test", .. })), "{own:?}");
        assert!(met.is_ok() && after.is_ok(), "{met:?} {after:?}");
    }
}
