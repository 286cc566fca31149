//! The router and the gate of a shared expert: logits, choices, auxiliary losses, and their gradients.

use crate::config::{AuxConfig, RouterConfig};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{DispatchSpec, Plan, Reporting};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::plan::Origin;

/// A dense product with a small weight: router logits, shared gate. `out = x·Wᵀ + b` in the accumulator type.
#[derive(Debug)]
pub struct Linear<'a, D: Device> {
    /// `[T, H]`.
    pub x: TensorRef<'a, D>,
    /// `[E, H]`; any floating type.
    pub weight: TensorRef<'a, D>,
    /// `[E]`; any floating type.
    pub bias: Option<TensorRef<'a, D>>,
    /// Accumulator type, `[T, E]`.
    pub out: TensorMut<'a, D>,
}

/// Gradients of [`Linear`]. `d_x` is added to; `d_weight` and `d_bias` are overwritten.
#[derive(Debug)]
pub struct LinearBwd<'a, D: Device> {
    /// `[T, H]`.
    pub x: TensorRef<'a, D>,
    /// `[E, H]`.
    pub weight: TensorRef<'a, D>,
    /// Accumulator type, `[T, E]`.
    pub d_out: TensorRef<'a, D>,
    /// `[T, H]`.
    pub d_x: Option<TensorMut<'a, D>>,
    /// `[E, H]`.
    pub d_weight: Option<TensorMut<'a, D>>,
    /// `[E]`.
    pub d_bias: Option<TensorMut<'a, D>>,
}

/// Counter-based noise on logits: the factor of (token, expert) depends on nothing but these numbers, so results do
/// not depend on the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Jitter {
    /// The run's seed.
    pub seed: u64,
    /// Training step.
    pub step: u64,
    /// The layer's number.
    pub layer: u32,
    /// Number of this rank's first token among all ranks' tokens.
    pub first_token: u64,
}

/// Logits to expert ids and weights.
#[derive(Debug)]
pub struct Route<'a, D: Device> {
    /// The formula.
    pub config: &'a RouterConfig,
    /// Accumulator type, `[T, E]`.
    pub logits: TensorRef<'a, D>,
    /// `[E]`, any floating type, where the formula has it.
    pub selection_bias: Option<TensorRef<'a, D>>,
    /// Noise, where the formula has it and the layer trains.
    pub jitter: Option<Jitter>,
    /// Whose logits these are, for errors.
    pub origin: Origin,
    /// When a NaN is reported; deferred, the token's experts are any, and its weights NaN where they depend on it.
    pub reporting: Reporting,
    /// Chosen experts, best first, `I32 [T, K]`.
    pub ids: TensorMut<'a, D>,
    /// Their weights, accumulator type `[T, K]`.
    pub weights: TensorMut<'a, D>,
}

/// The router of a group of one rank from tokens to slots: [`Linear`], [`Route`] of its logits, and the plan of the choices.
#[derive(Debug)]
pub struct RouteAndPlan<'a, D: Device> {
    /// The product whose result are the logits.
    pub linear: Linear<'a, D>,
    /// The formula.
    pub config: &'a RouterConfig,
    /// As in [`Route`].
    pub selection_bias: Option<TensorRef<'a, D>>,
    /// As in [`Route`].
    pub jitter: Option<Jitter>,
    /// As in [`Route`].
    pub ids: TensorMut<'a, D>,
    /// As in [`Route`].
    pub weights: TensorMut<'a, D>,
    /// Alignment, capacities, and when errors are reported.
    pub spec: &'a DispatchSpec,
}

/// What [`Kernels::route_and_plan`](super::Kernels::route_and_plan) makes beside logits, ids and weights.
#[derive(Debug)]
pub struct RoutedPlan<D: Device> {
    /// As [`Kernels::plan_on_device`](super::Kernels::plan_on_device) makes it.
    pub plan: Plan<D>,
    /// Weight of each slot, accumulator type `[N]`; padding unspecified.
    pub slot_weights: Tensor<D>,
}

/// Gradient of [`Route`] and of the auxiliary losses.
#[derive(Debug)]
pub struct RouteBwd<'a, D: Device> {
    /// The formula.
    pub config: &'a RouterConfig,
    /// As in forward.
    pub logits: TensorRef<'a, D>,
    /// As in forward.
    pub jitter: Option<Jitter>,
    /// The ids that [`Route`] gave (before any were dropped).
    pub ids: TensorRef<'a, D>,
    /// Gradient of the weights that [`Route`] gave; zero where a choice was dropped. Accumulator type, `[T, K]`.
    pub d_weights: TensorRef<'a, D>,
    /// Gradients of the auxiliary losses to add.
    pub aux: Option<AuxBwd<'a, D>>,
    /// Whose logits these are, for errors.
    pub origin: Origin,
    /// Accumulator type, `[T, E]`; overwritten.
    pub d_logits: TensorMut<'a, D>,
}

/// Sums from which auxiliary losses follow, over this rank's tokens.
#[derive(Debug)]
pub struct AuxSums<'a, D: Device> {
    /// The formula.
    pub config: &'a RouterConfig,
    /// The losses.
    pub aux: &'a AuxConfig,
    /// Accumulator type, `[T, E]`, without noise.
    pub logits: TensorRef<'a, D>,
    /// The ids that [`Route`] gave.
    pub ids: TensorRef<'a, D>,
    /// Whose logits these are, for errors.
    pub origin: Origin,
    /// Accumulator type, `[2·E + 4]`: choices of each expert, summed scores of each expert, number of tokens,
    /// Σ (log Σ exp l)², sum of the sequences' losses, number of sequences.
    pub out: TensorMut<'a, D>,
}

/// The auxiliary losses' sum, coefficients included, from the sums of [`AuxSums`]; 0 over no tokens.
#[derive(Debug)]
pub struct AuxTotal<'a, D: Device> {
    /// The formula.
    pub config: &'a RouterConfig,
    /// The losses.
    pub aux: &'a AuxConfig,
    /// The sums of [`AuxSums`], added over the ranks where the losses are.
    pub sums: TensorRef<'a, D>,
    /// One element of the accumulator type.
    pub out: TensorMut<'a, D>,
}

/// Gradient of the auxiliary losses.
#[derive(Debug)]
pub struct AuxBwd<'a, D: Device> {
    /// The losses.
    pub aux: &'a AuxConfig,
    /// The sums of [`AuxSums`], added over the ranks where the losses are.
    pub sums: TensorRef<'a, D>,
    /// Gradient of the total loss with respect to the auxiliary loss, one element of the accumulator type.
    pub d_loss: Scalar<'a, D>,
}

/// A number that the host has, or one that a device has, which its caller need not read, nor the call: kernels do. Made
/// by `into()` from either.
#[derive(Debug)]
pub enum Scalar<'a, D: Device> {
    /// A number.
    Host(f64),
    /// A tensor of one element.
    Device(TensorRef<'a, D>),
}

impl<D: Device> Clone for Scalar<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for Scalar<'_, D> {}

impl<D: Device> Scalar<'_, D> {
    /// Shorter borrow.
    pub fn borrow(&self) -> Scalar<'_, D> {
        match self {
            Self::Host(value) => Scalar::Host(*value),
            Self::Device(tensor) => Scalar::Device(tensor.borrow()),
        }
    }

    /// Refuses a tensor of another type, or of more elements than one.
    pub(crate) fn check(&self, call: &'static str, name: &str, dtype: DType) -> Result<()> {
        let Self::Device(tensor) = self else { return Ok(()) };
        Error::check_dtype(call, name, dtype, tensor.dtype())?;
        match tensor.count() {
            1 => Ok(()),
            _ => Error::check_shape(call, name, &[1], tensor.dims()),
        }
    }
}

impl<D: Device> From<f64> for Scalar<'_, D> {
    fn from(value: f64) -> Self {
        Self::Host(value)
    }
}

impl<'a, D: Device> From<TensorRef<'a, D>> for Scalar<'a, D> {
    fn from(tensor: TensorRef<'a, D>) -> Self {
        Self::Device(tensor)
    }
}

/// Scales a token's kept weights so that their sum is again what [`Route`] gave.
#[derive(Debug)]
pub struct RenormalizeKept<'a, D: Device> {
    /// Weights of [`Route`], accumulator type `[T, K]`.
    pub weights: TensorRef<'a, D>,
    /// Ids after dropping, `I32 [T, K]`; −1 where dropped.
    pub kept: TensorRef<'a, D>,
    /// Forward: `None`. Backward: the gradient of the scaled weights.
    pub grad: Option<TensorRef<'a, D>>,
    /// The scaled weights, or the gradient of [`Route`]'s weights. 0 where all of a token's choices were dropped.
    pub out: TensorMut<'a, D>,
}

/// Elementwise sigmoid, forward or backward, in the accumulator type.
#[derive(Debug)]
pub struct Sigmoid<'a, D: Device> {
    /// Forward: the input. Backward: the output of forward.
    pub value: TensorRef<'a, D>,
    /// Forward: `None`. Backward: the gradient of the output.
    pub grad: Option<TensorRef<'a, D>>,
    /// The output, or the gradient of the input.
    pub out: TensorMut<'a, D>,
}
