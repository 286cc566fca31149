//! A forward into the caller's memory, on every device and over ranks.

use candle_core::{DType, Device, Module, Tensor, Var};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, error_of};
use moebius::config::AuxConfig;
use moebius::layer::ParamKind;

use crate::dispatch::{Place, on_ranks};
use crate::support::{AnyResult, H, config, flat, seeded, wide_tokens};
use crate::trials::tests;

const TOKENS: usize = 6;

fn poisoned(dims: &[usize], device: &Device) -> AnyResult<Tensor> {
    Ok(Tensor::full(f32::NAN, dims, device)?)
}

/// This rank's tokens.
fn tokens(group: &DeviceGroup) -> AnyResult<Tensor> {
    let first = group.rank() * TOKENS;
    Ok(wide_tokens(first..first + TOKENS, H, DType::F32, group.device())?.as_detached_tensor())
}

/// The memory has the bits that a forward returns, whatever its leading dimensions, and the module its figures.
fn given_memory_has_the_bits_of_a_result(place: &Place) -> AnyResult<()> {
    let mut config = config();
    config.aux = AuxConfig::default().with_balance(0.01);
    on_ranks(place, place.count(), |group| {
        let (moe, x) = (seeded(group, config.clone())?.detached(), tokens(group)?);
        let expected = flat(&moe.forward(&x)?)?;
        let aux = moe.last_aux()?.get()?.balance;
        for dims in [vec![TOKENS, H], vec![2, TOKENS / 2, H]] {
            let y = poisoned(&dims, group.device())?;
            moe.forward_into(&x.reshape(dims)?, &y)?;
            assert_eq!(flat(&y)?, expected);
            assert_eq!(moe.last_aux()?.get()?.balance, aux);
        }
        // A part of a larger storage, of which the rest stays.
        let wide = poisoned(&[TOKENS + 2, H], group.device())?;
        moe.forward_into(&x, &wide.narrow(0, 1, TOKENS)?)?;
        let rows = flat(&wide)?;
        assert_eq!(rows[H..(TOKENS + 1) * H], expected);
        assert!(rows[..H].iter().chain(&rows[(TOKENS + 1) * H..]).all(|value| value.is_nan()));
        let none = x.narrow(0, 0, 0)?;
        Ok(moe.forward_into(&none, &none.copy()?)?)
    })?;
    Ok(())
}

/// Memory that does not fit, and gradients: typed, on every rank, and the group goes on.
fn what_does_not_fit_is_refused(place: &Place) -> AnyResult<()> {
    let count = place.count();
    for (wrong, told) in [
        ("shape", "tensor y: expected shape [6, "),
        ("type", "found f64"),
        ("layout", "tensor y: expected contiguous memory"),
        ("x's own", "y: expected memory of its own"),
        ("a weight's own", "y: expected memory of its own"),
        ("a module that tracks", "found what tracks gradients"),
        ("tokens that track", "found what tracks gradients"),
    ] {
        let failed = on_ranks(place, count, |group| {
            let (trained, x) = (seeded(group, config())?, tokens(group)?);
            let (moe, y) = (trained.detached(), poisoned(&[TOKENS, H], group.device())?);
            let other = |moe: &ExpertParallelMoE| -> AnyResult<_> {
                let router = moe.param(ParamKind::Router).ok_or("a router")?;
                Ok(router.flatten_all()?.narrow(0, 0, TOKENS * H)?.reshape((TOKENS, H))?)
            };
            let of = match group.rank() == count - 1 {
                false => "",
                true => wrong,
            };
            let result = match of {
                "shape" => moe.forward_into(&x, &poisoned(&[TOKENS, H + 1], group.device())?),
                "type" => moe.forward_into(&x, &y.to_dtype(DType::F64)?),
                "layout" => moe.forward_into(&x, &poisoned(&[H, TOKENS], group.device())?.t()?),
                "x's own" => moe.forward_into(&x, &x),
                "a weight's own" => moe.forward_into(&x, &other(&moe)?),
                "a module that tracks" => trained.forward_into(&x, &y),
                "tokens that track" => {
                    let tracked = Var::from_tensor(&x)?;
                    moe.forward_into(tracked.as_tensor(), &y)
                }
                _ => moe.forward_into(&x, &y),
            };
            let error = result.expect_err(wrong);
            assert!(error_of(&error).is_some(), "{wrong}: {error}");
            moe.forward_into(&x, &y)?;
            assert_eq!(flat(&y)?, flat(&moe.forward(&x)?)?, "the group goes on");
            Ok(error.to_string())
        })?;
        let text = &failed[count - 1];
        assert!(text.contains("forward") && text.contains(told), "{wrong}: {text}");
        for other in &failed[..count - 1] {
            assert!(other.contains(&format!("rank {}", count - 1)), "{wrong}: {other}");
        }
    }
    Ok(())
}

tests! {
    fn(&Place) -> AnyResult<()>;
    given_memory_has_the_bits_of_a_result,
    what_does_not_fit_is_refused,
}
