//! Dispatch and combine apart, with experts of the caller's between them, and their gradients: the layer's own stages
//! around the experts, as calls.
//!
//! ```text
//! route              logits [T, E]                       → ids, weights [T, K]        no collective
//! prepare_dispatch   ids, weights [T, K]                 → context (slots, segments)  1 collective
//! dispatch_into      x [T, H], weights [T, K]            → rows [N, H], weights [N]   1 collective
//! combine_into       the experts' outputs [N, H]         → y [T, H] (unweighted sum)  1 collective
//! combine_bwd_into   d y [T, H]                          → d outputs [N, H]           1 collective
//! dispatch_bwd_into  d rows [N, H], d weights [N]        → d x [T, H], d weights [T, K]  1 collective
//! ```
//!
//! Rows come in slots: expert-major, padding zero. Where tokens travel quantized, rows are what the codes stand for,
//! and the gradient passes straight through.

use tracing::trace_span;

use crate::comm::Op;
use crate::config::CapacityOrder;
use crate::dtype::DType;
use crate::ep::packing::byte_rows_mut;
use crate::ep::row_transport::written;
use crate::ep::{DispatchGrads, DispatchInputs, DispatchOutputs, Group, Handle};
use crate::error::{Error, Result};
use crate::kernels::{Kernels, Origin, RenormalizeKept, Route, RouteBwd};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::definition::Layer;
use super::forward;
use super::mode::Mode;
use super::params::borrow;
use super::payload::{self, EncodedTokens};
use super::refuse::refuse_on_error;

const PREPARE: &str = "Layer::prepare_dispatch";
const DISPATCH: &str = "Layer::dispatch_into";
const COMBINE: &str = "Layer::combine_into";
const COMBINE_BWD: &str = "Layer::combine_bwd_into";
const DISPATCH_BWD: &str = "Layer::dispatch_bwd_into";
const ROUTE: &str = "Layer::route_into";
const ROUTE_BWD: &str = "Layer::route_bwd_into";

/// Tokens with their routing, of one rank.
#[derive(Debug, Clone, Copy)]
pub struct RoutedTokens<'a, D: Kernels> {
    /// `[T, H]`.
    pub x: TensorRef<'a, D>,
    /// Chosen experts `[T, K]`, I32 or I64; −1 = dropped choice.
    pub ids: TensorRef<'a, D>,
    /// Routing weights `[T, K]`, accumulator type.
    pub weights: TensorRef<'a, D>,
}

/// The routing of one dispatch: combine and both backwards need it. Any number may be in flight.
#[derive(Debug)]
pub struct DispatchContext<D: Kernels> {
    handle: Handle<D>,
    dtype: DType,
    /// The routing weights, where the kept ones are scaled to keep their sum.
    weights: Option<Tensor<D>>,
}

impl<D: Kernels> DispatchContext<D> {
    /// The routing that prepare made.
    pub fn handle(&self) -> &Handle<D> {
        &self.handle
    }

    /// Type of the tokens.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// The caller's memory for what dispatch brings.
#[derive(Debug)]
pub struct DispatchedRowsMut<'a, D: Kernels> {
    /// Received rows `[N, H]` in slots, the tokens' type. Padding is zeroed.
    pub rows: TensorMut<'a, D>,
    /// Routing weight of each slot `[N]`, accumulator type. Padding is zeroed.
    pub weights: TensorMut<'a, D>,
}

/// Gradients of what dispatch brought.
#[derive(Debug)]
pub struct DispatchedRowGrads<'a, D: Kernels> {
    /// `[N, H]`, the tokens' type.
    pub rows: TensorRef<'a, D>,
    /// `[N]`, accumulator type; absent counts as zeros.
    pub weights: Option<TensorRef<'a, D>>,
}

/// The caller's memory for the gradients of dispatch.
#[derive(Debug)]
pub struct TokenGradsMut<'a, D: Kernels> {
    /// Of x `[T, H]`.
    pub x: TensorMut<'a, D>,
    /// Of the routing weights `[T, K]`, accumulator type; 0 for dropped choices.
    pub weights: TensorMut<'a, D>,
}

/// The caller's memory for a routing.
#[derive(Debug)]
pub struct RoutingMut<'a, D: Kernels> {
    /// Chosen experts, best first, `I32 [T, K]`.
    pub ids: TensorMut<'a, D>,
    /// Their weights `[T, K]`, accumulator type.
    pub weights: TensorMut<'a, D>,
}

/// A routing and its gradient.
#[derive(Debug)]
pub struct RoutingGrads<'a, D: Kernels> {
    /// As [`Layer::route_into`] had them, `[T, E]`, accumulator type.
    pub logits: TensorRef<'a, D>,
    /// The ids that it gave.
    pub ids: TensorRef<'a, D>,
    /// Gradient of the weights that it gave `[T, K]`, accumulator type.
    pub weights: TensorRef<'a, D>,
}

impl Layer {
    /// The router's formula over logits of the caller's, `[T, E]` in the accumulator type, without jitter;
    /// `selection_bias` `[E]` where the configuration has one. No collective, but what fails is told to the other
    /// ranks, which are on their way to [`prepare_dispatch`](Self::prepare_dispatch).
    ///
    /// # Errors
    /// Mis-shaped tensors; a NaN logit, at once or later as the layer's [`Reporting`](crate::ep::Reporting) says.
    pub fn route_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        logits: TensorRef<'_, D>,
        selection_bias: Option<TensorRef<'_, D>>,
        mut into: RoutingMut<'_, D>,
    ) -> Result<()> {
        let config = &self.config.router;
        let checked = self.check_experts(ROUTE, group).and_then(|()| {
            let experts = config.num_experts;
            if !matches!(logits.dims(), [_, columns] if *columns == experts) {
                let found = format!("shape {:?}", logits.dims());
                return Err(Error::invalid(ROUTE, "logits", format!("shape [T, {experts}]"), found));
            }
            group.device().route(Route {
                config,
                logits: logits.borrow(),
                selection_bias: borrow(&selection_bias),
                jitter: None,
                origin: Origin { rank: group.rank(), layer: self.number },
                reporting: self.dispatch.reporting.unwrap_or(D::REPORTING),
                ids: into.ids.reborrow(),
                weights: into.weights.reborrow(),
            })
        });
        refuse_on_error(self, group, Op::Prepare, checked)
    }

    /// Gradient of [`route_into`](Self::route_into), into `d_logits` `[T, E]`, accumulator type, overwritten.
    ///
    /// # Errors
    /// Mis-shaped tensors.
    pub fn route_bwd_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        grads: RoutingGrads<'_, D>,
        mut d_logits: TensorMut<'_, D>,
    ) -> Result<()> {
        let RoutingGrads { logits, ids, weights } = grads;
        let checked = Error::check_shape(ROUTE_BWD, "gradient of weights", ids.dims(), weights.dims());
        let done = checked.and_then(|()| {
            group.device().route_bwd(RouteBwd {
                config: &self.config.router,
                logits: logits.borrow(),
                jitter: None,
                ids: ids.borrow(),
                d_weights: weights.borrow(),
                aux: None,
                origin: Origin { rank: group.rank(), layer: self.number },
                d_logits: d_logits.reborrow(),
            })
        });
        // The other ranks have a backward of other operations before them.
        refuse_on_error(self, group, Op::CombineBwd, done)
    }

    /// Gives the tokens' choices their slots; `backward`: gradients will follow, on every rank. A collective.
    ///
    /// # Errors
    /// Mis-shaped tensors, bad ids, capacity, ranks whose layers or types of tokens differ: on every rank, and the
    /// group is usable afterwards between threads. [`Error::Comm`] where a rank is lost.
    pub fn prepare_dispatch<D: Kernels>(
        &self,
        group: &mut Group<D>,
        tokens: &RoutedTokens<'_, D>,
        backward: bool,
    ) -> Result<DispatchContext<D>> {
        let dtype = tokens.x.dtype();
        // Rows of the same size may be of two types, and the gradient is of their own.
        let formula = self.fingerprint.with_tokens(dtype);
        let spec = forward::spec::<D>(self, Mode { backward, noise: None }, dtype, formula);
        let checked = self.check_tokens(PREPARE, group, tokens);
        refuse_on_error(self, group, Op::Prepare, checked)?;
        let by_weight = spec.expert_capacity.filter(|c| c.order == CapacityOrder::Probability);
        let weights = by_weight.map(|_| tokens.weights.borrow());
        let handle =
            trace_span!("prepare").in_scope(|| group.dispatcher().prepare(tokens.ids.borrow(), weights, &spec))?;
        let kept = match self.renormalizes_kept() {
            true => copy(group.device(), tokens.weights.borrow()).map(Some),
            false => Ok(None),
        };
        let weights = refuse_on_error(self, group, Op::Dispatch, kept)?;
        Ok(DispatchContext { handle, dtype, weights })
    }

    /// Rows and weights to the ranks of their experts, into slots. The same tokens as in
    /// [`prepare_dispatch`](Self::prepare_dispatch). A collective.
    ///
    /// # Errors
    /// Mis-shaped tensors: on every rank, and the group is usable afterwards between threads.
    /// [`Error::Comm`] where a rank is lost.
    pub fn dispatch_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: &DispatchContext<D>,
        tokens: &RoutedTokens<'_, D>,
        mut into: DispatchedRowsMut<'_, D>,
    ) -> Result<()> {
        let device = group.device().clone();
        let handle = &context.handle;
        let pending = self.check_context(DISPATCH, context).and_then(|()| {
            self.check_tokens(DISPATCH, group, tokens)?;
            Error::check_dtype(DISPATCH, "x", context.dtype, tokens.x.dtype())?;
            let slots = [handle.rows(), self.config.hidden];
            check_mut(DISPATCH, "received rows", (context.dtype, &slots), &into.rows)?;
            let weights = (context.dtype.accumulator(), &slots[..1]);
            check_mut(DISPATCH, "received weights", weights, &into.weights)?;
            let kept = self.scaled_weights(&device, context)?;
            let packed = EncodedTokens::new(&self.config, &device, tokens.x.borrow())?;
            let received = packed.as_ref().map(|packed| packed.in_slots(&device, handle.rows())).transpose()?;
            Ok((kept, packed.zip(received)))
        });
        let (kept, packed) = refuse_on_error(self, group, Op::Dispatch, pending)?;
        let weights = kept.as_ref().map_or_else(|| tokens.weights.borrow(), Tensor::view);
        let _span = trace_span!("dispatch").entered();
        let Some((packed, mut received)) = packed else {
            let inputs = DispatchInputs { tokens: tokens.x.borrow(), weights: Some(weights), scales: None };
            let outputs =
                DispatchOutputs { tokens: into.rows.reborrow(), weights: Some(into.weights.reborrow()), scales: None };
            group.dispatcher().dispatch(handle, inputs, outputs)?;
            let done = zero_tail(&device, handle, into.rows).and_then(|()| zero_tail(&device, handle, into.weights));
            return refuse_on_error(self, group, Op::Combine, done);
        };
        let outputs = received.outputs(into.weights.reborrow());
        group.dispatcher().dispatch(handle, packed.inputs(weights), outputs)?;
        let done = packed
            .unpack_slots(&device, &received, into.rows.reborrow())
            .and_then(|()| zero_tail(&device, handle, into.rows))
            .and_then(|()| zero_tail(&device, handle, into.weights));
        refuse_on_error(self, group, Op::Combine, done)
    }

    /// Sums each token's outputs `[N, H]`, unweighted, into `y` `[T, H]`. Padding is not read. A collective.
    ///
    /// # Errors
    /// As [`dispatch_into`](Self::dispatch_into).
    pub fn combine_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: &DispatchContext<D>,
        outputs: TensorRef<'_, D>,
        mut y: TensorMut<'_, D>,
    ) -> Result<()> {
        let checked = self.check_context(COMBINE, context).and_then(|()| {
            self.check_slots(COMBINE, "outputs", context, outputs)?;
            let tokens = [context.handle.tokens(), self.config.hidden];
            check_mut(COMBINE, "y", (context.dtype, &tokens), &y)
        });
        refuse_on_error(self, group, Op::Combine, checked)?;
        trace_span!("combine").in_scope(|| group.dispatcher().combine(&context.handle, outputs, y.reborrow()))
    }

    /// Gradient of [`combine_into`](Self::combine_into): that of y `[T, H]` to the slots, `[N, H]`. Padding is zeroed.
    /// A collective.
    ///
    /// # Errors
    /// [`Error::BackwardNotAgreed`] before any collective; otherwise as [`dispatch_into`](Self::dispatch_into).
    pub fn combine_bwd_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: &DispatchContext<D>,
        d_y: TensorRef<'_, D>,
        mut d_outputs: TensorMut<'_, D>,
    ) -> Result<()> {
        context.handle.check_backward(COMBINE_BWD)?;
        let checked = self.check_context(COMBINE_BWD, context).and_then(|()| {
            let [tokens, slots] = [context.handle.tokens(), context.handle.rows()].map(|n| [n, self.config.hidden]);
            Error::check_shape(COMBINE_BWD, "gradient of y", &tokens, d_y.dims())?;
            Error::check_dtype(COMBINE_BWD, "gradient of y", context.dtype, d_y.dtype())?;
            check_mut(COMBINE_BWD, "gradient of outputs", (context.dtype, &slots), &d_outputs)
        });
        refuse_on_error(self, group, Op::CombineBwd, checked)?;
        trace_span!("combine_bwd")
            .in_scope(|| group.dispatcher().combine_bwd(&context.handle, d_y, d_outputs.reborrow()))?;
        let done = zero_tail(group.device(), &context.handle, d_outputs);
        refuse_on_error(self, group, Op::DispatchBwd, done)
    }

    /// Gradient of [`dispatch_into`](Self::dispatch_into): those of the received rows and weights to their tokens.
    /// Padding is not read. A collective.
    ///
    /// # Errors
    /// As [`combine_bwd_into`](Self::combine_bwd_into).
    pub fn dispatch_bwd_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: &DispatchContext<D>,
        grads: DispatchedRowGrads<'_, D>,
        mut into: TokenGradsMut<'_, D>,
    ) -> Result<()> {
        let handle = &context.handle;
        handle.check_backward(DISPATCH_BWD)?;
        let acc = context.dtype.accumulator();
        let pending = self.check_context(DISPATCH_BWD, context).and_then(|()| {
            self.check_slots(DISPATCH_BWD, "gradient of rows", context, grads.rows.borrow())?;
            if let Some(weights) = &grads.weights {
                Error::check_shape(DISPATCH_BWD, "gradient of received weights", &[handle.rows()], weights.dims())?;
                Error::check_dtype(DISPATCH_BWD, "gradient of received weights", acc, weights.dtype())?;
            }
            let (tokens, choices) = (handle.tokens(), handle.spec().top_k);
            check_mut(DISPATCH_BWD, "gradient of x", (context.dtype, &[tokens, self.config.hidden]), &into.x)?;
            check_mut(DISPATCH_BWD, "gradient of weights", (acc, &[tokens, choices]), &into.weights)?;
            match &context.weights {
                Some(like) => Tensor::empty(group.device(), like.dtype(), like.dims()).map(Some),
                None => Ok(None),
            }
        });
        let mut scaled = refuse_on_error(self, group, Op::DispatchBwd, pending)?;
        let d_weights = scaled.as_mut().map_or_else(|| into.weights.reborrow(), Tensor::view_mut);
        let grads = DispatchGrads {
            rows: grads.rows.borrow(),
            weights: borrow(&grads.weights),
            d_tokens: into.x.reborrow(),
            d_weights: Some(d_weights),
        };
        trace_span!("dispatch_bwd").in_scope(|| group.dispatcher().dispatch_bwd(handle, grads))?;
        let (Some(weights), Some(scaled)) = (&context.weights, &scaled) else { return Ok(()) };
        let (weights, grad) = (weights.view(), Some(scaled.view()));
        group.device().renormalize_kept(RenormalizeKept {
            weights,
            kept: handle.kept_ids(),
            grad,
            out: into.weights.reborrow(),
        })
    }

    /// The weights to send, where choices were dropped and the rest is to keep their sum.
    fn scaled_weights<D: Kernels>(&self, device: &D, context: &DispatchContext<D>) -> Result<Option<Tensor<D>>> {
        let Some(weights) = &context.weights else { return Ok(None) };
        let mut out = Tensor::empty(device, weights.dtype(), weights.dims())?;
        let kept = context.handle.kept_ids();
        device.renormalize_kept(RenormalizeKept { weights: weights.view(), kept, grad: None, out: out.view_mut() })?;
        Ok(Some(out))
    }

    fn check_experts<D: Kernels>(&self, call: &'static str, group: &Group<D>) -> Result<()> {
        let (own, found) = (self.config.router.num_experts, group.config().num_experts);
        if own == found { Ok(()) } else { Err(Error::invalid(call, "group.num_experts", own, found)) }
    }

    fn check_tokens<D: Kernels>(
        &self,
        call: &'static str,
        group: &Group<D>,
        tokens: &RoutedTokens<'_, D>,
    ) -> Result<()> {
        let RoutedTokens { x, ids, weights } = tokens;
        let count = self.check_x(call, x.borrow())?;
        payload::check(call, self.config.payload, x.dtype())?;
        self.check_experts(call, group)?;
        let routing = [count, self.config.router.top_k];
        Error::check_shape(call, "ids", &routing, ids.dims())?;
        Error::check_shape(call, "weights", &routing, weights.dims())?;
        Error::check_dtype(call, "weights", x.dtype().accumulator(), weights.dtype())
    }

    /// Refuses a routing that another layer prepared.
    fn check_context<D: Kernels>(&self, call: &'static str, context: &DispatchContext<D>) -> Result<()> {
        let spec = context.handle.spec();
        if self.number != spec.layer {
            let layer = |number| format!("one of layer {number}");
            return Err(Error::invalid(call, "context", layer(self.number), layer(spec.layer)));
        }
        if spec.formula != self.fingerprint.with_tokens(context.dtype) {
            return Err(Error::invalid(call, "context", "one of this configuration", "one of another"));
        }
        Ok(())
    }

    fn check_slots<D: Kernels>(
        &self,
        call: &'static str,
        name: &str,
        context: &DispatchContext<D>,
        t: TensorRef<'_, D>,
    ) -> Result<()> {
        Error::check_shape(call, name, &[context.handle.rows(), self.config.hidden], t.dims())?;
        Error::check_dtype(call, name, context.dtype, t.dtype())
    }
}

fn check_mut<D: Kernels>(
    call: &'static str,
    name: &str,
    (dtype, dims): (DType, &[usize]),
    t: &TensorMut<'_, D>,
) -> Result<()> {
    Error::check_shape(call, name, dims, t.dims())?;
    Error::check_dtype(call, name, dtype, t.dtype())
}

/// Zeroes rows past the last segment, which a dispatcher leaves as they are and a framework's operations read. Where
/// only the device knows that end, the dispatcher has zeroed them.
fn zero_tail<D: Kernels>(device: &D, handle: &Handle<D>, t: TensorMut<'_, D>) -> Result<()> {
    let end = written(handle);
    if end >= handle.rows() {
        return Ok(());
    }
    device.zero(byte_rows_mut(t, end..handle.rows())?.into_data())
}

fn copy<D: Kernels>(device: &D, from: TensorRef<'_, D>) -> Result<Tensor<D>> {
    let mut to = Tensor::empty(device, from.dtype(), from.dims())?;
    device.copy(from.data(), to.view_mut().into_data())?;
    Ok(to)
}
