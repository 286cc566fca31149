//! Auxiliary losses from their sums: the part that is the same on every device.

use crate::config::{AuxConfig, BalanceKind, RouterConfig};

/// Auxiliary losses of one forward, coefficients included.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AuxValue {
    /// Load-balancing loss.
    pub balance: f64,
    /// z-loss.
    pub z: f64,
}

impl AuxValue {
    /// Their sum, the value whose gradient [`Layer::backward`](crate::layer::Layer::backward) takes.
    pub fn total(&self) -> f64 {
        self.balance + self.z
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Score;

    /// Two experts, K = 1, two tokens: one choice each, scores 0.75 and 1.25, Σ z = 10, two sequences of losses 2.2.
    const SUMS: [f64; 8] = [1.0, 1.0, 0.75, 1.25, 2.0, 10.0, 2.2, 2.0];

    fn value(kind: BalanceKind, top_k: usize, coefficients: (f64, f64), sums: &[f64]) -> AuxValue {
        let mut config = RouterConfig::new(2, top_k);
        config.score = Score::Softmax;
        let (balance, z) = coefficients;
        aux_value(&config, &AuxConfig { balance, balance_kind: kind, z, over_ranks: false }, sums)
    }

    #[test]
    fn by_hand() {
        // E·Σ f·P = 2·(1/2·3/8 + 1/2·5/8) = 1, and z is 10/2.
        assert_eq!(value(BalanceKind::Switch, 1, (0.5, 0.1), &SUMS), AuxValue { balance: 0.5, z: 0.5 });
        assert_eq!(value(BalanceKind::Switch, 1, (0.5, 0.1), &SUMS).total(), 1.0);
        assert_eq!(value(BalanceKind::HuggingFace, 1, (0.5, 0.0), &SUMS), AuxValue { balance: 0.5, z: 0.0 });
        let sequence = BalanceKind::Sequence { length: 1 };
        assert_eq!(value(sequence, 1, (2.0, 0.0), &SUMS), AuxValue { balance: 2.2, z: 0.0 });
    }

    /// With K = 2 both experts are chosen by both tokens: Switch's is 1, Hugging Face's K.
    #[test]
    fn hugging_face_leaves_out_k() {
        let sums = [2.0, 2.0, 0.75, 1.25, 2.0, 0.0, 0.0, 0.0];
        assert_eq!(value(BalanceKind::Switch, 2, (1.0, 1.0), &sums).balance, 1.0);
        assert_eq!(value(BalanceKind::HuggingFace, 2, (1.0, 1.0), &sums).balance, 2.0);
    }

    #[test]
    fn nothing_to_add() {
        for kind in [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 4 }] {
            assert_eq!(value(kind, 1, (1.0, 1.0), &[0.0; 8]), AuxValue::default());
            let mut infinite = SUMS;
            infinite[5] = f64::INFINITY;
            assert_eq!(value(kind, 1, (0.0, 0.0), &infinite), AuxValue::default());
        }
    }
}
