//! A rank's group as a module holds it: host frameworks know at run time only which device they work on.

use std::sync::Arc;

use crate::comm::Op;
use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::ep::{EpGroup, Membership};
use crate::etp::{Chain, ShardDevice};

use super::collectives;
#[cfg(feature = "candle")]
use super::quantized::{AnyQuantized, QuantizedExperts};

/// A rank's group, on whichever device.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub enum AnyGroup {
    Cpu(EpGroup<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(EpGroup<Cuda>),
}

/// A chain of sharded weights, on whichever device.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub enum AnyChain {
    Cpu(Arc<Chain<Cpu>>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<Chain<Cuda>>),
}

impl AnyChain {
    /// The cut of a weight of these sizes, and this rank's place in the chain.
    pub(crate) fn cut(&self, dims: &[usize]) -> crate::Result<(crate::etp::Shards, usize)> {
        match self {
            Self::Cpu(chain) => Ok((chain.shards(dims)?, chain.rank())),
            #[cfg(feature = "cuda")]
            Self::Cuda(chain) => Ok((chain.shards(dims)?, chain.rank())),
        }
    }

    /// Whether both are one chain.
    #[cfg(feature = "burn")]
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu(own), Self::Cpu(other)) => Arc::ptr_eq(own, other),
            #[cfg(feature = "cuda")]
            (Self::Cuda(own), Self::Cuda(other)) => Arc::ptr_eq(own, other),
            #[cfg(feature = "cuda")]
            _ => false,
        }
    }
}

/// A device that the host frameworks have too: [`Cpu`], and with the `cuda` feature `Cuda`.
pub trait FrameworkDevice: ShardDevice {
    /// A group of this device, for a module that does not know its device.
    #[doc(hidden)]
    fn any(group: EpGroup<Self>) -> AnyGroup;

    /// The group again, if it is one of this device.
    #[doc(hidden)]
    fn group(any: &AnyGroup) -> Option<&EpGroup<Self>>;

    /// A chain of this device, for a module that does not know its device.
    #[doc(hidden)]
    fn any_chain(chain: Arc<Chain<Self>>) -> AnyChain;

    /// The chain again, if it is one of this device.
    #[doc(hidden)]
    fn chain(any: &AnyChain) -> Option<&Arc<Chain<Self>>>;

    /// Quantized experts of this device, for a module that does not know its device.
    #[doc(hidden)]
    #[cfg(feature = "candle")]
    fn any_quantized(experts: Arc<QuantizedExperts<Self>>) -> AnyQuantized;

    /// The experts again, if they are of this device.
    #[doc(hidden)]
    #[cfg(feature = "candle")]
    fn quantized(any: &AnyQuantized) -> Option<&Arc<QuantizedExperts<Self>>>;
}

impl FrameworkDevice for Cpu {
    fn any(group: EpGroup<Self>) -> AnyGroup {
        AnyGroup::Cpu(group)
    }

    fn group(any: &AnyGroup) -> Option<&EpGroup<Self>> {
        match any {
            AnyGroup::Cpu(group) => Some(group),
            #[cfg(feature = "cuda")]
            AnyGroup::Cuda(_) => None,
        }
    }

    fn any_chain(chain: Arc<Chain<Self>>) -> AnyChain {
        AnyChain::Cpu(chain)
    }

    fn chain(any: &AnyChain) -> Option<&Arc<Chain<Self>>> {
        match any {
            AnyChain::Cpu(chain) => Some(chain),
            #[cfg(feature = "cuda")]
            AnyChain::Cuda(_) => None,
        }
    }

    #[cfg(feature = "candle")]
    fn any_quantized(experts: Arc<QuantizedExperts<Self>>) -> AnyQuantized {
        AnyQuantized::Cpu(experts)
    }

    #[cfg(feature = "candle")]
    fn quantized(any: &AnyQuantized) -> Option<&Arc<QuantizedExperts<Self>>> {
        match any {
            AnyQuantized::Cpu(experts) => Some(experts),
            #[cfg(feature = "cuda")]
            AnyQuantized::Cuda(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl FrameworkDevice for Cuda {
    fn any(group: EpGroup<Self>) -> AnyGroup {
        AnyGroup::Cuda(group)
    }

    fn group(any: &AnyGroup) -> Option<&EpGroup<Self>> {
        match any {
            AnyGroup::Cuda(group) => Some(group),
            AnyGroup::Cpu(_) => None,
        }
    }

    fn any_chain(chain: Arc<Chain<Self>>) -> AnyChain {
        AnyChain::Cuda(chain)
    }

    fn chain(any: &AnyChain) -> Option<&Arc<Chain<Self>>> {
        match any {
            AnyChain::Cuda(chain) => Some(chain),
            AnyChain::Cpu(_) => None,
        }
    }

    #[cfg(feature = "candle")]
    fn any_quantized(experts: Arc<QuantizedExperts<Self>>) -> AnyQuantized {
        AnyQuantized::Cuda(experts)
    }

    #[cfg(feature = "candle")]
    fn quantized(any: &AnyQuantized) -> Option<&Arc<QuantizedExperts<Self>>> {
        match any {
            AnyQuantized::Cuda(experts) => Some(experts),
            AnyQuantized::Cpu(_) => None,
        }
    }
}

impl AnyGroup {
    /// The group apart from its device.
    pub(crate) fn membership(&self) -> &Membership {
        match self {
            AnyGroup::Cpu(group) => group.membership(),
            #[cfg(feature = "cuda")]
            AnyGroup::Cuda(group) => group.membership(),
        }
    }

    /// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
    pub(crate) fn refuse(&self, layer: u32, op: Op, reason: &str) {
        match self {
            AnyGroup::Cpu(group) => collectives::refuse(group, layer, op, reason),
            #[cfg(feature = "cuda")]
            AnyGroup::Cuda(group) => collectives::refuse(group, layer, op, reason),
        }
    }

    /// The device, for errors.
    #[cfg(feature = "burn")]
    pub(crate) fn device(&self) -> String {
        match self {
            AnyGroup::Cpu(group) => format!("{:?}", group.lock().device()),
            #[cfg(feature = "cuda")]
            AnyGroup::Cuda(group) => format!("{:?}", group.lock().device()),
        }
    }
}
