//! Gradients of layers that leave a running backward for their sums over ranks.

use std::collections::HashMap;

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;
use burn::tensor::ops::FloatTensor;

use crate::adapter::{EarlySums, PendingBuckets, SumOf};
use crate::error::Error;
use crate::layer::{ParamKind, PerParam};

use super::backend::NativeMemory;
use super::layer_calls::{GradientHook, OfferedGradients};
use super::step_gradients::{ByParam, ReducedTensor, SumDType, flat};

/// Takes gradients of layers, each of which leaves for its sum as soon as it is whole.
pub(super) struct ReduceHook<B: NativeMemory> {
    early: EarlySums<B::Core, ReducedTensor<B>>,
    /// Parameters whose sums begin beside backward.
    params: HashMap<NodeId, ReducedTensor<B>>,
    /// Their gradients of the microbatches before.
    before: ByParam<B>,
    /// Their gradients of this backward so far.
    new: ByParam<B>,
    /// Those of all microbatches, of parameters whose sums have begun.
    whole: ByParam<B>,
    /// That of the sums of all microbatches.
    sum_dtype: SumDType,
    error: Option<Error>,
}

/// What a backward has left with its hook.
pub(super) struct HookResult<B: NativeMemory> {
    pub(super) begun: PendingBuckets<B::Core, ReducedTensor<B>>,
    /// Gradients of this backward that were taken, and whose sums have not begun, or had before these came.
    pub(super) new: ByParam<B>,
    /// Gradients of all microbatches whose sums have begun.
    pub(super) whole: ByParam<B>,
    pub(super) error: Option<Error>,
}

impl<B: NativeMemory> ReduceHook<B> {
    /// Of the parameters that have calls of layers to come, with their gradients of the microbatches before.
    pub(super) fn new(
        early: EarlySums<B::Core, ReducedTensor<B>>,
        params: HashMap<NodeId, ReducedTensor<B>>,
        before: ByParam<B>,
        sum_dtype: SumDType,
    ) -> Self {
        Self { early, params, before, new: HashMap::new(), whole: HashMap::new(), sum_dtype, error: None }
    }

    /// What has come of the backward.
    pub(super) fn take(&mut self) -> HookResult<B> {
        HookResult {
            begun: self.early.take(),
            new: std::mem::take(&mut self.new),
            whole: std::mem::take(&mut self.whole),
            error: self.error.take(),
        }
    }

    /// Takes a gradient; says whether it is whole with it.
    fn add(&mut self, id: ParamId, gradient: FloatTensor<B>) -> bool {
        // As burn adds them.
        let new = match self.new.remove(&id) {
            Some(before) => B::float_add(gradient, before),
            None => gradient,
        };
        if !self.counts_whole(&id) {
            self.new.insert(id, new);
            return false;
        }
        self.set_whole(id, self.sum_dtype.cast::<B>(new));
        true
    }

    /// Counts a call of a parameter's layer; says whether its gradient is whole with it.
    fn counts_whole(&mut self, id: &ParamId) -> bool {
        self.early.count_call(id) && !self.whole.contains_key(id)
    }

    /// Adds what was there before this backward.
    fn set_whole(&mut self, id: ParamId, new: FloatTensor<B>) {
        let sum = match self.before.remove(&id) {
            Some(before) => B::float_add(before, new),
            None => new,
        };
        self.whole.insert(id, sum);
    }
}

impl<B: NativeMemory> GradientHook for ReduceHook<B> {
    fn takes(&self, leaf: NodeId) -> bool {
        self.error.is_none() && self.params.contains_key(&leaf)
    }

    fn counts(&mut self, leaf: NodeId) -> bool {
        let id = self.params.get(&leaf).map(|param| param.id);
        id.is_some_and(|id| self.counts_whole(&id))
    }

    fn on_gradients(&mut self, layer: u32, leaves: &PerParam<Option<NodeId>>, mut gradients: OfferedGradients) {
        let (mut replicated, mut experts) = (Vec::new(), Vec::new());
        for kind in ParamKind::ALL {
            let Some(param) = leaves[kind].and_then(|leaf| self.params.get(&leaf)).cloned() else { continue };
            let is_whole = match (gradients.whole.remove::<B>(&kind), gradients.new.remove::<B>(&kind)) {
                (Some(sum), _) => {
                    self.set_whole(param.id, sum.tensor());
                    true
                }
                (None, Some(gradient)) => self.add(param.id, gradient.tensor()),
                (None, None) => false,
            };
            if is_whole {
                let whole = if kind.is_replicated() { &mut replicated } else { &mut experts };
                whole.push(param);
            }
        }
        for (of, whole) in [(SumOf::Replicated, replicated), (SumOf::Experts, experts)] {
            let sums = &self.whole;
            let begun = self.early.begin(layer, of, &whole, |device, bucket| flat(device, bucket, |id| sums.get(&id)));
            if let Err(error) = begun {
                // The backward goes on: the other ranks of the layers behind are on their way to it, and hear of this at its
                // end.
                self.error = Some(error);
                return;
            }
        }
    }
}
