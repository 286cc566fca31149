//! Modules whose experts stay quantized.

use candle_core::{DType, Device, Module, Tensor};
use moebius::MoeConfig;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, LoadAs, Parameters};
use moebius::checkpoint::{Checkpoint, Progress};
use moebius::layer::ParamKind;
use moebius::quant::WeightFormat;

use crate::goldens::golden_of;
use crate::support::{AnyResult, EXPERTS, distance, flat, group, normal, of_type, wide_tokens};
use crate::trials::tests;

const HIDDEN: usize = 32;
const INNER: usize = 48;

fn config() -> MoeConfig {
    MoeConfig::new(HIDDEN, INNER, EXPERTS, 2)
}

/// Tokens' type and what products of it may differ by: some ten roundings to 24 or 8 bits in each of two products.
fn precision(device: &Device) -> (DType, f64) {
    if device.is_cpu() { (DType::F32, 1e-5) } else { (DType::BF16, 3e-2) }
}

/// y, and the gradients of x and of the router, of Σ y².
fn pass(moe: &ExpertParallelMoE, x: &Tensor) -> AnyResult<[Vec<f32>; 3]> {
    let y = moe.forward(x)?;
    let gradients = y.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
    let router = moe.param(ParamKind::Router).ok_or("no router")?;
    let of = |t: &Tensor| flat(gradients.get(t).ok_or("no gradient")?);
    Ok([flat(&y)?, of(x)?, of(router)?])
}

fn close(found: &[Vec<f32>; 3], expected: &[Vec<f32>; 3], tolerance: f64, name: &str) {
    for (what, (found, expected)) in
        ["y", "gradient of x", "gradient of the router"].iter().zip(found.iter().zip(expected))
    {
        let error = distance(found, expected);
        assert!(error <= tolerance, "{name}: {what} differs by {error:e}");
    }
}

/// Every format, against the same weights de-quantized: values and gradients, and nothing trains but the router.
fn experts_as_stored_are_the_dequantized_ones(device: &Device) -> AnyResult<()> {
    let folders = [
        ("qwen3_moe_nvfp4_modelopt", WeightFormat::Nvfp4),
        ("qwen3_moe_nvfp4_ct", WeightFormat::Nvfp4),
        ("gpt_oss_mxfp4", WeightFormat::Mxfp4),
        ("deepseek_v3_fp8", WeightFormat::Fp8Block),
    ];
    let (dtype, tolerance) = precision(device);
    for (name, format) in folders {
        let checkpoint = Checkpoint::open(golden_of(name))?;
        let layer = checkpoint.moe_layers()[0];
        let config = checkpoint.block_config(layer)?;
        let group = DeviceGroup::single(&config, device)?;
        let load = || LoadAs::new(Parameters::Trainable).dtype(dtype);
        let of = |load| ExpertParallelMoE::from_checkpoint(&checkpoint, layer, &group, load);
        let (kept, plain) = (of(load().quantized())?, of(load())?);
        let x = wide_tokens(0..9, config.hidden, dtype, device)?;
        close(&pass(&kept, &x)?, &pass(&plain, &x)?, tolerance, name);
        let (found, bytes) = kept.quantized().ok_or("experts that are not quantized")?;
        assert_eq!(found, format, "{name}");
        let elements = [ParamKind::Up, ParamKind::Down].into_iter().filter_map(|kind| plain.param(kind));
        let elements: usize = elements.map(Tensor::elem_count).sum();
        // Codes of a half or one byte, and their scales.
        assert!((elements / 2..2 * elements).contains(&bytes), "{name}: {bytes} bytes of {elements} weights");
        assert!(plain.quantized().is_none());
        let named = ["experts.up", "experts.down", "experts.up_bias", "experts.down_bias"];
        let trained = kept.vars().len();
        let frozen = plain.params().iter().filter(|(name, _)| named.contains(name)).count();
        assert_eq!(trained + frozen, plain.vars().len(), "{name}");
        // Without gradients too.
        assert_eq!(flat(&kept.detached().forward(&x)?)?, flat(&kept.forward(&x)?)?, "{name}");
    }
    Ok(())
}

/// Progress counts up to the bytes that the module then holds, experts as they are stored and all else.
fn loading_experts_as_stored_tells_how_far_it_has_come(device: &Device) -> AnyResult<()> {
    for name in ["qwen3_moe_nvfp4_modelopt", "qwen3_moe_nvfp4_ct", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let checkpoint = Checkpoint::open(golden_of(name))?;
        let layer = checkpoint.moe_layers()[0];
        let config = checkpoint.block_config(layer)?;
        let group = DeviceGroup::single(&config, device)?;
        let mut seen = Vec::new();
        let mut progress = |p: Progress<'_>| seen.push((p.layer, p.done, p.total));
        let load = LoadAs::new(Parameters::Frozen).dtype(DType::F32).quantized().progress(&mut progress);
        let kept = ExpertParallelMoE::from_checkpoint(&checkpoint, layer, &group, load)?;
        assert!(seen.len() > config.router.num_experts && seen.is_sorted_by(|a, b| a.1 < b.1), "{name}: {seen:?}");
        let (_, experts) = kept.quantized().ok_or("experts that are not quantized")?;
        let others = kept.params().into_iter().map(|(_, t)| t.elem_count() * t.dtype().size_in_bytes()).sum::<usize>();
        let total = (experts + others) as u64;
        assert_eq!(seen.last(), Some(&(layer, total, total)), "{name}");
    }
    Ok(())
}

/// Weights that NVFP4 holds exactly stay what they are: codes times a power of two, the largest of them in every block.
fn weights_of_nvfp4s_own_values_stay_so(device: &Device) -> AnyResult<()> {
    let (dtype, tolerance) = precision(device);
    let plain = of_type(group(device)?, config(), dtype)?;
    let values = [0.0, 0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0];
    for (number, kind) in [ParamKind::Up, ParamKind::Down].into_iter().enumerate() {
        let t = plain.param(kind).ok_or("no weight")?;
        let exact = (0..t.elem_count()).map(|i| values[if i % 16 == 0 { 7 } else { (i * 5 + i / 16) % 8 }] / 16.0);
        let exact: Vec<f32> = exact.map(|v| if number == 0 { v } else { -v }).collect();
        let exact = Tensor::from_vec(exact, t.dims(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
        candle_core::Var::from_tensor(t)?.set(&exact)?;
    }
    let kept = plain.to_nvfp4()?;
    assert_eq!(kept.quantized().map(|(format, _)| format), Some(WeightFormat::Nvfp4));
    let x = wide_tokens(0..9, HIDDEN, dtype, device)?;
    close(&pass(&kept, &x)?, &pass(&plain, &x)?, tolerance, "exact weights");
    assert_eq!(kept.vars().len(), 1, "the router alone");
    Ok(())
}

/// Random weights: E2M1 has at most 1/6 of a block's largest between neighbors, whose halves' mean square is 0.1 of
/// normal values at most.
fn random_weights_are_near(device: &Device) -> AnyResult<()> {
    let (dtype, _) = precision(device);
    let plain = of_type(group(device)?, config(), dtype)?;
    for (own, kind) in [(71, ParamKind::Up), (72, ParamKind::Down)] {
        let t = plain.param(kind).ok_or("no weight")?;
        let values = (normal(own, t.dims(), DType::F32, &Device::Cpu)? * 0.2)?;
        candle_core::Var::from_tensor(t)?.set(&values.to_dtype(dtype)?.to_device(device)?)?;
    }
    let x = wide_tokens(0..64, HIDDEN, dtype, device)?;
    let [found, expected] = [&plain.to_nvfp4()?, &plain].map(|moe| flat(&moe.forward(&x)?));
    let error = distance(&found?, &expected?);
    // Each of two products with weights that are off by a tenth.
    assert!((1e-3..0.3).contains(&error), "differs by {error}");
    Ok(())
}

fn what_cannot_be_is_refused(device: &Device) -> AnyResult<()> {
    let (dtype, _) = precision(device);
    let plain = of_type(group(device)?, config(), dtype)?;
    let kept = plain.to_nvfp4()?;
    let refused = |result: candle_core::Result<()>, word: &str| {
        let text = result.expect_err(word).to_string();
        assert!(text.contains(word), "{text}");
    };
    refused(kept.to_block().map(drop), "Nvfp4");
    refused(kept.to_parts().map(drop), "Nvfp4");
    refused(kept.to_nvfp4().map(drop), "floating type");
    let odd = of_type(group(device)?, MoeConfig::new(32, 24, EXPERTS, 2), dtype)?;
    refused(odd.to_nvfp4().map(drop), "multiple of 16");
    let up = plain.param(ParamKind::Up).ok_or("no weight")?;
    candle_core::Var::from_tensor(up)?.set(&(up * f64::NAN)?)?;
    refused(plain.to_nvfp4().map(drop), "expert 0");
    let checkpoint = Checkpoint::open(golden_of("qwen3_moe"))?;
    let group = DeviceGroup::single(&checkpoint.block_config(0)?, device)?;
    let load = LoadAs::new(Parameters::Frozen).quantized();
    refused(ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, load).map(drop), "NVFP4");
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    experts_as_stored_are_the_dequantized_ones,
    loading_experts_as_stored_tells_how_far_it_has_come,
    weights_of_nvfp4s_own_values_stay_so,
    random_weights_are_near,
    what_cannot_be_is_refused,
}
