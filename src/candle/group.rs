//! A rank's group as a module holds it: on whichever device candle chose at run time.

use candle_core::{Device, Tensor};

use crate::adapter::{self, ErasedGroup, broadcast, match_device};
use crate::cpu::Cpu;
use crate::ep::{EpGroup, Group, GroupConfig};
use crate::error::{Error, Result};

use super::device::{CandleDevice, copy_of, into_candle, location, with_views};
use super::error::framework;

/// One rank's group, shared by its layers, and the candle device that it works on. candle knows its devices at run
/// time only, so this type hides ours; [`on`](adapter::DeviceGroup::on) gives the group back.
///
/// A [`Group`] or [`EpGroup`] on the CPU converts into it.
pub type DeviceGroup = adapter::DeviceGroup<Device>;

impl DeviceGroup {
    /// A group whose tensors are on `device`.
    ///
    /// # Errors
    /// The group works on another device, or on another stream of it.
    pub fn new<D: CandleDevice>(group: EpGroup<D>, device: &Device) -> Result<Self> {
        if group.lock().device().is(device) {
            return Ok(Self::of(group, device.clone()));
        }
        // Of a GPU it may be the group's too, with another stream.
        let expected = match device {
            Device::Cuda(_) => "the group's own (make its Cuda by candle::cuda(&device))",
            _ => "the group's own",
        };
        Err(Error::invalid("DeviceGroup::new", "device", expected, D::other(device)))
    }

    /// A group of one rank on `device`; of a layer's configuration (`&MoeConfig`), one for its experts. It takes any number
    /// of tokens, whatever [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank) says. On a GPU `device` is of
    /// `Device::new_cuda_with_stream`: the stream of `Device::new_cuda` is another one on every thread.
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

    /// candle's device.
    pub fn device(&self) -> &Device {
        &self.framework
    }

    /// Whether a step that has calls of this group is being captured.
    pub(super) fn in_capture(&self) -> bool {
        match self.erased() {
            ErasedGroup::Cpu(_) => false,
            #[cfg(feature = "cuda")]
            ErasedGroup::Cuda(group) => group.lock().device().captures_with_framework(),
        }
    }

    /// Rank 0's values of a parameter of layer `layer`; the tensor is not changed.
    pub(super) fn broadcast(&self, layer: u32, t: &Tensor) -> Result<Tensor> {
        let device = self.device();
        match_device!(self.erased(), group => TypedGroup { group, device }.broadcast(layer, t))
    }
}

/// A group of a known device, and candle's name of that device.
#[derive(Debug)]
pub(super) struct TypedGroup<'a, D: CandleDevice> {
    pub(super) group: &'a EpGroup<D>,
    pub(super) device: &'a Device,
}

impl<D: CandleDevice> TypedGroup<'_, D> {
    fn broadcast(self, layer: u32, t: &Tensor) -> Result<Tensor> {
        const CALL: &str = "ExpertParallelMoE";
        let made = broadcast(self.group, layer, |device| {
            let t = t.contiguous().map_err(framework(CALL))?;
            with_views(device, CALL, &[("of a replicated parameter", &t)], |views| copy_of(device, views[0]))
        })?;
        into_candle(made, t.dims(), self.device)
    }
}

impl From<EpGroup<Cpu>> for DeviceGroup {
    fn from(group: EpGroup<Cpu>) -> Self {
        Self::of(group, Device::Cpu)
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
