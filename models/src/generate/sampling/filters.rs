//! The candidates of a draw: the filters that leave some of them, the softmax of these, and the one that a random number
//! picks.

use std::cmp::Ordering;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
}

impl Candidate {
    /// Larger logits first, then smaller ids.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// The softmax of what is left. The temperature divides no logit but its distance from the largest, which a small one
/// cannot make infinite; the order of logits is the same with and without.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    pub(super) temperature: f64,
}

impl Softmax {
    /// exp((logit − largest) / temperature), and their sum.
    pub(super) fn exponents(self, kept: &[Candidate]) -> (impl Fn(&Candidate) -> f64 + use<>, f64) {
        let most = f64::from(kept.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max));
        let exp = move |c: &Candidate| ((f64::from(c.logit) - most) / self.temperature).exp();
        let sum = kept.iter().map(&exp).sum();
        (exp, sum)
    }
}

pub(super) fn top_k(kept: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= kept.len() {
        return;
    }
    let (_, last, _) = kept.select_nth_unstable_by(k - 1, Candidate::order);
    let last = last.logit;
    kept.retain(|c| c.logit >= last);
}

/// Leaves the candidates before which, in their order, there is less than `p`; one at least.
pub(super) fn top_p(kept: &mut Vec<Candidate>, softmax: Softmax, p: f64) {
    if p >= 1.0 {
        return;
    }
    in_id_order(kept);
    let (exp, sum) = softmax.exponents(kept);
    let (mut sorted, mut before) = (0, 0.0);
    let mut left = 0;
    while left < kept.len() && (left == 0 || before < p * sum) {
        if left == sorted {
            // Most of a vocabulary is never looked at: sort a part, and twice as much if that is not enough.
            let more = (sorted + 256).min(kept.len() - sorted);
            let rest = &mut kept[sorted..];
            if more < rest.len() {
                rest.select_nth_unstable_by(more, Candidate::order);
            }
            rest[..more].sort_unstable_by(Candidate::order);
            sorted += more;
        }
        before += exp(&kept[left]);
        left += 1;
    }
    kept.truncate(left);
}

pub(super) fn min_p(kept: &mut Vec<Candidate>, softmax: Softmax, p: f64) {
    if p > 0.0 {
        let (exp, _) = softmax.exponents(kept);
        // The largest probability is that of exponent 1.
        kept.retain(|c| exp(c) >= p);
    }
}

/// Selections leave what they select in an order of their own; sums and draws are made in that of ids.
fn in_id_order(kept: &mut [Candidate]) {
    kept.sort_unstable_by_key(|c| c.id);
}

/// The candidate in whose part of the sum of all `uniform`, in `0.0..1.0`, lies.
pub(super) fn pick(kept: &mut [Candidate], softmax: Softmax, uniform: f64) -> u32 {
    in_id_order(kept);
    let (exp, sum) = softmax.exponents(kept);
    let mut left = uniform * sum;
    let mut last = kept[0].id;
    for candidate in kept.iter() {
        let weight = exp(candidate);
        if weight > 0.0 {
            last = candidate.id;
            if left < weight {
                break;
            }
            left -= weight;
        }
    }
    last
}
