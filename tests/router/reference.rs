//! Every family's formula, straight from its source, one token at a time in f64, and the same as a `RouterConfig`.
//! Then random cases of one against the other.

use moebius::cpu::Cpu;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::devices::cases;
use super::*;

cases!(f32_is_the_reference);

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Family {
    /// A: Mixtral, Qwen3-MoE.
    Mixtral,
    /// A with DBRX's p-norm.
    Dbrx,
    /// B: Qwen2-MoE, OLMoE.
    Olmoe,
    /// C: Granite, gpt-oss.
    GptOss,
    /// D: DeepSeek-V2, group-limited.
    DeepSeekV2,
    /// E: DeepSeek-V3, Kimi-K2, GLM-4.
    DeepSeekV3,
    /// F: MiniMax-M2.
    MiniMaxM2,
    /// F: LFM2.
    Lfm2,
    /// G: Ernie 4.5.
    Ernie,
    /// H: Llama-4.
    Llama4,
    /// I: PhiMoE.
    PhiMoe,
}

pub const FAMILIES: [Family; 11] = [
    Family::Mixtral,
    Family::Dbrx,
    Family::Olmoe,
    Family::GptOss,
    Family::DeepSeekV2,
    Family::DeepSeekV3,
    Family::MiniMaxM2,
    Family::Lfm2,
    Family::Ernie,
    Family::Llama4,
    Family::PhiMoe,
];

pub const DBRX_P: f64 = 2.0;
pub const SCALING: f64 = 2.5;
pub const PHI_EPS: f64 = 0.15;
pub const ERNIE_MIN: f64 = 0.3;

impl Family {
    pub fn has_bias(self) -> bool {
        matches!(self, Family::DeepSeekV3 | Family::MiniMaxM2 | Family::Lfm2 | Family::Ernie)
    }

    /// `groups` (n_group, topk_group) matter to the DeepSeeks only.
    pub fn config(self, e: usize, k: usize, (n, keep): (usize, usize)) -> RouterConfig {
        let mut c = match self {
            Family::Mixtral | Family::Olmoe | Family::Dbrx | Family::DeepSeekV2 | Family::Ernie => {
                router(e, k, Score::Softmax)
            }
            Family::GptOss => router(e, k, Score::TopkSoftmax),
            Family::DeepSeekV3 | Family::MiniMaxM2 | Family::Lfm2 => router(e, k, Score::Sigmoid),
            Family::Llama4 => router(e, k, Score::TopkSigmoid),
            Family::PhiMoe => router(e, 2, Score::SparseMixer { epsilon: PHI_EPS }),
        };
        c.selection_bias = self.has_bias();
        c.renorm = match self {
            Family::Mixtral | Family::MiniMaxM2 => renorm(0.0),
            Family::Dbrx => Some(Renorm { p: DBRX_P, epsilon: 0.0, floor: 0.0 }),
            Family::DeepSeekV3 => renorm(1e-20),
            Family::Lfm2 => renorm(1e-6),
            Family::Ernie => Some(Renorm { p: 1.0, epsilon: 0.0, floor: ERNIE_MIN }),
            _ => None,
        };
        match self {
            Family::DeepSeekV2 => (c.groups, c.scale) = (groups(n, keep, GroupScore::Max), SCALING),
            Family::DeepSeekV3 => (c.groups, c.scale) = (groups(n, keep, GroupScore::Top2Sum), SCALING),
            Family::Lfm2 => c.scale = SCALING,
            _ => {}
        }
        c
    }

    /// (expert, weight) of one token, best first, and by how much the choice was made.
    pub fn route(self, l: &[f64], bias: &[f64], k: usize, grouping: (usize, usize)) -> (Vec<(usize, f64)>, f64) {
        let p = softmax(l);
        let s: Vec<f64> = l.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
        let plus = |v: &[f64]| -> Vec<f64> { v.iter().zip(bias).map(|(v, b)| v + b).collect() };
        let of = |ids: &[usize], v: &[f64]| -> Vec<f64> { ids.iter().map(|&i| v[i]).collect() };
        let sum = |w: &[f64]| w.iter().sum::<f64>();
        let (ids, weights, margin) = match self {
            Family::Mixtral => {
                let (i, m) = topk(&p, k);
                let w = of(&i, &p);
                (i, w.iter().map(|x| x / sum(&w)).collect(), m)
            }
            Family::Dbrx => {
                let (i, m) = topk(&p, k);
                let w = of(&i, &p);
                let norm = w.iter().map(|x| x.powf(DBRX_P)).sum::<f64>().powf(1.0 / DBRX_P);
                (i, w.iter().map(|x| x / norm).collect(), m)
            }
            Family::Olmoe => {
                let (i, m) = topk(&p, k);
                let w = of(&i, &p);
                (i, w, m)
            }
            Family::GptOss => {
                let (i, m) = topk(l, k);
                let w = softmax(&of(&i, l));
                (i, w, m)
            }
            Family::DeepSeekV2 => {
                let best = |g: &[f64]| g.iter().copied().fold(f64::MIN, f64::max);
                let (masked, m1) = limit(&p, &p, grouping, best, 0.0);
                let (i, m2) = topk(&masked, k);
                let w = of(&i, &masked).iter().map(|x| x * SCALING).collect();
                (i, w, m1.min(m2))
            }
            Family::DeepSeekV3 => {
                let two = |g: &[f64]| sum(&of(&topk(g, 2.min(g.len())).0, g));
                let c = plus(&s);
                let (masked, m1) = limit(&c, &c, grouping, two, f64::NEG_INFINITY);
                let (i, m2) = topk(&masked, k);
                let w = of(&i, &s);
                (i, w.iter().map(|x| x / (sum(&w) + 1e-20) * SCALING).collect(), m1.min(m2))
            }
            Family::MiniMaxM2 => {
                let (i, m) = topk(&plus(&s), k);
                let w = of(&i, &s);
                (i, w.iter().map(|x| x / sum(&w)).collect(), m)
            }
            Family::Lfm2 => {
                let (i, m) = topk(&plus(&s), k);
                let w = of(&i, &s);
                (i, w.iter().map(|x| x / (sum(&w) + 1e-6) * SCALING).collect(), m)
            }
            Family::Ernie => {
                let (i, m) = topk(&plus(&p), k);
                let w = of(&i, &p);
                (i, w.iter().map(|x| x / sum(&w).max(ERNIE_MIN)).collect(), m)
            }
            Family::Llama4 => {
                let (i, m) = topk(l, k);
                let w = of(&i, &s);
                (i, w, m)
            }
            Family::PhiMoe => sparse_mixer(l),
        };
        (ids.into_iter().zip(weights).collect(), margin)
    }
}

fn softmax(l: &[f64]) -> Vec<f64> {
    let max = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = l.iter().map(|l| (l - max).exp()).sum();
    l.iter().map(|l| (l - max).exp() / sum).collect()
}

/// Indices of the k largest, the lower index first among equals, and the distance to the next.
fn topk(v: &[f64], k: usize) -> (Vec<usize>, f64) {
    let mut order: Vec<usize> = (0..v.len()).collect();
    order.sort_by(|&a, &b| v[b].partial_cmp(&v[a]).unwrap()); // stable; zeros of both signs are equal
    let margin = order.windows(2).take(k).map(|w| v[w[0]] - v[w[1]]).fold(f64::INFINITY, f64::min);
    order.truncate(k);
    (order, margin)
}

fn limit(
    v: &[f64],
    by: &[f64],
    (n, keep): (usize, usize),
    rank: impl Fn(&[f64]) -> f64,
    other: f64,
) -> (Vec<f64>, f64) {
    let size = v.len() / n;
    let ranks: Vec<f64> = by.chunks(size).map(rank).collect();
    let (kept, margin) = topk(&ranks, keep);
    (v.iter().enumerate().map(|(e, &x)| if kept.contains(&(e / size)) { x } else { other }).collect(), margin)
}

fn sparse_mixer(l: &[f64]) -> (Vec<usize>, Vec<f64>, f64) {
    let mut current = l.to_vec();
    let (mut ids, mut weights, mut margin) = (vec![], vec![], f64::INFINITY);
    for _ in 0..2 {
        let (first, m) = topk(&current, 1);
        let (i, max) = (first[0], current[first[0]]);
        let far: Vec<f64> = l.iter().map(|l| (max - l) / l.abs().max(max)).collect();
        let edge = far.iter().map(|f| (f - 2.0 * PHI_EPS).abs()).fold(f64::INFINITY, f64::min);
        let masked: Vec<f64> =
            current.iter().zip(&far).map(|(&l, &f)| if f > 2.0 * PHI_EPS { f64::NEG_INFINITY } else { l }).collect();
        weights.push(softmax(&masked)[i]);
        ids.push(i);
        margin = margin.min(m).min(edge);
        current[i] = f64::NEG_INFINITY;
    }
    (ids, weights, margin)
}

#[derive(Debug)]
pub struct Case {
    pub family: Family,
    pub config: RouterConfig,
    pub grouping: (usize, usize),
    pub logits: Vec<f64>,
    pub bias: Vec<f64>,
}

impl Case {
    /// `coarse`: logits from a few values, so that ties are common.
    pub fn new(family: Family, tokens: usize, seed: u64, coarse: bool) -> Self {
        let mut n = Numbers::new(seed);
        let shapes = [(8, 4, 2), (16, 4, 2), (12, 3, 1), (6, 1, 1), (32, 8, 3), (5, 5, 4), (2, 1, 1)];
        let (e, groups, keep) = shapes[n.below(shapes.len())];
        let most = if matches!(family, Family::DeepSeekV2 | Family::DeepSeekV3) { e / groups * keep } else { e };
        let k = if family == Family::PhiMoe { 2 } else { 1 + n.below(most.min(8)) };
        let mut logits = n.logits(tokens * e);
        if coarse {
            logits.iter_mut().for_each(|l| *l = l.round());
        }
        let bias = if family.has_bias() { (0..e).map(|_| 0.2 * n.unit()).collect() } else { vec![] };
        Self { family, config: family.config(e, k, (groups, keep)), grouping: (groups, keep), logits, bias }
    }

    fn check<D: Target>(&self, d: &On<D>, tolerance: f64, margin: f64) {
        let (e, k) = (self.config.num_experts, self.config.top_k);
        let rounded = |v: &[f64]| -> Vec<f64> {
            v.iter().map(|&v| if d.dtype == DType::F64 { v } else { f64::from(v as f32) }).collect()
        };
        let (logits, bias) = (rounded(&self.logits), rounded(&self.bias));
        let (ids, weights) = d.route(&self.config, &logits, self.family.has_bias().then_some(&bias[..]), None).unwrap();
        for (t, row) in logits.chunks(e).enumerate() {
            let (want, found_margin) = self.family.route(row, &bias, k, self.grouping);
            if found_margin < margin {
                continue;
            }
            let got: Vec<usize> = ids[t * k..][..k].iter().map(|&i| i as usize).collect();
            assert_eq!(got, want.iter().map(|w| w.0).collect::<Vec<_>>(), "ids of token {t} of {self:?}");
            for (w, (_, want)) in weights[t * k..][..k].iter().zip(want) {
                let error = (w - want).abs();
                assert!(error <= tolerance * want.max(1.0), "token {t}: {w} instead of {want}; {self:?}");
            }
        }
    }
}

/// Random cases of a seed.
fn each(seed: u8, check: impl Fn(&Case), coarse: impl Strategy<Value = bool>) {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &devices::seed::bytes(u64::from(seed)));
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(600) };
    let cases = (prop::sample::select(&FAMILIES[..]), 0usize..150, any::<u64>(), coarse);
    let outcome = TestRunner::new_with_rng(config, rng).run(&cases, |(family, tokens, seed, coarse)| {
        check(&Case::new(family, tokens, seed, coarse));
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// In f64: a few exp, sums of at most 32 terms and a few products, each 2⁻⁵³ relative: below 1e-14. Ties decide
/// by id on both sides, so no token is left out.
#[test]
fn f64_is_the_reference() {
    let device = Cpu::poisoning();
    each(1, |case| case.check(&On::wide(&device), 1e-14, -1.0), any::<bool>());
}

/// In f32: about ten roundings of 2⁻²⁴ on values up to the scale 2.5: 1e-6. A choice that f64 makes by less than
/// 1e-6 may fall otherwise in f32.
fn f32_is_the_reference<D: Target>(device: &D) {
    each(2, |case| case.check(&On::f32(device), 1e-6, 1e-6), Just(false));
}
