//! Activation memory: what a forward keeps for its backward, and the most that a step takes.

use moebius::config::MoeConfig;
use moebius::cuda::{Cuda, cudarc};
use moebius::layer::{Cotangents, Inputs, Layer, Mode, ParamViews, Role, Wanted};
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
    /// Most that the device's pool ever held, weights, inputs and gradients left out.
    peak: usize,
}

/// Free memory of the GPU.
fn free() -> usize {
    cudarc::driver::result::mem_get_info().expect("free memory").0
}

fn step(k: usize) -> Result<Taken> {
    // A device of its own, whose pool starts empty and gives nothing back meanwhile.
    let cuda = Cuda::new(0)?;
    let case = Case::new(MoeConfig::new(HIDDEN, WIDTH / k, 16, k), TOKENS, DType::BF16);
    let data = Data::new(&case)?;
    let (x, d_y) = (cuda.tensor(&data.x)?, cuda.tensor(&data.d_y)?);
    let params: Vec<(Role, Tensor<Cuda>)> =
        data.params.iter().map(|(role, t)| Ok((*role, cuda.tensor(t)?))).collect::<Result<_>>()?;
    let views = ParamViews::collect(|role| Ok(params.iter().find(|(r, _)| *r == role).map(|(_, t)| t.view())))?;
    let params = views.params();
    let layer = Layer::new(case.config.clone(), 0)?;
    let mut group = cuda.group(group_config(&case))?;
    cuda.check()?;
    let before = free();
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let context = forward.context.expect("a context");
    let bytes = context.bytes();
    let (inputs, cotangents) = (Inputs { x: x.view(), params: &params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
    let gradients = layer.backward(&mut group, context, inputs, cotangents, Wanted::ALL)?;
    cuda.check()?;
    let of = |t: &Option<Tensor<Cuda>>| t.as_ref().map_or(0, Tensor::bytes);
    let results = of(&gradients.up) + of(&gradients.down) + of(&gradients.router);
    Ok(Taken { context: bytes, peak: (before - free()).saturating_sub(results) })
}

fn activations_do_not_grow_with_k(_: &Cuda) {
    let taken: Vec<(usize, Taken)> = [1, 2, 4, 8].map(|k| (k, step(k).expect("a step"))).into();
    println!("activation memory, bf16, T {TOKENS} H {HIDDEN} K·I {WIDTH} (MiB)\n");
    println!("| K | I | kept for backward | peak of a step |\n|---|---|---|---|");
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    for (k, taken) in &taken {
        println!("| {k} | {} | {:.2} | {:.0} |", WIDTH / k, mib(taken.context), mib(taken.peak));
    }
    let base = taken[0].1.context;
    for (k, taken) in &taken {
        // An id and a weight a choice are all that may be added: 8 bytes.
        let most = base + TOKENS * (k - 1) * 8;
        assert!(taken.context <= most, "K = {k}: {} bytes kept, {base} at K = 1", taken.context);
    }
}
