//! Rotation of pairs of entries, with a backward.

use candle_core::{Result, Tensor};
use candle_nn::rotary_emb;

use super::argument_checks::Call;
use super::{with_backward, with_zero_gradients};
use crate::error::Result as CheckedResult;

/// Which entries of a head are rotated with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RopeLayout {
    /// Entries i and D/2 + i, as most published models have it.
    #[default]
    Halves,
    /// Neighbors, entries 2i and 2i + 1, as GPT-J's layout has it.
    Interleaved,
}

/// Rotary embedding: the pairs of entries of `x [B, heads, S, D]` that `layout` names, (a, b), become
/// (a · cos − b · sin, a · sin + b · cos) by the i-th angle of the position. `cos` and `sin`, `[S, D/2]` each, are those of
/// the S positions. The result has x's shape and type, in which it is computed.
///
/// Unlike candle's it has a backward, which rotates back and keeps `cos` and `sin` alone; these get no gradient. Where
/// a part of a head is rotated, hand in that part.
///
/// # Errors
/// A typed error for another number of dimensions, an odd D or one of 0, types other than f64, f32, bf16 and f16, and `cos`
/// or `sin` of other sizes, another type or device than x's; candle's.
pub fn rope(x: &Tensor, [cos, sin]: [&Tensor; 2], layout: RopeLayout) -> CheckedResult<Tensor> {
    let call = Call("ops::rope");
    call.float("x", x)?;
    let &[_, _, positions, dim] = x.dims() else { return call.refuse_shape("x", x, "[B, heads, S, D]") };
    if dim == 0 || !dim.is_multiple_of(2) {
        return call.refuse_shape("x", x, "[B, heads, S, D] with an even D >= 2");
    }
    for (name, t) in [("cos", cos), ("sin", sin)] {
        call.shape(name, t, &[positions, dim / 2])?;
        call.same_dtype_and_device(("x", x), name, t)?;
    }
    if x.elem_count() == 0 {
        return Ok(with_zero_gradients("rotate", &[x], x.zeros_like()?)?);
    }
    Ok(rotate(x, [&cos.contiguous()?, &sin.contiguous()?], layout == RopeLayout::Interleaved)?)
}

/// Rotates `x [B, heads, S, D]` by the angles of `cos` and `sin`, `[S, D/2]`: pairs of entries i and D/2 + i, or 2i and
/// 2i + 1 where `interleaved`. The gradient is rotated back.
pub(crate) fn rotate(x: &Tensor, [cos, sin]: [&Tensor; 2], interleaved: bool) -> Result<Tensor> {
    let turn = move |x: &Tensor, cos: &Tensor, sin: &Tensor| {
        let x = x.contiguous()?;
        if interleaved { rotary_emb::rope_i(&x, cos, sin) } else { rotary_emb::rope(&x, cos, sin) }
    };
    let (cos, sin) = (cos.detach(), sin.detach());
    let y = turn(&x.detach(), &cos, &sin)?;
    with_backward("rotate", &[x], y, move |_, _, of| Ok(vec![Some(turn(of, &cos, &sin.neg()?)?)]))
}
