//! Steps of AdamW over 2^28 elements, by the core and by a framework's optimizer, beside the copy rate: the bytes that each
//! form has to move, and no more, over its time.

use moebius::cuda::Cuda;
use moebius::kernels::optimizer::Convert;
use moebius::optim::{AdamW, AdamWOptions, GroupOptions, OptimizerDevice, ParamShard, ParamSpec, StepTensor};
use moebius::{DType, Device, Tensor};

use super::core::{SEED, time_queued};
use super::data::Random;
use super::{Result, asked, output};

/// The name of these rows' workload.
pub const WORKLOAD: &str = "256Mi";
/// Sizes of a layer's parameters, of which most elements are experts', and the number of layers: no cache holds a
/// thousandth of them.
pub const SIZES: [[usize; 2]; 2] = [[1 << 14, 1 << 11], [128, 2048]];
pub const LAYERS: usize = 8;

/// Types of parameter and gradient; moments are in f32.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    pub phase: &'static str,
    pub param: DType,
    pub gradient: DType,
}

pub const FORMS: [Form; 3] = [
    Form { phase: "adamw-f32", param: DType::F32, gradient: DType::F32 },
    Form { phase: "adamw-bf16", param: DType::BF16, gradient: DType::BF16 },
    Form { phase: "adamw-bf16-f32gradient", param: DType::BF16, gradient: DType::F32 },
];

impl Form {
    /// Bytes that a step has to move: of each element the gradient is read, main weight and two moments are read and
    /// written, and a 16-bit parameter is written.
    fn bytes(self) -> usize {
        let elements: usize = SIZES.iter().map(|[rows, width]| LAYERS * rows * width).sum();
        let rounded = if self.param == DType::F32 { 0 } else { self.param.size() };
        elements * (self.gradient.size() + 6 * DType::F32.size() + rounded)
    }

    /// A line of somebody's steps.
    pub fn report(self, who: &str, ms: f64, gpu: &str) {
        report(who, WORKLOAD, self.phase, (ms, self.bytes()), gpu);
    }
}

/// Options that leave the weights about as they are.
pub fn options() -> AdamWOptions {
    AdamWOptions { group: GroupOptions { lr: 1e-6, ..GroupOptions::default() }, ..AdamWOptions::default() }
}

fn report(who: &str, workload: &str, phase: &str, (ms, bytes): (f64, usize), gpu: &str) {
    let rate = bytes as f64 / ms / 1e6;
    output::say(format_args!(
        "{{\"impl\":\"{who}\",\"workload\":\"{workload}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},\"gb_s\":{rate:.0},\
         \"bytes\":{bytes},\"gpu\":\"{gpu}\"}}"
    ));
}

/// The copy rate and the core's steps.
pub fn run(cuda: &Cuda, gpu: &str) -> Result<()> {
    if !FORMS.iter().any(|form| asked(form.phase)) {
        return Ok(());
    }
    const BYTES: usize = 1 << 30;
    let from = Tensor::zeros(cuda, DType::U8, &[1, BYTES])?;
    let mut to = Tensor::empty(cuda, DType::U8, &[1, BYTES])?;
    let ms = time_queued(cuda, || Ok(cuda.copy(from.view().data(), to.view_mut().into_data())?))?;
    report("copy", "copy", "copy", (ms, 2 * BYTES), gpu);
    drop((from, to));
    for form in FORMS.into_iter().filter(|form| asked(form.phase)) {
        let dims: Vec<[usize; 2]> = (0..LAYERS).flat_map(|_| SIZES).collect();
        let spec = |(i, dims): (usize, &[usize; 2])| ParamSpec {
            name: i.to_string(),
            shard: ParamShard::whole(dims),
            dtype: form.param,
            group: 0,
        };
        let options = options();
        let specs = dims.iter().enumerate().map(spec).collect();
        let mut adam = AdamW::new(cuda, options, &[options.group], specs, None)?;
        let zeros = dims.iter().map(|dims| Tensor::zeros(cuda, form.param, dims));
        let mut params = zeros.collect::<moebius::Result<Vec<_>>>()?;
        let mut random = Random(SEED);
        let drawn = dims.iter().map(|dims| {
            let mut gradient = Tensor::empty(cuda, form.gradient, dims)?;
            cuda.convert(Convert { from: random.tensor(cuda, dims, 1.0)?.view(), to: gradient.view_mut() })?;
            Ok(gradient)
        });
        let gradients = drawn.collect::<moebius::Result<Vec<_>>>()?;
        let ms = time_queued(cuda, || {
            adam.begin(&gradients.iter().map(|g| Some(g.view())).collect::<Vec<_>>())?;
            let tensors = params.iter_mut().zip(&gradients).enumerate();
            let tensors = tensors.map(|(index, (p, g))| StepTensor { index, param: p.view_mut(), gradient: g.view() });
            Ok(adam.update(tensors.collect())?)
        })?;
        form.report("moebius", ms, gpu);
    }
    cuda.trim();
    Ok(())
}
