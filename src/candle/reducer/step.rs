//! The sums of a step: of main gradients behind the last backward, and those that begin while it runs.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId};

use crate::adapter::{EarlySums, PendingBuckets, ReducedParam, StepGradients, SumOf, Summand, fail, summed_in_part};
use crate::layer::PerParam;

use crate::candle::device::{CandleDevice, copy_of, into_candle, with_views};
use crate::candle::error::{framework, refusal_reason};
use crate::candle::gradient_hook::{GradientHook, with_hook};
use crate::candle::main_gradients::{MainGradients, added, expert_sum};
use crate::candle::pending::calls_of;
use crate::candle::reduce::{BucketParams, summand};

use super::{BACKWARD_REDUCED, CALL, GradientReducer};

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
            let _ = reducer.sums.recover(&refusal_reason(&error));
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
