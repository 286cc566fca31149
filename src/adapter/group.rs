//! A rank's group as a module holds it: host frameworks know at run time only which device they work on.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::Arc;

use crate::comm::Op;
use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::ep::{EpGroup, Membership};
use crate::error::Result;
use crate::etp::{Chain, ShardDevice, Shards};
use crate::layer::{Layer, LayerSpec};

use super::collectives;

/// The same work on a [`DeviceErased`] value of any device: `match_device!(erased, value => work)`.
macro_rules! match_device {
    ($erased:expr, $value:ident => $work:expr) => {
        match $erased {
            $crate::adapter::DeviceErased::Cpu($value) => $work,
            #[cfg(feature = "cuda")]
            $crate::adapter::DeviceErased::Cuda($value) => $work,
        }
    };
}
pub(crate) use match_device;

/// A generic type over devices, such as [`EpGroup`], by a name without its parameter.
#[doc(hidden)]
pub trait DeviceFamily {
    /// The type on a `D`.
    type On<D: FrameworkDevice>: Clone + Debug;
}

/// A value of such a type whose device is known at run time only.
#[doc(hidden)]
pub enum DeviceErased<P: DeviceFamily> {
    Cpu(P::On<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(P::On<Cuda>),
}

impl<P: DeviceFamily> Clone for DeviceErased<P> {
    fn clone(&self) -> Self {
        match self {
            Self::Cpu(value) => Self::Cpu(value.clone()),
            #[cfg(feature = "cuda")]
            Self::Cuda(value) => Self::Cuda(value.clone()),
        }
    }
}

impl<P: DeviceFamily> Debug for DeviceErased<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match_device!(self, value => value.fmt(f))
    }
}

/// A rank's group, on whichever device.
#[doc(hidden)]
pub type ErasedGroup = DeviceErased<GroupFamily>;

#[doc(hidden)]
#[derive(Debug)]
pub struct GroupFamily;

impl DeviceFamily for GroupFamily {
    type On<D: FrameworkDevice> = EpGroup<D>;
}

/// A chain of sharded weights, on whichever device.
#[doc(hidden)]
pub type ErasedChain = DeviceErased<ChainFamily>;

#[doc(hidden)]
#[derive(Debug)]
pub struct ChainFamily;

impl DeviceFamily for ChainFamily {
    type On<D: FrameworkDevice> = Arc<Chain<D>>;
}

impl ErasedChain {
    /// The cut of a weight of these sizes, and this rank's place in the chain.
    pub(crate) fn cut(&self, dims: &[usize]) -> Result<(Shards, usize)> {
        match_device!(self, chain => Ok((chain.shards(dims)?, chain.rank())))
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
    /// Hides the device of a value, for a module that does not name its device.
    #[doc(hidden)]
    fn erase<P: DeviceFamily>(value: P::On<Self>) -> DeviceErased<P>;

    /// The value again, if it is of this device.
    #[doc(hidden)]
    fn downcast<P: DeviceFamily>(erased: &DeviceErased<P>) -> Option<&P::On<Self>>;
}

impl FrameworkDevice for Cpu {
    fn erase<P: DeviceFamily>(value: P::On<Self>) -> DeviceErased<P> {
        DeviceErased::Cpu(value)
    }

    fn downcast<P: DeviceFamily>(erased: &DeviceErased<P>) -> Option<&P::On<Self>> {
        match erased {
            DeviceErased::Cpu(value) => Some(value),
            #[cfg(feature = "cuda")]
            DeviceErased::Cuda(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl FrameworkDevice for Cuda {
    fn erase<P: DeviceFamily>(value: P::On<Self>) -> DeviceErased<P> {
        DeviceErased::Cuda(value)
    }

    fn downcast<P: DeviceFamily>(erased: &DeviceErased<P>) -> Option<&P::On<Self>> {
        match erased {
            DeviceErased::Cuda(value) => Some(value),
            DeviceErased::Cpu(_) => None,
        }
    }
}

impl ErasedGroup {
    /// The group apart from its device.
    pub(crate) fn membership(&self) -> &Membership {
        match_device!(self, group => group.membership())
    }

    /// A layer of this group, with its own number, or else with `number` or the next one of the group.
    ///
    /// # Errors
    /// As [`Layer::new`]; another number of experts than the group's.
    pub(crate) fn layer(&self, call: &'static str, spec: LayerSpec, number: Option<u32>) -> Result<Layer> {
        let membership = self.membership();
        let number = membership.number_layer(spec.number().or(number));
        let layer = spec.layer(number)?;
        membership.check_experts(call, layer.config().router.num_experts)?;
        Ok(layer)
    }

    /// Compares a layer's configuration over the ranks. Nothing to do for one rank.
    pub(crate) fn compare_layer(&self, call: &'static str, layer: &Layer) -> Result<()> {
        if self.membership().ranks == 1 {
            return Ok(());
        }
        match_device!(self, group => collectives::compare_layer(group, call, layer))
    }

    /// Compares texts over the ranks, by their names. Nothing to do for one rank.
    pub(super) fn compare_texts(&self, call: &'static str, own: &BTreeMap<String, String>) -> Result<()> {
        if self.membership().ranks == 1 {
            return Ok(());
        }
        match_device!(self, group => collectives::compare_texts(group, call, own))
    }

    /// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
    pub(crate) fn refuse(&self, layer: u32, op: Op, reason: &str) {
        match_device!(self, group => collectives::refuse(group, layer, op, reason))
    }

    /// The device, for errors.
    #[cfg(feature = "burn")]
    pub(crate) fn device(&self) -> String {
        match_device!(self, group => format!("{:?}", group.lock().device()))
    }
}
