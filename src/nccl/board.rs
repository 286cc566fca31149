//! Where the ranks of a communicator meet beside NCCL.
//!
//! Threads of one process have a [`Hall`]: before every collective their hosts meet in it and compare what they are
//! about to do, so that a disagreement or a refusal is an error on each of them with nothing enqueued, and the
//! communicator stays usable. Between processes such a meeting costs a network's round trip a collective, and is held
//! where it was asked for only (`MOEBIUS_CHECKED`): else only [`Notices`] travel, and whoever is refused loses the
//! communicator.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::agree::{Call, Verdict, failed, judge};
use crate::comm::rendezvous::{Failure, Rendezvous};
use crate::error::CommError;

use super::message::{Kind, Of};
use super::notices::{Notices, Subject};
use super::spoken::Spoken;
use super::wire::Wire;

/// Pause between two looks at what the others call, or whether they have ended.
const LOOK: Duration = Duration::from_millis(1);
/// Longest wait of a rank that aborts for the others to end of their own accord, and then for them to end as they are told.
const OTHERS: Duration = Duration::from_millis(250);

/// Meeting place of the threads of one communicator.
#[derive(Debug)]
pub(super) struct Hall {
    meeting: Rendezvous<Call, Verdict>,
    notices: Arc<Notices>,
    /// Halls of the parts that this communicator was split into, by the split's number and the part's colour.
    parts: Mutex<HashMap<(u64, usize), Arc<Hall>>>,
}

impl Hall {
    pub(super) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self { meeting: Rendezvous::new(size), notices: Arc::default(), parts: Mutex::default() })
    }

    /// The hall of one part, which the first of its ranks makes.
    fn part(&self, key: (u64, usize), size: usize) -> Arc<Self> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(parts.entry(key).or_insert_with(|| Hall::new(size)))
    }
}

/// Why ranks have not met.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unmet {
    /// Each knows why, and this rank's communicator is as it was.
    Differ(CommError),
    /// The communicator is at its end.
    Over(CommError),
}

/// What processes have.
#[derive(Debug, Clone)]
pub(super) struct Mail {
    notices: Arc<Notices>,
    wire: Arc<Wire>,
    /// The communicator's number.
    id: u64,
    /// Its ranks, as the world numbers them.
    ranks: Vec<usize>,
}

impl Mail {
    pub(super) fn new(wire: &Arc<Wire>, id: u64, ranks: Vec<usize>) -> Self {
        let notices = Notices::new(wire.checked());
        wire.register(id, ranks.clone(), &notices);
        Self { notices, wire: Arc::clone(wire), id, ranks }
    }

    /// Tells the others what this rank is about to call, and hears what they are.
    fn meet(&self, subject: Subject, call: &Call, timeout: Duration) -> Result<(), Unmet> {
        let Subject { rank, number, operation, tag } = subject;
        let (own, start) = (Spoken::of(call), Instant::now());
        self.notices.call(rank, number, own.clone());
        self.wire.post(Kind::Call(self.of(number), own));
        loop {
            // Before the calls: who has said the last one may have left since.
            let fault = self.notices.fault(subject);
            let missing = match self.notices.called(number, self.ranks.len()) {
                Ok(all) => {
                    let all: Vec<Call> = all.iter().map(|told| told.call(operation)).collect();
                    let error = judge(all.iter()).and_then(|errors| errors.into_iter().nth(rank));
                    return error.map_or(Ok(()), |error| Err(Unmet::Differ(error)));
                }
                Err(missing) => missing,
            };
            if let Some(fault) = fault {
                return Err(Unmet::Over(fault));
            }
            if start.elapsed() >= timeout {
                return Err(Unmet::Over(CommError::Timeout { operation, tag, rank, missing, timeout }));
            }
            thread::sleep(LOOK);
        }
    }

    fn of(&self, number: u64) -> Of {
        Of { communicator: self.id, number }
    }
}

/// One rank's access.
#[derive(Debug, Clone)]
pub(super) enum Board {
    /// Threads of one process.
    Hall(Arc<Hall>),
    /// Processes.
    Mail(Mail),
    /// Nobody but this rank reads it.
    Alone(Arc<Notices>),
}

impl Board {
    pub(super) fn notices(&self) -> &Arc<Notices> {
        match self {
            Board::Hall(hall) => &hall.notices,
            Board::Mail(mail) => &mail.notices,
            Board::Alone(notices) => notices,
        }
    }

    /// Whether a refusal leaves the communicator usable.
    pub(super) fn meets(&self) -> bool {
        matches!(self, Board::Hall(_)) || self.notices().checked
    }

    /// Passes when all ranks are about to make the same call, or as far as that can be known.
    pub(super) fn meet(&self, subject: Subject, call: Call, timeout: Duration) -> Result<(), Unmet> {
        let hall = match self {
            Board::Hall(hall) => hall,
            Board::Mail(mail) if mail.notices.checked => return mail.meet(subject, &call, timeout),
            _ => return self.notices().fault(subject).map_or(Ok(()), |fault| Err(Unmet::Over(fault))),
        };
        let Subject { rank, operation, tag, .. } = subject;
        let round = hall.meeting.meet(rank, call, timeout, |all| judge(all.iter()));
        let told = |failure| {
            // Why a rank has left is more than that it has.
            match self.notices().fault(subject).filter(|_| matches!(failure, Failure::Gone(_))) {
                // What one has aborted has ended for all.
                Some(why) if self.notices().aborted().is_some() => Unmet::Over(why),
                Some(why) => Unmet::Differ(why),
                None => Unmet::Differ(failed((operation, tag), rank, timeout, failure)),
            }
        };
        let round = round.map_err(told)?;
        match round.verdict.as_ref().and_then(|errors| errors.get(rank)) {
            Some(error) => Err(Unmet::Differ(error.clone())),
            None => Ok(()),
        }
    }

    /// Tells the others that a collective will not end, after they have begun it.
    pub(super) fn post_refusal(&self, subject: Subject, reason: &str) {
        self.notices().refuse(subject.rank, subject.number, reason);
        if let Board::Mail(mail) = self {
            mail.wire.post(Kind::Refused(mail.of(subject.number), reason.to_string()));
        }
    }

    /// Tells the others that this rank takes part in nothing after its `last` collective.
    pub(super) fn leave(&self, rank: usize, last: u64) {
        self.notices().leave(rank, last);
        match self {
            Board::Hall(hall) => hall.meeting.leave(rank),
            Board::Mail(mail) => mail.wire.post(Kind::Left(mail.of(last))),
            Board::Alone(_) => {}
        }
    }

    /// The same of a rank of `size` that is about to abort its communicator, with the collectives from `first` on not ended.
    /// Returns when it may.
    ///
    /// An abort lets the peers' kernels of a collective go on with what happens to lie in memory, and a peer that has not
    /// heard of it would take that for the result. So every other rank ends its communicator first: most find out by
    /// themselves what this one has, and have that for their reason. The rest hear that this rank has left before `first`.
    /// A rank that is in no collective says nothing, and is waited for no longer than for these two.
    pub(super) fn give_up(&self, (rank, size): (usize, usize), (first, last): (u64, u64)) {
        self.notices().abort(rank);
        let before = last.min(first.saturating_sub(1));
        for last in if before < last { vec![last, before] } else { vec![last] } {
            if let Board::Mail(mail) = self {
                mail.wire.post(Kind::Aborted(mail.of(last)));
            }
            self.leave(rank, last);
            if self.others_end(rank, size) {
                return;
            }
        }
    }

    fn others_end(&self, rank: usize, size: usize) -> bool {
        let start = Instant::now();
        while !matches!(self, Board::Alone(_)) && !self.notices().others_ended(rank, size) {
            if start.elapsed() >= OTHERS {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// The board of a part of this communicator: which split, its colour, and its ranks as they are numbered here.
    pub(super) fn part(&self, key: (u64, usize), ranks: &[usize]) -> Self {
        match self {
            Board::Hall(hall) => Board::Hall(hall.part(key, ranks.len())),
            Board::Mail(mail) => {
                // Parts of one split have ranks apart, so its number and the colour name each for all who are in it.
                let id = mail.id.wrapping_mul(1 << 20).wrapping_add(key.0 << 32).wrapping_add(key.1 as u64 + 1);
                Board::Mail(Mail::new(&mail.wire, id, ranks.iter().map(|r| mail.ranks[*r]).collect()))
            }
            Board::Alone(_) => Board::Alone(Arc::default()),
        }
    }
}
