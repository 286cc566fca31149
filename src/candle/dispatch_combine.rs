//! Dispatch and combine for experts of the user's own.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, Var};

use crate::adapter::{DispatchTokens, DispatchedRows, check_expert_output, match_device, pieces};
use crate::comm::Op;
use crate::error::Error;
use crate::layer::{Layer, LayerSpec};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::dispatch_ops::{self, DispatchedRowsMut, RoutingNode};
use super::error::refusal_reason;
use super::group::{DeviceGroup, TypedGroup};
use super::route_op::{self, Routed};

/// Dispatch and combine as operations of candle's graph, with experts of your own between them: an MLP, a LoRA, any
/// candle operations.
///
/// [`dispatch`](Self::dispatch) sends each token to the ranks of its experts and gives the rows that this rank's
/// experts have to work on; [`Dispatched::combine`] sends their outputs back and adds them up. Both have gradients:
/// backward of dispatch adds up the rows' gradients at their tokens, backward of combine sends the gradient of y to
/// the rows, and the routing weights' gradients come back to whatever made them. Multiply the outputs by the rows'
/// weights yourself; combine does not.
///
/// ```
/// use candle_core::{D, DType, Device, Module, Result, Tensor};
/// use candle_nn::{Linear, VarBuilder, VarMap, linear_no_bias};
/// use moebius::MoeConfig;
/// use moebius::candle::{DeviceGroup, DispatchCombine};
///
/// /// A frozen projection with a LoRA of rank 4 beside it.
/// struct Expert { frozen: Tensor, a: Linear, b: Linear }
///
/// impl Expert {
///     fn forward(&self, rows: &Tensor) -> Result<Tensor> {
///         rows.matmul(&self.frozen)? + self.b.forward(&self.a.forward(rows)?)?
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let (vars, device) = (VarMap::new(), Device::Cpu);
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
/// let config = MoeConfig::new(16, 16, 8, 2); // hidden, intermediate (not read here), experts, top-k
/// let group = DeviceGroup::single(&config, &device)?; // or over several ranks: see the module
/// let moe = DispatchCombine::new(config, &group)?;
/// let router = linear_no_bias(16, 8, vb.pp("router"))?;
/// let experts = (0..group.local_experts()).map(|e| {
///     let (vb, frozen) = (vb.pp(e), Tensor::arange(0f32, 256., &device)?.sin()?.reshape((16, 16))?);
///     Ok(Expert { frozen, a: linear_no_bias(16, 4, vb.pp("a"))?, b: linear_no_bias(4, 16, vb.pp("b"))? })
/// });
/// let experts = experts.collect::<Result<Vec<_>>>()?;
///
/// let x = Tensor::arange(0f32, 160., &device)?.sin()?.reshape((10, 16))?;
/// let routed = moe.route(&router.forward(&x)?, None)?; // or ids and weights of a router of your own
/// let received = moe.dispatch(&x, &routed.ids, &routed.weights)?;
/// let outputs = received.map_experts(|e, rows, weights| {
///     experts[e].forward(rows)?.broadcast_mul(&weights.unsqueeze(D::Minus1)?)
/// })?;
/// let y = received.combine(&outputs)?;
/// let gradients = (y + x)?.sqr()?.mean_all()?.backward()?;
/// assert!(gradients.get(router.weight()).is_some());
/// assert!(experts.iter().any(|expert| gradients.get(expert.a.weight()).is_some()));
/// # Ok(()) }
/// ```
///
/// Of the configuration it reads the hidden size, the number of experts, top-k, the payload (tokens that travel
/// quantized arrive as what their codes stand for, and the gradient passes straight through) and the expert capacity;
/// [`route`](Self::route) reads the router's formula. Ranks compare all of it, as those of
/// [`ExpertParallelMoE`](super::ExpertParallelMoE) do.
///
/// Any number of dispatches may be in flight, each with its own combines; backwards may come in any order (F0 F1 B0 F2
/// B1 B2), the same on all ranks. Every dispatch counts on a backward, since nobody can see which parameters its
/// experts will have; [`detached`](Self::detached) keeps nothing and tracks nothing.
///
/// Every rank of a group calls dispatch, combine and their backwards in the same order, whatever its tokens, its rows
/// and its parameters are. A loss must reach y on every rank: with it, the collectives of combine's and dispatch's
/// backward run whatever else tracks gradients. A rank that fails between the calls meets the others with
/// [`refuse`](Self::refuse); otherwise they wait for the communicator's timeout.
#[derive(Debug, Clone)]
pub struct DispatchCombine {
    layer: Layer,
    group: DeviceGroup,
    /// Tracks gradients where nothing else may; none where nothing is to be tracked.
    anchor: Option<Var>,
}

impl DispatchCombine {
    /// Of a configuration, which gets the group's next layer number, or of a [`Layer`], which has a number and dispatch
    /// options of its own.
    ///
    /// # Errors
    /// A configuration that does not hold together; another number of experts than the group's.
    pub fn new(layer: impl Into<LayerSpec>, group: impl Into<DeviceGroup>) -> Result<Self> {
        let group = group.into();
        let layer = group.erased().layer("DispatchCombine::new", layer.into(), None)?;
        let anchor = Some(Var::zeros((), DType::F32, group.device())?);
        Ok(Self { layer, group, anchor })
    }

    /// The layer that stands for these calls in tags, errors and comparisons.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The group.
    pub fn group(&self) -> &DeviceGroup {
        &self.group
    }

    /// The same without gradients, for evaluation. Where there are several ranks, all of them evaluate, or none: a
    /// backward that not all ranks have agreed on is [`Error::BackwardNotAgreed`](crate::Error::BackwardNotAgreed).
    pub fn detached(&self) -> Self {
        Self { anchor: None, ..self.clone() }
    }

    /// The configuration's router over logits `[T, E]`, f32 (f64 beside f64 tokens): scores, groups, top-k,
    /// normalization, scale. Jitter and auxiliary losses are left to you. `selection_bias`: `[E]`, added to the scores
    /// for choosing only, where the configuration has one. No collective, but what fails is told to the other ranks.
    ///
    /// # Errors
    /// Tensors of another shape, type or device; a NaN logit.
    pub fn route(&self, logits: &Tensor, selection_bias: Option<&Tensor>) -> Result<Routed> {
        let (layer, device) = (&self.layer, self.group.device());
        match_device!(self.group.erased(), group => {
            route_op::route(TypedGroup { group, device }, layer, logits, selection_bias)
        })
    }

    /// Sends tokens to the ranks of their experts. `x`: `[T, H]`; `ids`: the chosen experts `[T, K]`, U32 or I64, a
    /// choice that is dropped is `u32::MAX` or −1; `weights`: `[T, K]`, f32 (f64 beside f64 tokens). T may differ
    /// between ranks and be 0. Two collectives: prepare and dispatch.
    ///
    /// # Errors
    /// Tensors of another shape, type or device, bad ids, capacity, ranks that disagree: on every rank, and the group
    /// is usable afterwards between threads. [`Error::Comm`](crate::Error::Comm) where a rank is lost.
    pub fn dispatch(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        let anchor = self.anchor.as_ref().map(Var::as_tensor);
        let (layer, device, tokens) = (&self.layer, self.group.device(), DispatchTokens { x, ids, weights });
        let sent = match_device!(self.group.erased(), group => {
            dispatch_ops::dispatch(TypedGroup { group, device }, layer, anchor, tokens)
        });
        let DispatchedRows { rows, weights, load, routing: node } = sent?;
        Ok(Dispatched { rows, weights, load, node })
    }

    /// [`dispatch`](Self::dispatch) into memory of yours, which a captured step, say, finds in one place: of a
    /// [detached](Self::detached) one. [`Dispatched::rows`] and [`Dispatched::weights`] are that memory. N is what the
    /// capacity says: [`Capacity::Static`](crate::ep::Capacity::Static) rows.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch), of the memory too: another shape, type or device, not contiguous, shared with
    /// another tensor of the call. One that tracks gradients, whose results are candle's.
    pub fn dispatch_into(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: &Tensor,
        into: DispatchedRowsMut<'_>,
    ) -> Result<Dispatched> {
        const CALL: &str = "DispatchCombine::dispatch_into";
        let (layer, device, tokens) = (&self.layer, self.group.device(), DispatchTokens { x, ids, weights });
        if self.anchor.is_some() {
            let error = tracks_gradients(CALL);
            self.group.erased().refuse(layer.number(), Op::Prepare, &error.to_string());
            return Err(error.into());
        }
        let sent = match_device!(self.group.erased(), group => {
            dispatch_ops::dispatch_into(TypedGroup { group, device }, layer, tokens, into)
        });
        let DispatchedRows { rows, weights, load, routing: node } = sent?;
        Ok(Dispatched { rows, weights, load, node })
    }

    /// Meets the other ranks as a failure, in whichever of their collectives they are: for a rank that fails before a
    /// dispatch, between it and its combine, or among its experts in backward. They get the reason at once.
    pub fn refuse(&self, reason: &str) {
        self.group.erased().refuse(self.layer.number(), Op::Combine, reason);
    }
}

/// A call that writes memory of the caller's, where a graph would have to have it.
fn tracks_gradients(call: &'static str) -> Error {
    Error::invalid(call, "DispatchCombine", "one that is `detached()`", "one that tracks gradients")
}

/// Result of a [`DispatchCombine::dispatch`].
#[derive(Debug, Clone)]
pub struct Dispatched {
    /// Received rows `[N, H]` of x's type, in slots: expert-major, and within an expert by (source rank, token, k) (NCCL
    /// EP: in its library's order). Rows that no expert has are zero. Tracked.
    pub rows: Tensor,
    /// Routing weight of each row `[N]`, f32 (f64 for f64 tokens); 0 where no expert has the row. Tracked.
    pub weights: Tensor,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
    node: RoutingNode,
}

impl Dispatched {
    /// Rows of each of this rank's L experts. Waits for the GPU.
    ///
    /// # Errors
    /// A device's.
    pub fn segments(&self) -> Result<Vec<Range<usize>>> {
        self.node.routing.segments()
    }

    /// First row of each of this rank's experts, I64 `[L]`, without waiting.
    ///
    /// # Errors
    /// A device's.
    pub fn offsets(&self) -> Result<Tensor> {
        let [offsets, _] = self.node.routing.segment_tensors()?;
        Ok(offsets)
    }

    /// Number of rows of each of this rank's experts, I64 `[L]`, without waiting.
    ///
    /// # Errors
    /// A device's.
    pub fn counts(&self) -> Result<Tensor> {
        let [_, counts] = self.node.routing.segment_tensors()?;
        Ok(counts)
    }

    /// Outputs `[N, H]` of this rank's experts, one after the other: `expert(e, rows, weights)` gives those of expert e
    /// (0 to L − 1) for its rows `[n, H]` and weights `[n]`. Experts without rows are left out: their parameters get no
    /// gradient. Waits for the GPU.
    ///
    /// candle's gradient of a part of a tensor is as large as the whole, so that backward takes L·N·H writes: where
    /// experts are many, work on all rows at once instead.
    ///
    /// # Errors
    /// Errors of `expert`; outputs of other dimensions or of another type than its rows. The other ranks, which are in
    /// combine or on their way to it, are told: no [`DispatchCombine::refuse`] follows.
    pub fn map_experts(&self, mut expert: impl FnMut(usize, &Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let part = |(e, rows): (Option<usize>, Range<usize>)| {
            let of = |t: &Tensor| t.narrow(0, rows.start, rows.len());
            let Some(e) = e else { return of(&self.rows)?.detach().zeros_like() };
            let own = of(&self.rows)?;
            let out = expert(e, &own, &of(&self.weights)?)?;
            check_expert_output(e, (own.dims(), own.dtype()), (out.dims(), out.dtype()))?;
            Ok(out)
        };
        let all = self.segments().and_then(|segments| {
            let parts = pieces(&segments, self.rows.dim(0)?).into_iter().map(part);
            Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
        });
        all.inspect_err(|error| {
            let call = "Dispatched::map_experts";
            let told = Error::Framework { call, framework: "candle", message: refusal_reason(error) };
            self.node.routing.refuse_combine(told);
        })
    }

    /// Sums of each token's outputs `[T, H]`, where the tokens came from. `outputs`: `[N, H]` in the order of
    /// [`rows`](Self::rows) and of x's type; rows that no expert has are not read. A collective.
    ///
    /// # Errors
    /// Outputs of another shape, type or device: on every rank, and the group is usable afterwards between threads.
    /// [`Error::Comm`](crate::Error::Comm) where a rank is lost.
    pub fn combine(&self, outputs: &Tensor) -> Result<Tensor> {
        self.node.routing.clone().combine(self.node.token.as_ref(), outputs)
    }

    /// [`combine`](Self::combine) into `y` `[T, H]`, memory of yours, where the dispatch was
    /// [detached](DispatchCombine::detached).
    ///
    /// # Errors
    /// As [`combine`](Self::combine), of y too: another shape, type or device, not contiguous, the outputs' own memory.
    /// A dispatch that tracks gradients.
    pub fn combine_into(&self, outputs: &Tensor, y: &Tensor) -> Result<()> {
        match self.node.token {
            Some(_) => Err(self.node.routing.refuse_combine(tracks_gradients("Dispatched::combine_into")).into()),
            None => self.node.routing.combine_into(outputs, y),
        }
    }
}
