//! Collectives beside the computation: a helper thread with a communicator of its own runs one job after another.
//!
//! A rank has two lanes, one for gathers and one for reductions, so neither waits behind the other; or one, on which
//! they take turns ([`EtpOptions::in_turn`](super::EtpOptions::in_turn)). Every rank gives its lanes the same jobs in
//! the same order: in place of one that it cannot give, its refusal. A job owns its buffers, so nobody can touch them
//! while it runs.
//!
//! On a GPU the thread enqueues, on its communicator's stream, behind what the computation had been given when the job
//! was; whoever takes the result has its own stream wait for the job's event. No host waits for a GPU. In a recording
//! whoever gives a job waits until it has been enqueued: no two threads may add to one graph at a time, which the driver
//! does not see to (it crashes). There the jobs of both lanes have one order on every rank, as on one lane: to be enqueued
//! can mean to meet the other ranks.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::beside::{Beside, Sent};
use super::chain::CALL;
use super::packed::Packed;
use super::placed;
use super::recorded::refused;
use super::source::ShardSource;
use super::tickets::{Key, Loan, Ticket, Tickets};
use super::{Ending, Reduction, ShardDevice};

/// A rank's shard on its way to the others.
#[derive(Debug)]
pub(super) enum Travels<D: ShardDevice> {
    /// As it is.
    Plain(Arc<dyn ShardSource<D>>),
    /// As it was cast.
    Cast(Arc<Packed<D>>),
    /// It lies in its place of what is gathered (`placed.rs`).
    Placed,
}

/// One collective.
#[derive(Debug)]
pub(super) enum Job<D: ShardDevice> {
    /// All ranks' shards to `into`.
    Gather { tag: Tag, shard: Travels<D>, into: Sent<D> },
    /// The ranks' amaxes, joined where they are.
    Join { tag: Tag, amaxes: Sent<D> },
    /// `gradient`, padded, to this rank's rows: their sum, or the other ranks' shares of it where the caller adds them.
    Reduce { tag: Tag, how: Reduction, gradient: Sent<D>, into: Sent<D> },
    /// In place of a job that this rank cannot give: the others, which wait in it, are told why.
    Refuse { tag: Tag },
    /// Memory that the lane's collectives move beside the computation.
    Memory { tag: Tag, dtype: DType, dims: Vec<usize>, made: Option<Tensor<D>> },
    /// A number of this rank, for all ranks'.
    Compare { tag: Tag, own: u64, all: Vec<u64> },
    /// Meets the other ranks after a failure: whatever they have in their lanes fails, until all meet here.
    Recover { tag: Tag, reason: Option<String> },
}

/// A job that is done, or enqueued: its buffers, in the job's order, and what became of it.
#[derive(Debug)]
pub(super) struct Done<D: ShardDevice> {
    pub loans: Vec<Sent<D>>,
    pub outcome: Result<()>,
    /// The end of its work.
    pub ready: Option<D::Event>,
    /// Memory, where that was asked for.
    pub made: Option<Tensor<D>>,
    /// All ranks' numbers, where they were compared.
    pub numbers: Vec<u64>,
}

impl<D: ShardDevice> Done<D> {
    /// With nothing left on a stream.
    fn with(loans: Vec<Sent<D>>, outcome: Result<()>) -> Self {
        Self { loans, outcome, ready: None, made: None, numbers: Vec::new() }
    }

    fn failed(error: Error) -> Self {
        Self::with(Vec::new(), Err(error))
    }
}

/// A job under way.
#[derive(Debug)]
pub(super) struct Pending<D: ShardDevice> {
    lane: &'static str,
    reply: Reply<D>,
    /// The recording that it is part of.
    recording: Option<u64>,
    _under_way: Counted,
}

/// Where its outcome is.
#[derive(Debug)]
enum Reply<D: ShardDevice> {
    Later(Receiver<Done<D>>),
    Here(Done<D>),
}

impl<D: ShardDevice> Pending<D> {
    /// Waits until the job is done or enqueued; nothing of it is left on the lane's thread afterwards.
    pub fn wait(self) -> Done<D> {
        self.reply.wait(self.lane)
    }
}

impl<D: ShardDevice> Reply<D> {
    fn wait(self, lane: &'static str) -> Done<D> {
        match self {
            Self::Later(reply) => reply.recv().unwrap_or_else(|_| Done::failed(ended(lane))),
            Self::Here(done) => done,
        }
    }
}

fn ended(lane: &'static str) -> Error {
    Error::Device { call: "etp", operation: format!("{lane} lane"), message: "its thread has ended".to_string() }
}

/// A job, what it comes behind, and where its outcome goes.
struct Order<D: ShardDevice> {
    job: Job<D>,
    /// The end of the computation so far; an error is for the other ranks to hear, in the job's turn.
    after: Result<Option<D::Event>>,
    reply: SyncSender<Done<D>>,
    open: Counted,
}

/// Longest wait for the end of a thread without a job: that of its communicator.
const IDLE: Duration = Duration::from_secs(30);
/// The same of one that has a job, which may wait for ranks that do not come.
const BUSY: Duration = Duration::from_millis(200);

/// What a lane has been given.
#[derive(Debug, Default)]
struct Given {
    /// Jobs that are not done, nor dropped with a thread that has ended.
    open: Arc<AtomicUsize>,
    /// Jobs whose results nobody has taken.
    under_way: Arc<AtomicUsize>,
    /// The recording that the last was part of, or 0.
    recording: AtomicU64,
    /// Calls are recorded: a job is enqueued before the next call.
    one_at_a_time: AtomicBool,
}

/// One of a number that there are, for as long as it lives.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn among(number: &Arc<AtomicUsize>) -> Self {
        number.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(number))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Given {
    /// The end of a recording. With jobs whose results nobody has taken it fails: the driver would take it, as NCCL sets
    /// what its captured streams depend on.
    fn settle<D: ShardDevice>(&self, between: &Beside<D>, failed: bool) -> Result<()> {
        if between.home.recording() != Some(self.recording.load(Ordering::SeqCst)) {
            return Ok(());
        }
        let left = self.under_way.load(Ordering::SeqCst) > 0;
        if failed || left {
            // What was recorded is given up, joined or not.
            let _ = between.come_back();
        }
        match left && !failed {
            true => Err(refused("Cuda::capture", "end within a pass of a chain, with collectives under way")),
            false => Ok(()),
        }
    }
}

/// A helper thread with its communicator.
pub(super) struct Lane<D: ShardDevice> {
    name: &'static str,
    jobs: Option<Sender<Order<D>>>,
    given: Arc<Given>,
    /// What recordings call before they end.
    _ending: Arc<Ending>,
    /// Told when the thread has let go of its communicator.
    ended: Receiver<()>,
    /// Its communicator's device beside the chain's.
    pub between: Arc<Beside<D>>,
    /// Whether its communicator has memory of its own to move ([`Communicator::copies_beside`]).
    pub has_memory: bool,
    /// Its rank, and how many there are.
    pub rank: (usize, usize),
}

impl<D: ShardDevice> fmt::Debug for Lane<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane<{}>", self.name)
    }
}

impl<D: ShardDevice> Drop for Lane<D> {
    /// Ends the thread, and its communicator with it: a process that ended meanwhile would take the libraries from
    /// under it. A job that waits for other ranks is left to itself.
    fn drop(&mut self) {
        self.jobs = None;
        let limit = if self.given.open.load(Ordering::SeqCst) == 0 { IDLE } else { BUSY };
        // What is late is late.
        let _ = self.ended.recv_timeout(limit);
    }
}

impl<D: ShardDevice> Lane<D> {
    /// Starts the thread.
    pub fn start(name: &'static str, home: &D, mut comm: Box<dyn Communicator<D>>) -> Result<Self> {
        if D::ENQUEUES && comm.device().is_none() {
            let expected = "a communicator that tells its device (Communicator::device)";
            return Err(Error::invalid("Chain::new", format!("comms.{name}"), expected, "one that does not"));
        }
        let (between, has_memory) = (Beside::new(home, comm.device()), comm.copies_beside());
        let rank = (comm.rank(), comm.size());
        let (jobs, orders) = channel::<Order<D>>();
        let (end, ended) = sync_channel(1);
        let given = Arc::<Given>::default();
        let own = Arc::clone(&between);
        let work = move || {
            for Order { job, after, reply, open } in orders {
                let done = job.run(&mut *comm, (&own, after));
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
            operation: format!("{name} lane"),
            message: e.to_string(),
        })?;
        let (own, settled) = (Arc::clone(&between), Arc::clone(&given));
        let ending: Arc<Ending> = Arc::new(move |failed| settled.settle(&own, failed));
        home.before_recordings_end(&ending);
        Ok(Self { name, jobs: Some(jobs), given, _ending: ending, ended, between, has_memory, rank })
    }

    /// A buffer that its collectives are to move (collective where its communicator has memory for them).
    ///
    /// # Errors
    /// No memory; a collective's.
    fn buffer(&self, key: &Key) -> Result<Tensor<D>> {
        let own = || Tensor::empty(&self.between.home, key.dtype, &key.dims);
        if !self.has_memory {
            return own();
        }
        let tag = Tag { layer: 0, op: Op::Init, sequence: key.number() };
        let job = Job::Memory { tag, dtype: key.dtype, dims: key.dims.clone(), made: None };
        let Done { made, outcome, .. } = self.give(job).wait();
        outcome?;
        made.map_or_else(own, Ok)
    }

    /// A number of each rank (collective).
    ///
    /// # Errors
    /// The collective's.
    pub fn compare(&self, tag: Tag, own: u64) -> Result<Vec<u64>> {
        let Done { numbers, outcome, .. } = self.give(Job::Compare { tag, own, all: Vec::new() }).wait();
        outcome.map(|()| numbers)
    }

    /// Lends a ticket's buffer, one that its collectives are to move.
    ///
    /// # Errors
    /// As [`Tickets::take`] and [`buffer`](Self::buffer).
    pub fn take(&self, tickets: &mut Tickets<D>, ticket: Ticket) -> Result<Loan<D>> {
        tickets.take_with(ticket, (self.has_memory, |key: &Key| self.buffer(key)))
    }

    /// Says whether calls are recorded from here on.
    pub fn record(&self, recorded: bool) {
        self.given.one_at_a_time.store(recorded, Ordering::SeqCst);
    }

    /// Queues a job, behind the computation so far.
    pub fn give(&self, job: Job<D>) -> Pending<D> {
        self.give_after(job, self.between.home.mark())
    }

    /// The same behind an event, or behind what went wrong before it, which the other ranks are told in the job's turn.
    /// In a recording it has been enqueued when this returns.
    pub fn give_after(&self, job: Job<D>, after: Result<Option<D::Event>>) -> Pending<D> {
        let (reply, receiver) = sync_channel(1);
        let recording = self.between.home.recording();
        self.given.recording.store(recording.unwrap_or(0), Ordering::SeqCst);
        let order = Order { job, after, reply, open: Counted::among(&self.given.open) };
        let refused = match &self.jobs {
            Some(jobs) => jobs.send(order).map_err(|refused| refused.0),
            None => Err(order),
        };
        if let Err(Order { job, after, reply, .. }) = refused {
            let _ = reply.send(Done::with(job.loans(), after.and(Err(ended(self.name)))));
        }
        let later = Reply::Later(receiver);
        let here = self.given.one_at_a_time.load(Ordering::SeqCst);
        let reply = if here { Reply::Here(later.wait(self.name)) } else { later };
        Pending { lane: self.name, reply, recording, _under_way: Counted::among(&self.given.under_way) }
    }

    /// In place of a job whose buffer is not to be had: the other ranks are told.
    pub fn refuse(&self, tag: Tag, error: Error) -> Pending<D> {
        self.give_after(Job::Refuse { tag }, Err(error))
    }

    /// Waits for a job and takes its buffers: on a GPU, has the computation wait.
    pub fn receive(&self, pending: Pending<D>) -> (Vec<Loan<D>>, Result<()>) {
        let (home, recording) = (&self.between.home, pending.recording);
        let Done { loans, outcome, ready, .. } = pending.wait();
        if recording.is_some_and(|part| home.recording() != Some(part)) {
            // Nothing has run, and nothing can be waited for.
            let over = Error::invalid(CALL, "job", "of a recording under way", "of one that has ended");
            return (loans.into_iter().filter_map(Sent::received).collect(), outcome.and(Err(over)));
        }
        let waited = home.wait(&home.own_stream(), ready.as_ref());
        let known = waited.is_ok() && (ready.is_some() || !D::ENQUEUES);
        // A buffer that is not received is waited for as it is dropped.
        let loans = if known { loans.into_iter().filter_map(Sent::received).collect() } else { Vec::new() };
        (loans, outcome.and(waited))
    }
}

impl<D: ShardDevice> Job<D> {
    fn loans(self) -> Vec<Sent<D>> {
        match self {
            Job::Gather { into: loan, .. } | Job::Join { amaxes: loan, .. } => vec![loan],
            Job::Reduce { gradient, into, .. } => vec![gradient, into],
            Job::Memory { .. } | Job::Compare { .. } | Job::Refuse { .. } | Job::Recover { .. } => Vec::new(),
        }
    }

    fn run(
        mut self,
        comm: &mut dyn Communicator<D>,
        (between, after): (&Beside<D>, Result<Option<D::Event>>),
    ) -> Done<D> {
        let away = &between.away;
        let outcome = match after.and_then(|after| away.wait(&away.own_stream(), after.as_ref())) {
            Ok(()) => self.collective(comm, away),
            Err(error) => {
                let _ = comm.refuse(self.tag(), &error.to_string());
                Err(error)
            }
        };
        match self {
            // Nothing is left on the stream, and what all ranks have made none of them gives up.
            Job::Memory { made, .. } => Done { made, ..Done::with(Vec::new(), outcome) },
            Job::Compare { all, .. } => Done { numbers: all, ..Done::with(Vec::new(), outcome) },
            job => {
                let (ready, outcome) = match away.mark() {
                    Ok(ready) => (ready, outcome),
                    Err(error) => (None, outcome.and(Err(error))),
                };
                Done { ready, ..Done::with(job.loans(), outcome) }
            }
        }
    }

    fn tag(&self) -> Tag {
        match self {
            Job::Gather { tag, .. } | Job::Join { tag, .. } | Job::Reduce { tag, .. } => *tag,
            Job::Memory { tag, .. } | Job::Compare { tag, .. } => *tag,
            Job::Refuse { tag } | Job::Recover { tag, .. } => *tag,
        }
    }

    fn collective(&mut self, comm: &mut dyn Communicator<D>, away: &D) -> Result<()> {
        let gone = || Error::invalid("etp", "buffer", "one for the collective", "none");
        match self {
            Job::Gather { tag, shard, into } => {
                let into = into.loan().ok_or_else(gone)?.tensor.view_mut();
                match shard {
                    Travels::Cast(packed) => packed.gather(comm, *tag, into),
                    Travels::Plain(shard) => gather_plain(comm, *tag, &**shard, into),
                    Travels::Placed => comm.gather_in_place(*tag, into),
                }
            }
            Job::Join { tag, amaxes } => {
                let amaxes = &mut amaxes.loan().ok_or_else(gone)?.tensor;
                let dims = amaxes.dims().to_vec();
                // No amax has a sign, so their bits are in the numbers' order, and a NaN's are the largest: integers,
                // which every communicator joins where they are.
                let bits = TensorMut::new(amaxes.view_mut().into_data(), DType::I32, &dims)?;
                comm.all_reduce(*tag, ReduceOp::Max, bits)
            }
            Job::Reduce { tag, how, gradient, into } => {
                let gradient = gradient.loan().ok_or_else(gone)?.tensor.view();
                reduce(comm, *tag, *how, (gradient, into.loan().ok_or_else(gone)?.tensor.view_mut()))
            }
            Job::Memory { tag, dtype, dims, made } => {
                *made = comm.memory(*tag, *dtype, dims)?;
                Ok(())
            }
            Job::Compare { tag, own, all } => {
                *all = told(away, comm, *tag, &[*own])?;
                Ok(())
            }
            // Its order brings the reason, and does not come here.
            Job::Refuse { .. } => Err(gone()),
            Job::Recover { tag, reason } => recover(comm, *tag, reason.take()),
        }
    }
}

/// Numbers of every rank, in rank order (collective).
pub(super) fn told<D: ShardDevice>(
    device: &D,
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    own: &[u64],
) -> Result<Vec<u64>> {
    let stream = &device.own_stream();
    let bytes: Vec<u8> = own.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let room = Tensor::empty(device, DType::U8, &[bytes.len()]).and_then(|mut send| {
        device.upload(stream, &bytes, send.view_mut())?;
        Ok((send, Tensor::empty(device, DType::U8, &[comm.size(), bytes.len()])?))
    });
    // The others are told: they are in the collective.
    let (send, mut recv) = room.inspect_err(|error| drop(comm.refuse(tag, &error.to_string())))?;
    comm.all_gather(tag, send.view(), recv.view_mut())?;
    let all = device.download(stream, recv.view())?;
    Ok(all.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect())
}

fn gather_plain<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    shard: &dyn ShardSource<D>,
    mut into: TensorMut<'_, D>,
) -> Result<()> {
    let mut met = false;
    let gathered = shard.read(&mut |shard| {
        met = true;
        gather(comm, tag, shard, into.reborrow())
    });
    if let (false, Err(error)) = (met, &gathered) {
        // The others are in the gather: they are told why this rank is not.
        let _ = comm.refuse(tag, &error.to_string());
    }
    gathered
}

/// A shard of another size is told to the other ranks, and exchanged with nobody.
fn gather<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    shard: TensorRef<'_, D>,
    into: TensorMut<'_, D>,
) -> Result<()> {
    let checked = placed::fits(&shard, &into, comm.size());
    if let Err(error) = checked {
        let _ = comm.refuse(tag, &error.to_string());
        return Err(error);
    }
    comm.all_gather(tag, shard, into)
}

fn reduce<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    how: Reduction,
    (gradient, into): (TensorRef<'_, D>, TensorMut<'_, D>),
) -> Result<()> {
    match how {
        Reduction::Native => comm.reduce_scatter(tag, gradient, into),
        Reduction::Pairwise => comm.exchange_blocks(tag, gradient, into),
    }
}

/// Ranks that are still in an earlier collective meet this as a mismatch, and are one job further. After as many
/// meetings as the longest lane has jobs, all ranks are here.
fn recover<D: Device>(comm: &mut dyn Communicator<D>, tag: Tag, reason: Option<String>) -> Result<()> {
    use CommError::{ArgumentMismatch, Refused, SizeMismatch, TagMismatch};
    let mut met = match reason {
        Some(reason) => comm.refuse(tag, &reason).and_then(|()| comm.barrier(tag)),
        None => comm.barrier(tag),
    };
    loop {
        match met {
            Err(Error::Comm(Refused { .. } | TagMismatch { .. } | SizeMismatch { .. } | ArgumentMismatch { .. }))
                if !comm.ended() =>
            {
                met = comm.barrier(tag)
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::Shard;
    use super::super::tickets::Usage;
    use super::*;
    use crate::comm::ThreadWorld;
    use crate::cpu::Cpu;

    /// A rank whose computation cannot be waited for tells the others, which are in the job's collective; its next job
    /// meets theirs.
    #[test]
    fn what_a_job_cannot_come_behind_is_told() {
        let broken = |rank: usize| match rank {
            1 => Err(Error::Device { call: "test", operation: "mark".into(), message: "out of luck".into() }),
            _ => Ok(None),
        };
        let work = |(rank, comm): (usize, crate::comm::ThreadComm)| {
            let cpu = Cpu::new();
            let mut tickets = Tickets::new(cpu);
            let key = Key { dims: vec![4, 2], dtype: DType::F32, usage: Usage::Gathered, parity: 0 };
            let ticket = tickets.reserve(key);
            let lane = Lane::start("gather", &cpu, Box::new(comm)).unwrap();
            let shard: Arc<dyn ShardSource<Cpu>> =
                Arc::new(Shard::new(Tensor::from_vec(vec![1f32; 4], &[2, 2]).unwrap()));
            let mut gather = |sequence, after| {
                let into = Sent::new(tickets.take(ticket).unwrap(), &lane.between);
                let tag = Tag { layer: 0, op: Op::Weights, sequence };
                let job = Job::Gather { tag, shard: Travels::Plain(Arc::clone(&shard)), into };
                let (loans, outcome) = lane.receive(lane.give_after(job, after));
                assert_eq!(loans.len(), 1, "the buffer comes back");
                loans.into_iter().for_each(|loan| tickets.put(loan));
                outcome
            };
            (gather(0, broken(rank)), gather(1, Ok(None)))
        };
        let comms = ThreadWorld::create(2, Duration::from_secs(60));
        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = comms.into_iter().enumerate().map(|seat| scope.spawn(move || work(seat))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let [(told, met), (own, after)] = <[_; 2]>::try_from(outcomes).unwrap();
        let Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) = &told else { panic!("{told:?}") };
        assert!(reason.contains("out of luck"), "{reason}");
        assert!(matches!(own, Err(Error::Device { call: "test", .. })), "{own:?}");
        assert!(met.is_ok() && after.is_ok(), "{met:?} {after:?}");
    }
}
