//! Meeting point of the threads of a group: every rank brings a deposit and leaves with all of them.
//!
//! Generic over what is deposited, so that loom can explore it with small deposits (`--cfg loom`).

use std::fmt;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(loom)]
pub(crate) use loom::sync::Arc;
#[cfg(not(loom))]
pub(crate) use std::sync::Arc;

/// Where ranks `0..size` meet, round after round.
pub(crate) struct Rendezvous<T, V> {
    state: Mutex<RendezvousState<T, V>>,
    changed: Condvar,
}

struct RendezvousState<T, V> {
    /// Number of the round that is being filled.
    round: u64,
    /// Deposits of the ranks.
    deposits: Vec<Option<T>>,
    /// The round before, until every rank has picked it up. The next cannot finish earlier: it needs them all.
    finished: Option<Arc<Round<T, V>>>,
    /// Ranks that have yet to pick it up.
    readers: usize,
    /// The first rank that left, for good: it is the cause, others that leave after it are consequences.
    gone: Option<usize>,
    /// Ranks that were missing when a round timed out; final.
    timed_out: Option<Vec<usize>>,
}

/// A finished round.
#[derive(Debug)]
pub(crate) struct Round<T, V> {
    /// Deposits in rank order.
    pub deposits: Vec<T>,
    /// The last rank's finding about them.
    pub verdict: V,
}

/// Why a round did not finish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// This rank has left for good.
    Gone(usize),
    /// These ranks did not arrive in time.
    Timeout(Vec<usize>),
    /// An earlier round ended without these ranks.
    Poisoned(Vec<usize>),
}

impl<T, V> fmt::Debug for Rendezvous<T, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendezvous").finish_non_exhaustive()
    }
}

impl<T, V> Rendezvous<T, V> {
    pub fn new(size: usize) -> Self {
        let state = RendezvousState {
            round: 0,
            deposits: (0..size).map(|_| None).collect(),
            finished: None,
            readers: 0,
            gone: None,
            timed_out: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits until every rank has made its deposit; `decide` runs once a round, on the last to arrive.
    pub fn exchange(
        &self,
        rank: usize,
        deposit: T,
        timeout: Duration,
        decide: impl FnOnce(&[T]) -> V,
    ) -> Result<Arc<Round<T, V>>, Failure> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        if let Some(missing) = &state.timed_out {
            return Err(Failure::Poisoned(missing.clone()));
        }
        if let Some(peer) = state.gone {
            return Err(Failure::Gone(peer));
        }
        let round = state.round;
        state.deposits[rank] = Some(deposit);
        if state.deposits.iter().all(Option::is_some) {
            let done = state.finish(decide);
            drop(state);
            self.changed.notify_all();
            return Ok(done);
        }
        loop {
            if state.round != round {
                return state.pick_up();
            }
            if let Some(missing) = &state.timed_out {
                return Err(Failure::Timeout(missing.clone()));
            }
            if let Some(peer) = state.gone {
                state.deposits[rank] = None;
                return Err(Failure::Gone(peer));
            }
            let left = match deadline {
                None => Duration::MAX,
                Some(at) => at.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                let missing = state.give_up();
                drop(state);
                self.changed.notify_all();
                return Err(Failure::Timeout(missing));
            }
            state = self.wait(state, left);
        }
    }

    /// Marks a rank as gone for good: whoever waits or comes later is told at once.
    pub fn mark_departed(&self, rank: usize) {
        let mut state = self.lock();
        state.gone.get_or_insert(rank);
        drop(state);
        self.changed.notify_all();
    }

    /// The state is consistent between statements that can panic, so a poisoned lock carries no information.
    fn lock(&self) -> MutexGuard<'_, RendezvousState<T, V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(not(loom))]
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, RendezvousState<T, V>>,
        left: Duration,
    ) -> MutexGuard<'a, RendezvousState<T, V>> {
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Loom has no clock: a round that never ends is a deadlock, which it reports.
    #[cfg(loom)]
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, RendezvousState<T, V>>,
        _left: Duration,
    ) -> MutexGuard<'a, RendezvousState<T, V>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T, V> RendezvousState<T, V> {
    fn finish(&mut self, decide: impl FnOnce(&[T]) -> V) -> Arc<Round<T, V>> {
        let deposits: Vec<T> = self.deposits.iter_mut().filter_map(Option::take).collect();
        let verdict = decide(&deposits);
        self.readers = deposits.len() - 1;
        let done = Arc::new(Round { deposits, verdict });
        self.finished = (self.readers > 0).then(|| Arc::clone(&done));
        self.round += 1;
        done
    }

    fn pick_up(&mut self) -> Result<Arc<Round<T, V>>, Failure> {
        self.readers = self.readers.saturating_sub(1);
        // The last reader takes the round along, so its memory does not outlive the call.
        let done = if self.readers == 0 { self.finished.take() } else { self.finished.clone() };
        done.ok_or_else(|| Failure::Poisoned(Vec::new()))
    }

    fn give_up(&mut self) -> Vec<usize> {
        let missing: Vec<usize> = (0..self.deposits.len()).filter(|r| self.deposits[*r].is_none()).collect();
        self.deposits.iter_mut().for_each(|d| *d = None);
        self.timed_out = Some(missing.clone());
        missing
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    const FOREVER: Duration = Duration::MAX;
    type Sum = Rendezvous<u32, u32>;

    fn sum(values: &[u32]) -> u32 {
        values.iter().sum()
    }

    /// Two ranks, two rounds: each sees both deposits of its own round, whatever the interleaving.
    #[test]
    fn two_rounds() {
        loom::model(|| {
            let world = Arc::new(Sum::new(2));
            let ranks: Vec<_> = (0..2u32)
                .map(|rank| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || {
                        for round in 0..2u32 {
                            let done = world.exchange(rank as usize, 10 * round + rank, FOREVER, sum).unwrap();
                            assert_eq!(done.deposits, [10 * round, 10 * round + 1]);
                            assert_eq!(done.verdict, 20 * round + 1);
                        }
                    })
                })
                .collect();
            ranks.into_iter().for_each(|r| r.join().unwrap());
            let state = world.lock();
            assert!(state.finished.is_none() && state.round == 2);
        });
    }

    /// Rank 1 leaves after one round: rank 0 finishes that round and is told in the next, never left waiting.
    #[test]
    fn rank_leaves() {
        loom::model(|| {
            let world = Arc::new(Sum::new(2));
            let peer = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let done = world.exchange(1, 1, FOREVER, sum).unwrap();
                    assert_eq!(done.deposits, [0, 1]);
                    world.mark_departed(1);
                })
            };
            assert_eq!(world.exchange(0, 0, FOREVER, sum).unwrap().verdict, 1);
            assert_eq!(world.exchange(0, 0, FOREVER, sum).unwrap_err(), Failure::Gone(1));
            peer.join().unwrap();
            assert_eq!(world.exchange(0, 0, FOREVER, sum).unwrap_err(), Failure::Gone(1));
        });
    }

    /// Rank 1 leaves without ever arriving.
    #[test]
    fn rank_never_arrives() {
        loom::model(|| {
            let world = Arc::new(Sum::new(2));
            let peer = {
                let world = Arc::clone(&world);
                thread::spawn(move || world.mark_departed(1))
            };
            assert_eq!(world.exchange(0, 0, FOREVER, sum).unwrap_err(), Failure::Gone(1));
            peer.join().unwrap();
        });
    }

    /// A rank whose time is up before it waits (loom's only clock): the peer either still meets it or is told the
    /// same, and the world is unusable afterwards unless the round finished.
    #[test]
    fn time_is_up() {
        loom::model(|| {
            let world = Arc::new(Sum::new(2));
            let peer = {
                let world = Arc::clone(&world);
                thread::spawn(move || world.exchange(1, 1, Duration::ZERO, sum).map(|r| r.verdict))
            };
            let mine = world.exchange(0, 0, Duration::ZERO, sum).map(|r| r.verdict);
            match (mine, peer.join().unwrap()) {
                (Ok(1), Ok(1)) => {}
                (Err(Failure::Timeout(missing)), Err(Failure::Poisoned(same))) => {
                    assert_eq!((missing, same), (vec![1], vec![1]));
                }
                (Err(Failure::Poisoned(same)), Err(Failure::Timeout(missing))) => {
                    assert_eq!((missing, same), (vec![0], vec![0]));
                }
                other => panic!("{other:?}"),
            }
        });
    }
}
