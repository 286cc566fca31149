//! Dispatch, combine and the router's formula of the core on a back end's memory, and their gradients.

use burn::tensor::TensorMetadata;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::adapter::{
    DispatchTokens, DispatchedCotangents, DispatchedRows, FrameworkTensors, GuardedCall, PendingDispatch, ResultSpec,
};
use crate::comm::Op;
use crate::device::Device;
use crate::error::Result;
use crate::tensor::{TensorMut, TensorRef};

use super::backend::{DispatchOperands, LayerBackend, LayerCall, Named, NativeMemory, RouteOutputs};
use super::group::DeviceGroup;
use super::run::ordered;

/// A back end's tensors in one call of a group; results lie where `like` does.
struct NativeTensors<'a, B: NativeMemory> {
    group: &'a DeviceGroup,
    like: &'a FloatTensor<B>,
}

impl<B: NativeMemory> FrameworkTensors<B::Core> for NativeTensors<'_, B> {
    type Float = FloatTensor<B>;
    type Ids = IntTensor<B>;
    type Output = B::Output;

    fn with_views<R>(
        &self,
        core: &B::Core,
        _: &'static str,
        floats: &[(&'static str, &FloatTensor<B>)],
        ids: Option<&IntTensor<B>>,
        work: impl FnOnce(&[TensorRef<'_, B::Core>]) -> Result<R>,
    ) -> Result<R> {
        let views = B::together(self.like, || {
            let floats = floats.iter().map(|&(name, tensor)| B::view(core, Named { name, tensor }));
            floats.chain(ids.map(|tensor| B::view_ids(core, Named { name: "ids", tensor }))).collect::<Result<Vec<_>>>()
        })?;
        work(&views)
    }

    fn output(&self, core: &B::Core, spec: ResultSpec<'_>) -> Result<B::Output> {
        B::output(core, self.like, spec)
    }

    fn output_pair(&self, core: &B::Core, [first, second]: [ResultSpec<'_>; 2]) -> Result<[B::Output; 2]> {
        B::together(self.like, || Ok([B::output(core, self.like, first)?, B::output(core, self.like, second)?]))
    }

    fn view_mut(output: &mut B::Output) -> Result<TensorMut<'_, B::Core>> {
        B::view_mut(output)
    }

    fn ordered<R>(&self, core: &B::Core, work: impl FnOnce() -> Result<R>) -> Result<R> {
        ordered::<B, R>(self.group, core, work)
    }
}

/// A dispatch on a back end, until its backward.
#[derive(Debug)]
pub struct NativeDispatch<B: NativeMemory> {
    pub(super) group: DeviceGroup,
    pub(super) pending: PendingDispatch<B::Core, FloatTensor<B>>,
    /// Shows the back end where results are to lie; `[1]`.
    like: FloatTensor<B>,
}

/// Tokens with their elements in row-major order.
pub(super) fn contiguous<B: NativeMemory>(tokens: DispatchOperands<B>) -> DispatchOperands<B> {
    let DispatchTokens { x, ids, weights } = tokens;
    DispatchTokens { x: B::contiguous(x), ids: B::contiguous_ids(ids), weights: B::contiguous(weights) }
}

/// Dispatches contiguous tokens; a backward can follow where `backward` says so.
pub(super) fn run_dispatch<B: NativeMemory>(
    call: &LayerCall,
    tokens: &DispatchOperands<B>,
    backward: bool,
) -> Result<DispatchedRows<FloatTensor<B>, NativeDispatch<B>>> {
    let device = B::float_device(&tokens.x);
    let like = B::float_empty([1].into(), &device, tokens.weights.dtype().into());
    let group = call.group_of::<B>(("DispatchCombine::dispatch", Op::Prepare), &tokens.x)?;
    let tensors = &NativeTensors::<B> { group: &call.group, like: &like };
    let DispatchTokens { x, ids, weights } = tokens;
    let made =
        GuardedCall { layer: &call.layer, group, tensors }.dispatch(DispatchTokens { x, ids, weights }, backward)?;
    let (rows, weights) = (B::float(made.rows)?, B::float(made.weights)?);
    let pending = PendingDispatch::new(made.routing);
    let (load, routing) = (made.load, NativeDispatch { group: call.group.clone(), pending, like });
    Ok(DispatchedRows { rows, weights, load, routing })
}

impl<B: NativeMemory> NativeDispatch<B> {
    fn tensors(&self) -> NativeTensors<'_, B> {
        NativeTensors { group: &self.group, like: &self.like }
    }

    /// First row and number of rows of each local expert, I64 `[L]`.
    pub(super) fn segment_tensors(&self) -> Result<[IntTensor<B>; 2]> {
        let (tensors, routing) = (self.tensors(), &self.pending.routing);
        let core = routing.group.lock().device().clone();
        let own = routing.segment_tensors();
        let mut copies = tensors.output_pair(&core, own.map(|t| ResultSpec { dtype: t.dtype(), dims: t.dims() }))?;
        tensors.ordered(&core, || {
            let mut each = own.into_iter().zip(&mut copies);
            each.try_for_each(|(from, to)| core.copy(from.view().data(), B::view_mut(to)?.into_data()))
        })?;
        let [offsets, counts] = copies;
        Ok([B::int(offsets)?, B::int(counts)?])
    }

    /// Sums `[T, H]` of contiguous outputs.
    pub(super) fn combine(&self, outputs: &FloatTensor<B>) -> Result<FloatTensor<B>> {
        B::float(self.pending.routing.combine(&self.tensors(), outputs)?)
    }

    /// Gradient `[N, H]` of the outputs, of one of y.
    pub(super) fn combine_bwd(&self, d_y: FloatTensor<B>) -> Result<FloatTensor<B>> {
        self.pending.check_combine(false)?;
        B::float(self.pending.routing.combine_bwd(&self.tensors(), &B::contiguous(d_y))?)
    }

    /// Gradients of x `[T, H]` and of the routing weights `[T, K]`, of those that have arrived.
    pub(super) fn backward(&self) -> Result<[FloatTensor<B>; 2]> {
        let DispatchedCotangents { rows, weights } = self.pending.take_cotangents()?;
        let arrived = DispatchedCotangents { rows: rows.map(B::contiguous), weights: weights.map(B::contiguous) };
        let [d_x, d_weights] = self.pending.routing.dispatch_bwd(&self.tensors(), &arrived)?;
        Ok([B::float(d_x)?, B::float(d_weights)?])
    }
}

/// Routes contiguous logits.
pub(super) fn run_route<B: NativeMemory + LayerBackend>(
    call: &LayerCall,
    logits: &FloatTensor<B>,
    selection_bias: Option<&FloatTensor<B>>,
) -> Result<RouteOutputs<B>> {
    let group = call.group_of::<B>(("DispatchCombine::route", Op::Prepare), logits)?;
    let tensors = &NativeTensors::<B> { group: &call.group, like: logits };
    let [ids, weights] = GuardedCall { layer: &call.layer, group, tensors }.route(logits, selection_bias)?;
    Ok(RouteOutputs { ids: B::int(ids)?, weights: B::float(weights)? })
}

/// Gradient of logits `[T, E]`; all contiguous. `routed`: the logits and ids, and the gradient of the weights.
pub(super) fn route_bwd<B: NativeMemory>(call: &LayerCall, routed: &DispatchOperands<B>) -> Result<FloatTensor<B>> {
    let group = call.group_of::<B>(("DispatchCombine::route, backward", Op::CombineBwd), &routed.x)?;
    let DispatchTokens { x, ids, weights } = routed;
    let tensors = &NativeTensors::<B> { group: &call.group, like: x };
    B::float(GuardedCall { layer: &call.layer, group, tensors }.route_bwd(DispatchTokens { x, ids, weights })?)
}
