//! Sums of a step's gradients over ranks beside backward: against those after it, over replicas, and where a rank fails.

mod refused;
mod sums;

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use moebius::burn::{DispatchCombine, EpGroup, ExpertParallelMoE, GradientReducer, ReduceComms};
use moebius::comm::Op;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::{CommError, Error, Result};

use super::faulty_comm::{Entered, FaultyComm};
use super::support::*;
use crate::trials::tests;

/// The rank that fails.
const CULPRIT: usize = 1;

/// A rank's place: of `replicas` groups of `ranks` ranks each.
pub struct Place {
    pub replica: usize,
    pub group: EpGroup,
    pub comms: ReduceComms<Cpu>,
    /// Collectives of its layers.
    of_layers: Entered,
    /// Collectives of its sums over the group, and over the replicas.
    of_sums: Entered,
    of_replicas: Entered,
}

/// Runs a closure a rank, replica by replica.
pub fn places<R: Send>([replicas, ranks]: [usize; 2], run: impl Fn(Place) -> R + Sync) -> Vec<R> {
    let mut of_rank: Vec<_> = (0..ranks).map(|_| ThreadWorld::create(replicas, LONG).into_iter()).collect();
    let mut all: Vec<(usize, ThreadComm, ThreadComm, ThreadComm)> = Vec::new();
    for replica in 0..replicas {
        let [layers, sums] = [(); 2].map(|()| ThreadWorld::create(ranks, LONG));
        for ((layers, sums), across) in layers.into_iter().zip(sums).zip(&mut of_rank) {
            all.push((replica, layers, sums, across.next().unwrap()));
        }
    }
    thread::scope(|scope| {
        let run = &run;
        let threads = all.into_iter().map(|(replica, layers, sums, across)| {
            scope.spawn(move || {
                let [layers, sums, across] = [layers, sums, across].map(|comm| FaultyComm::<Cpu>::new(Box::new(comm)));
                let [of_layers, of_sums, of_replicas] = [&layers, &sums, &across].map(|comm| comm.entered.clone());
                let group = Group::new(Cpu::new(), Box::new(layers), GroupConfig::new(E, 64)).unwrap();
                let replicas = (replicas > 1).then(|| Box::new(across) as Box<_>);
                let comms = ReduceComms { group: Box::new(sums), replicas };
                run(Place { replica, group: EpGroup::new(group), comms, of_layers, of_sums, of_replicas })
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same values, whose backward does something before.
#[derive(Debug)]
struct DoingNode;

#[derive(Clone)]
pub struct Doing(Arc<dyn Fn() + Send + Sync>);

impl Debug for Doing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Doing")
    }
}

impl Doing {
    pub fn new(what: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(what))
    }

    pub fn nothing() -> Self {
        Self::new(|| {})
    }

    pub fn apply(self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = x.into_primitive().tensor();
        let prepared = Backward::<Flex, 1>::prepare::<NoCheckpointing>(DoingNode, [x.node.clone()]);
        let y = match prepared.compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(self, x.primitive),
            OpsKind::UnTracked(prepared) => prepared.finish(x.primitive),
        };
        Tensor::from_primitive(TensorPrimitive::Float(y))
    }
}

impl Backward<Flex, 1> for DoingNode {
    type State = Doing;

    fn backward(self, ops: Ops<Doing, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        (ops.state.0)();
        let gradient = grads.consume::<Flex>(&ops.node);
        if let [Some(parent)] = ops.parents {
            grads.register::<Flex>(parent.id, gradient);
        }
    }
}

/// Two layers, the second of which is called twice, between parameters of the model's own.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    first: ExpertParallelMoE<B>,
    second: ExpertParallelMoE<B>,
    before: Param<Tensor<B, 1>>,
    behind: Param<Tensor<B, 1>>,
}

fn layer(group: &EpGroup, number: u32, dtype: DType) -> ExpertParallelMoE<B> {
    let block = block(&config(), group.rank(), group.ranks());
    let moe = ExpertParallelMoE::from_block(block, number, group, &device()).unwrap();
    if dtype == DType::F32 { moe } else { cast(moe, dtype) }
}

fn own(seed: u64, dtype: DType) -> Param<Tensor<B, 1>> {
    Param::from_tensor(tensor::<B, 1>(values(seed, H, 1.0), [H]).cast(dtype).detach())
}

/// A module with parameters of another type.
fn cast<M: Module<B>>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl burn::module::ModuleMapper<B> for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let tracked = param.is_require_grad();
            let value = param.val().detach().cast(self.0).detach().set_require_grad(tracked);
            Param::initialized(param.id, value)
        }
    }
    module.map(&mut Cast(dtype))
}

impl Model<B> {
    pub fn new(group: &EpGroup, dtype: DType) -> Self {
        let (first, second) = (layer(group, 3, dtype), layer(group, 4, dtype));
        Self { first, second, before: own(90, dtype), behind: own(91, dtype) }
    }

    /// `before`: runs backwards just before the first layer has, when all others have.
    pub fn loss(&self, x: Tensor<B, 2>, before: Doing) -> Result<Tensor<B, 1>> {
        let h = x * self.before.val().unsqueeze();
        let h = before.apply(self.first.forward(h.clone())? + h);
        let h = self.second.forward(h.clone())? + h;
        let h = (self.second.forward(h.clone())? + h) * self.behind.val().unsqueeze();
        Ok(h.powi_scalar(2).sum() + self.penalized().val().powi_scalar(2).sum())
    }

    /// A layer's parameter that has another use.
    fn penalized(&self) -> &Param<Tensor<B, 1>> {
        self.first.router.bias.as_ref().unwrap()
    }

    /// Which does not know of that use.
    fn reducer_of_layers(&self, comms: ReduceComms<Cpu>) -> GradientReducer<B> {
        let reducer = GradientReducer::new(&Cpu::new(), comms).unwrap().with_bucket_bytes(300);
        reducer.with_layer(&self.first).with_layer(&self.second)
    }

    pub fn reducer(&self, comms: ReduceComms<Cpu>) -> GradientReducer<B> {
        self.reducer_of_layers(comms).with_late_params(&[self.penalized().id])
    }

    /// Parameters with the values of their gradients, and whether they are experts.
    pub fn values(&self, gradients: &GradientsParams) -> Vec<Gradient> {
        let experts = [self.first.expert_ids(), self.second.expert_ids()].concat();
        let mut read = Read { gradients, experts, path: Vec::new(), found: Vec::new() };
        self.visit(&mut read);
        read.found
    }

    /// A rank's own, of losses.
    fn own_values(&self, microbatches: usize, loss: impl Fn(usize) -> Tensor<B, 1>) -> Vec<Gradient> {
        let mut sums = burn::optim::GradientsAccumulator::new();
        for microbatch in 0..microbatches {
            sums.accumulate(self, GradientsParams::from_grads(loss(microbatch).backward(), self));
        }
        self.values(&sums.grads())
    }
}

/// A parameter's gradient; none where a rank has none.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradient {
    name: String,
    expert: bool,
    pub values: Option<(DType, Vec<f32>)>,
    count: usize,
}

struct Read<'a> {
    gradients: &'a GradientsParams,
    experts: Vec<ParamId>,
    path: Vec<String>,
    found: Vec<Gradient>,
}

impl ModuleVisitor<B> for Read<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.gradients.get::<Flex, D>(param.id);
        let values = gradient.map(|gradient| {
            assert_eq!(gradient.dims(), param.dims());
            (gradient.dtype(), floats(gradient))
        });
        let (name, expert) = (self.path.join("."), self.experts.contains(&param.id));
        self.found.push(Gradient { name, expert, values, count: param.dims().iter().product() });
    }
}

/// Tokens of a rank; the third of four has none.
pub fn tokens(place: (usize, &EpGroup), microbatch: usize, dtype: DType) -> Tensor<B, 2> {
    let (replica, group) = place;
    let seed = 300 + 40 * microbatch + 10 * replica + group.rank();
    let count = token_counts()[group.rank()];
    tensor::<B, 2>(values(seed as u64, count * H, 1.0), [count, H]).cast(dtype).detach().require_grad()
}

fn is_refused(error: &Error, word: &str) -> bool {
    matches!(error, Error::Comm(CommError::Refused { reason, .. }) if reason.contains(word))
}

/// The tests by name.
pub fn cases() -> Vec<(&'static str, fn())> {
    [sums::cases(), refused::cases()].concat()
}
