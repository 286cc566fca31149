//! Straight-line arithmetic of a step, from the definitions alone: a list of slots a rank, and loops over it.

use moebius::config::{CapacityOrder, ExpertCapacity};

/// One slot: the choice that fills it, or padding.
pub type Slot = Option<(usize, usize, usize)>;

/// All ranks' choices, and limits.
#[derive(Debug, Clone)]
pub struct Problem {
    pub experts: usize,
    pub k: usize,
    pub alignment: usize,
    /// Slots from here on are dropped.
    pub capacity: Option<usize>,
    pub expert_capacity: Option<ExpertCapacity>,
    /// `[rank][t·K + k]`.
    pub ids: Vec<Vec<i64>>,
    pub weights: Vec<Vec<f64>>,
}

/// Rows that each rank holds, and the slot of each choice.
#[derive(Debug, Clone)]
pub struct Solution {
    /// `[rank][slot]`, padding included, up to the end of the last segment.
    pub slots: Vec<Vec<Slot>>,
    /// Slots that each rank needs before dropping for capacity.
    pub needed: Vec<usize>,
    /// `[rank][t·K + k]`, −1 where dropped.
    pub kept: Vec<Vec<i64>>,
    pub dropped: Vec<usize>,
    /// Choices of each expert, nothing dropped.
    pub load: Vec<usize>,
}

impl Problem {
    pub fn ranks(&self) -> usize {
        self.ids.len()
    }

    pub fn tokens(&self, rank: usize) -> usize {
        self.ids[rank].len() / self.k
    }

    /// Choices of an expert in order (source rank, token, k).
    fn candidates(&self, expert: usize) -> Vec<(usize, usize, usize)> {
        let mut all = Vec::new();
        for r in 0..self.ranks() {
            for t in 0..self.tokens(r) {
                for k in 0..self.k {
                    if self.ids[r][t * self.k + k] == expert as i64 {
                        all.push((r, t, k));
                    }
                }
            }
        }
        all
    }

    fn limited(&self, mut choices: Vec<(usize, usize, usize)>) -> Vec<(usize, usize, usize)> {
        let Some(limit) = &self.expert_capacity else { return choices };
        let total: usize = (0..self.ranks()).map(|r| self.tokens(r)).sum();
        let c = (limit.factor * (total * self.k) as f64 / self.experts as f64).ceil() as usize;
        if limit.order == CapacityOrder::Probability {
            let weight = |&(r, t, k): &(usize, usize, usize)| self.weights[r][t * self.k + k];
            choices.sort_by(|a, b| weight(b).partial_cmp(&weight(a)).expect("no NaN here").then(a.cmp(b)));
        }
        choices.truncate(c);
        choices.sort();
        choices
    }

    pub fn solve(&self) -> Solution {
        let ranks = self.ranks();
        let local = self.experts / ranks;
        let mut kept: Vec<Vec<i64>> = self.ids.iter().map(|ids| vec![-1; ids.len()]).collect();
        let (mut slots, mut needed, mut load) = (vec![Vec::new(); ranks], vec![0; ranks], Vec::new());
        for expert in 0..self.experts {
            let rank = expert / local;
            let choices = self.candidates(expert);
            load.push(choices.len());
            for choice in self.limited(choices) {
                slots[rank].push(Some(choice));
            }
            while slots[rank].len() % self.alignment != 0 {
                slots[rank].push(None);
            }
            needed[rank] = slots[rank].len();
        }
        for (rank, slots) in slots.iter_mut().enumerate() {
            slots.truncate(self.capacity.unwrap_or(needed[rank]));
            for &(r, t, k) in slots.iter().flatten() {
                kept[r][t * self.k + k] = self.ids[r][t * self.k + k];
            }
        }
        let drops = |r: usize| self.ids[r].iter().zip(&kept[r]).filter(|(before, after)| before != after).count();
        Solution { needed, load, dropped: (0..ranks).map(drops).collect(), kept, slots }
    }
}

impl Solution {
    /// Rows that dispatch writes on a rank: `value(choice)` rows of `width`, zeros in padding.
    pub fn scattered(&self, rank: usize, width: usize, value: impl Fn(usize, usize, usize, usize) -> f64) -> Vec<f64> {
        let row =
            |slot: &Slot| -> Vec<f64> { (0..width).map(|h| slot.map_or(0.0, |(r, t, k)| value(r, t, k, h))).collect() };
        self.slots[rank].iter().flat_map(row).collect()
    }

    /// Sums that combine gives rank `own`: over its tokens' slots of `value(choice, column)`.
    pub fn summed(
        &self,
        own: usize,
        tokens: usize,
        width: usize,
        value: impl Fn(usize, usize, usize, usize) -> f64,
    ) -> Vec<f64> {
        let mut out = vec![0.0; tokens * width];
        for &(r, t, k) in self.slots.iter().flatten().flatten() {
            if r == own {
                for h in 0..width {
                    out[t * width + h] += value(r, t, k, h);
                }
            }
        }
        out
    }
}
