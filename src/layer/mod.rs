//! The whole layer: route → prepare → dispatch → up → down → combine, and back. This is the seam that the
//! framework adapters call; the stages below it are its default implementation. Each stage is a `tracing` span at trace
//! level, named as in the picture (`route`, `prepare`, …, `dispatch_bwd`, `route_bwd`; `pack` and `unpack` where tokens
//! travel quantized).

mod aux_losses;
mod backward;
mod check;
mod dispatch_combine;
mod forward;
mod memory;
mod param_kind;
mod params;
mod payload;
mod per_param;
mod refuse;
mod shared_expert;
mod spec;

pub use crate::aux_loss::AuxValue;
pub use crate::kernels::Scalar;
pub use aux_losses::AuxLoss;
pub use dispatch_combine::{
    DispatchContext, DispatchedRowGrads, DispatchedRowsMut, RoutedTokens, RoutingGrads, RoutingMut, TokenGradsMut,
};
pub use memory::{StepMemory, StepSizes};
pub use param_kind::ParamKind;
pub use params::ParamViews;
pub use per_param::PerParam;
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use refuse::RefusalGuard;
pub use spec::LayerSpec;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::config::{Fingerprint, MoeConfig};
use crate::dtype::DType;
use crate::ep::{Capacity, Group, Handle, Overflow, Received, Reporting};
use crate::error::{Error, Result};
use crate::kernels::{Jitter, Kernels};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorMut, TensorRef};
use crate::weights::WeightSource;

/// A Mixture-of-Experts layer without its parameters, which the host framework owns.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    config: MoeConfig,
    number: u32,
    dispatch: DispatchOptions,
    /// Of the configuration, to be compared over the ranks.
    fingerprint: Fingerprint,
}

/// How a layer's tokens travel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DispatchOptions {
    /// Rows of the receive layout.
    pub capacity: Capacity,
    /// Treatment of rows past a static capacity.
    pub overflow: Overflow,
    /// Segments are padded to a multiple of this power of two.
    pub alignment: usize,
    /// When what only the device sees is reported; `None`: as suits the device ([`Kernels::REPORTING`]: at once on
    /// the CPU, later on a GPU).
    pub reporting: Option<Reporting>,
}

impl Default for DispatchOptions {
    fn default() -> Self {
        Self { capacity: Capacity::Eager, overflow: Overflow::Error, alignment: 1, reporting: None }
    }
}

/// Parameters of this rank: replicated router and shared expert, this rank's L = E / R routed experts.
/// G is 2 with a gate, 1 without; gate rows come first.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a, D: Kernels> {
    /// `[E, H]`.
    pub router: TensorRef<'a, D>,
    /// `[E]`, added to the logits.
    pub router_bias: Option<TensorRef<'a, D>>,
    /// `[E]`, added to the scores for choosing only; no gradient.
    pub selection_bias: Option<TensorRef<'a, D>>,
    /// `[L, G·I, H]`.
    pub up: &'a dyn WeightSource<D>,
    /// `[L, G·I]`.
    pub up_bias: Option<TensorRef<'a, D>>,
    /// `[L, H, I]`.
    pub down: &'a dyn WeightSource<D>,
    /// `[L, H]`.
    pub down_bias: Option<TensorRef<'a, D>>,
    /// `[G·S, H]`, S the shared expert's inner size.
    pub shared_up: Option<TensorRef<'a, D>>,
    /// `[H, S]`.
    pub shared_down: Option<TensorRef<'a, D>>,
    /// `[1, H]`.
    pub shared_gate: Option<TensorRef<'a, D>>,
}

/// Purpose of a call of forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mode {
    /// Backward will follow: keep a context.
    pub backward: bool,
    /// The layer trains: apply the router's jitter with this seed and step.
    pub noise: Option<Noise>,
}

/// Seed and step of a router's jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// The run's seed.
    pub seed: u64,
    /// Training step.
    pub step: u64,
}

/// Result of [`Layer::forward`].
#[derive(Debug)]
pub struct Forward<D: Kernels> {
    /// `[T, H]`, tokens' dtype.
    pub y: Tensor<D>,
    /// Auxiliary losses, coefficients included; zeros where none is asked for.
    pub aux: AuxLoss<D>,
    /// The routing, as data.
    pub routing: Routing<D>,
    /// State that backward needs; present if asked for.
    pub context: Option<Context<D>>,
}

/// Result of [`Layer::forward_into`]: a [`Forward`] whose output is the caller's.
#[derive(Debug)]
pub struct ForwardInfo<D: Kernels> {
    /// Auxiliary losses, coefficients included; zeros where none is asked for.
    pub aux: AuxLoss<D>,
    /// The routing, as data.
    pub routing: Routing<D>,
    /// State that backward needs; present if asked for.
    pub context: Option<Context<D>>,
}

/// Routing of this rank's tokens.
#[derive(Debug)]
pub struct Routing<D: Kernels> {
    /// `[T, E]`, accumulator type.
    pub logits: Arc<Tensor<D>>,
    /// Chosen experts, `I32 [T, K]`, before any drop.
    pub ids: Arc<Tensor<D>>,
    /// Weights of the chosen, accumulator type `[T, K]`.
    pub weights: Arc<Tensor<D>>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

/// State of a forward that its backward needs; consumed by it. The adapter keeps the inputs themselves (x and
/// parameters).
#[derive(Debug)]
pub struct Context<D: Kernels> {
    handle: Handle<D>,
    dtype: DType,
    logits: Arc<Tensor<D>>,
    ids: Arc<Tensor<D>>,
    weights: Arc<Tensor<D>>,
    jitter: Option<Jitter>,
    aux_sums: Option<Arc<Tensor<D>>>,
    received: Received<D>,
    pre: Option<Tensor<D>>,
    shared: Option<shared_expert::SharedContext<D>>,
    progress: Arc<BackwardProgress>,
}

/// How far a context's backward has come.
#[derive(Debug, Default)]
pub(crate) struct BackwardProgress(AtomicU8);

impl BackwardProgress {
    const ROWS: u8 = 1;
    const ALL: u8 = 2;

    fn set(&self, to: u8) {
        self.0.store(to, Ordering::Release);
    }
}

#[cfg(feature = "candle")]
impl BackwardProgress {
    /// The rows have come, on every rank: from here on the experts' gradients are written.
    pub(crate) fn has_rows(&self) -> bool {
        self.0.load(Ordering::Acquire) >= Self::ROWS
    }

    /// No collective is left, so that the other ranks do not hear of what fails from here on.
    pub(crate) fn has_exchanged_all(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::ALL
    }
}

#[cfg(any(feature = "candle", feature = "burn"))]
impl BackwardProgress {
    const REFUSED: u8 = 3;

    /// The other ranks have been told of a failure after the last collective.
    pub(crate) fn set_refused(&self) {
        self.set(Self::REFUSED);
    }
}

impl<D: Kernels> Context<D> {
    /// Bytes that the context holds.
    pub fn bytes(&self) -> usize {
        let of = |t: &Option<Tensor<D>>| t.as_ref().map_or(0, Tensor::bytes);
        let shared = self.shared.as_ref().map_or(0, shared_expert::SharedContext::bytes);
        self.logits.bytes()
            + self.ids.bytes()
            + self.weights.bytes()
            + self.aux_sums.as_ref().map_or(0, |t| t.bytes())
            + of(&self.received.rows)
            + of(&self.received.weights)
            + of(&self.pre)
            + shared
    }

    /// The routing that forward made.
    pub fn handle(&self) -> &Handle<D> {
        &self.handle
    }

    /// How far its backward has come, to be asked when it has failed.
    #[cfg(any(feature = "candle", feature = "burn"))]
    pub(crate) fn progress(&self) -> Arc<BackwardProgress> {
        Arc::clone(&self.progress)
    }
}

/// Which gradients backward shall make. Its collectives run whatever is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientMask {
    /// Gradient of x.
    pub x: bool,
    /// Gradients of router weight and bias.
    pub router: bool,
    /// Gradients of the routed experts.
    pub experts: bool,
    /// Gradients of the shared expert.
    pub shared: bool,
}

impl GradientMask {
    /// Every gradient.
    pub const ALL: Self = Self { x: true, router: true, experts: true, shared: true };
}

/// Gradients, each of its parameter's shape and dtype. Those of replicated parameters (router, shared expert) are
/// this rank's share: sum them over the ranks.
#[derive(Debug)]
pub struct Gradients<D: Kernels> {
    /// Of x, `[T, H]`.
    pub x: Option<Tensor<D>>,
    /// By parameter; the selection bias has none.
    pub params: PerParam<Option<Tensor<D>>>,
    /// Gradient of the logits, accumulator type `[T, E]`, for inspection.
    pub logits: Tensor<D>,
    /// Gradient of the routing weights, accumulator type `[T, K]`, for inspection.
    pub weights: Tensor<D>,
}

/// The caller's memory for gradients, each of its parameter's shape; what is absent is not computed (its collectives
/// run all the same). Types are the parameters' own; those of the routed experts' parameters may be F32 beside 16-bit ones.
#[derive(Debug)]
pub struct GradientsMut<'a, D: Kernels> {
    /// Of x, `[T, H]`.
    pub x: Option<TensorMut<'a, D>>,
    /// By parameter; that of an expert's bias only beside its weight's. The selection bias has none.
    pub params: PerParam<Option<TensorMut<'a, D>>>,
    /// Add to what the routed experts' gradients (`up`, `down` and their biases) hold; all others are overwritten.
    pub accumulate: bool,
}

/// Which gradients [`Layer::backward_with`] makes, and where.
#[derive(Debug)]
pub struct GradientRequest<'a, D: Kernels> {
    /// Gradients to make in new memory, but those of `given`.
    pub wanted: GradientMask,
    /// Memory of the caller: what has memory here is made in it, whatever `wanted` says.
    pub given: GradientsMut<'a, D>,
}

/// Cotangents of a forward.
#[derive(Debug, Clone, Copy)]
pub struct Cotangents<'a, D: Kernels, A = f64> {
    /// Gradient of y `[T, H]`; absent counts as zeros.
    pub y: Option<TensorRef<'a, D>>,
    /// Gradient of the auxiliary losses' sum: a number, or a tensor of one element of the accumulator type
    /// ([`Scalar`]), which a GPU reads itself: a captured backward takes what the tensor holds at each replay.
    pub aux: A,
}

impl<'a, D: Kernels, A: Into<Scalar<'a, D>>> Cotangents<'a, D, A> {
    fn scalar(self) -> Cotangents<'a, D, Scalar<'a, D>> {
        Cotangents { y: self.y, aux: self.aux.into() }
    }
}

impl Layer {
    /// A layer of `config`; `number` names it in tags and errors and must be the same on all ranks.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`].
    pub fn new(config: MoeConfig, number: u32) -> Result<Self> {
        config.validate()?;
        let fingerprint = Fingerprint::of(&config);
        Ok(Self { config, number, dispatch: DispatchOptions::default(), fingerprint })
    }

    /// The same layer with other dispatch options.
    pub fn with_dispatch(mut self, dispatch: DispatchOptions) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// Sizes and formulas.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The layer's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Forward over all ranks of the group.
    ///
    /// `x` is `[T, H]`; T may differ between ranks and be 0. Collectives: prepare, dispatch, combine; one more where
    /// auxiliary losses are over ranks, and one more where jitter needs global token numbers.
    ///
    /// # Errors
    /// Mis-shaped tensors, NaN logits, capacity: on every rank, with the group usable afterwards.
    /// [`Error::Comm`] where a rank is lost.
    pub fn forward<D: Kernels>(
        &self,
        group: &mut Group<D>,
        mode: Mode,
        x: TensorRef<'_, D>,
        params: &Params<'_, D>,
    ) -> Result<Forward<D>> {
        forward::forward(self, group, mode, x, params)
    }

    /// [`forward`](Self::forward) into memory of the caller: `y` is `[T, H]` of x's type, overwritten.
    ///
    /// On a GPU with one rank, or with several over all-gather with a static capacity, nothing is allocated and nothing
    /// waits for the device once calls of these sizes have been seen (`Cuda::memory` counts), so the call can be
    /// captured into a graph (`Cuda::capture`).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_into<D: Kernels>(
        &self,
        group: &mut Group<D>,
        mode: Mode,
        inputs: Inputs<'_, '_, D>,
        y: TensorMut<'_, D>,
    ) -> Result<ForwardInfo<D>> {
        forward::forward_into(self, group, mode, inputs, y)
    }

    /// Backward over all ranks of the group, with the same `x` and parameters as forward. Collectives:
    /// combine_bwd, dispatch_bwd.
    ///
    /// # Errors
    /// [`Error::BackwardNotAgreed`] before any collective; otherwise as forward.
    pub fn backward<'a, D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'a, D, impl Into<Scalar<'a, D>>>,
        wanted: GradientMask,
    ) -> Result<Gradients<D>> {
        let request = GradientRequest { wanted, given: GradientsMut::none() };
        backward::backward(self, group, context, inputs, cotangents.scalar(), request)
    }

    /// [`backward`](Self::backward) with some gradients (of x, of parameters) in memory of the caller, and others in new
    /// memory.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_with<D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'_, D, Scalar<'_, D>>,
        request: GradientRequest<'_, D>,
    ) -> Result<Gradients<D>> {
        backward::backward(self, group, context, inputs, cotangents, request)
    }

    /// [`backward`](Self::backward) into memory of the caller; see [`forward_into`](Self::forward_into).
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_into<'a, D: Kernels>(
        &self,
        group: &mut Group<D>,
        context: Context<D>,
        inputs: Inputs<'_, '_, D>,
        cotangents: Cotangents<'a, D, impl Into<Scalar<'a, D>>>,
        into: GradientsMut<'_, D>,
    ) -> Result<()> {
        backward::backward_into(self, group, context, inputs, cotangents.scalar(), into).map(drop)
    }

    /// True where kept weights are scaled to the sum they had before dropping.
    fn renormalizes_kept(&self) -> bool {
        self.config.router.expert_capacity.is_some_and(|c| c.renormalize)
    }

    fn check_x<D: Kernels>(&self, call: &'static str, x: TensorRef<'_, D>) -> Result<usize> {
        match x.dims() {
            [t, h] if *h == self.config.hidden && x.dtype().is_float() => Ok(*t),
            dims => Err(Error::invalid(
                call,
                "tensor x",
                format!("a floating [T, {}]", self.config.hidden),
                format!("{} {dims:?}", x.dtype()),
            )),
        }
    }
}

/// Inputs of a forward, given to backward again.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, 'p, D: Kernels> {
    /// `[T, H]`.
    pub x: TensorRef<'a, D>,
    /// The parameters.
    pub params: &'a Params<'p, D>,
}
