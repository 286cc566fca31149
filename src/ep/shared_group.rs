//! A rank's group, as the layers of a model share it.

#[cfg(any(feature = "candle", feature = "burn"))]
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
#[cfg(any(feature = "candle", feature = "burn"))]
use crate::error::Result;
use crate::kernels::Kernels;

use super::{DispatcherKind, Group};

/// One rank's group, shared by its layers.
#[derive(Debug)]
pub struct EpGroup<D: Kernels> {
    group: Arc<Mutex<Group<D>>>,
    membership: Arc<Membership>,
}

/// The error of a backward that a host gives no other way than a panic (burn).
#[derive(Debug, Default)]
pub(crate) struct BackwardFailure(Mutex<Option<Error>>);

impl BackwardFailure {
    /// The error; forgets it.
    pub(crate) fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Ends a backward that has no other way to fail.
    ///
    /// # Panics
    /// Always: the panic is the backward's end, and [`take`](Self::take) has its error.
    #[cfg(feature = "burn")]
    pub(crate) fn unwind(&self, error: Error) -> ! {
        let message = format!("moebius: {error}");
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        panic!("{message}")
    }
}

/// A shared group apart from its device.
#[derive(Debug)]
pub(crate) struct Membership {
    /// This rank.
    pub(crate) rank: usize,
    /// Number of ranks.
    pub(crate) ranks: usize,
    /// Experts of this rank, L = E / R.
    pub(crate) local_experts: usize,
    /// As [`Group::dispatcher_kind`].
    pub(crate) dispatcher: DispatcherKind,
    /// The error that unwound the last failed backward.
    failure: BackwardFailure,
    /// Number of the next layer that has none of its own.
    #[cfg(any(feature = "candle", feature = "burn"))]
    next_layer: AtomicU32,
    #[cfg(any(feature = "candle", feature = "burn"))]
    num_experts: usize,
}

impl<D: Kernels> Clone for EpGroup<D> {
    fn clone(&self) -> Self {
        Self { group: Arc::clone(&self.group), membership: Arc::clone(&self.membership) }
    }
}

impl<D: Kernels> EpGroup<D> {
    /// Shares a group among layers of this rank.
    pub fn new(group: Group<D>) -> Self {
        let membership = Membership {
            rank: group.rank(),
            ranks: group.ranks(),
            local_experts: group.local_experts(),
            dispatcher: group.dispatcher_kind(),
            failure: BackwardFailure::default(),
            #[cfg(any(feature = "candle", feature = "burn"))]
            next_layer: AtomicU32::default(),
            #[cfg(any(feature = "candle", feature = "burn"))]
            num_experts: group.config().num_experts,
        };
        Self { group: Arc::new(Mutex::new(group)), membership: Arc::new(membership) }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.membership.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.membership.ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.membership.local_experts
    }

    /// As [`Group::dispatcher_kind`].
    pub fn dispatcher_kind(&self) -> DispatcherKind {
        self.membership.dispatcher
    }

    /// The group, for collectives beside the layers' own. Waits for a layer that runs. A layer that is called, forward
    /// or backward, by the thread that holds the guard waits for ever: drop it first.
    pub fn lock(&self) -> MutexGuard<'_, Group<D>> {
        // A thread that panicked inside a collective left the group usable or its communicator poisoned; both
        // answer for themselves.
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that unwound the last failed backward of a host whose backward returns nothing (burn), if any;
    /// forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.membership.failure.take()
    }

    /// The same for all that share the group, and for nobody else while it lives.
    #[cfg(feature = "candle")]
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.group).addr()
    }

    /// The group apart from its device.
    #[cfg(any(feature = "candle", feature = "burn"))]
    pub(crate) fn membership(&self) -> &Membership {
        &self.membership
    }
}

#[cfg(any(feature = "candle", feature = "burn"))]
impl Membership {
    /// As [`EpGroup::take_failure`].
    #[cfg(feature = "burn")]
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.failure.take()
    }

    /// As [`BackwardFailure::unwind`].
    ///
    /// # Panics
    /// Always.
    #[cfg(feature = "burn")]
    pub(crate) fn unwind(&self, error: Error) -> ! {
        self.failure.unwind(error)
    }

    /// The number of a new layer: `explicit`, or the next one after all that this group has given or seen. Every rank
    /// makes the same layers in the same order.
    pub(crate) fn number_layer(&self, explicit: Option<u32>) -> u32 {
        match explicit {
            None => self.next_layer.fetch_add(1, Ordering::Relaxed),
            Some(number) => {
                self.next_layer.fetch_max(number.saturating_add(1), Ordering::Relaxed);
                number
            }
        }
    }

    /// Refuses a layer of another number of experts.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names `call`.
    pub(crate) fn check_experts(&self, call: &'static str, found: usize) -> Result<()> {
        if found == self.num_experts {
            return Ok(());
        }
        Err(Error::invalid(call, "num_experts", format!("the group's {}", self.num_experts), found))
    }
}
