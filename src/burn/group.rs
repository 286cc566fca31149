//! A rank's group as a module holds it, whatever its device: burn's `Module` has no place for the device's type.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::adapter::{self, FrameworkDevice};
use crate::device::Waited;
use crate::ep::{EpGroup, Group};
use crate::error::Error;

/// One rank's group, shared by its layers. A [`Group`] or [`EpGroup`] of any device converts into it;
/// [`on`](adapter::DeviceGroup::on) gives it back.
pub type DeviceGroup = adapter::DeviceGroup<Arc<WaitCounters>>;

/// Waits between burn's work and this crate's, of all calls so far. On a GPU each call takes two: its kernels wait for
/// burn's, and burn's later ones for them. None of these holds up the host, unless the driver is older than CUDA 12.5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waits {
    /// The GPU waited; the host went on.
    pub device: u64,
    /// The host waited for the GPU.
    pub host: u64,
}

/// Counts [`Waits`].
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct WaitCounters {
    device: AtomicU64,
    host: AtomicU64,
}

impl DeviceGroup {
    /// The error that unwound the last failed backward, if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.membership().take_failure()
    }

    /// Waits in calls of the layers that hold this value or a clone of it.
    pub fn waits(&self) -> Waits {
        let WaitCounters { device, host } = &*self.framework;
        Waits { device: device.load(Ordering::Relaxed), host: host.load(Ordering::Relaxed) }
    }

    /// Whether both are one rank's membership in one group.
    pub(super) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self.membership(), other.membership())
    }

    pub(super) fn count(&self, waited: Waited) {
        match waited {
            Waited::Nothing => {}
            Waited::Device => drop(self.framework.device.fetch_add(1, Ordering::Relaxed)),
            Waited::Host => drop(self.framework.host.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(super) fn unwind(&self, error: Error) -> ! {
        self.membership().unwind(error)
    }
}

impl<D: FrameworkDevice> From<EpGroup<D>> for DeviceGroup {
    fn from(group: EpGroup<D>) -> Self {
        Self::of(group, Arc::default())
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
