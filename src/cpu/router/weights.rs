//! Weights from the scores of the chosen experts, and the gradient of their renormalization.

use crate::config::{Renorm, RouterConfig, Score};
use crate::cpu::element::Acc;

use super::choose::Chooser;
use super::score::{exp_below, masked_softmax, max_of, sigmoid};

/// Weights of the chosen experts before renormalization, of a token whose choice is made.
pub(super) fn raw_weights<A: Acc>(config: &RouterConfig, row: &mut Chooser<'_, A>, out: &mut [A]) {
    let Chooser { logits, scores, order: chosen, .. } = row;
    match config.score {
        Score::Softmax | Score::Sigmoid => {
            for (w, &e) in out.iter_mut().zip(chosen.iter()) {
                *w = scores[e as usize];
            }
        }
        Score::TopkSoftmax => {
            let max = max_of(chosen.iter().map(|&e| logits[e as usize]));
            let mut sum = 0.0;
            for (w, &e) in out.iter_mut().zip(chosen.iter()) {
                *w = exp_below(logits[e as usize], max);
                sum += w.as_f64();
            }
            let total = A::of(sum);
            for w in out.iter_mut() {
                *w /= total;
            }
        }
        Score::TopkSigmoid => {
            for (w, &e) in out.iter_mut().zip(chosen.iter()) {
                *w = sigmoid(logits[e as usize]);
            }
        }
        Score::SparseMixer { epsilon } => {
            let mut without = None;
            for (w, &e) in out.iter_mut().zip(chosen.iter()) {
                masked_softmax(logits, epsilon, without, scores);
                *w = scores[e as usize];
                without = Some(e as usize);
            }
        }
    }
}

/// Writes the weights of a token whose choice is made.
pub(super) fn write<A: Acc>(config: &RouterConfig, row: &mut Chooser<'_, A>, out: &mut [A]) {
    raw_weights(config, row, out);
    let divisor = config.renorm.map_or(Divisor::ONE, |r| Divisor::new(&r, out));
    for w in out.iter_mut() {
        *w = A::of(divisor.divide(w.as_f64()) * config.scale);
    }
}

/// max((Σ wᵖ)^(1/p) + epsilon, floor) of one token.
pub(super) struct Divisor {
    p: f64,
    norm: f64,
    value: f64,
    floored: bool,
}

impl Divisor {
    pub(super) const ONE: Self = Self { p: 1.0, norm: 1.0, value: 1.0, floored: true };

    pub(super) fn new<A: Acc>(renorm: &Renorm, weights: &[A]) -> Self {
        let p = renorm.p;
        let values = || weights.iter().map(|v| v.as_f64());
        let norm = if p == 1.0 {
            values().sum::<f64>()
        } else {
            // Relative to the largest, so that no power underflows.
            match values().fold(0.0, f64::max) {
                0.0 => 0.0,
                max => max * values().map(|w| (w / max).powf(p)).sum::<f64>().powf(1.0 / p),
            }
        };
        let value = norm + renorm.epsilon;
        Self { p, norm, value: value.max(renorm.floor), floored: value < renorm.floor }
    }

    /// w over the divisor. Weights that are all zero stay zero.
    pub(super) fn divide(&self, w: f64) -> f64 {
        if self.value > 0.0 { w / self.value } else { 0.0 }
    }

    /// Turns the gradient of the quotients into that of the weights.
    pub(super) fn backward<A: Acc>(&self, weights: &[A], grad: &mut [f64]) {
        let dot: f64 = grad.iter().zip(weights).map(|(g, w)| g * w.as_f64()).sum();
        for (g, w) in grad.iter_mut().zip(weights) {
            // d norm / d w = (w / norm)^(p − 1); at w = 0 it is 0 but for p = 1 (for p < 1 infinite: taken as 0).
            let slope = match w.as_f64() {
                _ if self.floored => 0.0,
                _ if self.p == 1.0 => 1.0,
                w if w > 0.0 => (w / self.norm).powf(self.p - 1.0),
                _ => 0.0,
            };
            *g = self.divide(*g) - self.divide(self.divide(dot)) * slope;
        }
    }
}
