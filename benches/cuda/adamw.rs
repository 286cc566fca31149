//! Steps of AdamW beside the copy rate: the bytes that each form has to move, and no more, over its time.

use moebius::cuda::Cuda;
use moebius::optim::{AdamW, AdamWOptions, GroupOptions, ParamShard, ParamSpec, StepTensor};
use moebius::{DType, Result, Tensor};

use crate::data::Random;
use crate::report::Report;

/// Elements of all parameters, 256 Mi: no cache holds a thousandth of them. As those of a few layers: many tensors, of
/// which most elements are experts'.
const EXPERTS: [usize; 2] = [1 << 14, 1 << 11];
const LAYERS: usize = 8;
const SMALL: [usize; 2] = [128, 2048];

/// Types of parameter, gradient and moments.
const FORMS: [(&str, DType, DType, DType); 6] = [
    ("f32", DType::F32, DType::F32, DType::F32),
    ("f32-bf16moments", DType::F32, DType::F32, DType::BF16),
    ("bf16", DType::BF16, DType::BF16, DType::F32),
    ("bf16-f32gradient", DType::BF16, DType::F32, DType::F32),
    ("bf16-bf16moments", DType::BF16, DType::BF16, DType::BF16),
    ("f16", DType::F16, DType::F16, DType::F32),
];

/// Bytes that a step moves an element: the gradient is read, main weight and moments are read and written, and a 16-bit
/// parameter is written.
fn bytes(param: DType, gradient: DType, moments: DType) -> usize {
    let rounded = if param == DType::F32 { 0 } else { param.size() };
    gradient.size() + 2 * DType::F32.size() + 4 * moments.size() + rounded
}

pub fn run(cuda: &Cuda, report: &Report) -> Result<()> {
    for (name, param, gradient, moments) in FORMS {
        let dims: Vec<[usize; 2]> = (0..LAYERS).flat_map(|_| [EXPERTS, SMALL]).collect();
        let elements: usize = dims.iter().map(|d| d[0] * d[1]).sum();
        for max_norm in [None, Some(1.0)] {
            let options = AdamWOptions { max_norm, moments, ..AdamWOptions::default() };
            let mut random = Random(5);
            let specs = dims.iter().enumerate();
            let specs = specs.map(|(i, d)| ParamSpec {
                name: i.to_string(),
                shard: ParamShard::whole(d),
                dtype: param,
                group: 0,
            });
            let group = GroupOptions { lr: 1e-6, ..options.group };
            let mut adam = AdamW::new(cuda, options, &[group], specs.collect(), None)?;
            let mut params = dims.iter().map(|d| Tensor::zeros(cuda, param, d)).collect::<Result<Vec<_>>>()?;
            // Drawn once, in bf16, and as many times as there are layers.
            let drawn = [random.tensor(cuda, &EXPERTS, 1.0)?, random.tensor(cuda, &SMALL, 1.0)?];
            let gradients =
                (0..dims.len()).map(|i| as_type(cuda, &drawn[i % 2], gradient)).collect::<Result<Vec<_>>>()?;
            let ms = report.time(|_| {
                adam.begin(&gradients.iter().map(|g| Some(g.view())).collect::<Vec<_>>())?;
                let tensors = params.iter_mut().zip(&gradients).enumerate();
                let tensors =
                    tensors.map(|(index, (p, g))| StepTensor { index, param: p.view_mut(), gradient: g.view() });
                adam.update(tensors.collect())
            })?;
            // The norm reads gradients once more.
            let norm = if max_norm.is_some() { gradient.size() } else { 0 };
            let phase = format!("adamw-{name}{}", if max_norm.is_some() { "-clipped" } else { "" });
            report.bytes("256Mi", &phase, ms, (elements * (bytes(param, gradient, moments) + norm)) as f64);
            drop((adam, params, gradients));
            cuda.trim();
        }
    }
    Ok(())
}

fn as_type(cuda: &Cuda, t: &Tensor<Cuda>, dtype: DType) -> Result<Tensor<Cuda>> {
    use moebius::kernels::optimizer::Convert;
    use moebius::optim::OptimizerDevice;
    let mut to = Tensor::empty(cuda, dtype, t.dims())?;
    cuda.convert(Convert { from: t.view(), to: to.view_mut() })?;
    Ok(to)
}
