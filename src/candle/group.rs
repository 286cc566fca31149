//! A rank's group as a module holds it: on whichever device candle chose at run time.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::adapter::{AnyGroup, ParamCollective, exchange};
use crate::cpu::Cpu;
use crate::ep::{EpGroup, Group, GroupConfig};
use crate::error::{Error, Result};
use crate::layer::{Mode, PerParam};

use super::error::framework;
use super::host::{Host, copy_of, into_candle, location, with_views};
use super::module::MoeOutput;
use super::run;

/// One rank's group, shared by its layers, and the candle device that it works on. candle knows its devices at run
/// time only, so this type hides ours; [`on`](Self::on) gives the group back.
///
/// A [`Group`] or [`EpGroup`] on the CPU converts into it.
#[derive(Debug, Clone)]
pub struct DeviceGroup(Arc<dyn ModuleGroup>);

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

    /// A group of one rank on `device`: of a layer's configuration (`&MoeConfig`) one for its experts, which takes any
    /// number of tokens. On a GPU `device` is of `Device::new_cuda_with_stream`: the stream of `Device::new_cuda` is
    /// another one on every thread.
    ///
    /// # Errors
    /// A device that this build does not serve; what [`Group::new`](crate::ep::Group::new) finds.
    pub fn single(config: impl Into<GroupConfig>, device: &Device) -> Result<Self> {
        let config = config.into();
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
        self.any().as_any().downcast_ref()
    }

    /// candle's device.
    pub fn device(&self) -> &Device {
        self.0.device()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.any().rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.any().ranks()
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.any().local_experts()
    }

    pub(super) fn any(&self) -> &dyn AnyGroup {
        self.0.any()
    }

    pub(super) fn member(&self) -> &dyn ModuleGroup {
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

impl From<Group<Cpu>> for DeviceGroup {
    fn from(group: Group<Cpu>) -> Self {
        EpGroup::new(group).into()
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

/// Calls of a module to its group, whatever its device.
pub(super) trait ModuleGroup: Debug + Send + Sync {
    fn any(&self) -> &dyn AnyGroup;
    fn device(&self) -> &Device;
    /// Runs a collective of layer `layer` over a tensor's values, which are not changed; gives the result.
    fn exchange(&self, layer: u32, exchange: ParamCollective, t: &Tensor) -> Result<Tensor>;
    fn forward(&self, call: &run::ForwardInputs<'_>, mode: Mode) -> candle_core::Result<MoeOutput>;
}

impl<D: Host> ModuleGroup for On<D> {
    fn any(&self) -> &dyn AnyGroup {
        &self.group
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn exchange(&self, layer: u32, what: ParamCollective, t: &Tensor) -> Result<Tensor> {
        const CALL: &str = "ExpertParallelMoE";
        let made = exchange(&self.group, layer, what, |device| {
            let t = t.contiguous().map_err(framework(CALL))?;
            with_views(device, CALL, &[("of a replicated parameter", &t)], |views| copy_of(device, views[0]))
        })?;
        into_candle(made, t.dims(), &self.device)
    }

    fn forward(&self, call: &run::ForwardInputs<'_>, mode: Mode) -> candle_core::Result<MoeOutput> {
        run::forward(self, call, mode)
    }
}

/// The parameters in contiguous memory; as they are where they lie so.
pub(super) fn contiguous(call: &'static str, params: &PerParam<Option<Tensor>>) -> Result<PerParam<Option<Tensor>>> {
    let of = |t: &Option<Tensor>| t.as_ref().map(Tensor::contiguous).transpose().map_err(framework(call));
    params.as_ref().try_map(|_, t| of(t))
}
