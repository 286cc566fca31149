//! Sums of gradients over ranks on a thread of their own, beside the computation that makes the next ones.
//!
//! The thread runs the sums in the order in which it was given them, which is the same on every rank. After one that
//! fails it runs none, until all ranks have met again ([`GradientSums::recover`]).

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::error::{Error, Result};
use crate::etp::{ShardDevice, StreamPair, recover};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::buckets::NO_LAYER;

const CALL: &str = "GradientReducer";
/// Longest wait for the end of the thread: of one that waits for ranks which do not come, what is late is late.
const END: Duration = Duration::from_millis(200);

/// Communicators that a rank's gradients are summed over, for this alone: one thread drives them beside the layers'
/// own. On a GPU each is made with a `Cuda` of its own beside the layers' (`Cuda::with_new_stream`), or nothing runs
/// beside the computation.
#[derive(Debug)]
pub struct ReduceComms<D: Kernels> {
    /// The ranks of the layers' group: sums of what all of them hold.
    pub group: Box<dyn Communicator<D>>,
    /// The ranks that hold the same experts, where there are several such groups (data parallelism): sums of everything,
    /// after those over the group.
    pub replicas: Option<Box<dyn Communicator<D>>>,
}

/// Values to be summed, of the accumulator type.
#[derive(Debug)]
pub(crate) struct GradientSum<D: ShardDevice> {
    pub(crate) tag: Tag,
    /// Over the ranks of the group as well, and not over the replicas alone.
    pub(crate) over_group: bool,
    pub(crate) values: Tensor<D>,
}

/// A sum under way.
#[derive(Debug)]
pub(crate) struct PendingSum<D: ShardDevice>(Receiver<SumResult<D>>);

/// The summed values, and the end of the work on them.
type SumResult<D> = Result<(Tensor<D>, Option<<D as crate::device::Device>::Event>)>;

enum Job<D: ShardDevice> {
    Sum { sum: GradientSum<D>, after: Result<Option<D::Event>>, reply: SyncSender<SumResult<D>> },
    Recover { reason: String, reply: SyncSender<Result<()>> },
}

/// A thread with the communicators of [`ReduceComms`].
#[derive(Debug)]
pub(crate) struct GradientSums<D: ShardDevice> {
    compute: D,
    queue: Option<Sender<Job<D>>>,
    ended: Mutex<Receiver<()>>,
    alone: bool,
    has_replicas: bool,
}

impl<D: ShardDevice> GradientSums<D> {
    /// Starts the thread.
    ///
    /// # Errors
    /// On a GPU, a communicator that does not tell its device; no thread.
    pub(crate) fn start(compute: &D, comms: ReduceComms<D>) -> Result<Self> {
        let all = [Some(comms.group), comms.replicas];
        let size = |comm: &Option<Box<dyn Communicator<D>>>| comm.as_ref().map_or(1, |comm| comm.size());
        let (alone, has_replicas) = (all.iter().all(|comm| size(comm) == 1), size(&all[1]) > 1);
        if D::ENQUEUES && all.iter().flatten().any(|comm| comm.device().is_none()) {
            let expected = "one that tells its device (Communicator::device)";
            return Err(Error::invalid(CALL, "communicator", expected, "one that does not"));
        }
        for comm in all.iter().flatten() {
            // What fails there is to be heard of here.
            StreamPair::new(compute, comm.device());
        }
        let [group, replicas] = all.map(|comm| comm.filter(|comm| comm.size() > 1));
        let mut worker = Worker { compute: compute.clone(), comms: [group, replicas], failed: false };
        let (queue, jobs) = channel();
        let (end, ended) = sync_channel(1);
        let work = move || {
            jobs.into_iter().for_each(|job| worker.run(job));
            drop(worker);
            let _ = end.send(());
        };
        thread::Builder::new().name("gradient sums".to_string()).spawn(work).map_err(|e| Error::Device {
            call: CALL,
            operation: "thread".to_string(),
            message: e.to_string(),
        })?;
        Ok(Self { compute: compute.clone(), queue: Some(queue), ended: Mutex::new(ended), alone, has_replicas })
    }

    /// Whether every communicator has one rank, so that there is nothing to sum.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Whether several ranks hold the same experts.
    pub(crate) fn has_replicas(&self) -> bool {
        self.has_replicas
    }

    /// The device of the computation.
    pub(crate) fn device(&self) -> &D {
        &self.compute
    }

    fn send(&self, job: Job<D>) {
        if let Some(queue) = &self.queue {
            // Whoever waits for a thread that has ended is told so by its channel.
            let _ = queue.send(job);
        }
    }

    /// Begins a sum, behind the computation so far.
    pub(crate) fn begin(&self, sum: GradientSum<D>) -> PendingSum<D> {
        let (reply, result) = sync_channel(1);
        self.send(Job::Sum { sum, after: self.compute.record_event(), reply });
        PendingSum(result)
    }

    /// Waits for a sum; on a GPU, has the computation wait.
    ///
    /// # Errors
    /// A communicator's; an earlier sum's.
    pub(crate) fn finish(&self, pending: PendingSum<D>) -> Result<Tensor<D>> {
        let (values, ready) = pending.0.recv().unwrap_or_else(|_| Err(thread_ended()))?;
        match self.compute.wait(ready.as_ref()) {
            Ok(()) => Ok(values),
            Err(error) => {
                keep_for_ever(values);
                Err(error)
            }
        }
    }

    /// Meets the other ranks after a failure, each of which calls this for one of its own or for what it hears: whatever
    /// sums they have under way fail with `reason`, and the thread works on.
    ///
    /// # Errors
    /// A communicator that did not survive, or a rank that did not come.
    pub(crate) fn recover(&self, reason: &str) -> Result<()> {
        let (reply, result) = sync_channel(1);
        self.send(Job::Recover { reason: reason.to_string(), reply });
        result.recv().unwrap_or_else(|_| Err(thread_ended()))
    }
}

impl<D: ShardDevice> Drop for GradientSums<D> {
    fn drop(&mut self) {
        self.queue = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(END);
    }
}

fn thread_ended() -> Error {
    Error::Device { call: CALL, operation: "sum".to_string(), message: "its thread has ended".to_string() }
}

/// Where calls enqueue, what another stream still does with the memory is not known: nobody gets it.
fn keep_for_ever<D: ShardDevice>(values: Tensor<D>) {
    if D::ENQUEUES {
        std::mem::forget(values);
    }
}

struct Worker<D: ShardDevice> {
    compute: D,
    /// Of the group and of the replicas, where these are several ranks.
    comms: [Option<Box<dyn Communicator<D>>>; 2],
    failed: bool,
}

impl<D: ShardDevice> Worker<D> {
    fn run(&mut self, job: Job<D>) {
        // Whoever asked may be gone.
        match job {
            Job::Sum { sum, after, reply } => {
                let result = self.sum(sum, after);
                self.failed |= result.is_err();
                let _ = reply.send(result);
            }
            Job::Recover { reason, reply } => {
                let result = self.recover(&reason);
                self.failed &= result.is_err();
                let _ = reply.send(result);
            }
        }
    }

    fn sum(&mut self, sum: GradientSum<D>, after: Result<Option<D::Event>>) -> SumResult<D> {
        let GradientSum { tag, over_group, mut values } = sum;
        if self.failed {
            return Err(Error::invalid(CALL, "sum", "one behind sums that were made", "one behind a sum that failed"));
        }
        let [group, replicas] = &mut self.comms;
        let comms = [group.as_deref_mut().filter(|_| over_group), replicas.as_deref_mut()];
        let mut ready = after?;
        for comm in comms.into_iter().flatten() {
            let device = comm.device().unwrap_or(&self.compute).clone();
            device.wait(ready.as_ref())?;
            let summed = comm.all_reduce(tag, ReduceOp::Sum, values.view_mut()).and_then(|()| device.record_event());
            match summed {
                Ok(event) => ready = event,
                Err(error) => {
                    keep_for_ever(values);
                    return Err(error);
                }
            }
        }
        Ok((values, ready))
    }

    fn recover(&mut self, reason: &str) -> Result<()> {
        let tag = Tag { layer: NO_LAYER, op: Op::GradReduce, sequence: u64::MAX };
        let comms = self.comms.iter_mut().flatten();
        // All of them, whatever becomes of the first.
        comms.map(|comm| recover(&mut **comm, tag, Some(reason.to_string()))).fold(Ok(()), Result::and)
    }
}
