//! A block with every part that has a gradient, its values, and ranks to run it on.

use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::prelude::DeviceOps;
use burn::tensor::backend::{AutodiffBackend, Backend, DeviceId};
use burn::tensor::{Tensor, TensorData};
use moebius::MoeConfig;
use moebius::burn::{DeviceGroup, EpGroup, ExpertParallelMoE, NativeBackend};
use moebius::checkpoint::{Block, BlockParams};
use moebius::config::{AuxConfig, SharedConfig};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{ParamKind, PerParam};

use super::faulty_comm::{Entered, FaultyComm};

pub type B = Autodiff<Flex>;

/// A back end that the suite runs on.
pub trait Subject: NativeBackend {
    /// Relative error of a factor in burn's own products of f32.
    const ROUNDING: f64;

    /// Runs `rank` for each of R ranks with its group; results in rank order.
    fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, DeviceGroup) -> T + Sync) -> Vec<T>;

    /// A group of one rank.
    fn alone() -> DeviceGroup {
        DeviceGroup::single::<Self>(GroupConfig::new(E, 64), &Default::default()).unwrap()
    }
}

/// Numbers of ranks that a process has on the CPU.
pub const RANKS: [usize; 3] = [1, 2, 4];

impl Subject for Flex {
    const ROUNDING: f64 = 0.0;

    fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, DeviceGroup) -> T + Sync) -> Vec<T> {
        on_ranks(ranks, LONG, |r, group| rank(r, group.into()))
    }
}
pub type CoreTensor = moebius::Tensor<Cpu>;

pub const H: usize = 12;
pub const I: usize = 10;
pub const E: usize = 8;
pub const K: usize = 3;

/// Tokens of each rank; see [`token_counts`].
const TOKENS: [usize; 8] = [5, 3, 0, 6, 2, 4, 1, 7];

/// Sums of at most a few hundred f32 products of values below 4: a few units of 2⁻²⁴ relative to the result's norm.
pub const FORWARD: f64 = 2e-6;
pub const BACKWARD: f64 = 1e-5;

thread_local! {
    /// The device of this thread's rank, where there are several.
    static DEVICE: Cell<u16> = const { Cell::new(0) };

    /// Whether every rank of this thread's test has a token.
    static ALL_HAVE_TOKENS: Cell<bool> = const { Cell::new(false) };
}

/// Tokens of each rank. Rank 2 has none but where this thread's test has said that [all have some](set_all_have_tokens).
pub fn token_counts() -> [usize; 8] {
    if ALL_HAVE_TOKENS.get() { TOKENS.map(|count| count.max(1)) } else { TOKENS }
}

/// Has every rank of this thread's test have a token, for a back end that has no tensors of no elements, as burn's CUDA
/// has none. The ranks' threads do as the one that starts them.
pub fn set_all_have_tokens(all: bool) {
    ALL_HAVE_TOKENS.set(all);
}

/// Whether [they have](set_all_have_tokens).
pub fn all_have_tokens() -> bool {
    ALL_HAVE_TOKENS.get()
}

/// Has this thread work on the device of that number.
#[allow(dead_code, reason = "a build may have one device")]
pub fn work_on(device: u16) {
    DEVICE.set(device);
}

/// The device that this thread works on.
pub fn here<Bk: Backend>() -> Bk::Device {
    let first = <Bk::Device>::default().to_id();
    <Bk::Device>::from_id(DeviceId::new(first.type_id, DEVICE.get()))
}

pub fn device() -> FlexDevice {
    FlexDevice
}

/// Every part that has a gradient: router bias, expert biases, gated shared expert with biases, both auxiliary losses per rank.
pub fn config() -> MoeConfig {
    MoeConfig::new(H, I, E, K)
        .with_router(|router| router.with_logit_bias(true))
        .with_expert_bias(true)
        .with_shared(SharedConfig { intermediate: 6, gated: true, bias: true })
        .with_aux(AuxConfig::default().with_balance(0.02).with_z(0.01))
}

/// The same with a selection bias.
pub fn biased() -> MoeConfig {
    config().with_router(|router| router.with_selection_bias(true))
}

/// burn's generator is the process's: who draws from it, as `init` and `init_on` do, does so alone. Another's draws would
/// be missing from those behind a seed.
pub fn generator() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reproducible values in ±scale, another sequence for each seed.
pub fn values(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = crate::trials::seed::seed(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

/// Values of a parameter over all ranks (L = E).
pub fn whole(kind: ParamKind, config: &MoeConfig) -> Option<(Vec<f32>, Vec<usize>)> {
    let dims = kind.dims(config, config.router.num_experts)?;
    Some((values(kind as u64 + 10, dims.iter().product(), 0.5), dims))
}

/// One rank's share of it.
fn share(kind: ParamKind, config: &MoeConfig, rank: usize, ranks: usize) -> Option<CoreTensor> {
    let (values, dims) = whole(kind, config)?;
    if kind.is_replicated() {
        return Some(CoreTensor::from_vec(values, &dims).unwrap());
    }
    let mut own = dims;
    own[0] /= ranks;
    let count: usize = own.iter().product();
    Some(CoreTensor::from_vec(values[rank * count..][..count].to_vec(), &own).unwrap())
}

pub fn block(config: &MoeConfig, rank: usize, ranks: usize) -> Block {
    let params = BlockParams::new(PerParam::from_fn(|kind| share(kind, config, rank, ranks))).unwrap();
    Block { config: config.clone(), params }
}

/// This rank's x, and what the loss multiplies y with.
pub fn inputs(rank: usize) -> (Vec<f32>, Vec<f32>) {
    inputs_of(rank, H)
}

/// The same of another hidden size.
pub fn inputs_of(rank: usize, hidden: usize) -> (Vec<f32>, Vec<f32>) {
    let count = token_counts()[rank] * hidden;
    (values(100 + rank as u64, count, 1.0), values(200 + rank as u64, count, 1.0))
}

pub fn tensor<Bk: Backend, const D: usize>(values: Vec<f32>, dims: [usize; D]) -> Tensor<Bk, D> {
    Tensor::from_data(TensorData::new(values, dims), &here::<Bk>())
}

pub fn floats<Bk: Backend, const D: usize>(t: Tensor<Bk, D>) -> Vec<f32> {
    t.into_data().convert::<f32>().into_vec().unwrap()
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
pub fn close(name: &str, a: &[f32], b: &[f32], tolerance: f64) {
    let error = relative(a, b);
    assert!(error <= tolerance, "{name}: relative error {error:e} over {tolerance:e}");
}

/// Runs `rank` on a thread for each of R ranks with its group; results in rank order.
pub fn on_ranks<T: Send>(ranks: usize, timeout: Duration, rank: impl Fn(usize, EpGroup) -> T + Sync) -> Vec<T> {
    on_watched_ranks(ranks, timeout, |r, group, _| rank(r, group))
}

/// The same with what each rank's collectives are for, as they are entered, by rank.
pub fn on_watched_ranks<T: Send>(
    ranks: usize,
    timeout: Duration,
    rank: impl Fn(usize, EpGroup, &[Entered]) -> T + Sync,
) -> Vec<T> {
    let comms: Vec<_> = ThreadWorld::create(ranks, timeout).into_iter().map(|c| FaultyComm::new(Box::new(c))).collect();
    let entered: Vec<Entered> = comms.iter().map(|comm| Entered::clone(&comm.entered)).collect();
    thread::scope(|s| {
        let (run, entered, all) = (&rank, &entered[..], all_have_tokens());
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(r, comm)| {
                s.spawn(move || {
                    set_all_have_tokens(all);
                    let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(E, 64)).unwrap();
                    run(r, EpGroup::new(group), entered)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

pub const LONG: Duration = Duration::from_secs(60);

pub fn module<Bk: Backend>(config: &MoeConfig, group: impl Into<DeviceGroup>) -> ExpertParallelMoE<Bk> {
    let group = group.into();
    let block = block(config, group.rank(), group.ranks());
    ExpertParallelMoE::from_block(block, 3, group, &here::<Bk>()).unwrap()
}

/// y, aux, gradient of x and of every parameter, of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub y: Vec<f32>,
    pub aux: f32,
    pub dx: Vec<f32>,
    pub params: Vec<(String, Vec<f32>)>,
}

/// Gradients of a module's parameters by path.
struct Collect<'a, A: AutodiffBackend> {
    gradients: &'a A::Gradients,
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl<A: AutodiffBackend> ModuleVisitor<A> for Collect<'_, A> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        if let Some(gradient) = param.grad(self.gradients) {
            self.found.push((self.path.join("."), floats(gradient)));
        }
    }
}

pub fn gradients_of<A: AutodiffBackend>(
    model: &ExpertParallelMoE<A>,
    gradients: &A::Gradients,
) -> Vec<(String, Vec<f32>)> {
    let mut collect = Collect::<A> { gradients, path: vec![], found: vec![] };
    model.visit(&mut collect);
    collect.found
}

/// The loss Σ y·c + aux of one rank.
pub fn run_rank<S: Subject>(model: &ExpertParallelMoE<Autodiff<S>>, rank: usize) -> Found {
    let (x, c) = inputs(rank);
    let x = tensor::<Autodiff<S>, 2>(x, [token_counts()[rank], H]).require_grad();
    let c = tensor::<Autodiff<S>, 2>(c, [token_counts()[rank], H]);
    let out = model.forward_full(x.clone(), None).unwrap();
    let (y, aux) = (floats(out.y.clone()), floats(out.aux.clone())[0]);
    let gradients = ((out.y * c).sum() + out.aux).backward();
    let dx = floats(x.grad(&gradients).unwrap());
    Found { y, aux, dx, params: gradients_of(model, &gradients) }
}

/// A group of one rank.
pub fn single() -> EpGroup {
    EpGroup::single(GroupConfig::new(E, 64)).unwrap()
}
