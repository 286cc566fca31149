//! A rank's group as a module holds it, whatever its device: burn's `Module` has no place for the device's type.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::backend::Backend;

use crate::comm::{ReduceOp, Tag};
use crate::device::Waited;
use crate::dtype::DType;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::backend::MoeBackend;

/// One rank's group, shared by its layers. An [`EpGroup`] of any device converts into it; [`on`](Self::on) gives it
/// back.
#[derive(Debug, Clone)]
pub struct DeviceGroup {
    member: Arc<dyn Member>,
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
    /// A group of one rank on `device` of a back end.
    ///
    /// # Errors
    /// No such device; what [`Group::new`](crate::ep::Group::new) finds.
    pub fn single<B: MoeBackend>(config: GroupConfig, device: &B::Device) -> Result<Self> {
        B::group_of_one(config, device)
    }

    /// The group itself, if it works on a `D`: for collectives beside the layers' own.
    pub fn on<D: Kernels>(&self) -> Option<&EpGroup<D>> {
        self.member.as_any().downcast_ref()
    }

    /// The group, or an error that says that it is no group of this back end's device.
    pub(super) fn expect<B: Backend, D: Kernels>(&self, call: &'static str, device: &B::Device) -> Result<&EpGroup<D>> {
        self.on().ok_or_else(|| {
            let expected = format!("one of the device of {} {device:?}", B::name(device));
            Error::invalid(call, "group", expected, format!("one of {}", self.member.device()))
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.member.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.member.ranks()
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.member.local_experts()
    }

    /// The error that unwound the last failed backward, if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.member.take_failure()
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
        self.member.unwind(error)
    }

    pub(super) fn check_experts(&self, call: &'static str, found: usize) -> Result<()> {
        self.member.check_experts(call, found)
    }

    /// Runs a collective over a tensor of the host, in place.
    pub(super) fn exchange(&self, exchange: Exchange, on: HostTensor<'_>) -> Result<()> {
        self.member.exchange(exchange, on)
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

impl From<&DeviceGroup> for DeviceGroup {
    fn from(group: &DeviceGroup) -> Self {
        group.clone()
    }
}

/// A collective that the adapter runs itself.
#[derive(Debug, Clone, Copy)]
pub(super) enum Exchange {
    /// Rank 0's values to all.
    Broadcast(Tag),
    /// The sum over the ranks.
    Sum(Tag),
}

/// A tensor of the host.
#[derive(Debug)]
pub(super) struct HostTensor<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) dtype: DType,
    pub(super) dims: &'a [usize],
}

/// What a module asks of its group, whatever its device.
trait Member: Debug + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn device(&self) -> String;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    fn local_experts(&self) -> usize;
    fn take_failure(&self) -> Option<Error>;
    fn unwind(&self, error: Error) -> !;
    fn check_experts(&self, call: &'static str, found: usize) -> Result<()>;
    fn exchange(&self, exchange: Exchange, on: HostTensor<'_>) -> Result<()>;
}

impl<D: Kernels> Member for EpGroup<D> {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn device(&self) -> String {
        format!("{:?}", self.lock().device())
    }

    fn rank(&self) -> usize {
        self.rank()
    }

    fn ranks(&self) -> usize {
        self.ranks()
    }

    fn local_experts(&self) -> usize {
        self.local_experts()
    }

    fn take_failure(&self) -> Option<Error> {
        self.take_failure()
    }

    fn unwind(&self, error: Error) -> ! {
        self.unwind(error)
    }

    fn check_experts(&self, call: &'static str, found: usize) -> Result<()> {
        self.check_experts(call, found)
    }

    fn exchange(&self, exchange: Exchange, on: HostTensor<'_>) -> Result<()> {
        let mut group = self.lock();
        let device = group.device().clone();
        let sent = || {
            let mut values = Tensor::empty(&device, on.dtype, on.dims)?;
            device.upload(on.bytes, values.view_mut())?;
            Ok(values)
        };
        let sent: Result<_> = sent();
        let comm = group.dispatcher().communicator();
        let (Exchange::Broadcast(tag) | Exchange::Sum(tag)) = exchange;
        let mut values = match sent {
            Ok(values) => values,
            Err(error) => {
                // The other ranks are told: they are in the collective.
                let _ = comm.refuse(tag, &error.to_string());
                return Err(error);
            }
        };
        match exchange {
            Exchange::Broadcast(tag) => comm.broadcast(tag, 0, values.view_mut())?,
            Exchange::Sum(tag) => comm.all_reduce(tag, ReduceOp::Sum, values.view_mut())?,
        }
        on.bytes.copy_from_slice(&device.download(values.view())?);
        Ok(())
    }
}
