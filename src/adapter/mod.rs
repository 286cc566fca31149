//! Code that the adapters of candle and burn share: a group whose device's type is hidden, and the collectives that an
//! adapter runs itself.

use std::any::Any;
use std::fmt::Debug;

use crate::comm::{Op, ReduceOp, Tag};
use crate::ep::EpGroup;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// A rank's group, whatever its device: what a module needs of it beside the layer's calls.
pub(crate) trait AnyGroup: Debug + Send + Sync {
    /// The `EpGroup<D>` itself.
    fn as_any(&self) -> &dyn Any;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    fn local_experts(&self) -> usize;
    /// As [`EpGroup::number_layer`].
    fn number_layer(&self, explicit: Option<u32>) -> u32;
    /// As [`EpGroup::check_experts`].
    fn check_experts(&self, call: &'static str, found: usize) -> Result<()>;
    /// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
    fn refuse(&self, layer: u32, op: Op, reason: &str);
    /// The device, for errors.
    #[cfg(feature = "burn")]
    fn device(&self) -> String;
    /// As [`EpGroup::take_failure`].
    #[cfg(feature = "burn")]
    fn take_failure(&self) -> Option<crate::Error>;
    /// As [`EpGroup::unwind`].
    #[cfg(feature = "burn")]
    fn unwind(&self, error: crate::Error) -> !;
}

impl<D: Kernels> AnyGroup for EpGroup<D> {
    fn as_any(&self) -> &dyn Any {
        self
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

    fn number_layer(&self, explicit: Option<u32>) -> u32 {
        self.number_layer(explicit)
    }

    fn check_experts(&self, call: &'static str, found: usize) -> Result<()> {
        self.check_experts(call, found)
    }

    fn refuse(&self, layer: u32, op: Op, reason: &str) {
        // The rank returns its own error, whatever becomes of the refusal.
        let _ = self.lock().dispatcher().communicator().refuse(tag(layer, op), reason);
    }

    #[cfg(feature = "burn")]
    fn device(&self) -> String {
        format!("{:?}", self.lock().device())
    }

    #[cfg(feature = "burn")]
    fn take_failure(&self) -> Option<crate::Error> {
        self.take_failure()
    }

    #[cfg(feature = "burn")]
    fn unwind(&self, error: crate::Error) -> ! {
        self.unwind(error)
    }
}

/// A collective of a module, beside its layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParamCollective {
    /// Rank 0's parameter to all.
    Weights,
    /// The sum of a gradient over the ranks.
    Gradient,
}

impl ParamCollective {
    fn op(self) -> Op {
        match self {
            ParamCollective::Weights => Op::Weights,
            ParamCollective::Gradient => Op::GradReduce,
        }
    }
}

fn tag(layer: u32, op: Op) -> Tag {
    Tag { layer, op, sequence: 0 }
}

/// Runs a collective over this rank's `values`; where they cannot be had, the other ranks are told.
pub(crate) fn exchange<D: Kernels>(
    group: &EpGroup<D>,
    layer: u32,
    exchange: ParamCollective,
    values: impl FnOnce(&D) -> Result<Tensor<D>>,
) -> Result<Tensor<D>> {
    let mut group = group.lock();
    let (device, tag) = (group.device().clone(), tag(layer, exchange.op()));
    let comm = group.dispatcher().communicator();
    let mut values = values(&device).inspect_err(|error| {
        let _ = comm.refuse(tag, &error.to_string());
    })?;
    match exchange {
        ParamCollective::Weights => comm.broadcast(tag, 0, values.view_mut())?,
        ParamCollective::Gradient => comm.all_reduce(tag, ReduceOp::Sum, values.view_mut())?,
    }
    Ok(values)
}
