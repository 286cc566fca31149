//! A Mixture-of-Experts block the slow and obvious way: every expert runs on every token with plain candle operations,
//! and masks decide what counts. It shares nothing with the crate but the plain values of [`MoeConfig`] and the names
//! of the parameters; gradients come from candle's autograd.

use std::collections::BTreeMap;

use candle_core::{D, DType, Result, Tensor, bail};
use moebius::config::{Activation, BalanceKind, GroupScore, MoeConfig, RouterConfig, Score, WeightAt};

/// Parameters of a whole block by name: `router.weight [E, H]`, `router.bias [E]`, `router.selection_bias [E]`,
/// `experts.up [E, G·I, H]` (gate rows first), `experts.up_bias [E, G·I]`, `experts.down [E, H, I]`,
/// `experts.down_bias [E, H]`, `shared.up [G·S, H]`, `shared.up_bias [G·S]`,
/// `shared.down [H, S]`, `shared.down_bias [H]`, `shared.gate [1, H]`.
pub type Params = BTreeMap<String, Tensor>;

/// A block with all of its experts.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a> {
    /// Sizes and formulas.
    pub config: &'a MoeConfig,
    /// The parameters; variables where gradients are wanted.
    pub params: &'a Params,
}

/// Result of a forward.
#[derive(Debug, Clone)]
pub struct DenseOutput {
    /// `[T, H]`.
    pub y: Tensor,
    /// `[T, E]`.
    pub logits: Tensor,
    /// Chosen experts of each token, best first.
    pub ids: Vec<Vec<usize>>,
    /// Routing weights `[T, E]`, 0 where not chosen.
    pub weights: Tensor,
}

impl Dense<'_> {
    /// Forward over `x [T, H]`, T > 0, in x's dtype. `ids` overrules the choice of experts (for near ties).
    pub fn forward(&self, x: &Tensor, ids: Option<&[Vec<usize>]>) -> Result<DenseOutput> {
        self.forward_reading((x, x), ids)
    }

    /// The same with `read [T, H]` before the routed experts in place of `x`: what arrives of it.
    pub fn forward_reading(&self, (x, read): (&Tensor, &Tensor), ids: Option<&[Vec<usize>]>) -> Result<DenseOutput> {
        let router = &self.config.router;
        if router.expert_capacity.is_some() {
            bail!("the dense reference drops no tokens: expert_capacity must be off");
        }
        let mut logits = x.matmul(&self.get("router.weight")?.to_dtype(x.dtype())?.t()?)?;
        if let Some(bias) = self.params.get("router.bias") {
            logits = logits.broadcast_add(bias)?;
        }
        let rows = host(&logits)?;
        let ids = match ids {
            Some(ids) => ids.to_vec(),
            None => {
                let bias = self.params.get("router.selection_bias");
                let bias = bias.map(|b| b.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()).transpose()?;
                rows.iter().map(|row| choose(router, row, bias.as_deref())).collect()
            }
        };
        let mask = mask_like(&logits, &ids)?;
        let weights = self.weights(&logits, &rows, &ids, &mask)?;
        let mut y = x.zeros_like()?;
        for e in 0..router.num_experts {
            let (w, m) = (weights.narrow(1, e, 1)?, mask.narrow(1, e, 1)?);
            let (input, factor) = match self.config.weight_at {
                WeightAt::Input => (read.broadcast_mul(&w)?, m),
                // Weighting inside the activation or at the output is the same in exact arithmetic.
                _ => (read.clone(), w),
            };
            let mut pre = input.matmul(&self.get("experts.up")?.get(e)?.t()?)?;
            if let Some(bias) = self.params.get("experts.up_bias") {
                pre = pre.broadcast_add(&bias.get(e)?)?;
            }
            let mut out = self.activate(&pre)?.matmul(&self.get("experts.down")?.get(e)?.t()?)?;
            if let Some(bias) = self.params.get("experts.down_bias") {
                out = out.broadcast_add(&bias.get(e)?)?;
            }
            y = (y + out.broadcast_mul(&factor)?)?;
        }
        if self.config.shared.is_some() {
            y = (y + self.shared(x)?)?;
        }
        Ok(DenseOutput { y, logits, ids, weights })
    }

    /// Auxiliary losses, coefficients included, of all tokens of a forward.
    pub fn aux(&self, out: &DenseOutput) -> Result<Tensor> {
        let (aux, router) = (&self.config.aux, &self.config.router);
        let l = &out.logits;
        let t = l.dim(0)?;
        let z = (log_sum_exp(l)?.sqr()?.mean_all()? * aux.z)?;
        let p = match (aux.balance_kind, router.score) {
            (BalanceKind::Switch | BalanceKind::Sequence { .. }, Score::Sigmoid | Score::TopkSigmoid) => {
                let s = sigmoid(l)?;
                s.broadcast_div(&s.sum_keepdim(D::Minus1)?)?
            }
            _ => softmax(l)?,
        };
        let chosen = match aux.balance_kind {
            BalanceKind::HuggingFace => {
                let plain = RouterConfig::new(router.num_experts, router.top_k);
                let ids: Vec<_> = host(l)?.iter().map(|row| choose(&plain, row, None)).collect();
                mask_like(l, &ids)?
            }
            _ => mask_like(l, &out.ids)?,
        };
        let balance = |start: usize, len: usize| -> Result<Tensor> {
            let f = chosen.narrow(0, start, len)?.sum(0)?;
            let p = p.narrow(0, start, len)?.mean(0)?;
            let per_token = match aux.balance_kind {
                BalanceKind::HuggingFace => len as f64,
                _ => (len * router.top_k) as f64,
            };
            (f * p)?.sum_all()? * (router.num_experts as f64 / per_token)
        };
        let balance = match aux.balance_kind {
            BalanceKind::Sequence { length } => {
                let starts: Vec<usize> = (0..t).step_by(length).collect();
                let mut sum = z.zeros_like()?;
                for &s in &starts {
                    sum = (sum + balance(s, length.min(t - s))?)?;
                }
                (sum / starts.len() as f64)?
            }
            _ => balance(0, t)?,
        };
        (balance * aux.balance)? + z
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        match self.params.get(name) {
            Some(t) => Ok(t),
            None => bail!("parameter {name} is missing"),
        }
    }

    /// Routing weights `[T, E]`, 0 where not chosen.
    fn weights(&self, l: &Tensor, rows: &[Vec<f64>], ids: &[Vec<usize>], mask: &Tensor) -> Result<Tensor> {
        let router = &self.config.router;
        let mut w = match router.score {
            Score::Softmax => (softmax(l)? * mask)?,
            Score::Sigmoid | Score::TopkSigmoid => (sigmoid(l)? * mask)?,
            Score::TopkSoftmax => masked_softmax(l, mask)?,
            Score::SparseMixer { epsilon } => sparse_mixer(l, rows, ids, epsilon)?,
            other => bail!("the dense reference does not know {other:?}"),
        };
        if let Some(n) = router.renorm {
            let norm = if n.p == 1.0 {
                w.sum_keepdim(D::Minus1)?
            } else {
                // Ones where nothing was chosen: 0 to a power has no finite derivative for every p.
                let powers = ((&w + mask.affine(-1.0, 1.0)?)?.powf(n.p)? * mask)?;
                powers.sum_keepdim(D::Minus1)?.powf(1.0 / n.p)?
            };
            w = w.broadcast_div(&(norm + n.epsilon)?.maximum(n.floor)?)?;
        }
        w * router.scale
    }

    fn activate(&self, pre: &Tensor) -> Result<Tensor> {
        let inner = pre.dim(1)? / self.config.activation.gate_factor();
        let up = pre.narrow(1, pre.dim(1)? - inner, inner)?;
        let gate = pre.narrow(1, 0, inner)?;
        match self.config.activation {
            Activation::SiluGlu => gate.silu()? * up,
            // Written out: the constants of candle's own gelu backward have six digits.
            Activation::GeluGlu => {
                let cubic = (gate.sqr()? * &gate)?;
                let inner = ((&gate + (cubic * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
                ((&gate * (inner.tanh()? + 1.0)?)? * 0.5)? * up
            }
            Activation::ClampedGlu { alpha, limit } => {
                let (g, u) = (gate.minimum(limit)?, up.minimum(limit)?.maximum(-limit)?);
                ((u + 1.0)? * &g)? * sigmoid(&(g * alpha)?)?
            }
            Activation::Relu2 => up.relu()?.sqr(),
            other => bail!("the dense reference does not know {other:?}"),
        }
    }

    fn shared(&self, x: &Tensor) -> Result<Tensor> {
        let biased = |y: Tensor, name: &str| match self.params.get(name) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        };
        let pre = biased(x.matmul(&self.get("shared.up")?.t()?)?, "shared.up_bias")?;
        let y = biased(self.activate(&pre)?.matmul(&self.get("shared.down")?.t()?)?, "shared.down_bias")?;
        match self.params.get("shared.gate") {
            Some(gate) => y.broadcast_mul(&sigmoid(&x.matmul(&gate.t()?)?)?),
            None => Ok(y),
        }
    }
}

/// Scores by which experts are chosen, from one token's logits.
pub fn choice_scores(router: &RouterConfig, logits: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|l| (l - max).exp()).sum();
    let score = |l: f64| match router.score {
        Score::Softmax => (l - max).exp() / sum,
        Score::Sigmoid => 1.0 / (1.0 + (-l).exp()),
        _ => l,
    };
    logits.iter().enumerate().map(|(e, &l)| score(l) + bias.map_or(0.0, |b| b[e])).collect()
}

/// One token's experts, best first; ties go to the lower id.
pub fn choose(router: &RouterConfig, logits: &[f64], bias: Option<&[f64]>) -> Vec<usize> {
    let mut scores = choice_scores(router, logits, bias);
    if let Some(limit) = router.groups {
        let size = scores.len() / limit.groups;
        let rank: Vec<f64> = scores
            .chunks(size)
            .map(|group| {
                let best = best(group, 2);
                match limit.rank_by {
                    GroupScore::Max => group[best[0]],
                    _ => best.iter().map(|&e| group[e]).sum(),
                }
            })
            .collect();
        let keep = best(&rank, limit.keep);
        let outside = if limit.rank_by == GroupScore::Max { 0.0 } else { f64::NEG_INFINITY };
        for (e, score) in scores.iter_mut().enumerate() {
            if !keep.contains(&(e / size)) {
                *score = outside;
            }
        }
    }
    best(&scores, router.top_k)
}

/// Indices of the `k` largest values, largest first; a stable sort leaves ties to the lower index.
fn best(values: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order.truncate(k);
    order
}

/// PhiMoE's SparseMixer at evaluation: each of the two choices is weighted by a softmax over the logits close to it.
fn sparse_mixer(l: &Tensor, rows: &[Vec<f64>], ids: &[Vec<usize>], epsilon: f64) -> Result<Tensor> {
    let mut w = l.zeros_like()?;
    for k in 0..2 {
        let picked: Vec<Vec<usize>> = ids.iter().map(|row| vec![row[k]]).collect();
        let close: Vec<Vec<usize>> = rows
            .iter()
            .zip(ids)
            .map(|(row, chosen)| {
                let m = row[chosen[k]];
                let near = |e: usize| (m - row[e]) / row[e].abs().max(m) <= 2.0 * epsilon;
                (0..row.len()).filter(|e| !chosen[..k].contains(e) && near(*e)).collect()
            })
            .collect();
        w = (w + (masked_softmax(l, &mask_like(l, &close)?)? * mask_like(l, &picked)?)?)?;
    }
    Ok(w)
}

/// Softmax over the entries that a mask leaves, 0 elsewhere.
fn masked_softmax(l: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let e = (exp_shifted(l)? * mask)?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

fn softmax(l: &Tensor) -> Result<Tensor> {
    let e = exp_shifted(l)?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

fn sigmoid(l: &Tensor) -> Result<Tensor> {
    (l.neg()?.exp()? + 1.0)?.recip()
}

fn log_sum_exp(l: &Tensor) -> Result<Tensor> {
    exp_shifted(l)?.sum_keepdim(D::Minus1)?.log()? + l.detach().max_keepdim(D::Minus1)?
}

/// exp(l − max l); the maximum is a constant, it cancels wherever this is used.
fn exp_shifted(l: &Tensor) -> Result<Tensor> {
    l.broadcast_sub(&l.detach().max_keepdim(D::Minus1)?)?.exp()
}

/// Ones at each token's `ids`, zeros elsewhere, in shape and dtype of the logits.
fn mask_like(l: &Tensor, ids: &[Vec<usize>]) -> Result<Tensor> {
    let (t, e) = l.dims2()?;
    let mut mask = vec![0.0f64; t * e];
    for (row, ids) in mask.chunks_mut(e).zip(ids) {
        for &id in ids {
            row[id] = 1.0;
        }
    }
    Tensor::from_vec(mask, (t, e), l.device())?.to_dtype(l.dtype())
}

fn host(t: &Tensor) -> Result<Vec<Vec<f64>>> {
    t.detach().to_dtype(DType::F64)?.to_vec2()
}
