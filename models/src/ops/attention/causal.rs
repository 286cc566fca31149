//! Attention of queries, keys and values that others hand in.

use candle_core::Tensor;

use super::{AttentionOptions, MaskCache, masked_attention};
use crate::error::Result;
use crate::ops::argument_checks::Call;
use crate::ops::with_zero_gradients;

/// Which keys a query of an [`attention`] sees beside the causal rule, and how scores are made.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct CausalOptions<'a> {
    /// A query sees the last so many positions, its own included. All by default.
    pub window: Option<usize>,
    /// A query sees the positions of its own chunk of so many; chunks are counted from the first key. All by default.
    pub chunk: Option<usize>,
    /// A logit for each head `[heads]` that takes part in the softmax and has no value. None by default.
    pub sinks: Option<&'a Tensor>,
    /// Factor of the scores. 1/√D by default.
    pub scale: Option<f64>,
}

impl<'a> CausalOptions<'a> {
    /// With [`window`](Self::window).
    pub fn with_window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// With [`chunk`](Self::chunk).
    pub fn with_chunk(mut self, chunk: usize) -> Self {
        self.chunk = Some(chunk);
        self
    }

    /// With [`sinks`](Self::sinks).
    pub fn with_sinks(mut self, sinks: &'a Tensor) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// With [`scale`](Self::scale).
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }
}

/// Causal attention of queries `q [B, heads, S, D]` over keys `k [B, key heads, N, D]` and values `v [B, key heads, N, V]`:
/// softmax(q · kᵀ · scale) · v, `[B, S, heads, V]` in q's type. The last S of the N positions are the queries' own, and a
/// query sees those up to its own, as far as the options let it. Query heads are groups of neighbors over a key head (GQA).
///
/// Backward gives gradients of q, k, v and the sinks. It keeps these, the result, and one number a query and head, and makes
/// the scores of a block of queries again: a matrix of all scores is never there. On a GPU kernels do both for bf16 and f16,
/// heads of 64, 128, 256, or 192 with values of 128, and 16 queries and more; everything else is candle's operations, a
/// block of queries at a time, with softmax in f32 (f64 for f64). Without queries the result is none, and the gradients of
/// keys, values and sinks are zeros.
///
/// # Errors
/// A typed error for other numbers of dimensions and sizes that do not match, sizes of 0 but for B and S, query heads that
/// are no multiple of the key heads, fewer keys than queries, types other than f64, f32, bf16 and f16, tensors of another type or
/// device than q's, a window or chunk of 0, a scale that is not finite; candle's.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: CausalOptions<'_>) -> Result<Tensor> {
    let call = Call("ops::attention");
    let CausalOptions { window, chunk, sinks, scale } = options;
    call.float("q", q)?;
    let &[sequences, heads, queries, dim] = q.dims() else { return call.refuse_shape("q", q, "[B, heads, S, D]") };
    if heads == 0 || dim == 0 {
        return call.refuse_shape("q", q, "[B, heads, S, D] with heads >= 1 and D >= 1");
    }
    let (keys, positions) = match *k.dims() {
        [b, keys, n, d] if (b, d) == (sequences, dim) && keys > 0 && n >= queries.max(1) => (keys, n),
        _ => {
            let expected =
                format!("[{sequences}, key heads, N, {dim}] with key heads >= 1 and N >= {}", queries.max(1));
            return call.refuse_shape("k", k, expected);
        }
    };
    if !heads.is_multiple_of(keys) {
        return call.refuse_shape("k", k, format!("key heads that divide the {heads} heads of q"));
    }
    let value = match *v.dims() {
        [b, h, n, value] if (b, h, n) == (sequences, keys, positions) && value > 0 => value,
        _ => return call.refuse_shape("v", v, format!("[{sequences}, {keys}, {positions}, V] with V >= 1")),
    };
    call.same_dtype_and_device(("q", q), "k", k)?;
    call.same_dtype_and_device(("q", q), "v", v)?;
    if let Some(sinks) = sinks {
        call.shape("sinks", sinks, &[heads])?;
        call.same_dtype_and_device(("q", q), "sinks", sinks)?;
    }
    call.span("window", window)?;
    call.span("chunk", chunk)?;
    let scale = scale.unwrap_or_else(|| (dim as f64).powf(-0.5));
    call.finite("scale", scale)?;
    if sequences == 0 || queries == 0 {
        let none = || Tensor::zeros((sequences, queries, heads, value), q.dtype(), q.device());
        let of_rows = with_zero_gradients("attention", &[q, k, v], none()?)?;
        return match sinks {
            Some(sinks) => Ok(with_zero_gradients("attention", &[&of_rows, sinks], none()?)?),
            None => Ok(of_rows),
        };
    }
    let sinks = sinks.map(Tensor::contiguous).transpose()?;
    let masks = MaskCache::default();
    let first = positions - queries;
    let options = AttentionOptions { first, window, chunk, sinks: sinks.as_ref(), scale, masks: &masks };
    Ok(masked_attention(q, k, v, &options)?)
}
