//! Whole layers over several GPUs, against the same layers over as many CPU ranks.

use candle_core::{Device, Tensor};
use moebius::checkpoint::BlockParams;
use moebius::comm::Communicator;
use moebius::config::{CapacityOrder, ExpertCapacity, MoeConfig, Payload, SharedConfig};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Overflow, Reporting};
use moebius::nccl::NcclComm;
use moebius::{DType, Error};

use crate::common::devices::Endpoint;
use crate::common::support::compare::values;
use crate::common::support::dense::Params;
use crate::common::{Cotangent, Outcome, Setup, run_on, run_parts, run_rank, shard};
use crate::several::numbers;
use crate::{KINDS, Run, conformance::over};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        // One each: NCCL EP compiles two dozen kernels for one.
        ("same_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "plain")),
        ("auxiliary_losses_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "auxiliary losses")),
        ("a_shared_expert_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "shared expert")),
        ("an_expert_capacity_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "expert capacity")),
        ("tokens_in_nvfp4_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "nvfp4")),
        ("tokens_in_mxfp8_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "mxfp8")),
        ("tokens_in_fp8_blocks_as_cpu_ranks", |cuda, ranks| same_as_cpu_ranks(cuda, ranks, "fp8 blocks")),
        ("same_bits_in_a_hundred_steps", same_bits_in_a_hundred_steps),
        ("a_capacity_too_small_is_told_everywhere", a_capacity_too_small_is_told_everywhere),
    ]
}

fn tensor(seed: u64, dims: &[usize], scale: f64) -> Tensor {
    let count = dims.iter().product();
    Tensor::from_vec(numbers(seed, count, scale), dims, &Device::Cpu).expect("a tensor")
}

fn params(config: &MoeConfig) -> Params {
    let (h, i, e) = (config.hidden, config.intermediate, config.router.num_experts);
    let mut all = Params::new();
    let mut put = |name: &str, seed: u64, dims: &[usize], fan: usize| {
        all.insert(name.to_string(), tensor(seed, dims, 3.4 / (fan as f64).sqrt()));
    };
    put("router.weight", 1, &[e, h], h);
    put("experts.up", 2, &[e, 2 * i, h], h);
    put("experts.down", 3, &[e, h, i], i);
    if let Some(shared) = &config.shared {
        put("shared.up", 4, &[2 * shared.intermediate, h], h);
        put("shared.down", 5, &[h, shared.intermediate], shared.intermediate);
    }
    all
}

/// A block, its input and the gradient at its output.
pub struct Problem {
    setup: Setup,
    dtype: DType,
    x: Tensor,
    d_y: Tensor,
    params: Params,
}

impl Problem {
    pub fn new(config: &MoeConfig, split: &[usize], kind: DispatcherKind, dtype: DType) -> Self {
        let mut setup = Setup::new(config, split);
        setup.dispatcher = kind;
        let dims = [split.iter().sum(), config.hidden];
        Self { setup, dtype, x: tensor(6, &dims, 3.0), d_y: tensor(7, &dims, 3.0), params: params(config) }
    }

    /// The same for CPU ranks, which have neither NCCL EP nor NVLink.
    fn cpu_setup(&self) -> Setup {
        let mut setup = self.setup.clone();
        setup.dispatcher = match setup.dispatcher {
            DispatcherKind::NcclEp | DispatcherKind::NcclEpLowLatency => DispatcherKind::AllToAll,
            DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency => DispatcherKind::AllGather,
            both => both,
        };
        setup
    }

    fn on_cpu(&self) -> Result<Outcome, Error> {
        let Self { dtype, x, d_y, params, .. } = self;
        let (x, d_y, params) = (x.clone(), d_y.clone(), params.clone());
        Self { setup: self.cpu_setup(), dtype: *dtype, x, d_y, params }.on(&Cpu::poisoning())
    }

    /// This process's rank over NCCL, compared with the same rank on the CPU.
    pub fn as_one_rank(&self, name: &str, comm: NcclComm) {
        let (rank, ranks) = (comm.rank(), self.setup.split.len());
        let parts: Vec<BlockParams> = (0..ranks).map(|r| shard(&self.params, r, ranks, self.dtype)).collect();
        let cotangent = Some(Cotangent { y: Some(&self.d_y), aux: 0.3 });
        let cpu =
            run_parts(&Cpu::poisoning(), &self.cpu_setup(), &parts, &self.x, self.dtype, cotangent).expect("the CPU");
        let endpoint = Endpoint { device: comm.cuda().clone(), comm: Box::new(comm) };
        let own = run_rank(endpoint, &self.setup, &parts[rank], &self.x, self.dtype, cotangent);
        let own = own.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(own.counts(), cpu[rank].counts(), "{name}");
        for ((what, a), (_, b)) in own.tensors().into_iter().zip(cpu[rank].tensors()) {
            let d = distance(a, b);
            assert!(d <= tolerance(self.dtype), "{name}: {what} is off by {d:e}");
        }
    }

    /// Forward alone.
    #[allow(dead_code, reason = "what goes forward only has a suite of its own")]
    pub fn forward_as_on_cpu(&self, name: &str, cuda: &Cuda) {
        let ranks = self.setup.split.len();
        let parts: Vec<BlockParams> = (0..ranks).map(|r| shard(&self.params, r, ranks, self.dtype)).collect();
        let mut setup = self.setup.clone();
        let gpu = run_on(cuda, &setup, &parts, &self.x, self.dtype, None);
        setup.dispatcher = DispatcherKind::AllToAll;
        let cpu = run_on(&Cpu::poisoning(), &setup, &parts, &self.x, self.dtype, None);
        let (gpu, cpu) = (gpu.unwrap_or_else(|e| panic!("{name}: {e}")), cpu.expect("the CPU"));
        compare(name, &gpu, &cpu, tolerance(self.dtype));
    }

    fn on<D: crate::common::devices::Target>(&self, device: &D) -> Result<Outcome, Error> {
        let ranks = self.setup.split.len();
        let parts: Vec<BlockParams> = (0..ranks).map(|r| shard(&self.params, r, ranks, self.dtype)).collect();
        let cotangent = Cotangent { y: Some(&self.d_y), aux: 0.3 };
        run_on(device, &self.setup, &parts, &self.x, self.dtype, Some(cotangent))
    }
}

fn configs() -> Vec<(&'static str, MoeConfig)> {
    let plain = MoeConfig::new(64, 40, 16, 4);
    let mut aux = MoeConfig::new(128, 64, 8, 2);
    (aux.aux.balance, aux.aux.z) = (0.1, 0.01);
    let mut shared = MoeConfig::new(64, 48, 32, 8);
    shared.shared = Some(SharedConfig { intermediate: 32, gated: false, bias: false });
    let mut limited = plain.clone();
    limited.router.expert_capacity =
        Some(ExpertCapacity { factor: 0.8, order: CapacityOrder::Probability, renormalize: true });
    let quantized = |payload| {
        let mut config = shared.clone();
        config.payload = payload;
        config
    };
    vec![
        ("plain", plain),
        ("auxiliary losses", aux),
        ("nvfp4", quantized(Payload::Nvfp4)),
        ("mxfp8", quantized(Payload::Mxfp8)),
        ("fp8 blocks", quantized(Payload::Fp8Block)),
        ("shared expert", shared),
        ("expert capacity", limited),
    ]
}

/// Uneven tokens, among them none.
fn splits(ranks: usize) -> Vec<Vec<usize>> {
    vec![vec![33; ranks], (0..ranks).map(|r| [70, 0, 3, 128][r % 4]).collect()]
}

/// ‖a − b‖ / ‖b‖, or ‖a‖ where b is zero.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (values(a).expect("values"), values(b).expect("values"));
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let (error, base) = (norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)), norm(&mut b.iter().copied()));
    let relative = if base > 0.0 { error / base } else { error };
    if relative.is_nan() { f64::INFINITY } else { relative }
}

/// The same arithmetic in another order: a rounding to bf16 (2⁻⁹) at each of a layer's stores, of which a few add up,
/// and one more at the sum over ranks of an all-gather; sums in f32 otherwise.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 6e-3 } else { 1e-5 }
}

fn same_as_cpu_ranks(cuda: &Cuda, ranks: usize, which: &str) {
    for (name, config) in configs().into_iter().filter(|(name, _)| *name == which) {
        for split in splits(ranks) {
            for kind in KINDS {
                for dtype in [DType::F32, DType::BF16] {
                    let name = format!("{name}, {split:?}, {kind:?}, {dtype}");
                    let problem = Problem::new(&config, &split, kind, dtype);
                    let cpu = problem.on_cpu().unwrap_or_else(|e| panic!("{name}, CPU: {e}"));
                    let gpu = problem.on(cuda).unwrap_or_else(|e| panic!("{name}: {e}"));
                    compare(&name, &gpu, &cpu, tolerance(dtype));
                }
            }
        }
    }
}

fn compare(name: &str, gpu: &Outcome, cpu: &Outcome, tolerance: f64) {
    assert_eq!(gpu.ids, cpu.ids, "{name}: experts");
    assert_eq!(gpu.load, cpu.load, "{name}: load");
    let mut worst = (0.0, "nothing");
    let mut near = |what: &'static str, a: &Tensor, b: &Tensor| {
        let d = distance(a, b);
        assert!(d <= tolerance, "{name}: {what} is off by {d:e}");
        if d > worst.0 {
            worst = (d, what);
        }
    };
    near("y", &gpu.y, &cpu.y);
    near("logits", &gpu.logits, &cpu.logits);
    near("weights", &gpu.weights, &cpu.weights);
    assert_eq!(gpu.grads.keys().collect::<Vec<_>>(), cpu.grads.keys().collect::<Vec<_>>(), "{name}");
    for (key, gradient) in &cpu.grads {
        near("a gradient", &gpu.grads[key], gradient);
    }
    for (a, b) in gpu.aux.iter().zip(&cpu.aux) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1e-3), "{name}: auxiliary losses {a} and {b}");
    }
    println!("{name}: worst {} {:.1e}", worst.1, worst.0);
}

fn same_bits_in_a_hundred_steps(cuda: &Cuda, ranks: usize) {
    for kind in KINDS {
        let (_, config) = configs().into_iter().find(|(name, _)| *name == "shared expert").expect("a block");
        let problem = Problem::new(&config, &splits(ranks)[1], kind, DType::BF16);
        let first = problem.on(cuda).expect("a step").bits();
        for step in 1..100 {
            assert!(problem.on(cuda).expect("a step").bits() == first, "{kind:?}: step {step} differs");
        }
    }
}

/// Every rank hears which rank has no room, and the group works again.
fn a_capacity_too_small_is_told_everywhere(cuda: &Cuda, ranks: usize) {
    for kind in KINDS {
        let mut problem = Problem::new(&MoeConfig::new(64, 40, 16, 4), &vec![20; ranks], kind, DType::F32);
        problem.setup.dispatch.capacity = Capacity::Static(3);
        problem.setup.dispatch.overflow = Overflow::Error;
        problem.setup.dispatch.reporting = Some(Reporting::Immediate);
        let error = problem.on(cuda).err();
        assert!(matches!(error, Some(Error::Capacity { capacity: 3, .. })), "{error:?}");
        if kind != DispatcherKind::NcclEp {
            over(cuda, kind, ranks, "works").run(moebius::ep::GroupConfig::new(ranks, 2), |r| r.works());
        }
    }
}
