//! The operations against candle's plain ones, whose gradients are candle's own.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::rotary_emb::{rope_i_slow, rope_slow};

use super::*;
use crate::testing::random;

/// ‖found − expected‖ / ‖expected‖, in f64 of what both are.
pub(super) fn relative(found: &Tensor, expected: &Tensor) -> Result<f64> {
    let of = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let (found, expected) = (of(found)?, of(expected)?);
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>();
    Ok(norm(&(&found - &expected)?)? / norm(&expected)?.max(f64::MIN_POSITIVE))
}

/// The same type and shape, and a relative difference within `tolerance`.
pub(super) fn close(found: &Tensor, expected: &Tensor, tolerance: f64, name: &str) -> Result<()> {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{name}");
    let error = relative(found, expected)?;
    assert!(error <= tolerance, "{name}: {error:e} over {tolerance:e}");
    Ok(())
}

fn var(seed: u64, dims: &[usize], dtype: DType) -> Result<Var> {
    Var::from_tensor(&random(seed, dims).to_dtype(dtype)?)
}

/// Both results and the gradients of Σ y ∘ weights.
fn compare(name: &str, [found, expected]: [&Tensor; 2], vars: &[&Var], tolerance: f64) -> Result<()> {
    close(found, expected, tolerance, name)?;
    let weights = random(99, found.dims()).to_dtype(found.dtype())?;
    let gradients = |y: &Tensor| (y * &weights)?.sum_all()?.backward();
    let (found, expected) = (gradients(found)?, gradients(expected)?);
    for (number, var) in vars.iter().enumerate() {
        let missing = || candle_core::Error::msg(format!("{name}: no gradient of input {number}"));
        let (found, expected) = (found.get(var).ok_or_else(missing)?, expected.get(var).ok_or_else(missing)?);
        close(found, expected, tolerance, &format!("{name}: gradient of input {number}"))?;
    }
    Ok(())
}

/// In f64 and f32: sums of at most 12 terms.
#[test]
fn rotation() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-15), (DType::F32, 1e-6)] {
        let x = var(1, &[2, 3, 5, 8], dtype)?;
        let angles = random(2, &[5, 4]);
        let (cos, sin) = (angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?);
        let halves = [&rotate(&x, [&cos, &sin], false)?, &rope_slow(&x, &cos, &sin)?];
        compare("halves", halves, &[&x], tolerance)?;
        let pairs = [&rotate(&x, [&cos, &sin], true)?, &rope_i_slow(&x, &cos, &sin)?];
        compare("pairs", pairs, &[&x], tolerance)?;
    }
    Ok(())
}

/// Tokens of less than a block, of several, and none; with bias and scale.
#[test]
fn cross_entropy_of_tokens() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
        for tokens in [1, 5, 512, 1100] {
            let (x, weight) = (var(1, &[tokens, 6], dtype)?, var(2, &[11, 6], dtype)?);
            let bias = var(3, &[11], dtype)?;
            let next: Vec<u32> = (0..tokens as u32).map(|t| t * 7 % 11).collect();
            let next = Tensor::new(next, &Device::Cpu)?;
            for (with_bias, scale) in [(false, 1.0), (true, 0.3)] {
                let own = with_bias.then(|| bias.as_tensor().clone());
                let head = Head { weight: weight.as_tensor().clone(), bias: own, scale };
                let found = head_cross_entropy(&x, &head, &next)?;
                let logits = x.matmul(&weight.t()?)?;
                let logits = if with_bias { logits.broadcast_add(&bias)? } else { logits };
                let logits = (logits * scale)?;
                let chosen = logits.gather(&next.unsqueeze(1)?, 1)?.squeeze(1)?;
                let plain = (logits.log_sum_exp(D::Minus1)? - chosen)?.sum_all()?;
                let all = [&x, &weight, &bias];
                compare("cross_entropy", [&found, &plain], &all[..2 + usize::from(with_bias)], tolerance)?;
            }
        }
    }
    let head = Head { weight: random(1, &[3, 2]), bias: None, scale: 1.0 };
    let none = head_cross_entropy(&random(1, &[0, 2]), &head, &Tensor::zeros(0, DType::U32, &Device::Cpu)?)?;
    assert_eq!(none.to_dtype(DType::F64)?.to_scalar::<f64>()?, 0.0);
    Ok(())
}

/// A uniform model's loss is ln V a token, and its gradient of the logits 1/V − 1 at the next token.
#[test]
fn cross_entropy_of_a_uniform_model() -> Result<()> {
    let head = Head { weight: Tensor::zeros((8, 4), DType::F64, &Device::Cpu)?, bias: None, scale: 1.0 };
    let next = Tensor::new(&[0u32, 7, 3], &Device::Cpu)?;
    let loss = head_cross_entropy(&random(1, &[3, 4]), &head, &next)?.to_scalar::<f64>()?;
    assert!((loss - 3.0 * 8f64.ln()).abs() < 1e-14, "{loss}");
    Ok(())
}

/// What nobody asks for is not computed, and an operation's value is its own.
#[test]
fn operations_without_gradients_are_plain_values() -> Result<()> {
    let weight = random(2, &[4]);
    let normed = |x: &Tensor| norm(x, Some(NormWeights { weight: &weight, bias: None }), NormOptions::rms(1e-6));
    let y = normed(&random(1, &[2, 4]))?;
    assert!(!y.track_op());
    let x = Var::from_tensor(&random(1, &[2, 4]))?;
    let y = normed(&x)?;
    assert!(y.track_op() && y.sum_all()?.backward()?.get(&x).is_some());
    Ok(())
}
