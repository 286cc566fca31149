//! Scores from logits.

use crate::cpu::element::Acc;

/// exp(l − max), 1 at the maximum also where that is infinite: +∞ logits share the weight, as do all −∞ ones.
pub(super) fn exp_below<A: Acc>(l: A, max: A) -> A {
    if l == max { A::one() } else { (l - max).exp() }
}

pub(super) fn max_of<A: Acc>(values: impl Iterator<Item = A>) -> A {
    values.fold(A::neg_infinity(), A::max)
}

/// Writes softmax(logits); gives log Σ exp.
pub(super) fn softmax<A: Acc>(logits: &[A], out: &mut [A]) -> f64 {
    let max = max_of(logits.iter().copied());
    let mut sum = 0.0;
    for (o, &l) in out.iter_mut().zip(logits) {
        *o = exp_below(l, max);
        sum += o.as_f64();
    }
    let total = A::of(sum);
    for o in out.iter_mut() {
        *o /= total;
    }
    max.as_f64() + sum.ln()
}

/// 1 / (1 + exp(−l)), exact to rounding also where exp(−l) overflows.
pub(super) fn sigmoid<A: Acc>(l: A) -> A {
    let small = (-l.abs()).exp();
    if l < A::zero() { small / (A::one() + small) } else { A::one() / (A::one() + small) }
}

/// Softmax over the logits near their maximum, as PhiMoE's sparsemixer has it: l stays if
/// (max − l) / max(|l|, max) ≤ 2ε. `without` is left out of maximum and softmax; masked logits get 0.
pub(super) fn masked_softmax<A: Acc>(logits: &[A], epsilon: f64, without: Option<usize>, out: &mut [A]) {
    let present = |e: usize| Some(e) != without;
    let max = max_of(logits.iter().enumerate().filter(|(e, _)| present(*e)).map(|(_, &l)| l));
    let threshold = A::of(2.0 * epsilon);
    let mut sum = 0.0;
    for (e, (o, &l)) in out.iter_mut().zip(logits).enumerate() {
        // 0/0 and ∞/∞ keep the logit, as in the source; its exponential is then what the limit gives.
        let far = (max - l) / l.abs().max(max) > threshold;
        *o = if present(e) && !far { exp_below(l, max) } else { A::zero() };
        sum += o.as_f64();
    }
    let total = A::of(sum);
    for o in out.iter_mut() {
        *o /= total;
    }
}
