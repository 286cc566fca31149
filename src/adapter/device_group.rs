//! A rank's group as a module of a framework holds it.

use std::collections::BTreeMap;

use crate::ep::{DispatcherKind, EpGroup, Membership};
use crate::error::Result;

use super::group::{ErasedGroup, FrameworkDevice};

/// One rank's group, shared by its layers, with what a framework keeps beside it, `F`: `candle::DeviceGroup` and
/// `burn::DeviceGroup`. [`on`](Self::on) gives the group back.
#[derive(Debug, Clone)]
pub struct DeviceGroup<F> {
    group: ErasedGroup,
    pub(crate) framework: F,
}

impl<F> DeviceGroup<F> {
    pub(crate) fn of<D: FrameworkDevice>(group: EpGroup<D>, framework: F) -> Self {
        Self { group: D::erase(group), framework }
    }

    /// The group itself, if it works on a `D`: for collectives beside the layers' own.
    pub fn on<D: FrameworkDevice>(&self) -> Option<&EpGroup<D>> {
        D::downcast(&self.group)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.membership().rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.membership().ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.membership().local_experts
    }

    /// How tokens travel: [`Group::dispatcher_kind`](crate::ep::Group::dispatcher_kind).
    pub fn dispatcher_kind(&self) -> DispatcherKind {
        self.membership().dispatcher
    }

    /// Compares texts over the ranks by their names: what a program has alike on all of them, such as a model's
    /// configuration. Collective: two all-gathers that are waited for, none where there is one rank, so all ranks call it as
    /// often and in the same order among their layers' calls.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`](crate::Error::ConfigMismatch) on every rank where a text differs, or a rank lacks it: with
    /// the first such name as the field. Another rank's failure before; a communicator's error.
    pub fn compare_texts(&self, call: &'static str, own: &BTreeMap<String, String>) -> Result<()> {
        self.group.compare_texts(call, own)
    }

    /// The group apart from its device.
    pub(crate) fn membership(&self) -> &Membership {
        self.group.membership()
    }

    /// The group, whatever its device.
    pub(crate) fn erased(&self) -> &ErasedGroup {
        &self.group
    }
}

impl<F: Clone> From<&DeviceGroup<F>> for DeviceGroup<F> {
    fn from(group: &DeviceGroup<F>) -> Self {
        group.clone()
    }
}
