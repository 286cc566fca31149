//! What a burn back end must offer, and the way from burn's tensors to the core and back.

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Shape, TensorData};

use crate::cpu::{Cpu, Element};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::layer::{Context, Cotangents, Inputs, Layer, Mode, ParamViews, Role, Wanted};
use crate::lazy::Lazy;
use crate::metrics::Load;
use crate::tensor::{Tensor, TensorRef};

use crate::ep::EpGroup;

/// A burn back end that the layer runs on: [`Flex`](burn::backend::Flex), and
/// [`Autodiff`](burn::backend::Autodiff) over it.
#[diagnostic::on_unimplemented(
    message = "moebius' layer does not run on the burn back end `{Self}`",
    note = "it runs on `Flex` and `Autodiff<Flex>`; `Fusion` and back ends of other memory are not supported"
)]
pub trait MoeBackend: Backend {
    /// Forward over all ranks; keeps what backward needs where an operand tracks gradients.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    fn moe_forward(call: &Call, operands: Operands<FloatTensor<Self>>) -> Result<Outputs<Self>>;
}

/// A back end whose tensors lie in host memory, where the core reads them in place.
#[diagnostic::on_unimplemented(
    message = "moebius cannot read tensors of the burn back end `{Self}` in place",
    note = "it reads those of `Flex`; `Fusion`, nested `Autodiff` and back ends of other memory are not supported"
)]
pub trait HostBackend: Backend {
    /// The tensor with its elements in row-major order: itself where they are so already, else a copy.
    fn contiguous(tensor: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Borrows a contiguous tensor.
    ///
    /// # Errors
    /// An element type that the core has not.
    fn view(tensor: &FloatTensor<Self>) -> Result<TensorRef<'_, Cpu>>;
}

/// One call of a layer, apart from its tensors.
#[derive(Debug, Clone)]
pub struct Call {
    /// The layer.
    pub layer: Arc<Layer>,
    /// This rank's group.
    pub group: EpGroup,
    /// What the call is for; `backward` is set by the back end.
    pub mode: Mode,
}

/// Tensors of one call.
#[derive(Debug, Clone)]
pub struct Operands<T> {
    /// `[T, H]`.
    pub x: T,
    /// A place for each of [`Role::ALL`].
    pub(super) params: PerRole<T>,
}

pub(super) type PerRole<T> = [Option<T>; Role::ALL.len()];

impl<T> Operands<T> {
    /// Asks for each role's tensor.
    pub fn new(x: T, param: impl FnMut(Role) -> Option<T>) -> Self {
        Self { x, params: Role::ALL.map(param) }
    }

    /// A parameter.
    pub fn param(&self, role: Role) -> Option<&T> {
        self.params[role as usize].as_ref()
    }

    pub(super) fn map<U>(self, mut f: impl FnMut(T) -> U) -> Operands<U> {
        Operands { x: f(self.x), params: self.params.map(|t| t.map(&mut f)) }
    }
}

/// Result of [`MoeBackend::moe_forward`].
#[derive(Debug)]
pub struct Outputs<B: Backend> {
    /// `[T, H]`.
    pub y: FloatTensor<B>,
    /// Auxiliary losses' sum, `[1]`, accumulator type.
    pub aux: FloatTensor<B>,
    /// The routing, detached.
    pub routing: RoutingData<B>,
}

/// Routing of this rank's tokens, without gradients.
#[derive(Debug)]
pub struct RoutingData<B: Backend> {
    /// `[T, E]`, accumulator type.
    pub logits: FloatTensor<B>,
    /// Chosen experts `[T, K]`, before any drop.
    pub ids: IntTensor<B>,
    /// Weights of the chosen `[T, K]`, accumulator type.
    pub weights: FloatTensor<B>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

/// Forward through the core over contiguous operands; with a context if `backward` will follow.
pub(super) fn run_forward<B: HostBackend>(
    call: &Call,
    operands: &Operands<FloatTensor<B>>,
    backward: bool,
) -> Result<(Outputs<B>, Option<Context<Cpu>>)> {
    let device = B::float_device(&operands.x);
    let views = views::<B>(&operands.params)?;
    let mode = Mode { backward, ..call.mode };
    let out = call.layer.forward(&mut call.group.lock(), mode, B::view(&operands.x)?, &views.params())?;
    let total = out.aux.get()?.total();
    let aux = match out.y.dtype() {
        DType::F64 => Tensor::from_vec(vec![total], &[1])?,
        _ => Tensor::from_vec(vec![total as f32], &[1])?,
    };
    let (routing, context) = (out.routing, out.context);
    let outputs = Outputs {
        y: float::<B>(out.y, &device)?,
        aux: float::<B>(aux, &device)?,
        routing: RoutingData {
            logits: B::float_from_data(copied(&routing.logits)?, &device),
            ids: B::int_from_data(copied(&routing.ids)?, &device),
            weights: B::float_from_data(copied(&routing.weights)?, &device),
            load: routing.load,
        },
    };
    Ok((outputs, context))
}

/// Gradients of one backward.
pub(super) struct Gradients<T> {
    pub(super) x: Option<T>,
    pub(super) params: PerRole<T>,
}

/// Backward through the core over contiguous operands and cotangents.
pub(super) fn run_backward<B: HostBackend>(
    call: &Call,
    operands: &Operands<FloatTensor<B>>,
    context: Context<Cpu>,
    (dy, d_aux): (Option<FloatTensor<B>>, Option<FloatTensor<B>>),
    wanted: Wanted,
) -> Result<Gradients<FloatTensor<B>>> {
    let device = B::float_device(&operands.x);
    let views = views::<B>(&operands.params)?;
    let params = views.params();
    let aux = match &d_aux {
        Some(d) => Cpu::new().read(&(), B::view(d)?)?.into_iter().sum(),
        None => 0.0,
    };
    let cotangents = Cotangents { y: dy.as_ref().map(B::view).transpose()?, aux };
    let inputs = Inputs { x: B::view(&operands.x)?, params: &params };
    let mut gradients = call.layer.backward(&mut call.group.lock(), context, inputs, cotangents, wanted)?;
    let mut out = Gradients { x: None, params: [const { None }; Role::ALL.len()] };
    out.x = gradients.x.take().map(|g| float::<B>(g, &device)).transpose()?;
    for role in Role::ALL {
        out.params[role as usize] = gradients.take(role).map(|g| float::<B>(g, &device)).transpose()?;
    }
    Ok(out)
}

fn views<B: HostBackend>(params: &PerRole<FloatTensor<B>>) -> Result<ParamViews<'_, Cpu>> {
    ParamViews::collect(|role| params[role as usize].as_ref().map(B::view).transpose())
}

/// Hands a tensor of the core to burn, without a copy on back ends of host memory.
pub(super) fn float<B: Backend>(tensor: Tensor<Cpu>, device: &B::Device) -> Result<FloatTensor<B>> {
    fn data<T: Element + burn::tensor::Element>(tensor: Tensor<Cpu>) -> Result<TensorData> {
        let shape = Shape::from(tensor.dims().to_vec());
        Ok(TensorData::new(tensor.into_vec::<T>()?, shape))
    }
    let data = match tensor.dtype() {
        DType::F64 => data::<f64>(tensor),
        DType::F32 => data::<f32>(tensor),
        DType::F16 => data::<half::f16>(tensor),
        DType::BF16 => data::<half::bf16>(tensor),
        other => Err(Error::invalid("ExpertParallelMoE", "tensor", "a floating type", other)),
    };
    Ok(B::float_from_data(data?, device))
}

/// Copies a tensor that the context may share.
fn copied(tensor: &Tensor<Cpu>) -> Result<TensorData> {
    fn data<T: Element + burn::tensor::Element>(tensor: &Tensor<Cpu>) -> Result<TensorData> {
        Ok(TensorData::new(tensor.as_slice::<T>()?.to_vec(), Shape::from(tensor.dims().to_vec())))
    }
    match tensor.dtype() {
        DType::F64 => data::<f64>(tensor),
        DType::F32 => data::<f32>(tensor),
        DType::I32 => data::<i32>(tensor),
        other => Err(Error::invalid("ExpertParallelMoE", "routing", "f64, f32 or i32", other)),
    }
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
