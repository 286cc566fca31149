//! Cross-entropy of tokens under an output layer, a block of tokens at a time.

use candle_core::{D, DType, Result, Tensor};

use super::{softmax, wide, with_backward};

/// Tokens whose logits are there at a time.
const ROWS: usize = 512;

/// The layer from hidden states to logits: `(x · weightᵀ + bias) · scale`.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    /// `[V, H]`
    pub weight: Tensor,
    /// `[V]`
    pub bias: Option<Tensor>,
    pub scale: f64,
}

impl Head {
    /// Logits of `[T, H]`, in f32 (f64 for f64).
    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = hidden.matmul(&self.weight.t()?)?;
        let logits = match &self.bias {
            Some(bias) => logits.broadcast_add(bias)?,
            None => logits,
        };
        let logits = if self.scale == 1.0 { logits } else { (logits * self.scale)? };
        logits.to_dtype(wide(logits.dtype()))
    }
}

/// Sum over the tokens of `hidden [T, H]` of the cross-entropy of `next [T]` (U32), a scalar in f32 (f64 for f64). Neither
/// forward nor backward, which makes logits again, has more than 512 tokens' at a time.
pub(crate) fn cross_entropy(hidden: &Tensor, head: &Head, next: &Tensor) -> Result<Tensor> {
    let next = next.detach().flatten_all()?.unsqueeze(1)?;
    let detached = Head { weight: head.weight.detach(), bias: head.bias.as_ref().map(Tensor::detach), ..*head };
    let mut sum: Option<Tensor> = None;
    for (start, len) in blocks(hidden)? {
        let logits = detached.logits(&hidden.detach().narrow(0, start, len)?)?;
        let chosen = logits.gather(&next.narrow(0, start, len)?.contiguous()?, 1)?.squeeze(1)?;
        let part = (logits.log_sum_exp(D::Minus1)? - chosen)?.sum_all()?;
        sum = Some(match sum {
            Some(sum) => (sum + part)?,
            None => part,
        });
    }
    let sum = match sum {
        Some(sum) => sum,
        None => Tensor::zeros((), DType::F32, hidden.device())?,
    };
    let tracked = |t: &Tensor| t.track_op();
    let asked = [tracked(hidden), tracked(&head.weight), head.bias.as_ref().is_some_and(tracked)];
    let scale = head.scale;
    let backward = move |inputs: &[Tensor], _: &Tensor, of: &Tensor| {
        let head = Head { weight: inputs[1].clone(), bias: inputs.get(2).cloned(), scale };
        gradients(&inputs[0], &head, &next, (of, asked))
    };
    match &head.bias {
        Some(bias) => with_backward("cross_entropy", &[hidden, &head.weight, bias], sum, backward),
        None => with_backward("cross_entropy", &[hidden, &head.weight], sum, backward),
    }
}

/// Start and length of each block of tokens.
fn blocks(hidden: &Tensor) -> Result<impl Iterator<Item = (usize, usize)> + use<>> {
    let count = hidden.dim(0)?;
    Ok((0..count).step_by(ROWS).map(move |start| (start, ROWS.min(count - start))))
}

fn gradients(
    hidden: &Tensor,
    head: &Head,
    next: &Tensor,
    (of, asked): (&Tensor, [bool; 3]),
) -> Result<Vec<Option<Tensor>>> {
    let (mut d_hidden, mut d_weight, mut d_bias) = (Vec::new(), None::<Tensor>, None::<Tensor>);
    let added = |sum: Option<Tensor>, new: Tensor| match sum {
        Some(sum) => sum + new,
        None => Ok(new),
    };
    for (start, len) in blocks(hidden)? {
        let rows = hidden.narrow(0, start, len)?;
        let logits = head.logits(&rows)?;
        // Of the logits before their scale.
        let p = softmax(&logits)?;
        let minus = Tensor::ones((len, 1), p.dtype(), p.device())?.neg()?;
        let d = p.scatter_add(&next.narrow(0, start, len)?.contiguous()?, &minus, 1)?;
        let d = (d.broadcast_mul(&of.to_dtype(p.dtype())?)? * head.scale)?;
        if asked[2] {
            d_bias = Some(added(d_bias, d.sum(0)?)?);
        }
        let d = d.to_dtype(hidden.dtype())?;
        if asked[0] {
            d_hidden.push(d.matmul(&head.weight)?);
        }
        if asked[1] {
            // Blocks are added in f32.
            let part = d.t()?.matmul(&rows.contiguous()?)?.to_dtype(logits.dtype())?;
            d_weight = Some(added(d_weight, part)?);
        }
    }
    let d_hidden = match (asked[0], &d_hidden[..]) {
        (false, _) => None,
        (true, []) => Some(hidden.zeros_like()?),
        (true, blocks) => Some(Tensor::cat(blocks, 0)?),
    };
    let finished = |sum: Option<Tensor>, like: &Tensor| sum.map(|sum| sum.to_dtype(like.dtype())).transpose();
    let d_weight = finished(d_weight, &head.weight)?;
    Ok(match &head.bias {
        None => vec![d_hidden, d_weight],
        Some(bias) => vec![d_hidden, d_weight, finished(d_bias, bias)?],
    })
}
