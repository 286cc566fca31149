//! Backwards that are still to run: a rank whose backward fails on the way to one tells the ranks that wait in it.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use candle_core::{Result, Tensor, TensorId};

/// How far the backward of an operation with collectives has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BackwardStage {
    /// It has not met the other ranks, or is still to do so.
    Waiting,
    /// It has run, or has failed where no rank waits for this one.
    Over,
    /// It has failed, and the other ranks know.
    Reported,
}

/// An operation whose backward meets the other ranks of a group.
pub(super) trait PendingCollectives: Send + Sync {
    fn stage(&self) -> BackwardStage;
    /// The same for all operations of one group.
    fn group(&self) -> usize;
    /// Variables of layers whose gradients this backward gives, once for each use: those that all ranks of the group
    /// hold, and experts'.
    fn layer_vars(&self) -> Vec<TensorId>;
    /// Meets the other ranks, which wait in this backward or are on their way to it, as a failure.
    fn refuse(&self, reason: &str);
}

/// An operation that takes the gradient of one of its outputs.
pub(super) trait OutputGradient: Send + Sync {
    fn set_y_cotangent(&self, d_y: &Tensor) -> Result<()>;
}

/// An output of an operation, and the node of the graph that it hangs from.
struct Output {
    y: TensorId,
    node: TensorId,
    operation: Weak<dyn OutputGradient>,
}

thread_local! {
    /// Outputs of this thread's operations that live.
    static OUTPUTS: RefCell<Vec<Output>> = const { RefCell::new(Vec::new()) };
    /// Operations of this thread that live, by a node of the graph that every loss of theirs reaches. candle does not
    /// show a graph's operations, so they are looked up here.
    static PENDING: RefCell<Vec<(TensorId, Weak<dyn PendingCollectives>)>> = const { RefCell::new(Vec::new()) };
}

/// Remembers an operation whose outputs hang from `node`.
pub(super) fn remember<P: PendingCollectives + 'static>(node: &Tensor, operation: &Arc<P>) {
    let operation: Weak<dyn PendingCollectives> = Arc::downgrade(operation) as _;
    PENDING.with_borrow_mut(|all| {
        all.retain(|(_, operation)| operation.strong_count() > 0);
        all.push((node.id(), operation));
    });
}

/// Remembers that `y`, which hangs from `node`, is an output of an operation.
pub(super) fn remember_output<P: OutputGradient + 'static>(y: &Tensor, node: &Tensor, operation: &Arc<P>) {
    let operation: Weak<dyn OutputGradient> = Arc::downgrade(operation) as _;
    OUTPUTS.with_borrow_mut(|all| {
        all.retain(|output| output.operation.strong_count() > 0);
        all.push(Output { y: y.id(), node: node.id(), operation });
    });
}

/// The operation that `y` is an output of, and the node that it hangs from.
pub(super) fn operation_of(y: &Tensor) -> Option<(Tensor, Arc<dyn OutputGradient>)> {
    let (node, operation) = OUTPUTS.with_borrow(|all| {
        let output = all.iter().find(|output| output.y == y.id())?;
        Some((output.node, output.operation.upgrade()?))
    })?;
    let node = y.sorted_nodes().into_iter().find(|of| of.id() == node)?.clone();
    Some((node, operation))
}

/// Meets the other ranks of `loss`'s layers as a failure: for a rank that cannot run the backward of `loss`, or whose
/// `loss.backward()` has failed, while the others wait in a layer for it. They get `reason` at once, and where the layers'
/// errors say so the group stays usable. Nothing happens where no layer is left to run, or where it was a layer that
/// failed: that has told them. [`backward`](super::backward) and [`MainGradients`](super::MainGradients) do this
/// themselves.
///
/// Of layers whose forward has run on this thread; for others there is
/// [`ExpertParallelMoE::refuse_backward`](super::ExpertParallelMoE::refuse_backward).
pub fn refuse_backward(loss: &Tensor, reason: &str) {
    let operations = operations_of(loss);
    let in_stage = |stage| operations.iter().filter(move |operation| operation.stage() == stage);
    let mut refused: HashSet<usize> = in_stage(BackwardStage::Reported).map(|operation| operation.group()).collect();
    for operation in in_stage(BackwardStage::Waiting) {
        if refused.insert(operation.group()) {
            operation.refuse(reason);
        }
    }
}

/// How often the backward of `loss` will give a gradient of a layer's variable, by layers.
pub(super) fn calls_of(loss: &Tensor) -> HashMap<TensorId, usize> {
    let mut calls = HashMap::new();
    for operation in operations_of(loss).iter().filter(|operation| operation.stage() == BackwardStage::Waiting) {
        for var in operation.layer_vars() {
            *calls.entry(var).or_default() += 1;
        }
    }
    calls
}

/// The operations that `loss` reaches, in the order of backward: the last forward first.
fn operations_of(loss: &Tensor) -> Vec<Arc<dyn PendingCollectives>> {
    let nodes: HashSet<TensorId> = loss.sorted_nodes().into_iter().map(Tensor::id).collect();
    PENDING.with_borrow(|all| {
        let reached = all.iter().rev().filter(|(node, _)| nodes.contains(node));
        reached.filter_map(|(_, operation)| operation.upgrade()).collect()
    })
}
