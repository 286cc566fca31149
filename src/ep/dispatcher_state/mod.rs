//! The state that all dispatchers of this crate share: the checks before every collective, the count of prepares, and
//! handles. [`prepare`](DispatcherState::prepare) is in a file of its own, the ranks' records of it in another.
//!
//! A rank that finds an error of its own still takes part in the collective that the others wait in, as a failure:
//! in prepare through its record, elsewhere through [`Communicator::refuse`]. It returns its error, they return
//! [`Error::Peer`] at once, and the group works again.

mod prepare;
mod records;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Op, Tag};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::plan::Overflow;
use crate::plan::routing_record::BadId;
use crate::tensor::{Tensor, TensorRef};

use super::handle::{Agreement, Handle};
use super::{DevicePlan, DispatchSpec, GroupConfig, Plan, PlanIds, RowOrder};

pub(super) const PREPARE: &str = "prepare";

/// Rules of the transport that a prepare checks its rows against.
#[derive(Debug)]
pub struct TransportRules {
    /// The order in which it brings rows.
    pub row_order: RowOrder,
    /// An error where it cannot serve the spec.
    pub accepted: Result<()>,
}

/// A way of its own in which the ranks' records of a prepare reach all ranks (one collective).
pub trait RecordExchange<D: Kernels>: fmt::Debug + Send {
    /// All ranks' records `[R, bytes]`, which stay until the next exchange; `None`, alike on all ranks: these it does not
    /// carry, and the communicator gathers them.
    fn exchange(
        &mut self,
        comm: &mut dyn Communicator<D>,
        tag: Tag,
        rank: usize,
        own: TensorRef<'_, D>,
    ) -> Result<Option<Tensor<D>>>;

    /// The same with the plan in one, from choices that the device has. The outer result is that of the ranks' meeting, with
    /// `None` where [`exchange`](Self::exchange) is to do it (a rank may differ in that); the inner what this rank made of it.
    fn plan(
        &mut self,
        comm: &mut dyn Communicator<D>,
        tag: Tag,
        choices: PlanIds<'_, D>,
    ) -> Result<Option<Result<ExchangedPlan<D>>>>;
}

/// A plan from records that have been exchanged, and these, where the host has waited for them.
pub type ExchangedPlan<D> = (DevicePlan<D>, Option<Tensor<D>>);

/// State of a dispatcher.
#[derive(Debug)]
pub struct DispatcherState<D: Kernels> {
    pub device: D,
    pub comm: Box<dyn Communicator<D>>,
    pub config: GroupConfig,
    /// Says which group a handle belongs to.
    identity: Arc<()>,
    /// Prepares whose exchange took place. All ranks know that alike, whatever each makes of what it learned.
    sequence: u64,
    /// The last of them in which all ranks had the same spec and none failed. Known alike, too.
    compared: u64,
    deferred: Option<BadId>,
    /// Errors that the device has found in records.
    pub(super) errors: Option<Tensor<D>>,
    /// An error that was found beside one that has been told.
    pub(super) pending_error: Option<Error>,
    /// `None`: the communicator gathers records.
    pub records: Option<Box<dyn RecordExchange<D>>>,
}

impl<D: Kernels> DispatcherState<D> {
    pub fn new(device: D, comm: Box<dyn Communicator<D>>, config: GroupConfig) -> Self {
        Self {
            device,
            comm,
            config,
            identity: Arc::new(()),
            sequence: 0,
            compared: 0,
            deferred: None,
            errors: None,
            pending_error: None,
            records: None,
        }
    }

    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub fn ranks(&self) -> usize {
        self.comm.size()
    }

    pub fn take_deferred(&mut self) -> Result<()> {
        self.take_masked()?;
        self.take_device_error()
    }

    /// The same of what records told: the host knows it and waits for nothing.
    pub fn take_masked(&mut self) -> Result<()> {
        match self.deferred.take() {
            Some(bad) => Err(bad.error(self.config.num_experts)),
            None => Ok(()),
        }
    }

    /// Tag of a collective that belongs to a handle.
    pub fn tag(handle: &Handle<D>, op: Op) -> Tag {
        Tag { layer: handle.spec.layer, op, sequence: handle.sequence }
    }

    /// Refuses a handle of another group.
    pub fn check_handle(&self, call: &'static str, handle: &Handle<D>) -> Result<()> {
        if Arc::ptr_eq(&self.identity, &handle.group) {
            return Ok(());
        }
        Err(Error::invalid(call, "handle", "a handle that this group prepared", "one of another group"))
    }

    /// Passes this rank's checks before a collective, or tells the others that they failed.
    pub fn check_or_refuse<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        refuse_on_error(&mut *self.comm, tag, checked)
    }

    /// The same in a step, in which ranks with patience go on without this one anyway: they are not told.
    pub fn check_in_step<T>(&mut self, tag: Tag, checked: Result<T>) -> Result<T> {
        match self.config.patience {
            Some(_) => checked,
            None => self.check_or_refuse(tag, checked),
        }
    }

    /// With patience, ranks plan from the records that have come to each of them, so that nothing may depend on all ranks'
    /// tokens.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a spec by which choices may be dropped.
    pub fn check_patience(&self, call: &'static str, spec: &DispatchSpec) -> Result<()> {
        let beside = "beside GroupConfig::patience";
        match (self.config.patience, spec.overflow, spec.expert_capacity) {
            (Some(_), Overflow::Drop, _) => {
                Err(Error::invalid(call, "spec.overflow", format!("Overflow::Error {beside}"), "Overflow::Drop"))
            }
            (Some(_), _, Some(_)) => {
                Err(Error::invalid(call, "spec.expert_capacity", format!("none {beside}"), "some"))
            }
            _ => Ok(()),
        }
    }

    /// The same of what a rank needs for an exchange or makes of one: the others hear of it where they are next. That a
    /// capacity is too small, or that nothing of this can be captured, all of them see.
    pub(super) fn refuse_own_error<T>(&mut self, tag: Tag, made: Result<T>) -> Result<T> {
        match made {
            Err(Error::Capacity { .. } | Error::NotCapturable { .. }) => made,
            other => self.check_in_step(tag, other),
        }
    }

    /// A collective's error, in terms of the call it served.
    pub fn as_peer_error(&self, call: &'static str, error: Error) -> Error {
        error.of_call(call, self.rank())
    }

    /// Counts a prepare whose exchange, not this module's, took place: straight after it, so that what a rank makes of
    /// it alone does not come between the ranks' counts.
    pub fn count(&mut self) {
        self.sequence += 1;
    }

    /// A handle of a plan that was made without the ranks' records, of the prepare counted last.
    pub fn accept(&self, spec: &DispatchSpec, plan: Plan<D>) -> Handle<D> {
        let absent = if spec.backward { Vec::new() } else { vec![self.rank()] };
        let tokens = vec![plan.tokens];
        Handle { in_slots: true, ..self.handle(spec, plan, absent, tokens) }
    }

    /// Whether the ranks' specs were the same in the prepare of this number or a later one; the same on all ranks,
    /// whatever each made of the records.
    pub fn has_compared(&self, sequence: u64) -> bool {
        self.compared >= sequence
    }

    /// The number of the next prepare.
    pub fn next(&self) -> u64 {
        self.sequence + 1
    }

    /// The handle of the only rank's plan, which counts as a prepare.
    fn alone(&mut self, spec: &DispatchSpec, plan: Plan<D>) -> Handle<D> {
        self.sequence += 1;
        let (absent, tokens) = (if spec.backward { Vec::new() } else { vec![0] }, vec![plan.tokens]);
        self.handle(spec, plan, absent, tokens)
    }

    /// A handle of the last prepare that was counted.
    pub(super) fn handle(
        &self,
        spec: &DispatchSpec,
        plan: Plan<D>,
        absent: Vec<usize>,
        tokens: Vec<usize>,
    ) -> Handle<D> {
        Handle {
            spec: *spec,
            rank: self.rank(),
            sequence: self.sequence,
            agreement: Agreement { absent },
            plan,
            group: Arc::clone(&self.identity),
            tokens,
            in_slots: false,
            hops: None,
            _kept_routing: None,
        }
    }
}
