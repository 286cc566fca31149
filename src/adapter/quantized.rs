//! Routed experts' weights that stay quantized, in a module that does not know its device.

use std::sync::Arc;

use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
#[cfg(feature = "burn")]
use crate::layer::Params;
use crate::quant::{Quantized, WeightFormat};

use super::group::{DeviceErased, DeviceFamily, ErasedGroup, FrameworkDevice, match_device};

/// `up` and `down` of a rank's experts.
#[derive(Debug)]
pub(crate) struct QuantizedExperts<D: Kernels> {
    pub(crate) up: Quantized<D>,
    pub(crate) down: Quantized<D>,
}

impl QuantizedExperts<Cpu> {
    /// The same on another device.
    pub(crate) fn to<D: Kernels>(&self, device: &D) -> Result<QuantizedExperts<D>> {
        Ok(QuantizedExperts { up: self.up.to(device)?, down: self.down.to(device)? })
    }
}

#[cfg(feature = "burn")]
impl<D: Kernels> QuantizedExperts<D> {
    /// A layer's parameters with these experts.
    pub(crate) fn in_params<'a>(&'a self, params: Params<'a, D>) -> Params<'a, D> {
        Params { up: &self.up, down: &self.down, ..params }
    }
}

/// The same, on whichever device.
pub(crate) type ErasedQuantizedExperts = DeviceErased<QuantizedExpertsFamily>;

#[derive(Debug)]
pub(crate) struct QuantizedExpertsFamily;

impl DeviceFamily for QuantizedExpertsFamily {
    type On<D: FrameworkDevice> = Arc<QuantizedExperts<D>>;
}

impl ErasedQuantizedExperts {
    /// Experts that were read to the host, on a group's device.
    pub(crate) fn on_device_of(group: &ErasedGroup, experts: QuantizedExperts<Cpu>) -> Result<Self> {
        match group {
            ErasedGroup::Cpu(_) => Ok(Self::Cpu(Arc::new(experts))),
            #[cfg(feature = "cuda")]
            ErasedGroup::Cuda(group) => Ok(Self::Cuda(Arc::new(experts.to(group.lock().device())?))),
        }
    }

    /// The experts, for a layer that works on a `D`.
    pub(crate) fn experts<D: FrameworkDevice>(&self, call: &'static str) -> Result<Arc<QuantizedExperts<D>>> {
        let elsewhere = || Error::invalid(call, "experts", "quantized ones on the group's device", "some elsewhere");
        D::downcast(self).cloned().ok_or_else(elsewhere)
    }

    /// Bytes of codes, scales and factors.
    pub(crate) fn bytes(&self) -> usize {
        match_device!(self, experts => experts.up.bytes() + experts.down.bytes())
    }

    /// Format of `up`.
    pub(crate) fn format(&self) -> WeightFormat {
        match_device!(self, experts => experts.up.format())
    }
}
