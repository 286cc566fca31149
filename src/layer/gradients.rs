//! Gradients: which to make, where, and from what.

use std::ops::{Deref, DerefMut};

use crate::ep::Group;
use crate::error::Result;
use crate::kernels::{Kernels, Scalar};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::definition::Layer;
use super::param_kind::ParamKind;
use super::params::Inputs;
use super::per_param::PerParam;

/// Which gradients backward shall make. Its collectives run whatever is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientMask {
    /// Gradient of x.
    pub x: bool,
    /// Gradients of router weight and bias.
    pub router: bool,
    /// Gradients of the routed experts.
    pub experts: bool,
    /// Gradients of the shared expert.
    pub shared: bool,
}

impl GradientMask {
    /// Every gradient.
    pub const ALL: Self = Self { x: true, router: true, experts: true, shared: true };
}

/// Gradients, each of its parameter's shape and dtype. Those of replicated parameters (router, shared expert) are
/// this rank's share: sum them over the ranks.
#[derive(Debug)]
pub struct Gradients<D: Kernels> {
    /// Of x, `[T, H]`.
    pub x: Option<Tensor<D>>,
    /// By parameter; the selection bias has none.
    pub params: PerParam<Option<Tensor<D>>>,
    /// Gradient of the logits, accumulator type `[T, E]`, for inspection.
    pub logits: Tensor<D>,
    /// Gradient of the routing weights, accumulator type `[T, K]`, for inspection.
    pub weights: Tensor<D>,
}

/// The caller's memory for gradients, each of its parameter's shape; what is absent is not computed (its collectives
/// run all the same). Types are the parameters' own; those of the routed experts' parameters may be F32 beside 16-bit ones.
#[derive(Debug)]
pub struct GradientsMut<'a, D: Kernels> {
    /// Of x, `[T, H]`.
    pub x: Option<TensorMut<'a, D>>,
    /// By parameter; that of an expert's bias only beside its weight's. The selection bias has none.
    pub params: PerParam<Option<TensorMut<'a, D>>>,
    /// Add to what the routed experts' gradients (`up`, `down` and their biases) hold; all others are overwritten.
    pub accumulate: bool,
}

/// Which gradients [`Layer::backward_with`](super::Layer::backward_with) makes, and where.
#[derive(Debug)]
pub struct GradientRequest<'a, D: Kernels> {
    /// Gradients to make in new memory, but those of `given`.
    pub wanted: GradientMask,
    /// Memory of the caller: what has memory here is made in it, whatever `wanted` says.
    pub given: GradientsMut<'a, D>,
}

/// Cotangents of a forward.
#[derive(Debug, Clone, Copy)]
pub struct Cotangents<'a, D: Kernels, A = f64> {
    /// Gradient of y `[T, H]`; absent counts as zeros.
    pub y: Option<TensorRef<'a, D>>,
    /// Gradient of the auxiliary losses' sum: a number, or a tensor of one element of the accumulator type
    /// ([`Scalar`]), which a GPU reads itself: a captured backward takes what the tensor holds at each replay.
    pub aux: A,
}

impl<'a, D: Kernels, A: Into<Scalar<'a, D>>> Cotangents<'a, D, A> {
    pub(super) fn scalar(self) -> Cotangents<'a, D, Scalar<'a, D>> {
        Cotangents { y: self.y, aux: self.aux.into() }
    }
}

impl<D: Kernels> Gradients<D> {
    /// Takes a parameter's gradient out. The selection bias has none.
    pub fn take(&mut self, kind: ParamKind) -> Option<Tensor<D>> {
        self.params[kind].take()
    }

    /// Room for the gradients that are wanted, and none yet for those of logits and routing weights, nor for those (of x
    /// or of a parameter) that have memory in `given`.
    pub(super) fn empty(
        layer: &Layer,
        group: &Group<D>,
        inputs: &Inputs<'_, '_, D>,
        GradientRequest { wanted, given }: &GradientRequest<'_, D>,
    ) -> Result<Self> {
        let device = group.device();
        let like = |t: TensorRef<'_, D>| Tensor::empty(device, t.dtype(), t.dims());
        let of = |kind: ParamKind| {
            let wanted = match kind {
                ParamKind::Router | ParamKind::RouterBias => wanted.router,
                ParamKind::SelectionBias => false,
                ParamKind::Up | ParamKind::UpBias | ParamKind::Down | ParamKind::DownBias => wanted.experts,
                ParamKind::SharedUp
                | ParamKind::SharedUpBias
                | ParamKind::SharedDown
                | ParamKind::SharedDownBias
                | ParamKind::SharedGate => wanted.shared,
            };
            let wanted = wanted && given.get(kind).is_none();
            let dims = kind.dims(layer.config(), group.local_experts()).filter(|_| wanted);
            // Its parameter's; that of `up` and `down` is the tokens'.
            let dtype = inputs.params.tensor(kind).map_or(inputs.x.dtype(), |t| t.dtype());
            dims.map(|dims| Tensor::empty(device, dtype, &dims)).transpose()
        };
        let none = || Tensor::empty(device, inputs.x.dtype().accumulator(), &[0, 0]);
        Ok(Self {
            x: if wanted.x && given.x.is_none() { Some(like(inputs.x.borrow())?) } else { None },
            params: PerParam::try_from_fn(of)?,
            logits: none()?,
            weights: none()?,
        })
    }

    /// Borrows them to be overwritten.
    pub(super) fn view_mut(&mut self) -> GradientsMut<'_, D> {
        GradientsMut {
            x: self.x.as_mut().map(Tensor::view_mut),
            params: self.params.as_mut().map(|_, t| t.as_mut().map(Tensor::view_mut)),
            accumulate: false,
        }
    }
}

impl<'a, D: Kernels> GradientsMut<'a, D> {
    /// Memory for no gradient.
    pub fn none() -> Self {
        Self { x: None, params: PerParam::none(), accumulate: false }
    }

    /// Gives memory for a parameter's gradient. The selection bias has none.
    pub fn set(&mut self, kind: ParamKind, memory: TensorMut<'a, D>) {
        if kind != ParamKind::SelectionBias {
            self.params[kind] = Some(memory);
        }
    }

    /// Memory for a parameter's gradient. The selection bias has none.
    pub fn get(&self, kind: ParamKind) -> Option<&TensorMut<'a, D>> {
        self.params.get(kind).filter(|_| kind != ParamKind::SelectionBias)
    }
}

/// Its gradients by parameter: `gradients.up`.
impl<D: Kernels> Deref for Gradients<D> {
    type Target = PerParam<Option<Tensor<D>>>;

    fn deref(&self) -> &Self::Target {
        &self.params
    }
}

impl<D: Kernels> DerefMut for Gradients<D> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.params
    }
}
