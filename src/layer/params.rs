//! Parameters and their views, each by its name.

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::TensorRef;
use crate::weights::WeightSource;

use super::param_kind::ParamKind;
use super::per_param::PerParam;

/// Parameters of this rank: replicated router and shared expert, this rank's L = E / R routed experts.
/// G is 2 with a gate, 1 without; gate rows come first.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a, D: Kernels> {
    /// `[E, H]`.
    pub router: TensorRef<'a, D>,
    /// `[E]`, added to the logits.
    pub router_bias: Option<TensorRef<'a, D>>,
    /// `[E]`, added to the scores for choosing only; no gradient.
    pub selection_bias: Option<TensorRef<'a, D>>,
    /// `[L, G·I, H]`.
    pub up: &'a dyn WeightSource<D>,
    /// `[L, G·I]`.
    pub up_bias: Option<TensorRef<'a, D>>,
    /// `[L, H, I]`.
    pub down: &'a dyn WeightSource<D>,
    /// `[L, H]`.
    pub down_bias: Option<TensorRef<'a, D>>,
    /// `[G·S, H]`, S the shared expert's inner size.
    pub shared_up: Option<TensorRef<'a, D>>,
    /// `[H, S]`.
    pub shared_down: Option<TensorRef<'a, D>>,
    /// `[1, H]`.
    pub shared_gate: Option<TensorRef<'a, D>>,
}

/// Inputs of a forward, given to backward again.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, 'p, D: Kernels> {
    /// `[T, H]`.
    pub x: TensorRef<'a, D>,
    /// The parameters.
    pub params: &'a Params<'p, D>,
}

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
