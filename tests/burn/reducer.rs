//! Sums of a step's gradients over ranks beside backward: against those after it, over replicas, and where a rank fails.

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

/// Over 1, 2 and 4 ranks and 1 and 2 replicas: the sums beside backward, those after it, and those of every rank's
/// gradients added up here.
fn sums_beside_backward_are_those_after_it() {
    for (mesh, dtype) in [
        ([1, 1], DType::F32),
        ([1, 2], DType::F32),
        ([1, 4], DType::F32),
        ([2, 1], DType::F32),
        ([2, 2], DType::F32),
        ([1, 2], DType::BF16),
        ([2, 2], DType::BF16),
    ] {
        let [replicas, ranks] = mesh;
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, dtype);
            let mut reducer = model.reducer(comms);
            let loss = |microbatch| model.loss(tokens((replica, &group), microbatch, dtype), Doing::nothing()).unwrap();
            let own = model.own_values(3, loss);
            for microbatch in 0..3 {
                reducer.backward(loss(microbatch), &model).unwrap();
            }
            let after = model.values(&reducer.reduce(&model).unwrap());
            for microbatch in 0..2 {
                reducer.backward(loss(microbatch), &model).unwrap();
            }
            assert_eq!(reducer.microbatches(), 2);
            let beside = model.values(&reducer.backward_reduced(loss(2), &model).unwrap());
            assert_eq!(beside, after);
            assert_eq!(reducer.microbatches(), 0);
            (own, beside)
        });
        // In rank order, first over the group, in f32, and rounded once.
        let of = |gradient: &Gradient| match &gradient.values {
            Some((_, values)) => values.clone(),
            None => vec![0.0; gradient.count],
        };
        let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        for at in 0..results[0].0.len() {
            let Gradient { name, expert, .. } = results[0].0[at].clone();
            for rank in 0..ranks {
                let of_replica = |replica: usize| {
                    let own = &results[replica * ranks..(replica + 1) * ranks];
                    match expert {
                        false => own[1..].iter().fold(of(&own[0].0[at]), |sum, one| add(sum, of(&one.0[at]))),
                        true => of(&own[rank].0[at]),
                    }
                };
                let sum = (1..replicas).fold(of_replica(0), |sum, replica| add(sum, of_replica(replica)));
                let expected: Vec<f32> = match dtype {
                    DType::F32 => sum,
                    _ => sum.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
                };
                for replica in 0..replicas {
                    let found = &results[replica * ranks + rank].1[at];
                    let (found_type, values) = found.values.clone().unwrap_or((dtype, vec![0.0; found.count]));
                    assert_eq!((found_type, values), (dtype, expected.clone()), "{mesh:?} {name} of rank {rank}");
                }
            }
        }
    }
}

/// Sums of the second layer are over before the first layer's backward begins, its experts' over replicas among them;
/// microbatches before communicate nothing.
fn sums_of_a_layer_begin_while_backward_runs() {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, of_layers, of_sums, of_replicas } = place;
            let model = Model::new(&group, DType::F32);
            // A layer's experts in one collective.
            let mut reducer = model.reducer(comms).with_bucket_bytes(1 << 20);
            let x = || tokens((replica, &group), 0, DType::F32);
            let count = |entered: &Entered| -> usize {
                entered.lock().unwrap().iter().filter(|op| **op == Op::GradReduce).count()
            };
            reducer.backward(model.loss(x(), Doing::nothing()).unwrap(), &model).unwrap();
            assert_eq!((count(&of_sums), count(&of_replicas), count(&of_layers)), (0, 0, 0));
            let seen = Arc::new(Mutex::new(0));
            // The comparison of microbatches and the sum, and of the replicas the experts' sum.
            let (own, expected) = if mesh[0] > 1 { (of_replicas.clone(), 3) } else { (of_sums.clone(), 2) };
            let (entered, seen_there) = (own.clone(), seen.clone());
            let wait = Doing::new(move || {
                let limit = Instant::now() + LONG;
                while count(&entered) < expected && Instant::now() < limit {
                    thread::sleep(Duration::from_millis(1));
                }
                *seen_there.lock().unwrap() = count(&entered);
            });
            reducer.backward_reduced(model.loss(x(), wait).unwrap(), &model).unwrap();
            let seen = *seen.lock().unwrap();
            assert!(seen == expected && count(&own) > expected + 1, "{mesh:?}: {seen} of {}", count(&own));
            assert_eq!(count(&of_layers), 0);
        });
    }
}

/// A forward whose backward does not come has its layer's sums wait for the end of backward, on every rank, also where
/// one rank alone has made away with it.
fn a_forward_without_a_backward_has_its_sums_follow() {
    for forgets in [None, Some(0)] {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            let expected = model.values(&reducer.backward_reduced(loss(), &model).unwrap());
            let evaluated = model.second.forward(tokens((replica, &group), 1, DType::F32)).unwrap();
            let kept = (forgets != Some(group.rank())).then_some(evaluated);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), expected);
            drop(kept);
        });
    }
}

/// Optimizer's steps make new modules of new tensors: the reducer knows their layers.
fn layers_stay_known_behind_a_step() {
    places([2, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let [mut after, mut beside] = [(); 2].map(|()| Model::new(&group, DType::F32));
        let mut reducer = after.reducer(comms).with_layer(&beside.first).with_layer(&beside.second);
        reducer = reducer.with_late_params(&[beside.penalized().id]);
        let mut sgd = [(); 2].map(|()| SgdConfig::new().init());
        for step in 0..3 {
            let x = || tokens((replica, &group), step, DType::F32);
            reducer.backward(after.loss(x(), Doing::nothing()).unwrap(), &after).unwrap();
            let gradients = reducer.reduce(&after).unwrap();
            let values = after.values(&gradients);
            after = sgd[0].step(1e-3, after, gradients);
            let gradients = reducer.backward_reduced(beside.loss(x(), Doing::nothing()).unwrap(), &beside).unwrap();
            assert_eq!(beside.values(&gradients), values, "step {step}");
            beside = sgd[1].step(1e-3, beside, gradients);
        }
    });
}

fn a_rank_that_fails_among_sums() {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = |before| model.loss(tokens((replica, &group), 0, DType::F32), before).unwrap();
            reducer.backward(loss(Doing::nothing()), &model).unwrap();
            let expected = model.values(&reducer.backward_reduced(loss(Doing::nothing()), &model).unwrap());
            reducer.backward(loss(Doing::nothing()), &model).unwrap();

            // Between two layers, when the sums of the second have begun.
            let fail = Doing::new(move || assert!(!is_culprit, "an operation of the user's own"));
            let failing = loss(fail);
            let done = catch_unwind(AssertUnwindSafe(|| reducer.backward_reduced(failing, &model).map(drop)));
            match (is_culprit, replica, done) {
                (true, _, Err(panic)) => {
                    let text = panic.downcast_ref::<String>().map_or("", String::as_str);
                    let text = panic.downcast_ref::<&str>().copied().unwrap_or(text);
                    assert!(text.contains("the user's own"), "{text}");
                }
                (false, 0, Ok(Err(Error::Peer { peer: CULPRIT, reason, .. }))) => {
                    assert!(reason.contains("the user's own"), "{reason}");
                }
                // Of the other replica, which hears of it in a sum.
                (false, 1, Ok(Err(Error::Comm(CommError::Refused { reason, .. })))) => {
                    assert!(reason.contains("the user's own") || reason.contains("failed"), "{reason}");
                }
                (.., other) => panic!("replica {replica}, rank {}: {other:?}", group.rank()),
            }
            // The other replica's backward was whole.
            assert_eq!(reducer.microbatches(), 1 + replica as u64);
            // The group and the reducer work on.
            reducer.reset();
            reducer.backward(loss(Doing::nothing()), &model).unwrap();
            assert_eq!(model.values(&reducer.backward_reduced(loss(Doing::nothing()), &model).unwrap()), expected);
        });
    }
}

/// A rank does not come to the sums: the others hear of it at once, those of another replica too.
fn a_rank_that_does_not_come_to_sums() {
    for mesh in [[2, 1], [1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            reducer.backward(loss(), &model).unwrap();
            let last = loss();
            let comes = (replica, group.rank()) != (0, mesh[1] - 1);
            match comes {
                false => reducer.refuse("a loss of the user's own").unwrap(),
                true => {
                    let error = reducer.reduce(&model).expect_err("a rank that does not come");
                    assert!(is_refused(&error, "the user's own"), "{error:?}");
                }
            }
            assert_eq!(reducer.microbatches(), 1);
            let sums = model.values(&reducer.reduce(&model).unwrap());
            // The same of one that does not come to the last backward, whose layers it does not enter.
            match comes {
                false => reducer.refuse("a loss of the user's own").unwrap(),
                true => {
                    let error = reducer.backward_reduced(last, &model).expect_err("a rank that does not come");
                    assert!(is_refused(&error, "the user's own"), "{error:?}");
                }
            }
            assert_eq!(reducer.microbatches(), 0);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), sums);
        });
    }
}

/// A gradient that is not its parameter's, on one rank: of what all ranks hold nothing changes, and of experts, whose sums
/// have begun, nothing is left, on any rank.
fn a_rank_whose_parameters_have_other_sizes() {
    for (mesh, is_expert) in [([1, 2], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            reducer.backward(loss(), &model).unwrap();
            let is_culprit = (replica, group.rank()) == (0, 0);
            let mut other = model.clone();
            if is_culprit {
                match is_expert {
                    true => {
                        let id = other.second.experts.down.id;
                        other.second.experts.down =
                            Param::initialized(id, tensor::<B, 3>(vec![0.0; 3], [1, 1, 3]).require_grad());
                    }
                    false => {
                        other.behind =
                            Param::initialized(other.behind.id, tensor::<B, 1>(vec![0.0; 3], [3]).require_grad())
                    }
                }
            }
            let error = reducer.reduce(&other).expect_err("parameters of other sizes");
            // Also where the culprit is in none of the rank's communicators.
            let named = if is_expert { "experts" } else { "variables" };
            assert!(matches!(&error, Error::Invalid { name, .. } if name == named), "{error:?}");
            // Nothing is lost.
            assert_eq!(reducer.microbatches(), 1);
            reducer.reset();
            reducer.backward_reduced(loss(), &model).unwrap();
        });
    }
}

/// One rank sums after one microbatch more.
fn another_number_of_microbatches_is_an_error_on_every_rank() {
    let meshes = [[1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            // Of a loss without a layer, of which nobody else knows.
            let more = |reducer: &mut GradientReducer<B>| {
                reducer.backward(model.before.val().powi_scalar(2).sum(), &model).unwrap();
            };
            reducer.backward(loss(), &model).unwrap();
            let last = loss();
            if is_culprit {
                more(&mut reducer);
            }
            let done = match beside {
                true => reducer.backward_reduced(last, &model),
                false => reducer.reduce(&model),
            };
            let own = 1 + u64::from(is_culprit);
            let counted = own + u64::from(beside);
            match (replica, done.expect_err("another number")) {
                (0, Error::Invalid { name, expected, found, .. }) => {
                    assert_eq!((&name[..], found), ("microbatches", counted.to_string()));
                    assert!(is_culprit || expected.contains(&format!("rank {CULPRIT}")), "{expected}");
                }
                // Of the other replica, whose ranks all find the same.
                (1, Error::Invalid { name, expected, found, .. }) => {
                    let at_culprit = group.rank() == CULPRIT;
                    let named = if at_culprit { (expected, "as on replica 0") } else { (found, "a replica of rank 1") };
                    assert!(name == "microbatches" && named.0.contains(named.1), "{named:?}");
                }
                (_, error) => panic!("replica {replica}, rank {}: {error:?}", group.rank()),
            }
            // Nothing is lost, and nothing stands in the way of the missing microbatch.
            assert_eq!(reducer.microbatches(), own);
            if !is_culprit {
                more(&mut reducer);
            }
            match beside {
                true => drop(reducer.backward_reduced(loss(), &model).unwrap()),
                false => drop(reducer.reduce(&model).unwrap()),
            }
        });
    }
}

/// A layer's parameter, replicated or an expert's, has another use of which the reducer does not know, on ranks with
/// tokens and without.
fn a_parameter_with_another_use_is_named() {
    let meshes = [([1, 2], false), ([1, 4], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)];
    for ((mesh, of_expert), in_place) in meshes.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let down = &model.first.experts.down;
            let id = if of_expert { down.id } else { model.penalized().id };
            let reducer = model.reducer_of_layers(comms);
            let mut reducer = if in_place { reducer.with_main_gradients() } else { reducer };
            let loss = || {
                let y = model.first.forward(tokens((replica, &group), 0, DType::F32)).unwrap().sum();
                match of_expert {
                    true => y + down.val().powi_scalar(2).sum(),
                    false => y + model.penalized().val().powi_scalar(2).sum(),
                }
            };
            match reducer.backward_reduced(loss(), &model).expect_err("a sum that has begun too soon") {
                Error::Invalid { name, expected, .. } => {
                    assert!(name == "variable" && expected.contains("with_late_params"), "{expected}");
                }
                error => assert!(is_refused(&error, "with_late_params"), "{error:?}"),
            }
            // What kernels had added to was dropped, and nothing of the failed microbatch is left.
            assert_eq!(reducer.microbatches(), 0);
            reducer.backward(loss(), &model).unwrap();
            let after = model.values(&reducer.reduce(&model).unwrap());
            // Named, or all experts after backward: the same bits.
            let mut reducer = reducer.with_late_params(&[id]);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), after);
            let mut reducer = reducer.with_late_experts();
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), after);
        });
    }
}

/// A parameter of which no rank has a gradient stays without one; if one rank has it, all get it; what is left out stays
/// each rank's own.
fn parameters_without_gradients() {
    #[derive(Module, Debug)]
    struct Own<B: Backend> {
        nobodys: Param<Tensor<B, 1>>,
        somebodys: Param<Tensor<B, 1>>,
        left_out: Param<Tensor<B, 1>>,
    }
    let types = [(DType::F32, false), (DType::BF16, false), (DType::BF16, true), (DType::F64, false)];
    for (dtype, in_f32) in types {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let model: Own<B> = Own { nobodys: own(1, dtype), somebodys: own(2, dtype), left_out: own(3, dtype) };
            let reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().without(&[model.left_out.id]);
            let mut reducer = if in_f32 { reducer.with_main_gradients_in_f32() } else { reducer };
            let has = (replica, group.rank()) == (1, 0);
            let factor = 1.0 + (2 * replica + group.rank()) as f64;
            let own = model.left_out.val().mul_scalar(factor).sum();
            let loss = if has { own + model.somebodys.val().powi_scalar(2).sum() } else { own };
            reducer.backward(loss, &model).unwrap();
            let gradients = reducer.reduce(&model).unwrap();
            assert!(gradients.get::<Flex, 1>(model.nobodys.id).is_none());
            let somebodys = gradients.get::<Flex, 1>(model.somebodys.id).unwrap();
            // The same on all ranks.
            assert_eq!(somebodys.dtype(), if in_f32 { DType::F32 } else { dtype });
            assert_eq!(floats(somebodys), floats(model.somebodys.val().mul_scalar(2.0)));
            assert_eq!(floats(gradients.get::<Flex, 1>(model.left_out.id).unwrap()), vec![factor as f32; H]);
        });
    }
}

/// Each rank's own, of the same sizes: over replicas they are summed, over the group they are not. Ranks whose sums have
/// other types are told so.
fn experts_of_the_users_own() {
    #[derive(Module, Debug)]
    struct Own<B: Backend> {
        expert: Param<Tensor<B, 1>>,
        norm: Param<Tensor<B, 1>>,
    }
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Own { expert: own(group.rank() as u64, DType::F32), norm: own(9, DType::F32) };
            let mut reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_experts(&[model.expert.id]);
            let factor = |replica: usize, rank: usize| (1 + 10 * replica + rank) as f32;
            let loss = || (model.expert.val() + model.norm.val()).mul_scalar(factor(replica, group.rank())).sum();
            reducer.backward(loss(), &model).unwrap();
            let sums = reducer.reduce(&model).unwrap();
            let sum = |of: &Param<Tensor<B, 1>>| floats(sums.get::<Flex, 1>(of.id).unwrap());
            // Small whole numbers.
            let of_rank = |rank| (0..mesh[0]).map(|replica| factor(replica, rank)).sum::<f32>();
            assert_eq!(sum(&model.expert), [of_rank(group.rank()); H]);
            assert_eq!(sum(&model.norm), [(0..mesh[1]).map(of_rank).sum::<f32>(); H]);
            let is_culprit = (replica, group.rank()) == (mesh[0] - 1, mesh[1] - 1);
            let mut reducer = if is_culprit { reducer.with_main_gradients_in_f32() } else { reducer };
            reducer.backward(loss(), &model).unwrap();
            match reducer.reduce(&model).expect_err("another type") {
                Error::Invalid { name, found, .. } => {
                    assert_eq!((&name[..], found.contains("in f32")), ("gradients", is_culprit));
                }
                error => panic!("{error:?}"),
            }
            assert_eq!(reducer.microbatches(), 1);
        });
    }
}

/// An expert of the user's own fails in backward on one rank, between combine and dispatch: the others, which wait in the
/// dispatch's backward, hear of it at once, and the group works on. A failure of the calls' own comes typed.
fn a_backward_that_fails_among_the_users_experts() {
    for ranks in [2, 4] {
        places([1, ranks], |Place { group, comms, .. }| {
            let rank = group.rank();
            let moe = DispatchCombine::new(config(), group).unwrap();
            let scale = own(3, DType::F32);
            let mut reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_dispatch(&moe);
            let loss = |doing: Doing| {
                let tokens = 4 + rank;
                let x = tensor::<B, 2>(values(rank as u64, tokens * H, 1.0), [tokens, H]) * scale.val().unsqueeze();
                let ids: Vec<i32> = (0..tokens * K).map(|at| ((at % K) * (E / K) + at / K % (E / K)) as i32).collect();
                let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [tokens, K]), &device());
                let received = moe.dispatch(x, ids, Tensor::ones([tokens, K], &device())).unwrap();
                let outputs = received.map_experts(|_, rows, _| Ok(doing.clone().apply(rows.mul_scalar(2.0)))).unwrap();
                received.combine(outputs).unwrap().powi_scalar(2).sum()
            };
            reducer.backward(loss(Doing::nothing()), &scale).unwrap();
            let expected = floats(reducer.reduce(&scale).unwrap().get::<Flex, 1>(scale.id).unwrap());
            let begun = Instant::now();
            let fail = Doing::new(move || assert!(rank != CULPRIT, "an expert of the user's own"));
            let failing = loss(fail);
            let done = catch_unwind(AssertUnwindSafe(|| reducer.backward(failing, &scale)));
            match (rank, done) {
                (CULPRIT, Err(panic)) => {
                    let text = panic.downcast_ref::<String>().map_or("", String::as_str);
                    let text = panic.downcast_ref::<&str>().copied().unwrap_or(text);
                    assert!(text.contains("the user's own"), "{text}");
                }
                (_, Ok(Err(Error::Peer { peer: CULPRIT, reason, .. }))) if rank != CULPRIT => {
                    assert!(reason.contains("the user's own"), "{reason}");
                }
                (_, other) => panic!("rank {rank}: {other:?}"),
            }
            assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
            reducer.reset();
            reducer.backward(loss(Doing::nothing()), &scale).unwrap();
            assert_eq!(floats(reducer.reduce(&scale).unwrap().get::<Flex, 1>(scale.id).unwrap()), expected);
        });
    }
}

tests! {
    fn();
    experts_of_the_users_own,
    a_backward_that_fails_among_the_users_experts,
    sums_beside_backward_are_those_after_it,
    sums_of_a_layer_begin_while_backward_runs,
    a_forward_without_a_backward_has_its_sums_follow,
    layers_stay_known_behind_a_step,
    a_rank_that_fails_among_sums,
    a_rank_that_does_not_come_to_sums,
    a_rank_whose_parameters_have_other_sizes,
    another_number_of_microbatches_is_an_error_on_every_rank,
    a_parameter_with_another_use_is_named,
    parameters_without_gradients,
}
