//! Auxiliary losses from their sums: the part that is the same on every device.

use crate::config::{AuxConfig, BalanceKind, RouterConfig};
use crate::layer::AuxValue;

/// The fields of [`AuxSums::out`](crate::kernels::AuxSums::out).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums<'a> {
    /// Choices of each expert.
    pub counts: &'a [f64],
    /// Summed scores of each expert.
    pub scores: &'a [f64],
    pub tokens: f64,
    /// Σ (log Σ exp l)².
    pub z: f64,
    /// Sum of the sequences' losses.
    pub sequence_losses: f64,
    pub sequences: f64,
}

impl<'a> Sums<'a> {
    /// Elements for E experts.
    pub(crate) const fn len(experts: usize) -> usize {
        2 * experts + 4
    }

    /// Names the fields of `values`, which holds [`Sums::len`] of them.
    pub(crate) fn new(values: &'a [f64], experts: usize) -> Self {
        let (counts, rest) = values.split_at(experts);
        let (scores, rest) = rest.split_at(experts);
        Self { counts, scores, tokens: rest[0], z: rest[1], sequence_losses: rest[2], sequences: rest[3] }
    }
}

/// E·Σ f·P with f = counts / picks and P = scores / tokens.
pub(crate) fn balance(counts: &[f64], scores: &[f64], picks: f64, tokens: f64) -> f64 {
    let dot: f64 = counts.iter().zip(scores).map(|(c, s)| c * s).sum();
    counts.len() as f64 * dot / picks / tokens
}

/// The losses, coefficients included; zeros over no tokens, and those whose coefficient is 0.
///
/// `sums` is what [`AuxSums`](crate::kernels::AuxSums) wrote, added over the ranks where the losses are.
#[allow(dead_code)] // The layer's forward is its caller.
pub(crate) fn aux_value(config: &RouterConfig, aux: &AuxConfig, sums: &[f64]) -> AuxValue {
    let s = Sums::new(sums, config.num_experts);
    if s.tokens <= 0.0 {
        return AuxValue::default();
    }
    // Not a product by zero: a loss that is not asked for must not turn the total into NaN where it is infinite.
    let weighted = |coefficient: f64, loss: f64| if coefficient == 0.0 { 0.0 } else { coefficient * loss };
    let loss = match aux.balance_kind {
        BalanceKind::Switch => balance(s.counts, s.scores, s.tokens * config.top_k as f64, s.tokens),
        BalanceKind::HuggingFace => balance(s.counts, s.scores, s.tokens, s.tokens),
        BalanceKind::Sequence { .. } => s.sequence_losses / s.sequences,
    };
    AuxValue { balance: weighted(aux.balance, loss), z: weighted(aux.z, s.z / s.tokens) }
}
