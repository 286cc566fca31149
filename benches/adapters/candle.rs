//! On candle's CUDA device.

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use moebius::MoeConfig;
use moebius::candle::{
    AdamW, CandleDevice, Capture, DeviceGroup, ExpertParallelMoE, MainGradients, cuda, device_for_capture,
};
use moebius::cuda::Cuda;
use moebius::ep::GroupConfig;
use moebius::layer::{Layer, ParamKind};

use super::adamw::{self, FORMS};
use super::core::{SEED, time_queued};
use super::data::Random;
use super::{Result, Workload, asked, time};

/// The layer's own inputs: as it draws them, one after the other, so that both have the same values and routing.
struct Draws<'a> {
    random: Random,
    cuda: Cuda,
    device: &'a Device,
}

impl<'a> Draws<'a> {
    fn new(device: &'a Device) -> Result<Self> {
        Ok(Self { random: Random(SEED), cuda: cuda(device)?, device })
    }

    fn draw(&mut self, dims: &[usize], scale: usize) -> Result<Tensor> {
        let values = self.random.tensor(&self.cuda, dims, (scale as f64).powf(-0.5))?;
        Ok(Tensor::from_storage(Cuda::storage(values, self.device)?, dims, BackpropOp::none(), false))
    }
}

/// x as the output of a layer below, to which its gradient goes: a variable's would be a parameter's, which is kept.
struct LayerBelow(Tensor);

impl CustomOp1 for LayerBelow {
    fn name(&self) -> &'static str {
        "layer-below"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!("a GPU's")
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let (storage, layout) = self.0.storage_and_layout();
        let candle_core::Storage::Cuda(storage) = &*storage else { candle_core::bail!("a GPU's") };
        Ok((storage.try_clone(layout)?, self.0.shape().clone()))
    }

    fn bwd(&self, arg: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(arg.zeros_like()?))
    }
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
    let mut draws = Draws::new(&device)?;
    for (kind, dims, scale) in given {
        let value = Var::from_tensor(&draws.draw(&dims, scale)?)?;
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
    let (x, c) = (draws.draw(&[t, h], 1)?, draws.draw(&[t, h], 1)?);
    let sync = || Ok(device.synchronize()?);
    if let Some(way) = memory_phase()? {
        let x = Var::from_tensor(&x)?;
        let below = Var::zeros((), DType::F32, &device)?.apply_op1(LayerBelow(x.as_detached_tensor()))?;
        let bytes = most_memory(&cuda(&device)?, || match way {
            MemoryOf::Plain => {
                drop((moe.forward(x.as_tensor())? * &c)?.sum(1)?.sum_all()?.backward()?);
                Ok(())
            }
            MemoryOf::Stored => Ok(MainGradients::new().backward_with(&moe.forward(&below)?, &c)?),
            MemoryOf::F32Added => Ok(MainGradients::in_f32().backward_with(&moe.forward(&below)?, &c)?),
        })?;
        workload.report_memory("moebius-candle", way.name(), bytes, gpu);
        return Ok(());
    }
    if asked("fwd") {
        let fwd = time(sync, || {
            frozen.forward(&x)?;
            Ok(())
        })?;
        workload.report("moebius-candle", "fwd", fwd, gpu);
    }
    let x = Var::from_tensor(&x)?;
    if asked("fwd+bwd") {
        let step = time(sync, || {
            // Row by row first: candle sums a whole tensor in one block.
            drop((moe.forward(x.as_tensor())? * &c)?.sum(1)?.sum_all()?.backward()?);
            Ok(())
        })?;
        workload.report("moebius-candle", "fwd+bwd", step, gpu);
    }
    let core = cuda(&device)?;
    let below = Var::zeros((), DType::F32, &device)?.apply_op1(LayerBelow(x.as_detached_tensor()))?;
    let forms = [("fwd+bwd-stored", MainGradients::new(), false), ("fwd+bwd-f32-add", MainGradients::in_f32(), true)];
    for (phase, mut main, add) in forms.into_iter().filter(|(phase, ..)| asked(phase)) {
        let step = time_queued(&core, || {
            main.backward_with(&moe.forward(&below)?, &c)?;
            if !add {
                main.reset();
            }
            Ok(())
        })?;
        workload.report("moebius-candle", phase, step, gpu);
    }
    if asked("fwd+bwd-plain") {
        let plain = time_queued(&core, || {
            drop((moe.forward(x.as_tensor())? * &c)?.sum(1)?.sum_all()?.backward()?);
            Ok(())
        })?;
        workload.report("moebius-candle", "fwd+bwd-plain", plain, gpu);
    }
    core.check()?;
    drop((moe, frozen, map, core));
    for (phase, returned) in [("fwd-graph", false), ("fwd-graph-returned", true)] {
        if asked(phase) {
            workload.report("moebius-candle", phase, graph(workload, returned)?, gpu);
        }
    }
    Ok(())
}

/// The layer's forward as a graph that is replayed, into memory that stays, or `returned` in candle's.
fn graph(workload: &Workload, returned: bool) -> Result<f64> {
    let Workload { tokens: t, hidden: h, inner: i, experts: e, top_k: k, .. } = *workload;
    let device = device_for_capture(0)?;
    let given = [
        (ParamKind::Router, vec![e, h], h),
        (ParamKind::Up, vec![e, 2 * i, h], h),
        (ParamKind::Down, vec![e, h, i], i),
    ];
    let mut draws = Draws::new(&device)?;
    let draw = |(kind, dims, scale): (ParamKind, Vec<usize>, usize)| -> Result<(String, Tensor)> {
        Ok((kind.name().to_string(), draws.draw(&dims, scale)?))
    };
    let weights = given.map(draw).into_iter().collect::<Result<_>>()?;
    let group = DeviceGroup::single(GroupConfig::new(e, t), &device)?;
    let vb = VarBuilder::from_tensors(weights, DType::BF16, &device);
    let moe = ExpertParallelMoE::new(Layer::new(MoeConfig::new(h, i, e, k), 0)?, group, vb)?;
    let x = draws.draw(&[t, h], 1)?;
    let y = x.zeros_like()?;
    let forward = || {
        if returned {
            return Ok(vec![moe.forward(&x)?]);
        }
        moe.forward_into(&x, &y).map(|()| Vec::new())
    };
    let capture = Capture::new(&device)?.group(moe.group())?;
    // SAFETY: nothing replaces the layer's weights, x or y.
    let mut step = unsafe { capture.run(forward) }?;
    let core = cuda(&device)?;
    let ms = time_queued(&core, || Ok(step.replay()?))?;
    core.check()?;
    Ok(ms)
}

/// Steps of `candle::AdamW`.
pub fn run_adamw(gpu: &str) -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let (mut draws, core) = (Draws::new(&device)?, cuda(&device)?);
    for form in FORMS.into_iter().filter(|form| asked(form.phase)) {
        let [param, gradient] = [form.param, form.gradient].map(|dtype| match dtype {
            moebius::DType::F32 => DType::F32,
            _ => DType::BF16,
        });
        let dims = (0..adamw::LAYERS).flat_map(|_| adamw::SIZES);
        let vars = dims.map(|dims| Var::zeros(&dims, param, &device)).collect::<candle_core::Result<Vec<_>>>()?;
        let mut gradients = Var::zeros((), DType::F32, &device)?.backward()?;
        for var in &vars {
            gradients.insert(var, draws.draw(var.dims(), 1)?.to_dtype(gradient)?);
        }
        let mut adam = AdamW::new(vars, adamw::options())?;
        let ms = time_queued(&core, || Ok(adam.step(&gradients)?))?;
        form.report("moebius-candle", ms, gpu);
        drop((adam, gradients));
        core.trim();
    }
    Ok(())
}

/// Gradients whose memory is measured.
#[derive(Debug, Clone, Copy)]
enum MemoryOf {
    Plain,
    Stored,
    F32Added,
}

impl MemoryOf {
    const ALL: [Self; 3] = [Self::Plain, Self::Stored, Self::F32Added];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Stored => "stored",
            Self::F32Added => "f32-add",
        }
    }
}

/// The way whose memory is asked for. It is measured in a process of its own: pools keep what earlier steps took, and a
/// later step would be given that.
fn memory_phase() -> Result<Option<MemoryOf>> {
    let named: Vec<String> = std::env::args().filter_map(|a| Some(a.strip_prefix("--phase=")?.to_string())).collect();
    let of = |name: &String| {
        let way = name.strip_prefix("memory-")?;
        MemoryOf::ALL.into_iter().find(|of| of.name() == way)
    };
    match named.iter().find_map(of) {
        Some(_) if named.len() > 1 => Err("a phase of memory goes alone: pools keep what other phases took".into()),
        way => Ok(way),
    }
}

/// Bytes by which the first step of this process has the GPU's free memory fall, main gradients that stay included: its
/// queued work's, as pools give nothing back before the host waits.
fn most_memory(cuda: &Cuda, step: impl FnOnce() -> Result<()>) -> Result<usize> {
    cuda.check()?;
    let before = cuda.free_memory()?;
    step()?;
    let after = cuda.free_memory()?;
    cuda.check()?;
    Ok(before.saturating_sub(after))
}
