//! Sums of gradients over ranks on a thread of their own, beside the computation that makes the next ones.
//!
//! The thread runs the sums in the order in which it was given them, which is the same on every rank. After one that
//! fails it runs none, until all ranks have met again ([`GradientSums::recover`]).

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::compare::{gather_numbers, meet};
use crate::error::{Error, Result};
use crate::etp::{ShardDevice, recover};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::buckets::{NO_LAYER, other_variables};

const CALL: &str = "GradientReducer";
/// Longest wait for the thread as its owner goes away: one that waits for ranks which do not come ends by itself, with
/// their communicator's timeout.
const LONGEST_END_WAIT: Duration = Duration::from_millis(200);

/// Communicators that a rank's gradients are summed over, for this alone: one thread drives them beside the layers'
/// own. On a GPU each is made with a `Cuda` of its own beside the layers' (`Cuda::with_new_stream`): on the computation's
/// stream its collectives would stand among the layers' in another order on every rank, and these would wait for each
/// other.
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

/// What a rank sums, which all ranks compare before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SumDescription {
    /// Backwards whose gradients are summed.
    pub(crate) microbatches: u64,
    /// A hash of the calls of layers, by which sums begin beside the last of them.
    pub(crate) layer_calls: u64,
    /// A hash of the variables that all ranks hold (layers, sizes, types), in the order in which they are summed: sums of
    /// others would be mixed.
    pub(crate) variables: u64,
    /// The same of the experts, which the replicas hold.
    pub(crate) experts: u64,
    /// Whether gradients of 16 bits are summed in f32, and stay so.
    pub(crate) in_f32: bool,
    /// Bytes of sums that one collective takes.
    pub(crate) bucket_bytes: usize,
}

/// What all ranks have found of what they sum, alike on each of them.
#[derive(Debug)]
pub(crate) enum SumAgreement {
    /// It is the same on all, and the calls of layers are or are not.
    Same { same_calls: bool },
    /// It is not, so nothing is summed. Nobody is to be told, and another comparison may follow.
    Differs(Error),
}

impl SumDescription {
    /// As they travel.
    fn numbers(&self) -> [u64; 6] {
        let Self { microbatches, layer_calls, variables, experts, in_f32, bucket_bytes } = *self;
        [microbatches, layer_calls, variables, experts, u64::from(in_f32), bucket_bytes as u64]
    }

    fn of_numbers([microbatches, layer_calls, variables, experts, in_f32, bucket_bytes]: [u64; 6]) -> Self {
        let (in_f32, bucket_bytes) = (in_f32 != 0, usize::try_from(bucket_bytes).unwrap_or(usize::MAX));
        Self { microbatches, layer_calls, variables, experts, in_f32, bucket_bytes }
    }

    /// What another rank sums otherwise, with the number of its field; experts are compared with those of a replica.
    fn difference(&self, theirs: &Self, peer: Peer) -> Option<(usize, Error)> {
        let sums = |of: &Self| if of.in_f32 { "in f32" } else { "in the variables' types" };
        let number = |number: u64, found: u64| (format!("{number}, as on {peer}"), found.to_string());
        let same = [
            theirs.microbatches == self.microbatches,
            theirs.in_f32 == self.in_f32,
            theirs.variables == self.variables,
            matches!(peer, Peer::Rank(_)) || theirs.experts == self.experts,
            theirs.bucket_bytes == self.bucket_bytes,
        ];
        let field = same.iter().position(|same| !same)?;
        let (expected, found) = match field {
            0 => number(theirs.microbatches, self.microbatches),
            1 => (format!("{}, as on {peer}", sums(theirs)), sums(self).to_string()),
            2 | 3 => return Some((field, other_variables(CALL, FIELDS[field], &peer.to_string()))),
            _ => number(theirs.bucket_bytes as u64, self.bucket_bytes as u64),
        };
        Some((field, Error::invalid(CALL, FIELDS[field], expected, found)))
    }
}

/// What ranks compare, as errors name it.
const FIELDS: [&str; 5] = ["microbatches", "gradients", "variables", "experts", "bucket_bytes"];

/// Whom a rank compares itself with.
#[derive(Debug, Clone, Copy)]
enum Peer {
    /// A rank of the group.
    Rank(usize),
    /// The rank in its place of another replica of the group.
    Replica(usize),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank) => write!(f, "rank {rank}"),
            Self::Replica(replica) => write!(f, "replica {replica}"),
        }
    }
}

/// A sum under way.
#[derive(Debug)]
pub(crate) struct PendingSum<D: ShardDevice>(Receiver<SumResult<D>>);

type SumResult<D> = Result<ValuesInUse<D>>;

/// Values that are the computation's, and that a communicator's stream may still write. Whoever drops them, their memory
/// comes back to the computation behind that.
#[derive(Debug)]
struct ValuesInUse<D: ShardDevice> {
    values: Option<Tensor<D>>,
    /// The end of the work on them.
    ready: Option<D::Event>,
    compute: D,
}

impl<D: ShardDevice> ValuesInUse<D> {
    /// The values; on a GPU, the computation waits for them.
    fn take(mut self) -> Result<Tensor<D>> {
        self.compute.wait(self.ready.as_ref())?;
        self.values.take().ok_or_else(thread_ended)
    }

    /// Nobody gets the memory: what another stream still does with it is not known.
    fn leak(mut self) {
        let values = self.values.take();
        if D::ENQUEUES {
            std::mem::forget(values);
        }
    }
}

impl<D: ShardDevice> Drop for ValuesInUse<D> {
    fn drop(&mut self) {
        let Some(values) = self.values.take() else { return };
        if D::ENQUEUES && self.compute.wait(self.ready.as_ref()).is_err() {
            std::mem::forget(values);
        }
    }
}

enum Job<D: ShardDevice> {
    Agree { tag: Tag, own: SumDescription, reply: SyncSender<Result<SumAgreement>> },
    Sum { sum: GradientSum<D>, after: Result<Option<D::Event>>, reply: SyncSender<SumResult<D>> },
    Compare { tag: Tag, reply: SyncSender<Result<()>> },
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
    /// On a GPU, a communicator of several ranks that does not tell its device, or whose stream is the computation's; no
    /// thread.
    pub(crate) fn start(compute: &D, comms: ReduceComms<D>) -> Result<Self> {
        let all = [Some(comms.group), comms.replicas];
        let size = |comm: &Option<Box<dyn Communicator<D>>>| comm.as_ref().map_or(1, |comm| comm.size());
        let (alone, has_replicas) = (all.iter().all(|comm| size(comm) == 1), size(&all[1]) > 1);
        // One of a rank alone carries nothing.
        let carries = || all.iter().flatten().filter(|comm| comm.size() > 1);
        if D::ENQUEUES && carries().any(|comm| comm.device().is_none()) {
            let expected = "one that tells its device (Communicator::device)";
            return Err(Error::invalid(CALL, "communicator", expected, "one that does not"));
        }
        if carries().any(|comm| comm.device().is_some_and(|device| device.shares_stream_with(compute))) {
            let expected = "one of a stream of its own (Cuda::with_new_stream)";
            return Err(Error::invalid(CALL, "communicator", expected, "one of the computation's stream"));
        }
        for comm in carries() {
            if let Some(device) = comm.device() {
                // A wait for the computation returns what has failed among the sums, too.
                compute.adopt_errors_of(device);
            }
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
        pending.0.recv().unwrap_or_else(|_| Err(thread_ended()))?.take()
    }

    /// Compares what a reduction sums with all other ranks', of the replicas and then of the group. The host waits for
    /// them.
    ///
    /// # Errors
    /// A communicator's; an earlier sum's. In a capture, before the other ranks are met: no two threads may add to one
    /// graph at a time.
    pub(crate) fn agree(&self, tag: Tag, own: SumDescription) -> Result<SumAgreement> {
        if self.compute.capture_number().is_some() {
            let operation =
                "sums over ranks on a thread of their own: capture forward and backward, and sum after a replay";
            return Err(Error::not_capturable(CALL, operation));
        }
        let (reply, result) = sync_channel(1);
        self.send(Job::Agree { tag, own, reply });
        result.recv().unwrap_or_else(|_| Err(thread_ended()))
    }

    /// Meets all other ranks, of the group and then of the replicas: after a failure of one of them it fails on all. On a
    /// GPU the host does not wait for it.
    ///
    /// # Errors
    /// A communicator's; an earlier sum's.
    pub(crate) fn compare(&self, tag: Tag) -> Result<()> {
        let (reply, result) = sync_channel(1);
        self.send(Job::Compare { tag, reply });
        result.recv().unwrap_or_else(|_| Err(thread_ended()))
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
        let _ = ended.recv_timeout(LONGEST_END_WAIT);
    }
}

/// A field in which a rank of the group differs from its replicas, which are in neither of this rank's communicators.
fn differs_elsewhere(field: usize, peer: usize) -> Option<(usize, Error)> {
    let (name, found) = (*FIELDS.get(field)?, format!("others on a replica of rank {peer}"));
    Some((field, Error::invalid(CALL, name, "the same on all replicas", found)))
}

fn thread_ended() -> Error {
    Error::Device { call: CALL, operation: "sum".to_string(), message: "its thread has ended".to_string() }
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
            Job::Agree { tag, own, reply } => {
                let result = self.agree(tag, own);
                self.failed |= result.is_err();
                let _ = reply.send(result);
            }
            Job::Sum { sum, after, reply } => {
                let result = self.sum(sum, after);
                self.failed |= result.is_err();
                let _ = reply.send(result);
            }
            Job::Compare { tag, reply } => {
                let result = self.compare(tag);
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
        let GradientSum { tag, over_group, values } = sum;
        self.check_not_failed()?;
        let mut all = ValuesInUse { values: Some(values), ready: after?, compute: self.compute.clone() };
        let [group, replicas] = &mut self.comms;
        let comms = [group.as_deref_mut().filter(|_| over_group), replicas.as_deref_mut()];
        for comm in comms.into_iter().flatten() {
            let device = comm.device().unwrap_or(&self.compute).clone();
            device.wait(all.ready.as_ref())?;
            let Some(values) = &mut all.values else { continue };
            // One that a communicator survives has begun on no rank.
            if let Err(error) = comm.all_reduce(tag, ReduceOp::Sum, values.view_mut()) {
                if comm.ended() {
                    all.leak();
                }
                return Err(error);
            }
            match device.record_event() {
                Ok(event) => all.ready = event,
                Err(error) => {
                    all.leak();
                    return Err(error);
                }
            }
        }
        Ok(all)
    }

    fn agree(&mut self, tag: Tag, own: SumDescription) -> Result<SumAgreement> {
        self.check_not_failed()?;
        // The replicas come first. If no rank differs from its own, all groups are alike, and each finds the same by itself;
        // if one does, it tells its group, and the replicas that it differs from tell theirs.
        let (mut same_calls, mut difference) = (true, None);
        let peers: [fn(usize) -> Peer; 2] = [Peer::Rank, Peer::Replica];
        for (comm, peer) in self.comms.iter_mut().zip(peers).rev() {
            let Some(comm) = comm else { continue };
            let device = comm.device().unwrap_or(&self.compute).clone();
            // The field that differs, from 1 on.
            let field = difference.as_ref().map_or(0, |(field, _)| *field as u64 + 1);
            let sent = [&[u64::from(same_calls), field], &own.numbers()[..]].concat();
            let numbers = gather_numbers(&device, &mut **comm, tag, &sent)?;
            for (number, [all_same, field, theirs @ ..]) in numbers.as_chunks::<8>().0.iter().enumerate() {
                let theirs = SumDescription::of_numbers(*theirs);
                let elsewhere = || differs_elsewhere((*field as usize).checked_sub(1)?, number);
                difference = difference.or_else(|| own.difference(&theirs, peer(number))).or_else(elsewhere);
                same_calls &= theirs.layer_calls == own.layer_calls && *all_same != 0;
            }
        }
        Ok(match difference {
            None => SumAgreement::Same { same_calls },
            Some((_, error)) => SumAgreement::Differs(error),
        })
    }

    fn compare(&mut self, tag: Tag) -> Result<()> {
        self.check_not_failed()?;
        for comm in self.comms.iter_mut().flatten() {
            let device = comm.device().unwrap_or(&self.compute).clone();
            meet(&device, &mut **comm, tag)?;
        }
        Ok(())
    }

    fn check_not_failed(&self) -> Result<()> {
        match self.failed {
            false => Ok(()),
            true => {
                let expected = "one behind calls that were made";
                Err(Error::invalid(CALL, "call", expected, "one behind a call that failed"))
            }
        }
    }

    fn recover(&mut self, reason: &str) -> Result<()> {
        let tag = Tag { layer: NO_LAYER, op: Op::GradReduce, sequence: u64::MAX };
        let comms = self.comms.iter_mut().flatten();
        // All of them, whatever becomes of the first.
        comms.map(|comm| recover(&mut **comm, tag, Some(reason.to_string()))).fold(Ok(()), Result::and)
    }
}
