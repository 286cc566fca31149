//! Where the ranks of a communicator meet beside NCCL.
//!
//! Threads of one process have a [`ThreadRendezvous`]: before every collective their hosts meet in it and compare what
//! they are about to do, so that a disagreement or a refusal is an error on each of them with nothing enqueued, and the
//! communicator stays usable. Between processes such a meeting costs a network's round trip a collective, and is held
//! where it was asked for only (`MOEBIUS_CHECKED`): else only [`PeerEvents`] travel, among them the calls at which ranks
//! meet that have made different numbers of passes of a chain, and whoever is refused loses the communicator.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::Tag;
use crate::comm::agree::{CollectiveCall, Verdict, compare_calls, failed};
use crate::comm::rendezvous::{Failure, Rendezvous};
use crate::error::CommError;

use crate::nccl::control::call_descriptor::CallDescriptor;
use crate::nccl::control::message::{CollectiveId, MessageKind};
use crate::nccl::control::peer_events::{CollectiveInfo, PeerEvents};
use crate::nccl::control::socket::ControlSocket;

/// Pause between two looks at what the others call, or whether they have ended.
const LOOK: Duration = Duration::from_millis(1);
/// Longest wait of a rank that aborts for the others to end of their own accord, and then for them to end as they are
/// told.
const OTHERS: Duration = Duration::from_millis(250);

/// Meeting place of the threads of one communicator.
#[derive(Debug)]
pub(in crate::nccl) struct ThreadRendezvous {
    meeting: Rendezvous<CollectiveCall, Verdict>,
    peer_events: Arc<PeerEvents>,
    /// Rendezvous of the parts that this communicator was split into, by the split's number and the part's color.
    parts: Mutex<HashMap<(u64, usize), Arc<ThreadRendezvous>>>,
}

impl ThreadRendezvous {
    pub(in crate::nccl) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self { meeting: Rendezvous::new(size), peer_events: Arc::default(), parts: Mutex::default() })
    }

    /// The rendezvous of one part, which the first of its ranks makes.
    fn part(&self, key: (u64, usize), size: usize) -> Arc<Self> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(parts.entry(key).or_insert_with(|| ThreadRendezvous::new(size)))
    }
}

/// Why ranks are not about to make the same call.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::nccl) enum CompareError {
    /// Each knows why, and this rank's communicator is as it was.
    Differ(CommError),
    /// The communicator is at its end.
    Over(CommError),
}

/// Control plane of ranks that are processes.
#[derive(Debug, Clone)]
pub(in crate::nccl) struct ProcessControl {
    peer_events: Arc<PeerEvents>,
    socket: Arc<ControlSocket>,
    /// The communicator's number.
    id: u64,
    /// Its ranks, as the world numbers them.
    ranks: Vec<usize>,
    /// The pass of a chain whose first collective was announced last.
    announced: Arc<AtomicU64>,
}

impl ProcessControl {
    pub(in crate::nccl) fn new(socket: &Arc<ControlSocket>, id: u64, ranks: Vec<usize>) -> Self {
        let peer_events = PeerEvents::new(socket.checked(), ranks.len());
        socket.register(id, ranks.clone(), &peer_events);
        Self { peer_events, socket: Arc::clone(socket), id, ranks, announced: Arc::default() }
    }

    /// Sends the others what this rank is about to call, and compares what they send.
    fn compare_call(
        &self,
        subject: CollectiveInfo,
        call: &CollectiveCall,
        timeout: Duration,
    ) -> Result<(), CompareError> {
        let CollectiveInfo { rank, number, operation, tag } = subject;
        let (own, start) = (CallDescriptor::of(call), Instant::now());
        self.peer_events.call(rank, number, own.clone());
        self.socket.post(MessageKind::Call(self.of(number), own));
        loop {
            // Before the calls: who has said the last one may have left since.
            let fault = self.peer_events.fault(subject);
            let missing = match self.peer_events.called(number, self.ranks.len()) {
                Ok(all) => {
                    let all: Vec<CollectiveCall> = all.iter().map(|descriptor| descriptor.call(operation)).collect();
                    let error = compare_calls(all.iter()).and_then(|errors| errors.into_iter().nth(rank));
                    return error.map_or(Ok(()), |error| Err(CompareError::Differ(error)));
                }
                Err(missing) => missing,
            };
            if let Some(fault) = fault {
                return Err(CompareError::Over(fault));
            }
            if start.elapsed() >= timeout {
                return Err(CompareError::Over(CommError::Timeout { operation, tag, rank, missing, timeout }));
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether ranks that have made different numbers of passes of a chain come to this collective beside another one: it
    /// compares their numbers, or is the first of a pass.
    fn is_announced(&self, tag: Tag) -> bool {
        let pass = tag.pass();
        tag.sequence == Tag::PASSES || (pass > 0 && self.announced.swap(pass, Ordering::Relaxed) != pass)
    }

    /// Tells the others what this rank calls, and waits for nobody: where another calls something else, each finds out as
    /// it hears of it, before the collective or while that runs.
    fn announce(&self, subject: CollectiveInfo, call: &CollectiveCall) {
        let own = CallDescriptor::of(call);
        self.peer_events.call(subject.rank, subject.number, own.clone());
        self.socket.post(MessageKind::Call(self.of(subject.number), own));
    }

    fn of(&self, number: u64) -> CollectiveId {
        CollectiveId { communicator: self.id, number }
    }
}

/// One rank's access.
#[derive(Debug, Clone)]
pub(in crate::nccl) enum ControlPlane {
    /// Threads of one process.
    ThreadRendezvous(Arc<ThreadRendezvous>),
    /// Processes.
    ProcessControl(ProcessControl),
}

impl ControlPlane {
    pub(in crate::nccl) fn peer_events(&self) -> &Arc<PeerEvents> {
        match self {
            ControlPlane::ThreadRendezvous(rendezvous) => &rendezvous.peer_events,
            ControlPlane::ProcessControl(process) => &process.peer_events,
        }
    }

    /// Whether a refusal leaves the communicator usable.
    pub(in crate::nccl) fn compares_calls(&self) -> bool {
        matches!(self, ControlPlane::ThreadRendezvous(_)) || self.peer_events().checked
    }

    /// Passes when all ranks are about to make the same call, or as far as that can be known.
    pub(in crate::nccl) fn compare_call(
        &self,
        subject: CollectiveInfo,
        call: CollectiveCall,
        timeout: Duration,
    ) -> Result<(), CompareError> {
        let rendezvous = match self {
            ControlPlane::ThreadRendezvous(rendezvous) => rendezvous,
            ControlPlane::ProcessControl(process) if process.peer_events.checked => {
                return process.compare_call(subject, &call, timeout);
            }
            ControlPlane::ProcessControl(process) => {
                if process.is_announced(call.tag) {
                    process.announce(subject, &call);
                }
                return process.peer_events.fault(subject).map_or(Ok(()), |fault| Err(CompareError::Over(fault)));
            }
        };
        let CollectiveInfo { rank, operation, tag, .. } = subject;
        let round = rendezvous.meeting.exchange(rank, call, timeout, |all| compare_calls(all.iter()));
        let reported = |failure| {
            let gone = matches!(failure, Failure::Gone(_));
            // Why a rank has left is more than that it has.
            let why = self.peer_events().fault(subject).filter(|_| gone);
            let why = why.unwrap_or_else(|| failed((operation, tag), rank, timeout, failure));
            // A communicator that one rank has aborted has ended for all.
            match gone && self.peer_events().aborted().is_some() {
                true => CompareError::Over(why),
                false => CompareError::Differ(why),
            }
        };
        let round = round.map_err(reported)?;
        match round.verdict.as_ref().and_then(|errors| errors.get(rank)) {
            Some(error) => Err(CompareError::Differ(error.clone())),
            None => Ok(()),
        }
    }

    /// Meets the others to refuse a collective, for whose detail `call` has the reason. A rank that replays a graph in its
    /// place hears of it too, and ends its communicator.
    pub(in crate::nccl) fn refuse_call(
        &self,
        subject: CollectiveInfo,
        (call, reason): (CollectiveCall, &str),
        timeout: Duration,
    ) -> Result<(), CompareError> {
        self.peer_events().refuse_meeting(subject.rank, subject.number, reason);
        let met = self.compare_call(subject, call, timeout);
        if matches!(met, Ok(()) | Err(CompareError::Differ(CommError::Refused { .. }))) {
            self.peer_events().have_met(subject.number);
        }
        met
    }

    /// Tells the others that a collective will not end, after they have begun it.
    pub(in crate::nccl) fn post_refusal(&self, subject: CollectiveInfo, reason: &str) {
        self.peer_events().refuse(subject.rank, subject.number, reason);
        if let ControlPlane::ProcessControl(process) = self {
            process.socket.post(MessageKind::Refused(process.of(subject.number), reason.to_string()));
        }
    }

    /// Tells the others that this rank takes part in nothing after its `last` collective.
    pub(in crate::nccl) fn announce_departure(&self, rank: usize, last: u64) {
        self.peer_events().record_departure(rank, last);
        match self {
            ControlPlane::ThreadRendezvous(rendezvous) => rendezvous.meeting.mark_departed(rank),
            ControlPlane::ProcessControl(process) => process.socket.post(MessageKind::Left(process.of(last))),
        }
    }

    /// The same of a rank of `size` that is about to abort its communicator, with the collectives from `first` on not
    /// ended. Returns when it may.
    ///
    /// An abort lets the peers' kernels of a collective go on with what happens to lie in memory, and a peer that has
    /// not heard of it would take that for the result. So every other rank ends its communicator first: most find out
    /// by themselves what this one has, and have that for their reason. The rest hear that this rank has left before
    /// `first`. A rank that is in no collective says nothing, and is waited for no longer than for these two.
    pub(in crate::nccl) fn give_up(&self, rank: usize, size: usize, first: u64, last: u64) {
        self.peer_events().abort(rank);
        let before = last.min(first.saturating_sub(1));
        for last in if before < last { vec![last, before] } else { vec![last] } {
            if let ControlPlane::ProcessControl(process) = self {
                process.socket.post(MessageKind::Aborted(process.of(last)));
            }
            self.announce_departure(rank, last);
            if self.wait_for_others(rank, size) {
                return;
            }
        }
    }

    fn wait_for_others(&self, rank: usize, size: usize) -> bool {
        let start = Instant::now();
        while !self.peer_events().others_ended(rank, size) {
            if start.elapsed() >= OTHERS {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// The control plane of a part of this communicator: which split, its color, and its ranks as they are numbered
    /// here.
    pub(in crate::nccl) fn part(&self, key: (u64, usize), ranks: &[usize]) -> Self {
        match self {
            ControlPlane::ThreadRendezvous(rendezvous) => {
                ControlPlane::ThreadRendezvous(rendezvous.part(key, ranks.len()))
            }
            ControlPlane::ProcessControl(process) => {
                // Parts of one split have ranks apart, so its number and the color name each for all who are in it.
                let id = process.id.wrapping_mul(1 << 20).wrapping_add(key.0 << 32).wrapping_add(key.1 as u64 + 1);
                ControlPlane::ProcessControl(ProcessControl::new(
                    &process.socket,
                    id,
                    ranks.iter().map(|r| process.ranks[*r]).collect(),
                ))
            }
        }
    }
}
