//! The layer as a burn module: against a dense reference of burn operations, and as a citizen of burn's autodiff,
//! records and optimisers.
#![cfg(feature = "burn")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;

use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::config::Config;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, NamedMpkFileRecorder, Recorder};
use burn::tensor::activation::{sigmoid, silu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moebius::burn::{EpGroup, ExpertParallelMoE, ExpertParallelMoEConfig};
use moebius::checkpoint::{Block, BlockParams};
use moebius::comm::{Op, ReduceOp, Tag, ThreadWorld};
use moebius::config::{AuxConfig, SharedConfig};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Cotangents, Inputs, Layer, Mode, Role, Wanted};
use moebius::{CommError, Error, MoeConfig, TensorMut};

type B = Autodiff<Flex>;
type CoreTensor = moebius::Tensor<Cpu>;

const H: usize = 12;
const I: usize = 10;
const E: usize = 8;
const K: usize = 3;
const TOKENS: [usize; 4] = [5, 3, 0, 6];

/// Sums of at most a few hundred f32 products of values below 4: a few units of 2⁻²⁴ relative to the result's norm.
const FORWARD: f64 = 2e-6;
const BACKWARD: f64 = 1e-5;

fn device() -> FlexDevice {
    FlexDevice
}

/// Every part that has a gradient: router bias, expert biases, gated shared expert, both auxiliary losses per rank.
fn config() -> ExpertParallelMoEConfig {
    let mut aux = AuxConfig::default();
    (aux.balance, aux.z) = (0.02, 0.01);
    ExpertParallelMoEConfig::new(H, I, E, K)
        .with_logit_bias(true)
        .with_expert_bias(true)
        .with_shared(Some(SharedConfig { intermediate: 6, gated: true }))
        .with_aux(aux)
}

/// Reproducible values in ±scale, another sequence for each seed.
fn values(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

/// Values of a parameter over all ranks (L = E).
fn whole(role: Role, config: &MoeConfig) -> Option<(Vec<f32>, Vec<usize>)> {
    let dims = role.dims(config, config.router.num_experts)?;
    Some((values(role as u64 + 10, dims.iter().product(), 0.5), dims))
}

/// One rank's share of it.
fn share(role: Role, config: &MoeConfig, rank: usize, ranks: usize) -> Option<CoreTensor> {
    let (values, dims) = whole(role, config)?;
    if role.is_replicated() {
        return Some(CoreTensor::from_vec(values, &dims).unwrap());
    }
    let mut own = dims;
    own[0] /= ranks;
    let count: usize = own.iter().product();
    Some(CoreTensor::from_vec(values[rank * count..][..count].to_vec(), &own).unwrap())
}

fn block(config: &MoeConfig, rank: usize, ranks: usize) -> Block {
    let of = |role| share(role, config, rank, ranks);
    let params = BlockParams {
        router: of(Role::Router).unwrap(),
        router_bias: of(Role::RouterBias),
        selection_bias: of(Role::SelectionBias),
        up: of(Role::Up).unwrap(),
        up_bias: of(Role::UpBias),
        down: of(Role::Down).unwrap(),
        down_bias: of(Role::DownBias),
        shared_up: of(Role::SharedUp),
        shared_down: of(Role::SharedDown),
        shared_gate: of(Role::SharedGate),
    };
    Block { config: config.clone(), params }
}

/// This rank's x, and what the loss multiplies y with.
fn inputs(rank: usize) -> (Vec<f32>, Vec<f32>) {
    let count = TOKENS[rank] * H;
    (values(100 + rank as u64, count, 1.0), values(200 + rank as u64, count, 1.0))
}

fn tensor<Bk: Backend, const D: usize>(values: Vec<f32>, dims: [usize; D]) -> Tensor<Bk, D> {
    Tensor::from_data(TensorData::new(values, dims), &Default::default())
}

fn floats<Bk: Backend, const D: usize>(t: Tensor<Bk, D>) -> Vec<f32> {
    t.into_data().into_vec().unwrap()
}

/// ‖a − b‖ / ‖b‖; a zero reference wants exact zero.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let reference = norm(&mut b.iter().map(|&x| f64::from(x)));
    let error = norm(&mut a.iter().zip(b).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    if reference == 0.0 { if error == 0.0 { 0.0 } else { f64::INFINITY } } else { error / reference }
}

#[track_caller]
fn close(name: &str, a: &[f32], b: &[f32], tolerance: f64) {
    let error = relative(a, b);
    assert!(error <= tolerance, "{name}: relative error {error:e} over {tolerance:e}");
}

/// Runs `rank` on a thread for each of R ranks with its group; results in rank order.
fn on_ranks<T: Send>(ranks: usize, timeout: Duration, rank: impl Fn(usize, EpGroup) -> T + Sync) -> Vec<T> {
    let comms = ThreadWorld::create(ranks, timeout);
    thread::scope(|s| {
        let run = &rank;
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(r, comm)| {
                s.spawn(move || {
                    let group = Group::new(Cpu::new(), (), Box::new(comm), GroupConfig::new(E, 64)).unwrap();
                    run(r, EpGroup::new(group))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

const LONG: Duration = Duration::from_secs(60);

fn module<Bk: Backend>(config: &MoeConfig, group: &EpGroup) -> ExpertParallelMoE<Bk> {
    let block = block(config, group.rank(), group.ranks());
    ExpertParallelMoE::from_block(block, 3, group, &Default::default()).unwrap()
}

/// y, aux, gradient of x and of every parameter, of one rank.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    y: Vec<f32>,
    aux: f32,
    dx: Vec<f32>,
    params: Vec<(String, Vec<f32>)>,
}

/// Gradients of a module's parameters by path.
struct Collect<'a> {
    gradients: &'a <B as burn::tensor::backend::AutodiffBackend>::Gradients,
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor<B> for Collect<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = param.grad(self.gradients) {
            self.found.push((self.path.join("."), floats(gradient)));
        }
    }
}

fn gradients_of(
    model: &ExpertParallelMoE<B>,
    gradients: &<B as burn::tensor::backend::AutodiffBackend>::Gradients,
) -> Vec<(String, Vec<f32>)> {
    let mut collect = Collect { gradients, path: vec![], found: vec![] };
    model.visit(&mut collect);
    collect.found
}

/// The loss Σ y·c + aux of one rank.
fn run_rank(model: &ExpertParallelMoE<B>, rank: usize) -> Found {
    let (x, c) = inputs(rank);
    let x = tensor::<B, 2>(x, [TOKENS[rank], H]).require_grad();
    let c = tensor::<B, 2>(c, [TOKENS[rank], H]);
    let out = model.forward_full(x.clone(), Mode::default()).unwrap();
    let (y, aux) = (floats(out.y.clone()), floats(out.aux.clone())[0]);
    let gradients = ((out.y * c).sum() + out.aux).backward();
    let dx = floats(x.grad(&gradients).unwrap());
    Found { y, aux, dx, params: gradients_of(model, &gradients) }
}

/// The same of a model that runs every expert on every token with burn's operations and shares no code with the
/// crate: one entry per rank, parameter gradients summed over the ranks' losses.
fn dense(config: &MoeConfig, ranks: usize) -> (Vec<Found>, Vec<(&'static str, Vec<f32>)>) {
    let param = |role| whole(role, config).unwrap();
    fn leaf<const D: usize>((values, dims): (Vec<f32>, Vec<usize>)) -> Tensor<B, D> {
        tensor(values, dims.try_into().unwrap()).require_grad()
    }
    let (router, router_bias) = (leaf::<2>(param(Role::Router)), leaf::<1>(param(Role::RouterBias)));
    let (up, up_bias) = (leaf::<3>(param(Role::Up)), leaf::<2>(param(Role::UpBias)));
    let (down, down_bias) = (leaf::<3>(param(Role::Down)), leaf::<2>(param(Role::DownBias)));
    let (s_up, s_down) = (leaf::<2>(param(Role::SharedUp)), leaf::<2>(param(Role::SharedDown)));
    let s_gate = leaf::<2>(param(Role::SharedGate));
    let glu = |h: Tensor<B, 2>| {
        let [t, n] = h.dims();
        let (gate, value) = (h.clone().slice([0..t, 0..n / 2]), h.slice([0..t, n / 2..n]));
        silu(gate) * value
    };
    let (mut found, mut losses) = (vec![], vec![]);
    let mut xs = vec![];
    for rank in 0..ranks {
        let t = TOKENS[rank];
        if t == 0 {
            xs.push(None);
            found.push(Found { y: vec![], aux: 0.0, dx: vec![], params: vec![] });
            continue;
        }
        let (x, c) = inputs(rank);
        let x = tensor::<B, 2>(x, [t, H]).require_grad();
        let logits = x.clone().matmul(router.clone().transpose()) + router_bias.clone().unsqueeze();
        let scores = softmax(logits.clone(), 1);
        let chosen = scores.clone().topk_with_indices(K, 1).1;
        let mask = Tensor::<B, 2>::zeros([t, E], &device()).scatter(
            1,
            chosen.clone(),
            Tensor::ones([t, K], &device()),
            burn::tensor::IndexingUpdateOp::Add,
        );
        let kept = scores.clone() * mask.clone();
        let weights = kept.clone() / kept.sum_dim(1);
        let mut y = Tensor::<B, 2>::zeros([t, H], &device());
        for e in 0..E {
            let of = |w: &Tensor<B, 3>| w.clone().slice([e..e + 1]).squeeze_dim::<2>(0);
            let bias = |b: &Tensor<B, 2>| b.clone().slice([e..e + 1]);
            let inner = glu(x.clone().matmul(of(&up).transpose()) + bias(&up_bias));
            let w = weights.clone().slice([0..t, e..e + 1]);
            // WeightAt::Activation weighs what enters down, and its bias.
            y = y + (inner.matmul(of(&down).transpose()) + bias(&down_bias)) * w;
        }
        let shared = glu(x.clone().matmul(s_up.clone().transpose())).matmul(s_down.clone().transpose());
        let y = y + shared * sigmoid(x.clone().matmul(s_gate.clone().transpose()));
        // Switch: coefficient · E · Σ (choices / (T·K)) · mean score.
        let f = mask.sum_dim(0).mul_scalar(1.0 / (t * K) as f64).detach();
        let p = scores.mean_dim(0);
        let balance = (f * p).sum().mul_scalar(config.aux.balance * E as f64);
        let log_z = logits.exp().sum_dim(1).log();
        let aux = balance + log_z.powi_scalar(2).mean().mul_scalar(config.aux.z);
        found.push(Found { y: floats(y.clone()), aux: floats(aux.clone())[0], dx: vec![], params: vec![] });
        losses.push((y * tensor::<B, 2>(c, [t, H])).sum() + aux);
        xs.push(Some(x));
    }
    let gradients = losses.into_iter().reduce(|a, b| a + b).unwrap().backward();
    for (rank, x) in found.iter_mut().zip(&xs) {
        rank.dx = x.as_ref().map_or(vec![], |x| floats(x.grad(&gradients).unwrap()));
    }
    let params = vec![
        (Role::Router.name(), floats(router.grad(&gradients).unwrap())),
        (Role::RouterBias.name(), floats(router_bias.grad(&gradients).unwrap())),
        (Role::Up.name(), floats(up.grad(&gradients).unwrap())),
        (Role::UpBias.name(), floats(up_bias.grad(&gradients).unwrap())),
        (Role::Down.name(), floats(down.grad(&gradients).unwrap())),
        (Role::DownBias.name(), floats(down_bias.grad(&gradients).unwrap())),
        (Role::SharedUp.name(), floats(s_up.grad(&gradients).unwrap())),
        (Role::SharedDown.name(), floats(s_down.grad(&gradients).unwrap())),
        (Role::SharedGate.name(), floats(s_gate.grad(&gradients).unwrap())),
    ];
    (found, params)
}

/// Sums replicated gradients over the ranks, joins those of experts.
fn joined(found: &[Found], name: &str) -> Vec<f32> {
    let of = |rank: &Found| rank.params.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name}")).1.clone();
    if name.starts_with("experts") {
        return found.iter().flat_map(of).collect();
    }
    found.iter().map(of).reduce(|a, b| a.iter().zip(&b).map(|(x, y)| x + y).collect()).unwrap()
}

#[test]
fn forward_and_gradients_match_a_dense_model_over_1_2_and_4_ranks() {
    let config = MoeConfig::from(&config());
    for ranks in [1, 2, 4] {
        // Rank 2 of 4 brings no token.
        let found = on_ranks(ranks, LONG, |rank, group| run_rank(&module(&config, &group), rank));
        let (reference, params) = dense(&config, ranks);
        for (rank, (a, b)) in found.iter().zip(&reference).enumerate() {
            close(&format!("y, rank {rank} of {ranks}"), &a.y, &b.y, FORWARD);
            close(&format!("aux, rank {rank} of {ranks}"), &[a.aux], &[b.aux], FORWARD);
            close(&format!("dx, rank {rank} of {ranks}"), &a.dx, &b.dx, BACKWARD);
            assert_eq!(a.params.len(), params.len(), "a gradient for every parameter");
        }
        for (name, gradient) in &params {
            close(&format!("d {name}, R = {ranks}"), &joined(&found, name), gradient, BACKWARD);
        }
    }
}

#[test]
fn each_output_alone_gives_its_part_of_the_gradients() {
    let config = MoeConfig::from(&config());
    let parts = |with_y: bool, with_aux: bool| {
        on_ranks(2, LONG, |rank, group| {
            let model = module::<B>(&config, &group);
            let (x, c) = inputs(rank);
            let x = tensor::<B, 2>(x, [TOKENS[rank], H]).require_grad();
            let out = model.forward_full(x.clone(), Mode::default()).unwrap();
            let y = (out.y * tensor(c, [TOKENS[rank], H])).sum();
            let loss = match (with_y, with_aux) {
                (true, true) => y + out.aux,
                (true, false) => y,
                _ => out.aux,
            };
            let gradients = loss.backward();
            let mut all = floats(x.grad(&gradients).unwrap());
            all.extend(gradients_of(&model, &gradients).into_iter().flat_map(|(_, g)| g));
            all
        })
    };
    let (y, aux, both) = (parts(true, false), parts(false, true), parts(true, true));
    for rank in 0..2 {
        let sum: Vec<f32> = y[rank].iter().zip(&aux[rank]).map(|(a, b)| a + b).collect();
        assert!(aux[rank].iter().any(|&g| g != 0.0));
        close("gradients of both outputs", &both[rank], &sum, BACKWARD);
    }
}

#[test]
fn results_are_the_cores_bit_for_bit() {
    let config = MoeConfig::from(&config());
    for dtype in [moebius::DType::F32, moebius::DType::BF16, moebius::DType::F16, moebius::DType::F64] {
        on_ranks(2, LONG, |rank, group| {
            let cast = |t: CoreTensor| cast(&t, dtype);
            let mut given = block(&config, rank, 2);
            given.params = cast_params(given.params, &cast);
            let mut kept = block(&config, rank, 2);
            kept.params = cast_params(kept.params, &cast);
            let (t, (x, c)) = (TOKENS[rank], inputs(rank));
            let (x, c) =
                (cast(CoreTensor::from_vec(x, &[t, H]).unwrap()), cast(CoreTensor::from_vec(c, &[t, H]).unwrap()));

            let layer = Layer::new(config.clone(), 3).unwrap();
            let views = kept.params.views().unwrap();
            let params = views.params();
            let mode = Mode { backward: true, noise: None };
            let (core, core_grads) = {
                let mut group = group.lock();
                let mut out = layer.forward(&mut group, mode, x.view(), &params).unwrap();
                let inputs = Inputs { x: x.view(), params: &params };
                let cotangents = Cotangents { y: Some(c.view()), aux: 1.0 };
                let context = out.context.take().unwrap();
                let grads = layer.backward(&mut group, context, inputs, cotangents, Wanted::ALL).unwrap();
                (out, grads)
            };

            let model = ExpertParallelMoE::<B>::from_block(given, 3, &group, &device()).unwrap();
            let leaf = |t: &CoreTensor| burn_tensor::<2>(t);
            let bx = leaf(&x).require_grad();
            let out = model.forward_full(bx.clone(), Mode::default()).unwrap();
            assert_eq!(out.y.to_data().as_bytes(), core.y.as_bytes());
            assert_eq!(out.logits.into_data().as_bytes(), core.routing.logits.as_bytes());
            assert_eq!(out.weights.into_data().as_bytes(), core.routing.weights.as_bytes());
            assert_eq!(out.ids.into_data().as_bytes(), core.routing.ids.as_bytes());
            assert_eq!(out.load, core.routing.load);
            let accumulator = if dtype == moebius::DType::F64 { DType::F64 } else { DType::F32 };
            assert_eq!(out.aux.dtype(), accumulator);
            // The aux loss is f32 beside bf16 tokens: the user's loss is too.
            let loss = (out.y.cast(accumulator) * leaf(&c).cast(accumulator)).sum() + out.aux;
            let gradients = loss.backward();
            assert_eq!(bx.grad(&gradients).unwrap().into_data().as_bytes(), core_grads.x.unwrap().as_bytes());
            let up = model.experts.up.grad(&gradients).unwrap().into_data();
            assert_eq!(up.as_bytes(), core_grads.up.unwrap().as_bytes());
            let router = model.router.weight.grad(&gradients).unwrap().into_data();
            assert_eq!(router.as_bytes(), core_grads.router.unwrap().as_bytes());
            let gate = model.shared.unwrap().gate.unwrap().grad(&gradients).unwrap().into_data();
            assert_eq!(gate.as_bytes(), core_grads.shared_gate.unwrap().as_bytes());
        });
    }
}

fn cast(t: &CoreTensor, dtype: moebius::DType) -> CoreTensor {
    let (v, dims) = (t.as_slice::<f32>().unwrap(), t.dims());
    match dtype {
        moebius::DType::F32 => CoreTensor::from_vec(v.to_vec(), dims),
        moebius::DType::F64 => CoreTensor::from_vec(v.iter().map(|&v| f64::from(v)).collect(), dims),
        moebius::DType::F16 => CoreTensor::from_vec(v.iter().map(|&v| half::f16::from_f32(v)).collect(), dims),
        _ => CoreTensor::from_vec(v.iter().map(|&v| half::bf16::from_f32(v)).collect(), dims),
    }
    .unwrap()
}

fn cast_params(p: BlockParams, f: &impl Fn(CoreTensor) -> CoreTensor) -> BlockParams {
    BlockParams {
        router: f(p.router),
        router_bias: p.router_bias.map(f),
        selection_bias: p.selection_bias.map(f),
        up: f(p.up),
        up_bias: p.up_bias.map(f),
        down: f(p.down),
        down_bias: p.down_bias.map(f),
        shared_up: p.shared_up.map(f),
        shared_down: p.shared_down.map(f),
        shared_gate: p.shared_gate.map(f),
    }
}

fn burn_tensor<const D: usize>(t: &CoreTensor) -> Tensor<B, D> {
    let dtype = match t.dtype() {
        moebius::DType::F64 => DType::F64,
        moebius::DType::F16 => DType::F16,
        moebius::DType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let data = TensorData::from_bytes_vec(t.as_bytes().to_vec(), t.dims().to_vec(), dtype);
    Tensor::from_data(data, (&device(), dtype))
}

#[test]
fn any_leading_dimensions_and_strides() {
    let config = MoeConfig::from(&config());
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    let model = module::<Flex>(&config, &group);
    let x = tensor::<Flex, 2>(values(1, 6 * H, 1.0), [6, H]);
    let y = floats(model.forward(x.clone()).unwrap());
    let cube = model.forward(x.clone().reshape([2, 3, H])).unwrap();
    assert_eq!(cube.dims(), [2, 3, H]);
    assert_eq!(floats(cube), y);
    // The same values under other strides, and as the middle of a larger tensor.
    let transposed = tensor::<Flex, 2>(floats(x.clone().transpose()), [H, 6]).transpose();
    assert_eq!(floats(model.forward(transposed).unwrap()), y);
    let wide = Tensor::cat(vec![x.clone(), x.clone(), x.clone()], 0);
    assert_eq!(floats(model.forward(wide.slice([6..12])).unwrap()), y);
    for dims in [[0, 3, H], [2, 0, H]] {
        assert_eq!(model.forward(Tensor::<Flex, 3>::zeros(dims, &device())).unwrap().dims(), dims);
    }
}

#[test]
fn a_gradient_that_is_not_contiguous_is_read_right() {
    let config = MoeConfig::from(&config());
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    let model = module::<B>(&config, &group);
    let run = |transpose: bool| {
        let x = tensor::<B, 2>(values(1, 6 * H, 1.0), [6, H]).require_grad();
        let y = model.forward(x.clone()).unwrap();
        let c = tensor::<B, 2>(values(2, 6 * H, 1.0), [6, H]);
        let loss = if transpose { (y.transpose() * c.transpose()).sum() } else { (y * c).sum() };
        floats(x.grad(&loss.backward()).unwrap())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn recomputed_input_gives_the_same_gradients() {
    use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
    fn run<C: CheckpointStrategy>(config: &MoeConfig) -> Vec<f32> {
        let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
        let block = block(config, 0, 1);
        let model = ExpertParallelMoE::<Autodiff<Flex, C>>::from_block(block, 0, &group, &device()).unwrap();
        let leaf = tensor::<Autodiff<Flex, C>, 2>(values(1, 6 * H, 1.0), [6, H]).require_grad();
        // Memory-bound operations, which burn recomputes under this strategy.
        let x = leaf.clone().mul_scalar(2.0).add_scalar(0.5);
        let y = model.forward(x.clone()).unwrap() + x;
        floats(leaf.grad(&y.powi_scalar(2).sum().backward()).unwrap())
    }
    let config = MoeConfig::from(&config());
    let plain = run::<burn::backend::autodiff::checkpoint::strategy::NoCheckpointing>(&config);
    assert_eq!(run::<BalancedCheckpointing>(&config), plain);
}

#[test]
fn nothing_is_kept_where_nothing_tracks() {
    let config = MoeConfig::from(&config());
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    // Whatever keeps x shares its memory.
    let shared_after = |model: &ExpertParallelMoE<B>| {
        let x = tensor::<B, 2>(values(1, 6 * H, 1.0), [6, H]);
        let y = model.forward(x.clone()).unwrap();
        let unique = x.into_primitive().tensor().primitive.is_unique();
        drop(y);
        !unique
    };
    let tracking = module::<B>(&config, &group);
    assert!(shared_after(&tracking), "a tracking layer keeps x");
    let frozen = tracking.clone().no_grad();
    assert!(!shared_after(&frozen), "a layer of constants keeps nothing");

    let valid = tracking.valid();
    let x = tensor::<Flex, 2>(values(1, 6 * H, 1.0), [6, H]);
    let y = valid.forward(x.clone()).unwrap();
    let tracked = tracking.forward(Tensor::from_inner(x)).unwrap();
    assert_eq!(floats(tracked), floats(y), "with and without autodiff, the same bits");
}

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap()
}

#[test]
fn backward_against_a_rank_that_tracks_nothing_is_refused_before_any_collective() {
    let config = MoeConfig::from(&config());
    on_ranks(2, LONG, |rank, group| {
        let model = module::<B>(&config, &group);
        let x = tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H]);
        if rank == 0 {
            model.clone().no_grad().forward(x.clone()).unwrap();
        } else {
            let out = model.forward_full(x.clone(), Mode::default()).unwrap();
            let loss = out.y.sum();
            let panic = catch_unwind(AssertUnwindSafe(|| loss.backward())).err().unwrap();
            assert!(message(panic).contains("not agreed"), "the error's text");
            let failure = group.take_failure();
            assert!(
                matches!(failure, Some(Error::BackwardNotAgreed { ref absent, .. }) if *absent == [0]),
                "{failure:?}"
            );
        }
        // The group still works.
        model.forward(x).unwrap();
    });
}

#[test]
fn a_second_backward_is_refused_before_any_collective() {
    let config = MoeConfig::from(&config());
    on_ranks(2, LONG, |rank, group| {
        let model = module::<B>(&config, &group);
        let x = tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H]);
        let out = model.forward_full(x.clone(), Mode::default()).unwrap();
        let loss = out.y.sum();
        loss.backward();
        // burn itself refuses the same loss, and what else hangs on the nodes it consumed. Only on one rank: a
        // collective would wait for the other.
        if rank == 0 {
            for again in [loss, out.aux] {
                let panic = catch_unwind(AssertUnwindSafe(|| again.backward())).err().unwrap();
                assert!(message(panic).contains("step registered"));
            }
            assert!(group.take_failure().is_none());
        }
        model.forward(x).unwrap();
    });
}

/// Long enough for a loaded machine to bring both ranks to a collective.
const SHORT: Duration = Duration::from_secs(3);

#[test]
fn a_backward_that_never_comes_is_a_typed_timeout() {
    let config = MoeConfig::from(&config());
    let finished = Barrier::new(2);
    let failures = on_ranks(2, SHORT, |rank, group| {
        let model = module::<B>(&config, &group);
        let y = model.forward(tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H])).unwrap();
        if rank == 0 {
            assert!(catch_unwind(AssertUnwindSafe(|| y.sum().backward())).is_err());
        }
        finished.wait();
        group.take_failure()
    });
    assert!(matches!(failures[0], Some(Error::Comm(CommError::Timeout { .. }))), "{:?}", failures[0]);
}

/// Each rank's error of its backward; `before` is what rank 1 does meanwhile.
fn locked_out(shared: bool, before: fn()) {
    let config = MoeConfig::from(&config());
    let (done, finished) = mpsc::channel();
    thread::spawn(move || {
        let leaf = tensor::<B, 1>(vec![1.5], [1]).require_grad();
        let failures = on_ranks(2, SHORT, |rank, group| {
            let model = module::<B>(&config, &group);
            let mut x = tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H]);
            if shared {
                x = x * leaf.clone().unsqueeze();
            }
            let y = model.forward(x).unwrap();
            if rank == 1 {
                // Until rank 0 is inside its backward.
                thread::sleep(SHORT / 3);
                before();
            }
            let result = catch_unwind(AssertUnwindSafe(|| y.sum().backward()));
            (result.is_err(), group.take_failure())
        });
        done.send(failures).unwrap();
    });
    for (unwound, failure) in finished.recv_timeout(Duration::from_secs(60)).expect("a hang") {
        assert!(unwound && matches!(failure, Some(Error::Comm(_))), "{failure:?}");
    }
}

/// What the module's documentation forbids: the end of rank 1's own backward waits for rank 0's graph, and rank 0 for
/// rank 1 in a collective.
#[test]
fn an_independent_backward_beside_a_peers_ends_in_typed_errors_and_not_in_a_hang() {
    locked_out(false, || {
        let other = tensor::<B, 1>(vec![1.0], [1]).require_grad();
        other.mul_scalar(2.0).backward();
    });
}

/// The other: one graph of both ranks, whose lock rank 0 holds.
#[test]
fn a_leaf_shared_between_ranks_ends_in_typed_errors_and_not_in_a_hang() {
    locked_out(true, || {});
}

#[test]
fn a_record_holds_the_parameters_under_the_crates_names() {
    let config = MoeConfig::from(&config().with_selection_bias(true));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    on_ranks(2, LONG, |rank, group| {
        let path = path.with_file_name(format!("layer{rank}"));
        let model = module::<B>(&config, &group);
        let x = tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H]);
        let y = floats(model.forward(x.clone()).unwrap());
        let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::default();
        model.clone().save_file(&path, &recorder).unwrap();
        let bytes = BinBytesRecorder::<FullPrecisionSettings>::default().record(model.into_record(), ()).unwrap();

        let fresh = || ExpertParallelMoEConfig::from(&config).init::<B>(3, &group, &device()).unwrap();
        let before = floats(fresh().forward(x.clone()).unwrap());
        assert_ne!(before, y);
        let loaded = fresh().load_file(&path, &recorder, &device()).unwrap();
        assert_eq!(floats(loaded.forward(x.clone()).unwrap()), y);
        assert!(loaded.experts.up.is_require_grad());
        assert!(!loaded.router.selection_bias.as_ref().unwrap().is_require_grad());
        let record = BinBytesRecorder::<FullPrecisionSettings>::default().load(bytes, &device()).unwrap();
        assert_eq!(floats(fresh().load_record(record).forward(x).unwrap()), y);

        struct Names(Vec<String>, Vec<String>);
        impl<Bk: Backend> ModuleVisitor<Bk> for Names {
            fn enter_module(&mut self, name: &str, _: &str) {
                self.0.push(name.to_string());
            }
            fn exit_module(&mut self, _: &str, _: &str) {
                self.0.pop();
            }
            fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<Bk, D>>) {
                self.1.push(self.0.join("."));
            }
        }
        let mut names = Names(vec![], vec![]);
        loaded.visit(&mut names);
        assert_eq!(names.1, Role::ALL.map(Role::name));
    });
}

#[test]
fn the_configuration_survives_a_file_and_the_cores_form() {
    let config = config().with_selection_bias(true).with_scale(2.5).with_renorm(None).with_recompute(true);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    config.save(&path).unwrap();
    assert_eq!(ExpertParallelMoEConfig::load(&path).unwrap(), config);
    assert_eq!(ExpertParallelMoEConfig::from(&MoeConfig::from(&config)), config);
    assert_eq!(MoeConfig::from(&ExpertParallelMoEConfig::new(H, I, E, K)), MoeConfig::new(H, I, E, K));
}

/// The generator is the process's, so this is the only test that asks for its values.
#[test]
fn training_lowers_the_loss_and_keeps_the_ranks_together() {
    #[derive(Module, Debug)]
    struct Model<B: Backend> {
        first: burn::nn::Linear<B>,
        moe: ExpertParallelMoE<B>,
    }
    let config = config();
    let weights = |ranks: usize| {
        Flex::seed(&device(), 7);
        on_ranks(ranks, LONG, |_, group| {
            let moe = config.init::<Flex>(0, &group, &device()).unwrap();
            (floats(moe.router.weight.val()), floats(moe.experts.down.val()))
        })
    };
    let (one, two) = (weights(1), weights(2));
    assert_eq!(one[0].0, two[0].0);
    assert_eq!(one[0].0, two[1].0);
    assert_eq!(one[0].1, [two[0].1.clone(), two[1].1.clone()].concat(), "the same experts, whatever R");

    let runs = on_ranks(2, LONG, |rank, group| {
        let moe = config.init::<B>(0, &group, &device()).unwrap();
        // Equal on both ranks: values are given, not drawn.
        let mut first = burn::nn::LinearConfig::new(H, H).with_bias(false).init::<B>(&device());
        first.weight = Param::from_tensor(tensor(values(5, H * H, 0.5), [H, H]));
        let mut model = Model { first, moe };
        let mut optimiser = AdamWConfig::new().init();
        let (x, target) = inputs(rank);
        let (x, target) = (tensor::<B, 2>(x, [TOKENS[rank], H]), tensor::<B, 2>(target, [TOKENS[rank], H]));
        let mut losses = vec![];
        for _ in 0..40 {
            let out = model.moe.forward_full(model.first.forward(x.clone()), Mode::default()).unwrap();
            let loss = (out.y - target.clone()).powi_scalar(2).mean();
            losses.push(floats(loss.clone())[0]);
            let mut gradients = GradientsParams::from_grads((loss + out.aux).backward(), &model);
            model.moe.reduce_gradients(&mut gradients).unwrap();
            all_reduce(&group, &mut gradients, &model.first.weight);
            model = optimiser.step(1e-2, model, gradients);
        }
        let replicated = (floats(model.moe.router.weight.val()), floats(model.moe.shared.unwrap().up.val()));
        (losses, replicated, floats(model.first.weight.val()))
    });
    for (losses, _, _) in &runs {
        assert!(losses[39] < 0.5 * losses[0], "{losses:?}");
    }
    assert_eq!(runs[0].1, runs[1].1, "router and shared expert stay equal");
    assert_eq!(runs[0].2, runs[1].2);
}

/// The user's own data-parallel step.
fn all_reduce(group: &EpGroup, gradients: &mut GradientsParams, param: &Param<Tensor<B, 2>>) {
    let mut data = gradients.remove::<Flex, 2>(param.id).unwrap().into_data();
    let tag = Tag { layer: u32::MAX, op: Op::User, sequence: 0 };
    let buffer = TensorMut::new(&mut data.bytes[..], moebius::DType::F32, &[H, H]).unwrap();
    group.lock().dispatcher().communicator().all_reduce(tag, ReduceOp::Sum, buffer).unwrap();
    gradients.register::<Flex, 2>(param.id, Tensor::from_data(data, &device()));
}

#[test]
fn an_absent_gradient_of_a_replicated_parameter_counts_as_zeros() {
    let config = MoeConfig::from(&config());
    let sums = on_ranks(2, LONG, |rank, group| {
        let model = module::<B>(&config, &group);
        let y = model.forward(tensor::<B, 2>(inputs(rank).0, [TOKENS[rank], H])).unwrap();
        let mut gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        if rank == 1 {
            gradients.remove::<Flex, 2>(model.router.weight.id).unwrap();
        }
        let own = gradients.get::<Flex, 2>(model.router.weight.id).map(floats);
        model.reduce_gradients(&mut gradients).unwrap();
        (own, floats(gradients.get::<Flex, 2>(model.router.weight.id).unwrap()))
    });
    assert_eq!(sums[0].0.as_ref(), Some(&sums[0].1));
    assert_eq!(sums[0].1, sums[1].1);
}

#[test]
fn bad_input_is_a_typed_error() {
    let config = config();
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    let other = ExpertParallelMoEConfig::new(H, I, E * 2, K).init::<Flex>(0, &group, &device());
    assert!(matches!(other, Err(Error::Invalid { ref name, .. }) if name == "num_experts"), "{other:?}");
    let too_many = ExpertParallelMoEConfig::new(H, I, E, E + 1).init::<Flex>(0, &group, &device());
    assert!(matches!(too_many, Err(Error::Invalid { ref name, .. }) if name == "top_k"), "{too_many:?}");

    let config = MoeConfig::from(&config);
    let mut missing = block(&config, 0, 1);
    missing.params.shared_down = None;
    let found = ExpertParallelMoE::<Flex>::from_block(missing, 0, &group, &device());
    assert!(found.is_err_and(|e| e.to_string().contains("shared.down")));
    let mut extra = block(&config, 0, 1);
    extra.params.selection_bias = Some(CoreTensor::from_vec(vec![0f32; E], &[E]).unwrap());
    let found = ExpertParallelMoE::<Flex>::from_block(extra, 0, &group, &device());
    assert!(found.is_err_and(|e| e.to_string().contains("selection_bias")));
    let mut shape = block(&config, 0, 1);
    shape.params.down = CoreTensor::from_vec(vec![0f32; E * I * H], &[E, I, H]).unwrap();
    let found = ExpertParallelMoE::<Flex>::from_block(shape, 0, &group, &device());
    assert!(matches!(found, Err(Error::Shape { .. })));

    let model = module::<Flex>(&config, &group);
    let found = model.forward(Tensor::<Flex, 2>::zeros([4, H + 1], &device()));
    assert!(found.is_err_and(|e| e.to_string().contains("tensor x")));
    let nan = tensor::<Flex, 2>(vec![f32::NAN; H], [1, H]);
    assert!(matches!(model.forward(nan), Err(Error::NanLogits { .. })));
    let mixed = Tensor::<Flex, 2>::zeros([4, H], &device()).cast(DType::F64);
    assert!(model.forward(mixed).is_err());
    // And the layer works on.
    model.forward(Tensor::<Flex, 2>::zeros([4, H], &device())).unwrap();
}

#[test]
fn ids_come_as_data() {
    let config = MoeConfig::from(&config());
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    let model = module::<Flex>(&config, &group);
    let out = model.forward_full(tensor::<Flex, 2>(inputs(0).0, [TOKENS[0], H]), Mode::default()).unwrap();
    let ids: Tensor<Flex, 2, Int> = out.ids;
    assert_eq!(ids.dims(), [TOKENS[0], K]);
    assert_eq!(out.logits.dims(), [TOKENS[0], E]);
    assert_eq!(out.load.tokens_per_expert.iter().sum::<usize>(), TOKENS[0] * K);
    let sums = floats(out.weights.sum_dim(1));
    // Renormalised: a sum of three f32.
    assert!(sums.iter().all(|s| (s - 1.0).abs() < 4.0 * f32::EPSILON));
}
