//! Dispatch, combine and the router's formula as operations of burn's autodiff.
//!
//! A dispatch is a node, the token, whose parents are x, the routing weights and an anchor that always tracks
//! gradients; its value means nothing. Its children are the received rows, their weights, and every combine. burn runs
//! nodes by depth, the children first: each of the first two leaves its gradient in the shared state, and the token
//! takes both, an absent one as zeros. So a dispatch's backward runs wherever a loss reaches one of its combines, as
//! the other ranks are in the same collectives.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};

use crate::adapter::{DispatchTokens, DispatchedPart, DispatchedRows};
use crate::error::Result;
use crate::layer::PerParam;

use super::backend::{DispatchOperands, DispatchResult, LayerCall, NativeBackend, NativeMemory, RouteOutputs};
use super::dispatch::{NativeDispatch, contiguous, route_bwd, run_dispatch, run_route};
use super::layer_calls::CallNode;

/// A dispatch in a graph.
#[derive(Debug, Clone)]
pub struct TrackedDispatch<B: NativeMemory> {
    pub(super) native: Arc<NativeDispatch<B>>,
    /// The node that combines hang from.
    token: FloatTensor<Autodiff<B>>,
}

/// The result of a backward; an error has no other way out, as burn's backward returns nothing. A backward that comes
/// again fails: burn has dropped the token with the backward that ran it.
fn unwinding<B: NativeMemory, T>(native: &NativeDispatch<B>, made: Result<T>) -> T {
    made.unwrap_or_else(|error| native.group.unwind(error))
}

/// The token: of the anchor, x and the routing weights.
#[derive(Debug)]
struct DispatchToken;

#[derive(Debug, Clone)]
struct TokenState<B: NativeMemory> {
    native: Arc<NativeDispatch<B>>,
    /// Waits until its backward begins: the last collective of the dispatch.
    call: Arc<CallNode>,
}

impl<B: NativeMemory> Backward<B, 3> for DispatchToken {
    type State = TokenState<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let TokenState { native, call } = &ops.state;
        call.begin();
        // Made whether wanted or not: the other ranks are in the collective.
        let gradients = unwinding(native, native.backward());
        for (parent, gradient) in ops.parents.into_iter().skip(1).zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// An output of a dispatch: a child of the token.
#[derive(Debug, Clone, Copy)]
struct DispatchedNode(DispatchedPart);

impl<B: NativeMemory> Backward<B, 1> for DispatchedNode {
    type State = Arc<NativeDispatch<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        unwinding(&ops.state, ops.state.pending.set_cotangent(self.0, gradient));
    }
}

/// A combine: of its dispatch's token and the experts' outputs.
#[derive(Debug)]
struct CombineNode;

impl<B: NativeMemory> Backward<B, 2> for CombineNode {
    type State = Arc<NativeDispatch<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_y = grads.consume::<B>(&ops.node);
        let d_outputs = unwinding(&ops.state, ops.state.combine_bwd(d_y));
        let [_, outputs] = ops.parents;
        if let Some(outputs) = outputs {
            grads.register::<B>(outputs.id, d_outputs);
        }
    }
}

pub(super) fn dispatch<B: NativeBackend, C: CheckpointStrategy>(
    call: &LayerCall,
    tokens: DispatchOperands<Autodiff<B, C>>,
) -> Result<DispatchResult<Autodiff<B, C>>> {
    let DispatchTokens { x, ids, weights } = tokens;
    let device = B::float_device(&x.primitive);
    let nothing = B::float_empty([1].into(), &device, weights.dtype().into());
    let anchor = <Autodiff<B, C> as AutodiffBackend>::from_inner(nothing);
    let anchor = <Autodiff<B, C> as FloatTensorOps<_>>::float_set_require_grad(anchor, true);
    let nodes = [anchor.node.clone(), x.node.clone(), weights.node.clone()];
    let prepared = Backward::<B, 3>::prepare::<C>(DispatchToken, nodes).compute_bound().stateful();
    // At the end of any thread's backward burn forgets graphs of which no tensor is alive. Until the token is in the
    // graph, its parents may be all that keeps theirs.
    let alive = [anchor.rc.clone(), x.rc.clone(), weights.rc.clone()];
    let inner = contiguous::<B>(DispatchTokens { x: x.primitive, ids, weights: weights.primitive });
    let tracked = matches!(prepared, OpsKind::Tracked(_));
    let DispatchedRows { rows, weights, load, routing } = run_dispatch::<B>(call, &inner, tracked)?;
    let native = Arc::new(routing);
    let token = match prepared {
        OpsKind::Tracked(p) => {
            let call = call.calls.remember(call.layer.number(), &call.group, PerParam::default());
            p.finish(TokenState { native: native.clone(), call }, anchor.primitive)
        }
        OpsKind::UnTracked(p) => p.finish(anchor.primitive),
    };
    drop(alive);
    let child = |part: DispatchedPart, value| {
        let prepared = Backward::<B, 1>::prepare::<C>(DispatchedNode(part), [token.node.clone()]);
        let prepared = prepared.compute_bound().stateful();
        match prepared {
            OpsKind::Tracked(p) => p.finish(native.clone(), value),
            OpsKind::UnTracked(p) => p.finish(value),
        }
    };
    let (rows, weights) = (child(DispatchedPart::Rows, rows), child(DispatchedPart::Weights, weights));
    Ok(DispatchedRows { rows, weights, load, routing: TrackedDispatch { native, token } })
}

pub(super) fn combine<B: NativeBackend, C: CheckpointStrategy>(
    dispatch: &TrackedDispatch<B>,
    outputs: FloatTensor<Autodiff<B, C>>,
) -> Result<FloatTensor<Autodiff<B, C>>> {
    let TrackedDispatch { native, token } = dispatch;
    let nodes = [token.node.clone(), outputs.node.clone()];
    let prepared = Backward::<B, 2>::prepare::<C>(CombineNode, nodes).compute_bound().stateful();
    let alive = outputs.rc.clone();
    let y = native.combine(&B::contiguous(outputs.primitive))?;
    let y = match prepared {
        OpsKind::Tracked(p) => p.finish(native.clone(), y),
        OpsKind::UnTracked(p) => p.finish(y),
    };
    drop(alive);
    Ok(y)
}

/// Weights of chosen experts, of logits.
#[derive(Debug)]
struct RouteNode;

#[derive(Debug, Clone)]
struct RouteState<B: NativeMemory> {
    call: LayerCall,
    logits: FloatTensor<B>,
    ids: burn::tensor::ops::IntTensor<B>,
}

impl<B: NativeMemory> Backward<B, 1> for RouteNode {
    type State = RouteState<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let RouteState { call, logits, ids } = ops.state;
        let weights = B::contiguous(grads.consume::<B>(&ops.node));
        let made = route_bwd::<B>(&call, &DispatchTokens { x: logits, ids, weights });
        let d_logits = made.unwrap_or_else(|error| call.group.unwind(error));
        let [logits] = ops.parents;
        if let Some(logits) = logits {
            grads.register::<B>(logits.id, d_logits);
        }
    }
}

pub(super) fn route<B: NativeBackend, C: CheckpointStrategy>(
    call: &LayerCall,
    logits: FloatTensor<Autodiff<B, C>>,
    selection_bias: Option<FloatTensor<Autodiff<B, C>>>,
) -> Result<RouteOutputs<Autodiff<B, C>>> {
    let prepared = Backward::<B, 1>::prepare::<C>(RouteNode, [logits.node.clone()]).compute_bound().stateful();
    let alive = logits.rc.clone();
    let logits = B::contiguous(logits.primitive);
    let bias = selection_bias.map(|bias| B::contiguous(bias.primitive));
    let RouteOutputs { ids, weights } = run_route::<B>(call, &logits, bias.as_ref())?;
    let weights = match prepared {
        OpsKind::Tracked(p) => p.finish(RouteState { call: call.clone(), logits, ids: ids.clone() }, weights),
        OpsKind::UnTracked(p) => p.finish(weights),
    };
    drop(alive);
    Ok(RouteOutputs { ids, weights })
}
