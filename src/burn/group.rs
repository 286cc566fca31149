//! A rank's group as a module holds it, whatever its device: burn's `Module` has no place for the device's type.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::backend::Backend;

use crate::adapter::{AnyGroup, ParamCollective, exchange};
use crate::device::Waited;
use crate::dtype::DType;
use crate::ep::{EpGroup, Group, GroupConfig};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::backend::MoeBackend;

/// One rank's group, shared by its layers. A [`Group`] or [`EpGroup`] of any device converts into it; [`on`](Self::on)
/// gives it back.
#[derive(Debug, Clone)]
pub struct DeviceGroup {
    member: Arc<dyn ModuleGroup>,
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
    /// A group of one rank on `device` of a back end: of a layer's configuration (`&MoeConfig`) one for its experts,
    /// which takes any number of tokens.
    ///
    /// # Errors
    /// No such device; what [`Group::new`](crate::ep::Group::new) finds.
    pub fn single<B: MoeBackend>(config: impl Into<GroupConfig>, device: &B::Device) -> Result<Self> {
        B::group_of_one(config.into(), device)
    }

    /// The group itself, if it works on a `D`: for collectives beside the layers' own.
    pub fn on<D: Kernels>(&self) -> Option<&EpGroup<D>> {
        self.member.any().as_any().downcast_ref()
    }

    /// The group, or an error that says that it is no group of this back end's device.
    pub(super) fn expect<B: Backend, D: Kernels>(&self, call: &'static str, device: &B::Device) -> Result<&EpGroup<D>> {
        self.on().ok_or_else(|| {
            let expected = format!("one of the device of {} {device:?}", B::name(device));
            Error::invalid(call, "group", expected, format!("one of {}", self.member.any().device()))
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.member.any().rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.member.any().ranks()
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.member.any().local_experts()
    }

    /// The error that unwound the last failed backward, if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.member.any().take_failure()
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
        self.member.any().unwind(error)
    }

    pub(super) fn any(&self) -> &dyn AnyGroup {
        self.member.any()
    }

    /// Runs a collective over a tensor of the host, in place.
    pub(super) fn exchange(&self, layer: u32, exchange: ParamCollective, on: HostTensor<'_>) -> Result<()> {
        self.member.exchange(layer, exchange, on)
    }
}

impl<D: Kernels> From<EpGroup<D>> for DeviceGroup {
    fn from(group: EpGroup<D>) -> Self {
        Self { member: Arc::new(group), waits: Arc::default() }
    }
}

impl<D: Kernels> From<&EpGroup<D>> for DeviceGroup {
    fn from(group: &EpGroup<D>) -> Self {
        group.clone().into()
    }
}

impl<D: Kernels> From<Group<D>> for DeviceGroup {
    fn from(group: Group<D>) -> Self {
        EpGroup::new(group).into()
    }
}

impl From<&DeviceGroup> for DeviceGroup {
    fn from(group: &DeviceGroup) -> Self {
        group.clone()
    }
}

/// A tensor of the host.
#[derive(Debug)]
pub(super) struct HostTensor<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) dtype: DType,
    pub(super) dims: &'a [usize],
}

/// Calls of a module to its group, whatever its device.
trait ModuleGroup: Debug + Send + Sync {
    fn any(&self) -> &dyn AnyGroup;
    fn exchange(&self, layer: u32, exchange: ParamCollective, on: HostTensor<'_>) -> Result<()>;
}

impl<D: Kernels> ModuleGroup for EpGroup<D> {
    fn any(&self) -> &dyn AnyGroup {
        self
    }

    fn exchange(
        &self,
        layer: u32,
        what: ParamCollective,
        HostTensor { bytes, dtype, dims }: HostTensor<'_>,
    ) -> Result<()> {
        let made = exchange(self, layer, what, |device| {
            let mut values = Tensor::empty(device, dtype, dims)?;
            device.upload(bytes, values.view_mut())?;
            Ok(values)
        })?;
        let device = self.lock().device().clone();
        bytes.copy_from_slice(&device.download(made.view())?);
        Ok(())
    }
}
