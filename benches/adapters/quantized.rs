//! The layer's forward with experts that stay quantized, captured and replayed: the layer itself, and candle's module.

use candle_core::Device;
use candle_core::op::BackpropOp;
use moebius::MoeConfig;
use moebius::candle::{
    CandleDevice, Capture, DeviceGroup, ExpertParallelMoE, Parameters, cuda as cuda_of, device_for_capture,
};
use moebius::checkpoint::QuantizedBlock;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::GroupConfig;
use moebius::layer::{Inputs, Layer, Mode, PerParam};
use moebius::quant::WeightFormat;
use moebius::{DType, Tensor};

use super::core::{SEED, time_queued};
use super::data::Random;
use super::{Result, Workload, asked};

#[path = "../../tests/common/stacks.rs"]
#[allow(dead_code, reason = "its list of formats is a test's")]
mod stacks;

const PHASES: [(WeightFormat, &str); 3] = [
    (WeightFormat::Nvfp4, "fwd-graph-nvfp4"),
    (WeightFormat::Mxfp4, "fwd-graph-mxfp4"),
    (WeightFormat::Fp8Block, "fwd-graph-fp8"),
];

pub fn run(cuda: &Cuda, workload: &Workload, gpu: &str) -> Result<()> {
    for (format, phase) in PHASES.into_iter().filter(|(_, phase)| asked(phase)) {
        let ms = layer(cuda, workload, format)?;
        workload.report("moebius", phase, ms, gpu);
        cuda.trim();
        workload.report("moebius-candle", phase, candle(workload, format)?, gpu);
        cuda.trim();
    }
    Ok(())
}

/// The same router and experts each time.
fn block(cuda: &Cuda, workload: &Workload, format: WeightFormat) -> Result<QuantizedBlock<Cpu>> {
    let Workload { hidden: h, inner: i, experts: e, top_k: k, .. } = *workload;
    let router = cuda.to_host(Random(SEED).tensor(cuda, &[e, h], (h as f64).powf(-0.5))?.view())?;
    let mut bits = Random(SEED + 1);
    let mut stack = |dims, parts| stacks::random(&mut || bits.next(), format, dims, parts);
    let (up, down) = (stack([e, 2 * i, h], 2), stack([e, h, i], 1));
    let others = PerParam { router: Some(router), ..PerParam::default() };
    Ok(QuantizedBlock::new(MoeConfig::new(h, i, e, k), up, down, others)?)
}

fn tokens(cuda: &Cuda, workload: &Workload) -> Result<Tensor<Cuda>> {
    Ok(Random(SEED + 2).tensor(cuda, &[workload.tokens, workload.hidden], 1.0)?)
}

fn layer(cuda: &Cuda, workload: &Workload, format: WeightFormat) -> Result<f64> {
    let block = block(cuda, workload, format)?.to(cuda)?;
    let (params, x) = (block.params()?, tokens(cuda, workload)?);
    let layer = Layer::new(block.config.clone(), 0)?;
    let mut group = cuda.group(GroupConfig::new(workload.experts, workload.tokens))?;
    let mut y = Tensor::zeros(cuda, DType::BF16, x.dims())?;
    let mut forward = || {
        let inputs = Inputs { x: x.view(), params: &params };
        layer.forward_into(&mut group, Mode::default(), inputs, y.view_mut()).map(drop)
    };
    forward()?;
    let mut graph = cuda.capture(forward)?;
    time_queued(cuda, || Ok(graph.replay()?))
}

fn candle(workload: &Workload, format: WeightFormat) -> Result<f64> {
    let device: Device = device_for_capture(0)?;
    let cuda = cuda_of(&device)?;
    let group = DeviceGroup::single(GroupConfig::new(workload.experts, workload.tokens), &device)?;
    let moe = ExpertParallelMoE::from_quantized(block(&cuda, workload, format)?, 0, group, Parameters::Frozen)?;
    let x = tokens(&cuda, workload)?;
    let dims = x.dims().to_vec();
    let x = candle_core::Tensor::from_storage(Cuda::storage(x, &device)?, dims, BackpropOp::none(), false);
    let y = x.zeros_like()?;
    let capture = Capture::new(&device)?.group(moe.group())?;
    // SAFETY: nothing replaces the layer's weights, x or y.
    let mut step = unsafe { capture.run(|| moe.forward_into(&x, &y).map(|()| Vec::new())) }?;
    let ms = time_queued(&cuda, || Ok(step.replay()?))?;
    cuda.check()?;
    Ok(ms)
}
