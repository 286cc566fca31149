//! Computations with gathered dense weights as operations of burn's autodiff.

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Shape, TensorMetadata};

use crate::error::{Error, Result};

use super::backend::{NativeBackend, NativeMemory};
use super::dense::{DenseGradientMask, run_backward, run_forward};
use super::dense_call::{DenseCall, DenseInput};

/// Its parents are x and the weights' shards, of which there are at most two.
const PARENTS: usize = 3;

#[derive(Debug)]
struct DenseNode;

#[derive(Debug, Clone)]
struct DenseState<B: NativeMemory> {
    call: DenseCall,
    /// Rows lie with burn's checkpointer, which may recompute them.
    input: DenseInput<NodeId, IntTensor<B>>,
    shards: Vec<FloatTensor<B>>,
}

impl<B: NativeMemory> Backward<B, PARENTS> for DenseNode {
    type State = DenseState<B>;

    fn backward(self, ops: Ops<DenseState<B>, PARENTS>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let DenseState { call, input, shards } = ops.state;
        let input = match input {
            DenseInput::Rows(x) => DenseInput::Rows(checkpointer.retrieve_node_output::<FloatTensor<B>>(x)),
            DenseInput::Ids(ids) => DenseInput::Ids(ids),
        };
        let [x, weights @ ..] = ops.parents;
        let wanted = DenseGradientMask { x: x.is_some(), weights: weights.iter().map(Option::is_some).collect() };
        match run_backward::<B>(&call, &input, &shards, gradient, &wanted) {
            Err(error) => call.failure.unwind(error),
            Ok(d_x) => {
                if let (Some(parent), Some(d_x)) = (x, d_x) {
                    grads.register::<B>(parent.id, d_x);
                }
            }
        }
    }
}

/// Forward, and its place in the graph where something tracks gradients.
pub(super) fn dense<B: NativeBackend, C: CheckpointStrategy>(
    call: &DenseCall,
    input: DenseInput<FloatTensor<Autodiff<B, C>>, IntTensor<B>>,
    shards: Vec<FloatTensor<Autodiff<B, C>>>,
) -> Result<FloatTensor<Autodiff<B, C>>> {
    let Some(first) = shards.first() else {
        return Err(Error::invalid("ShardedDense", "weights", "one at least", 0));
    };
    // Stands for operands that there are not, so that the number of parents is fixed.
    let nothing = B::float_empty(Shape::new([1]), &B::float_device(&first.primitive), first.dtype().into());
    let absent = <Autodiff<B, C> as AutodiffBackend>::from_inner(nothing);
    let nodes = std::array::from_fn(|i| match (i, &input) {
        (0, DenseInput::Rows(x)) => x.node.clone(),
        (0, DenseInput::Ids(_)) => absent.node.clone(),
        _ => shards.get(i - 1).unwrap_or(&absent).node.clone(),
    });
    // Until the operation is in the graph, the operands may be all that keeps theirs.
    let alive: Vec<_> = shards.iter().map(|t| t.rc.clone()).collect();
    let prepared = Backward::<B, PARENTS>::prepare::<C>(DenseNode, nodes).compute_bound().stateful();
    let inner = |t: FloatTensor<Autodiff<B, C>>| t.primitive;
    match prepared {
        OpsKind::UnTracked(_) => {
            let input = match input {
                DenseInput::Rows(x) => DenseInput::Rows(inner(x)),
                DenseInput::Ids(ids) => DenseInput::Ids(ids),
            };
            let shards: Vec<_> = shards.into_iter().map(inner).collect();
            run_forward::<B>(call, &input, &shards, false).map(<Autodiff<B, C> as AutodiffBackend>::from_inner)
        }
        OpsKind::Tracked(mut prepared) => {
            let (kept, input, x) = match input {
                DenseInput::Rows(x) => {
                    let (kept, rc) = (DenseInput::Rows(prepared.checkpoint(&x)), x.rc.clone());
                    (kept, DenseInput::Rows(inner(x)), Some(rc))
                }
                DenseInput::Ids(ids) => (DenseInput::Ids(ids.clone()), DenseInput::Ids(ids), None),
            };
            let shards: Vec<_> = shards.into_iter().map(inner).collect();
            let y = run_forward::<B>(call, &input, &shards, true)?;
            let y = prepared.finish(DenseState { call: call.clone(), input: kept, shards }, y);
            drop((alive, x));
            Ok(y)
        }
    }
}
