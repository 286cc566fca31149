//! A rank's group as a module holds it: host frameworks know at run time only which device they work on.

use std::fmt::{self, Debug};
use std::sync::Arc;

use crate::comm::Op;
use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::ep::{EpGroup, Membership};
use crate::error::Result;
use crate::etp::{Chain, ShardDevice};
use crate::layer::{Layer, LayerSpec};

use super::collectives;

/// Work on what is of some device, the same on all of them: `any_device!(any, of => work)`.
macro_rules! any_device {
    ($any:expr, $of:ident => $work:expr) => {
        match $any {
            $crate::adapter::Any::Cpu($of) => $work,
            #[cfg(feature = "cuda")]
            $crate::adapter::Any::Cuda($of) => $work,
        }
    };
}
pub(crate) use any_device;

/// A type that each device has its own of.
#[doc(hidden)]
pub trait PerDevice {
    type Of<D: FrameworkDevice>: Clone + Debug;
}

/// That of some device.
#[doc(hidden)]
pub enum Any<P: PerDevice> {
    Cpu(P::Of<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(P::Of<Cuda>),
}

impl<P: PerDevice> Clone for Any<P> {
    fn clone(&self) -> Self {
        match self {
            Self::Cpu(of) => Self::Cpu(of.clone()),
            #[cfg(feature = "cuda")]
            Self::Cuda(of) => Self::Cuda(of.clone()),
        }
    }
}

impl<P: PerDevice> Debug for Any<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        any_device!(self, of => of.fmt(f))
    }
}

/// A rank's group, on whichever device.
#[doc(hidden)]
pub type AnyGroup = Any<Groups>;

#[doc(hidden)]
#[derive(Debug)]
pub struct Groups;

impl PerDevice for Groups {
    type Of<D: FrameworkDevice> = EpGroup<D>;
}

/// A chain of sharded weights, on whichever device.
#[doc(hidden)]
pub type AnyChain = Any<Chains>;

#[doc(hidden)]
#[derive(Debug)]
pub struct Chains;

impl PerDevice for Chains {
    type Of<D: FrameworkDevice> = Arc<Chain<D>>;
}

impl AnyChain {
    /// The cut of a weight of these sizes, and this rank's place in the chain.
    pub(crate) fn cut(&self, dims: &[usize]) -> crate::Result<(crate::etp::Shards, usize)> {
        any_device!(self, chain => Ok((chain.shards(dims)?, chain.rank())))
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
    /// What is of this device, for a module that does not know its device.
    #[doc(hidden)]
    fn any<P: PerDevice>(of: P::Of<Self>) -> Any<P>;

    /// The same again, if it is of this device.
    #[doc(hidden)]
    fn own<P: PerDevice>(any: &Any<P>) -> Option<&P::Of<Self>>;

    /// A chain of this device, for a module that does not know its device.
    #[doc(hidden)]
    fn any_chain(chain: Arc<Chain<Self>>) -> AnyChain {
        Self::any(chain)
    }

    /// The chain again, if it is one of this device.
    #[doc(hidden)]
    fn chain(any: &AnyChain) -> Option<&Arc<Chain<Self>>> {
        Self::own(any)
    }
}

impl FrameworkDevice for Cpu {
    fn any<P: PerDevice>(of: P::Of<Self>) -> Any<P> {
        Any::Cpu(of)
    }

    fn own<P: PerDevice>(any: &Any<P>) -> Option<&P::Of<Self>> {
        match any {
            Any::Cpu(of) => Some(of),
            #[cfg(feature = "cuda")]
            Any::Cuda(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl FrameworkDevice for Cuda {
    fn any<P: PerDevice>(of: P::Of<Self>) -> Any<P> {
        Any::Cuda(of)
    }

    fn own<P: PerDevice>(any: &Any<P>) -> Option<&P::Of<Self>> {
        match any {
            Any::Cuda(of) => Some(of),
            Any::Cpu(_) => None,
        }
    }
}

impl AnyGroup {
    /// The group apart from its device.
    pub(crate) fn membership(&self) -> &Membership {
        any_device!(self, group => group.membership())
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

    /// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
    pub(crate) fn refuse(&self, layer: u32, op: Op, reason: &str) {
        any_device!(self, group => collectives::refuse(group, layer, op, reason))
    }

    /// The device, for errors.
    #[cfg(feature = "burn")]
    pub(crate) fn device(&self) -> String {
        any_device!(self, group => format!("{:?}", group.lock().device()))
    }
}
