//! On candle's CUDA device.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use moebius::MoeConfig;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, MainGradients, cuda};
use moebius::ep::GroupConfig;
use moebius::layer::{Layer, ParamKind};

use super::core::time_queued;
use super::{Result, Workload, time};

/// Random values in bf16.
fn random(dims: &[usize], scale: usize, device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(0f32, (scale as f32).powf(-0.5), dims, device)?.to_dtype(DType::BF16)?)
}

pub fn run(workload: &Workload, gpu: &str) -> Result<()> {
    let Workload { tokens: t, hidden: h, inner: i, experts: e, top_k: k, .. } = *workload;
    let device = Device::new_cuda_with_stream(0)?;
    let group = DeviceGroup::single(GroupConfig::new(e, t), &device)?;
    let map = VarMap::new();
    let given = [
        (ParamKind::Router, vec![e, h], h),
        (ParamKind::Up, vec![e, 2 * i, h], h),
        (ParamKind::Down, vec![e, h, i], i),
    ];
    for (kind, dims, scale) in given {
        let value = Var::from_tensor(&random(&dims, scale, &device)?)?;
        map.data().lock().map_err(|e| e.to_string())?.insert(kind.name().to_string(), value);
    }
    let layer = |number| Layer::new(MoeConfig::new(h, i, e, k), number);
    let moe = ExpertParallelMoE::new(layer(0)?, group.clone(), VarBuilder::from_varmap(&map, DType::BF16, &device))?;
    // The same values as plain tensors, of which no gradient is asked.
    let values = map
        .data()
        .lock()
        .map_err(|e| e.to_string())?
        .iter()
        .map(|(n, v)| (n.clone(), v.as_detached_tensor()))
        .collect();
    let frozen = ExpertParallelMoE::new(layer(1)?, group, VarBuilder::from_tensors(values, DType::BF16, &device))?;
    let (x, c) = (random(&[t, h], 1, &device)?, random(&[t, h], 1, &device)?);
    let sync = || Ok(device.synchronize()?);
    let fwd = time(sync, || {
        frozen.forward(&x)?;
        Ok(())
    })?;
    workload.report("moebius-candle", "fwd", fwd, gpu);
    let x = Var::from_tensor(&x)?;
    let step = time(sync, || {
        // Row by row first: candle sums a whole tensor in one block.
        drop((moe.forward(x.as_tensor())? * &c)?.sum(1)?.sum_all()?.backward()?);
        Ok(())
    })?;
    workload.report("moebius-candle", "fwd+bwd", step, gpu);
    let core = cuda(&device)?;
    for (phase, mut main, add) in
        [("fwd+bwd-stored", MainGradients::new(), false), ("fwd+bwd-f32-add", MainGradients::in_f32(), true)]
    {
        let step = time_queued(&core, || {
            main.backward_with(&moe.forward(x.as_tensor())?, &c)?;
            if !add {
                main.reset();
            }
            Ok(())
        })?;
        workload.report("moebius-candle", phase, step, gpu);
    }
    let plain = time_queued(&core, || {
        drop((moe.forward(x.as_tensor())? * &c)?.sum(1)?.sum_all()?.backward()?);
        Ok(())
    })?;
    workload.report("moebius-candle", "fwd+bwd-plain", plain, gpu);
    Ok(core.check()?)
}
