//! Dispatch, combine and the router's formula on a framework's tensors, and their gradients: the calls of the layer, told
//! to the other ranks where they fail.

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::comm::Op;
use crate::dtype::DType;
use crate::ep::EpGroup;
use crate::error::{Error, Result};
use crate::layer::{
    DispatchContext, DispatchedRowGrads, DispatchedRowsMut, Layer, RefusalGuard, RoutedTokens, RoutingGrads,
    RoutingMut, TokenGradsMut,
};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::group::FrameworkDevice;
use super::outputs::{DispatchedCotangents, DispatchedPart};

const ROUTE: &str = "DispatchCombine::route";
const DISPATCH: &str = "DispatchCombine::dispatch";
const COMBINE: &str = "Dispatched::combine";
const DISPATCH_BWD: &str = "DispatchCombine::dispatch, backward";
const COMBINE_BWD: &str = "Dispatched::combine, backward";
const ROUTE_BWD: &str = "DispatchCombine::route, backward";

/// Type and sizes of a result.
#[derive(Debug, Clone, Copy)]
pub struct ResultSpec<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub dims: &'a [usize],
}

/// A framework's tensors as a device takes them, and its memory for results.
pub(crate) trait FrameworkTensors<D: FrameworkDevice> {
    /// A tensor of floating type.
    type Float;
    /// A tensor of ids.
    type Ids;
    /// Memory that the device fills.
    type Output;

    /// Runs work with views of tensors, which have names in errors, and of ids behind them.
    fn with_views<R>(
        &self,
        device: &D,
        call: &'static str,
        floats: &[(&'static str, &Self::Float)],
        ids: Option<&Self::Ids>,
        work: impl FnOnce(&[TensorRef<'_, D>]) -> Result<R>,
    ) -> Result<R>;

    /// Allocates a result.
    fn output(&self, device: &D, spec: ResultSpec<'_>) -> Result<Self::Output>;

    /// Allocates two.
    fn output_pair(&self, device: &D, [first, second]: [ResultSpec<'_>; 2]) -> Result<[Self::Output; 2]> {
        Ok([self.output(device, first)?, self.output(device, second)?])
    }

    /// Borrows a result to fill it.
    fn view_mut(output: &mut Self::Output) -> Result<TensorMut<'_, D>>;

    /// Runs the device's work behind the framework's so far, and the framework's later work behind it.
    fn ordered<R>(&self, device: &D, work: impl FnOnce() -> Result<R>) -> Result<R>;
}

/// Tokens with their routing, as tensors of a framework.
#[derive(Debug, Clone, Copy)]
pub struct DispatchTokens<F, I> {
    /// `[T, H]`.
    pub x: F,
    /// Chosen experts `[T, K]`.
    pub ids: I,
    /// Routing weights `[T, K]`, accumulator type.
    pub weights: F,
}

/// Rows and weights that a dispatch brings, as tensors of a framework, and its routing `R`.
#[derive(Debug)]
pub struct DispatchedRows<F, R> {
    /// `[N, H]`.
    pub rows: F,
    /// `[N]`, accumulator type.
    pub weights: F,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
    /// The routing.
    pub routing: R,
}

/// A call of a layer on a framework's tensors: what fails before the layer is entered, such as the framework's part, is
/// told to the other ranks, which are in a collective of the call or on their way to it.
pub(crate) struct GuardedCall<'a, D: FrameworkDevice, T> {
    pub(crate) layer: &'a Layer,
    pub(crate) group: &'a EpGroup<D>,
    pub(crate) tensors: &'a T,
}

impl<D: FrameworkDevice, T: FrameworkTensors<D>> GuardedCall<'_, D, T> {
    fn run<R>(
        &self,
        (call, op): (&'static str, Op),
        floats: &[(&'static str, &T::Float)],
        ids: Option<&T::Ids>,
        work: impl FnOnce(&mut RefusalGuard<'_, D>, &D, &[TensorRef<'_, D>]) -> Result<R>,
    ) -> Result<R> {
        let mut group = self.group.lock();
        let device = group.device().clone();
        RefusalGuard::of(self.layer, &mut group, op)
            .run(|entry| self.tensors.with_views(&device, call, floats, ids, |views| work(entry, &device, views)))
    }

    /// Chosen experts `[T, K]` and their weights, of logits `[T, E]` in the accumulator type and a selection bias `[E]`.
    pub(crate) fn route(&self, logits: &T::Float, selection_bias: Option<&T::Float>) -> Result<[T::Output; 2]> {
        let bias = selection_bias.map(|bias| ("selection_bias", bias));
        let floats: Vec<_> = [("logits", logits)].into_iter().chain(bias).collect();
        self.run((ROUTE, Op::Prepare), &floats, None, |entry, device, views| {
            let dims = [views[0].rows(), self.layer.config().router.top_k];
            let specs = [DType::I32, views[0].dtype().accumulator()].map(|dtype| ResultSpec { dtype, dims: &dims });
            let mut made = self.tensors.output_pair(device, specs)?;
            self.tensors.ordered(device, || {
                let [ids, weights] = &mut made;
                let into = RoutingMut { ids: T::view_mut(ids)?, weights: T::view_mut(weights)? };
                self.layer.route_into(entry.enter(), views[0].borrow(), views.get(1).copied(), into)
            })?;
            Ok(made)
        })
    }

    /// Gradient `[T, E]` of the logits; `routed`: they as x, the ids that were chosen of them, and the gradient of the
    /// weights.
    pub(crate) fn route_bwd(&self, routed: DispatchTokens<&T::Float, &T::Ids>) -> Result<T::Output> {
        let floats = [("logits", routed.x), ("gradient of weights", routed.weights)];
        self.run((ROUTE_BWD, Op::CombineBwd), &floats, Some(routed.ids), |entry, device, views| {
            let [logits, weights, ids] = [0, 1, 2].map(|at| views[at].borrow());
            let spec = ResultSpec { dtype: logits.dtype(), dims: logits.dims() };
            let mut d_logits = self.tensors.output(device, spec)?;
            self.tensors.ordered(device, || {
                let grads = RoutingGrads { logits, ids, weights };
                self.layer.route_bwd_into(entry.enter(), grads, T::view_mut(&mut d_logits)?)
            })?;
            Ok(d_logits)
        })
    }

    /// Dispatches tokens; a backward can follow where `backward` says so.
    pub(crate) fn dispatch(
        &self,
        tokens: DispatchTokens<&T::Float, &T::Ids>,
        backward: bool,
    ) -> Result<DispatchedRows<T::Output, DispatchRouting<D>>> {
        let Self { layer, tensors, .. } = *self;
        let floats = [("x", tokens.x), ("weights", tokens.weights)];
        self.run((DISPATCH, Op::Prepare), &floats, Some(tokens.ids), |entry, device, views| {
            let [x, weights, ids] = [0, 1, 2].map(|at| views[at].borrow());
            let tokens = RoutedTokens { x, ids, weights };
            let context = tensors.ordered(device, || layer.prepare_dispatch(entry.enter(), &tokens, backward))?;
            RefusalGuard::of(layer, entry.enter(), Op::Dispatch).run(|entry| {
                let (dtype, slots) = (context.dtype(), [context.handle().rows(), layer.config().hidden]);
                let weights = ResultSpec { dtype: dtype.accumulator(), dims: &slots[..1] };
                let mut made = tensors.output_pair(device, [ResultSpec { dtype, dims: &slots }, weights])?;
                tensors.ordered(device, || {
                    let [rows, weights] = &mut made;
                    let into = DispatchedRowsMut { rows: T::view_mut(rows)?, weights: T::view_mut(weights)? };
                    layer.dispatch_into(entry.enter(), &context, &tokens, into)
                })?;
                let ([rows, weights], load) = (made, context.handle().load());
                let routing = DispatchRouting { layer: layer.clone(), group: self.group.clone(), context };
                Ok(DispatchedRows { rows, weights, load, routing })
            })
        })
    }
}

/// One dispatch's routing on a device.
pub(crate) struct DispatchRouting<D: FrameworkDevice> {
    pub(crate) layer: Layer,
    pub(crate) group: EpGroup<D>,
    context: DispatchContext<D>,
}

impl<D: FrameworkDevice> Debug for DispatchRouting<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dispatch<layer {}, {:?}>", self.layer.number(), self.context.handle().sequence())
    }
}

impl<D: FrameworkDevice> DispatchRouting<D> {
    fn call<'a, T>(&'a self, tensors: &'a T) -> GuardedCall<'a, D, T> {
        GuardedCall { layer: &self.layer, group: &self.group, tensors }
    }

    /// Offsets and counts of the local experts' slots, `[L]`.
    pub(crate) fn segment_tensors(&self) -> [&Tensor<D>; 2] {
        let segments = self.context.handle().segments();
        [&segments.offsets, &segments.counts]
    }

    /// Slots of each local expert; waits for the device.
    pub(crate) fn segments(&self) -> Result<Vec<Range<usize>>> {
        let segments = self.context.handle().segments();
        let group = self.group.lock();
        let read = |t: &Tensor<D>| group.device().read(t.view());
        let (offsets, counts) = (read(&segments.offsets)?, read(&segments.counts)?);
        let range = |(offset, count): (&f64, &f64)| *offset as usize..(offset + count) as usize;
        Ok(offsets.iter().zip(&counts).map(range).collect())
    }

    /// Sums `[T, H]` of the experts' outputs.
    pub(crate) fn combine<T: FrameworkTensors<D>>(&self, tensors: &T, outputs: &T::Float) -> Result<T::Output> {
        let Self { layer, context, .. } = self;
        self.call(tensors).run((COMBINE, Op::Combine), &[("outputs", outputs)], None, |entry, device, views| {
            let dims = [context.handle().tokens(), layer.config().hidden];
            let mut y = tensors.output(device, ResultSpec { dtype: context.dtype(), dims: &dims })?;
            let outputs = views[0].borrow();
            tensors.ordered(device, || layer.combine_into(entry.enter(), context, outputs, T::view_mut(&mut y)?))?;
            Ok(y)
        })
    }

    /// Gradient `[N, H]` of the experts' outputs.
    pub(crate) fn combine_bwd<T: FrameworkTensors<D>>(&self, tensors: &T, d_y: &T::Float) -> Result<T::Output> {
        let Self { layer, context, .. } = self;
        context.handle().check_backward(COMBINE_BWD)?;
        let floats = [("gradient of y", d_y)];
        self.call(tensors).run((COMBINE_BWD, Op::CombineBwd), &floats, None, |entry, device, views| {
            let dims = [context.handle().rows(), layer.config().hidden];
            let mut d_outputs = tensors.output(device, ResultSpec { dtype: context.dtype(), dims: &dims })?;
            tensors.ordered(device, || {
                let into = T::view_mut(&mut d_outputs)?;
                layer.combine_bwd_into(entry.enter(), context, views[0].borrow(), into)
            })?;
            Ok(d_outputs)
        })
    }

    /// Gradients of x `[T, H]` and of the routing weights `[T, K]`, of those of what dispatch brought.
    pub(crate) fn dispatch_bwd<T: FrameworkTensors<D>>(
        &self,
        tensors: &T,
        arrived: &DispatchedCotangents<T::Float>,
    ) -> Result<[T::Output; 2]> {
        let Self { layer, context, .. } = self;
        let (handle, hidden, dtype) = (context.handle(), layer.config().hidden, context.dtype());
        handle.check_backward(DISPATCH_BWD)?;
        let named = [("gradient of rows", &arrived.rows), ("gradient of received weights", &arrived.weights)];
        let named: Vec<_> = named.into_iter().filter_map(|(name, t)| Some((name, t.as_ref()?))).collect();
        self.call(tensors).run((DISPATCH_BWD, Op::DispatchBwd), &named, None, |entry, device, views| {
            let [of_x, of_weights] = [hidden, handle.spec().top_k].map(|width| [handle.tokens(), width]);
            let of_weights = ResultSpec { dtype: dtype.accumulator(), dims: &of_weights };
            let mut made = tensors.output_pair(device, [ResultSpec { dtype, dims: &of_x }, of_weights])?;
            tensors.ordered(device, || {
                let zeros = match arrived.rows {
                    None => Some(Tensor::zeros(device, dtype, &[handle.rows(), hidden])?),
                    Some(_) => None,
                };
                let rows = zeros.as_ref().map_or_else(|| views[0].borrow(), Tensor::view);
                let weights = views.get(usize::from(zeros.is_none())).map(TensorRef::borrow);
                let [d_x, d_weights] = &mut made;
                let into = TokenGradsMut { x: T::view_mut(d_x)?, weights: T::view_mut(d_weights)? };
                let grads = DispatchedRowGrads { rows, weights };
                layer.dispatch_bwd_into(entry.enter(), context, grads, into)
            })?;
            Ok(made)
        })
    }
}

/// All of a number of rows in their order: those of each local expert that has any, and those between, which no expert has.
/// One piece at least.
pub(crate) fn pieces(segments: &[Range<usize>], rows: usize) -> Vec<(Option<usize>, Range<usize>)> {
    let (mut pieces, mut end) = (Vec::new(), 0);
    for (expert, segment) in segments.iter().enumerate().filter(|(_, segment)| !segment.is_empty()) {
        pieces.extend([(None, end..segment.start), (Some(expert), segment.clone())]);
        end = segment.end;
    }
    pieces.push((None, end..rows));
    pieces.retain(|(_, piece)| rows == 0 || !piece.is_empty());
    pieces
}

/// Refuses what an expert has made of its rows, if it has other dimensions or another type than these: of another number of
/// rows the next expert's would be taken for its own, and experts of several types are no one tensor.
pub(crate) fn check_expert_output<T: PartialEq + Debug>(
    expert: usize,
    (rows, dtype): (&[usize], T),
    (made, of): (&[usize], T),
) -> Result<()> {
    const CALL: &str = "Dispatched::map_experts";
    if made != rows {
        return Err(Error::invalid(CALL, format!("rows of expert {expert}"), format!("{rows:?}"), format!("{made:?}")));
    }
    match of == dtype {
        true => Ok(()),
        false => Err(Error::invalid(
            CALL,
            format!("type of expert {expert}'s rows"),
            format!("{dtype:?}"),
            format!("{of:?}"),
        )),
    }
}

/// One dispatch, until its backward; cotangents are tensors `T` of a framework.
pub(crate) struct PendingDispatch<D: FrameworkDevice, T> {
    pub(crate) routing: DispatchRouting<D>,
    /// Gradients of what dispatch brought, as they arrive; none once backward has run.
    arrived: Mutex<Option<DispatchedCotangents<T>>>,
}

impl<D: FrameworkDevice, T> Debug for PendingDispatch<D, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.routing.fmt(f)
    }
}

impl<D: FrameworkDevice, T> PendingDispatch<D, T> {
    pub(crate) fn new(routing: DispatchRouting<D>) -> Self {
        Self { routing, arrived: Mutex::new(Some(DispatchedCotangents::default())) }
    }

    fn arrived(&self) -> MutexGuard<'_, Option<DispatchedCotangents<T>>> {
        // Every holder leaves the fields whole, so a panic elsewhere does not matter.
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its backward has not run.
    pub(crate) fn is_waiting(&self) -> bool {
        self.arrived().is_some()
    }

    /// Refuses a backward of a combine that comes again, or behind that of the dispatch.
    pub(crate) fn check_combine(&self, ran_before: bool) -> Result<()> {
        if self.is_waiting() && !ran_before { Ok(()) } else { Err(self.consumed(COMBINE_BWD)) }
    }

    /// Keeps the gradient of a part until the dispatch's backward.
    pub(crate) fn set_cotangent(&self, part: DispatchedPart, gradient: T) -> Result<()> {
        match &mut *self.arrived() {
            Some(arrived) => arrived.set(part, gradient),
            None => return Err(self.consumed(DISPATCH_BWD)),
        }
        Ok(())
    }

    /// The gradients that have arrived, for the dispatch's backward.
    pub(crate) fn take_cotangents(&self) -> Result<DispatchedCotangents<T>> {
        self.arrived().take().ok_or_else(|| self.consumed(DISPATCH_BWD))
    }

    fn consumed(&self, call: &'static str) -> Error {
        Error::ContextConsumed { call, rank: self.routing.group.rank() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_every_row_once() {
        assert_eq!(pieces(&[], 0), [(None, 0..0)]);
        assert_eq!(pieces(&[0..0, 4..4], 4), [(None, 0..4)]);
        assert_eq!(pieces(&[0..2, 2..2, 2..5], 5), [(Some(0), 0..2), (Some(2), 2..5)]);
        assert_eq!(
            pieces(&[1..2, 4..6], 8),
            [(None, 0..1), (Some(0), 1..2), (None, 2..4), (Some(1), 4..6), (None, 6..8)]
        );
    }
}
