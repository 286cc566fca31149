//! On burn's CUDA back end.

use burn::backend::Autodiff;
use burn::backend::cuda::CudaDevice;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, Shape, Tensor};
use moebius::MoeConfig;
use moebius::burn::{
    AdamW, DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, GradientReducer, backward_with, cuda,
};
use moebius::ep::{EpGroup, GroupConfig};

use super::adamw::{self, FORMS, Form};
use super::core::time_queued;
use super::{Result, Workload, asked, time};

type Inner = burn::backend::Cuda<f32, i32>;
type B = Autodiff<Inner>;

/// Random values in bf16, in rows that burn does not pad.
fn random<const D: usize>(dims: [usize; D], scale: usize) -> Tensor<Inner, D> {
    random_in(DType::BF16, dims, scale)
}

fn random_in<const D: usize>(dtype: DType, dims: [usize; D], scale: usize) -> Tensor<Inner, D> {
    let spread = Distribution::Normal(0.0, (scale as f64).powf(-0.5));
    let device = CudaDevice::default();
    let flat = Tensor::<Inner, 1>::random([dims.iter().product::<usize>()], spread, (&device, dtype));
    flat.reshape(Shape::from(dims))
}

fn sync() -> Result<()> {
    Inner::sync(&CudaDevice::default()).map_err(|e| format!("{e:?}").into())
}

pub fn run(workload: &Workload, gpu: &str) -> Result<()> {
    let Workload { tokens: t, hidden: h, inner: i, experts: e, top_k: k, .. } = *workload;
    let device = CudaDevice::default();
    let core = cuda(&device)?;
    let group = DeviceGroup::from(EpGroup::new(core.group(GroupConfig::new(e, t))?));
    let leaf2 = |dims, scale| Param::from_tensor(Tensor::<B, 2>::from_inner(random::<2>(dims, scale)));
    let leaf3 = |dims, scale| Param::from_tensor(Tensor::<B, 3>::from_inner(random::<3>(dims, scale)));
    // Drawn on the GPU below: the configuration's own way goes expert by expert.
    let small = ExpertParallelMoEConfig::new(MoeConfig::new(h, i, e, k)).with_initializer(burn::nn::Initializer::Zeros);
    let mut moe: ExpertParallelMoE<B> = small.init_on(&group, &device)?;
    moe.router.weight = leaf2([e, h], h);
    moe.experts.up = leaf3([e, 2 * i, h], h);
    moe.experts.down = leaf3([e, h, i], i);
    let (x, c) = (random::<2>([t, h], 1), random::<2>([t, h], 1));
    let frozen = moe.clone().no_grad();
    let input = Tensor::<B, 2>::from_inner(x.clone());
    if asked("fwd") {
        let fwd = time(sync, || {
            frozen.forward(input.clone())?;
            Ok(())
        })?;
        workload.report("moebius-burn", "fwd", fwd, gpu);
    }
    if asked("fwd+bwd-stored") {
        // Their gradients lie in memory that burn gives anew at each step.
        let given = time_queued(&core, || {
            let y = moe.forward(Tensor::<B, 2>::from_inner(x.clone()).require_grad())?;
            drop(backward_with(y, c.clone())?);
            Ok(())
        })?;
        workload.report("moebius-burn", "fwd+bwd-stored", given, gpu);
    }
    if asked("fwd+bwd-f32-add") {
        let mut main = GradientReducer::<B>::alone(&core)?.with_layer(&moe).with_main_gradients_in_f32();
        let added = time_queued(&core, || {
            let y = moe.forward(Tensor::<B, 2>::from_inner(x.clone()).require_grad())?;
            Ok(main.backward_with(y, c.clone(), &moe)?)
        })?;
        workload.report("moebius-burn", "fwd+bwd-f32-add", added, gpu);
    }
    let c = Tensor::<B, 2>::from_inner(c);
    if asked("fwd+bwd") {
        let step = time(sync, || {
            let x = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
            drop((moe.forward(x)? * c.clone()).sum().backward());
            Ok(())
        })?;
        workload.report("moebius-burn", "fwd+bwd", step, gpu);
    }
    if asked("fwd+bwd-plain") {
        let plain = time_queued(&core, || {
            let x = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
            drop((moe.forward(x)? * c.clone()).sum().backward());
            Ok(())
        })?;
        workload.report("moebius-burn", "fwd+bwd-plain", plain, gpu);
    }
    Ok(core.check()?)
}

/// Parameters whose steps are timed.
#[derive(Module, Debug)]
struct Weights<B: Backend> {
    all: Vec<Param<Tensor<B, 2>>>,
}

/// Steps of `burn::AdamW`.
pub fn run_adamw(gpu: &str) -> Result<()> {
    let core = cuda(&CudaDevice::default())?;
    for form in FORMS.into_iter().filter(|form| asked(form.phase)) {
        let Form { param, gradient, .. } = form;
        let [param, gradient] = [param, gradient].map(|dtype| match dtype {
            moebius::DType::F32 => DType::F32,
            _ => DType::BF16,
        });
        let dims = || (0..adamw::LAYERS).flat_map(|_| adamw::SIZES);
        let leaf = |dims| Param::from_tensor(Tensor::<B, 2>::from_inner(random_in(param, dims, 1)));
        let weights: Weights<B> = Weights { all: dims().map(leaf).collect() };
        let gradients: Vec<_> = dims().map(|dims| random_in::<2>(gradient, dims, 1)).collect();
        let mut adam = AdamW::<B>::new(&core, &weights, adamw::options())?;
        let mut weights = Some(weights);
        let ms = time_queued(&core, || {
            let (taken, mut given) = (weights.take().ok_or("an earlier step failed")?, GradientsParams::new());
            for (param, gradient) in taken.all.iter().zip(&gradients) {
                given.register::<Inner, 2>(param.id, gradient.clone());
            }
            weights = Some(adam.step(taken, given)?);
            Ok(())
        })?;
        form.report("moebius-burn", ms, gpu);
        drop((adam, weights, gradients));
        Inner::memory_cleanup(&CudaDevice::default());
        core.trim();
    }
    Ok(())
}
