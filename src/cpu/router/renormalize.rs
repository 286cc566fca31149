//! Weights of a token whose choices were partly dropped.

use crate::cpu::Cpu;
use crate::cpu::element::{Acc, with_acc};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::RenormalizeKept;

use super::check;

pub(in crate::cpu) fn renormalize_kept(call: RenormalizeKept<'_, Cpu>) -> Result<()> {
    with_acc!("renormalize_kept", "tensor weights", call.weights.dtype(), A => renormalize_kept_as::<A>(call))
}

fn renormalize_kept_as<A: Acc>(call: RenormalizeKept<'_, Cpu>) -> Result<()> {
    const CALL: &str = "renormalize_kept";
    let dims = call.weights.dims();
    let &[_, k] = dims else {
        return Err(Error::invalid(CALL, "tensor weights", "shape [T, K]", format!("{dims:?}")));
    };
    check(CALL, "kept", DType::I32, dims, call.kept.dtype(), call.kept.dims())?;
    check(CALL, "out", A::DTYPE, dims, call.out.dtype(), call.out.dims())?;
    if let Some(grad) = &call.grad {
        check(CALL, "grad", A::DTYPE, dims, grad.dtype(), grad.dims())?;
    }
    if k == 0 {
        return Ok(());
    }
    let (weights, kept) = (call.weights.as_slice::<A>()?, call.kept.as_slice::<i32>()?);
    let grad = call.grad.map(|g| g.as_slice::<A>()).transpose()?;
    let out = call.out.into_slice::<A>()?;
    for (t, out) in out.chunks_exact_mut(k).enumerate() {
        let row = t * k..(t + 1) * k;
        match grad {
            None => forward(&weights[row.clone()], &kept[row], out),
            Some(grad) => backward(&weights[row.clone()], &kept[row.clone()], &grad[row], out),
        }
    }
    Ok(())
}

/// Sums of all weights and of the kept ones. `None` where nothing is to be scaled: nothing dropped, or no weight kept.
fn sums<A: Acc>(weights: &[A], kept: &[i32]) -> Option<(f64, f64)> {
    if kept.iter().all(|&id| id >= 0) {
        return None;
    }
    let all: f64 = weights.iter().map(|v| v.as_f64()).sum();
    let left: f64 = weights.iter().zip(kept).filter(|(_, id)| **id >= 0).map(|(w, _)| w.as_f64()).sum();
    (left != 0.0).then_some((all, left))
}

fn forward<A: Acc>(weights: &[A], kept: &[i32], out: &mut [A]) {
    let ratio = sums(weights, kept).map(|(all, left)| all / left);
    for ((o, &w), &id) in out.iter_mut().zip(weights).zip(kept) {
        *o = match (id >= 0, ratio) {
            (false, _) => A::zero(),
            (true, None) => w,
            (true, Some(ratio)) => A::of(w.as_f64() * ratio),
        };
    }
}

/// Of out_k = w_k·S/D with S the sum of all weights and D that of the kept.
fn backward<A: Acc>(weights: &[A], kept: &[i32], grad: &[A], out: &mut [A]) {
    let Some((all, left)) = sums(weights, kept) else {
        for ((o, &g), &id) in out.iter_mut().zip(grad).zip(kept) {
            *o = if id >= 0 { g } else { A::zero() };
        }
        return;
    };
    let present = |id: i32| id >= 0;
    let dot: f64 = (weights.iter().zip(grad).zip(kept))
        .filter(|(_, id)| present(**id))
        .map(|((w, g), _)| w.as_f64() * g.as_f64())
        .sum();
    for ((o, &g), &id) in out.iter_mut().zip(grad).zip(kept) {
        let own = if present(id) { g.as_f64() * all / left - dot * all / (left * left) } else { 0.0 };
        *o = A::of(dot / left + own);
    }
}
