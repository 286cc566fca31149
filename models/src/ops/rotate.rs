//! Rotation of pairs of entries, with a backward.

use candle_core::{Result, Tensor};
use candle_nn::rotary_emb::{rope, rope_i};

use super::with_backward;

/// Rotates `x [B, heads, S, D]` by the angles of `cos` and `sin`, `[S, D/2]`: pairs of entries i and D/2 + i, or 2i and
/// 2i + 1 where `interleaved`. The gradient is rotated back.
pub(crate) fn rotate(x: &Tensor, [cos, sin]: [&Tensor; 2], interleaved: bool) -> Result<Tensor> {
    let turn = move |x: &Tensor, cos: &Tensor, sin: &Tensor| {
        let x = x.contiguous()?;
        if interleaved { rope_i(&x, cos, sin) } else { rope(&x, cos, sin) }
    };
    let (cos, sin) = (cos.detach(), sin.detach());
    let y = turn(&x.detach(), &cos, &sin)?;
    with_backward("rotate", &[x], y, move |_, _, of| Ok(vec![Some(turn(of, &cos, &sin.neg()?)?)]))
}
