//! Calls of an optimizer to a device: sums of squares of gradients, the numbers of a step, and the step itself.
//!
//! # The order of a norm
//! A weight is rows of `width` elements, and ranks hold runs of whole rows of it. A row is cut into *leaves* of
//! [`LEAF`] elements, the last one shorter, and leaves are numbered through the whole weight, whoever holds them.
//!
//! 1. A leaf has 128 partial sums in f64: number j adds the squares of elements j, j + 128, j + 256, … in this order.
//!    (Squares of f32, bf16 and f16 are exact in f64, so it is all the same whether square and sum are one instruction.)
//!    32 sums follow, `(p[4l] + p[4l + 1]) + (p[4l + 2] + p[4l + 3])`, then `s[l] + s[l + 16]`, and so on with 8, 4, 2, 1.
//! 2. Leaves are added in a binary tree whose nodes of height h are leaves i·2ʰ ‥ (i + 1)·2ʰ of the whole weight:
//!    ((0 + 1) + (2 + 3)) + …. Leaves that there are not count +0.
//! 3. Weights are added in their order, one by one.
//!
//! A cut between rows is a cut between leaves, so it only decides which rank computes which nodes of a tree: the bits are
//! the same for every number of ranks, and on every device.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::Kernels;

/// Most elements of a leaf.
pub const LEAF: usize = 4096;
/// Partial sums of a leaf.
pub const LEAF_SUMS: usize = 128;

/// Numbers of [`StepControl::state`] ahead of the groups' own.
pub const STATE_NUMBERS: usize = 8;
/// Numbers of a group in [`StepControl::state`]: β₁ᵗ and β₂ᵗ.
pub const GROUP_STATE: usize = 2;
/// Numbers of a group in [`StepControl::settings`]: learning rate, β₁, β₂, ε, weight decay.
pub const SETTINGS: usize = 5;
/// Numbers of a group in [`StepControl::coefficients`].
pub const COEFFICIENTS: usize = 9;

/// Places in [`StepControl::state`].
pub mod state {
    /// Factor of the loss.
    pub const SCALE: usize = 0;
    /// Steps without inf or NaN since the factor changed.
    pub const GOOD: usize = 1;
    /// Steps taken, t.
    pub const STEP: usize = 2;
    /// Steps skipped.
    pub const SKIPPED: usize = 3;
    /// Norm of the last step's gradients, without the loss's factor and before clipping.
    pub const NORM: usize = 4;
    /// Factor of the last step's gradients: clipping, and the inverse of the loss's factor.
    pub const FACTOR: usize = 5;
    /// 1 if the last step was skipped, else 0.
    pub const SKIP: usize = 6;
}

/// Places in a row of [`StepControl::coefficients`]; kernels round each to f32 but the step.
pub mod coefficient {
    /// 1: nothing is changed.
    pub const SKIP: usize = 0;
    /// Factor of gradients.
    pub const FACTOR: usize = 1;
    /// 1 − β₁.
    pub const FIRST: usize = 2;
    /// 1 − β₂.
    pub const SECOND: usize = 3;
    /// lr / (1 − β₁ᵗ).
    pub const RATE: usize = 4;
    /// 1 / √(1 − β₂ᵗ).
    pub const ROOT: usize = 5;
    /// ε.
    pub const EPSILON: usize = 6;
    /// lr · weight decay.
    pub const DECAY: usize = 7;
    /// t, for random bits.
    pub const STEP: usize = 8;
}

/// The squares of one gradient, or of a run of its rows.
#[derive(Debug)]
pub struct SquaredTensor<'a, D: Device> {
    /// Any floating type but F64; rows behind the first `rows` (a shard's padding) are not read.
    pub gradient: TensorRef<'a, D>,
    /// Rows to add.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Height h of the nodes wanted: each is 2ʰ leaves, the last one fewer. The first row begins a node.
    pub height: u32,
    /// Number of the first node in [`SquareSums::out`].
    pub node: usize,
}

impl<D: Device> SquaredTensor<'_, D> {
    /// Leaves of a row.
    pub(crate) fn leaves_of_row(&self) -> usize {
        self.width.div_ceil(LEAF)
    }

    /// Leaves in all.
    pub(crate) fn leaves(&self) -> usize {
        self.rows * self.leaves_of_row()
    }

    /// Nodes.
    pub(crate) fn nodes(&self) -> usize {
        nodes(self.leaves(), self.height)
    }
}

/// Nodes of a height that so many leaves have.
pub(crate) fn nodes(leaves: usize, height: u32) -> usize {
    leaves.div_ceil(1usize.checked_shl(height).unwrap_or(usize::MAX))
}

/// Sums of squares of gradients, in the [module](self)'s order as far as the nodes asked for.
#[derive(Debug)]
pub struct SquareSums<'a, D: Device> {
    /// The gradients.
    pub tensors: Vec<SquaredTensor<'a, D>>,
    /// `F64 [n]`; nodes of no gradient are not written.
    pub out: TensorMut<'a, D>,
}

impl<D: Device> SquareSums<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        Error::check_dtype(call, "out", DType::F64, self.out.dtype())?;
        for tensor in &self.tensors {
            check_gradient(call, tensor.gradient.borrow(), tensor.rows.saturating_mul(tensor.width))?;
            let end = tensor.node.saturating_add(tensor.nodes());
            if end > self.out.count() {
                return Err(Error::invalid(call, "out", format!("room for {end} sums"), self.out.count()));
            }
        }
        Ok(())
    }
}

/// Refuses a gradient of another type, or of fewer elements than will be read.
fn check_gradient<D: Device>(call: &'static str, gradient: TensorRef<'_, D>, count: usize) -> Result<()> {
    if !matches!(gradient.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::invalid(call, "gradient", "f32, f16 or bf16", gradient.dtype()));
    }
    at_least(call, "gradient", count, gradient.count())
}

fn at_least(call: &'static str, name: &str, wanted: usize, found: usize) -> Result<()> {
    if found >= wanted { Ok(()) } else { Err(Error::invalid(call, name, format!("{wanted} elements or more"), found)) }
}

/// Nodes of all ranks, and the weights that they belong to.
#[derive(Debug)]
pub struct NormNodes<'a, D: Device> {
    /// `F64`: what the ranks' [`SquareSums`] gave.
    pub nodes: TensorRef<'a, D>,
    /// `I32`: the nodes of the first weight in their order, of the second, ….
    pub order: TensorRef<'a, D>,
    /// `I32 [P + 1]`: where each weight's begin in `order`, and the last one's end.
    pub starts: TensorRef<'a, D>,
    /// Room for a number a weight, `F64 [P]`.
    pub sums: TensorMut<'a, D>,
}

/// Dynamic scale of a loss whose gradients are f16.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaling {
    /// The first step's factor.
    pub initial: f64,
    /// Its factor after `interval` steps without inf or NaN. Powers of two keep gradients exact.
    pub growth: f64,
    /// Its factor after a step with one.
    pub backoff: f64,
    /// Steps.
    pub interval: u32,
    /// Least factor.
    pub min: f64,
    /// Largest factor.
    pub max: f64,
}

impl Default for LossScaling {
    /// 2¹⁶, doubled after 2000 steps, halved at once; between 1 and 2²⁴.
    fn default() -> Self {
        Self { initial: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000, min: 1.0, max: 16_777_216.0 }
    }
}

/// The numbers of a step, all in f64 and on the device: norm, clipping, the loss's factor, whether the step is skipped,
/// bias corrections. With n the [norm](self) over `state[SCALE]`:
///
/// ```text
/// no norm:            factor = 1 / scale, and the step is taken
/// n is inf or NaN:    the step is skipped; scale = max(scale · backoff, min), good = 0
/// else:               factor = (1 / scale) · (max_norm / n where n > max_norm, else 1)
///                     good += 1; if good = interval: scale = min(scale · growth, max), good = 0
/// taken:              t += 1; each group's β₁ᵗ and β₂ᵗ are multiplied by its β₁ and β₂
/// ```
#[derive(Debug)]
pub struct StepControl<'a, D: Device> {
    /// Where the norm is known.
    pub norm: Option<NormNodes<'a, D>>,
    /// Gradients of a larger norm are scaled to it.
    pub max_norm: Option<f64>,
    /// How the loss's factor moves; without, it stays.
    pub scaling: Option<LossScaling>,
    /// `F64 [G, `[`SETTINGS`]`]`.
    pub settings: TensorRef<'a, D>,
    /// `F64 [`[`STATE_NUMBERS`]` + `[`GROUP_STATE`]` · G]`, changed.
    pub state: TensorMut<'a, D>,
    /// `F64 [G, `[`COEFFICIENTS`]`]`, overwritten.
    pub coefficients: TensorMut<'a, D>,
}

impl<D: Device> StepControl<'_, D> {
    /// Checks sizes; groups.
    pub(crate) fn check(&self, call: &'static str) -> Result<usize> {
        let groups = self.settings.rows();
        let check = |name, count: usize, dtype, found: usize, of: DType| {
            Error::check_dtype(call, name, dtype, of)?;
            Error::check_shape(call, name, &[count], &[found])
        };
        let (settings, state, to) = (&self.settings, &self.state, &self.coefficients);
        check("settings", groups * SETTINGS, DType::F64, settings.count(), settings.dtype())?;
        check("state", STATE_NUMBERS + GROUP_STATE * groups, DType::F64, state.count(), state.dtype())?;
        check("coefficients", groups * COEFFICIENTS, DType::F64, to.count(), to.dtype())?;
        if let Some(norm) = &self.norm {
            let sums = norm.sums.count();
            check("nodes", norm.nodes.count(), DType::F64, norm.nodes.count(), norm.nodes.dtype())?;
            check("order", norm.order.count(), DType::I32, norm.order.count(), norm.order.dtype())?;
            check("starts", sums + 1, DType::I32, norm.starts.count(), norm.starts.dtype())?;
            check("sums", sums, DType::F64, sums, norm.sums.dtype())?;
        }
        Ok(groups)
    }
}

/// One parameter of an [`AdamWUpdate`].
#[derive(Debug)]
pub struct AdamWTensor<'a, D: Device> {
    /// Elements to change, from the first on; what is behind them (a shard's padding) stays.
    pub count: usize,
    /// F32, F16 or BF16.
    pub gradient: TensorRef<'a, D>,
    /// Main weight, F32.
    pub main: TensorMut<'a, D>,
    /// F16 or BF16: set to the main weight, rounded; `None` where the main weight is the parameter.
    pub rounded: Option<TensorMut<'a, D>>,
    /// First moments; F32 or BF16, both moments alike.
    pub first: TensorMut<'a, D>,
    /// Second moments.
    pub second: TensorMut<'a, D>,
    /// The whole parameter's number, for random bits.
    pub number: u32,
    /// Number of the first element in the whole parameter.
    pub element: u64,
}

/// A step of AdamW over a group's parameters. For each element, in f32, every operation rounded by itself (no fused
/// multiply-add), with the numbers of [`coefficient`] rounded to f32:
///
/// ```text
/// g = gradient · FACTOR
/// m = m + FIRST · (g − m)
/// v = v + SECOND · (g · g − v)
/// w = w − (DECAY · w + RATE · (m / (√v · ROOT + EPSILON)))
/// ```
///
/// The step takes m and v as they are here. BF16 moments are then stored with stochastic rounding (to nearest, v would
/// not move once (1 − β₂)·|g² − v| is less than half of its last place): the bits of m (upper 16) and of v (lower 16)
/// are those of word `e % 4` of Philox4x32-7 with the counter (e / 4 low, e / 4 high, `number`, t), e the element's
/// number in the whole parameter; added below the last bit kept, then cut off.
#[derive(Debug)]
pub struct AdamWUpdate<'a, D: Device> {
    /// The parameters.
    pub tensors: Vec<AdamWTensor<'a, D>>,
    /// Those of all groups, from [`StepControl`].
    pub coefficients: TensorRef<'a, D>,
    /// Which of them.
    pub group: usize,
    /// Of the random bits.
    pub seed: u64,
}

impl<D: Device> AdamWUpdate<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        Error::check_dtype(call, "coefficients", DType::F64, self.coefficients.dtype())?;
        at_least(call, "coefficients", (self.group + 1) * COEFFICIENTS, self.coefficients.count())?;
        for t in &self.tensors {
            check_gradient(call, t.gradient.borrow(), t.count)?;
            Error::check_dtype(call, "main", DType::F32, t.main.dtype())?;
            at_least(call, "main", t.count, t.main.count())?;
            if let Some(rounded) = &t.rounded {
                if !matches!(rounded.dtype(), DType::F16 | DType::BF16) {
                    return Err(Error::invalid(call, "rounded", "f16 or bf16", rounded.dtype()));
                }
                at_least(call, "rounded", t.count, rounded.count())?;
            }
            if !matches!(t.first.dtype(), DType::F32 | DType::BF16) {
                return Err(Error::invalid(call, "first", "f32 or bf16", t.first.dtype()));
            }
            Error::check_dtype(call, "second", t.first.dtype(), t.second.dtype())?;
            at_least(call, "first", t.count, t.first.count())?;
            at_least(call, "second", t.count, t.second.count())?;
        }
        Ok(())
    }
}

/// Copies elements to another floating type, rounded to nearest; F64 is rounded to F32 first.
#[derive(Debug)]
pub struct Convert<'a, D: Device> {
    /// Any floating type.
    pub from: TensorRef<'a, D>,
    /// F32, F16 or BF16, of as many elements.
    pub to: TensorMut<'a, D>,
}

impl<D: Device> Convert<'_, D> {
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        Error::check_shape(call, "to", &[self.from.count()], &[self.to.count()])?;
        if !self.from.dtype().is_float() {
            return Err(Error::invalid(call, "from", "a floating type", self.from.dtype()));
        }
        match self.to.dtype() {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            other => Err(Error::invalid(call, "to", "f32, f16 or bf16", other)),
        }
    }
}

/// The device's part of an optimizer, beside the layer's kernels.
pub trait OptimizerDevice: Kernels {
    /// [`SquareSums`].
    ///
    /// # Errors
    /// Types or sizes that do not fit; the device's.
    fn square_sums(&self, call: SquareSums<'_, Self>) -> Result<()>;
    /// [`StepControl`].
    ///
    /// # Errors
    /// As [`square_sums`](Self::square_sums).
    fn step_control(&self, call: StepControl<'_, Self>) -> Result<()>;
    /// [`AdamWUpdate`].
    ///
    /// # Errors
    /// As [`square_sums`](Self::square_sums).
    fn adamw(&self, call: AdamWUpdate<'_, Self>) -> Result<()>;
    /// [`Convert`].
    ///
    /// # Errors
    /// As [`square_sums`](Self::square_sums).
    fn convert(&self, call: Convert<'_, Self>) -> Result<()>;
}
