//! The layer as an operation of burn's autodiff.
//!
//! burn's operations have one output each, the layer has two that carry gradients (y and the auxiliary loss) and must
//! run its backward once. So the layer itself is a node [`LayerNode`] whose parents are x and the parameters and whose own
//! value means nothing; y and the auxiliary loss are its children. burn runs nodes by depth, so in backward the
//! children that the loss reaches come first: each leaves its gradient in the shared [`ForwardState`], and `LayerNode` takes
//! both, an absent one as zeros.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Shape;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::adapter::{LayerOutput, OutputCotangents};
use crate::ep::GroupConfig;
use crate::error::{Error, Result};
use crate::layer::{BackwardProgress, Context, ParamKind, PerParam};

use super::backend::{
    Details, DispatchOperands, DispatchResult, LayerBackend, LayerCall, NativeBackend, NativeMemory, Operands, Outputs,
    RouteOutputs,
};
use super::backward::untracked;
use super::dense_autodiff;
use super::dense_call::{DenseCall, DenseInput};
use super::dispatch_autodiff::{self, TrackedDispatch};
use super::expert_sums::{LentExpertSums, SharedExpertSums, locked as locked_sums};
use super::group::DeviceGroup;
use super::layer_calls::CallNode;
use super::run::{Tracked, Wanted, run_backward, run_forward};

const CALL: &str = "ExpertParallelMoE::backward";

/// State that passes between the three nodes of one forward.
#[derive(Debug)]
struct ForwardState<B: NativeMemory> {
    /// Taken by the first backward.
    context: Option<Context<B::Core>>,
    arrived: OutputCotangents<FloatTensor<B>>,
}

type SharedForwardState<B> = Arc<Mutex<ForwardState<B>>>;

fn locked<B: NativeMemory>(pending: &SharedForwardState<B>) -> MutexGuard<'_, ForwardState<B>> {
    // Every holder leaves the fields whole, so a panic elsewhere does not matter.
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

fn consumed(call: &LayerCall) -> Error {
    Error::ContextConsumed { call: CALL, rank: call.group.rank() }
}

/// Memory for experts' gradients while a backward has it: it goes back also where that unwinds.
struct Loan<M> {
    sums: SharedExpertSums<M>,
    lent: Option<LentExpertSums<M>>,
    progress: Arc<BackwardProgress>,
    /// The backward has ended well.
    whole: bool,
}

impl<M> Drop for Loan<M> {
    fn drop(&mut self) {
        if let Some(lent) = self.lent.take() {
            locked_sums(&self.sums).give_back(lent, self.progress.has_rows(), self.whole);
        }
    }
}

/// Parents of a [`LayerNode`]: x and a place for each kind.
const PARENTS: usize = 1 + ParamKind::ALL.len();

/// The layer: its parents are x and the parameters.
#[derive(Debug)]
struct LayerNode;

#[derive(Debug, Clone)]
struct LayerState<B: NativeMemory> {
    call: LayerCall,
    /// x lies with burn's checkpointer, which may recompute it.
    x: NodeId,
    params: PerParam<Option<FloatTensor<B>>>,
    pending: SharedForwardState<B>,
    node: Arc<CallNode>,
}

impl<B: NativeMemory> Backward<B, PARENTS> for LayerNode {
    type State = LayerState<B>;

    fn backward(self, ops: Ops<LayerState<B>, PARENTS>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let LayerState { call, x, params, pending, node } = ops.state;
        let x = B::contiguous(checkpointer.retrieve_node_output::<FloatTensor<B>>(x));
        let (context, arrived) = {
            let mut pending = locked(&pending);
            (pending.context.take(), std::mem::take(&mut pending.arrived))
        };
        let Some(context) = context else { call.group.unwind(consumed(&call)) };
        let params_tracked = PerParam::from_fn(|kind| ops.parents[1 + kind as usize].is_some());
        let tracked = Tracked { x: ops.parents[0].is_some(), params: params_tracked };
        let arrived = OutputCotangents { d_y: arrived.d_y.map(B::contiguous), d_aux: arrived.d_aux.map(B::contiguous) };
        // What fails before leaves the call waiting, so that the other ranks are told of it.
        node.begin();
        let progress = context.progress();
        // Gradients of shards are their chain's.
        let lent = match &call.experts {
            None => call.calls.lend::<B>(node.leaves(), &tracked.params),
            Some(_) => None,
        };
        let mut loan = lent.map(|(sums, lent)| Loan { sums, lent: Some(lent), progress, whole: false });
        let sums = loan.as_ref().map(|loan| Arc::clone(&loan.sums));
        let mut lent = loan.as_mut().and_then(|loan| loan.lent.as_mut());
        let in_place = PerParam::from_fn(|kind| lent.as_ref().is_some_and(|lent| lent.has(kind)));
        let wanted = Wanted { tracked, sums: lent.take() };
        let made = run_backward::<B>(&call, &Operands { x, params }, context, arrived, wanted);
        if let Some(mut loan) = loan {
            loan.whole = made.is_ok();
        }
        let offered = made.and_then(|mut gradients| {
            let in_place = sums.as_ref().map(|sums| (sums, in_place));
            call.calls.offer::<B>(call.layer.number(), node.leaves(), &mut gradients.params, in_place)?;
            Ok(gradients)
        });
        match offered {
            Err(error) => call.group.unwind(error),
            Ok(gradients) => {
                let gradients = std::iter::once(gradients.x).chain(gradients.params.into_iter().map(|(_, t)| t));
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let (Some(parent), Some(gradient)) = (parent, gradient) {
                        grads.register::<B>(parent.id, gradient);
                    }
                }
            }
        }
    }
}

/// Σ y ∘ d_y, of which only the gradient is wanted: its state is d_y.
#[derive(Debug)]
struct InnerProductNode;

impl<B: NativeMemory> Backward<B, 1> for InnerProductNode {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<FloatTensor<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _ = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, ops.state);
        }
    }
}

#[derive(Debug, Clone)]
struct OutputState<B: NativeMemory> {
    call: LayerCall,
    pending: SharedForwardState<B>,
}

/// An output as a child of [`LayerNode`].
#[derive(Debug, Clone, Copy)]
struct OutputNode(LayerOutput);

impl<B: NativeMemory> Backward<B, 1> for OutputNode {
    type State = OutputState<B>;

    fn backward(self, ops: Ops<OutputState<B>, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let OutputState { call, pending } = ops.state;
        let gradient = grads.consume::<B>(&ops.node);
        let alive = {
            let mut pending = locked(&pending);
            pending.arrived.set(self.0, gradient);
            pending.context.is_some()
        };
        if !alive {
            // burn has dropped `LayerNode` with the backward that ran it: it would never be reached.
            call.group.unwind(consumed(&call));
        }
    }
}

impl<B: NativeBackend, C: CheckpointStrategy> LayerBackend for Autodiff<B, C> {
    type Native = B;

    fn to_native(tensor: FloatTensor<Self>) -> FloatTensor<B> {
        tensor.primitive
    }

    fn from_native(tensor: FloatTensor<B>) -> FloatTensor<Self> {
        <Self as AutodiffBackend>::from_inner(tensor)
    }

    fn node(tensor: &FloatTensor<Self>) -> Option<NodeId> {
        tensor.is_tracked().then_some(tensor.node.id)
    }

    fn moe_forward(call: &LayerCall, operands: Operands<FloatTensor<Self>>) -> Result<Outputs<Self>> {
        let device = B::float_device(&operands.x.primitive);
        // Stands for operands that the layer has not, so that the number of parents is fixed.
        let nothing = B::float_empty(Shape::new([1]), &device, operands.x.dtype().into());
        let absent = <Self as AutodiffBackend>::from_inner(nothing);
        let nodes = std::array::from_fn(|i| match i {
            0 => operands.x.node.clone(),
            _ => operands.params.get(ParamKind::ALL[i - 1]).unwrap_or(&absent).node.clone(),
        });
        let inner = |operands: Operands<FloatTensor<Self>>| operands.map(|t| B::contiguous(t.primitive));

        let mut run = match Backward::<B, PARENTS>::prepare::<C>(LayerNode, nodes).compute_bound().stateful() {
            OpsKind::UnTracked(_) => {
                let (out, _) = run_forward::<B>(call, &inner(operands), false)?;
                let constant = <Self as AutodiffBackend>::from_inner;
                let Outputs { y, losses, load, details } = out;
                let details = details.map(|details| detached(details, constant));
                return Ok(Outputs { y: constant(y), losses, load, details });
            }
            OpsKind::Tracked(run) => run,
        };
        let x = run.checkpoint(&operands.x);
        // At the end of any thread's backward burn forgets graphs of which no tensor is alive. Until `LayerNode` is in the
        // graph, the operands may be all that keeps theirs.
        let alive: Vec<_> = std::iter::once(&operands.x)
            .chain(operands.params.present().map(|(_, t)| t))
            .map(|t| t.rc.clone())
            .collect();
        let leaves = operands.params.as_ref().map(|_, t| t.as_ref().and_then(Self::node));
        let operands = inner(operands);
        let (out, context) = run_forward::<B>(call, &operands, true)?;
        let node = call.calls.remember(call.layer.number(), &call.group, leaves);
        let pending = Arc::new(Mutex::new(ForwardState { context, arrived: OutputCotangents::default() }));
        let state = LayerState { call: call.clone(), x, params: operands.params, pending: pending.clone(), node };
        let root = run.finish(state, absent.primitive);
        drop(alive);

        let child = |output: LayerOutput, value| {
            let prepared =
                Backward::<B, 1>::prepare::<C>(OutputNode(output), [root.node.clone()]).compute_bound().stateful();
            match prepared {
                OpsKind::Tracked(p) => p.finish(OutputState { call: call.clone(), pending: pending.clone() }, value),
                OpsKind::UnTracked(p) => p.finish(value),
            }
        };
        let Outputs { y, losses, load, details } = out;
        let y = child(LayerOutput::Y, y);
        // Without auxiliary losses the zero is a constant.
        let aux = |aux| match call.layer.config().aux.is_off() {
            true => <Self as AutodiffBackend>::from_inner(aux),
            false => child(LayerOutput::Aux, aux),
        };
        let details = details.map(|details| detached(details, aux));
        Ok(Outputs { y, losses, load, details })
    }

    type Dispatch = TrackedDispatch<B>;

    fn moe_route(
        call: &LayerCall,
        logits: FloatTensor<Self>,
        selection_bias: Option<FloatTensor<Self>>,
    ) -> Result<RouteOutputs<Self>> {
        dispatch_autodiff::route::<B, C>(call, logits, selection_bias)
    }

    fn moe_dispatch(call: &LayerCall, tokens: DispatchOperands<Self>) -> Result<DispatchResult<Self>> {
        dispatch_autodiff::dispatch::<B, C>(call, tokens)
    }

    fn moe_combine(dispatch: &Self::Dispatch, outputs: FloatTensor<Self>) -> Result<FloatTensor<Self>> {
        dispatch_autodiff::combine::<B, C>(dispatch, outputs)
    }

    fn moe_segments(dispatch: &Self::Dispatch) -> Result<Vec<Range<usize>>> {
        dispatch.native.pending.routing.segments()
    }

    fn moe_segment_tensors(dispatch: &Self::Dispatch) -> Result<[IntTensor<Self>; 2]> {
        dispatch.native.segment_tensors()
    }

    fn moe_inner_product(y: FloatTensor<Self>, d_y: FloatTensor<B>) -> Result<FloatTensor<Self>> {
        let value = B::float_empty(Shape::new([1]), &B::float_device(&y.primitive), y.dtype().into());
        match Backward::<B, 1>::prepare::<C>(InnerProductNode, [y.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(product) => Ok(product.finish(d_y, value)),
            OpsKind::UnTracked(_) => Err(untracked()),
        }
    }

    fn dense(
        call: &DenseCall,
        input: DenseInput<FloatTensor<Self>, IntTensor<Self>>,
        shards: Vec<FloatTensor<Self>>,
    ) -> Result<FloatTensor<Self>> {
        dense_autodiff::dense::<B, C>(call, input, shards)
    }

    fn group_of_one(config: GroupConfig, device: &Self::Device) -> Result<DeviceGroup> {
        B::group_of_one(config, device)
    }
}

/// The details as constants but for the auxiliary losses' sum, whose place in the graph `aux` makes.
fn detached<B: NativeMemory, C: CheckpointStrategy>(
    details: Details<B>,
    aux: impl FnOnce(FloatTensor<B>) -> FloatTensor<Autodiff<B, C>>,
) -> Details<Autodiff<B, C>> {
    let constant = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    let Details { aux: sum, logits, ids, weights } = details;
    Details { aux: aux(sum), logits: constant(logits), ids, weights: constant(weights) }
}
