//! Routing on the CPU: closed forms, a straight-line reference, finite differences and the goldens.

mod aux;
mod cases;
mod golden;
mod gradient;
mod reference;

use moebius::Result;
use moebius::config::{AuxConfig, BalanceKind, GroupLimit, GroupScore, Renorm, RouterConfig, Score};
use moebius::cpu::{Cpu, Element};
use moebius::kernels::{AuxBwd, AuxSums, Jitter, KeepSum, Kernels, Route, RouteBwd};
use moebius::{TensorMut, TensorRef};

/// A router of `experts` choosing `top_k`, without renormalisation.
fn router(experts: usize, top_k: usize, score: Score) -> RouterConfig {
    let mut c = RouterConfig::new(experts, top_k);
    c.score = score;
    c.renorm = None;
    c
}

fn renorm(epsilon: f64) -> Option<Renorm> {
    Some(Renorm { p: 1.0, epsilon, floor: 0.0 })
}

fn groups(groups: usize, keep: usize, rank_by: GroupScore) -> Option<GroupLimit> {
    Some(GroupLimit { groups, keep, rank_by })
}

/// Ids and weights, `[T, K]`.
fn route<T: Element>(
    c: &RouterConfig,
    logits: &[T],
    bias: Option<&[T]>,
    jitter: Option<Jitter>,
) -> Result<(Vec<i32>, Vec<T>)> {
    let (e, k) = (c.num_experts, c.top_k);
    let t = logits.len() / e;
    let (mut ids, mut weights) = (vec![-7; t * k], vec![T::default(); t * k]);
    let call = Route {
        config: c,
        logits: TensorRef::from_slice(logits, &[t, e])?,
        selection_bias: bias.map(|b| TensorRef::from_slice(b, &[b.len()])).transpose()?,
        jitter,
        reporting: moebius::ep::Reporting::Immediate,
        ids: TensorMut::from_slice(&mut ids, &[t, k])?,
        weights: TensorMut::from_slice(&mut weights, &[t, k])?,
    };
    Cpu::new().route(&(), call)?;
    Ok((ids, weights))
}

/// Gradient of the logits, `[T, E]`.
fn route_bwd<T: Element>(
    c: &RouterConfig,
    logits: &[T],
    ids: &[i32],
    d_weights: &[T],
    jitter: Option<Jitter>,
    aux: Option<(&AuxConfig, &[T], f64)>,
) -> Result<Vec<T>> {
    let (e, k) = (c.num_experts, c.top_k);
    let t = logits.len() / e;
    let mut d_logits = vec![T::default(); t * e];
    let call = RouteBwd {
        config: c,
        logits: TensorRef::from_slice(logits, &[t, e])?,
        jitter,
        ids: TensorRef::from_slice(ids, &[t, k])?,
        d_weights: TensorRef::from_slice(d_weights, &[t, k])?,
        aux: match aux {
            None => None,
            Some((aux, sums, d_loss)) => {
                Some(AuxBwd { aux, sums: TensorRef::from_slice(sums, &[sums.len()])?, d_loss })
            }
        },
        d_logits: TensorMut::from_slice(&mut d_logits, &[t, e])?,
    };
    Cpu::new().route_bwd(&(), call)?;
    Ok(d_logits)
}

/// The sums, `[2·E + 4]`.
fn aux_sums<T: Element>(c: &RouterConfig, aux: &AuxConfig, logits: &[T], ids: &[i32]) -> Result<Vec<T>> {
    let (e, k) = (c.num_experts, c.top_k);
    let t = logits.len() / e;
    let mut out = vec![T::default(); 2 * e + 4];
    let call = AuxSums {
        config: c,
        aux,
        logits: TensorRef::from_slice(logits, &[t, e])?,
        ids: TensorRef::from_slice(ids, &[t, k])?,
        out: TensorMut::from_slice(&mut out, &[2 * e + 4])?,
    };
    Cpu::new().aux_sums(&(), call)?;
    Ok(out)
}

fn keep_sum<T: Element>(k: usize, weights: &[T], kept: &[i32], grad: Option<&[T]>) -> Result<Vec<T>> {
    let dims = [weights.len() / k, k];
    let mut out = vec![T::default(); weights.len()];
    let call = KeepSum {
        weights: TensorRef::from_slice(weights, &dims)?,
        kept: TensorRef::from_slice(kept, &dims)?,
        grad: grad.map(|g| TensorRef::from_slice(g, &dims)).transpose()?,
        out: TensorMut::from_slice(&mut out, &dims)?,
    };
    Cpu::new().keep_sum(&(), call)?;
    Ok(out)
}

fn balance(kind: BalanceKind, balance: f64, z: f64) -> AuxConfig {
    let mut aux = AuxConfig::default();
    (aux.balance_kind, aux.balance, aux.z) = (kind, balance, z);
    aux
}

/// Seeded numbers for tests.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) ^ self.0
    }
    /// Uniform in −1..1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 20) as f64 / (1u64 << 43) as f64 - 1.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 20) as usize % n
    }
    /// Spread like logits, about ±3.
    fn logits(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| 1.5 * (self.unit() + self.unit() + self.unit())).collect()
    }
}

fn close(name: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (g - w).abs();
        assert!(error <= tolerance, "{name}[{i}]: {g} instead of {w}, off by {error:e} (tolerance {tolerance:e})");
    }
}

/// ‖a − b‖ / ‖b‖.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

fn widen(v: &[f32]) -> Vec<f64> {
    v.iter().map(|&x| f64::from(x)).collect()
}
