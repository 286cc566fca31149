//! Parameters, their views and their gradients, each by its name.

use std::ops::{Deref, DerefMut};

use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorMut, TensorRef};
use crate::weights::WeightSource;

use super::{GradientRequest, Gradients, GradientsMut, Inputs, Layer, ParamKind, Params, PerParam};

impl<'a, D: Kernels> Params<'a, D> {
    /// The parameters of a rank; of `others` those that are not given before.
    pub fn of(
        router: TensorRef<'a, D>,
        up: &'a dyn WeightSource<D>,
        down: &'a dyn WeightSource<D>,
        others: PerParam<Option<TensorRef<'a, D>>>,
    ) -> Self {
        let PerParam { router_bias, selection_bias, up_bias, down_bias, shared_up, shared_down, shared_gate, .. } =
            others;
        Self { router, router_bias, selection_bias, up, up_bias, down, down_bias, shared_up, shared_down, shared_gate }
    }

    /// A parameter that is a tensor: any but `up` and `down`, where the configuration has it.
    pub(super) fn tensor(&self, kind: ParamKind) -> Option<TensorRef<'a, D>> {
        match kind {
            ParamKind::Router => Some(self.router),
            ParamKind::RouterBias => self.router_bias,
            ParamKind::SelectionBias => self.selection_bias,
            ParamKind::UpBias => self.up_bias,
            ParamKind::DownBias => self.down_bias,
            ParamKind::SharedUp => self.shared_up,
            ParamKind::SharedDown => self.shared_down,
            ParamKind::SharedGate => self.shared_gate,
            ParamKind::Up | ParamKind::Down => None,
        }
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
                ParamKind::SharedUp | ParamKind::SharedDown | ParamKind::SharedGate => wanted.shared,
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

/// Views of plain parameters by kind: what an adapter collects from its framework's tensors.
#[derive(Debug)]
pub struct ParamViews<'a, D: Kernels> {
    router: TensorRef<'a, D>,
    up: TensorRef<'a, D>,
    down: TensorRef<'a, D>,
    all: PerParam<Option<TensorRef<'a, D>>>,
}

impl<'a, D: Kernels> ParamViews<'a, D> {
    /// Asks for each kind's view.
    ///
    /// # Errors
    /// No router, up or down.
    pub fn collect(mut view: impl FnMut(ParamKind) -> Result<Option<TensorRef<'a, D>>>) -> Result<Self> {
        let all = PerParam::try_from_fn(&mut view)?;
        let required = |kind: ParamKind| {
            let missing =
                || Error::invalid("ParamViews::collect", format!("tensor {}", kind.name()), "a tensor", "none");
            all[kind].ok_or_else(missing)
        };
        Ok(Self {
            router: required(ParamKind::Router)?,
            up: required(ParamKind::Up)?,
            down: required(ParamKind::Down)?,
            all,
        })
    }

    /// A parameter's view.
    pub fn get(&self, kind: ParamKind) -> Option<TensorRef<'a, D>> {
        self.all[kind]
    }

    /// The parameters as a layer takes them.
    pub fn params(&self) -> Params<'_, D> {
        let all = self.all.as_ref().map(|_, t| t.as_ref().map(TensorRef::borrow));
        Params::of(self.router.borrow(), &self.up, &self.down, all)
    }
}
