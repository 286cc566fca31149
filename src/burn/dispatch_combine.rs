//! Dispatch and combine for experts of the user's own.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::adapter::{DispatchTokens, DispatchedRows, check_expert_output, pieces};
use crate::comm::Op;
use crate::error::{Error, Result};
use crate::layer::{Layer, LayerSpec};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::backend::{LayerCall, MoeBackend, RouteOutputs, primitive, tensor_of};
use super::group::DeviceGroup;
use super::layer_calls::LayerCalls;

/// Dispatch and combine as operations of burn's graph, with experts of your own between them: an MLP, a LoRA, any
/// burn operations.
///
/// [`dispatch`](Self::dispatch) sends each token to the ranks of its experts and gives the rows that this rank's
/// experts have to work on; [`Dispatched::combine`] sends their outputs back and adds them up. Both have gradients:
/// backward of dispatch adds up the rows' gradients at their tokens, backward of combine sends the gradient of y to
/// the rows, and the routing weights' gradients come back to whatever made them. Multiply the outputs by the rows'
/// weights yourself; combine does not.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Distribution, Tensor, activation::silu};
/// use moebius::burn::{DeviceGroup, DispatchCombine, MoeBackend};
/// use moebius::{MoeConfig, Result};
///
/// #[derive(Module, Debug)]
/// struct Mlp<B: MoeBackend> { up: Linear<B>, down: Linear<B> }
///
/// #[derive(Module, Debug)]
/// struct Moe<B: MoeBackend> {
///     router: Linear<B>,
///     experts: Vec<Mlp<B>>,
///     #[module(skip)]
///     moe: DispatchCombine,
/// }
///
/// impl<B: MoeBackend> Moe<B> {
///     fn forward(&self, x: Tensor<B, 2>) -> Result<Tensor<B, 2>> {
///         let routed = self.moe.route(self.router.forward(x.clone()), None)?; // or ids and weights of your own router
///         let received = self.moe.dispatch(x, routed.ids, routed.weights)?;
///         let outputs = received.map_experts(|e, rows, weights| {
///             let Mlp { up, down } = &self.experts[e];
///             Ok(down.forward(silu(up.forward(rows))) * weights.unsqueeze_dim(1))
///         })?;
///         received.combine(outputs)
///     }
/// }
///
/// type B = Autodiff<Flex>;
/// let (config, device) = (MoeConfig::new(16, 24, 8, 2), Default::default()); // hidden, intermediate, experts, top-k
/// # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
/// let group = DeviceGroup::single::<B>(&config, &device)?; // or over several ranks: see the module
/// let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init::<B>(&device);
/// let experts = (0..group.local_experts()).map(|_| Mlp { up: linear(16, 24), down: linear(24, 16) }).collect();
/// let model = Moe { router: linear(16, 8), experts, moe: DispatchCombine::new(config, &group)? };
/// let x = Tensor::<B, 2>::random([10, 16], Distribution::Default, &device);
/// let gradients = (model.forward(x.clone())? + x).powi_scalar(2).mean().backward();
/// assert!(model.router.weight.grad(&gradients).is_some());
/// # Ok::<(), moebius::Error>(())
/// ```
///
/// Of the configuration it reads the hidden size, the number of experts, top-k, the payload (tokens that travel
/// quantized arrive as what their codes stand for, and the gradient passes straight through) and the expert capacity;
/// [`route`](Self::route) reads the router's formula. Ranks compare all of it, as those of
/// [`ExpertParallelMoE`](super::ExpertParallelMoE) do.
///
/// Any number of dispatches may be in flight, each with its own combines. Every dispatch on an `Autodiff` back end
/// counts on a backward, since nobody can see which parameters its experts will have; on the back end below it (a
/// module's `valid()`) nothing is kept.
///
/// Every rank of a group calls dispatch, combine and their backwards in the same order, whatever its tokens, its rows
/// and its parameters are. A loss must reach y on every rank: with it, the collectives of combine's and dispatch's
/// backward run whatever else tracks gradients. Where ranks are threads, one rank's `backward()` ends before another
/// rank begins the next ([burn's graph lock](super#threads-as-ranks-and-burns-graph-lock)). A rank that fails between
/// the calls meets the others with [`refuse`](Self::refuse); otherwise they wait for the communicator's timeout. A backward
/// that fails among the experts is told by the [`GradientReducer`](super::GradientReducer) that runs it, if
/// [`with_dispatch`](super::GradientReducer::with_dispatch) names these calls.
#[derive(Debug, Clone)]
pub struct DispatchCombine {
    layer: Arc<Layer>,
    group: DeviceGroup,
    /// Dispatches of this and its clones.
    pub(super) calls: Arc<LayerCalls>,
}

/// Experts and weights of this rank's tokens.
#[derive(Debug, Clone)]
pub struct Routed<B: Backend> {
    /// Chosen experts `[T, K]`, best first, before any drop.
    pub ids: Tensor<B, 2, Int>,
    /// Their weights `[T, K]`, f32 (f64 of f64 logits); tracked.
    pub weights: Tensor<B, 2>,
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
        Ok(Self { layer: Arc::new(layer), group, calls: Arc::default() })
    }

    /// The layer that stands for these calls in tags, errors and comparisons.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The group.
    pub fn group(&self) -> &DeviceGroup {
        &self.group
    }

    fn call(&self) -> LayerCall {
        LayerCall { calls: Arc::clone(&self.calls), ..LayerCall::new(&self.layer, &self.group) }
    }

    /// The configuration's router over logits `[T, E]`, f32 (f64 beside f64 tokens): scores, groups, top-k,
    /// normalization, scale. Jitter and auxiliary losses are left to you. `selection_bias`: `[E]`, added to the scores
    /// for choosing only, where the configuration has one. No collective, but what fails is told to the other ranks.
    ///
    /// # Errors
    /// Tensors of another shape, type or device; a NaN logit.
    pub fn route<B: MoeBackend>(
        &self,
        logits: Tensor<B, 2>,
        selection_bias: Option<Tensor<B, 1>>,
    ) -> Result<Routed<B>> {
        let RouteOutputs { ids, weights } =
            B::moe_route(&self.call(), primitive(logits), selection_bias.map(primitive))?;
        Ok(Routed { ids: Tensor::from_primitive(ids), weights: tensor_of(weights) })
    }

    /// Sends tokens to the ranks of their experts. `x`: `[T, H]`; `ids`: the chosen experts `[T, K]`, i32, i64 or u32,
    /// −1 for a choice that is dropped; `weights`: `[T, K]`, f32 (f64 beside f64 tokens). T may differ between ranks
    /// and be 0. Two collectives: prepare and dispatch.
    ///
    /// # Errors
    /// Tensors of another shape, type or device, bad ids, capacity, ranks that disagree: on every rank, and the group
    /// is usable afterwards between threads. [`Error::Comm`](crate::Error::Comm) where a rank is lost.
    pub fn dispatch<B: MoeBackend>(
        &self,
        x: Tensor<B, 2>,
        ids: Tensor<B, 2, Int>,
        weights: Tensor<B, 2>,
    ) -> Result<Dispatched<B>> {
        let tokens = DispatchTokens { x: primitive(x), ids: ids.into_primitive(), weights: primitive(weights) };
        let DispatchedRows { rows, weights, load, routing } = B::moe_dispatch(&self.call(), tokens)?;
        Ok(Dispatched { rows: tensor_of(rows), weights: tensor_of(weights), load, routing, moe: self.clone() })
    }

    /// Meets the other ranks as a failure, in whichever of their collectives they are: for a rank that fails before a
    /// dispatch, between it and its combine, or among its experts in backward. They get the reason at once.
    pub fn refuse(&self, reason: &str) {
        self.group.erased().refuse(self.layer.number(), Op::Combine, reason);
    }
}

/// Result of a [`DispatchCombine::dispatch`].
#[derive(Debug, Clone)]
pub struct Dispatched<B: MoeBackend> {
    /// Received rows `[N, H]` of x's type, in slots: expert-major, and within an expert by (source rank, token, k)
    /// (NCCL EP: in its library's order). Rows that no expert has are zero. Tracked.
    pub rows: Tensor<B, 2>,
    /// Routing weight of each row `[N]`, f32 (f64 for f64 tokens); 0 where no expert has the row. Tracked.
    pub weights: Tensor<B, 1>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
    routing: B::Dispatch,
    /// Whose dispatch it is.
    moe: DispatchCombine,
}

impl<B: MoeBackend> Dispatched<B> {
    /// Rows of each of this rank's L experts: where they begin, and how many they are. Waits for the GPU.
    ///
    /// # Errors
    /// A device's.
    pub fn segments(&self) -> Result<Vec<Range<usize>>> {
        B::moe_segments(&self.routing)
    }

    /// First row of each of this rank's experts, I64 `[L]`, without waiting for the GPU.
    ///
    /// # Errors
    /// A device's.
    pub fn offsets(&self) -> Result<Tensor<B, 1, Int>> {
        let [offsets, _] = B::moe_segment_tensors(&self.routing)?;
        Ok(Tensor::from_primitive(offsets))
    }

    /// Number of rows of each of this rank's experts, I64 `[L]`, without waiting for the GPU.
    ///
    /// # Errors
    /// A device's.
    pub fn counts(&self) -> Result<Tensor<B, 1, Int>> {
        let [_, counts] = B::moe_segment_tensors(&self.routing)?;
        Ok(Tensor::from_primitive(counts))
    }

    /// Outputs `[N, H]` of this rank's experts, one after the other: `expert(e, rows, weights)` gives those of expert e
    /// (0 to L − 1) for its rows `[n, H]` and weights `[n]`. Experts without rows are left out: their parameters get no
    /// gradient. Waits for the GPU.
    ///
    /// # Errors
    /// Errors of `expert`; outputs of other dimensions or of another type than its rows. The other ranks, which are in
    /// combine or on their way to it, are told: no [`DispatchCombine::refuse`] follows.
    pub fn map_experts(
        &self,
        mut expert: impl FnMut(usize, Tensor<B, 2>, Tensor<B, 1>) -> Result<Tensor<B, 2>>,
    ) -> Result<Tensor<B, 2>> {
        let count = self.rows.dims()[0];
        let part = |(e, rows): (Option<usize>, Range<usize>)| match e {
            Some(e) => {
                let own = self.rows.clone().slice([rows.clone()]);
                let (dims, dtype) = (own.dims(), own.dtype());
                let out = expert(e, own, self.weights.clone().slice([rows]))?;
                check_expert_output(e, (&dims, dtype), (&out.dims(), out.dtype()))?;
                Ok(out)
            }
            // These rows are zero, and nobody reads what becomes of them.
            None if rows == (0..count) => Ok(self.rows.clone().detach()),
            None => Ok(self.rows.clone().detach().slice([rows])),
        };
        let parts = self.segments().and_then(|segments| pieces(&segments, count).into_iter().map(part).collect());
        let parts: Vec<_> = parts.inspect_err(|error: &Error| self.moe.refuse(&error.to_string()))?;
        Ok(Tensor::cat(parts, 0))
    }

    /// Sums of each token's outputs `[T, H]`, where the tokens came from. `outputs`: `[N, H]` in the order of
    /// [`rows`](Self::rows) and of x's type; rows that no expert has are not read. A collective.
    ///
    /// # Errors
    /// Outputs of another shape, type or device: on every rank, and the group is usable afterwards between threads.
    /// [`Error::Comm`](crate::Error::Comm) where a rank is lost.
    pub fn combine(&self, outputs: Tensor<B, 2>) -> Result<Tensor<B, 2>> {
        Ok(tensor_of(B::moe_combine(&self.routing, primitive(outputs))?))
    }
}
