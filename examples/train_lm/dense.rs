//! The language model in plain candle operations, apart from where its experts are computed; and the dense
//! computation of them.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::{log_softmax, silu, softmax};

use crate::lm::Settings;

/// A decoder of pre-norm attention and expert layers over bytes, with learned positions.
pub struct Model {
    settings: Settings,
    vars: BTreeMap<String, Var>,
    /// `[S, S]`, −∞ above the diagonal.
    mask: Tensor,
}

/// Loss of some sequences.
pub struct Loss {
    /// Sum over positions of the cross-entropy of the next byte.
    pub sum: Tensor,
    /// Sum over layers of the auxiliary losses.
    pub aux: Tensor,
}

impl Model {
    /// A model of a rank's parameters.
    pub fn new(settings: &Settings, vars: BTreeMap<String, Var>, device: &Device) -> Result<Self> {
        let s = settings.context;
        let mask: Vec<f32> = (0..s * s).map(|i| if i % s > i / s { f32::NEG_INFINITY } else { 0.0 }).collect();
        Ok(Self { settings: settings.clone(), vars, mask: Tensor::from_vec(mask, (s, s), device)? })
    }

    /// The parameters by name, in an order that is the same everywhere.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// A parameter.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        match self.vars.get(name) {
            Some(var) => Ok(var.as_tensor()),
            None => candle_core::bail!("no parameter {name}"),
        }
    }

    /// Loss of `rows` sequences of context + 1 bytes. `experts` computes a layer's experts on tokens `[T, H]` and
    /// gives its auxiliary loss beside.
    pub fn loss(
        &self,
        bytes: &[u8],
        rows: usize,
        mut experts: impl FnMut(usize, &Tensor) -> Result<(Tensor, Tensor)>,
    ) -> Result<Loss> {
        let (s, h) = (self.settings.context, self.settings.hidden);
        let ids: Vec<u32> = bytes.iter().map(|b| u32::from(*b)).collect();
        let ids = Tensor::from_vec(ids, (rows, s + 1), self.mask.device())?;
        let (input, next) = (ids.narrow(1, 0, s)?, ids.narrow(1, 1, s)?);
        let x = self.get("embedding")?.index_select(&input.flatten_all()?, 0)?.reshape((rows, s, h))?;
        let mut x = x.broadcast_add(self.get("positions")?)?.reshape((rows * s, h))?;
        let mut aux = Tensor::zeros((), DType::F32, self.mask.device())?;
        for layer in 0..self.settings.layers {
            x = (&x + self.attention(layer, &x, rows)?)?;
            let normed = norm(&x, self.get(&format!("layers.{layer}.moe_norm"))?)?;
            let (y, layer_aux) = experts(layer, &normed)?;
            x = (x + y)?;
            aux = (aux + layer_aux)?;
        }
        let logits = norm(&x, self.get("norm")?)?.matmul(&self.get("head")?.t()?)?;
        let next = next.flatten_all()?.unsqueeze(1)?;
        let sum = log_softmax(&logits, D::Minus1)?.gather(&next, 1)?.sum_all()?.neg()?;
        Ok(Loss { sum, aux })
    }

    fn attention(&self, layer: usize, x: &Tensor, rows: usize) -> Result<Tensor> {
        let (s, h, heads) = (self.settings.context, self.settings.hidden, self.settings.heads);
        let get = |part: &str| self.get(&format!("layers.{layer}.{part}"));
        let qkv = norm(x, get("attention_norm")?)?.matmul(&get("qkv")?.t()?)?;
        let qkv = qkv.reshape((rows, s, 3, heads, h / heads))?.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (q, k, v) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = (q.matmul(&k.transpose(2, 3)?)? * ((h / heads) as f64).powf(-0.5))?;
        let p = softmax(&scores.broadcast_add(&self.mask)?, D::Minus1)?;
        p.matmul(&v)?.transpose(1, 2)?.reshape((rows * s, h))?.matmul(&get("out")?.t()?)
    }
}

fn norm(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + 1e-6)?.sqrt()?)?.broadcast_mul(weight)
}

/// One layer's parameters of the dense computation, over all experts.
pub struct DenseExperts<'a> {
    /// `[E, H]`.
    pub router: &'a Tensor,
    /// `[E, 2·I, H]`, gate rows first.
    pub up: &'a Tensor,
    /// `[E, H, I]`.
    pub down: &'a Tensor,
    /// Coefficient of the load-balancing loss.
    pub balance: f64,
    /// Tokens that are balanced among themselves; the loss is the mean over these blocks.
    pub blocks: &'a [Vec<u32>],
    /// Where tokens travel quantized: what the experts read in their place, `[T, H]`. Gradients pass straight through.
    pub read: Option<Tensor>,
    /// As [`Tolerances::logit`](crate::lm::Tolerances::logit).
    pub near: f32,
}

impl DenseExperts<'_> {
    /// Every expert on every token of `x [T, H]`, weighted by zero where it was not chosen. Softmax routing,
    /// renormalized over the K experts in `ids` (U32 `[T, K]`); the balance loss is E · Σ f·P.
    pub fn forward(&self, x: &Tensor, ids: &[Vec<u32>]) -> Result<(Tensor, Tensor)> {
        let logits = x.matmul(&self.router.t()?)?;
        let (t, e) = logits.dims2()?;
        let k = ids.first().map_or(1, Vec::len);
        check_choice(&logits, ids, self.near)?;
        let mut mask = vec![0f32; t * e];
        for (token, ids) in ids.iter().enumerate() {
            ids.iter().for_each(|id| mask[token * e + *id as usize] = 1.0);
        }
        let mask = Tensor::from_vec(mask, (t, e), x.device())?;
        let p = softmax(&logits, D::Minus1)?;
        let w = (&p * &mask)?;
        let w = w.broadcast_div(&w.sum_keepdim(1)?)?;
        let mut y = x.zeros_like()?;
        let read = match &self.read {
            // Of the value of `read`: a row is rounded to 0 or by less than a factor of two, so that no bit is lost.
            Some(read) => (x + (read - x)?.detach())?,
            None => x.clone(),
        };
        for expert in 0..e {
            let up = read.matmul(&self.up.get(expert)?.t()?)?.chunk(2, 1)?;
            let out = (silu(&up[0])? * &up[1])?.matmul(&self.down.get(expert)?.t()?)?;
            y = (y + out.broadcast_mul(&w.narrow(1, expert, 1)?)?)?;
        }
        if let [_] = self.blocks {
            let f = (mask.sum(0)? / (t * k) as f64)?;
            let aux = ((f * p.mean(0)?)?.sum_all()? * (self.balance * e as f64))?;
            return Ok((y, aux));
        }
        let mut aux = Tensor::zeros((), DType::F32, x.device())?;
        for tokens in self.blocks {
            let at = Tensor::from_slice(tokens, tokens.len(), x.device())?;
            let f = (mask.index_select(&at, 0)?.sum(0)? / (tokens.len() * k) as f64)?;
            aux = (aux + (f * p.index_select(&at, 0)?.mean(0)?)?.sum_all()?)?;
        }
        Ok((y, (aux * (self.balance * e as f64 / self.blocks.len() as f64))?))
    }
}

/// An error where `ids` are not the best experts of a token, or as good as these by `near`.
fn check_choice(logits: &Tensor, ids: &[Vec<u32>], near: f32) -> Result<()> {
    for (token, (row, ids)) in logits.to_vec2::<f32>()?.iter().zip(ids).enumerate() {
        let chosen = |e: &usize| ids.contains(&(*e as u32));
        let worst = ids.iter().map(|id| row[*id as usize]).fold(f32::INFINITY, f32::min);
        let best = (0..row.len()).filter(|e| !chosen(e)).map(|e| row[e]).fold(f32::NEG_INFINITY, f32::max);
        if worst < best - near {
            candle_core::bail!("token {token}: experts {ids:?} were chosen, but an expert's logit is {best} > {worst}");
        }
    }
    Ok(())
}
