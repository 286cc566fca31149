//! Routed experts' weights that stay quantized, in a module that does not know its device.

#[cfg(feature = "candle")]
use std::sync::Arc;

use crate::cpu::Cpu;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::quant::Quantized;
#[cfg(feature = "candle")]
use crate::quant::WeightFormat;

#[cfg(feature = "candle")]
use super::group::{DeviceErased, DeviceFamily, FrameworkDevice, match_device};

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

/// The same, on whichever device.
#[cfg(feature = "candle")]
pub(crate) type ErasedQuantizedExperts = DeviceErased<QuantizedExpertsFamily>;

#[cfg(feature = "candle")]
#[derive(Debug)]
pub(crate) struct QuantizedExpertsFamily;

#[cfg(feature = "candle")]
impl DeviceFamily for QuantizedExpertsFamily {
    type On<D: FrameworkDevice> = Arc<QuantizedExperts<D>>;
}

#[cfg(feature = "candle")]
impl ErasedQuantizedExperts {
    /// Bytes of codes, scales and factors.
    pub(crate) fn bytes(&self) -> usize {
        match_device!(self, experts => experts.up.bytes() + experts.down.bytes())
    }

    /// Format of `up`.
    pub(crate) fn format(&self) -> WeightFormat {
        match_device!(self, experts => experts.up.format())
    }
}
