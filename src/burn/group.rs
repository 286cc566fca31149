//! A rank's group, as modules hold it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cpu::Cpu;
use crate::ep::{Group, GroupConfig};
use crate::error::{Error, Result};

/// One rank's group, shared by its layers.
#[derive(Debug, Clone)]
pub struct EpGroup {
    group: Arc<Mutex<Group<Cpu>>>,
    failure: Arc<Mutex<Option<Error>>>,
    rank: usize,
    ranks: usize,
    local: usize,
    experts: usize,
}

impl EpGroup {
    /// Shares a group among layers of this rank.
    pub fn new(group: Group<Cpu>) -> Self {
        let (rank, ranks, local) = (group.rank(), group.ranks(), group.local_experts());
        let experts = group.config().num_experts;
        Self { group: Arc::new(Mutex::new(group)), failure: Arc::default(), rank, ranks, local, experts }
    }

    /// A group of one rank.
    ///
    /// # Errors
    /// What [`Group::new`] finds.
    pub fn single(config: GroupConfig) -> Result<Self> {
        Group::single(config).map(Self::new)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.local
    }

    /// The group, for collectives beside the layers' own. Not while a layer runs: it waits for it.
    pub fn lock(&self) -> MutexGuard<'_, Group<Cpu>> {
        // A thread that panicked inside a collective left the group usable or its communicator poisoned; both
        // answer for themselves.
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that unwound the last failed backward, if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Ends a burn backward, which has no other way to fail.
    pub(super) fn unwind(&self, error: Error) -> ! {
        let message = format!("moebius: {error}");
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        panic!("{message}")
    }

    pub(super) fn check_experts(&self, call: &'static str, found: usize) -> Result<()> {
        if found == self.experts {
            return Ok(());
        }
        Err(Error::invalid(call, "num_experts", format!("the group's {}", self.experts), found))
    }
}
