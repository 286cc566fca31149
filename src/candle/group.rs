//! A rank's group as a module holds it: on whichever device candle chose at run time.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};

use crate::comm::{Op, Tag};
use crate::cpu::Cpu;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::layer::{Layer, Mode, ParamKind};

use super::error::framework;
use super::host::{Host, copy_of, into_candle, location, with_views};
use super::module::MoeOutput;
use super::run;

/// One rank's group, shared by its layers, and the candle device that it works on. candle knows its devices at run
/// time only, so this type hides ours; [`on`](Self::on) gives the group back.
///
/// An [`EpGroup`] on the CPU converts into it.
#[derive(Debug, Clone)]
pub struct DeviceGroup(Arc<dyn Member>);

impl DeviceGroup {
    /// A group whose tensors are on `device`.
    ///
    /// # Errors
    /// The group works on another device, or on another stream of it.
    pub fn new<D: Host>(group: EpGroup<D>, device: &Device) -> Result<Self> {
        if group.lock().device().is(device) {
            return Ok(Self(Arc::new(On { group, device: device.clone() })));
        }
        Err(Error::invalid("DeviceGroup::new", "device", "the group's own", location(device)))
    }

    /// A group of one rank on `device`. On a GPU that is a device of `Device::new_cuda_with_stream`: the stream of
    /// `Device::new_cuda` is another one on every thread.
    ///
    /// # Errors
    /// A device that this build does not serve; what [`Group::new`](crate::ep::Group::new) finds.
    pub fn single(config: GroupConfig, device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(EpGroup::single(config)?.into()),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Self::new(EpGroup::new(super::cuda(device)?.group(config)?), device),
            other => {
                let expected = if cfg!(feature = "cuda") { "the CPU or a GPU" } else { "the CPU (no `cuda` feature)" };
                Err(Error::invalid("DeviceGroup::single", "device", expected, location(other)))
            }
        }
    }

    /// The group itself, if it works on a `D`: for collectives beside the layers' own.
    pub fn on<D: Host>(&self) -> Option<&EpGroup<D>> {
        self.0.as_any().downcast_ref::<On<D>>().map(|on| &on.group)
    }

    /// candle's device.
    pub fn device(&self) -> &Device {
        self.0.device()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.ranks()
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.0.local_experts()
    }

    pub(super) fn member(&self) -> &dyn Member {
        &*self.0
    }
}

impl From<EpGroup<Cpu>> for DeviceGroup {
    fn from(group: EpGroup<Cpu>) -> Self {
        Self(Arc::new(On { group, device: Device::Cpu }))
    }
}

impl From<&EpGroup<Cpu>> for DeviceGroup {
    fn from(group: &EpGroup<Cpu>) -> Self {
        group.clone().into()
    }
}

impl From<&DeviceGroup> for DeviceGroup {
    fn from(group: &DeviceGroup) -> Self {
        group.clone()
    }
}

/// A group and candle's name of its device.
#[derive(Debug)]
pub(super) struct On<D: Host> {
    pub(super) group: EpGroup<D>,
    pub(super) device: Device,
}

/// What a module asks of its group, whatever its device.
pub(super) trait Member: Debug + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn device(&self) -> &Device;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    fn local_experts(&self) -> usize;
    fn check_experts(&self, call: &'static str, layer: &Layer) -> Result<()>;
    /// Meets the other ranks, which are in the collective of that tag, as a failure.
    fn refuse(&self, tag: Tag, reason: &str);
    /// Gives a variable rank 0's values; a constant takes part and stays as it is.
    fn replicate(&self, layer: &Layer, t: &Tensor) -> candle_core::Result<()>;
    fn forward(&self, call: &run::Call<'_>, mode: Mode) -> candle_core::Result<MoeOutput>;
}

impl<D: Host> Member for On<D> {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn local_experts(&self) -> usize {
        self.group.local_experts()
    }

    fn check_experts(&self, call: &'static str, layer: &Layer) -> Result<()> {
        self.group.check_experts(call, layer.config().router.num_experts)
    }

    fn refuse(&self, tag: Tag, reason: &str) {
        // The rank's own error is the news, whatever becomes of the meeting.
        let _ = self.group.lock().dispatcher().communicator().refuse(tag, reason);
    }

    fn replicate(&self, layer: &Layer, t: &Tensor) -> candle_core::Result<()> {
        const CALL: &str = "ExpertParallelMoE::new";
        let mut group = self.group.lock();
        let device = group.device().clone();
        let copied = t.contiguous().and_then(|t| {
            Ok(with_views(&device, CALL, &[("of a replicated parameter", &t)], |views| copy_of(&device, views[0]))?)
        });
        let mut values = copied.inspect_err(|e| {
            // The other ranks are told: they are in the collective below.
            let _ = group.dispatcher().communicator().refuse(weights(layer), &e.to_string());
        })?;
        group.dispatcher().communicator().broadcast(weights(layer), 0, values.view_mut())?;
        if t.is_variable() {
            Var::from_tensor(t)?.set(&into_candle(values, t.dims(), &self.device)?)?;
        }
        Ok(())
    }

    fn forward(&self, call: &run::Call<'_>, mode: Mode) -> candle_core::Result<MoeOutput> {
        run::forward(self, call, mode)
    }
}

/// The collective that [`Member::replicate`] is.
pub(super) fn weights(layer: &Layer) -> Tag {
    Tag { layer: layer.number(), op: Op::Weights, sequence: 0 }
}

/// A forward's first collective.
pub(super) fn prepare(layer: &Layer) -> Tag {
    Tag { layer: layer.number(), op: Op::Prepare, sequence: 0 }
}

/// The parameters in contiguous memory; as they are where they lie so.
pub(super) fn contiguous(call: &'static str, params: &[(ParamKind, Tensor)]) -> Result<Vec<(ParamKind, Tensor)>> {
    params.iter().map(|(role, t)| Ok((*role, t.contiguous().map_err(framework(call))?))).collect()
}
