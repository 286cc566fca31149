//! Activation memory: what a forward keeps for its backward, and the most that a step takes.

use moebius::config::MoeConfig;
use moebius::cuda::Cuda;
use moebius::ep::DispatcherKind;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind, ParamViews, StepSizes};
use moebius::{DType, Result, Tensor};

use crate::harness::{Case, Data, group_config, tests};

tests!(activations_do_not_grow_with_k);

const TOKENS: usize = 4096;
const HIDDEN: usize = 1024;
/// K·I.
const WIDTH: usize = 4096;

/// Bytes of one step.
struct Taken {
    /// Held between forward and backward.
    context: usize,
    /// Most that was in tensors at once; weights, inputs and weight gradients left out.
    peak: usize,
}

fn step(cuda: &Cuda, k: usize) -> Result<Taken> {
    let case = Case::new(MoeConfig::new(HIDDEN, WIDTH / k, 16, k), TOKENS, DType::BF16);
    let data = Data::new(&case)?;
    let (x, d_y) = (data.x.to(cuda)?, data.d_y.to(cuda)?);
    let params: Vec<(ParamKind, Tensor<Cuda>)> =
        data.params.iter().map(|(kind, t)| Ok((*kind, t.to(cuda)?))).collect::<Result<_>>()?;
    let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let layer = Layer::new(case.config.clone(), 0)?;
    let mut group = cuda.group(group_config(&case))?;
    cuda.check()?;
    cuda.reset_peak();
    let before = cuda.memory().in_use;
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let context = forward.context.expect("a context");
    let bytes = context.bytes();
    let sizes = StepSizes::even(&case.config, TOKENS, 1, DType::BF16, DispatcherKind::Local);
    let planned = sizes.memory(&case.config);
    assert_eq!(bytes, planned.saved, "K = {k}");
    // Blocks change hands if they exceed what is asked for by at most an eighth. Beside them: maps and counts.
    let (transient, y) = (cuda.memory().peak - before - bytes, forward.y.bytes());
    let most = (planned.transient + y) / 8 * 9 + 64 * TOKENS * k;
    assert!(
        transient <= most && transient >= planned.transient,
        "K = {k}: {transient} beside what is saved, planned {most}"
    );
    let (inputs, cotangents) = (Inputs { x: x.view(), params: &params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
    let gradients = layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL)?;
    cuda.check()?;
    let of = |t: &Option<Tensor<Cuda>>| t.as_ref().map_or(0, Tensor::bytes);
    let results = of(&gradients.up) + of(&gradients.down) + of(&gradients.router);
    Ok(Taken { context: bytes, peak: cuda.memory().peak - before - results })
}

fn activations_do_not_grow_with_k(cuda: &Cuda) -> Result<()> {
    let taken: Vec<(usize, Taken)> =
        [1, 2, 4, 8].into_iter().map(|k| Ok((k, step(cuda, k)?))).collect::<Result<_>>()?;
    println!("activation memory, bf16, T {TOKENS} H {HIDDEN} K·I {WIDTH} (MiB)\n");
    println!("| K | I | kept for backward | peak of a step |\n|---|---|---|---|");
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    for (k, taken) in &taken {
        println!("| {k} | {} | {:.2} | {:.2} |", WIDTH / k, mib(taken.context), mib(taken.peak));
    }
    let base = &taken[0].1;
    for (k, taken) in &taken {
        // A choice adds an id and a weight, by token and by slot.
        let more = TOKENS * (k - 1);
        let most = base.context + more * 12;
        assert!(taken.context <= most, "K = {k}: {} bytes kept, {} at K = 1", taken.context, base.context);
        // While it is combined, also its expert's output. Maps and what is kept take up to 64 bytes.
        let most = base.peak + more * (2 * HIDDEN + 64);
        assert!(taken.peak <= most, "K = {k}: {} bytes at once, {} at K = 1", taken.peak, base.peak);
    }
    Ok(())
}
