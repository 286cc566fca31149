//! Sums of main gradients over ranks, those of layers begun while backward still runs.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId, Var};
use candle_nn::VarMap;

use crate::adapter::{
    BUCKET_BYTES, EarlySums, GradientSums, PendingBuckets, ReduceComms, ReducedParam, StepGradients, StepReduction,
    SumDescription, SumOf, Summand, agree, fail, summed_in_part, variables_hash,
};
use crate::error::Error;
use crate::fnv1a::fnv1a;
use crate::layer::{ParamKind, PerParam};

use super::device::{CandleDevice, copy_of, into_candle, with_views};
use super::error::{framework, reason};
use super::gradient_hook::{GradientHook, with_hook};
use super::main_gradients::{MainGradients, added, expert_sum};
use super::module::ExpertParallelMoE;
use super::optimizer::AdamWParam;
use super::pending::calls_of;
use super::reduce::{BucketParams, described, summand};

const CALL: &str = "MainGradients::reduce";
const BACKWARD_REDUCED: &str = "MainGradients::backward_reduced";

/// Sums of [`MainGradients`] over the ranks of a group, and over data-parallel replicas of it, in f32 (f64 for f64), in
/// buckets, in rank order. A thread carries them beside the computation:
/// [`MainGradients::backward_reduced`] begins those of a layer as soon as they are whole: of router and shared expert, and
/// of its experts over the replicas.
///
/// ```
/// use std::time::Duration;
///
/// use candle_core::{DType, Device, Module, Result, Tensor};
/// use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
/// use moebius::MoeConfig;
/// use moebius::candle::{ExpertParallelMoE, GradientReducer, MainGradients, ReduceComms};
/// use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
/// use moebius::ep::{Group, GroupConfig};
///
/// fn rank(comm: ThreadComm, sums: ThreadComm) -> Result<()> {
///     let config = MoeConfig::new(16, 32, 8, 2);
///     let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::of(&config, 64))?;
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let moe = ExpertParallelMoE::new(config, group, vb)?;
///     let comms = ReduceComms { group: Box::new(sums), replicas: None };
///     let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&moe);
///     let mut gradients = MainGradients::new();
///     let loss = |x: Tensor| (moe.forward(&x)? - x)?.sqr()?.mean_all();
///     gradients.backward(&loss(Tensor::arange(0f32, 160., &Device::Cpu)?.sin()?.reshape((10, 16))?)?)?; // communicates no gradient
///     gradients.backward_reduced(&loss(Tensor::arange(0f32, 160., &Device::Cpu)?.sin()?.reshape((10, 16))?)?, &reducer)?;
///     SGD::new(moe.vars(), 0.1)?.step(gradients.store())?;
///     gradients.reset();
///     Ok(())
/// }
///
/// let [layers, sums] = [(); 2].map(|()| ThreadWorld::create(2, Duration::from_secs(60)));
/// let ranks: Vec<_> = layers.into_iter().zip(sums).map(|(a, b)| std::thread::spawn(|| rank(a, b))).collect();
/// for rank in ranks {
///     rank.join().expect("a rank panicked")?;
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientReducer<D: CandleDevice> {
    sums: Arc<GradientSums<D>>,
    /// Variables that all ranks of the group hold.
    replicated: Vec<Tensor>,
    /// Variables that the replicas hold.
    experts: Vec<Tensor>,
    /// Variables that differ from rank to rank of the group: experts, and shards of them.
    of_one_rank: HashSet<TensorId>,
    /// Variables that are summed nowhere here.
    left_out: HashSet<TensorId>,
    /// What a variable is, for those of layers and of maps: compared over the ranks.
    names: HashMap<TensorId, String>,
    /// Parameters of layers that are no variables.
    computed: Vec<ComputedParam>,
    /// Variables whose sums wait for the end of backward.
    late: HashSet<TensorId>,
    /// Those of all experts do.
    late_experts: bool,
    bucket_bytes: usize,
}

/// A layer's parameter that is computed of variables: these have gradients, and it has none.
#[derive(Debug)]
struct ComputedParam {
    name: String,
    is_replicated: bool,
    vars: Vec<TensorId>,
}

impl<D: CandleDevice> GradientReducer<D> {
    /// A reducer without variables; `device` is that of the layers. Every rank of the communicators makes one, with the
    /// same variables in the same order.
    ///
    /// # Errors
    /// On a GPU, a communicator that does not tell its device, or whose stream is the layers' own; no thread to be had.
    pub fn new(device: &D, comms: ReduceComms<D>) -> Result<Self> {
        let sums = Arc::new(GradientSums::start(device, comms)?);
        Ok(Self {
            sums,
            replicated: Vec::new(),
            experts: Vec::new(),
            of_one_rank: HashSet::new(),
            left_out: HashSet::new(),
            names: HashMap::new(),
            computed: Vec::new(),
            late: HashSet::new(),
            late_experts: false,
            bucket_bytes: BUCKET_BYTES,
        })
    }

    /// Sums a layer's gradients too: of router and shared expert over the group, and over replicas of all its variables.
    /// Experts that are shards are their chain's ([`finish_sharded`](super::finish_sharded)). Where a parameter is computed
    /// (a cast, a sum of two), its variables are to be named as well: those of router and shared expert by
    /// [`with_vars`](Self::with_vars), the experts' by [`with_experts`](Self::with_experts) where there are replicas.
    pub fn with_layer(mut self, moe: &ExpertParallelMoE) -> Self {
        for (kind, t) in moe.trainable() {
            let name = param_name(moe, kind);
            if !t.is_variable() {
                let vars = t.sorted_nodes().into_iter().filter(|node| node.is_variable()).map(Tensor::id).collect();
                self.computed.push(ComputedParam { name, is_replicated: kind.is_replicated(), vars });
                continue;
            }
            self.names.insert(t.id(), name);
            let is_shard = moe.is_shard(kind);
            if is_shard || !kind.is_replicated() {
                self.of_one_rank.insert(t.id());
            }
            let all = if kind.is_replicated() { &mut self.replicated } else { &mut self.experts };
            if !is_shard && !all.iter().any(|other| other.id() == t.id()) {
                all.push(t.clone());
            }
        }
        self.leave_out();
        self
    }

    /// Sums the gradients of variables that each rank of the group has of its own over the replicas alone: of experts
    /// between the calls of a [`DispatchCombine`](super::DispatchCombine), or behind a layer's computed ones. Their order is
    /// to be the same on all replicas of a rank.
    pub fn with_experts(mut self, vars: &[Var]) -> Self {
        for var in vars {
            self.of_one_rank.insert(var.id());
            if !self.experts.iter().any(|other| other.id() == var.id()) {
                self.experts.push(var.as_tensor().clone());
            }
        }
        self.leave_out();
        self
    }

    /// What ranks hold different ones of is not summed over the group, and what is left out nowhere.
    fn leave_out(&mut self) {
        let Self { of_one_rank, left_out, .. } = self;
        self.replicated.retain(|t| !of_one_rank.contains(&t.id()) && !left_out.contains(&t.id()));
        self.experts.retain(|t| !left_out.contains(&t.id()));
    }

    /// Sums the gradients of other variables too, which all ranks hold: of the model around the layers. The experts and
    /// shards that [`with_layer`](Self::with_layer) and [`with_experts`](Self::with_experts) name, which ranks hold
    /// different ones of, are left out, before these calls and behind them, so that all variables of the model may be
    /// given; of a model with shards of dense weights, behind [`without`](Self::without) of these. Their order is to be
    /// the same on every rank, which that of `VarMap::all_vars` is not: [`with_var_map`](Self::with_var_map) has that of
    /// names.
    pub fn with_vars(mut self, vars: &[Var]) -> Self {
        vars.iter().for_each(|var| self.add_replicated(var));
        self.leave_out();
        self
    }

    /// [`with_vars`](Self::with_vars) of a map's variables of floating types, in the order of their names, which ranks
    /// compare. Shards of dense weights ([`ShardedWeights`](super::ShardedWeights)) that lie in the map are each rank's own,
    /// of the same names and sizes on all, which no comparison finds: they are named to [`without`](Self::without).
    pub fn with_var_map(mut self, vars: &VarMap) -> Self {
        for param in AdamWParam::of_var_map(vars) {
            self.names.entry(param.var().id()).or_insert_with(|| param.name().to_string());
            self.add_replicated(param.var());
        }
        self.leave_out();
        self
    }

    fn add_replicated(&mut self, var: &Var) {
        if !self.replicated.iter().any(|other| other.id() == var.id()) {
            self.replicated.push(var.as_tensor().clone());
        }
    }

    /// Leaves variables out of all sums, whichever call names them, before this one or behind it: shards of dense weights,
    /// which their chain sums ([`finish_sharded`](super::finish_sharded)).
    pub fn without(mut self, vars: &[Var]) -> Self {
        self.left_out.extend(vars.iter().map(|var| var.id()));
        self.leave_out();
        self
    }

    /// Has the sums of these wait for the end of backward: layers' parameters, experts among them, that other operations of
    /// the model use as well, such as a penalty on a router's weight. The same on every rank.
    pub fn with_late_vars(mut self, vars: &[Var]) -> Self {
        self.late.extend(vars.iter().map(|var| var.id()));
        self
    }

    /// Has the sums of all experts, whichever call names them, over the replicas wait for the end of backward and go a
    /// bucket at a time. Beside backward each of them holds a copy of its gradients in f32 (f64 for f64) until the end,
    /// which this spares.
    pub fn with_late_experts(self) -> Self {
        Self { late_experts: true, ..self }
    }

    /// Bytes of sums that one collective takes, [`BUCKET_BYTES`] without this. The same on every rank, which ranks compare.
    pub fn with_bucket_bytes(self, bucket_bytes: usize) -> Self {
        Self { bucket_bytes, ..self }
    }

    /// Meets the other ranks' [`MainGradients::backward_reduced`] or [`MainGradients::reduce`] as a failure: for a rank
    /// that does not come to it. They get the reason, and the reducer works on.
    ///
    /// # Errors
    /// A communicator that did not survive; ranks that did not come.
    pub fn refuse(&self, reason: &str) -> Result<()> {
        Ok(self.sums.recover(reason)?)
    }

    /// Refuses a layer's computed parameter of whose variables one is summed nowhere, or, of an expert, over other ranks'
    /// experts. Over the group, experts are summed with nobody.
    fn check_computed(&self, call: &'static str) -> crate::Result<()> {
        let is_in = |all: &[Tensor], var: &TensorId| all.iter().any(|t| t.id() == *var);
        let is_summed = |var: &TensorId, is_replicated| match is_replicated {
            _ if self.left_out.contains(var) => true,
            true => is_in(&self.replicated, var),
            false if self.sums.has_replicas() => is_in(&self.experts, var),
            false => !is_in(&self.replicated, var),
        };
        for ComputedParam { name, is_replicated, vars } in &self.computed {
            if !vars.iter().all(|var| is_summed(var, *is_replicated)) {
                let by = if *is_replicated { "with_vars" } else { "with_experts" };
                let expected = format!("a variable, or computed of those that `GradientReducer::{by}` names");
                return Err(Error::invalid(call, name, expected, "computed of a variable that it does not name"));
            }
        }
        Ok(())
    }

    /// Refuses what this rank cannot sum, on every rank: the others may be in the comparison.
    fn check(&self, call: &'static str, gradients: &MainGradients) -> crate::Result<()> {
        let checked = gradients.check_unchanged(call).and_then(|()| self.check_computed(call));
        checked.map_err(|error| fail(&self.sums, error))
    }

    /// Variables, for a comparison: what they are, their sizes and types.
    fn hash(&self, of: &[Tensor]) -> u64 {
        let name = |t: &Tensor| self.names.get(&t.id()).map_or("", String::as_str);
        variables_hash(of.iter().map(|t| format!("{:?} {}", name(t), described(&t))))
    }

    /// Compares what is summed with all other ranks, and with it the sums that will begin beside a backward: of
    /// variables, the calls of layers that add to each. Says whether these are the same on all.
    fn agree(
        &self,
        microbatches: u64,
        gradients: &MainGradients,
        early: &HashMap<TensorId, usize>,
    ) -> crate::Result<bool> {
        let calls = |t: &Tensor| early.get(&t.id()).map_or_else(|| "-".to_string(), usize::to_string);
        let calls: Vec<String> = self.replicated.iter().chain(&self.experts).map(calls).collect();
        let (variables, experts) = (self.hash(&self.replicated), self.hash(&self.experts));
        let own = SumDescription {
            microbatches,
            layer_calls: fnv1a(&calls.join(",")),
            variables,
            experts,
            in_f32: gradients.is_in_f32(),
            bucket_bytes: self.bucket_bytes,
        };
        agree(&self.sums, own)
    }

    fn reduction(&self) -> StepReduction<'_, D, Tensor> {
        let Self { sums, replicated, experts, bucket_bytes, .. } = self;
        StepReduction { sums, replicated, experts, bucket_bytes: *bucket_bytes }
    }
}

/// A layer's parameter, by the layer's number and its own name.
fn param_name(moe: &ExpertParallelMoE, kind: ParamKind) -> String {
    format!("layer {}, {}", moe.layer().number(), kind.name())
}

impl ReducedParam for Tensor {
    type Key = TensorId;

    fn key(&self) -> TensorId {
        self.id()
    }

    fn summand(&self) -> Summand {
        summand(&self)
    }
}

/// The gradients of a bucket that `gradient` gives, as [`StepGradients::flat`].
fn flat<D: CandleDevice>(
    device: &D,
    bucket: &[Tensor],
    gradient: &dyn Fn(&Tensor) -> Option<Tensor>,
) -> crate::Result<crate::Tensor<D>> {
    let flat = BucketParams(&bucket.iter().collect::<Vec<_>>()).flat(gradient)?;
    with_views(device, CALL, &[("gradients", &flat)], |views| copy_of(device, views[0].borrow()))
}

impl<D: CandleDevice> StepGradients<D> for MainGradients {
    type Param = Tensor;
    type Sum = Tensor;

    fn flat(&self, device: &D, bucket: &[Tensor]) -> crate::Result<crate::Tensor<D>> {
        flat(device, bucket, &|of| self.store().get(of).cloned())
    }

    fn split(&self, _: &D, bucket: &[Tensor], sums: crate::Tensor<D>) -> crate::Result<Vec<Option<Tensor>>> {
        let Some(first) = bucket.first() else { return Ok(Vec::new()) };
        let count = sums.view().count();
        let sums = into_candle(sums, &[count], first.device())?;
        let bucket: Vec<&Tensor> = bucket.iter().collect();
        let bucket = BucketParams(&bucket);
        bucket.split(&sums, self.store(), &|number| bucket.flagged_type(&sums, number)).map_err(framework(CALL))
    }

    fn set(&mut self, of: &Tensor, sum: Tensor) {
        self.sums_mut().insert(of, sum);
    }

    fn reset(&mut self) {
        MainGradients::reset(self);
    }
}

/// Gradients of a running backward that leave for their sums as soon as they are whole.
struct ReduceHook<D: CandleDevice> {
    early: EarlySums<D, Tensor>,
    /// The sums before this backward, and the type of those to come.
    before: GradStore,
    type_of: fn(DType) -> DType,
    /// This backward's so far, each with its variable.
    new: HashMap<TensorId, (Tensor, Tensor)>,
}

impl<D: CandleDevice> ReduceHook<D> {
    /// Begins the sums of a layer's experts over the replicas, if this was the last call that adds to them.
    fn begin_experts(&mut self, layer: u32, params: &PerParam<Option<Tensor>>) -> crate::Result<()> {
        let (mut whole, mut sums) = (Vec::new(), HashMap::new());
        for (_, t) in params.present().filter(|(kind, _)| !kind.is_replicated()) {
            // Of one that candle's own way has led to, the sum is not here.
            if self.early.count_call(&t.id())
                && let Some(sum) = expert_sum(t)
            {
                whole.push(t.clone());
                sums.insert(t.id(), sum);
            }
        }
        self.early.begin(layer, SumOf::Experts, &whole, |device, bucket| {
            flat(device, bucket, &|of| sums.get(&of.id()).cloned())
        })
    }
}

impl<D: CandleDevice> GradientHook for ReduceHook<D> {
    fn on_gradients(
        &mut self,
        layer: u32,
        params: &PerParam<Option<Tensor>>,
        gradients: &mut PerParam<Option<Tensor>>,
    ) -> crate::Result<PerParam<bool>> {
        let (mut whole, mut sums) = (Vec::new(), HashMap::new());
        let taken = params.as_ref().try_map(|kind, t| -> candle_core::Result<bool> {
            let Some(t) = t.as_ref().filter(|t| kind.is_replicated() && self.early.has(&t.id())) else {
                return Ok(false);
            };
            let Some(gradient) = gradients[kind].take() else { return Ok(false) };
            // In candle's order of sums.
            let all = match self.new.remove(&t.id()) {
                Some((_, sum)) => (sum + gradient)?,
                None => gradient,
            };
            if self.early.count_call(&t.id()) {
                sums.insert(t.id(), added(self.before.get(t), &all, self.type_of)?);
                whole.push(t.clone());
            }
            self.new.insert(t.id(), (t.clone(), all));
            Ok(true)
        });
        let taken = taken.map_err(framework(CALL))?;
        self.early.begin(layer, SumOf::Replicated, &whole, |device, bucket| {
            flat(device, bucket, &|of| sums.get(&of.id()).cloned())
        })?;
        self.begin_experts(layer, params)?;
        Ok(taken)
    }
}

impl MainGradients {
    /// Sums the gradients over the ranks, behind the step's last backward. Every rank calls it. The next backward, and
    /// another sum, are refused until a [`reset`](Self::reset).
    ///
    /// # Errors
    /// Gradients that have been summed already. On every rank of the group and of its replicas: gradients that
    /// [`store_mut`](Self::store_mut) has given on one of them, as whoever changes them may have summed them; a layer's
    /// computed parameter whose variables are not named ([`with_layer`](GradientReducer::with_layer)); a rank that has
    /// failed, or that is here after another number of microbatches, with other variables or with sums of another type; a
    /// communicator's. The gradients are as they were on all of them, or, where the experts' sums over replicas were being
    /// taken, on none: the step begins anew, and [`reset`](Self::reset) has been done. Where the communicators survive, the
    /// reducer works on.
    pub fn reduce<D: CandleDevice>(&mut self, reducer: &GradientReducer<D>) -> Result<()> {
        self.check_not_reduced()?;
        if reducer.sums.is_alone() {
            self.check_unchanged(CALL)?;
            self.set_reduced();
            return Ok(());
        }
        reducer.check(CALL, self)?;
        reducer.agree(self.microbatches(), self, &HashMap::new())?;
        reducer.reduction().run(self, PendingBuckets::default())?;
        self.set_reduced();
        Ok(())
    }

    /// [`backward`](Self::backward) of a step's last microbatch and [`reduce`](Self::reduce), with the same bits: the
    /// sums of a layer's router and shared expert, and those of its experts over replicas, begin as soon as the layer's
    /// last backward in this graph has made them whole, and go on beside the rest of backward; the others follow. The
    /// experts' sums under way are copies of their gradients, in f32 (f64 for f64).
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`reduce`](Self::reduce). After one of `reduce` the microbatch is part of the
    /// gradients. Another operation's gradient of a variable whose sum had begun: name it to
    /// [`with_late_vars`](GradientReducer::with_late_vars).
    pub fn backward_reduced<D: CandleDevice>(&mut self, loss: &Tensor, reducer: &GradientReducer<D>) -> Result<()> {
        if reducer.sums.is_alone() {
            self.backward(loss)?;
            self.set_reduced();
            return Ok(());
        }
        reducer.check(BACKWARD_REDUCED, self)?;
        let mut remaining = calls_of(loss);
        let early_experts = reducer.sums.has_replicas() && !reducer.late_experts;
        let experts = reducer.experts.iter().filter(|t| early_experts && !self.is_elsewhere(t));
        let early = reducer.replicated.iter().chain(experts).map(Tensor::id);
        let known: HashSet<TensorId> = early.filter(|id| !reducer.late.contains(id)).collect();
        remaining.retain(|id, _| known.contains(id));
        // The backward to come is counted. Where another rank would begin other sums, all follow backward.
        if !reducer.agree(self.microbatches() + 1, self, &remaining)? {
            remaining.clear();
        }
        let mut before = GradStore::default();
        for t in &reducer.replicated {
            if let Some(sum) = self.store().get(t) {
                before.insert(t, sum.clone());
            }
        }
        let hook = Rc::new(RefCell::new(ReduceHook {
            early: EarlySums::new(&reducer.sums, remaining, reducer.bucket_bytes),
            before,
            type_of: self.type_of(),
            new: HashMap::new(),
        }));
        // Of variables whose sums have begun, one that another operation has given a gradient of.
        let mut in_part = None;
        let done = with_hook(hook.clone(), || {
            self.run(loss, |gradients| {
                for (var, new) in hook.borrow().new.values() {
                    let all = match gradients.get(var) {
                        Some(other) => {
                            in_part = Some(var.dims().to_vec());
                            (other + new)?
                        }
                        None => new.clone(),
                    };
                    gradients.insert(var, all);
                }
                for var in hook.borrow().early.begun().experts() {
                    in_part = gradients.get(var).map(|_| var.dims().to_vec()).or(in_part.take());
                }
                Ok(())
            })
        });
        let begun = hook.borrow_mut().early.take();
        if let Err(error) = done {
            // The others are in these sums, or on their way to those that follow.
            let _ = reducer.sums.recover(&reason(&error));
            return Err(error);
        }
        if let Some(dims) = in_part {
            let error = summed_in_part(CALL, &dims, "GradientReducer::with_late_vars");
            return Err(fail(&reducer.sums, error).into());
        }
        reducer.reduction().run(self, begun)?;
        self.set_reduced();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use candle_core::Device;

    use super::*;
    use crate::candle::error_of;
    use crate::cpu::{Cpu, ThreadComm, ThreadWorld};
    use crate::error::CommError;

    /// A rank of a mesh of so many replicas and ranks of each.
    struct Place {
        replica: usize,
        rank: usize,
        comms: ReduceComms<Cpu>,
    }

    fn places([replicas, ranks]: [usize; 2], run: impl Fn(Place) -> Result<()> + Sync) {
        let world = |size| ThreadWorld::create(size, Duration::from_secs(60));
        let boxed = |comm: ThreadComm| Box::new(comm) as Box<dyn crate::comm::Communicator<Cpu>>;
        let mut across: Vec<_> = (0..ranks).map(|_| world(replicas).into_iter()).collect();
        std::thread::scope(|scope| {
            let run = &run;
            for replica in 0..replicas {
                for (rank, group) in world(ranks).into_iter().enumerate() {
                    let comms = ReduceComms { group: boxed(group), replicas: across[rank].next().map(boxed) };
                    scope.spawn(move || run(Place { replica, rank, comms }).unwrap());
                }
            }
        });
    }

    /// One rank's gradient has another shape: of what all ranks hold nothing changes, and of experts, whose sums have begun,
    /// nothing is left, on any rank.
    #[test]
    fn a_rank_whose_gradient_cannot_be_summed() {
        for (mesh, is_expert) in [([1, 2], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)] {
            places(mesh, |Place { replica, rank, comms }| {
                let var = |count: usize| Var::ones(count, DType::F32, &Device::Cpu);
                let (shared, expert) = (var(3)?, var(4)?);
                let reducer = GradientReducer::new(&Cpu::new(), comms)?;
                let reducer = reducer.with_vars(std::slice::from_ref(&shared));
                let reducer = reducer.with_experts(std::slice::from_ref(&expert));
                let loss = ((shared.sum_all()? * 2.0)? + (expert.sum_all()? * 3.0)?)?;
                let mut main = MainGradients::new();
                main.backward(&loss)?;
                let of = if is_expert { &expert } else { &shared };
                let own = main.get(of)?.clone();
                let is_culprit = (replica, rank) == (0, 0);
                if is_culprit {
                    main.sums_mut().insert(of, Tensor::zeros(7, DType::F32, &Device::Cpu)?);
                }
                let error = main.reduce(&reducer).expect_err("a gradient of another shape");
                match error_of(&error) {
                    Some(Error::Shape { .. }) if is_culprit => {}
                    Some(Error::Comm(CommError::Refused { .. })) if !is_culprit => {}
                    other => panic!("{other:?} {error}"),
                }
                if is_expert {
                    assert_eq!(main.microbatches(), 0);
                    main.backward(&loss)?;
                } else {
                    assert_eq!(main.microbatches(), 1);
                    main.sums_mut().insert(of, own);
                }
                // The reducer works on, of what was there before.
                main.reduce(&reducer)?;
                let [replicas, ranks] = mesh.map(|count| count as f32);
                assert_eq!(main.get(&shared)?.to_vec1::<f32>()?, [2.0 * replicas * ranks; 3]);
                assert_eq!(main.get(&expert)?.to_vec1::<f32>()?, [3.0 * replicas; 4]);
                Ok(())
            });
        }
    }
}
