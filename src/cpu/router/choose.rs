//! The choice of experts: scores, selection bias, group limit, top-k.

use std::cmp::Ordering;

use crate::config::{GroupLimit, GroupScore, RouterConfig, Score};
use crate::cpu::element::Acc;

use super::jitter::TokenNoise;
use super::score;

/// Working memory of one token after another.
pub(super) struct Chooser<'a, A> {
    config: &'a RouterConfig,
    bias: Option<&'a [A]>,
    /// Logits of the token, noise applied.
    pub(super) logits: Vec<A>,
    /// Scores of all experts, for [`Score::Softmax`] and [`Score::Sigmoid`]; else free to use.
    pub(super) scores: Vec<A>,
    /// The chosen experts, best first.
    pub(super) order: Vec<u32>,
    ranking: Vec<A>,
    group_ranking: Vec<A>,
    group_order: Vec<u32>,
}

impl<'a, A: Acc> Chooser<'a, A> {
    pub(super) fn new(config: &'a RouterConfig, bias: Option<&'a [A]>) -> Self {
        let e = config.num_experts;
        let row = || vec![A::zero(); e];
        Self {
            config,
            bias,
            logits: row(),
            scores: row(),
            ranking: row(),
            order: Vec::with_capacity(e),
            group_ranking: Vec::new(),
            group_order: Vec::new(),
        }
    }

    /// Takes a token's logits and computes its scores.
    pub(super) fn load(&mut self, logits: &[A], noise: Option<TokenNoise>) {
        self.logits.copy_from_slice(logits);
        if let Some(noise) = noise {
            for (e, l) in self.logits.iter_mut().enumerate() {
                *l *= A::of(noise.factor(e));
            }
        }
        match self.config.score {
            Score::Softmax => {
                score::softmax(&self.logits, &mut self.scores);
            }
            Score::Sigmoid => {
                for (s, &l) in self.scores.iter_mut().zip(&self.logits) {
                    *s = score::sigmoid(l);
                }
            }
            Score::TopkSoftmax | Score::TopkSigmoid | Score::SparseMixer { .. } => {}
        }
    }

    /// Takes over a choice made earlier.
    pub(super) fn set_chosen(&mut self, ids: &[i32]) {
        self.order.clear();
        self.order.extend(ids.iter().map(|&id| id as u32));
    }

    /// Fills `order`.
    pub(super) fn choose(&mut self) {
        let by_score = self.scored();
        let base = if by_score { &self.scores } else { &self.logits };
        self.ranking.copy_from_slice(base);
        if let Some(bias) = self.bias {
            for (r, &b) in self.ranking.iter_mut().zip(bias) {
                *r += b;
            }
        }
        for r in self.ranking.iter_mut().filter(|r| r.is_nan()) {
            // Only ∞ − ∞ of a logit and its bias: not a number to prefer.
            *r = A::neg_infinity();
        }
        self.order.clear();
        match self.config.groups {
            None => self.order.extend(0..self.config.num_experts as u32),
            Some(limit) => self.limit_to_groups(limit),
        }
        best(&self.ranking, self.config.top_k, &mut self.order);
    }

    /// Repeats forward's effect of the groups on the scores, for backward: without a selection bias alone.
    pub(super) fn zero_other_groups(&mut self) {
        if let Some(limit) = self.config.groups
            && self.zeroes_scores(limit)
        {
            self.ranking.copy_from_slice(&self.scores);
            let size = self.config.num_experts / limit.groups;
            self.rank_groups(limit, size);
            for &g in &self.group_order[limit.keep..] {
                self.scores[g as usize * size..][..size].fill(A::zero());
            }
        }
    }

    fn scored(&self) -> bool {
        matches!(self.config.score, Score::Softmax | Score::Sigmoid)
    }

    /// DeepSeek-V2 takes weights from the masked scores. Where a bias is added for choosing, weights come from the
    /// scores as they were (DeepSeek-V3).
    fn zeroes_scores(&self, limit: GroupLimit) -> bool {
        limit.rank_by == GroupScore::Max && self.scored() && !self.config.selection_bias
    }

    fn limit_to_groups(&mut self, limit: GroupLimit) {
        let size = self.config.num_experts / limit.groups;
        self.rank_groups(limit, size);
        // A logit of 0 would beat negative ones: there, others cannot be chosen either way of ranking.
        let choosable = limit.rank_by == GroupScore::Max && self.scored();
        let zeroed = self.zeroes_scores(limit);
        for (place, &g) in self.group_order.iter().enumerate() {
            let first = g as usize * size;
            let kept = place < limit.keep;
            if kept || choosable {
                self.order.extend(first as u32..(first + size) as u32);
            }
            if !kept && choosable {
                self.ranking[first..first + size].fill(A::zero());
            }
            if !kept && zeroed {
                self.scores[first..first + size].fill(A::zero());
            }
        }
    }

    /// Orders all groups, the kept ones first.
    fn rank_groups(&mut self, limit: GroupLimit, size: usize) {
        self.group_ranking.clear();
        self.group_ranking.extend(self.ranking.chunks_exact(size).map(|group| {
            let (mut first, mut second) = (A::neg_infinity(), A::neg_infinity());
            for &s in group {
                if s > first {
                    second = first;
                    first = s;
                } else if s > second {
                    second = s;
                }
            }
            match limit.rank_by {
                GroupScore::Top2Sum if size > 1 => first + second,
                _ => first,
            }
        }));
        for r in self.group_ranking.iter_mut().filter(|r| r.is_nan()) {
            *r = A::neg_infinity();
        }
        self.group_order.clear();
        self.group_order.extend(0..limit.groups as u32);
        best(&self.group_ranking, limit.groups, &mut self.group_order);
    }
}

/// Leaves the best `k` of `candidates`, best first, the lower index first among equals. `values` holds no NaN.
pub(super) fn best<A: Acc>(values: &[A], k: usize, candidates: &mut Vec<u32>) {
    let order = |a: &u32, b: &u32| -> Ordering {
        let (x, y) = (values[*a as usize], values[*b as usize]);
        y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    if 0 < k && k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, order);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(order);
}
