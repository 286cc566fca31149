//! The suite's cases on burn's CUDA back end, and what is the GPU's own: order, waits, whose memory, which device.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::cuda::CudaDevice;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::{AdamW, DeviceGroup, EpGroup, ExpertParallelMoE, Waits, cuda};
use moebius::config::AuxConfig;
use moebius::cuda::{Cuda, Waited};
use moebius::ep::GroupConfig;
use moebius::layer::ParamKind;
use moebius::optim::{AdamWOptions, GroupOptions};
use moebius::{Error, MoeConfig};

use super::support::*;
use super::{dense, dispatch, exact, faults, gradients, main_gradients};
use crate::trials::tests;

pub type Gpu = burn::backend::Cuda<f32, i32>;
type A = Autodiff<Gpu>;

/// The GPU for one test alone, as a call is ordered with all of the context's work, also other tests'.
pub fn gpu() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn group(config: GroupConfig) -> DeviceGroup {
    EpGroup::new(cuda(&CudaDevice::default()).unwrap().poisoning().group(config).unwrap()).into()
}

impl Subject for Gpu {
    // burn may multiply on tensor cores, which read f32 as TF32: ten bits behind the point.
    const ROUNDING: f64 = 1.0 / 2048.0;

    fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, DeviceGroup) -> T + Sync) -> Vec<T> {
        match ranks {
            1 => vec![rank(0, Self::alone())],
            #[cfg(feature = "nccl")]
            _ => crate::gpus::on_ranks(ranks, rank),
            #[cfg(not(feature = "nccl"))]
            _ => panic!("{ranks} ranks want NCCL"),
        }
    }

    /// Every buffer of the crate's own starts as NaN.
    fn alone() -> DeviceGroup {
        group(GroupConfig::new(E, 64))
    }
}

fn device_of(group: &DeviceGroup) -> Cuda {
    group.on::<Cuda>().unwrap().lock().device().clone()
}

fn matches_a_dense_model() {
    let _alone = gpu();
    dense::matches_a_dense_model::<Gpu>(&[1]);
}

fn each_output_alone_gives_its_part() {
    let _alone = gpu();
    dense::each_output_alone::<Gpu>(1);
}

fn experts_gradients_are_added_up_in_f32() {
    let _alone = gpu();
    main_gradients::backward::added_up::<Gpu>();
}

fn steps_of_adamw_have_the_cpus_bits() {
    let _alone = gpu();
    main_gradients::optimizer::steps_as_on_the_cpu::<Gpu>();
    main_gradients::optimizer::fields_of_one_id::<Gpu>();
}

fn any_leading_dimensions_and_strides() {
    let _alone = gpu();
    exact::leading_dimensions_and_strides::<Gpu>();
}

fn a_gradient_that_is_not_contiguous() {
    let _alone = gpu();
    exact::strided_gradient::<Gpu>();
}

fn recomputed_input() {
    let _alone = gpu();
    exact::recomputed_input::<Gpu>();
}

fn a_second_backward_is_refused() {
    let _alone = gpu();
    faults::second_backward::<Gpu>();
}

fn bad_tokens_are_refused() {
    let _alone = gpu();
    faults::bad_tokens::<Gpu>();
}

fn gradients_are_those_of_finite_differences() {
    let _alone = gpu();
    gradients::finite_differences::<Gpu>(1);
}

fn a_given_gradient_is_a_products() {
    let _alone = gpu();
    gradients::given::<Gpu>();
}

fn dispatch_and_combine_with_identity_experts() {
    let _alone = gpu();
    dispatch::identity_experts::<Gpu>(&[1]);
}

fn dispatch_and_combine_make_the_module() {
    let _alone = gpu();
    dispatch::as_the_module::<Gpu>(&[1]);
}

fn several_dispatches_in_flight() {
    let _alone = gpu();
    dispatch::several_in_flight::<Gpu>(&[1]);
}

/// x, the gradient of y and the parameters of a case, rounded to its type.
struct Case {
    config: MoeConfig,
    tokens: usize,
    dtype: DType,
}

impl Case {
    fn leaf<Bk: Backend, const D: usize>(&self, values: Vec<f32>, dims: [usize; D]) -> Tensor<Bk, D> {
        let data = TensorData::new(values, dims).convert_dtype(self.dtype);
        Tensor::from_data(data, (&Default::default(), self.dtype))
    }

    /// y, aux and all gradients, by name.
    fn run<S: Subject>(&self, group: DeviceGroup) -> Vec<(String, Vec<f32>)> {
        let mut model = module::<Autodiff<S>>(&self.config, group);
        let e = self.config.router.num_experts;
        fn cast<S: Subject, const D: usize>(case: &Case, kind: ParamKind, param: &mut Param<Tensor<Autodiff<S>, D>>) {
            let Some((values, dims)) = whole(kind, &case.config) else { return };
            let scale = kind.fan_in(&case.config).map_or(0.3, |n| 2.0 / (n as f32).sqrt());
            let values = values.into_iter().map(|v| v * scale).collect();
            *param = Param::from_tensor(case.leaf(values, dims.try_into().unwrap()));
        }
        cast::<S, 2>(self, ParamKind::Router, &mut model.router.weight);
        cast::<S, 3>(self, ParamKind::Up, &mut model.experts.up);
        cast::<S, 3>(self, ParamKind::Down, &mut model.experts.down);
        let (t, h) = (self.tokens, self.config.hidden);
        let x = self.leaf::<Autodiff<S>, 2>(values(1, t * h, 1.0), [t, h]).require_grad();
        let c = self.leaf::<Autodiff<S>, 2>(values(2, t * h, 1.0), [t, h]);
        let out = model.forward_full(x.clone(), None).unwrap();
        assert_eq!(out.load.get().unwrap().tokens_per_expert.len(), e);
        let mut found = vec![
            ("y".to_string(), floats(out.y.clone())),
            ("logits".to_string(), floats(out.logits)),
            ("ids".to_string(), out.ids.into_data().convert::<f32>().into_vec().unwrap()),
            ("weights".to_string(), floats(out.weights)),
        ];
        let loss = (out.y.cast(DType::F32) * c.cast(DType::F32)).sum();
        let gradients = match self.config.aux.is_off() {
            true => loss,
            false => {
                found.push(("aux".to_string(), floats(out.aux.clone())));
                loss + out.aux
            }
        }
        .backward();
        found.push(("dx".to_string(), floats(x.grad(&gradients).unwrap())));
        found.extend(gradients_of(&model, &gradients));
        found
    }
}

/// Differences that two runs of the same arithmetic in another order may have: a rounding to the type at each of the
/// layer's stores (2⁻⁹ in bf16, 2⁻¹² in f16, of which a few add up), and sums in f32 otherwise.
const TOLERANCES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::BF16, 4e-3), (DType::F16, 1e-3)];

fn results_are_the_cpus_within_rounding() {
    let _alone = gpu();
    let mut aux = AuxConfig::default();
    (aux.balance, aux.z) = (0.02, 0.01);
    // Rows that burn pads and such that it does not, tiles cut and whole, an empty share and none.
    for (h, i, e, k, tokens) in [(12, 10, 8, 3, 6), (136, 200, 8, 2, 300), (256, 128, 16, 4, 513), (64, 64, 4, 2, 1)] {
        for (dtype, tolerance) in TOLERANCES {
            for aux in [AuxConfig::default(), aux] {
                let mut config = MoeConfig::new(h, i, e, k);
                config.aux = aux;
                let case = Case { config, tokens, dtype };
                let limits = GroupConfig::new(e, tokens);
                let on_cpu = case.run::<Flex>(EpGroup::single(limits.clone()).unwrap().into());
                let on_gpu = case.run::<Gpu>(group(limits));
                assert_eq!(on_cpu.len(), on_gpu.len());
                for ((name, a), (other, b)) in on_gpu.iter().zip(&on_cpu) {
                    assert_eq!(name, other);
                    close(&format!("{name}, H {h} T {tokens} {dtype:?}"), a, b, tolerance);
                }
            }
        }
    }
}

fn a_step_repeats_to_the_bit() {
    let _alone = gpu();
    let case = Case { config: MoeConfig::new(256, 128, 16, 4), tokens: 513, dtype: DType::BF16 };
    let first = case.run::<Gpu>(group(GroupConfig::new(16, 513)));
    for _ in 0..20 {
        assert_eq!(case.run::<Gpu>(group(GroupConfig::new(16, 513))), first);
    }
}

fn a_group_of_another_device_is_refused() {
    let _alone = gpu();
    let config = config();
    let x = tensor::<Gpu, 2>(inputs(0).0, [token_counts()[0], H]);
    let error = module::<Gpu>(&config, single()).forward(x).unwrap_err();
    assert!(matches!(&error, Error::Invalid { name, .. } if name == "group"), "{error}");
    let x = tensor::<Flex, 2>(inputs(0).0, [token_counts()[0], H]);
    let error = module::<Flex>(&config, Gpu::alone()).forward(x).unwrap_err();
    assert!(matches!(&error, Error::Invalid { name, .. } if name == "group"), "{error}");
}

fn a_call_waits_on_the_gpu_alone() {
    let _alone = gpu();
    let step = |config: &MoeConfig| {
        let group = Gpu::alone();
        let model = module::<A>(config, &group);
        let x = tensor::<A, 2>(inputs(0).0, [token_counts()[0], H]).require_grad();
        let out = model.forward_full(x, None).unwrap();
        let forward = group.waits();
        (out.y.sum() + out.aux).backward();
        (forward, group.waits())
    };
    // Drivers before CUDA 12.5 leave it to the host.
    let on_gpu = device_of(&Gpu::alone()).follow_context().unwrap() == Waited::Device;
    let waits = |order: u64| match on_gpu {
        true => Waits { device: order, host: 0 },
        false => Waits { device: 0, host: order },
    };
    let mut plain = config();
    plain.aux = AuxConfig::default();
    assert_eq!(step(&plain), (waits(2), waits(4)), "no auxiliary loss");
    assert_eq!(step(&config()), (waits(2), waits(4)), "neither its value nor its gradient");
    let inference = Gpu::alone();
    let model = module::<Gpu>(&plain, &inference);
    model.forward(tensor::<Gpu, 2>(inputs(0).0, [token_counts()[0], H])).unwrap();
    assert_eq!(inference.waits(), waits(2), "inference");
}

/// Behind work that takes long, a step with auxiliary losses is enqueued before any of it has run; then it gives what
/// it gave before.
fn the_host_runs_ahead_of_a_step() {
    let _alone = gpu();
    let group = Gpu::alone();
    let core = device_of(&group);
    if core.follow_context().unwrap() != Waited::Device {
        println!("skipped: this driver leaves the order to the host");
        return;
    }
    let model = module::<A>(&config(), &group);
    let x = tensor::<A, 2>(inputs(0).0, [token_counts()[0], H]).require_grad();
    let n = 8192;
    let big = Tensor::<Gpu, 2>::zeros([n, n], &x.device());
    // Half a second at 70 TFLOP/s, 0.1 at 350: a GPU may take its TF32 units for f32.
    let long = || (0..32).fold(big.clone(), |product, _| product.matmul(big.clone()));
    let step = || {
        let out = model.forward_full(x.clone(), None).unwrap();
        let gradients = (out.y.sum() + out.aux.clone() * 0.5).backward();
        (out.aux, x.grad(&gradients).unwrap(), out.losses)
    };
    // Kernels are chosen and loaded once.
    drop(floats(long().slice([0..1, 0..1])));
    let (aux, dx, _) = step();
    let (aux, dx) = (floats(aux), floats(dx));
    let product = long();
    // This call brings the layer's stream behind burn's, which is hidden: the event comes once the products are done,
    // and before anything of the step.
    let first = model.forward_full(x.clone(), None).unwrap();
    let ahead = core.record().unwrap();
    let (again, d_again, losses) = step();
    assert!(!ahead.is_done().unwrap(), "the host waited for the GPU");
    drop(first);
    assert!(losses.known().is_none());
    assert_eq!((floats(again), floats(d_again)), (aux, dx));
    drop(product);
}

/// Work of burn that takes long, whose result is `x` to the bit.
fn late(x: &Tensor<Gpu, 2>) -> Tensor<Gpu, 2> {
    let n = 2048;
    let mut slow = Tensor::<Gpu, 2>::zeros([n, n], &x.device());
    for _ in 0..4 {
        slow = slow.clone().matmul(slow);
    }
    x.clone() + slow.slice([0..1, 0..1]).expand(x.dims())
}

fn work_before_and_after_a_call_is_in_order() {
    let _alone = gpu();
    let (h, t) = (512, 1024);
    let config = MoeConfig::new(h, 256, 8, 2);
    let group = group(GroupConfig::new(8, t));
    let model = module::<Gpu>(&config, &group);
    let device = CudaDevice::default();
    let x = tensor::<Gpu, 2>(values(11, t * h, 1.0), [t, h]);
    Gpu::sync(&device).unwrap();
    let expected = floats(model.forward(x.clone()).unwrap());
    for _ in 0..10 {
        // The memory that the pool hands out next holds NaN, written late.
        let junk = late(&x).mul_scalar(f32::NAN);
        drop(junk);
        // Neither side waits on the host: the call reads what is not yet written, and what it writes is overwritten.
        let x = late(&x);
        let y = model.forward(x.clone()).unwrap();
        drop(x);
        let copy = y.add_scalar(0.0);
        let _overwrites = Tensor::<Gpu, 2>::ones([t, h], &device);
        assert_eq!(floats(copy), expected);
    }
}

fn results_lie_in_burns_memory_and_workspace_is_given_back() {
    let _alone = gpu();
    let (h, t) = (256, 512);
    let config = MoeConfig::new(h, 512, 8, 2);
    let group = group(GroupConfig::new(8, t));
    let core = device_of(&group);
    let model = module::<A>(&config, &group);
    let x = tensor::<A, 2>(values(1, t * h, 1.0), [t, h]).require_grad();
    // The module has the last call's loss and load until the next one.
    model.forward(x.clone()).unwrap().sum().backward();
    let before = core.memory().in_use;
    let y = model.forward(x.clone()).unwrap();
    assert!(core.memory().in_use > before, "the context is the crate's");
    let gradients = y.clone().sum().backward();
    let up = model.experts.up.grad(&gradients).unwrap();
    assert!(core.memory().peak > before + t * h * 4);
    assert_eq!(core.memory().in_use, before, "nothing but burn's tensors and the last figures is left");
    assert!(floats(up).iter().chain(&floats(y)).all(|v| v.is_finite()));
    let requests = core.memory().allocations;
    let again = model.forward(x).unwrap();
    again.sum().backward();
    assert_eq!(core.memory().allocations, requests, "a step of known sizes asks the driver for nothing");
    drop(model);
    assert_eq!(core.memory().in_use, 0, "figures go with their module");
}

fn a_nan_is_reported_at_the_next_wait() {
    let _alone = gpu();
    let config = config();
    let group = Gpu::alone();
    let model = module::<Gpu>(&config, &group);
    let nan = tensor::<Gpu, 2>(vec![f32::NAN; H], [1, H]);
    let at_once = model.forward(nan).err();
    let found = at_once.or_else(|| device_of(&group).check().err());
    assert!(matches!(found, Some(Error::NanLogits { .. })), "{found:?}");
    model.forward(tensor::<Gpu, 2>(inputs(0).0, [token_counts()[0], H])).unwrap();
}

fn a_capture_of_burns_layer_is_refused() {
    let _alone = gpu();
    let mut config = config();
    config.aux = AuxConfig::default();
    let group = Gpu::alone();
    let (model, core) = (module::<Gpu>(&config, &group), device_of(&group));
    let x = tensor::<Gpu, 2>(inputs(0).0, [token_counts()[0], H]);
    let y = floats(model.forward(x.clone()).unwrap());
    let refused = core.capture(|| model.forward(x.clone()).map(drop)).err().map(|e| e.to_string());
    assert!(refused.as_ref().is_some_and(|e| e.contains("cannot be captured")), "{refused:?}");
    assert_eq!(floats(model.forward(x).unwrap()), y, "and the layer works on");
}

fn a_tensor_of_another_gpu_is_refused() {
    let _alone = gpu();
    if Cuda::new(1).is_err() {
        println!("skipped: one GPU");
        return;
    }
    // Tensors on the first GPU, a group on the second.
    let group = DeviceGroup::single::<Gpu>(&config(), &CudaDevice::new(1)).unwrap();
    let x = tensor::<Gpu, 2>(inputs(0).0, [token_counts()[0], H]);
    let error = module::<Gpu>(&config(), &group).forward(x).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("the group's GPU 1")), "{error:?}");
}

/// A tensor `[2048, 2048]` of this value, a whole number, that the GPU is at for milliseconds; burn's thread has not
/// enqueued all of it when this returns.
pub fn slow<Bk: Backend>(value: f32) -> Tensor<Bk, 2> {
    let full = Tensor::full([2048, 2048], value, &here::<Bk>());
    (0..300).fold(full, |t, _| t.mul_scalar(2.0).mul_scalar(0.5))
}

#[derive(Module, Debug)]
pub struct OneParam<B: Backend> {
    pub weight: Param<Tensor<B, 2>>,
}

/// Main weights are those of a parameter that burn computes at this moment, and a step reads a gradient so.
fn an_optimizer_waits_for_what_burn_computes() {
    let _alone = gpu();
    let device = cuda(&CudaDevice::default()).unwrap();
    // burn's kernels are compiled, and its memory has held another value.
    assert!(floats(slow::<Gpu>(7.0)).iter().all(|v| *v == 7.0));
    let weight = Tensor::<A, 2>::from_inner(slow::<Gpu>(3.0).cast(DType::BF16)).require_grad();
    let model = OneParam { weight: Param::initialized(ParamId::new(), weight) };
    // Of a gradient of 4 a step is the rate, as its first moment is the root of its second: half of the weight, and ε.
    let group = GroupOptions { lr: 1.5, weight_decay: 0.0, eps: 1e-20, ..Default::default() };
    let mut adam = AdamW::<A>::new(&device, &model, AdamWOptions { group, ..Default::default() }).unwrap();
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, slow::<Gpu>(4.0));
    let model = adam.step(model, gradients).unwrap();
    let found = floats(model.weight.val());
    assert!(found.iter().all(|v| *v == 1.5), "{} to {}", found[0], found[found.len() - 1]);
}

fn a_bf16_back_end_runs_it_too() {
    let _alone = gpu();
    // burn keeps one default type a device and process, the first that is asked for: a process of its own.
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "gpu::a_bf16_back_end_alone", "--ignored"];
    let done = std::process::Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

/// Run by [`a_bf16_back_end_runs_it_too`].
pub fn a_bf16_back_end_alone() {
    type Half = burn::backend::Cuda<half::bf16, i32>;
    let config = MoeConfig::new(64, 32, 8, 2);
    let group = DeviceGroup::single::<Autodiff<Half>>(GroupConfig::new(8, 16), &CudaDevice::default()).unwrap();
    let moe = moebius::burn::ExpertParallelMoEConfig::from(&config)
        .init_on::<Autodiff<Half>>(&group, &CudaDevice::default())
        .unwrap();
    let x = Tensor::<Autodiff<Half>, 2>::from_data(
        TensorData::new(values(17, 16 * 64, 1.0), [16, 64]).convert::<half::bf16>(),
        &CudaDevice::default(),
    );
    let y = moe.forward(x).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    let gradients = y.sum().backward();
    let up = floats(moe.experts.up.grad(&gradients).unwrap());
    assert!(up.iter().all(|v| v.is_finite()) && up.iter().any(|&v| v != 0.0));
    let _: &ExpertParallelMoE<Autodiff<Half>> = &moe;
}

tests! {
    fn();
    matches_a_dense_model,
    each_output_alone_gives_its_part,
    experts_gradients_are_added_up_in_f32,
    steps_of_adamw_have_the_cpus_bits,
    any_leading_dimensions_and_strides,
    a_gradient_that_is_not_contiguous,
    recomputed_input,
    a_second_backward_is_refused,
    bad_tokens_are_refused,
    gradients_are_those_of_finite_differences,
    a_given_gradient_is_a_products,
    dispatch_and_combine_with_identity_experts,
    dispatch_and_combine_make_the_module,
    several_dispatches_in_flight,
    results_are_the_cpus_within_rounding,
    a_step_repeats_to_the_bit,
    a_group_of_another_device_is_refused,
    a_call_waits_on_the_gpu_alone,
    the_host_runs_ahead_of_a_step,
    work_before_and_after_a_call_is_in_order,
    results_lie_in_burns_memory_and_workspace_is_given_back,
    a_nan_is_reported_at_the_next_wait,
    a_capture_of_burns_layer_is_refused,
    a_tensor_of_another_gpu_is_refused,
    an_optimizer_waits_for_what_burn_computes,
    a_bf16_back_end_runs_it_too,
}
