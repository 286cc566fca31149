//! One run of a layer on any device, with its results on the host.

use moebius::config::MoeConfig;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, DispatchOptions, GradientMask, Inputs, Layer, Mode, Noise, ParamKind, ParamViews};
use moebius::{DType, Error, Result, Tensor};

use crate::conformance::seed;

/// A test of the GPU.
pub type Test = Box<dyn Fn(&Cuda) + Send>;

/// Result of a test.
pub trait Outcome {
    fn must_hold(self);
}

impl Outcome for () {
    fn must_hold(self) {}
}

impl Outcome for Result<()> {
    fn must_hold(self) {
        self.unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Lists a file's tests, each a `fn name(cuda: &Cuda)`.
macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        /// The tests by name.
        pub fn cases() -> Vec<(&'static str, fn(&moebius::cuda::Cuda))> {
            vec![$((stringify!($name), |cuda| $crate::harness::Outcome::must_hold($name(cuda)))),+]
        }
    };
}
pub(crate) use tests;

/// The GPU, or why there is none. Every buffer starts as NaN.
pub fn gpu() -> std::result::Result<Cuda, String> {
    let found = Cuda::new(0).map(|cuda| cuda.poisoning()).map_err(|e| e.to_string());
    // A machine with a GPU on which the crate cannot start must not look like one without.
    if let (Err(e), Some(_)) = (&found, std::env::var_os("MOEBIUS_NEEDS_GPU")) {
        panic!("{e}");
    }
    found
}

/// Seeded numbers (SplitMix64, sum of four uniforms: close enough to normal).
pub struct Random(u64);

impl Random {
    /// Numbers of a place's own number.
    pub fn new(own: u64) -> Self {
        Self(seed::seed(own))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn normal(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 2.0) * 3f64.sqrt()
    }

    pub fn tensor(&mut self, dims: &[usize], dtype: DType, scale: f64) -> Result<Tensor<Cpu>> {
        let values: Vec<f64> = (0..dims.iter().product()).map(|_| self.normal() * scale).collect();
        Cpu::new().write(&values, dtype, dims)
    }
}

/// Parameters of a run.
#[derive(Clone)]
pub struct Case {
    pub config: MoeConfig,
    pub dispatch: DispatchOptions,
    pub tokens: usize,
    pub dtype: DType,
    pub seed: u64,
    /// Added to expert 0's logit bias, to make it hot.
    pub hot: f64,
    pub noise: Option<Noise>,
}

impl Case {
    pub fn new(config: MoeConfig, tokens: usize, dtype: DType) -> Self {
        Self { config, dispatch: DispatchOptions::default(), tokens, dtype, seed: 1, hot: 0.0, noise: None }
    }
}

/// Inputs of a case, on the host.
pub struct Data {
    pub x: Tensor<Cpu>,
    pub d_y: Tensor<Cpu>,
    pub params: Vec<(ParamKind, Tensor<Cpu>)>,
}

impl Data {
    pub fn new(case: &Case) -> Result<Self> {
        let mut random = Random::new(case.seed);
        let config = &case.config;
        let x = random.tensor(&[case.tokens, config.hidden], case.dtype, 1.0)?;
        let d_y = random.tensor(&[case.tokens, config.hidden], case.dtype, 1.0)?;
        let mut params = Vec::new();
        for kind in ParamKind::ALL {
            let Some(dims) = kind.dims(config, config.router.num_experts) else { continue };
            let scale = kind.fan_in(config).map_or(0.3, |n| 1.0 / (n as f64).sqrt());
            let mut t = random.tensor(&dims, case.dtype, scale)?;
            if kind == ParamKind::RouterBias && case.hot != 0.0 {
                let mut values = t.to_f64();
                values[0] += case.hot;
                t = Cpu::new().write(&values, case.dtype, &dims)?;
            }
            params.push((kind, t));
        }
        Ok(Self { x, d_y, params })
    }
}

/// Named results, as f64.
pub type Results = Vec<(String, Vec<f64>)>;

/// Forward and backward.
pub fn run<D: Kernels>(
    case: &Case,
    data: &Data,
    device: &D,
    group: &mut Group<D>,
    put: &dyn Fn(&Tensor<Cpu>) -> Result<Tensor<D>>,
) -> Result<Results> {
    let layer = Layer::new(case.config.clone(), 3)?.with_dispatch(case.dispatch);
    let x = put(&data.x)?;
    let d_y = put(&data.d_y)?;
    let params: Vec<(ParamKind, Tensor<D>)> =
        data.params.iter().map(|(kind, t)| Ok((*kind, put(t)?))).collect::<Result<_>>()?;
    let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let mode = Mode { backward: true, noise: case.noise };
    let forward = layer.forward(group, mode, x.view(), &params)?;
    let mut results = Vec::new();
    let mut keep = |name: &str, t: &Tensor<D>| -> Result<()> {
        results.push((name.to_string(), device.read(t.view())?));
        Ok(())
    };
    keep("ids", &forward.routing.ids)?;
    keep("logits", &forward.routing.logits)?;
    keep("weights", &forward.routing.weights)?;
    keep("y", &forward.y)?;
    let aux = forward.aux.get()?;
    let aux = vec![aux.balance, aux.z];
    let dropped = vec![forward.routing.load.get()?.dropped as f64];
    let Some(context) = forward.context else {
        return Err(Error::Device { call: "run", operation: "context".into(), message: "none".into() });
    };
    let inputs = Inputs { x: x.view(), params: &params };
    let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.7 };
    let mut gradients = layer.backward(group, context, inputs, cotangents, GradientMask::ALL)?;
    if let Some(d_x) = &gradients.x {
        keep("d_x", d_x)?;
    }
    keep("d_logits", &gradients.logits)?;
    keep("d_weights", &gradients.weights)?;
    for kind in ParamKind::ALL {
        if let Some(t) = gradients.take(kind) {
            keep(&format!("d_{}", kind.name()), &t)?;
        }
    }
    results.push(("aux".to_string(), aux));
    results.push(("dropped".to_string(), dropped));
    Ok(results)
}

pub fn group_config(case: &Case) -> GroupConfig {
    let mut config = GroupConfig::new(case.config.router.num_experts, case.tokens.max(1));
    config.max_rows = (case.tokens * case.config.router.top_k).max(1);
    config
}

pub fn on_cpu(case: &Case, data: &Data) -> Result<Results> {
    let put = |t: &Tensor<Cpu>| Tensor::from_buffer(copy(t), t.dtype(), t.dims());
    let cpu = Cpu::poisoning();
    run(case, data, &cpu, &mut Group::<Cpu>::single(group_config(case))?, &put)
}

fn copy(t: &Tensor<Cpu>) -> moebius::cpu::HostBuffer {
    let mut new = Tensor::empty(&Cpu::new(), t.dtype(), t.dims()).expect("room for a copy");
    new.as_bytes_mut().copy_from_slice(t.as_bytes());
    new.into_buffer()
}

pub fn on_gpu(case: &Case, data: &Data, cuda: &Cuda) -> Result<Results> {
    let results = run(case, data, cuda, &mut cuda.group(group_config(case))?, &|t| t.to(cuda))?;
    cuda.check()?;
    Ok(results)
}

/// ‖a − b‖ / ‖b‖; ‖a‖ where b is zero. NaN counts as infinite.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let base = norm(&mut b.iter().copied());
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    let relative = if base > 0.0 { error / base } else { error };
    if relative.is_nan() { f64::INFINITY } else { relative }
}

/// Differences that two runs of the same arithmetic in another order may have: a rounding to the type at each of the
/// layer's stores (2⁻⁹ in bf16, 2⁻¹² in f16, of which a few add up), and sums in f32 otherwise.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 1e-3,
        _ => 1e-5,
    }
}

/// Compares every result.
pub fn compare(name: &str, case: &Case, cuda: &Cuda) {
    let data = Data::new(case).expect("inputs");
    let cpu = on_cpu(case, &data).unwrap_or_else(|e| panic!("{name} on the CPU: {e}"));
    let gpu = on_gpu(case, &data, cuda).unwrap_or_else(|e| panic!("{name} on the GPU: {e}"));
    check(name, case, &cpu, &gpu);
    let portable = on_gpu(case, &data, &cuda.portable()).unwrap_or_else(|e| panic!("{name}, portable: {e}"));
    check(&format!("{name}, portable"), case, &cpu, &portable);
}

fn check(name: &str, case: &Case, cpu: &Results, gpu: &Results) {
    assert_eq!(cpu.len(), gpu.len());
    let mut worst = (0.0, String::new());
    for ((key, a), (other, b)) in gpu.iter().zip(cpu) {
        assert_eq!(key, other);
        if key == "ids" || key == "dropped" {
            assert_eq!(a, b, "{name}: {key}");
            continue;
        }
        let d = distance(a, b);
        assert!(d <= tolerance(case.dtype), "{name} {:?}: {key} is off by {d:e}", case.dtype);
        if d > worst.0 {
            worst = (d, key.clone());
        }
    }
    println!("{name} {:?}: worst {} {:.1e}", case.dtype, worst.1, worst.0);
}
