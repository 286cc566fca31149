//! Experts of tokens, seeded.

use crate::Workload;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The ways that tokens choose.
pub const ROUTINGS: [&str; 2] = ["uniform", "zipf"];

/// Distinct experts of each of a rank's tokens: all alike, or expert e with a probability of 1 / (e + 1), which makes
/// the first rank's hot.
pub fn experts(w: &Workload, routing: &str, rank: usize) -> Vec<i32> {
    let mut random = Random(rank as u64 + 1);
    let weight = |e: usize| if routing == "zipf" { 1.0 / (e + 1) as f64 } else { 1.0 };
    let sums: Vec<f64> = (0..w.experts)
        .scan(0.0, |sum, e| {
            *sum += weight(e);
            Some(*sum)
        })
        .collect();
    let total = sums.last().copied().unwrap_or(1.0);
    let mut ids = Vec::with_capacity(w.tokens * w.top_k);
    for _ in 0..w.tokens {
        let first = ids.len();
        while ids.len() < first + w.top_k {
            let at = random.uniform() * total;
            let e = sums.partition_point(|sum| *sum <= at).min(w.experts - 1) as i32;
            if !ids[first..].contains(&e) {
                ids.push(e);
            }
        }
    }
    ids
}

/// Of a rank's choices: pairs of a token and a rank that has an expert of its, and of a token and an expert; each on
/// this rank and on others.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pairs {
    pub own_rank: usize,
    pub other_ranks: usize,
    pub own_experts: usize,
    pub other_experts: usize,
}

pub fn pairs(w: &Workload, ids: &[i32], rank: usize, ranks: usize) -> Pairs {
    let local = w.experts / ranks;
    let mut pairs = Pairs::default();
    for token in ids.chunks_exact(w.top_k) {
        let mut at: Vec<usize> = token.iter().map(|e| *e as usize / local).collect();
        let own = at.iter().filter(|r| **r == rank).count();
        pairs.own_experts += own;
        pairs.other_experts += at.len() - own;
        at.sort_unstable();
        at.dedup();
        let own = usize::from(at.contains(&rank));
        pairs.own_rank += own;
        pairs.other_ranks += at.len() - own;
    }
    pairs
}
