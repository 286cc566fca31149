//! Sums of gradients over ranks, many parameters to a collective.

use std::marker::PhantomData;
use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType as BurnDType, FloatDType, Shape, Tensor, TensorMetadata};

use crate::adapter::{
    AllReduce, BUCKET_BYTES, GradientReduction, NO_LAYER, REDUCE_GRADIENTS, Summand, TypeNumber, number_of_type,
    type_of_number,
};
use crate::comm::{Communicator, Op};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor as CoreTensor, TensorMut, TensorRef};

use super::backend::{CoreDevice, MoeBackend, Named, NativeMemory, ResultSpec, between, primitive, tensor_of};
use super::group::DeviceGroup;

const CALL: &str = REDUCE_GRADIENTS;

/// Which gradients of a module are summed, and how.
#[derive(Debug, Clone, Copy)]
pub struct ReduceOptions<'a> {
    /// Parameters that are left out: those that each rank has of its own, as
    /// [`ExpertParallelMoE::expert_ids`](super::ExpertParallelMoE::expert_ids) lists them.
    pub except: &'a [ParamId],
    /// Parameters that are taken, if not all: for example a layer's
    /// [experts' biases](super::ExpertParallelMoE::expert_bias_ids).
    pub only: Option<&'a [ParamId]>,
    /// Bytes of sums that one collective takes.
    pub bucket_bytes: usize,
}

impl Default for ReduceOptions<'_> {
    /// All parameters, in buckets of [`BUCKET_BYTES`].
    fn default() -> Self {
        Self { except: &[], only: None, bucket_bytes: BUCKET_BYTES }
    }
}

impl<'a> ReduceOptions<'a> {
    /// All parameters but these.
    pub fn except(except: &'a [ParamId]) -> Self {
        Self { except, ..Self::default() }
    }

    /// These parameters alone.
    pub fn only(only: &'a [ParamId]) -> Self {
        Self { only: Some(only), ..Self::default() }
    }

    fn takes<B: AutodiffBackend, const D: usize>(&self, param: &Param<Tensor<B, D>>) -> bool {
        let elements = param.dims().iter().product::<usize>();
        let chosen = self.only.is_none_or(|only| only.contains(&param.id)) && !self.except.contains(&param.id);
        elements > 0 && param.is_require_grad() && chosen
    }
}

/// Sums the gradients of a module's trainable parameters over the ranks of a group: in f32 (f64 for f64) whatever their
/// types, in buckets, in rank order. A gradient keeps its type. One that is absent on some ranks counts as zeros there, and
/// gets the other ranks' type; one that is absent on all stays so, and an optimizer leaves the parameter alone.
///
/// The module may be a whole model; what each rank has of its own, the experts, is left out by
/// [`ReduceOptions::except`]. Call it on every rank with the same module after a step's last backward, so that
/// microbatches before it ([`GradientsAccumulator`](burn::optim::GradientsAccumulator)) communicate nothing. Nothing to
/// do for one rank. Ranks first compare sizes, types and order of the parameters, for which the host waits.
///
/// # Errors
/// A communicator's error, on every rank; on every rank too, with all gradients as they were, parameters of other sizes or
/// types than another rank's, or in another order; a gradient of another shape than its parameter's, or of another type
/// than on another rank that has it; a group of another device; on a GPU, a communicator that does not tell its device.
pub fn reduce_gradients<B: AutodiffBackend + MoeBackend, M: Module<B>>(
    group: &DeviceGroup,
    module: &M,
    options: ReduceOptions<'_>,
    gradients: &mut GradientsParams,
) -> Result<()> {
    over_group(group, ModuleReduction { layer: NO_LAYER, module, options, backend: PhantomData }, gradients)
}

/// The same over the ranks of any communicator, for example of data-parallel replicas, whose experts are among the
/// parameters. The module lies on `device`; the communicator's own may have another stream of the same GPU, whose work
/// is then put between this one's.
///
/// # Errors
/// As [`reduce_gradients`]; a communicator of another GPU.
pub fn reduce_gradients_over<B: AutodiffBackend + MoeBackend, M: Module<B>>(
    comm: &mut dyn Communicator<CoreDevice<B>>,
    device: &CoreDevice<B>,
    module: &M,
    options: ReduceOptions<'_>,
    gradients: &mut GradientsParams,
) -> Result<()> {
    ModuleReduction { layer: NO_LAYER, module, options, backend: PhantomData }.run(comm, device, gradients)
}

/// Sums over the ranks of a group, of a layer's parameters or of others.
pub(super) fn over_group<B: AutodiffBackend + MoeBackend, M: Module<B>>(
    group: &DeviceGroup,
    reduction: ModuleReduction<'_, B, M>,
    gradients: &mut GradientsParams,
) -> Result<()> {
    let on = group.on::<CoreDevice<B>>().ok_or_else(|| {
        let found = format!("one of {}", group.erased().device());
        let error = Error::invalid(CALL, "group", "one of the parameters' device", found);
        // The other ranks are in the first collective.
        group.erased().refuse(reduction.layer, Op::GradReduce, &error.to_string());
        error
    })?;
    let mut group = on.lock();
    let device = group.device().clone();
    reduction.run(group.dispatcher().communicator(), &device, gradients)
}

/// A module's gradients to be summed.
pub(super) struct ModuleReduction<'a, B, M> {
    /// The tag's.
    pub(super) layer: u32,
    pub(super) module: &'a M,
    pub(super) options: ReduceOptions<'a>,
    pub(super) backend: PhantomData<B>,
}

impl<B: AutodiffBackend + MoeBackend, M: Module<B>> ModuleReduction<'_, B, M> {
    fn run(
        self,
        comm: &mut dyn Communicator<CoreDevice<B>>,
        device: &CoreDevice<B>,
        gradients: &mut GradientsParams,
    ) -> Result<()> {
        let Self { layer, module, options, .. } = self;
        if comm.size() == 1 {
            return Ok(());
        }
        let mut collect = CollectGradients::<B> { options, gradients, parts: Vec::new() };
        module.visit(&mut collect);
        let parts = collect.parts;
        let mut sums = Vec::with_capacity(parts.len());
        let bucket_bytes = options.bucket_bytes;
        let reduction = GradientReduction {
            layer,
            params: &parts,
            summand: ParamGradient::summand,
            described: ParamGradient::described,
            bucket_bytes,
        };
        let own = parts.iter().map(ParamGradient::gradient_type).collect();
        reduction.run(comm, device, own, |bucket, types, all_reduce| {
            let flat = BucketGradients::<B::Native>::new(bucket)?.sum(device, all_reduce)?;
            let flat: Tensor<B, 1> = tensor_of(B::from_native(flat));
            let mut start = 0;
            for (part, of) in bucket.iter().zip(types) {
                let range = start..start + part.count;
                start = range.end;
                sums.push(ParamSum { flat: flat.clone().inner(), range, dtype: type_of_number(&TYPES, *of) });
            }
            Ok(())
        })?;
        module.visit(&mut StoreSums::<B> { options, gradients, sums: sums.into_iter() });
        Ok(())
    }
}

/// A parameter's gradient.
pub(super) struct ParamGradient<B: NativeMemory> {
    pub(super) gradient: Option<FloatTensor<B>>,
    /// Shows the back end where sums are to lie.
    pub(super) param: FloatTensor<B>,
    pub(super) count: usize,
}

impl<B: NativeMemory> ParamGradient<B> {
    pub(super) fn summand(&self) -> Summand {
        Summand { count: self.count, double: self.param.dtype() == BurnDType::F64 }
    }

    /// Sizes and type of the parameter, which ranks compare.
    fn described(&self) -> String {
        described(&self.param)
    }

    fn gradient_type(&self) -> Result<TypeNumber> {
        let Some(gradient) = &self.gradient else { return Ok(0) };
        number_of_type(&TYPES, &gradient.dtype(), |dtype| format!("{dtype:?}"))
    }
}

/// Types of gradients, by the order of their numbers.
const TYPES: [BurnDType; 4] = [BurnDType::F16, BurnDType::BF16, BurnDType::F32, BurnDType::F64];

/// Sizes and type of a parameter, which ranks compare.
pub(super) fn described(param: &impl TensorMetadata) -> String {
    format!("{:?} {:?}", param.shape(), param.dtype())
}

/// A tensor as its back end's memory holds it, detached.
pub(super) fn native<B: AutodiffBackend + MoeBackend>(tensor: FloatTensor<B::InnerBackend>) -> FloatTensor<B::Native> {
    B::to_native(B::from_inner(tensor))
}

/// Takes the gradients of a module's parameters, in the parameters' order.
struct CollectGradients<'a, B: MoeBackend> {
    options: ReduceOptions<'a>,
    gradients: &'a GradientsParams,
    parts: Vec<ParamGradient<B::Native>>,
}

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for CollectGradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.options.takes(param) {
            return;
        }
        let gradient = self.gradients.get::<B::InnerBackend, D>(param.id);
        self.parts.push(ParamGradient {
            gradient: gradient.map(|gradient| native::<B>(primitive(gradient))),
            param: B::to_native(primitive(param.val())),
            count: param.dims().iter().product(),
        });
    }
}

/// A gradient within a bucket.
struct BucketGradient<B: NativeMemory> {
    bytes: usize,
    /// Of the sums' type.
    gradient: Option<FloatTensor<B>>,
}

/// The gradients of a bucket.
pub(super) struct BucketGradients<B: NativeMemory> {
    gradients: Vec<BucketGradient<B>>,
    /// The sums'.
    dtype: DType,
    /// Elements of the sums.
    count: usize,
    /// Lies where the sums are to lie.
    like: FloatTensor<B>,
}

impl<B: NativeMemory> BucketGradients<B> {
    pub(super) fn new(parts: &[ParamGradient<B>]) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::invalid(CALL, "parameters", "at least one", 0));
        };
        let (dtype, cast) = match first.summand().double {
            true => (DType::F64, FloatDType::F64),
            false => (DType::F32, FloatDType::F32),
        };
        let of = |part: &ParamGradient<B>| -> Result<_> {
            let bytes = part.count * dtype.size();
            let Some(gradient) = &part.gradient else {
                return Ok(BucketGradient { bytes, gradient: None });
            };
            Error::check_shape(CALL, "gradient", &part.param.shape(), &gradient.shape())?;
            let wide = match gradient.dtype() == cast.into() {
                true => gradient.clone(),
                false => B::float_cast(gradient.clone(), cast),
            };
            Ok(BucketGradient { bytes, gradient: Some(B::contiguous(wide)) })
        };
        let gradients = parts.iter().map(of).collect::<Result<Vec<_>>>()?;
        let count = parts.iter().map(|part| part.count).sum::<usize>() + parts.len();
        Ok(Self { gradients, dtype, count, like: first.param.clone() })
    }

    /// Sums `[N]` of the gradients, one behind the other, and behind them for each the number of ranks that have it.
    fn sum(self, device: &B::Core, all_reduce: &mut AllReduce<'_, B::Core>) -> Result<FloatTensor<B>> {
        let mut sums = B::output(device, &self.like, ResultSpec { dtype: self.dtype, dims: &[self.count] })?;
        let views = self.views(device)?;
        between::<B, _>(
            device,
            |_| (),
            || {
                self.gather(device, &views, B::view_mut(&mut sums)?)?;
                all_reduce(B::view_mut(&mut sums)?)
            },
        )?;
        B::float(sums)
    }

    /// What is summed, in memory of the device's.
    pub(super) fn flat(self, device: &B::Core) -> Result<CoreTensor<B::Core>> {
        let mut flat = CoreTensor::empty(device, self.dtype, &[self.count])?;
        let views = self.views(device)?;
        between::<B, _>(device, |_| (), || self.gather(device, &views, flat.view_mut()))?;
        Ok(flat)
    }

    /// The gradients that there are.
    fn views(&self, device: &B::Core) -> Result<Vec<Option<TensorRef<'_, B::Core>>>> {
        let view = |tensor| B::view(device, Named { name: "gradient", tensor });
        self.gradients.iter().map(|of| of.gradient.as_ref().map(view).transpose()).collect()
    }

    fn gather(
        &self,
        device: &B::Core,
        views: &[Option<TensorRef<'_, B::Core>>],
        into: TensorMut<'_, B::Core>,
    ) -> Result<()> {
        let mut rest = into.into_data();
        for (BucketGradient { bytes, .. }, view) in self.gradients.iter().zip(views) {
            let (own, after) = B::Core::split_mut(rest, *bytes);
            match view {
                Some(view) => device.copy(view.data(), own)?,
                None => device.zero(own)?,
            }
            rest = after;
        }
        let present = views.iter().map(Option::is_some);
        let flags: Vec<u8> = match self.dtype {
            DType::F64 => present.flat_map(|is| f64::from(u8::from(is)).to_le_bytes()).collect(),
            _ => present.flat_map(|is| f32::from(u8::from(is)).to_le_bytes()).collect(),
        };
        device.upload(&flags, TensorMut::new(rest, self.dtype, &[self.gradients.len()])?)
    }
}

/// A parameter's sum, within its bucket's.
struct ParamSum<B: AutodiffBackend> {
    flat: Tensor<B::InnerBackend, 1>,
    range: Range<usize>,
    /// The gradient's, `None` where no rank has one.
    dtype: Option<BurnDType>,
}

/// Gives the sums to a module's parameters, in the parameters' order, each in its gradient's type.
struct StoreSums<'a, B: AutodiffBackend> {
    options: ReduceOptions<'a>,
    gradients: &'a mut GradientsParams,
    sums: std::vec::IntoIter<ParamSum<B>>,
}

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for StoreSums<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.options.takes(param) {
            return;
        }
        let Some(ParamSum { flat, range, dtype: Some(dtype) }) = self.sums.next() else { return };
        self.gradients.remove::<B::InnerBackend, D>(param.id);
        let sum = flat.slice([range]).reshape(Shape::from(param.dims().to_vec()));
        let sum: Tensor<B::InnerBackend, D> = if sum.dtype() == dtype { sum } else { sum.cast(dtype) };
        self.gradients.register::<B::InnerBackend, D>(param.id, sum);
    }
}
