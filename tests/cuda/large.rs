//! Sizes past 2³¹ elements, and many tokens. What the CPU would take minutes for is compared on a sample: every
//! gradient but the sample's is zero, so that its weight gradients are the whole ones.

use moebius::config::MoeConfig;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind, ParamViews};
use moebius::{DType, Result, Tensor};

use crate::gathered_rows::gathered_rows;
use crate::harness::{Case, Data, Random, Results, compare, distance, group_config, on_cpu, tests, tolerance};

tests!(thousand_steps_are_bit_identical, many_tokens, many_slots, wide_rows, wide_weights);

fn thousand_steps_are_bit_identical(cuda: &Cuda) {
    crate::repeat::repeat(cuda, 1000);
}

fn many_tokens(cuda: &Cuda) {
    compare("100000 tokens", &Case::new(MoeConfig::new(32, 16, 16, 2), 100_000, DType::BF16), cuda);
}

/// Slots x 2·I.
fn many_slots(cuda: &Cuda) {
    const TOKENS: usize = 131_200;
    let config = MoeConfig::new(64, 1024, 16, 8);
    assert!(TOKENS * config.router.top_k * 2 * config.intermediate > 1 << 31);
    each_path(cuda, |cuda| sampled(cuda, "slots x 2I", &config, TOKENS));
}

/// Tokens x H.
fn wide_rows(cuda: &Cuda) {
    const TOKENS: usize = 131_100;
    let config = MoeConfig::new(16_384, 16, 4, 1);
    assert!(TOKENS * config.hidden > 1 << 31);
    each_path(cuda, |cuda| sampled(cuda, "tokens x H", &config, TOKENS));
}

/// Experts x 2·I x H. Every token goes to the last expert, so that the CPU needs that one alone.
fn wide_weights(cuda: &Cuda) {
    let mut config = MoeConfig::new(8256, 2048, 64, 1);
    config.router.logit_bias = true;
    assert!(config.router.num_experts * config.up_rows() * config.hidden > 1 << 31);
    each_path(cuda, |cuda| last_expert(cuda, &config).expect("a run"));
}

fn each_path(cuda: &Cuda, run: impl Fn(&Cuda)) {
    run(cuda);
    run(&cuda.portable());
}

/// A layer over many tokens, whose outputs and gradients at some are compared with the CPU's of these alone.
fn sampled(cuda: &Cuda, name: &str, config: &MoeConfig, tokens: usize) {
    // The first, the last, and others between.
    const SAMPLE: usize = 160;
    let sample: Vec<usize> = (0..SAMPLE).map(|i| i * (tokens - 1) / (SAMPLE - 1)).collect();
    let case = Case::new(config.clone(), SAMPLE, DType::BF16);
    let data = Data::new(&case).expect("inputs");
    let cpu = on_cpu(&case, &data).expect("on the CPU");
    let gpu = sampled_on_gpu(cuda, &case, &data, &sample, tokens).expect("on the GPU");
    for (key, found) in &gpu {
        let (_, expected) = cpu.iter().find(|(k, _)| k == key).expect("the same results");
        let d = distance(found, expected);
        assert!(d <= tolerance(case.dtype), "{name}: {key} is off by {d:e}");
    }
}

fn sampled_on_gpu(cuda: &Cuda, case: &Case, data: &Data, sample: &[usize], tokens: usize) -> Result<Results> {
    let row_of = |t: usize| sample.binary_search(&t).map_or(-1, |i| i as i32);
    let (small_x, small_dy) = (data.x.to(cuda)?, data.d_y.to(cuda)?);
    // Tokens outside the sample are the sample's again, without a gradient.
    let again = |t: usize| (t % sample.len()) as i32;
    let x = gathered_rows(
        cuda,
        &small_x,
        (0..tokens).map(|t| row_of(t).max(again(t) * i32::from(row_of(t) < 0))).collect(),
    )?;
    let d_y = gathered_rows(cuda, &small_dy, (0..tokens).map(row_of).collect())?;
    let params: Vec<(ParamKind, Tensor<Cuda>)> =
        data.params.iter().map(|(kind, t)| Ok((*kind, t.to(cuda)?))).collect::<Result<_>>()?;
    let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let layer = Layer::new(case.config.clone(), 0)?;
    let mut group = cuda.group(group_config(&Case { tokens, ..case.clone() }))?;
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let (inputs, cotangents) = (Inputs { x: x.view(), params: &params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
    let context = forward.context.expect("a context");
    let mut gradients = layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL)?;

    let at = |t: &Tensor<Cuda>| -> Result<Vec<f64>> {
        let rows = gathered_rows(cuda, t, sample.iter().map(|&t| t as i32).collect())?;
        cuda.read(rows.view())
    };
    let mut results = vec![("y".to_string(), at(&forward.y)?)];
    results.push(("d_x".to_string(), at(gradients.x.as_ref().expect("asked for"))?));
    results.push(("d_weights".to_string(), at(&gradients.weights)?));
    for kind in [ParamKind::Router, ParamKind::Up, ParamKind::Down] {
        let gradient = gradients.take(kind).expect("asked for");
        results.push((format!("d_{}", kind.name()), cuda.read(gradient.view())?));
    }
    Ok(results)
}

fn last_expert(cuda: &Cuda, config: &MoeConfig) -> Result<()> {
    const TOKENS: usize = 48;
    let (experts, hidden, inner) = (config.router.num_experts, config.hidden, config.intermediate);
    // What the CPU sees: one expert, whose weight is 1 by renormalization, as the last one's is among many.
    let mut alone = Case::new(MoeConfig::new(hidden, inner, 1, 1), TOKENS, DType::BF16);
    alone.config.router.logit_bias = true;
    let data = Data::new(&alone)?;
    let cpu = on_cpu(&alone, &data)?;
    let of = |kind: ParamKind| &data.params.iter().find(|(r, _)| *r == kind).expect("a parameter").1;

    // Every expert has the same weights; what tells them apart is where they lie.
    let everywhere = |kind: ParamKind| -> Result<Tensor<Cuda>> {
        let dims = kind.dims(config, experts).expect("a parameter");
        let one = of(kind).to(cuda)?.reshape(&[dims[1], dims[2]])?;
        let map = (0..experts * dims[1]).map(|row| (row % dims[1]) as i32).collect();
        gathered_rows(cuda, &one, map)?.reshape(&dims)
    };
    let (up, down) = (everywhere(ParamKind::Up)?, everywhere(ParamKind::Down)?);
    let router = Random::new(3).tensor(&[experts, hidden], DType::BF16, 1e-3)?.to(cuda)?;
    let bias: Vec<f64> = (0..experts).map(|e| if e + 1 == experts { 50.0 } else { 0.0 }).collect();
    let bias = Cpu::new().write(&bias, DType::BF16, &[experts])?.to(cuda)?;
    let views = ParamViews::collect(|kind| {
        Ok(match kind {
            ParamKind::Router => Some(router.view()),
            ParamKind::RouterBias => Some(bias.view()),
            ParamKind::Up => Some(up.view()),
            ParamKind::Down => Some(down.view()),
            _ => None,
        })
    })?;
    let (x, d_y) = (data.x.to(cuda)?, data.d_y.to(cuda)?);
    let params = views.params();
    let layer = Layer::new(config.clone(), 0)?;
    let mut group = cuda.group(group_config(&Case::new(config.clone(), TOKENS, DType::BF16)))?;
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let ids = cuda.read(forward.routing.ids.view())?;
    assert!(ids.iter().all(|id| *id as usize + 1 == experts), "{ids:?}");
    let (inputs, cotangents) = (Inputs { x: x.view(), params: &params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
    let context = forward.context.expect("a context");
    let mut gradients = layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL)?;

    let check = |key: &str, found: &[f64]| {
        let (_, expected) = cpu.iter().find(|(k, _)| k == key).expect("the same results");
        let d = distance(found, expected);
        assert!(d <= tolerance(DType::BF16), "experts x 2I x H: {key} is off by {d:e}");
    };
    check("y", &cuda.read(forward.y.view())?);
    check("d_x", &cuda.read(gradients.x.as_ref().expect("asked for").view())?);
    for kind in [ParamKind::Up, ParamKind::Down] {
        let dims = kind.dims(config, experts).expect("a parameter");
        let gradient = gradients.take(kind).expect("asked for").reshape(&[experts * dims[1], dims[2]])?;
        let rows = |first: usize, step: usize, count: usize| -> Result<Vec<f64>> {
            let rows = gathered_rows(cuda, &gradient, (0..count).map(|i| (first + i * step) as i32).collect())?;
            cuda.read(rows.view())
        };
        check(&format!("d_{}", kind.name()), &rows((experts - 1) * dims[1], 1, dims[1])?);
        // The others had no token.
        let zeros = rows(0, dims[1] / 8 + 1, 7 * (experts - 1))?;
        assert!(zeros.iter().all(|v| *v == 0.0), "d_{} of experts without tokens", kind.name());
    }
    Ok(())
}
