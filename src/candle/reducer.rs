//! Sums of main gradients over ranks, those of layers begun while backward still runs.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId, Var};

use crate::adapter::{BUCKET_BYTES, GradientSum, GradientSums, NO_LAYER, PendingSum, ReduceComms, buckets};
use crate::comm::{Op, Tag};
use crate::error::{CommError, Error};
use crate::layer::{ParamKind, PerParam};

use super::error::framework;
use super::group::DeviceGroup;
use super::host::{Host, copy_of, into_candle, with_views};
use super::leaving::{LayerGradients, during};
use super::main_gradients::{MainGradients, added};
use super::module::ExpertParallelMoE;
use super::pending::calls_of;
use super::reduce::{Bucket, summand};

const CALL: &str = "MainGradients::reduce";

/// Sums of [`MainGradients`] over the ranks of a group, and over data-parallel replicas of it, in f32 (f64 for f64), in
/// buckets, in rank order. A thread carries them beside the computation:
/// [`MainGradients::backward_reduced`] begins those of a layer's router and shared expert as soon as they are whole.
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
///     gradients.backward(&loss(Tensor::randn(0f32, 1., (10, 16), &Device::Cpu)?)?)?; // communicates no gradient
///     gradients.backward_reduced(&loss(Tensor::randn(0f32, 1., (10, 16), &Device::Cpu)?)?, &reducer)?;
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
pub struct GradientReducer<D: Host> {
    sums: Arc<GradientSums<D>>,
    /// Variables that all ranks of the group hold.
    replicated: Vec<Tensor>,
    /// Variables that the replicas hold.
    experts: Vec<Tensor>,
    /// The layers' groups, each once.
    groups: Vec<DeviceGroup>,
    bucket_bytes: usize,
}

impl<D: Host> GradientReducer<D> {
    /// A reducer without variables; `device` is that of the layers. Every rank of the communicators makes one, with the
    /// same variables in the same order.
    ///
    /// # Errors
    /// On a GPU, a communicator that does not tell its device; no thread to be had.
    pub fn new(device: &D, comms: ReduceComms<D>) -> Result<Self> {
        let sums = Arc::new(GradientSums::start(device, comms)?);
        let (replicated, experts, groups) = Default::default();
        Ok(Self { sums, replicated, experts, groups, bucket_bytes: BUCKET_BYTES })
    }

    /// Sums a layer's gradients too: of router and shared expert over the group, and over replicas of all its variables.
    /// Experts that are shards are their chain's ([`finish_sharded`](super::finish_sharded)).
    pub fn with_layer(mut self, moe: &ExpertParallelMoE) -> Self {
        for (kind, t) in moe.trainable().filter(|(_, t)| t.is_variable()) {
            let is_shard = moe.sharded.is_some() && matches!(kind, ParamKind::Up | ParamKind::Down);
            let all = if kind.is_replicated() { &mut self.replicated } else { &mut self.experts };
            if !is_shard && !all.iter().any(|other| other.id() == t.id()) {
                all.push(t.clone());
            }
        }
        let address = |group: &DeviceGroup| group.any().address();
        if !self.groups.iter().any(|other| address(other) == address(moe.group())) {
            self.groups.push(moe.group().clone());
        }
        self
    }

    /// Sums the gradients of other variables too, which all ranks hold: of the model around the layers.
    pub fn with_vars(mut self, vars: &[Var]) -> Self {
        for var in vars {
            if !self.replicated.iter().any(|other| other.id() == var.id()) {
                self.replicated.push(var.as_tensor().clone());
            }
        }
        self
    }

    /// Bytes of sums that one collective takes, [`BUCKET_BYTES`] without this.
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

    /// Compares the number of microbatches with the other ranks of the layers' groups, which may be in another forward.
    fn compare(&self, microbatches: u64) -> crate::Result<()> {
        let tag = tag(NO_LAYER, microbatches, 0);
        self.groups.iter().try_for_each(|group| group.any().meet(tag)).map_err(counted)
    }

    /// Ends a reduction that has failed, on every rank; gives its error.
    fn fail(&self, error: crate::Error) -> crate::Error {
        // The first error is the one to report, whatever becomes of the meeting.
        let _ = self.sums.recover(&error.to_string());
        counted(error)
    }
}

/// A bucket whose sum has begun.
#[derive(Debug)]
struct BegunSum<D: Host> {
    bucket: Vec<Tensor>,
    sum: PendingSum<D>,
}

impl<D: Host> BegunSum<D> {
    /// Begins the sum of the gradients that `gradient` gives.
    fn begin(
        sums: &GradientSums<D>,
        (tag, over_group): (Tag, bool),
        bucket: Vec<Tensor>,
        gradient: &dyn Fn(&Tensor) -> Option<Tensor>,
    ) -> crate::Result<Self> {
        let device = sums.device();
        let flat = Bucket(&bucket.iter().collect::<Vec<_>>()).flat(gradient)?;
        let values = with_views(device, CALL, &[("gradients", &flat)], |views| copy_of(device, views[0].borrow()))?;
        Ok(Self { bucket, sum: sums.begin(GradientSum { tag, over_group, values }) })
    }

    /// Waits for it.
    fn finish(self, sums: &GradientSums<D>) -> crate::Result<BucketSum<D>> {
        Ok(BucketSum { values: sums.finish(self.sum)?, bucket: self.bucket })
    }
}

/// A bucket's sums.
struct BucketSum<D: Host> {
    bucket: Vec<Tensor>,
    values: crate::Tensor<D>,
}

impl<D: Host> BucketSum<D> {
    /// Puts them in their gradients' places.
    fn take(self, gradients: &mut GradStore) -> crate::Result<()> {
        let Some(first) = self.bucket.first() else { return Ok(()) };
        let count = self.values.view().count();
        let values = into_candle(self.values, &[count], first.device())?;
        Bucket(&self.bucket.iter().collect::<Vec<_>>()).split(&values, gradients).map_err(framework(CALL))
    }
}

/// Tag of a sum: ranks that sum after other numbers of microbatches have none in common.
fn tag(layer: u32, microbatches: u64, bucket: usize) -> Tag {
    Tag { layer, op: Op::GradReduce, sequence: microbatches << 32 | bucket as u64 }
}

/// Where ranks disagree about their tags because they sum after other numbers of microbatches, says so.
fn counted(error: Error) -> Error {
    let Error::Comm(CommError::TagMismatch { tag, peer, peer_tag, .. }) = &error else { return error };
    let (own, theirs) = (tag.sequence >> 32, peer_tag.sequence >> 32);
    if [tag.op, peer_tag.op] != [Op::GradReduce; 2] || own == theirs {
        return error;
    }
    Error::invalid(CALL, "microbatches", format!("{theirs}, as on rank {peer}"), own)
}

/// Gradients of a running backward that leave for their sums as soon as they are whole.
struct Leaving<D: Host> {
    sums: Arc<GradientSums<D>>,
    microbatches: u64,
    /// Calls of layers that are still to run, by the variable that they use.
    remaining: HashMap<TensorId, usize>,
    /// The sums before this backward, and the type of those to come.
    before: GradStore,
    type_of: fn(DType) -> DType,
    /// This backward's so far, each with its variable.
    new: HashMap<TensorId, (Tensor, Tensor)>,
    begun: Vec<BegunSum<D>>,
}

impl<D: Host> LayerGradients for Leaving<D> {
    fn take(
        &mut self,
        layer: u32,
        params: &PerParam<Option<Tensor>>,
        gradients: &mut PerParam<Option<Tensor>>,
    ) -> crate::Result<PerParam<bool>> {
        let mut whole = Vec::new();
        let taken = params.as_ref().try_map(|kind, t| -> candle_core::Result<bool> {
            let Some(t) = t else { return Ok(false) };
            let Some(remaining) = self.remaining.get_mut(&t.id()).filter(|_| kind.is_replicated()) else {
                return Ok(false);
            };
            let Some(gradient) = gradients[kind].take() else { return Ok(false) };
            // In candle's order of sums.
            let all = match self.new.remove(&t.id()) {
                Some((_, sum)) => (sum + gradient)?,
                None => gradient,
            };
            self.new.insert(t.id(), (t.clone(), all));
            *remaining = remaining.saturating_sub(1);
            if *remaining == 0 {
                whole.push(t.clone());
            }
            Ok(true)
        });
        let taken = taken.map_err(framework(CALL))?;
        if !whole.is_empty() {
            let mut sums = HashMap::new();
            for t in &whole {
                let Some((_, new)) = self.new.get(&t.id()) else { continue };
                let sum = added(self.before.get(t), new, self.type_of).map_err(framework(CALL))?;
                sums.insert(t.id(), sum);
            }
            let tag = tag(layer, self.microbatches, self.begun.len());
            let gradient = |of: &Tensor| sums.get(&of.id()).cloned();
            self.begun.push(BegunSum::begin(&self.sums, (tag, true), whole, &gradient)?);
        }
        Ok(taken)
    }
}

impl MainGradients {
    /// Sums the gradients over the ranks, behind the step's last backward. Every rank calls it. The next backward is
    /// refused until a [`reset`](Self::reset).
    ///
    /// # Errors
    /// A communicator's, on every rank: of a rank that has failed, or, where ranks compare their calls
    /// ([`comm`](crate::comm)), that has summed another number of microbatches.
    /// The gradients are as they were (but for experts, where their sums over replicas had begun: the step begins anew,
    /// [`reset`](Self::reset) has been done), and where the communicators survive, groups and reducer work on.
    pub fn reduce<D: Host>(&mut self, reducer: &GradientReducer<D>) -> Result<()> {
        if !reducer.sums.is_alone() {
            reducer.compare(self.microbatches())?;
            self.reduce_rest(reducer, Vec::new(), &HashSet::new())?;
        }
        self.store_mut();
        Ok(())
    }

    /// [`backward`](Self::backward) of a step's last microbatch and [`reduce`](Self::reduce), with the same bits: the
    /// sums of a layer's router and shared expert begin as soon as the layer's last backward in this graph has made them
    /// whole, and go on beside the rest of backward; the others follow. A variable that other operations use as well is
    /// among these.
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`reduce`](Self::reduce). After one of `reduce` the microbatch is part of the
    /// gradients.
    pub fn backward_reduced<D: Host>(&mut self, loss: &Tensor, reducer: &GradientReducer<D>) -> Result<()> {
        if reducer.sums.is_alone() {
            self.backward(loss)?;
            self.store_mut();
            return Ok(());
        }
        self.check_not_lent()?;
        // The backward to come is counted.
        let microbatches = self.microbatches() + 1;
        reducer.compare(microbatches)?;
        let mut remaining = calls_of(loss);
        let known: HashSet<TensorId> = reducer.replicated.iter().map(Tensor::id).collect();
        remaining.retain(|id, _| known.contains(id));
        let mut before = GradStore::default();
        for t in &reducer.replicated {
            if let Some(sum) = self.store().get(t) {
                before.insert(t, sum.clone());
            }
        }
        let leaving = Rc::new(RefCell::new(Leaving {
            sums: Arc::clone(&reducer.sums),
            microbatches,
            remaining,
            before,
            type_of: self.type_of(),
            new: HashMap::new(),
            begun: Vec::new(),
        }));
        let mut elsewhere = HashSet::new();
        let done = during(leaving.clone(), || {
            self.run(loss, |gradients| {
                for (var, new) in leaving.borrow().new.values() {
                    let all = match gradients.get(var) {
                        Some(other) => {
                            elsewhere.insert(var.id());
                            (other + new)?
                        }
                        None => new.clone(),
                    };
                    gradients.insert(var, all);
                }
                Ok(())
            })
        });
        let begun = std::mem::take(&mut leaving.borrow_mut().begun);
        if let Err(error) = done {
            // The others are in these sums, or on their way to those that follow.
            let _ = reducer.sums.recover(&error.to_string());
            return Err(error);
        }
        self.reduce_rest(reducer, begun, &elsewhere)?;
        self.store_mut();
        Ok(())
    }

    /// Sums what has not begun to be summed, and takes all sums. `elsewhere`: variables whose gradients were not whole
    /// when their sums began.
    fn reduce_rest<D: Host>(
        &mut self,
        reducer: &GradientReducer<D>,
        begun: Vec<BegunSum<D>>,
        elsewhere: &HashSet<TensorId>,
    ) -> crate::Result<()> {
        let sums = &reducer.sums;
        let early: HashSet<TensorId> = begun.iter().flat_map(|begun| &begun.bucket).map(Tensor::id).collect();
        let is_early = |t: &Tensor| early.contains(&t.id()) && !elsewhere.contains(&t.id());
        let mut number = begun.len();
        let microbatches = self.microbatches();
        let mut begin = |of: &[&Tensor], over_group: bool, gradients: &GradStore| {
            let tag = tag(NO_LAYER, microbatches, number);
            number += 1;
            let bucket = of.iter().map(|t| (*t).clone()).collect();
            BegunSum::begin(sums, (tag, over_group), bucket, &|of| gradients.get(of).cloned())
        };
        let others: Vec<&Tensor> = reducer.replicated.iter().filter(|t| !is_early(t)).collect();
        let others =
            buckets(&others, reducer.bucket_bytes, summand).into_iter().map(|of| begin(of, true, self.store()));
        let all = others.collect::<crate::Result<Vec<_>>>().and_then(|others| {
            let all = begun.into_iter().chain(others).map(|begun| begun.finish(sums));
            all.collect::<crate::Result<Vec<_>>>()
        });
        // All of them are there before the first takes its place.
        for sum in all.map_err(|error| reducer.fail(error))? {
            sum.take(self.sums_mut())?;
        }
        if !sums.has_replicas() {
            return Ok(());
        }
        // Nearly all of a model's bytes: a bucket at a time.
        let experts: Vec<&Tensor> = reducer.experts.iter().collect();
        for of in buckets(&experts, reducer.bucket_bytes, summand) {
            let sum = begin(of, false, self.store()).and_then(|begun| begun.finish(sums));
            if let Err(error) = sum.and_then(|sum| sum.take(self.sums_mut())) {
                self.reset();
                return Err(reducer.fail(error));
            }
        }
        Ok(())
    }
}
