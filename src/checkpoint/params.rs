//! A block, and one rank's parameters of it by kind.

use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::layer::{ParamKind, ParamViews, PerParam};
use crate::tensor::Tensor;

/// One rank's parameters of one block, as [`Params`](crate::layer::Params) has them; [`ParamKind`] states the shapes.
#[derive(Debug)]
pub struct BlockParams {
    /// `[E, H]`.
    pub router: Tensor<Cpu>,
    /// `[L, G·I, H]`, gate rows first.
    pub up: Tensor<Cpu>,
    /// `[L, H, I]`.
    pub down: Tensor<Cpu>,
    /// What the configuration has beside these: biases, the shared expert. Its `router`, `up` and `down` are not read.
    pub others: PerParam<Option<Tensor<Cpu>>>,
}

/// A block's parameters and its layer, as [`Checkpoint::save`](super::Checkpoint::save) takes them:
/// [`BlockParams::at_layer`].
#[derive(Debug, Clone, Copy)]
pub struct LayerBlock<'a> {
    /// The layer.
    pub layer: usize,
    /// Its parameters, or a rank's share of them.
    pub params: &'a BlockParams,
}

/// One rank's share of one Mixture-of-Experts block.
#[derive(Debug)]
pub struct Block {
    /// Sizes and formulas, of all ranks.
    pub config: MoeConfig,
    /// This rank's parameters.
    pub params: BlockParams,
}

impl Block {
    /// Refuses a block whose parameters are not those of its configuration, with `local` experts on this rank.
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Invalid`] with the name of a parameter that is missing.
    pub fn check(&self, call: &'static str, local: usize) -> Result<()> {
        self.params.check(call, &self.config, local)?;
        let absent = |kind: &ParamKind| kind.dims(&self.config, local).is_some() && self.params.get(*kind).is_none();
        match ParamKind::ALL.into_iter().find(absent) {
            None => Ok(()),
            Some(kind) => Err(Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none")),
        }
    }
}

impl BlockParams {
    /// Parameters from their tensors.
    ///
    /// # Errors
    /// No router, up or down.
    pub fn new(tensors: PerParam<Option<Tensor<Cpu>>>) -> Result<Self> {
        Self::of("BlockParams::new", tensors)
    }

    /// The same; errors name `call`.
    pub(crate) fn of(call: &'static str, mut tensors: PerParam<Option<Tensor<Cpu>>>) -> Result<Self> {
        let mut required = |kind: ParamKind, name: &str| {
            tensors[kind].take().ok_or_else(|| Error::invalid(call, name, "a tensor", "nothing"))
        };
        let router = required(ParamKind::Router, "router")?;
        let up = required(ParamKind::Up, "up")?;
        let down = required(ParamKind::Down, "down")?;
        Ok(Self { router, up, down, others: tensors })
    }

    /// The parameters that are there, by kind.
    pub fn per_param(&self) -> PerParam<Option<&Tensor<Cpu>>> {
        let others = self.others.as_ref().map(|_, tensor| tensor.as_ref());
        PerParam { router: Some(&self.router), up: Some(&self.up), down: Some(&self.down), ..others }
    }

    /// The same by value.
    pub fn into_per_param(self) -> PerParam<Option<Tensor<Cpu>>> {
        PerParam { router: Some(self.router), up: Some(self.up), down: Some(self.down), ..self.others }
    }

    /// One parameter.
    pub fn get(&self, kind: ParamKind) -> Option<&Tensor<Cpu>> {
        self.per_param()[kind]
    }

    /// The parameters that are there, one behind the other.
    pub fn into_params(self) -> impl Iterator<Item = (ParamKind, Tensor<Cpu>)> {
        self.into_per_param().into_present()
    }

    /// Views for a layer.
    ///
    /// # Errors
    /// None.
    pub fn views(&self) -> Result<ParamViews<'_, Cpu>> {
        ParamViews::collect(|kind| Ok(self.get(kind).map(Tensor::view)))
    }

    /// As the parameters of a layer, to be saved.
    pub fn at_layer(&self, layer: usize) -> LayerBlock<'_> {
        LayerBlock { layer, params: self }
    }

    /// Refuses tensors that the configuration has not, with `local` experts on this rank, or has otherwise. Absent ones
    /// may be.
    pub(super) fn check(&self, call: &'static str, config: &MoeConfig, local: usize) -> Result<()> {
        for kind in ParamKind::ALL {
            let (name, Some(tensor)) = (kind.name(), self.get(kind)) else { continue };
            let Some(dims) = kind.dims(config, local) else {
                return Err(Error::invalid(call, name, "none, by the configuration", format!("{:?}", tensor.dims())));
            };
            Error::check_shape(call, name, &dims, tensor.dims())?;
            if !tensor.dtype().is_float() {
                return Err(Error::invalid(call, format!("tensor {name}"), "a floating-point type", tensor.dtype()));
            }
        }
        Ok(())
    }
}
