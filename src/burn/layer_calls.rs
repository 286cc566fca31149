//! Calls of a layer whose backward is still to run, and who takes the gradients that it makes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::tensor::TensorPrimitive;
use burn::tensor::container::TensorContainer;
use burn::tensor::ops::FloatTensor;

use crate::comm::Op;
use crate::error::Result;
use crate::layer::{ParamKind, PerParam};

use super::backend::NativeMemory;
use super::expert_sums::{ErasedExpertSums, LentExpertSums, SharedExpertSums, locked as locked_sums};
use super::group::DeviceGroup;

/// Gradients of a layer's parameters, of a back end that the module does not name.
pub(super) type LayerGradients = TensorContainer<ParamKind>;

/// Receiver of gradients of layers as a backward makes them.
pub(super) trait GradientHook: Send {
    /// Whether it takes the gradients of this leaf of the graph: burn does not get them.
    fn takes(&self, leaf: NodeId) -> bool;

    /// Counts a call whose gradient of this leaf lies in memory that stays; says whether the sum there is whole with it.
    fn counts(&mut self, leaf: NodeId) -> bool;

    /// Takes those of a layer's call, whose parameters are these leaves.
    fn on_gradients(&mut self, layer: u32, leaves: &PerParam<Option<NodeId>>, gradients: OfferedGradients);
}

/// Gradients of a layer's call, for who takes them.
pub(super) struct OfferedGradients {
    /// Of the call.
    pub(super) new: LayerGradients,
    /// Sums of all microbatches, which the call has made whole.
    pub(super) whole: LayerGradients,
}

/// Such a receiver, of several layers.
pub(super) type SharedHook = Arc<Mutex<dyn GradientHook>>;

/// How far the backward of a layer's call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardStage {
    /// It is still to run.
    Waiting,
    /// It has begun.
    Begun,
    /// Its graph is gone, and it has not run.
    Dropped,
}

/// A call of a layer, or a dispatch, whose backward meets the other ranks of the group.
#[derive(Debug)]
pub(super) struct PendingCall {
    layer: u32,
    group: DeviceGroup,
    /// Nodes of the parameters that track gradients; none of a dispatch.
    leaves: PerParam<Option<NodeId>>,
    stage: Mutex<BackwardStage>,
}

impl PendingCall {
    pub(super) fn stage(&self) -> BackwardStage {
        *locked(&self.stage)
    }

    pub(super) fn group(&self) -> &DeviceGroup {
        &self.group
    }

    pub(super) fn leaves(&self) -> &PerParam<Option<NodeId>> {
        &self.leaves
    }

    /// Meets the other ranks, which wait in this backward or are on their way to it, as a failure.
    pub(super) fn refuse(&self, reason: &str) {
        self.group.erased().refuse(self.layer, Op::CombineBwd, reason);
    }
}

/// A call as its node in the graph holds it.
#[derive(Debug)]
pub(super) struct CallNode(Arc<PendingCall>);

impl CallNode {
    /// Its backward begins.
    pub(super) fn begin(&self) {
        *locked(&self.0.stage) = BackwardStage::Begun;
    }

    pub(super) fn leaves(&self) -> &PerParam<Option<NodeId>> {
        &self.0.leaves
    }
}

impl Drop for CallNode {
    fn drop(&mut self) {
        let mut stage = locked(&self.0.stage);
        if *stage == BackwardStage::Waiting {
            *stage = BackwardStage::Dropped;
        }
    }
}

/// Memory that is lent, and where it comes back to.
pub(super) type Lent<M> = (SharedExpertSums<M>, LentExpertSums<M>);

/// Who takes the gradients of a backward that runs, and where.
#[derive(Clone, Default)]
pub(super) struct Receivers {
    pub(super) hook: Option<SharedHook>,
    /// Memory for the experts'.
    pub(super) sums: Option<ErasedExpertSums>,
}

/// Calls of a module and its clones.
#[derive(Default)]
pub(super) struct LayerCalls {
    pending: Mutex<Vec<Arc<PendingCall>>>,
    /// Those of the backward that runs.
    receivers: Mutex<Receivers>,
}

impl std::fmt::Debug for LayerCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerCalls").field("pending", &self.pending).finish_non_exhaustive()
    }
}

fn locked<T: ?Sized>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every holder leaves it whole.
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LayerCalls {
    /// Remembers a call, for as long as its node lives.
    pub(super) fn remember(&self, layer: u32, group: &DeviceGroup, leaves: PerParam<Option<NodeId>>) -> Arc<CallNode> {
        let call = PendingCall { layer, group: group.clone(), leaves, stage: Mutex::new(BackwardStage::Waiting) };
        let call = Arc::new(call);
        let mut pending = locked(&self.pending);
        pending.retain(|call| call.stage() == BackwardStage::Waiting);
        pending.push(Arc::clone(&call));
        Arc::new(CallNode(call))
    }

    /// Calls whose backward is still to run, also those whose graph is not that of the next backward.
    pub(super) fn waiting(&self) -> Vec<Arc<PendingCall>> {
        locked(&self.pending).iter().filter(|call| call.stage() == BackwardStage::Waiting).cloned().collect()
    }

    /// Lends memory for the gradients of experts that a call trains.
    pub(super) fn lend<B: NativeMemory>(
        &self,
        leaves: &PerParam<Option<NodeId>>,
        trained: &PerParam<bool>,
    ) -> Option<Lent<B::Output>> {
        // Of another back end: that of a reducer whose module this call is not.
        let sums = Arc::clone(B::named_sums(locked(&self.receivers).sums.as_ref()?)?);
        let lent = locked_sums(&sums).lend(leaves, trained)?;
        Some((sums, lent))
    }

    /// Offers the gradients of a call to who takes them; those of `in_place` are in memory that was lent.
    pub(super) fn offer<B: NativeMemory>(
        &self,
        layer: u32,
        leaves: &PerParam<Option<NodeId>>,
        gradients: &mut PerParam<Option<FloatTensor<B>>>,
        in_place: Option<(&SharedExpertSums<B::Output>, PerParam<bool>)>,
    ) -> Result<()> {
        let Some(hook) = locked(&self.receivers).hook.clone() else { return Ok(()) };
        let (mut hook, mut new, mut whole) = (locked(&hook), LayerGradients::new(), LayerGradients::new());
        for kind in ParamKind::ALL {
            let Some(leaf) = leaves[kind].filter(|leaf| hook.takes(*leaf)) else { continue };
            match &in_place {
                Some((sums, kinds)) if kinds[kind] => {
                    if hook.counts(leaf)
                        && let Some(sum) = locked_sums(sums).take_leaf(leaf)
                    {
                        whole.register::<B>(kind, TensorPrimitive::Float(B::float(sum)?));
                    }
                }
                _ => {
                    if let Some(gradient) = gradients[kind].take() {
                        new.register::<B>(kind, TensorPrimitive::Float(gradient));
                    }
                }
            }
        }
        hook.on_gradients(layer, leaves, OfferedGradients { new, whole });
        Ok(())
    }

    fn receive(&self, receivers: Receivers) {
        *locked(&self.receivers) = receivers;
    }
}

/// Has receivers take the gradients of layers' calls for as long as this lives.
pub(super) struct ReceiverScope<'a>(Vec<&'a LayerCalls>);

impl<'a> ReceiverScope<'a> {
    pub(super) fn new(layers: impl Iterator<Item = &'a LayerCalls>, receivers: &Receivers) -> Self {
        let layers: Vec<_> = layers.collect();
        layers.iter().for_each(|layer| layer.receive(receivers.clone()));
        Self(layers)
    }
}

impl Drop for ReceiverScope<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|layer| layer.receive(Receivers::default()));
    }
}
