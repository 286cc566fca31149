//! Optimizers over the parameters of a rank: whole ones, shards, and those that every rank holds.
//!
//! [`AdamW`] keeps main weights in f32 and both moments beside the parameters. A step is
//!
//! ```text
//! begin    sums of squares of this rank's gradients → one all-gather of a few numbers a parameter → norm, clipping,
//!          the loss's factor and whether the step is taken, all in f64 and on the device
//! update   one kernel a group: main weights, moments, and parameters rounded from the main weights
//! ```
//!
//! and the host waits for none of it. What a rank holds of a parameter is its [`ParamShard`]; the norm counts each row
//! of each parameter once, whoever holds it, in an order that does not depend on how parameters are cut
//! ([`kernels::optimizer`](crate::kernels::optimizer) states it). So a step has the same bits in every run and for
//! every number of ranks, given the same gradients.

mod adamw;
mod fields;
mod gradient_presence;
mod norm;
mod param_shard;
mod saved_state;
mod state_memory;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::ShardDevice;

pub use crate::kernels::optimizer::{LossScaling, OptimizerDevice};
pub use adamw::{AdamW, StepTensor};
pub use param_shard::ParamShard;
pub(crate) use saved_state::{Counts, StateKind};

/// A device that optimizers step on, over ranks: all that there are.
pub trait StepDevice: OptimizerDevice + ShardDevice {}
impl<D: OptimizerDevice + ShardDevice> StepDevice for D {}

/// Options of a group of parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first and of the second moment, β₁ and β₂.
    pub betas: [f64; 2],
    /// ε, added to the root of the second moment: positive, at least f32's least normal number.
    pub eps: f64,
    /// Weight decay, decoupled: each step takes `lr · weight_decay` of the weight off it.
    pub weight_decay: f64,
}

impl Default for GroupOptions {
    /// Learning rate 0.001, β 0.9 and 0.999, ε 10⁻⁸, weight decay 0.01, as candle-nn and PyTorch have them.
    fn default() -> Self {
        Self { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 }
    }
}

impl GroupOptions {
    fn check(&self) -> Result<()> {
        const CALL: &str = "AdamW";
        let within = |name, value: f64, range: std::ops::Range<f64>| match range.contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(CALL, name, format!("a number in {range:?}"), value)),
        };
        within("lr", self.lr, 0.0..f64::INFINITY)?;
        within("betas[0]", self.betas[0], 0.0..1.0)?;
        within("betas[1]", self.betas[1], 0.0..1.0)?;
        // The step adds it in f32: where the second moment is 0, so is the first, and 0/0 is no number.
        if !(self.eps > 0.0 && (self.eps as f32).is_normal()) {
            return Err(Error::invalid(
                CALL,
                "eps",
                format!("a positive number from {:e} on", f32::MIN_POSITIVE),
                self.eps,
            ));
        }
        within("weight_decay", self.weight_decay, 0.0..f64::INFINITY)
    }
}

/// Options of an optimizer; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Of all parameters, where no groups are given; else one of these, or the default.
    pub group: GroupOptions,
    /// Gradients whose norm over all parameters exceeds this are scaled to it.
    pub max_norm: Option<f64>,
    /// Dynamic scale of the loss, for gradients in f16.
    pub loss_scaling: Option<LossScaling>,
    /// Type of the moments: F32, or BF16 with stochastic rounding.
    pub moments: DType,
    /// Seed of that rounding.
    pub seed: u64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { group: GroupOptions::default(), max_norm: None, loss_scaling: None, moments: DType::F32, seed: 0 }
    }
}

impl AdamWOptions {
    /// Whether steps compute the norm of the gradients, and skip one that is inf or NaN.
    pub fn has_norm(&self) -> bool {
        self.max_norm.is_some() || self.loss_scaling.is_some()
    }

    /// Refuses options that would be of no parameter.
    fn check_group(&self, groups: &[GroupOptions]) -> Result<()> {
        match groups.contains(&self.group) || self.group == GroupOptions::default() {
            true => Ok(()),
            false => {
                let expected = "one of the groups that are given beside it, or the default";
                Err(Error::invalid("AdamW", "options.group", expected, format!("{:?}", self.group)))
            }
        }
    }

    fn check(&self) -> Result<()> {
        const CALL: &str = "AdamW";
        self.group.check()?;
        if let Some(most) = self.max_norm.filter(|most| most.is_nan() || *most <= 0.0) {
            return Err(Error::invalid(CALL, "max_norm", "a positive number", most));
        }
        if !matches!(self.moments, DType::F32 | DType::BF16) {
            return Err(Error::invalid(CALL, "moments", "f32 or bf16", self.moments));
        }
        let Some(s) = self.loss_scaling else { return Ok(()) };
        let ordered = s.min > 0.0 && s.min <= s.initial && s.initial <= s.max && s.max.is_finite();
        let fits = ordered && s.growth >= 1.0 && s.backoff > 0.0 && s.backoff <= 1.0 && s.interval > 0;
        match fits && s.growth.is_finite() {
            true => Ok(()),
            false => {
                let expected = "0 < min ≤ initial ≤ max, growth ≥ 1, 0 < backoff ≤ 1, interval ≥ 1";
                Err(Error::invalid(CALL, "loss_scaling", expected, format!("{s:?}")))
            }
        }
    }
}

/// A parameter, as an optimizer is told of it.
#[derive(Debug, Clone)]
pub struct ParamSpec {
    /// Its name, of its own: in errors and in saved states.
    pub name: String,
    /// The rows of it that this rank holds.
    pub shard: ParamShard,
    /// Type of the parameter: F32, F16 or BF16.
    pub dtype: DType,
    /// Number of its group.
    pub group: usize,
}

/// Figures of the last step, once the device has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepStats {
    /// Steps taken so far.
    pub steps: u64,
    /// Steps skipped so far, for an inf or a NaN among the gradients.
    pub skipped: u64,
    /// Norm of the last step's gradients before clipping, without the loss's factor; 0 where none is computed.
    pub norm: f64,
    /// Factor of the last step's gradients.
    pub factor: f64,
    /// Factor of the next step's loss; 1 without loss scaling.
    pub loss_scale: f64,
    /// Whether the last step was skipped.
    pub skipped_last: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let of = |group: GroupOptions| group.check();
        let group = GroupOptions::default();
        of(group).unwrap();
        of(GroupOptions { lr: 0.0, eps: f64::from(f32::MIN_POSITIVE), ..group }).unwrap();
        let bad = [
            ("lr", GroupOptions { lr: f64::NAN, ..group }),
            ("lr", GroupOptions { lr: -1e-3, ..group }),
            ("lr", GroupOptions { lr: f64::INFINITY, ..group }),
            ("eps", GroupOptions { eps: 0.0, ..group }),
            ("eps", GroupOptions { eps: 1e-46, ..group }),
            ("eps", GroupOptions { eps: -1e-8, ..group }),
            ("eps", GroupOptions { eps: f64::NAN, ..group }),
            ("eps", GroupOptions { eps: 1e39, ..group }),
            ("betas[1]", GroupOptions { betas: [0.9, 1.0], ..group }),
        ];
        for (field, group) in bad {
            match of(group) {
                Err(Error::Invalid { name, .. }) => assert_eq!(name, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }
}
