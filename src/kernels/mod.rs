//! The primitives that a device supplies. The layer composes them and does no arithmetic of its own; arguments are
//! description structs, so that a fused back-end sees everything a stage knows.
//!
//! Notation: T tokens of this rank, K top-k, E experts, L local experts, H hidden, I inner size, G gate factor
//! (2 with a gate, 1 without), N slots (rows of the expert-major layout, padding included). "Accumulator type" is
//! [`DType::accumulator`] of the tokens' type.

mod experts;
mod layout;
mod nvfp4_stack;
pub mod optimizer;

use std::sync::Arc;

use crate::config::{AuxConfig, RouterConfig};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{DevicePlan, DispatchSpec, HostPlanRequest, Plan, PlanRecords, PlanRequest, RecordIds, Reporting};
use crate::quant::Codec;
use crate::tensor::{Tensor, TensorMut, TensorRef};

pub use experts::{BiasGrad, Down, DownBwd, InputWeightBwd, Up, UpDgrad, Wgrad};
pub use layout::{Arrivals, RowDest, RowSource, SlotWeights};

pub use crate::plan::{Origin, Segments};

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

/// What [`Kernels::route_and_plan`] makes beside logits, ids and weights.
#[derive(Debug)]
pub struct RoutedPlan<D: Device> {
    /// As [`Kernels::plan_on_device`] makes it.
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

/// Copies rows: `out[i] = source[map[i]]`; a negative entry writes zeros.
#[derive(Debug)]
pub struct GatherRows<'a, D: Device> {
    /// Any dtype.
    pub source: TensorRef<'a, D>,
    /// `I32 [n]`.
    pub map: TensorRef<'a, D>,
    /// Whose rows these are, for errors.
    pub origin: Origin,
    /// `[n, …]`, rows of the source's size.
    pub out: TensorMut<'a, D>,
}

/// Rows of two tensors behind each other: `out[i] = left[i] ++ right[i] ++ zeros`. All `U8 [n, ·]`.
#[derive(Debug)]
pub struct ConcatRows<'a, D: Device> {
    /// First part of each row.
    pub left: TensorRef<'a, D>,
    /// Second part of each row.
    pub right: Option<TensorRef<'a, D>>,
    /// Rows of at least both their bytes.
    pub out: TensorMut<'a, D>,
}

/// [`ConcatRows`] taken apart.
#[derive(Debug)]
pub struct SplitRows<'a, D: Device> {
    /// The joined rows.
    pub source: TensorRef<'a, D>,
    /// As in [`ConcatRows`].
    pub left: TensorMut<'a, D>,
    /// As in [`ConcatRows`].
    pub right: Option<TensorMut<'a, D>>,
}

/// Bytes of a row of [`ConcatRows`] and [`SplitRows`], on the left, on the right and in all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConcatLayout {
    pub left: usize,
    pub right: usize,
    pub whole: usize,
}

impl ConcatLayout {
    /// Checks both sides.
    fn of<D: Device>(
        call: &'static str,
        name: &str,
        whole: TensorRef<'_, D>,
        left: TensorRef<'_, D>,
        right: Option<TensorRef<'_, D>>,
    ) -> Result<Self> {
        let rows = whole.rows();
        let all = [
            (name, Some(whole.borrow())),
            ("left", Some(left.borrow())),
            ("right", right.as_ref().map(TensorRef::borrow)),
        ];
        for (name, t) in all {
            let Some(t) = t else { continue };
            Error::check_dtype(call, name, DType::U8, t.dtype())?;
            Error::check_shape(call, name, &[rows, t.row_bytes()], t.dims())?;
        }
        let right = right.map_or(0, |t| t.row_bytes());
        let found = Self { left: left.row_bytes(), right, whole: whole.row_bytes() };
        match found.left + found.right <= found.whole {
            true => Ok(found),
            false => {
                let expected = format!("rows of at least {} + {} bytes", found.left, found.right);
                Err(Error::invalid(call, format!("tensor {name}"), expected, found.whole))
            }
        }
    }
}

impl<D: Device> ConcatRows<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<ConcatLayout> {
        ConcatLayout::of(call, "out", self.out.as_ref(), self.left.borrow(), self.right.as_ref().map(TensorRef::borrow))
    }
}

impl<D: Device> SplitRows<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<ConcatLayout> {
        ConcatLayout::of(
            call,
            "source",
            self.source.borrow(),
            self.left.as_ref(),
            self.right.as_ref().map(TensorMut::as_ref),
        )
    }
}

/// Adds rows: `out[t] = Σ_k source[map[t, k]]` in the accumulator type, in the order of k, rounded once; negative
/// entries count zero.
#[derive(Debug)]
pub struct ReduceRows<'a, D: Device> {
    /// `[·, H]`.
    pub source: TensorRef<'a, D>,
    /// `I32 [T, K]`.
    pub map: TensorRef<'a, D>,
    /// Whose rows these are, for errors.
    pub origin: Origin,
    /// `[T, H]`.
    pub out: TensorMut<'a, D>,
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

/// Everything the layer computes, with the [`Codec`] of what travels quantized. A device's calls do
/// their work in the order in which they are made, and may return before it is done (not on the CPU): a [`Device`] is
/// its stream. A call checks shapes and dtypes of its arguments first.
pub trait Kernels: Codec {
    /// How a layer has what only the device sees reported, unless told otherwise.
    const REPORTING: Reporting = Reporting::Immediate;
    /// [`Linear`].
    ///
    /// # Errors
    /// Types or shapes that do not fit each other or the device, before anything is done; no memory; the device's.
    fn linear(&self, call: Linear<'_, Self>) -> Result<()>;
    /// [`LinearBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn linear_bwd(&self, call: LinearBwd<'_, Self>) -> Result<()>;
    /// [`Route`]. Fails on a NaN logit, at once or as [`Route::reporting`] says.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); [`Error::NanLogits`], at once or as [`Route::reporting`]
    /// says.
    fn route(&self, call: Route<'_, Self>) -> Result<()>;
    /// [`RouteBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn route_bwd(&self, call: RouteBwd<'_, Self>) -> Result<()>;
    /// [`AuxSums`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn aux_sums(&self, call: AuxSums<'_, Self>) -> Result<()>;
    /// [`AuxTotal`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn aux_total(&self, call: AuxTotal<'_, Self>) -> Result<()>;
    /// [`RenormalizeKept`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn renormalize_kept(&self, call: RenormalizeKept<'_, Self>) -> Result<()>;
    /// Slots for all ranks' choices, which the host has, as seen from one rank.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); [`Error::Capacity`].
    fn plan(&self, call: HostPlanRequest<'_>) -> Result<Plan<Self>>;
    /// The plan of a group of one rank ([`RowOrder::Local`](crate::ep::RowOrder::Local)) from ids `[T, K]` (I32 or
    /// I64) that nobody has checked, without waiting for the device: bad ids count as −1, and [`check`](Self::check)
    /// tells of them. `None`: the device cannot, or not for this request. May return an error of an earlier call.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); one of an earlier call.
    fn plan_on_device(&self, call: PlanRequest<'_, Self>) -> Result<Option<Plan<Self>>> {
        let _ = call;
        Ok(None)
    }
    /// [`RouteAndPlan`] at once, to the bits of the separate calls, without waiting for the device. `None`, and nothing done:
    /// the device has nothing quicker than those for this request. May return an error of an earlier call.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); one of an earlier call.
    fn route_and_plan(&self, call: RouteAndPlan<'_, Self>) -> Result<Option<RoutedPlan<Self>>> {
        let _ = call;
        Ok(None)
    }
    /// Whether [`plan_records`](Self::plan_records) can plan for such a spec, whatever the ids.
    fn plans_records(&self, spec: &DispatchSpec, num_experts: usize) -> bool;
    /// [`RecordIds`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn record_ids(&self, call: RecordIds<'_, Self>) -> Result<()>;
    /// The plan of records that ranks have exchanged, without waiting for the device but for the number of rows where
    /// that is open. What is wrong with them is kept in [`PlanRecords::errors`], and [`check`](Self::check) fails for
    /// it on a device that runs behind the host.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); of the records none but those that [`check`](Self::check) and
    /// [`PlanRecords::errors`] tell.
    fn plan_records(&self, call: PlanRecords<'_, Self>) -> Result<DevicePlan<Self>>;
    /// Waits for the device, and returns and clears the first error that kernels have met since the last call.
    ///
    /// # Errors
    /// The first of an earlier call: NaN logits, bad ids, a capacity that is too small, [`Error::RowMap`],
    /// [`Error::Segment`]; the device's.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Whether [`up`](Self::up) and [`down_bwd`](Self::down_bwd) of gated experts of `[hidden, intermediate]`, with weights
    /// of the rows' `dtype`, start before their rows have come ([`Arrivals`]). Of sizes and the kind of device alone, so that
    /// ranks on devices of one kind find the same.
    fn products_wait(&self, dtype: DType, sizes: [usize; 2]) -> bool {
        let _ = (dtype, sizes);
        false
    }
    /// Makes the list of a layout's row tiles that its products share, where the device has such and there is none yet. A
    /// product that starts early has no time for it.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn list_tiles(&self, segments: &Segments<Self>) -> Result<()> {
        let _ = segments;
        Ok(())
    }
    /// Whether rows behind a map, which several products read, had better be brought into slot order once: `columns` is
    /// the fewest that one of these products makes of a row.
    fn orders_rows(&self, dtype: DType, columns: usize) -> bool {
        let _ = (dtype, columns);
        false
    }
    /// [`GatherRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn gather_rows(&self, call: GatherRows<'_, Self>) -> Result<()>;
    /// [`ConcatRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn concat_rows(&self, call: ConcatRows<'_, Self>) -> Result<()>;
    /// [`SplitRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn split_rows(&self, call: SplitRows<'_, Self>) -> Result<()>;
    /// [`ReduceRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn reduce_rows(&self, call: ReduceRows<'_, Self>) -> Result<()>;
    /// [`Up`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn up(&self, call: Up<'_, Self>) -> Result<()>;
    /// [`Down`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn down(&self, call: Down<'_, Self>) -> Result<()>;
    /// [`DownBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn down_bwd(&self, call: DownBwd<'_, Self>) -> Result<()>;
    /// [`UpDgrad`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn up_dgrad(&self, call: UpDgrad<'_, Self>) -> Result<()>;
    /// [`Wgrad`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn wgrad(&self, call: Wgrad<'_, Self>) -> Result<()>;
    /// [`Sigmoid`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn sigmoid(&self, call: Sigmoid<'_, Self>) -> Result<()>;
    /// Layout of one expert that every one of `rows` tokens visits.
    ///
    /// # Errors
    /// Rows that no memory has the numbers for; the device's.
    fn single_segment(&self, rows: usize) -> Result<Arc<Segments<Self>>>;
    /// Makes later work of this device wait for an event, which may be another device's of the same memory.
    ///
    /// # Errors
    /// The device's.
    fn wait(&self, event: Option<&Self::Event>) -> Result<()>;
    /// A small tensor from values on the host; integers up to 2⁵³ are exact.
    ///
    /// # Errors
    /// A number of values that does not fit the sizes; a type that the device has not; no memory; the device's.
    fn write(&self, values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Self>>;
    /// Values of a small tensor on the host, as `f64`; waits for the device.
    ///
    /// # Errors
    /// Errors of earlier calls, as [`check`](Self::check) returns them; no memory; the device's.
    fn read(&self, tensor: TensorRef<'_, Self>) -> Result<Vec<f64>>;
    /// A tensor's bytes on the host; waits for the device.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn download(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>>;
    /// Copies bytes of the host, as many as the tensor has.
    ///
    /// # Errors
    /// Another number of bytes than the tensor has; the device's.
    fn upload(&self, from: &[u8], to: TensorMut<'_, Self>) -> Result<()>;
}
