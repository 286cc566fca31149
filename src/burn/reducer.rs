//! A step's gradients, accumulated over microbatches and summed over ranks, those of layers overlapped with backward.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use crate::adapter::{
    BUCKET_BYTES, EarlySums, GradientSums, PendingBuckets, ReduceComms, StepReduction, SumDescription, agree, fail,
    summed_in_part, variables_hash,
};
use crate::comm::Solo;
use crate::error::{Error, Result};
use crate::fnv1a::fnv1a;

use super::backend::{CoreDevice, LayerBackend, MoeBackend, NativeMemory};
use super::backward::inner_product;
use super::dispatch_combine::DispatchCombine;
use super::etp::ShardHolder;
use super::expert_sums::{ExpertSums, SharedExpertSums, locked};
use super::group::DeviceGroup;
use super::layer_calls::{BackwardStage, LayerCalls, PendingCall, ReceiverScope, Receivers, SharedHook};
use super::module::ExpertParallelMoE;
use super::reduce_hook::ReduceHook;
use super::step_gradients::{
    AccumulatedGradients, ByParam, ReducedTensor, SumDType, add_each, reduced_params, take_gradients,
};

const CALL: &str = "GradientReducer";

/// The gradients of a step, accumulated over its microbatches and summed over the ranks of a group and over data-parallel
/// replicas of it, in f32 (f64 for f64), in buckets, in rank order. A thread carries the sums beside the computation:
/// [`backward_reduced`](Self::backward_reduced) begins those of a layer as soon as they are whole: of router and shared
/// expert, and of its experts over the replicas.
///
/// ```
/// use std::time::Duration;
///
/// use burn::backend::{Autodiff, Flex};
/// use burn::optim::{Optimizer, SgdConfig};
/// use burn::tensor::{Distribution, Tensor};
/// use moebius::burn::{EpGroup, ExpertParallelMoE, ExpertParallelMoEConfig, GradientReducer, ReduceComms};
/// use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
/// use moebius::ep::{Group, GroupConfig};
/// use moebius::{MoeConfig, Result};
///
/// type B = Autodiff<Flex>;
///
/// fn rank(comm: ThreadComm, sums: ThreadComm) -> Result<()> {
///     let (config, device) = (MoeConfig::new(16, 32, 8, 2), Default::default());
///     let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::of(&config, 64))?;
///     let mut moe = ExpertParallelMoEConfig::new(config).init_on::<B>(EpGroup::new(group), &device)?;
///     let mut sgd = SgdConfig::new().init::<B, ExpertParallelMoE<B>>();
///     let comms = ReduceComms { group: Box::new(sums), replicas: None };
///     let mut reducer = GradientReducer::<B>::new(&Cpu::new(), comms)?.with_layer(&moe);
///     for _step in 0..2 {
///         let loss = |moe: &ExpertParallelMoE<B>| -> Result<_> {
///             let x = Tensor::<B, 2>::random([10, 16], Distribution::Default, &device);
///             Ok((moe.forward(x.clone())? - x).powi_scalar(2).mean())
///         };
///         reducer.backward(loss(&moe)?, &moe)?; // communicates no gradient
///         let gradients = reducer.backward_reduced(loss(&moe)?, &moe)?;
///         moe = sgd.step(0.1, moe, gradients);
///     }
///     Ok(())
/// }
///
/// # <Flex as burn::tensor::backend::Backend>::seed(&Default::default(), 1);
/// let [layers, sums] = [(); 2].map(|()| ThreadWorld::create(2, Duration::from_secs(60)));
/// let ranks: Vec<_> = layers.into_iter().zip(sums).map(|(a, b)| std::thread::spawn(|| rank(a, b))).collect();
/// for rank in ranks {
///     rank.join().expect("a rank panicked")?;
/// }
/// # Ok::<(), moebius::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientReducer<B: AutodiffBackend + MoeBackend> {
    sums: Arc<GradientSums<CoreDevice<B>>>,
    layers: Vec<ReducedLayer>,
    /// Parameters that the replicas hold, and not the ranks of the group.
    experts: HashSet<ParamId>,
    /// Parameters that are not summed here.
    left_out: HashSet<ParamId>,
    /// Parameters whose sums wait for the end of backward.
    late: HashSet<ParamId>,
    late_experts: bool,
    bucket_bytes: usize,
    gradients: AccumulatedGradients<B::Native>,
    /// Those of experts, where kernels add them up.
    main: Option<SharedExpertSums<<B::Native as NativeMemory>::Output>>,
}

/// A layer whose sums may begin beside backward, or dispatches for experts of the user's own.
#[derive(Debug)]
struct ReducedLayer {
    group: DeviceGroup,
    calls: Arc<LayerCalls>,
}

/// Parameters of a module whose gradients are summed.
struct StepParams<B: LayerBackend> {
    replicated: Vec<ReducedTensor<B::Native>>,
    experts: Vec<ReducedTensor<B::Native>>,
}

/// Sums that have begun beside a backward.
type Begun<B> = PendingBuckets<CoreDevice<B>, ReducedTensor<<B as LayerBackend>::Native>>;

impl<B: AutodiffBackend + MoeBackend> GradientReducer<B> {
    /// A reducer; `device` is that of the layers. Every rank of the communicators makes one.
    ///
    /// # Errors
    /// On a GPU, a communicator that does not tell its device, or whose stream is the layers' own; no thread to be had.
    pub fn new(device: &CoreDevice<B>, comms: ReduceComms<CoreDevice<B>>) -> Result<Self> {
        let sums = Arc::new(GradientSums::start(device, comms)?);
        let (layers, experts, left_out, late) = Default::default();
        let gradients = AccumulatedGradients::default();
        let (late_experts, bucket_bytes) = (false, BUCKET_BYTES);
        Ok(Self { sums, layers, experts, left_out, late, late_experts, bucket_bytes, gradients, main: None })
    }

    /// Of one rank: it accumulates gradients, and sums them with nobody's.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn alone(device: &CoreDevice<B>) -> Result<Self> {
        Self::new(device, ReduceComms { group: Box::new(Solo::new(device.clone())), replicas: None })
    }

    /// Has the layers' kernels write the experts' gradients, of the layers that [`with_layer`](Self::with_layer) names,
    /// into memory that stays over a step's microbatches: the first of them writes, the others add, and burn's graph has
    /// none of them. Each step has its own memory: the optimizer takes it with what [`reduce`](Self::reduce) gives. A layer
    /// goes burn's way where an expert's parameter is the result of an operation, or one parameter stands for two. Call it
    /// before the first backward: what has been accumulated is dropped.
    ///
    /// A backward, or a [`backward_reduced`](Self::backward_reduced), that fails once a layer has begun to write has lost
    /// the sums of this rank's step: [`reset`](Self::reset) has been done, and every rank begins the step anew. Before that
    /// they are as they were.
    pub fn with_main_gradients(self) -> Self {
        let gradients = AccumulatedGradients::new(SumDType::AsGradients);
        Self { main: Some(ExpertSums::new(false)), gradients, ..self }
    }

    /// The same, with all sums of 16-bit parameters in f32, experts' written so by the kernels: for an optimizer that
    /// takes a gradient of another type than its parameter's. [`AdamW`](super::AdamW) does, burn's do not.
    pub fn with_main_gradients_in_f32(self) -> Self {
        let gradients = AccumulatedGradients::new(SumDType::F32);
        Self { main: Some(ExpertSums::new(true)), gradients, ..self }
    }

    /// Tells which parameters are a layer's: its experts are summed over replicas alone, and its sums begin beside
    /// backward. What is no named layer's is taken to be the same on all ranks. Clones of the module, and what an
    /// optimizer's step makes of it, are the same layer. Parameters that are shards are their chain's
    /// ([`ShardedParams`](super::ShardedParams)), and left out here.
    pub fn with_layer(mut self, moe: &ExpertParallelMoE<B>) -> Self {
        let shards = moe.shard_ids();
        self.experts.extend(moe.expert_ids().into_iter().filter(|id| !shards.contains(id)));
        self.left_out.extend(shards);
        self.add_layer(moe.group(), &moe.calls);
        self
    }

    /// Tells of dispatches between which experts of the user's own lie: where a backward fails before it has come to
    /// theirs, the ranks that wait there are told, and the error of one of their own collectives is this call's result.
    /// Clones are the same.
    pub fn with_dispatch(mut self, moe: &DispatchCombine) -> Self {
        self.add_layer(moe.group(), &moe.calls);
        self
    }

    fn add_layer(&mut self, group: &DeviceGroup, calls: &Arc<LayerCalls>) {
        if !self.layers.iter().any(|layer| Arc::ptr_eq(&layer.calls, calls)) {
            self.layers.push(ReducedLayer { group: group.clone(), calls: Arc::clone(calls) });
        }
    }

    /// Sums the gradients of parameters that each rank of the group has of its own over the replicas alone: of experts
    /// between the calls of a [`DispatchCombine`](super::DispatchCombine).
    pub fn with_experts(mut self, params: &[ParamId]) -> Self {
        self.experts.extend(params);
        self
    }

    /// Leaves parameters out: those that each rank has of its own, as the shards of a
    /// [`ShardedDense`](super::ShardedDense).
    pub fn without(mut self, params: &[ParamId]) -> Self {
        self.left_out.extend(params);
        self
    }

    /// Has the sums of these wait for the end of backward: layers' parameters, experts among them, that other operations of
    /// the model use as well, such as a penalty on a router's weight. The same on every rank.
    pub fn with_late_params(mut self, params: &[ParamId]) -> Self {
        self.late.extend(params);
        self
    }

    /// Has the sums of all experts over the replicas wait for the end of backward and go a bucket at a time. Beside backward
    /// each of them holds a copy of its gradients in f32 (f64 for f64) until the end, which this spares.
    pub fn with_late_experts(self) -> Self {
        Self { late_experts: true, ..self }
    }

    /// Bytes of sums that one collective takes, [`BUCKET_BYTES`] without this. The same on every rank, which ranks compare.
    pub fn with_bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// Backwards whose gradients this rank has accumulated.
    pub fn microbatches(&self) -> u64 {
        self.gradients.microbatches()
    }

    /// Forgets what has been accumulated: the step begins anew.
    pub fn reset(&mut self) {
        self.gradients = AccumulatedGradients::new(self.gradients.sum_dtype());
        if let Some(main) = &self.main {
            locked(main).clear();
        }
    }

    /// Adds the gradients of a microbatch's `loss`, and communicates none.
    ///
    /// # Errors
    /// Those of layers that [`with_layer`](Self::with_layer) names, and of dispatches that
    /// [`with_dispatch`](Self::with_dispatch) does, which unwind a backward of burn's own. What else unwinds
    /// the backward unwinds this call as well. Either way the ranks that wait in such a layer, which this one does not
    /// reach, are told and fail too; those of whose layers none is left go on, and hear of it where they next meet this
    /// rank ([`refuse`](Self::refuse)). The gradients are as they were, but for what
    /// [`with_main_gradients`](Self::with_main_gradients) says.
    pub fn backward<M: Module<B>, const D: usize>(&mut self, loss: Tensor<B, D>, module: &M) -> Result<()> {
        let gradients = self.run(loss, (module, None), |_| ())?;
        self.accumulate(gradients, module);
        Ok(())
    }

    /// [`backward`](Self::backward) of Σ y ∘ d_y: of an output whose gradient is known, without a loss.
    ///
    /// # Errors
    /// As there, and as [`burn::backward_with`](super::backward_with).
    pub fn backward_with<M: Module<B>, const D: usize>(
        &mut self,
        y: Tensor<B, D>,
        d_y: Tensor<B::InnerBackend, D>,
        module: &M,
    ) -> Result<()> {
        self.backward(inner_product(y, d_y)?, module)
    }

    /// Adds the gradients of a microbatch's backward that has run elsewhere.
    pub fn accumulate<M: Module<B>>(&mut self, gradients: B::Gradients, module: &M) {
        self.gradients.add(take_gradients::<B, M>(gradients, module), HashMap::new());
    }

    /// The gradients summed over the ranks, behind the step's last backward, for the optimizer; the next step begins. Every
    /// rank calls it with the same module. A gradient keeps its type. One that is absent on some ranks counts as zeros
    /// there; one that is absent on all stays so.
    ///
    /// # Errors
    /// On every rank of the group and of its replicas: a rank that has failed, or that is here after another number of
    /// microbatches; a communicator's; parameters of other sizes on another rank. The gradients are as they were on all of
    /// them, or, where the experts' sums over replicas were being taken, on none: the step begins anew, as behind a
    /// [`reset`](Self::reset). Where the communicators survive, the reducer works on.
    pub fn reduce<M: Module<B>>(&mut self, module: &M) -> Result<GradientsParams> {
        self.settle()?;
        if self.sums.is_alone() {
            return Ok(self.take());
        }
        let params = self.params(module);
        agree(&self.sums, self.sum_description(&params, self.microbatches(), 0))?;
        self.sum(&params, Begun::<B>::default())
    }

    /// [`backward`](Self::backward) of a step's last microbatch and [`reduce`](Self::reduce), with the same bits: the
    /// sums of a layer's router and shared expert, and those of its experts over replicas, begin as soon as the layer's
    /// last backward has made them whole, and go on beside the rest of backward; the others follow. A layer's forward
    /// whose backward is not in this graph, and whose graph lives, has them follow too. The sums under way are copies of
    /// their gradients, in f32 (f64 for f64).
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`reduce`](Self::reduce). After one of `reduce` the microbatch is part of the
    /// gradients. Another operation's gradient of a parameter whose sum had begun: name it to
    /// [`with_late_params`](Self::with_late_params).
    pub fn backward_reduced<M: Module<B>, const D: usize>(
        &mut self,
        loss: Tensor<B, D>,
        module: &M,
    ) -> Result<GradientsParams> {
        if self.sums.is_alone() {
            self.backward(loss, module)?;
            return self.reduce(module);
        }
        let params = self.params(module);
        let hook = Arc::new(Mutex::new(self.agreed_hook(&params)?));
        let (shared, sums): (SharedHook, _) = (Arc::clone(&hook) as _, Arc::clone(&self.sums));
        let gradients = self.run(loss, (module, Some(shared)), |reason| {
            // The others are in these sums, or on their way to those that follow.
            let _ = sums.recover(reason);
        })?;
        let made = hook.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(error) = made.error {
            return Err(self.fail(error));
        }
        let mut new = take_gradients::<B, M>(gradients, module);
        if let Some(error) = made.begun.params().find_map(|param| self.summed_too_soon(param, [&new, &made.new])) {
            return Err(self.fail(error));
        }
        add_each::<B::Native>(&mut new, made.new);
        self.gradients.add(new, made.whole);
        self.settle()?;
        self.sum(&params, made.begun)
    }

    /// Meets the other ranks' [`reduce`](Self::reduce) or [`backward_reduced`](Self::backward_reduced) as a failure: for a
    /// rank that does not come to it. They get the reason, and the reducer works on.
    ///
    /// # Errors
    /// A communicator that did not survive; ranks that did not come.
    pub fn refuse(&self, reason: &str) -> Result<()> {
        self.sums.recover(reason)
    }

    /// The gradients, for an optimizer.
    fn take(&mut self) -> GradientsParams {
        let next = AccumulatedGradients::new(self.gradients.sum_dtype());
        std::mem::replace(&mut self.gradients, next).into_params::<B>()
    }

    /// Puts the sums that kernels have made among the gradients. Where that fails the other ranks are told.
    fn settle(&mut self) -> Result<()> {
        let Some(main) = &self.main else { return Ok(()) };
        let sums = locked(main).take().into_iter().map(|(id, sum)| Ok((id, B::Native::float(sum)?)));
        match sums.collect::<Result<ByParam<B::Native>>>() {
            Ok(sums) => self.gradients.take_sums(sums),
            Err(error) => {
                self.reset();
                return Err(fail(&self.sums, error));
            }
        }
        Ok(())
    }

    /// The error for a parameter whose sum has begun beside a backward, and of which there is more: among the backward's
    /// `new` gradients, or where kernels add up those of the microbatches before.
    fn summed_too_soon(&self, param: &ReducedTensor<B::Native>, new: [&ByParam<B::Native>; 2]) -> Option<Error> {
        const LATE: &str = "GradientReducer::with_late_params";
        if new.iter().any(|new| new.contains_key(&param.id)) {
            return Some(summed_in_part(CALL, &param.dims(), LATE));
        }
        let in_main = self.main.as_ref().is_some_and(|main| locked(main).has(param.id));
        in_main.then(|| {
            let dims = param.dims();
            let expected = format!(
                "gradients by the layer's kernels in every microbatch of a step, or a parameter that `{LATE}` names"
            );
            let found = format!(
                "one of {dims:?} whose gradient came through burn's graph in this microbatch, and by the kernels before"
            );
            Error::invalid(CALL, "expert's parameter", expected, found)
        })
    }

    /// Tells the other ranks of an error behind a backward. What kernels have added to is lost with its microbatch.
    fn fail(&mut self, error: Error) -> Error {
        if self.main.as_ref().is_some_and(|main| locked(main).is_written()) {
            self.reset();
        }
        fail(&self.sums, error)
    }

    fn params<M: Module<B>>(&self, module: &M) -> StepParams<B> {
        let all = reduced_params::<B, M>(module, &self.left_out);
        let (experts, replicated) = all.into_iter().partition(|param| self.experts.contains(&param.id));
        StepParams { replicated, experts }
    }

    /// What this rank sums, for the comparison with the others.
    fn sum_description(&self, params: &StepParams<B>, microbatches: u64, layer_calls: u64) -> SumDescription {
        // Of sizes and types, in the order of the sums.
        let hash = |of: &[ReducedTensor<B::Native>]| variables_hash(of.iter().map(ReducedTensor::described));
        let (variables, experts) = (hash(&params.replicated), hash(&params.experts));
        let in_f32 = self.gradients.sum_dtype() == SumDType::F32;
        SumDescription { microbatches, layer_calls, variables, experts, in_f32, bucket_bytes: self.bucket_bytes }
    }

    /// Sums what has not begun to be summed, and takes all sums.
    fn sum(&mut self, params: &StepParams<B>, begun: Begun<B>) -> Result<GradientsParams> {
        let (replicated, experts) = (&params.replicated[..], &params.experts[..]);
        let reduction = StepReduction { sums: &self.sums, replicated, experts, bucket_bytes: self.bucket_bytes };
        reduction.run(&mut self.gradients, begun)?;
        Ok(self.take())
    }

    /// The receiver of the gradients of the backward to come, which all ranks begin to sum alike.
    fn agreed_hook(&self, params: &StepParams<B>) -> Result<ReduceHook<B::Native>> {
        let experts = params.experts.iter().filter(|_| self.sums.has_replicas() && !self.late_experts);
        let early = params.replicated.iter().chain(experts).filter(|param| !self.late.contains(&param.id));
        let mut by_leaf: HashMap<_, _> = early.filter_map(|param| Some((param.leaf?, param.clone()))).collect();
        let mut remaining = HashMap::new();
        for call in self.waiting() {
            for param in call.leaves().present().filter_map(|(_, leaf)| by_leaf.get(leaf)) {
                *remaining.entry(param.id).or_insert(0) += 1;
            }
        }
        let of = |param: &ReducedTensor<_>| remaining.get(&param.id).copied().unwrap_or(0usize).to_string();
        let calls: Vec<String> = params.replicated.iter().chain(&params.experts).map(of).collect();
        // The backward to come is counted.
        let own = self.sum_description(params, self.microbatches() + 1, fnv1a(calls.join(",")));
        if !agree(&self.sums, own)? {
            remaining.clear();
        }
        by_leaf.retain(|_, param| remaining.contains_key(&param.id));
        let before = by_leaf.values().filter_map(|param| Some((param.id, self.gradients.get(param.id)?.clone())));
        let (before, sum_dtype) = (before.collect(), self.gradients.sum_dtype());
        Ok(ReduceHook::new(EarlySums::new(&self.sums, remaining, self.bucket_bytes), by_leaf, before, sum_dtype))
    }

    /// Calls of the layers whose backward is still to run.
    fn waiting(&self) -> Vec<Arc<PendingCall>> {
        self.layers.iter().flat_map(|layer| layer.calls.waiting()).collect()
    }

    /// Runs a backward of a module, whose layers' gradients a hook takes if there is one. Where it fails, the ranks that
    /// wait in a layer are told, and those that `tell` knows of; what is no layer's error goes on unwinding.
    fn run<M: Module<B>, const D: usize>(
        &mut self,
        loss: Tensor<B, D>,
        (module, hook): (&M, Option<SharedHook>),
        tell: impl FnOnce(&str),
    ) -> Result<B::Gradients> {
        let waiting = self.waiting();
        if let Some(main) = &self.main {
            let experts = reduced_params::<B, M>(module, &self.left_out).into_iter();
            let experts = experts.filter(|param| self.experts.contains(&param.id));
            locked(main).begin(experts.filter_map(|param| Some((param.leaf?, param.id))).collect());
        }
        // What an earlier backward has left is not this one's.
        self.layers.iter().for_each(|layer| drop(layer.group.take_failure()));
        let done = {
            let calls = self.layers.iter().map(|layer| &*layer.calls);
            let sums = self.main.as_ref().map(|main| B::Native::erase_sums(Arc::clone(main)));
            let _scope = ReceiverScope::new(calls, &Receivers { hook, sums });
            catch_unwind(AssertUnwindSafe(|| loss.backward()))
        };
        if done.is_err() && self.main.as_ref().is_some_and(|main| locked(main).is_written()) {
            self.reset();
        }
        done.map_err(|panic| {
            // A layer has told its group itself.
            let failed = |layer: &ReducedLayer| Some((layer.group.take_failure()?, layer.group.clone()));
            let (error, told) = self.layers.iter().find_map(failed).unzip();
            let reason = match &error {
                Some(error) => error.to_string(),
                None => {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                    text.unwrap_or("a backward that panicked").to_string()
                }
            };
            let mut told: Vec<DeviceGroup> = told.into_iter().collect();
            for call in waiting.iter().filter(|call| call.stage() == BackwardStage::Dropped) {
                if !told.iter().any(|group| group.is(call.group())) {
                    told.push(call.group().clone());
                    call.refuse(&reason);
                }
            }
            tell(&reason);
            error.unwrap_or_else(|| resume_unwind(panic))
        })
    }
}
