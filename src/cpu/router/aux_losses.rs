//! Sums from which the auxiliary losses follow, and the losses' gradient.
//!
//! Partial sums are made over blocks of fixed size ([`AUX_PARTIAL_TOKENS`]) and added in their order: bit-identical
//! whatever the threads do.

use rayon::prelude::*;

use crate::aux_loss::{self, Sums};
use crate::config::{BalanceKind, RouterConfig, Score};
use crate::cpu::Cpu;
use crate::cpu::element::{Acc, with_acc};
use crate::error::{Error, Result};
use crate::kernels::{AuxBwd, AuxSums, AuxTotal, Origin, Scalar};
use crate::tensor::TensorRef;

use super::choose::best;
use super::score::{sigmoid, softmax};
use super::{check, check_ids, check_logits};
use crate::cpu::heuristics::{AUX_PARTIAL_TOKENS, TASK_TOKENS};

pub(in crate::cpu) fn aux_sums(call: AuxSums<'_, Cpu>) -> Result<()> {
    with_acc!("aux_sums", "tensor logits", call.logits.dtype(), A => aux_sums_as::<A>(call))
}

fn aux_sums_as<A: Acc>(call: AuxSums<'_, Cpu>) -> Result<()> {
    const CALL: &str = "aux_sums";
    let (config, kind) = (call.config, call.aux.balance_kind);
    config.validate()?;
    call.aux.validate()?;
    let (e, k) = (config.num_experts, config.top_k);
    let t = check_logits(CALL, config, call.logits)?;
    check(CALL, "out", A::DTYPE, &[Sums::len(e)], call.out.dtype(), call.out.dims())?;
    let ids = check_ids(CALL, config, t, call.origin, call.ids)?;
    let logits = call.logits.as_slice::<A>()?;

    let block = match kind {
        BalanceKind::Sequence { length } => length.min(t.max(1)),
        BalanceKind::Switch | BalanceKind::HuggingFace => AUX_PARTIAL_TOKENS,
    };
    let partial = |(logits, ids): (&[A], &[i32])| Partial::new(config, kind, logits, ids);
    let partials: Vec<Partial> = if t <= TASK_TOKENS {
        logits.chunks(block * e).zip(ids.chunks(block * k)).map(partial).collect()
    } else {
        logits.par_chunks(block * e).zip(ids.par_chunks(block * k)).map(partial).collect()
    };

    let mut sums = vec![0.0; Sums::len(e)];
    for p in &partials {
        let of_sequence = match kind {
            BalanceKind::Sequence { .. } => [p.sequence_loss(k), 1.0],
            BalanceKind::Switch | BalanceKind::HuggingFace => [0.0, 0.0],
        };
        let [sequence_loss, sequences] = of_sequence;
        let values = p.counts.iter().chain(&p.scores).copied().chain([p.tokens, p.z, sequence_loss, sequences]);
        sums.iter_mut().zip(values).for_each(|(s, v)| *s += v);
    }
    for (o, s) in call.out.into_slice::<A>()?.iter_mut().zip(sums) {
        *o = A::of(s);
    }
    Ok(())
}

pub(in crate::cpu) fn aux_total(call: AuxTotal<'_, Cpu>) -> Result<()> {
    with_acc!("aux_total", "tensor sums", call.sums.dtype(), A => aux_total_as::<A>(call))
}

fn aux_total_as<A: Acc>(call: AuxTotal<'_, Cpu>) -> Result<()> {
    const CALL: &str = "aux_total";
    call.config.validate()?;
    call.aux.validate()?;
    let sums = sums_of::<A>(CALL, "sums", call.config, call.sums)?;
    let total = aux_loss::aux_value(call.config, call.aux, &sums).total();
    Scalar::Device(call.out.as_ref()).check(CALL, "out", A::DTYPE)?;
    call.out.into_slice::<A>()?[0] = A::of(total);
    Ok(())
}

/// The sums, checked.
fn sums_of<A: Acc>(
    call: &'static str,
    name: &str,
    config: &RouterConfig,
    sums: TensorRef<'_, Cpu>,
) -> Result<Vec<f64>> {
    check(call, name, A::DTYPE, &[Sums::len(config.num_experts)], sums.dtype(), sums.dims())?;
    Ok(sums.as_slice::<A>()?.iter().map(|v| v.as_f64()).collect())
}

/// Sums over a block of tokens, which is one sequence where the loss is over sequences.
struct Partial {
    counts: Vec<f64>,
    scores: Vec<f64>,
    tokens: f64,
    z: f64,
}

impl Partial {
    fn new<A: Acc>(config: &RouterConfig, kind: BalanceKind, logits: &[A], ids: &[i32]) -> Self {
        let (e, k) = (config.num_experts, config.top_k);
        let mut sums = Self { counts: vec![0.0; e], scores: vec![0.0; e], tokens: 0.0, z: 0.0 };
        let mut soft = vec![A::zero(); e];
        let mut order = Vec::with_capacity(e);
        let sigmoids = normalized_sigmoid(config, kind);
        for (logits, ids) in logits.chunks_exact(e).zip(ids.chunks_exact(k)) {
            let log_sum = softmax(logits, &mut soft);
            sums.tokens += 1.0;
            sums.z += log_sum * log_sum;
            if kind == BalanceKind::HuggingFace {
                for p in soft.iter_mut().filter(|p| p.is_nan()) {
                    *p = A::zero();
                }
                order.clear();
                order.extend(0..e as u32);
                best(&soft, k, &mut order);
                order.iter().for_each(|&e| sums.counts[e as usize] += 1.0);
            } else {
                ids.iter().for_each(|&e| sums.counts[e as usize] += 1.0);
            }
            if sigmoids {
                normalize(logits, &mut soft);
            }
            sums.scores.iter_mut().zip(&soft).for_each(|(s, p)| *s += p.as_f64());
        }
        sums
    }

    fn sequence_loss(&self, k: usize) -> f64 {
        aux_loss::balance(&self.counts, &self.scores, self.tokens * k as f64, self.tokens)
    }
}

/// Hugging Face's loss takes the softmax whatever the router's scores are.
fn normalized_sigmoid(config: &RouterConfig, kind: BalanceKind) -> bool {
    kind != BalanceKind::HuggingFace && matches!(config.score, Score::Sigmoid | Score::TopkSigmoid)
}

/// Sigmoids over their sum, which it gives; zeros where all are.
fn normalize<A: Acc>(logits: &[A], out: &mut [A]) -> f64 {
    let mut sum = 0.0;
    for (o, &l) in out.iter_mut().zip(logits) {
        *o = sigmoid(l);
        sum += o.as_f64();
    }
    if sum > 0.0 {
        out.iter_mut().for_each(|o| *o /= A::of(sum));
    }
    sum
}

/// Gradient of the losses: per token, that of a linear function of its scores, plus z-loss.
pub(super) struct AuxGrad {
    experts: usize,
    /// Gradient with respect to a token's scores, `[S, E]`, by sequence; empty without a balance loss.
    by_sequence: Vec<f64>,
    /// Tokens a sequence.
    length: usize,
    sigmoids: bool,
    /// Of a token's (log Σ exp)².
    z: f64,
}

impl AuxGrad {
    pub(super) fn new<A: Acc>(
        call: &'static str,
        config: &RouterConfig,
        aux: &AuxBwd<'_, Cpu>,
        ids: &[i32],
        origin: Origin,
    ) -> Result<Self> {
        let (e, k) = (config.num_experts, config.top_k);
        aux.aux.validate()?;
        let values = sums_of::<A>(call, "aux.sums", config, aux.sums)?;
        let sums = Sums::new(&values, e);
        aux.d_loss.check(call, "aux.d_loss", A::DTYPE)?;
        let d_loss = match aux.d_loss {
            Scalar::Host(value) => value,
            Scalar::Device(tensor) => tensor.as_slice::<A>()?[0].as_f64(),
        };
        let kind = aux.aux.balance_kind;
        let no_sequences = matches!(kind, BalanceKind::Sequence { .. }) && sums.sequences <= 0.0;
        if (sums.tokens <= 0.0 || no_sequences) && !ids.is_empty() {
            return Err(Error::EmptySums { call, rank: origin.rank, layer: origin.layer });
        }
        let weight = d_loss * aux.aux.balance * e as f64;
        let row = |counts: &[f64], picks: f64, tokens: f64, weight: f64| -> Vec<f64> {
            counts.iter().map(|c| weight * c / picks / tokens).collect()
        };
        let (length, by_sequence) = match kind {
            _ if aux.aux.balance == 0.0 || ids.is_empty() => (usize::MAX, Vec::new()),
            BalanceKind::Switch => (usize::MAX, row(sums.counts, sums.tokens * k as f64, sums.tokens, weight)),
            BalanceKind::HuggingFace => (usize::MAX, row(sums.counts, sums.tokens, sums.tokens, weight)),
            BalanceKind::Sequence { length } => {
                let length = length.min(ids.len() / k);
                let mut counts = vec![0.0; e];
                let rows = ids.chunks(length * k).flat_map(|ids| {
                    counts.fill(0.0);
                    ids.iter().for_each(|&id| counts[id as usize] += 1.0);
                    row(&counts, ids.len() as f64, (ids.len() / k) as f64, weight / sums.sequences)
                });
                (length, rows.collect())
            }
        };
        let z = if ids.is_empty() { 0.0 } else { d_loss * aux.aux.z / sums.tokens };
        Ok(Self { experts: e, by_sequence, length, sigmoids: normalized_sigmoid(config, kind), z })
    }

    /// Adds the gradient of this rank's token `t` to `d_logits`.
    pub(super) fn add<A: Acc>(&self, t: usize, logits: &[A], scratch: &mut [A], d_logits: &mut [f64]) {
        if self.z != 0.0 {
            let log_sum = softmax(logits, scratch);
            for (d, p) in d_logits.iter_mut().zip(scratch.iter()).filter(|(_, p)| **p != A::zero()) {
                *d += 2.0 * self.z * log_sum * p.as_f64();
            }
        }
        if self.by_sequence.is_empty() {
            return;
        }
        let grad = &self.by_sequence[t / self.length * self.experts..][..self.experts];
        let dot = |p: &[A]| grad.iter().zip(p).map(|(g, p)| g * p.as_f64()).sum::<f64>();
        if self.sigmoids {
            normalize(logits, scratch);
            let dot = dot(scratch);
            for (((d, &l), p), g) in d_logits.iter_mut().zip(logits).zip(scratch.iter()).zip(grad) {
                // d s / d l = s·(1 − s), and 1 − s is the sigmoid of −l.
                *d += p.as_f64() * sigmoid(-l).as_f64() * (g - dot);
            }
        } else {
            if self.z == 0.0 {
                softmax(logits, scratch);
            }
            let dot = dot(scratch);
            for ((d, p), g) in d_logits.iter_mut().zip(scratch.iter()).zip(grad) {
                *d += p.as_f64() * (g - dot);
            }
        }
    }
}
