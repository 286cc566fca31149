//! Times of the layer as a burn module on burn's CUDA back end: wall clock from an idle GPU to an idle GPU, warm,
//! median, random data, uniform random routing. One JSON line a measurement, keys as `benches/cuda.rs`; `host_waits`
//! and `gpu_waits` are those of one call, between burn's work and the layer's.
//!
//! ```text
//! cargo bench --no-default-features --features burn-cuda --bench burn_cuda -- [WORKLOAD …]
//! ```

use std::time::Instant;

use burn::backend::Autodiff;
use burn::backend::cuda::CudaDevice;
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, Shape, Tensor};
use moebius::burn::{DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, Waits, cuda};
use moebius::cuda::Cuda;
use moebius::ep::{EpGroup, GroupConfig};
use moebius::{Error, Result};

type Inner = burn::backend::Cuda<f32, i32>;
type B = Autodiff<Inner>;

/// Name, tokens, hidden, intermediate, experts, top-k.
const WORKLOADS: [(&str, usize, usize, usize, usize, usize); 5] = [
    ("qwen3-30b-a3b", 16384, 2048, 768, 128, 8),
    ("olmoe-7b", 16384, 2048, 1024, 64, 8),
    ("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    ("dsv3-ep8-rank", 4096, 7168, 2048, 32, 8),
    ("decode-qwen3", 64, 2048, 768, 128, 8),
];
const WARM_UP: usize = 3;
const REPEATS: usize = 15;

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let core = match cuda(&CudaDevice::default()) {
        Ok(core) => core,
        Err(e) => {
            println!("skipped: no GPU ({e})");
            return Ok(());
        }
    };
    for workload in WORKLOADS {
        if wanted.is_empty() || wanted.iter().any(|w| w == workload.0) {
            run(&core, workload)?;
        }
    }
    Ok(())
}

/// Random values in bf16, in rows that burn does not pad.
fn random<const D: usize>(dims: [usize; D], scale: usize) -> Tensor<Inner, D> {
    let spread = Distribution::Normal(0.0, (scale as f64).powf(-0.5));
    let device = CudaDevice::default();
    let flat = Tensor::<Inner, 1>::random([dims.iter().product::<usize>()], spread, (&device, DType::BF16));
    flat.reshape(Shape::from(dims))
}

fn sync() -> Result<()> {
    let failed = |e| Error::Device { call: "bench", operation: "sync".into(), message: format!("{e:?}") };
    Inner::sync(&CudaDevice::default()).map_err(failed)
}

/// Median milliseconds of a call, and its waits.
fn time(group: &DeviceGroup, mut call: impl FnMut() -> Result<()>) -> Result<(f64, Waits)> {
    let (mut times, mut waits) = (Vec::new(), Waits::default());
    for repeat in 0..WARM_UP + REPEATS {
        sync()?;
        let (start, before) = (Instant::now(), group.waits());
        call()?;
        let after = group.waits();
        sync()?;
        if repeat >= WARM_UP {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        waits = Waits { device: after.device - before.device, host: after.host - before.host };
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], waits))
}

fn run(core: &Cuda, (name, t, h, i, e, k): (&str, usize, usize, usize, usize, usize)) -> Result<()> {
    let device = CudaDevice::default();
    let group = DeviceGroup::from(EpGroup::new(core.group(GroupConfig::new(e, t))?));
    let leaf2 = |dims, scale| Param::from_tensor(Tensor::<B, 2>::from_inner(random::<2>(dims, scale)));
    let leaf3 = |dims, scale| Param::from_tensor(Tensor::<B, 3>::from_inner(random::<3>(dims, scale)));
    // Drawn on the GPU below: the configuration's own way goes expert by expert.
    let small = ExpertParallelMoEConfig::new(h, i, e, k).with_initializer(burn::nn::Initializer::Zeros);
    let mut moe: ExpertParallelMoE<B> = small.init(0, &group, &device)?;
    moe.router.weight = leaf2([e, h], h);
    moe.experts.up = leaf3([e, 2 * i, h], h);
    moe.experts.down = leaf3([e, h, i], i);
    let (x, c) = (random::<2>([t, h], 1), random::<2>([t, h], 1));
    let flop = 6.0 * (t * k) as f64 * h as f64 * i as f64;
    let gpu = core.name()?;
    let report = |phase: &str, (ms, waits): (f64, Waits), flop: f64| {
        println!(
            "{{\"impl\":\"moebius-burn\",\"workload\":\"{name}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},\"tflops\":{:.1},\
             \"gpu_waits\":{},\"host_waits\":{},\"gpu\":\"{gpu}\"}}",
            flop / ms / 1e9,
            waits.device,
            waits.host,
        );
    };
    let frozen = moe.clone().no_grad();
    let input = Tensor::<B, 2>::from_inner(x.clone());
    report("fwd", time(&group, || frozen.forward(input.clone()).map(drop))?, flop);
    let c = Tensor::<B, 2>::from_inner(c);
    let step = time(&group, || {
        let x = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
        let gradients = (moe.forward(x)? * c.clone()).sum().backward();
        drop(gradients);
        Ok(())
    })?;
    report("fwd+bwd", step, 3.0 * flop);
    core.check()
}
