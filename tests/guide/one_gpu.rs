//! The pieces of `docs/one-gpu.md`.

mod program {
    use candle_core::{DType, Device, Module, Tensor};
    use candle_nn::{VarBuilder, VarMap};
    use moebius::{MoeConfig, candle};

    fn main() -> Result<(), Box<dyn std::error::Error>> {
        let device = Device::new_cuda_with_stream(0)?;
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::BF16, &device);
        let moe = candle::moe(MoeConfig::new(2048, 768, 128, 8), vb.pp("moe"))?; // hidden, intermediate, experts, top-k
        let x = Tensor::ones((512, 2048), DType::BF16, &device)?;
        let y = (moe.forward(&x)? + x)?;
        let _gradients = y.sqr()?.mean_all()?.backward()?;
        Ok(())
    }
}

fn two_layers(config: moebius::MoeConfig, vars: candle_nn::VarMap) -> super::Result<()> {
    use candle_core::{DType, Device}; // …
    use candle_nn::VarBuilder; // …
    use moebius::candle::{DeviceGroup, ExpertParallelMoE};

    let device = Device::new_cuda_with_stream(0)?;
    let vb = VarBuilder::from_varmap(&vars, DType::BF16, &device);
    let group = DeviceGroup::single(&config, &device)?;
    let first = ExpertParallelMoE::new(config.clone(), &group, vb.pp("layers.0.moe"))?;
    let second = ExpertParallelMoE::new(config, &group, vb.pp("layers.1.moe"))?;
    Ok(())
}

#[cfg(feature = "burn-cuda")]
fn from_burn(config: moebius::MoeConfig) -> super::Result<()> {
    use burn::backend::{Autodiff, Cuda};
    use moebius::burn::{DeviceGroup, ExpertParallelMoEConfig};

    let device = Default::default(); // the first GPU
    let group = DeviceGroup::single::<Autodiff<Cuda>>(&config, &device)?; // its layers share one workspace
    let moe = ExpertParallelMoEConfig::new(config).init_on::<Autodiff<Cuda>>(&group, &device)?;
    Ok(())
}

fn alone() -> super::Result<()> {
    use moebius::cuda::Cuda;
    use moebius::ep::GroupConfig;
    use moebius::layer::{Layer, Mode, Params, PerParam};
    use moebius::{DType, MoeConfig, Tensor};

    let cuda = Cuda::new(0)?;
    let config = MoeConfig::new(2048, 768, 128, 8); // hidden, intermediate, experts, top-k
    let layer = Layer::new(config.clone(), 0)?;
    let tensor = |dims: &[usize]| Tensor::zeros(&cuda, DType::BF16, dims); // Kernels::upload writes values
    let (x, router) = (tensor(&[512, 2048])?, tensor(&[128, 2048])?);
    let (up, down) = (tensor(&[128, 2 * 768, 2048])?, tensor(&[128, 2048, 768])?); // up: gate rows first
    let params = Params { router: router.view(), up: &up.view(), down: &down.view(), others: PerParam::none() };

    let mut group = cuda.group(GroupConfig::of(&config, 16384))?; // the layer's experts, most tokens a call
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    Ok(())
}

fn graph(cuda: moebius::cuda::Cuda, mut x: moebius::Tensor<moebius::cuda::Cuda>, next_batch: &[u8],
    step: impl FnMut() -> moebius::Result<()>) -> super::Result<()> {
    use moebius::kernels::Kernels; // …
    let mut step = step; // …
    let mut graph = cuda.capture(|| step())?; // owns or holds everything it touches
    cuda.upload(next_batch, x.view_mut())?;
    graph.replay()?;
    Ok(())
}

fn captured(moe: moebius::candle::ExpertParallelMoE, x: candle_core::Tensor, next: candle_core::Tensor) -> super::Result<()> {
    use candle_core::Module; // …
    use moebius::candle; // …
    let device = candle::device_for_capture(0)?;
    let capture = candle::Capture::new(&device)?.group(moe.group())?;
    // SAFETY: nothing replaces x or a weight of the layer while the step lives.
    let mut step = unsafe { capture.run(|| Ok(vec![(moe.forward(&x)? + &x)?])) }?;
    x.slice_set(&next, 0, 0)?; // an input changes in place
    step.replay()?;
    println!("{}", step.outputs()[0]);
    Ok(())
}

fn invariant() -> super::Result<()> {
    use moebius::cuda::Cuda; // …
    use moebius::ep::{EpGroup, GroupConfig}; // …
    let cuda = Cuda::new(0)?.batch_invariant(); // from candle: moebius::candle::cuda(&device)?.batch_invariant()
    let group = EpGroup::new(cuda.group(GroupConfig::one_rank(128))?);
    Ok(())
}
