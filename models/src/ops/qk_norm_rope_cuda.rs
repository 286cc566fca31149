//! qk-norm and rotary embedding by a kernel (`kernels/qk_norm_rope.cu`): bf16.

use candle_core::{DType, Error, Result, Tensor};
use candle_nn::Linear;

use super::cuda::{Grid, Launcher, int, is_plain, output, with_addresses_mut};
use super::params::{QkNormRopeParams, THREADS, WARPS};
use super::qk_norm_rope::QkNormRope;

/// Whether there is a kernel for the product of `x` and this projection, and every tensor is as it takes them.
pub(super) fn serves(of: &QkNormRope<'_>, projection: &Linear, x: &Tensor) -> bool {
    let (dim, w) = (of.dim, projection.weight());
    let angle =
        |t: &&Tensor| is_plain(t, x) && matches!(t.dims(), [rows, half] if *rows == of.tokens && 2 * half <= dim);
    x.dtype() == DType::BF16
        && x.device().is_cuda()
        // The product is no part of a graph.
        && [Some(x), Some(w), projection.bias()].into_iter().flatten().all(|t| !t.track_op())
        && of.tokens > 0
        && matches!(x.dims(), [tokens, _] if *tokens == of.sequences * of.tokens)
        && matches!(w.dims(), [columns, _] if *columns == columns_of(of))
        // A block's rows in shared memory.
        && dim <= 1024
        && of.weights.iter().flatten().all(|t| is_plain(t, x) && t.dims() == [dim] && !t.track_op())
        && of.angles.iter().flatten().all(angle)
        && of.angles.is_none_or(|[cos, sin]| cos.dims() == sin.dims())
}

fn columns_of(of: &QkNormRope<'_>) -> usize {
    (of.heads + 2 * of.key_heads) * of.dim
}

pub(super) fn split(of: &QkNormRope<'_>, qkv: &Tensor) -> Result<[Tensor; 3]> {
    let QkNormRope { sequences, tokens, heads, key_heads, dim, .. } = *of;
    // All queries, then all keys, then all values.
    let entries = |heads: usize| sequences * tokens * heads * dim;
    let out = made(of, qkv, heads + 2 * key_heads, None, |launch, out| {
        let bytes = |heads: usize| (entries(heads) * qkv.dtype().size_in_bytes()) as u64;
        launch.enqueue(out, [out + bytes(heads), out + bytes(heads + key_heads)], tokens)
    })?;
    let part = |from: usize, heads: usize| {
        out.narrow(0, entries(from), entries(heads))?.reshape((sequences, heads, tokens, dim))
    };
    Ok([part(0, heads)?, part(heads, key_heads)?, part(heads + key_heads, key_heads)?])
}

pub(super) fn put(of: &QkNormRope<'_>, qkv: &Tensor, caches: [&Tensor; 2], at: &Tensor) -> Result<Tensor> {
    let QkNormRope { sequences, heads, key_heads, dim, .. } = *of;
    let fits = |t: &&Tensor| {
        let dims = t.dims();
        is_plain(t, qkv) && dims.len() == 4 && [dims[0], dims[1], dims[3]] == [sequences, key_heads, dim]
    };
    if !caches.iter().all(fits) || caches[0].dims() != caches[1].dims() || at.dims() != [1] || at.dtype() != DType::U32
    {
        let found: Vec<&[usize]> = caches.into_iter().chain([at]).map(Tensor::dims).collect();
        return Err(Error::msg(format!(
            "heads: caches {found:?} of {sequences} sequences, {key_heads} heads of {dim}"
        )));
    }
    let count = caches[0].dim(2)?;
    let q = made(of, qkv, heads, Some(at), |launch, q| {
        with_addresses_mut(&caches, |caches| match *caches {
            [k, v] => launch.enqueue(q, [k, v], count),
            _ => Err(Error::msg("heads: expected the memory of two tensors")),
        })
    })?;
    q.reshape((sequences, heads, of.tokens, dim))
}

/// A launch that lacks only where its results go.
struct Launch<'a> {
    gpu: &'a Launcher,
    params: QkNormRopeParams,
    grid: Grid,
}

impl Launch<'_> {
    /// Queries go to `q`, keys and values to `k` and `v`, which have `positions` cache positions for each key head.
    fn enqueue(self, q: u64, [k, v]: [u64; 2], positions: usize) -> Result<()> {
        let params = QkNormRopeParams { q, k, v, positions: int(positions)?, ..self.params };
        // SAFETY: the kernel's struct; `serves`, `made` and `put` have compared the shapes of what it reads and writes.
        unsafe { self.gpu.launch(&self.gpu.kernels.qk_norm_rope, self.grid, &params) }
    }
}

/// A new tensor of so many heads of each token, which `enqueue` has the kernel write.
fn made(
    of: &QkNormRope<'_>,
    qkv: &Tensor,
    heads: usize,
    position: Option<&Tensor>,
    enqueue: impl FnOnce(Launch<'_>, u64) -> Result<()>,
) -> Result<Tensor> {
    let rows = of.sequences * of.tokens;
    if qkv.dims() != [rows, columns_of(of)] || qkv.dtype() != DType::BF16 || !is_plain(qkv, qkv) {
        let expected = [rows, columns_of(of)];
        return Err(Error::msg(format!("heads: expected a product {expected:?} in bf16, found {:?}", qkv.layout())));
    }
    let ([q_weight, k_weight], [cos, sin]) = (both(of.weights), both(of.angles));
    let rotated = cos.map_or(Ok(0), |cos| cos.dim(1).map(|half| 2 * half))?;
    let inputs = [Some(qkv), position, q_weight, k_weight, cos, sin];
    let like = (qkv.device(), qkv.dtype());
    output(like, rows * heads * of.dim, inputs, |gpu, [qkv, position, q_weight, k_weight, cos, sin], out| {
        let params = QkNormRopeParams {
            qkv,
            position,
            q_weight,
            k_weight,
            cos,
            sin,
            sequences: int(of.sequences)?,
            tokens: int(of.tokens)?,
            heads: int(of.heads)?,
            key_heads: int(of.key_heads)?,
            dim: int(of.dim)?,
            rotated: int(rotated)?,
            eps: of.eps as f32,
            ..Default::default()
        };
        let warps = WARPS as usize;
        let blocks = (rows * (of.heads + 2 * of.key_heads)).div_ceil(warps);
        let grid =
            Grid { blocks: [blocks, 1, 1], threads: THREADS as usize, shared: warps * of.dim * size_of::<f32>() };
        enqueue(Launch { gpu, params, grid }, out)
    })
}

/// Both, or neither.
fn both(tensors: Option<[&Tensor; 2]>) -> [Option<&Tensor>; 2] {
    tensors.map_or([None; 2], |pair| pair.map(Some))
}
