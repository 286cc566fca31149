//! Dispatch, combine and the router's formula of the core on a back end's memory, and their gradients.

use std::ops::Range;

use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensor;

use crate::adapter::DispatchedCotangents;
use crate::comm::Op;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layer::{
    DispatchContext, DispatchedRowGrads, DispatchedRowsMut, RefusalGuard, RoutedTokens, RoutingGrads, RoutingMut,
    TokenGradsMut,
};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorRef};

use super::backend::{DispatchOperands, LayerBackend, LayerCall, Named, NativeMemory, ResultSpec, RouteOutputs};
use super::run::ordered;

const ROUTE: &str = "DispatchCombine::route";
const DISPATCH: &str = "DispatchCombine::dispatch";
const COMBINE: &str = "Dispatched::combine";
const DISPATCH_BWD: &str = "DispatchCombine::dispatch, backward";
const COMBINE_BWD: &str = "Dispatched::combine, backward";
const ROUTE_BWD: &str = "DispatchCombine::route, backward";

/// A dispatch's routing on the core.
#[derive(Debug)]
pub struct NativeDispatch<B: NativeMemory> {
    pub(super) call: LayerCall,
    context: DispatchContext<B::Core>,
    /// Shows the back end where results are to lie; `[1]`.
    beside: FloatTensor<B>,
}

/// Results of a dispatch.
pub(super) struct NativeOutputs<B: NativeMemory> {
    pub(super) rows: FloatTensor<B>,
    pub(super) weights: FloatTensor<B>,
    pub(super) dispatch: NativeDispatch<B>,
}

/// Tokens with their elements in row-major order.
pub(super) fn contiguous<B: NativeMemory>(tokens: DispatchOperands<B>) -> DispatchOperands<B> {
    let DispatchOperands { x, ids, weights } = tokens;
    DispatchOperands { x: B::contiguous(x), ids: B::contiguous_ids(ids), weights: B::contiguous(weights) }
}

/// Dispatches contiguous tokens; a backward can follow where `backward` says so.
pub(super) fn run_dispatch<B: NativeMemory>(
    call: &LayerCall,
    tokens: &DispatchOperands<B>,
    backward: bool,
) -> Result<NativeOutputs<B>> {
    let device = B::float_device(&tokens.x);
    let beside = B::float_empty([1].into(), &device, tokens.weights.dtype().into());
    let (layer, x) = (&call.layer, &tokens.x);
    let mut group = call.group.expect::<B, B::Core>(DISPATCH, &device)?.lock();
    let core = group.device().clone();
    let done = RefusalGuard::forward(layer, &mut group).run(|entry| {
        let tokens = B::together(x, || {
            let view = |name, tensor| B::view(&core, Named { name, tensor });
            let ids = B::view_ids(&core, Named { name: "ids", tensor: &tokens.ids })?;
            Ok(RoutedTokens { x: view("x", x)?, ids, weights: view("weights", &tokens.weights)? })
        })?;
        let context = ordered::<B, _>(call, &core, || layer.prepare_dispatch(entry.enter(), &tokens, backward))?;
        RefusalGuard::of(layer, entry.enter(), Op::Dispatch).run(|entry| {
            let (dtype, slots) = (context.dtype(), [context.handle().rows(), layer.config().hidden]);
            let (mut rows, mut weights) = B::together(x, || {
                let weights = ResultSpec { dtype: dtype.accumulator(), dims: &slots[..1] };
                let rows = B::output(&core, x, ResultSpec { dtype, dims: &slots })?;
                Ok((rows, B::output(&core, x, weights)?))
            })?;
            ordered::<B, _>(call, &core, || {
                let into = DispatchedRowsMut { rows: B::view_mut(&mut rows)?, weights: B::view_mut(&mut weights)? };
                layer.dispatch_into(entry.enter(), &context, &tokens, into)
            })?;
            Ok((context, rows, weights))
        })
    });
    let (context, rows, weights) = done?;
    let dispatch = NativeDispatch { call: call.clone(), context, beside };
    Ok(NativeOutputs { rows: B::float(rows)?, weights: B::float(weights)?, dispatch })
}

impl<B: NativeMemory> NativeDispatch<B> {
    pub(super) fn load(&self) -> Lazy<Load> {
        self.context.handle().load()
    }

    pub(super) fn segments(&self) -> Result<Vec<Range<usize>>> {
        let segments = self.context.handle().segments();
        let group = self.call.group.expect::<B, B::Core>(DISPATCH, &B::float_device(&self.beside))?.lock();
        let read = |t: &Tensor<B::Core>| group.device().read(t.view());
        let (offsets, counts) = (read(&segments.offsets)?, read(&segments.counts)?);
        let range = |(offset, count): (&f64, &f64)| *offset as usize..(offset + count) as usize;
        Ok(offsets.iter().zip(&counts).map(range).collect())
    }

    /// Sums `[T, H]` of contiguous outputs.
    pub(super) fn combine(&self, outputs: &FloatTensor<B>) -> Result<FloatTensor<B>> {
        let Self { call, context, beside } = self;
        let mut group = call.group.expect::<B, B::Core>(COMBINE, &B::float_device(beside))?.lock();
        let core = group.device().clone();
        let y = RefusalGuard::of(&call.layer, &mut group, Op::Combine).run(|entry| {
            let outputs = B::view(&core, Named { name: "outputs", tensor: outputs })?;
            let dims = [context.handle().tokens(), call.layer.config().hidden];
            let mut y = B::output(&core, beside, ResultSpec { dtype: context.dtype(), dims: &dims })?;
            ordered::<B, _>(call, &core, || {
                call.layer.combine_into(entry.enter(), context, outputs, B::view_mut(&mut y)?)
            })?;
            Ok(y)
        });
        B::float(y?)
    }

    /// Gradient `[N, H]` of the outputs, of a contiguous one of y.
    pub(super) fn combine_backward(&self, d_y: &FloatTensor<B>) -> Result<FloatTensor<B>> {
        let Self { call, context, beside } = self;
        context.handle().check_backward(COMBINE_BWD)?;
        let mut group = call.group.expect::<B, B::Core>(COMBINE_BWD, &B::float_device(beside))?.lock();
        let core = group.device().clone();
        let d_outputs = RefusalGuard::of(&call.layer, &mut group, Op::CombineBwd).run(|entry| {
            let d_y = B::view(&core, Named { name: "gradient of y", tensor: d_y })?;
            let dims = [context.handle().rows(), call.layer.config().hidden];
            let mut d_outputs = B::output(&core, beside, ResultSpec { dtype: context.dtype(), dims: &dims })?;
            ordered::<B, _>(call, &core, || {
                call.layer.combine_backward_into(entry.enter(), context, d_y, B::view_mut(&mut d_outputs)?)
            })?;
            Ok(d_outputs)
        });
        B::float(d_outputs?)
    }

    /// Gradients of x `[T, H]` and of the routing weights `[T, K]`, of contiguous ones of what dispatch brought.
    pub(super) fn backward(&self, arrived: &DispatchedCotangents<FloatTensor<B>>) -> Result<[FloatTensor<B>; 2]> {
        let Self { call, context, beside } = self;
        let (handle, dtype) = (context.handle(), context.dtype());
        handle.check_backward(DISPATCH_BWD)?;
        let mut group = call.group.expect::<B, B::Core>(DISPATCH_BWD, &B::float_device(beside))?.lock();
        let core = group.device().clone();
        let made = RefusalGuard::of(&call.layer, &mut group, Op::DispatchBwd).run(|entry| {
            let view = |name, tensor| B::view(&core, Named { name, tensor });
            let rows = arrived.rows.as_ref().map(|t| view("gradient of rows", t)).transpose()?;
            let weights = arrived.weights.as_ref().map(|t| view("gradient of received weights", t)).transpose()?;
            let result = |dtype, dims: &[usize]| B::output(&core, beside, ResultSpec { dtype, dims });
            let hidden = call.layer.config().hidden;
            let mut d_x = result(dtype, &[handle.tokens(), hidden])?;
            let mut d_weights = result(dtype.accumulator(), &[handle.tokens(), handle.spec().top_k])?;
            ordered::<B, _>(call, &core, || {
                let zeros = match &rows {
                    None => Some(Tensor::zeros(&core, dtype, &[handle.rows(), hidden])?),
                    Some(_) => None,
                };
                let rows = match (&rows, &zeros) {
                    (Some(rows), _) => rows.borrow(),
                    (None, Some(zeros)) => zeros.view(),
                    (None, None) => return Ok(()),
                };
                let grads = DispatchedRowGrads { rows, weights: weights.as_ref().map(TensorRef::borrow) };
                let into = TokenGradsMut { x: B::view_mut(&mut d_x)?, weights: B::view_mut(&mut d_weights)? };
                call.layer.dispatch_backward_into(entry.enter(), context, grads, into)
            })?;
            Ok([d_x, d_weights])
        });
        let [d_x, d_weights] = made?;
        Ok([B::float(d_x)?, B::float(d_weights)?])
    }
}

/// Routes contiguous logits.
pub(super) fn run_route<B: NativeMemory + LayerBackend>(
    call: &LayerCall,
    logits: &FloatTensor<B>,
    selection_bias: Option<&FloatTensor<B>>,
) -> Result<RouteOutputs<B>> {
    let mut group = call.group.expect::<B, B::Core>(ROUTE, &B::float_device(logits))?.lock();
    let core = group.device().clone();
    // The other ranks are on their way to prepare.
    let made = RefusalGuard::forward(&call.layer, &mut group).run(|entry| {
        let view = |name, tensor| B::view(&core, Named { name, tensor });
        let bias = selection_bias.map(|bias| view("selection_bias", bias)).transpose()?;
        let tokens = view("logits", logits)?;
        let choices = [tokens.rows(), call.layer.config().router.top_k];
        let mut ids = B::output(&core, logits, ResultSpec { dtype: DType::I32, dims: &choices })?;
        let dtype = tokens.dtype().accumulator();
        let mut weights = B::output(&core, logits, ResultSpec { dtype, dims: &choices })?;
        ordered::<B, _>(call, &core, || {
            let into = RoutingMut { ids: B::view_mut(&mut ids)?, weights: B::view_mut(&mut weights)? };
            call.layer.route_into(entry.enter(), tokens, bias, into)
        })?;
        Ok((ids, weights))
    });
    let (ids, weights) = made?;
    Ok(RouteOutputs { ids: B::int(ids)?, weights: B::float(weights)? })
}

/// Gradient of logits `[T, E]`; all contiguous. `routed`: the logits and ids, and the gradient of the weights.
pub(super) fn route_backward<B: NativeMemory>(
    call: &LayerCall,
    routed: &DispatchOperands<B>,
) -> Result<FloatTensor<B>> {
    let DispatchOperands { x: logits, ids, weights } = routed;
    let mut group = call.group.expect::<B, B::Core>(ROUTE_BWD, &B::float_device(logits))?.lock();
    let core = group.device().clone();
    // The other ranks are on their way to the collectives of earlier layers.
    let made = RefusalGuard::of(&call.layer, &mut group, Op::CombineBwd).run(|entry| {
        let view = |name, tensor| B::view(&core, Named { name, tensor });
        let ids = B::view_ids(&core, Named { name: "ids", tensor: ids })?;
        let of = view("logits", logits)?;
        let mut d_logits = B::output(&core, logits, ResultSpec { dtype: of.dtype(), dims: of.dims() })?;
        let grads = RoutingGrads { logits: of, ids, weights: view("gradient of weights", weights)? };
        ordered::<B, _>(call, &core, || {
            call.layer.route_backward_into(entry.enter(), grads, B::view_mut(&mut d_logits)?)
        })?;
        Ok(d_logits)
    });
    B::float(made?)
}
