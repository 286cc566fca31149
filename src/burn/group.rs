//! A rank's group as a module holds it, whatever its device: burn's `Module` has no place for the device's type.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::backend::Backend;

use crate::adapter::{ErasedGroup, FrameworkDevice};
use crate::device::Waited;
use crate::ep::{EpGroup, Group};
use crate::error::{Error, Result};

/// One rank's group, shared by its layers. A [`Group`] or [`EpGroup`] of any device converts into it; [`on`](Self::on)
/// gives it back.
#[derive(Debug, Clone)]
pub struct DeviceGroup {
    group: ErasedGroup,
    waits: Arc<Counters>,
}

/// Waits between burn's work and this crate's, of all calls so far. On a GPU each call takes two: its kernels wait for
/// burn's, and burn's later ones for them. None of these holds up the host, unless the driver is older than CUDA 12.5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waits {
    /// The GPU waited; the host went on.
    pub device: u64,
    /// The host waited for the GPU.
    pub host: u64,
}

#[derive(Debug, Default)]
struct Counters {
    device: AtomicU64,
    host: AtomicU64,
}

impl DeviceGroup {
    /// The group itself, if it works on a `D`: for collectives beside the layers' own.
    pub fn on<D: FrameworkDevice>(&self) -> Option<&EpGroup<D>> {
        D::downcast(&self.group)
    }

    /// The group, or an error that says that it is no group of this back end's device.
    pub(super) fn expect<B: Backend, D: FrameworkDevice>(
        &self,
        call: &'static str,
        device: &B::Device,
    ) -> Result<&EpGroup<D>> {
        self.on().ok_or_else(|| {
            let expected = format!("one of the device of {} {device:?}", B::name(device));
            Error::invalid(call, "group", expected, format!("one of {}", self.group.device()))
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.membership().rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.group.membership().ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.group.membership().local_experts
    }

    /// The error that unwound the last failed backward, if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.group.membership().take_failure()
    }

    /// Waits in calls of the layers that hold this value or a clone of it.
    pub fn waits(&self) -> Waits {
        let Counters { device, host } = &*self.waits;
        Waits { device: device.load(Ordering::Relaxed), host: host.load(Ordering::Relaxed) }
    }

    pub(super) fn count(&self, waited: Waited) {
        match waited {
            Waited::Nothing => {}
            Waited::Device => drop(self.waits.device.fetch_add(1, Ordering::Relaxed)),
            Waited::Host => drop(self.waits.host.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(super) fn unwind(&self, error: Error) -> ! {
        self.group.membership().unwind(error)
    }

    /// The group, whatever its device.
    pub(super) fn erased(&self) -> &ErasedGroup {
        &self.group
    }
}

impl<D: FrameworkDevice> From<EpGroup<D>> for DeviceGroup {
    fn from(group: EpGroup<D>) -> Self {
        Self { group: D::erase(group), waits: Arc::default() }
    }
}

impl<D: FrameworkDevice> From<&EpGroup<D>> for DeviceGroup {
    fn from(group: &EpGroup<D>) -> Self {
        group.clone().into()
    }
}

impl<D: FrameworkDevice> From<Group<D>> for DeviceGroup {
    fn from(group: Group<D>) -> Self {
        EpGroup::new(group).into()
    }
}

impl From<&DeviceGroup> for DeviceGroup {
    fn from(group: &DeviceGroup) -> Self {
        group.clone()
    }
}
