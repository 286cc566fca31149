//! Sums of main gradients over ranks, those of layers begun while backward still runs.

mod step;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::{Result, Tensor, TensorId, Var};
use candle_nn::VarMap;

use crate::adapter::{
    BUCKET_BYTES, GradientSums, ReduceComms, StepReduction, SumDescription, agree, fail, variables_hash,
};
use crate::error::Error;
use crate::fnv1a::fnv1a;
use crate::layer::ParamKind;

use super::device::CandleDevice;
use super::main_gradients::MainGradients;
use super::module::ExpertParallelMoE;
use super::optimizer::AdamWParam;
use super::reduce::described;

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
            layer_calls: fnv1a(calls.join(",")),
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
