//! Gradient of the routing weights and auxiliary losses with respect to the logits. The choice and the sparsemixer's
//! masks are constants, as autograd has it; scores are recomputed from the logits, nothing is kept from forward.

use rayon::prelude::*;

use crate::config::{RouterConfig, Score};
use crate::cpu::Cpu;
use crate::cpu::element::{Acc, with_acc};
use crate::error::Result;
use crate::kernels::RouteBwd;

use super::aux_losses::AuxGrad;
use super::choose::Chooser;
use super::jitter::JitterNoise;
use super::score::{masked_softmax, sigmoid, softmax};
use super::weights::{Divisor, raw_weights};
use super::{check, check_ids, check_logits};
use crate::cpu::heuristics::TASK_TOKENS;

pub(in crate::cpu) fn route_bwd(call: RouteBwd<'_, Cpu>) -> Result<()> {
    with_acc!("route_bwd", "tensor logits", call.logits.dtype(), A => route_bwd_as::<A>(call))
}

fn route_bwd_as<A: Acc>(call: RouteBwd<'_, Cpu>) -> Result<()> {
    const CALL: &str = "route_bwd";
    let config = call.config;
    config.validate()?;
    let (e, k) = (config.num_experts, config.top_k);
    let t = check_logits(CALL, config, call.logits)?;
    check(CALL, "d_weights", A::DTYPE, &[t, k], call.d_weights.dtype(), call.d_weights.dims())?;
    check(CALL, "d_logits", A::DTYPE, &[t, e], call.d_logits.dtype(), call.d_logits.dims())?;
    let ids = check_ids(CALL, config, t, call.origin, call.ids)?;
    let aux = call.aux.map(|aux| AuxGrad::new::<A>(CALL, config, &aux, ids, call.origin)).transpose()?;
    let (logits, d_weights) = (call.logits.as_slice::<A>()?, call.d_weights.as_slice::<A>()?);
    let d_logits = call.d_logits.into_slice::<A>()?;

    let noise = JitterNoise::new(config, call.jitter);
    let block = |(b, d_logits): (usize, &mut [A])| {
        let mut row = Row::new(config);
        for (i, out) in d_logits.chunks_exact_mut(e).enumerate() {
            let t = b * TASK_TOKENS + i;
            let clean = &logits[t * e..][..e];
            let noise = noise.as_ref().map(|n| n.token(t));
            row.chooser.load(clean, noise);
            row.chooser.set_chosen(&ids[t * k..][..k]);
            row.backward(&d_weights[t * k..][..k]);
            if let Some(noise) = noise {
                row.d_logits.iter_mut().enumerate().for_each(|(e, d)| *d *= A::of(noise.factor(e)).as_f64());
            }
            if let Some(aux) = &aux {
                aux.add(t, clean, &mut row.chooser.scores, &mut row.d_logits);
            }
            for (o, &d) in out.iter_mut().zip(&row.d_logits) {
                *o = A::of(d);
            }
        }
    };
    if t <= TASK_TOKENS {
        block((0, d_logits));
    } else {
        d_logits.par_chunks_mut(TASK_TOKENS * e).enumerate().for_each(block);
    }
    Ok(())
}

struct Row<'a, A> {
    config: &'a RouterConfig,
    chooser: Chooser<'a, A>,
    weights: Vec<A>,
    grad: Vec<f64>,
    d_logits: Vec<f64>,
}

impl<'a, A: Acc> Row<'a, A> {
    fn new(config: &'a RouterConfig) -> Self {
        let (e, k) = (config.num_experts, config.top_k);
        Self {
            config,
            chooser: Chooser::new(config, None),
            weights: vec![A::zero(); k],
            grad: vec![0.0; k],
            d_logits: vec![0.0; e],
        }
    }

    /// Writes `d_logits` with respect to the noisy logits that the chooser holds.
    fn backward(&mut self, d_weights: &[A]) {
        let config = self.config;
        for (g, d) in self.grad.iter_mut().zip(d_weights) {
            *g = d.as_f64() * config.scale;
        }
        self.chooser.zero_other_groups();
        raw_weights(config, &mut self.chooser, &mut self.weights);
        if let Some(renorm) = &config.renorm {
            Divisor::new(renorm, &self.weights).backward(&self.weights, &mut self.grad);
        }
        self.d_logits.fill(0.0);
        match config.score {
            Score::Softmax => self.softmax_bwd(),
            Score::Sigmoid | Score::TopkSigmoid => self.sigmoid_bwd(),
            Score::TopkSoftmax => self.topk_softmax_bwd(),
            Score::SparseMixer { epsilon } => self.sparse_mixer_bwd(epsilon),
        }
    }

    fn softmax_bwd(&mut self) {
        // A score that the group limit set to 0 passes no gradient: its weight is 0, and so is its term here. But its
        // logit is in the softmax of the others, whence the scores anew.
        let dot: f64 = self.grad.iter().zip(&self.weights).map(|(g, w)| g * w.as_f64()).sum();
        if self.config.groups.is_some() {
            softmax(&self.chooser.logits, &mut self.chooser.scores);
        }
        for (d, p) in self.d_logits.iter_mut().zip(&self.chooser.scores) {
            *d = -p.as_f64() * dot;
        }
        for ((&e, g), w) in self.chooser.order.iter().zip(&self.grad).zip(&self.weights) {
            self.d_logits[e as usize] += g * w.as_f64();
        }
    }

    fn sigmoid_bwd(&mut self) {
        for ((&e, g), w) in self.chooser.order.iter().zip(&self.grad).zip(&self.weights) {
            // 1 − s is the sigmoid of −l, which does not cancel.
            let rest = sigmoid(-self.chooser.logits[e as usize]);
            self.d_logits[e as usize] += g * w.as_f64() * rest.as_f64();
        }
    }

    fn topk_softmax_bwd(&mut self) {
        let dot: f64 = self.grad.iter().zip(&self.weights).map(|(g, w)| g * w.as_f64()).sum();
        for ((&e, g), w) in self.chooser.order.iter().zip(&self.grad).zip(&self.weights) {
            self.d_logits[e as usize] += w.as_f64() * (g - dot);
        }
    }

    fn sparse_mixer_bwd(&mut self, epsilon: f64) {
        let Chooser { logits, scores, order, .. } = &mut self.chooser;
        let mut without = None;
        for ((&e, g), w) in order.iter().zip(&self.grad).zip(&self.weights) {
            masked_softmax(logits, epsilon, without, scores);
            let g = g * w.as_f64();
            for (d, p) in self.d_logits.iter_mut().zip(scores.iter()) {
                *d -= g * p.as_f64();
            }
            self.d_logits[e as usize] += g;
            without = Some(e as usize);
        }
    }
}
