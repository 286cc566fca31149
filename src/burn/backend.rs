//! Requirements on a burn back end, and the way from burn's tensors to the core and back.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Shape, TensorData, TensorPrimitive};

pub use crate::adapter::ResultSpec;
use crate::adapter::{DispatchTokens, DispatchedRows, ErasedLayerShards, ErasedQuantizedExperts, FrameworkDevice};
use crate::comm::Op;
use crate::cpu::{Cpu, Element};
use crate::device::Waited;
use crate::dtype::DType;
use crate::ep::{EpGroup, GroupConfig};
use crate::error::{Error, Result};
use crate::kernels::optimizer::OptimizerDevice;
use crate::layer::{AuxValue, Layer, Noise, PerParam};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::dense_call::{DenseCall, DenseInput};
use super::expert_sums::{ErasedExpertSums, SharedExpertSums};
use super::group::DeviceGroup;
use super::layer_calls::LayerCalls;

/// A burn back end that the layer runs on: [`Flex`](burn::backend::Flex), with the `burn-cuda` feature burn's CUDA back
/// end without fusion, and [`Autodiff`](burn::backend::Autodiff) over either.
#[diagnostic::on_unimplemented(
    message = "moebius' layer does not run on the burn back end `{Self}`",
    note = "it runs on `Flex`, on `CubeBackend<CudaRuntime, ..>` (burn's `Cuda` without its `fusion` feature) where \
            moebius has its `burn-cuda` feature, and on `Autodiff` over either; `Fusion` and others are not supported"
)]
pub trait MoeBackend: LayerBackend {}

impl<B: LayerBackend> MoeBackend for B {}

/// A [`MoeBackend`] whose tensors lie in memory of a device of the core, which works on them in place: all but
/// `Autodiff`, which goes over one of these.
#[diagnostic::on_unimplemented(
    message = "moebius cannot work on tensors of the burn back end `{Self}` in place",
    note = "it works on those of `Flex` and, with the `burn-cuda` feature, of `CubeBackend<CudaRuntime, ..>`; \
            `Fusion`, nested `Autodiff` and other back ends are not supported"
)]
pub trait NativeBackend: MoeBackend + NativeMemory {}

impl<B: MoeBackend + NativeMemory> NativeBackend for B {}

/// Requirements of the adapter on a [`MoeBackend`].
#[diagnostic::on_unimplemented(
    message = "moebius' layer does not run on the burn back end `{Self}`",
    note = "see `moebius::burn::MoeBackend`"
)]
pub trait LayerBackend: Backend {
    /// The back end whose memory the layer works on: itself, or what `Autodiff` goes over.
    type Native: NativeBackend;

    /// The tensor in that memory, detached.
    fn to_native(tensor: FloatTensor<Self>) -> FloatTensor<Self::Native>;

    /// The tensor again, a constant.
    fn from_native(tensor: FloatTensor<Self::Native>) -> FloatTensor<Self>;

    /// The tensor's node in the graph, if it tracks gradients.
    fn node(tensor: &FloatTensor<Self>) -> Option<NodeId>;

    /// Forward over all ranks; keeps what backward needs where an operand tracks gradients.
    fn moe_forward(call: &LayerCall, operands: Operands<FloatTensor<Self>>) -> Result<Outputs<Self>>;

    /// The routing of a dispatch, and its place in the graph.
    type Dispatch: Clone + Debug + Send + Sync + 'static;

    /// The router's formula; logits `[T, E]` in the accumulator type, selection bias `[E]`.
    fn moe_route(
        call: &LayerCall,
        logits: FloatTensor<Self>,
        selection_bias: Option<FloatTensor<Self>>,
    ) -> Result<RouteOutputs<Self>>;

    /// Rows to the ranks of their experts; keeps what backward needs where the back end has one.
    fn moe_dispatch(call: &LayerCall, tokens: DispatchOperands<Self>) -> Result<DispatchResult<Self>>;

    /// Outputs `[N, H]` back to their tokens, `[T, H]`.
    fn moe_combine(dispatch: &Self::Dispatch, outputs: FloatTensor<Self>) -> Result<FloatTensor<Self>>;

    /// Slots of each local expert.
    fn moe_segments(dispatch: &Self::Dispatch) -> Result<Vec<Range<usize>>>;

    /// First slot and number of slots of each local expert, I64 `[L]`.
    fn moe_segment_tensors(dispatch: &Self::Dispatch) -> Result<[IntTensor<Self>; 2]>;

    /// A scalar whose gradient by `y` is the given one; it has no value. Fails for a `y` that tracks no gradients.
    fn moe_inner_product(y: FloatTensor<Self>, d_y: FloatTensor<Self::Native>) -> Result<FloatTensor<Self>>;

    /// A computation with dense weights of a chain, of which `shards` are this rank's; keeps what backward needs where an
    /// operand tracks gradients.
    fn dense(
        call: &DenseCall,
        input: DenseInput<FloatTensor<Self>, IntTensor<Self>>,
        shards: Vec<FloatTensor<Self>>,
    ) -> Result<FloatTensor<Self>>;

    /// A group of one rank on a device.
    fn group_of_one(config: GroupConfig, device: &Self::Device) -> Result<DeviceGroup>;
}

/// The core's device that the layer works on for a back end.
pub type CoreDevice<B> = <<B as LayerBackend>::Native as NativeMemory>::Core;

/// Requirements of the adapter on a [`NativeBackend`].
#[diagnostic::on_unimplemented(
    message = "moebius cannot work on tensors of the burn back end `{Self}` in place",
    note = "see `moebius::burn::NativeBackend`"
)]
pub trait NativeMemory: Backend {
    /// The core's device.
    type Core: FrameworkDevice + OptimizerDevice;
    /// Memory of the back end that the core fills.
    type Output: Send;
    /// A tensor that the core reads on any thread.
    type Shared: Debug + Send + Sync + 'static;

    /// A group that works on the core's device.
    fn core_group(group: &DeviceGroup) -> Option<&EpGroup<Self::Core>> {
        group.on()
    }

    /// Runs calls of these as one where each would wait for a thread of the back end's; beside a tensor of the device.
    fn together<R: Send>(like: &FloatTensor<Self>, calls: impl FnOnce() -> Result<R> + Send) -> Result<R> {
        let _ = like;
        calls()
    }

    /// The tensor with its elements in row-major order: itself where they are so already, else a copy.
    fn contiguous(tensor: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Borrows a contiguous tensor; fails for another device, or an element type that the core has not.
    fn view<'a>(core: &Self::Core, tensor: Named<'a, FloatTensor<Self>>) -> Result<TensorRef<'a, Self::Core>>;

    /// Lends a contiguous tensor to other threads for as long as the result lives; fails as [`view`](Self::view).
    fn share(core: &Self::Core, tensor: Named<'_, FloatTensor<Self>>) -> Result<Self::Shared>;

    /// Borrows such a tensor.
    fn view_shared<'a>(core: &Self::Core, shared: &'a Self::Shared) -> Result<TensorRef<'a, Self::Core>>;

    /// As [`contiguous`](Self::contiguous), of integers.
    fn contiguous_ids(tensor: IntTensor<Self>) -> IntTensor<Self>;

    /// Borrows contiguous ids, I32, I64 or U32 as I32; fails for another device or type.
    fn view_ids<'a>(core: &Self::Core, tensor: Named<'a, IntTensor<Self>>) -> Result<TensorRef<'a, Self::Core>>;

    /// Allocates a result where `like` lies.
    fn output(core: &Self::Core, like: &FloatTensor<Self>, place: ResultSpec<'_>) -> Result<Self::Output>;

    /// The memory of a contiguous tensor to be written in place, where nobody but who lends it holds it; `None`: somebody
    /// may, or the back end cannot tell.
    fn in_place(core: &Self::Core, tensor: Named<'_, FloatTensor<Self>>) -> Result<Option<Self::Output>> {
        let _ = (core, tensor);
        Ok(None)
    }

    /// Borrows a result to fill it.
    fn view_mut(output: &mut Self::Output) -> Result<TensorMut<'_, Self::Core>>;

    /// The result as a tensor; fails for a type that is not floating.
    fn float(output: Self::Output) -> Result<FloatTensor<Self>>;

    /// The result as a tensor of integers; fails for a type that is no integer.
    fn int(output: Self::Output) -> Result<IntTensor<Self>>;

    /// Hides which memory a step's sums of experts' gradients are in.
    fn erase_sums(sums: SharedExpertSums<Self::Output>) -> ErasedExpertSums;

    /// The sums again, if they are in this back end's.
    fn named_sums(sums: &ErasedExpertSums) -> Option<&SharedExpertSums<Self::Output>>;

    /// Puts the core's later work behind the back end's so far.
    fn begin(core: &Self::Core) -> Result<Waited>;

    /// Puts the back end's later work behind the core's so far.
    fn end(core: &Self::Core) -> Result<Waited>;
}

impl DeviceGroup {
    /// A group of one rank on `device` of a back end; of a layer's configuration (`&MoeConfig`), one for its experts. It
    /// takes any number of tokens, whatever [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank) says.
    ///
    /// # Errors
    /// No such device; what [`Group::new`](crate::ep::Group::new) finds.
    pub fn single<B: MoeBackend>(config: impl Into<GroupConfig>, device: &B::Device) -> Result<Self> {
        B::group_of_one(config.into(), device)
    }
}

/// A tensor and its name in errors.
#[derive(Debug, Clone, Copy)]
pub struct Named<'a, T> {
    /// The name.
    pub name: &'a str,
    /// The tensor.
    pub tensor: &'a T,
}

/// One call of a layer, apart from its tensors.
#[derive(Debug, Clone)]
pub struct LayerCall {
    /// The layer.
    pub layer: Arc<Layer>,
    /// This rank's group.
    pub group: DeviceGroup,
    /// Seed and step of the router's jitter, where it is to be applied.
    pub noise: Option<Noise>,
    /// Gradient of the auxiliary losses that comes with y's.
    pub(super) aux_scale: f64,
    /// Whether a forward gives [`Details`].
    pub(super) details: bool,
    /// Where `up` and `down` are gathered from, if their parameters are shards.
    pub(super) experts: Option<ErasedLayerShards>,
    /// `up` and `down`, where they stay quantized and their parameters stand for them.
    pub(super) quantized: Option<ErasedQuantizedExperts>,
    /// The module's calls, of which a tracked forward makes this one.
    pub(super) calls: Arc<LayerCalls>,
}

impl LayerCall {
    /// A call that applies no jitter, leaves auxiliary losses out and gives no [`Details`], of parameters that are whole.
    pub(super) fn new(layer: &Arc<Layer>, group: &DeviceGroup) -> Self {
        let (layer, group) = (Arc::clone(layer), group.clone());
        let (experts, quantized, calls) = (None, None, Arc::default());
        Self { layer, group, noise: None, aux_scale: 0.0, details: false, experts, quantized, calls }
    }

    /// The group, for a call on a tensor of a back end. A group of another device is refused, and the other ranks, which
    /// are in the collective `op` or on their way to it, are told.
    pub(super) fn group_of<B: NativeMemory>(
        &self,
        (name, op): (&'static str, Op),
        tensor: &FloatTensor<B>,
    ) -> Result<&EpGroup<B::Core>> {
        B::core_group(&self.group).ok_or_else(|| {
            let (device, group) = (B::float_device(tensor), self.group.erased());
            let expected = format!("one of the device of {} {device:?}", B::name(&device));
            let error = Error::invalid(name, "group", expected, format!("one of {}", group.device()));
            group.refuse(self.layer.number(), op, &error.to_string());
            error
        })
    }
}

/// Tensors of one call.
#[derive(Debug, Clone)]
pub struct Operands<T> {
    /// `[T, H]`.
    pub x: T,
    /// Those that the configuration has.
    pub params: PerParam<Option<T>>,
}

impl<T> Operands<T> {
    pub(super) fn map<U>(self, mut f: impl FnMut(T) -> U) -> Operands<U> {
        Operands { x: f(self.x), params: self.params.map(|_, t| t.map(&mut f)) }
    }
}

/// Result of [`LayerBackend::moe_forward`].
#[derive(Debug)]
pub struct Outputs<B: Backend> {
    /// `[T, H]`.
    pub y: FloatTensor<B>,
    /// The auxiliary losses, for the host.
    pub losses: Lazy<AuxValue>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
    /// More tensors, where the call asks for them.
    pub details: Option<Details<B>>,
}

/// Tensors of a forward beside y.
#[derive(Debug)]
pub struct Details<B: Backend> {
    /// Auxiliary losses' sum, `[1]`, accumulator type.
    pub aux: FloatTensor<B>,
    /// Router logits `[T, E]`, accumulator type, detached.
    pub logits: FloatTensor<B>,
    /// Chosen experts `[T, K]`, before any drop.
    pub ids: IntTensor<B>,
    /// Weights of the chosen `[T, K]`, accumulator type, detached.
    pub weights: FloatTensor<B>,
}

/// Tokens with their routing.
pub type DispatchOperands<B> = DispatchTokens<FloatTensor<B>, IntTensor<B>>;

/// Result of [`LayerBackend::moe_dispatch`].
pub type DispatchResult<B> = DispatchedRows<FloatTensor<B>, <B as LayerBackend>::Dispatch>;

/// Result of [`LayerBackend::moe_route`].
#[derive(Debug)]
pub struct RouteOutputs<B: Backend> {
    /// Chosen experts `[T, K]`.
    pub ids: IntTensor<B>,
    /// Their weights `[T, K]`, accumulator type.
    pub weights: FloatTensor<B>,
}

/// Runs the core's work between the back end's: what it reads was enqueued before, what reads its results comes behind.
///
/// Views of what it reads, or its outputs, are taken before this call. burn enqueues on a thread of its own what it is asked
/// for, and has done so with all before it as it answers for an address; work that is put behind burn's without such an
/// answer would read a tensor that is still to be computed.
///
/// `count` gets what either wait was. The work's own error comes before that of the wait behind it.
pub(super) fn between<B: NativeMemory, R>(
    core: &B::Core,
    mut count: impl FnMut(Waited),
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    count(B::begin(core)?);
    let done = work();
    // Also behind a failure: what the work enqueued may still use the back end's memory.
    let ended = B::end(core).map(count);
    done.and_then(|done| ended.map(|()| done))
}

/// A tensor of the core on the host as burn's data, without a copy.
pub(super) fn data(tensor: Tensor<Cpu>) -> Result<TensorData> {
    fn data<T: Element + burn::tensor::Element>(tensor: Tensor<Cpu>) -> Result<TensorData> {
        let shape = Shape::from(tensor.dims().to_vec());
        Ok(TensorData::new(tensor.into_vec::<T>()?, shape))
    }
    match tensor.dtype() {
        DType::F64 => data::<f64>(tensor),
        DType::F32 => data::<f32>(tensor),
        DType::F16 => data::<half::f16>(tensor),
        DType::BF16 => data::<half::bf16>(tensor),
        DType::I32 => data::<i32>(tensor),
        DType::I64 => data::<i64>(tensor),
        other => Err(Error::invalid("ExpertParallelMoE", "tensor", "a floating type, i32 or i64", other)),
    }
}

/// A tensor as its back end holds it.
pub(super) fn primitive<B: Backend, const D: usize>(tensor: burn::tensor::Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// The tensor again.
pub(super) fn tensor_of<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> burn::tensor::Tensor<B, D> {
    burn::tensor::Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// Hands a floating tensor of the host to burn, without a copy on back ends of host memory.
pub(super) fn float<B: Backend>(tensor: Tensor<Cpu>, device: &B::Device) -> Result<FloatTensor<B>> {
    if !tensor.dtype().is_float() {
        return Err(Error::invalid("ExpertParallelMoE", "tensor", "a floating type", tensor.dtype()));
    }
    let data = data(tensor)?;
    // Back ends may pad rows, which the core would not read in place: a single row is none too short.
    let shape = Shape::from(data.shape.to_vec());
    let flat = TensorData { shape: [shape.num_elements()].into(), ..data };
    Ok(B::float_reshape(B::float_from_data(flat, device), shape))
}

/// The core's name of a burn element type.
pub(super) fn core_dtype(call: &'static str, tensor: &str, dtype: burn::tensor::DType) -> Result<DType> {
    match dtype {
        burn::tensor::DType::F64 => Ok(DType::F64),
        burn::tensor::DType::F32 => Ok(DType::F32),
        burn::tensor::DType::F16 => Ok(DType::F16),
        burn::tensor::DType::BF16 => Ok(DType::BF16),
        other => Err(Error::invalid(call, format!("tensor {tensor}"), "f64, f32, f16 or bf16", format!("{other:?}"))),
    }
}

/// Refuses ids of a type that the core has no use for.
pub(super) fn unfit_ids(call: &'static str, tensor: &str, dtype: burn::tensor::DType) -> Error {
    Error::invalid(call, format!("tensor {tensor}"), "i32, i64 or u32", format!("{dtype:?}"))
}
