//! One rank, on every device.

use candle_core::{D, DType, Device, Module, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use moebius::DType as OurDType;
use moebius::candle::{ExpertParallelMoE, Parameters};
use moebius::checkpoint::Checkpoint;
use moebius::config::{AuxConfig, BalanceKind, Payload};
use moebius::layer::{Layer, ParamKind};

use crate::goldens::golden_of;
use crate::support::{
    AnyResult, EXPERTS, H, config, distance, flat, group, normal, redraw, seeded, single, tokens, wide_tokens,
};
use crate::trials::tests;

fn any_leading_dimensions_and_layouts(device: &Device) -> AnyResult<()> {
    let moe = single(config(), DType::F32, device)?;
    let x = normal(41, (6, H), DType::F32, device)?;
    let flat = moe.forward(&x)?.to_vec2::<f32>()?;
    let cube = moe.forward(&x.reshape((2, 3, H))?)?;
    assert_eq!(cube.dims(), [2, 3, H]);
    assert_eq!(cube.reshape((6, H))?.to_vec2::<f32>()?, flat);
    let strided = x.t()?.contiguous()?.t()?;
    assert!(!strided.is_contiguous());
    assert_eq!(moe.forward(&strided)?.to_vec2::<f32>()?, flat);
    // A part of a larger storage.
    assert_eq!(moe.forward(&x.narrow(0, 2, 3)?)?.to_vec2::<f32>()?, flat[2..5]);
    assert_eq!(moe.forward(&x.narrow(0, 0, 0)?)?.dims(), [0, H]);
    Ok(())
}

fn nothing_is_kept_where_nothing_tracks(device: &Device) -> AnyResult<()> {
    let trained = single(config(), DType::F32, device)?;
    let x = normal(42, (6, H), DType::F32, device)?;
    assert!(trained.forward(&x)?.track_op(), "parameters are variables");
    let frozen = trained.params().into_iter().map(|(n, t)| (n.to_string(), t.detach())).collect();
    let vb = VarBuilder::from_tensors(frozen, DType::F32, device);
    let frozen = ExpertParallelMoE::new(trained.layer().clone(), group(device)?, vb)?;
    let y = frozen.forward(&x)?;
    assert!(!y.track_op(), "no operation, so no context, hangs on the output");
    assert_eq!(y.to_vec2::<f32>()?, trained.forward(&x)?.to_vec2::<f32>()?);
    // x alone tracks: its gradient and nothing else.
    let x = Var::from_tensor(&x)?;
    let gradients = frozen.forward(&x)?.sum_all()?.backward()?;
    assert!(gradients.get(&x).is_some());
    assert!(frozen.vars().is_empty());
    Ok(())
}

fn a_second_backward_is_an_error(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let loss = moe.forward(tokens(0..3, device)?.as_tensor())?.sqr()?.sum_all()?;
    loss.backward()?;
    let error = loss.backward().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("consumed") && error.contains("rank 0"), "{error}");
    moe.forward(tokens(0..3, device)?.as_tensor())?.sum_all()?.backward()?;
    Ok(())
}

fn an_absent_gradient_counts_as_zeros(device: &Device) -> AnyResult<()> {
    // GPUs have no f64 here. Both bounds are some hundred roundings of their type.
    let (dtype, bound) = if device.is_cpu() { (DType::F64, 1e-13) } else { (DType::F32, 2e-5) };
    let mut with_aux = config();
    with_aux.aux = AuxConfig::default();
    with_aux.aux.balance = 0.5;
    with_aux.aux.z = 0.25;
    let moe = single(with_aux, dtype, device)?;
    let x = Var::from_tensor(&normal(43, (12, H), dtype, device)?)?;
    // Only the auxiliary loss is used: experts' gradients are exact zeros, the router's are not.
    let gradients = moe.forward_full(&x, None)?.aux.backward()?;
    let number = |t: &Tensor| -> AnyResult<f64> { Ok(t.to_dtype(DType::F64)?.to_scalar::<f64>()?) };
    let norm = |kind: ParamKind| -> AnyResult<f64> {
        let param = moe.param(kind).ok_or("no such parameter")?;
        number(&gradients.get(param).ok_or("no gradient")?.abs()?.sum_all()?)
    };
    assert_eq!(norm(ParamKind::Up)?, 0.0);
    assert_eq!(norm(ParamKind::Down)?, 0.0);
    assert!(norm(ParamKind::Router)? > 0.0);
    // Both outputs: the gradients add. Linear in the cotangents, so the sums agree to rounding.
    let both = moe.forward_full(&x, None)?;
    let both = both.y.sum_all()?.add(&(both.aux * 3.0)?)?.backward()?;
    let y_only = moe.forward(&x)?.sum_all()?.backward()?;
    let router = moe.param(ParamKind::Router).ok_or("no router")?;
    let of = |g: &candle_core::backprop::GradStore| g.get(router).cloned().ok_or("no gradient");
    let expected = (of(&y_only)? + (of(&gradients)? * 3.0)?)?;
    let error = number(&(of(&both)? - &expected)?.abs()?.max_all()?)?;
    let scale = number(&expected.abs()?.max_all()?)?;
    assert!(error <= bound * scale, "{error} of {scale} on {device:?}");
    Ok(())
}

fn adamw_trains_it_inside_a_model(device: &Device) -> AnyResult<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let mut with_aux = config();
    with_aux.aux.balance = 0.01;
    with_aux.aux.balance_kind = BalanceKind::HuggingFace;
    let first = candle_nn::linear(4, H, vb.pp("first"))?;
    let moe = ExpertParallelMoE::new(Layer::new(with_aux, 0)?, group(device)?, vb.pp("moe"))?;
    let last = candle_nn::linear(H, 1, vb.pp("last"))?;
    redraw(&vars, 45)?;
    let values: Vec<f32> = (0..256).map(|i| ((i * 7919) % 127) as f32 / 63.5 - 1.0).collect();
    let x = Tensor::from_vec(values, (64, 4), device)?;
    let target = (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)?;
    let mut adam = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let mut losses = Vec::new();
    for _ in 0..150 {
        let out = moe.forward_full(&first.forward(&x)?, None)?;
        let error = (last.forward(&out.y)? - &target)?.sqr()?.mean_all()?;
        losses.push(error.to_scalar::<f32>()?);
        adam.backward_step(&(error + out.aux)?)?;
    }
    let (start, end) = (losses[0], losses[losses.len() - 1]);
    assert!(end < 0.2 * start, "the loss went from {start} to {end} on {device:?}");
    Ok(())
}

fn half_types_stay_near_f32(device: &Device) -> AnyResult<()> {
    // One rounding to 8 (11) bits at each of four stored tensors: 4 half-ulps of relative size 2^-9 (2^-12).
    for (dtype, bound) in [(DType::BF16, 4.0 / 512.0), (DType::F16, 4.0 / 4096.0)] {
        let moe = single(config(), dtype, device)?;
        let x = normal(44, (32, H), dtype, device)?;
        let y = moe.forward(&x)?;
        assert_eq!(y.dtype(), dtype);
        let wide = moe.params().into_iter().map(|(n, t)| Ok((n.to_string(), t.to_dtype(DType::F32)?)));
        let wide = wide.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(wide, DType::F32, device);
        let reference = ExpertParallelMoE::new(moe.layer().clone(), group(device)?, vb)?;
        let reference = reference.forward(&x.to_dtype(DType::F32)?)?;
        let error = (y.to_dtype(DType::F32)? - &reference)?.sqr()?.sum(D::Minus1)?.sum_all()?.sqrt()?;
        let error = error.to_scalar::<f32>()? / reference.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
        assert!(f64::from(error) <= bound, "{dtype:?} on {device:?}: {error}");
    }
    assert_eq!(OurDType::BF16.size(), 2);
    Ok(())
}

/// The layer's configuration says so, and the module knows nothing of it.
fn tokens_may_be_sent_quantized(device: &Device) -> AnyResult<()> {
    const WIDE: usize = 64;
    for (payload, most) in [(Payload::Nvfp4, 0.45), (Payload::Mxfp8, 0.19), (Payload::Fp8Block, 0.19)] {
        let mut config = moebius::MoeConfig::new(WIDE, 24, EXPERTS, 2);
        let plain = seeded(group(device)?, config.clone())?;
        config.payload = payload;
        let quantized = plain.clone().with_layer(Layer::new(config.clone(), 4)?);
        // The formats hold these; one element of every 16 is the row's largest, of which fp8 blocks make a scale.
        let largest = if payload == Payload::Fp8Block { 7.0 } else { 6.0 };
        let values: Vec<f32> = (0..9 * WIDE).map(|i| [largest, -0.5, 1.0, 3.0, -4.0, 1.5, 2.0, 0.0][i % 8]).collect();
        let exact = Tensor::from_vec(values, (9, WIDE), &Device::Cpu)?.to_device(device)?;
        assert_eq!(flat(&quantized.forward(&exact)?)?, flat(&plain.forward(&exact)?)?);
        // Elements move by 0.15 (E2M1) and 0.0625 (E4M3) of their norm at most, outputs three times as far.
        let x = wide_tokens(0..9, WIDE, DType::F32, device)?;
        let (found, expected) = (quantized.forward(&x)?, flat(&plain.forward(&x)?)?);
        let moved = distance(&flat(&found)?, &expected);
        assert!(moved > 0.0 && moved < most, "{payload:?}: {moved}");
        let gradients = found.sqr()?.sum_all()?.backward()?;
        for t in quantized.vars().iter().map(|v| v.as_tensor()).chain([x.as_tensor()]) {
            let norm = flat(gradients.get(t).ok_or("no gradient")?)?.iter().map(|v| v * v).sum::<f32>();
            assert!(norm.is_finite() && norm > 0.0);
        }
        config.hidden = H;
        let error = Layer::new(config, 0).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("hidden") && error.contains("multiple of 32"), "{error}");
    }
    Ok(())
}

/// A checkpoint's own payload is loaded as ever; the payload of tokens is the layer's.
fn checkpoints_do_not_say_how_tokens_travel(device: &Device) -> AnyResult<()> {
    let moe = ExpertParallelMoE::from_checkpoint(
        &Checkpoint::open(golden_of("qwen3_moe"))?,
        0,
        group(device)?,
        Parameters::Frozen,
    )?;
    let mut config = moe.layer().config().clone();
    assert_eq!(config.payload, Payload::Plain);
    config.payload = Payload::Mxfp8;
    let quantized = moe.clone().with_layer(Layer::new(config.clone(), 1)?);
    let x = wide_tokens(0..9, config.hidden, DType::F32, device)?;
    let moved = distance(&flat(&quantized.forward(&x)?)?, &flat(&moe.forward(&x)?)?);
    assert!(moved > 0.0 && moved < 0.19, "{moved}");
    Ok(())
}

fn auxiliary_losses_are_read_by_who_asks(device: &Device) -> AnyResult<()> {
    let mut config = config();
    (config.aux.balance, config.aux.z) = (0.1, 0.01);
    let moe = single(config, DType::F32, device)?;
    let out = moe.forward_full(&normal(43, (6, H), DType::F32, device)?, None)?;
    (out.y.sum_all()? + (&out.aux * 0.5)?)?.backward()?;
    assert!(out.losses.known().is_none(), "neither forward nor backward has read them");
    let losses = out.losses.get()?;
    assert!(losses.balance > 0.05 && losses.z > 0.0);
    assert_eq!(out.aux.to_scalar::<f32>()?.to_bits(), (losses.total() as f32).to_bits());
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    auxiliary_losses_are_read_by_who_asks,
    any_leading_dimensions_and_layouts,
    nothing_is_kept_where_nothing_tracks,
    a_second_backward_is_an_error,
    an_absent_gradient_counts_as_zeros,
    adamw_trains_it_inside_a_model,
    half_types_stay_near_f32,
    tokens_may_be_sent_quantized,
    checkpoints_do_not_say_how_tokens_travel,
}
