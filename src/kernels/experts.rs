//! Products of the experts, forward and backward.

use crate::config::Activation;
use crate::device::Device;
use crate::plan::Segments;
use crate::tensor::{TensorMut, TensorRef};
use crate::weights::Weight;

use super::layout::{RowDest, RowSource, SlotWeights};

/// Up projection and activation of every local expert.
#[derive(Debug)]
pub struct Up<'a, D: Device> {
    /// Received rows x, `[·, H]`.
    pub rows: RowSource<'a, D>,
    /// The layout.
    pub segments: &'a Segments<D>,
    /// `[L, G·I, H]`, gate rows first.
    pub weight: Weight<'a, D>,
    /// `[L, G·I]`.
    pub bias: Option<TensorRef<'a, D>>,
    /// Applied here if at [`WeightAt::Activation`](crate::config::WeightAt::Activation) or
    /// [`WeightAt::Input`](crate::config::WeightAt::Input).
    pub slot_weights: Option<SlotWeights<'a, D>>,
    /// act in `h = act(pre)`.
    pub activation: Activation,
    /// Pre-activations `[N, G·I]` (`w·x·Uᵀ + b` at [`WeightAt::Input`](crate::config::WeightAt::Input)), where backward
    /// wants them.
    pub pre: Option<TensorMut<'a, D>>,
    /// h, `[N, I]`, times the weight at [`WeightAt::Activation`](crate::config::WeightAt::Activation).
    pub out: RowDest<'a, D>,
    /// As [`Wgrad::movement_sms`], of rows that are all there, which nothing that was enqueued last writes; tiles are to be listed before ([`Kernels::list_tiles`]).
    ///
    /// [`Kernels::list_tiles`]: super::Kernels::list_tiles
    pub movement_sms: Option<usize>,
}

/// Down projection of every local expert.
#[derive(Debug)]
pub struct Down<'a, D: Device> {
    /// h, `[N, I]`.
    pub rows: RowSource<'a, D>,
    /// The layout.
    pub segments: &'a Segments<D>,
    /// `[L, H, I]`.
    pub weight: Weight<'a, D>,
    /// `[L, H]`; times the routing weight unless that is at [`WeightAt::Input`](crate::config::WeightAt::Input).
    pub bias: Option<TensorRef<'a, D>>,
    /// Scales the product at [`WeightAt::Output`](crate::config::WeightAt::Output), and the bias as said there.
    pub slot_weights: Option<SlotWeights<'a, D>>,
    /// Expert outputs, `[N, H]`.
    pub out: RowDest<'a, D>,
}

/// Gradient through down and the activation.
#[derive(Debug)]
pub struct DownBwd<'a, D: Device> {
    /// Gradient of the expert outputs, `[·, H]`.
    pub grad: RowSource<'a, D>,
    /// The layout.
    pub segments: &'a Segments<D>,
    /// `[L, H, I]`.
    pub weight: Weight<'a, D>,
    /// `[L, H]`.
    pub bias: Option<TensorRef<'a, D>>,
    /// Pre-activations of forward, `[N, G·I]`.
    pub pre: TensorRef<'a, D>,
    /// As in forward.
    pub slot_weights: Option<SlotWeights<'a, D>>,
    /// act.
    pub activation: Activation,
    /// Gradient of the pre-activations, `[N, G·I]`.
    pub d_pre: TensorMut<'a, D>,
    /// h times the weight (unless at [`WeightAt::Input`](crate::config::WeightAt::Input)), `[N, I]`: down's right
    /// operand in [`Wgrad`].
    pub hidden: Option<TensorMut<'a, D>>,
    /// Gradient of the slot weights, accumulator type `[N]`; not written at
    /// [`WeightAt::Input`](crate::config::WeightAt::Input), nor at padding.
    pub d_slot_weights: Option<TensorMut<'a, D>>,
}

/// Gradient through up to the received rows.
#[derive(Debug)]
pub struct UpDgrad<'a, D: Device> {
    /// Gradient of the pre-activations, `[N, G·I]`.
    pub d_pre: TensorRef<'a, D>,
    /// The layout.
    pub segments: &'a Segments<D>,
    /// `[L, G·I, H]`.
    pub weight: Weight<'a, D>,
    /// Where the weight was applied to the rows.
    pub input_weight: Option<InputWeightBwd<'a, D>>,
    /// Gradient of the received rows, `[N, H]`.
    pub out: RowDest<'a, D>,
}

/// Gradient of a weight applied at [`WeightAt::Input`](crate::config::WeightAt::Input).
#[derive(Debug)]
pub struct InputWeightBwd<'a, D: Device> {
    /// Accumulator type, `[N]`.
    pub values: TensorRef<'a, D>,
    /// The rows x of forward.
    pub rows: RowSource<'a, D>,
    /// Gradient of the slot weights, accumulator type `[N]`; padding not written.
    pub d_slot_weights: Option<TensorMut<'a, D>>,
}

/// Weight gradient of every local expert: `out[j] = Σ_s w_s · left[s] ⊗ right[s]` over its slots, zero for an
/// expert without tokens.
#[derive(Debug)]
pub struct Wgrad<'a, D: Device> {
    /// Gradient rows, `[·, M]`.
    pub left: RowSource<'a, D>,
    /// Input rows, `[·, P]`.
    pub right: RowSource<'a, D>,
    /// w in the sum; ones without it. Accumulator type, `[N]`.
    pub slot_weights: Option<TensorRef<'a, D>>,
    /// The layout.
    pub segments: &'a Segments<D>,
    /// `[L, M, P]`, of the operands' type or, on devices that say so, F32.
    pub out: TensorMut<'a, D>,
    /// Gradient of the bias.
    pub bias: Option<BiasGrad<'a, D>>,
    /// Add to what `out` and the bias gradient hold instead of overwriting them.
    pub accumulate: bool,
    /// SMs of the movement of rows that was enqueued last, which touches nothing of this call's: the kernel may start before
    /// that has ended, and leaves it these SMs. `None`: it starts behind all that was enqueued.
    pub movement_sms: Option<usize>,
}

/// Bias gradient `out[j] = Σ_s w_s · left[s]`.
#[derive(Debug)]
pub struct BiasGrad<'a, D: Device> {
    /// w in the sum; ones without it. Accumulator type, `[N]`.
    pub slot_weights: Option<TensorRef<'a, D>>,
    /// `[L, M]`.
    pub out: TensorMut<'a, D>,
}
