//! A GPU against the CPU, tensors of which nobody made a copy, and devices used wrongly.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, cuda, error_of, moe, routing_ids};
use moebius::comm::{Communicator, Solo};
use moebius::config::{SharedConfig, WeightAt};
use moebius::cuda::Cuda;
use moebius::ep::{EpGroup, GroupConfig, Reporting};
use moebius::etp::{Chain, Comms, EtpOptions, Payload};
use moebius::kernels::Kernels;
use moebius::layer::{DispatchOptions, ParamKind};
use moebius::{Error, MoeConfig};

use crate::support::{
    AnyError, AnyResult, EXPERTS, close, config, distance, flat, group, normal, of_type, seeded, step, tokens,
    wide_tokens,
};
use crate::trials::tests;

/// A group on the GPU whose buffers start as NaN.
pub fn poisoned(device: &Device, tokens: usize) -> AnyResult<DeviceGroup> {
    let group = cuda(device)?.poisoning().group(GroupConfig::new(EXPERTS, tokens))?;
    Ok(DeviceGroup::new(EpGroup::new(group), device)?)
}

/// Everything that a forward and a backward give, by name.
fn results(moe: &ExpertParallelMoE, tokens: usize, dtype: DType) -> AnyResult<Vec<(String, Vec<f32>)>> {
    let device = moe.group().device();
    let hidden = moe.layer().config().hidden;
    let x = wide_tokens(0..tokens, hidden, dtype, device)?;
    let cotangent = wide_tokens(tokens..2 * tokens, hidden, dtype, device)?;
    let out = moe.forward_full(&x, None)?;
    let loss = (&out.y * cotangent.as_tensor())?.sum_all()?.to_dtype(DType::F32)?;
    let gradients = (loss + (&out.aux * 0.5)?)?.backward()?;
    let mut all = vec![("y".to_string(), flat(&out.y)?), ("aux".to_string(), vec![out.aux.to_scalar::<f32>()?])];
    all.push(("logits".to_string(), flat(&out.logits)?));
    all.push(("weights".to_string(), flat(&out.weights)?));
    let ids = out.ids.flatten_all()?.to_vec1::<u32>()?;
    all.push(("ids".to_string(), ids.into_iter().map(|id| id as f32).collect()));
    all.push(("d x".to_string(), flat(gradients.get(&x).ok_or("no gradient of x")?)?));
    for kind in ParamKind::ALL {
        if let Some(gradient) = moe.param(kind).and_then(|t| gradients.get(t)) {
            all.push((format!("d {}", kind.name()), flat(gradient)?));
        }
    }
    Ok(all)
}

/// Layers that take every part of the adapter: all parameters; none but the needed; recomputation; small and large
/// tiles.
fn layers() -> Vec<(&'static str, MoeConfig, usize)> {
    let mut full = MoeConfig::new(136, 104, EXPERTS, 2);
    full.shared = Some(SharedConfig { intermediate: 72, gated: true, bias: false });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    (full.aux.balance, full.aux.z) = (0.1, 0.01);
    let mut recomputed = MoeConfig::new(128, 64, EXPERTS, 3);
    (recomputed.recompute, recomputed.weight_at) = (true, WeightAt::Input);
    vec![
        ("small", config(), 13),
        // Of token 186 two experts' logits are equal but for rounding.
        ("all parameters", full, 186),
        ("recomputed, weight at the input", recomputed, 150),
        ("large", MoeConfig::new(512, 256, EXPERTS, 2), 700),
    ]
}

fn a_gpu_gives_what_the_cpu_gives(device: &Device) -> AnyResult<()> {
    // Roundings to the type at each of the layer's stores (2⁻⁹ in bf16, 2⁻¹² in f16), of which a few add up, and sums
    // in f32 in another order.
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 4e-3), (DType::F16, 1e-3)] {
        for (name, config, tokens) in layers() {
            let on_cpu = results(&of_type(group(&Device::Cpu)?, config.clone(), dtype)?, tokens, dtype)?;
            let on_gpu = results(&of_type(poisoned(device, tokens)?, config, dtype)?, tokens, dtype)?;
            assert_eq!(on_cpu.len(), on_gpu.len());
            let mut worst = (0.0, "");
            for ((key, expected), (_, found)) in on_cpu.iter().zip(&on_gpu) {
                let error = distance(found, expected);
                let bound = if key == "ids" { 0.0 } else { bound };
                assert!(error <= bound, "{name} {dtype:?}: {key} is off by {error:e}");
                worst = if error > worst.0 { (error, key.as_str()) } else { worst };
            }
            println!("{name} {dtype:?}: worst {} {:.1e}", worst.1, worst.0);
        }
    }
    Ok(())
}

fn two_calls_among_ordinary_operations(device: &Device) -> AnyResult<()> {
    let expected = step(&seeded(group(&Device::Cpu)?, config())?, 0..13)?;
    let found = step(&seeded(poisoned(device, 16)?, config())?, 0..13)?;
    close("y", &found.0, &expected.0);
    close("d x", &found.1, &expected.1);
    for ((kind, found), (_, expected)) in found.2.iter().zip(&expected.2) {
        close(kind.name(), found, expected);
    }
    Ok(())
}

fn steps_of_an_optimizer_follow_the_cpu(device: &Device) -> AnyResult<()> {
    let train = |moe: &ExpertParallelMoE| -> AnyResult<Vec<(ParamKind, Vec<f32>)>> {
        let x = tokens(0..40, moe.group().device())?;
        let mut adam = AdamW::new(moe.vars(), ParamsAdamW { lr: 1e-3, ..Default::default() })?;
        for _ in 0..5 {
            adam.backward_step(&moe.forward(&x)?.sqr()?.mean_all()?)?;
        }
        ParamKind::ALL.into_iter().filter_map(|r| Some((r, moe.param(r)?))).map(|(r, t)| Ok((r, flat(t)?))).collect()
    };
    let expected = train(&seeded(group(&Device::Cpu)?, config())?)?;
    let found = train(&seeded(poisoned(device, 64)?, config())?)?;
    for ((kind, found), (_, expected)) in found.iter().zip(&expected) {
        // Adam divides a gradient by its own size: near 0, where f32 sums differ by 1e-7 of their terms, a step's
        // direction is the rounding's. Five steps of 1e-3 on weights of 0.1, a percent of them undecided.
        let error = distance(found, expected);
        assert!(error <= 1e-3, "{kind:?}: {error}");
    }
    Ok(())
}

fn steps_are_bit_identical_and_reuse_memory(device: &Device) -> AnyResult<()> {
    let moe = of_type(poisoned(device, 300)?, MoeConfig::new(136, 104, EXPERTS, 2), DType::BF16)?;
    let bits = || -> AnyResult<Vec<Vec<u32>>> {
        let all = results(&moe, 300, DType::BF16)?;
        Ok(all.into_iter().map(|(_, v)| v.into_iter().map(f32::to_bits).collect()).collect())
    };
    let first = bits()?;
    for step in 1..50 {
        // Other tensors come and go between: what candle frees is reused at once.
        let noise = normal(step, (300, 136), DType::F32, device)?;
        drop(noise.matmul(&noise.t()?)?);
        assert!(bits()? == first, "step {step} differs");
    }
    Ok(())
}

fn outputs_outlive_group_and_module(device: &Device) -> AnyResult<()> {
    let expected = flat(&seeded(group(&Device::Cpu)?, config())?.forward(tokens(0..13, &Device::Cpu)?.as_tensor())?)?;
    let y = seeded(group(device)?, config())?.forward(tokens(0..13, device)?.as_tensor())?.detach();
    // Another group's memory, while the first one's pool is gone.
    let other = seeded(group(device)?, config())?.forward(tokens(20..33, device)?.as_tensor())?.detach();
    close("y", &flat(&y)?, &expected);
    drop(other);
    close("y", &flat(&y)?, &expected);
    let total = (y.sqr()? + 1.0)?.sum_all()?.to_scalar::<f32>()?;
    assert!(total.is_finite());
    Ok(())
}

fn backward_on_another_thread(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let expected = step(&moe, 0..13)?;
    let found = std::thread::scope(|scope| scope.spawn(|| step(&moe, 0..13)).join().expect("a thread"))?;
    assert!(found == expected, "threads differ");
    let loss = moe.forward(tokens(0..13, device)?.as_tensor())?.sqr()?.sum_all()?;
    let gradients = std::thread::scope(|scope| scope.spawn(|| loss.backward()).join().expect("a thread"))?;
    assert!(moe.vars().iter().all(|v| gradients.get(v).is_some()));
    Ok(())
}

/// The error of a forward.
fn error(moe: &ExpertParallelMoE, x: &Tensor) -> String {
    moe.forward(x).err().map(|e| e.to_string()).unwrap_or_default()
}

fn wrong_tensors_are_named(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let good = tokens(0..4, device)?;
    let another = Device::new_cuda_with_stream(0)?;
    let bad = [
        (tokens(0..4, &Device::Cpu)?.as_tensor().clone(), ["tensor x", "CUDA device", "the CPU"]),
        (tokens(0..4, &another)?.as_tensor().clone(), ["tensor x", "CUDA device", "another CUDA device"]),
        (good.to_dtype(DType::U32)?, ["tensor x", "f32, bf16 or f16", "u32"]),
        (good.to_dtype(DType::F64)?, ["f64", "expected", "found"]),
        (good.narrow(1, 0, 8)?.contiguous()?, ["tensor x", "16]", "8]"]),
        (Tensor::new(1f32, device)?, ["tensor x", "16]", "[]"]),
    ];
    for (x, words) in bad {
        let text = error(&moe, &x);
        assert!(words.iter().all(|w| text.to_lowercase().contains(&w.to_lowercase())), "{words:?}: {text}");
        moe.forward(&good)?;
    }
    if let Ok(second) = Device::new_cuda_with_stream(1) {
        let text = error(&moe, tokens(0..4, &second)?.as_tensor());
        assert!(text.contains("GPU 1"), "{text}");
    }
    let cpu = seeded(group(&Device::Cpu)?, config())?;
    let text = error(&cpu, &good);
    assert!(text.contains("tensor x") && text.contains("GPU 0"), "{text}");
    Ok(())
}

fn nan_logits_are_told_at_once_or_later(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let good = tokens(0..4, device)?;
    let expected = flat(&moe.forward(&good)?)?;
    let bad = (good.as_tensor() * f64::NAN)?;
    let check = || moe.group().on::<Cuda>().ok_or("no GPU")?.lock().device().check().map_err(AnyError::from);
    let named = |text: String| assert!(text.contains("token 0") && text.contains("NaN"), "{text}");
    // The forward does not wait for the GPU; whoever does is told.
    moe.forward(&bad)?;
    named(check().expect_err("a NaN").to_string());
    check()?;
    assert!(flat(&moe.forward(&good)?)? == expected);
    let at_once = DispatchOptions { reporting: Some(Reporting::Immediate), ..DispatchOptions::default() };
    let layer = moe.layer().clone().with_dispatch(at_once);
    let moe = moe.clone().with_layer(layer);
    named(error(&moe, &bad));
    assert!(flat(&moe.forward(&good)?)? == expected);
    Ok(())
}

/// Ids of a router of one's own, as the device's dispatcher takes them.
fn ids_come_from_the_gpu(device: &Device) -> AnyResult<()> {
    let own = cuda(device)?;
    let ids = Tensor::new(&[[1u32, 3], [0, u32::MAX], [2, 1]], device)?;
    let wide = Tensor::new(&[[1i64, 3], [0, -1], [2, 1]], device)?;
    let part = Tensor::cat(&[&wide, &wide], 0)?.narrow(0, 3, 3)?;
    for given in [&ids, &wide, &part] {
        let found = routing_ids(&own, given)?;
        assert_eq!(found.dims(), [3, 2]);
        assert_eq!(own.read(found.view())?, [1.0, 3.0, 0.0, -1.0, 2.0, 1.0], "{:?}", given.dtype());
    }
    let refused = routing_ids(&own, &ids.to_dtype(DType::F32)?).err().map(|e| e.to_string());
    assert!(refused.as_ref().is_some_and(|e| e.contains("u32 or i64") && e.contains("f32")), "{refused:?}");
    let elsewhere = routing_ids(&own, &ids.to_device(&Device::Cpu)?).err().map(|e| e.to_string());
    assert!(elsewhere.is_some(), "ids of the host");
    Ok(())
}

fn wrong_devices_are_refused(device: &Device) -> AnyResult<()> {
    let config = || GroupConfig::new(EXPERTS, 64);
    // Its stream is another one on every thread.
    let shared = Device::new_cuda(0)?;
    let text = DeviceGroup::single(config(), &shared).map(drop).expect_err("per-thread stream").to_string();
    assert!(text.contains("new_cuda_with_stream"), "{text}");
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &shared);
    let error = moe(MoeConfig::new(16, 8, EXPERTS, 2), vb).map(drop).expect_err("per-thread stream");
    assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    assert!(error.to_string().contains("new_cuda_with_stream"), "{error}");
    let text = cuda(&Device::Cpu).map(drop).expect_err("no GPU").to_string();
    assert!(text.contains("expected a CUDA device") && text.contains("the CPU"), "{text}");
    let other = || -> AnyResult<EpGroup<Cuda>> { Ok(EpGroup::new(Cuda::new(0)?.group(config())?)) };
    for wrong in [device, &Device::Cpu] {
        let text = DeviceGroup::new(other()?, wrong).map(drop).expect_err("another stream").to_string();
        assert!(text.contains("the group's own"), "{text}");
        assert_eq!(text.contains("candle::cuda(&device)"), wrong.is_cuda(), "{text}");
    }
    // Experts of a chain whose stream is another one: nothing would order its gathers with the layer's kernels.
    let own = Cuda::new(0)?;
    let solo = || -> AnyResult<Box<dyn Communicator<Cuda>>> { Ok(Box::new(Solo::new(own.with_new_stream()?))) };
    let comms = Comms { gather: solo()?, reduce: solo()? };
    let chain = Arc::new(Chain::new(own.clone(), comms, EtpOptions::default())?);
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, device);
    let config = MoeConfig::new(16, 8, EXPERTS, 2);
    let sharded = ExpertParallelMoE::sharded(config, group(device)?, &chain, Payload::Plain, vb);
    let text = sharded.map(drop).expect_err("another stream").to_string();
    assert!(text.contains("the chain's device"), "{text}");
    assert!(group(device)?.on::<Cuda>().is_some());
    assert!(group(device)?.on::<moebius::cpu::Cpu>().is_none());
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    a_gpu_gives_what_the_cpu_gives,
    two_calls_among_ordinary_operations,
    steps_of_an_optimizer_follow_the_cpu,
    steps_are_bit_identical_and_reuse_memory,
    outputs_outlive_group_and_module,
    backward_on_another_thread,
    wrong_tensors_are_named,
    nan_logits_are_told_at_once_or_later,
    wrong_devices_are_refused,
    ids_come_from_the_gpu,
}
