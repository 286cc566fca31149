//! Cross-entropy of tokens under an output layer, a block of tokens at a time.

use candle_core::{D, DType, Device, Result, Tensor};

use super::argument_checks::Call;
use super::{softmax, wide, with_backward, with_zero_gradients};
use crate::error::{Error, Result as CheckedResult};

/// Tokens whose logits are there at a time.
const ROWS: usize = 512;

/// What the output layer of a [`cross_entropy`] has beside its weight.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CrossEntropyOptions<'a> {
    /// `[V]`, added to the logits before their scale. None by default.
    pub bias: Option<&'a Tensor>,
    /// Factor of the logits. 1 by default.
    pub scale: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        Self { bias: None, scale: 1.0 }
    }
}

impl<'a> CrossEntropyOptions<'a> {
    /// With [`bias`](Self::bias).
    pub fn with_bias(mut self, bias: &'a Tensor) -> Self {
        self.bias = Some(bias);
        self
    }

    /// With [`scale`](Self::scale).
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }
}

/// Sum over tokens of the cross-entropy of their targets under an output layer, −ln softmax((h · weightᵀ + bias) · scale) at
/// the target: of `hidden [T, H]`, `weight [V, H]` and `targets [T]`, ids in 0..V of type U8, U32 or I64 on any device. A
/// scalar in f32 (f64 for f64); divide by T for the mean. Of no tokens it is 0.
///
/// Its backward gives gradients of hidden states, weight and bias. Neither forward nor backward, which makes logits again,
/// has those of more than 512 tokens at a time, so that nothing of `[T, V]` is made. The targets are compared with the
/// vocabulary on the host, which waits for a GPU that has them.
///
/// # Errors
/// A typed error for other numbers of dimensions and sizes that do not match, an H or V of 0, types other than f64, f32, bf16
/// and f16, a weight or bias of another type or device than the hidden states', targets of no integers, a scale that is not
/// finite; [`Error::TokenId`](crate::Error::TokenId), whose position is the token's, for a target outside the vocabulary;
/// candle's.
pub fn cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    options: CrossEntropyOptions<'_>,
) -> CheckedResult<Tensor> {
    const CALL: Call = Call("ops::cross_entropy");
    let CrossEntropyOptions { bias, scale } = options;
    CALL.float("hidden", hidden)?;
    CALL.finite("scale", scale)?;
    let &[tokens, size] = hidden.dims() else { return CALL.refuse_shape("hidden", hidden, "[T, H]") };
    let vocabulary = match *weight.dims() {
        [vocabulary, inner] if inner == size && size > 0 && vocabulary > 0 => vocabulary,
        _ => return CALL.refuse_shape("weight", weight, format!("[V, {size}] with V >= 1 and H >= 1")),
    };
    CALL.same_dtype_and_device(("hidden", hidden), "weight", weight)?;
    if let Some(bias) = bias {
        CALL.shape("bias", bias, &[vocabulary])?;
        CALL.same_dtype_and_device(("hidden", hidden), "bias", bias)?;
    }
    CALL.shape("targets", targets, &[tokens])?;
    let ids = checked_targets(CALL, targets, vocabulary)?;
    let next = Tensor::from_vec(ids, tokens, &Device::Cpu)?;
    // A GPU has no memory of no bytes.
    let next = if tokens == 0 { next } else { next.to_device(hidden.device())? };
    let head = Head { weight: weight.contiguous()?, bias: bias.cloned(), scale };
    Ok(head_cross_entropy(&hidden.contiguous()?, &head, &next)?)
}

/// Targets on the host.
fn checked_targets(call: Call, targets: &Tensor, vocabulary: usize) -> CheckedResult<Vec<u32>> {
    if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return call.refuse(format!("tensor targets: expected integers, found {:?}", targets.dtype()));
    }
    if targets.elem_count() == 0 {
        return Ok(Vec::new());
    }
    let id = |(position, &id): (usize, &i64)| match u32::try_from(id) {
        Ok(inside) if (inside as usize) < vocabulary => Ok(inside),
        _ => Err(Error::TokenId { call: call.0, row: 0, position, id, vocabulary }),
    };
    targets.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1::<i64>()?.iter().enumerate().map(id).collect()
}

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

/// As [`cross_entropy`] of `next [T]` (U32), which have been compared with the vocabulary.
pub(crate) fn head_cross_entropy(hidden: &Tensor, head: &Head, next: &Tensor) -> Result<Tensor> {
    if hidden.dim(0)? == 0 {
        let inputs: Vec<&Tensor> = [hidden, &head.weight].into_iter().chain(&head.bias).collect();
        let sum = Tensor::zeros((), wide(hidden.dtype()), hidden.device())?;
        return with_zero_gradients("cross_entropy", &inputs, sum);
    }
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
    let sum = sum.ok_or_else(|| candle_core::Error::msg("cross_entropy: no blocks of tokens"))?;
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
    let d_hidden = if asked[0] { Some(Tensor::cat(&d_hidden, 0)?) } else { None };
    let finished = |sum: Option<Tensor>, like: &Tensor| sum.map(|sum| sum.to_dtype(like.dtype())).transpose();
    let d_weight = finished(d_weight, &head.weight)?;
    Ok(match &head.bias {
        None => vec![d_hidden, d_weight],
        Some(bias) => vec![d_hidden, d_weight, finished(d_bias, bias)?],
    })
}
