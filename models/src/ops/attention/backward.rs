//! Attention with a backward that makes the scores of a block of queries again: by kernels where there are some, else
//! by candle's operations.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{D, Result, Tensor};

use super::super::{wide, with_backward};
#[cfg(feature = "cuda")]
use super::backward_cuda;
use super::{AttentionOptions, AttentionSizes, MaskCache, Operands, Output, output};

/// [`AttentionOptions`] for as long as a backward may come.
#[derive(Debug, Clone)]
struct Kept {
    first: usize,
    window: Option<usize>,
    chunk: Option<usize>,
    sinks: Option<Tensor>,
    scale: f64,
    masks: MaskCache,
}

impl Kept {
    fn of(options: &AttentionOptions<'_>) -> Self {
        let AttentionOptions { first, window, chunk, sinks, scale, masks } = *options;
        Self { first, window, chunk, sinks: sinks.map(Tensor::detach), scale, masks: masks.clone() }
    }

    fn options(&self) -> AttentionOptions<'_> {
        let Self { first, window, chunk, ref sinks, scale, ref masks } = *self;
        AttentionOptions { first, window, chunk, sinks: sinks.as_ref(), scale, masks }
    }
}

/// Gradient of the sinks, which the attention's backward leaves for the operation that hands in the sinks: an operation of
/// candle has three inputs.
type SinksGradient = Arc<Mutex<Option<Tensor>>>;

pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions<'_>) -> Result<Tensor> {
    let kept = Kept::of(options);
    let of_sinks = SinksGradient::default();
    let v = match options.sinks.filter(|sinks| sinks.track_op()) {
        None => v.clone(),
        Some(sinks) => beside_sinks(v, sinks, &of_sinks)?,
    };
    let (y, log_sums) = {
        let options = kept.options();
        let Output { y, log_sums } = output([&q.detach(), &k.detach(), &v.detach()], &options, true)?;
        (y, log_sums.ok_or_else(|| candle_core::Error::msg("attention: no sums of exponentials"))?)
    };
    with_backward("attention", &[q, k, &v], y, move |inputs, y, of| {
        let [q, k, v] = inputs else { return Ok(Vec::new()) };
        let options = kept.options();
        let BackwardOutput { d_q, d_k, d_v, dots } = gradients([q, k, v], &options, [y, of, &log_sums])?;
        let dots = dots.reshape(log_sums.dims())?;
        let sinks = options.sinks.map(|sinks| sinks_gradient(sinks, &dots, &log_sums)).transpose()?;
        *of_sinks.lock().unwrap_or_else(PoisonError::into_inner) = sinks;
        Ok(vec![Some(d_q.to_dtype(q.dtype())?), Some(d_k.to_dtype(k.dtype())?), Some(d_v.to_dtype(v.dtype())?)])
    })
}

/// `v` as it is. In backward, the attention over it has run before.
fn beside_sinks(v: &Tensor, sinks: &Tensor, of_sinks: &SinksGradient) -> Result<Tensor> {
    let of_sinks = Arc::clone(of_sinks);
    with_backward("attention sinks", &[v, sinks], v.detach().copy()?, move |inputs, _, of| {
        let gradient = of_sinks.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gradient = gradient.map(|gradient| gradient.to_dtype(inputs[1].dtype())).transpose()?;
        Ok(vec![Some(of.clone()), gradient])
    })
}

/// What backward makes.
#[derive(Debug)]
pub(super) struct BackwardOutput {
    /// Gradients in the operands' shapes: in their type, or f32 (f64 for f64).
    pub d_q: Tensor,
    pub d_k: Tensor,
    pub d_v: Tensor,
    /// Each row of the result times its gradient's, f32 (f64 for f64), `[B, heads, S]`.
    pub dots: Tensor,
}

/// Gradients from the output, its gradient (both `[B, S, heads, V]`) and the logarithms of the rows' sums.
fn gradients(
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions<'_>,
    [y, of, log_sums]: [&Tensor; 3],
) -> Result<BackwardOutput> {
    #[cfg(feature = "cuda")]
    if let Some(found) = backward_cuda::backward([q, k, v], [y, of, log_sums], options)? {
        return Ok(found);
    }
    gradients_by_blocks(&Operands::new(q, k, v, options)?, options, [y, of, log_sums])
}

/// The sinks' gradient: each takes its part of every row's probability, and has no value.
fn sinks_gradient(sinks: &Tensor, dots: &Tensor, log_sums: &Tensor) -> Result<Tensor> {
    let (_, keys, groups, _, _) = log_sums.dims5()?;
    let sinks = sinks.to_dtype(dots.dtype())?.reshape((1, keys, groups, 1, 1))?;
    let p = sinks.broadcast_sub(log_sums)?.exp()?;
    (p * dots)?.neg()?.sum((0, 3, 4))?.flatten_all()
}

/// By candle's operations.
fn gradients_by_blocks(
    operands: &Operands,
    options: &AttentionOptions<'_>,
    [y, of, log_sums]: [&Tensor; 3],
) -> Result<BackwardOutput> {
    let AttentionSizes { sequences, keys, groups, queries, dim, value, .. } = operands.sizes;
    let (k, v, dtype) = (&operands.k, &operands.v, wide(operands.q.dtype()));
    let heads_first = |t: &Tensor| t.transpose(1, 2)?.reshape((sequences, keys, groups, queries, value));
    let (y, of) = (heads_first(y)?, heads_first(of)?);
    let along = (y.to_dtype(dtype)? * of.to_dtype(dtype)?)?.sum_keepdim(D::Minus1)?;
    let (d_k, d_v) = (Tensor::zeros(k.dims(), dtype, k.device())?, Tensor::zeros(v.dims(), dtype, v.device())?);
    let mut d_q = Vec::new();
    for block in operands.blocks(options) {
        let rows = |t: &Tensor| operands.rows(t, block);
        let (q, of, along, log_sums) = (rows(&operands.q)?, rows(&of)?, rows(&along)?, rows(log_sums)?);
        let p = operands.scores(&q, block, options)?.broadcast_sub(&log_sums)?.exp()?;
        let add = |sums: &Tensor, new: Tensor| {
            let start = block.low - operands.sizes.first_key;
            let sum = (sums.narrow(2, start, block.len())? + new.to_dtype(dtype)?)?;
            sums.slice_set(&sum.contiguous()?, 2, start)
        };
        add(&d_v, p.to_dtype(v.dtype())?.transpose(2, 3)?.contiguous()?.matmul(&of)?)?;
        let d_p = of.matmul(&operands.seen(v, block)?.transpose(2, 3)?)?.to_dtype(dtype)?;
        let d_scores = (p * d_p.broadcast_sub(&along)?)?.to_dtype(k.dtype())?;
        add(&d_k, d_scores.transpose(2, 3)?.contiguous()?.matmul(&q)?)?;
        let d_rows = (d_scores.matmul(&operands.seen(k, block)?)? * options.scale)?;
        d_q.push(d_rows.reshape((sequences, keys, groups, block.rows, dim))?);
    }
    let d_q = Tensor::cat(&d_q, 3)?.reshape((sequences, keys * groups, queries, dim))?;
    Ok(BackwardOutput { d_q, d_k, d_v, dots: along.reshape((sequences, keys * groups, queries))? })
}
