//! Parameters and their views, each by its name.

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::TensorRef;
use crate::weights::WeightSource;

use super::param_kind::ParamKind;
use super::per_param::PerParam;

/// Shorter borrow of an optional view.
pub(super) fn borrow<'s, D: Kernels>(t: &'s Option<TensorRef<'_, D>>) -> Option<TensorRef<'s, D>> {
    t.as_ref().map(TensorRef::borrow)
}

/// Parameters of this rank: replicated router and shared expert, this rank's L = E / R routed experts. [`ParamKind`]
/// states the shapes; G is 2 with a gate, 1 without, and gate rows come first.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a, D: Kernels> {
    /// `[E, H]`.
    pub router: TensorRef<'a, D>,
    /// `[L, G·I, H]`.
    pub up: &'a dyn WeightSource<D>,
    /// `[L, H, I]`.
    pub down: &'a dyn WeightSource<D>,
    /// What the configuration has beside these: biases, the shared expert. Its `router`, `up` and `down` are not read.
    pub others: PerParam<Option<TensorRef<'a, D>>>,
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
    /// A parameter that is a tensor: any but `up` and `down`, where the configuration has it.
    pub(super) fn tensor(&self, kind: ParamKind) -> Option<TensorRef<'a, D>> {
        match kind {
            ParamKind::Router => Some(self.router),
            ParamKind::Up | ParamKind::Down => None,
            _ => self.others[kind],
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
        let others = self.all.as_ref().map(|_, t| t.as_ref().map(TensorRef::borrow));
        Params { router: self.router.borrow(), up: &self.up, down: &self.down, others }
    }
}
