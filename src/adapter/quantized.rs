//! Routed experts' weights that stay quantized, in a module that does not know its device.

use std::sync::Arc;

use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::kernels::Kernels;
use crate::quant::{Quantized, WeightFormat};

/// `up` and `down` of a rank's experts.
#[derive(Debug)]
pub struct QuantizedExperts<D: Kernels> {
    pub(crate) up: Quantized<D>,
    pub(crate) down: Quantized<D>,
}

/// The same, on whichever device.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub enum AnyQuantized {
    Cpu(Arc<QuantizedExperts<Cpu>>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<QuantizedExperts<Cuda>>),
}

impl AnyQuantized {
    /// Bytes of codes, scales and factors.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Cpu(experts) => experts.up.bytes() + experts.down.bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(experts) => experts.up.bytes() + experts.down.bytes(),
        }
    }

    /// Format of `up`.
    pub(crate) fn format(&self) -> WeightFormat {
        match self {
            Self::Cpu(experts) => experts.up.format(),
            #[cfg(feature = "cuda")]
            Self::Cuda(experts) => experts.up.format(),
        }
    }
}
