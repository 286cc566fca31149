//! The layer on back ends whose tensors the core works on in place: one body for all of them.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::adapter::DispatchedRows;
use crate::ep::GroupConfig;
use crate::error::Result;

use super::backend::{
    DispatchOperands, DispatchResult, LayerBackend, LayerCall, NativeMemory, Operands, Outputs, RouteOutputs,
};
use super::backward::untracked;
use super::dense::run_forward as run_dense;
use super::dense_call::{DenseCall, DenseInput};
use super::dispatch::{NativeDispatch, contiguous, run_dispatch, run_route};
use super::group::DeviceGroup;
use super::run::run_forward;

/// A back end that the core works on in place and that tracks no gradients.
#[diagnostic::on_unimplemented(
    message = "moebius' layer does not run on the burn back end `{Self}`",
    note = "see `moebius::burn::MoeBackend`"
)]
pub trait NativeGroup: NativeMemory {
    /// A group of one rank on a device.
    fn native_group(config: GroupConfig, device: &Self::Device) -> Result<DeviceGroup>;
}

/// Nothing is kept for a backward.
impl<B: NativeGroup> LayerBackend for B {
    type Native = B;

    fn to_native(tensor: FloatTensor<B>) -> FloatTensor<B> {
        tensor
    }

    fn from_native(tensor: FloatTensor<B>) -> FloatTensor<B> {
        tensor
    }

    fn node(_: &FloatTensor<B>) -> Option<NodeId> {
        None
    }

    fn moe_forward(call: &LayerCall, operands: Operands<FloatTensor<B>>) -> Result<Outputs<B>> {
        Ok(run_forward::<B>(call, &operands.map(B::contiguous), false)?.0)
    }

    type Dispatch = Arc<NativeDispatch<B>>;

    fn moe_route(
        call: &LayerCall,
        logits: FloatTensor<B>,
        selection_bias: Option<FloatTensor<B>>,
    ) -> Result<RouteOutputs<B>> {
        run_route(call, &B::contiguous(logits), selection_bias.map(B::contiguous).as_ref())
    }

    fn moe_dispatch(call: &LayerCall, tokens: DispatchOperands<B>) -> Result<DispatchResult<B>> {
        let DispatchedRows { rows, weights, load, routing } = run_dispatch::<B>(call, &contiguous::<B>(tokens), false)?;
        Ok(DispatchedRows { rows, weights, load, routing: Arc::new(routing) })
    }

    fn moe_combine(dispatch: &Self::Dispatch, outputs: FloatTensor<B>) -> Result<FloatTensor<B>> {
        dispatch.combine(&B::contiguous(outputs))
    }

    fn moe_segments(dispatch: &Self::Dispatch) -> Result<Vec<Range<usize>>> {
        dispatch.pending.routing.segments()
    }

    fn moe_segment_tensors(dispatch: &Self::Dispatch) -> Result<[IntTensor<B>; 2]> {
        dispatch.segment_tensors()
    }

    fn moe_inner_product(_: FloatTensor<B>, _: FloatTensor<B>) -> Result<FloatTensor<B>> {
        Err(untracked())
    }

    fn dense(
        call: &DenseCall,
        input: DenseInput<FloatTensor<B>, IntTensor<B>>,
        shards: Vec<FloatTensor<B>>,
    ) -> Result<FloatTensor<B>> {
        run_dense::<B>(call, &input, &shards, false)
    }

    fn group_of_one(config: GroupConfig, device: &B::Device) -> Result<DeviceGroup> {
        B::native_group(config, device)
    }
}
