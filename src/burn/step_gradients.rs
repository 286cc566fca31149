//! A module's gradients, accumulated over a step's microbatches, in the back end's memory.

use std::collections::{HashMap, HashSet};

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{FloatDType, Shape, Tensor, TensorMetadata};

use crate::adapter::{ReducedParam, StepGradients, Summand};
use crate::device::Device;
use crate::error::Result;
use crate::tensor::Tensor as CoreTensor;

use super::backend::{MoeBackend, NativeMemory, ResultSpec, between, primitive, tensor_of};
use super::reduce::{BucketGradients, ParamGradient, described, native};

/// A parameter of a module whose gradient is summed.
#[derive(Debug, Clone)]
pub(super) struct ReducedTensor<B: NativeMemory> {
    pub(super) id: ParamId,
    /// Its leaf in the graph.
    pub(super) leaf: Option<NodeId>,
    /// Shows the back end where sums are to lie.
    value: FloatTensor<B>,
}

impl<B: NativeMemory> ReducedTensor<B> {
    pub(super) fn dims(&self) -> Vec<usize> {
        self.value.shape().to_vec()
    }

    /// Sizes and type, which ranks compare.
    pub(super) fn described(&self) -> String {
        described(&self.value)
    }

    fn with_gradient(&self, gradient: Option<FloatTensor<B>>) -> ParamGradient<B> {
        ParamGradient { gradient, param: self.value.clone(), count: self.value.shape().num_elements() }
    }
}

impl<B: NativeMemory> ReducedParam for ReducedTensor<B> {
    type Key = ParamId;

    fn key(&self) -> ParamId {
        self.id
    }

    fn summand(&self) -> Summand {
        self.with_gradient(None).summand()
    }
}

/// The trainable parameters of a module, each once, in the module's order, but for those left out.
pub(super) fn reduced_params<B: AutodiffBackend + MoeBackend, M: Module<B>>(
    module: &M,
    left_out: &HashSet<ParamId>,
) -> Vec<ReducedTensor<B::Native>> {
    let mut collect = CollectParams::<B> { seen: left_out.clone(), params: Vec::new() };
    module.visit(&mut collect);
    collect.params
}

struct CollectParams<B: MoeBackend> {
    seen: HashSet<ParamId>,
    params: Vec<ReducedTensor<B::Native>>,
}

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for CollectParams<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let elements = param.dims().iter().product::<usize>();
        if elements > 0 && param.is_require_grad() && self.seen.insert(param.id) {
            let value = primitive(param.val());
            self.params.push(ReducedTensor { id: param.id, leaf: B::node(&value), value: B::to_native(value) });
        }
    }
}

/// Gradients of one backward, by parameter.
pub(super) type ByParam<B> = HashMap<ParamId, FloatTensor<B>>;

/// Takes a module's gradients out of a backward's.
pub(super) fn take_gradients<B: AutodiffBackend + MoeBackend, M: Module<B>>(
    gradients: B::Gradients,
    module: &M,
) -> ByParam<B::Native> {
    let mut take = TakeGradients::<B> { gradients, taken: HashMap::new() };
    module.visit(&mut take);
    take.taken
}

struct TakeGradients<B: AutodiffBackend + MoeBackend> {
    gradients: B::Gradients,
    taken: ByParam<B::Native>,
}

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for TakeGradients<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = param.val().grad_remove(&mut self.gradients) {
            self.taken.insert(param.id, native::<B>(primitive(gradient)));
        }
    }
}

/// Adds gradients to those of the same parameters.
pub(super) fn add_each<B: NativeMemory>(
    sums: &mut ByParam<B>,
    new: impl IntoIterator<Item = (ParamId, FloatTensor<B>)>,
) {
    for (id, new) in new {
        let sum = match sums.remove(&id) {
            Some(before) => B::float_add(before, new),
            None => new,
        };
        sums.insert(id, sum);
    }
}

/// Type of the sums of a step's gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum SumDType {
    /// That of each gradient.
    #[default]
    AsGradients,
    /// F32 for gradients of 16 bits.
    F32,
}

impl SumDType {
    /// Type of the sum of a parameter's gradients, which are of its type.
    fn for_param(self, dtype: burn::tensor::DType) -> burn::tensor::DType {
        match (self, dtype) {
            (Self::F32, burn::tensor::DType::BF16 | burn::tensor::DType::F16) => burn::tensor::DType::F32,
            _ => dtype,
        }
    }

    /// A gradient in the type of its sums.
    pub(super) fn cast<B: NativeMemory>(self, gradient: FloatTensor<B>) -> FloatTensor<B> {
        match self.for_param(gradient.dtype()) {
            dtype if dtype == gradient.dtype() => gradient,
            _ => B::float_cast(gradient, FloatDType::F32),
        }
    }
}

/// A step's gradients.
#[derive(Debug)]
pub(super) struct AccumulatedGradients<B: NativeMemory> {
    sums: ByParam<B>,
    sum_dtype: SumDType,
    /// Backwards that they are the sums of.
    microbatches: u64,
}

impl<B: NativeMemory> Default for AccumulatedGradients<B> {
    fn default() -> Self {
        Self::new(SumDType::default())
    }
}

impl<B: NativeMemory> AccumulatedGradients<B> {
    pub(super) fn new(sum_dtype: SumDType) -> Self {
        Self { sums: HashMap::new(), sum_dtype, microbatches: 0 }
    }

    pub(super) fn sum_dtype(&self) -> SumDType {
        self.sum_dtype
    }

    pub(super) fn microbatches(&self) -> u64 {
        self.microbatches
    }

    pub(super) fn get(&self, id: ParamId) -> Option<&FloatTensor<B>> {
        self.sums.get(&id)
    }

    /// Adds one backward's gradients; `whole` are sums with those before.
    pub(super) fn add(&mut self, new: ByParam<B>, whole: ByParam<B>) {
        let sum_dtype = self.sum_dtype;
        add_each::<B>(&mut self.sums, new.into_iter().map(|(id, new)| (id, sum_dtype.cast::<B>(new))));
        self.sums.extend(whole);
        self.microbatches += 1;
    }

    /// Adds sums that were kept elsewhere, of microbatches that are counted.
    pub(super) fn take_sums(&mut self, sums: ByParam<B>) {
        add_each::<B>(&mut self.sums, sums);
    }

    /// As optimizers take them.
    pub(super) fn into_params<A: AutodiffBackend + MoeBackend<Native = B>>(self) -> GradientsParams {
        let mut params = GradientsParams::new();
        for (id, sum) in self.sums {
            // burn keeps the tensor as its back end does: its dimensions are the gradient's, whatever is named here.
            let sum: Tensor<A::InnerBackend, 1> = tensor_of(A::inner(A::from_native(sum)));
            params.register(id, sum);
        }
        params
    }
}

/// The gradients of a bucket that `gradient` gives, as [`StepGradients::flat`].
pub(super) fn flat<'a, B: NativeMemory + 'a>(
    device: &B::Core,
    bucket: &[ReducedTensor<B>],
    gradient: impl Fn(ParamId) -> Option<&'a FloatTensor<B>>,
) -> Result<CoreTensor<B::Core>> {
    let parts: Vec<_> = bucket.iter().map(|param| param.with_gradient(gradient(param.id).cloned())).collect();
    BucketGradients::new(&parts)?.flat(device)
}

impl<B: NativeMemory> StepGradients<B::Core> for AccumulatedGradients<B> {
    type Param = ReducedTensor<B>;
    type Sum = FloatTensor<B>;

    fn flat(&self, device: &B::Core, bucket: &[ReducedTensor<B>]) -> Result<CoreTensor<B::Core>> {
        flat(device, bucket, |id| self.get(id))
    }

    fn split(
        &self,
        device: &B::Core,
        bucket: &[ReducedTensor<B>],
        sums: CoreTensor<B::Core>,
    ) -> Result<Vec<Option<FloatTensor<B>>>> {
        let Some(first) = bucket.first() else { return Ok(Vec::new()) };
        let place = ResultSpec { dtype: sums.dtype(), dims: sums.dims() };
        let mut flat = B::output(device, &first.value, place)?;
        between::<B, _>(device, |_| (), || device.copy(sums.view().data(), B::view_mut(&mut flat)?.into_data()))?;
        let flat: Tensor<B, 1> = tensor_of(B::float(flat)?);
        let counts = bucket.iter().map(|param| param.value.shape().num_elements());
        let (mut start, flags) = (0, counts.clone().sum::<usize>());
        let mut split = Vec::with_capacity(bucket.len());
        for (number, (param, count)) in bucket.iter().zip(counts).enumerate() {
            let range = start..start + count;
            start = range.end;
            let own = self.get(param.id);
            let any_has =
                || flat.clone().narrow(0, flags + number, 1).into_data().iter::<f64>().any(|ranks| ranks > 0.0);
            if own.is_none() && !any_has() {
                split.push(None);
                continue;
            }
            let dtype = own.map_or_else(|| self.sum_dtype.for_param(param.value.dtype()), TensorMetadata::dtype);
            let sum = flat.clone().slice([range]);
            let sum = if sum.dtype() == dtype { sum } else { sum.cast(dtype) };
            split.push(Some(B::float_reshape(primitive(sum), Shape::from(param.dims()))));
        }
        Ok(split)
    }

    fn set(&mut self, param: &ReducedTensor<B>, sum: FloatTensor<B>) {
        self.sums.insert(param.id, sum);
    }

    fn reset(&mut self) {
        *self = Self::new(self.sum_dtype);
    }
}
